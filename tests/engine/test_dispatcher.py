"""How much a worker claims in advance, and that what it parked is looked at when it may go on."""

from __future__ import annotations

import asyncio
import functools
import random
import time
from datetime import timedelta
from functools import partial
from uuid import uuid4

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from resilient import Item, Job, Resilient, Throttled, handler
from resilient.core.gates.policy import Policies
from resilient.engine.run import dispatcher, sweeper
from resilient.engine.run.dispatcher import Dispatcher
from resilient.engine.run.services import idle_pause
from resilient.store.gates import resources
from resilient.store.jobs import claim
from resilient.store.jobs import insert as jobs
from tests.helpers import LIMIT, until


class Clock:
    def __init__(self):
        self.time = 100.0

    def __call__(self):
        return self.time


def make(clock, concurrency=10, database=None):
    return Dispatcher(
        database, worker_id="w", kinds=["k"], concurrency=concurrency, lease=timedelta(seconds=60), policies=Policies(),
        monotonic=clock, rng=random.Random(1),
    )  # fmt: skip


def run_for(dispatcher, clock, seconds, per_second, total=0):
    for _ in range(int(seconds * 20)):
        clock.time += 0.05
        total += per_second * 0.05
        dispatcher.ended(int(total))
    return int(total)


def put(database, *keys, priority=0):
    database.transaction_sync(jobs.insert, [jobs.NewJob(uuid4(), "k", key, "{}", priority=priority) for key in keys])


async def claimed(dispatcher, count, polls=400):
    """The keys of the next jobs, one a claim."""
    found = []
    for _ in range(polls):
        brought, _ = await dispatcher.poll(1)
        found += [job.resource_key for job in brought.jobs] if brought else []
        if len(found) >= count:
            break
    return found


async def test_the_oldest_is_served_now_and_then_however_much_urgent_work_there_is(database):
    put(database, "a/patient")
    put(database, *(f"a/{n}" for n in range(40)), priority=9)
    found = await claimed(make(Clock(), database=database), 25)
    assert len(found) == 25
    assert "a/patient" in found


async def test_gone_turns_are_not_read_again_and_one_that_commits_late_is_found(database, monkeypatch):
    """Ids are drawn before they commit: one below those already seen may appear at any time."""
    asks, real = [], claim.claim

    @functools.wraps(real)
    def noting(c, d, ask):
        asks.append(ask)
        return real(c, d, ask)

    monkeypatch.setattr(claim, "claim", noting)
    put(database, *(f"a/{n}" for n in range(20)))
    late = "SELECT id FROM {turn} WHERE resource_key = 'a/0'"
    (id_,) = database.transaction_sync(lambda c, d: d.run(c, late).one())
    database.transaction_sync(lambda c, d: d.run(c, "DELETE FROM {turn} WHERE id = :i RETURNING 1", {"i": id_}).all())
    database.transaction_sync(resources.ensure, ["a", *(f"a/{n}" for n in range(20))])
    clock = Clock()
    dispatcher = make(clock, database=database)
    assert len(await claimed(dispatcher, 15)) == 15
    assert max(ask.low for ask in asks) > id_
    put_back = "INSERT INTO {turn} (id, resource_key, priority) VALUES (:i, 'a/0', 0) RETURNING 1"
    database.transaction_sync(lambda c, d: d.run(c, put_back, {"i": id_}).all())
    dispatcher._looks = 0  # the next looks take no oldest turn
    assert await claimed(dispatcher, 1) != ["a/0"]
    clock.time += 1.1
    assert await claimed(dispatcher, 1) == ["a/0"]  # once a second it is looked everywhere, also while there is work


def test_slow_jobs_are_claimed_one_by_one_and_none_in_advance():
    dispatcher = make(Clock())
    assert [dispatcher.slots_to_claim(claimed) for claimed in (0, 7, 9, 10, 11)] == [10, 3, 1, 0, 0]


def test_fast_jobs_are_claimed_in_advance_and_never_a_few_at_a_time():
    clock = Clock()
    dispatcher = make(clock)
    total = run_for(dispatcher, clock, 2.0, per_second=5_000)
    assert dispatcher.slots_to_claim(0) == 30
    assert dispatcher.slots_to_claim(20) == 10
    assert dispatcher.slots_to_claim(28) == 0  # two more are not worth a claim
    run_for(dispatcher, clock, 4.0, per_second=0, total=total)
    assert [dispatcher.slots_to_claim(claimed) for claimed in (9, 10, 15)] == [1, 0, 0]  # they became slow


