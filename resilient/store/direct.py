"""The short way to PostgreSQL: store functions straight on psycopg, for what a worker or a caller does all day.

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
"""

from __future__ import annotations

from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TypeVar

from sqlalchemy.exc import DBAPIError
from sqlalchemy.util import await_only

from resilient.store import trouble
from resilient.store.types import UtcDateTime

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from types import TracebackType
    from typing import Self

    from sqlalchemy import Connection, Engine
    from sqlalchemy.pool import PoolProxiedConnection

_CURSOR: Final = "resilient.cursor"
_BEGIN: Final = "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL jit = off"  # whatever the database's default is
_KEEP_PLANS: Final = "; SET LOCAL plan_cache_mode = force_generic_plan"
_ISOLATION: Final = "READ COMMITTED"
_PREPARE: Final = {"prepare_threshold": 1}  # with the second execution
_PREPARED: Final = {"COMMIT": False, "ROLLBACK": False}  # others as often as they are used
_ABOUT_DATA: Final = "22"  # sqlstates of values that PostgreSQL refuses
_OUT_OF_DATE: Final = "0A000"  # a kept plan whose columns have been altered since: it fails for as long as it is kept


F = TypeVar("F", bound="Callable[..., Any]")


def direct(fn: F) -> F:
    """Mark a store function as one that may run on a `Direct`; see the top of this file."""
    fn.direct = True  # type: ignore[attr-defined]
    return fn


def is_direct(fn: Callable[..., Any]) -> bool:
    """Whether a function is marked so."""
    return getattr(fn, "direct", False)


def reserved(fn: F) -> F:
    """Mark a store function as one that has a connection of its own, so that it waits for nobody's."""
    fn.reserved = True  # type: ignore[attr-defined]
    return fn


def is_reserved(fn: Callable[..., Any]) -> bool:
    """Whether a function is marked so."""
    return getattr(fn, "reserved", False)


class Rows(list[Any]):
    """The rows of a statement, as named tuples: what store functions use of SQLAlchemy's result."""

    rowcount: int = -1

    def all(self) -> list[Any]:
        """Every row."""
        return self

    def first(self) -> Any:
        """The first row, or None."""
        return self[0] if self else None

    def one(self) -> Any:
        """The only row."""
        (row,) = self
        return row

    def one_or_none(self) -> Any:
        """The only row, or None."""
        return self.one() if self else None

    def scalar(self) -> Any:
        """The first column of the first row, or None."""
        return self[0][0] if self else None

    def scalar_one(self) -> Any:
        """The first column of the only row."""
        return self.one()[0]


