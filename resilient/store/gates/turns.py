"""Turns: the run queue of resources.

Invariant: a key with a ready job has a turn, a parked turn, or a claim in progress. Enqueueing only ever inserts a
turn. Taking a key deletes all its visible turns; whoever takes it must, in the same transaction, write a new turn or a
parked one for what is left (`store/jobs/claim.py`).

A parked turn waits on the resource that stops its key (itself or an ancestor), one row per key. Two things bring it
back: whatever opens the gate calls `release` in a statement after the one that wrote the resource row, and staging
looks at it again at `recheck_at`. Parking is conditional (`park`): the stopping row is read FOR SHARE and must still be
as it was judged, so a gate that opens meanwhile strands nobody; a key that is not parked gets an ordinary turn.

Ids only grow, so a worker remembers the id below which no turn was left (`low`) and begins its next look there: deleted
rows that somebody's old snapshot keeps cost it nothing. A smaller id may commit later, so now and then it begins at 0.

Jobs that wait for a resource off their own path have no turn that could be parked there, because their key may have
other work. So the rows themselves wait: scheduled, with ``waiting_for``, and never run to find out. When one is due
while its resource is still stopped, staging puts it off (`put_off`), and whatever opens that resource's gate makes the
first of them due at once (`hasten`). Neither waits for a locked job row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from resilient.core.base.resource_key import FAR, depth, each_depth

if TYPE_CHECKING:
    from datetime import datetime

    from sqlalchemy import Connection

    from resilient.store.db.dialect import Dialect


RELEASE_STEP: Final = timedelta(seconds=1)
RECHECK: Final = timedelta(seconds=60)  # jittered; then a parked turn is looked at even if nothing released it


@dataclass(frozen=True, slots=True)
class Turn:
    """A taken turn."""

    resource_key: str
    priority: int
    id: int


@dataclass(frozen=True, slots=True)
class Parking:
    """One key to park: on which resource, and when to look at it again."""

    resource_key: str
    priority: int
    parked_on: str
    recheck_at: datetime
    spread_at: datetime  # recheck of all but the first turn parked on the same resource


def insert(c: Connection, d: Dialect, turns: Mapping[str, int] | Iterable[tuple[str, int]]) -> None:
    """Write ordinary turns: keys with the priority of their best ready job."""
    rows = list(turns.items() if isinstance(turns, Mapping) else turns)
    if not rows:
        return
    if len(rows) == 1:
        d.later(
            c,
            "INSERT INTO {turn} (resource_key, priority) VALUES (:resource_key, :priority)",
            {"resource_key": rows[0][0], "priority": rows[0][1]},
        )
        return
    source = (
        "SELECT * FROM unnest(CAST(:keys AS text[]), CAST(:priorities AS int[]))"
        if d.is_postgresql
        else "SELECT value ->> '$[0]', value ->> '$[1]' FROM json_each(:doc)"
    )
    params = (
        {"keys": d.pack_keys([k for k, _ in rows]), "priorities": d.pack_ints([p for _, p in rows])}
        if d.is_postgresql
        else {"doc": json.dumps(rows)}
    )
    d.later(c, "INSERT INTO {turn} (resource_key, priority) " + source, params)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which turns to take: up to ``limit``, the best priority first, or the oldest.

    With ``priority`` only turns of exactly that priority with an id of at least ``low`` are looked at (a direct seek).
    Turns of keys in ``skip`` are passed over. With ``resources`` (patterns) only those of keys that fit them, or lie
    below such keys, are taken.
    """

    limit: int
    priority: int | None = None
    low: int = 0
    oldest_first: bool = False
    skip: Sequence[str] = ()
    resources: Sequence[str] = ()


def take(c: Connection, d: Dialect, selection: Selection) -> list[Turn]:
    """Take turns and delete every visible one of the same keys; one `Turn` per key, in order."""
    return best_of_each(take_each(c, d, selection), selection)


def take_each(c: Connection, d: Dialect, selection: Selection) -> Sequence[Any]:
    """`take`, but with every row that was deleted."""
    sql, params = take_statement(d, selection)
    sql = f"WITH {sql} SELECT * FROM taken" if d.is_postgresql else sql
    return d.run(c, sql, params).all()


