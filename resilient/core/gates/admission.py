"""How many jobs of a resource may start now, what stops the others, and when to ask again.

A job must be let through by its key and by every ancestor: the levels of its path, deepest first. Pauses,
missing credentials, cooldowns and open breakers stop everything; caps, ramps and job limits leave room for
some. Job limits are drawn here. Request limits are drawn when requests are sent, so here they are only read,
`LOOK_AHEAD` seconds ahead: no more jobs start than could soon send one request each.

If breakers of the path are due for a probe, they elect one job together, and only if every other gate of
the path lets it through; otherwise none of them changes.

What is learnt (`in_force`) never allows more than what is declared. A learnt rate is one more request limit, drawn by
the same GCRA over all processes; a learnt window is a bucket as large as the window's count, refilled by one every
`BEYOND` seconds, so that a request tries out whether the next window has begun. Rates are rounded, so that processes
that read them a moment earlier or later draw by the same limit.

The claim judges thousands of leaves a second, so a level without any gate (`ResourceFacts.calm`,
`Policy.plain`) costs two attribute reads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal

from resilient.core.base.instants import from_epoch
from resilient.core.gates.breaker import BreakerFacts, elect, electable, ramp_allowance, ramp_step
from resilient.core.gates.learnt import FEWEST, allowance, current
from resilient.core.gates.rate_limit import FULL, LEARNT, Limit, LimitState, available, ready_at, take

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from resilient.core.gates.learnt import Learnt
    from resilient.core.gates.policy import Policy

GateName = Literal["breaker", "cooldown", "pause", "auth", "limit", "concurrency"]
LOOK_AHEAD: Final = 1.0  # seconds; shorter than a request may wait for its limits in place
SLOW_STEP: Final = timedelta(seconds=0.5)  # between two looks at a resource that comes back, if no job ends before
SLOW_START, SLOWER, RESERVED = "slow_start", "learnt", "reserve"  # codes of stops
_CLOSED: Final = BreakerFacts()
_ALMOST: Final = 1e-9  # of a unit: more than the rounding of floats loses
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
    learnt: Learnt | None = None
    calm: bool = False


@dataclass(frozen=True, slots=True)
class Level:
    """One key of a path: facts, policy, limits by name (absent: never drawn), jobs running at or below it.

    ``running`` is read only where `needs_count` says so, or where there are ``stated`` limits: those that nobody
    declared, and of which the provider's answers say what is left.
    """

    facts: ResourceFacts
    policy: Policy
    limits: Mapping[str, LimitState]
    running: int = 0
    stated: tuple[Limit, ...] = ()


@dataclass(frozen=True, slots=True)
class Stop:
    """The gate that stops a path: the resource it belongs to, since when and until when (None: nobody knows)."""

    resource: str
    gate: GateName
    until: datetime | None = None
    since: datetime | None = None
    code: str | None = None


@dataclass(frozen=True, slots=True)
class Admission:
    """``count`` jobs may start; ``stop`` prevents more (None if all were admitted).

    ``probes`` are the keys whose half-open breaker elected the one admitted job. ``levels`` are those of the path,
    with the admitted jobs counted, for the next leaf of the same ancestors.
    """

    count: int
    stop: Stop | None
    probes: tuple[str, ...]
    levels: Sequence[Level]


def admit(levels: Sequence[Level], most: int, now: datetime, owner: str, priority: int = 0) -> Admission:
    """Decide how many of ``most`` jobs of one priority a path (deepest first) admits; ``owner`` gets the probes."""
    for level in levels:
        if not (level.facts.calm and level.policy.plain and not level.stated):
            break
    else:
        return Admission(most, None, (), levels)
    stops = [stop for level in levels if (stop := stop_of(level.facts, now)) is not None]
    if stops:
        return Admission(0, _longest(stops), (), levels)
    count, stop = most, None
    for level in levels:
        room, why = _room(level, count, now, priority)
        if room < count:
            count, stop = room, why
    if count <= 0:
        return Admission(0, stop, (), levels)
    due = tuple(level.facts.key for level in levels if level.facts.breaker.state != "closed")
    if due and count > 1:
        count, stop = 1, None
    admitted = tuple(_with_started(level, count, now, owner) for level in levels)
    if due and most > 1:
        lease = next(level.facts.breaker.probe_until for level in admitted if level.facts.key == due[0])
        stop = Stop(due[0], "breaker", until=lease, code="probing")
    return Admission(count, stop, due, admitted)


def stop_of(facts: ResourceFacts, now: datetime) -> Stop | None:
    """What stops this one key now, counts and limits aside; a breaker due for a probe does not."""
    if facts.calm:
        return None
    stops = _shut(facts, now)
    b = facts.breaker
    if b.state != "closed" and not electable(b, now):
        stops.append(_circuit(facts))
    return _longest(stops) if stops else None


def error_shut(gate: str | None, code: str | None, since: datetime | None, error_at: datetime | None) -> bool:
    """Whether a resource's latest error (``error_at``) is why this gate has been shut since ``since``.

    It is not for an older error, for a gate that no error shuts, and for a breaker that somebody opened by hand.
    """
    if gate != "breaker" or code == "isolated":
        return False
    return since is None or error_at is None or error_at >= since


def hand_shut(gate: str | None, code: str | None) -> bool:
    """Whether somebody shut this gate by hand, so that the reason in the resource's row is about it."""
    return gate == "pause" or code == "isolated"


