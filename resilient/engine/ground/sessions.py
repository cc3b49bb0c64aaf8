"""Four ways to run one store function: in a transaction of its own or in the caller's, async or blocking.

The caller passes a Session (SQLModel's too), AsyncSession, Connection, AsyncConnection or scoped session. What is
written in it exists only if it commits; workers are woken after that.

An API is written once, as async methods that await nothing but `Transactions`. Its synchronous facade has the same
methods (`blocking`): if no transaction suspends, a coroutine runs to its end in one step. So there is no second text
(twins drift apart), no event loop and no thread.

`SessionEngines`: the engines of handlers' sessions, apart from the engine's own connections, which keep leases and
write results. Handlers may hold as many transactions open as there are slots; they wait for each other's connections
here, and never take the last one from the heartbeat. An engine that the program passes to the app serves both.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from functools import cache, partial, wraps
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Concatenate, Final, Generic, ParamSpec, Protocol, TypeAlias, TypeVar, cast

from sqlalchemy import Connection, Engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import (
    AsyncConnection,
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.pool import StaticPool
from sqlalchemy.util import greenlet_spawn

from resilient.core.base.errors import DatabaseBusy, DatabaseUnreachable, InvalidInput, SetupError
from resilient.store.db import pool
from resilient.store.db.file import guard

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
    from types import TracebackType

    from sqlalchemy import NestedTransaction

    from resilient.engine.ground.ground import Ground
    from resilient.store.db.database import Database
    from resilient.store.db.dialect import Dialect


RETRYABLE_SQLSTATES: Final = ("40P01", "40001")  # deadlock, serialization failure: nothing was committed
RETRIES: Final = 4  # of a transaction that the database aborted
T = TypeVar("T")
P = ParamSpec("P")
A = TypeVar("A")
CallersSession: TypeAlias = (
    Session | AsyncSession | Connection | AsyncConnection | scoped_session[Any] | async_scoped_session[Any] | None
)


class Wake(Protocol):
    """Wakes workers after a commit: now, or once a transaction is not ``is_open`` any more."""

    def __call__(self, is_open: Callable[[], bool] | None = None) -> None:
        """See `Ground.poke`."""


class Transactions:
    """Runs store functions for one app; with ``here``, it blocks the calling thread and never suspends."""

    def __init__(self, ground: Ground, *, here: bool = False) -> None:
        self._ground, self.here = ground, here

    async def read(
        self,
        session: CallersSession,
        fn: Callable[Concatenate[Connection, Dialect, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Run ``fn(connection, dialect, ...)``, which only reads."""
        if session is not None:
            return await self._join(session, lambda c, d: fn(c, d, *args, **kwargs), writes=False)
        try:
            return await self._own(lambda c, d: fn(c, d, *args, **kwargs))
        except DatabaseBusy:
            raise
        except DatabaseUnreachable:  # perhaps an idle connection was cut: to read twice does no harm
            return await self._own(lambda c, d: fn(c, d, *args, **kwargs))

    async def write(
        self,
        session: CallersSession,
        fn: Callable[Concatenate[Connection, Dialect, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Run ``fn(connection, dialect, ...)``; workers are woken after the commit."""
        if session is not None:
            return await self._join(session, lambda c, d: fn(c, d, *args, **kwargs), writes=True)
        result = await self._own(lambda c, d: fn(c, d, *args, **kwargs))
        self._ground.poke()
        return result

    async def rest(self, seconds: float) -> None:
        """Wait between two transactions."""
        if self.here:
            time.sleep(seconds)  # noqa: ASYNC251 - the synchronous facade: nobody else is on this thread
        else:
            await asyncio.sleep(seconds)

    async def _own(self, fn: Callable[[Connection, Dialect], T]) -> T:
        """Run in a transaction of its own; up to `RETRIES` times again if the database aborts it."""
        for _ in range(RETRIES):
            try:
                return await self.transaction(fn)
            except DBAPIError as error:
                if getattr(error.orig, "sqlstate", None) not in RETRYABLE_SQLSTATES:
                    raise
        return await self.transaction(fn)

    async def transaction(self, fn: Callable[..., T], *args: Any) -> T:
        """Run ``fn(connection, dialect, ...)`` once, in a transaction of its own; workers are not woken after it."""
        database = self._ground.database
        if self.here:
            self._ground.ready_sync()
            return database.transaction_sync(fn, *args)
        await self._ground.ready()
        return await database.transaction(fn, *args)

    async def statement(self, fn: Callable[..., T], *args: Any) -> T:
        """`transaction` for a `direct` function that runs exactly one statement: see `Database.statement`."""
        database = self._ground.database
        if self.here:
            self._ground.ready_sync()
            return database.statement_sync(fn, *args)
        await self._ground.ready()
        return await database.statement(fn, *args)

    async def _join(self, target: Any, fn: Callable[[Connection, Dialect], T], *, writes: bool) -> T:
        if isinstance(target, async_scoped_session):
            target = target()
        if not isinstance(target, (AsyncSession, AsyncConnection)):
            return _joined(target, self._ground, fn, writes=writes)
        if self.here:
            raise InvalidInput(_no_plain_session(target))
        return await target.run_sync(_joined, self._ground, fn, writes=writes)


def _joined(target: Any, ground: Ground, fn: Callable[[Connection, Dialect], T], *, writes: bool) -> T:
    """Run in the caller's transaction."""
    target = unscoped(target)
    if writes or not isinstance(target, (Session, Connection)):
        target, c = enter(target, ground.poke)
    else:
        c = target.connection() if isinstance(target, Session) else target
    if isinstance(target, Session):
        target.flush()
    return fn(c, ground.database.dialect)


def unscoped(target: Any) -> Any:
    """The session of a scoped session; anything else as it is."""
    return target() if isinstance(target, (scoped_session, async_scoped_session)) else target


def enter(target: Any, on_commit: Wake) -> tuple[Any, Connection]:
    """The caller's session or connection, and the connection to write on; ``on_commit`` is called after its commit.

    Raises `InvalidInput` for anything else, and for autocommit: what is written there would be committed at once.
    """
    target = unscoped(target)
    if isinstance(target, Connection):
        require_transaction(target, "connection")
        _hook_connection(target, on_commit)
        return target, target
    if isinstance(target, (AsyncSession, AsyncConnection)):
        raise InvalidInput(_no_plain_session(target))
    if not isinstance(target, Session):
        raise InvalidInput(
            f"session= takes a Session, AsyncSession, Connection or AsyncConnection, not {type(target).__name__}"
        )
    if not target.in_transaction():
        target.begin()
    c = target.connection()
    require_transaction(c, "session")
    if target.get_bind() is c:  # the connection's transaction may go on after the session's commit
        _hook_connection(c, on_commit)
    else:
        on_outermost_commit(target, on_commit)
    return target, c


def savepoint(c: Connection) -> NestedTransaction:
    """A savepoint in a caller's transaction.

    SQLite's driver begins a transaction with its first write. A savepoint before that would be one of its own, and its
    end a commit: https://docs.sqlalchemy.org/en/20/dialects/sqlite.html#pysqlite-serializable
    """
    if c.dialect.name == "sqlite" and not c.connection.driver_connection.in_transaction:  # type: ignore[union-attr]
        c.exec_driver_sql("BEGIN")
    return c.begin_nested()


def _no_plain_session(target: AsyncSession | AsyncConnection) -> str:
    plain = type(target).__name__.removeprefix("Async")
    return (
        f"app.sync and other plain calls take a {plain}, not an {type(target).__name__}: `await` the app's own method"
        f" with it, or go through `await session.run_sync(...)`, which gives a plain {plain}"
    )


def require_transaction(c: Connection, what: str) -> None:
    """Raise `InvalidInput` where each statement would be committed at once."""
    if not c.in_transaction() or _commits_by_itself(c):
        raise InvalidInput(
            f"the {what} is not in a transaction (autocommit): begin one; a job may leave out session= and gets its own"
        )


def require_committable(session: Session) -> Engine | Connection:
    """Begin a transaction if there is none. Raises `InvalidInput` if the session's settings rule out a transaction.

    It does no I/O, so that it serves asynchronous sessions; `require_transaction` checks the connection later.
    Returns what the session is bound to.
    """
    bind = session.get_bind()
    options = bind.get_execution_options() if isinstance(bind, Engine) else {}
    level = options.get("isolation_level") or getattr(bind.dialect, "_on_connect_isolation_level", None)
    if level == "AUTOCOMMIT":
        raise InvalidInput("the session commits each statement (autocommit): give its engine no isolation level")
    if not session.in_transaction():
        if not session.autobegin:
            raise InvalidInput("the session has no transaction and begins none by itself: call session.begin() before")
        session.begin()
    return bind


def _commits_by_itself(c: Connection) -> bool:
    """Whether each statement is committed at once, by the connection's options, the engine's or the driver's."""
    if c.get_execution_options().get("isolation_level") == "AUTOCOMMIT":
        return True
    if c.dialect.name == "sqlite":
        driver: Any = c.connection.driver_connection
        return driver.isolation_level is None and not driver.in_transaction  # some programs send BEGIN themselves
    return getattr(c.connection.dbapi_connection, "autocommit", None) is True


def on_outermost_commit(session: Session, on_commit: Wake) -> None:
    """Call ``on_commit`` after each outermost commit of the session. It is a hint to workers, which may be lost."""
    if (wakes := session.info.get(_WAKES)) is None:
        session.info[_WAKES] = {on_commit}
    else:
        wakes.add(on_commit)
    _listen()


@cache
def _listen() -> None:
    """Listen to all sessions, once: a listener of its own costs a session as much as a statement."""
    event.listen(Session, "after_commit", _committed)


def _committed(session: Session) -> None:
    if (wakes := session.info.get(_WAKES)) and not session.in_nested_transaction():
        for wake in wakes:
            wake()


def _hook_connection(c: Connection, on_commit: Wake) -> None:
    """Call ``on_commit`` after each commit of the connection; SQLAlchemy has events only before it."""
    if (wakes := _CONNECTIONS.get(c)) is not None:
        wakes.add(on_commit)
        return
    wakes = _CONNECTIONS[c] = {on_commit}

    def committing(c: Connection, *_: Any) -> None:
        is_open = attrgetter("is_active")
        for wake in wakes:
            wake(partial(is_open, c.get_transaction()))

    for name in ("commit", "commit_twophase"):
        event.listen(c, name, committing)


_WAKES: Final = "resilient.wakes"
_CONNECTIONS: Final[weakref.WeakKeyDictionary[Connection, set[Wake]]] = weakref.WeakKeyDictionary()


class SyncFacade(Generic[A]):
    """The synchronous facade of an API: ``inner`` is the async one on `Transactions` that block."""

    def __init__(self, inner: A) -> None:
        self._inner = inner


def blocking(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[SyncFacade[A], P], T]:
    """The same method for a `SyncFacade`."""

    @wraps(method)
    def call(self: SyncFacade[A], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return to_the_end(method(self._inner, *args, **kwargs))

    return call


def to_the_end(coroutine: Awaitable[T]) -> T:
    """Run a coroutine that awaits nothing but blocking transactions, and return its result."""
    try:
        cast("Coroutine[Any, Any, T]", coroutine).send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError(f"{coroutine!r} waited for something else than its database")


class BlockingBlock(AbstractContextManager[T]):
    """An async context manager that awaits nothing but blocking transactions, for ``with``."""

    def __init__(self, block: AbstractAsyncContextManager[T]) -> None:
        self._block = block

    def __enter__(self) -> T:
        return to_the_end(self._block.__aenter__())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return to_the_end(self._block.__aexit__(kind, error, trace))


def one_by_one(values: AsyncGenerator[T, None]) -> Iterator[T]:
    """The values of an async generator that awaits nothing but blocking transactions."""
    try:
        while True:
            try:
                value = to_the_end(values.__anext__())
            except StopAsyncIteration:
                return
            yield value
    finally:
        to_the_end(values.aclose())


PATIENCE: Final = 120.0  # seconds a handler waits for a connection
_IN_MEMORY: Final = "a database in memory has no second connection for sessions: use a file"


class Writer:
    """The locks of SQLite's one writer: a worker's handlers queue here for it, instead of polling the file."""

    def __init__(self) -> None:
        self.tasks = asyncio.Lock()
        self.threads = threading.Lock()


class SessionEngines:
    """The engines of handlers' sessions: made on first use, closed with the app.

    ``factory`` is the program's ``session_factory``; it makes the sessions instead.
    """

    def __init__(self, database: Database, factory: Callable[[], Any] | None = None) -> None:
        self._database, self.factory = database, factory
        self.begin_anew()
        pool.renew_in_children(self)
        self._sync: Engine | None = None
        self._async: AsyncEngine | None = None

    def begin_anew(self) -> None:
        """See `pool.renew_in_children`; the engines are the database's to renew."""
        self._lock = threading.Lock()

    @property
    def makes_new(self) -> bool:
        """Whether each session is certainly a new one: a function may return one that its thread or task keeps."""
        return self.factory is None or isinstance(self.factory, (sessionmaker, async_sessionmaker, type))

    def made(self, kind: type[AsyncSession | Session]) -> Any:
        """A session of this kind for a handler. Raises `SetupError` if the program's factory makes another one."""
        if self.factory is None:
            if kind is AsyncSession:
                return AsyncSession(self.asynchronous, expire_on_commit=False)
            return Session(self.synchronous, expire_on_commit=False)
        session = self.factory()
        if not isinstance(session, kind):
            raise SetupError(
                f"session_factory= makes a {type(session).__name__}, but this handler needs"
                f" {'an' if kind is AsyncSession else 'a'} {kind.__name__}:"
                " `async def` handlers take an AsyncSession, plain ones a Session"
            )
        return session

    @property
    def synchronous(self) -> Engine:
        """The engine for plain handlers. Raises `SetupError` for a database in memory."""
        database = self._database
        if database.is_sqlite or not database.is_own:
            engine = database.sync_engine
            if isinstance(engine.pool, StaticPool):
                raise SetupError(_IN_MEMORY)
            return engine
        with self._lock:
            if self._sync is None:
                self._sync = database.new_engine("sessions", timeout=PATIENCE)
            return self._sync

    @property
    def asynchronous(self) -> AsyncEngine:
        """The engine for ``async def`` handlers. Raises `SetupError` for a database in memory."""
        database = self._database
        if not database.is_own and (engine := database.async_engine) is not None:
            return engine
        if self._async is None:
            self._async = self._new_async()
        return self._async

    def _new_async(self) -> AsyncEngine:
        database = self._database
        if not database.is_sqlite:
            return database.new_async_engine("sessions", timeout=PATIENCE)
        if database.file is None:
            raise SetupError(_IN_MEMORY)
        url, options = database.url.set(drivername="sqlite+aiosqlite"), {"timeout": 30}
        engine = create_async_engine(url, hide_parameters=True, connect_args=options)
        guard(engine.sync_engine, database.file)
        return engine

    async def close(self) -> None:
        """Close the engines that were made here; the next use makes new ones."""
        with self._lock:
            plain, self._sync = self._sync, None
        asynchronous, self._async = self._async, None
        if asynchronous is not None:
            await greenlet_spawn(pool.end, asynchronous.sync_engine)
        if plain is not None:
            pool.end(plain)
