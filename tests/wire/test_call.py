"""`job.call`: requests of somebody else's client, and the same client in a thread."""

import asyncio
import contextlib
import threading
import traceback
from functools import partial

import httpx
import pytest

from resilient import Errors, Idempotency, InvalidInput, JobFailure, LostLease, Provider, ResourceStopped, Rule
from resilient.core.base.errors import FailureKind as K
from resilient.core.provider.facts import GENERIC
from resilient.wire.requests.call import AsyncCall, SyncCall
from resilient.wire.requests.client import build_client
from resilient.wire.requests.request_log import RequestLog, derive
from tests.helpers import LIMIT

URL = "https://api.example.com/v1/things"
DECLARED = Provider(
    name="api",
    base_url="https://api.example.com",
    idempotency=Idempotency(),
    errors=Errors(code=("error",), rules=(Rule(K.PERMANENT, status=200, where={"ok": False}),)),
)


async def test_a_reported_answer(hooks):
    request_log = RequestLog(hooks)
    async with AsyncCall(request_log, "get", URL, cost=3) as one:
        assert one.headers == {}
        assert one.report(200, {"X-RateLimit-Remaining": "4"}, b"{}") is None
        one.raise_for_failure()
    assert hooks.log == [("admit", "api/acct", 3), ("answered", 200, None)]
    assert hooks.answers[0][0].budgets[0].remaining == 4


async def test_a_refusal_comes_before_the_block(hooks):
    hooks.stop_from = 1
    with pytest.raises(ResourceStopped):
        async with AsyncCall(RequestLog(hooks), "GET", URL):
            pytest.fail("not admitted")


async def test_credentials_and_key_are_the_blocks_to_send(hooks):
    hooks.credentials = {"Authorization": "Bearer canary"}
    request_log = RequestLog(hooks, DECLARED)
    async with AsyncCall(request_log, "POST", URL) as one:
        assert one.headers == {
            "Authorization": "Bearer canary", "Idempotency-Key": derive("job-1", "POST /v1/things #1"),
        }  # fmt: skip
        one.report(201)
    async with AsyncCall(request_log, "POST", "https://evil.test/v1/things") as one:
        assert one.headers == {}
        one.report(201)
    assert hooks.steps == ["admit", "answered", "admit", "mark", "clear"]


@pytest.mark.parametrize(
    "url",
    [
        r"https://evil.test\@api.example.com/v1", r"https://api.example.com\@evil.test/v1",
        "https://api.example.com@evil.test/v1", "https://evil.test#@api.example.com/", "https://api.example.com\t.evil.test/",
        "https://api.example.com%2f@evil.test/", "https://api.example.com:443@evil.test/", "https://\u0430pi.example.com/v1",
    ],
)  # fmt: skip
async def test_no_spelling_of_a_stranger_gets_credentials(hooks, url):
    hooks.credentials = {"Authorization": "Bearer canary"}
    headers = {}
    with contextlib.suppress(InvalidInput):
        async with AsyncCall(RequestLog(hooks, DECLARED), "GET", url) as one:
            headers = one.headers
            one.report(200)
    assert headers == {}


async def test_a_key_as_a_parameter(hooks):
    provider = Provider(name="api", base_url="https://api.example.com", idempotency=Idempotency(query="requestid"))
    async with AsyncCall(RequestLog(hooks, provider), "POST", URL + "?a=1", op="bill") as one:
        assert one.url == f"{URL}?a=1&requestid={derive('job-1', 'bill')}"
        assert one.headers == {}
        one.report(200)


@pytest.mark.parametrize(
    "body", ['{"ok": false, "error": "nope"}', b'{"ok": false, "error": "nope"}', {"ok": False, "error": "nope"}]
)
async def test_a_dialect_reads_the_reported_body(hooks, body):
    request_log = RequestLog(hooks, DECLARED)
    async with AsyncCall(request_log, "POST", URL) as one:
        failure = one.report(200, (), body)
        assert (failure.kind, failure.code) == (K.PERMANENT, "nope")
        with pytest.raises(JobFailure, match="permanent"):
            one.raise_for_failure()
    assert hooks.log[-1] == ("answered", 200, K.PERMANENT)
    assert request_log.last_failure is failure


