"""What a claim reads first: turns, their resources and those above them, limits, and the best ready jobs.

One round trip on PostgreSQL, because an idle worker's time until it starts a job is round trips.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from resilient.core.base.resource_key import ancestors, path
from resilient.store.db.dialect import LOCK_WAIT, Dialect
from resilient.store.gates import limits, resources, turns
from resilient.store.jobs.columns import selected, types

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    from sqlalchemy import Connection

    from resilient.core.gates.admission import ResourceFacts
    from resilient.core.gates.rate_limit import LimitState


class ClaimedJob(NamedTuple):
    """A job as it was right before its claim: ``version`` is one less than the fence."""

    id: UUID
    version: int
    kind: str
    resource_key: str
    payload: str | None  # JSON
    payload_version: int
    priority: int
    run_at: datetime
    expires_at: datetime | None
    attempts: int
    max_attempts: int | None
    executions: int
    deferrals: int
    rescues: int
    idempotency_key: str | None
    sent: Any
    tags: Mapping[str, str] | None
    once_more: bool
    ordering_key: str | None
    order_no: int | None
    followed: bool
    trace: Any


# -- the best ready jobs of each key, by the partial index made for it -------------------------------------------------

_READY: Final = f"SELECT {selected(ClaimedJob)} FROM {{job}} WHERE state = 'ready' AND resource_key = "
_BEST_FIRST: Final = " ORDER BY priority DESC, run_at, id"
_SQLITE_TYPES: Final = types(ClaimedJob)
_claimed: Final[Callable[[Any], ClaimedJob]] = partial(tuple.__new__, ClaimedJob)  # a quarter of a call's time


def best_sql(key: str, also: str = "") -> str:
    """The best ``:per_key`` ready jobs of the resource that an expression names."""
    return _READY + key + also + _BEST_FIRST + " LIMIT :per_key"


def best_ready(
    c: Connection, d: Dialect, keys: Sequence[str], limit: int, kinds: Sequence[str] | None = None
) -> dict[str, list[ClaimedJob]]:
    """The best ``limit`` ready jobs of each key, best first; with ``kinds`` only of those."""
    best: dict[str, list[ClaimedJob]] = {}
    if not keys:
        return best
    params: dict[str, Any] = {"per_key": limit}
    also = ""
    if kinds is not None:
        also = f" AND kind IN (SELECT value FROM {d.array('kinds', 'text')})"
        params["kinds"] = d.pack_keys(kinds)
    if d.is_postgresql:
        rows = d.run(
            c,
            f"SELECT j.* FROM unnest(CAST(:keys AS text[])) AS k(key) CROSS JOIN LATERAL ({best_sql('k.key', also)}) j",
            {**params, "keys": d.pack_keys(keys)},
        )
        for row in map(_claimed, rows):
            best.setdefault(row.resource_key, []).append(row)
        return best
    for key in keys:  # no LATERAL, and no round trip to save
        rows = d.run(c, best_sql(":key", also), {**params, "key": key}, **_SQLITE_TYPES)
        if jobs := list(map(_claimed, rows)):
            best[key] = jobs
    return best


# -- the first look ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Snapshot:
    """What the first look read; ``locked`` has the keys whose rows it locked."""

    now: datetime
    turns: list[turns.Turn]
    locked: set[str]
    facts: dict[str, ResourceFacts]
    jobs: dict[str, list[ClaimedJob]]  # by key, best first
    turn_count: int  # several of one key counted
    limits: dict[str, dict[str, LimitState]] | None = None  # of all those keys, if they were read


def take_snapshot(
    c: Connection, d: Dialect, selection: turns.Selection, per_key: int, *, limited: bool = False
) -> Snapshot | None:
    """Take turns, lock and read their keys, read those above; None if there is no turn.

    ``limited``: their limits too, on PostgreSQL in a second statement of the same round trip. It must begin after
    the locks are had: a claim that had them before may have drawn since this one's first statement began.
    """
    if not d.is_postgresql:
        return _one_by_one(c, d, selection, per_key)
    sql, params = turns.take_statement(d, selection)
    if (now := d.host_now()) is not None:
        params["now"] = now
    result = d.later(c, _statement(d, sql, limited), {**params, "per_key": per_key})
    limit_states = limits.read_noted(c, d) if limited else None
    d.send(c)
    rows = result.all()
    jobs: dict[str, list[ClaimedJob]] = {}
    turn_rows, locked, facts = [], set[str](), {}
    for row in rows:
        if row[_KIND] == "turn":
            turn_rows.append(row[_TURN])
        elif row[_KIND] == "job":
            job = _claimed(row[_JOB])
            jobs.setdefault(job.resource_key, []).append(job)
        else:
            facts[row[_RESOURCE][0]] = resources.facts_from_row(row[_RESOURCE])
            if row[_KIND] == "held":
                locked.add(row[_RESOURCE][0])
    if not turn_rows:
        return None
    read_at = now or resources.in_utc(rows[0][_NOW])
    best = turns.best_of_each(turn_rows, selection)
    return Snapshot(read_at, best, locked, facts, jobs, len(turn_rows), limit_states)


def _one_by_one(c: Connection, d: Dialect, selection: turns.Selection, per_key: int) -> Snapshot | None:
    each = turns.take_each(c, d, selection)
    if not each:
        return None
    best = turns.best_of_each(each, selection)
    keys = [t.resource_key for t in best]
    above = sorted({a for key in keys for a in ancestors(key)})
    now, locked, facts = resources.lock_leaves(c, d, keys, above)
    calm = [key for key in locked if is_calm(key, facts)]
    return Snapshot(now, best, set(locked), facts, best_ready(c, d, calm, per_key), len(each))


def is_calm(key: str, facts: dict[str, ResourceFacts]) -> bool:
    """Whether `take_snapshot` has read the jobs of a locked key: neither it nor a key above it needs a closer look."""
    return all(k not in facts or facts[k].calm for k in path(key))


# -- the statement -------------------------------------------------------------------------------------------
# Rows of three shapes side by side, the columns of the other two being NULL: what a row is, the clock, then the
# columns of a turn, of a resource and of a job.

_KIND, _NOW = 0, 1
_WIDTHS: Final = (3, resources.WIDTH, len(ClaimedJob._fields))
_TURN, _RESOURCE, _JOB = (slice(2 + sum(_WIDTHS[:n]), 2 + sum(_WIDTHS[: n + 1])) for n in range(3))
_PARENTS: Final = (
    "SELECT DISTINCT array_to_string((string_to_array(t.resource_key, '/'))[1:n], '/') AS key FROM taken t"
    # As deep as the key is: one that was written by hand, deeper than keys may be, must not wait for a parent.
    " CROSS JOIN LATERAL generate_series(1, array_length(string_to_array(t.resource_key, '/'), 1) - 1) AS n"
)


@lru_cache(maxsize=256)
def _statement(d: Dialect, taking: str, limited: bool) -> str:  # noqa: FBT001 - of a cached function
    columns = resources.columns(d)
    note = f", {limits.note('SELECT key FROM held UNION ALL SELECT key FROM above')}" if limited else ""
    shapes = [[f"{letter}{n}" for n in range(width)] for letter, width in zip("trj", _WIDTHS, strict=True)]
    turn, resource, job = (", ".join(names) for names in shapes)
    return (
        f"WITH {taking}, parents AS MATERIALIZED ({_PARENTS}),"
        f" held AS MATERIALIZED (SELECT {columns} FROM {{resource}}"
        " WHERE key = ANY(ARRAY(SELECT resource_key FROM taken)) ORDER BY key {leaf_lock}),"
        f" above AS MATERIALIZED (SELECT {columns} FROM {{resource}}"
        " WHERE key = ANY(ARRAY(SELECT key FROM parents)) AND key NOT IN (SELECT key FROM held)),"
        " troubled AS MATERIALIZED (SELECT key || '/' AS stem FROM above WHERE NOT calm UNION ALL"
        " SELECT key || '/' FROM held WHERE NOT calm AND key = ANY(ARRAY(SELECT key FROM parents))),"
        f" best AS (SELECT j.* FROM held h CROSS JOIN LATERAL ({best_sql('h.key')}) j"
        " WHERE h.calm AND NOT EXISTS (SELECT 1 FROM troubled WHERE starts_with(h.key, stem)))"
        # Steers the statements after it, in the round trip it makes anyway.
        f" SELECT coalesce(t.what, r.what, j.what) AS what, clock_timestamp() AS now, {turn}, {resource}, {job},"
        f" (SELECT concat({{steering}}, set_config('lock_timeout', '{LOCK_WAIT}', true){note})) AS steered"
        f" FROM (SELECT 'turn' AS what, * FROM taken) AS t(what, {turn})"
        " FULL JOIN (SELECT 'held' AS what, * FROM held UNION ALL SELECT 'above', * FROM above)"
        f" AS r(what, {resource}) ON false"
        f" FULL JOIN (SELECT 'job' AS what, * FROM best) AS j(what, {job}) ON false"
    )
