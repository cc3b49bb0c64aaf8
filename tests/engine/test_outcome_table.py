"""What came back, to what it costs: each line of the table in docs/handlers.md, by a real request of a real job.

For every answer: the attempts charged, what the circuits of the account and of its provider counted, and what is next.
"""

from __future__ import annotations

import asyncio
import threading

import pytest

from resilient import Bearer, Errors, Fixed, Idempotency, Job, Provider, Resilient, Retry, Rule, SyncJob, Wait, handler
from resilient.core.base.errors import FailureKind as K
from resilient.store.accounts.secrets import new_key
from resilient.store.gates import circuits
from resilient.wire.requests.pool import Pool, PoolSettings
from tests.helpers import LIMIT, use_up

DELAY = 100.0
KEY = "api/acct"
ERRORS = Errors(
    code=("error",),
    rules=(
        Rule(K.THROTTLED, status=(200, 400, 403, 503, 529), code="slow_down"),
        Rule(K.QUOTA, status=403, code="daily", wait=Wait(header="x-reset")),
        Rule(K.RESET_CURSOR, status=410, code="cursor"),
        Rule(K.PERMANENT, status=200, code="*"),
    ),
)


class Api:
    """Answers as it is told; ``cut`` takes a request and never answers it, ``half`` begins to."""

    def __init__(self):
        self.status, self.headers, self.body, self.keys = 200, {}, b"{}", []
        self.cut = self.half = False
        self.go = threading.Event()  # before that nothing is answered
        self.go.set()

    async def __call__(self, scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        self.keys.append(dict(scope["headers"]).get(b"idempotency-key"))
        if self.cut:
            send.__self__.transport.abort()  # uvicorn's: the connection is cut
            return
        while not self.go.is_set():  # noqa: ASYNC110 - the test is in another thread
            await asyncio.sleep(0.01)
        if self.half:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})
            raise ConnectionAbortedError  # uvicorn cuts the connection
        headers = {"content-type": "application/json", "content-length": str(len(self.body)), **self.headers}
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": self.status, "headers": raw})
        await send({"type": "http.response.body", "body": self.body})


def sends(method, url="/x", **options):
    @handler("send", retry=Retry(max_attempts=5, delay=Fixed(DELAY)), **options)
    async def send(job: Job[None]) -> None:
        (await job.client.request(method, url)).raise_for_status()

    return send


@pytest.fixture
async def once(api, database, clock):
    """``once(handler)``: run a job of it until nothing is ready, and say what came of it."""
    made = []

    async def once(declared, *, pool=None, token=None, **facts):
        auth = (Bearer(),) if token else ()
        provider = Provider(**{"name": "api", "base_url": api.url, "errors": ERRORS, "auth": auth, **facts})
        app = Resilient(database, handlers=[declared], providers=[provider], secrets=[new_key()], upgrade=False)
        made.append(app)
        if token:
            await app.connections.add(KEY, token=token)
        done = await app.enqueue(declared, resource_key=KEY)
        worker = app.worker(concurrency=2)
        worker.wire.pool = pool or Pool(PoolSettings(tries=1, connect=LIMIT, read=LIMIT, error_whole=LIMIT))
        await worker.drain(timeout=LIMIT)
        return Outcome(await app.jobs.get(done.id), await app.jobs.attempts(done.id), facts_of(database), clock.now())

    yield once
    for app in made:
        await app.close()


def facts_of(database):
    return database.transaction_sync(circuits.lock, [KEY, "api"])


class Outcome:
    def __init__(self, job, attempts, facts, now):
        self.job, self.attempts, self.now = job, attempts, now
        self.account, self.provider = facts[KEY], facts["api"]

    def counted(self):
        """Failures that the circuits of the account and of its provider counted."""
        return self.account.breaker.window.failed, self.provider.breaker.window.failed

    def charged(self):
        return self.job.attempts, [attempt.charged for attempt in self.attempts]

    def next_in(self):
        return (self.job.run_at - self.now).total_seconds()


@pytest.mark.parametrize(
    ("status", "body", "headers"),
    [
        (429, b"{}", {"retry-after": "60"}),
        (429, b"{}", {"retry-after-ms": "60000"}),
        (509, b"{}", {"retry-after": "60"}),
        *((status, b'{"error": "slow_down"}', {"retry-after": "60"}) for status in (200, 400, 403, 503, 529)),
    ],
)
async def test_a_throttle(api, once, status, body, headers):
    api.status, api.body, api.headers = status, body, headers
    found = await once(sends("POST"))
    assert (found.job.state, found.job.last_error_kind) == ("ready", "throttled")
    assert (found.charged(), found.counted()) == ((0, [False]), (0, 0))
    rest = (found.account.blocked_until - found.now).total_seconds()
    assert 61 <= rest <= 67  # as told, a second, and up to a tenth
    assert len(api.keys) == 1


