"""Order: jobs of one resource with the same ordering key run one after the other, in the order of their commits.

The `resilient_order` row of an ordering key is locked last before a commit and until it, so its numbers are gapless and
in commit order. It names the head: the only job of the key that may be ready, scheduled or running. The others are
blocked, which no claim reads. When the head is over, `advance` makes the next blocked job the head.

- A head that fails keeps its place through all retries. Once it is dead, its policy decides: with ``block`` the
  others wait until somebody retries or discards it, with ``skip`` they go on. An expired head is always skipped.
- A job that is retried after its key has another head is put back: it is next (`put_back`). So is an event that is
  replayed, which is a job of its own with the number of the first one.
- Jobs are locked before `resilient_order` rows, and these in the order of their keys: a transaction that has one waits
  for no smaller one, and for no job but the one it is about to make the head.
"""

from __future__ import annotations

import json
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from resilient.store.db.dialect import ID
from resilient.store.jobs import ready

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    from sqlalchemy import Connection

    from resilient.store.db.dialect import Dialect

OrderingKey = tuple[str, str]  # resource key, ordering key
_KEY: Final = {"resource_key": "text", "ordering_key": "text"}
_SAME: Final = "{order}.resource_key = p.resource_key AND {order}.ordering_key = p.ordering_key"
_BY_INT: Final = attrgetter("int")  # comparing the ids themselves is Python code
STRANDED_LIMIT: Final = 500


class Newcomer(NamedTuple):
    """A job that is about to get its number."""

    id: UUID
    resource_key: str
    ordering_key: str


class Place(NamedTuple):
    """A job's number under its ordering key, and whether the job is the head at once."""

    order_no: int
    is_head: bool


def draw(c: Connection, d: Dialect, newcomers: Sequence[Newcomer]) -> dict[UUID, Place]:
    """Number new jobs, in the order given. Locks their ordering keys until the commit: call it last."""
    ordering_keys: dict[OrderingKey, list[UUID]] = {}
    for new in newcomers:
        ordering_keys.setdefault((new.resource_key, new.ordering_key), []).append(new.id)
    if not ordering_keys:
        return {}
    doc = [
        {"resource_key": key, "ordering_key": name, "n": len(ids), "head_id": d.id(ids[0])}
        for (key, name), ids in sorted(ordering_keys.items())
    ]
    host = d.host_now()
    rows = d.run(
        c,
        "INSERT INTO {order} (resource_key, ordering_key, last_no, head_id, seek_no, updated_at)"
        f" SELECT resource_key, ordering_key, n, head_id, 1, {d.now_sql}"
        f" FROM {d.records('doc', {**_KEY, 'n': 'bigint', 'head_id': 'uuid'})} AS p WHERE true"
        " ON CONFLICT (resource_key, ordering_key) DO UPDATE SET last_no = {order}.last_no + excluded.last_no,"
        " head_id = coalesce({order}.head_id, excluded.head_id), updated_at = excluded.updated_at"
        " RETURNING resource_key, ordering_key, last_no, head_id",
        {"doc": json.dumps(doc)} | ({} if host is None else {"now": host}),
        head_id=ID,
    ).all()
    places: dict[UUID, Place] = {}
    for key, name, last_no, head_id in rows:
        ids = ordering_keys[key, name]
        first = last_no - len(ids) + 1
        places.update((id_, Place(first + n, id_ == head_id)) for n, id_ in enumerate(ids))
    return places


