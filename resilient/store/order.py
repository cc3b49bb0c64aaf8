"""Order: jobs of one resource and ordering key (a lane) run one after the other, in the order of their commits.

The lane's `resilient_order` row is taken last before a commit and held until it, so its numbers are gapless and in
commit order. It names the job whose turn it is, the head: the only one that may be ready, scheduled or running. The
others are blocked, out of every claim's sight. When the head is over, `advance` makes the next blocked job the head.

- A head that fails keeps its place through all retries. Once it is dead, its policy says: ``block`` (the lane waits
  until somebody retries or discards it) or ``skip``. An expired one is skipped: that is what an expiry is for.
- A job that is retried after its lane went on is put back: it is next (`put_back`). So is an event that is replayed,
  which is a job of its own with the number of the first one.
- Jobs are written before lanes, lanes in the order of their keys: whoever holds a lane waits for no other lane of a
  smaller key, and for no job but the one it is about to make the head.
"""

from __future__ import annotations

import json
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from resilient.store import jobs
from resilient.store.dialect import ID

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    from sqlalchemy import Connection

    from resilient.store.dialect import Dialect

Lane = tuple[str, str]  # resource key, ordering key
_LANE: Final = {"resource_key": "text", "ordering_key": "text"}
_SAME: Final = "{order}.resource_key = p.resource_key AND {order}.ordering_key = p.ordering_key"
_BY_INT: Final = attrgetter("int")  # comparing the ids themselves is Python code
STRANDED_LIMIT: Final = 500


class Newcomer(NamedTuple):
    """A job that is about to get its number."""

    id: UUID
    resource_key: str
    ordering_key: str


class Place(NamedTuple):
    """Its number in its lane, and whether it is its turn at once."""

    order_no: int
    is_head: bool


def draw(c: Connection, d: Dialect, newcomers: Sequence[Newcomer]) -> dict[UUID, Place]:
    """Number new jobs, in the order given. Holds their lanes until the commit: call it last."""
    lanes: dict[Lane, list[UUID]] = {}
    for new in newcomers:
        lanes.setdefault((new.resource_key, new.ordering_key), []).append(new.id)
    if not lanes:
        return {}
    doc = [
        {"resource_key": key, "ordering_key": name, "n": len(ids), "head_id": d.id(ids[0])}
        for (key, name), ids in sorted(lanes.items())
    ]
    host = d.host_now()
    rows = d.run(
        c,
        "INSERT INTO {order} (resource_key, ordering_key, last_no, head_id, seek_no, updated_at)"
        f" SELECT resource_key, ordering_key, n, head_id, 1, {d.now_sql}"
        f" FROM {d.records('doc', {**_LANE, 'n': 'bigint', 'head_id': 'uuid'})} AS p WHERE true"
        " ON CONFLICT (resource_key, ordering_key) DO UPDATE SET last_no = {order}.last_no + excluded.last_no,"
        " head_id = coalesce({order}.head_id, excluded.head_id), updated_at = excluded.updated_at"
        " RETURNING resource_key, ordering_key, last_no, head_id",
        {"doc": json.dumps(doc)} | ({} if host is None else {"now": host}),
        head_id=ID,
    ).all()
    places: dict[UUID, Place] = {}
    for key, name, last_no, head_id in rows:
        ids = lanes[key, name]
        first = last_no - len(ids) + 1
        places.update((id_, Place(first + n, id_ == head_id)) for n, id_ in enumerate(ids))
    return places


def hold(c: Connection, d: Dialect, newcomers: Iterable[Newcomer], ended: Iterable[UUID]) -> None:
    """Lock the lanes in which these jobs get a number, and those in which these have one, in the order of their keys.

    Before a transaction draws numbers in the first and lets the second go on.
    """
    doc = [{"resource_key": key, "ordering_key": name} for key, name in sorted({(n[1], n[2]) for n in newcomers})]
    d.run(
        c,
        "INSERT INTO {order} (resource_key, ordering_key, last_no, seek_no, updated_at)"
        f" SELECT resource_key, ordering_key, 0, 1, {d.now_sql} FROM"
        f" (SELECT resource_key, ordering_key FROM {d.records('doc', _LANE)} AS p UNION"
        " SELECT resource_key, ordering_key FROM {job} WHERE ordering_key IS NOT NULL"
        f" AND id {d.among('ids', 'uuid')}) AS lanes WHERE true ORDER BY resource_key, ordering_key"
        " ON CONFLICT (resource_key, ordering_key) DO UPDATE SET seek_no = {order}.seek_no",
        {"doc": json.dumps(doc), "ids": d.pack_ids(sorted(ended, key=_BY_INT))}
        | ({} if d.host_now() is None else {"now": d.host_now()}),
    )


