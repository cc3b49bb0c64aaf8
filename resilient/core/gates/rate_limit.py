"""Rate limits: as declared (`Limit`), and as drawn, by the generic cell rate algorithm.

``Limit(100, per=60)`` keeps a promise about the provider's count: never more than 100 in *any* 60 seconds,
wherever its window begins. A bucket as large as the rate would let 200 through in the first minute. So such a limit
paces: a tenth of the rate may go at once (one request, if that is less), and the rest follows evenly.
``Limit(10, per="1m")`` lets one request through every 6 seconds.

A request counts at the moment it is written to its socket, because then it is on its way to the provider. That moment
may be later than the draw, by the seconds that a worker may draw in advance (`lease`) and by `ROAD`; a request that is
later still draws again (`engine/gates/drawing.py`). The window is longer by both, which is felt if it is short: 10 a
second become 10 in 1.1 seconds, 100 a minute 100 in 60.18. What may go at once is kept free of the even flow: of 100 a
minute, 91 are used by work that never pauses.

``burst=`` says that the provider itself has a bucket: that many at once, refilled at the full rate. Draws keep to it;
at the sockets the requests may exceed it by what the rate gives in `lease` and `ROAD` together.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, field, fields
from datetime import timedelta
from math import floor
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from resilient.core.base.errors import InvalidInput, SetupError
from resilient.core.base.misfit import explained_class, is_number

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


Counts = Literal["requests", "jobs"]
LONGEST_LEASE: Final = 0.1  # seconds of a limit's rate that a worker may hold in advance
ROAD: Final = 0.08  # seconds that a request may take from its draw to its socket
_LEASE: Final = 0.02  # share of the window a lease may last
LEARNT: Final = "~learnt"
_STATED: Final = re.compile(r"~([0-9.e+]+)/")
_NAME: Final = re.compile(r"[A-Za-z0-9._:@+/-]{1,64}")
_SPAN: Final = re.compile(r"([0-9]*(?:\.[0-9]*)?)\s*([a-z]+)")  # one way to read digits: its time is linear
_UNITS: Final = {
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86400.0),
}


def seconds(span: float | str | timedelta) -> float:
    """A span as seconds: a number, a timedelta, or text such as ``"15m"``, ``"min"`` or ``"1h"``."""
    if isinstance(span, timedelta):
        value = span.total_seconds()
    elif isinstance(span, str):
        match = _SPAN.fullmatch(span.strip().lower())
        if not match or match[2] not in _UNITS or match[1] == ".":
            raise InvalidInput(
                f"{span!r} is not a span of time: write seconds, or text such as '90s', '15m', '1h', '1d'"
            )
        value = float(match[1] or 1) * _UNITS[match[2]]
    else:
        value = 0.0
        with suppress(OverflowError):
            value = 0.0 if isinstance(span, bool) else float(span)
    if not is_number(value) or value <= 0:
        raise InvalidInput(f"a span of time must be positive, not {span!r}")
    return value


@explained_class
@dataclass(frozen=True, slots=True, init=False)
class Limit:
    """At most ``rate`` units in any ``per`` seconds, or with ``burst`` a bucket of that many at once.

    ``per`` takes seconds, a timedelta or text such as ``"1m"``. ``name``: as the provider's headers call it, so that
    what they report is applied to it. ``counts`` says of what: requests are drawn
    when they are sent, jobs when they are claimed. Raises `InvalidInput`.
    """

    rate: float
    per: float
    burst: float | None
    name: str
    counts: Counts
    interval: float = field(repr=False, compare=False)  # seconds for one unit to come back
    capacity: float = field(repr=False, compare=False)  # units at once

    def __init__(
        self,
        rate: float,
        per: float | str | timedelta,
        *,
        burst: float | None = None,
        name: str = "",
        counts: Counts = "requests",
    ) -> None:
        span = seconds(per)
        for word, number in (("rate", rate), ("burst", 1 if burst is None else burst)):
            if not is_number(number):
                raise InvalidInput(f"Limit({word}={number!r}): write a number, such as Limit(100, per='1m', burst=20)")
        if rate <= 0 or (burst is not None and burst < 1):
            raise InvalidInput(
                f"Limit({rate!r}, per={per!r}, burst={burst!r}): rate must be positive, burst at least 1"
            )
        if counts not in ("requests", "jobs"):
            raise InvalidInput(f"a limit counts 'requests' or 'jobs', not {counts!r}")
        name = name or f"{rate:.12g}/{span:.12g}s"
        if not _NAME.fullmatch(name):
            raise InvalidInput(f"{name!r} cannot name a limit: use at most 64 letters, digits and ._:@+/-")
        if burst is not None:
            interval, capacity = span / rate, float(burst)
        else:
            capacity = max(1.0, rate / 10)
            interval = (span + _lease(span) + ROAD) / (rate - (capacity - 1))
        values = (float(rate), span, burst, name, counts, interval, capacity)
        for item, value in zip(fields(self), values, strict=True):
            object.__setattr__(self, item.name, value)

    @property
    def lease(self) -> float:
        """How many seconds of the rate a worker may draw in advance."""
        return _lease(self.per)

    @classmethod
    def parse(cls, text: str, *, counts: Counts = "requests", name: str = "") -> Limit:
        """Read ``"100/min"``, ``"5000/1h"``, ``"10/s"`` or ``"2/s burst 40"``."""
        head, _, burst = text.partition(" burst ")
        rate, slash, per = head.partition("/")
        try:
            if not slash:
                raise ValueError  # noqa: TRY301 - one message for everything malformed
            return cls(float(rate), per, burst=float(burst) if burst else None, counts=counts, name=name)
        except ValueError as error:
            if isinstance(error, InvalidInput):
                raise
            raise InvalidInput(f"{text!r} is not a limit: write '100/min', '5000/1h' or '2/s burst 40'") from None

    @classmethod
    def learnt(cls, rate: float, per: float, burst: float) -> Limit:
        """A limit that throttles taught; no declared limit can have its name."""
        made = cls(rate, per, burst=burst)
        object.__setattr__(made, "name", LEARNT)
        return made

    @classmethod
    def stated(cls, name: str, total: float, per: float) -> Limit:
        """A limit that only the provider's answers state, by the name they give it; no declared one is named so."""
        made = cls(total, per)
        object.__setattr__(made, "name", f"~{total:.12g}/{name}")
        return made

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads."""
        doc = {
            "rate": self.rate,
            "per": self.per,
            "burst": self.burst,
            "name": self.name,
            "counts": self.counts,
        }
        return {key: value for key, value in doc.items() if value is not None}

    @classmethod
    def from_json(cls, doc: Any) -> Limit:
        """Read what `to_json` wrote, or the text of `parse`."""
        if isinstance(doc, str):
            return cls.parse(doc)
        try:
            return cls(**doc)
        except TypeError:
            raise InvalidInput(f"{doc!r} is not a limit: give rate, per and perhaps burst, name, counts") from None


def stated_limit(name: str, per: float) -> Limit | None:
    """The limit that answers state, by the name that `Limit.stated` gave it; None for every other name."""
    match = _STATED.match(name)
    return None if match is None else Limit.stated(name[match.end() :], float(match[1]), max(per, 1.0))


def _lease(span: float) -> float:
    return min(LONGEST_LEASE, span * _LEASE)


# -- draws ------------------------------------------------------------------------------------------------------------
#
# A limit's state is `tat`, the "theoretical arrival time" in epoch seconds: when everything drawn so far will have come
# back. A draw of ``cost`` fits once ``tat + (cost - capacity) * interval`` has passed. By the same rule a cost above
# the capacity waits for the units above it, so a big request keeps the promise of `Limit`, too.
#
# A draw over several limits takes from all or from none, at the moment of sending: if one limit delays it, the others
# count it at that later moment, too. A delayed draw reserves its place: `Draw.wait` says how long, and later draws
# queue behind it. `tat` is the end of that queue and knows no gaps in it. So a place that is not used comes back only
# while it is the last; otherwise the next draw would get a moment that a draw behind that place has already.
#
# A limit that is declared anew under its old name keeps what was drawn, in units: the state says what one took
# (`interval`) when they were last drawn (`drawn_at`), and `_converted` gives the `tat` to which the same draws would
# have led had the new limit held since. So one that is raised is not stopped by seconds of the old one, and two workers
# that know the old and the new limit lose and add no unit, in whatever order they draw. One that is lowered stops for
# its window at most, counted from the last draw, or for as long as the old one would have taken to be full again: then
# nothing of the former draws is left by either. What nobody declared has a pace of its own each time: it keeps seconds.
#
# What the server reports (`remaining` until `reset_at`) can only lower our view: nothing is drawn beyond it, and what
# is left is spread over the time until the reset, a tenth at once. Answers overtake each other, so a report counts only
# if its request started after the one that is stored, and within one server window `remaining` only falls (our own
# draws lower it too, so requests in flight are not spent twice).

_EPSILON: Final = 1e-6  # seconds; epoch floats have a resolution of about 2e-7
_SAME_WINDOW: Final = 2.0  # seconds by which resets of one server window may differ (rounding, skew)


class LimitState(NamedTuple):
    """Where one limit stands, in epoch seconds.

    ``remaining`` is the server's count until ``reset_at``; ``observed_at`` is when the request was sent whose answer
    stated it. ``interval``: that of the limit as it was declared at the last draw, ``drawn_at``.
    """

    tat: float = 0.0
    remaining: float | None = None
    reset_at: float | None = None
    observed_at: float | None = None
    interval: float | None = None
    drawn_at: float | None = None


FULL: Final = LimitState()  # a bucket that nobody has drawn from


@dataclass(frozen=True, slots=True)
class Draw:
    """Granted, to be sent ``wait`` seconds from now, with the new ``states``; or refused.

    ``at`` (epoch seconds): when it is to be sent, or would fit. ``by`` is the index of the limit that made the draw
    wait longest.
    """

    granted: bool
    wait: float
    at: float
    by: int
    states: tuple[LimitState, ...]


def pace(limit: Limit, state: LimitState, now: float) -> tuple[float, float]:
    """Seconds per unit and units at once, as far as the server's report allows."""
    if state.remaining is None or state.reset_at is None or state.reset_at <= now:
        return limit.interval, limit.capacity
    units = max(state.remaining, 1.0)
    interval = (state.reset_at - now) / units
    if interval <= limit.interval:
        return limit.interval, min(limit.capacity, units)
    return interval, min(limit.capacity, max(1.0, units / 10))


