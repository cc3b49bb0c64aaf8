"""The short way to the drivers: store functions straight on psycopg or sqlite3, for what is done all day.

SQLAlchemy's asynchronous layer costs as much as the database does: of 0.67 ms for one committed insert, 0.33 were its
own (two cores; psycopg alone: 0.33). Statements that are text anyway (`Dialect.run`) can do without it. Its pool and
its errors stay, so callers notice nothing but the time.

A function that is marked `direct` runs here in `Database.transaction`: it uses nothing of its connection but
`Dialect.run`, `Dialect.now` and `Dialect.steer`, and gives the columns it selects different names.

Plans are generic (`plan_cache_mode`): a connection plans a statement twice, once unprepared and once for good. Left
to itself it does so six times (psycopg's first execution, PostgreSQL's five custom plans), and then compares costs that
steering has made meaningless. A claim takes longer to plan than to run, and idle connections are closed, so new ones
are common. Measured in turns on two busy cores, left to itself against generic: the first jobs of an idle worker began
18 to 20 % later (p50), drains of 4,000 jobs behind 50,000 blocked ones ran at 0.59 to 0.68 of the rate, others at 0.58
to 1.14; later jobs began as soon. The plans themselves hold either way: `tests/store/test_plans.py` explains custom
ones. So generic ones are the default and no necessity: ``generic_plans=False`` sets nothing, for Citus, which cannot
plan without values.

A caller's own connection (`through_driver`) and SQLite's (`DirectSQLite`) go the short way too. SQLAlchemy takes as
long for a statement as psycopg; on SQLite it takes four fifths of a claim, because it compiles each statement once an
engine and makes a context, a result and its metadata for each execution. Where somebody listens to the statements
(tracing) or has them logged, and with other drivers, they go through SQLAlchemy like any other.
"""

from __future__ import annotations

import contextlib
import sqlite3
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, cast, get_args
from uuid import UUID, SafeUUID

from sqlalchemy import Uuid
from sqlalchemy.dialects import sqlite
from sqlalchemy.exc import DBAPIError
from sqlalchemy.util import await_only

from resilient.store.db import pipeline, trouble
from resilient.store.db.pipeline import Query
from resilient.store.db.types import AnyText, Rows, UtcDateTime, any_text, shape, sqlite_time, utc_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from types import TracebackType
    from typing import Self

    from sqlalchemy import Connection, Engine
    from sqlalchemy.pool import PoolProxiedConnection


_CURSOR: Final = "resilient.cursor"


def _command(statement: str) -> Query:
    return Query(statement, has_params=False, numbered=statement.encode(), is_command=True)


def _setting(statement: str) -> Query:
    return Query(statement, has_params=False, numbered=statement.encode())


_COMMIT, _ROLLBACK = _command("COMMIT"), _command("ROLLBACK")
_BEGIN: Final = (
    _command("BEGIN ISOLATION LEVEL READ COMMITTED"),  # whatever the database's default is
    _setting("SELECT set_config('jit', 'off', true)"),
)
_BEGIN_GENERIC: Final = (
    _BEGIN[0],
    _setting(
        "SELECT concat(set_config('jit', 'off', true), set_config('plan_cache_mode', 'force_generic_plan', true))"
    ),
)
_ISOLATION: Final = "READ COMMITTED"
_PREPARE: Final = {"prepare_threshold": 1}  # with the second execution
_ABOUT_DATA: Final = "22"  # sqlstates of values that PostgreSQL refuses
_OUT_OF_DATE: Final = "0A000"  # a kept plan whose columns have been altered since: it fails for as long as it is kept


F = TypeVar("F", bound="Callable[..., Any]")
Operation = Literal["claim", "finish", "enqueue", "heartbeat", "stage", "rescue", "limit", "gate", "other"]
OPERATIONS: Final[tuple[str, ...]] = get_args(Operation)


class Waiting:
    """A statement that waits for the next round trip."""

    __slots__ = ("columns", "params", "query", "rows")

    def __init__(
        self, query: Query, params: Mapping[str, Any] | None = None, columns: Mapping[str, Any] | None = None,
        rows: Rows | None = None,
    ) -> None:  # fmt: skip
        self.query, self.params, self.columns = query, params, columns
        self.rows = Rows() if rows is None else rows


def direct(fn: F) -> F:
    """Mark a store function that may run on a `Direct`; see the top of this file."""
    fn.direct = True  # type: ignore[attr-defined]
    return fn


