"""Resource rows: making, locking and reading them, and what the claim writes back.

Several rows are locked in one ordered SELECT: leaves by key, ancestors deepest first and then by key. What
gates need is in `RESOURCE_COLUMNS`; the counting window is left out, because only reports (`circuits.py`)
read it. Rows without any gate share one facts object per key, so that reading thousands of leaves a second
costs a microsecond each.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from resilient.core.base.resource_key import BUDGET
from resilient.core.gates.admission import ResourceFacts
from resilient.core.gates.breaker import BreakerFacts
from resilient.core.gates.learnt import Learnt
from resilient.store.db.dialect import JSON, TIME
from resilient.store.db.direct import direct
from resilient.store.gates import circuits, limits

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from sqlalchemy import Connection

    from resilient.core.gates.admission import Level
    from resilient.core.gates.rate_limit import LimitState
    from resilient.store.db.dialect import Dialect

# `calm` says of the common row what `admission.stop_of` would find out. `{now}` is `Dialect.now_sql`.
RESOURCE_COLUMNS: Final = (
    "key, (breaker = 'closed' AND streak = 0 AND closed_at IS NULL AND paused_at IS NULL AND auth = 'ok'"
    " AND policy IS NULL AND learnt IS NULL AND (blocked_until IS NULL OR blocked_until < {now})) AS calm,"
    " generation, breaker, open_until, opened_at, closed_at, reopens, probe_owner, probe_until, streak,"
    " blocked_until, blocked_since, blocked_code, paused_at, paused_until, paused_reason, auth, auth_since,"
    " policy, revision, learnt"
)
WIDTH: Final = 22  # how many columns that are
# On PostgreSQL columns come without converters, which would cost more than the row: see `facts_from_row`.
_SQLITE_TYPES: Final[dict[str, Any]] = {
    "key": None, "calm": None, "generation": None, "breaker": None, "open_until": TIME, "opened_at": TIME,
    "closed_at": TIME, "reopens": None, "probe_owner": None, "probe_until": TIME, "streak": None,
    "blocked_until": TIME, "blocked_since": TIME, "blocked_code": None, "paused_at": TIME,
    "paused_until": TIME, "paused_reason": None, "auth": None, "auth_since": TIME, "policy": JSON,
    "revision": None, "learnt": JSON,
}  # fmt: skip
_DEEPEST_FIRST: Final = " ORDER BY length(key) - length(replace(key, '/', '')) DESC, key {row_lock}"


@direct
def ensure(c: Connection, d: Dialect, keys: Iterable[str], how_long: str | None = None) -> None:
    """Make the missing rows of these keys, in lock order: one statement, in a short transaction of its own.

    ``how_long``: how long to wait for another transaction that makes one of them (see `db/dialect.py`).
    """
    condition = "true"
    if how_long is not None and d.is_postgresql:
        condition = f"set_config('lock_timeout', '{how_long}', true) <> ''"
    d.run(
        c,
        "INSERT INTO {resource} (key, created_at, updated_at)"
        f" SELECT value, {d.now_sql}, {d.now_sql} FROM {d.array('keys', 'text')} WHERE {condition}"
        " ON CONFLICT (key) DO NOTHING",  # in the order given: the database may sort a text that is no column otherwise
        _with_now(d, {"keys": d.pack_keys(sorted(set(keys)))}),
    )


def lock_leaves(
    c: Connection, d: Dialect, keys: Sequence[str], above: Sequence[str] = ()
) -> tuple[datetime, list[str], dict[str, ResourceFacts]]:
    """Lock ``keys``, skipping locked ones, and read ``above`` unlocked.

    Returns (now, the keys that were locked, the facts of all rows found).
    """
    params = _with_now(d, {"keys": d.pack_keys(keys), "above": d.pack_keys(above)})
    if d.is_postgresql:
        rows = d.run(c, _lock_leaves_sql(d), params).all()
        now = in_utc(rows[0][WIDTH + 1]) if rows and d.clock is None else d.now(c)
        return now, [r[0] for r in rows if r[WIDTH]], {r[0]: facts_from_row(r) for r in rows}
    facts_of = _select(c, d, _within(d, "keys") + f" OR {_within(d, 'above')}", params)
    return d.now(c), [key for key in keys if key in facts_of], facts_of


def has_accounts(c: Connection, d: Dialect) -> bool:
    """Whether there are at least two accounts."""
    rows = d.run(c, "SELECT 1 FROM {resource} WHERE key LIKE '%/%' AND key NOT LIKE '%/%/%' LIMIT 2").all()
    return len(rows) > 1


def lock_waiting(c: Connection, d: Dialect, keys: Sequence[str]) -> dict[str, ResourceFacts]:
    """Lock and read rows, waiting for them, deepest first and then by key."""
    return _select(c, d, _within(d, "keys") + _DEEPEST_FIRST, _with_now(d, {"keys": d.pack_keys(keys)}))


def read(c: Connection, d: Dialect, keys: Sequence[str]) -> dict[str, ResourceFacts]:
    """The gates of these keys, without locks."""
    return _select(c, d, _within(d, "keys"), _with_now(d, {"keys": d.pack_keys(keys)}))


def touch(c: Connection, d: Dialect, keys: Sequence[str], now: datetime) -> None:
    """Raise the revision of these resources, because capacity became free: earlier judgements are stale."""
    params = {"keys": d.pack_keys(keys), "now": now}
    d.later(c, f"SELECT key FROM {{resource}} WHERE {_within(d, 'keys')}" + _DEEPEST_FIRST, params)
    d.later(
        c,
        f"UPDATE {{resource}} SET revision = revision + 1, updated_at = :now WHERE {_within(d, 'keys')}",
        params,
    )


def count_running(c: Connection, d: Dialect, keys: Sequence[str]) -> dict[str, int]:
    """How many jobs run at or below each key."""
    rows = d.run(
        c,
        # '0' follows '/' among the bytes, so the second range is everything below the key.
        "SELECT value, (SELECT count(*) FROM {job} WHERE state = 'running' AND resource_key = value)"
        " + (SELECT count(*) FROM {job} WHERE state = 'running'"
        "    AND resource_key > value || '/' AND resource_key < value || '0')"
        f" FROM {d.array('keys', 'text')}",
        {"keys": d.pack_keys(keys)},
    )
    return {r[0]: r[1] for r in rows}


def budgets_of(c: Connection, d: Dialect, key: str) -> list[str]:
    """The keys of an account's budgets that have a row, in order; at most 100."""
    rows = d.run(
        c,
        "SELECT key FROM {resource} WHERE key > :low AND key < :high ORDER BY key LIMIT 100",
        {"low": f"{key}/{BUDGET}", "high": f"{key}/{BUDGET}~"},
    )
    return [row[0] for row in rows]


