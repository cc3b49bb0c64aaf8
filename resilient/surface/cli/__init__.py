"""The command line: ``resilient``.

``main`` is all the rest of the world needs: it prints errors as one line and returns the exit status (`exits.py`).
Options that every command takes (``--app``, ``--json`` ...) may stand before or after the command.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import TYPE_CHECKING

from resilient.engine.ground.garbage import own_process

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    if arguments is None:
        own_process()
    from resilient.surface.cli import root  # noqa: PLC0415 - typer and rich: only for this
    from resilient.surface.cli.exits import INTERRUPTED, OK, USAGE, line_of, status_of  # noqa: PLC0415 - SQLAlchemy's errors

    _write_out_what_is_missing()
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    try:
        return _written(root.run(words))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except Exception as error:
        if debug:
            raise
        if (usage := root.usage_line(error)) is not None:
            root.errors(words).error(usage)
            return USAGE
        root.errors(words).error(line_of(error))
        return status_of(error)


def _write_out_what_is_missing() -> None:
    """Where the locale's encoding lacks a character, write it as an escape: a name of a stranger ends no command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            with contextlib.suppress(OSError):  # its descriptor was changed from a file to a terminal
                stream.reconfigure(errors="backslashreplace")


def _written(status: int) -> int:
    """The same status, once everything is written: what cannot be is heard of here, not when Python ends."""
    if sys.stdout is not None:
        sys.stdout.flush()
    return status