def refusal(facts: ResourceFacts, now: datetime, *, probing: bool = False) -> Stop | None:
    """What stops a job that has started, or a request of it: also any breaker that is not closed.

    A breaker that is due waits for the claim to elect its probe; the probe itself (``probing``) may go on.
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
    if policy.reserve:
        return True
    if facts.calm:
        return policy.concurrency is not None
    policy = in_force(policy, facts.learnt, now)
    if policy.limits and _is_window(policy.limits[-1]):
        return True
    return policy.concurrency is not None or _slow_start(facts, policy, now) is not None


def needs_lock(facts: ResourceFacts, policy: Policy, now: datetime) -> bool:
    """Whether admitting may change an ancestor or counts its jobs: a cap, a job limit, a breaker not closed."""
    return (
        policy.concurrency is not None
        or bool(policy.job_limits)
        or (not facts.calm and (facts.breaker.state != "closed" or needs_count(facts, policy, now)))
    )


def releasable(facts: ResourceFacts, policy: Policy, now: datetime, batch: int) -> int:
    """How many turns parked on this key may be released now: 0, 1 (a probe), what a slow start allows, or ``batch``."""
    if stop_of(facts, now) is not None:
        return 0
    if not facts.calm and facts.breaker.state != "closed":
        return 1
    most = _slow_start(facts, policy, now)
    return batch if most is None else min(batch, most[0])


# -- inside --------------------------------------------------------------------------------------------------


def _shut(facts: ResourceFacts, now: datetime) -> list[Stop]:
    """The stops of the gates that are shut, the breaker aside."""
    key, stops = facts.key, list[Stop]()
    if facts.paused_at is not None and (facts.paused_until is None or facts.paused_until > now):
        stops.append(Stop(key, "pause", facts.paused_until, facts.paused_at, facts.paused_reason))
    if facts.auth != "ok":
        stops.append(Stop(key, "auth", None, facts.auth_since, facts.auth))
    if facts.blocked_until is not None and facts.blocked_until > now:
        stops.append(Stop(key, "cooldown", facts.blocked_until, facts.blocked_since, facts.blocked_code))
    return stops


def _slow_start(facts: ResourceFacts, policy: Policy, now: datetime) -> tuple[int, Stop] | None:
    """How many jobs may run at once soon after a cooldown or an open breaker, and the stop of more; None: all."""
    ramp = ramp_allowance(facts.breaker, policy.breaker, now)
    after_rest = None if facts.learnt is None else allowance(facts.learnt, now.timestamp())
    if after_rest is not None and (ramp is None or after_rest <= ramp):
        since = None if facts.learnt is None else from_epoch(facts.learnt.resumes_at)
        return after_rest, Stop(facts.key, "cooldown", now + SLOW_STEP, since, SLOW_START)
    if ramp is None:
        return None
    return ramp, Stop(facts.key, "breaker", now + ramp_step(policy.breaker), facts.breaker.closed_at, "ramp")


def _circuit(facts: ResourceFacts) -> Stop:
    b = facts.breaker
    probing = b.state == "half_open"
    until = b.probe_until if probing else b.open_until
    return Stop(facts.key, "breaker", until, b.opened_at, "probing" if probing else b.state)


def _longest(stops: Sequence[Stop]) -> Stop:
    """The stop that ends last; among equals the highest ancestor's, because a turn parked there moves only once."""
    best = stops[0]
    for stop in stops[1:]:
        if (stop.until or _FAR) >= (best.until or _FAR):
            best = stop
    return best


