"""Numbers that JSON has no word for: infinity and NaN.

Python's `json` writes them as words that PostgreSQL and other readers refuse, and reads them; pydantic writes ``null``,
which is another value. So whatever the engine writes or a person types is refused for them, by the place of the number
(``lines.0.price``). What a provider answers may hold them: it is not ours to refuse.
"""

from __future__ import annotations

import json
from collections import deque
from enum import Enum
from math import isfinite
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

REMEDY: Final = "JSON has no infinity and no NaN: leave it out, or send null or a text"
SIGNS: Final = ("null", "NaN", "Infinity", '"None"')  # what serializers write for such a number; None: as a key


def json_text(value: Any) -> str:
    """JSON text of a value. Raises `ValueError` with the place of an infinite number or NaN, and `TypeError`."""
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError as error:
        if not str(error).startswith("Out of range"):  # a circle, which has no end to look for
            raise
        for place, number in _not_finite(value, ()):
            raise ValueError(_sentence(place, number)) from None
        raise


def json_value(text: str | bytes) -> Any:
    """The value of JSON text. Raises `ValueError` for what is no JSON, ``NaN`` and ``1e999`` too."""
    return json.loads(text, parse_constant=_refuse, parse_float=_finite)


def lost_number(value: Any, text: str) -> str | None:
    """What is wrong with JSON text that holds no number where ``value`` has infinity or NaN; None: nothing.

    ``value`` is what a serializer was given, as dicts, lists and plain values; a model may well write such a number as
    text.
    """
    if not _has_one(value):
        return None
    for place, one, written in beside(value, text):
        if isinstance(one, float) and not isfinite(one):
            is_key = bool(place) and place[-1] is _A_KEY
            if written == "None" if is_key else written is None or isinstance(written, float):
                return _sentence(place, one)
    return None


def beside(value: Any, text: str) -> Iterator[tuple[tuple[object, ...], Any, Any]]:
    """(place, value, what JSON text has there) of each key and of each value that is no dict or list.

    ``text`` is what a serializer made of ``value``, in its order; of a part with another number of members: nothing.
    """
    return _beside(value, json.loads(text, object_pairs_hook=_Pairs), ())


class _Word(str):
    """A part of a place that is no name."""

    __slots__ = ()


_A_KEY: Final = _Word("a key")  # the last part of a key's place
_MANY: Final = (list, tuple, set, frozenset, deque)
_PLAIN: Final = frozenset({str, int, bool, type(None)})


class _Pairs(list[tuple[str, Any]]):
    """An object of a JSON text: its names and values as they stand there, one name twice too."""


def _has_one(value: Any) -> bool:
    """Whether `_not_finite` gives anything; quick, because most texts with ``null`` have lost nothing."""
    if isinstance(value, dict):
        for key, one in value.items():
            if one.__class__ not in _PLAIN and _has_one(one):
                return True
            if key.__class__ is not str and _has_one(key):
                return True
        return False
    if isinstance(value, _MANY):
        return any(one.__class__ not in _PLAIN and _has_one(one) for one in value)
    value = value.value if isinstance(value, Enum) else value
    return isinstance(value, float) and not isfinite(value)


def _not_finite(value: Any, place: tuple[object, ...]) -> Iterator[tuple[tuple[object, ...], float]]:
    value = value.value if isinstance(value, Enum) else value
    if isinstance(value, float):
        if not isfinite(value):
            yield place, value
    elif isinstance(value, dict):
        for key, one in value.items():
            if isinstance(key, float) and not isfinite(key):
                yield (*place, _A_KEY), key
            yield from _not_finite(one, (*place, key))
    elif isinstance(value, _MANY):
        for number, one in enumerate(value):
            yield from _not_finite(one, (*place, number))


def _beside(value: Any, doc: Any, place: tuple[object, ...]) -> Iterator[tuple[tuple[object, ...], Any, Any]]:
    value = value.value if isinstance(value, Enum) else value
    if isinstance(value, dict):
        members = doc if isinstance(doc, _Pairs) and len(value) == len(doc) else ()
        for (key, one), (name, written) in zip(value.items(), members, strict=False):
            yield (*place, _A_KEY), key, name
            yield from _beside(one, written, (*place, key))
    elif isinstance(value, _MANY):
        items = doc if isinstance(doc, list) and len(value) == len(doc) else ()
        for number, (one, written) in enumerate(zip(value, items, strict=False)):
            yield from _beside(one, written, (*place, number))
    else:
        yield place, value, doc


def _sentence(place: tuple[object, ...], number: float) -> str:
    return f"{'.'.join(map(str, place)) or 'the value'} is {number}; {REMEDY}"


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is no number; {REMEDY}")


def _finite(text: str) -> float:
    number = float(text)
    if not isfinite(number):
        raise ValueError(f"{text[:40]} is larger than any number here; send a text")
    return number
