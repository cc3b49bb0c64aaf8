"""A worker whose task is cancelled, once or more often, in whatever moment: no claim and no result is lost over it."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest

from resilient import Job, Resilient, handler
from resilient.engine.run import completer, services
from tests.helpers import LIMIT, until

GO_ON = threading.Event()
BEGUN: list[str] = []


@handler("ok")
async def ok(job: Job[None]) -> None:
    BEGUN.append(job.kind)


@handler("waits")
async def waits(job: Job[None]) -> None:
    await asyncio.sleep(LIMIT)


@handler("stubborn")
async def stubborn(job: Job[None]) -> None:
    BEGUN.append(job.kind)
    while not GO_ON.is_set():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.01)


@pytest.fixture
async def app(database_url):
    GO_ON.clear()
    BEGUN.clear()
    async with Resilient(database_url, handlers=[ok, waits, stubborn], upgrade=False) as app:
        yield app
        GO_ON.set()


@pytest.fixture
def away(monkeypatch):
    """``away.set()``: no result can be written until it is cleared."""
    away, real = threading.Event(), completer.write

    def write(*args, **options):
        if away.is_set():
            raise OSError("the database is away")
        return real(*args, **options)

    monkeypatch.setattr(completer, "write", write)
    monkeypatch.setattr(completer, "retry_pause", lambda *_: 0.01)
    return away


def run(worker):
    return asyncio.create_task(worker.run(signals=False))


async def cancelled(task):
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, LIMIT)


def tasks():
    """Those of workers."""
    return [task for task in asyncio.all_tasks() if task.get_name().startswith("resilient-")]


@pytest.mark.parametrize("how", ["run", "drain"])
async def test_what_a_claim_brings_that_was_under_way_is_handed_back(app, how, monkeypatch):
    job = await app.enqueue(waits, resource_key="p/1")
    worker = app.worker()
    claimed, answer, real = asyncio.Event(), asyncio.Event(), worker.dispatcher.poll

    async def poll(slots):
        claim, delay = await real(slots)
        if claim is not None and claim.jobs:
            claimed.set()
            await answer.wait()
        return claim, delay

    monkeypatch.setattr(worker.dispatcher, "poll", poll)
    task = run(worker) if how == "run" else asyncio.create_task(worker.drain())
    await asyncio.wait_for(claimed.wait(), LIMIT)
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    answer.set()
    await cancelled(task)
    info = await app.jobs.get(job.id)
    assert (info.state, info.rescues) == ("ready", 0)
    assert worker.outcomes == {"handed_back": 1}


async def test_a_claim_that_does_not_end_is_given_up(app, monkeypatch):
    monkeypatch.setattr(services, "HURRY", 0.01)
    worker, begun = app.worker(), asyncio.Event()

    async def poll(_slots):
        begun.set()
        await asyncio.sleep(LIMIT)

    monkeypatch.setattr(worker.dispatcher, "poll", poll)
    task = run(worker)
    await begun.wait()
    task.cancel()
    await cancelled(asyncio.wait_for(task, LIMIT / 5))
    assert tasks() == []


async def test_claims_are_made_in_one_task(app, monkeypatch):
    """One for each would cost every pick-up two more turns of the event loop."""
    worker, claims = app.worker(), []
    real = worker.dispatcher.poll

    async def poll(slots):
        claims.append(asyncio.current_task())
        if len(claims) == 3:
            worker.stop()
        worker.wake()
        return await real(slots)

    monkeypatch.setattr(worker.dispatcher, "poll", poll)
    await asyncio.wait_for(run(worker), LIMIT)
    assert len(claims) >= 3
    assert len(set(claims)) == 1


async def test_a_worker_that_rests_ends_at_once(app, monkeypatch):
    """Its database is away, so no claim is under way."""
    monkeypatch.setattr(services, "HURRY", LIMIT)
    monkeypatch.setattr(services, "retry_pause", lambda *_: LIMIT)
    worker, failed = app.worker(), asyncio.Event()

    async def poll(_slots):
        failed.set()
        raise OSError("gone")

    monkeypatch.setattr(worker.dispatcher, "poll", poll)
    task = run(worker)
    await failed.wait()
    await asyncio.sleep(0)
    task.cancel()
    await cancelled(asyncio.wait_for(task, LIMIT / 5))
    assert tasks() == []


async def test_a_second_cancel_leaves_no_job_with_a_handler_that_does_not_end(app):
    job = await app.enqueue(stubborn, resource_key="p/1")
    worker = app.worker(concurrency=1)
    task = run(worker)
    await until(lambda: BEGUN)
    task.cancel()
    await until(lambda: worker.executor.closed)
    task.cancel()
    await cancelled(task)
    assert (await app.jobs.get(job.id)).state == "ready"
    assert not worker.heartbeat._thread.is_alive()
    GO_ON.set()
    await until(lambda: not tasks())


async def test_a_second_cancel_leaves_time_for_the_results(app, away):
    job = await app.enqueue(ok, resource_key="p/1")
    worker = app.worker()
    away.set()
    task = run(worker)
    await until(lambda: worker.finisher.unwritten)
    task.cancel()
    await until(lambda: worker.completer._closing)
    task.cancel()
    await asyncio.sleep(0.05)
    assert not task.done()
    away.clear()
    await cancelled(task)
    assert (await app.jobs.get(job.id)).state == "succeeded"
    assert tasks() == []


async def test_a_second_cancel_ends_it_although_results_cannot_be_written(app, away, monkeypatch):
    monkeypatch.setattr(services, "HURRY", 0.01)
    job = await app.enqueue(ok, resource_key="p/1")
    worker = app.worker()
    away.set()
    task = run(worker)
    await until(lambda: worker.finisher.unwritten)
    task.cancel()
    await until(lambda: worker.completer._closing)
    task.cancel()
    await cancelled(asyncio.wait_for(task, LIMIT / 5))
    assert (await app.jobs.get(job.id)).state == "running"
    assert not worker.heartbeat._thread.is_alive()
    assert tasks() == []


async def test_results_are_written_although_every_task_is_cancelled(app, away):
    """As `asyncio.run` does once its main coroutine has ended."""
    job = await app.enqueue(ok, resource_key="p/1")
    worker = app.worker()
    away.set()
    task = run(worker)
    await until(lambda: worker.finisher.unwritten)
    for one in [task, *tasks()]:
        one.cancel()
    away.clear()
    await cancelled(task)
    assert (await app.jobs.get(job.id)).state == "succeeded"
    assert worker.completer.stale == 0


async def test_a_mistake_over_a_result_ends_no_other(app, monkeypatch, caplog):
    worker = app.worker()
    real, failed = worker.completer._saved, []

    def saved(*args, **options):
        if not failed:
            failed.append(args)
            raise LookupError("a mistake of the engine's")
        real(*args, **options)

    monkeypatch.setattr(worker.completer, "_saved", saved)
    ids = [(await app.enqueue(ok, resource_key=f"p/{n}")).id for n in range(2)]
    assert await worker.drain(timeout=LIMIT / 5) == 2
    assert {(await app.jobs.get(id_)).state for id_ in ids} == {"succeeded"}
    assert (worker.fences(), worker.completer.stale) == ([], 0)
    assert "the engine failed over" in caplog.text