def _room(level: Level, most: int, now: datetime, priority: int) -> tuple[int, Stop | None]:
    """How many of ``most`` jobs this key has room for, and what prevents more."""
    facts, policy, room = level.facts, level.policy, most
    stop: Stop | None = None
    if policy.concurrency is not None and policy.concurrency - level.running < room:
        room, stop = policy.concurrency - level.running, Stop(facts.key, "concurrency")
    if not facts.calm:
        slow = _slow_start(facts, policy, now)
        if slow is not None and slow[0] - level.running < room:
            room, stop = slow[0] - level.running, slow[1]
    if policy.limits:
        epoch = now.timestamp()
        for limit in policy.limits:
            state = level.limits.get(limit.name, FULL)
            ahead = LOOK_AHEAD if limit.counts == "requests" else 0.0
            units = available(limit, state, epoch, ahead)
            begun = level.running if _is_window(limit) else 0  # the running jobs may not have drawn yet
            if units - begun < room:
                whole = max(int(units + _ALMOST) - begun, 0)
                if whole < room:
                    at = ready_at(limit, take(limit, state, whole, epoch), 1.0, epoch) - ahead
                    until = from_epoch(max(at, epoch))
                    if begun:
                        until = max(until, now + SLOW_STEP)
                    name = SLOWER if limit.name == LEARNT else limit.name
                    room, stop = whole, Stop(facts.key, "limit", until, code=name)
    if level.stated or policy.reserve:
        room, stop = _of_what_is_left(level, room, stop, now, priority)
    return max(room, 0), stop


def _is_window(limit: Limit) -> bool:
    """Whether throttles taught this limit as the count of a window, not as a rate."""
    return limit.name == LEARNT and limit.capacity > 1


def _of_what_is_left(
    level: Level, room: int, stop: Stop | None, now: datetime, priority: int
) -> tuple[int, Stop | None]:
    """``room`` and ``stop``, lowered by what the provider says is left of a window, less what is kept for others.

    Each running job counts as one request that the provider has not counted yet.
    """
    kept = level.policy.kept_from(priority)
    for limit in (*level.policy.request_limits, *level.stated) if kept else level.stated:
        state = level.limits.get(limit.name, FULL)
        if state.remaining is None or state.reset_at is None or state.reset_at <= now.timestamp():
            continue
        units = state.remaining - kept * limit.rate
        if units - level.running < room:
            until = from_epoch(state.reset_at)
            if units >= 1:  # the running jobs may leave some of it
                until = min(until, now + SLOW_STEP)
            code = RESERVED if state.remaining >= 1 > units else limit.name
            room, stop = int(units + _ALMOST) - level.running, Stop(level.facts.key, "limit", until, code=code)
    return room, stop


