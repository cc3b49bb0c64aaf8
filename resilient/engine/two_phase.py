"""Prepare and complete: the handler's own transactions, and the end of its job inside the last of them.

    staged (default)    prepare: a short transaction of its own, under the fence; complete: another, which stays open
                        after its block, takes in the completion, and is committed when the handler returns
    atomic              one transaction from the first block to the return; each block in a savepoint

Whatever ends the handler otherwise (an exception, a Snooze, an interruption, a lost lease) rolls the open transaction
back, and what becomes of the job is written apart from it. The fenced update of the job comes last: were the job given
to another worker meanwhile, nothing of this one would be committed. A commit is never interrupted; one whose answer was
lost is recognised by the version it left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import time
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Final

from resilient.core.errors import InvalidInput, JobFailure
from resilient.core.failure import Failure, FailureKind
from resilient.core.outcomes import Outcome, Reconciled, Succeeded
from resilient.engine import completer, joining, user_sessions
from resilient.engine.away import retry_pause
from resilient.engine.endings import raised
from resilient.engine.foreign import ends_task
from resilient.engine.sessions import BROKEN_OFF
from resilient.engine.steps import require_going
from resilient.store import leases, trouble

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
    from uuid import UUID

    from sqlalchemy import Connection
    from sqlalchemy.orm import Session

    from resilient.engine.execution import Execution
    from resilient.engine.user_sessions import Opened
    from resilient.store.dialect import Dialect

log = logging.getLogger("resilient.worker")
AFTER_COMMIT_PATIENCE: Final = 10.0


class Work:
    """The transactions of one execution's handler."""

    __slots__ = ("after", "committing", "completed", "opened", "stack", "workflows")

    def __init__(self) -> None:
        self.opened: Opened | None = None  # a transaction that outlives its block
        self.stack: Any = None  # ends it
        self.completed = False  # a complete block was left in peace: the job's end belongs into the transaction
        self.committing = False
        self.after: list[Callable[[], Any]] = []
        self.workflows: list[UUID] = []  # that got more steps


def _work(execution: Execution, word: str) -> Work:
    """Its work, made with the first block; raises `InvalidInput` where this block cannot begin."""
    if execution.run is not None:
        raise InvalidInput(f"job.{word}() in a batch handler: its jobs end by succeed and fail, each on its own")
    execution.require_running()
    work = execution.work = execution.work or Work()
    if work.completed:
        raise InvalidInput(f"job.{word}() after job.complete(): return, and everything is committed together")
    return work


def _is_atomic(execution: Execution) -> bool:
    return execution.handler.mode == "atomic"


def require_open(execution: Execution) -> Work:
    """The work whose commit is to come; raises `InvalidInput` if there is none."""
    if execution.work is None or execution.work.opened is None:
        raise InvalidInput("job.after_commit() needs the transaction it waits for: call it in `job.complete()`")
    return execution.work


# -- blocks --------------------------------------------------------------------------------------------------


@asynccontextmanager
async def prepare(execution: Execution) -> AsyncIterator[Any]:
    """See `Job.prepare`."""
    work = _work(execution, "prepare")
    with _asks(execution, work):
        if not _is_atomic(execution):
            async with user_sessions.opened(execution, lambda s: _check_held(s, execution)) as session:
                yield session
            return
        session = await _open(execution, work)
        async with session.begin_nested():
            yield session


@asynccontextmanager
async def complete(execution: Execution) -> AsyncIterator[Any]:
    """See `Job.complete`."""
    work = _work(execution, "complete")
    session = await _open(execution, work)
    with _asks(execution, work):
        if _is_atomic(execution):
            async with session.begin_nested():
                yield session
        else:
            try:
                yield session
                await session.flush()
            except BaseException:
                await roll_back(execution)
                raise
    work.completed = True


@contextmanager
def prepare_sync(execution: Execution) -> Iterator[Any]:
    """`prepare` for threads."""
    work = _work(execution, "prepare")
    with _asks(execution, work):
        if not _is_atomic(execution):
            with user_sessions.opened_sync(execution, lambda s: _check_held(s, execution)) as session:
                yield session
            return
        session = _open_sync(execution, work)
        with session.begin_nested():
            yield session


