"""Keeps secrets out of logs and messages.

httpx logs whole URLs at INFO, query and all; httpcore logs whole header lists at DEBUG. The filters installed
here rewrite those records before any handler gets them. They look for no particular secret: they remove user and
password, every query value and every header that is not on the list of harmless ones.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
import re
import traceback
from dataclasses import replace
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, quote_plus

from resilient.core.base.bounds import ERROR_TEXT, SCRUBBED_TEXT
from resilient.core.base.errors import JobFailure
from resilient.core.base.frames import from_callee
from resilient.core.base.hosts import without_secrets
from resilient.core.base.loggers import MASK, masked, urls
from resilient.core.base.phrases import one_line, plain, value_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from resilient.core.base.errors import Failure

_HTTPCORE: Final = (
    "httpcore.connection",
    "httpcore.http11",
    "httpcore.http2",
    "httpcore.proxy",
    "httpcore.socks",
)
_URLLIB3: Final = ("urllib3.connectionpool", "urllib3.poolmanager", "urllib3.util.retry")
_PAIR: Final = re.compile(r"\((b'(?:[^'\\]|\\.)*'|b\"(?:[^\"\\]|\\.)*\"), (b'(?:[^'\\]|\\.)*'|b\"(?:[^\"\\]|\\.)*\")\)")
_HARMLESS: Final = re.compile(
    r"""b['"](?:date|server|content-[a-z-]+|transfer-encoding|connection|retry-after|x?-?rate-?limit[a-z0-9-]*"""
    r"""|vary|age|allow|cache-control|etag)['"]""",
    re.IGNORECASE,
)
_EDGE: Final = 4_096  # characters to drop at a cut if no blank among them ends a word


def scrub(text: str, secrets: Iterable[str] = (), keep: int | None = None, *, end: bool = False) -> str:
    """``text`` without ``secrets``, without credentials in the usual notation and with harmless URLs.

    Reads `SCRUBBED_TEXT` characters, the first (or, with ``end``, the last), drops the word at the cut, which may be
    half of a secret, and then cuts to ``keep``. Its time is linear in the text, whatever the text is.
    """
    most = SCRUBBED_TEXT.value
    if len(text) > most:
        text = _from_the_next_word(text[-most:]) if end else _to_the_last_word(text[:most])
    for secret in sorted(notations(secrets), key=len, reverse=True):
        text = text.replace(secret, MASK)
    text = masked(text)
    if keep is None:
        return text
    return text[-keep:] if end else text[:keep]


def _to_the_last_word(text: str) -> str:
    """``text`` without its last word, which a cut may have halved; without `_EDGE` characters if they hold no blank."""
    at = max(text.rfind(blank, len(text) - _EDGE) for blank in " \n\t")
    return text[: at if at > 0 else len(text) - _EDGE]


def _from_the_next_word(text: str) -> str:
    blanks = [at for blank in "\n \t" if (at := text.find(blank, 0, _EDGE)) >= 0]
    return text[min(blanks) + 1 if blanks else _EDGE :]


def without_secrets_in_code(failure: Failure | None, secrets: Iterable[str]) -> Failure | None:
    """``failure`` with a code that echoes no secret, because codes are shown, grouped and stored."""
    if failure is None or failure.code is None:
        return failure
    code = scrub(failure.code, secrets)
    for secret in notations(secrets):
        code = _without_its_beginning(code, secret)
    return failure if code == failure.code else replace(failure, code=code)


def _without_its_beginning(code: str, secret: str) -> str:
    """``code``, whose end may be the beginning of ``secret``, because codes are cut to a length: that is masked."""
    at = code.find(secret[:SHORTEST])
    while at >= 0:
        if secret.startswith(code[at:]):
            return code[:at] + MASK
        at = code.find(secret[:SHORTEST], at + 1)
    return code


def _hide_url(record: logging.LogRecord) -> bool:
    """Httpx's "HTTP Request: GET https://... "HTTP/1.1 200 OK""."""
    if isinstance(record.args, tuple):
        record.args = tuple(
            without_secrets(str(arg)) if type(arg).__name__ == "URL" else urls(arg) if isinstance(arg, str) else arg
            for arg in record.args
        )
    return True


