"""Trouble of the database's own (away, busy, full, read-only), as opposed to the mistake of a statement.

A job that meets it is charged nothing, so what counts as trouble is decided here, once, for every way to the database.
PostgreSQL's states are those of its documentation, appendix A ("PostgreSQL Error Codes"); before a session there is
only a text. SQLite has texts alone. A text is read only where no state is, because others quote names and values.
"""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING, Final
from weakref import WeakSet

from sqlalchemy import event
from sqlalchemy.exc import DBAPIError

from resilient.core.base.errors import DatabaseUnreachable

if TYPE_CHECKING:
    from sqlalchemy import Dialect, Engine
    from sqlalchemy.engine import ExceptionContext


_CLASSES: Final = ("08", "53", "57P", "58")  # connection, resources, operator's intervention, system
_CANCELLED: Final = "57014"
_READ_ONLY: Final = "25006"  # a standby, or a primary that became one
_BUSY: Final = ("too many clients", "remaining connection slots", "too many connections")
_UNREACHED: Final = ("connect", "resolve host", "read-write", "starting up", "shutting down")
_SQLITE: Final = (
    "unable to open",
    "database is locked",
    "database table is locked",
    "disk I/O error",
    "disk is full",
    "readonly database",
    "not a database",
    "disk image is malformed",
)


def is_trouble(error: DBAPIError) -> bool:
    """Whether the database could not serve, whatever the statement was."""
    if error.connection_invalidated or is_busy(error):
        return True
    state, name = getattr(error.orig, "sqlstate", None) or "", type(error.orig).__name__
    return (
        state.startswith(_CLASSES)
        or state == _READ_ONLY
        or name == "ConnectionTimeout"
        or _says(error, _UNREACHED)
        or (
            not state
            and name in ("OperationalError", "DatabaseError")
            and any(sign in str(error.orig) for sign in _SQLITE)
        )
    )


def is_busy(error: DBAPIError) -> bool:
    """Whether every connection the server has is taken."""
    return getattr(error.orig, "sqlstate", None) == "53300" or _says(error, _BUSY)


def _says(error: DBAPIError, signs: tuple[str, ...]) -> bool:
    """Whether a server refused to connect with one of these texts; SQLite has no server, and quotes names."""
    orig = error.orig
    if isinstance(orig, sqlite3.Error) or type(orig).__name__ != "OperationalError" or getattr(orig, "sqlstate", None):
        return False
    return any(sign in str(orig) for sign in signs)


def is_read_only(error: DBAPIError) -> bool:
    """Whether a write was sent to a server that takes none: a standby."""
    text = str(error.orig)
    return getattr(error.orig, "sqlstate", None) == _READ_ONLY or "session is read-only" in text


def is_broken_off(error: BaseException) -> bool:
    """Whether the server ended a statement before its end: ``statement_timeout``, or an operator's cancel.

    Of the engine's own statements that is the database's trouble (`Database.named_errors`); of a handler's it is the
    handler's, because such a statement may be too slow each time.
    """
    return any(getattr(one, "sqlstate", None) == _CANCELLED for one in (getattr(error, "orig", None), error.__cause__))


def is_of_database(error: BaseException) -> bool:
    """Whether an exception is trouble of the engine's database: `DatabaseUnreachable`, or met on an engine of ours."""
    return isinstance(error, DatabaseUnreachable) or getattr(error, _NOTE, False)


def mark_errors_of(engine: Engine) -> None:
    """Mark the errors of this engine that are its database's trouble; see `is_of_database`."""
    if engine.dialect not in _MARKED:  # not `event.contains`, which takes an engine for one that had its address before
        _MARKED.add(engine.dialect)
        event.listen(engine, "handle_error", _note)


def takes_no_writes(error: BaseException | None) -> bool:
    """Whether a driver's error is that of a session on a server that takes no writes any more.

    Another session may be on another server: the address may name several, and a name or a pooler may point to the new
    primary. So such a session is given up, with those as old as it.
    """
    return getattr(error, "sqlstate", None) == _READ_ONLY


def _note(context: ExceptionContext) -> None:
    if takes_no_writes(context.original_exception):
        context.is_disconnect = True
    if context.sqlalchemy_exception is not None:
        mark(context.sqlalchemy_exception)


def mark(error: BaseException) -> BaseException:
    """Mark an error for `is_of_database`, if it is the database's trouble; returns it."""
    if isinstance(error, DBAPIError) and is_trouble(error):
        mark_own(error)
    return error


def mark_own(error: BaseException) -> None:
    """Mark an error of the engine's own statement for `is_of_database`, whatever it is."""
    setattr(error, _NOTE, True)


_NOTE: Final = "_resilient_trouble"
_MARKED: Final[WeakSet[Dialect]] = WeakSet()  # engines that share a dialect share its listeners