def hold(c: Connection, d: Dialect, newcomers: Iterable[Newcomer], ended: Iterable[UUID]) -> None:
    """Lock the ordering keys of newcomers and of ended jobs, in their order.

    For a transaction that will draw numbers for the first and advance the keys of the second.
    """
    doc = [{"resource_key": key, "ordering_key": name} for key, name in sorted({(n[1], n[2]) for n in newcomers})]
    d.run(
        c,
        "INSERT INTO {order} (resource_key, ordering_key, last_no, seek_no, updated_at)"
        f" SELECT resource_key, ordering_key, 0, 1, {d.now_sql} FROM"
        f" (SELECT resource_key, ordering_key FROM {d.records('doc', _KEY)} AS p UNION"
        " SELECT resource_key, ordering_key FROM {job} WHERE ordering_key IS NOT NULL"
        f" AND id {d.among('ids', 'uuid')}) AS keys WHERE true ORDER BY resource_key, ordering_key"
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
    ready.unblock(c, d, {i: 1 for i, place in places.items() if place.is_head}, now)


# -- the head ----------------------------------------------------------------------------------------------------------

# A dead head for which the others wait.
HOLDS: Final = "(j.state = 'dead' AND j.ordering_policy = 'block' AND coalesce(j.last_error_kind, '') <> 'expired')"


def advance(c: Connection, d: Dialect, ids: Iterable[UUID], now: datetime, *, gone: bool = False) -> None:
    """Give ordering keys whose head is among these finished jobs the next one, unless `HOLDS` is true of it.

    ``gone``: the jobs are about to be deleted, so `HOLDS` counts for nothing.
    """
    _advance(c, d, ids, "j.id = o.head_id AND j.finished_at IS NOT NULL" + ("" if gone else f" AND NOT {HOLDS}"), now)


def put_back(c: Connection, d: Dialect, numbers: Mapping[UUID, tuple[OrderingKey, int]], now: datetime) -> None:
    """Make blocked jobs that were a head before, or stand for one that was, the next heads."""
    lowest: dict[OrderingKey, int] = {}
    for key, order_no in numbers.values():
        lowest[key] = min(order_no, lowest.get(key, order_no))
    doc = [{"resource_key": key, "ordering_key": name, "n": n} for (key, name), n in sorted(lowest.items())]
    d.run(
        c,
        "INSERT INTO {order} (resource_key, ordering_key, last_no, seek_no, updated_at)"
        f" SELECT resource_key, ordering_key, n, n, :now FROM {d.records('doc', {**_KEY, 'n': 'bigint'})} AS p"
        " WHERE true ON CONFLICT (resource_key, ordering_key) DO UPDATE SET"  # the row may have been pruned
        " seek_no = CASE WHEN excluded.seek_no < {order}.seek_no THEN excluded.seek_no ELSE {order}.seek_no END,"
        " last_no = CASE WHEN excluded.last_no > {order}.last_no THEN excluded.last_no ELSE {order}.last_no END",
        {"doc": json.dumps(doc), "now": now},
    )
    _advance(c, d, numbers, "(j.id = o.head_id OR o.head_id IS NULL)", now)


def _advance(c: Connection, d: Dialect, ids: Iterable[UUID], over: str, now: datetime) -> None:
    """Lock the ordering keys of jobs for which the condition ``over`` holds, in order, and give them the next head."""
    rows = d.run(
        c,
        "SELECT o.resource_key, o.ordering_key, o.seek_no FROM {job} j JOIN {order} o"
        " ON o.resource_key = j.resource_key AND o.ordering_key = j.ordering_key"
        f" WHERE j.id {d.among('ids', 'uuid')} AND {over} ORDER BY o.resource_key, o.ordering_key {{row_lock_o}}",
        {"ids": d.pack_ids(sorted(ids, key=_BY_INT))},
    ).all()
    _promote(c, d, {(r[0], r[1]): r[2] for r in rows}, now)


def _promote(c: Connection, d: Dialect, ordering_keys: Mapping[OrderingKey, int], now: datetime) -> None:
    """Give locked ordering keys (with their `seek_no`) the next head, or none.

    Each statement reads anew, so it reads what was committed while the lock was waited for. If a follower is cancelled
    between the read and the write, another round passes over it.
    """
    heads: dict[OrderingKey, tuple[UUID | None, int]] = {}
    headless = dict(ordering_keys)
    while headless:
        candidates = _next(c, d, headless)
        moved = ready.unblock(c, d, dict.fromkeys((id_ for id_, _ in candidates.values()), 1), now)
        heads |= {key: (None, 0) for key in headless if key not in candidates}
        heads |= {key: head for key, head in candidates.items() if head[0] in moved}
        headless = {key: seek for key, seek in headless.items() if key not in heads}
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
        f" FROM {d.records('doc', {**_KEY, 'head_id': 'uuid', 'n': 'bigint'})} AS p WHERE {_SAME}",
        {"doc": json.dumps(doc), "now": now},
    )


