"""One call of a handler: from its executions, through the function, on the loop or in a thread, to their outcomes."""

from __future__ import annotations

import asyncio
import inspect
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from resilient.engine import two_phase
from resilient.engine.endings import interrupted, raised, returned
from resilient.engine.foreign import Ended, NoThread, tried
from resilient.engine.job import Job, SyncJob
from resilient.engine.readiness import prepared
from resilient.wire.sockets import Line, using

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor as ThreadPool

    from resilient.core.outcomes import Outcome
    from resilient.engine.batch_run import BatchRun
    from resilient.engine.execution import Execution

NO_THREAD_PAUSE: Final = 1.0  # seconds until a slot that got no thread tries the next job


async def call(execution: Execution, threads: ThreadPool) -> Outcome:
    """Run and translate. Only a bug of the engine's own is raised."""
    handler = execution.handler
    try:
        if (execution.waited or execution.worker.wire.scattered) and (refused := await prepared(execution)) is not None:
            return refused
        job = _job(execution)
        reconciling = execution.sent and handler.reconcile is not None
        fn = handler.reconcile if reconciling and handler.reconcile is not None else handler.fn
        if not handler.is_async:
            ended = await _in_thread(execution, threads, partial(_call_sync, execution, fn, job, reconciling))
            result = ended.unpacked()
        elif inspect.isawaitable(result := fn(job)):
            result = await result
    except BaseException as error:  # noqa: BLE001 - SystemExit and the like end the job, not the worker
        uncancel(execution)
        outcome = raised(execution, error if execution.work is None else two_phase.named(error))
        if execution.work is not None and not execution.thread:
            await two_phase.roll_back(execution)
            uncancel(execution)
        return outcome
    uncancel(execution)
    if execution.work is None:
        return _ended(execution, result, reconciling)
    if execution.thread:  # `_call_sync` has done it
        outcome = result
    else:
        outcome = await two_phase.finish(execution, _ended(execution, result, reconciling))
    uncancel(execution)
    return outcome


async def call_batch(run: BatchRun, threads: ThreadPool) -> None:
    """Run the handler of a batch, and end all its jobs."""
    fn, batch = run.handler.fn, run.batch([_job(one) for one in run.members.values()])
    result: Any = None
    failed: BaseException | None = None
    try:
        if not run.handler.is_async:
            result, failed = await _in_thread(run, threads, partial(fn, batch))
        elif inspect.isawaitable(result := fn(batch)):
            result = await result
    except BaseException as error:  # noqa: BLE001 - as in `call`
        failed = error
    uncancel(run)
    run.end(result, failed)


def uncancel(execution: Execution | BatchRun) -> None:
    """The next job of this slot begins without the cancellations of this one."""
    task = execution.task or asyncio.current_task()
    if task is not None:
        while task.cancelling():
            task.uncancel()


async def _in_thread(execution: Execution | BatchRun, threads: ThreadPool, fn: Callable[[], Any]) -> Ended:
    """Call a function in a thread. Raises `NoThread`."""
    called_off = False

    def begin() -> Ended:
        if called_off:
            return Ended(None, NoThread("it was called off"))
        with using(line):
            return tried(fn)

    line = Line()
    execution.take_thread(line)
    try:
        execution.future = asyncio.get_running_loop().run_in_executor(threads, begin)
    except RuntimeError as error:  # its worker has closed, or the system gives no more threads
        called_off = True  # it stays in the pool's queue, where a thread that gets free would find it
        await asyncio.sleep(NO_THREAD_PAUSE)
        raise NoThread(f"its worker has no thread for it: {error}") from None
    await asyncio.wait([execution.future])  # a cancellation leaves the future alone, because the thread goes on
    if execution.future.cancelled():
        raise NoThread("its worker closed before a thread was free")
    found: Ended = execution.future.result()
    return found


def _call_sync(execution: Execution, fn: Callable[[Any], Any], job: Any, reconciling: bool) -> Any:  # noqa: FBT001
    """In the thread: the result, or what came of its transactions, which are ended where they began."""
    try:
        result = fn(job)
    except BaseException:
        two_phase.roll_back_sync(execution)
        raise
    if execution.work is None:
        return result
    return two_phase.finish_sync(execution, _ended(execution, result, reconciling))


def _ended(execution: Execution, result: Any, reconciling: bool) -> Outcome:  # noqa: FBT001 - hot
    """What it means that the handler returned."""
    if execution.reason is not None and (not execution.thread or execution.heard or execution.line.broke):
        return interrupted(execution)  # it swallowed its cancellation, heard of it and left, or read half an answer
    return returned(execution, result, reconciling=reconciling)


def _job(execution: Execution) -> Job[Any] | SyncJob[Any]:
    """What the handler sees of it."""
    row = execution.row
    return (Job if execution.handler.is_async else SyncJob)(
        id=execution.id,
        kind=row.kind,
        payload=execution.payload,
        resource_key=row.resource_key,
        attempt=row.attempts + 1,
        execution=row.executions + 1,
        idempotency_key=row.idempotency_key,
        tags=row.tags or {},
        ordering_key=row.ordering_key,
        order_no=row.order_no,
        side=execution,
    )