def _hide_headers(record: logging.LogRecord) -> bool:
    """Httpcore's "receive_response_headers.complete return_value=(..., [(b'Set-Cookie', b'...')])"."""
    if isinstance(record.msg, str) and "(b" in record.msg:
        record.msg = _PAIR.sub(lambda p: p[0] if _HARMLESS.fullmatch(p[1]) else f"({p[1]}, b'{MASK}')", record.msg)
    return True


def _hide_target(record: logging.LogRecord) -> bool:
    """Urllib3's '%s://%s:%s "%s %s %s" %s %s', whose arguments hold the path with its query, or a URL."""
    if isinstance(record.args, tuple):
        record.args = tuple(_without_query(urls(arg)) if isinstance(arg, str) else arg for arg in record.args)
    return True


def _without_query(text: str) -> str:
    return without_secrets(text) if text.startswith("/") else text


def install() -> None:
    """Put the filters on the loggers of httpx, httpcore and urllib3; doing it again changes nothing."""
    logging.getLogger("httpx").addFilter(_hide_url)
    for name in _URLLIB3:
        logging.getLogger(name).addFilter(_hide_target)
    for name in _HTTPCORE:
        logging.getLogger(name).addFilter(_hide_headers)


def logs_httpcore() -> bool:
    """Whether somebody wants httpcore's records."""
    return _HTTP11.isEnabledFor(logging.DEBUG)


def log_as_httpcore(room: str, line: str) -> None:
    """Log a line about our own connections as httpcore would: its logger's filter hides secrets."""
    logging.getLogger(f"httpcore.{room}").debug(line)


_HTTP11: Final = logging.getLogger("httpcore.http11")


# -- echoes -----------------------------------------------------------------------------------------------------------
#
# The forms in which an answer may echo what a request carried.

SHORTEST: Final = 6  # characters of a value worth masking; shorter ones would garble harmless text


def notations(values: Iterable[str]) -> set[str]:
    """All forms in which an answer may echo these values of headers and parameters, of `SHORTEST` characters or more.

    Each value, what follows its scheme ("Bearer abc": "abc"), and user and password of Basic; all of them as they are,
    in one line, as JSON and as URLs write them.
    """
    texts: set[str] = set()
    for value in values:
        word = value.rpartition(" ")[2]
        forms = [value, word]
        if value[:6].lower() == "basic " and (decoded := _decoded(word)):
            user, _, password = decoded.partition(":")
            forms += [decoded, user, password]
        for one in forms:
            texts |= {one, one_line(one), json.dumps(one)[1:-1], quote(one, safe=""), quote_plus(one)}
    return {one for one in texts if len(one) >= SHORTEST}


def _decoded(word: str) -> str:
    try:
        return base64.b64decode(word + "==").decode("utf-8", "replace")
    except (ValueError, binascii.Error):
        return ""


def text_of(error: BaseException, secrets: Iterable[str] = ()) -> str:
    """The type and message of an exception, without secrets; of our own failures only what their kind does not say."""
    message, name = value_text(error).strip(), type(error).__name__
    # `isinstance` alone asks an exception that is none for its class, and that may raise.
    if issubclass(type(error), JobFailure) and isinstance(error, JobFailure):
        message = error.bare_message or message
        name = "" if type(error).__module__.startswith("resilient.") else name
    most = SCRUBBED_TEXT.value + 1  # so that the scrub knows that there was more
    return scrub(plain(": ".join(filter(None, (name, message[:most]))) or type(error).__name__), secrets)


def trace_of(error: BaseException, secrets: Iterable[str] = ()) -> str:
    """The end of the traceback of an exception, without secrets and without the frames that led to the handler."""
    try:
        lines = traceback.format_exception(type(error), error, from_callee(error.__traceback__))
    except BaseException as second:  # noqa: BLE001 - of a class of the program's own: its `__bool__`, its notes
        lines = _frames(error, second)
    text = plain("".join(lines)[-SCRUBBED_TEXT.value - 1 :])
    return scrub(text, secrets, ERROR_TEXT.value, end=True)


def _frames(error: BaseException, second: BaseException) -> list[str]:
    """The frames of an exception over which the traceback module fails."""
    own = traceback.format_tb(from_callee(error.__traceback__))
    return [*own, f"{type(error).__name__} (the rest of its traceback cannot be had: {type(second).__name__})\n"]
