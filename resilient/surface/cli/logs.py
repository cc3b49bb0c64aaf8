"""``--log text|json``: how commands that run for long write their log, on standard error.

As JSON a record is one object in one line. Always there: ``time`` (UTC), ``level``, ``logger``, ``message``. Where they
have a value: ``job_id``, ``kind``, ``resource_key``, ``attempt`` (of the job whose handler runs), ``trace_id``,
``exception`` (``type``, ``message``, ``traceback``), ``extra`` (what the record's author added).

Text is one line a record, too, its time in UTC; further lines are indented. Whoever logs, no line holds a control
character or a credential in the usual notations, and every text is bounded. A record that cannot be written is written
without what is wrong with it: a log must not fail.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import threading
import traceback
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from resilient.core.base.bounds import LOGGED_TEXT, LOGGED_TRACEBACK
from resilient.core.base.errors import InvalidInput, ResilientError
from resilient.core.base.loggers import FIELDS, MASK, PREFIX, SHARD, label_records, logger, masked
from resilient.core.base.phrases import brief, in_json, plain
from resilient.surface.cli.exits import line_of, status_of
from resilient.surface.cli.hints import hinted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import TracebackType

log = logger("cli")
Shape = Literal["text", "json"]
LogShape = Annotated[
    Shape, typer.Option("--log", envvar="RESILIENT_LOG", help="How the log is written, to standard error.")
]
MOST_EXTRAS: Final = 50
_NAME: Final = 100  # characters of an extra's name
_USUAL: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def set_up(shape: Shape, log_level: str, options: Mapping[str, str] | None = None) -> None:
    """Let the process log in this shape, commands with these options (`hints`). Raises `InvalidInput`."""
    level = logging.getLevelNamesMapping().get(log_level.upper())
    if level is None:
        raise InvalidInput(f"--log-level {log_level!r}: use debug, info, warning or error")
    logging.basicConfig(level=level)
    logging.getLogger("httpx").setLevel(max(level, logging.WARNING))  # it logs whole addresses
    logging.getLogger("alembic").setLevel(max(level, logging.WARNING))  # two lines for each look at the tables
    if shape == "json":
        label_records()
        logging.captureWarnings(capture=True)
    _catch_what_nobody_catches()
    for handler in logging.getLogger().handlers:
        handler.setFormatter(JsonFormatter(options) if shape == "json" else TextFormatter(options))


def _catch_what_nobody_catches() -> None:
    """Let what ends a thread, or fails where nobody can catch it, be a record: Python writes it as it is, past the log.

    A hook of the program's own stays.
    """
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = _thread_died
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = _not_raised


def _thread_died(what: threading.ExceptHookArgs) -> None:
    if not isinstance(what.exc_value, SystemExit):
        name = "?" if what.thread is None else what.thread.name
        log.error("thread %s ended by an error that nobody caught", name, exc_info=what.exc_value)


def _not_raised(what: sys.UnraisableHookArgs) -> None:
    text = what.err_msg or "an error that nobody can catch, in"
    log.error("%s: %s", text, brief(_text(what.object), _NAME), exc_info=what.exc_value)


@contextmanager
def last_words(shape: Shape) -> Iterator[None]:
    """Around a command: what ends it is a line of the log too, and no line of another shape."""
    try:
        yield
    except Exception as error:
        if shape == "text" or isinstance(error, typer.Exit):
            raise
        log.critical("%s", line_of(error), exc_info=None if isinstance(error, ResilientError) else error)
        raise typer.Exit(status_of(error)) from None


class _Formatter(logging.Formatter):
    """What both shapes share: ``options`` are those of the command line, for the commands that a message proposes."""

    def __init__(self, options: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._options = options or {}

    def _line(self, record: logging.LogRecord) -> str:
        record.message = _message(record)  # as every formatter does: others who handle the record read it
        name = getattr(record, SHARD, None)
        options = self._options if name is None or "--shard" in self._options else {**self._options, "--shard": name}
        return _safe(hinted(record.message, options))


class JsonFormatter(_Formatter):
    """A record as one JSON object in one line."""

    def format(self, record: logging.LogRecord) -> str:
        """See the top of this file."""
        at = datetime.fromtimestamp(record.created, UTC)
        document: dict[str, Any] = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": _safe(record.name),
            "message": self._line(record),
        }
        for name in FIELDS:
            value = getattr(record, PREFIX + name, None)
            if value is not None:
                document[name] = _value(value)
        if record.exc_info and record.exc_info[1] is not None:
            document["exception"] = _exception(record.exc_info[1], record.exc_info[2])
        if extra := _extras(record):
            document["extra"] = extra
        return in_json(json.dumps(document, ensure_ascii=False))


class TextFormatter(_Formatter):
    """A record as a line for people, in UTC; its further lines begin with blanks, so that no text forges one."""

    def format(self, record: logging.LogRecord) -> str:
        """See the top of this file."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(" ", timespec="milliseconds").replace("+00:00", "Z")
        line = f"{at} {record.levelname:<7} {_safe(record.name)}: {self._line(record)}"
        if record.exc_info and record.exc_info[1] is not None:
            line += "\n" + _exception(record.exc_info[1], record.exc_info[2])["traceback"].rstrip()
        return line.replace("\n", "\n    ")


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception as error:  # noqa: BLE001 - arguments that do not fit, or whose text cannot be had
        return f"{record.msg!s} (its arguments do not fit: {type(error).__name__})"


def _exception(error: BaseException, at: TracebackType | None) -> dict[str, str]:
    text = _text(error)
    try:
        lines = "".join(traceback.format_exception(type(error), error, at))
    except Exception as second:  # noqa: BLE001 - a stranger's `__str__`
        lines = f"(it cannot be had: {type(second).__name__})"
    return {
        "type": _safe(type(error).__qualname__),
        "message": _safe(text),
        "traceback": masked(plain(lines[-LOGGED_TRACEBACK.value :])),
    }


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    """What ``extra=`` added; of a name that says it is a secret the value is hidden."""
    others = [name for name in vars(record) if name not in _USUAL and not name.startswith(PREFIX)]
    return {_safe(name)[:_NAME]: _extra(name, vars(record)[name]) for name in others[:MOST_EXTRAS]}


def _extra(name: str, value: Any) -> Any:
    return MASK if masked(f"{name}=x") != f"{name}=x" else _value(value)


def _value(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return _safe(_text(value))


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception as error:  # noqa: BLE001 - a stranger's `__str__`
        return f"{type(value).__name__} (its text cannot be had: {type(error).__name__})"


def _safe(text: str) -> str:
    most = LOGGED_TEXT.value
    shown = masked(plain(text[:most]))
    return shown[: most - 1] + "…" if len(text) > most else shown