def take_statement(d: Dialect, selection: Selection) -> tuple[str, dict[str, object]]:
    """The statement that takes turns (resource_key, priority, id); on PostgreSQL a list of CTEs, the last ``taken``."""
    w = selection
    where = "parked_on IS NULL AND id >= :low"
    params: dict[str, object] = {"limit": w.limit, "low": w.low}
    if w.priority is not None:
        where += " AND priority = :priority"
        params["priority"] = w.priority
    if w.skip:
        where += f" AND resource_key NOT IN (SELECT value FROM {d.array('skip', 'text')})"
        params["skip"] = d.pack_keys(w.skip)
    order = "id" if w.oldest_first or w.priority is not None else "priority DESC, id"
    if w.resources:
        served, words = _served(d, w.resources)
        where += f" AND {served}"
        params |= words
        if not w.low:  # by the index of keys: in that of the order all turns of others would stand in front
            order = "id + 0" if order == "id" else "priority + 0 DESC, id"
    picked = f"SELECT id, resource_key FROM {{turn}} WHERE {where} ORDER BY {order} LIMIT :limit {{skip_locked}}"
    if not d.is_postgresql:
        return (
            "DELETE FROM {turn} WHERE parked_on IS NULL AND resource_key IN"
            f" (SELECT resource_key FROM ({picked})) RETURNING resource_key, priority, id"
        ), params
    return (
        f"picked AS MATERIALIZED ({picked}), gone AS MATERIALIZED ("
        "  SELECT t.id FROM {turn} t WHERE t.parked_on IS NULL"
        # An array, not a join: without fresh statistics a join compares every turn with every picked key.
        " AND t.resource_key = ANY(ARRAY(SELECT resource_key FROM picked)) FOR UPDATE SKIP LOCKED),"
        " taken AS (DELETE FROM {turn} t WHERE t.id = ANY(ARRAY(SELECT id FROM gone))"
        " RETURNING t.resource_key, t.priority, t.id)"
    ), params


def _served(d: Dialect, patterns: Sequence[str]) -> tuple[str, dict[str, object]]:
    """The condition that a key is one that `resource_key.serves`: a match, and ranges, so that an index is used."""
    params: dict[str, object] = {}
    if d.is_postgresql:
        served = "resource_key ~ :resources"
        params["resources"] = _regex(tuple(patterns))
    else:
        served = (
            "EXISTS (SELECT 1 FROM json_each(:resources) AS p WHERE resource_key GLOB p.value ->> '$[0]'"
            " AND resource_key NOT GLOB p.value ->> '$[1]')"
        )
        params["resources"] = _globs(tuple(patterns))
    begins = [re.split(r"[*?]", pattern)[0] for pattern in patterns]
    if not all(begins):
        return served, params
    for number, begin in enumerate(begins):
        params |= {f"from_{number}": begin, f"to_{number}": begin + FAR}
    ranges = (f"resource_key >= :from_{number} AND resource_key < :to_{number}" for number in range(len(begins)))
    return f"({' OR '.join(ranges)}) AND {served}", params


@lru_cache(maxsize=16)
def _regex(patterns: tuple[str, ...]) -> str:
    one_segment = {"*": "[^/]*", "?": "[^/]"}
    words = (
        "".join(one_segment.get(sign, re.escape(sign)) for sign in pattern.removesuffix("/**"))
        + ("/" if pattern.endswith("/**") else "(/|$)")
        for pattern in patterns
    )
    return f"^({'|'.join(words)})"


@lru_cache(maxsize=16)
def _globs(patterns: tuple[str, ...]) -> str:
    """Pairs of globs: what a key matches, and what it does not: a further slash, which GLOB's star would cross."""
    globs = (glob for pattern in patterns for glob in each_depth(pattern))
    return json.dumps([[glob, "*/" * depth(glob) + "*"] for glob in globs])


def best_of_each(rows: Iterable[Sequence[Any]], selection: Selection) -> list[Turn]:
    """One turn of each key, in the order to serve them."""
    best: dict[str, Turn] = {}
    for key, priority, id_ in sorted(rows, key=lambda r: (-r[1], r[2])):
        best.setdefault(key, Turn(key, priority, id_))
    turns = list(best.values())
    if selection.oldest_first:
        turns.sort(key=lambda t: t.id)
    return turns


def park(c: Connection, d: Dialect, parkings: Sequence[Parking], judged: Mapping[str, int]) -> None:
    """Park keys on resources that are still as they were ``judged`` (key to revision); the rest get ordinary turns.

    A resource that is not in ``judged`` is locked by the caller and cannot have changed. The first turn parked on
    a resource is rechecked at ``recheck_at``, the others at ``spread_at``.
    """
    if not parkings:
        return
    targets = {p.parked_on for p in parkings}
    unchanged = (targets - judged.keys()) | _still_judged(c, d, sorted(targets & judged.keys()), judged)
    insert(c, d, [(p.resource_key, p.priority) for p in parkings if p.parked_on not in unchanged])
    parkings = [p for p in parkings if p.parked_on in unchanged]
    if not parkings:
        return
    own = [p.resource_key for p in parkings]
    _arm_former(c, d, parkings)
    armed = _armed(c, d, {p.parked_on: p.recheck_at for p in parkings}, own)
    rows = []
    for p in parkings:
        recheck_at = p.spread_at if p.parked_on in armed else p.recheck_at
        armed.add(p.parked_on)
        rows.append(
            {
                "resource_key": p.resource_key,
                "priority": p.priority,
                "parked_on": p.parked_on,
                "recheck_at": d.time(recheck_at),
            }
        )
    d.later(
        c,
        "INSERT INTO {turn} (resource_key, priority, parked_on, recheck_at)"
        f" SELECT resource_key, priority, parked_on, recheck_at FROM {d.records('doc', _PARKED)} AS r WHERE true"
        " ON CONFLICT (resource_key) WHERE parked_on IS NOT NULL DO UPDATE SET parked_on = excluded.parked_on,"
        " priority = excluded.priority, recheck_at = excluded.recheck_at",
        {"doc": json.dumps(rows)},
    )


