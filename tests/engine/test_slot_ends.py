"""How a slot comes free again: whatever a handler does at its end, or after it, and however its worker stops."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading

import pytest

from resilient import Batch, Job, Resilient, SyncJob, handler
from resilient.engine.ground.signals import SignalCount, stop_signals
from resilient.engine.run import executor, heartbeat
from tests.helpers import LIMIT, brisk, until

GO_ON = threading.Event()
BEGUN: list[str] = []
ENDED: list[BaseException] = []


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    GO_ON.clear()
    BEGUN.clear()
    ENDED.clear()
    monkeypatch.setattr(heartbeat, "LONGEST_BEAT", 0.3)
    yield
    GO_ON.set()


@handler("cancels.itself")
async def cancels_itself(job: Job[None]) -> None:
    asyncio.current_task().cancel()


@handler("cancels.itself.batch", batch=2)
async def cancels_itself_batch(jobs: Batch[None]) -> None:
    asyncio.current_task().cancel()


@handler("ok")
async def ok(job: Job[None]) -> None:
    """It does nothing."""


@handler("hangs")
def hangs(job: SyncJob[None]) -> None:
    BEGUN.append(job.kind)
    assert GO_ON.wait(LIMIT)


@handler("waits")
async def waits(job: Job[None]) -> None:
    BEGUN.append(job.kind)
    await asyncio.sleep(LIMIT)


def hang():
    BEGUN.append("after the commit")
    assert GO_ON.wait(LIMIT)


async def ignore_its_cancel():
    BEGUN.append("after the commit")
    while not GO_ON.is_set():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.01)


@handler("told.thread")
def told_thread(job: SyncJob[None]) -> None:
    with job.complete():
        job.after_commit(hang)


@handler("told.coroutine")
async def told_coroutine(job: Job[None]) -> None:
    async with job.complete():
        job.after_commit(ignore_its_cancel)


@handler("pair", batch=2)
async def pair(jobs: Batch[int]) -> None:
    BEGUN.append(str(len(jobs)))
    _, second = sorted(jobs, key=lambda job: job.payload)
    try:
        while not GO_ON.is_set():  # noqa: ASYNC110 - the test's
            await asyncio.sleep(0.01)
        jobs.succeed(second)
        await asyncio.sleep(LIMIT)
    except BaseException as error:
        ENDED.append(error)
        raise


@handler("pair.done", batch=2)
async def pair_done(jobs: Batch[int]) -> None:
    BEGUN.append(str(len(jobs)))
    while not GO_ON.is_set():  # noqa: ASYNC110 - the test's
        await asyncio.sleep(0.01)
    jobs.succeed(max(jobs, key=lambda job: job.payload))


HANDLERS = [cancels_itself, cancels_itself_batch, ok, hangs, waits, told_thread, told_coroutine, pair, pair_done]


@pytest.fixture
async def app(database_url):
    async with Resilient(database_url, handlers=HANDLERS) as app:
        yield app
        GO_ON.set()


@contextlib.asynccontextmanager
async def working(app, **options):
    worker = brisk(app.worker(**{"concurrency": 1, "lease": 300.0, "grace": 0.1, **options}))
    task = asyncio.create_task(worker.run(signals=False))
    try:
        yield worker
    finally:
        worker.stop()
        GO_ON.set()
        await asyncio.wait_for(task, LIMIT)


async def state(app, id_):
    return (await app.jobs.get(id_)).state.value


@pytest.mark.parametrize("kind", [cancels_itself, cancels_itself_batch], ids=lambda kind: kind.kind)
async def test_a_handler_that_cancels_its_task_and_returns_costs_no_slot(app, kind):
    ids = [(await app.enqueue(one, resource_key="p/1")).id for one in (kind, ok)]
    assert await app.worker(concurrency=1).drain(timeout=LIMIT / 5) == 2
    assert [await state(app, id_) for id_ in ids] == ["succeeded"] * 2


async def test_the_second_signal_does_not_wait_for_what_is_left_of_the_grace(app):
    await app.enqueue(hangs, resource_key="p/1")
    async with working(app, grace=LIMIT) as worker:
        waits, real = [], worker._wake_or

        async def wait(delay):
            waits.append(worker.stopping)
            await real(delay)

        worker._wake_or = wait
        await until(lambda: BEGUN)
        worker.stop()
        await until(lambda: sum(waits) > 1)  # it winds down
        worker.hand_back()
        await until(lambda: not worker.executor.running, LIMIT / 5)


async def test_signals_within_a_second_are_one(app):
    """A terminal sends Ctrl-C to the whole group, and a wrapper (`uv run`, `timeout`) once more."""
    job = await app.enqueue(hangs, resource_key="p/1")
    async with working(app, grace=LIMIT) as worker:
        now = 5.0
        worker._signals = SignalCount(lambda: now)
        await until(lambda: BEGUN)
        worker._signalled()
        now += 0.9
        worker._signalled()
        assert worker.stopping
        assert worker.grace == LIMIT
        assert await state(app, job.id) == "running"
        now += 0.2
        worker._signalled()
        await until(lambda: not worker.executor.running, LIMIT / 5)
    assert await state(app, job.id) == "ready"


@pytest.mark.skipif(os.name != "posix", reason="Windows has no SIGHUP")
async def test_a_terminal_that_closes_stops_a_worker_like_a_sigterm(app, hangups_are_heard):
    """By itself SIGHUP ends a process at once: what ran would wait for its lease, or be in doubt."""
    job = await app.enqueue(hangs, resource_key="p/1")
    worker = app.worker(grace=0)
    running = asyncio.create_task(worker.run())
    await until(lambda: BEGUN)
    signal.raise_signal(signal.SIGHUP)
    await asyncio.wait_for(running, LIMIT)
    assert await state(app, job.id) == "ready"
    assert (await app.jobs.get(job.id)).attempts == 0


@pytest.mark.skipif(os.name != "posix", reason="Windows has no SIGHUP")
def test_a_process_under_nohup_goes_on():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signal.SIGHUP not in stop_signals()
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("kind", [told_thread, told_coroutine], ids=lambda kind: kind.kind)
async def test_what_hangs_after_the_commit_keeps_no_slot(app, kind, monkeypatch, caplog):
    monkeypatch.setattr(executor, "AFTER_PATIENCE", 0.1)
    done = await app.enqueue(kind, resource_key="p/1")
    async with working(app) as worker:
        await until(lambda: BEGUN)
        other = await app.enqueue(ok, resource_key="p/2")
        await until(lambda: succeeded(app, other.id), LIMIT / 5)
        assert worker.outcomes == {"succeeded": 2}
        assert worker.completer.stale == 0
    assert await state(app, done.id) == "succeeded"
    assert f"job {done.id}" in caplog.text
    assert worker.outcomes == {"succeeded": 2}


async def succeeded(app, id_):
    return await state(app, id_) == "succeeded"


@pytest.mark.parametrize("kind", [told_thread, told_coroutine], ids=lambda kind: kind.kind)
async def test_a_job_that_is_committed_is_not_handed_back_by_a_stop(app, kind, caplog):
    done = await app.enqueue(kind, resource_key="p/1")
    worker = app.worker(concurrency=1, grace=0)
    task = asyncio.create_task(worker.run(signals=False))
    await until(lambda: BEGUN)
    worker.stop()
    await asyncio.wait_for(task, LIMIT)
    assert await state(app, done.id) == "succeeded"
    assert (worker.outcomes, worker.completer.stale) == ({"succeeded": 1}, 0)
    assert "goes on elsewhere" not in caplog.text


async def test_a_worker_that_is_cancelled_writes_what_others_follow(app):
    """Staging has ended by then, and is told in vain that there is work."""
    first = await app.enqueue(waits, resource_key="p/1")
    await app.enqueue(ok, resource_key="p/1", after=[first])
    worker = app.worker(concurrency=1)
    task = asyncio.create_task(worker.run(signals=False))
    await until(lambda: BEGUN and worker.sweeper._rest is not None)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await state(app, first.id) == "ready"
    assert worker.outcomes == {"handed_back": 1}


async def test_who_hears_of_results_does_not_end_their_writing(app, caplog):
    def fail():
        raise RuntimeError("can't start new thread")

    worker = app.worker(concurrency=1)
    worker.completer.on_saved = fail
    ids = [(await app.enqueue(ok, resource_key="p/1")).id for _ in range(2)]
    assert await worker.drain(timeout=LIMIT / 5) == 2
    assert [await state(app, id_) for id_ in ids] == ["succeeded"] * 2
    assert "can't start new thread" in caplog.text


async def cancelled_first(app, kind, worker):
    """The first of two jobs of a batch, whose cancel its worker has heard of."""
    first, _ = await app.enqueue_many(kind, [1, 2], resource_key="p/1")
    await until(lambda: BEGUN)
    assert BEGUN == ["2"]
    await app.jobs.cancel(first.id)
    await until(lambda: worker.executor.find(first.id.int).reason == "cancel")
    return first.id


async def test_a_cancel_ends_a_batch_once_the_others_are_settled(app):
    async with working(app) as worker:
        first = await cancelled_first(app, pair, worker)
        GO_ON.set()
        await until(lambda: not worker.executor.running, LIMIT / 5)
    assert [type(one) for one in ENDED] == [asyncio.CancelledError]
    assert await state(app, first) == "cancelled"


async def test_a_batch_that_ends_by_itself_is_not_cancelled_by_its_last_word(app):
    async with working(app) as worker:
        first = await cancelled_first(app, pair_done, worker)
        GO_ON.set()
        await until(lambda: not worker.executor.running)
    assert await state(app, first) == "succeeded"


async def test_a_mistake_over_one_that_is_given_up_keeps_no_other(app, caplog):
    """Leases of several stuck jobs are lost in one heartbeat, or their worker closes."""
    for n in (1, 2):
        await app.enqueue(hangs, resource_key=f"p/{n}")
    async with working(app, concurrency=2) as worker:
        await until(lambda: len(BEGUN) == 2)
        first, second = worker.executor.running.values()
        real, failures = worker.executor._on_done, []

        def fail(execution, outcome):
            if execution is first:
                failures.append(execution)
                raise RuntimeError("a mistake of the engine's")
            real(execution, outcome)

        worker.executor._on_done = fail
        worker.heartbeat._tell({(one.id, one.fence): "lost" for one in (first, second)})
        for one in (first, second):
            worker.executor._set_aside(one)
        worker.heartbeat._tell({(one.id, one.fence): "lost" for one in (first, second)})
        assert (failures, worker.executor.aside) == ([first], {})
        assert f"the engine failed over the end of job {first.id} (hangs)" in caplog.text