@pytest.mark.parametrize(
    ("fleet", "shortest", "mean", "longest"),
    [(1, 0.8, 1.0, 1.2), (8, 0.8, 1.0, 1.2), (16, 0.8, 2.0, 3.2), (24, 0.8, 3.0, 5.2), (1000, 0.8, 3.0, 5.2)],
)
def test_the_workers_of_a_large_fleet_look_less_often_and_never_all_late(fleet, shortest, mean, longest):
    """Woken at one moment, some look as soon as one that is alone would, however large the fleet."""
    assert [idle_pause(1.0, 0.2, fleet, roll) for roll in (0, 0.5, 1)] == pytest.approx([shortest, mean, longest])


async def test_an_idle_worker_of_a_large_fleet_looks_less_often(open_database, postgres_url):
    database = open_database(postgres_url)
    dispatcher = make(Clock(), database=database)
    pauses = {}
    for fleet in (1, 50):
        dispatcher.fleet = partial(int, fleet)
        pauses[fleet] = [(await dispatcher.poll(1))[1] for _ in range(50)]
    assert 0.75 <= min(pauses[1]) < max(pauses[1]) <= 1.25
    assert 0.75 <= min(pauses[50]) < 1.25 < max(pauses[50]) <= 5.25


@pytest.mark.parametrize(("seconds", "most"), [(0.5, 12), (0.1, 22), (0.05, 24), (0.02, 30), (0.001, 30)])
def test_the_shorter_jobs_are_the_more_are_claimed_in_advance(seconds, most):
    """By what the slots work off in a tenth of a second, and, beyond as many as there are slots, in a fiftieth."""
    clock = Clock()
    dispatcher = make(clock)
    run_for(dispatcher, clock, 4.0, per_second=10.5 / seconds)
    assert dispatcher.slots_to_claim(0) == most


async def test_a_job_that_a_program_holds_keeps_no_other_waiting(postgres_url):
    """One that a transaction has cancelled, say, and that does something else before it commits."""
    ran, some, last = [], asyncio.Event(), asyncio.Event()

    @handler("work")
    async def work(job: Job[int]) -> None:
        ran.append(job.payload)
        if len(ran) == 20:
            some.set()
        if job.payload == -1:
            last.set()

    app = Resilient(postgres_url, handlers=[work])
    held = await app.enqueue(work, -1, resource_key="p/held", priority=9)
    with psycopg.connect(postgres_url) as other:
        other.execute("SELECT 1 FROM resilient_job WHERE id = %s FOR UPDATE", (held.id,))
        await app.enqueue_many(work, [Item(n, f"p/{n % 5}") for n in range(20)])
        worker = app.worker(concurrency=5)
        running = asyncio.create_task(worker.run(signals=False))
        async with asyncio.timeout(LIMIT):
            await some.wait()
        assert sorted(ran) == list(range(20))
        other.commit()
        async with asyncio.timeout(LIMIT):
            await last.wait()
    worker.stop()
    await running
    await app.close()


@pytest.mark.parametrize("key", ["p", "new/1"], ids=["a provider", "a new account"])
async def test_a_resource_that_a_program_holds_keeps_no_other_waiting(postgres_url, monkeypatch, key):
    """It pauses a provider with a concurrency cap, or makes the row of an account, and does not commit yet."""
    monkeypatch.setattr(dispatcher, "LOCK_WAIT", "50ms")
    ran = []

    @handler("work")
    async def work(job: Job[int]) -> None:
        ran.append(job.payload)

    app = Resilient(postgres_url, handlers=[work], concurrency={"p": 5})
    await app.enqueue(work, 0, resource_key="p/1")
    assert await app.worker().drain(timeout=LIMIT) == 1
    with Session(app.database.sync_engine) as s:
        app.sync.resources.pause(key, session=s)
        await app.enqueue_many(
            work, [Item(-1, "p/1" if key == "p" else key), *(Item(n, f"q/{n}") for n in range(1, 9))]
        )
        worker = app.worker(concurrency=20)
        running = asyncio.create_task(worker.run(signals=False))
        await until(lambda: len(ran) >= 9)
        assert sorted(ran) == list(range(9))
        s.rollback()
    await until(lambda: len(ran) == 10)
    worker.stop()
    await running
    await app.close()


async def test_what_was_parked_is_looked_at_when_its_cooldown_ends(database_url, monkeypatch):
    """Not with the next tick of the staging: that is half a minute away here."""
    monkeypatch.setattr(sweeper, "TICK", 300.0)
    ran = []

    @handler("work")
    async def work(job: Job[int]) -> None:
        ran.append(job.payload)
        if len(ran) == 1:
            raise Throttled(until=app.now() + timedelta(seconds=0.2))

    app = Resilient(database_url, handlers=[work], upgrade=False)
    await app.enqueue_many(work, range(3), resource_key="p/1")
    worker = app.worker(concurrency=1)
    running = asyncio.create_task(worker.run(signals=False))

    async def succeeded():
        return await app.jobs.count(state="succeeded") == 3

    await until(succeeded)
    worker.stop()
    await running
    await app.close()
    assert len(ran) == 4


