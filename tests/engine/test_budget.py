"""One budget of connections for a process: never more, what rests is closed, nobody waits in a circle."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sqlite3
import sys
import threading
from collections import deque
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from sqlalchemy import text
from sqlalchemy.util import greenlet_spawn

from resilient import DatabaseBusy, DatabaseUnreachable, Job, Resilient, SetupError, SyncJob, handler
from resilient.engine.inspect.doctor import check_server, examine
from resilient.store.db import pool
from resilient.store.db.address import checked, for_listening
from resilient.store.db.database import Database
from resilient.store.db.direct import direct
from resilient.store.inspect import health
from resilient.store.inspect.health import Server

sys.path.insert(0, str(Path(__file__).parents[1] / "chaos"))
from proxy import Proxy

from tests.helpers import LIMIT


@direct
def one(c, d):
    return d.run(c, "SELECT 1 AS one").scalar()


def plain(c, d):
    return d.run(c, "SELECT 1 AS one").scalar()


class Counter:
    """Looks all the time how many sessions a database has, but for its own.

    ``most`` counts those that stay for ten looks: the server shows a session until its process has ended, so one that
    was closed stands beside the one that was opened in its place for a moment.
    """

    def __init__(self, server, url):
        self.most, self._end = 0, threading.Event()
        self._connection = server.connect(url.partition("?")[0].rpartition("/")[2])
        self._thread = threading.Thread(target=self._run)

    def now(self):
        return len(self._sessions())

    def _sessions(self):
        with self._connection.cursor() as cursor:
            rows = cursor.execute(
                "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
            ).fetchall()
        return {pid for (pid,) in rows}

    def _run(self):
        looks = deque(maxlen=10)
        while not self._end.wait(0.01):
            looks.append(self._sessions())
            if len(looks) == looks.maxlen:
                self.most = max(self.most, len(set.intersection(*looks)))

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._end.set()
        self._thread.join()
        self._connection.close()


@handler("complete", timeout=120)
async def complete(job: Job[dict]) -> None:
    async with job.complete() as session:
        await session.execute(text("SELECT pg_sleep(0.002)"))


@handler("thread", timeout=120)
def thread(job: SyncJob[dict]) -> None:
    with job.complete() as session:
        session.execute(text("SELECT pg_sleep(0.002)"))


@handler("more", timeout=120)
async def more(job: Job[dict]) -> None:
    """Holds one connection and asks for another."""
    async with job.complete() as session:
        await session.execute(text("SELECT 1"))
        await job.app.jobs.count()
        await asyncio.to_thread(job.app.sync.jobs.count)


async def until_done(app, count):
    async with asyncio.timeout(LIMIT):
        while await app.jobs.count(state="succeeded") < count:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


LONG = pytest.mark.proof("that of threads")


@pytest.mark.parametrize(
    "kinds",
    [pytest.param([complete], marks=LONG), [thread], pytest.param([complete, thread, more], marks=LONG)],
    ids=["async", "threads", "mixed"],
)
async def test_five_hundred_slots_inside_complete_share_ten_connections(postgres_server, postgres_url, kinds):
    app = Resilient(postgres_url, handlers=[complete, thread, more], upgrade=False)
    for kind in kinds:
        await app.enqueue_many(kind, [{}] * (500 // len(kinds)), resource_key="p/1")
    worker = app.worker(concurrency=500)
    with Counter(postgres_server, postgres_url) as counter:
        running = asyncio.create_task(worker.run(signals=False))
        await until_done(app, 500 // len(kinds) * len(kinds))
        worker.stop()
        await running
        assert counter.most <= 10
    assert worker.outcomes == {"succeeded": 500 // len(kinds) * len(kinds)}
    await app.close()


async def test_what_rests_is_closed(postgres_server, postgres_url, monkeypatch):
    database = Database(postgres_url)
    with Counter(postgres_server, postgres_url) as counter:
        await asyncio.gather(*(database.transaction(fn) for fn in (one, plain) * 20))
        await asyncio.gather(*(asyncio.to_thread(database.transaction_sync, plain) for _ in range(10)))
        assert counter.now() > 1
        monkeypatch.setattr(pool, "IDLE", 0.0)  # as if what rests had rested for long
        async with asyncio.timeout(LIMIT):
            while counter.now():  # noqa: ASYNC110 - the server's processes end
                await asyncio.sleep(0.01)
        assert counter.most <= 6
        assert [await database.transaction(one), await database.transaction(plain)] == [1, 1]
    await database.close()


async def test_who_waits_is_served_in_order_and_who_goes_away_holds_up_nobody(postgres_url):
    database = Database(postgres_url, connections=5)  # one, shared
    served = []

    async def ask(n):
        await database.transaction(one)
        served.append(n)

    sleep = direct(lambda c, d: d.run(c, "SELECT pg_sleep(:s) AS slept", {"s": 0.3}).all())
    first = asyncio.create_task(database.transaction(sleep))
    await asyncio.sleep(0.1)
    tasks = []
    for n in range(5):
        tasks.append(asyncio.create_task(ask(n)))
        await asyncio.sleep(0)
    tasks[1].cancel()
    await first
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks, return_exceptions=True)
    assert served == [0, 2, 3, 4]
    async with asyncio.timeout(LIMIT):
        assert await asyncio.gather(*(database.transaction(plain) for _ in range(5))) == [1] * 5
    await database.close()


def test_a_permit_that_came_too_late_is_given_back():
    share = pool.Share(1)
    share.take(1, asynchronous=False)
    with pytest.raises(pool.PoolTimeout):
        share.take(0.01, asynchronous=False)
    share.give()
    share.take(0.01, asynchronous=False)


def test_who_needs_two_permits_waits_for_both_no_longer_than_for_one(monkeypatch):
    """A handler's session takes one of the sessions, then one of all: it is told after the time that one is told."""
    now, waits = [0.0], []

    class Slow(pool.Share):
        def take(self, seconds, *, asynchronous):
            waits.append(seconds)
            now[0] += 20.0
            super().take(seconds, asynchronous=asynchronous)

    one = pool.BudgetPool(partial(sqlite3.connect, ":memory:"))
    one.place(pool.Budget(1), [Slow(1), Slow(1), Slow(1)], timeout=30.0)
    monkeypatch.setattr(pool, "time", SimpleNamespace(monotonic=lambda: now[0]))
    one._do_get()
    assert waits == [30.0, 10.0, 0.0]


