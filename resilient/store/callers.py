"""A caller's own connection, used through its driver: what a business transaction waits for.

SQLAlchemy takes as long for a statement as psycopg, so it is passed by as in `direct.py`, where nobody would notice:
its pool and its errors stay. Where somebody listens to the connection (tracing), or has its statements logged, they
go through it like any other; with other drivers too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from resilient.store.direct import Direct, as_sqlalchemy, cursor_of, unless_cut_off

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from sqlalchemy import Connection

    from resilient.store.direct import Rows


def shortest(c: Connection) -> Connection:
    """``c``, or its driver. For functions that are marked `direct`."""
    goes = c.dialect.driver == "psycopg" and not (
        c._has_events or c.engine._has_events or c.dialect._has_events or c._echo  # noqa: SLF001 - as SQLAlchemy asks
    )
    return cast("Connection", Callers(c)) if goes else c


class Callers(Direct):
    """A connection in a transaction that its caller began and will end. Use it up at once, before anything else."""

    __slots__ = ("_connection",)

    def __init__(self, c: Connection) -> None:
        super().__init__(c.engine, asynchronous=c.dialect.is_async, one_statement=True)
        self._connection = c
        self._driver = c.connection.driver_connection
        self._cursor = cursor_of(self._driver, c.info)

    def copy(self, statement: str, lines: Iterable[str]) -> None:
        """As it is sent to a connection of ours."""
        with unless_cut_off(self._connection):
            super().copy(statement, lines)

    def _send(self, statement: str, params: Mapping[str, Any] | None = None) -> Rows:
        with unless_cut_off(self._connection):
            return super()._send(statement, params)

    def _explained(self, error: Exception, statement: str | None) -> BaseException:
        """As SQLAlchemy says it; a connection that is gone leaves the caller's pool."""
        gone = bool(self._driver.closed or self._driver.broken)
        if gone:
            self._connection.invalidate(error)
        return as_sqlalchemy(error, statement, self.engine.dialect, gone=gone)
