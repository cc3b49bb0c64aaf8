"""A server that says nothing is noticed: stopped, one of its processes alone, or behind a network that drops all."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading

import psutil
import pytest
from proxy import Proxy

from resilient import DatabaseUnreachable, Job, Kind, Resilient, handler
from resilient.store.db import pool
from resilient.store.db.address import connect_args
from resilient.store.db.database import Database
from resilient.store.db.direct import direct
from tests.helpers import LIMIT


@handler("nothing")
async def nothing(job: Job[dict]) -> None:
    pass


@direct
def one(c, d):
    return d.run(c, "SELECT 1 AS one").scalar()


def plain(c, d):
    return d.run(c, "SELECT 1 AS one").scalar()


WAYS = {
    "direct": lambda database: database.transaction(one),
    "async": lambda database: database.transaction(plain),
    "statement": lambda database: database.statement(one),
    "sync": lambda database: asyncio.to_thread(database.transaction_sync, plain),
    "statement_sync": lambda database: asyncio.to_thread(database.statement_sync, one),
}


@contextlib.contextmanager
def stopped(processes):
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)


def test_all_of_it_is_less_than_fifteen_seconds():
    assert pool.SUSPECT + pool.TICK + pool.CONNECT + pool.ANSWER < 15


async def test_a_server_that_is_stopped_is_noticed_on_every_way_and_told(own_postgres, caplog):
    caplog.set_level(logging.ERROR, "resilient.database")
    database = Database(own_postgres.url())
    database.watch.suspect = 1.0
    assert [await way(database) for way in WAYS.values()] == [1] * len(WAYS)
    with stopped(own_postgres.processes()):
        async with asyncio.timeout(LIMIT):
            found = await asyncio.gather(*(way(database) for way in WAYS.values()), return_exceptions=True)
    assert [type(error) for error in found] == [DatabaseUnreachable] * len(WAYS)
    assert "nor does it answer a new connection" in caplog.text
    async with asyncio.timeout(LIMIT):
        for way in WAYS.values():
            while True:
                with contextlib.suppress(DatabaseUnreachable):
                    assert await way(database) == 1
                    break
    await database.close()


@pytest.mark.parametrize("name", WAYS)
async def test_one_of_its_processes_that_is_stopped_costs_one_call(own_postgres, caplog, name):
    caplog.set_level(logging.ERROR, "resilient.database")
    database, way = Database(own_postgres.url()), WAYS[name]
    database.watch.suspect = 1.0
    await way(database)
    with own_postgres.connect() as c:
        rows = c.execute(
            "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
        ).fetchall()
    with stopped([psutil.Process(pid) for (pid,) in rows]):
        async with asyncio.timeout(LIMIT):
            with pytest.raises(DatabaseUnreachable):
                await way(database)
            assert await way(database) == 1
    assert "but not on 1 of our connections" in caplog.text
    await database.close()


async def test_a_network_that_takes_everything_and_passes_nothing_on(postgres_server, postgres_url, caplog):
    caplog.set_level(logging.ERROR, "resilient.database")
    name = postgres_url.partition("?")[0].rpartition("/")[2]
    with Proxy(next(postgres_server.data.glob(".s.PGSQL.*[0-9]"))) as proxy:
        database = Database(f"postgresql://postgres@127.0.0.1:{proxy.port}/{name}?sslmode=disable&gssencmode=disable")
        database.watch.suspect = 1.0
        await database.transaction(one)
        proxy.hole = True
        async with asyncio.timeout(LIMIT):
            with pytest.raises(DatabaseUnreachable):
                await database.transaction(one)
        assert "nor does it answer a new connection" in caplog.text
        proxy.hole = False
        assert await database.transaction(one) == 1
        await database.close()


async def test_what_waits_for_a_lock_waits_on(postgres_url, postgres_server, caplog):
    """Somebody's transaction may take its time."""
    caplog.set_level(logging.ERROR, "resilient.database")
    database = Database(postgres_url)
    database.watch.suspect = 0.5
    asked, real = threading.Semaphore(0), database.watch._ask

    def ask():
        found = real()
        asked.release()
        return found

    database.watch._ask = ask
    name = postgres_url.partition("?")[0].rpartition("/")[2]
    with postgres_server.connect(name) as c:
        c.execute("BEGIN; LOCK TABLE resilient_job")
        waiting = asyncio.create_task(
            database.transaction(direct(lambda c, d: d.run(c, "SELECT count(*) AS n FROM {job}").scalar()))
        )
        for _ in range(2):
            assert await asyncio.to_thread(asked.acquire, timeout=60)
        assert not waiting.done()
        c.execute("ROLLBACK")
    assert await waiting == 0
    assert caplog.text == ""
    await database.close()


def test_what_the_address_says_wins(monkeypatch):
    from sqlalchemy import make_url

    plain = connect_args(make_url("postgresql://h/x"))
    assert plain["connect_timeout"] == 5
    assert plain["keepalives_idle"] + plain["keepalives_interval"] * plain["keepalives_count"] < 15
    assert plain["tcp_user_timeout"] < 15_000
    said = connect_args(make_url("postgresql://h/x?connect_timeout=60&keepalives=0&client_encoding=latin1"))
    assert not {"connect_timeout", "keepalives", "client_encoding"} & set(said)
    monkeypatch.setenv("PGCONNECT_TIMEOUT", "30")
    assert "connect_timeout" not in connect_args(make_url("postgresql://h/x"))


