"""Signals to open pages: on a real server, with the stream as a browser reads it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time

import httpx
import psycopg
import pytest

from resilient import Job, Resilient, handler, web
from resilient.surface.web.dashboard import live
from tests.helpers import until
from tests.serving import serving
from tests.surface.dashboards import browser


@handler("contact.push")
async def push(job: Job[dict]) -> None: ...


@pytest.fixture
async def app(postgres_url):
    app = Resilient(postgres_url, handlers=[push], providers=[])
    await app.ready()
    yield app
    await app.close()


def site(app, rights=("read",)):
    return web.dashboard(app, operator=lambda _request: web.Operator("ann", rights))


@contextlib.asynccontextmanager
async def streaming(url):
    """The lines of a stream, as they come, in a list."""
    lines = []
    async with httpx.AsyncClient(base_url=url, timeout=60) as client, client.stream("GET", "/live") as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")

        async def read():
            with contextlib.suppress(httpx.RemoteProtocolError):
                async for line in answer.aiter_lines():
                    lines.append(line)  # noqa: PERF401 - each is looked at when it comes
            lines.append("end")

        task = asyncio.create_task(read())
        try:
            yield lines
        finally:
            task.cancel()
            await asyncio.wait([task])


def listening(app):
    """The connections of this database that listen."""
    with psycopg.connect(**app.database.driver_arguments(), autocommit=True) as c:
        query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN%'"
        return c.execute(query).fetchone()[0]


async def commit(app):
    await app.enqueue("contact.push", {}, resource_key="github/acct-1")


async def signal_comes(app, *streams):
    """Commit until each stream has one signal more."""
    before = [lines.count("data: changed") for lines in streams]
    await commit(app)
    await until(lambda: all(lines.count("data: changed") > n for lines, n in zip(streams, before, strict=True)))


async def test_a_page_hears_of_commits_and_one_connection_listens_for_all(app):
    async with serving(site(app)) as url, serving(site(app)) as other:
        async with streaming(url) as first, streaming(other) as second:
            await until(lambda: first and second)
            await until(lambda: listening(app) == 1)
            for _ in range(2):
                await signal_comes(app, first, second)
            assert listening(app) == 1
            began, before = time.monotonic(), first.count("data: changed")
            while time.monotonic() - began < 2 * live.PACE:
                await commit(app)
            number = first.count("data: changed") - before
            assert 1 <= number <= (time.monotonic() - began) / live.PACE + 1
        await until(lambda: listening(app) == 0)


async def test_on_sqlite_pages_poll(sqlite_url):
    app = Resilient(sqlite_url, handlers=[push], providers=[])
    ann = browser(app)
    answer = await ann.client.get("/live")
    assert (answer.status_code, answer.content) == (204, b"")
    assert "data-signals" not in (await ann.client.get("/")).text
    await app.close()


async def test_a_stream_is_for_those_who_may_read(app):
    for rights in ((), ("jobs", "resources")):
        await browser(app, rights=rights).get("/live", 403)
    await browser(app, rights=None).get("/live", 401)


async def test_a_stream_ends_with_its_server_and_after_its_time(app, monkeypatch):
    class Server:
        should_exit = False

        def handle_exit(self, *_):
            self.should_exit = True

    server = Server()
    monkeypatch.setattr(signal, "getsignal", lambda _number: server.handle_exit)
    async with serving(site(app)) as url:
        async with streaming(url) as lines:
            await signal_comes(app, lines)
            server.handle_exit()
            await until(lambda: "end" in lines)
        server.should_exit = False
        monkeypatch.setattr(live, "LONGEST", 0.0)
        async with streaming(url) as lines:
            await until(lambda: "end" in lines)


async def test_no_more_streams_than_it_takes(app, monkeypatch):
    monkeypatch.setattr(live, "MOST", 1)
    async with serving(site(app)) as url, streaming(url) as lines, httpx.AsyncClient(base_url=url) as client:
        await signal_comes(app, lines)
        assert (await client.get("/live")).status_code == 204
        assert (await client.get("/")).status_code == 200