def settle(c: Connection, d: Dialect, places: Mapping[UUID, Place], now: datetime) -> None:
    """Write the places of jobs that were inserted, blocked, before they could be numbered."""
    if not places:
        return
    doc = json.dumps([{"id": d.id(i), "n": place.order_no} for i, place in sorted(places.items())])
    d.run(
        c,
        f"UPDATE {{job}} SET order_no = p.n FROM {d.records('doc', {'id': 'uuid', 'n': 'bigint'})} AS p"
        " WHERE {job}.id = p.id",
        {"doc": doc},
    )
    jobs.unblock(c, d, {i: 1 for i, place in places.items() if place.is_head}, now)


# -- whose turn it is --------------------------------------------------------------------------------------------------

# A dead job that keeps its lane waiting.
HOLDS: Final = "(j.state = 'dead' AND j.ordering_policy = 'block' AND coalesce(j.last_error_kind, '') <> 'expired')"


def advance(c: Connection, d: Dialect, ids: Iterable[UUID], now: datetime, *, gone: bool = False) -> None:
    """Lanes whose head is among these finished jobs go on, unless it is dead and holds its lane.

    ``gone``: they are about to be deleted, so a dead one holds nothing.
    """
    _advance(c, d, ids, "j.id = o.head_id AND j.finished_at IS NOT NULL" + ("" if gone else f" AND NOT {HOLDS}"), now)


def put_back(c: Connection, d: Dialect, numbers: Mapping[UUID, tuple[Lane, int]], now: datetime) -> None:
    """Jobs that had their turn, or stand for one that had it, and are blocked by now: they are next in their lanes."""
    lowest: dict[Lane, int] = {}
    for lane, order_no in numbers.values():
        lowest[lane] = min(order_no, lowest.get(lane, order_no))
    doc = [{"resource_key": key, "ordering_key": name, "n": n} for (key, name), n in sorted(lowest.items())]
    d.run(
        c,
        "INSERT INTO {order} (resource_key, ordering_key, last_no, seek_no, updated_at)"
        f" SELECT resource_key, ordering_key, n, n, :now FROM {d.records('doc', {**_LANE, 'n': 'bigint'})} AS p"
        " WHERE true ON CONFLICT (resource_key, ordering_key) DO UPDATE SET"  # there: the lane may have been pruned
        " seek_no = CASE WHEN excluded.seek_no < {order}.seek_no THEN excluded.seek_no ELSE {order}.seek_no END,"
        " last_no = CASE WHEN excluded.last_no > {order}.last_no THEN excluded.last_no ELSE {order}.last_no END",
        {"doc": json.dumps(doc), "now": now},
    )
    _advance(c, d, numbers, "(j.id = o.head_id OR o.head_id IS NULL)", now)


def _advance(c: Connection, d: Dialect, ids: Iterable[UUID], over: str, now: datetime) -> None:
    """Lock the lanes of jobs for which ``over`` says that the head is over, in order, and give them the next head."""
    rows = d.run(
        c,
        "SELECT o.resource_key, o.ordering_key, o.seek_no FROM {job} j JOIN {order} o"
        " ON o.resource_key = j.resource_key AND o.ordering_key = j.ordering_key"
        f" WHERE j.id {d.among('ids', 'uuid')} AND {over} ORDER BY o.resource_key, o.ordering_key {{row_lock_o}}",
        {"ids": d.pack_ids(sorted(ids, key=_BY_INT))},
    ).all()
    _promote(c, d, {(r[0], r[1]): r[2] for r in rows}, now)


def _promote(c: Connection, d: Dialect, lanes: Mapping[Lane, int], now: datetime) -> None:
    """Give locked lanes (with their `seek_no`) the next head, or none.

    What the lock was waited for is seen, because each statement looks anew. A follower that was cancelled between the
    look and the write is passed over by another round.
    """
    heads: dict[Lane, tuple[UUID | None, int]] = {}
    left = dict(lanes)
    while left:
        found = _next(c, d, left)
        moved = jobs.unblock(c, d, dict.fromkeys((id_ for id_, _ in found.values()), 1), now)
        heads |= {lane: (None, 0) for lane in left if lane not in found}
        heads |= {lane: head for lane, head in found.items() if head[0] in moved}
        left = {lane: seek for lane, seek in left.items() if lane not in heads}
    if not heads:
        return
    doc = [
        {"resource_key": key, "ordering_key": name, "head_id": None if id_ is None else d.id(id_), "n": n}
        for (key, name), (id_, n) in sorted(heads.items())
    ]
    d.run(
        c,
        "UPDATE {order} SET head_id = p.head_id, updated_at = :now,"
        # Not beyond the head's own number: several jobs may have it, an event and its replays.
        " seek_no = CASE WHEN p.head_id IS NULL THEN {order}.last_no + 1 ELSE p.n END"
        f" FROM {d.records('doc', {**_LANE, 'head_id': 'uuid', 'n': 'bigint'})} AS p WHERE {_SAME}",
        {"doc": json.dumps(doc), "now": now},
    )


