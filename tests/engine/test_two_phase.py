"""Prepare and complete on real databases: whatever happens where, the tables afterwards tell what was committed."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections import Counter
from pathlib import Path

import psutil
import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker
from sqlmodel import Field, SQLModel
from sqlmodel.ext.asyncio.session import AsyncSession as SQLModelSession

from resilient import (
    Batch,
    Cancel,
    Fixed,
    InvalidInput,
    Job,
    Kind,
    LostLease,
    Permanent,
    Resilient,
    Retry,
    SetupError,
    Snooze,
    SyncJob,
    TransactionOpen,
    Transient,
    handler,
    testing,
)
from resilient.engine.run import executor
from tests import nursery
from tests.helpers import LIMIT, bury, until, use_up
from tests.interleaving import waiters


class Base(DeclarativeBase):
    pass


class Row(Base):
    __tablename__ = "tp_row"
    name: Mapped[str] = mapped_column(primary_key=True)


class ModelRow(SQLModel, table=True):
    __tablename__ = "tp_model_row"
    name: str = Field(primary_key=True)


SEEN: list = []
RETRY = Retry(max_attempts=3, delay=Fixed(10))


@pytest.fixture(autouse=True)
def _seen():
    SEEN.clear()


def trouble(job, place):
    """What the payload says goes wrong, at this place of the first execution."""
    what, _, where = job.payload.partition(" ")
    if job.execution == 1 and where == place:
        raise {"fail": Transient("oops"), "snooze": Snooze(10), "cancel": Cancel("no"), "die": Permanent("never")}[what]


def told(job):
    return Snooze(10) if job.payload == "told snooze" and job.execution == 1 else {"rows": job.execution}


@handler("follow")
async def follow(job: Job[str]) -> None:
    SEEN.append(("followed", job.payload, job.resource_key))


async def work(job: Job[str]) -> object:
    async with job.prepare() as session:
        session.add(Row(name=f"prepared {job.execution}"))
        trouble(job, "prepare")
    trouble(job, "between")
    async with job.complete() as session:
        session.add(Row(name=f"completed {job.execution}"))
        job.then(follow, f"of {job.execution}")
        job.after_commit(lambda: SEEN.append("committed"))
        trouble(job, "inside")
    trouble(job, "after")
    return told(job)


def work_plain(job: SyncJob[str]) -> object:
    with job.prepare() as session:
        session.add(Row(name=f"prepared {job.execution}"))
        trouble(job, "prepare")
    trouble(job, "between")
    with job.complete() as session:
        session.add(Row(name=f"completed {job.execution}"))
        job.then(follow, f"of {job.execution}")
        job.after_commit(lambda: SEEN.append("committed"))
        trouble(job, "inside")
    trouble(job, "after")
    return told(job)


WORKERS = {
    ("async", "staged"): handler("work", retry=RETRY)(work),
    ("async", "atomic"): handler("work", retry=RETRY, mode="atomic")(work),
    ("plain", "staged"): handler("work", retry=RETRY)(work_plain),
    ("plain", "atomic"): handler("work", retry=RETRY, mode="atomic")(work_plain),
}


@pytest.fixture
async def make(database):
    apps = []
    tables = [Row.__table__, ModelRow.__table__]
    database.transaction_sync(lambda c, _d: [t.create(c) for t in tables])

    def make(*handlers, **options):
        apps.append(Resilient(database, handlers=[follow, *handlers], upgrade=False, **options))
        return apps[-1]

    yield make
    for app in apps:
        await app.close()


def rows(app, table="tp_row"):
    sql = sa.text(f"SELECT name FROM {table} ORDER BY name")
    return app.database.transaction_sync(lambda c, _d: list(c.execute(sql).scalars()))


async def drain(app, **options):
    worker = app.worker(**{"concurrency": 4, **options})
    await worker.drain(timeout=LIMIT)
    return worker


async def only(app, kind="work"):
    (job,) = await app.jobs.list(kind=kind)
    return job


@pytest.fixture(params=WORKERS, ids=" ".join)
def worker_kind(request):
    return request.param


# -- where it goes wrong -------------------------------------------------------------------------------------


async def test_everything_is_committed_together(make, worker_kind):
    declared = WORKERS[worker_kind]
    app = make(declared)
    await app.enqueue(declared, "fine", resource_key="p/1")
    worker = await drain(app)
    job = await only(app)
    assert (job.state, job.result, job.attempts) == ("succeeded", {"rows": 1}, 0)
    assert rows(app) == ["completed 1", "prepared 1"]
    assert Counter(SEEN) == Counter(["committed", ("followed", "of 1", "p/1")])  # one beside the other
    assert (worker.completer.stale, worker.outcomes) == (0, {"succeeded": 2})


@pytest.mark.parametrize("place", ["prepare", "between", "inside", "after"])
@pytest.mark.parametrize("what", ["fail", "snooze"])
async def test_an_error_undoes_what_its_phase_says(make, clock, worker_kind, place, what):
    declared = WORKERS[worker_kind]
    app = make(declared)
    await app.enqueue(declared, f"{what} {place}", resource_key="p/1")
    await drain(app)
    job = await only(app)
    assert (job.state, job.attempts) == ("scheduled", 1 if what == "fail" else 0)
    kept = ["prepared 1"] if worker_kind[1] == "staged" and place != "prepare" else []
    assert rows(app) == kept
    assert SEEN == []
    assert await app.jobs.count(kind="follow") == 0
    clock.advance(11)
    await drain(app)
    assert (await only(app)).state == "succeeded"
    assert rows(app) == ["completed 2", *kept, "prepared 2"]
    assert Counter(SEEN) == Counter(["committed", ("followed", "of 2", "p/1")])  # one beside the other


@pytest.mark.parametrize(("word", "state"), [("cancel after", "cancelled"), ("die after", "dead")])
async def test_other_ends_undo_it_too(make, worker_kind, word, state):
    declared = WORKERS[worker_kind]
    app = make(declared)
    await app.enqueue(declared, word, resource_key="p/1")
    await drain(app)
    assert (await only(app)).state == state
    assert rows(app) == (["prepared 1"] if worker_kind[1] == "staged" else [])
    assert (SEEN, await app.jobs.count(kind="follow")) == ([], 0)


async def test_a_returned_snooze_undoes_it(make, worker_kind):
    declared = WORKERS[worker_kind]
    app = make(declared)
    await app.enqueue(declared, "told snooze", resource_key="p/1")
    await drain(app)
    assert ((await only(app)).state, (await only(app)).deferrals) == ("scheduled", 1)
    assert rows(app) == (["prepared 1"] if worker_kind[1] == "staged" else [])
    assert await app.jobs.count(kind="follow") == 0


async def test_a_lease_lost_before_complete_rolls_everything_back(make, worker_kind):
    is_async, mode = worker_kind[0] == "async", worker_kind[1]

    def steal(job):
        def run(c, d):
            sql = f"UPDATE resilient_job SET version = version + 1, state = 'ready' WHERE id = '{d.id(job.id)}'"
            c.exec_driver_sql(sql)

        if job.execution == 1:
            job.app.database.transaction_sync(run)

    async def robbed(job: Job[None]) -> None:
        await asyncio.to_thread(steal, job)
        async with job.complete() as session:
            session.add(Row(name=f"completed {job.execution}"))
            job.then(follow, "x")

    def robbed_plain(job: SyncJob[None]) -> None:
        steal(job)
        with job.complete() as session:
            session.add(Row(name=f"completed {job.execution}"))
            job.then(follow, "x")

    declared = handler("robbed", mode=mode)(robbed if is_async else robbed_plain)
    app = make(declared)
    await app.enqueue(declared, resource_key="p/1")
    worker = await drain(app)
    assert rows(app) == []
    assert worker.completer.stale == 1
    assert await app.jobs.count(kind="follow") == 0
    assert (await only(app, "robbed")).state == "ready"


async def test_a_lease_lost_before_prepare_commits_nothing(make):
    @handler("robbed")
    async def robbed(job: Job[None]) -> None:
        sql = f"UPDATE resilient_job SET version = version + 1, state = 'ready' WHERE '{job.id}' <> ''"
        await job.app.database.transaction(lambda c, _d: c.exec_driver_sql(sql))
        async with job.prepare() as session:
            session.add(Row(name="prepared"))
        SEEN.append("went on")

    app = make(robbed)
    await app.enqueue(robbed, resource_key="p/1")
    await drain(app)
    assert (rows(app), SEEN) == ([], [])


@pytest.mark.parametrize("phase", ["prepare", "complete"])
async def test_a_job_whose_row_somebody_has_for_a_moment_is_still_held(postgres_url, phase):
    """Its lease is being renewed, say, or a program that asks it to end has not committed yet."""

    @handler("held")
    async def held(job: Job[None]) -> None:
        renewal.execute("UPDATE resilient_job SET lease_until = lease_until")
        try:
            async with getattr(job, phase)() as session:
                session.add(Row(name=phase))
        except LostLease as error:
            SEEN.append(error)

    app = Resilient(postgres_url, handlers=[held], upgrade=False)
    app.database.transaction_sync(lambda c, _d: Row.__table__.create(c))
    await app.enqueue(held, resource_key="p/1")
    arguments = app.database.driver_arguments()
    with psycopg.connect(**arguments) as renewal, psycopg.connect(**arguments, autocommit=True) as watch:
        draining = asyncio.create_task(drain(app))
        await until(lambda: SEEN or waiters(watch))
        renewal.commit()
        await draining
    assert SEEN == []
    assert ((await only(app, "held")).state, rows(app)) == ("succeeded", [phase])
    await app.close()


@pytest.mark.parametrize("mode", ["staged", "atomic"])
@pytest.mark.parametrize("phase", ["prepare", "complete"])
async def test_a_handler_may_catch_what_its_block_raised(make, mode, phase):
    """The block is undone; the transaction around it stays usable."""

    @handler("catches", mode=mode)
    async def catches(job: Job[None]) -> None:
        async with job.prepare() as session:
            session.add(Row(name="first"))
        block = job.prepare if phase == "prepare" else job.complete
        with pytest.raises(IntegrityError):  # noqa: PT012 - the block itself raises
            async with block() as session:
                session.add(Row(name="second"))
                await session.flush()
                await session.execute(sa.insert(Row).values(name="first"))
        async with job.complete() as session:
            session.add(Row(name="third"))

    @handler("catches", mode=mode)
    def catches_plain(job: SyncJob[None]) -> None:
        with job.prepare() as session:
            session.add(Row(name="first"))
        block = job.prepare if phase == "prepare" else job.complete
        with pytest.raises(IntegrityError), block() as session:  # noqa: PT012
            session.add(Row(name="second"))
            session.flush()
            session.add(Row(name="third"))
            session.execute(sa.insert(Row).values(name="first"))
        with job.complete() as session:
            session.add(Row(name="third"))

    for declared in (catches, catches_plain):
        app = make(declared)
        await app.enqueue(declared, resource_key="p/1")
        await drain(app)
        assert {job.state for job in await app.jobs.list(kind="catches")} == {"succeeded"}
        assert rows(app) == ["first", "third"]
        app.database.transaction_sync(lambda c, _d: c.execute(sa.delete(Row)))


async def test_what_a_block_asked_for_is_undone_with_it(make, worker_kind):
    """Follow-ups and calls after the commit, where the handler catches the block's error and ends well."""

    async def tries(job: Job[None]) -> None:
        job.then(follow, "before")
        for block, word in ((job.prepare, "prepared"), (job.complete, "completed")):
            with pytest.raises(ZeroDivisionError):  # noqa: PT012 - the block itself raises
                async with block():
                    job.then(follow, word)
                    if word == "completed":
                        job.after_commit(lambda: SEEN.append("committed in vain"))
                    raise ZeroDivisionError
        async with job.complete():
            job.then(follow, "at last")
            job.after_commit(lambda: SEEN.append("committed"))

    def tries_plain(job: SyncJob[None]) -> None:
        job.then(follow, "before")
        for block, word in ((job.prepare, "prepared"), (job.complete, "completed")):
            with pytest.raises(ZeroDivisionError), block():  # noqa: PT012 - the same
                job.then(follow, word)
                if word == "completed":
                    job.after_commit(lambda: SEEN.append("committed in vain"))
                raise ZeroDivisionError
        with job.complete():
            job.then(follow, "at last")
            job.after_commit(lambda: SEEN.append("committed"))

    declared = handler("tries", mode=worker_kind[1])(tries if worker_kind[0] == "async" else tries_plain)
    app = make(declared)
    await app.enqueue(declared, resource_key="p/1")
    await drain(app)
    jobs = [("followed", "at last", "p/1"), ("followed", "before", "p/1")]
    assert Counter(SEEN) == Counter(["committed", *jobs])  # one beside the other


