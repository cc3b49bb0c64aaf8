"""Bytes behind an answer never become the answer of another account, over one connection or many."""

import asyncio
import contextlib
from datetime import UTC, datetime

import aiohttp
import httpx
import pytest
import requests

from resilient import OAuth2
from resilient.adapters.aiohttp import session
from resilient.testing import job
from resilient.wire.oauth.endpoints import TokenClient
from resilient.wire.requests.pool import Pool, PoolSettings
from tests.helpers import LIMIT, until
from tests.serving import Certificate

FORGED = b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nforged"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n"
WHOLE = 65_536 - len(HEAD % 65_000)  # a body with which the answer is as long as what httpcore reads at once


def answer(body):
    return [HEAD % len(body) + body]


SURPLUS = {
    "a second answer": [answer(b"a")[0] + FORGED],
    "half of one": [answer(b"a")[0] + FORGED[:20]],
    "one byte": [answer(b"a")[0] + b"H"],
    "204 with a body": [b"HTTP/1.1 204 No Content\r\ncontent-length: 51\r\n\r\n" + FORGED],
    "304 with a body": [b"HTTP/1.1 304 Not Modified\r\n\r\n" + FORGED],
    "behind chunks": [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n" + FORGED],
    "behind a 100": [b"HTTP/1.1 100 Continue\r\n\r\n" + answer(b"a")[0] + FORGED],
    "behind what is read at once": [HEAD % WHOLE + b"a" * WHOLE + FORGED],
    "in a record of its own": [answer(b"a")[0], FORGED],
}


class Server:
    """Answers each request with the name of the account that asks; to ``a`` it says more than it should."""

    def __init__(self, parts):
        self.parts, self.opened, self.late = parts, 0, None
        self.sent = asyncio.Event()  # all of it: it is in the other side's socket
        self.tasks = set()

    async def serve(self, reader, writer):
        self.opened += 1
        self.tasks.add(asyncio.current_task())
        writer.transport.set_write_buffer_limits(1)  # with 0, asyncio's TLS pauses a writer whose buffer is empty
        try:
            await self.talk(reader, writer)
        finally:
            writer.close()

    async def talk(self, reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.sent.clear()
                for line in head.lower().split(b"\r\n"):
                    if line.startswith(b"content-length:"):
                        await reader.readexactly(int(line.split(b":")[1]))
                if b"x-account: b" in head.lower():
                    writer.write(answer(b"b")[0])
                else:
                    for part in self.parts:
                        writer.write(part)
                try:
                    await writer.drain()
                finally:  # it may have been cut off meanwhile
                    self.sent.set()
                if self.late is not None:
                    await self.late.wait()
                    writer.write(FORGED)


@contextlib.asynccontextmanager
async def serving(parts, context=None):
    server = Server(parts)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=context)
    server.url = f"http{'s' if context else ''}://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listening.close()
        for task in server.tasks:
            task.cancel()
        await asyncio.gather(*server.tasks, return_exceptions=True)


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    made = Certificate(tmp_path_factory.mktemp("tls"))
    return made.server, made.trusting


class Lent(httpx.AsyncBaseTransport):
    def __init__(self, inner):
        self.handle_async_request = inner.handle_async_request


A, B = {"x-account": "a"}, {"x-account": "b"}


@pytest.mark.parametrize("secure", [False, True], ids=["http", "https"])
@pytest.mark.parametrize("threads", [False, True], ids=["coroutines", "threads"])
@pytest.mark.parametrize("parts", SURPLUS.values(), ids=SURPLUS)
async def test_the_next_account_gets_its_own_answer(parts, secure, threads, tls):
    pool = Pool(PoolSettings(verify=tls[1], read=LIMIT))
    async with serving(parts, tls[0] if secure else None) as server:
        if threads:
            client = httpx.Client(transport=pool.for_threads, trust_env=False, timeout=LIMIT)
            for _ in range(3):
                await asyncio.to_thread(client.get, server.url, headers=A)
                await asyncio.wait_for(server.sent.wait(), LIMIT)
                assert (await asyncio.to_thread(client.get, server.url, headers=B)).text == "b"
        else:
            async with httpx.AsyncClient(transport=Lent(pool.for_coroutines), trust_env=False, timeout=LIMIT) as client:
                for _ in range(3):
                    await client.get(server.url, headers=A)
                    await asyncio.wait_for(server.sent.wait(), LIMIT)
                    assert (await client.get(server.url, headers=B)).text == "b"
    await pool.aclose()


@pytest.mark.parametrize("threads", [False, True], ids=["coroutines", "threads"])
async def test_an_answer_nobody_asked_for_yet(threads):
    """It comes while the connection rests."""
    pool = Pool(PoolSettings(read=LIMIT, idle_for=LIMIT))
    async with (
        serving(answer(b"a")) as server,
        httpx.AsyncClient(transport=Lent(pool.for_coroutines), timeout=LIMIT) as client,
    ):
        server.late = asyncio.Event()
        threaded = httpx.Client(transport=pool.for_threads, trust_env=False, timeout=LIMIT)

        async def get(headers):
            if threads:
                return await asyncio.to_thread(threaded.get, server.url, headers=headers)
            return await client.get(server.url, headers=headers)

        await get(A)
        resting = pool.for_threads._pool.connections if threads else list(pool.for_coroutines._resting)
        server.late.set()
        async with asyncio.timeout(LIMIT):
            while not resting[0].has_expired():  # noqa: ASYNC110 - the kernel's event, not a test's
                await asyncio.sleep(0.005)
        assert (await get(B)).text == "b"
    await pool.aclose()


async def test_connections_without_surplus_are_kept():
    pool = Pool(PoolSettings(read=LIMIT, idle_for=LIMIT))
    async with (
        serving(answer(b"a")) as server,
        httpx.AsyncClient(transport=Lent(pool.for_coroutines), timeout=LIMIT) as client,
    ):
        threaded = httpx.Client(transport=pool.for_threads, trust_env=False, timeout=LIMIT)
        for _ in range(5):
            await client.get(server.url, headers=A)
            await asyncio.to_thread(threaded.get, server.url, headers=A)
        assert server.opened == 2
    await pool.aclose()


async def test_kept_over_tls_too(tls):
    pool = Pool(PoolSettings(verify=tls[1], read=LIMIT, idle_for=LIMIT))
    async with serving(answer(b"a"), tls[0]) as server:
        async with httpx.AsyncClient(transport=Lent(pool.for_coroutines), timeout=LIMIT) as client:
            for _ in range(5):
                await client.get(server.url, headers=A)
        assert server.opened == 1
    await pool.aclose()


async def test_token_endpoints():
    """The answer to one customer's refresh is not the token of another."""
    own = b'{"access_token": "own", "token_type": "bearer"}'
    forged = own.replace(b"own", b"for")
    token, now = TokenClient(), datetime.now(UTC)
    parts = [answer(own)[0] + answer(forged)[0]]
    async with serving(parts) as server:
        oauth = OAuth2(token_url=server.url + "/token", client_id="c", client_secret="s")
        for _ in range(3):
            assert (await token.refresh(oauth, "r", now)).body["access_token"] == "own"
    await token.aclose()


@pytest.mark.parametrize("parts", SURPLUS.values(), ids=SURPLUS)
async def test_requests_keeps_them_apart_by_itself(parts):
    async with serving(parts) as server:
        with requests.Session() as s:
            for _ in range(3):
                await asyncio.to_thread(s.get, server.url, headers=A, timeout=60)
                await asyncio.wait_for(server.sent.wait(), LIMIT)
                assert (await asyncio.to_thread(s.get, server.url, headers=B, timeout=60)).text == "b"


@pytest.mark.parametrize("parts", SURPLUS.values(), ids=SURPLUS)
async def test_the_sessions_of_two_jobs_over_one_connector_of_aiohttp(parts):
    async with serving(parts) as server, session(job(None)) as s:
        for _ in range(3):
            with contextlib.suppress(aiohttp.ClientError):  # it may refuse the answer as a whole
                async with s.get(server.url, headers=A) as response:
                    await response.read()
            await asyncio.wait_for(server.sent.wait(), LIMIT)
            async with s.get(server.url, headers=B) as response:
                assert await response.text() == "b"


@pytest.mark.of_asyncio
async def test_an_answer_that_tls_keeps_while_too_much_waits(tls):
    """Beyond a bound asyncio leaves in TLS what arrives, and fetches it only in its next round."""
    pool = Pool(PoolSettings(verify=tls[1], read=LIMIT, idle_for=LIMIT))
    async with (
        serving(answer(b"a"), tls[0]) as server,
        httpx.AsyncClient(transport=Lent(pool.for_coroutines), trust_env=False, timeout=LIMIT) as client,
    ):
        server.late = asyncio.Event()
        async with client.stream("GET", server.url, headers=A) as one:
            transport = one.extensions["network_stream"]._transport
            transport.pause_reading()  # as our stream does when too much waits in it
            server.late.set()
            await until(transport._ssl_protocol._get_read_buffer_size)
            transport.resume_reading()
            await one.aread()
        assert (await client.get(server.url, headers=B)).text == "b"
        assert server.opened == 2
    await pool.aclose()