def is_direct(fn: Callable[..., Any]) -> bool:
    """Whether a function is marked so."""
    return getattr(fn, "direct", False)


def operation(word: Operation) -> Callable[[F], F]:
    """Say what the transactions of a store function are for, to whoever measures them."""

    def mark(fn: F) -> F:
        fn.operation = word  # type: ignore[attr-defined]
        return fn

    return mark


def operation_of(fn: Callable[..., Any]) -> str:
    """What a function's transactions are for."""
    word: str = getattr(fn, "operation", "other")
    return word


def reserved(fn: F) -> F:
    """Mark a store function that has a reserved connection, so that it never waits for one."""
    fn.reserved = True  # type: ignore[attr-defined]
    return fn


def is_reserved(fn: Callable[..., Any]) -> bool:
    """Whether a function is marked so."""
    return getattr(fn, "reserved", False)


class Direct:
    """A pooled connection in autocommit, used through its driver; as a context manager: one transaction.

    ``one_statement``: exactly one statement is run, without BEGIN and COMMIT, unless the first connection read that the
    database has another default isolation.
    """

    __slots__ = (
        "_asynchronous", "_begin", "_begun", "_cursor", "_driver", "_errors", "_line", "_one_statement", "_pooled",
        "_queue", "engine",
    )  # fmt: skip

    def __init__(
        self, engine: Engine, *, asynchronous: bool, one_statement: bool = False, generic_plans: bool = True
    ) -> None:
        self.engine, self._begin = engine, _BEGIN_GENERIC if generic_plans else _BEGIN
        self._asynchronous, self._one_statement, self._begun = asynchronous, one_statement, one_statement
        self._errors: type[Exception] = engine.dialect.loaded_dbapi.Error
        self._queue: list[Waiting] = []  # for the next round trip
        self._line: pipeline.Line | None = None

    def __enter__(self) -> Self:
        """Take a connection out of the pool; raises `DBAPIError` if there is none to be had."""
        try:
            self._pooled: PoolProxiedConnection = self.engine.raw_connection()
        except self._errors as error:
            raise self._explained(error, None) from error
        self._driver: Any = self._pooled.driver_connection
        if pipeline.is_supported():
            self._line = pipeline.line_of(self._driver, self._pooled.info)
        else:
            self._cursor = cursor_of(self._driver, self._pooled.info)
        if self._one_statement and self.engine.dialect.default_isolation_level != _ISOLATION:
            self._one_statement = self._begun = False
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Commit, or roll back; then the connection goes back into the pool, which resets nothing."""
        try:
            if kind is None:
                self.commit()
            elif self._begun and not self._one_statement and self._can_go_on():
                self._queue = [Waiting(_ROLLBACK)]
                self.send()
        except BaseException as failure:
            if self._pooled.is_valid:
                self._pooled.invalidate(failure)  # its state is unknown
            if kind is None or not isinstance(failure, Exception):  # else the first error is raised on
                raise
        finally:
            if self._pooled.is_valid and (self._driver.pgconn.transaction_status or not self._can_go_on()):
                self._pooled.invalidate()  # not idle: cut off in the middle
            self._pooled.close()

    def _can_go_on(self) -> bool:
        """Whether the connection is there, and not in the middle of a round."""
        return not self._driver.closed and not (self._line is not None and self._driver.pgconn.pipeline_status)

    def run(self, query: Query, params: Mapping[str, Any] | None, columns: Mapping[str, Any]) -> Rows:
        """Execute one statement, after those that wait; raises what SQLAlchemy raises (`DBAPIError`)."""
        rows = self.later(query, params, columns)
        self.send()
        return rows

    def later(self, query: Query, params: Mapping[str, Any] | None, columns: Mapping[str, Any]) -> Rows:
        """Execute one statement with the next round trip, at the latest the commit's; its rows are there after it."""
        if not self._begun:
            self._begun = True
            self._queue += map(Waiting, self._begin)
        waiting = Waiting(query, params, columns, Rows())
        self._queue.append(waiting)
        return waiting.rows

    def commit(self) -> None:
        """Commit, with what waits, in one round trip. What is run afterwards is another transaction."""
        if self._begun and not self._one_statement:
            self._queue.append(Waiting(_COMMIT))
        self.send()
        self._begun = self._one_statement

    def copy(self, statement: str, lines: Iterable[str]) -> None:
        """Send lines of a COPY ... FROM STDIN in text format."""
        if not self._begun:
            self._begun = True
            self._queue += map(Waiting, self._begin)
        self.send()
        try:
            if self._asynchronous:
                await_only(_copy(self._driver, statement, lines))
            else:
                _copy_sync(self._driver, statement, lines)
        except self._errors as error:
            raise self._explained(_bare(error), statement) from None

    def send(self) -> None:
        """Execute what waits; raises what SQLAlchemy raises (`DBAPIError`)."""
        queue, self._queue = self._queue, []
        if not queue:
            return
        line, statement, exchange = self._line, queue[-1].query.named, None
        try:
            if line is None:
                for waiting in queue:
                    statement = waiting.query.named
                    self._send(waiting)
            else:
                exchange = line.send([(waiting.query, waiting.params) for waiting in queue])
                answers = await_only(line.answers(exchange)) if self._asynchronous else line.wait(exchange)
                for waiting, answer in zip(queue, answers, strict=True):
                    line.load(answer, waiting.query, waiting.rows)
        except self._errors as error:
            if exchange is not None and exchange.place < len(queue):
                statement = queue[exchange.place].query.named
            if (getattr(error, "sqlstate", None) or "").startswith(_ABOUT_DATA):
                raise self._explained(_bare(error), statement) from None
            raise self._explained(error, statement) from error
        for waiting in queue:
            if waiting.rows and waiting.columns:
                _convert(waiting.rows, waiting.columns)

    def _send(self, waiting: Waiting) -> None:
        """Execute one statement with a cursor: on a caller's connection, and where libpq has no pipelines."""
        query, params = waiting.query, waiting.params if waiting.query.has_params else None
        fetch = _fetch if self._asynchronous else _fetch_sync
        fetching: Any = fetch(self._cursor, query.named, params)
        rows: Rows = await_only(fetching) if self._asynchronous else fetching
        waiting.rows[:], waiting.rows.rowcount = rows, rows.rowcount

    def _explained(self, error: Exception, statement: str | None) -> BaseException:
        """The error as SQLAlchemy raises it. If a connection is gone, it and the others, as old as it, leave the pool.

        So does one whose server takes no writes any more, and one with a plan that is out of date: it is kept, because
        nobody takes notice of our ROLLBACK.
        """
        gone = statement is not None and bool(self._driver.closed or self._driver.broken)
        if gone or trouble.takes_no_writes(error) or getattr(error, "sqlstate", None) == _OUT_OF_DATE:
            self._pooled.invalidate(error)
            self.engine.dispose()
        return as_sqlalchemy(error, statement, self.engine.dialect, gone=gone)


