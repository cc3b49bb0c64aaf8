"""Positions in a stream as its records write them: times and numbers, compared and moved, in their own spelling."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import Final

_MILLISECONDS: Final = 1e11  # numbers from here on are no seconds
_MILLI: Final = 3  # digits


def instant(value: str | None) -> float | None:
    """Epoch seconds of a time as records write it (ISO 8601, seconds or milliseconds), or a plain number; else None."""
    if value is None:
        return None
    try:
        number = float(value)
    except ValueError:
        return None if (time := _iso(value)) is None else time.timestamp()
    if not math.isfinite(number):
        return None
    return number / 1000 if abs(number) >= _MILLISECONDS else number


def shifted(value: str, seconds: float) -> str:
    """The same time so much later, in the same spelling. What is no time stays what it is."""
    if (at := instant(value)) is None:
        return value
    if (time := _iso(value)) is None:
        if "." in value:
            return f"{at + seconds:.6f}"
        return str(math.floor((at + seconds) * 1000 if abs(float(value)) >= _MILLISECONDS else at + seconds))
    moved = time + timedelta(seconds=seconds)
    if "T" not in value and " " not in value.strip():
        return moved.date().isoformat()
    digits = len(_fraction(value))
    fraction = "microseconds" if digits > _MILLI else "milliseconds" if digits else "seconds"
    text = moved.replace(tzinfo=None).isoformat(sep="T" if "T" in value else " ", timespec=fraction)
    return text + _zone(value)


def _iso(value: str) -> datetime | None:
    if value.isdigit():
        return None  # a number, though some of them are dates in ISO's basic form
    try:
        time = datetime.fromisoformat(value)
    except ValueError:
        return None
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


def _fraction(value: str) -> str:
    _, _, rest = value.partition(".")
    return rest[: next((i for i, c in enumerate(rest) if not c.isdigit()), len(rest))]


def _zone(value: str) -> str:
    """How the time zone is spelled: ``Z``, ``+01:00``, ``+0100`` or not at all."""
    _, _, clock = value.replace(" ", "T").partition("T")
    at = next((i for i, c in enumerate(clock) if c in "Zz+-"), len(clock))
    return clock[at:]


def later(value: str | None, other: str | None) -> bool:
    """Whether ``value`` comes after ``other``: as times or numbers where both are, else as text."""
    if value is None or other is None:
        return value is not None
    here, there = instant(value), instant(other)
    return here > there if here is not None and there is not None else value > other