def _next(c: Connection, d: Dialect, ordering_keys: Mapping[OrderingKey, int]) -> dict[OrderingKey, tuple[UUID, int]]:
    """The blocked job with the smallest number of each ordering key, looked for from its `seek_no` on."""
    doc = [{"resource_key": key, "ordering_key": name, "n": n} for (key, name), n in sorted(ordering_keys.items())]
    first = (
        "SELECT j.id, j.order_no FROM {job} j WHERE j.state = 'blocked' AND j.resource_key = p.resource_key"
        " AND j.ordering_key = p.ordering_key AND j.order_no >= p.n ORDER BY j.order_no LIMIT 1"
    )
    source = f"{d.records('doc', {**_KEY, 'n': 'bigint'})} AS p"
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
    """Advance ordering keys with blocked jobs and no head, or one that is over; returns how many: 0 but for a bug.

    A loose index scan: one probe for each ordering key with blocked jobs, never one for each of them.
    """
    step = (
        "SELECT j.resource_key AS key, j.ordering_key AS name FROM {job} j WHERE j.state = 'blocked'"
        " AND j.ordering_key IS NOT NULL AND (j.resource_key, j.ordering_key) > (%s)"
        " ORDER BY j.resource_key, j.ordering_key LIMIT 1"
    )
    key, name = (f"(SELECT s.{column} FROM ({step % 'keys.key, keys.name'}) s)" for column in ("key", "name"))
    start = "'', ''"
    rows = d.run(
        c,
        "WITH RECURSIVE keys(key, name) AS ("
        f" SELECT key, name FROM ({step % start}) AS first_one UNION ALL"
        f" SELECT {key}, {name} FROM keys WHERE keys.key IS NOT NULL)"
        " SELECT o.resource_key, o.ordering_key FROM keys JOIN {order} o"
        " ON o.resource_key = keys.key AND o.ordering_key = keys.name LEFT JOIN {job} j ON j.id = o.head_id"
        f" WHERE j.id IS NULL OR (j.finished_at IS NOT NULL AND NOT {HOLDS}) LIMIT {STRANDED_LIMIT}",
    ).all()
    stranded: dict[OrderingKey, int] = {}
    for key, name in sorted((r[0], r[1]) for r in rows):
        names = {"key": key, "name": name}
        this = "resource_key = :key AND ordering_key = :name"
        d.run(c, f"SELECT seek_no FROM {{order}} WHERE {this} {{row_lock}}", names).all()
        row: Any = d.run(  # once more, under the lock: somebody may have advanced it meanwhile
            c,
            f"SELECT 1 FROM (SELECT head_id FROM {{order}} WHERE {this}) o LEFT JOIN {{job}} j ON j.id = o.head_id"
            f" WHERE j.id IS NULL OR (j.finished_at IS NOT NULL AND NOT {HOLDS})",
            names,
        ).first()
        if row is not None:
            stranded[key, name] = 1  # from the beginning: no number can be trusted
    _promote(c, d, stranded, now)
    return len(stranded)


PRUNE_LIMIT: Final = 20_000


def prune(c: Connection, d: Dialect, before: datetime, limit: int = PRUNE_LIMIT) -> int:
    """Forget ordering keys that are empty since before a time; if one is used again, its numbers begin with 1.

    Ordering keys of events stay: consumers noted their numbers, and would take a second 1 for an old event.
    """
    idle = "head_id IS NULL AND updated_at < :before AND resource_key NOT LIKE 'outbox/%' LIMIT :limit"
    gone = d.run(
        c, f"DELETE FROM {{order}} WHERE {d.chosen_rows('{order}', idle)}", {"before": before, "limit": limit}
    ).rowcount
    return int(gone)