def cursor_of(driver: Any, info: dict[Any, Any]) -> Any:
    """One cursor for all statements of a connection: psycopg keeps the adapters of parameters in it.

    Measured: a cursor for each statement costs a third of a short one's time. ``info`` is the connection's in its pool.
    A caller may have changed the encoding of texts since.
    """
    cursor, encoding = info.get(_CURSOR, (None, b""))
    spoken = driver.pgconn.parameter_status(b"client_encoding")
    if cursor is None or cursor.connection is not driver or encoding != spoken:
        from psycopg.rows import namedtuple_row  # noqa: PLC0415 - the extra may be missing, and then nobody comes here

        cursor = driver.cursor(row_factory=namedtuple_row)
        info[_CURSOR] = (cursor, spoken)
    return cursor


def as_sqlalchemy(error: Exception, statement: str | None, dialect: Any, *, gone: bool = False) -> BaseException:
    """An error of the driver's as SQLAlchemy would raise it."""
    return DBAPIError.instance(
        statement, None, error, dialect.loaded_dbapi.Error, hide_parameters=True, connection_invalidated=gone,
        dialect=dialect,
    )  # fmt: skip


def can_copy(c: Connection | Direct) -> bool:
    """Whether `copy` works here: on connections of psycopg's, ours or a caller's."""
    return isinstance(c, Direct) or c.dialect.driver == "psycopg"


def copy(c: Connection | Direct, statement: str, lines: Iterable[str]) -> None:
    """Run COPY ... FROM STDIN in the connection's transaction; raises what SQLAlchemy raises (`DBAPIError`)."""
    if isinstance(c, Direct):
        c.copy(statement, lines)
        return
    connection: Any = c.connection.dbapi_connection
    with unless_cut_off(c):
        try:
            if c.dialect.is_async:
                connection.run_async(lambda driver: _copy(driver, statement, lines))
            else:
                _copy_sync(connection, statement, lines)
        except c.dialect.loaded_dbapi.Error as error:
            raise trouble.mark(as_sqlalchemy(_bare(error), statement, c.dialect)) from None