def _with_started(level: Level, count: int, now: datetime, owner: str) -> Level:
    """The level with ``count`` jobs more running, their draws taken and, if its breaker is due, its probe elected."""
    facts, policy, limits = level.facts, level.policy, level.limits
    if facts.calm and policy.plain and not level.stated:
        return level
    if policy.limits:
        epoch = now.timestamp()
        drawn = {x.name: take(x, limits.get(x.name, FULL), float(count), epoch) for x in policy.limits}
        limits = {**limits, **drawn}
    if facts.breaker.state != "closed":
        facts = replace(facts, breaker=elect(facts.breaker, owner, policy.breaker, now), revision=facts.revision + 1)
    return Level(facts, policy, limits, level.running + count, level.stated)


BEYOND: Final = 2.0  # seconds for one request beyond the count of a window that was learnt


def in_force(policy: Policy, learnt: Learnt | None, now: datetime) -> Policy:
    """The declared policy with the limit or cap that was learnt, if one still holds."""
    if learnt is None or learnt.kind == "free" or not policy.learn.on:
        return policy
    s = current(learnt, now.timestamp())
    if s is None or (policy.limits and policy.limits[-1].name == LEARNT):  # or it is in force already
        return policy
    if s.kind == "slots":
        return _with_cap(policy, s.slots)
    if s.kind == "quota":
        if s.quota < FEWEST:
            return policy
        return _with_limit(policy, 1 / BEYOND, float(max(1, s.quota)))
    return _with_limit(policy, float(f"{s.rate or 1.0:.3g}"), 1.0)


@lru_cache(maxsize=4096)
def paced(policy: Policy, stated: tuple[Limit, ...]) -> Policy:
    """The policy with ``stated`` limits added, if its pace is even."""
    return replace(policy, limits=(*stated, *policy.limits)) if policy.pace == "even" and stated else policy


@lru_cache(maxsize=4096)
def _with_limit(policy: Policy, rate: float, burst: float) -> Policy:
    return replace(policy, limits=(*policy.limits, Limit.learnt(rate, 1.0, burst)))


@lru_cache(maxsize=1024)
def _with_cap(policy: Policy, slots: int) -> Policy:
    return replace(policy, concurrency=slots if policy.concurrency is None else min(slots, policy.concurrency))


# -- shares -----------------------------------------------------------------------------------------------------------
#
# How many of a worker's slots the jobs of one account may hold.
#
# A job keeps its slot until it ends. So an account whose requests hang would get one slot after the other, and every
# other account would wait for its timeouts. Therefore an account that is alone leaves half of the slots free; several
# accounts get equal shares, and leave a tenth free for further ones. Only if the database has no other account may one
# have all slots, because then nobody waits for them.
#
# A shared-memory switch divides its buffers like this (Choudhury and Hahne, dynamic queue length thresholds): the share
# of one shrinks with what the others hold, and nobody has to choose a number beforehand.

QUICK: Final = 0.02  # seconds in a slot; shorter jobs are limited by the claims, not by the slots
UNKNOWN: Final = 1.0  # seconds assumed of an account whose jobs have not ended lately; no job counts longer
_WEIGHT: Final = 0.2  # of the latest job in the mean


def spare(slots: int) -> int:
    """The slots that stay free for accounts that have none yet; an account of many may hold as many, too."""
    return max(1, slots // 10)


def share(slots: int, active: int, seconds: float = UNKNOWN) -> int:
    """The most slots of ``slots`` that one account may hold while ``active`` accounts, this one too, have jobs.

    ``seconds``: how long its jobs hold a slot (`mean`). An account of quick jobs may have all but the spare slots: its
    jobs are claimed ahead, and free their slots before another account has to wait. Others may hold at least `spare`,
    so that many accounts cost no more claims than a few.
    """
    if seconds < QUICK:
        return max(1, slots - spare(slots))
    if active <= 1:
        return max(1, slots // 2)
    return max(spare(slots), (slots - spare(slots)) // active)


def mean(before: float, seconds: float) -> float:
    """The moving mean of the seconds in a slot, after one more job; ``before``: `UNKNOWN` for the first job."""
    return before + (min(seconds, UNKNOWN) - before) * _WEIGHT