@pytest.mark.parametrize("body", [None, "", "<html>", b"\xff\xfe", "{", 5, "[" * 100_000])
async def test_any_body_may_be_reported(hooks, body):
    async with AsyncCall(RequestLog(hooks, DECLARED), "GET", URL) as one:
        assert one.report(500, {}, body).kind is K.TRANSIENT


async def test_marks_around_the_block(hooks):
    async with AsyncCall(RequestLog(hooks), "POST", URL, op="create") as one:
        assert hooks.marks == {"create": None}
        one.report(201)
    assert hooks.steps == ["admit", "mark", "answered", "clear"]
    hooks.on_mark = LostLease("gone")
    with pytest.raises(LostLease):
        async with AsyncCall(RequestLog(hooks), "POST", URL):
            pytest.fail("not marked")
    assert hooks.steps[-1] == "abandoned"


async def test_an_exception_of_a_client_is_its_outcome(hooks):
    class ReadTimeout(Exception):
        pass

    ReadTimeout.__module__ = "requests.exceptions"
    with pytest.raises(ReadTimeout):
        async with AsyncCall(RequestLog(hooks), "POST", URL):
            raise ReadTimeout
    assert hooks.log[-1] == ("failed", K.AMBIGUOUS, "read_timeout")
    assert len(hooks.marks) == 1
    with pytest.raises(TimeoutError):
        async with AsyncCall(RequestLog(hooks), "GET", URL):
            raise TimeoutError
    assert hooks.log[-1] == ("failed", K.TRANSIENT, "no_answer")


async def test_the_users_own_mistake_in_the_block_is_neutral_and_the_mark_stands(hooks):
    with pytest.raises(KeyError):
        async with AsyncCall(RequestLog(hooks), "POST", URL):
            raise KeyError("x")
    assert hooks.steps == ["admit", "mark", "abandoned"]
    assert len(hooks.marks) == 1


async def test_a_call_nobody_knows_the_outcome_of_keeps_its_key_when_it_is_made_again(hooks):
    request_log, keys = RequestLog(hooks, DECLARED), []
    for error in (KeyError, None):
        with contextlib.suppress(KeyError):
            async with AsyncCall(request_log, "POST", URL) as one:
                keys.append(one.headers["Idempotency-Key"])
                if error is not None:
                    raise error
                one.report(200)
    assert keys == [derive("job-1", "POST /v1/things #1")] * 2


async def test_a_block_that_reports_nothing_is_refused(hooks):
    with pytest.raises(InvalidInput, match=r"call\.report"):
        async with AsyncCall(RequestLog(hooks), "GET", URL + "?key=canary"):
            pass
    assert hooks.steps == ["admit", "abandoned"]


async def test_a_cancelled_block_is_abandoned(hooks):
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05), AsyncCall(RequestLog(hooks), "POST", URL):
            await asyncio.sleep(1)
    assert hooks.steps == ["admit", "mark", "abandoned"]


async def test_refused_credentials_are_refreshed_for_the_next_call(hooks):
    hooks.credentials = {"Authorization": "Bearer stale"}
    hooks.refreshes = [{"Authorization": "Bearer fresh"}]
    request_log = RequestLog(hooks, DECLARED)
    async with AsyncCall(request_log, "GET", URL) as one:
        one.report(401)
    assert hooks.log[-1] == ("answered", 401, None)
    async with AsyncCall(request_log, "GET", URL) as one:
        assert one.headers["Authorization"] == "Bearer fresh"
        one.report(401)
    assert hooks.log[-1] == ("answered", 401, K.AUTH)


@pytest.mark.parametrize("url", ["/search?url=https://a.test/b", "proxy/https://a.test", "//a.test/x"])
async def test_a_relative_url_may_hold_another_one(hooks, url):
    async with AsyncCall(RequestLog(hooks, DECLARED), "GET", url) as one:
        one.report(200)
    assert one.url == f"https://api.example.com/{url.lstrip('/')}"


@pytest.mark.parametrize("url", ["/relative", "ftp://x/y", "https://"])
async def test_a_url_has_to_be_absolute(hooks, url):
    with pytest.raises(InvalidInput, match="absolute"):
        AsyncCall(RequestLog(hooks), "GET", url)