@contextmanager
def complete_sync(execution: Execution) -> Iterator[Any]:
    """`complete` for threads."""
    work = _work(execution, "complete")
    session = _open_sync(execution, work)
    with _asks(execution, work):
        if _is_atomic(execution):
            with session.begin_nested():
                yield session
        else:
            try:
                yield session
                session.flush()
            except BaseException:
                roll_back_sync(execution)
                raise
    work.completed = True


@contextmanager
def _asks(execution: Execution, work: Work) -> Iterator[None]:
    """What a block asks for, follow-ups and calls after the commit, is undone with it, also where that is caught."""
    follow_ups, after = execution.follow_ups, list(work.after)
    try:
        yield
    except BaseException:
        execution.follow_ups, work.after = follow_ups, after
        raise


async def _open(execution: Execution, work: Work) -> Any:
    if work.opened is None:
        async with AsyncExitStack() as stack:
            work.opened = await stack.enter_async_context(user_sessions.begun(execution))
            work.stack = stack.pop_all()
    return work.opened.session


def _open_sync(execution: Execution, work: Work) -> Any:
    if work.opened is None:
        with ExitStack() as stack:
            work.opened = stack.enter_context(user_sessions.begun_sync(execution))
            work.stack = stack.pop_all()
    return work.opened.session


def _check_held(session: Session, execution: Execution) -> None:
    session.flush()
    execution.require_running()
    d = execution.app.database.dialect
    execution.require_held(leases.is_held(session.connection(), d, execution.id, execution.fence))


# -- the end -------------------------------------------------------------------------------------------------


async def finish(execution: Execution, outcome: Outcome) -> Outcome:
    """The handler returned: commit its work with the completion, or roll it back; returns what came of it."""
    work = execution.work
    if work is None or work.opened is None:
        return outcome
    if (result := _success(outcome)) is None:
        await roll_back(execution)
        return outcome
    try:
        await _undisturbed(_commit(execution, work, result))
    except BaseException as error:  # noqa: BLE001 - it is told to the job
        if not await _was_committed(execution, work):
            return raised(execution, named(error))
    execution.over = True
    with contextlib.suppress(asyncio.CancelledError), _logged(execution):
        async with asyncio.timeout(AFTER_COMMIT_PATIENCE):
            await _call_after(execution, work)
    return _committed(execution, result)


async def _call_after(execution: Execution, work: Work) -> None:
    for fn in work.after:
        with _logged(execution):
            told = fn()
            if inspect.isawaitable(told):
                await told


def finish_sync(execution: Execution, outcome: Outcome) -> Outcome:
    """`finish` for threads."""
    work = execution.work
    if work is None or work.opened is None:
        return outcome
    if (result := _success(outcome)) is None:
        roll_back_sync(execution)
        return outcome
    try:
        _commit_sync(execution, work, result)
    except BaseException as error:  # noqa: BLE001 - it is told to the job
        if not _was_committed_sync(execution, work):
            return raised(execution, named(error))
    execution.over = True
    for fn in work.after:
        with _logged(execution):
            fn()
    return _committed(execution, result)


def _success(outcome: Outcome) -> Succeeded | None:
    if isinstance(outcome, Reconciled) and outcome.took_effect:
        return Succeeded()
    return outcome if isinstance(outcome, Succeeded) else None


def _committed(execution: Execution, result: Succeeded) -> Succeeded:
    if execution.follow_ups:
        execution.app.poke()
    return Succeeded(result.result, written=True)


def _taken(work: Work) -> tuple[Any, Any]:
    found = work.opened, work.stack
    work.opened = work.stack = None
    return found


async def _commit(execution: Execution, work: Work, result: Succeeded) -> None:
    opened, stack = _taken(work)
    async with stack:
        await opened.session.run_sync(_complete, execution, result)
        opened.ours.append(True)
        work.committing = True
        await opened.session.commit()


