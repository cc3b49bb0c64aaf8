"""Batches of requests, through a real job against the scriptable Graph: n parts cost n, and fail one by one."""

import contextlib
from dataclasses import replace

import pytest

from resilient import (
    BatchEndpoint,
    DatabaseUnreachable,
    FailureKind,
    Idempotency,
    InvalidInput,
    Job,
    Limit,
    OAuth2,
    Part,
    Provider,
    Resilient,
    Retry,
    SyncJob,
    handler,
)
from resilient.testing import FakeClock, FakeProvider, Reply, new_key
from resilient.wire.requests.client import Envelope
from resilient.wire.requests.request_log import RequestLog
from resilient.wire.requests.transport import drive

KEYED = Provider(
    name="keyed",
    base_url="https://api.keyed.example/v1",
    auth=(OAuth2(token_url="https://api.keyed.example/token"),),
    batch=BatchEndpoint(path="/$batch"),
    reads=("POST /v1/search",),
    idempotency=Idempotency(paths=("/v1/charges",)),
)
READS = [Part("GET", f"/me/messages/{n}") for n in range(3)]


@pytest.fixture
def time():
    return FakeClock()


@pytest.fixture
async def run(time, sqlite_url):
    """``await run(fake, handler)``: one job of it, ``again`` so often five minutes later; the job."""
    apps = []

    async def run(fake, kind, *, again=0):
        apps.append(
            Resilient(
                sqlite_url, handlers=[kind], providers=[fake.provider], clock=time.now, upgrade=False,
                secrets=[new_key()],
            )
        )  # fmt: skip
        key = f"{fake.provider.name}/one"
        await apps[-1].connections.import_(key, **fake.account("one").tokens)
        done = await apps[-1].enqueue(kind, resource_key=key)
        await apps[-1].worker().drain()
        for _ in range(again):
            time.advance(minutes=5)
            await apps[-1].worker().drain()
        return await apps[-1].jobs.get(done.id)

    yield run
    for app in apps:
        await app.close()


@pytest.fixture
def make(time):
    fakes = []

    def make(name="microsoft_graph", **options):
        fakes.append(FakeProvider(name, clock=time.now, **options))
        fakes[-1].on("*/me/messages/*", lambda seen: {"path": seen.path})
        fakes[-1].start()
        return fakes[-1]

    yield make
    for fake in fakes:
        fake.close()


def batching(parts, seen, kind="async"):
    if kind == "async":

        @handler("b", retry=Retry(max_attempts=1))
        async def b(job: Job[None]) -> None:
            seen.extend(await job.client.batch(parts))
    else:

        @handler("b", retry=Retry(max_attempts=1))
        def b(job: SyncJob[None]) -> None:
            seen.extend(job.client.batch(parts))

    return b


@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_each_part_is_answered_and_a_throttled_one_fails_alone(run, make, kind):
    fake, seen = make(), []
    fake.fail_next(FailureKind.THROTTLED, on=lambda one: one.what == "part" and one.path.endswith("/1"), wait=30)
    found = await run(fake, batching(READS, seen, kind))
    assert found.state.value == "succeeded", found.last_error
    assert [(one.status, one.failure and one.failure.kind) for one in seen] == [
        (200, None), (429, FailureKind.THROTTLED), (200, None),
    ]  # fmt: skip
    assert seen[0].body == {"path": "/v1.0/me/messages/0"}
    assert seen[1].failure.retry_in == pytest.approx(30, abs=1)
    assert [one.what for one in fake.log] == ["api", "part", "part", "part"]
    with pytest.raises(Exception, match="snoozed") as waits:
        seen[1].raise_for_failure()
    assert waits.value.delay == pytest.approx(30, abs=1)
    seen[0].raise_for_failure()


async def test_if_reporting_a_part_fails_the_other_parts_are_given_up(hooks):
    """Exactly one of answered, failed and abandoned follows each permit."""
    envelope = Envelope(RequestLog(hooks, KEYED), KEYED.base_url, READS)
    await drive(envelope.admit())

    async def answered(*_):
        raise DatabaseUnreachable("away")

    hooks.answered = answered
    answers = {"responses": [{"id": str(n), "status": 200} for n in range(3)]}
    with pytest.raises(DatabaseUnreachable):
        await drive(envelope.report(answers))
    assert hooks.steps.count("abandoned") == 2


