"""The first look of a claim: turns, their resources, and the best jobs of those that nothing stops.

On PostgreSQL one statement, because an idle worker's time until it starts a job is round trips. All three are seen by
one snapshot, taken before the leaves are locked: what changed in between only costs a lost candidate (the claim matches
versions) or an extra turn (whoever makes a job ready inserts one, which this look cannot see and does not delete).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from resilient.core.resource_key import ancestors, path
from resilient.store import resources, turns
from resilient.store.candidates import ClaimedJob, best_ready, best_sql
from resilient.store.patience import PATIENCE

if TYPE_CHECKING:
    from datetime import datetime

    from sqlalchemy import Connection

    from resilient.core.admission import ResourceFacts
    from resilient.store.dialect import Dialect


@dataclass(slots=True)
class Look:
    """What was found. ``locked`` are the keys of turns whose rows are held now, ``taken`` counts several of one key."""

    now: datetime
    turns: list[turns.Turn]
    locked: set[str]
    facts: dict[str, ResourceFacts]
    jobs: dict[str, list[ClaimedJob]]  # by key, best first
    taken: int


def look(c: Connection, d: Dialect, wanted: turns.Wanted, per_key: int) -> Look | None:
    """Take turns, lock and read their keys, read those above; None if there is no turn."""
    if not d.is_postgresql:
        return _one_by_one(c, d, wanted, per_key)
    sql, params = turns.taking(d, wanted)
    if (now := d.host_now()) is not None:
        params["now"] = now
    rows = d.run(c, _statement(d, sql), {**params, "per_key": per_key}).all()
    found: dict[str, list[ClaimedJob]] = {}
    taken, locked, facts = [], set[str](), {}
    for row in rows:
        if row[_KIND] == "turn":
            taken.append(row[_TURN])
        elif row[_KIND] == "job":
            job = ClaimedJob._make(row[_JOB])
            found.setdefault(job.resource_key, []).append(job)
        else:
            facts[row[_RESOURCE][0]] = resources.facts_from_row(row[_RESOURCE])
            if row[_KIND] == "held":
                locked.add(row[_RESOURCE][0])
    if not taken:
        return None
    told = now or resources.in_utc(rows[0][_NOW])
    return Look(told, turns.best_of_each(taken, wanted), locked, facts, found, len(taken))


def _one_by_one(c: Connection, d: Dialect, wanted: turns.Wanted, per_key: int) -> Look | None:
    each = turns.take_each(c, d, wanted)
    if not each:
        return None
    taken = turns.best_of_each(each, wanted)
    keys = [t.resource_key for t in taken]
    above = sorted({a for key in keys for a in ancestors(key)})
    now, locked, facts = resources.lock_leaves(c, d, keys, above)
    calm = [key for key in locked if is_calm(key, facts)]
    return Look(now, taken, set(locked), facts, best_ready(c, d, calm, per_key), len(each))


def is_calm(key: str, facts: dict[str, ResourceFacts]) -> bool:
    """Whether `look` has read the jobs of a held key: nothing known of it or above it is out of the ordinary."""
    return all(k not in facts or facts[k].calm for k in path(key))


# -- the statement -------------------------------------------------------------------------------------------
# Rows of three shapes side by side, the columns of the other two being NULL: what a row is, the clock, then the
# columns of a turn, of a resource and of a job.

_KIND, _NOW = 0, 1
_WIDTHS: Final = (3, resources.WIDTH, len(ClaimedJob._fields))
_TURN, _RESOURCE, _JOB = (slice(2 + sum(_WIDTHS[:n]), 2 + sum(_WIDTHS[: n + 1])) for n in range(3))
_PARENTS: Final = (
    "SELECT DISTINCT array_to_string((string_to_array(t.resource_key, '/'))[1:n], '/') AS key FROM taken t"
    # As deep as the key is, not as it may be: one that somebody wrote by hand must not wait for a parent never read.
    " CROSS JOIN LATERAL generate_series(1, array_length(string_to_array(t.resource_key, '/'), 1) - 1) AS n"
)


@lru_cache(maxsize=256)
def _statement(d: Dialect, taking: str) -> str:
    columns = resources.columns(d)
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
        f" (SELECT concat({{steering}}, set_config('lock_timeout', '{PATIENCE}', true))) AS steered"
        f" FROM (SELECT 'turn' AS what, * FROM taken) AS t(what, {turn})"
        " FULL JOIN (SELECT 'held' AS what, * FROM held UNION ALL SELECT 'above', * FROM above)"
        f" AS r(what, {resource}) ON false"
        f" FULL JOIN (SELECT 'job' AS what, * FROM best) AS j(what, {job}) ON false"
    )