async def test_an_interruption_rolls_back(make):
    @handler("hangs", timeout=600, retry=Retry(max_attempts=1))
    async def hangs(job: Job[None]) -> None:
        async with job.complete() as session:
            session.add(Row(name="x"))
        use_up(job)
        await asyncio.Event().wait()

    app = make(hangs)
    await app.enqueue(hangs, resource_key="p/1")
    await drain(app)
    assert (await only(app, "hangs")).last_error_kind == "timeout"
    assert rows(app) == []


async def test_a_thread_that_is_given_up_commits_nothing_later(make, monkeypatch):
    go_on, done = threading.Event(), threading.Event()

    @handler("hangs", timeout=600, retry=Retry(max_attempts=1))
    def hangs(job: SyncJob[None]) -> None:
        try:
            with job.complete() as session:
                session.add(Row(name="x"))
                job.then(follow, "x")
            use_up(job)
            assert go_on.wait(LIMIT)
        finally:
            done.set()

    app = make(hangs)
    await app.enqueue(hangs, resource_key="p/1")
    monkeypatch.setattr(executor, "CANCEL_PATIENCE", 0.2)
    worker = app.worker(concurrency=2, patience=0.2)
    task = asyncio.create_task(worker.run(signals=False))
    while not worker.executor.stuck or worker.executor.aside:  # noqa: ASYNC110 - given up
        await asyncio.sleep(0.02)
    go_on.set()
    assert await asyncio.to_thread(done.wait, LIMIT)
    while worker.executor.stuck:  # noqa: ASYNC110 - until its thread has ended
        await asyncio.sleep(0.02)
    worker.stop()
    await asyncio.wait_for(task, LIMIT)
    assert ((await only(app, "hangs")).last_error_kind, rows(app)) == ("timeout", [])
    assert await app.jobs.count(kind="follow") == 0


