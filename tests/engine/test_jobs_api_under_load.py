"""Changing jobs while workers claim and finish them: nothing fails, nothing is lost, nobody is stranded."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest
import sqlalchemy as sa

from resilient import Cancelled, DatabaseUnreachable, Job, Resilient, handler
from resilient.store.gates import turns
from resilient.store.jobs import changes
from resilient.store.jobs.filters import JOB
from resilient.surface.cli.exits import line_of
from tests.helpers import LIMIT, until

ACCOUNTS, EACH, CHANGES = 12, 40, 40


@handler("noop")
async def noop(job: Job[int]) -> None:
    if job.payload % 7 == 0:
        await asyncio.sleep(0.005)


def meddle(jobs, rng):
    """One change of many jobs, as an operator in a hurry would make it."""
    key = f"github/acct-{rng.randrange(ACCOUNTS)}"
    match rng.randrange(5):
        case 0:
            jobs.cancel(resource=key, state=["ready", "running"], limit=60)
        case 1:
            jobs.cancel(kind="noop", state="running")
        case 2:
            jobs.retry(state=["cancelled", "succeeded"], limit=80)
        case 3:
            jobs.edit({"resource": key}, priority=rng.choice([5, 0, -3]))
        case 4:
            jobs.edit({"state": ["ready", "scheduled"]}, delay=rng.choice([0, 0.1]), limit=100)


@pytest.fixture
async def app(database_url):
    app = Resilient(database_url, handlers=[noop])
    yield app
    await app.close()


async def test_operators_and_workers_at_once(app, database_url):
    for n in range(ACCOUNTS):
        await app.enqueue_many(noop, range(EACH), resource_key=f"github/acct-{n}")
    stop, failed, done = threading.Event(), [], []

    def operate(seed):
        own, rng = Resilient(database_url, handlers=[noop]), random.Random(seed)
        try:
            while not stop.is_set():
                meddle(own.sync.jobs, rng)
                done.append(1)
        except Exception as error:  # noqa: BLE001 - whatever it is, the test shows it
            failed.append(error)
        asyncio.run(own.close())

    operators = [threading.Thread(target=operate, args=(seed,)) for seed in range(2)]
    workers = [app.worker(concurrency=20) for _ in range(2)]
    running = [asyncio.create_task(worker.run(signals=False)) for worker in workers]
    for one in operators:
        one.start()
    await until(lambda: failed or len(done) >= CHANGES)
    stop.set()
    for one in operators:
        await asyncio.to_thread(one.join)
    async with asyncio.timeout(LIMIT):
        while await app.jobs.count(state=["ready", "running", "scheduled"]):  # noqa: ASYNC110 - a database
            await asyncio.sleep(0.05)
    for worker in workers:
        worker.stop()
    await asyncio.gather(*running)
    assert failed == []
    assert await app.jobs.count(state=["succeeded", "cancelled"]) == ACCOUNTS * EACH == await app.jobs.count()
    assert [worker.sweeper.repaired for worker in workers] == [0, 0]
    assert app.database.transaction_sync(turns.stranded) == []


async def test_a_change_that_loses_a_deadlock_is_made_again(postgres_url):
    """Somebody locks the second job, then the first; the change locks them in order."""
    app = Resilient(postgres_url, handlers=[noop])
    first, second = sorted(e.id for e in await app.enqueue_many(noop, [1, 2], resource_key="github/a"))
    lock = sa.select(JOB.c.id).with_for_update()
    with app.database.sync_engine.connect() as c:
        c.exec_driver_sql("SET LOCAL deadlock_timeout = '1min'")  # the change looks first, whoever gets the processor
        c.execute(lock.where(JOB.c.id == second))
        change = asyncio.create_task(app.jobs.cancel([first, second]))
        while not c.exec_driver_sql("SELECT count(*) FROM pg_locks WHERE NOT granted").scalar_one():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.to_thread(c.execute, lock.where(JOB.c.id == first))
        c.commit()
    assert await change == Cancelled(cancelled=2)
    await app.close()


async def test_a_change_that_is_broken_off_says_how_far_it_came(sqlite_url, monkeypatch):
    """The database goes behind the second batch, and stays away while the audit would be written."""
    app, step = Resilient(sqlite_url, handlers=[noop], upgrade=False), changes.Sweep.step
    file = app.database.file
    for _ in range(3):
        await app.enqueue(noop, 1, resource_key="p/1")

    def step_until_it_goes(sweep, c, d):
        is_over = step(sweep, c, d)
        if sweep.looked_at == 2:
            file.rename(file.with_name("away.db"))
        return is_over

    monkeypatch.setattr(changes, "BATCH", 1)
    monkeypatch.setattr(changes.Sweep, "step", step_until_it_goes)
    with pytest.raises(DatabaseUnreachable, match="is gone") as caught:
        await app.jobs.cancel(kind="noop")
    assert line_of(caught.value).endswith(". 2 jobs were dealt with before that: say it again for the rest")
    file.with_name("away.db").rename(file)
    assert await app.jobs.count(state="cancelled") == 2
    monkeypatch.undo()
    assert (await app.jobs.cancel(kind="noop")).cancelled == 1
    await app.close()
