"""Prepare and complete: the handler's own transactions, and the end of its job inside the last of them.

    staged (default)    prepare: a short transaction of its own, under the fence; complete: another, which stays open
                        after its block, takes in the completion, and is committed when the handler returns
    atomic              one transaction from the first block to the return; each block in a savepoint

Whatever ends the handler otherwise (an exception, a Snooze, an interruption, a lost lease) rolls the open transaction
back, and what becomes of the job is written apart from it. The fenced update of the job comes last: were the job given
to another worker meanwhile, nothing of this one would be committed. A commit is never interrupted; one whose answer was
lost is recognised by the version it left behind.

The session comes from ``Resilient(session_factory=...)``, else it is a plain AsyncSession or Session on the app's
database. While it is open the job's client refuses to send: a transaction must not wait for a provider. The user never
commits it; that would separate rows from what must be committed with them.

All of it is written once, as coroutines. Where the handler runs in a thread its session is a plain Session, nothing
suspends, and the thread drives them to their end on the spot (`ground/sessions.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from resilient.core.base.errors import Failure, FailureKind, InvalidInput, JobFailure, ResilientError
from resilient.core.base.loggers import logger
from resilient.core.jobs.backoff import retry_pause
from resilient.engine.ground.foreign import ends_task
from resilient.engine.ground.sessions import RETRYABLE_SQLSTATES
from resilient.engine.jobs import queue
from resilient.engine.jobs.workflows import require_going
from resilient.engine.run import completer
from resilient.engine.run.execution import Opened, Work, patiently
from resilient.store.db import trouble
from resilient.store.jobs import finishing, leases

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
    from uuid import UUID

    from sqlalchemy import Connection

    from resilient.core.jobs.outcomes import Succeeded
    from resilient.engine.ground.encoder import JobRequest
    from resilient.engine.run.execution import Execution
    from resilient.store.db.dialect import Dialect

log = logger("worker")
T = TypeVar("T")
AFTER_COMMIT_PATIENCE: Final = 10.0  # seconds for all calls after the commit
IDLE_BEYOND: Final = 10.0  # seconds beyond its handler's timeout that a transaction may be idle


def _work(execution: Execution, word: str) -> Work:
    """The transactions of an execution; raises `InvalidInput` where the block ``job.<word>()`` cannot begin."""
    if execution.run is not None:
        raise InvalidInput(f"job.{word}() in a batch handler: its jobs end by succeed and fail, each on its own")
    execution.require_running()
    work = execution.begin_work()
    if work.completed:
        raise InvalidInput(f"job.{word}() after job.complete(): return, and everything is committed together")
    return work


def _is_atomic(execution: Execution) -> bool:
    return execution.handler.mode == "atomic"


def require_open(execution: Execution) -> Work:
    """The transactions of an execution; raises `InvalidInput` if none is open."""
    if execution.work is None or execution.work.opened is None:
        raise InvalidInput("job.after_commit() needs the transaction it waits for: call it in `job.complete()`")
    return execution.work


# -- blocks --------------------------------------------------------------------------------------------------


@asynccontextmanager
async def prepare(execution: Execution) -> AsyncIterator[Any]:
    """See `Job.prepare`."""
    work = _work(execution, "prepare")
    with _undone_with_block(execution, work):
        if not _is_atomic(execution):
            async with committed_session(execution, lambda s: _check_held(s, execution)) as session:
                yield session
            return
        session = await _open(execution, work)
        async with _entered(session.begin_nested()):
            yield session


@asynccontextmanager
async def complete(execution: Execution) -> AsyncIterator[Any]:
    """See `Job.complete`."""
    work = _work(execution, "complete")
    session = await _open(execution, work)
    with _undone_with_block(execution, work):
        if _is_atomic(execution):
            async with _entered(session.begin_nested()):
                yield session
        else:
            try:
                yield session
                await _settled(session.flush())
            except BaseException:
                await roll_back(execution)
                raise
    work.completed = True


# The follow-up jobs of each block in which a task is: one beside it may be in others.
_BLOCKS: Final[ContextVar[tuple[set[UUID], ...]]] = ContextVar("_BLOCKS", default=())


def follow(execution: Execution, job: JobRequest) -> None:
    """Enqueue a job with the success of an execution, unless a block fails in which this is said."""
    for ids in _BLOCKS.get():
        ids.add(job.row.id)
    execution.follow(job)


@contextmanager
def _undone_with_block(execution: Execution, work: Work) -> Iterator[None]:
    """Undo with a block what it asks for (follow-ups, calls after the commit, steps), even if the error is caught.

    Not the follow-ups of a task beside it. The others need the transaction of the block.
    """
    follow_ups, after, count = set["UUID"](), list(work.after), len(work.workflows)
    around = _BLOCKS.get()
    _BLOCKS.set((*around, follow_ups))
    try:
        yield
    except BaseException:
        execution.take_back_follow_ups(follow_ups)
        work.after = after
        del work.workflows[count:]  # in place: workflows of the transaction around it append to this list
        raise
    finally:
        _BLOCKS.set(around)


async def _open(execution: Execution, work: Work) -> Any:
    """The session of the transaction that outlives its block; only an atomic one is entered by several blocks.

    A staged block within another would end the other's transaction with its own, and the job without their rows.
    """
    if work.opened is None or not _is_atomic(execution):
        async with AsyncExitStack() as stack:
            work.opened = await stack.enter_async_context(_begun(execution))
            work.stack = stack.pop_all()
    return work.opened.session


def _check_held(session: Session, execution: Execution) -> None:
    session.flush()
    execution.require_running()
    database, c = execution.context.ground.database, session.connection()
    with database.named_errors():
        is_held = leases.is_held(c, database.dialect, execution.id, execution.fence)
    execution.require_held(is_held)


# -- sessions ------------------------------------------------------------------------------------------------


@asynccontextmanager
async def committed_session(execution: Execution, last: Callable[[Session], None]) -> AsyncIterator[Any]:
    """A session in a transaction; ``last`` is called before its commit, and rolls back what it refuses."""
    async with _begun(execution) as (session, is_ours):
        yield session
        await _on(session, last)
        is_ours.append(True)
        await _settled(session.commit())


@asynccontextmanager
async def _begun(execution: Execution) -> AsyncIterator[Opened]:
    """A session in a transaction, which is rolled back unless it is committed before the end."""
    with _exclusive(execution):
        async with _entered(_writer(execution)):
            session = await patiently(execution, partial(_ready, execution), execution.db.rest)
            plain = session.sync_session if isinstance(session, AsyncSession) else session
            with _refused_after(plain) if execution.context.sessions.makes_new else nullcontext():
                async with _entered(session):
                    with _only_ours(plain) as is_ours:
                        yield Opened(session, is_ours)


def _writer(execution: Execution) -> Any:
    """On SQLite, what lets one transaction of the process write at a time."""
    if not execution.context.ground.database.is_sqlite:
        return nullcontext()
    writer = execution.context.writer
    return writer.threads if execution.db.here else writer.tasks


async def _ready(execution: Execution) -> Any:
    """A session whose transaction has begun."""
    session = execution.context.sessions.made(Session if execution.db.here else AsyncSession)
    try:
        with execution.context.ground.database.named_errors():
            await _on(session, _begin, execution)
    except BaseException:
        await _settled(session.close())
        raise
    return session


async def _on(session: Any, fn: Callable[..., Any], *args: Any) -> Any:
    """``fn(session, ...)`` on the plain session that both kinds have."""
    if isinstance(session, AsyncSession):
        return await session.run_sync(fn, *args)
    return fn(session, *args)


async def _settled(result: Any) -> Any:
    """The result of a method of either kind of session, awaited if need be."""
    return await result if inspect.isawaitable(result) else result


@asynccontextmanager
async def _entered(manager: Any) -> AsyncIterator[Any]:
    """Enter either kind of context manager, asynchronous or plain."""
    if hasattr(manager, "__aenter__"):
        async with manager as value:
            yield value
    else:
        with manager as value:
            yield value


def _begin(session: Session, execution: Execution) -> None:
    """Begin now, on SQLite as a writer: a reader that turns writer fails at once instead of waiting.

    A connection that was cut while it rested shows here, before the handler has written anything.
    """
    database, timeout = execution.context.ground.database, execution.handler.timeout
    c = session.connection()
    trouble.mark_errors_of(c.engine)
    database.begin_as_writer(c)
    leases.bound_idle(c, database.dialect, None if timeout is None else timeout + IDLE_BEYOND)


@contextmanager
def _exclusive(execution: Execution) -> Iterator[None]:
    if execution.transaction_open:
        raise InvalidInput(f"job {execution.id} has a transaction open already: end it before the next one begins")
    execution.transaction_open = True
    try:
        yield
    finally:
        execution.transaction_open = False


@contextmanager
def _refused_after(session: Session) -> Iterator[None]:
    """Refuse what is done in a session after its end.

    SQLAlchemy would begin another transaction, which nobody commits and whose connection nobody gives back.
    """
    try:
        yield
    finally:
        vars(session)["get_bind"] = _refuse


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise InvalidInput(
        "this session of the job's has ended, with its block or its commit: what is written in it now would never be"
        " committed. Begin another block, or a session of your own"
    )


@contextmanager
def _only_ours(session: Session) -> Iterator[list[bool]]:
    """Refuse a commit by anybody else; a savepoint's release is none."""
    is_ours: list[bool] = []

    def check(s: Session) -> None:
        if not is_ours and not s.in_nested_transaction():
            raise ResilientError("do not commit the job's own session: it is committed with what belongs to it")

    event.listen(session, "before_commit", check)
    try:
        yield is_ours
    finally:
        event.remove(session, "before_commit", check)