@pytest.mark.parametrize("mode", ["staged", "atomic"])
@pytest.mark.parametrize("where", ["inside", "commit"])
async def test_a_transaction_the_database_broke_off_is_a_conflict(make, clock, mode, where):
    """A deadlock's victim has no bug: nothing was committed, and it runs again soon."""

    class Deadlock(Exception):
        sqlstate = "40P01"

    def broken_off(*_):
        raise OperationalError("UPDATE x", {}, Deadlock())

    @handler("victim", mode=mode, retry=RETRY)
    def victim(job: SyncJob[None]) -> None:
        with job.complete() as session:
            session.add(Row(name=f"row {job.execution}"))
            if job.execution == 1 and where == "inside":
                broken_off()
            if job.execution == 1:
                event.listen(session, "before_commit", lambda s: s.in_nested_transaction() or broken_off())

    app = make(victim)
    await app.enqueue(victim, resource_key="p/1")
    await drain(app)
    job = await only(app, "victim")
    assert (job.state, job.last_error_kind, job.last_error_code) == ("scheduled", "conflict", "40P01")
    assert rows(app) == []
    clock.advance(60)
    await drain(app)
    assert rows(app) == ["row 2"]


# -- the commit itself ---------------------------------------------------------------------------------------


def flaky_sessions(database_url, when):
    """A factory whose sessions fail once at their commit: before it, or after it (the answer is lost)."""
    left = [1]

    def lost():
        left[0] = 0
        return OperationalError("COMMIT", {}, Exception("connection lost"))

    class Flaky(AsyncSession):
        async def commit(self):
            if when == "before" and left[0]:
                raise lost()
            await super().commit()
            if when == "after" and left[0]:
                raise lost()

    class FlakySync(Session):
        def commit(self):
            if when == "before" and left[0]:
                raise lost()
            super().commit()
            if when == "after" and left[0]:
                raise lost()

    return Flaky, FlakySync


async def one_row(job: Job[None]) -> str:
    async with job.complete() as session:
        session.add(Row(name=f"row {job.execution}"))
        job.then(follow, "x")
    return "done"


def one_row_plain(job: SyncJob[None]) -> str:
    with job.complete() as session:
        session.add(Row(name=f"row {job.execution}"))
        job.then(follow, "x")
    return "done"


@pytest.mark.parametrize("fn", [one_row, one_row_plain])
@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_commit_whose_answer_was_lost_is_recognised(make, clock, database_url, fn, when):
    declared = handler("one", retry=RETRY)(fn)
    app = make(declared)
    asynchronous, synchronous = flaky_sessions(database_url, when)
    if fn is one_row:
        url = app.database.url.set(drivername="sqlite+aiosqlite" if app.database.is_sqlite else "postgresql+psycopg")
        engine = create_async_engine(url)
        app.session_engines.factory = lambda: asynchronous(engine)
    else:
        app.session_engines.factory = lambda: synchronous(app.database.sync_engine)
    await app.enqueue(declared, resource_key="p/1")
    worker = await drain(app)
    assert worker.completer.stale == 0
    if when == "before":
        assert (rows(app), (await only(app, "one")).state) == ([], "scheduled")
        clock.advance(11)
        await drain(app)
    assert rows(app) == ["row 1" if when == "after" else "row 2"]
    job = await only(app, "one")
    assert (job.state, job.result, job.executions) == ("succeeded", "done", 1 if when == "after" else 2)
    assert await app.jobs.count(kind="follow") == 1
    if fn is one_row:
        await engine.dispose()


