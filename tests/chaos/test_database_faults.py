"""The database goes away: restarted under load, sessions cut in the middle, answers to commits lost, clocks apart."""

from __future__ import annotations

import asyncio
import functools
import gc
import threading
import time
import warnings
from datetime import UTC, datetime, timedelta

import history
import psycopg
import pytest
from harness import Eye, address, new, put, states, unfinished, wait
from proxy import Proxy
from sqlalchemy.exc import SQLAlchemyError

from resilient import DatabaseUnreachable, Job, Resilient, handler
from resilient.engine.run import dispatcher
from resilient.store.db import schema
from resilient.store.db.database import Database
from tests.helpers import LIMIT


@handler("work")
async def work(job: Job[dict]) -> int:
    RAN.append(job.id)
    return job.execution


RAN: list = []


@pytest.fixture(autouse=True)
def _ran():
    """After a session broke, SQLAlchemy replaces the pool and drops what others had borrowed; psycopg remarks it."""
    RAN.clear()
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


# -- stopped and started under load ------------------------------------------------------------------------------------


class Producer:
    """A thread that enqueues all the time and knows what was committed."""

    def __init__(self, url):
        self.database, self.committed, self.unknown = Database(url, connections=1), [], []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        n = 0
        while not self._closed.wait(0.02):
            n += 1
            job = new(("work", "thread")[n % 2], f"p/{n % 3}")
            try:
                put(self.database, job)
                self.committed.append(job.id.hex)
            except (DatabaseUnreachable, SQLAlchemyError):
                self.unknown.append(job.id.hex)

    def close(self):
        self._closed.set()
        self._thread.join()
        self.database.close_sync()


def test_postgresql_stopped_and_started_under_load(own_postgres, crew):
    """Two workers and a producer: nobody is restarted, nothing is lost, nothing runs that was not committed."""
    url = own_postgres.url(own_postgres.create())
    database = Database(url)
    schema.upgrade_sync(database)
    history.install(database)
    workers = [crew.start(url, "--lease", "3") for _ in range(2)]
    producer = Producer(url)
    wait(lambda: len({line["n"] for line in crew.runs()}) == 2, 60, about=crew.said)  # both are at work
    for _ in range(2):
        before = len(crew.runs("end"))
        wait(lambda: len(crew.runs("end")) > before + 20, 60, about=crew.said)  # noqa: B023
        own_postgres.stop()
        refused = len(producer.unknown)
        wait(lambda: len(producer.unknown) > refused, about="the producer noticed nothing")  # noqa: B023
        own_postgres.start()
    before = len(producer.committed)
    wait(lambda: len(producer.committed) > before + 20, 60)
    producer.close()
    database.close_sync()  # its sessions ended with the server
    found = {one.id.hex for one in history.rows(database, "SELECT id FROM resilient_job")}
    committed = producer.committed + [one for one in producer.unknown if one in found]
    rolled_back = [one for one in producer.unknown if one not in found]
    wait(lambda: not unfinished(database), 60, about=crew.said)
    assert [worker.poll() for worker in workers] == [None, None], crew.said()
    crew.stop()
    assert history.check(database, crew.log, committed=committed, rolled_back=rolled_back) + crew.stranded() == []
    assert {row.state for row in states(database).values()} == {"succeeded"}
    database.close_sync()


# -- sessions cut in the middle ----------------------------------------------------------------------------------------


def cutting(app, monkeypatch, function, times):
    """The next ``times`` transactions of ``function`` lose their session after its statements, before the commit."""
    left = [times]
    for way in ("transaction", "statement") if function == "ensure" else ("transaction",):
        monkeypatch.setattr(app.database, way, _cutting(app, getattr(app.database, way), function, left))
    return left


def _cutting(app, real, function, left):
    async def run(fn, *args, **kwargs):
        if fn.__name__ != function or not left[0]:
            return await real(fn, *args, **kwargs)
        left[0] -= 1

        @functools.wraps(fn)  # with its marks
        def cut(c, d, *args, **kwargs):
            done = fn(c, d, *args, **kwargs)
            (pid,) = d.run(c, "SELECT pg_backend_pid()").one()
            with psycopg.connect(address(app.database), autocommit=True) as other:
                other.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])
            return done

        return await real(cut, *args, **kwargs)

    return run


