"""Requests that get no proper answer, against servers that really do these things."""

import asyncio
import contextlib
import time

import httpx
import pytest

from resilient import Errors, Idempotency, Permanent, Provider, Rule
from resilient.core.base.errors import FailureKind as K
from resilient.wire.requests.answer import AnswerTooLarge
from resilient.wire.requests.explain import explain
from resilient.wire.requests.pool import Pool, PoolSettings
from tests.helpers import LIMIT, until
from tests.serving import Certificate

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
NO_ANSWER = httpx.Timeout(LIMIT, read=0.2)


def meaning(error, api, hooks):
    return explain(error, api.request_log, hooks.now()).failure


async def outcome(api, hooks, method, url, **options):
    with pytest.raises(httpx.RequestError) as caught:
        await api.request(method, url, **options)
    return caught.value, meaning(caught.value, api, hooks)


async def test_refused(client, hooks, closed_port):
    api = client()
    error, failure = await outcome(api, hooks, "POST", f"http://127.0.0.1:{closed_port}/x")
    assert isinstance(error, httpx.ConnectError)
    assert (failure.kind, failure.code, failure.provider_wide) == (K.TRANSIENT, "connect_error", True)
    assert hooks.steps == ["admit", "mark", "failed", "clear"]  # it was never sent


async def test_refused_is_repeated_even_for_a_post(client, hooks, closed_port, patient):
    await outcome(client(over=patient), hooks, "POST", f"http://127.0.0.1:{closed_port}/x")
    assert hooks.steps.count("admit") == 3
    assert hooks.marks == {}


async def test_an_unknown_host(client, hooks):
    _, failure = await outcome(client(), hooks, "GET", "http://host.invalid/x")
    assert (failure.kind, failure.code) == (K.TRANSIENT, "connect_error")


@pytest.mark.parametrize(("method", "kind"), [("GET", K.TRANSIENT), ("PUT", K.TRANSIENT), ("POST", K.AMBIGUOUS)])
async def test_no_answer_in_time(client, hooks, method, kind):
    _, failure = await outcome(client(), hooks, method, "/x?hold=1", timeout=NO_ANSWER)
    assert (failure.kind, failure.code) == (kind, "read_timeout")
    assert hooks.log[-1] == ("failed", kind, "read_timeout")
    assert bool(hooks.marks) is (method == "POST")


async def test_no_answer_to_a_keyed_post_may_be_repeated(client, hooks, provider):
    api = client(provider(idempotency=Idempotency()))
    _, failure = await outcome(api, hooks, "POST", "/x?hold=1", timeout=NO_ANSWER)
    assert failure.kind is K.TRANSIENT


async def test_a_reset(client, hooks, rude, reset):
    async def behave(reader, writer):
        reset(writer)

    async with rude(behave) as (url, received):
        _, failure = await outcome(client(), hooks, "POST", url + "/x")
        assert (failure.kind, failure.code) == (K.AMBIGUOUS, "read_error")
        assert len(received) == 1
        assert list(hooks.marks) == ["POST /x #1"]
        _, failure = await outcome(client(), hooks, "GET", url + "/x")
        assert failure.kind is K.TRANSIENT


async def test_a_connection_closed_without_a_word(client, hooks, rude):
    async def behave(reader, writer):
        pass

    async with rude(behave) as (url, _):
        _, failure = await outcome(client(), hooks, "POST", url)
        assert (failure.kind, failure.code) == (K.AMBIGUOUS, "protocol_error")