@pytest.mark.parametrize("wish", [{}, {"delay": 60}, {"idempotency_key": "mine"}])
async def test_a_success_that_runs_once_more_is_recognised_too(make, clock, database_url, wish):
    @handler("again")
    def again(job: SyncJob[None]) -> None:
        if job.execution == 1:
            options = {"unique_key": "u", "unique_until": "finish", "while_running": "once_more"}
            options |= {"on_conflict": "replace", **wish} if wish else {}
            job.app.sync.enqueue(again, resource_key="p/1", **options)
        with job.complete() as session:
            session.add(Row(name=f"row {job.execution}"))
            job.after_commit(lambda: SEEN.append(job.execution))

    app = make(again)
    _, synchronous = flaky_sessions(database_url, "after")
    app.session_engines.factory = lambda: synchronous(app.database.sync_engine)
    await app.enqueue(again, resource_key="p/1", unique_key="u", unique_until="finish")
    worker = app.worker(concurrency=1)  # the next execution begins when this one has looked
    await worker.drain()
    counts = worker.outcomes
    if "delay" in wish:
        clock.advance(60)
        counts = counts | (await drain(app)).outcomes
    assert (rows(app), SEEN) == (["row 1", "row 2"], [1, 2])
    assert (worker.completer.stale, counts) == (0, {"succeeded": 1 if "delay" in wish else 2})


async def test_nor_is_its_next_run_taken_for_another_workers(make, database_url):
    """It was claimed again before this one could look: what was asked for after the commit is done all the same."""
    runs = []

    @handler("again")
    def again(job: SyncJob[None]) -> None:
        runs.append(job.execution)
        if job.execution == 1:
            job.app.sync.enqueue(
                again, resource_key="p/1", unique_key="u", unique_until="finish", while_running="once_more"
            )
            with job.complete():
                job.after_commit(lambda: SEEN.append("told"))

    class Lost(Session):
        def commit(self):
            super().commit()
            asyncio.run_coroutine_threadsafe(other.drain(timeout=LIMIT), loop).result(LIMIT)
            raise OperationalError("COMMIT", {}, Exception("connection lost"))

    app, loop = make(again), asyncio.get_running_loop()
    other = app.worker()
    app.session_engines.factory = lambda: Lost(app.database.sync_engine)
    await app.enqueue(again, resource_key="p/1", unique_key="u", unique_until="finish")
    worker = await drain(app, concurrency=1)
    assert (runs, SEEN) == ([1, 2], ["told"])
    assert (worker.completer.stale, worker.outcomes) == (0, {"succeeded": 1})


@pytest.mark.parametrize("answer", ["comes", "is lost"])
@pytest.mark.parametrize("is_async", [True, False], ids=["async", "plain"])
async def test_a_heartbeat_that_sees_the_end_first_takes_nothing_away(make, is_async, answer):
    """It finds the fence gone. That was this very commit, and no other worker's."""
    loop, held = asyncio.get_running_loop(), threading.Event()

    def beat():
        worker.heartbeat._beat()
        loop.call_soon_threadsafe(held.set)  # after what the beat tells
        assert held.wait(LIMIT)
        if answer == "is lost":
            raise OperationalError("COMMIT", {}, Exception("connection lost"))

    class Late(AsyncSession):
        async def commit(self):
            await super().commit()
            await asyncio.to_thread(beat)

    class LateSync(Session):
        def commit(self):
            super().commit()
            beat()

    @handler("late")
    async def late(job: Job[None]) -> None:
        async with job.complete():
            job.after_commit(lambda: SEEN.append("told"))

    @handler("late")
    def late_plain(job: SyncJob[None]) -> None:
        with job.complete():
            job.after_commit(lambda: SEEN.append("told"))

    app = make(late if is_async else late_plain)
    if is_async:
        url = app.database.url.set(drivername="sqlite+aiosqlite" if app.database.is_sqlite else "postgresql+psycopg")
        engine = create_async_engine(url)
        app.session_engines.factory = lambda: Late(engine)
    else:
        app.session_engines.factory = lambda: LateSync(app.database.sync_engine)
    await app.enqueue("late", resource_key="p/1")
    worker = app.worker()
    await worker.drain(timeout=LIMIT)
    assert ((await only(app, "late")).state, SEEN) == ("succeeded", ["told"])
    assert (worker.completer.stale, worker.outcomes) == (0, {"succeeded": 1})
    if is_async:
        await engine.dispose()


@pytest.mark.parametrize("when", ["in the commit", "after it"])
async def test_a_commit_and_what_follows_it_are_not_interrupted(make, when):
    """Broken off in the middle, nobody would know whether it took place."""
    interrupted = []

    async def interrupt(place):
        if place == when and not interrupted:
            interrupted.extend(worker.executor.running.values())
            for one in interrupted:
                worker.executor.interrupt(one, "timeout")
            for _ in range(20):  # so that a cancellation arrives
                await asyncio.sleep(0)

    class Slow(AsyncSession):
        async def commit(self):
            await interrupt("in the commit")
            await super().commit()

    async def slow():
        await interrupt("after it")
        SEEN.append("told")

    @handler("brief", retry=Retry(max_attempts=1))
    async def brief(job: Job[None]) -> str:
        async with job.complete() as session:
            session.add(Row(name="x"))
            job.after_commit(slow)
        return "done"

    app = make(brief)
    url = app.database.url.set(drivername="sqlite+aiosqlite" if app.database.is_sqlite else "postgresql+psycopg")
    engine = create_async_engine(url)
    app.session_engines.factory = lambda: Slow(engine)
    await app.enqueue(brief, resource_key="p/1")
    worker = app.worker()
    await worker.drain(timeout=LIMIT)
    job = await only(app, "brief")
    assert (job.state, job.result, rows(app), SEEN) == ("succeeded", "done", ["x"], ["told"])
    assert (worker.completer.stale, len(interrupted)) == (0, 1)
    await engine.dispose()


