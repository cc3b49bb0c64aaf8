"""One database: how transactions are opened, for async and sync callers alike.

Ways in, by what was handed over:

- a PostgreSQL address or an `AsyncEngine`: SQLAlchemy's async engine and `run_sync`, so statements are
  written once;
- SQLite, or an `Engine`: threads. SQLite has one writer, so there it is one thread and its transactions run
  one after the other: no busy waiting inside a process, one hop per transaction. Between processes ``BEGIN
  IMMEDIATE`` and the busy timeout keep the queue;
- synchronous callers: the `Engine`, or one of our own made from the address;
- for what is done all day on PostgreSQL: psycopg itself, with connections of its own (`direct.py`).

An engine that was handed over keeps its settings. Only inside our transactions two things differ: PostgreSQL
runs at READ COMMITTED (statements after a lock must see what was committed meanwhile), SQLite begins as a
writer (a reader that turns writer fails at once instead of waiting).

SQLite is opened with WAL and ``synchronous=FULL``: a commit survives a power cut, as on PostgreSQL.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from copy import copy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.util import greenlet_spawn

from resilient.core.base.errors import DatabaseBusy, DatabaseUnreachable, SetupError
from resilient.core.base.frames import frameless, without_frames
from resilient.store.db import pool, trouble
from resilient.store.db.address import (
    BUSY_TIMEOUT,
    checked,
    connect_args,
    loses_statements,
    of_engine,
    reason,
    shown,
    without_threshold,
)
from resilient.store.db.dialect import Dialect, is_lock_timeout
from resilient.store.db.direct import Direct, DirectSQLite, engine_options, is_direct, is_reserved, operation_of
from resilient.store.db.file import guard, is_in_memory, make_private, path_of, use_wal
from resilient.store.db.pool import Watch, asking
from resilient.store.db.types import lenient_json

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from datetime import datetime

    from sqlalchemy import Connection
    from sqlalchemy.engine import URL

T = TypeVar("T")
E = TypeVar("E", Engine, AsyncEngine)
THREADS: Final = 10  # that serve coroutines on an engine for threads
_PRAGMAS: Final = ("synchronous=FULL", "foreign_keys=ON", "temp_store=MEMORY")
# SQLite checks no text. A byte that is none, written by hand, would fail every query that meets its row.
_LENIENT_TEXT: Final = partial(str, encoding="utf-8", errors="replace")


class Database:
    """A database, for asynchronous and synchronous callers."""

    @frameless
    def __init__(
        self,
        target: str | URL | Engine | AsyncEngine,
        *,
        schema: str | None = None,
        clock: Callable[[], datetime] | None = None,
        connections: int = pool.DEFAULT,
        generic_plans: bool = True,
    ) -> None:
        """Connect to nothing yet. Raises `SetupError` (or its `MissingExtra`) for what can never work."""
        self.connections = pool.Connections(connections)
        self._uses: weakref.WeakKeyDictionary[Engine, tuple[str, float]] = weakref.WeakKeyDictionary()
        self._owned: list[Engine | AsyncEngine] = []
        self._watch: Watch | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # in which an engine that was handed over is used
        self.on_commit: Callable[[str, float], None] | None = None  # the operation, and the seconds it took
        self._began = threading.local()
        self._ending: set[threading.Thread] = set()  # threads with connections, which `close` waits for
        self._direct_sync: Engine | None = None
        self._direct_async: AsyncEngine | None = None
        self._reserved_sync: Engine | None = None  # of what must not wait for others: heartbeat, finish
        self._reserved_async: AsyncEngine | None = None
        self._sync = target if isinstance(target, Engine) else None
        self._async = target if isinstance(target, AsyncEngine) else None
        self.is_own = not isinstance(target, Engine | AsyncEngine)  # its engines are made here, from an address
        self.url = of_engine(target) if isinstance(target, Engine | AsyncEngine) else checked(target)
        self.url, self._connect_args = without_threshold(self.url)
        backend = self.url.get_backend_name()
        if schema is not None and backend != "postgresql":
            raise SetupError(f"schema={schema!r} needs PostgreSQL; this database is {backend}")
        try:
            self.dialect = Dialect(backend, schema=schema, clock=clock, generic_plans=generic_plans)
        except ValueError as error:
            raise SetupError(str(error)) from None
        self.is_sqlite = backend == "sqlite"
        if isinstance(target, AsyncEngine):
            trouble.mark_errors_of(target.sync_engine)
        elif isinstance(target, Engine):
            trouble.mark_errors_of(target)
        self.is_in_threads = self._async is None and (self.is_sqlite or self._sync is not None)
        self._queue_up()
        pool.renew_in_children(self)
        if self.disk is not None:
            pool.pause_for_forks(self)

    def _queue_up(self) -> None:
        # Not the loop's default executor: the application's own threads may fill that.
        self._threads = ThreadPoolExecutor(1 if self.is_sqlite else THREADS, "resilient-database")
        self._async_turn = asyncio.Lock()
        self._sync_turn = threading.RLock()

    @property
    def file(self) -> Path | None:
        """The SQLite file; None on PostgreSQL and in memory."""
        name = self.url.database or ":memory:"
        if not self.is_sqlite or name == ":memory:" or name.startswith("file:"):
            return None
        return Path(name).absolute()

    @property
    def disk(self) -> Path | None:
        """`file`, also of an address in SQLite's form (``file:...?uri=true``)."""
        return path_of(self.url) if self.is_sqlite and not is_in_memory(self.url) else None

    # -- engines ---------------------------------------------------------------------------------------------

    @property
    def sync_engine(self) -> Engine:
        """The synchronous engine, made on first use. Raises `SetupError` where a fork has made SQLite unusable."""
        self._check_fork()
        engine = self._sync  # read once, here and below: another thread may close it
        if engine is None:
            if self._async is not None and self.is_sqlite and self.file is None:
                raise SetupError("an AsyncEngine in memory cannot serve synchronous callers: use a file")
            engine = self._sync = _sqlite_engine(self.url) if self.is_sqlite else self.new_engine()
            self._owned.append(engine)
        return engine

    @property
    def async_engine(self) -> AsyncEngine | None:
        """The asynchronous engine, made on first use; None where threads serve async callers."""
        if self.is_in_threads:
            return None
        self._check_fork()
        engine = self._async
        if engine is None:
            engine = self._async = self.new_async_engine()
            self._owned.append(engine)
        return engine

    def options(self, use: str = "engine") -> dict[str, Any]:
        """The options of our own PostgreSQL engines. The documents of programs are read as SQLAlchemy reads them."""
        own = {} if use == "sessions" else {"json_deserializer": lenient_json}
        return own | {
            "url": self.url.set(drivername="postgresql+psycopg"),
            "connect_args": connect_args(self.url) | self._connect_args,
            "isolation_level": "READ COMMITTED",  # whatever default_transaction_isolation is
            "hide_parameters": True,  # payloads do not belong into error messages
        }

    def new_engine(
        self, use: str = "engine", options: dict[str, Any] | None = None, *, timeout: float = pool.TIMEOUT
    ) -> Engine:
        """An engine on PostgreSQL whose connections are watched, and counted by their use (`Connections.place`)."""
        engine = sa.create_engine(poolclass=pool.BudgetPool, **(options or self.options(use)))
        return self._placed(engine, use, timeout)

    def new_async_engine(
        self, use: str = "engine", options: dict[str, Any] | None = None, *, timeout: float = pool.TIMEOUT
    ) -> AsyncEngine:
        """`new_engine` for coroutines."""
        engine = create_async_engine(poolclass=pool.AsyncBudgetPool, **(options or self.options(use)))
        self._placed(engine.sync_engine, use, timeout)
        return engine

    def _placed(self, engine: Engine, use: str, timeout: float) -> Engine:
        self.connections.place(engine.pool, use, timeout)
        self._uses[engine] = use, timeout
        trouble.mark_errors_of(engine)
        event.listen(engine, "connect", self._connected)
        return engine

    def _connected(self, connection: Any, _record: Any) -> None:
        self.watch.add(getattr(connection, "driver_connection", connection))

    @property
    def watch(self) -> Watch:
        """What notices that the server does not answer; see `pool.py`."""
        if self._watch is None:
            self._watch = Watch(self.address, asking(self.driver_arguments()), also=self._close_idle)
        return self._watch

    def _close_idle(self, now: float) -> None:
        self.connections.budget.close_idle(now)

    def driver_arguments(self, url: URL | None = None) -> dict[str, Any]:
        """The address (or another one) as psycopg's own arguments."""
        url = (url or self.url).set(drivername="postgresql+psycopg")
        _, arguments = url.get_dialect()().create_connect_args(url)
        return {**arguments, **connect_args(url)}

    def in_threads(self) -> Database:
        """The same database for another event loop: its transactions for coroutines run in the threads of this one."""
        _ = self.sync_engine  # made here, so that both have the same
        twin = copy(self)
        twin.is_in_threads = True
        return twin

    # -- transactions ----------------------------------------------------------------------------------------

    async def transaction(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run ``fn(connection, dialect, *args, **kwargs)`` in a transaction of its own and commit.

        Raises `DatabaseUnreachable` where the database refuses, is gone, or stays busy; nothing was committed
        then, unless the connection broke during the commit itself.
        """
        began = time.perf_counter()
        if self._goes_direct and is_direct(fn):
            return await self._direct(fn, args, kwargs)
        if (engine := self.async_engine) is None:

            def in_thread() -> T:
                self._began.at = began  # it has waited for this thread
                return self.transaction_sync(fn, *args, **kwargs)

            return await asyncio.get_running_loop().run_in_executor(self._threads, in_thread)
        with self.named_errors():
            await self._come_home(engine)
            async with self._writer(), engine.connect() as ac:
                c = await ac.execution_options(**self._isolation(engine))
                async with c.begin():
                    result = await c.run_sync(self._run, engine, fn, args, kwargs)
        self._committed(fn, began)
        return result

    def transaction_sync(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """The same for synchronous callers."""
        began = self._began.__dict__.pop("at", None)
        began = time.perf_counter() if began is None else began
        if self.is_sqlite and self.is_own and is_direct(fn) and not self.sync_engine.dispatch.before_cursor_execute:
            with self.named_errors(), self._sync_writer():
                result = self._on(DirectSQLite(self.sync_engine), fn, args, kwargs)
        else:
            engine = self._reserved_engine if self._goes_direct and is_reserved(fn) else self.sync_engine
            with self.named_errors(), self._sync_writer(), engine.connect() as c:
                c.execution_options(**self._isolation(engine))
                with c.begin():
                    result = self._run(c, engine, fn, args, kwargs)
        self._committed(fn, began)
        return result

    def _committed(self, fn: Callable[..., Any], began: float) -> None:
        if self.on_commit is not None:
            self.on_commit(operation_of(fn), time.perf_counter() - began)

    async def call(self, fn: Callable[[], T]) -> T:
        """Call what blocks for this database in a thread of its own: the program may have filled those of its loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, fn)

    async def statement(self, fn: Callable[..., T], *args: Any) -> T:
        """`transaction` for a `direct` function that runs exactly one statement: it needs no BEGIN and no COMMIT."""
        if not self._goes_direct:
            return await self.transaction(fn, *args)
        return await self._direct(fn, args, {}, one_statement=True)

    def statement_sync(self, fn: Callable[..., T], *args: Any) -> T:
        """The same for synchronous callers."""
        if not self._goes_direct:
            return self.transaction_sync(fn, *args)
        began = time.perf_counter()
        engine = self._direct_sync
        if engine is None:
            engine = self._direct_sync = self.new_engine(options=engine_options(self.options()))
            self._owned.append(engine)
        with self.named_errors():
            c = self._connection(engine, asynchronous=False, one_statement=True)
            result = self._on(c, fn, args, {})
        self._committed(fn, began)
        return result

    @property
    def _goes_direct(self) -> bool:
        """Whether there may be connections beside SQLAlchemy's: not beside an engine that was handed over."""
        return self.is_own and not self.is_sqlite and not self.is_in_threads

    async def _direct(self, fn: Callable[..., T], args: Any, kwargs: Any, *, one_statement: bool = False) -> T:
        began = time.perf_counter()
        engine = self._direct_engine("_reserved_async" if is_reserved(fn) else "_direct_async")
        with self.named_errors():
            c = self._connection(engine.sync_engine, asynchronous=True, one_statement=one_statement)
            result: T = await greenlet_spawn(self._on, c, fn, args, kwargs)
        self._committed(fn, began)
        return result

    def _connection(self, engine: Engine, *, asynchronous: bool, one_statement: bool) -> Direct:
        plans = self.dialect.generic_plans
        return Direct(engine, asynchronous=asynchronous, one_statement=one_statement, generic_plans=plans)

    def _direct_engine(self, name: str) -> AsyncEngine:
        engine: AsyncEngine | None = getattr(self, name)
        if engine is None:
            use = "reserved" if name == "_reserved_async" else "engine"
            engine = self.new_async_engine(use, engine_options(self.options()))
            setattr(self, name, engine)
            self._owned.append(engine)
        return engine

    @property
    def _reserved_engine(self) -> Engine:
        engine = self._reserved_sync
        if engine is None:
            engine = self._reserved_sync = self.new_engine("reserved")
            self._owned.append(engine)
        return engine

    def _on(self, c: Direct | DirectSQLite, fn: Callable[..., T], args: Any, kwargs: Any) -> T:
        with c:
            return fn(c, self.dialect, *args, **kwargs)

    def _run(self, c: Connection, engine: Engine | AsyncEngine, fn: Callable[..., T], args: Any, kwargs: Any) -> T:
        if self.is_sqlite and engine not in self._owned:
            _begin_as_writer(c)
        return fn(c, self.dialect, *args, **kwargs)

    def begin_as_writer(self, c: Connection) -> None:
        """Begin the transaction of somebody's session as a writer, where that matters."""
        if self.is_sqlite and c.engine not in self._owned:
            _begin_as_writer(c)

    def _isolation(self, engine: Engine | AsyncEngine) -> dict[str, Any]:
        is_foreign = engine not in self._owned
        return {"isolation_level": "READ COMMITTED"} if is_foreign and not self.is_sqlite else {}

    async def _come_home(self, engine: AsyncEngine) -> None:
        """Give an engine that was handed over a new pool once the event loop it was used in is closed.

        Whoever waits for its connections waits in one loop. Our own engines serve any (`pool.py`).
        """
        home, loop = self._loop, asyncio.get_running_loop()
        if self.is_own or home is loop or (home is not None and not home.is_closed()):
            return
        self._loop = loop
        if home is not None:
            self._async_turn = asyncio.Lock()
            if isinstance(old := engine.pool, sa.AsyncAdaptedQueuePool):
                engine.sync_engine.dispose(close=False)  # whoever comes now finds the new one
                await greenlet_spawn(old.dispose)

    @asynccontextmanager
    async def _writer(self) -> AsyncIterator[None]:
        """SQLite's one writer of this process, so that its busy timeout is left for other processes."""
        if not self.is_sqlite:
            yield
            return
        async with self._async_turn:
            yield

    @contextmanager
    def _sync_writer(self) -> Iterator[None]:
        if not self.is_sqlite:
            yield
            return
        with self._sync_turn:
            yield

    # -- errors ----------------------------------------------------------------------------------------------

    @contextmanager
    def named_errors(self) -> Iterator[None]:
        """Turn trouble of the engine's own statements into an error that names the database; let others pass."""
        try:
            yield
        except PoolTimeout:
            own = f"raise Resilient(connections=...), which is {self.connections.most}"
            foreign = "hand over an engine with a larger pool: Resilient(create_async_engine(..., pool_size=...))"
            remedy = own if self.is_own else foreign
            raise DatabaseBusy(
                f"every connection to {self.address} is in use: shorten transactions, or {remedy}"
            ) from None
        except NotImplementedError as error:
            if "DateStyle" not in str(error):
                raise
            raise SetupError(
                f"the database user of {self.address} is set up to write times as psycopg cannot read them ({error}):"
                " ALTER ROLE ... SET DateStyle = 'ISO', or add ?options=-cDateStyle=ISO to the address"
            ) from None
        except RuntimeError as error:
            if "different event loop" not in str(error):
                raise
            raise SetupError(
                f"the AsyncEngine for {self.address} is in use by another event loop: hand over its address instead,"
                " a plain Engine, or one without a pool (create_async_engine(..., poolclass=NullPool))"
            ) from None
        except DBAPIError as error:
            if loses_statements(error):
                raise SetupError(
                    f"the pooler at {self.address} does not keep prepared statements (PgBouncer in transaction mode?):"
                    " add ?prepare_threshold=none to the address"
                ) from error.orig
            if is_lock_timeout(error):  # who knows what to do without the lock repeats it; a job is charged nothing
                trouble.mark_own(error)
                raise
            if not trouble.is_trouble(error) and not trouble.is_broken_off(error):
                raise
            raise self._unreachable(error) from without_frames(error).orig  # drivers keep the password in theirs

    def _unreachable(self, error: DBAPIError) -> DatabaseUnreachable:
        message = reason(error, self.url)
        if trouble.is_busy(error):
            return DatabaseBusy(f"the database {self.address} has no connection left: {message}")
        if trouble.is_broken_off(error):
            return DatabaseUnreachable(f"the database {self.address} broke off a statement of the engine's: {message}")
        if trouble.is_read_only(error):
            return DatabaseUnreachable(f"the database {self.address} takes no writes: {message}")
        return DatabaseUnreachable(f"the database {self.address} does not answer: {message}")

    @property
    def address(self) -> str:
        """The address without its password, for people."""
        return str(self.file) if self.file is not None else shown(self.url)

    # -- forks -----------------------------------------------------------------------------------------------

    def begin_anew(self) -> None:
        """In a forked child. An engine that was handed over is its owner's affair; memory can be opened once only."""
        self._queue_up()
        if self.is_sqlite and self.disk is None:
            return
        self.connections.begin_anew()
        for engine in self._owned:
            plain = engine.sync_engine if isinstance(engine, AsyncEngine) else engine
            if plain not in self._uses:
                pool.PARENTS_POOLS.append(plain.pool)
                plain.dispose(close=False)
        for plain, (use, timeout) in self._uses.items():
            pool.PARENTS_POOLS.append(plain.pool)
            plain.dispose(close=False)
            self.connections.place(plain.pool, use, timeout)

    def pause(self, seconds: float) -> bool:
        """Before a fork: close SQLite, once its one writer is done."""
        if not self._sync_turn.acquire(timeout=seconds):
            return False
        for engine in self._owned:
            if isinstance(engine, Engine) and isinstance(engine.pool, sa.QueuePool) and not engine.pool.checkedout():
                engine.dispose()
        return True

    def resume(self) -> None:
        """The fork is done."""
        self._sync_turn.release()

    def _check_fork(self) -> None:
        if pool.PARENTS_FILES and (file := self.disk) is not None and pool.is_parents(file):
            raise SetupError(
                f"{file} was open in the process that this one was forked from: SQLite's locks do not work here, and"
                " what is written could be lost. Close it before the fork (app.close(), engine.dispose() of an engine"
                " of your own, no open session, no worker at work), or start processes anew:"
                ' multiprocessing.get_context("spawn"), gunicorn without --preload'
            )

    # -- the end ---------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Close what was opened here; an engine that was handed over stays open. What is used again opens anew."""
        for engine in self._let_go(AsyncEngine):
            await greenlet_spawn(pool.end, engine.sync_engine)
        for pause in self._closing(pool.LAST_CONNECT):
            await asyncio.sleep(pause)

    def close_sync(self) -> None:
        """Close the synchronous side. In a coroutine it waits for no thread, because some of them wait for its loop."""
        for pause in self._closing(0.0 if _is_in_loop() else pool.LAST_CONNECT):
            time.sleep(pause)

    def _closing(self, patience: float) -> Iterator[float]:
        """Close the synchronous side; yields pauses until threads have ended, some of which wait for the loop."""
        for engine in self._let_go(Engine):
            pool.end(engine)
        self._threads.shutdown(wait=True)
        self._queue_up()  # it starts no thread before one is needed
        deadline = time.monotonic() + patience
        yield from self._pauses(deadline)
        if self._watch is not None and (thread := self._watch.close()) is not None:
            self.await_end(thread)
            yield from self._pauses(deadline)

    def _pauses(self, deadline: float) -> Iterator[float]:
        while any(one.is_alive() for one in list(self._ending)) and time.monotonic() < deadline:
            yield 0.005

    def await_end(self, thread: threading.Thread) -> None:
        """Let `close` wait for a thread that is told to end: it has a connection, or is about to open one."""
        self._ending.difference_update([one for one in list(self._ending) if not one.is_alive()])
        self._ending.add(thread)

    def _let_go(self, kind: type[E]) -> list[E]:
        """The engines of this kind that were made here; from now on there are none."""
        engines: list[E] = [one for one in list(self._owned) if isinstance(one, kind)]
        for one in engines:  # not a new list: another thread may be adding an engine, or closing these
            with contextlib.suppress(ValueError):
                self._owned.remove(one)
        for name in ("_sync", "_async", "_direct_sync", "_direct_async", "_reserved_sync", "_reserved_async"):
            if getattr(self, name) in engines:
                setattr(self, name, None)
        return engines