@contextmanager
def unless_cut_off(c: Connection) -> Iterator[None]:
    """Invalidate the caller's connection if a statement is cut off in the middle (by a timeout, say).

    Its state is unknown then; and PostgreSQL accepts the commit of a transaction that failed, and rolls it back.
    """
    try:
        yield
    except DBAPIError:
        raise
    except BaseException as error:
        c.invalidate(error)
        raise


def _bare(error: Any) -> Exception:
    """The error without what PostgreSQL quotes (a line of a COPY, a part of JSON): payloads belong into no message."""
    message = error.diag.message_primary
    bare: Exception = error if message is None else type(error)(message)
    return bare


async def _fetch(cursor: Any, statement: str, params: Mapping[str, Any] | None) -> Rows:
    await cursor.execute(statement, params)
    while cursor.nextset():
        pass
    rows = Rows(await cursor.fetchall() if cursor.pgresult.nfields else ())  # `description` describes every column
    rows.rowcount = cursor.rowcount
    return rows


def _fetch_sync(cursor: Any, statement: str, params: Mapping[str, Any] | None) -> Rows:
    cursor.execute(statement, params)
    while cursor.nextset():
        pass
    rows = Rows(cursor.fetchall() if cursor.pgresult.nfields else ())
    rows.rowcount = cursor.rowcount
    return rows


async def _copy(driver: Any, statement: str, lines: Iterable[str]) -> None:
    async with driver.cursor() as cursor, cursor.copy(statement) as copy:
        for some in lines:
            await copy.write(some)


def _copy_sync(driver: Any, statement: str, lines: Iterable[str]) -> None:
    with driver.cursor() as cursor, cursor.copy(statement) as copy:
        for some in lines:
            copy.write(some)


def _convert(rows: Rows, columns: Mapping[str, Any]) -> None:
    """Times in UTC, whatever zone the session has."""
    if times := [name for name, type_ in columns.items() if isinstance(type_, UtcDateTime)]:
        rows[:] = [row._replace(**_in_utc(row, times)) for row in rows]


def _in_utc(row: Any, names: Sequence[str]) -> dict[str, datetime | None]:
    times: dict[str, datetime | None] = {}
    for name in names:
        value = getattr(row, name)
        times[name] = None if value is None else value.astimezone(UTC)
    return times


def engine_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options of the engine under a `Direct`, from those of our other engines."""
    return options | {
        "connect_args": _PREPARE | options["connect_args"],
        "isolation_level": "AUTOCOMMIT",
        "pool_reset_on_return": None,
    }


# -- a caller's own connection: what a business transaction waits for --------------------------------------------------


def through_driver(c: Connection) -> Connection:
    """A `BorrowedConnection` for `direct` functions, or ``c`` itself if somebody listens to it."""
    is_unobserved = c.dialect.driver == "psycopg" and not (
        c._has_events or c.engine._has_events or c.dialect._has_events or c._echo  # noqa: SLF001 - as SQLAlchemy asks
    )
    return cast("Connection", BorrowedConnection(c)) if is_unobserved else c


class BorrowedConnection(Direct):
    """A connection in a transaction that its caller began and will end. Use it up at once, before anything else."""

    __slots__ = ("_connection",)

    def __init__(self, c: Connection) -> None:
        super().__init__(c.engine, asynchronous=c.dialect.is_async, one_statement=True)
        self._connection = c
        self._driver = c.connection.driver_connection
        self._cursor = cursor_of(self._driver, c.info)

    def copy(self, statement: str, lines: Iterable[str]) -> None:
        """See `Direct.copy`."""
        with unless_cut_off(self._connection):
            super().copy(statement, lines)

    def later(self, query: Query, params: Mapping[str, Any] | None, columns: Mapping[str, Any]) -> Rows:
        """Execute it at once: the commit is another's."""
        return self.run(query, params, columns)

    def run(self, query: Query, params: Mapping[str, Any] | None, columns: Mapping[str, Any]) -> Rows:
        """See `Direct.run`."""
        rows = super().later(query, params, columns)
        self.send()
        return rows

    def send(self) -> None:
        """See `Direct.send`."""
        with unless_cut_off(self._connection):
            super().send()

    def _explained(self, error: Exception, statement: str | None) -> BaseException:
        """The error as SQLAlchemy raises it; a connection that is gone leaves the caller's pool."""
        gone = bool(self._driver.closed or self._driver.broken)
        if gone:
            self._connection.invalidate(error)
        return as_sqlalchemy(error, statement, self.engine.dialect, gone=gone)