async def many_rows(job: Job[int]) -> None:
    async with job.complete() as session:
        session.add(Row(name=f"row {job.payload}"))


def many_rows_plain(job: SyncJob[int]) -> None:
    with job.complete() as session:
        session.add(Row(name=f"row {job.payload}"))


@pytest.mark.parametrize("fn", [many_rows, many_rows_plain])
async def test_many_at_once(make, fn):
    many = handler("many")(fn)
    app = make(many)
    await app.enqueue_many(many, range(40), resource_key="p/1")
    worker = await drain(app, concurrency=10)
    assert len(rows(app)) == 40
    assert worker.outcomes == {"succeeded": 40}


async def test_a_slot_under_a_cap_is_freed_by_the_commit(make):
    capped = handler("capped")(many_rows)
    app = make(capped, concurrency={"p/*": 1})
    await app.enqueue_many(capped, range(5), resource_key="p/1")
    await drain(app)
    assert len(rows(app)) == 5


@pytest.mark.parametrize("place", ["inside", "after"])
async def test_those_who_wait_for_it_wait_for_the_commit(make, clock, place):
    """Jobs behind it, by dependency and by ordering key, stay blocked while its completion is rolled back."""

    @handler("head", retry=RETRY)
    async def head(job: Job[str]) -> None:
        async with job.complete() as session:
            session.add(Row(name=f"row {job.execution}"))
            trouble(job, "inside")
        trouble(job, "after")

    app = make(head)
    first = await app.enqueue(head, f"fail {place}", resource_key="p/1", ordering_key="k")
    await app.enqueue(follow, "in line", resource_key="p/1", ordering_key="k")
    await app.enqueue(follow, "depends", resource_key="p/2", after=[first.id])
    await drain(app)
    assert {job.state for job in await app.jobs.list(kind="follow")} == {"blocked"}
    clock.advance(11)
    await drain(app)
    assert sorted(x[1] for x in SEEN) == ["depends", "in line"]
    assert rows(app) == ["row 2"]


@pytest.mark.parametrize("plain", [False, True])
async def test_handlers_do_not_take_the_engine_s_connections(postgres_url, plain):
    """Of a process's ten connections their transactions hold four: the others wait, and the engine goes on."""
    go_on = threading.Event()

    @handler("holds")
    async def holds(job: Job[int]) -> None:
        async with job.complete() as session:
            session.add(Row(name=str(job.payload)))
            SEEN.append(job.id)
            while not go_on.is_set():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    @handler("holds")
    def holds_plain(job: SyncJob[int]) -> None:
        with job.complete() as session:
            session.add(Row(name=str(job.payload)))
            SEEN.append(job.id)
            assert go_on.wait(LIMIT)

    declared = holds_plain if plain else holds
    app = Resilient(postgres_url, handlers=[declared], upgrade=False)
    app.database.transaction_sync(lambda c, _d: Row.__table__.create(c))
    await app.enqueue_many(declared, range(20), resource_key="p/1")
    draining = asyncio.create_task(app.worker(concurrency=20).drain(timeout=LIMIT))
    while len(SEEN) < 4:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await asyncio.wait_for(app.jobs.count(), LIMIT)
    await asyncio.wait_for(asyncio.to_thread(app.sync.jobs.count), LIMIT)
    assert len(SEEN) == app.database.connections.of_handlers == 4
    go_on.set()
    assert await draining == 20
    assert len(rows(app)) == 20
    await app.close()


async def test_once_more(make):
    @handler("again")
    async def again(job: Job[None]) -> None:
        if job.execution == 1:
            await job.app.enqueue(
                again, resource_key="p/1", unique_key="u", unique_until="finish", while_running="once_more"
            )
        async with job.complete() as session:
            session.add(Row(name=f"row {job.execution}"))

    app = make(again)
    await app.enqueue(again, resource_key="p/1", unique_key="u", unique_until="finish")
    await drain(app)
    assert rows(app) == ["row 1", "row 2"]
    assert (await only(app, "again")).state == "succeeded"


async def test_a_reconcile_hook_may_complete(make):
    async def look(job: Job[None]) -> bool:
        async with job.complete() as session:
            session.add(Row(name="looked"))
            job.then(follow, "x")
        return True

    @handler("sends", reconcile=look)
    async def sends(job: Job[None]) -> None: ...

    app = make(sends)
    await app.enqueue(sends, resource_key="p/1")
    sql = "UPDATE resilient_job SET sent = '{\"x\": {}}'"
    app.database.transaction_sync(lambda c, _d: c.exec_driver_sql(sql))
    await drain(app)
    assert ((await only(app, "sends")).state, rows(app)) == ("succeeded", ["looked"])
    assert await app.jobs.count(kind="follow") == 1


# -- the user's sessions ---------------------------------------------------------------------------------------


async def test_a_database_in_memory_has_no_sessions(worker_kind):
    """It has one connection: what the engine does meanwhile would be part of the handler's transaction."""
    app = Resilient("sqlite://", handlers=[follow, WORKERS[worker_kind]])
    await app.enqueue("work", "fine", resource_key="p/1")
    await drain(app)
    job = await only(app)
    assert job.state == "scheduled"
    assert "a database in memory has no second connection for sessions: use a file" in job.last_error
    await app.close()


async def test_sqlmodel_and_sessions_of_the_user_s_own(make):
    @handler("models")
    async def models(job: Job[str]) -> None:
        async with job.prepare() as session:
            assert isinstance(session, SQLModelSession)
            session.add(ModelRow(name="prepared"))
        async with job.complete() as session:
            found = (await session.exec(sa.select(ModelRow))).scalars().all()
            session.add(ModelRow(name=f"completed after {len(found)}"))

    app = make(models)
    url = app.database.url.set(drivername="sqlite+aiosqlite" if app.database.is_sqlite else "postgresql+psycopg")
    engine = create_async_engine(url)
    app.session_engines.factory = async_sessionmaker(engine, class_=SQLModelSession)
    await app.enqueue(models, "x", resource_key="p/1")
    await drain(app)
    assert rows(app, "tp_model_row") == ["completed after 1", "prepared"]
    await engine.dispose()