async def test_nonsense_instead_of_http(client, hooks, rude):
    async def behave(reader, writer):
        writer.write(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")
        await writer.drain()

    async with rude(behave) as (url, _):
        _, failure = await outcome(client(), hooks, "GET", url)
        assert (failure.kind, failure.code) == (K.TRANSIENT, "protocol_error")


async def test_an_answer_cut_off_in_its_body_happened_but_is_lost(client, hooks, rude):
    async def behave(reader, writer):
        writer.write(HEAD + b"content-length: 1000\r\n\r\n{")
        await writer.drain()

    async with rude(behave) as (url, _):
        api = client()
        _, failure = await outcome(api, hooks, "POST", url)
        assert failure.kind is K.AMBIGUOUS
        _, failure = await outcome(api, hooks, "GET", url)
        assert failure.kind is K.TRANSIENT
        keyed = client(Provider(name="api", base_url=url, idempotency=Idempotency()))
        _, failure = await outcome(keyed, hooks, "POST", url)
        assert failure.kind is K.TRANSIENT


async def test_an_error_cut_off_in_its_body_is_still_that_error(client, hooks, rude):
    async def behave(reader, writer):
        writer.write(b'HTTP/1.1 429 Slow\r\nretry-after: 9\r\ncontent-length: 1000\r\n\r\n{"half')
        await writer.drain()

    async with rude(behave) as (url, _):
        response = await client().post(url)
        assert response.content == b'{"half'
        assert response.extensions["resilient"].retry_in == 9


async def endless(writer, head, chunk, pause=0.0):
    writer.write(head + b"\r\n")
    while True:
        writer.write(chunk)
        await writer.drain()
        await asyncio.sleep(pause)


async def test_an_endless_error_body_is_cut(client, hooks, rude):
    async def behave(reader, writer):
        await endless(writer, b"HTTP/1.1 500 Oops\r\n", b"x" * 10_000)

    async with rude(behave) as (url, _):
        response = await client().get(url)
        assert response.status_code == 500
        assert len(response.content) == 64 * 1024


async def test_an_error_body_that_drips_is_not_waited_for(client, hooks, rude):
    async def behave(reader, writer):
        await endless(writer, b"HTTP/1.1 503 Oops\r\nretry-after: 3\r\n", b"x", 0.05)

    quick = Pool(PoolSettings(read=LIMIT, error_whole=0.5))
    async with asyncio.timeout(LIMIT), rude(behave) as (url, _):
        started = time.monotonic()
        response = await client(over=quick).get(url)
        assert time.monotonic() - started > 0.4
        assert response.extensions["resilient"].retry_in == 3
    await quick.aclose()


async def test_an_endless_success_is_refused(client, hooks, rude):
    async def behave(reader, writer):
        await endless(writer, HEAD, b"x" * 100_000)

    async with rude(behave) as (url, _):
        api = client()
        with pytest.raises(AnswerTooLarge, match="1000000 bytes") as caught:
            await api.get(url)
        assert isinstance(caught.value, Permanent)
        assert meaning(caught.value, api, hooks).code == "answer_too_large"


async def test_a_success_that_drips_is_given_up(client, hooks, rude):
    async def behave(reader, writer):
        await endless(writer, HEAD, b"x", 0.1)

    quick = Pool(PoolSettings(read=LIMIT, whole=0.5))
    async with rude(behave) as (url, _):
        with pytest.raises(AnswerTooLarge, match=r"longer than 0\.5 s"):
            await client(over=quick).get(url)
    await quick.aclose()


async def test_a_small_answer_that_would_unpack_into_a_huge_one(client, hooks, server):
    with pytest.raises(AnswerTooLarge):
        await client().get("/bomb")
    response = await client().get("/bomb?status=500")
    assert len(response.content) == 64 * 1024


async def test_a_stream_is_the_callers_own_business(client, server):
    got = 0
    async with client().stream("GET", "/bomb") as response:
        async for chunk in response.aiter_bytes():
            got += len(chunk)
    assert got == 50_000_000


async def test_a_body_that_must_be_read_and_cannot(client, hooks, rude):
    async def behave(reader, writer):
        writer.write(HEAD + b"content-length: 1000\r\n\r\n{")
        await writer.drain()

    async with rude(behave) as (url, _):
        errors = Errors(rules=(Rule(K.PERMANENT, status=200, where={"ok": False}),))
        _, failure = await outcome(client(Provider(name="api", base_url=url, errors=errors)), hooks, "POST", "/x")
        assert failure.kind is K.AMBIGUOUS
        assert hooks.log[-1] == ("failed", K.AMBIGUOUS, "protocol_error")
        assert list(hooks.marks) == ["POST /x #1"]


async def test_garbage_that_claims_to_be_gzip(client, hooks, rude):
    async def behave(reader, writer):
        writer.write(HEAD + b"content-encoding: gzip\r\ncontent-length: 4\r\n\r\nnope")
        await writer.drain()

    async with rude(behave) as (url, _):
        _, failure = await outcome(client(), hooks, "GET", url)
        assert (failure.kind, failure.code) == (K.PERMANENT, "undecodable_answer")


async def test_no_free_connection(hooks, client, server):
    narrow = Pool(PoolSettings(connections=1, read=LIMIT, wait=0.2, tries=1))
    api = client(over=narrow)
    slow = asyncio.create_task(api.get("/x?hold=1"))
    await until(lambda: server.app.seen)
    error, failure = await outcome(api, hooks, "POST", "/x")
    assert isinstance(error, httpx.PoolTimeout)
    assert (failure.kind, failure.counts_for_breaker) == (K.TRANSIENT, False)
    assert hooks.marks == {}
    server.app.go.set()
    await slow
    await narrow.aclose()


@pytest.mark.parametrize("url", ["ftp://127.0.0.1/x", "nothing", "http://"])
async def test_a_url_nobody_can_send_to(client, hooks, pool, url):
    from resilient.wire.requests.client import AsyncClient
    from resilient.wire.requests.request_log import RequestLog

    api = AsyncClient(RequestLog(hooks), pool, "")
    api.request_log = api._request_log
    _, failure = await outcome(api, hooks, "GET", url)
    assert (failure.kind, failure.code) == (K.PERMANENT, "bad_url")
    assert meaning(httpx.InvalidURL("no"), api, hooks).kind is K.PERMANENT


async def test_a_certificate_that_cannot_be_verified(client, hooks, pool, tmp_path):
    context = Certificate(tmp_path).server
    listening = await asyncio.start_server(lambda _r, w: w.close(), "127.0.0.1", 0, ssl=context)
    port = listening.sockets[0].getsockname()[1]
    error, failure = await outcome(client(), hooks, "POST", f"https://127.0.0.1:{port}/x")
    assert isinstance(error, httpx.ConnectError)
    assert (failure.kind, failure.code, failure.provider_wide) == (K.PERMANENT, "tls_verification", False)
    assert hooks.steps == ["admit", "mark", "failed", "clear"]
    listening.close()


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("retry-after:30", 30),
        ("retry-after:Sun, 01 Nov 2026 12:00:30 GMT", 30),
        ("retry-after:Sunday, 01-Nov-26 12:00:30 GMT", 30),
        ("retry-after:Sun Nov  1 12:00:30 2026", 30),
        ("retry-after-ms:1500", 1.5),
        ("x-ms-retry-after-ms:2500", 2.5),
        ('ratelimit:"default";r=0;t=40', 40),
        ("x-ratelimit-remaining:0|x-ratelimit-reset:45", 45),
        ("x-ratelimit-remaining:0|x-ratelimit-reset:1793534460", 60),
        ("x-ratelimit-remaining:0|x-ratelimit-reset:1793534460000", 60),
        ("x-ratelimit-remaining:0|x-ratelimit-reset:2026-11-01T12:01:00Z", 60),
        ("retry-after:soon", None),
    ],
)
async def test_a_throttle_in_every_dialect(client, hooks, header, seconds):
    # without the server's Date, which would rightly be believed more than the recorder's clock
    date = "|date:Sun, 01 Nov 2026 12:00:00 GMT"
    response = await client().get("/x", params={"status": 429, "h": header + date})
    failure = response.extensions["resilient"]
    assert failure.kind is K.THROTTLED
    assert failure.retry_in == (None if seconds is None else pytest.approx(seconds, abs=1.1))


@pytest.mark.parametrize("status", ["200 OK", "429 Too Many Requests"])
async def test_a_hundred_thousand_headers_are_refused(client, hooks, rude, status):
    """By their bytes: their end never comes, and nobody waits for it."""

    async def behave(_reader, writer):
        writer.write(f"HTTP/1.1 {status}\r\n".encode())
        with contextlib.suppress(OSError):
            for n in range(100_000):
                writer.write(f"x-{n}: {n}\r\n".encode())
                if n % 500 == 0:
                    await writer.drain()
            await asyncio.Event().wait()

    async with rude(behave) as (url, _):
        _, failure = await outcome(client(), hooks, "GET", url)
    assert (failure.kind, failure.code) == (K.TRANSIENT, "protocol_error")
