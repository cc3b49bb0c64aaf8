"""Times and numbers as people read them at three in the morning.

Always UTC, always with the distance from now.
"""

from __future__ import annotations

from datetime import UTC
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

_MINUTE: Final = 60
_HOUR: Final = 3600
_DAY: Final = 86400
_NEAR: Final = 0.66  # of difflib's ratio: a letter or two; of three letters, two that changed places


def span(seconds: float) -> str:
    """A length of time in at most two units: ``45 s``, ``3 min 20 s``, ``2 h 5 min``, ``3 d 4 h``."""
    whole = max(0, round(seconds))
    if whole < _MINUTE:
        return f"{whole} s" if whole else "less than 1 s"
    for size, unit, below, rest, ample in (
        (_MINUTE, "min", _HOUR, "s", 10),
        (_HOUR, "h", _DAY, "min", 10),
        (_DAY, "d", None, "h", 10),
    ):
        if below is None or whole < below:
            many, left = divmod(whole, size)
            left //= {"s": 1, "min": _MINUTE, "h": _HOUR}[rest]
            return f"{many} {unit}" if many >= ample or not left else f"{many} {unit} {left} {rest}"
    raise AssertionError("unreachable")


def length(seconds: float) -> str:
    """A length of time as it was declared, in the largest unit that leaves nothing over: ``90 s``, ``1 min``."""
    for size, unit in ((_DAY, "d"), (_HOUR, "h"), (_MINUTE, "min")):
        if seconds >= size and not seconds % size:
            return f"{figure(seconds / size)} {unit}"
    return f"{figure(seconds)} s"


def figure(number: float) -> str:
    """A number without needless digits: ``5,000``, ``0.5``."""
    return f"{number:,.6f}".rstrip("0").rstrip(".")


def rough(seconds: float) -> str:
    """A length of time in one unit, for narrow columns: ``45 s``, ``3 min``, ``2 h``, ``3 d``."""
    whole = max(0, round(seconds))
    for size, unit in ((_DAY, "d"), (_HOUR, "h"), (_MINUTE, "min")):
        if whole >= size:
            return f"{whole // size} {unit}"
    return f"{whole} s"


def moment(at: datetime, now: datetime | None = None) -> str:
    """A point in time to the second; without its date if that is today's and the text is read ``now``, not later."""
    at = at.astimezone(UTC)
    today = now is not None and at.date() == now.astimezone(UTC).date()
    return f"{at:%H:%M:%S} UTC" if today else f"{at:%Y-%m-%d %H:%M:%S} UTC"


def when(at: datetime, now: datetime) -> str:
    """A point in time and how far off it is: ``12:00:05 UTC (in 5 s)``."""
    ahead = (at - now).total_seconds()
    return f"{moment(at, now)} (in {span(ahead)})" if ahead > 0 else f"{moment(at, now)} ({span(-ahead)} ago)"


def counted(number: object, one: str, many: str = "") -> str:
    """``1 job``, ``1,204 jobs``, ``10,000+ jobs``."""
    value = int(number)  # type: ignore[call-overload]
    more = "+" if getattr(number, "more", False) else ""
    return f"{value:,}{more} {one if value == 1 and not more else many or one + 's'}"


def error_line(kind: str | None, code: str | None, message: str | None, length: int = 160) -> str:
    """An error in one line, each word once: its kind, its code and what was said."""
    said = brief(message, length)
    if code and said == code.replace("_", " "):
        return f"{kind or 'error'}: {said}"
    if code:
        said = said.removeprefix(f"{code}: ")  # an exception's type is the code of a bug
    named = " ".join(word for word in (kind, code) if word)
    return f"{named}: {said}" if named and said else named or said


def nearest(word: str, known: Iterable[str]) -> str:
    """``; did you mean 'priority'?`` for a word that is almost one of those that are known, else nothing."""
    import difflib  # noqa: PLC0415 - for mistakes only

    near = difflib.get_close_matches(word, list(known), n=1, cutoff=_NEAR)
    return f"; did you mean {near[0]!r}?" if near else ""


def brief(text: str | None, length: int = 160) -> str:
    """The first line of a text, cut with an ellipsis."""
    line = next(iter((text or "").strip().splitlines()), "").strip()
    return line if len(line) <= length else line[: length - 1].rstrip() + "…"
