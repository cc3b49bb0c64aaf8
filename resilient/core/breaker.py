"""The circuit breaker of one resource key: a state machine on plain values.

    closed --trip--> open --elect--> half_open --ok--> closed
                      ^                  |
                      +------failed------+   longer
                      +-----neutral------+   no longer than before
    half_open --elect--> half_open           the probe's lease is over: somebody else probes
    any --isolate--> isolated --elect--> half_open   (only if it was given an end)
    any --reset--> closed

Every arrow bumps `generation`; counting does not. A report counts only under the generation its request was
sent under, so whatever was in flight across an arrow changes nothing. A half-open circuit has one probe,
leased: a lost report wedges nothing, because the lease ends.

An ancestor's failures come from many children. One sick account must not stop its provider, so a trip also
needs enough of them (`quorum`). Who was seen lately is kept in the window, a bounded number of names with the
time of their latest ok and failure; a child that works again leaves the list of the ill. A key's own requests
count as one child (`evidence.child_of`).

Open times double from trip to trip, are lengthened by up to half so that not all come back at once, and come down
one step per calm interval instead of at once, so a flapping provider is not asked at full pace after each good
minute. `first_open` is the shortest there is, `longest_open` the longest, jitter included; only a time the provider
itself told is waited out beyond it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

from resilient.core.policy import MOST_CHILDREN
from resilient.core.quorum import ill_enough

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from resilient.core.policy import BreakerPolicy

State = Literal["closed", "open", "half_open", "isolated"]
_JITTER: Final = 0.5  # of an open time, added
_RAMP_STEPS: Final = 10  # doublings within the ramp
_NEUTRAL_PAUSE: Final = timedelta(seconds=1)
_NOBODY: Final[Mapping[str, float]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Window:
    """Two buckets of half a window each, and the children seen lately (name to epoch second)."""

    ok: int = 0
    failed: int = 0
    ok_before: int = 0
    failed_before: int = 0
    well: Mapping[str, float] = field(default_factory=lambda: _NOBODY)
    ill: Mapping[str, float] = field(default_factory=lambda: _NOBODY)

    def to_json(self) -> dict[str, Any]:
        """As the resource row keeps it."""
        counts = [self.ok, self.failed, self.ok_before, self.failed_before]
        return {"n": counts, "well": dict(self.well), "ill": dict(self.ill)}

    @classmethod
    def from_json(cls, doc: Mapping[str, Any] | None) -> Window:
        """Read what `to_json` wrote."""
        if not doc:
            return _EMPTY
        ok, failed, ok_before, failed_before = doc["n"]
        return cls(ok, failed, ok_before, failed_before, doc["well"], doc["ill"])


_EMPTY: Final = Window()


@dataclass(frozen=True, slots=True)
class BreakerFacts:
    """The breaker's part of a resource row."""

    state: State = "closed"
    generation: int = 0
    open_until: datetime | None = None
    opened_at: datetime | None = None
    closed_at: datetime | None = None
    reopens: int = 0
    probe_owner: str | None = None
    probe_until: datetime | None = None
    streak: int = 0
    window_at: datetime | None = None
    window: Window = _EMPTY


@dataclass(frozen=True, slots=True)
class Report:
    """What became of requests sent under one generation, summed; neither ok nor failed is neutral.

    ``trailing`` counts the failures after the last ok. ``children_ok`` and ``children_failed`` name the
    children whose *latest* request went well or badly. ``probe``: it was the probe, and its first answer
    decides. ``floor_until`` is a time before which the provider asked us not to come back.
    """

    generation: int
    ok: int = 0
    failed: int = 0
    trailing: int = 0
    children_ok: frozenset[str] = frozenset()
    children_failed: frozenset[str] = frozenset()
    probe: bool = False
    floor_until: datetime | None = None


# -- transitions ---------------------------------------------------------------------------------------------


def report(
    b: BreakerFacts, r: Report, policy: BreakerPolicy, now: datetime, roll: float, *, root: bool = False
) -> BreakerFacts:
    """The breaker after a report; the same object if the report changes nothing (a stale generation, say).

    ``root``: its children belong to different owners, so it takes more of them (`quorum`).
    """
    if r.generation != b.generation:
        return b
    if b.state == "half_open":
        return _decided(b, r, policy, now, roll) if r.probe else b
    if b.state != "closed":
        return b
    counted = _counted(b, r, policy, now)
    if r.failed and _tripped(counted, policy, root=root):
        step = growth(b, policy, now)
        return _opened(counted, step, now, _open_until(step, policy, now, roll, r.floor_until))
    return _settled(counted, policy, now)


def electable(b: BreakerFacts, now: datetime) -> bool:
    """Whether a probe may be elected: the open time, or the lease of the last probe, is over."""
    until = b.probe_until if b.state == "half_open" else b.open_until
    if b.state == "closed" or (until is None and b.state == "isolated"):
        return False
    return until is None or until <= now


def elect(b: BreakerFacts, owner: str, policy: BreakerPolicy, now: datetime) -> BreakerFacts:
    """Half-open with ``owner`` as its probe. The caller has asked `electable` and holds the row."""
    return replace(
        b,
        state="half_open",
        generation=b.generation + 1,
        opened_at=b.opened_at or now,
        probe_owner=owner,
        probe_until=now + timedelta(seconds=policy.probe_lease),
    )


def orphaned(b: BreakerFacts, owners: Collection[str]) -> bool:
    """Whether the circuit waits for a probe that one of these lost workers had sent."""
    return b.state == "half_open" and b.probe_owner in owners


