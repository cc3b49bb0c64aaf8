"""The loggers of every floor: text of strangers harms neither a log nor its readers nor its disk.

Much that is logged is somebody else's: codes and messages of providers, texts of exceptions, names in requests. So the
rules are here and not at each call: an argument is one line without control characters, without credentials in the
usual notations, and of a bounded length; a traceback is indented, so that no line of it can pass for a line of the
log. Nothing on this floor logs.

A call gives a template and its arguments, never a text made of them; the exception itself stays with its record, for
error trackers.
"""

from __future__ import annotations

import logging
import re
import textwrap
import traceback
from contextvars import Context, ContextVar, copy_context
from typing import Any, Final

from resilient.core.base.bounds import LOGGED_TEXT, LOGGED_TRACEBACK
from resilient.core.base.hosts import without_secrets
from resilient.core.base.phrases import one_line, plain
from resilient.core.base.tracing import current_id, forget_current, running

# -- masks ------------------------------------------------------------------------------------------------------------
#
# Credentials in the notations that everybody uses are masked in any text: nobody has to know the secret itself.

MASK: Final = "[hidden]"
# Databases and brokers have URLs too.
_URL: Final = re.compile(r"\b[a-z][a-z0-9+.-]{1,30}://(?:[^\s/?#@]*@)?[^\s'\"<>]+", re.IGNORECASE)
_BEGIN: Final = re.compile(r"\b[a-z][a-z0-9+.-]{1,30}://", re.IGNORECASE)
_BARE: Final = re.compile(  # //user:password@host, which no scheme precedes; not //host:80/x@y
    r"""(?<![\w:/])//[^\s/?#@:'"<>]{0,200}:(?!\d{1,5}(?:[/?#\s]|\Z))[^\s'"<>]{0,400}@"""
)
_SCHEME: Final = re.compile(  # not "token expired"
    r"\b(Bearer|Basic|Token)\s+(?!(?:access|auth|authentication|authorization|credentials?|endpoint|errors?|exchange|expir\w+"
    r"|invalid|missing|realm|refresh\w*|rejected|request\w*|required|revo\w+|scheme|tokens?)\b)[A-Za-z0-9._~+/=-]{6,}",
    re.IGNORECASE,
)
_NAMED: Final = re.compile(  # password=..., 'api_key': '...'; not "password: wrong"
    r"""((?<![a-z0-9])(?:(?:pg)?password|passwd|passphrase|pwd|secret|api[_-]?key|private[_-]?key)(?:\s?=|['"]\s?[:=])\s?"""
    r"""|\b(?:(?:access|auth|bot|id|refresh|session)[_-])?token(?:\s?=|['"]\s?[:=])\s?)"""
    r"""('(?:[^'\\]|\\(?:.|\Z))*(?:'|\Z)|"(?:[^"\\]|\\(?:.|\Z))*(?:"|\Z)|\{[^}]*(?:\}|\Z)|[^\s,;&'"()…]+)""",
    re.IGNORECASE | re.DOTALL,
)
_SCHEMES: Final = ("bearer", "basic", "token")  # one of which `_SCHEME` begins with
_NAMES: Final = ("passw", "passphrase", "pwd", "secret", "key", "token")  # of which `_NAMED` and `_LISTED` need one
_LISTED: Final = re.compile(r"(;\s?(?:password|pwd)\s?=)([^;\n'\"]+)", re.IGNORECASE)  # Server=h;Pwd=with a blank;
_PORT: Final = re.compile(r"\d{1,5}(?:[/?#\s,]|\Z)")
_FAR: Final = 400  # characters between a scheme and the end of a password with a blank


def urls(text: str) -> str:
    """``text`` with every URL in it as `without_secrets` shows it."""
    if "//" not in text:
        return text
    text = _BARE.sub("//", _without_split_logins(text) if "@" in text else text)
    return _URL.sub(lambda match: without_secrets(match[0]), text)


def _without_split_logins(text: str) -> str:
    """``text`` without users and passwords of URLs that have a blank in them."""
    kept, place = list[str](), 0
    for begin in _BEGIN.finditer(text):
        end = begin.end()
        rest = text[end : end + _FAR].partition("\n")[0].partition("://")[0]
        login, sign, _ = rest.rpartition("@")
        if end >= place and sign and "@" not in rest.split(None, 1)[0] and _is_login(login, begin[0]):
            kept.append(text[place:end])
            place = end + len(login) + 1
    return "".join(kept) + text[place:]


def _is_login(text: str, scheme: str) -> bool:
    """Whether what stands before an ``@`` seems to be a user and a password; else it is a host, and words."""
    user, colon, password = text.partition(":")
    if not colon or password[:1].isspace() or any(c in "/?#'\"<>" for c in user):
        return False
    if user and _PORT.match(password):
        return False
    return " " not in user or not scheme.lower().startswith("http")


def masked(text: str) -> str:
    """``text`` without what follows "Bearer", "password=" and the like, and with harmless URLs; in linear time."""
    words = text.casefold()  # looking for a word takes a hundredth of a pattern's time
    if any(word in words for word in _SCHEMES):
        text = _SCHEME.sub(rf"\1 {MASK}", text)
    text = urls(text)
    if any(word in words for word in _NAMES):
        text = _NAMED.sub(rf"\1{MASK}", _LISTED.sub(rf"\1{MASK}", text))
    return text


