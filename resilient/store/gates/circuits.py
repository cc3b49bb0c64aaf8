"""Circuits: every statement that writes the breaker's part of a resource row, and what requests came to.

Reports count only under the generation their requests were sent under (`core.gates.breaker`); counting bumps no
`revision`, a change of state does. A circuit that closes releases a few parked turns in a later statement,
and staging goes on with the ramp; one that opens arms a parked turn for its end. Rows are locked in one
ordered SELECT, deepest first, then by key.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from resilient.core.base.resource_key import depth
from resilient.core.gates import breaker
from resilient.core.gates.admission import ResourceFacts, stop_of
from resilient.core.gates.breaker import BreakerFacts, Report, Window
from resilient.core.gates.learnt import Learnt
from resilient.store.db.dialect import JSON, SHORT_LOCK_WAIT, TIME, limit_lock_waits
from resilient.store.db.direct import direct, operation
from resilient.store.gates import turns

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from datetime import datetime

    from sqlalchemy import Connection

    from resilient.core.base.errors import Failure
    from resilient.core.gates.policy import Policies
    from resilient.store.db.dialect import Dialect

RELEASE: Final = 200  # parked turns released at once where no ramp holds them back


@dataclass(frozen=True, slots=True)
class Evidence:
    """What became of requests through one resource: a `Report`, and the latest failure if there was one."""

    key: str
    report: Report
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """A circuit that changed its state, and the failure that did it."""

    before: ResourceFacts
    after: ResourceFacts
    failure: Failure | None = None


@direct
@operation("gate")
def report_if_current(
    c: Connection, d: Dialect, evidence: Sequence[Evidence], policies: Policies, roll: Callable[[], float]
) -> list[Change]:
    """Count what was sent under the present generations and nothing else; returns the changed circuits.

    Waits for no row that a program holds (see `db/dialect.py`), because nobody can claim those it has already.
    """
    limit_lock_waits(c, d, SHORT_LOCK_WAIT)
    by_key: dict[str, list[Evidence]] = {}
    for one in evidence:
        by_key.setdefault(one.key, []).append(one)
    rows = lock(c, d, sorted(by_key))
    now = d.now(c)
    records: list[dict[str, Any]] = []
    changes: list[Change] = []
    for key, facts in rows.items():
        policy = policies.for_key(key, facts.policy_override).breaker
        after, failure, well = facts.breaker, None, False
        for one in by_key[key]:
            r = _rested(one.report, facts, now)
            failure = one.failure or failure
            well = well or r.ok > 0
            after = breaker.report(after, r, policy, now, roll(), root=depth(key) == 1)
        records.append(_record(d, facts, after, failure, now if well else None))
        if after.state != facts.breaker.state:
            changed = replace(facts, breaker=after, revision=facts.revision + 1)
            changes.append(Change(facts, changed, failure))
    _write_reports(c, d, records, now)
    for change in changes:
        _after_change(c, d, change, policies, now)
    return changes


def elect_for_request(
    c: Connection, d: Dialect, keys: Sequence[str], owner: str, policies: Policies
) -> tuple[list[ResourceFacts], list[str]]:
    """Make a request the probe of the circuits among ``keys`` that are due.

    Returns the rows as they are then, and the keys of its circuits. All or none: if some gate of them is shut, nothing
    changes. For resources that no job has as its own, whose probes the claim therefore never elects. ``owner`` is a
    process: another request of it may have been faster. Waits for no row that a program holds (see `db/dialect.py`).
    """
    limit_lock_waits(c, d, SHORT_LOCK_WAIT)
    rows = lock(c, d, keys)
    now = d.now(c)
    due = [facts for facts in rows.values() if facts.breaker.state != "closed"]
    if not due or any(stop_of(facts, now) is not None for facts in rows.values()):
        return list(rows.values()), []
    for facts in due:
        policy = policies.for_key(facts.key, facts.policy_override).breaker
        b = breaker.elect(facts.breaker, owner, policy, now)
        rows[facts.key] = replace(facts, breaker=b, revision=facts.revision + 1)
    write_breakers(c, d, [(f.key, rows[f.key].breaker) for f in due], now)
    return list(rows.values()), [f.key for f in due]


def _rested(r: Report, facts: ResourceFacts, now: datetime) -> Report:
    """The report; that of a probe during a cooldown puts the next probe off until the cooldown's end."""
    rest = facts.blocked_until
    if not r.probe or rest is None or rest <= now:
        return r
    return replace(r, floor_until=max(rest, r.floor_until or rest))


def _after_change(c: Connection, d: Dialect, change: Change, policies: Policies, now: datetime) -> None:
    key, b = change.after.key, change.after.breaker
    if b.state == "closed":
        policy = policies.for_key(key, change.after.policy_override).breaker
        count = breaker.ramp_allowance(b, policy, now) or RELEASE
        turns.hasten(c, d, key, count, now)
        turns.release(c, d, key, count, now)
    elif b.open_until is not None:
        turns.arm(c, d, key, b.open_until)


def give_up_probes(c: Connection, d: Dialect, owners: Mapping[str, Collection[str]], now: datetime) -> list[str]:
    """End probes whose workers were lost (``owners``: of the probes, by circuit), so that the next probe need not wait.

    Returns the keys of these circuits; one parked turn of each becomes an ordinary one.
    """
    rows = lock(c, d, sorted(owners)) if owners else {}
    orphans = [key for key, facts in rows.items() if breaker.orphaned(facts.breaker, owners[key])]
    if orphans:
        write_breakers(c, d, [(key, replace(rows[key].breaker, probe_until=now)) for key in orphans], now)
    for key in sorted(orphans):
        turns.release(c, d, key, 1, now, oldest_first=True)
    return orphans


