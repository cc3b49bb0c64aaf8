"""Keeps secrets out of logs and messages.

httpx logs whole URLs at INFO, query and all; httpcore logs whole header lists at DEBUG. The filters installed
here rewrite those records before any handler sees them. They know no particular secret: user and password,
every query value and every header that is not known to be harmless are left out.
"""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeVar

from resilient.core.bounds import SCRUBBED_TEXT
from resilient.core.hosts import without_secrets
from resilient.wire.echoes import SHORTEST, forms

if TYPE_CHECKING:
    from collections.abc import Iterable

    from resilient.core.failure import Failure

E = TypeVar("E", bound=BaseException)
MASK: Final = "[hidden]"
_HTTPCORE: Final = (
    "httpcore.connection",
    "httpcore.http11",
    "httpcore.http2",
    "httpcore.proxy",
    "httpcore.socks",
)
_URLLIB3: Final = ("urllib3.connectionpool", "urllib3.poolmanager", "urllib3.util.retry")
_URL: Final = re.compile(
    r"\b[a-z][a-z0-9+.-]{1,30}://[^\s'\"<>]+", re.IGNORECASE
)  # databases and brokers have some too
_PAIR: Final = re.compile(r"\((b'(?:[^'\\]|\\.)*'|b\"(?:[^\"\\]|\\.)*\"), (b'(?:[^'\\]|\\.)*'|b\"(?:[^\"\\]|\\.)*\")\)")
_HARMLESS: Final = re.compile(
    r"""b['"](?:date|server|content-[a-z-]+|transfer-encoding|connection|retry-after|x?-?rate-?limit[a-z0-9-]*"""
    r"""|vary|age|allow|cache-control|etag)['"]""",
    re.IGNORECASE,
)
_SCHEME: Final = re.compile(r"\b(Bearer|Basic|Token)\s+[A-Za-z0-9._~+/=-]{6,}", re.IGNORECASE)
_NAMED: Final = re.compile(  # password=..., 'api_key': '...'; not "password: wrong"
    r"""\b((?:password|passwd|passphrase|pwd|secret|client_secret|(?:access_|refresh_)?token|api_?key|private_key)"""
    r"""(?:\s?=|['"]\s?[:=])\s?)('[^']*(?:'|\Z)|"[^"]*(?:"|\Z)|[^\s,;&'"()…]+)""",
    re.IGNORECASE,
)
_EDGE: Final = 4_096  # characters at an edge that are given up where no blank ends a word


def urls(text: str) -> str:
    """``text`` with every URL in it as `without_secrets` shows it."""
    return _URL.sub(lambda found: without_secrets(found[0]), text)


def scrub(text: str, secrets: Iterable[str] = (), keep: int | None = None, *, end: bool = False) -> str:
    """``text`` without ``secrets``, without credentials in the usual notation and with harmless URLs.

    Looks at `SCRUBBED_TEXT` characters, the first (or, with ``end``, the last), drops what a secret may have lost its
    other half at, and then cuts to ``keep``. The time it takes grows with the text, whatever the text is.
    """
    most = SCRUBBED_TEXT.value
    if len(text) > most:
        text = _from_the_next_word(text[-most:]) if end else _to_the_last_word(text[:most])
    for secret in sorted(forms(secrets), key=len, reverse=True):
        text = text.replace(secret, MASK)
    text = _NAMED.sub(rf"\1{MASK}", urls(_SCHEME.sub(rf"\1 {MASK}", text)))
    if keep is None:
        return text
    return text[-keep:] if end else text[:keep]


def _to_the_last_word(text: str) -> str:
    """Without the word that was cut in two, or as much as a secret is long."""
    at = max(text.rfind(blank, len(text) - _EDGE) for blank in " \n\t")
    return text[: at if at > 0 else len(text) - _EDGE]


def _from_the_next_word(text: str) -> str:
    found = [at for blank in "\n \t" if (at := text.find(blank, 0, _EDGE)) >= 0]
    return text[min(found) + 1 if found else _EDGE :]


def without_secrets_in_code(failure: Failure | None, secrets: Iterable[str]) -> Failure | None:
    """``failure`` with a code that echoes nothing: codes are shown, grouped and kept."""
    if failure is None or failure.code is None:
        return failure
    code = scrub(failure.code, secrets)
    for secret in forms(secrets):
        code = _without_its_beginning(code, secret)
    return failure if code == failure.code else replace(failure, code=code)


def _without_its_beginning(code: str, secret: str) -> str:
    """A code is cut before it comes here: it may end within a secret."""
    at = code.find(secret[:SHORTEST])
    while at >= 0:
        if secret.startswith(code[at:]):
            return code[:at] + MASK
        at = code.find(secret[:SHORTEST], at + 1)
    return code


def without_frames(error: E, outer: BaseException | None) -> E:
    """``error`` and what led to it, but for ``outer``, without the frames they came through.

    Variables there hold credentials, and error trackers collect the values of variables.
    """
    left: list[BaseException | None] = [error]
    seen = {outer}
    while left:
        one = left.pop()
        if one is not None and one not in seen:
            seen.add(one)
            one.__traceback__ = None
            left += [one.__cause__, one.__context__]
    return error


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