_PARKED: Final = {"resource_key": "text", "priority": "int", "parked_on": "text", "recheck_at": "timestamptz"}


def _arm_former(c: Connection, d: Dialect, parkings: Sequence[Parking]) -> None:
    """Arm the resources that these keys were parked on before: the turn that moves away may have been the first due."""
    rows = d.run(
        c,
        f"SELECT t.parked_on, count(*) FROM {d.records('doc', {'resource_key': 'text', 'parked_on': 'text'})} AS r"
        " JOIN {turn} t ON t.resource_key = r.resource_key AND t.parked_on IS NOT NULL AND t.parked_on <> r.parked_on"
        " GROUP BY t.parked_on",
        {"doc": json.dumps([{"resource_key": p.resource_key, "parked_on": p.parked_on} for p in parkings])},
    ).all()
    for key, count in rows:
        arm(c, d, key, min(p.recheck_at for p in parkings), skip=count)


def _armed(c: Connection, d: Dialect, times: Mapping[str, datetime], own: Sequence[str]) -> set[str]:
    """The resources on which a parked turn is rechecked by the time that ``times`` gives, or earlier.

    The turns of ``own`` keys do not count: they are about to be overwritten.
    """
    rows = d.run(
        c,
        f"SELECT r.parked_on FROM {d.records('doc', {'parked_on': 'text', 'recheck_at': 'timestamptz'})} AS r"
        " WHERE EXISTS (SELECT 1 FROM {turn} t WHERE t.parked_on = r.parked_on AND t.recheck_at <= r.recheck_at"
        f" AND t.resource_key NOT IN (SELECT value FROM {d.array('own', 'text')}))",
        {
            "doc": json.dumps([{"parked_on": k, "recheck_at": d.time(at)} for k, at in times.items()]),
            "own": d.pack_keys(own),
        },
    )
    return {r[0] for r in rows}


def _still_judged(c: Connection, d: Dialect, keys: Sequence[str], judged: Mapping[str, int]) -> frozenset[str]:
    """The resources whose revision is the one judged, share-locked until the commit.

    One that somebody else has locked may be changing, so it does not count: waiting for it, with other resources
    locked, could be a deadlock.
    """
    if not keys:
        return frozenset()
    rows = d.run(
        c,
        f"SELECT key, revision FROM {{resource}} WHERE key {d.among('keys', 'text')} ORDER BY key {{share_lock}}",
        {"keys": d.pack_keys(keys)},
    )
    return frozenset(key for key, revision in rows if judged.get(key) == revision)


def release(c: Connection, d: Dialect, parked_on: str, limit: int, now: datetime, *, oldest_first: bool = False) -> int:
    """Make up to ``limit`` turns parked on a resource ordinary ones, best first; returns how many.

    ``oldest_first``: for probes. One that fails parks anew, at the back, so the next is another key's: an account that
    fails by itself and comes first by priority would otherwise keep all others waiting.
    Call it in a statement after the one that wrote the resource row. If more are parked, the next is rechecked a
    second later, so that staging goes on releasing.
    """
    order = "id" if oldest_first else "priority DESC, id"
    best = d.chosen(
        f"SELECT id FROM {{turn}} WHERE parked_on = :parked_on ORDER BY {order} LIMIT :limit {{skip_locked}}"
    )
    rows = d.run(
        c,
        f"DELETE FROM {{turn}} WHERE id {best} RETURNING resource_key, priority",
        {"parked_on": parked_on, "limit": limit},
    ).all()
    insert(c, d, [(r[0], r[1]) for r in rows])
    if len(rows) == limit:
        arm(c, d, parked_on, now + RELEASE_STEP)
    return len(rows)


def arm(c: Connection, d: Dialect, parked_on: str, recheck_at: datetime, *, skip: int = 0) -> None:
    """Recheck a turn parked on a resource by ``recheck_at``; ``skip`` more, because so many are about to leave it."""
    first = d.chosen("SELECT id FROM {turn} WHERE parked_on = :parked_on ORDER BY id LIMIT :few {skip_locked}")
    d.later(
        c,
        f"UPDATE {{turn}} SET recheck_at = :recheck_at WHERE recheck_at > :recheck_at AND id {first}",
        {"parked_on": parked_on, "recheck_at": recheck_at, "few": 1 + skip},
    )


