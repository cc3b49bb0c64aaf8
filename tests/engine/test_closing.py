"""After `Resilient.close()` no session of this process is in its database, whatever thread or loop opened it."""

from __future__ import annotations

import contextlib
import threading

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from resilient import Kind, Resilient
from resilient.store.db import wake
from tests.helpers import LIMIT, until

PUSH = Kind("push")
LATER = 0.1  # seconds after which a thread that was held goes on, while the app is closed


@pytest.fixture
def sessions(postgres_url, postgres_server):
    """A function: how many sessions the database has."""
    name = sa.make_url(postgres_url).database
    with postgres_server.connect() as c:
        yield lambda: c.execute("SELECT count(*) FROM pg_stat_activity WHERE datname = %s", [name]).fetchone()[0]


@pytest.fixture
def go(monkeypatch):
    """Threads of its name connect for LISTEN and NOTIFY once it is set: slowly, as on a busy machine."""
    go, connect = threading.Event(), wake._autocommit

    @contextlib.contextmanager
    def late(*args):
        if threading.current_thread().name == go.name:
            go.is_awaited.set()
            assert go.wait(LIMIT)
        with connect(*args) as driver:
            yield driver

    monkeypatch.setattr(wake, "_autocommit", late)
    go.name, go.is_awaited = "", threading.Event()
    go.others = {*threading.enumerate()}  # of tests before this one
    yield go
    go.set()


async def closed(app, go, sessions):
    threading.Timer(LATER, go.set).start()  # in no loop, which must not matter
    await app.close()
    assert [one.name for one in {*threading.enumerate()} - go.others if one.name.startswith("resilient-")] == []
    await until(lambda: sessions() == 0)  # the server ends them when it reads that they are closed


async def test_a_commit_of_a_callers_connection_that_is_announced_while_it_is_closed(postgres_url, go, sessions):
    """Its thread announces it, and must not start another one that nobody closes."""
    app, engine = Resilient(postgres_url), sa.create_engine(postgres_url.replace("postgresql", "postgresql+psycopg", 1))
    go.name = "resilient-waker"
    with engine.begin() as c:
        app.enqueue_sync(PUSH, resource_key="a/b", session=c)
    engine.dispose()
    await closed(app, go, sessions)
    assert app.ground.waker._thread is None


async def test_a_listener_of_those_who_waited_for_a_job(postgres_url, go, sessions):
    app = Resilient(postgres_url)
    go.name = "resilient-listener"
    with app.jobs._ends.hearing(lambda: None):
        await until(go.is_awaited.is_set)
    await closed(app, go, sessions)


async def test_a_watch_that_asks_the_server(postgres_url, go, sessions):
    """It asks over a connection of its own."""
    app, is_asking = Resilient(postgres_url), threading.Event()

    def ask(_now):
        with psycopg.connect(postgres_url):
            is_asking.set()
            assert go.wait(LIMIT)

    app.database.watch._also = ask
    await app.enqueue(PUSH, resource_key="a/b")
    await until(is_asking.is_set)
    await closed(app, go, sessions)


async def test_a_thread_that_has_yet_to_use_an_engine(postgres_url, go, sessions):
    """It took the engine before the close, and a connection after it."""
    app = Resilient(postgres_url)
    engines = [app.database.sync_engine, app.database._reserved_engine, app.session_engines.synchronous]
    late = Session(app.session_engines.synchronous), AsyncSession(app.session_engines.asynchronous)
    await closed(app, go, sessions)
    for engine in engines:
        with engine.connect() as c:
            c.execute(sa.text("SELECT 1"))
    with late[0] as session:
        session.execute(sa.text("SELECT 1"))
    async with late[1] as session:
        await session.execute(sa.text("SELECT 1"))
    await until(lambda: sessions() == 0)
    app.database.watch.close()