def ready_at(limit: Limit, state: LimitState, cost: float, now: float) -> float:
    """When a draw of ``cost`` fits: ``now`` or a later epoch second."""
    interval, capacity = pace(limit, state, now)
    at = _tat(limit, state) + (cost - capacity) * interval
    if state.remaining is not None and state.reset_at is not None and state.remaining < cost:
        at = max(at, state.reset_at)
    return now if at <= now + _EPSILON else at


def available(limit: Limit, state: LimitState, now: float, ahead: float = 0.0) -> float:
    """How many units may be drawn from ``now`` until ``ahead`` seconds later, each as soon as it has come back."""
    if state.remaining is None:  # by far the most common; the claim asks this thousands of times a second
        spare = (now + _EPSILON - _tat(limit, state)) / limit.interval
        units = limit.capacity + min(0.0, spare) + ahead / limit.interval
        return max(0.0, units)
    interval, capacity = pace(limit, state, now)
    units = capacity + min(0.0, (now + _EPSILON - _tat(limit, state)) / interval) + ahead / interval
    if state.reset_at is not None and state.reset_at > now:
        units = min(units, state.remaining)
    return max(0.0, units)


def take(limit: Limit, state: LimitState, cost: float, now: float, at: float | None = None) -> LimitState:
    """The state after drawing ``cost`` to be sent ``at`` (None: now), whether it fits or not.

    It need not fit, because an answer may say that its request cost more than was drawn.
    """
    tat, moment = _tat(limit, state), now if at is None else at
    start, drawn_at = (tat, now) if tat > moment else (moment, moment)
    basis = (None, None) if limit.name.startswith("~") else (limit.interval, drawn_at)
    if state.remaining is None:
        return LimitState(start + cost * limit.interval, None, state.reset_at, state.observed_at, *basis)
    interval, _ = pace(limit, state, now)
    remaining = None if state.reset_at is None or state.reset_at <= now else state.remaining - cost
    return LimitState(start + cost * interval, remaining, state.reset_at, state.observed_at, *basis)