@pytest.mark.parametrize("word", ["fine", "fail inside", "fail after"])
async def test_the_session_s_own_hooks_fire_on_commits_alone(make, clock, word):  # the retry is never due
    class Hooked(Session):
        pass

    @event.listens_for(Hooked, "after_commit")
    def _(session):
        SEEN.append(session)

    @handler("hooked")
    def hooked(job: SyncJob[str]) -> None:
        with job.complete() as session:
            session.add(Row(name="x"))
            trouble(job, "inside")
        trouble(job, "after")

    app = make(hooked)
    app.session_engines.factory = lambda: Hooked(app.database.sync_engine)
    await app.enqueue(hooked, word, resource_key="p/1")
    await drain(app)
    assert len(SEEN) == (word == "fine")


async def test_an_enqueue_in_the_session_is_committed_with_it(make, clock):
    @handler("orders", retry=RETRY)
    async def orders(job: Job[str]) -> None:
        async with job.complete() as session:
            await job.app.enqueue(follow, "plain", resource_key="q/1", session=session)
            await job.app.enqueue(follow, "unique", resource_key="q/1", session=session, unique_key="u")
        trouble(job, "after")

    app = make(orders)
    await app.enqueue(orders, "fail after", resource_key="p/1")
    await drain(app)
    assert await app.jobs.count(kind="follow") == 0
    clock.advance(11)
    await drain(app)
    assert await app.jobs.count(kind="follow", state="succeeded") == 2


async def test_what_is_refused(make):
    @handler("refused", retry=Retry(max_attempts=1))
    async def refused(job: Job[None]) -> None:
        with pytest.raises(InvalidInput, match="needs the transaction"):
            job.after_commit(lambda: None)
        async with job.prepare() as session:
            with pytest.raises(InvalidInput, match="has a transaction open already"):
                async with job.complete():
                    pass
            with pytest.raises(TransactionOpen):
                await job.client.get("http://127.0.0.1:9/")
            with pytest.raises(TransactionOpen, match="progress"):
                await job.progress(1)
        async with job.complete() as session:
            session.add(Row(name="x"))
            with pytest.raises(Exception, match="do not commit"):
                await session.commit()
            await session.rollback()
            session.add(Row(name="y"))
        for block in (job.prepare, job.complete):
            with pytest.raises(InvalidInput, match="committed together"):
                async with block():
                    pass
        with pytest.raises(TransactionOpen):
            await job.client.get("http://127.0.0.1:9/")
        with pytest.raises(InvalidInput):
            job.then("unheard of", 1)
        with pytest.raises(InvalidInput):
            job.then(follow, "x", priority=1000)

    app = make(refused)
    await app.enqueue(refused, resource_key="p/1")
    await drain(app)
    job = await only(app, "refused")
    assert (job.state, job.last_error) == ("succeeded", None)


async def test_a_block_within_another_is_refused_and_ends_nothing(make):
    """Its error, caught, rolled back the rows around it: the job succeeded without them."""

    @handler("nested")
    async def nested(job: Job[None]) -> None:
        async with job.complete() as session:
            session.add(Row(name="before"))
            with pytest.raises(InvalidInput, match="has a transaction open already"):
                async with job.complete():
                    raise ZeroDivisionError
            session.add(Row(name="after"))

    @handler("nested")
    def nested_plain(job: SyncJob[None]) -> None:
        with job.complete() as session:
            session.add(Row(name="before"))
            with pytest.raises(InvalidInput, match="has a transaction open already"), job.complete():
                raise ZeroDivisionError
            session.add(Row(name="after"))

    @handler("nested")
    async def gathered(job: Job[None]) -> None:
        is_open, was_refused = asyncio.Event(), asyncio.Event()

        async def write():
            async with job.complete() as session:
                session.add(Row(name="before"))
                is_open.set()
                await was_refused.wait()
                session.add(Row(name="after"))

        async def fail():
            await is_open.wait()
            with pytest.raises(InvalidInput, match="has a transaction open already"):
                async with job.complete():
                    raise ZeroDivisionError
            was_refused.set()

        await asyncio.gather(write(), fail())

    for declared in (nested, nested_plain, gathered):
        app = make(declared)
        await app.enqueue(declared, resource_key="p/1")
        await drain(app)
        assert {job.state for job in await app.jobs.list(kind="nested")} == {"succeeded"}
        assert rows(app) == ["after", "before"]
        app.database.transaction_sync(lambda c, _d: c.execute(sa.delete(Row)))


async def test_a_block_that_fails_takes_no_follow_up_of_a_task_beside_it(make):
    @handler("gathered")
    async def gathered(job: Job[None]) -> None:
        is_open, is_said = asyncio.Event(), asyncio.Event()

        async def fail():
            with contextlib.suppress(ZeroDivisionError):
                async with job.prepare():
                    job.then(follow, "within")
                    is_open.set()
                    await is_said.wait()
                    raise ZeroDivisionError

        async def say():
            await is_open.wait()
            job.then(follow, "beside")
            is_said.set()

        job.then(follow, "before")
        await asyncio.gather(fail(), say())
        job.then(follow, "after")

    app = make(gathered)
    await app.enqueue(gathered, resource_key="p/1")
    await drain(app)
    assert sorted(payload for _, payload, _ in SEEN) == ["after", "before", "beside"]


async def test_a_block_takes_back_what_a_task_of_its_own_asked_for(make):
    @handler("gathered")
    async def gathered(job: Job[None]) -> None:
        async def say():
            job.then(follow, "within")

        with contextlib.suppress(ZeroDivisionError):
            async with job.prepare():
                await asyncio.gather(say())
                raise ZeroDivisionError

    app = make(gathered)
    await app.enqueue(gathered, resource_key="p/1")
    await drain(app)
    assert SEEN == []


