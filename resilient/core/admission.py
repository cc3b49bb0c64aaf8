"""How many jobs of a resource may start now, what stops the others, and when to ask again.

A job must be let through by its key and by every ancestor: the levels of its path, deepest first. Pauses,
missing credentials, cooldowns and open circuits stop everything; caps, ramps and job limits leave room for
some. Job limits are drawn here. Request limits are drawn when requests are sent, so here they are only looked
at, a moment ahead: no more jobs start than could soon send one request each.

If circuits of the path are due for a probe, they elect this one job together, and only if every other gate of
the path lets a job through; otherwise none of them changes.

The claim judges thousands of leaves a second, so a level without any gate (`ResourceFacts.calm`,
`Policy.plain`) costs two attribute reads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Literal

from resilient.core.breaker import BreakerFacts, elect, electable, ramp_allowance, ramp_step
from resilient.core.rate_limit import FRESH, LimitState, available, ready_at, take

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from resilient.core.policy import Policy

GateName = Literal["breaker", "cooldown", "pause", "auth", "limit", "concurrency"]
LOOK_AHEAD: Final = 1.0  # seconds; shorter than a request may wait for its limits in place
_CLOSED: Final = BreakerFacts()
_ALMOST: Final = 1e-9  # of a unit: what floats lose
_FAR: Final = datetime.max.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class ResourceFacts:
    """The gates of one resource row. ``calm``: when it was read, none of them stopped or slowed anything."""

    key: str
    breaker: BreakerFacts = _CLOSED
    blocked_until: datetime | None = None
    blocked_since: datetime | None = None
    blocked_code: str | None = None
    paused_at: datetime | None = None
    paused_until: datetime | None = None  # None with paused_at: until somebody resumes it
    paused_reason: str | None = None
    auth: str = "ok"
    auth_since: datetime | None = None
    policy_override: Mapping[str, Any] | None = None
    revision: int = 0  # changes whenever a gate does
    calm: bool = False


@dataclass(frozen=True, slots=True)
class Level:
    """One key of a path: facts, policy, limits by name (absent: never drawn), jobs running at or below it.

    ``running`` matters only where `needs_count` says so.
    """

    facts: ResourceFacts
    policy: Policy
    limits: Mapping[str, LimitState]
    running: int = 0


@dataclass(frozen=True, slots=True)
class Stop:
    """What stops a resource: which one, by which gate, since and until when (None: nobody knows)."""

    resource: str
    gate: GateName
    until: datetime | None = None
    since: datetime | None = None
    code: str | None = None


@dataclass(frozen=True, slots=True)
class Admission:
    """``count`` jobs may start; ``stop`` prevents more (None if all wanted were admitted).

    ``probes`` are the keys whose half-open circuit elected the one admitted job. ``levels`` are those judged,
    with the admitted jobs counted, for the next leaf of the same ancestors.
    """

    count: int
    stop: Stop | None
    probes: tuple[str, ...]
    levels: Sequence[Level]


def admit(levels: Sequence[Level], wanted: int, now: datetime, owner: str) -> Admission:
    """Judge a path (deepest first) for ``wanted`` jobs; ``owner`` would hold the probes."""
    for level in levels:
        if not (level.facts.calm and level.policy.plain):
            break
    else:
        return Admission(wanted, None, (), levels)
    stops = [stop for level in levels if (stop := stop_of(level.facts, now)) is not None]
    if stops:
        return Admission(0, _longest(stops), (), levels)
    count, stop = wanted, None
    for level in levels:
        room, why = _room(level, count, now)
        if room < count:
            count, stop = room, why
    if count <= 0:
        return Admission(0, stop, (), levels)
    due = tuple(level.facts.key for level in levels if level.facts.breaker.state != "closed")
    if due and count > 1:
        count, stop = 1, None
    admitted = tuple(_with_started(level, count, now, owner) for level in levels)
    if due and wanted > 1:
        lease = next(level.facts.breaker.probe_until for level in admitted if level.facts.key == due[0])
        stop = Stop(due[0], "breaker", until=lease, code="probing")
    return Admission(count, stop, due, admitted)


def stop_of(facts: ResourceFacts, now: datetime) -> Stop | None:
    """What stops this one key now, counts and limits aside; a circuit due for a probe does not."""
    if facts.calm:
        return None
    stops = _shut(facts, now)
    b = facts.breaker
    if b.state != "closed" and not electable(b, now):
        stops.append(_circuit(facts))
    return _longest(stops) if stops else None


def error_shut(gate: str | None, code: str | None, since: datetime | None, error_at: datetime | None) -> bool:
    """Whether a resource's latest error is why this gate is shut, and not one from before, or about another gate."""
    if gate != "breaker" or code == "isolated":
        return False
    return since is None or error_at is None or error_at >= since


def hand_shut(gate: str | None, code: str | None) -> bool:
    """Whether somebody shut this gate by hand, so that the reason that was given is about it."""
    return gate == "pause" or code == "isolated"