def charge(limit: Limit, state: LimitState, cost: float, now: float) -> LimitState:
    """The state after an answer said that its request cost so much more than was drawn."""
    return take(limit, _converted(limit, state), cost, now)


def _tat(limit: Limit, state: LimitState) -> float:
    """The theoretical arrival time of what was drawn, as this limit counts."""
    if state.interval is None or state.interval == limit.interval:  # by far the most common
        return state.tat
    tat = _converted(limit, state).tat
    if tat <= state.tat or state.drawn_at is None:
        return tat
    return min(tat, max(state.tat, state.drawn_at + limit.per) + (limit.capacity - 1) * limit.interval)


def _converted(limit: Limit, state: LimitState) -> LimitState:
    """The state with the same units drawn from this limit instead, all of them."""
    if state.interval is None or state.drawn_at is None or state.interval == limit.interval:
        return state
    if limit.name.startswith("~"):
        return state._replace(interval=None, drawn_at=None)
    debt = max(0.0, state.tat - state.drawn_at)
    tat = min(state.tat, state.drawn_at) + debt * limit.interval / state.interval
    return state._replace(tat=tat, interval=limit.interval)


def give_back(limit: Limit, state: LimitState, units: float, now: float, tat: float) -> LimitState:
    """The state with ``units`` that were drawn and never sent put back, if nobody has drawn since.

    ``tat``: the state's after their draw. The part of it that has passed does not come back, because the bucket has
    refilled meanwhile.
    """
    state = _unspent(state, units)
    if abs(state.tat - tat) > _EPSILON:
        return state
    return _lowered(limit, state, units, now, tat)


