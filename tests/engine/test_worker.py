"""The worker on real databases: what becomes of jobs, whatever their handlers do."""

from __future__ import annotations

import asyncio
import re
import threading
from collections import Counter
from concurrent.futures import Future
from datetime import timedelta

import pytest

from resilient import (
    Cancel,
    Fixed,
    Job,
    LostLease,
    Permanent,
    Resilient,
    Retry,
    SetupError,
    Snooze,
    SyncJob,
    Transient,
    UnknownKind,
    handler,
)
from resilient.engine.run.execution import WorkerLoop
from tests.helpers import LIMIT, brisk, drain, until

SEEN: list = []


@pytest.fixture(autouse=True)
def _seen():
    SEEN.clear()


@handler("ok")
async def ok(job: Job[dict]) -> dict:
    SEEN.append((job.kind, job.payload, job.attempt))
    return {"got": job.payload}


@handler("plain")
def plain(job: SyncJob[dict]) -> None:
    SEEN.append(threading.current_thread().name)


@handler("transient", retry=Retry(max_attempts=3, delay=Fixed(10)))
async def transient(job: Job[None]) -> None:
    SEEN.append(job.attempt)
    raise Transient("later")


@handler("permanent")
async def permanent(job: Job[None]) -> None:
    raise Permanent("never")


@handler("bug", retry=Retry(max_attempts=1))
async def bug(job: Job[None]) -> None:
    raise ValueError("boom")


@handler("exit", retry=Retry(max_attempts=1))
async def leaves(job: Job[None]) -> None:
    raise SystemExit(3)


@handler("snooze")
async def snooze(job: Job[None]) -> Snooze | None:
    SEEN.append(job.execution)
    return Snooze(60) if job.execution == 1 else None


@handler("cancel")
async def cancel(job: Job[None]) -> None:
    raise Cancel("not wanted any more")


@handler("slow", timeout=0.05, retry=Retry(max_attempts=1))
async def slow(job: Job[None]) -> None:
    await asyncio.sleep(30)


@handler("stubborn", timeout=0.05, retry=Retry(max_attempts=1))
async def stubborn(job: Job[None]) -> str:
    try:
        await asyncio.sleep(30)
    except asyncio.CancelledError:
        return "swallowed"
    return "done"


@handler("fickle")
async def fickle(job: Job[None]) -> str | None:
    if job.execution > 1:
        return None
    await job.app.enqueue(fickle, resource_key="p/1", unique_key="one", while_running="once_more")
    return "the first"


HANDLERS = [fickle, ok, plain, transient, permanent, bug, leaves, snooze, cancel, slow, stubborn]


@pytest.fixture
async def app(database):
    app = Resilient(database, handlers=HANDLERS, upgrade=False)
    yield app
    await app.close()


async def row(app, id_):
    return await app.jobs.get(id_)


async def test_a_job_runs_once_and_keeps_its_result(app):
    done = await app.enqueue(ok, {"a": 1}, resource_key="p/1")
    assert await drain(app) == 1
    job = await row(app, done.id)
    assert (job.state, job.result, job.attempts) == ("succeeded", {"got": {"a": 1}}, 0)
    assert SEEN == [("ok", {"a": 1}, 1)]
    assert await drain(app) == 0


async def test_what_runs_again_does_not_keep_the_result_of_the_run_before(app):
    done = await app.enqueue(fickle, resource_key="p/1", unique_key="one", unique_until="finish")
    await drain(app)
    job = await row(app, done.id)
    assert (job.state, job.executions, job.result) == ("succeeded", 2, None)


async def test_plain_functions_run_in_threads(app):
    await app.enqueue(plain, {}, resource_key="p/1")
    await drain(app)
    assert SEEN[0].startswith("resilient-handler")


async def test_a_transient_failure_is_retried_until_its_budget_ends(app, clock):
    done = await app.enqueue(transient, resource_key="p/1")
    for _ in range(3):
        await drain(app)
        clock.advance(11)
    job = await row(app, done.id)
    assert (job.state, job.attempts, SEEN) == ("dead", 3, [1, 2, 3])
    assert "attempt 3 of 3" in job.last_error
    assert [a.decision for a in await app.jobs.attempts(done.id)] == ["retry", "retry", "dead"]


async def test_a_permanent_failure_is_dead_at_once(app):
    done = await app.enqueue(permanent, resource_key="p/1")
    await drain(app)
    job = await row(app, done.id)
    assert (job.state, job.last_error_kind, job.last_error) == ("dead", "permanent", "never")


@pytest.mark.parametrize(("kind", "text"), [(bug, "ValueError: boom"), (leaves, "SystemExit: 3")])
async def test_what_a_handler_raises_ends_its_job_only(app, kind, text):
    done = await app.enqueue(kind, resource_key="p/1")
    other = await app.enqueue(ok, {}, resource_key="p/1")
    await drain(app)
    job = await row(app, done.id)
    assert (job.state, job.last_error_kind) == ("dead", "bug")
    assert text in job.last_error
    (attempt,) = await app.jobs.attempts(done.id)
    first, place, *_ = attempt.traceback.splitlines()
    assert first.startswith("Traceback")
    assert f'File "{__file__}"' in place, "the engine's own frames say nothing to a handler's author"
    assert (await row(app, other.id)).state == "succeeded"


