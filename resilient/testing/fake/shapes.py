"""Facts read backwards: a text that fits a pattern, a body with a value at a path, a time in a dialect's word."""

from __future__ import annotations

import math
import re
from datetime import UTC, timedelta
from email.utils import format_datetime
from typing import TYPE_CHECKING, Any, Final

from resilient.core.instants import Word

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

_STEP: Final = re.compile(r"\[(?:(\d+)|'([^']*)')?\]|([^.\[\]]+)")
_WHOLE: Final = frozenset({Word.DELTA_S, Word.EPOCH_S, Word.AUTO})
_NAMED: Final = {"CATEGORY_DIGIT": "1", "CATEGORY_SPACE": " ", "CATEGORY_NOT_SPACE": "x", "CATEGORY_WORD": "x"}


def fitting(pattern: str, groups: Mapping[int | str, str] | None = None) -> str:
    """A text that ``pattern`` finds something in; ``groups``: what some of its groups shall be.

    Look-arounds and back references are not seen to: whoever asks checks what comes out.
    """
    parsed = re._parser.parse(pattern)  # type: ignore[attr-defined]  # noqa: SLF001 - there is no public one
    names = {number: name for name, number in parsed.state.groupdict.items()}
    wanted = groups or {}
    return _all(parsed, names, wanted)


def _text(item: Any, names: Mapping[int, str], wanted: Mapping[int | str, str]) -> str:
    word, value = str(item[0]), item[1]
    if word == "SUBPATTERN":
        number, inside = value[0], value[3]
        given = wanted.get(number, wanted.get(names.get(number, "")))
        return _all(inside, names, wanted) if given is None else given
    if word == "BRANCH":
        return _all(value[1][0], names, wanted)
    if word in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
        return _all(value[2], names, wanted) * max(1, int(value[0]))
    if word == "IN":
        return _member(value)
    return chr(value) if word == "LITERAL" else "x" if word in ("ANY", "NOT_LITERAL") else ""


def _all(items: Any, names: Mapping[int, str], wanted: Mapping[int | str, str]) -> str:
    return "".join(_text(one, names, wanted) for one in items)


def _member(members: Any) -> str:
    if str(members[0][0]) == "NEGATE":
        return "x"
    word, value = str(members[0][0]), members[0][1]
    if word == "RANGE":
        return chr(value[0])
    return chr(value) if word == "LITERAL" else _NAMED.get(str(value), "x")


def plain(pattern: str) -> str:
    """A text that an fnmatch pattern fits."""
    return re.sub(r"\[(.)[^\]]*\]", r"\1", pattern).replace("*", "x").replace("?", "x")


def put(body: Any, path: str, value: Any) -> Any:
    """``body`` with ``value`` at a path (as `Provider` writes them); what is missing on the way is made."""
    steps = [(int(index) if index else name or quoted or None) for index, quoted, name in _STEP.findall(path)]
    return _put(body, steps, value)


def _put(body: Any, steps: list[int | str | None], value: Any) -> Any:
    if not steps:
        return value
    head, *rest = steps
    if head is None or isinstance(head, int):
        items = list(body) if isinstance(body, list) else []
        index = head or 0
        items += [None] * (index + 1 - len(items))
        items[index] = _put(items[index], rest, value)
        return items
    name = "items" if head == "*" else head
    made: dict[Any, Any] = dict(body) if isinstance(body, dict) else {}
    made[name] = _put(made.get(name), rest, value)
    return made


def said(word: Word, seconds: float, now: datetime) -> str:
    """``seconds`` from ``now`` as the dialect ``word`` writes it, rounded up."""
    at = now.astimezone(UTC) + timedelta(seconds=seconds)
    whole = at if at.microsecond == 0 else at.replace(microsecond=0) + timedelta(seconds=1)
    written = {
        Word.DELTA_S: lambda: str(math.ceil(seconds)),
        Word.AUTO: lambda: str(math.ceil(seconds)),
        Word.DELTA_S_FLOAT: lambda: f"{math.ceil(seconds * 1000) / 1000:g}",
        Word.DELTA_MS: lambda: str(math.ceil(seconds * 1000)),
        Word.DURATION: lambda: f"{math.ceil(seconds)}s",
        Word.EPOCH_S: lambda: str(int(whole.timestamp())),
        Word.EPOCH_S_FLOAT: lambda: f"{at.timestamp():.3f}",
        Word.EPOCH_MS: lambda: str(math.ceil(at.timestamp() * 1000)),
        Word.ISO8601: lambda: whole.strftime("%Y-%m-%dT%H:%M:%SZ"),
        Word.HTTP_DATE: lambda: format_datetime(whole, usegmt=True),
    }
    return written[word]() if word in written else ""


def said_in_json(word: Word, seconds: float, now: datetime) -> Any:
    """The same as JSON has it: numbers as numbers."""
    text = said(word, seconds, now)
    if word in _WHOLE or word in (Word.DELTA_MS, Word.EPOCH_MS):
        return int(text)
    return float(text) if word in (Word.DELTA_S_FLOAT, Word.EPOCH_S_FLOAT) else text


def http_date(now: datetime) -> str:
    """A Date header."""
    return format_datetime(now.astimezone(UTC).replace(microsecond=0), usegmt=True)
