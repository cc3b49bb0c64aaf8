"""The forms in which an answer may echo what a request carried."""

from __future__ import annotations

import base64
import binascii
import json
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, quote_plus

from resilient.core.plain_text import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable

SHORTEST: Final = 6  # characters of a value worth masking; shorter ones would garble harmless text


class Hidden(tuple[str, ...]):
    """Secrets under a name of their own: a frame or a log that shows it shows how many there are."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<{len(self)} hidden>"


def forms(values: Iterable[str]) -> set[str]:
    """Each value, without its scheme ("Bearer abc": "abc"), decoded (Basic), its user and password, in every notation.

    As they are, in one line, as JSON and as URLs write them.
    """
    found: set[str] = set()
    for value in values:
        word = value.rpartition(" ")[2]
        plain = [value, word]
        if value[:6].lower() == "basic " and (decoded := _decoded(word)):
            user, _, password = decoded.partition(":")
            plain += [decoded, user, password]
        for one in plain:
            found |= {one, one_line(one), json.dumps(one)[1:-1], quote(one, safe=""), quote_plus(one)}
    return {one for one in found if len(one) >= SHORTEST}


def _decoded(word: str) -> str:
    try:
        return base64.b64decode(word + "==").decode("utf-8", "replace")
    except (ValueError, binascii.Error):
        return ""