RECHECK_BATCH: Final = 500


def recheck_in(roll: float) -> timedelta:
    """How long a parked turn rests unless it is released: `RECHECK`, a quarter more or less, so that they spread."""
    return RECHECK * (0.75 + 0.5 * roll)


def due_parked(c: Connection, d: Dialect, now: datetime) -> dict[str, list[int]]:
    """Parked turns whose recheck is due, up to `RECHECK_BATCH`, locked: resource parked on to turn ids."""
    rows = d.run(
        c,
        "SELECT id, parked_on FROM {turn} WHERE parked_on IS NOT NULL AND recheck_at <= :now"
        " ORDER BY recheck_at LIMIT :limit {skip_locked}",
        {"now": now, "limit": RECHECK_BATCH},
    )
    ids_of: dict[str, list[int]] = {}
    for id_, parked_on in rows:
        ids_of.setdefault(parked_on, []).append(id_)
    return ids_of


def postpone(c: Connection, d: Dialect, ids: Sequence[int], recheck_at: datetime) -> None:
    """Look at these parked turns again later."""
    d.run(
        c,
        f"UPDATE {{turn}} SET recheck_at = :recheck_at WHERE id {d.among('ids', 'bigint')}",
        {"ids": d.pack_ints(ids), "recheck_at": recheck_at},
    )


def stranded(c: Connection, d: Dialect, limit: int = 1000) -> list[tuple[str, int]]:
    """Keys with a ready job and no turn at all: violations of the invariant (housekeeping repairs and counts them)."""
    # A loose index scan: one probe per distinct key with ready work, never one per ready job.
    rows = d.run(
        c,
        "WITH RECURSIVE keys(key) AS ("
        " SELECT min(resource_key) FROM {job} WHERE state = 'ready'"
        " UNION ALL SELECT (SELECT min(resource_key) FROM {job} WHERE state = 'ready' AND resource_key > keys.key)"
        " FROM keys WHERE keys.key IS NOT NULL)"
        " SELECT key, (SELECT max(priority) FROM {job} WHERE state = 'ready' AND resource_key = key) FROM keys"
        " WHERE key IS NOT NULL AND NOT EXISTS (SELECT 1 FROM {turn} WHERE resource_key = key AND parked_on IS NULL)"
        " AND NOT EXISTS (SELECT 1 FROM {turn} WHERE resource_key = key AND parked_on IS NOT NULL) LIMIT :limit",
        {"limit": limit},
    )
    return [(r[0], r[1]) for r in rows]


BATCH: Final = 500
_KEYS: Final = 200  # resources of one look
_WAITS: Final = "state = 'scheduled' AND waiting_for IS NOT NULL"


def due_for(c: Connection, d: Dialect, now: datetime) -> list[str]:
    """The resources that due jobs wait for, up to `_KEYS` of them."""
    rows = d.run(
        c,
        f"SELECT DISTINCT waiting_for FROM {{job}} WHERE {_WAITS} AND run_at <= :now ORDER BY waiting_for LIMIT :limit",
        {"now": now, "limit": _KEYS},
    )
    return [row[0] for row in rows]


def put_off(c: Connection, d: Dialect, key: str, now: datetime, until: datetime, *, spare: int) -> int:
    """Let due jobs that wait for ``key`` wait ``until`` then, but for the best ``spare``; returns how many."""
    others = d.chosen(
        f"SELECT id FROM {{job}} WHERE {_WAITS} AND waiting_for = :key AND run_at <= :now"
        " ORDER BY priority DESC, run_at, id LIMIT :limit OFFSET :spare {skip_locked}"
    )
    rows = d.run(
        c,
        f"UPDATE {{job}} SET run_at = :until, updated_at = :now WHERE id {others} RETURNING 1",
        {"key": key, "now": now, "until": until, "limit": BATCH, "spare": spare},
    ).all()
    return len(rows)


def hasten(c: Connection, d: Dialect, key: str, limit: int, now: datetime) -> int:
    """Make the best ``limit`` of the jobs that wait for ``key`` due, because its gate opened; returns how many.

    Call it in a statement after the one that wrote the resource row.
    """
    best = d.chosen(
        f"SELECT id FROM {{job}} WHERE {_WAITS} AND waiting_for = :key AND run_at > :now"
        " ORDER BY priority DESC, run_at, id LIMIT :limit {skip_locked}"
    )
    rows = d.run(
        c,
        f"UPDATE {{job}} SET run_at = :now, updated_at = :now WHERE id {best} RETURNING 1",
        {"key": key, "now": now, "limit": min(limit, BATCH)},
    ).all()
    return len(rows)
