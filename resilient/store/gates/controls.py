"""Gates: every statement that changes a cooldown, a pause, credentials or a policy, and circuits by hand.

A write that may open or close a gate bumps `revision`, so that whoever judged the row before
(to park a turn) notices it. Whatever opens a gate releases parked turns in a later statement: a few after an outage, a
batch otherwise; staging goes on with the rest. A gate that shuts until a known time arms one parked turn for it.

What throttles teach (`core.gates.learnt`) is written here too. A refusal is taken in where its cooldown is written
(`cool_down`), under the same lock; its generation is the row's next revision, so that one which is forgotten never
comes again. Answers are reported a little later, by each process its own (`take_in`). What grows bumps no revision:
facts are young enough.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from resilient.core.accounts.tokens import REFRESHING
from resilient.core.base.resource_key import is_budget, parent
from resilient.core.gates import breaker, learnt
from resilient.core.gates.admission import ResourceFacts
from resilient.core.gates.policy import Learning
from resilient.core.gates.rate_limit import LEARNT
from resilient.core.gates.retry_after import cooled
from resilient.store.db.dialect import SHORT_LOCK_WAIT, limit_lock_waits
from resilient.store.db.direct import operation
from resilient.store.gates import circuits, limits, resources, turns

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from sqlalchemy import Connection

    from resilient.core.gates.learnt import Answers, Learnt, Refusal
    from resilient.core.gates.policy import Policies
    from resilient.store.db.dialect import Dialect


MOST_BUDGETS: Final = 8  # of an account, learnt apart
_FIRST: Final = 1  # parked turns released where the load comes back step by step
_FIELDS: Final = {"key": "text", "learnt": "json"}


class Report(NamedTuple):
    """What one process got accepted through one resource."""

    key: str
    answers: Answers


def after_refusal(
    c: Connection,
    d: Dialect,
    facts: ResourceFacts,
    refusal: Refusal | None,
    learning: Learning | None,
    now: datetime,
    rest: datetime,
) -> Learnt:
    """The state after a throttle that makes the resource rest; the caller holds the row and writes it."""
    learning = learning or Learning()
    at, resumes_at, generation = now.timestamp(), rest.timestamp(), facts.revision + 1
    s = learnt.current(facts.learnt, at)
    if refusal is None or not learning.on:
        return learnt.rested(s, generation, at, resumes_at)
    if not learnt.is_fresh(s, refusal.generation):  # the same event, with a longer rest
        return learnt.prolonged(s or learnt.Learnt(), resumes_at)
    drop_limit(c, d, facts.key)  # places that were drawn at another rate
    return learnt.throttled(s, refusal, generation, at, resumes_at, bounds=learning.bounds, slots=learning.slots)


def slow_down(c: Connection, d: Dialect, key: str, refusal: Refusal, times: float) -> ResourceFacts:
    """Answers take so many ``times`` as long as usual; returns the facts as they are then.

    Waits for no row that a program holds (see `db/dialect.py`).
    """
    limit_lock_waits(c, d, SHORT_LOCK_WAIT)
    facts, now = _lock_one(c, d, key), d.now(c)
    s = learnt.current(facts.learnt, now.timestamp())
    if not learnt.is_fresh(s, refusal.generation):
        return facts
    drop_limit(c, d, key)
    after = learnt.slowed(s, refusal, facts.revision + 1, now.timestamp(), times)
    _set(c, d, key, now, _learnt_sql(d), learnt=packed(after))
    return replace(facts, learnt=after, revision=facts.revision + 1, calm=False)


def take_in(c: Connection, d: Dialect, reports: Sequence[Report], policies: Policies) -> list[ResourceFacts]:
    """Count answers; returns the resources whose state changed, as they are now.

    Waits for no row that a program holds (see `db/dialect.py`).
    """
    limit_lock_waits(c, d, SHORT_LOCK_WAIT)
    rows = circuits.lock(c, d, sorted({one.key for one in reports}))
    now = d.now(c)
    at, changed, ended = now.timestamp(), list[ResourceFacts](), list[str]()
    for key, facts in rows.items():
        s, bounds = facts.learnt, policies.for_key(key, facts.policy_override).learn.bounds
        for one in reports:
            if one.key == key and s is not None:
                s = learnt.answered(s, one.answers, at, bounds=bounds)
        if s is facts.learnt:
            continue
        if learnt.allowance(s, at) is None and learnt.allowance(facts.learnt, at) is not None:
            ended.append(key)
        changed.append(replace(facts, learnt=s))
    _write(c, d, changed, now)
    for key in sorted(ended):  # nothing holds its jobs back any more, apart from its rate
        turns.hasten(c, d, key, circuits.RELEASE, now)
        turns.release(c, d, key, circuits.RELEASE, now)
    return changed


def forget_burst(c: Connection, d: Dialect, keys: Sequence[str], since: datetime) -> None:
    """Drop what these resources were taught since then: it was not their own limit.

    Waits for no row that a program holds (see `db/dialect.py`).
    """
    limit_lock_waits(c, d, SHORT_LOCK_WAIT)
    rows, now = circuits.lock(c, d, sorted(keys)), d.now(c)
    young = [f for f in rows.values() if f.learnt is not None and f.learnt.changed_at >= since.timestamp()]
    _write(c, d, [replace(f, learnt=None) for f in young], now)
    for facts in young:
        drop_limit(c, d, facts.key)


def drop_limit(c: Connection, d: Dialect, key: str) -> None:
    """Delete the row of the learnt limit, which begins anew."""
    d.run(c, "DELETE FROM {rate_limit} WHERE resource_key = :key AND name = :name", {"key": key, "name": LEARNT})


def packed(s: Learnt | None) -> str | None:
    """The document for the column `learnt`."""
    return None if s is None else json.dumps(s.to_json())


def _write(c: Connection, d: Dialect, changed: Sequence[ResourceFacts], now: datetime) -> None:
    if not changed:
        return
    doc = [{"key": f.key, "learnt": None if f.learnt is None else f.learnt.to_json()} for f in changed]
    d.run(
        c,
        f"UPDATE {{resource}} SET learnt = v.learnt, updated_at = :now FROM {d.records('doc', _FIELDS)} AS v"
        " WHERE {resource}.key = v.key",
        {"doc": json.dumps(doc), "now": now},
    )


# -- cooldown ------------------------------------------------------------------------------------------------


@operation("gate")
def cool_down(
    c: Connection,
    d: Dialect,
    key: str,
    until: datetime | None,
    code: str | None,
    roll: float,
    *,
    sent_at: datetime | None = None,
    exact: bool = False,
    refusal: Refusal | None = None,
    learning: Learning | None = None,
    how_long: str | None = None,
) -> tuple[ResourceFacts, bool]:
    """A throttle: rest until the told time, or (None) as long as computed; (facts now, whether that is news).

    ``exact``: the time is a budget's reset, so nothing is added to it. ``refusal``: what it may teach, as far as
    ``learning`` says; without one the load only comes back step by step. A rest for a refresh may end before its time,
    so it gives way to what was told, and never takes its place. A budget that may not be learnt apart any more is its
    account's: then the facts are the account's. ``how_long``: waits for each lock so long (see `db/dialect.py`).
    """
    if how_long is not None:
        limit_lock_waits(c, d, how_long)
    key, facts = _of_its_own(c, d, key, _lock_one(c, d, key))
    now = d.now(c)
    gives_way = facts.blocked_code == REFRESHING != code
    if gives_way:
        facts = replace(facts, blocked_until=None, blocked_since=None)
    elif code == REFRESHING != facts.blocked_code and facts.blocked_until is not None and facts.blocked_until > now:
        return facts, False
    rest = until if exact else cooled(facts, until, now, roll, sent_at, refusal=refusal)
    if rest is None or rest <= max(now, facts.blocked_until or now):
        return facts, False
    active = facts.blocked_until is not None and facts.blocked_until > now
    since = facts.blocked_since if active and facts.blocked_since is not None else now
    learnt = facts.learnt
    if code != REFRESHING:  # nobody said to slow down
        learnt = after_refusal(c, d, facts, refusal, learning, now, rest)
    facts = replace(
        facts,
        blocked_until=rest,
        blocked_since=since,
        blocked_code=code,
        revision=facts.revision + 1,
        learnt=learnt,
        calm=False,
    )
    _set(
        c, d, key, now,
        f"blocked_until = :blocked_until, blocked_since = :blocked_since, blocked_code = :code, {_learnt_sql(d)}",
        blocked_until=rest, blocked_since=since, code=code, learnt=packed(learnt),
    )  # fmt: skip
    if gives_way:  # what is parked would be looked at when the refresh is given up
        turns.arm(c, d, key, rest)
    return facts, True


def _of_its_own(c: Connection, d: Dialect, key: str, facts: ResourceFacts) -> tuple[str, ResourceFacts]:
    """What a throttle of ``key`` is written to: its account if that has `MOST_BUDGETS` with lessons beside this one."""
    owner = parent(key)
    now = d.now(c).timestamp()
    if owner is None or not is_budget(key) or learnt.current(facts.learnt, now) is not None:
        return key, facts
    rest = _lock_one(c, d, owner)  # two new ones wait for each other here
    taught = resources.read(c, d, resources.budgets_of(c, d, owner)).values()
    others = sum(learnt.current(one.learnt, now) is not None for one in taught)
    return (key, facts) if others < MOST_BUDGETS else (owner, rest)


def warm_up(c: Connection, d: Dialect, key: str) -> int:
    """End a cooldown by hand, and forget what it taught; returns how many parked turns were released."""
    facts, now = _lock_one(c, d, key), d.now(c)
    if facts.blocked_until is None and facts.learnt is None:
        return 0
    drop_limit(c, d, key)
    _set(
        c, d, key, now, f"blocked_until = NULL, blocked_since = NULL, blocked_code = NULL, {_learnt_sql(d)}",
        learnt=packed(_slow_start(replace(facts, learnt=None), now)),
    )  # fmt: skip
    return _opened(c, d, key, _FIRST, now)


def warm_up_from(c: Connection, d: Dialect, key: str, code: str) -> int:
    """End a cooldown of this code, if there is one; returns how many parked turns were released.

    What other throttles taught stays.
    """
    rests = d.run(c, "SELECT blocked_code FROM {resource} WHERE key = :key", {"key": key}).scalar()
    if rests != code or _lock_one(c, d, key).blocked_code != code:
        return 0
    now = d.now(c)
    _set(c, d, key, now, "blocked_until = NULL, blocked_since = NULL, blocked_code = NULL")
    return _opened(c, d, key, circuits.RELEASE, now)


def forget(c: Connection, d: Dialect, key: str) -> int:
    """Drop what throttles taught about a resource and its budgets; returns how many parked turns were released."""
    keys = [*resources.budgets_of(c, d, key), key]
    resources.lock_waiting(c, d, keys)
    limits.lock_all(c, d, keys)
    return sum(_forget_one(c, d, one) for one in keys)


def _forget_one(c: Connection, d: Dialect, key: str) -> int:
    if _lock_one(c, d, key).learnt is None:
        return 0
    now = d.now(c)
    drop_limit(c, d, key)
    _set(c, d, key, now, "learnt = NULL")
    return _opened(c, d, key, circuits.RELEASE, now)


# -- operators -----------------------------------------------------------------------------------------------


def pause(c: Connection, d: Dialect, key: str, *, until: datetime | None = None, reason: str | None = None) -> None:
    """Start nothing through this key, until a time or (None) until it is resumed."""
    facts, now = _lock_one(c, d, key), d.now(c)
    after = facts.learnt if until is None else _slow_start(facts, now, until)
    _set(
        c, d, key, now,
        "paused_at = coalesce(paused_at, :now), paused_until = :paused_until, paused_reason = :reason,"
        f" {_learnt_sql(d)}",
        paused_until=until, reason=reason, learnt=packed(after),
    )  # fmt: skip
    if until is not None:
        turns.arm(c, d, key, until)


def resume(c: Connection, d: Dialect, key: str) -> int:
    """End a pause; the load comes back step by step. Returns how many parked turns were released."""
    facts, now = _lock_one(c, d, key), d.now(c)
    after = facts.learnt if facts.paused_at is None else _slow_start(facts, now)
    _set(
        c, d, key, now, f"paused_at = NULL, paused_until = NULL, paused_reason = {_OF_ISOLATION}, {_learnt_sql(d)}",
        learnt=packed(after),
    )  # fmt: skip
    return _opened(c, d, key, _FIRST, now)


def open_(c: Connection, d: Dialect, key: str, *, until: datetime | None = None, reason: str | None = None) -> None:
    """Open the circuit by hand (isolate): until it is closed by hand, or until a probe after ``until``."""
    facts = _lock_one(c, d, key)
    now = d.now(c)
    circuits.write_breakers(c, d, [(key, breaker.isolate(facts.breaker, now, until))], now)
    _set(c, d, key, now, f"paused_reason = coalesce(:reason, {_OF_PAUSE})", reason=reason)
    if until is not None:
        turns.arm(c, d, key, until)


def close(c: Connection, d: Dialect, key: str) -> int:
    """Close the circuit by hand; the load comes back step by step. Returns how many turns were released."""
    facts = _lock_one(c, d, key)
    now = d.now(c)
    after = breaker.reset(facts.breaker, now)
    circuits.write_reset(c, d, facts, after, now)
    _set(c, d, key, now, f"paused_reason = {_OF_PAUSE}")
    return _opened(c, d, key, _FIRST, now)


# A pause and an isolation share the column of their reasons: one that ends leaves the other's.
_OF_PAUSE: Final = "CASE WHEN paused_at IS NOT NULL THEN paused_reason END"
_OF_ISOLATION: Final = "CASE WHEN breaker = 'isolated' THEN paused_reason END"


def set_auth(c: Connection, d: Dialect, key: str, auth: str) -> int:
    """The credentials are ``ok``, and the load comes back step by step, or why they are not.

    Returns how many parked turns were released.
    """
    facts = _lock_one(c, d, key)
    if facts.auth == auth:
        return 0
    now = d.now(c)
    after = _slow_start(facts, now) if auth == "ok" else facts.learnt
    _set(
        c, d, key, now, f"auth = :auth, auth_since = :auth_since, {_learnt_sql(d)}",
        auth=auth, auth_since=None if auth == "ok" else now, learnt=packed(after),
    )  # fmt: skip
    return _opened(c, d, key, _FIRST, now) if auth == "ok" else 0


def open_auth(c: Connection, d: Dialect, key: str, before: str) -> int:
    """The credentials are ``ok``, if this was what was wrong with them; returns as `set_auth`."""
    if auth_of(c, d, key) != before or lock_auth(c, d, key) != before:
        return 0
    return set_auth(c, d, key, "ok")


def auth_of(c: Connection, d: Dialect, key: str) -> str:
    """What one row says about credentials, without locking it: who then writes it, looks again (`lock_auth`)."""
    value = d.run(c, "SELECT auth FROM {resource} WHERE key = :key", {"key": key}).scalar()
    return "ok" if value is None else str(value)


def lock_auth(c: Connection, d: Dialect, key: str) -> str:
    """What one row says about credentials until the commit."""
    return _lock_one(c, d, key).auth


def set_policy(c: Connection, d: Dialect, key: str, override: Mapping[str, Any] | None) -> int:
    """Override one resource's policy (None: no longer), checked with `Policy.overridden`; returns as `resume`."""
    _lock_one(c, d, key)
    now = d.now(c)
    doc = None if not override else json.dumps(override)
    policy = "CAST(:policy AS json)" if d.is_postgresql else ":policy"
    _set(c, d, key, now, f"policy = {policy}", policy=doc)
    return _opened(c, d, key, circuits.RELEASE, now)


