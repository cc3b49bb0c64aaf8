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
import os
import sqlite3
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
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

from resilient.core.errors import DatabaseBusy, DatabaseUnreachable, SetupError
from resilient.store import forks, pool, trouble
from resilient.store.address import (
    BUSY_TIMEOUT,
    checked,
    connect_args,
    loses_statements,
    of_engine,
    reason,
    shown,
    without_threshold,
)
from resilient.store.dialect import Dialect
from resilient.store.direct import Direct, engine_options, is_direct, is_reserved
from resilient.store.watch import Watch, asking

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from datetime import datetime

    from sqlalchemy import Connection
    from sqlalchemy.engine import URL

T = TypeVar("T")
THREADS: Final = 10  # that serve coroutines on an engine for threads
_PRAGMAS: Final = ("synchronous=FULL", "foreign_keys=ON", "temp_store=MEMORY")
# SQLite checks no text. A byte that is none, written by hand, would fail every query that meets its row.
_LENIENT_TEXT: Final = partial(str, encoding="utf-8", errors="replace")


class Database:
    """A database and its two ways in."""

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
            trouble.note(target.sync_engine)
        elif isinstance(target, Engine):
            trouble.note(target)
        self._in_threads = self._async is None and (self.is_sqlite or self._sync is not None)
        self._queue_up()
        forks.renew_in_children(self)

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

    # -- engines ---------------------------------------------------------------------------------------------

    @property
    def sync_engine(self) -> Engine:
        """The synchronous engine, made on first use."""
        if self._sync is None:
            if self._async is not None and self.is_sqlite and self.file is None:
                raise SetupError("an AsyncEngine in memory cannot serve synchronous callers: use a file")
            self._sync = _sqlite_engine(self.url) if self.is_sqlite else self.new_engine()
            self._owned.append(self._sync)
        return self._sync

    @property
    def async_engine(self) -> AsyncEngine | None:
        """The asynchronous engine, made on first use; None where threads serve async callers."""
        if self._async is None and not self._in_threads:
            self._async = self.new_async_engine()
            self._owned.append(self._async)
        return self._async

    def options(self) -> dict[str, Any]:
        """How our own PostgreSQL engines are made."""
        return {
            "url": self.url.set(drivername="postgresql+psycopg"),
            "connect_args": connect_args(self.url) | self._connect_args,
            "isolation_level": "READ COMMITTED",  # whatever default_transaction_isolation says
            "hide_parameters": True,  # payloads do not belong into error messages
        }

    def new_engine(
        self, use: str = "engine", options: dict[str, Any] | None = None, *, patience: float = pool.PATIENCE
    ) -> Engine:
        """An engine on PostgreSQL whose connections are watched, and counted by their use (`Connections.place`)."""
        engine = sa.create_engine(poolclass=pool.BudgetPool, **(options or self.options()))
        return self._placed(engine, use, patience)

    def new_async_engine(
        self, use: str = "engine", options: dict[str, Any] | None = None, *, patience: float = pool.PATIENCE
    ) -> AsyncEngine:
        """`new_engine` for coroutines."""
        engine = create_async_engine(poolclass=pool.AsyncBudgetPool, **(options or self.options()))
        self._placed(engine.sync_engine, use, patience)
        return engine

    def _placed(self, engine: Engine, use: str, patience: float) -> Engine:
        self.connections.place(engine.pool, use, patience)
        self._uses[engine] = use, patience
        trouble.note(engine)
        event.listen(engine, "connect", self._connected)
        return engine

    def _connected(self, connection: Any, _record: Any) -> None:
        self.watch.add(getattr(connection, "driver_connection", connection))

    @property
    def watch(self) -> Watch:
        """Who notices that the server says nothing; see `watch.py`."""
        if self._watch is None:
            self._watch = Watch(self.address, asking(self.driver_arguments()), also=self._close_idle)
        return self._watch

    def _close_idle(self, now: float) -> None:
        self.connections.budget.close_idle(now)

    def driver_arguments(self, url: URL | None = None) -> dict[str, Any]:
        """The address (or another one) as psycopg's own arguments."""
        url = (url or self.url).set(drivername="postgresql+psycopg")
        _, found = url.get_dialect()().create_connect_args(url)
        return {**found, **connect_args(url)}

    # -- transactions ----------------------------------------------------------------------------------------

    async def transaction(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run ``fn(connection, dialect, *args, **kwargs)`` in a transaction of its own and commit.

        Raises `DatabaseUnreachable` where the database refuses, is gone, or stays busy; nothing was committed
        then, unless the connection broke during the commit itself.
        """
        if self._goes_direct and is_direct(fn):
            return await self._direct(fn, args, kwargs)
        if (engine := self.async_engine) is None:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, lambda: self.transaction_sync(fn, *args, **kwargs))
        with self.named_errors():
            async with self._writer(), engine.connect() as ac:
                c = await ac.execution_options(**self._isolation(engine))
                async with c.begin():
                    return await c.run_sync(self._run, engine, fn, args, kwargs)

    def transaction_sync(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """The same for synchronous callers."""
        engine = self._reserved_engine if self._goes_direct and is_reserved(fn) else self.sync_engine
        with self.named_errors(), self._sync_writer(), engine.connect() as c:
            c.execution_options(**self._isolation(engine))
            with c.begin():
                return self._run(c, engine, fn, args, kwargs)

    async def statement(self, fn: Callable[..., T], *args: Any) -> T:
        """`transaction` for a `direct` function that runs exactly one statement: it needs no BEGIN and no COMMIT."""
        if not self._goes_direct:
            return await self.transaction(fn, *args)
        return await self._direct(fn, args, {}, one_statement=True)

    def statement_sync(self, fn: Callable[..., T], *args: Any) -> T:
        """The same for synchronous callers."""
        if not self._goes_direct:
            return self.transaction_sync(fn, *args)
        if self._direct_sync is None:
            self._direct_sync = self.new_engine(options=engine_options(self.options()))
            self._owned.append(self._direct_sync)
        with self.named_errors():
            return self._on(self._connection(self._direct_sync, asynchronous=False, one_statement=True), fn, args, {})

    @property
    def _goes_direct(self) -> bool:
        """Whether there may be connections beside SQLAlchemy's: not beside an engine that was handed over."""
        return self.is_own and not self.is_sqlite

    async def _direct(self, fn: Callable[..., T], args: Any, kwargs: Any, *, one_statement: bool = False) -> T:
        engine = self._direct_engine("_reserved_async" if is_reserved(fn) else "_direct_async")
        with self.named_errors():
            c = self._connection(engine.sync_engine, asynchronous=True, one_statement=one_statement)
            return await greenlet_spawn(self._on, c, fn, args, kwargs)

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
        if self._reserved_sync is None:
            self._reserved_sync = self.new_engine("reserved")
            self._owned.append(self._reserved_sync)
        return self._reserved_sync

    def _on(self, c: Direct, fn: Callable[..., T], args: Any, kwargs: Any) -> T:
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
        theirs = engine not in self._owned
        return {"isolation_level": "READ COMMITTED"} if theirs and not self.is_sqlite else {}

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
        """Trouble of the database's own names the database; anything else stays what it is."""
        try:
            yield
        except PoolTimeout:
            own = f"raise Resilient(connections=...), which is {self.connections.most}"
            theirs = "hand over an engine with a larger pool: Resilient(create_async_engine(..., pool_size=...))"
            remedy = own if self.is_own else theirs
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
        except DBAPIError as error:
            if loses_statements(error):
                raise SetupError(
                    f"the pooler at {self.address} does not keep prepared statements (PgBouncer in transaction mode?):"
                    " add ?prepare_threshold=none to the address"
                ) from error.orig
            if not trouble.is_trouble(error):
                raise
            raise self._unreachable(error) from error.orig

    def _unreachable(self, error: DBAPIError) -> DatabaseUnreachable:
        said = reason(error, self.url)
        if trouble.is_busy(error):
            return DatabaseBusy(f"the database {self.address} has no connection left: {said}")
        if trouble.is_read_only(error):
            return DatabaseUnreachable(f"the database {self.address} takes no writes: {said}")
        return DatabaseUnreachable(f"the database {self.address} does not answer: {said}")

    @property
    def address(self) -> str:
        """The address without its password, for people."""
        return str(self.file) if self.file is not None else shown(self.url)

    def begin_anew(self) -> None:
        """See `forks`. An engine that was handed over is its owner's affair; memory can be opened once only."""
        self._queue_up()
        if self.is_sqlite and self.file is None:
            return
        self.connections.begin_anew()
        for engine in self._owned:
            plain = engine.sync_engine if isinstance(engine, AsyncEngine) else engine
            if plain not in self._uses:
                forks.left.append(plain.pool)
                plain.dispose(close=False)
        for plain, (use, patience) in self._uses.items():
            forks.left.append(plain.pool)
            plain.dispose(close=False)
            self.connections.place(plain.pool, use, patience)

    # -- the end ---------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Close what was opened here; an engine that was handed over stays open. What is used again opens anew."""
        for engine in self._let_go(AsyncEngine):
            await engine.dispose()
        self.close_sync()

    def close_sync(self) -> None:
        """Close the synchronous side."""
        for engine in self._let_go(Engine):
            engine.dispose()
        if self._watch is not None:
            self._watch.close()
        self._threads.shutdown(wait=True)
        self._queue_up()  # it starts no thread before one is needed

    def _let_go(self, kind: type[T]) -> list[T]:
        """The engines of this kind that were made here; from now on there are none."""
        left: list[T] = [one for one in self._owned if isinstance(one, kind)]
        self._owned = [one for one in self._owned if one not in left]
        for name in ("_sync", "_async", "_direct_sync", "_direct_async", "_reserved_sync", "_reserved_async"):
            if getattr(self, name) in left:
                setattr(self, name, None)
        return left


# -- SQLite --------------------------------------------------------------------------------------------------


def _sqlite_engine(url: URL) -> Engine:
    """SQLite as a queue wants it: WAL, durable commits, every transaction a writer from its start."""
    memory = url.database in (None, "", ":memory:")
    file = None if memory or str(url.database).startswith("file:") else Path(str(url.database))
    engine = sa.create_engine(
        url.set(drivername="sqlite"),
        connect_args={"timeout": BUSY_TIMEOUT, "check_same_thread": False},
        poolclass=sa.StaticPool if memory else None,
        hide_parameters=True,
    )

    @event.listens_for(engine, "do_connect")
    def _(*_: Any) -> None:
        if file is not None:
            _make_private(file)

    @event.listens_for(engine, "connect")
    def _(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # the driver's own BEGIN is deferred: see `_begin_as_writer`
        connection.text_factory = _LENIENT_TEXT
        _use_wal(connection)
        for pragma in _PRAGMAS:
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def _(c: Connection) -> None:
        c.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


def _make_private(file: Path) -> None:
    """A new file is its owner's alone (0600), and so are the -wal and -shm that SQLite makes beside it."""
    with contextlib.suppress(OSError):  # it exists; or the connection tells what is wrong
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))


def _use_wal(connection: Any) -> None:
    """Processes that open a new file at once refuse each other this change, without the busy timeout."""
    deadline = time.monotonic() + BUSY_TIMEOUT
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return


def _begin_as_writer(c: Connection) -> None:
    """On an engine that was handed over: begin as a writer, whatever its own settings do at a begin."""
    driver: Any = c.connection.driver_connection
    if driver.in_transaction:
        c.exec_driver_sql("COMMIT")  # its own BEGIN, with nothing in it yet
    c.exec_driver_sql("BEGIN IMMEDIATE")