def refund(limit: Limit, state: LimitState, units: float, now: float, tat: float | None = None) -> LimitState:
    """The state after an answer said that its request cost ``units`` less than was drawn; ``tat`` as for `give_back`.

    While later draws wait for their moments, fewer units come back, so that the last of them keeps its moment.
    """
    state = _unspent(_converted(limit, state), units)
    interval, capacity = pace(limit, state, now)
    if tat is not None and state.tat > tat and state.tat - capacity * interval > now:
        units = min(units, capacity - 1)
    return _lowered(limit, state, units, now, tat)


def _unspent(state: LimitState, units: float) -> LimitState:
    """The state with ``units`` more of the server's count, if it has one."""
    if state.remaining is None:
        return state
    return state._replace(remaining=state.remaining + units)


def _lowered(limit: Limit, state: LimitState, units: float, now: float, tat: float | None) -> LimitState:
    interval, _ = pace(limit, state, now)
    back = units * interval if tat is None else max(0.0, min(units * interval, tat - now))
    return state._replace(tat=state.tat - back)


def draw(limits: Sequence[tuple[Limit, LimitState]], cost: float, now: float, patience: float = 0.0) -> Draw:
    """Draw ``cost`` from all limits or from none; a draw may wait at most ``patience`` seconds for its place."""
    at, by = now, 0
    for index, (limit, state) in enumerate(limits):
        if (ready := ready_at(limit, state, cost, now)) > at:
            at, by = ready, index
    if at - now > patience:
        return Draw(granted=False, wait=0.0, at=at, by=by, states=tuple(state for _, state in limits))
    moments = [None if i == by else at for i in range(len(limits))]  # the limit that delays it counts by its own `tat`
    states = tuple(take(limit, state, cost, now, one) for (limit, state), one in zip(limits, moments, strict=True))
    return Draw(granted=True, wait=at - now, at=at, by=by, states=states)