async def test_a_snooze_costs_nothing(app, clock):
    done = await app.enqueue(snooze, resource_key="p/1")
    await drain(app)
    job = await row(app, done.id)
    assert (job.state, job.attempts, job.deferrals) == ("scheduled", 0, 1)
    clock.advance(61)
    await drain(app)
    assert (await row(app, done.id)).state == "succeeded"


async def test_a_handler_may_cancel_its_job(app):
    done = await app.enqueue(cancel, resource_key="p/1")
    await drain(app)
    assert (await row(app, done.id)).state == "cancelled"


@pytest.mark.parametrize("kind", [slow, stubborn])
async def test_a_timeout_ends_the_execution(app, kind):
    done = await app.enqueue(kind, resource_key="p/1")
    await drain(app)
    job = await row(app, done.id)
    assert (job.state, job.last_error_kind) == ("dead", "timeout")


async def test_priority_first_then_oldest(app, clock):
    await app.enqueue(ok, {"n": 1}, resource_key="p/1")
    clock.advance(1)
    await app.enqueue(ok, {"n": 2}, resource_key="p/1")
    await app.enqueue(ok, {"n": 3}, resource_key="p/1", priority=5)
    await app.worker(concurrency=1).drain(timeout=LIMIT)
    assert [payload["n"] for _, payload, _ in SEEN] == [3, 1, 2]


async def test_a_delay_is_waited_out(app, clock):
    await app.enqueue(ok, {}, resource_key="p/1", delay=timedelta(minutes=5))
    assert await drain(app) == 0
    clock.advance(minutes=5, seconds=1)
    assert await drain(app) == 1


async def test_a_worker_leaves_kinds_it_does_not_know(app):
    mine = await app.enqueue(ok, {}, resource_key="p/1")
    theirs = await app.enqueue(plain, {}, resource_key="p/1")
    assert await drain(app, kinds=["ok"]) == 1
    assert (await row(app, theirs.id)).state == "ready"
    assert (await row(app, mine.id)).state == "succeeded"
    assert await drain(app) == 1


async def test_a_worker_takes_every_kind_but_some(app):
    await app.enqueue("ok", {}, resource_key="a/1")
    left = await app.enqueue("permanent", None, resource_key="a/1")
    assert await drain(app, except_kinds=["permanent"]) == 1
    assert (await app.jobs.get(left.id)).state == "ready"
    assert app.worker(kinds=["ok", "bug"], except_kinds=["bug"]).kinds == ("ok",)


async def test_a_worker_of_some_resources_leaves_the_others(app):
    await app.enqueue("ok", {}, resource_key="a/1/search")
    left = await app.enqueue("ok", {}, resource_key="b/1")
    worker = app.worker(concurrency=4, kinds=["ok"], resources=["a/*", "c"])
    assert (worker.facts().resources, await worker.drain(timeout=LIMIT)) == (["a/*", "c"], 1)
    assert (await app.jobs.get(left.id)).state == "ready"
    assert await drain(app) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"resources": "a/*"}, "resources is a list of patterns, such as ['github/*']"),
        ({"resources": ["a b"]}, "'a b' is not a resource pattern"),
        ({"kinds": ["permanant"]}, "no handler is declared for 'permanant'; did you mean 'permanent'?"),
        ({"except_kinds": ["permanant"]}, "no handler is declared for 'permanant'; did you mean 'permanent'?"),
        ({"except_kinds": "ok"}, "kinds and except_kinds are lists of kinds"),
        ({"kinds": ["ok"], "except_kinds": ["ok"]}, "this worker would run no kind at all"),
    ],
)
async def test_kinds_that_no_worker_can_take(app, options, words):
    with pytest.raises(SetupError, match=re.escape(words)):
        app.worker(**options)


@pytest.mark.parametrize("lease", [0, 0.05, -1, float("nan"), float("inf"), "60", None])
async def test_a_lease_that_no_heartbeat_can_keep_is_refused(app, lease):
    with pytest.raises(SetupError, match=r"lease is a number of seconds from 0\.1 to 100,000,000"):
        app.worker(lease=lease)


async def test_expired_jobs_die_with_a_reason(app, clock):
    done = await app.enqueue(ok, {}, resource_key="p/1", expires_at=clock.now() + timedelta(seconds=5))
    clock.advance(6)
    worker = app.worker()
    await worker.sweeper.chores()
    job = await row(app, done.id)
    assert (job.state, job.last_error_kind) == ("dead", "expired")
    assert SEEN == []


async def test_unknown_kinds_are_refused_with_the_known_ones(app):
    with pytest.raises(UnknownKind, match="this app knows: bug, cancel"):
        await app.enqueue("nope", resource_key="p/1")