def isolate(b: BreakerFacts, now: datetime, until: datetime | None = None) -> BreakerFacts:
    """Opened by hand: until a probe after ``until``, or (None) until closed by hand."""
    return replace(
        b, state="isolated", generation=b.generation + 1, open_until=until, opened_at=now,
        probe_owner=None, probe_until=None,
    )  # fmt: skip


def reset(b: BreakerFacts, now: datetime) -> BreakerFacts:
    """Closed by hand: nothing of the past counts, but the load still comes back step by step."""
    return replace(_closed(b, now), reopens=0)


def ramp_allowance(b: BreakerFacts, policy: BreakerPolicy, now: datetime) -> int | None:
    """How many jobs may run at once this soon after closing; None once the ramp is over."""
    if b.closed_at is None or b.state != "closed" or policy.ramp <= 0:
        return None
    elapsed = (now - b.closed_at).total_seconds()
    if elapsed >= policy.ramp:
        return None
    return policy.ramp_first << int(max(elapsed, 0.0) / policy.ramp * _RAMP_STEPS)


def ramp_step(policy: BreakerPolicy) -> timedelta:
    """How long one doubling of the ramp takes."""
    return timedelta(seconds=policy.ramp / _RAMP_STEPS)


def growth(b: BreakerFacts, policy: BreakerPolicy, now: datetime) -> int:
    """How many doublings the next open time has: one fewer per calm interval since the circuit closed."""
    if b.closed_at is None:
        return b.reopens
    return max(0, b.reopens - int((now - b.closed_at).total_seconds() / policy.calm))


# -- inside --------------------------------------------------------------------------------------------------


def _decided(b: BreakerFacts, r: Report, policy: BreakerPolicy, now: datetime, roll: float) -> BreakerFacts:
    """The probe's verdict."""
    if r.failed:
        step = b.reopens + 1
        return _opened(b, step, now, _open_until(step, policy, now, roll, r.floor_until))
    if r.ok:
        return _closed(b, now)
    until = max(now + _NEUTRAL_PAUSE, r.floor_until or now)
    return _opened(b, b.reopens, now, until)


def _open_until(step: int, policy: BreakerPolicy, now: datetime, roll: float, floor: datetime | None) -> datetime:
    """The doubled time and up to half of it more, within the policy's bounds; never before what was told."""
    least = min(policy.first_open * 2.0 ** min(step, 32), policy.longest_open / (1 + _JITTER))
    least = max(least, policy.first_open)
    most = min(least * (1 + _JITTER), policy.longest_open)
    until = now + timedelta(seconds=least + roll * (most - least))
    return max(until, floor) if floor else until


def _opened(b: BreakerFacts, reopens: int, now: datetime, until: datetime) -> BreakerFacts:
    return replace(
        b, state="open", generation=b.generation + 1, open_until=until, opened_at=b.opened_at or now,
        closed_at=None, reopens=min(reopens, 32), probe_owner=None, probe_until=None,
    )  # fmt: skip


def _closed(b: BreakerFacts, now: datetime) -> BreakerFacts:
    return BreakerFacts("closed", b.generation + 1, closed_at=now, reopens=b.reopens)


def _settled(b: BreakerFacts, policy: BreakerPolicy, now: datetime) -> BreakerFacts:
    """Forget an outage that no longer changes anything, so that the row is as cheap to judge as any other."""
    if b.closed_at is None or growth(b, policy, now) or ramp_allowance(b, policy, now) is not None:
        return b
    return replace(b, closed_at=None, reopens=0)


def _counted(b: BreakerFacts, r: Report, policy: BreakerPolicy, now: datetime) -> BreakerFacts:
    """Streak, buckets and children with the report added."""
    if not (r.ok or r.failed):
        return b
    half = timedelta(seconds=policy.window / 2)
    w, at = b.window, b.window_at
    if at is None or now >= at + 2 * half or now < at - half:  # too old, or from a clock that was wrong
        w, at = replace(w, ok=0, failed=0, ok_before=0, failed_before=0), now
    elif now >= at + half:
        w, at = replace(w, ok=0, failed=0, ok_before=w.ok, failed_before=w.failed), at + half
    stamp = now.timestamp()
    well = {k: v for k, v in w.well.items() if k not in r.children_failed} | dict.fromkeys(r.children_ok, stamp)
    ill = {k: v for k, v in w.ill.items() if k not in r.children_ok} | dict.fromkeys(r.children_failed, stamp)
    since = stamp - policy.window
    w = replace(w, ok=w.ok + r.ok, failed=w.failed + r.failed, well=_recent(well, since), ill=_recent(ill, since))
    streak = r.trailing if r.ok else b.streak + r.failed
    return replace(b, streak=streak, window_at=at, window=w)


def _recent(seen: Mapping[str, float], since: float) -> dict[str, float]:
    """The latest few names since ``since``."""
    kept = sorted(((at, name) for name, at in seen.items() if at > since), reverse=True)[:MOST_CHILDREN]
    return {name: at for at, name in kept}


def _tripped(b: BreakerFacts, policy: BreakerPolicy, *, root: bool) -> bool:
    w = b.window
    failed = w.failed + w.failed_before
    total = failed + w.ok + w.ok_before
    by_streak = policy.streak is not None and b.streak >= policy.streak
    by_ratio = policy.ratio is not None and total >= policy.volume and failed >= policy.ratio * total
    return (by_streak or by_ratio) and ill_enough(w.ill, w.well, policy.children, root=root)
