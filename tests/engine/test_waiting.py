"""`app.jobs.wait`: until a job has ended, for many at once."""

from __future__ import annotations

import asyncio

import pytest

from resilient import Batch, InvalidInput, Job, JobNotFound, JobNotOver, Permanent, Resilient, SyncJob, handler
from resilient.engine.jobs import waiting
from resilient.store.db import wake
from resilient.store.db.database import Database
from resilient.store.jobs import queries
from tests.helpers import until


@handler("double")
async def double(job):
    return 2 * job.payload


@handler("fail")
async def fail(job):
    raise Permanent("no")


@pytest.fixture
async def app(database_url):
    app = Resilient(database_url, handlers=[double, fail])
    yield app
    await app.close()


@pytest.fixture
async def working(database_url):
    """The app of a worker that is another process for all that it and the app know of each other."""
    other = Resilient(database_url, handlers=[double, fail])
    worker = other.worker()
    running = asyncio.create_task(worker.run(signals=False))
    yield other
    worker.stop()
    await running
    await other.close()


@pytest.fixture
async def without_polling(app, working, backend, monkeypatch):
    """The worker has heard that somebody waits, and nobody looks by the clock any more."""
    monkeypatch.setattr(wake, "AWAITED_FOR", 3600.0)
    never = await app.enqueue(double, 0, resource_key="a/0", delay=3600)
    wait = asyncio.create_task(app.jobs.wait(never.id))
    if backend == "postgresql":
        await until(lambda: working.ground.waker._awaited_until > 0)
    monkeypatch.setattr(waiting, "LOOK", 3600.0)
    yield
    wait.cancel()


@pytest.mark.usefixtures("without_polling")
async def test_many_wait_at_once_for_what_another_process_does(app, monkeypatch):
    looks, over = [], queries.over
    monkeypatch.setattr(queries, "over", lambda c, d, ids: looks.append(len(ids)) or over(c, d, ids))
    jobs = await app.enqueue_many(double, range(200), resource_key="a/1")
    ended = await asyncio.gather(*(app.jobs.wait(job.id, timeout=60) for job in jobs for _ in range(3)))
    assert [one.result for one in ended] == [2 * n for n in range(200) for _ in range(3)]
    assert len(looks) < 200, "one look is for all"


@pytest.mark.usefixtures("without_polling")
async def test_a_thread_is_told_too(app):
    job = await app.enqueue(double, 4, resource_key="a/1")
    assert (await asyncio.to_thread(app.sync.jobs.wait, job.id, timeout=60)).result == 8


@pytest.mark.usefixtures("working")
async def test_nobody_listens_when_nobody_waits(app):
    job = await app.enqueue(double, 4, resource_key="a/1")
    await app.jobs.wait(job.id, timeout=60)
    await until(lambda: app.jobs._ends._listener is None)


@pytest.mark.usefixtures("working")
async def test_a_job_that_dies_or_is_cancelled_has_ended(app):
    dies = await app.enqueue(fail, None, resource_key="a/1")
    assert (await app.jobs.wait(dies.id, timeout=60)).state == "dead"
    later = await app.enqueue(double, 1, resource_key="a/1", delay=3600)
    wait = asyncio.create_task(app.jobs.wait(str(later.id), timeout=60))
    await until(lambda: app.jobs._ends._listener is not None)
    await app.jobs.cancel(later.id)
    assert (await wait).state == "cancelled"


async def test_one_that_does_not_end_in_time(app):
    job = await app.enqueue(double, 1, resource_key="a/1")
    with pytest.raises(JobNotOver, match=rf"job {job.id} .double. is still ready after 0.01 s: `resilient jobs why"):
        await app.jobs.wait(job.id, timeout=0.01)
    with pytest.raises(TimeoutError):
        await asyncio.to_thread(app.sync.jobs.wait, job.id, timeout=0.01)
    with pytest.raises(JobNotOver):
        await app.jobs.wait(job.id, timeout=0)
    waits = asyncio.create_task(app.jobs.wait(job.id))
    with pytest.raises(JobNotOver):
        await app.jobs.wait(job.id, timeout=0.01)
    await app.worker().drain()
    assert (await waits).result == 2
    assert (await app.jobs.wait(job.id, timeout=0)).result == 2


async def test_what_nobody_can_wait_for(app):
    id_ = "019234567-89ab-7def-8123-456789abcdef"[1:]
    with pytest.raises(JobNotFound, match="there is no job"):
        await app.jobs.wait(id_, timeout=60)
    with pytest.raises(JobNotFound):
        await asyncio.to_thread(app.sync.jobs.wait, id_, timeout=60)
    for wrong in (-1, "5", True):
        with pytest.raises(InvalidInput, match="give seconds, from 0 on"):
            await app.jobs.wait(id_, timeout=wrong)


REFUSED: list[str] = []


@handler("asks")
async def asks(job: Job[str]) -> None:
    """Wait where that would never end."""
    other = job.payload.partition(" ")[2] or job.id
    wait = job.deps["app"].jobs.wait
    try:
        if job.payload.startswith("prepare"):
            async with job.prepare():
                await wait(other)
        elif job.payload.startswith("complete"):
            async with job.complete():
                pass
            await wait(other)
        else:
            await wait(other)
    except InvalidInput as error:
        REFUSED.append(str(error))


@handler("asks.thread")
def asks_in_thread(job: SyncJob[str]) -> None:
    try:
        with job.prepare():
            job.deps["app"].sync.jobs.wait(job.payload)
    except InvalidInput as error:
        REFUSED.append(str(error))


@handler("asks.batch", batch=2)
async def asks_in_batch(jobs: Batch[str]) -> None:
    for job in jobs:
        try:
            await job.deps["app"].jobs.wait(job.id)
        except InvalidInput as error:
            REFUSED.append(str(error))


@pytest.mark.parametrize(
    ("kind", "where", "words"),
    [
        (asks, "", "waits for its own end"),
        (asks_in_batch, "", "waits for its own end"),
        (asks, "prepare ", "with a transaction of its own open"),
        (asks, "complete ", "with a transaction of its own open"),
        (asks_in_thread, "", "with a transaction of its own open"),
    ],
)
async def test_a_handler_that_would_wait_for_itself_is_refused(database_url, kind, where, words):
    REFUSED.clear()
    deps = {}
    deps["app"] = app = Resilient(database_url, handlers=[double, asks, asks_in_thread, asks_in_batch], deps=deps)
    other = await app.enqueue(double, 1, resource_key="a/1", delay=3600)
    payload = f"{where}{other.id}" if where or kind is asks_in_thread else ""
    await app.enqueue_many(kind, [payload] * 2, resource_key="a/1")
    await app.worker().drain(timeout=30)
    assert len(REFUSED) == 2
    assert all(words in text for text in REFUSED)
    assert await app.jobs.count(state="succeeded") == 2
    await app.close()


async def test_a_database_in_memory_is_looked_at():
    app = Resilient(Database("sqlite://"), handlers=[double])
    job = await app.enqueue(double, 1, resource_key="a/1")
    wait = asyncio.create_task(app.jobs.wait(job.id, timeout=60))
    await app.worker().drain()
    assert (await wait).result == 2
    await app.close()