async def test_a_long_wait_is_jittered_by_half_a_minute_at_most(api, once):
    api.status, api.headers = 429, {"retry-after": "7200"}
    found = await once(sends("GET"))
    assert 7201 <= (found.account.blocked_until - found.now).total_seconds() <= 7231


async def test_a_spent_quota(api, once):
    api.status, api.body, api.headers = 403, b'{"error": "daily"}', {"x-reset": "7200"}
    found = await once(sends("GET"))
    assert (found.job.state, found.job.last_error_kind) == ("ready", "quota")
    assert (found.charged(), found.counted()) == ((0, [False]), (0, 0))
    assert (found.account.blocked_until - found.now).total_seconds() >= 7200


async def test_refused_credentials_that_cannot_be_refreshed_gate_the_account(api, once):
    api.status = 401
    found = await once(sends("GET"), token="secret")
    assert (found.job.state, found.account.auth, found.provider.auth) == ("ready", "needs_reauth", "ok")
    assert (found.charged(), found.counted()) == ((0, [False]), (0, 0))
    assert len(api.keys) == 1


@pytest.mark.parametrize("status", [408, 425, 500, 502, 504, 520, 530])
async def test_a_passing_fault(api, once, status):
    api.status = status
    found = await once(sends("GET"))
    assert (found.job.state, found.job.last_error_kind) == ("scheduled", "transient")
    assert found.charged() == (1, [True])
    assert found.counted() == (1, 0 if status == 425 else 1)  # too early: the provider is well
    assert found.next_in() == DELAY


async def test_what_was_told_with_a_fault_is_a_floor(api, once):
    api.status, api.headers = 503, {"retry-after": "600"}
    found = await once(sends("GET"))
    assert (found.charged(), found.account.blocked_until) == ((1, [True]), None)
    assert 601 <= found.next_in() <= 631


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_refused_connection(once, method):
    found = await once(sends(method), base_url="http://127.0.0.1:1")
    assert (found.job.state, found.job.last_error_kind) == ("scheduled", "transient")
    assert (found.charged(), found.counted(), found.next_in()) == ((1, [True]), (1, 1), DELAY)


async def test_no_answer_to_what_may_be_repeated(api, once):
    api.cut = True
    found = await once(sends("GET"))
    assert (found.job.state, found.job.last_error_kind) == ("scheduled", "transient")
    assert (found.charged(), found.counted()) == ((1, [True]), (1, 1))


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("plain", [False, True])
async def test_an_answer_that_breaks_off_in_its_body(api, once, method, plain):
    """It began, which is life; and it never came, which is none: a circuit opens if that goes on."""

    @handler("send", retry=Retry(max_attempts=5, delay=Fixed(DELAY)))
    def function(job: SyncJob[None]) -> None:
        job.client.request(method, "/x").raise_for_status()

    api.half = True
    found = await once(function if plain else sends(method))
    assert (found.job.state, found.job.last_error_kind) == (
        ("scheduled", "transient") if method == "GET" else ("dead", "ambiguous")
    )
    assert (found.charged(), found.counted()) == ((1, [True]), (1, 1))
    assert (found.account.breaker.window.ok, found.provider.breaker.window.ok) == (1, 1)


async def test_our_own_pool_is_nobodys_illness(api, once):
    """No free connection within the time for one."""

    @handler("send", retry=Retry(max_attempts=5, delay=Fixed(DELAY)))
    async def send(job: Job[None]) -> None:
        async with asyncio.TaskGroup() as both:
            for _ in range(2):
                both.create_task(job.client.get("/x"))

    api.go.clear()
    found = await once(send, pool=Pool(PoolSettings(connections=1, wait=0.1, connect=LIMIT, read=LIMIT, tries=1)))
    api.go.set()
    assert (found.job.state, found.job.last_error_code) == ("scheduled", "pool_timeout")
    assert (found.charged(), found.counted()) == ((1, [True]), (0, 0))


