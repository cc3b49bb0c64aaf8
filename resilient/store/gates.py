"""Gates: every statement that changes a cooldown, a pause, credentials or a policy, and circuits by hand.

A write that may open or close a gate bumps `revision`, so that whoever judged the row before can tell
(parking). Whatever opens a gate releases parked turns in a later statement: a few after an outage, a batch
otherwise; staging goes on with the rest. A gate that shuts until a known time arms one parked turn for it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from resilient.core import breaker
from resilient.core.cooldown import cooled
from resilient.store import circuits, turns, waiting

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from sqlalchemy import Connection

    from resilient.core.admission import ResourceFacts
    from resilient.store.dialect import Dialect


# -- cooldown ------------------------------------------------------------------------------------------------


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
) -> tuple[ResourceFacts, bool]:
    """A throttle: rest until the told time, or (None) as long as computed; (facts now, whether that is news).

    ``exact``: the time is a budget's reset, so nothing is added to it.
    """
    facts = _lock_one(c, d, key)
    now = d.now(c)
    rest = until if exact else cooled(facts, until, now, roll, sent_at)
    if rest is None or rest <= max(now, facts.blocked_until or now):
        return facts, False
    active = facts.blocked_until is not None and facts.blocked_until > now
    since = facts.blocked_since if active and facts.blocked_since is not None else now
    facts = replace(
        facts,
        blocked_until=rest,
        blocked_since=since,
        blocked_code=code,
        revision=facts.revision + 1,
        calm=False,
    )
    _set(
        c, d, key, now,
        "blocked_until = :blocked_until, blocked_since = :blocked_since, blocked_code = :code",
        blocked_until=rest, blocked_since=since, code=code,
    )  # fmt: skip
    return facts, True


def warm_up(c: Connection, d: Dialect, key: str) -> int:
    """End a cooldown by hand; returns how many parked turns were released."""
    _lock_one(c, d, key)
    now = d.now(c)
    _set(c, d, key, now, "blocked_until = NULL, blocked_since = NULL, blocked_code = NULL")
    return _opened(c, d, key, circuits.RELEASE, now)


def warm_up_from(c: Connection, d: Dialect, key: str, code: str) -> int:
    """End a cooldown of this code, if there is one; returns how many parked turns were released."""
    rests = d.run(c, "SELECT blocked_code FROM {resource} WHERE key = :key", {"key": key}).scalar()
    if rests != code or _lock_one(c, d, key).blocked_code != code:
        return 0
    return warm_up(c, d, key)


# -- operators -----------------------------------------------------------------------------------------------


def pause(c: Connection, d: Dialect, key: str, *, until: datetime | None = None, reason: str | None = None) -> None:
    """Start nothing through this key, until a time or (None) until it is resumed."""
    _lock_one(c, d, key)
    now = d.now(c)
    _set(
        c, d, key, now,
        "paused_at = coalesce(paused_at, :now), paused_until = :paused_until, paused_reason = :reason",
        paused_until=until, reason=reason,
    )  # fmt: skip
    if until is not None:
        turns.arm(c, d, key, until)


def resume(c: Connection, d: Dialect, key: str) -> int:
    """End a pause; returns how many parked turns were released."""
    _lock_one(c, d, key)
    now = d.now(c)
    _set(c, d, key, now, "paused_at = NULL, paused_until = NULL, paused_reason = NULL")
    return _opened(c, d, key, circuits.RELEASE, now)


def open_(c: Connection, d: Dialect, key: str, *, until: datetime | None = None, reason: str | None = None) -> None:
    """Open the circuit by hand (isolate): until it is closed by hand, or until a probe after ``until``."""
    facts = _lock_one(c, d, key)
    now = d.now(c)
    circuits.write_breakers(c, d, [(key, breaker.isolate(facts.breaker, now, until))], now)
    _set(c, d, key, now, "paused_reason = :reason", reason=reason)
    if until is not None:
        turns.arm(c, d, key, until)


def close(c: Connection, d: Dialect, key: str) -> int:
    """Close the circuit by hand; the load comes back step by step. Returns how many turns were released."""
    facts = _lock_one(c, d, key)
    now = d.now(c)
    after = breaker.reset(facts.breaker, now)
    circuits.write_reset(c, d, facts, after, now)
    return _opened(c, d, key, 1, now)


def set_auth(c: Connection, d: Dialect, key: str, auth: str) -> int:
    """The credentials are ``ok``, or why they are not; returns how many parked turns were released."""
    facts = _lock_one(c, d, key)
    if facts.auth == auth:
        return 0
    now = d.now(c)
    _set(
        c, d, key, now, "auth = :auth, auth_since = :auth_since",
        auth=auth, auth_since=None if auth == "ok" else now,
    )  # fmt: skip
    return _opened(c, d, key, circuits.RELEASE, now) if auth == "ok" else 0


def auth_of(c: Connection, d: Dialect, key: str) -> str:
    """What one row says about credentials, without locking it."""
    found = d.run(c, "SELECT auth FROM {resource} WHERE key = :key", {"key": key}).scalar()
    return "ok" if found is None else str(found)


def set_policy(c: Connection, d: Dialect, key: str, override: Mapping[str, Any] | None) -> int:
    """Override the policy of one resource (None: no longer). Check it with `Policy.overridden` before."""
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


def _opened(c: Connection, d: Dialect, key: str, limit: int, now: datetime) -> int:
    """What waits for the resource goes on; returns how many parked turns were released."""
    waiting.hasten(c, d, key, limit, now)
    return turns.release(c, d, key, limit, now)


def _set(c: Connection, d: Dialect, key: str, now: datetime, sets: str, **params: Any) -> None:
    d.run(
        c,
        f"UPDATE {{resource}} SET {sets}, revision = revision + 1, updated_at = :now WHERE key = :key",
        {"key": key, "now": now, **params},
    )