async def test_a_worker_needs_handlers(database):
    app = Resilient(database)
    with pytest.raises(SetupError, match="declares no handlers"):
        app.worker()


async def test_cancel_reaches_a_running_job(app, database):
    started, seen = asyncio.Event(), []

    @handler("waits")
    async def waits(job: Job[None]) -> None:
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            seen.append(job.cancel_requested)

    own = Resilient(database, handlers=[waits])
    done = await own.enqueue(waits, resource_key="p/1")
    worker = brisk(own.worker())
    running = asyncio.create_task(worker.run(signals=False))
    await started.wait()
    assert (await own.jobs.cancel(done.id)).requested == 1
    async with asyncio.timeout(LIMIT):
        while (await own.jobs.get(done.id)).state != "cancelled":  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(0.02)
    worker.stop()
    await running
    assert seen == [True]
    await own.close()


async def test_a_graceful_stop_hands_back_what_does_not_end(app, database):
    started = asyncio.Event()

    @handler("waits")
    async def waits(job: Job[None]) -> None:
        started.set()
        await asyncio.sleep(60)

    own = Resilient(database, handlers=[waits])
    done = await own.enqueue(waits, resource_key="p/1")
    worker = own.worker(grace=0.05)
    running = asyncio.create_task(worker.run(signals=False))
    await started.wait()
    worker.stop()
    await running
    job = await own.jobs.get(done.id)
    assert (job.state, job.attempts, job.rescues) == ("ready", 0, 0)  # no lease to wait out, nothing charged
    await own.close()


@pytest.mark.parametrize(("keys", "least", "most"), [(1, 256, 256), (2, 128, 128), (64, 16, 16)])
async def test_keys_with_much_work_are_claimed_many_jobs_at_a_time(app, keys, least, most):
    """Fewer turns, locks and statements a job; round robin, and no slot idle where few keys have work."""
    for n in range(keys):
        await app.enqueue_many(ok, [{}] * (2000 // keys + 300), resource_key=f"p/{n}")
    dispatcher = app.worker(concurrency=512).dispatcher
    for _ in range(12):  # the first looks make resource rows and learn
        claimed, _ = await dispatcher.poll(256 if keys > 2 else 8)
    claimed, _ = await dispatcher.poll(256)
    counts = Counter(row.resource_key for row in claimed.jobs)
    assert least <= min(counts.values()) <= max(counts.values()) <= most
    assert len(claimed.jobs) == 256


class StaleLoop(asyncio.SelectorEventLoop):
    """Once, it answers what was true a moment ago: that it is not closed."""

    is_stale = False

    def is_closed(self):
        is_stale, self.is_stale = self.is_stale, False
        return not is_stale and super().is_closed()


@pytest.mark.parametrize("is_stale", [False, True])
def test_a_thread_that_outlives_its_loop_hears_of_a_lost_lease(is_stale):
    """Whenever the loop was closed: nothing is raised where nobody waits, and `LostLease` where somebody does."""
    calls, loop, worker_loop = [], StaleLoop(), WorkerLoop("w")

    async def call():
        calls.append("a coroutine")

    loop.call_soon(worker_loop.attach)
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    loop.is_stale = is_stale
    worker_loop.call_soon(calls.append, "a function")
    loop.is_stale = is_stale
    worker_loop.send(call())
    loop.is_stale = is_stale
    with pytest.raises(LostLease, match="worker w has stopped"):
        worker_loop.run(call())
    loop.is_stale = False
    assert calls == []


class LateFuture(Future):
    """It has its result, or its error, in the moment in which the thread that waits looks whether the loop is there."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def result(self, timeout=None):
        if self.done():
            return super().result(timeout)
        self.set_result("answered") if self.error is None else self.set_exception(self.error)
        raise TimeoutError


async def nothing():
    """It is never run."""


@pytest.mark.parametrize("error", [None, TimeoutError("its own"), OSError("gone")])
def test_an_answer_that_comes_while_a_thread_looks_for_the_loop_is_not_lost(monkeypatch, error):
    loop, worker_loop = asyncio.new_event_loop(), WorkerLoop("w")
    monkeypatch.setattr(worker_loop, "_loop", loop)
    monkeypatch.setattr(worker_loop, "send", lambda coroutine: coroutine.close() or LateFuture(error))
    try:
        if error is None:
            assert worker_loop.run(nothing()) == "answered"
        else:
            with pytest.raises(type(error), match=str(error)):
                worker_loop.run(nothing())
    finally:
        loop.close()


async def test_a_wait_of_a_thread_that_somebody_cancels_is_the_workers_end_and_no_bug_of_the_handler():
    """As a program may that ends, with every task of its loop."""
    worker_loop, own = WorkerLoop("w"), asyncio.all_tasks()
    worker_loop.attach()
    waiting = asyncio.create_task(asyncio.to_thread(worker_loop.run, asyncio.Event().wait()))
    (task,) = await until(lambda: asyncio.all_tasks() - own - {waiting})
    task.cancel()
    with pytest.raises(LostLease, match="worker w has stopped"):
        await waiting
