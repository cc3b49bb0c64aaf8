"""Exit statuses, and the one line that an error becomes.

    0    done
    1    it could not be done, or a check failed (doctor, demo)
    2    wrong usage: an argument, the app or the address cannot be meant
    3    the job, schedule or resource does not exist
    4    the database does not answer, or its tables do not fit this version

A line names what was wrong and what to do; it never contains a password.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from resilient.core.errors import (
    ConnectionNotFound,
    DatabaseUnreachable,
    InvalidInput,
    JobNotFound,
    ResilientError,
    SchemaOutdated,
    SchemaTooNew,
    SetupError,
    WorkflowNotFound,
)

OK: Final = 0
FAILED: Final = 1
USAGE: Final = 2
NOT_FOUND: Final = 3
DATABASE: Final = 4
INTERRUPTED: Final = 130

HELP: Final = (
    "Exit status: 0 done; 1 it could not be done, or a check failed; 2 wrong usage; 3 no such job, schedule or"
    " resource; 4 the database does not answer, or its tables do not fit."
)


class NotFound(ResilientError):
    """A schedule or the like that does not exist."""


def status_of(error: BaseException) -> int:
    """The exit status for an error."""
    if isinstance(error, (JobNotFound, WorkflowNotFound, ConnectionNotFound, NotFound)):
        return NOT_FOUND
    if isinstance(error, (DatabaseUnreachable, SchemaOutdated, SchemaTooNew, SQLAlchemyError)):
        return DATABASE
    if isinstance(error, (InvalidInput, SetupError)):
        return USAGE
    return FAILED


def line_of(error: BaseException) -> str:
    """What to print of an error."""
    if isinstance(error, DBAPIError):
        # Only the driver's first line: the rest may quote the statement's values.
        said = (str(error.orig).strip().splitlines() or [type(error.orig).__name__])[0]
        return f"the database refused: {said}"
    if isinstance(error, ResilientError):
        return str(error)
    return f"{type(error).__name__}: {error} (--debug shows where)"