# -- threads -------------------------------------------------------------------------------------------------


@pytest.fixture
def bridge():
    """Runs coroutines on a loop in another thread, as a worker does for its threads."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield lambda coroutine: asyncio.run_coroutine_threadsafe(coroutine, loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(LIMIT)
    loop.close()


@pytest.fixture
def sync_client(hooks, server, bridge):
    from resilient.wire.requests.pool import Pool, PoolSettings

    pool = Pool(PoolSettings(read=LIMIT, error_whole=LIMIT, tries=2, tries_within=LIMIT, largest=1_000_000))
    yield lambda provider=GENERIC: build_client(RequestLog(hooks, provider), pool, bridge, server.url)
    pool.close()


def test_a_call_in_a_thread(hooks, bridge):
    with SyncCall(RequestLog(hooks), bridge, "POST", URL) as one:
        one.report(429, {"Retry-After": "9"})
    assert hooks.steps == ["admit", "mark", "answered", "clear"]
    with pytest.raises(InvalidInput), SyncCall(RequestLog(hooks), bridge, "GET", URL):
        pass


def test_the_client_of_a_thread(sync_client, hooks, server):
    api = sync_client()
    assert api.post("/x", json={"a": 1}).json() == {"ok": True}
    assert hooks.steps == ["admit", "mark", "answered", "clear"]
    failed = api.get("/x?status=503&h=retry-after:30")
    assert failed.extensions["resilient"].retry_in == 30
    with pytest.raises(httpx.HTTPStatusError):
        failed.raise_for_status()
    assert api.graphql("{ a }", url='/g?body={"data":7}') == 7
    assert sync_client(Provider(name="api", errors=DECLARED.errors)).get('/x?body={"ok":false}').extensions["resilient"]


def test_repeats_in_a_thread(sync_client, server):
    assert sync_client().get("/x?status=503&times=1").status_code == 200
    assert len(server.app.seen) == 2


def test_bounds_in_a_thread(sync_client, server):
    with pytest.raises(httpx.RequestError, match="larger"):
        sync_client().get("/bomb")
    assert len(sync_client().get("/bomb?status=422").content) == 64 * 1024


async def test_a_dripping_error_in_a_thread(hooks, bridge, rude):
    from resilient.wire.requests.pool import Pool, PoolSettings

    async def behave(reader, writer):
        writer.write(b"HTTP/1.1 503 Oops\r\n\r\nbeginning")
        await writer.drain()
        await reader.read()  # until the client has enough of it

    pool = Pool(PoolSettings(error_whole=0.3, tries=1))
    async with rude(behave) as (url, _):
        api = build_client(RequestLog(hooks), pool, bridge, url)
        response = await asyncio.to_thread(api.get, "/", timeout=LIMIT)
        assert response.content == b"beginning"
        assert response.request.extensions["timeout"]["read"] == LIMIT
    pool.close()


def test_a_fault_in_a_thread(sync_client, hooks, closed_port):
    with pytest.raises(httpx.ConnectError):
        sync_client().get(f"http://127.0.0.1:{closed_port}/")
    assert hooks.steps == ["admit", "failed"] * 2


SECRET = "geheim"  # so that no line of a traceback shows it


@pytest.mark.parametrize("proxied", [False, True], ids=["thread", "proxy"])
async def test_a_header_with_the_end_of_a_line_is_named_without_its_value(hooks, bridge, server, proxied):
    """As over our own connections; these two are httpcore's."""
    from resilient.wire.requests.client import build_async_client
    from resilient.wire.requests.pool import Pool, PoolSettings

    pool = Pool(PoolSettings(proxy=server.url if proxied else None, tries=1))
    if proxied:
        get = build_async_client(RequestLog(hooks), pool, server.url).get
    else:
        get = partial(asyncio.to_thread, build_client(RequestLog(hooks), pool, bridge, server.url).get)
    with pytest.raises(httpx.LocalProtocolError, match="'authorization'") as caught:
        await get("/", headers={"authorization": f"Bearer {SECRET}\n"})
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    await pool.aclose()