def _next(c: Connection, d: Dialect, lanes: Mapping[Lane, int]) -> dict[Lane, tuple[UUID, int]]:
    """The blocked job with the smallest number of each lane, looked for from its `seek_no` on."""
    doc = [{"resource_key": key, "ordering_key": name, "n": n} for (key, name), n in sorted(lanes.items())]
    first = (
        "SELECT j.id, j.order_no FROM {job} j WHERE j.state = 'blocked' AND j.resource_key = p.resource_key"
        " AND j.ordering_key = p.ordering_key AND j.order_no >= p.n ORDER BY j.order_no LIMIT 1"
    )
    source = f"{d.records('doc', {**_LANE, 'n': 'bigint'})} AS p"
    rows = d.run(
        c,
        f"SELECT p.resource_key, p.ordering_key, f.id, f.order_no FROM {source} CROSS JOIN LATERAL ({first}) f"
        if d.is_postgresql
        else "SELECT f.resource_key, f.ordering_key, f.id, f.order_no FROM {job} f WHERE f.id IN"
        f" (SELECT ({first.replace('j.id, j.order_no', 'j.id')}) FROM {source})",
        {"doc": json.dumps(doc)},
        resource_key=None,
        ordering_key=None,
        id=ID,
    ).all()
    return {(key, name): (id_, n) for key, name, id_, n in rows}


def repair(c: Connection, d: Dialect, now: datetime) -> int:
    """Lanes with blocked jobs whose head is over, or nobody, go on; returns how many. A bug if there are any.

    A loose index scan: one probe for each lane with blocked jobs, never one for each of them.
    """
    step = (
        "SELECT j.resource_key AS key, j.ordering_key AS name FROM {job} j WHERE j.state = 'blocked'"
        " AND j.ordering_key IS NOT NULL AND (j.resource_key, j.ordering_key) > (%s)"
        " ORDER BY j.resource_key, j.ordering_key LIMIT 1"
    )
    key, name = (f"(SELECT s.{column} FROM ({step % 'lanes.key, lanes.name'}) s)" for column in ("key", "name"))
    start = "'', ''"
    lost = d.run(
        c,
        "WITH RECURSIVE lanes(key, name) AS ("
        f" SELECT key, name FROM ({step % start}) AS first_one UNION ALL"
        f" SELECT {key}, {name} FROM lanes WHERE lanes.key IS NOT NULL)"
        " SELECT o.resource_key, o.ordering_key FROM lanes JOIN {order} o"
        " ON o.resource_key = lanes.key AND o.ordering_key = lanes.name LEFT JOIN {job} j ON j.id = o.head_id"
        f" WHERE j.id IS NULL OR (j.finished_at IS NOT NULL AND NOT {HOLDS}) LIMIT {STRANDED_LIMIT}",
    ).all()
    found: dict[Lane, int] = {}
    for key, name in sorted((r[0], r[1]) for r in lost):
        lane = {"key": key, "name": name}
        this = "resource_key = :key AND ordering_key = :name"
        d.run(c, f"SELECT seek_no FROM {{order}} WHERE {this} {{row_lock}}", lane).all()
        row: Any = d.run(  # once more, now that it stays so: somebody may have let it go on meanwhile
            c,
            f"SELECT 1 FROM (SELECT head_id FROM {{order}} WHERE {this}) o LEFT JOIN {{job}} j ON j.id = o.head_id"
            f" WHERE j.id IS NULL OR (j.finished_at IS NOT NULL AND NOT {HOLDS})",
            lane,
        ).first()
        if row is not None:
            found[key, name] = 1  # from the beginning: who knows what is wrong
    _promote(c, d, found, now)
    return len(found)


PRUNE_LIMIT: Final = 20_000


def prune(c: Connection, d: Dialect, before: datetime, limit: int = PRUNE_LIMIT) -> int:
    """Forget lanes that are empty since before a time; if one is used again, its numbers begin with 1.

    Lanes of events stay: consumers have seen their numbers, and would take a second 1 for an old event.
    """
    gone = d.run(
        c,
        "DELETE FROM {order} WHERE (resource_key, ordering_key) IN (SELECT resource_key, ordering_key FROM {order}"
        " WHERE head_id IS NULL AND updated_at < :before AND resource_key NOT LIKE 'outbox/%'"
        " LIMIT :limit {leaf_lock})",
        {"before": before, "limit": limit},
    ).rowcount
    return int(gone)