def test_a_permit_for_a_loop_that_was_closed_is_given_back_once():
    share = pool.Share(1)
    share.take(1, asynchronous=False)
    loop = asyncio.new_event_loop()
    waiting = loop.create_task(greenlet_spawn(share.take, 60, asynchronous=True))
    loop.run_until_complete(asyncio.sleep(0))
    waiting._log_destroy_pending = False
    loop.close()
    share.give()  # nobody hears of it there: the permit is free
    with contextlib.suppress(GeneratorExit, RuntimeError):
        waiting.get_coro().close()
    del waiting
    gc.collect()
    share.take(0, asynchronous=False)
    with pytest.raises(pool.PoolTimeout):
        share.take(0, asynchronous=False)


def test_a_connection_that_comes_back_while_its_pool_is_disposed_of_is_closed(monkeypatch):
    """Else it rests in a pool that nobody looks into, and counts as open for ever."""
    budget = pool.Budget(1)
    one = pool.BudgetPool(partial(sqlite3.connect, ":memory:"))
    one.place(budget, [pool.Share(1)])
    monkeypatch.setattr(pool, "has_word", lambda _driver: False)
    record = one._do_get()

    class Clock:
        def monotonic(self):
            one.dispose()  # by another thread, after this one has looked whether it is over
            return 0.0

    monkeypatch.setattr(pool, "time", Clock())
    one._do_return_conn(record)
    assert budget._open == 0


async def test_a_server_without_a_free_connection_is_named_and_waited_for(own_postgres):
    """It costs no attempt: the job is run when there is one."""
    name = own_postgres.create()
    with own_postgres.connect() as c:
        c.execute(f"CREATE ROLE few LOGIN CONNECTION LIMIT 3; GRANT ALL ON DATABASE {name} TO few")
    url = own_postgres.url(name).replace("postgres@", "few@")
    database = Database(url)
    assert await database.transaction(one) == 1
    import psycopg

    others = [psycopg.connect(host=str(own_postgres.data), dbname=name, user="few") for _ in range(2)]
    with pytest.raises(DatabaseBusy, match=r"has no connection left.*too many connections for role"):
        await asyncio.gather(*(database.transaction(fn) for fn in (one, plain) * 3))
    for other in others:
        other.close()
    while True:  # the server counts a session, a refused one too, until its process has ended
        try:
            assert await database.transaction(plain) == 1
        except DatabaseBusy:
            await asyncio.sleep(0.01)
        else:
            break
    await database.close()


