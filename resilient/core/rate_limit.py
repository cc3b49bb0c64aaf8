"""Rate limits: the generic cell rate algorithm on one number, several limits at once, the server on top.

A limit's state is `tat`, the "theoretical arrival time" in epoch seconds: when everything drawn so far will
have come back. A draw of ``cost`` fits once ``tat + (cost - capacity) * interval`` has passed; the same rule
lets a cost above the capacity through after a correspondingly longer rest, so a big request never breaks the
promise of `Limit`.

A draw over several limits takes from all or from none. One that must wait a moment reserves its place: the
wait is part of the answer, later draws queue behind it, and everybody who looks at the state sees the queue.

What the server reports (`remaining` until `reset_at`) can only lower our view: nothing is drawn beyond it,
and what is left is spread over the time until the reset, a tenth at once. Answers overtake each other, so a
report counts only if its request started after the one that is stored, and within one server window
`remaining` only falls (our own draws lower it too, so requests in flight are not spent twice).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from resilient.core.limit import Limit

_EPSILON: Final = 1e-6  # seconds; epoch floats have a resolution of about 2e-7
_SAME_WINDOW: Final = 2.0  # seconds by which resets of one server window may differ (rounding, skew)


class LimitState(NamedTuple):
    """Where one limit stands, in epoch seconds; ``remaining`` is the server's count until ``reset_at``."""

    tat: float = 0.0
    remaining: float | None = None
    reset_at: float | None = None
    observed_at: float | None = None


FRESH: Final = LimitState()


@dataclass(frozen=True, slots=True)
class Draw:
    """Granted after ``wait`` seconds with the new ``states``, or refused until ``until``.

    ``by`` is the index of the limit that decided.
    """

    granted: bool
    wait: float
    until: float
    by: int
    states: tuple[LimitState, ...]


def pace(limit: Limit, state: LimitState, now: float) -> tuple[float, float]:
    """Seconds per unit and units at once, as far as the server's report allows."""
    if state.remaining is None or state.reset_at is None or state.reset_at <= now:
        return limit.interval, limit.capacity
    left = max(state.remaining, 1.0)
    interval = (state.reset_at - now) / left
    if interval <= limit.interval:
        return limit.interval, min(limit.capacity, left)
    return interval, min(limit.capacity, max(1.0, left / 10))


def ready_at(limit: Limit, state: LimitState, cost: float, now: float) -> float:
    """When a draw of ``cost`` fits: ``now`` or a later epoch second."""
    interval, capacity = pace(limit, state, now)
    at = state.tat + (cost - capacity) * interval
    if state.remaining is not None and state.reset_at is not None and state.remaining < cost:
        at = max(at, state.reset_at)
    return now if at <= now + _EPSILON else at


def available(limit: Limit, state: LimitState, now: float, ahead: float = 0.0) -> float:
    """How many units may be drawn from ``now`` on within ``ahead`` seconds, each as soon as it is there."""
    if state.remaining is None:  # by far the most common; the claim asks this thousands of times a second
        spare = (now + _EPSILON - state.tat) / limit.interval
        units = limit.capacity + min(0.0, spare) + ahead / limit.interval
        return max(0.0, units)
    interval, capacity = pace(limit, state, now)
    units = capacity + min(0.0, (now + _EPSILON - state.tat) / interval) + ahead / interval
    if state.reset_at is not None and state.reset_at > now:
        units = min(units, state.remaining)
    return max(0.0, units)


def take(limit: Limit, state: LimitState, cost: float, now: float) -> LimitState:
    """The state after drawing ``cost``, whether it fits or not (an answer may cost more than asked for)."""
    start = max(state.tat, now)
    if state.remaining is None:
        return LimitState(start + cost * limit.interval, None, state.reset_at, state.observed_at)
    interval, _ = pace(limit, state, now)
    left = None if state.reset_at is None or state.reset_at <= now else state.remaining - cost
    return LimitState(start + cost * interval, left, state.reset_at, state.observed_at)


def give_back(limit: Limit, state: LimitState, units: float, now: float, until: float | None = None) -> LimitState:
    """The state with ``units`` that were drawn and not used put back.

    ``until``: the `tat` that their draw led to. What of it has passed cannot be given back: the bucket has refilled
    without it, and somebody may have drawn that.
    """
    if state.remaining is not None:  # first: they were drawn at the pace of that many
        state = LimitState(state.tat, state.remaining + units, state.reset_at, state.observed_at)
    interval, _ = pace(limit, state, now)
    back = units * interval if until is None else max(0.0, min(units * interval, until - now))
    return LimitState(state.tat - back, state.remaining, state.reset_at, state.observed_at)


def draw(limits: Sequence[tuple[Limit, LimitState]], cost: float, now: float, patience: float = 0.0) -> Draw:
    """Draw ``cost`` from all limits or from none, reserving a place if at most ``patience`` seconds away."""
    until, by = now, 0
    for index, (limit, state) in enumerate(limits):
        at = ready_at(limit, state, cost, now)
        if at > until:
            until, by = at, index
    if until - now > patience:
        return Draw(granted=False, wait=0.0, until=until, by=by, states=tuple(state for _, state in limits))
    states = tuple(take(limit, state, cost, now) for limit, state in limits)
    return Draw(granted=True, wait=until - now, until=until, by=by, states=states)


def observe(state: LimitState, remaining: float, reset_at: float, started_at: float) -> LimitState:
    """Take in what an answer said; ``started_at`` is when its request was sent. See the top of this file."""
    if state.observed_at is not None and started_at < state.observed_at:
        return state
    if state.remaining is not None and state.reset_at is not None and reset_at <= state.reset_at + _SAME_WINDOW:
        if reset_at < state.reset_at - _SAME_WINDOW:
            return state  # a window before the one we know
        remaining = min(remaining, state.remaining)
    return LimitState(state.tat, max(0.0, remaining), reset_at, started_at)