# -- loggers ----------------------------------------------------------------------------------------------------------

_HARMLESS: Final = (int, float, type(None))  # what %d and %.1f take
_INDENT: Final = "    "
_EDGE: Final = 4_096  # characters beyond a cut that are masked too: half a secret is not recognised


def logger(name: str) -> logging.Logger:
    """The logger ``resilient.<name>``."""
    made = logging.getLogger(f"resilient.{name}")
    made.addFilter(make_harmless)
    return made


class FailureLog:
    """Logs a failure that lasts when it begins and when it ends; its repeats are for debugging only."""

    def __init__(self, log: logging.Logger, end: str) -> None:
        self._log, self._end = log, end
        self._is_failing = False

    def failed(self, template: str, *args: object) -> None:
        """Log a failure, by a template and its arguments: a warning if it is the first since `worked`."""
        self._log.log(logging.DEBUG if self._is_failing else logging.WARNING, template, *args)
        self._is_failing = True

    def worked(self) -> None:
        """Log the end of the failure, if there was one."""
        if self._is_failing:
            self._is_failing = False
            self._log.warning("%s", self._end)


def make_harmless(record: logging.LogRecord) -> bool:
    """Rewrite a record before any handler sees it; a filter that lets everything through."""
    if isinstance(record.args, tuple):
        record.args = tuple(_harmless(arg) for arg in record.args)
    elif record.args:
        record.args = {name: _harmless(arg) for name, arg in record.args.items()}
    if record.exc_info and record.exc_info[1] is not None and not record.exc_text:
        record.exc_text = _trace(record.exc_info[1])
    return True


def _harmless(arg: object) -> Any:
    return arg if isinstance(arg, _HARMLESS) else _shown(_text(arg), LOGGED_TEXT.value)


def _shown(text: str, most: int) -> str:
    """One harmless line of at most ``most`` characters of ``text``, which is cut after it is masked."""
    window = text[: most + _EDGE]
    if len(text) > len(window):
        window = window[: max(window.rfind(" ", most), 0) or None]
    shown = one_line(masked(window))
    return shown[: most - 1] + "…" if len(text) > most else shown


def _trace(error: BaseException) -> str:
    """The end of an exception's traceback, with its causes, harmless and indented."""
    try:
        text = "".join(traceback.format_exception(error))
    except BaseException as second:  # noqa: BLE001 - a stranger's `__str__`
        text = f"{type(error).__name__} (its traceback cannot be had: {type(second).__name__})"
    most = LOGGED_TRACEBACK.value
    window = text[-most - _EDGE :]
    if len(text) > len(window):
        window = window[window.find("\n", 0, _EDGE) + 1 :]
    return textwrap.indent(masked(plain(window))[-most:].rstrip(), _INDENT)


def _text(arg: object) -> str:
    try:
        return str(arg)
    except BaseException as error:  # noqa: BLE001 - a stranger's `__str__`
        return f"{type(arg).__name__} (its text cannot be had: {type(error).__name__})"


# -- whose record it is -----------------------------------------------------------------------------------------------
#
# A worker's records say which job's they are, whoever logs: handlers, libraries that they call, and the engine. A
# factory of records does that and no filter, because a logger's filter sees nothing of the loggers below it. It keeps
# the factory that was there. Its names have a prefix, because `extra=` may name nothing that a record already has.


FIELDS: Final = ("job_id", "kind", "resource_key", "attempt", "trace_id")
PREFIX: Final = "resilient_"
SHARD: Final = PREFIX + "shard"  # of a record: the shard of the worker that logs, where a process has several
shard: Final[ContextVar[str | None]] = ContextVar(SHARD, default=None)
_ABSENT: Final = {PREFIX + name: None for name in FIELDS}


def apart() -> Context:
    """A copy of the caller's context without its job and span: for tasks begun in a job that serve others too."""
    context = copy_context()
    if running.get() is not None:
        context.run(_forget)
    return context


def _forget() -> None:
    running.set(None)
    forget_current()


def log_fields() -> dict[str, Any]:
    """What logs say of the job whose handler calls this: job_id, kind, resource_key, attempt, trace_id; {} elsewhere.

    For loggers that are not the standard library's.
    """
    job = running.get()
    return {} if job is None else {**job.log_fields(), "trace_id": current_id()}


def label_records() -> None:
    """Let every record have the attributes ``resilient_job_id`` and so on; doing it again changes nothing."""
    make = logging.getLogRecordFactory()
    if isinstance(make, _Labelling):
        return
    logging.setLogRecordFactory(_Labelling(make))


class _Labelling:
    """A factory of records around another one."""

    def __init__(self, make: Any) -> None:
        self._make = make

    def __call__(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        record: logging.LogRecord = self._make(*args, **kwargs)
        vars(record).update(_ABSENT)
        job = running.get()
        if job is not None:
            vars(record).update({PREFIX + name: value for name, value in job.log_fields().items()})
        record.resilient_trace_id = current_id()
        if (name := shard.get()) is not None:
            setattr(record, SHARD, name)
        return record