def _commit_sync(execution: Execution, work: Work, result: Succeeded) -> None:
    opened, stack = _taken(work)
    with stack:
        _complete(opened.session, execution, result)
        opened.ours.append(True)
        work.committing = True
        opened.session.commit()


def _complete(session: Session, execution: Execution, result: Succeeded) -> None:
    """The last statements before the commit."""
    session.flush()
    execution.require_running()
    freed = dict.fromkeys(execution.worker.gate.capped(execution.resource_key), 1)
    done = [(execution.id, execution.fence, result.result)]
    d = execution.app.database.dialect
    # What its session buffered takes places in lanes, as what was ended does: written together, lanes are taken sorted.
    buffered, ends = joining.taken(session, d)
    follow_ups = {execution.id: [*(execution.follow_ups or ()), *buffered]}
    c = session.connection()
    written = completer.write(c, d, done, [], freed, follow_ups=follow_ups, ends=ends)
    execution.require_held(execution.id in written)
    for id_ in sorted(set(execution.work.workflows if execution.work is not None else ())):
        require_going(c, d, id_, lock=True)


def named(error: BaseException) -> BaseException:
    """What left a handler with transactions; broken off by the database for another one: that is nobody's bug."""
    state = getattr(getattr(error, "orig", None), "sqlstate", None)
    if state not in BROKEN_OFF:
        return error
    failure = Failure(FailureKind.CONFLICT, code=state)
    named = JobFailure("the database broke the job's transaction off because of another one", failure=failure)
    named.__cause__ = error
    return named


async def _was_committed(execution: Execution, work: Work) -> bool:
    """Whether a commit that failed took place all the same: the answer was lost. It is asked until it answers."""
    tries = 0
    while work.committing and not execution.lost:
        try:
            return await execution.app.database.transaction(_is_done, execution)
        except asyncio.CancelledError:  # timeout, stop, lost lease: what is written now is refused if it was committed
            return False
        except Exception as error:  # noqa: BLE001 - whatever it is, the commit is not known to have failed
            if _is_told(execution, error, tries):
                return False
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(retry_pause(tries, execution.worker.rng.random()))
        tries += 1
    return False


def _was_committed_sync(execution: Execution, work: Work) -> bool:
    tries = 0
    while work.committing and not execution.lost:
        try:
            return execution.app.database.transaction_sync(_is_done, execution)
        except Exception as error:  # noqa: BLE001 - as above
            if _is_told(execution, error, tries):
                return False
        time.sleep(retry_pause(tries, execution.worker.rng.random()))
        tries += 1
    return False


def _is_told(execution: Execution, error: Exception, tries: int) -> bool:
    """Whether asking again is in vain: the worker stops, or something else than the database is wrong."""
    execution.away = error if trouble.met(error) else None
    return execution.reason is not None or (execution.away is None and tries > 0)


def _is_done(c: Connection, d: Dialect, execution: Execution) -> bool:
    return leases.held_versions(c, d, [execution.id]).get(execution.id) == (execution.fence + 1, "succeeded")


async def roll_back(execution: Execution) -> None:
    """Undo what is open, if anything is."""
    if (work := execution.work) is not None and work.opened is not None:
        _, stack = _taken(work)
        work.after, work.workflows = [], []
        with _logged(execution):
            await _undisturbed(stack.aclose())


def roll_back_sync(execution: Execution) -> None:
    """`roll_back` for threads."""
    if (work := execution.work) is not None and work.opened is not None:
        _, stack = _taken(work)
        work.after, work.workflows = [], []
        with _logged(execution):
            stack.close()


async def _undisturbed(coroutine: Coroutine[Any, Any, None]) -> None:
    """Wait for it even where this task is cancelled meanwhile: a transaction is not left in the middle of its end."""
    task = asyncio.ensure_future(coroutine)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([task])
    task.result()


@contextmanager
def _logged(execution: Execution) -> Iterator[None]:
    """What fails here does not change what becomes of the job."""
    try:
        yield
    except BaseException as error:
        if ends_task(error):
            raise
        log.exception("after the end of a transaction of job %s (%s)", execution.id, execution.row.kind)