# -- rows ----------------------------------------------------------------------------------------------------


def _lock_one(c: Connection, d: Dialect, key: str) -> ResourceFacts:
    """Lock one row, made if it is missing."""
    now = d.now(c)
    d.run(
        c,
        "INSERT INTO {resource} (key, created_at, updated_at) VALUES (:key, :now, :now) ON CONFLICT (key) DO NOTHING",
        {"key": key, "now": now},
    )
    return circuits.lock(c, d, [key])[key]


def _slow_start(facts: ResourceFacts, now: datetime, resumes_at: datetime | None = None) -> Learnt:
    """What is learnt, with the load to come back step by step from ``resumes_at`` (None: now) on."""
    at = now.timestamp()
    s = learnt.current(facts.learnt, at)
    return learnt.rested(s, facts.revision + 1, at, at if resumes_at is None else resumes_at.timestamp())


def _learnt_sql(d: Dialect) -> str:
    return f"learnt = {'CAST(:learnt AS json)' if d.is_postgresql else ':learnt'}"


def _opened(c: Connection, d: Dialect, key: str, limit: int, now: datetime) -> int:
    """What waits for the resource goes on; returns how many parked turns were released."""
    turns.hasten(c, d, key, limit, now)
    return turns.release(c, d, key, limit, now)


def _set(c: Connection, d: Dialect, key: str, now: datetime, sets: str, **params: Any) -> None:
    d.run(
        c,
        f"UPDATE {{resource}} SET {sets}, revision = revision + 1, updated_at = :now WHERE key = :key",
        {"key": key, "now": now, **params},
    )