# -- connections that were cut, databases that come later ------------------------------------------------------


CUT = (
    "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
    " AND datname = current_database()"
)


@pytest.mark.parametrize("face", ["async", "sync"])
async def test_a_look_over_a_connection_that_was_cut_while_it_rested(postgres_url, postgres_server, face):
    app = Resilient(postgres_url, kinds=[Kind("k", None)], upgrade=False)

    async def count():
        return await app.jobs.count() if face == "async" else await asyncio.to_thread(app.sync.jobs.count)

    assert await count() == 0
    with postgres_server.connect(postgres_url.partition("?")[0].rpartition("/")[2]) as c:
        c.execute(CUT)
    assert await count() == 0
    await app.close()


async def test_connections_for_hints_that_are_cut_are_one_line_each(postgres_url, postgres_server, caplog):
    caplog.set_level(logging.WARNING)
    app = Resilient(postgres_url, handlers=[nothing], upgrade=False)
    worker = app.worker(concurrency=1)
    running = asyncio.create_task(worker.run(signals=False))
    await app.enqueue(nothing, {}, resource_key="k/1")
    name = postgres_url.partition("?")[0].rpartition("/")[2]
    with postgres_server.connect(name) as c:
        while not c.execute("SELECT 1 FROM pg_stat_activity WHERE query LIKE 'LISTEN%'").fetchall():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        told = "SELECT 1 FROM pg_stat_activity WHERE query LIKE '%pg_notify%' AND state = 'idle'"
        while not c.execute(told).fetchall():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        c.execute(CUT)
        app.poke()
        while not {"no LISTEN", "no NOTIFY"} <= {r.getMessage()[:9] for r in caplog.records}:
            app.poke()
            await asyncio.sleep(0.02)
    worker.stop()
    await running
    told = [r for r in caplog.records if r.name == "resilient.wake" or r.name.startswith("sqlalchemy")]
    assert [r for r in told if r.exc_info or r.levelno > logging.WARNING or "\n" in r.getMessage()] == []
    await app.close()


async def test_a_worker_waits_for_a_database_that_comes_later(own_postgres, caplog):
    caplog.set_level(logging.WARNING)
    url = own_postgres.url(own_postgres.create())
    app = Resilient(url, handlers=[nothing], upgrade=True)
    own_postgres.stop()
    worker = app.worker(concurrency=1)
    running = asyncio.create_task(worker.run(signals=False))
    async with asyncio.timeout(LIMIT):
        while "waits for the database" not in caplog.text:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        own_postgres.start()
        while True:
            with contextlib.suppress(DatabaseUnreachable):
                job = await app.enqueue(nothing, {}, resource_key="k/1")
                break
            await asyncio.sleep(0.05)
        while (await app.jobs.get(job.id)).state != "succeeded":  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    worker.stop()
    await running
    await app.close()


async def test_a_worker_that_waits_for_its_database_stops_at_once():
    app = Resilient("postgresql://127.0.0.1:1/x", handlers=[nothing])
    worker = app.worker(concurrency=1)
    running = asyncio.create_task(worker.run(signals=False))
    await asyncio.sleep(0)
    worker.stop()
    async with asyncio.timeout(LIMIT):
        await running
    await app.close()


async def test_after_an_outage_leases_are_not_taken_from_workers_that_come_back(postgres_url):
    """Whoever is back first leaves the others the time of two heartbeats."""
    app = Resilient(postgres_url, handlers=[nothing], upgrade=False)
    worker = app.worker(lease=60)
    await app.enqueue(nothing, {}, resource_key="k/1")
    await app.database.transaction(
        lambda c, d: d.run(
            c,
            "UPDATE {job} SET state = 'running', version = version + 1, locked_by = 'other',"
            " lease_until = clock_timestamp() - interval '5 seconds' RETURNING 1",
        ).all()
    )
    worker.link.monotonic = lambda: 100.0
    worker.link.is_cut_off = True
    await worker.sweeper.rescue()
    worker.link.is_cut_off, worker.link.back_at = False, 95.0
    await worker.sweeper.rescue()
    assert worker.sweeper.rescued == 0
    worker.link.back_at = 80.0
    await worker.sweeper.rescue()
    assert worker.sweeper.rescued == 1
    await app.close()


def test_a_new_sqlite_file_is_its_owners_alone(tmp_path):
    database = Database(f"sqlite:///{tmp_path}/app.db")
    database.transaction_sync(lambda c, _d: c.exec_driver_sql("CREATE TABLE t (n int)"))
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in tmp_path.iterdir()} == {
        "app.db": "0o600", "app.db-wal": "0o600", "app.db-shm": "0o600",
    }  # fmt: skip
    database.close_sync()
    (tmp_path / "app.db").chmod(0o640)
    database = Database(f"sqlite:///{tmp_path}/app.db")
    database.transaction_sync(lambda c, _d: c.exec_driver_sql("INSERT INTO t VALUES (1)"))
    assert (tmp_path / "app.db").stat().st_mode & 0o777 == 0o640, "somebody meant it so"
    database.close_sync()
