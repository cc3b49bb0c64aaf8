"""The pool of connections: reuse, bounds, waiting in line, and what becomes of broken ones."""

import asyncio
import contextlib

import httpcore
import httpx
import pytest
import respx

from resilient import Errors, Provider, ResourceStopped, Rule
from resilient.core.base.errors import FailureKind as K
from resilient.core.provider.facts import GENERIC
from resilient.wire.requests.client import build_client
from resilient.wire.requests.pool import Pool, PoolSettings
from resilient.wire.requests.request_log import RequestLog
from tests.helpers import LIMIT, until

UNHURRIED = {"connect": LIMIT, "read": LIMIT, "write": LIMIT, "wait": LIMIT}
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Counting:
    """A keep-alive server that counts connections and requests in progress."""

    def __init__(self):
        self.opened = self.closed = self.busy = self.busiest = 0
        self.hold = None  # an event that answers wait for
        self.close_after_answer = False
        self.answers = []  # the first ones

    async def serve(self, reader, writer):
        self.opened += 1
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                self.busy += 1
                self.busiest = max(self.busy, self.busiest)
                if self.hold is not None:
                    await self.hold.wait()
                else:
                    await asyncio.sleep(0.005)
                self.busy -= 1
                writer.write(self.answers.pop(0) if self.answers else ANSWER)
                await writer.drain()
                if self.close_after_answer:
                    return
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            self.closed += 1
            writer.close()


@contextlib.asynccontextmanager
async def counting():
    found = Counting()
    listening = await asyncio.start_server(found.serve, "127.0.0.1", 0)
    found.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    try:
        yield found
    finally:
        listening.close()


@contextlib.asynccontextmanager
async def pooled(**settings):
    pool = Pool(PoolSettings(**{**UNHURRIED, "idle_for": LIMIT, **settings}))
    connections = pool.for_coroutines
    async with httpx.AsyncClient(transport=_Lent(connections), timeout=pool.timeout, trust_env=False) as client:
        yield client, connections
    await pool.aclose()


class _Lent(httpx.AsyncBaseTransport):
    def __init__(self, inner):
        self.handle_async_request = inner.handle_async_request


async def test_one_connection_serves_one_after_the_other():
    async with counting() as server, pooled() as (client, connections):
        for _ in range(5):
            assert (await client.get(server.url)).text == "ok"
        assert server.opened == 1
        assert (connections._open, len(connections._resting)) == (1, 1)


async def test_no_more_connections_than_allowed_and_everybody_gets_one():
    async with counting() as server, pooled(connections=3) as (client, connections):
        answers = await asyncio.gather(*(client.get(server.url) for _ in range(30)))
        assert {a.status_code for a in answers} == {200}
        assert server.opened == server.busiest == connections._open == 3


async def test_only_so_many_rest():
    async with counting() as server, pooled(idle=2) as (client, connections):
        await asyncio.gather(*(client.get(server.url) for _ in range(6)))
        assert len(connections._resting) == connections._open == 2
        await until(lambda: server.opened - server.closed == 2)


async def test_whoever_waits_too_long_is_told_so_and_nobodys_turn_is_lost():
    async with counting() as server, pooled(connections=1) as (client, connections):
        server.hold = asyncio.Event()
        first = asyncio.create_task(client.get(server.url))
        await until(lambda: server.busy == 1)
        with pytest.raises(httpx.PoolTimeout, match="none of 1 connections"):
            await client.get(server.url, timeout=httpx.Timeout(LIMIT, pool=0.05))
        waiting = [asyncio.create_task(client.get(server.url)) for _ in range(3)]
        await until(lambda: len(connections._line) == 3)
        waiting[0].cancel()
        await asyncio.sleep(0)
        server.hold.set()
        await first
        done = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(d).__name__ for d in done] == ["CancelledError", "Response", "Response"]
        assert (server.opened, connections._open) == (1, 1)


async def test_a_turn_that_comes_in_the_moment_of_cancellation_goes_to_the_next():
    async with counting() as server, pooled(connections=1) as (client, connections):
        async with client.stream("GET", server.url) as held:
            second, third = (asyncio.create_task(client.get(server.url)) for _ in range(2))
            await until(lambda: len(connections._line) == 2)
            await held.aread()  # gives the connection back: the second is woken ...
            second.cancel()  # ... and gone before it runs
        assert (await asyncio.wait_for(third, LIMIT)).status_code == 200
        assert second.cancelled()