# -- the end -------------------------------------------------------------------------------------------------


async def commit(execution: Execution, result: Succeeded) -> BaseException | None:
    """The handler returned: commit its transaction with the completion. Returns the error if it is not."""
    work = execution.work
    assert work is not None  # noqa: S101
    try:
        await _undisturbed(_commit(execution, work, result), execution)
    except BaseException as error:  # noqa: BLE001 - the job fails with it
        if not await _was_committed(execution, work):
            return named(error)
    execution.leave()
    if execution.db.here:
        await _call_after(execution, work)
    else:
        with contextlib.suppress(asyncio.CancelledError), _logged(execution):
            async with asyncio.timeout(AFTER_COMMIT_PATIENCE):
                await _call_after(execution, work)
    if execution.follow_ups:
        execution.context.ground.poke()
    return None


async def _call_after(execution: Execution, work: Work) -> None:
    for fn in work.after:
        with _logged(execution):
            result = fn()
            if inspect.isawaitable(result) and not execution.db.here:
                await result


async def _commit(execution: Execution, work: Work, result: Succeeded) -> None:
    opened, stack = _detached(work)
    async with stack:
        await _on(opened.session, _complete, execution, result)
        opened.is_ours.append(True)
        work.committing = True
        await _settled(opened.session.commit())