def _is_in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


# -- SQLite --------------------------------------------------------------------------------------------------


def _sqlite_engine(url: URL) -> Engine:
    """SQLite as a queue wants it: WAL, durable commits, every transaction a writer from its start."""
    memory = is_in_memory(url)
    file = None if memory else path_of(url)
    engine = sa.create_engine(
        url.set(drivername="sqlite"),
        connect_args={"timeout": BUSY_TIMEOUT, "check_same_thread": False},
        poolclass=sa.StaticPool if memory else None,
        hide_parameters=True,
    )

    if file is not None:
        guard(engine, file)
        if not str(url.database).startswith("file:"):
            event.listen(engine, "do_connect", lambda *_: make_private(file))

    @event.listens_for(engine, "connect")
    def _(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # the driver's own BEGIN is deferred: see `_begin_as_writer`
        connection.text_factory = _LENIENT_TEXT
        use_wal(connection)
        for pragma in _PRAGMAS:
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def _(c: Connection) -> None:
        c.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


def _begin_as_writer(c: Connection) -> None:
    """On an engine that was handed over: begin as a writer, whatever its own settings do at a begin."""
    driver: Any = c.connection.driver_connection
    if driver.in_transaction:
        c.exec_driver_sql("COMMIT")  # its own BEGIN, with nothing in it yet
    c.exec_driver_sql("BEGIN IMMEDIATE")