def count_running_kinds(c: Connection, d: Dialect, key: str, kinds: Sequence[str]) -> int:
    """How many jobs of a key run that are of one of these kinds."""
    number: int = d.run(
        c,
        "SELECT count(*) FROM {job} WHERE state = 'running' AND resource_key = :key"
        f" AND kind {d.among('kinds', 'text')}",
        {"key": key, "kinds": d.pack_keys(kinds)},
    ).scalar_one()
    return number


def write_levels(c: Connection, d: Dialect, old: Sequence[Level], new: Sequence[Level], now: datetime) -> None:
    """Write what an admission changed: elected probes and drawn job limits. The caller holds the rows."""
    elected = [
        (b.facts.key, b.facts.breaker) for a, b in zip(old, new, strict=True) if a.facts.breaker is not b.facts.breaker
    ]
    if elected:
        circuits.write_breakers(c, d, elected, now)
    drawn: list[tuple[str, str, LimitState]] = []
    fresh: list[tuple[str, str]] = []
    for a, b in zip(old, new, strict=True):
        if a.limits is b.limits:
            continue
        for limit in b.policy.job_limits:  # request limits are only looked at by the claim
            before, state = a.limits.get(limit.name), b.limits[limit.name]
            if before is None:
                fresh.append((b.facts.key, limit.name))
            if before is None or before.tat != state.tat:
                drawn.append((b.facts.key, limit.name, state))
    if fresh:
        limits.insert(c, d, fresh)
    limits.write_tats(c, d, drawn)


# -- rows to facts -------------------------------------------------------------------------------------------


def facts_from_row(row: Any) -> ResourceFacts:
    """The facts of a row of `RESOURCE_COLUMNS`; calm rows share theirs."""
    if row[1]:
        return _calm(row[0], row[2], row[WIDTH - 2])
    row = [in_utc(value) if isinstance(value, datetime) else value for value in row]
    b = BreakerFacts(row[3], row[2], row[4], row[5], row[6], row[7], row[8], row[9], row[10])
    row[WIDTH - 1] = Learnt.from_json(row[WIDTH - 1])
    return ResourceFacts(row[0], b, *row[11:WIDTH])


def in_utc(time: datetime) -> datetime:
    """A time as the driver gives it, in the session's zone: reckoning there goes by the wall clock.

    In the night when summer time ends, that is an hour wrong.
    """
    return time if time.tzinfo is UTC else time.astimezone(UTC)


@lru_cache(maxsize=16384)
def _calm(key: str, generation: int, revision: int) -> ResourceFacts:
    return ResourceFacts(key, _closed(generation), revision=revision, calm=True)


@lru_cache(maxsize=1024)
def _closed(generation: int) -> BreakerFacts:
    return BreakerFacts(generation=generation)


def _select(c: Connection, d: Dialect, where: str, params: Mapping[str, Any]) -> dict[str, ResourceFacts]:
    types = {} if d.is_postgresql else _SQLITE_TYPES
    rows = d.run(c, f"SELECT {columns(d)} FROM {{resource}} WHERE {where}", params, **types)
    return {row[0]: facts_from_row(row) for row in rows}


def columns(d: Dialect) -> str:
    """`RESOURCE_COLUMNS` of this database."""
    return RESOURCE_COLUMNS.replace("{now}", d.now_sql)


def _within(d: Dialect, param: str) -> str:
    if d.is_postgresql:
        return f"key = ANY(CAST(:{param} AS text[]))"
    return f"key IN (SELECT value FROM json_each(:{param}))"


def _lock_leaves_sql(d: Dialect) -> str:
    names = columns(d)
    return (
        f"WITH locked AS MATERIALIZED (SELECT {names} FROM {{resource}} WHERE {_within(d, 'keys')}"
        " ORDER BY key {leaf_lock})"
        # Steers the statements after it, in the round trip it makes anyway.
        f" SELECT *, true AS is_locked, clock_timestamp(), (SELECT concat({{steering}})) FROM locked UNION ALL"
        f" SELECT {names}, false, clock_timestamp(), '' FROM {{resource}} WHERE {_within(d, 'above')}"
        " AND key NOT IN (SELECT key FROM locked)"  # as this statement began: older than under the lock, perhaps
    )


def _with_now(d: Dialect, params: dict[str, Any]) -> dict[str, Any]:
    if (now := d.host_now()) is not None:
        params["now"] = now
    return params
