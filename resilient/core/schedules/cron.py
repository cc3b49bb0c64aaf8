"""When a schedule ticks: cron expressions in a time zone, and anchored intervals.

Rules. Ticks are exact moments, the same for every worker, so that one row gives out each one once. An interval
counts from a fixed anchor (midnight 1970 UTC unless given): it never drifts, and ``every="1h"`` ticks on the
hour.

Daylight saving, as Debian's cron has it: with a fixed minute and hour (``30 2 * * *``) the job ticks once on
every day it names; a time that is skipped in spring ticks right after the gap, a time that comes twice in
autumn ticks the first time. With ``*`` in minute or hour, or with a field of seconds, it ticks by elapsed time:
again in the repeated hour, and not in the gap.

Missed ticks (no worker ran): "latest" runs only the latest of them; "all" runs the newest ``most`` of them;
"skip" runs the latest, if it is at most ``grace`` late.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from resilient.core.base.errors import BadCron, NaiveDatetime
from resilient.core.base.instants import duration
from resilient.core.base.phrases import length

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

CatchUp = Literal["latest", "all", "skip"]

MOST: Final = 100  # missed ticks that "all" runs
GRACE: Final = timedelta(seconds=60)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST: Final = datetime.min.replace(tzinfo=UTC)
_PROBE: Final = datetime(2024, 1, 1)  # noqa: DTZ001 - a leap year, so that 29 February is found at once
_LONGEST_EXPRESSION: Final = 200
_SHORTEST: Final = timedelta(seconds=1)
_LONGEST: Final = timedelta(days=3653)
_NAMES: Final = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}


@dataclass(frozen=True, slots=True)
class Ticks:
    """A checked timing; make it with `ticks`. Exactly one of ``cron`` and ``every`` is set."""

    cron: str | None = None
    every: timedelta | None = None
    zone: str = "UTC"
    anchor: datetime = _EPOCH

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads."""
        if self.every is None:
            return {"cron": self.cron, "zone": self.zone}
        return {"every": self.every.total_seconds(), "anchor": self.anchor.isoformat()}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Ticks:
        """The timing that `to_json` wrote. Raises `BadCron`."""
        if value.get("cron") is not None:
            return ticks(cron=value["cron"], zone=value["zone"])
        return ticks(every=value.get("every"), anchor=datetime.fromisoformat(value["anchor"]))

    def __str__(self) -> str:
        if self.every is not None:
            return f"every {length(self.every.total_seconds())}"
        return f"{self.cron} ({self.zone})"


def ticks(
    *,
    cron: str | None = None,
    every: str | float | timedelta | None = None,
    zone: str = "UTC",
    anchor: datetime | None = None,
) -> Ticks:
    """Check a timing.

    ``cron``: five fields (or six, the first being seconds), or a name such as ``@daily``, in the time zone
    ``zone`` (an IANA name). ``every``: seconds, a timedelta, or text such as ``"1h"``, ``"15m"``,
    ``"1h30m"``, counted from ``anchor``.

    Raises `BadCron` naming the expression and the remedy, `NaiveDatetime` for an anchor without a time zone.
    """
    if (cron is None) == (every is None):
        raise BadCron("a schedule needs either cron=..., such as '0 3 * * *', or every=..., such as '1h'")
    if cron is not None:
        if anchor is not None:
            raise BadCron(f"cron {cron!r} takes no anchor: that is for every=...")
        _zone(zone if isinstance(zone, str) else repr(zone))
        return Ticks(cron=_expression(cron), zone=zone)
    if zone != "UTC":
        raise BadCron(f"every={every!r} takes no time zone ({zone!r}): use cron for times of day, or an anchor")
    if anchor is not None and not isinstance(anchor, datetime):
        raise BadCron(f"anchor={anchor!r:.80} is no datetime: use datetime(..., tzinfo=UTC)")
    if anchor is not None and anchor.tzinfo is None:
        raise NaiveDatetime(f"anchor {anchor.isoformat()} has no time zone: use datetime(..., tzinfo=UTC)")
    try:
        return Ticks(every=_interval(every), anchor=(anchor or _EPOCH).astimezone(UTC))
    except OverflowError:
        raise BadCron(f"anchor {anchor} lies outside of the years 1 to 9999 in UTC: use one near today") from None