def _detached(work: Work) -> tuple[Any, Any]:
    """Take out the open session and the stack that ends it: the caller ends them."""
    pair = work.opened, work.stack
    work.opened = work.stack = None
    return pair


def _complete(session: Session, execution: Execution, result: Succeeded) -> None:
    """The last statements before the commit."""
    session.flush()
    execution.require_running()
    freed = dict.fromkeys(execution.context.gate.capped(execution.resource_key), 1)
    done = [(execution.id, execution.fence, result.result)]
    database = execution.context.ground.database
    d = database.dialect
    # Buffered jobs lock lanes, and so do jobs that the session ended: written by one call, lanes are locked in order.
    buffered, ends = queue.take_buffered(session, d)
    follow_ups = {execution.id: [*(execution.follow_ups or ()), *buffered]}
    c = session.connection()
    with database.named_errors():
        written = completer.write(c, d, done, [], freed, follow_ups=follow_ups, ends=ends)
    execution.require_held(execution.id in written)
    for id_ in sorted(set(execution.work.workflows if execution.work is not None else ())):
        require_going(c, d, id_, lock=True)


def named(error: BaseException) -> BaseException:
    """The error of a handler's transaction; a conflict, nobody's bug, if the database broke it off for another one."""
    state = getattr(getattr(error, "orig", None), "sqlstate", None)
    if state not in RETRYABLE_SQLSTATES:
        return error
    failure = Failure(FailureKind.CONFLICT, code=state)
    conflict = JobFailure("the database broke the job's transaction off because of another one", failure=failure)
    conflict.__cause__ = error
    return conflict


async def _was_committed(execution: Execution, work: Work) -> bool:
    """Whether a commit that raised took place all the same. Asks the database until it answers.

    At least once, whatever interrupts it: the heartbeat may see the job's end first, and take it for a lost lease.
    """
    tries, db = 0, execution.db
    while work.committing:
        try:
            return await _undisturbed(db.transaction(_is_done, execution), execution)
        except asyncio.CancelledError:  # the program ends
            return False
        except Exception as error:  # noqa: BLE001 - whatever it is, the commit is not known to have failed
            if _gives_up(execution, error, tries):
                return False
        with contextlib.suppress(asyncio.CancelledError):
            await db.rest(retry_pause(tries, execution.context.roll()))
        tries += 1
    return False


def _gives_up(execution: Execution, error: Exception, tries: int) -> bool:
    """Whether asking again is in vain: the worker stops, or something else than the database is wrong."""
    execution.outage = error if trouble.is_of_database(error) else None
    return execution.reason is not None or (execution.outage is None and tries > 0)


def _is_done(c: Connection, d: Dialect, execution: Execution) -> bool:
    version, *end = leases.ends(c, d, [execution.id]).get(execution.id, (0,))
    if version == execution.fence + 1:
        return tuple(end) in finishing.AFTER_SUCCESS
    # What runs once more may have been claimed meanwhile: its history has the end of this execution.
    return finishing.ran_once_more(c, d, execution.id, execution.row.executions + 1)


async def roll_back(execution: Execution) -> None:
    """Undo what is open, if anything is."""
    if (work := execution.work) is not None and work.opened is not None:
        _, stack = _detached(work)
        work.after, work.workflows = [], []
        with _logged(execution):
            await _undisturbed(stack.aclose(), execution)


async def _undisturbed(coroutine: Coroutine[Any, Any, T], execution: Execution) -> T:
    """Await a coroutine to its end, even if this task is cancelled: no transaction is left in the middle of its end."""
    if execution.db.here:
        return await coroutine
    task = asyncio.ensure_future(coroutine)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([task])
    return task.result()


@contextmanager
def _logged(execution: Execution) -> Iterator[None]:
    """Log an error and go on: it does not change what becomes of the job."""
    try:
        yield
    except BaseException as error:
        if ends_task(error):
            raise
        log.exception("after the end of a transaction of job %s (%s)", execution.id, execution.row.kind)
