"""The user's own session inside a handler: opened, ended by a last word of ours, committed.

It comes from ``Resilient(session_factory=...)``, else it is a plain AsyncSession or Session on the app's
database. While it is open the job's client refuses to send: a transaction must not wait for a provider. The
user never commits it; that would separate rows from what must be committed with them.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from resilient.core.errors import InvalidInput, ResilientError, SetupError
from resilient.engine.away import patiently, patiently_sync
from resilient.store import leases, trouble

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from resilient.engine.app import Resilient
    from resilient.engine.execution import Execution


IDLE_BEYOND: Final = 10.0  # seconds beyond its handler's timeout that a transaction may be idle


class Opened(NamedTuple):
    """A user's session in a transaction; ``ours`` must get an element before it is committed."""

    session: Any
    ours: list[bool]


@asynccontextmanager
async def begun(execution: Execution) -> AsyncIterator[Opened]:
    """An AsyncSession in a transaction, which is rolled back unless it is committed before the end."""
    async with _exclusive(execution), await patiently(execution, partial(_ready, execution)) as session:
        with _only_ours(session.sync_session) as ours:
            yield Opened(session, ours)


@contextmanager
def begun_sync(execution: Execution) -> Iterator[Opened]:
    """`begun` for threads: a Session."""
    begin = partial(_ready_sync, execution)
    with _exclusive_sync(execution), patiently_sync(execution, begin) as session, _only_ours(session) as ours:
        yield Opened(session, ours)


async def _ready(execution: Execution) -> Any:
    """An AsyncSession whose transaction has begun."""
    session = _made(execution.app, AsyncSession)
    try:
        with execution.app.database.named_errors():
            await session.run_sync(_begin, execution)
    except BaseException:
        await session.close()
        raise
    return session


def _ready_sync(execution: Execution) -> Any:
    session = _made(execution.app, Session)
    try:
        with execution.app.database.named_errors():
            _begin(session, execution)
    except BaseException:
        session.close()
        raise
    return session


@asynccontextmanager
async def opened(execution: Execution, last: Callable[[Session], None]) -> AsyncIterator[Any]:
    """An AsyncSession in a transaction; ``last`` is called before its commit, and rolls back what it refuses."""
    async with begun(execution) as (session, ours):
        yield session
        await session.run_sync(last)
        ours.append(True)
        await session.commit()


@contextmanager
def opened_sync(execution: Execution, last: Callable[[Session], None]) -> Iterator[Any]:
    """`opened` for threads: a Session."""
    with begun_sync(execution) as (session, ours):
        yield session
        last(session)
        ours.append(True)
        session.commit()


def _begin(session: Session, execution: Execution) -> None:
    """Begin now, on SQLite as a writer: a reader that turns writer fails at once instead of waiting.

    A connection that was cut while it rested shows here, before the handler has written anything.
    """
    database, timeout = execution.app.database, execution.handler.timeout
    c = session.connection()
    trouble.note(c.engine)
    database.begin_as_writer(c)
    leases.bound_idle(c, database.dialect, None if timeout is None else timeout + IDLE_BEYOND)


@contextmanager
def _held(execution: Execution) -> Iterator[None]:
    if execution.transaction_open:
        raise InvalidInput(f"job {execution.id} has a transaction open already: end it before the next one begins")
    execution.transaction_open = True
    try:
        yield
    finally:
        execution.transaction_open = False


class Writer:
    """SQLite has one writer: a worker's handlers queue for it here, instead of waking up now and then to ask."""

    def __init__(self) -> None:
        self.tasks = asyncio.Lock()
        self.threads = threading.Lock()


@asynccontextmanager
async def _exclusive(execution: Execution) -> AsyncIterator[None]:
    with _held(execution):
        async with execution.worker.writer.tasks if execution.app.database.is_sqlite else nullcontext():
            yield


@contextmanager
def _exclusive_sync(execution: Execution) -> Iterator[None]:
    with _held(execution), execution.worker.writer.threads if execution.app.database.is_sqlite else nullcontext():
        yield


@contextmanager
def _only_ours(session: Session) -> Iterator[list[bool]]:
    """Refuse a commit by anybody else; a savepoint's release is none."""
    ours: list[bool] = []

    def check(s: Session) -> None:
        if not ours and not s.in_nested_transaction():
            raise ResilientError("do not commit the job's own session: it is committed with what belongs to it")

    event.listen(session, "before_commit", check)
    try:
        yield ours
    finally:
        event.remove(session, "before_commit", check)


def _made(app: Resilient, kind: type[Any]) -> Any:
    if app.session_factory is None:
        return (
            AsyncSession(app.session_engines.asynchronous, expire_on_commit=False)
            if kind is AsyncSession
            else Session(app.session_engines.synchronous, expire_on_commit=False)
        )
    session = app.session_factory()
    if not isinstance(session, kind):
        raise SetupError(
            f"session_factory= makes a {type(session).__name__}, but this handler needs"
            f" {'an' if kind is AsyncSession else 'a'} {kind.__name__}:"
            " `async def` handlers take an AsyncSession, plain ones a Session"
        )
    return session