def next_after(spec: Ticks, after: datetime) -> datetime:
    """The first tick later than ``after``, in UTC."""
    if spec.every is not None:
        return spec.anchor + ((after - spec.anchor) // spec.every + 1) * spec.every
    return next(_walk(spec, after))


def back(spec: Ticks, now: datetime, most: int, since: datetime | None = None) -> list[datetime]:
    """Up to ``most`` ticks not later than ``now``, oldest first; none older than the last one before ``since``."""
    moments: list[datetime] = []
    for tick in islice(_back(spec, now), most):
        moments.append(tick)
        if since is not None and tick < since:
            break
    return moments[::-1]


def missed(
    spec: Ticks,
    last: datetime,
    now: datetime,
    policy: CatchUp = "latest",
    *,
    grace: timedelta = GRACE,
    most: int = MOST,
) -> list[datetime]:
    """The ticks to run now, oldest first: those after ``last`` (the last one served) and not after ``now``.

    A tick at ``now`` counts, too. The cost depends on ``most``, not on how long no worker ran.
    """
    ticks = _until(_back(spec, now), last)
    if policy == "latest":
        return list(islice(ticks, 1))
    if policy == "skip":
        return [tick for tick in islice(ticks, 1) if now - tick <= grace]
    return list(reversed(list(islice(ticks, most))))


def _until(ticks: Iterator[datetime], last: datetime) -> Iterator[datetime]:
    """Descending ``ticks``, as far as they are later than ``last``."""
    for tick in ticks:
        if tick <= last:
            return
        yield tick


def _walk(spec: Ticks, after: datetime) -> Iterator[datetime]:
    """Cron ticks later than ``after``, ascending."""
    zone = _zone(spec.zone)
    start = after.astimezone(zone).replace(tzinfo=None) - _shift_near(after, zone)
    for tick in _in_utc(spec, CronSim(spec.cron or "", start), zone, 1):
        if tick > after:
            yield tick


def _back(spec: Ticks, now: datetime) -> Iterator[datetime]:
    """Ticks not later than ``now``, descending."""
    if spec.every is not None:
        tick = spec.anchor + (now - spec.anchor) // spec.every * spec.every
        while tick - _FIRST >= spec.every:
            yield tick
            tick -= spec.every
        yield tick
        return
    zone = _zone(spec.zone)
    start = now.astimezone(zone).replace(tzinfo=None) + _shift_near(now, zone)
    start += timedelta(seconds=1)  # the walk leaves its start out, and ``now`` itself counts
    for tick in _in_utc(spec, CronSim(spec.cron or "", start, reverse=True), zone, -1):
        if tick <= now:
            yield tick


def _in_utc(spec: Ticks, local: CronSim, zone: tzinfo, direction: int) -> Iterator[datetime]:
    """Local ticks as moments, strictly ascending (``direction`` 1) or descending (-1).

    The library walks naive local time, where it needs to know nothing of zones: its own zone arithmetic
    yields ticks in the past in a repeated hour, and loses some where the shift is half an hour (tried).
    """
    fixed = _is_fixed(spec.cron or "")
    ahead: deque[datetime] = deque()  # ticks of the other pass through a repeated hour
    last: datetime | None = None
    for tick in local:
        moments = _moments(tick, zone)
        if fixed:
            moments = moments[:1] or (_gap_end(tick, zone),)
        for moment in moments[:1] if direction > 0 else moments[-1:]:
            while ahead and (moment - ahead[0]) * direction > timedelta(0):
                yield ahead.popleft()
            if moment != last:
                yield moment
            last = moment
        ahead.extend(moments[1:] if direction > 0 else moments[:-1])
    yield from ahead


def _moments(local: datetime, zone: tzinfo) -> tuple[datetime, ...]:
    """The moments when clocks of the zone show ``local``: one, in autumn two, in spring's gap none."""
    first = local.replace(tzinfo=zone).astimezone(UTC)
    second = local.replace(tzinfo=zone, fold=1).astimezone(UTC)
    if first == second:
        return (first,)
    return (first, second) if first < second else ()


def _gap_end(local: datetime, zone: tzinfo) -> datetime:
    """The first moment after the gap in which ``local`` would lie (to the second, as zones are)."""
    before = local.replace(tzinfo=zone, fold=1).astimezone(UTC)
    after = local.replace(tzinfo=zone).astimezone(UTC)
    new = after.astimezone(zone).utcoffset()
    while after - before > timedelta(seconds=1):
        middle = before + timedelta(seconds=(after - before) // timedelta(seconds=2))
        if middle.astimezone(zone).utcoffset() == new:
            after = middle
        else:
            before = middle
    return after


def _shift_near(at: datetime, zone: tzinfo) -> timedelta:
    """By how much the zone's clocks are set within a day of ``at``: how far local time may run backwards."""
    day = timedelta(days=1)
    before, after = (at - day).astimezone(zone).utcoffset(), (at + day).astimezone(zone).utcoffset()
    return abs((after or timedelta(0)) - (before or timedelta(0)))


def _is_fixed(cron: str) -> bool:
    """Whether minute and hour are fixed, so that Debian's rule for daylight saving applies."""
    parts = cron.split()
    return len(parts) == 5 and not parts[0].startswith("*") and not parts[1].startswith("*")  # noqa: PLR2004


def _expression(cron: str) -> str:
    if not isinstance(cron, str) or len(cron) > _LONGEST_EXPRESSION:
        raise BadCron(f"cron {str(cron)[:40]!r} is no cron expression: write five fields, such as '0 3 * * *'")
    expression = _NAMES.get(cron.strip().lower(), cron.strip())
    try:
        if next(CronSim(expression, _PROBE), None) is not None:
            return expression
    except CronSimError as error:
        raise BadCron(
            f"cron {cron!r}: {str(error).lower()}. Write minute, hour, day of month, month and day of week, "
            "such as '0 3 * * *' or '*/15 8-18 * * mon-fri'",
        ) from None
    raise BadCron(f"cron {cron!r} never ticks: no day fits all of its fields")


def _interval(every: str | float | timedelta | None) -> timedelta:
    remedy = "write seconds, a timedelta, or text such as '1h', '15m' or '1h30m', from 1 second to 10 years"
    try:
        if isinstance(every, str):
            micros = duration(every.replace(" ", ""))
            interval = None if micros is None else timedelta(microseconds=micros)
        elif isinstance(every, (int, float)) and not isinstance(every, bool):
            interval = timedelta(seconds=every)
        else:
            interval = every if isinstance(every, timedelta) else None
    except (OverflowError, ValueError):
        interval = None
    if interval is None or not _SHORTEST <= interval <= _LONGEST:
        raise BadCron(f"every={every!r} is no interval: {remedy}")
    return interval


@lru_cache(maxsize=256)
def _zone(name: str) -> tzinfo:
    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError, TypeError):
        raise BadCron(f"time zone {name!r} is not known: use an IANA name, such as 'Europe/Berlin'") from None
