"""Times and numbers as text for people, and text of strangers made harmless (`plain`).

Times are always in UTC, and with their distance from now where a person has to act on them.
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
_AMPLE: Final = 10  # so many of a unit need no second one
_NEAR: Final = 0.66  # of difflib's ratio: a letter or two; of three letters, two that changed places


def span(seconds: float) -> str:
    """A length of time in at most two units: ``45 s``, ``3 min 20 s``, ``2 h 5 min``, ``3 d 4 h``."""
    whole = max(0, round(seconds))
    if whole < _MINUTE:
        return f"{whole} s" if whole else "less than 1 s"
    if whole < _HOUR:
        size, unit, part, rest = _MINUTE, "min", 1, "s"
    elif whole < _DAY:
        size, unit, part, rest = _HOUR, "h", _MINUTE, "min"
    else:
        size, unit, part, rest = _DAY, "d", _HOUR, "h"
    many, remainder = whole // size, whole % size // part
    return f"{many} {unit} {remainder} {rest}" if many < _AMPLE and remainder else f"{many} {unit}"


def length(seconds: float) -> str:
    """A length of time as it was declared, in the largest unit that leaves nothing over: ``90 s``, ``1 min``."""
    for size, unit in ((_DAY, "d"), (_HOUR, "h"), (_MINUTE, "min")):
        if seconds >= size and not seconds % size:
            return f"{figure(seconds / size)} {unit}"
    return f"{figure(seconds)} s"


def figure(number: float) -> str:
    """A number without needless digits: ``5,000``, ``0.5``."""
    return f"{number:,.6f}".rstrip("0").rstrip(".")


def rough(seconds: float, *, nearest: bool = False) -> str:
    """A length of time in one unit, for narrow columns: ``45 s``, ``3 min``, ``2 h``, ``3 d``.

    Rounded down to whole units; with ``nearest``, to the nearest one.
    """
    whole = max(0, round(seconds))
    for size, part, unit in ((_DAY, _HOUR, "d"), (_HOUR, _MINUTE, "h"), (_MINUTE, 1, "min")):
        if whole + (part // 2 if nearest else 0) >= size:
            return f"{(whole + (size // 2 if nearest else 0)) // size} {unit}"
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
    text = brief("" if message == kind else message, length)
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
# results of all jobs that are written in its batch. A terminal obeys escape sequences, characters that turn the
# direction of writing make a line read as another, and those that nobody sees make two names look alike, or carry text
# for programs alone. All of them are written as visible escapes.

# Unicode's Cc but tab and line feed, Cf, Cs, Zl, Zp and what else is Default_Ignorable_Code_Point; a test compares.
_HIDDEN: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u115f\u1160\u17b4\u17b5"
    "\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ud800-\udfff\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb"
    "\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
# Of these, joiners and U+FE0F stay where a reader sees what they do: between Arabic or Indic letters, and in emoji.
_JOINERS: Final = frozenset("\u200c\u200d\ufe0f")
_CONTROLS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")  # what of them is ASCII, as most texts are
_EMOJI: Final = re.compile("[\u203c\u2049\u2100-\u2bff\u3030\u303d\u3297\u3299\U0001f000-\U0001faff]")
_LETTER: Final = re.compile("[\u0620-\u06d5\u0900-\u0dff]")
_ASTRAL: Final = 0x10000


_NO_HEADER: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]|[^\x00-\xff]|^[ \t]|[ \t]$")


def plain(text: str) -> str:
    """``text`` with an escape for each character that a database refuses or a terminal obeys; lines stay lines."""
    hidden = _CONTROLS if text.isascii() else _HIDDEN
    return hidden.sub(_written, text.replace("\r\n", "\n")) if hidden.search(text) else text


def value_text(value: object) -> str:
    """The text of a value of the program's own, whose ``__str__`` may raise."""
    try:
        return str(value)
    except BaseException as error:  # noqa: BLE001 - the user's own `__str__`
        return f"(its text cannot be had: {type(error).__name__})"


def one_line(text: str) -> str:
    """`plain` in one line, with single blanks: for codes, names and logs."""
    return " ".join(plain(text).split())


def fits_header(value: str) -> bool:
    """Whether a header can hold it: Latin-1 without control characters but the tab (RFC 9110, 5.5)."""
    return not _NO_HEADER.search(value)


def in_json(text: str) -> str:
    """A JSON document with a JSON escape for each such character; its meaning stays the same."""
    return _HIDDEN.sub(_written_in_json, text)


def _written(match: re.Match[str]) -> str:
    if _is_read(match):
        return match[0]
    number = ord(match[0])
    if number < 0x100:  # noqa: PLR2004 - two digits
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < _ASTRAL else f"\\U{number:08x}"


def _written_in_json(match: re.Match[str]) -> str:
    if _is_read(match):
        return match[0]
    number = ord(match[0])
    if number < _ASTRAL:
        return f"\\u{number:04x}"
    high, low = divmod(number - _ASTRAL, 0x400)  # JSON writes it as a pair of surrogates
    return f"\\u{0xD800 + high:04x}\\u{0xDC00 + low:04x}"


def _is_read(match: re.Match[str]) -> bool:
    """Whether a reader sees what the character does to its neighbours."""
    if match[0] not in _JOINERS:
        return False
    text, (start, end) = match.string, match.span()
    before = text[start - 1 : start]
    if match[0] == "\ufe0f":
        return _EMOJI.match(before) is not None
    if before == "\ufe0f":  # of an emoji
        before = text[start - 2 : start - 1]
    kind = _EMOJI if _EMOJI.fullmatch(before) else _LETTER if _LETTER.fullmatch(before) else None
    return kind is not None and kind.match(text, end) is not None