@pytest.mark.parametrize("own", [False, True], ids=["ours", "the program's"])
async def test_a_session_is_refused_after_its_end(make, own):
    """SQLAlchemy began another transaction: what was written there was lost, and its connection with it."""
    sessions = []

    @handler("late")
    async def late(job: Job[None]) -> None:
        async with job.prepare() as session:
            session.add(Row(name="prepared"))
        with pytest.raises(InvalidInput, match="has ended"):
            await session.execute(sa.text("SELECT 1"))
        session.add(Row(name="never"))
        with pytest.raises(InvalidInput, match="has ended"):
            await session.flush()
        async with job.complete() as session:
            sessions.append(session)

    @handler("late")
    def late_plain(job: SyncJob[None]) -> None:
        with job.prepare() as session:
            session.add(Row(name="plain"))
        with pytest.raises(InvalidInput, match="has ended"):
            session.execute(sa.text("SELECT 1"))
        with job.complete() as session:
            sessions.append(session)

    for declared in (late, late_plain):
        app = make(declared)
        if own:
            engines = app.session_engines
            asynchronous, synchronous = async_sessionmaker(engines.asynchronous), sessionmaker(engines.synchronous)
            engines.factory = asynchronous if declared is late else synchronous
        await app.enqueue(declared, resource_key="p/1")
        await drain(app)
    assert {job.state for job in await app.jobs.list(kind="late")} == {"succeeded"}
    assert rows(app) == ["plain", "prepared"]
    with pytest.raises(InvalidInput, match="has ended"):
        await sessions[0].execute(sa.text("SELECT 1"))
    with pytest.raises(InvalidInput, match="has ended"):
        sessions[1].execute(sa.text("SELECT 1"))


async def test_a_session_that_its_thread_keeps_goes_on(make):
    """The program uses it beside the blocks, too: Flask's, say."""

    @handler("scoped")
    def scoped(job: SyncJob[None]) -> None:
        for name in ("first", "second"):
            with job.prepare() as session:
                session.add(Row(name=name))
            SEEN.append(len(registry().execute(sa.text("SELECT name FROM tp_row")).all()))
            registry.remove()

    app = make(scoped)
    registry = scoped_session(sessionmaker(app.database.sync_engine))
    app.session_engines.factory = registry
    await app.enqueue(scoped, resource_key="p/1")
    await drain(app)
    assert (SEEN, rows(app)) == ([1, 2], ["first", "second"])


@pytest.mark.parametrize("own", ["0", "7s"])
async def test_a_stopped_process_does_not_keep_rows_locked_for_ever(postgres_url, own):
    @handler("looks", timeout=50)
    async def looks(job: Job[None]) -> None:
        for block in (job.prepare, job.complete):
            async with block() as session:
                SEEN.append(await session.scalar(sa.text("SHOW idle_in_transaction_session_timeout")))

    app = Resilient(postgres_url, handlers=[looks], upgrade=False)
    name = app.database.url.database
    set_own = f"ALTER DATABASE {name} SET idle_in_transaction_session_timeout = '{own}'"
    app.database.transaction_sync(lambda c, _d: c.exec_driver_sql(set_own))
    await app.enqueue(looks, resource_key="p/1")
    await drain(app)
    assert (["1min", "1min"] if own == "0" else ["7s", "7s"]) == SEEN
    await app.close()


async def test_a_batch_has_none(make):
    @handler("many", batch=5, retry=Retry(max_attempts=1))
    async def many(jobs: Batch[int]) -> None:
        async with jobs[0].complete():
            pass

    app = make(many)
    await app.enqueue(many, 1, resource_key="p/1")
    await drain(app)
    assert "in a batch handler" in (await only(app, "many")).last_error


@pytest.mark.parametrize("options", [{"mode": "both"}, {"mode": "atomic", "batch": 2}])
def test_modes_are_checked(options):
    with pytest.raises(SetupError, match="mode of handler"):
        handler("x", **options)


async def test_the_test_kit_gives_the_session_it_was_given():
    session = object()
    job = testing.job("fine", session=session)

    async def fn(job):
        async with job.prepare() as first, job.complete() as second:
            job.then(follow, "x", delay=5)
            job.after_commit(list)
        return first, second

    assert await fn(job) == (session, session)
    bench = testing.bench_of(job)
    assert bench.followed == [("follow", "x", None, {"delay": 5})]
    assert bench.after == [list]
    plain = testing.sync_job("fine", session=session)
    with plain.prepare() as first, plain.complete() as second:
        assert (first, second) == (session, session)


# -- follow-up jobs ------------------------------------------------------------------------------------------


@handler("starts", retry=RETRY)
async def starts(job: Job[str]) -> None:
    job.then(follow, "default")
    job.then(follow, "elsewhere", resource_key="q/9", tags={"a": "b"}, delay=5)
    job.then("follow", "once", unique_key="u")
    job.then("follow", "once", unique_key="u")
    trouble(job, "after")


@handler("starts", retry=RETRY)
def starts_plain(job: SyncJob[str]) -> None:
    job.then(follow, "default")
    job.then(follow, "elsewhere", resource_key="q/9", tags={"a": "b"}, delay=5)
    job.then("follow", "once", unique_key="u")
    job.then("follow", "once", unique_key="u")
    trouble(job, "after")


@pytest.mark.parametrize("declared", [starts, starts_plain])
async def test_follow_ups_exist_only_if_the_job_succeeds(make, clock, declared):
    app = make(declared)
    await app.enqueue(declared, "fail after", resource_key="p/1")
    await drain(app)
    assert await app.jobs.count(kind="follow") == 0
    clock.advance(11)
    await drain(app)
    found = {job.payload: job for job in await app.jobs.list(kind="follow")}
    assert {name: (job.state, job.resource_key) for name, job in found.items()} == {
        "default": ("succeeded", "p/1"), "elsewhere": ("scheduled", "q/9"), "once": ("succeeded", "p/1"),
    }  # fmt: skip
    assert found["elsewhere"].tags == {"a": "b"}