@pytest.fixture
async def alone(postgres_url, monkeypatch):
    """A worker that looks again only if it is told to, and does not hear its own NOTIFY."""
    monkeypatch.setattr(dispatcher, "POLL", 1000.0)

    go = asyncio.Event()

    @handler("work")
    async def work(job: Job[int]) -> None:
        if job.payload:
            await go.wait()

    app = Resilient(postgres_url, handlers=[work], upgrade=False, concurrency={"capped/*": 1})
    monkeypatch.setattr(app.ground.waker, "poke", lambda: None)
    worker = app.worker()
    running = asyncio.create_task(worker.run(signals=False))
    await until(lambda: worker.dispatcher.claims >= 1)
    yield app, worker, go
    worker.stop()
    go.set()
    await running
    await app.close()


async def test_the_end_of_a_job_that_frees_nobody_is_no_reason_to_look_again(alone):
    app, worker, _ = alone
    for n in range(1, 12):
        await app.enqueue("work", 0, resource_key="p/1")
        await until(lambda n=n: worker.completer.written == n)
        await asyncio.sleep(0.05)
        if n == 1:  # its resource was new
            before = worker.dispatcher.claims
    assert worker.dispatcher.claims - before <= 10  # the look that brings it, and none beside


@pytest.mark.parametrize(
    "two",
    [
        [{"ordering_key": "a"}, {"ordering_key": "a"}],
        [{"unique_key": "a"}, {"unique_key": "a", "while_running": "once_more"}],
        [{"resource_key": "capped/a"}, {"resource_key": "capped/a"}],
        [{}, {"after": True}],
    ],
    ids=["lane", "once more", "cap", "dependency"],
)
async def test_the_end_of_a_job_for_which_another_waits_is_one(alone, two):
    app, worker, go = alone
    first = await app.enqueue("work", 1, **{"resource_key": "p/1", **two[0]})
    await until(lambda: worker.executor.running)
    later = {"resource_key": "p/1", **two[1]}
    await app.enqueue("work", 0, **later | ({"after": first} if "after" in later else {}))
    go.set()
    await until(lambda: worker.completer.written == 2)


async def test_one_key_with_many_turns_hides_no_other(alone):
    """A look takes as many turns as there are slots for; several of one key are not several keys."""
    app, worker, _ = alone
    async with AsyncSession(app.database.async_engine) as s:  # it tells of its commit when that is over
        for _ in range(4):
            await app.enqueue("work", 0, resource_key="p/many", priority=1, session=s)
        await app.enqueue("work", 0, resource_key="p/one", session=s)
        await s.commit()
    await until(lambda: worker.completer.written == 5)


SLOW_COMMIT = (
    "CREATE TABLE slow (n int);"
    " CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(0.3); RETURN NULL; END';"
    " CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON slow DEFERRABLE INITIALLY DEFERRED"
    " FOR EACH ROW EXECUTE FUNCTION slow()"
)
INSERT = text("INSERT INTO slow VALUES (1)")


async def on_an_async_connection(app):
    async with app.database.async_engine.begin() as c:
        await c.execute(INSERT)
        await app.enqueue("work", 0, resource_key="p/1", session=c)


def on_a_connection(app, begin="begin"):
    with app.database.sync_engine.connect() as c, getattr(c, begin)():
        c.execute(INSERT)
        app.sync.enqueue("work", 0, resource_key="p/1", session=c)


def on_a_session_whose_commit_ends_nothing(app):
    with app.database.sync_engine.begin() as c:
        with Session(c) as s:
            s.execute(INSERT)
            app.sync.enqueue("work", 0, resource_key="p/1", session=s)
            s.commit()
        time.sleep(0.3)


@pytest.mark.parametrize(
    "write",
    [
        on_an_async_connection,
        on_a_connection,
        partial(on_a_connection, begin="begin_twophase"),
        on_a_session_whose_commit_ends_nothing,
    ],
    ids=["AsyncConnection", "Connection", "two phases", "Session"],
)
async def test_who_enqueues_on_a_connection_wakes_the_worker_after_the_commit(alone, postgres_url, write):
    """SQLAlchemy tells only of its beginning; this one takes a while."""
    app, worker, _ = alone
    with psycopg.connect(postgres_url) as c:
        c.execute(SLOW_COMMIT)
    await (write(app) if write is on_an_async_connection else asyncio.to_thread(write, app))
    await until(lambda: worker.completer.written == 1)


async def test_kinds_of_another_worker_hide_nothing(alone, postgres_url):
    app, worker, _ = alone

    @handler("strange")
    async def strange(job: Job[None]) -> None: ...

    other = Resilient(postgres_url, handlers=[strange], upgrade=False)
    await other.enqueue_many(strange, [Item(None, resource_key=f"p/{n}") for n in range(20)])
    await other.close()
    await app.enqueue("work", 0, resource_key="p/1")
    await until(lambda: worker.completer.written == 1)
