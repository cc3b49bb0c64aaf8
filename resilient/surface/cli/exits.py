"""Exit statuses, and the one line that an error becomes.

    0    done
    1    it could not be done, or a check failed (doctor, demo)
    2    wrong usage: an argument, the app or the address cannot be meant
    3    the job, schedule or resource does not exist
    4    the database does not answer, or its tables do not fit this version

A line names what was wrong and what to do; it never contains a password.
"""

from __future__ import annotations

import os
import re
from itertools import groupby
from typing import TYPE_CHECKING, Final

from sqlalchemy.exc import SQLAlchemyError, StatementError

from resilient.core.base.errors import (
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
from resilient.core.base.phrases import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# -- traces -----------------------------------------------------------------------------------------------------------
#
# A traceback for people has the program's own frames; of libraries' frames it says how many, and whose.
#
# Where every frame is a library's, the last one stays: it says where. ``--json`` shows all of them.

_FRAME: Final = re.compile(r'\A *File "(?P<path>[^"]+)", line \d+')
_PACKAGE: Final = re.compile(r"[/\\](?:site|dist)-packages[/\\](\w+)")
_STANDARD: Final = re.compile(r"[/\\]lib[/\\]python3[.\d]*[/\\](?!site-|dist-)|^<frozen ")
_OURS: Final = re.compile(r"[/\\]resilient[/\\](?:core|store|wire|engine|adapters|testing|surface)[/\\]")


def shortened(traceback: str) -> Iterator[str]:
    """The lines of a traceback, each run of libraries' frames as one line."""
    for is_frames, frames in groupby(_parts(traceback), key=lambda part: _FRAME.match(part[0]) is not None):
        if is_frames:
            yield from _of_frames(list(frames))
        else:
            yield from (line for part in frames for line in part)


def _parts(traceback: str) -> Iterator[list[str]]:
    """The parts of a traceback: a frame with its source, or another line."""
    part: list[str] = []
    for line in traceback.splitlines():
        if part and _FRAME.match(part[0]) and line.startswith("    ") and not _FRAME.match(line):
            part.append(line)
            continue
        if part:
            yield part
        part = [line]
    if part:
        yield part


def _of_frames(frames: list[list[str]]) -> Iterator[str]:
    names = [_library(frame[0]) for frame in frames]
    if all(names):
        names[-1] = ""
    for (in_library, _), run in groupby(
        zip(map(bool, names), frames, names, strict=True), key=lambda one: (one[0], None)
    ):
        members = list(run)
        if in_library:
            whose = ", ".join(dict.fromkeys(name for *_, name in members))
            yield f"  ... {counted(len(members), 'frame')} of {whose}"
        else:
            yield from _lines(frame for _, frame, _ in members)


def _lines(frames: Iterable[list[str]]) -> Iterator[str]:
    for frame in frames:
        yield from frame


def _library(line: str) -> str:
    """Whose frame it is; empty for the program's own."""
    match = _FRAME.match(line)
    path = match["path"] if match else ""
    if package := _PACKAGE.search(path):
        return package[1]
    if _STANDARD.search(path):
        return "Python"
    return "resilient" if _OURS.search(path) else ""


# -- exits ------------------------------------------------------------------------------------------------------------

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


def reason_of(error: OSError) -> str:
    """What the system says of an error, alone: Python's own text names the address a second time."""
    text = os.strerror(error.errno) if error.errno is not None and error.errno > 0 else str(error.strerror or error)
    return text.partition(" (while ")[0]


def line_of(error: BaseException) -> str:
    """What to print of an error."""
    if isinstance(error, StatementError):
        # Only the first line of its cause: the rest may quote the statement's values.
        message = (str(error.orig).strip().splitlines() or [type(error.orig).__name__])[0]
        return f"the database refused: {message}"
    if isinstance(error, ResilientError):
        return ". ".join([str(error), *getattr(error, "__notes__", [])])
    return f"{type(error).__name__}: {error} (--debug shows where)"