class Direct:
    """A pooled connection in autocommit, used through its driver; as a context manager: one transaction.

    ``one_statement``: exactly one statement is run, which needs no BEGIN and no COMMIT; unless another isolation is the
    database's default, as the first connection found out.
    """

    __slots__ = (
        "_asynchronous", "_begin", "_begun", "_cursor", "_driver", "_errors", "_one_statement", "_pooled", "engine",
    )  # fmt: skip

    def __init__(
        self, engine: Engine, *, asynchronous: bool, one_statement: bool = False, generic_plans: bool = True
    ) -> None:
        self.engine, self._begin = engine, _BEGIN + (_KEEP_PLANS if generic_plans else "")
        self._asynchronous, self._one_statement, self._begun = asynchronous, one_statement, one_statement
        self._errors: type[Exception] = engine.dialect.loaded_dbapi.Error

    def __enter__(self) -> Self:
        """Take a connection out of the pool; raises `DBAPIError` if there is none to be had."""
        try:
            self._pooled: PoolProxiedConnection = self.engine.raw_connection()
        except self._errors as error:
            raise self._explained(error, None) from error
        self._driver: Any = self._pooled.driver_connection
        self._cursor = cursor_of(self._driver, self._pooled.info)
        if self._one_statement and self.engine.dialect.default_isolation_level != _ISOLATION:
            self._one_statement = self._begun = False
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Commit, or roll back; then the connection goes back into the pool, which resets nothing."""
        try:
            if self._begun and not self._one_statement and not self._driver.closed:
                self._send("COMMIT" if kind is None else "ROLLBACK")
        except BaseException as failure:
            if self._pooled.is_valid:
                self._pooled.invalidate(failure)  # nobody knows what state it is in
            if kind is None or not isinstance(failure, Exception):  # else what went wrong before is what to tell
                raise
        finally:
            if self._pooled.is_valid and self._driver.pgconn.transaction_status:  # not idle: cut off in the middle
                self._pooled.invalidate()
            self._pooled.close()

    def run(self, statement: str, params: Mapping[str, Any] | None, columns: Mapping[str, Any]) -> Rows:
        """Execute one statement in psycopg's format; raises what SQLAlchemy raises (`DBAPIError`)."""
        if not self._begun:
            self._begun = True
            if params:
                self._send(self._begin)
            else:  # without parameters both go in one round trip
                statement = f"{self._begin}; {statement}"
        rows = self._send(statement, params)
        if rows and (times := [name for name, type_ in columns.items() if isinstance(type_, UtcDateTime)]):
            rows[:] = [row._replace(**_in_utc(row, times)) for row in rows]
        return rows

    def copy(self, statement: str, lines: Iterable[str]) -> None:
        """Send lines of a COPY ... FROM STDIN in text format."""
        if not self._begun:
            self._begun = True
            self._send(self._begin)
        try:
            if self._asynchronous:
                await_only(_copy(self._driver, statement, lines))
            else:
                _copy_sync(self._driver, statement, lines)
        except self._errors as error:
            raise self._explained(_bare(error), statement) from None

    def _send(self, statement: str, params: Mapping[str, Any] | None = None) -> Rows:
        try:
            if self._asynchronous:
                return await_only(_fetch(self._cursor, statement, params))
            return _fetch_sync(self._cursor, statement, params)
        except self._errors as error:
            if (getattr(error, "sqlstate", None) or "").startswith(_ABOUT_DATA):
                raise self._explained(_bare(error), statement) from None
            raise self._explained(error, statement) from error

    def _explained(self, error: Exception, statement: str | None) -> BaseException:
        """As SQLAlchemy says it; a connection that is gone leaves the pool, and so do the others, which are as old.

        So does one with a plan that is out of date: psycopg keeps it, because it takes no notice of our ROLLBACK.
        """
        gone = statement is not None and bool(self._driver.closed or self._driver.broken)
        if gone or getattr(error, "sqlstate", None) == _OUT_OF_DATE:
            self._pooled.invalidate(error)
            self.engine.dispose()
        return as_sqlalchemy(error, statement, self.engine.dialect, gone=gone)


def cursor_of(driver: Any, info: dict[Any, Any]) -> Any:
    """One cursor for all statements of a connection: psycopg remembers in it how parameters are written.

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
    """Whether `copy` works here: psycopg's connections, whoever opened them."""
    return isinstance(c, Direct) or c.dialect.driver == "psycopg"


def copy(c: Connection | Direct, statement: str, lines: Iterable[str]) -> None:
    """COPY ... FROM STDIN in the connection's transaction; raises what SQLAlchemy raises (`DBAPIError`)."""
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
            raise trouble.noted(as_sqlalchemy(_bare(error), statement, c.dialect)) from None


@contextmanager
def unless_cut_off(c: Connection) -> Iterator[None]:
    """What is cut off in the middle (a timeout, say) takes the caller's connection with it.

    Nobody knows what state it is in; and PostgreSQL takes the commit of a transaction that failed, and rolls it back.
    """
    try:
        yield
    except DBAPIError:
        raise
    except BaseException as error:
        c.invalidate(error)
        raise


def _bare(error: Any) -> Exception:
    """Without what PostgreSQL quotes, a line of a COPY or a part of JSON: payloads belong into no error message."""
    said = error.diag.message_primary
    bare: Exception = error if said is None else type(error)(said)
    return bare


async def _fetch(cursor: Any, statement: str, params: Mapping[str, Any] | None) -> Rows:
    await cursor.execute(statement, params, prepare=_PREPARED.get(statement))
    while cursor.nextset():
        pass
    rows = Rows(await cursor.fetchall() if cursor.pgresult.nfields else ())  # `description` describes every column
    rows.rowcount = cursor.rowcount
    return rows


def _fetch_sync(cursor: Any, statement: str, params: Mapping[str, Any] | None) -> Rows:
    cursor.execute(statement, params, prepare=_PREPARED.get(statement))
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


def _in_utc(row: Any, names: Sequence[str]) -> dict[str, datetime | None]:
    found: dict[str, datetime | None] = {}
    for name in names:
        value = getattr(row, name)
        found[name] = None if value is None else value.astimezone(UTC)
    return found


def engine_options(options: dict[str, Any]) -> dict[str, Any]:
    """How the engine under a `Direct` is made, from how our others are."""
    return options | {
        "connect_args": _PREPARE | options["connect_args"],
        "isolation_level": "AUTOCOMMIT",
        "pool_reset_on_return": None,
    }