class TestUnknown:
    """A POST without an answer, or with one by a gateway that lost the server's."""

    @pytest.fixture(autouse=True, params=[None, 502, 504])
    def lost(self, api, request):
        api.cut, api.status = request.param is None, request.param or 200

    async def test_without_a_key_it_is_shown_to_a_person(self, api, once):
        found = await once(sends("POST"))
        assert (found.job.state, found.job.last_error_kind) == ("dead", "ambiguous")
        assert "unknown outcome" in found.job.last_error
        assert (found.charged(), found.counted(), len(api.keys)) == ((1, [True]), (1, 1), 1)

    async def test_with_a_key_it_is_repeated_with_the_same(self, api, once):
        found = await once(sends("POST"), idempotency=Idempotency())
        assert (found.job.state, found.job.last_error_kind) == ("scheduled", "transient")
        assert (found.charged(), found.counted(), found.next_in()) == ((1, [True]), (1, 1), DELAY)
        assert api.keys[0]

    async def test_with_a_look_up_it_is_looked_up(self, once):
        looks = []

        async def look(job: Job[None]) -> bool:
            looks.append(job.id)
            return True

        found = await once(sends("POST", reconcile=look))
        assert (found.job.state, found.job.last_error_kind, looks) == ("scheduled", "ambiguous", [])
        assert (found.charged(), found.counted(), found.next_in()) == ((1, [True]), (1, 1), DELAY)
        assert [attempt.decision for attempt in found.attempts] == ["reconcile"]


@pytest.mark.parametrize("status", [409, 412, 423])
async def test_a_conflict(api, once, status):
    api.status = status
    found = await once(sends("POST"))
    assert (found.job.state, found.job.last_error_kind) == ("scheduled", "conflict")
    assert (found.charged(), found.counted()) == ((1, [True]), (0, 0))
    assert 0 < found.next_in() <= 15  # the other side is done soon, whatever the policy's delay


@pytest.mark.parametrize("status", [400, 403, 404, 405, 410, 413, 422, 501])
async def test_for_good(api, once, status):
    api.status = status
    found = await once(sends("POST"))
    assert (found.job.state, found.job.last_error_kind, len(api.keys)) == ("dead", "permanent", 1)
    assert found.counted() == (0, 0)


async def test_an_address_that_is_none(once):
    found = await once(sends("GET", "ftp://127.0.0.1/x"))
    assert (found.job.state, found.job.last_error_kind, found.counted()) == ("dead", "permanent", (0, 0))


async def test_a_refused_cursor_outside_a_stream_is_not_sent_again_and_again(api, once):
    """Nobody starts anything anew for it: uncharged and ungated, it would be sent as fast as a worker can."""
    api.status, api.body = 410, b'{"error": "cursor"}'
    found = await once(sends("GET"))
    assert (found.job.state, found.job.last_error_kind, found.job.attempts) == ("scheduled", "reset_cursor", 0)
    assert (found.counted(), len(api.keys)) == ((0, 0), 4)
    assert 0 < found.next_in() <= 1


async def test_a_timeout_of_the_handler(once):
    @handler("send", timeout=0.5, retry=Retry(max_attempts=5, delay=Fixed(DELAY)))
    async def send(job: Job[None]) -> None:
        await asyncio.Event().wait()

    found = await once(send)
    assert (found.job.state, found.job.last_error_kind) == ("scheduled", "timeout")
    assert (found.charged(), found.counted(), found.next_in()) == ((1, [True]), (0, 0), DELAY)


async def test_an_exception_of_the_program(once):
    @handler("send", retry=Retry(max_attempts=5, delay=Fixed(DELAY)))
    async def send(job: Job[None]) -> None:
        await job.client.get("/x")
        raise ValueError("boom")

    found = await once(send)
    assert (found.job.state, found.job.last_error_kind) == ("scheduled", "bug")
    assert (found.charged(), found.counted(), found.next_in()) == ((1, [True]), (0, 0), DELAY)
    assert "ValueError: boom" in found.attempts[0].traceback


async def test_the_last_error_is_of_one_piece(api, once):
    """A failure without a code leaves none of the one before."""

    @handler("send", timeout=600, retry=Retry(max_attempts=2, delay=Fixed(0)))
    async def send(job: Job[None]) -> None:
        if job.attempt == 1:
            (await job.client.get("/x")).raise_for_status()
        use_up(job)
        await asyncio.Event().wait()

    api.status = 503
    found = await once(send)
    assert [(attempt.kind, attempt.code) for attempt in found.attempts] == [
        ("transient", "http_503"),
        ("timeout", None),
    ]
    assert (found.job.state, found.job.last_error_kind, found.job.last_error_code) == ("dead", "timeout", None)
