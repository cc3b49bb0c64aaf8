"""The circuit breaker of one resource key: a state machine on plain values, and what a request is evidence of.

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
needs enough of them (`ill_enough`). Which children reported lately is kept in the window, a bounded number of names
with the time of their latest ok and failure; a child that works again leaves the list of the ill. A key's own requests
count as one child (`child_of`).

A child is what comes next on the path of a request: below a root an account, below an account an endpoint. Children
below a root belong to different owners, so one of them, or a handful among many that work, never stops the others;
its own circuit does that work. Endpoints belong to one account, so stopping that harms nobody else. ``children`` is
`BreakerPolicy.children`; ill are those whose latest request failed, well those whose latest one did not:

    ill                                 well            below a root            below an account
    one                                 none            no                      yes
    one                                 any             no                      no
    two, of children=3                  none            no                      yes
    two, of children=3                  any             no                      no
    at least ``children``               no more         yes                     yes
    at least ``children``               more            no                      yes
    the key's own requests              none            yes                     yes

A root with one account or with two therefore never opens by itself: the accounts' own circuits do. The last line is
work on the root's very key, which has no other circuit.

Open times double from trip to trip, are lengthened by up to half so that not all come back at once, and come down
one step per calm interval instead of at once, so a flapping provider is not asked at full pace after each good
minute. `first_open` is the shortest there is, `longest_open` the longest, jitter included; only a time that the
provider itself states is waited out beyond it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

from resilient.core.base.errors import FailureKind, Scope, at_scope
from resilient.core.base.resource_key import depth, is_below
from resilient.core.gates.policy import MOST_CHILDREN, Tenancy

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from resilient.core.base.errors import Failure
    from resilient.core.gates.policy import BreakerPolicy

OWN: Final = "."  # the child name of a key's own requests


def ill_enough(ill: Collection[str], well: Collection[str], children: int, *, root: bool) -> bool:
    """Whether failures of these children count against their parent; see the table above."""
    if not root:
        return len(ill) >= min(children, len(ill) + len(well)) > 0
    if OWN in ill and not well:
        return True
    return len(ill) >= max(children, len(well))


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


Probes = tuple[tuple[str, int], ...]  # keys of half-open circuits, and the generations one job was elected in


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

    ``root``: its children belong to different owners, so it takes more of them (`ill_enough`).
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
    if b.closed_at is None or now <= b.closed_at:  # or a clock went back
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
    """The doubled time and up to half of it more, within the policy's bounds; never before the stated ``floor``."""
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


def _recent(times: Mapping[str, float], since: float) -> dict[str, float]:
    """The latest few names since ``since``."""
    kept = sorted(((at, name) for name, at in times.items() if at > since), reverse=True)[:MOST_CHILDREN]
    return {name: at for at, name in kept}


def _tripped(b: BreakerFacts, policy: BreakerPolicy, *, root: bool) -> bool:
    w = b.window
    failed = w.failed + w.failed_before
    total = failed + w.ok + w.ok_before
    by_streak = policy.streak is not None and b.streak >= policy.streak
    by_ratio = policy.ratio is not None and total >= policy.volume and failed >= policy.ratio * total
    return (by_streak or by_ratio) and ill_enough(w.ill, w.well, policy.children, root=root)


# -- evidence ---------------------------------------------------------------------------------------------------------
#
# What the outcome of one request says about each resource on its path.
#
# Evidence against the provider (5xx, timeouts, connection errors) counts for the whole path, other failures up to the
# resource they name. For the levels above that resource, any answer but 5xx and 408 is a success. For the resource they
# name, throttles and refused credentials are no evidence; requests without an answer that `counts` passes over are none
# for any level. What happens at an account's own host stays with that account, as far as `policy.Tenancy` says.

Verdict = Literal["ok", "failed", "neutral"]
_SERVER_ERROR: Final = 500
_REQUEST_TIMEOUT: Final = 408
_ILLNESS: Final = frozenset({FailureKind.TRANSIENT, FailureKind.AMBIGUOUS})
_SILENT: Final = frozenset({FailureKind.THROTTLED, FailureKind.QUOTA, FailureKind.AUTH})


def judge(failure: Failure | None, request_key: str, level: str, tenancy: Tenancy = Tenancy.SHARED) -> Verdict:
    """The verdict on ``level``, a key on the path of ``request_key``, after a request (failure None: a success)."""
    if failure is None:
        return "ok"
    named = names(failure, request_key, level, tenancy)
    answered = failure.status is not None and failure.status < _SERVER_ERROR and failure.status != _REQUEST_TIMEOUT
    if counts(failure):
        if named or (failure.provider_wide and not _private(failure, level, tenancy)):
            return "failed"
    elif named and failure.kind in _SILENT:
        return "neutral"
    return "ok" if answered else "neutral"


def names(failure: Failure, request_key: str, level: str, tenancy: Tenancy = Tenancy.SHARED) -> bool:
    """Whether a failure is about the key ``level`` or one above it, so that the time it states binds ``level``."""
    return is_below(level, scoped(failure, request_key, tenancy))


def scoped(failure: Failure, request_key: str, tenancy: Tenancy = Tenancy.SHARED) -> str:
    """The resource that a failure is about; at a host that the account chose, it is at most that account."""
    apart = failure.scope is Scope.PROVIDER and tenancy is Tenancy.APART
    return at_scope(request_key, Scope.ACCOUNT if apart else failure.scope)


def _private(failure: Failure, level: str, tenancy: Tenancy) -> bool:
    """Whether ``level`` is a root, and a failure at an account's own host must not count there (`Tenancy`)."""
    if tenancy is Tenancy.SHARED or depth(level) > 1:
        return False
    return tenancy is Tenancy.APART or failure.status is None


def counts(failure: Failure) -> bool:
    """Whether a breaker counts the failure: as its rule says, else by its kind."""
    if failure.counts_for_breaker is not None:
        return failure.counts_for_breaker
    return failure.kind in _ILLNESS


def child_of(request_key: str, level: str) -> str:
    """The child of ``level`` that a request through ``request_key`` belongs to."""
    return OWN if request_key == level else request_key[len(level) + 1 :].partition("/")[0]