@pytest.mark.parametrize("function", ["claim", "write", "attend", "rescue", "ensure"])
async def test_a_session_cut_in_the_middle_of(postgres, tmp_path, monkeypatch, function):
    """Of a claim, a finish, staging, rescue: rolled back, and done again on another session."""
    app = Resilient(Database(postgres.url), handlers=[work], upgrade=False)
    left = cutting(app, monkeypatch, function, 2)
    done = [await app.enqueue(work, {"n": n}, resource_key=f"p/{n % 2}") for n in range(8)]
    done.append(await app.enqueue(work, {"n": 9}, resource_key="p/0", delay=0.2))
    worker = app.worker(concurrency=3, lease=5)
    running = asyncio.create_task(worker.run(signals=False))
    async with asyncio.timeout(LIMIT):
        while left[0] or await app.jobs.count(state="succeeded") < len(done):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    worker.stop()
    await running
    assert sorted(RAN) == sorted(one.id for one in done)  # no handler ran twice
    for id_ in RAN:
        history.note(tmp_path / "log", event="start", job=id_.hex, execution=1, n=0)
        history.note(tmp_path / "log", event="end", job=id_.hex, execution=1, n=0)
    assert history.check(postgres, tmp_path / "log", committed=[one.id.hex for one in done]) == []
    await app.close()


# -- commits whose answer is lost --------------------------------------------------------------------------------------


@pytest.fixture
async def behind_proxy(postgres, postgres_server):
    """``(proxy, app)``: the app talks to the database through a proxy that can lose answers."""
    port = next(postgres_server.data.glob(".s.PGSQL.*[0-9]"))
    with Proxy(port) as proxy:
        url = f"postgresql://postgres@127.0.0.1:{proxy.port}/{postgres.url.database}?sslmode=disable&gssencmode=disable"
        app = Resilient(Database(url), handlers=[work], upgrade=False)
        yield proxy, app
        await app.close()


async def finished(database, count):
    """Looks past the proxy."""
    async with asyncio.timeout(LIMIT):
        while sum(row.state == "succeeded" for row in states(database).values()) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_a_finish_whose_answer_is_lost_is_recognised(behind_proxy, postgres):
    proxy, app = behind_proxy
    ids = [(await app.enqueue(work, {}, resource_key="p/1")).id for _ in range(5)]
    worker = app.worker(lease=5)
    proxy.lose("SET state = 'succeeded'")
    running = asyncio.create_task(worker.run(signals=False))
    await finished(postgres, 5)
    await worker.completer.flushed()
    worker.stop()
    await running
    assert proxy.lost == 1
    assert sorted(RAN) == sorted(ids)
    assert (worker.completer.written, worker.completer.stale) == (5, 0)


async def test_what_a_finish_released_is_found_although_its_answer_is_lost(behind_proxy, postgres, monkeypatch):
    """The next of its lane: nobody else tells the worker, and it looks by itself only now and then."""
    monkeypatch.setattr(dispatcher, "POLL", 1000.0)
    proxy, app = behind_proxy
    monkeypatch.setattr(app.ground.waker, "poke", lambda: None)
    await app.enqueue_many(work, [{}, {}], resource_key="p/1", ordering_key="o")
    worker = app.worker(lease=5)
    proxy.lose("ELSE 'succeeded' END")
    running = asyncio.create_task(worker.run(signals=False))
    await finished(postgres, 2)
    worker.stop()
    await running
    assert proxy.lost == 1
    assert (worker.completer.written, worker.completer.stale) == (2, 0)


