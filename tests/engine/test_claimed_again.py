"""A job that is claimed again by the same worker, beside its own handler: the process slept through its lease."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest

from resilient import Batch, Job, Resilient, SyncJob, handler
from resilient.core.jobs.outcomes import SUCCEEDED
from resilient.engine.run import executor
from resilient.engine.run.execution import Execution
from resilient.store.jobs import leases
from tests.helpers import LIMIT, bury, until, use_up

FIRST, LATER = threading.Event(), threading.Event()  # what the first execution of a job waits for, and all later ones
BEGUN: list = []
JOBS: list = []


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    for event in (FIRST, LATER):
        event.clear()
    BEGUN.clear()
    JOBS.clear()
    monkeypatch.setattr(executor, "CANCEL_PATIENCE", 0.2)
    monkeypatch.setattr(executor, "SOLO_PATIENCE", 0.05)
    yield
    FIRST.set()
    LATER.set()


def go_on(job):
    BEGUN.append(job.execution)
    return FIRST if job.execution == 1 else LATER


@handler("stubborn")
async def stubborn(job: Job[None]) -> None:
    event = go_on(job)
    while not event.is_set():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.01)


@handler("hangs")
def hangs(job: SyncJob[None]) -> None:
    assert go_on(job).wait(LIMIT)


@handler("gentle")
async def gentle(job: Job[None]) -> None:
    event = go_on(job)
    while not event.is_set():  # noqa: ASYNC110 - the test's
        await asyncio.sleep(0.01)


@handler("batch", batch=2)
async def batch(jobs: Batch[None]) -> None:
    JOBS.extend(jobs)
    event = go_on(jobs[0])
    while not event.is_set():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.01)


@handler("ok")
async def ok(job: Job[None]) -> None: ...


@pytest.fixture
async def app(database_url):
    async with Resilient(database_url, handlers=[stubborn, hangs, gentle, batch, ok], upgrade=False) as app:
        yield app
        FIRST.set()
        LATER.set()


@contextlib.asynccontextmanager
async def working(app, **options):
    """Its heartbeats are far apart: it does not hear that a lease was lost."""
    worker = app.worker(**{"concurrency": 2, "lease": 3600.0, "grace": 0.1, **options})
    worker.heartbeat._interval = 3600.0
    task = asyncio.create_task(worker.run(signals=False))
    try:
        yield worker
    finally:
        worker.stop()
        FIRST.set()
        LATER.set()
        await asyncio.wait_for(task, LIMIT)


async def rescued(app):
    await bury(app)
    await app.worker().sweeper.rescue()


async def succeeded(app, id_):
    return (await app.jobs.get(id_)).state == "succeeded"


@pytest.mark.parametrize("kind", [stubborn, hangs, gentle], ids=lambda kind: kind.kind)
async def test_the_later_execution_counts_and_the_earlier_one_keeps_no_slot(app, kind):
    done = await app.enqueue(kind, resource_key="p/1")
    async with working(app) as worker:
        await until(lambda: BEGUN == [1])
        (earlier,) = worker.executor.running.values()
        await rescued(app)
        await until(lambda: BEGUN == [1, 2])
        (later,) = worker.executor.running.values()
        assert later.fence > earlier.fence
        assert worker.fences() == [(done.id, later.fence)]
        await until(lambda: worker.outcomes == {"handed_back": 1})  # the earlier one
        assert worker.executor._all() == [later]
        LATER.set()
        await until(lambda: succeeded(app, done.id))
        others = [await app.enqueue(ok, resource_key=f"p/{n}") for n in range(4)]
        for one in others:
            await until(lambda one=one: succeeded(app, one.id), LIMIT / 5)
        FIRST.set()
        await until(lambda: not worker.executor.stuck)
        assert worker.executor.slots_in_use == worker.executor._started == 0
        assert worker.outcomes == {"handed_back": 1, "succeeded": 5}


async def test_a_slot_is_taken_as_long_as_the_earlier_execution_does_not_end(app):
    await app.enqueue(stubborn, resource_key="p/1")
    async with working(app) as worker:
        await until(lambda: BEGUN == [1])
        (earlier,) = worker.executor.running.values()
        later = Execution(earlier.context, earlier.row._replace(version=9), earlier.handler, ())
        worker.executor.submit(later, leases.clock())
        assert worker.executor.slots_in_use == 2
        assert worker.executor.find(later.number) is later
        assert (later.id, 10) in worker.fences()


async def test_a_batch_that_does_not_end_sets_aside_only_its_own(app):
    first, second = await app.enqueue_many(batch, [None, None], resource_key="p/1")
    async with working(app) as worker:
        await until(lambda: BEGUN)
        await app.database.transaction(
            lambda c, d: d.run(c, "UPDATE {job} SET version = 10 WHERE id = :id", {"id": d.id(first.id)})
        )
        earlier = worker.executor.running[first.id.int]
        later = Execution(earlier.context, earlier.row._replace(version=9, executions=1), earlier.handler, ())
        worker.executor.submit(later, leases.clock())
        assert worker.executor.slots_in_use == 2
        await until(lambda: BEGUN == [1, 2])
        use_up(JOBS[1])
        await until(lambda: list(worker.executor.aside) == [second.id.int])
        assert worker.executor.running == {first.id.int: later}
        FIRST.set()
        await until(lambda: not worker.executor.stuck)
        LATER.set()
        await until(lambda: not worker.executor._all())
        assert worker.executor.slots_in_use == worker.executor._started == 0


async def test_what_an_earlier_execution_came_to_at_last_hides_no_later_one(app):
    """Both ends wait to be written: the lease of the later one is looked after."""
    await app.enqueue(ok, resource_key="p/1")
    worker = app.worker()
    async with worker._services(background=False):
        while (claimed := (await worker._claim(1))[0]) is None or not claimed.jobs:
            pass  # the first look makes the resource's row
        (row,) = claimed.jobs
        earlier = Execution(worker.context, row, ok, ())
        later = Execution(worker.context, row._replace(version=row.version + 2), ok, ())
        await app.database.transaction(lambda c, d: d.run(c, "UPDATE {job} SET version = version + 2"))
        earlier.lost = True
        for one in (later, earlier):
            worker.finisher.conclude(one, SUCCEEDED)
        assert worker.fences() == [(row.id, later.fence)]
        async with asyncio.timeout(LIMIT):
            await worker.completer.flushed()
        assert (worker.fences(), worker.finisher.unwritten) == ([], {})
    assert (await app.jobs.get(row.id)).state == "succeeded"