async def test_a_throttled_part_stops_no_later_request(run, make):
    fake, seen = make(), []
    fake.fail_next(FailureKind.THROTTLED, on="part", wait=30)

    @handler("b", retry=Retry(max_attempts=1))
    async def b(job: Job[None]) -> None:
        seen.extend(await job.client.batch(READS[:2]))
        (await job.client.get("/me/messages/9")).raise_for_status()

    assert (await run(fake, b)).state.value == "succeeded"
    assert [one.status for one in seen] == [429, 200]


async def test_a_batch_costs_as_much_as_its_parts(run, make):
    """Each by its own limits: the provider counts them the same way, and none is over."""
    limits = {"account/outlook": [Limit(2, per="1h", burst=2, name="outlook")]}
    fake, seen = make(limits=limits), []
    assert (await run(fake, batching(READS, seen))).state.value == "succeeded"
    assert [one.status for one in seen] == [200, 200, None]
    assert seen[2].failure.code == "stopped_limit"
    assert (fake.over_admitted, len(fake.log.where(what="part"))) == (0, 2)


async def test_more_parts_than_fit_go_in_several(run, make):
    fake, seen = make(), []
    parts = [Part("GET", f"/me/messages/{n}") for n in range(45)]
    assert (await run(fake, batching(parts, seen))).state.value == "succeeded"
    assert [one.body["path"].rpartition("/")[2] for one in seen] == [str(n) for n in range(45)]
    assert len(fake.log.where(what="api")) == 3


async def test_a_batch_that_is_throttled_as_a_whole_makes_the_job_wait(run, make):
    fake, seen = make(), []
    fake.fail_next(FailureKind.THROTTLED, on="POST */$batch", wait=60)
    found = await run(fake, batching(READS, seen))
    assert (found.finished_at, found.attempts, found.last_error_kind) == (None, 0, FailureKind.THROTTLED)
    assert seen == []


async def test_other_failures_of_a_part(run, make):
    fake, seen = make(), []
    fake.on("POST */me/messages/1", lambda _: {"made": True})
    parts = [Part("POST", "/me/messages/1", {"a": 1}), Part("GET", "/nothing")]
    assert (await run(fake, batching(parts, seen))).state.value == "succeeded"
    assert [one.status for one in seen] == [200, 404]
    assert fake.performed[0].json == {"a": 1}
    with pytest.raises(Exception, match="GET /nothing within a batch answered 404: permanent"):
        seen[1].raise_for_failure()


@pytest.mark.parametrize(
    "said",
    [
        {"responses": 5}, {"responses": {"id": "0"}}, {"responses": None}, [1], "no", None,
        {"responses": [{"id": "0", "status": True}]}, {"responses": [{"id": "0", "status": "200"}]},
    ],
)  # fmt: skip
async def test_an_answer_that_is_no_batch_loses_its_parts_alone(run, make, said):
    fake, seen = make(), []
    fake.fail_next(Reply(200, said, {"Content-Type": "application/json"}), on="POST */$batch")
    found = await run(fake, batching(READS[:1], seen))
    assert (found.state.value, found.last_error) == ("succeeded", None)
    assert [(one.status, one.failure.kind) for one in seen] == [(None, FailureKind.TRANSIENT)]


@pytest.mark.parametrize("headers", [5, ["Retry-After"], "Retry-After: 1", {"Retry-After": [1]}])
async def test_headers_of_a_part_that_are_none(run, make, headers):
    fake, seen = make(), []
    one = {"id": "0", "status": 200, "headers": headers, "body": {"a": 1}}
    fake.fail_next(Reply(200, {"responses": [one]}), on="POST */$batch")
    found = await run(fake, batching(READS[:1], seen))
    assert (found.state.value, found.last_error) == ("succeeded", None)
    assert [(one.status, one.body, one.failure) for one in seen] == [(200, {"a": 1}, None)]