@pytest.mark.parametrize("staged", [True, False])
async def test_a_follow_up_that_cannot_be_written_fails_its_job(make, staged):
    @handler("clashes", retry=Retry(max_attempts=1))
    async def clashes(job: Job[None]) -> None:
        job.then(follow, "x", unique_key="u", on_conflict="raise")
        if staged:
            async with job.complete() as session:
                session.add(Row(name="x"))

    @handler("fine")
    async def fine(job: Job[None]) -> None:
        job.then(follow, "y")

    app = make(clashes, fine)
    await app.enqueue(follow, "first", resource_key="p/1", unique_key="u", delay=60)
    await app.enqueue_many(fine, [None] * 5, resource_key="p/1")
    await app.enqueue(clashes, resource_key="p/1")
    await app.enqueue_many(fine, [None] * 5, resource_key="p/1")
    await drain(app, concurrency=20)
    job = await only(app, "clashes")
    assert (job.state, job.last_error_kind) == ("dead", "bug")
    assert "already holds unique_key" in job.last_error
    assert rows(app) == []
    assert await app.jobs.count(kind="fine", state="succeeded") == 10
    assert await app.jobs.count(kind="follow", state="succeeded") == 10


async def test_a_lost_answer_writes_no_follow_up_twice(make, monkeypatch):
    @handler("starts")
    async def one(job: Job[None]) -> None:
        job.then(follow, "x", delay=60)

    app = make(one)
    await app.enqueue(one, resource_key="p/1")
    worker = app.worker()
    original, failures = app.database.transaction, []

    async def transaction(fn, *args, **kwargs):
        found = await original(fn, *args, **kwargs)
        if kwargs.get("follow_ups") and not failures:
            failures.append(1)
            raise ConnectionError("the answer is lost")
        return found

    monkeypatch.setattr(app.database, "transaction", transaction)
    await worker.drain(timeout=LIMIT)
    assert failures
    assert (await only(app, "starts")).state == "succeeded"
    assert await app.jobs.count(kind="follow") == 1
    assert worker.completer.stale == 0


async def test_a_batch_s_jobs_have_follow_ups_of_their_own(make):
    @handler("many", batch=5, retry=RETRY)
    async def many(jobs: Batch[int]) -> None:
        for job in jobs:
            job.then(follow, f"of {job.payload}")
        jobs.succeed(jobs[0])
        jobs.fail(jobs[1], Transient())

    app = make(many)
    await app.enqueue_many(many, range(3), resource_key="p/1")
    await drain(app)
    assert sorted(x[1] for x in SEEN) == ["of 0", "of 2"]


async def test_a_chain_of_follow_ups_runs_to_its_end(make):
    @handler("chain")
    def chain(job: SyncJob[int]) -> int:
        if job.payload < 5:
            job.then(chain, job.payload + 1)
        return job.payload

    app = make(chain)
    await app.enqueue(chain, 0, resource_key="p/1")
    await drain(app)
    assert sorted(job.result for job in await app.jobs.list(kind="chain")) == [0, 1, 2, 3, 4, 5]


# -- rescheduling ----------------------------------------------------------------------------------------------


async def test_a_job_may_retry_without_end(make, clock):
    @handler("endless", retry=Retry(max_attempts=None, delay=Fixed(10)))
    async def endless(job: Job[None]) -> None:
        async with job.complete() as session:
            session.add(Row(name=f"row {job.attempt}"))
        if job.attempt < 15:
            raise Transient("again")

    app = make(endless, breakers={})
    await app.enqueue(endless, resource_key="p/1")
    for _ in range(80):
        await drain(app)
        if (await only(app, "endless")).state == "succeeded":
            break
        clock.advance(60)
    job = await only(app, "endless")
    assert (job.state, job.attempts, rows(app)) == ("succeeded", 14, ["row 15"])


# -- killed workers --------------------------------------------------------------------------------------------

CHILD = Path(__file__).with_name("two_phase_child.py")


async def test_a_killed_worker_leaves_nothing_half_done_and_nothing_twice(make, database_url, backend):
    """Killed in the block, before the commit, and right after it: one effect and one follow-up job come of it all."""
    app, kind = make(), "plain" if backend == "sqlite" else "async"
    app.database.transaction_sync(lambda c, _d: c.exec_driver_sql("CREATE TABLE effect (name TEXT)"))
    declared = Kind(kind)
    done = await Resilient(app.database, kinds=[declared], upgrade=False).enqueue(declared, resource_key="p/1")
    for where in ("inside", "after", "committed"):
        code = await run_child(database_url, where)
        assert code == -signal.SIGKILL
        await bury(app)
        assert rows(app, "effect") == ([kind] if where == "committed" else [])
    job = await app.jobs.get(done.id)
    assert (job.state, job.result) == ("succeeded", "done")
    assert job.rescues >= 2
    assert await app.jobs.count(kind="next", state="ready") == 1
    assert await run_child(database_url, "committed") == 0  # nothing is left to do but the follow-up job
    assert rows(app, "effect") == [kind]
    assert await app.jobs.count(kind="next", state="succeeded") == 1


async def test_a_worker_that_was_frozen_beyond_its_lease_commits_nothing(postgres_url):
    declared = Kind("async")
    app = Resilient(postgres_url, kinds=[declared], upgrade=False)
    app.database.transaction_sync(lambda c, _d: c.exec_driver_sql("CREATE TABLE effect (name TEXT)"))
    await app.enqueue(declared, resource_key="p/1")
    frozen = nursery.start(CHILD, postgres_url, "stopped")
    try:
        while psutil.Process(frozen.pid).status() != psutil.STATUS_STOPPED:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        await bury(app)
        assert await run_child(postgres_url, "never") == 0  # another worker takes the job over and completes it
        assert rows(app, "effect") == ["async"]
        frozen.send_signal(signal.SIGCONT)
        assert await asyncio.to_thread(frozen.wait, LIMIT) == 0
    finally:
        frozen.kill()
        frozen.wait()
    assert rows(app, "effect") == ["async"]
    assert await app.jobs.count(kind="next") == 1
    assert (await only(app, "async")).state == "succeeded"
    await app.close()


async def run_child(url, where):
    return await asyncio.to_thread(nursery.start(CHILD, url, where).wait, LIMIT)
