"""Times and numbers as people read them at three in the morning.

Always UTC, always with the distance from now. What strangers wrote is made harmless here too (`plain`).
"""

from __future__ import annotations

import re
from datetime import UTC
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import datetime
    from typing import Any

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
            many, remainder = divmod(whole, size)
            remainder //= {"s": 1, "min": _MINUTE, "h": _HOUR}[rest]
            return f"{many} {unit}" if many >= ample or not remainder else f"{many} {unit} {remainder} {rest}"
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


def learnt_limit(learnt: Mapping[str, Any], now: datetime) -> str:
    """``4.8/s, learnt at 14:02:11 from 3 throttles``; ``learnt`` as `ResourceInfo.learnt`."""
    match learnt["kind"]:
        case "rate":
            limit = f"{learnt['rate']:g}/s"
        case "slots":
            limit = f"{learnt['at_once']} at once"
        case _:
            limit = f"{learnt['in_a_window']:,} in a window"
    return f"{limit}, learnt at {when(learnt['at'], now)} from {counted(learnt['throttles'], 'throttle')}"


def counted(number: object, one: str, many: str = "") -> str:
    """``1 job``, ``1,204 jobs``, ``10,000+ jobs``."""
    value = int(number)  # type: ignore[call-overload]
    more = "+" if getattr(number, "more", False) else ""
    return f"{value:,}{more} {one if value == 1 and not more else many or one + 's'}"


def error_line(kind: str | None, code: str | None, message: str | None, length: int = 160) -> str:
    """An error in one line, each word once: its kind, its code and its message."""
    text = brief(message, length)
    if code and text == code.replace("_", " "):
        return f"{kind or 'error'}: {text}"
    if code:
        text = text.removeprefix(f"{code}: ")  # an exception's type is the code of a bug
    named = " ".join(word for word in (kind, code) if word)
    return f"{named}: {text}" if named and text else named or text


def nearest(word: str, words: Iterable[str]) -> str:
    """``; did you mean 'priority'?`` for a word that is almost one of ``words``, else nothing."""
    import difflib  # noqa: PLC0415 - for mistakes only

    near = difflib.get_close_matches(word, list(words), n=1, cutoff=_NEAR)
    return f"; did you mean {near[0]!r}?" if near else ""


def brief(text: str | None, length: int = 160) -> str:
    """The first line of a text, cut with an ellipsis."""
    line = next(iter((text or "").strip().splitlines()), "").strip()
    return line if len(line) <= length else line[: length - 1].rstrip() + "…"


# -- strangers' text --------------------------------------------------------------------------------------------------
#
# Text of strangers, made fit for rows, terminals and logs before it reaches any of them.
#
# PostgreSQL stores no NUL, and neither database stores a lone surrogate: a text that cannot be stored would hold up the
# results of all jobs that are written in its batch. A terminal obeys escape sequences, and characters that turn the
# direction of writing make a line read as another, so both are written as visible escapes.

# C0 but tab and line feed, DEL, C1; marks, embeddings, overrides and isolates of direction; line and paragraph
# separators; the byte order mark; lone surrogates.
_HIDDEN: Final = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


_NO_HEADER: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]|[^\x00-\xff]|^[ \t]|[ \t]$")


def plain(text: str) -> str:
    """``text`` with an escape for each character that a database refuses or a terminal obeys; lines stay lines."""
    return _HIDDEN.sub(_written, text.replace("\r\n", "\n")) if _HIDDEN.search(text) else text


def one_line(text: str) -> str:
    """`plain` in one line, with single blanks: for codes, names and logs."""
    return " ".join(plain(text).split())


def fits_header(value: str) -> bool:
    """Whether a header can hold it: Latin-1 without control characters but the tab (RFC 9110, 5.5)."""
    return not _NO_HEADER.search(value)


def in_json(text: str) -> str:
    """A JSON document with a JSON escape for each such character; its meaning stays the same."""
    return _HIDDEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _written(match: re.Match[str]) -> str:
    number = ord(match[0])
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"  # noqa: PLR2004 - two digits