async def test_a_claim_whose_answer_is_lost_is_rescued(behind_proxy, postgres):
    """The rows say that this worker holds them, and it does not know."""
    proxy, app = behind_proxy
    ids = [(await app.enqueue(work, {}, resource_key="p/1")).id for _ in range(3)]
    await app.database.transaction(lambda c, d: d.run(c, "INSERT INTO {resource} (key, created_at, updated_at) VALUES"
                                                       " ('p', now(), now()), ('p/1', now(), now())"))  # fmt: skip
    worker = app.worker(lease=1)
    proxy.lose("lease_until = ")
    running = asyncio.create_task(worker.run(signals=False))
    await finished(postgres, 3)
    worker.stop()
    await running
    assert proxy.lost == 1
    assert sorted(RAN) == sorted(ids)
    assert {(await app.jobs.get(id_)).rescues for id_ in ids} == {1}


async def test_an_enqueue_whose_answer_is_lost_says_so_and_the_job_runs_once(behind_proxy):
    """The caller cannot know; a unique key makes the repeat harmless."""
    proxy, app = behind_proxy
    await app.jobs.count()  # the check of the tables is done
    proxy.lose("INSERT INTO resilient_job")
    with pytest.raises(DatabaseUnreachable):
        await app.enqueue(work, {}, resource_key="p/1", unique_key="once")
    again = await app.enqueue(work, {}, resource_key="p/1", unique_key="once")
    assert (proxy.lost, again.created) == (1, False)
    assert await app.worker().drain(timeout=LIMIT) == 1
    assert [again.id] == RAN


# -- clocks ------------------------------------------------------------------------------------------------------------


def test_clocks_of_workers_an_hour_apart(postgres, crew):
    """Nothing starts early, late, or twice: the database's clock decides, on which both agree."""
    for seconds in ("3600", "-3600"):
        crew.start(postgres, "--clock", seconds, "--lease", "2", "--slow", "0.02", "--every", "1s")
    ids = put(postgres, *(new(("work", "fails")[n % 2], f"p/{n % 3}", max_attempts=3) for n in range(20)))
    due = time.time() + 2.0
    later = put(
        postgres, *(new("work", f"p/{n % 3}", run_at=datetime.now(UTC) + timedelta(seconds=2)) for n in range(6))
    )
    never = put(postgres, new("work", run_at=datetime.now(UTC) + timedelta(minutes=30)))
    wait(lambda: all(row.finished_at for row in states(postgres, ids + later)), 60, about=crew.said)
    wait(lambda: len(states(postgres)) > len(ids + later + never) + 1, 60, about=crew.said)  # and some ticks
    crew.stop()
    rows = states(postgres, ids + later)
    assert all(row.rescues == 0 for row in rows)
    assert {row.state for row in states(postgres, never)} == {"scheduled"}
    assert all(row.started_at.timestamp() >= due - 0.1 for row in states(postgres, later))
    assert history.check(postgres, crew.log, committed=ids + later) + crew.stranded() == []
    ticks = [row for id_, row in states(postgres).items() if id_ not in {*ids, *later, *never}]
    elapsed = max(row.created_at for row in ticks) - min(row.created_at for row in ticks)
    assert 1 <= len(ticks) <= elapsed.total_seconds() + 2  # one job for each tick, whoever made it


# -- watched -----------------------------------------------------------------------------------------------------------


def test_every_session_cut_again_and_again(postgres, crew):
    ids = put(postgres, *(new(("work", "thread", "fails")[n % 3], f"p/{n % 4}", max_attempts=3) for n in range(60)))
    for _ in range(2):
        crew.start(postgres, "--slow", "0.05", "--lease", "2")
    eye = Eye(postgres)
    wait(crew.runs, 60, about=crew.said)
    for _ in range(6):
        with psycopg.connect(address(postgres), autocommit=True) as c:
            c.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE pid <> pg_backend_pid() AND datname = current_database()"
            )
        time.sleep(0.2)
    wait(lambda: _all_done(postgres), 60, about=crew.said)
    crew.stop()
    assert history.check(postgres, crew.log, committed=ids) + eye.close() + crew.stranded() == []


def _all_done(database):
    try:
        return not unfinished(database)
    except (DatabaseUnreachable, SQLAlchemyError):
        return False