def refusal(facts: ResourceFacts, now: datetime, *, probing: bool = False) -> Stop | None:
    """What stops a job that has started, or a request of it: also any circuit that is not closed.

    A circuit that is due waits for the claim to elect its probe; the probe itself (``probing``) may go on.
    """
    if facts.calm:
        return None
    stops = _shut(facts, now)
    state = facts.breaker.state
    if state != "closed" and not (probing and state == "half_open"):
        stops.append(_circuit(facts))
    return _longest(stops) if stops else None


def needs_count(facts: ResourceFacts, policy: Policy, now: datetime) -> bool:
    """Whether admitting depends on how many jobs run at or below the key."""
    return policy.concurrency is not None or (
        not facts.calm and ramp_allowance(facts.breaker, policy.breaker, now) is not None
    )


def needs_lock(facts: ResourceFacts, policy: Policy, now: datetime) -> bool:
    """Whether admitting may change an ancestor or counts on it: a cap, a job limit, a troubled circuit."""
    return (
        policy.concurrency is not None
        or bool(policy.job_limits)
        or (not facts.calm and (facts.breaker.state != "closed" or needs_count(facts, policy, now)))
    )


def releasable(facts: ResourceFacts, policy: Policy, now: datetime, batch: int) -> int:
    """How many turns parked on this key may be released now: 0, 1 (a probe), the ramp's, or ``batch``."""
    if stop_of(facts, now) is not None:
        return 0
    if not facts.calm and facts.breaker.state != "closed":
        return 1
    allowance = ramp_allowance(facts.breaker, policy.breaker, now)
    return batch if allowance is None else min(batch, allowance)


# -- inside --------------------------------------------------------------------------------------------------


def _shut(facts: ResourceFacts, now: datetime) -> list[Stop]:
    """The gates that are shut, the circuit aside."""
    key, stops = facts.key, list[Stop]()
    if facts.paused_at is not None and (facts.paused_until is None or facts.paused_until > now):
        stops.append(Stop(key, "pause", facts.paused_until, facts.paused_at, facts.paused_reason))
    if facts.auth != "ok":
        stops.append(Stop(key, "auth", None, facts.auth_since, facts.auth))
    if facts.blocked_until is not None and facts.blocked_until > now:
        stops.append(Stop(key, "cooldown", facts.blocked_until, facts.blocked_since, facts.blocked_code))
    return stops


def _circuit(facts: ResourceFacts) -> Stop:
    b = facts.breaker
    probing = b.state == "half_open"
    until = b.probe_until if probing else b.open_until
    return Stop(facts.key, "breaker", until, b.opened_at, "probing" if probing else b.state)


def _longest(stops: Sequence[Stop]) -> Stop:
    """The stop that ends last, of equals the most general: parked there, a key moves only once."""
    best = stops[0]
    for stop in stops[1:]:
        if (stop.until or _FAR) >= (best.until or _FAR):
            best = stop
    return best


def _room(level: Level, wanted: int, now: datetime) -> tuple[int, Stop | None]:
    """How many of ``wanted`` jobs this key has room for, and what prevents more."""
    facts, policy, room = level.facts, level.policy, wanted
    stop: Stop | None = None
    if policy.concurrency is not None and policy.concurrency - level.running < room:
        room, stop = policy.concurrency - level.running, Stop(facts.key, "concurrency")
    if not facts.calm:
        allowance = ramp_allowance(facts.breaker, policy.breaker, now)
        if allowance is not None and allowance - level.running < room:
            room = allowance - level.running
            until = now + ramp_step(policy.breaker)
            stop = Stop(facts.key, "breaker", until, facts.breaker.closed_at, "ramp")
    if policy.limits:
        epoch = now.timestamp()
        for limit in policy.limits:
            state = level.limits.get(limit.name, FRESH)
            ahead = LOOK_AHEAD if limit.counts == "requests" else 0.0
            left = available(limit, state, epoch, ahead)
            if left < room:
                whole = int(left + _ALMOST)
                if whole < room:
                    at = ready_at(limit, take(limit, state, whole, epoch), 1.0, epoch) - ahead
                    until = datetime.fromtimestamp(max(at, epoch), UTC)
                    room, stop = whole, Stop(facts.key, "limit", until, code=limit.name)
    return max(room, 0), stop


def _with_started(level: Level, count: int, now: datetime, owner: str) -> Level:
    """The level with ``count`` jobs more running, drawn and (if its circuit is due) probing."""
    facts, policy, limits = level.facts, level.policy, level.limits
    if facts.calm and policy.plain:
        return level
    if policy.limits:
        epoch = now.timestamp()
        drawn = {x.name: take(x, limits.get(x.name, FRESH), float(count), epoch) for x in policy.limits}
        limits = {**limits, **drawn}
    if facts.breaker.state != "closed":
        facts = replace(facts, breaker=elect(facts.breaker, owner, policy.breaker, now), revision=facts.revision + 1)
    return Level(facts, policy, limits, level.running + count)