async def test_a_connection_the_server_closed_while_it_rested_is_not_used():
    async with counting() as server, pooled() as (client, connections):
        server.close_after_answer = True
        for _ in range(3):
            closed = server.closed
            assert (await client.post(server.url)).status_code == 200
            await until(lambda: server.closed > closed)  # noqa: B023 - awaited within this round
            await asyncio.sleep(0.01)
        assert (server.opened, connections._open) == (3, 1)


async def test_what_rests_too_long_is_closed_by_itself():
    async with counting() as server, pooled(idle_for=0.1) as (client, connections):
        await asyncio.gather(*(client.get(server.url) for _ in range(4)))
        await until(lambda: connections._open == 0 and server.closed == 4)
        assert (dict(connections._stacks), connections._sweeper) == ({}, None)
        assert (await client.get(server.url)).status_code == 200


async def test_another_origins_resting_connection_makes_room():
    async with counting() as one, counting() as two, pooled(connections=2) as (client, connections):
        await asyncio.gather(client.get(one.url), client.get(one.url))
        assert (await client.get(two.url)).status_code == 200
        assert (connections._open, len(connections._resting)) == (2, 2)
        await until(lambda: one.closed == 1)


async def test_a_cancelled_request_gives_its_connection_up():
    async with counting() as server, pooled(connections=1) as (client, connections):
        server.hold = asyncio.Event()
        task = asyncio.create_task(client.get(server.url))
        await until(lambda: server.busy == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert connections._open == 0
        server.hold.set()
        assert (await client.get(server.url)).status_code == 200


async def test_a_stream_left_half_read_gives_its_connection_up():
    async with counting() as server, pooled(connections=1) as (client, connections):
        async with client.stream("GET", server.url) as response:
            assert response.status_code == 200
        assert connections._open == 0
        async with client.stream("GET", server.url) as response:
            async for _ in response.aiter_raw():
                break
        assert (await client.get(server.url)).status_code == 200
        assert connections._open == 1


async def _refuses(*_):
    raise ResourceStopped("api/acct", "auth", None)


async def test_an_answer_that_the_engine_keeps_back_gives_its_connection_up(client, hooks, monkeypatch):
    """It answers 200, unread: the account is gated while it is reported, or the database is away."""
    pool = Pool(PoolSettings(**UNHURRIED, connections=1))
    async with counting() as server:
        with monkeypatch.context() as patch:
            patch.setattr(hooks, "answered", _refuses)
            with pytest.raises(ResourceStopped):
                await client(over=pool, base_url=server.url).get("/x")
        assert pool.for_coroutines._open == 0
        assert (await client(over=pool, base_url=server.url).get("/x")).status_code == 200
        await pool.aclose()
        await until(lambda: (server.opened, server.closed) == (2, 2))


async def test_an_answer_that_is_cancelled_while_it_is_reported_gives_its_connection_up(client, hooks, monkeypatch):
    pool, reporting = Pool(PoolSettings(**UNHURRIED, connections=1)), asyncio.Event()

    async def answered(*_):
        reporting.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(hooks, "answered", answered)
    async with counting() as server:
        task = asyncio.create_task(client(over=pool, base_url=server.url).get("/x"))
        await reporting.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        assert pool.for_coroutines._open == 0
        await pool.aclose()
        await until(lambda: server.closed == 1)


async def test_a_refusal_by_a_header_gives_its_connection_up_before_it_is_repeated(client, hooks):
    """The credentials are refused with status 200, whose body nobody else would read."""
    hooks.refreshes, hooks.credentials = [{"authorization": "Bearer 2"}], {"authorization": "Bearer 1"}
    pool = Pool(PoolSettings(**UNHURRIED, connections=1, idle_for=LIMIT))
    async with counting() as server:
        renewable = Provider(
            name="api", base_url=server.url, errors=Errors(rules=(Rule(K.AUTH, status=200, header={"x": "old"}),))
        )
        server.answers = [ANSWER.replace(b"content", b"x: old\r\ncontent")]
        answer = await client(renewable, over=pool, base_url=server.url).get("/x")
        assert (answer.headers.get("x"), server.opened, hooks.steps.count("refreshed")) == (None, 1, 1)
        await pool.aclose()


async def test_the_same_of_a_thread(hooks, monkeypatch):
    pool = Pool(PoolSettings(**UNHURRIED, connections=1))
    async with counting() as server:
        loop = asyncio.get_running_loop()
        bridge = lambda step: asyncio.run_coroutine_threadsafe(step, loop).result()  # noqa: E731
        plain = build_client(RequestLog(hooks, GENERIC, server.url), pool, bridge)
        with monkeypatch.context() as patch:
            patch.setattr(hooks, "answered", _refuses)
            with pytest.raises(ResourceStopped):
                await asyncio.to_thread(plain.get, "/x")
        assert all(one.is_closed() for one in pool.for_threads._pool.connections)
        assert (await asyncio.to_thread(plain.get, "/x")).status_code == 200
        pool.close()


async def test_failed_connections_do_not_count(closed_port):
    async with pooled(connections=1) as (client, connections):
        for _ in range(3):
            with pytest.raises(httpx.ConnectError):
                await client.get(f"http://127.0.0.1:{closed_port}")
        assert (connections._open, len(connections._resting)) == (0, 0)


async def test_closing_the_pool_closes_what_rests_now_and_the_rest_when_it_comes_back():
    async with counting() as server, pooled() as (client, connections):
        server.hold = asyncio.Event()
        task = asyncio.create_task(client.get(server.url))
        await until(lambda: server.busy == 1)
        await connections.aclose()
        server.hold.set()
        assert (await task).status_code == 200
        await until(lambda: (server.closed, connections._open) == (1, 0))


async def test_errors_are_httpxs_and_do_not_cause_themselves(closed_port):
    async with pooled() as (client, _):
        with pytest.raises(httpx.ConnectError) as caught:
            await client.get(f"http://127.0.0.1:{closed_port}")
        assert isinstance(caught.value.__cause__, httpcore.ConnectError)
        assert caught.value.__cause__.__cause__ is not caught.value.__cause__


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_respx_answers_for_us(client, hooks):
    with respx.mock:
        respx.get("https://api.example.com/x").respond(429, headers={"retry-after": "3"})
        response = await client().get("https://api.example.com/x")
    assert response.extensions["resilient"].kind is K.THROTTLED
    assert hooks.log[-1][:2] == ("answered", 429)


async def test_a_proxy_is_left_to_httpx(hooks):
    pool = Pool(PoolSettings(proxy="http://127.0.0.1:9"))
    assert isinstance(pool.for_coroutines, httpx.AsyncHTTPTransport)
    await pool.aclose()


async def test_an_origin_is_forgotten_with_its_last_connection():
    """Accounts may have hosts of their own: what is kept of each must end."""
    async with counting() as server, pooled() as (client, connections):
        await client.get(server.url)
        server.close_after_answer = True
        server.answers = [ANSWER.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")]
        await client.get(server.url)
        assert (connections._open, dict(connections._stacks)) == (0, {})


async def test_who_has_waited_goes_before_who_comes():
    async with counting() as server, pooled(connections=1) as (client, connections):
        server.hold = asyncio.Event()
        order, comers = [], []

        async def ask(name):
            await client.get(server.url)
            order.append(name)

        first = asyncio.create_task(ask("first"))
        await until(lambda: server.busy == 1)
        waiting = [asyncio.create_task(ask(name)) for name in ("second", "third")]
        await until(lambda: len(connections._line) == 2)
        give_back = connections._give_back

        def with_a_comer(*args):
            """Somebody asks in the turn of the loop in which a place gets free, before who is woken for it."""
            if not comers:
                comers.append(asyncio.create_task(ask("comer")))
            give_back(*args)

        connections._give_back = with_a_comer
        server.hold.set()
        await asyncio.gather(first, *waiting)
        await asyncio.gather(*comers)
        assert order == ["first", "second", "third", "comer"]