def observe(
    state: LimitState, remaining: float, reset_at: float, started_at: float, *, is_declared: bool = True
) -> LimitState:
    """The state after an answer stated ``remaining``; ``started_at`` is when its request was sent.

    A limit that nobody declared is full again at its reset, whatever pace another word led to before.
    """
    if state.observed_at is not None and started_at < state.observed_at:
        return state
    tat = state.tat
    if state.remaining is not None and state.reset_at is not None and reset_at <= state.reset_at + _SAME_WINDOW:
        if reset_at < state.reset_at - _SAME_WINDOW:
            return state  # the report is about an earlier window
        remaining = min(remaining, state.remaining)
    elif not is_declared:
        tat = min(tat, reset_at)
    return state._replace(tat=tat, remaining=max(0.0, remaining), reset_at=reset_at, observed_at=started_at)


# -- division among shards --------------------------------------------------------------------------------------------
#
# A provider's limits, divided among shards: each database counts for itself, and together they stay below.
#
# Only what holds for a whole provider is divided, so what stands at a root (``github``). An account (``github/*``)
# lives in one shard, with all of its limits, and so does what a token endpoint of its own allows.

_SLACK: Final = 1e-9  # of sums and products of shares


def is_shared(pattern: str) -> bool:
    """Whether the resources of a pattern (roots) are used from several shards."""
    return "/" not in pattern and ":token@" not in pattern


def check_shares(shares: Mapping[str, float | None], shared: Sequence[str]) -> dict[str, float]:
    """The share of each shard. ``shared``: patterns of limits and caps to divide. Raises `SetupError`."""
    declared = {name: share for name, share in shares.items() if share is not None}
    if not declared and (len(shares) == 1 or not shared):
        return dict.fromkeys(shares, 1.0)
    if missing := [name for name in shares if name not in declared]:
        why = f": {shared[0]!r} has a limit or cap for all accounts together" if shared else ""
        raise SetupError(f"shard {missing[0]!r} has no share{why}; declare each one's, Shard(url, share=0.5)")
    for name, share in declared.items():
        if not is_number(share) or not 0 < share <= 1:
            raise SetupError(f"shard {name!r}: share={share!r} is a part of 1, above 0")
    if (total := sum(declared.values())) > 1 + _SLACK:
        raise SetupError(f"the shares of the shards are {total:g} together: at most 1, or they exceed every limit")
    return declared


def divided(limits: Mapping[str, Sequence[Limit]], share: float, shard: str) -> dict[str, Sequence[Limit]]:
    """The limits of one shard. Raises `SetupError` for one of which less than a request would be left."""
    return {
        pattern: [_part(limit, share, f"{pattern!r} in shard {shard!r}") for limit in many]
        if is_shared(pattern)
        else many
        for pattern, many in limits.items()
    }


def divided_caps(caps: Mapping[str, int], share: float, shard: str) -> dict[str, int]:
    """The concurrency caps of one shard. Raises `SetupError` for one of which no job would be left."""
    parts = {}
    for pattern, cap in caps.items():
        parts[pattern] = floor(cap * share + _SLACK) if is_shared(pattern) else cap
        if parts[pattern] < 1:
            raise SetupError(f"{share:g} of the cap of {pattern!r}, {cap}, leaves shard {shard!r} no job at once")
    return parts


def bounded(learning: Mapping[str, Any]) -> list[str]:
    """The patterns under which what is learnt has bounds, in requests a second."""
    return [pattern for pattern, word in learning.items() if isinstance(word, tuple)]


def divided_learning(learning: Mapping[str, Any], share: float) -> dict[str, Any]:
    """What one shard may learn: its share of the bounds that hold for a whole provider."""
    patterns = {pattern for pattern in bounded(learning) if is_shared(pattern)}
    return {
        pattern: tuple(bound * share for bound in word) if pattern in patterns and share < 1 else word
        for pattern, word in learning.items()
    }


def _part(limit: Limit, share: float, where: str) -> Limit:
    rate, burst = limit.rate * share, None if limit.burst is None else limit.burst * share
    if min(rate, rate if burst is None else burst) < 1 - _SLACK and share < 1:
        raise SetupError(
            f"{share:g} of the limit {limit.name} of {where} is less than one request: shards count apart, so each"
            " would send that one; give it a larger share, or a longer span (120 per 2 minutes instead of 1 a second)"
        )
    if share == 1:
        return limit
    return Limit(
        rate, limit.per, burst=None if burst is None else max(1.0, burst), name=limit.name, counts=limit.counts
    )