def test_too_few_to_work_with_is_refused():
    with pytest.raises(SetupError, match="from 6 to 10,000"):
        Resilient("postgresql://h/x", connections=5)


async def test_a_worker_that_the_server_has_no_room_for_says_so(own_postgres, caplog):
    """max_connections is 50 there, three of them kept for superusers."""
    url = own_postgres.url(own_postgres.create())
    app = Resilient(url, handlers=[complete], upgrade=True, connections=48)
    worker = app.worker()
    running = asyncio.create_task(worker.run(signals=False))
    async with asyncio.timeout(LIMIT):
        while "this worker may open 48" not in caplog.text:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        while not [f for f in await examine(app.database) if f.name == "workers" and f.level == "ok"]:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    (found,) = [f for f in await examine(app.database) if f.name == "connection_budget"]
    assert "1 worker of 48 connections each may open 48, and the server has 47 for everybody" in found.message
    worker.stop()
    await running
    await app.close()


@pytest.mark.parametrize(
    ("written", "query"),
    [
        ("host=a,b&port=1,2", {"host": "a,b", "port": "1,2"}),
        ("host=a:1&host=b:2", {"host": "a,b", "port": "1,2"}),
        ("host=a:1&host=b", {"host": "a,b", "port": "1,5432"}),
        ("host=a&host=b", {"host": "a,b"}),
        ("host=/run/pg", {"host": "/run/pg"}),
        ("host=::1,::2&port=1,2", {"host": "::1,::2", "port": "1,2"}),
    ],
)
def test_several_hosts_in_either_form(written, query):
    assert dict(checked(f"postgresql://u@/x?{written}").query) == query
    arguments = Database(f"postgresql://u@/x?{written}").driver_arguments()
    assert {name: arguments[name] for name in query} == query


@pytest.mark.parametrize("written", ["host=a:1,b:2", "host=a:1&host=b:2&port=1,2", "host=a&port=1&port=2"])
def test_both_forms_at_once_are_refused(written):
    with pytest.raises(SetupError, match="in one of two forms"):
        Resilient(f"postgresql://u@/x?{written}")


@pytest.mark.parametrize("form", ["host={0},{0}&port={1},{2}", "host={0}:{1}&host={0}:{2}"])
async def test_the_host_that_is_there_is_found(postgres_server, postgres_url, form):
    name = postgres_url.partition("?")[0].rpartition("/")[2]
    with Proxy(next(postgres_server.data.glob(".s.PGSQL.*[0-9]"))) as proxy:
        hosts = form.format("127.0.0.1", 1, proxy.port)
        url = f"postgresql://postgres@/{name}?{hosts}&sslmode=disable&gssencmode=disable"
        database = Database(url)
        assert [await database.transaction(one), database.transaction_sync(plain)] == [1, 1]
        assert await asyncio.to_thread(health.hearers, for_listening(url)) is not None
        await database.close()


async def test_a_server_that_takes_no_writes_is_named_and_waited_for(own_postgres, caplog):
    name = own_postgres.create()
    url = own_postgres.url(name)
    app = Resilient(url, handlers=[complete], upgrade=True)
    await app.ready()
    await app.close()
    with own_postgres.connect() as c:
        c.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    with pytest.raises(DatabaseUnreachable, match=r"takes no writes: .* \(this is a standby, or a server that was set"):
        await app.enqueue(complete, {}, resource_key="p/1")
    worker = app.worker()
    running = asyncio.create_task(worker.run(signals=False))
    async with asyncio.timeout(LIMIT):
        while "waits for the database" not in caplog.text:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    worker.stop()
    await running
    await app.close()


def test_a_standby_is_told():
    server = Server((17, 0), datetime.now(UTC), {"max_connections": "100"}, standby=True)
    (found,) = [f for f in check_server(server, (0, 0), sqlite=False) if f.name == "standby"]
    assert (found.level, "this is a standby" in found.message) == ("fail", True)
