"""One moment out of a provider's text: the words in which APIs state a time.

Owns the dialect words and their parsers. Rules: ASCII digits only (``float()`` would take ``nan``, ``1e3``
and Arabic digits); huge numbers saturate at `FAR`; fractions round up, never down, because a hint is a floor;
text that does not parse is None, never zero. HTTP-dates have a parser of their own: ``email.utils`` reads the
zone ``AEST`` as UTC, accepts hour 24 and maps year 69 to 1969. A moment in the past is returned as it is;
`retry_after` decides whether it is of use.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import lru_cache
from math import isfinite
from typing import Final

from resilient.core.base.bounds import STATED_TIME

FAR: Final = datetime(9999, 1, 1, tzinfo=UTC)  # the largest moment; leaves room for what is added to it
NEAR: Final = datetime(1, 1, 3, tzinfo=UTC)  # the smallest that every zone can show
_NO_SKEW: Final = timedelta(0)
_HUGE: Final = 15  # digits before the point, beyond which a number saturates
_ENDLESS: Final = 10**18  # microseconds: 31,700 years, which timedelta still holds


class Word(StrEnum):
    """How a provider writes a time."""

    DELTA_S = "delta_s"  # whole seconds from now
    DELTA_S_FLOAT = "delta_s_float"
    DELTA_MS = "delta_ms"
    EPOCH_S = "epoch_s"
    EPOCH_S_FLOAT = "epoch_s_float"
    EPOCH_MS = "epoch_ms"
    ISO8601 = "iso8601"  # RFC 3339 date-time with an offset; seconds may be missing
    HTTP_DATE = "http_date"  # the three forms of RFC 9110, 5.6.7
    DURATION = "duration"  # 6m0s, 1h2m, 250ms
    AUTO = "auto"  # a number by its magnitude, else any of the texts
    NONE = "none"  # states no time


_UNITS: Final = {  # microseconds in one, and whether a fraction is part of the dialect
    Word.DELTA_S: (1_000_000, False),
    Word.DELTA_S_FLOAT: (1_000_000, True),
    Word.DELTA_MS: (1_000, True),
    Word.EPOCH_S: (1_000_000, False),
    Word.EPOCH_S_FLOAT: (1_000_000, True),
    Word.EPOCH_MS: (1_000, True),
}
_EPOCH_WORDS: Final = frozenset({Word.EPOCH_S, Word.EPOCH_S_FLOAT, Word.EPOCH_MS})
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

_NUMBER: Final = re.compile(r"([0-9]+)(?:\.([0-9]+))?")
_DURATION: Final = re.compile(
    r"(?:([0-9.]+)d)?(?:([0-9.]+)h)?(?:([0-9.]+)m(?!s))?(?:([0-9.]+)s)?(?:([0-9.]+)ms)?(?:([0-9.]+)(?:us|µs))?",
)
_DURATION_UNITS: Final = (86_400_000_000, 3_600_000_000, 60_000_000, 1_000_000, 1_000, 1)
_ISO: Final = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})[Tt ]([0-9]{2}):([0-9]{2})(?::([0-9]{2})(?:[.,]([0-9]+))?)?"
    r"(?:([Zz])|([+-])([0-9]{2}):?([0-9]{2}))",
)
_TIME: Final = r"(?P<hour>[0-9]{2}):(?P<minute>[0-9]{2}):(?P<second>[0-9]{2})"
_DAYS: Final = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_MONTHS: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_MONTH: Final = f"(?P<month>{'|'.join(_MONTHS)})"
_DAY: Final = f"(?P<weekday>{'|'.join(_DAYS)})"
_LONG_DAY: Final = "(?P<weekday>Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday)"
_HTTP_DATES: Final = (
    re.compile(rf"{_DAY}, (?P<day>[0-9]{{2}}) {_MONTH} (?P<year>[0-9]{{4}}) {_TIME} (?:GMT|UTC)"),
    re.compile(rf"{_LONG_DAY}, (?P<day>[0-9]{{2}})-{_MONTH}-(?P<year>[0-9]{{2}}) {_TIME} (?:GMT|UTC)"),
    re.compile(rf"{_DAY} {_MONTH} (?P<day>[0-9 ][0-9]) {_TIME} (?P<year>[0-9]{{4}})"),  # asctime: always UTC
)


def read(value: object, word: Word, now: datetime, skew: timedelta = _NO_SKEW) -> datetime | None:
    """The moment ``value`` (text, or a number out of JSON) states in the dialect ``word``, or None.

    ``skew`` is how far our clock is ahead of the server's: it shifts absolute moments, never relative ones.
    """
    text = _as_text(value)
    if text is None or word is Word.NONE:
        return None
    fractions = isinstance(value, float)  # JSON makes no difference between 30 and 30.0
    if (unit := _UNITS.get(word)) is not None:
        micros = _micros(text, unit[0], fractions=unit[1] or fractions)
        if micros is None:
            return None
        return _after(_EPOCH, micros, skew) if word in _EPOCH_WORDS else _after(now, micros)
    if word is Word.DURATION:
        return None if (micros := duration(text)) is None else _after(now, micros)
    if word is Word.AUTO:
        return _auto(text, now, skew)
    at = iso8601(text) if word is Word.ISO8601 else http_date(text, now)
    return None if at is None else _after(at, 0, skew)


def http_date(text: str, now: datetime) -> datetime | None:
    """An HTTP-date (RFC 9110, 5.6.7): IMF-fixdate, RFC 850 or asctime; None for anything else."""
    return _fixdate(text) or _any_date(text, now)


@lru_cache(maxsize=64)
def _fixdate(text: str) -> datetime | None:
    """The usual form; cached, because all answers of one second have the same Date."""
    m = _HTTP_DATES[0].fullmatch(text)
    return None if m is None else _any_date(text, _EPOCH)


def _any_date(text: str, now: datetime) -> datetime | None:
    for form in _HTTP_DATES:
        if (m := form.fullmatch(text.strip(" \t"))) is not None:
            break
    else:
        return None
    month = _MONTHS.index(m["month"]) + 1
    clock = (int(m["hour"]), int(m["minute"]), int(m["second"]))
    if len(m["year"]) == 4:  # noqa: PLR2004 - a full year needs no century
        at = _moment(int(m["year"]), month, int(m["day"]), *clock)
    else:
        at = _in_nearest_century(int(m["year"]), month, int(m["day"]), clock, now)
    if at is None:
        return None
    stated = at - timedelta(seconds=clock[2] // 60)  # a leap second has already become the next day's
    return at if _DAYS[stated.weekday()] == m["weekday"][:3] else None


def iso8601(text: str) -> datetime | None:
    """An RFC 3339 date-time. Without an offset it is None: a guess could be hours off."""
    if (m := _ISO.fullmatch(text.strip(" \t"))) is None or len(text) > STATED_TIME.value:
        return None
    at = _moment(int(m[1]), int(m[2]), int(m[3]), int(m[4]), int(m[5]), int(m[6] or 0))
    if at is None:
        return None
    offset = timedelta(0)
    if m[8] is None:
        hours, minutes = int(m[10]), int(m[11])
        if hours > 23 or minutes > 59:  # noqa: PLR2004 - the ranges of a clock
            return None
        offset = timedelta(hours=hours, minutes=minutes) * (-1 if m[9] == "-" else 1)
    fraction = _micros("0." + m[7], 1_000_000, fractions=True) if m[7] else 0
    return _after(at, fraction or 0, -offset)


def duration(text: str) -> int | None:
    """Microseconds in a duration such as ``6m0s``, ``1h2m`` or ``250ms``; None if it is none."""
    text = text.strip(" \t")
    m = _DURATION.fullmatch(text) if text and len(text) <= STATED_TIME.value else None
    if m is None:
        return None
    total = 0
    for part, unit in zip(m.groups(), _DURATION_UNITS, strict=True):
        if part is None:
            continue
        micros = _micros(part, unit, fractions=True)
        if micros is None:
            return None
        total += micros
    return total


def number(text: str) -> float | None:
    """A plain decimal number of ASCII digits, or None."""
    text = text.strip(" \t")
    return float(text) if len(text) <= STATED_TIME.value and _NUMBER.fullmatch(text) else None


def add_seconds(at: datetime, seconds: float) -> datetime:
    """``at`` plus a finite number of seconds, saturating at `FAR`."""
    try:
        return min(at + timedelta(seconds=seconds), FAR)
    except OverflowError:
        return FAR if seconds > 0 else datetime.min.replace(tzinfo=UTC)


def from_epoch(seconds: float) -> datetime:
    """The moment so many seconds after 1970, saturating at `FAR`: what a limit computes has no end."""
    return add_seconds(_EPOCH, seconds)


def in_utc(at: datetime) -> datetime:
    """The same moment in UTC, not before `NEAR` and not after `FAR`.

    PostgreSQL stores the year 10000, and psycopg reads no row that has it: neither pages nor workers would get past it.
    """
    try:
        return min(max(at.astimezone(UTC), NEAR), FAR)
    except OverflowError:  # beyond the calendar, in either direction
        return FAR if at.year > 1 else NEAR


def add(at: datetime, by: timedelta) -> datetime:
    """``at`` plus a length of time, bounded as `in_utc`."""
    try:
        return in_utc(at + by)
    except OverflowError:
        return FAR if by > _NO_SKEW else NEAR


def _as_text(value: object) -> str | None:
    """Header text without its outer blanks, or a JSON number as digits."""
    if isinstance(value, str):
        return value.strip(" \t") or None
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return str(min(value, 10**18)) if value >= 0 else None
    if isinstance(value, float):
        return f"{min(value, 1e18):.9f}" if isfinite(value) and value >= 0 else None
    return None


def _micros(text: str, unit: int, *, fractions: bool) -> int | None:
    """``text`` times ``unit`` microseconds, rounded up; None if it is no plain number."""
    m = _NUMBER.fullmatch(text)
    if m is None or (m[2] and not fractions):
        return None
    whole, fraction = m[1].lstrip("0") or "0", m[2] or ""
    if len(whole) > _HUGE:
        return _ENDLESS
    kept = fraction[:18]
    more = 1 if fraction[18:].strip("0") else 0
    scale = int("1" + "0" * len(kept))
    return min(-(-(int(whole + kept) + more) * unit // scale), _ENDLESS)


def _auto(text: str, now: datetime, skew: timedelta) -> datetime | None:
    """By magnitude: from 1e12 epoch milliseconds, from 1e9 epoch seconds, below that seconds from now."""
    if (m := _NUMBER.fullmatch(text)) is not None:
        digits = len(m[1].lstrip("0"))
        word = Word.EPOCH_MS if digits > 12 else Word.EPOCH_S_FLOAT if digits > 9 else Word.DELTA_S_FLOAT  # noqa: PLR2004
        return read(text, word, now, skew)
    at = iso8601(text) or http_date(text, now)
    if at is not None:
        return _after(at, 0, skew)
    return None if (micros := duration(text)) is None else _after(now, micros)


def _after(at: datetime, micros: int, shift: timedelta = _NO_SKEW) -> datetime:
    by = timedelta(microseconds=micros) + shift
    try:
        return min(at + by, FAR)
    except OverflowError:  # beyond the calendar, in either direction
        return FAR if by > _NO_SKEW else datetime.min.replace(tzinfo=UTC)


def _moment(year: int, month: int, day: int, hour: int, minute: int, second: int) -> datetime | None:
    """A moment of the calendar, or None; a leap second (60) is the next one's start."""
    leap = second == 60  # noqa: PLR2004 - RFC 9110 and RFC 3339 both permit it
    try:
        at = datetime(year, month, day, hour, minute, 59 if leap else second, tzinfo=UTC)
        return at + timedelta(seconds=1) if leap else at
    except (ValueError, OverflowError):
        return None


def _in_nearest_century(year: int, month: int, day: int, clock: tuple[int, int, int], now: datetime) -> datetime | None:
    """RFC 9110's rule for two digits: more than 50 years ahead means the latest such year in the past."""
    century = now.year - now.year % 100
    for full in (century + 100 + year, century + year, century - 100 + year):
        limit = (now.year + 50, now.month, now.day, now.hour, now.minute, now.second)
        if (full, month, day, *clock) <= limit:
            return _moment(full, month, day, *clock)
    return None