# -- rows ----------------------------------------------------------------------------------------------------


def write_breakers(c: Connection, d: Dialect, breakers: Iterable[tuple[str, BreakerFacts]], now: datetime) -> None:
    """Write the state of circuits whose rows the caller holds; their counting is left alone."""
    sets = ", ".join(f"{name} = v.{name}" for name in _CIRCUIT if name != "key")
    d.run(
        c,
        f"UPDATE {{resource}} SET {sets}, revision = {{resource}}.revision + 1, updated_at = :now"
        f" FROM {d.records('doc', _CIRCUIT)} AS v WHERE {{resource}}.key = v.key",
        {"doc": json.dumps([_circuit(d, key, b) for key, b in breakers]), "now": now},
    )


def write_reset(c: Connection, d: Dialect, facts: ResourceFacts, after: BreakerFacts, now: datetime) -> None:
    """Write a circuit whose counting starts anew; the caller holds the row."""
    _write_reports(c, d, [_record(d, facts, after, None, None)], now)


_CIRCUIT: Final = {
    "key": "text", "breaker": "text", "generation": "bigint", "open_until": "timestamptz",
    "opened_at": "timestamptz", "closed_at": "timestamptz", "reopens": "int",
    "probe_owner": "text", "probe_until": "timestamptz",
}  # fmt: skip
_REPORTED: Final = _CIRCUIT | {
    "step": "int", "streak": "int", "window_at": "timestamptz", "counts": "json", "error": "text",
    "error_kind": "text", "error_code": "text", "error_at": "timestamptz", "success_at": "timestamptz",
}  # fmt: skip


def _circuit(d: Dialect, key: str, b: BreakerFacts) -> dict[str, Any]:
    return {
        "key": key, "breaker": b.state, "generation": b.generation, "open_until": d.time(b.open_until),
        "opened_at": d.time(b.opened_at), "closed_at": d.time(b.closed_at), "reopens": b.reopens,
        "probe_owner": b.probe_owner, "probe_until": d.time(b.probe_until),
    }  # fmt: skip


def _record(
    d: Dialect, facts: ResourceFacts, b: BreakerFacts, failure: Failure | None, success_at: datetime | None
) -> dict[str, Any]:
    return _circuit(d, facts.key, b) | {
        "step": int(b.generation != facts.breaker.generation),
        "streak": b.streak,
        "window_at": d.time(b.window_at),
        "counts": b.window.to_json() if b.window_at else None,
        "success_at": d.time(success_at),
        "error": None if failure is None else str(failure),
        "error_kind": failure and str(failure.kind),
        "error_code": failure and failure.code,
    }


def _write_reports(c: Connection, d: Dialect, records: Sequence[Mapping[str, Any]], now: datetime) -> None:
    if not records:
        return
    sets = ", ".join(f"{name} = v.{name}" for name in _CIRCUIT if name != "key")
    then = "CAST(:now AS {timestamp})"
    d.run(
        c,
        f"UPDATE {{resource}} SET {sets}, revision = {{resource}}.revision + v.step, streak = v.streak,"
        ' window_at = v.window_at, "window" = v.counts, updated_at = :now,'
        " last_success_at = coalesce(v.success_at, last_success_at),"
        " last_error = coalesce(v.error, last_error),"
        " last_error_kind = coalesce(v.error_kind, last_error_kind),"
        " last_error_code = CASE WHEN v.error IS NULL THEN last_error_code ELSE v.error_code END,"
        f" last_error_at = CASE WHEN v.error IS NULL THEN last_error_at ELSE {then} END"
        f" FROM {d.records('doc', _REPORTED)} AS v WHERE {{resource}}.key = v.key",
        {"doc": json.dumps(records), "now": now},
    )


_FULL: Final = (
    "key, breaker, generation, open_until, opened_at, closed_at, reopens, probe_owner, probe_until, streak,"
    ' window_at, "window" AS counts, blocked_until, blocked_since, blocked_code, paused_at, paused_until,'
    " paused_reason, auth, auth_since, policy, revision, learnt"
)
_FULL_TYPES: Final[dict[str, Any]] = {
    "key": None, "breaker": None, "generation": None, "open_until": TIME, "opened_at": TIME,
    "closed_at": TIME, "reopens": None, "probe_owner": None, "probe_until": TIME, "streak": None,
    "window_at": TIME, "counts": JSON,
    "blocked_until": TIME, "blocked_since": TIME, "blocked_code": None, "paused_at": TIME,
    "paused_until": TIME, "paused_reason": None, "auth": None, "auth_since": TIME, "policy": JSON,
    "revision": None, "learnt": JSON,
}  # fmt: skip


def lock(c: Connection, d: Dialect, keys: Sequence[str]) -> dict[str, ResourceFacts]:
    """Lock rows, deepest first, and read everything about their gates."""
    rows = d.run(
        c,
        f"SELECT {_FULL} FROM {{resource}} WHERE key {d.among('keys', 'text')}"
        " ORDER BY length(key) - length(replace(key, '/', '')) DESC, key {row_lock}",
        {"keys": d.pack_keys(keys)}, **_FULL_TYPES,
    )  # fmt: skip
    facts = {}
    for r in rows:
        b = replace(BreakerFacts(*list(r[1:11])), window=Window.from_json(r[11]))
        facts[r[0]] = ResourceFacts(r[0], b, *[*r[12:-1], Learnt.from_json(r[-1])])
    return facts
