"""Text of strangers, made fit for rows, terminals and logs before it reaches any of them.

PostgreSQL stores no NUL, and neither database a lone surrogate: one that cannot be stored would hold up the results of
every job that is written with it. A terminal obeys escape sequences and a reader believes what stands on a line, so
control characters and those that turn the direction of writing are written out, never sent.
"""

from __future__ import annotations

import re
from typing import Final

# C0 but tab and line feed, DEL, C1; marks, embeddings, overrides and isolates of direction; line and paragraph
# separators; the byte order mark; lone surrogates.
_HIDDEN: Final = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


_NO_HEADER: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]|[^\x00-\xff]|^[ \t]|[ \t]$")


def plain(text: str) -> str:
    """``text`` with every character written out that a database refuses or a terminal obeys; lines stay lines."""
    return _HIDDEN.sub(_written, text.replace("\r\n", "\n")) if _HIDDEN.search(text) else text


def one_line(text: str) -> str:
    """`plain` in one line, for codes, names and what stands in a log."""
    return " ".join(plain(text).split())


def fits_header(value: str) -> bool:
    """Whether a header can hold it: Latin-1 without control characters but the tab (RFC 9110, 5.5)."""
    return not _NO_HEADER.search(value)


def in_json(text: str) -> str:
    """A JSON document with the same characters as JSON's own escapes: it means what it meant."""
    return _HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _written(found: re.Match[str]) -> str:
    number = ord(found[0])
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"  # noqa: PLR2004 - two digits