async def test_who_has_no_batches(run, make):
    seen = []
    found = await run(make("hubspot"), batching(READS, seen))
    assert "declares no batch endpoint" in found.last_error
    assert issubclass(InvalidInput, ValueError)


LOST, AGAIN = FailureKind.AMBIGUOUS, FailureKind.TRANSIENT


@pytest.mark.parametrize(
    ("method", "path", "lost"),
    [
        ("GET", "/a", AGAIN), ("PUT", "/a", AGAIN), ("DELETE", "/a", AGAIN), ("PATCH", "/a", LOST),
        ("POST", "/a", LOST), ("post", "/a", LOST), ("POST", "/search", AGAIN), ("POST", "/search?q=1", AGAIN),
        ("POST", "/charges", AGAIN), ("PATCH", "/charges", LOST),
    ],
)  # fmt: skip
async def test_a_part_means_what_the_single_request_means(run, make, method, path, lost):
    """By its own method, the provider's reads and its own key. Some have no answer at all."""
    fake, parts, alone = make(KEYED), [], []
    statuses = [404, 502, 409, 504, 404, None, 409, 500]  # not so ill that a circuit opens
    answers = [{"id": str(n), "status": status, "body": {}} for n, status in enumerate(statuses) if status is not None]
    fake.fail_next(Reply(200, {"responses": answers}), on="POST */$batch")

    @handler("b", retry=Retry(max_attempts=1))
    async def b(job: Job[None]) -> None:
        batch = [Part(method, path, {"n": n}) for n in range(len(statuses))]
        parts.extend(one.failure.kind for one in await job.client.batch(batch))
        for n, status in enumerate(statuses):
            with contextlib.suppress(ConnectionResetError):
                async with job.call(method.upper(), f"{fake.provider.base_url}{path}", body=b"%d" % n) as call:
                    if status is None:
                        raise ConnectionResetError
                    call.report(status, [], b"{}")
            alone.append(call.failure.kind)

    await run(fake, b)
    assert parts == alone
    assert (parts[1], parts[3], parts[5], parts[7]) == (lost, lost, lost, AGAIN)


async def test_a_part_carries_its_key_and_keeps_it(run, make):
    """In the batch that repeats it, too; a part whose fate is known gives its key to no other."""
    fake, seen = make(KEYED), []
    fake.on("POST */charges", {"ok": True})
    charges = [Part("POST", "/charges", {"n": n}) for n in range(2)]
    by_hand = Part("POST", "/charges", {"n": 5}, {"idempotency-key": "by-hand"})
    fake.fail_next(Reply(502), on=lambda one: one.what == "part" and one.json == {"n": 1})

    @handler("b", retry=Retry(max_attempts=1))
    async def b(job: Job[None]) -> None:
        seen.extend(await job.client.batch([*charges, by_hand]))
        seen.extend(await job.client.batch([charges[1], charges[0]]))

    found = await run(fake, b)
    assert found.state.value == "succeeded", found.last_error
    assert [one.failure and one.failure.kind for one in seen] == [None, FailureKind.TRANSIENT, None, None, None]
    keys = [one.idempotency_key for one in fake.log.where(what="part")]
    assert (len(keys[0]), keys[2], keys[3]) == (32, "by-hand", keys[1])
    assert len(set(keys)) == 4


async def test_a_part_whose_key_is_forgotten_is_not_sent_again(run, make, time):
    """As a request by itself: the time of its first sending stands in the job's row."""
    fake = make(replace(KEYED, idempotency=Idempotency(paths=("/v1/charges",), life=600)))
    fake.fail_next(Reply(502), on="part", times=3)
    sendings = []

    @handler("b", retry=Retry(max_attempts=5))
    async def b(job: Job[None]) -> None:
        sendings.append(time.now())
        for answer in await job.client.batch([Part("POST", "/charges", {"n": 1})]):
            time.advance(seconds=700 * (len(sendings) > 1))
            answer.raise_for_failure()

    found = await run(fake, b, again=2)
    parts = fake.log.where(what="part")
    assert (len(sendings), len(parts), len({one.idempotency_key for one in parts})) == (2, 2, 1)
    assert (found.state.value, found.last_error_kind) == ("dead", FailureKind.AMBIGUOUS)