# -- SQLite ------------------------------------------------------------------------------------------------------------

_SQLITE: Final = sqlite.dialect()
_SHAPES: Final = 4096
_SHORT: Final[Mapping[type, Callable[[Any], Any]]] = {UtcDateTime: utc_time, AnyText: any_text}


class DirectSQLite:
    """A pooled connection, used through its driver; as a context manager: one transaction, a writer from its start."""

    __slots__ = ("_driver", "_pooled", "engine")

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def __enter__(self) -> Self:
        """Take a connection out of the pool, and wait for the writer's lock; raises `DBAPIError` if that fails."""
        try:
            self._pooled: PoolProxiedConnection = self.engine.raw_connection()
        except sqlite3.Error as error:
            raise as_sqlalchemy(error, None, self.engine.dialect) from error
        self._driver: Any = self._pooled.driver_connection
        try:
            self.run("BEGIN IMMEDIATE", (), {}, {})
        except BaseException:
            self._pooled.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Commit, or roll back; then the connection goes back into the pool."""
        try:
            if kind is None:
                self.run("COMMIT", (), {}, {})
        finally:
            self._let_go()

    def _let_go(self) -> None:
        """Roll back a transaction that SQLite has not ended by itself; if that fails, discard the connection."""
        try:
            if self._driver.in_transaction:
                self._driver.execute("ROLLBACK")
        except sqlite3.Error as failure:
            self._pooled.invalidate(failure)
        with contextlib.suppress(sqlite3.Error):
            self._pooled.close()

    def run(
        self, statement: str, times: tuple[str, ...], params: Mapping[str, Any], columns: Mapping[str, Any]
    ) -> Rows:
        """Execute one statement; raises what SQLAlchemy raises (`DBAPIError`).

        ``times`` are the names of parameters that are times, ``columns`` the types of results that need one.
        """
        bound = dict(params)
        for name in times:
            if (time := bound[name]) is not None:
                bound[name] = sqlite_time(time)
        try:
            cursor = self._driver.execute(statement, bound)
            values = cursor.fetchall()
        except sqlite3.Error as error:
            raise as_sqlalchemy(error, statement, self.engine.dialect) from error
        if not values:
            rows = Rows()
        else:
            names = tuple(column[0] for column in cursor.description)
            if columns:
                values = _read(values, _readers(names, tuple(columns.items())))
            rows = Rows(map(partial(tuple.__new__, shape(names)), values))
        rows.rowcount = cursor.rowcount
        return rows


def _read(rows: Sequence[Sequence[Any]], readers: Sequence[tuple[int, Callable[[Any], Any]]]) -> list[list[Any]]:
    """Rows with the values that SQLite stores otherwise, by place: to replace fields by name costs three times that."""
    values = list(map(list, rows))
    for place, read in readers:
        for row in values:
            if row[place] is not None:
                row[place] = read(row[place])
    return values


@lru_cache(maxsize=_SHAPES)
def _readers(
    names: tuple[str, ...], columns: tuple[tuple[str, Any], ...]
) -> tuple[tuple[int, Callable[[Any], Any]], ...]:
    """The places of the columns whose values SQLite stores otherwise, each with the function that reads them."""
    readers = ((name, _reader(type_)) for name, type_ in columns if type_ is not None)
    return tuple((names.index(name), read) for name, read in readers if read is not None)


def _reader(type_: Any) -> Callable[[Any], Any] | None:
    if isinstance(type_, Uuid):
        return _id
    short = _SHORT.get(type(type_))  # without what SQLAlchemy puts around it, which takes as long again
    return short or cast("Callable[[Any], Any] | None", type_.dialect_impl(_SQLITE).result_processor(_SQLITE, None))


def _id(text: str) -> UUID:
    """An id of 32 digits; `UUID` itself takes three times as long. Raises ValueError for anything else."""
    number = bytes.fromhex(text)
    if len(text) != _DIGITS or len(number) != _DIGITS // 2:
        return UUID(text)
    one = _new(UUID)
    _set(one, "int", int.from_bytes(number))
    _set(one, "is_safe", _UNKNOWN)
    return one


_DIGITS: Final = 32
_UNKNOWN: Final = SafeUUID.unknown  # to ask an enum for its member costs as much as the rest of an id
_new, _set = object.__new__, object.__setattr__
