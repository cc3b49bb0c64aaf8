"""Writing jobs that were checked and encoded: plain ones, unique ones, those in lanes, and what they wait for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from resilient.core import marks
from resilient.core.errors import DuplicateJob
from resilient.engine.enqueue import Enqueued, Ordered
from resilient.store import append, dependencies, followers, jobs, order
from resilient.store.direct import direct
from resilient.store.schema import missing_tables_explained

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from uuid import UUID

    from sqlalchemy import Connection, Row

    from resilient.store.dialect import Dialect

BATCH: Final = 10_000


@direct
def write(
    c: Connection, d: Dialect, ordered: Sequence[Ordered], *, last: bool = True, ended: Collection[UUID] = ()
) -> list[Enqueued]:
    """Insert what was ordered, in this transaction: plain jobs, then unique ones, then what takes a place in a lane.

    ``last``: the commit follows, so a look at what jobs wait for keeps nobody waiting; else staging does it.
    ``ended``: jobs whose lanes go on in this transaction too. Raises `SchemaOutdated` where there are no tables.
    """
    with missing_tables_explained(c):
        return _write(c, d, ordered, last=last, ended=ended)


def _write(
    c: Connection, d: Dialect, ordered: Sequence[Ordered], *, last: bool, ended: Collection[UUID]
) -> list[Enqueued]:
    if len(ordered) == 1 and not ordered[0].after and not ended and append.fits(d, row := ordered[0].row):
        append.append(c, d, row)
        return [Enqueued(row.id)]  # an event of its own: a business transaction waits for it
    plain = [o.row for o in ordered if o.row.unique_key is None and o.row.ordering_key is None]
    if plain:
        jobs.insert(c, d, plain)
    if len(plain) == len(ordered) and not any(o.after for o in ordered):
        return [Enqueued(row.id) for row in plain]
    found = {o.row.id: Enqueued(o.row.id) for o in ordered}
    for o in sorted((o for o in ordered if o.row.unique_key is not None), key=_unique_order):
        found[o.row.id] = _write_unique(c, d, o)
    in_lanes = [o.row for o in ordered if o.row.ordering_key is not None and found[o.row.id].created]
    if in_lanes:
        _write_in_lanes(c, d, in_lanes, ended)
    if waiting := [o for o in ordered if o.after and found[o.row.id].created]:
        _write_edges(c, d, waiting, found, last=last)
    return [found[o.row.id] for o in ordered]


@direct
def write_many(c: Connection, d: Dialect, ordered: Sequence[Ordered]) -> list[Enqueued]:
    """`write`, in statements of a bounded size."""
    done: list[Enqueued] = []
    for start in range(0, len(ordered), BATCH):
        done += write(c, d, ordered[start : start + BATCH])
    return done


@direct
def write_back(c: Connection, d: Dialect, rows: Sequence[jobs.NewJob]) -> None:
    """Insert jobs that have their numbers already: they are next in their lanes."""
    if rows:
        jobs.insert(c, d, [row._replace(waits=1) for row in rows])
        order.put_back(c, d, {r.id: ((r.resource_key, r.ordering_key or ""), r.order_no or 0) for r in rows}, d.now(c))


def is_one_statement(o: Ordered) -> bool:
    """Whether `write` of this job alone is one statement (PostgreSQL)."""
    return not o.waits_for_commit


def _write_edges(
    c: Connection, d: Dialect, waiting: Sequence[Ordered], found: Mapping[UUID, Enqueued], *, last: bool
) -> None:
    """What they wait for; a blocker whose unique key another job holds is that other one."""
    edges, fewer = set(), {}
    for o in waiting:
        blockers = {found[i].id if i in found else i for i in o.after}
        edges |= {dependencies.Edge(o.row.id, i, o.on_dead) for i in blockers}
        if len(blockers) < len(o.after):
            fewer[o.row.id] = len(o.after) - len(blockers)
    dependencies.insert(c, d, edges)
    now = d.now(c)
    jobs.unblock(c, d, fewer, now)
    if last:
        followers.resolve_dependencies(c, d, now, [o.row.id for o in waiting])


def _write_in_lanes(c: Connection, d: Dialect, rows: Sequence[jobs.NewJob], ended: Collection[UUID]) -> None:
    """Number jobs with an ordering key and insert them; those with a unique key stand there already, blocked."""
    newcomers = [order.Newcomer(r.id, r.resource_key, r.ordering_key or "") for r in rows]
    if ended:
        order.hold(c, d, newcomers, ended)
    if len(rows) == 1 and append.fits(d, rows[0]):
        append.append(c, d, rows[0])
        return
    places = order.draw(c, d, newcomers)
    new = [
        r._replace(order_no=places[r.id].order_no, waits=r.waits + (not places[r.id].is_head))
        for r in rows
        if r.unique_key is None
    ]
    if new:
        jobs.insert(c, d, new)
    if len(new) < len(rows):
        order.settle(c, d, {r.id: places[r.id] for r in rows if r.unique_key is not None}, d.now(c))


def _unique_order(o: Ordered) -> tuple[str, str]:
    return o.row.kind, o.row.unique_key or ""


def _write_unique(c: Connection, d: Dialect, o: Ordered) -> Enqueued:
    """Insert, or deal with whoever holds the key. Never select-then-insert: the unique index decides."""
    row = o.row
    if row.unique_key is None:
        raise ValueError("a job without a unique key")
    new = row if row.ordering_key is None else row._replace(waits=row.waits + 1)
    for _ in range(5):
        if jobs.insert_unique(c, d, [new]):
            return Enqueued(row.id)
        held = jobs.holder(c, d, row.kind, row.unique_key)
        if held is None:  # it ended between the two statements
            continue
        if o.on_conflict == "raise":
            raise DuplicateJob(f"job {held.id} ({row.kind}, {held.state}) already holds unique_key {row.unique_key!r}")
        if _told_the_holder(c, d, o, held):
            return Enqueued(held.id, created=False)
    raise DuplicateJob(f"unique_key {row.unique_key!r} of {row.kind!r} is taken and freed faster than it can be read")


def _told_the_holder(c: Connection, d: Dialect, o: Ordered, held: Row[Any]) -> bool:
    """Tell the job that holds the key what was ordered; False if it moved on meanwhile."""
    row, now = o.row, d.now(c)
    if held.state == "running":
        return o.while_running != "once_more" or jobs.mark_once_more(c, d, held.id, now)
    if o.on_conflict != "replace":
        return True
    if marks.unkeyed(held.sent):
        raise DuplicateJob(
            f"job {held.id} ({row.kind}, {held.state}) holds unique_key {row.unique_key!r} and waits to look up a"
            " request that may have been received: it cannot be replaced before that"
        )
    return jobs.replace_if_waiting(c, d, held, row, now)
