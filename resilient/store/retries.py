"""Retry and replay: finished jobs start over, at once or spread over time.

Rules: a job whose last request may have been received stays, unless the caller says ``repeat_ambiguous``; a
job whose unique key another job holds by now stays; the spread ones become scheduled, so that a replay of
thousands is no herd.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from resilient.core import marks
from resilient.core.events import RESOURCE
from resilient.core.states import TERMINAL, JobState
from resilient.store import jobs, order, workflows
from resilient.store.changes import Sorted, next_key, write_all
from resilient.store.filters import JOB

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime, timedelta
    from uuid import UUID

    from sqlalchemy import Connection, Row

    from resilient.store.dialect import Dialect


@dataclass(slots=True)
class Retry:
    """Finished jobs start over with a fresh budget: at once, or one every ``spacing``.

    ``repeat_ambiguous``: also those whose last request may have taken effect. ``new_operation``: under a new
    idempotency key, so that the provider does it again. A job whose unique key is held by another one stays.
    """

    repeat_ambiguous: bool = False
    new_operation: bool = False
    spacing: timedelta | None = None
    verb: str = "retried"
    usual: frozenset[JobState] = frozenset({JobState.DEAD})
    allowed: frozenset[JobState] = TERMINAL
    _started: datetime | None = None
    _done: int = 0

    def sort(self, job: Row[Any]) -> str:
        """By whether it is over, and whether repeating it is safe."""
        if job.state not in TERMINAL:
            return "not_finished"
        unknown = marks.unkeyed(job.sent) or job.last_error_kind == "ambiguous"
        if unknown and job.state != JobState.SUCCEEDED and not self.repeat_ambiguous:
            return "ambiguous"
        return "retried"

    def write(self, c: Connection, d: Dialect, found: Sorted, now: datetime) -> Counter[str]:
        """Take the unique keys back, then reset."""
        rows = found.get("retried", ())
        lost = {row.id for row in rows if row.unique_key is not None and not _relock(c, d, row.id)}
        over = _turned_around(c, d, rows)  # of other jobs: steps have no unique key
        rows = [row for row in rows if row.id not in lost | over]
        fresh: dict[str, Any] = {"idempotency_key": next_key()} if self.new_operation else {}
        if self.repeat_ambiguous or self.new_operation:  # else keys go on being counted from their first sending
            fresh["sent"] = None
        kept = sa.case((JOB.c.expires_at > now, JOB.c.expires_at))  # a passed expiry would end it again at once
        write_all(c, d, rows, waiting_for=None, progress=None, result=None, expires_at=kept, **fresh)
        write_all(c, d, [row for row in rows if _was_published(row)], idempotency_key=next_key())
        first, later = self._spread(rows, now)
        starts = {row.id: now for row in first} | {row.id: at for row, at in later}
        _put_back(c, d, [(row, starts[row.id]) for row in rows if row.ordering_key is not None], now)
        free = {row.id: row.version for row in first if row.ordering_key is None}
        jobs.make_ready_if_version(c, d, free, now, reset=True)
        _schedule(c, d, [(row, at) for row, at in later if row.ordering_key is None], now)
        if followed := [row.id for row in rows if row.followed]:
            workflows.ask(c, d, followed, now)  # one that was stuck over a dead undo is not any more
        left = Counter({"duplicates": len(lost), "undone": len(over)})
        return Counter({"retried": -left.total(), **+left}) if left.total() else Counter()

    def _spread(
        self, rows: Sequence[Row[Any]], now: datetime
    ) -> tuple[Sequence[Row[Any]], list[tuple[Row[Any], datetime]]]:
        """Who starts now, and who when."""
        if self.spacing is None:
            return rows, []
        self._started = self._started or now
        due = [(row, self._started + self.spacing * (self._done + n)) for n, row in enumerate(rows)]
        self._done += len(rows)
        return [row for row, at in due if at <= now], [(row, at) for row, at in due if at > now]


def _was_published(row: Row[Any]) -> bool:
    """An event that its destination has: under the key it had, a broker that drops what it knows would drop it."""
    return bool(row.state == JobState.SUCCEEDED and row.resource_key.startswith(f"{RESOURCE}/"))


def _turned_around(c: Connection, d: Dialect, rows: Sequence[Row[Any]]) -> set[UUID]:
    """Steps that nobody may retry any more. Locks workflows, and before that the lanes that `_put_back` needs."""
    steps = [row.id for row in rows if row.followed]
    if steps and (in_lanes := [row.id for row in rows if row.ordering_key is not None]):
        order.hold(c, d, (), in_lanes)
    return workflows.turned_around(c, d, steps) if steps else set()


def _relock(c: Connection, d: Dialect, id_: UUID) -> bool:
    """Hold the job's unique key again; False if another job holds it."""
    other = JOB.alias()
    taken = sa.exists().where(other.c.kind == JOB.c.kind, other.c.unique_lock == JOB.c.unique_key)
    lock = sa.update(JOB).where(JOB.c.id == id_, ~taken).values(unique_lock=JOB.c.unique_key).returning(JOB.c.id)
    if not d.is_postgresql:  # one writer: nobody comes between the look and the write
        return d.execute(c, lock).first() is not None
    try:
        with c.begin_nested():
            return d.execute(c, lock).first() is not None
    except IntegrityError:  # somebody enqueued the same key meanwhile
        return False


def _put_back(c: Connection, d: Dialect, rows: Sequence[tuple[Row[Any], datetime]], now: datetime) -> None:
    """Those with an ordering key wait for their turn, which is now if nobody has it."""
    if not rows:
        return
    _schedule(c, d, rows, now, state="blocked", waits=1)
    numbers = {row.id: ((row.resource_key, row.ordering_key), row.order_no) for row, _ in rows}
    order.put_back(c, d, numbers, now)


def _schedule(
    c: Connection,
    d: Dialect,
    later: Sequence[tuple[Row[Any], datetime]],
    now: datetime,
    *,
    state: str = "scheduled",
    waits: int = 0,
) -> None:
    if not later:
        return
    doc = json.dumps([{"id": d.id(row.id), "version": row.version, "run_at": d.time(at)} for row, at in later])
    d.run(
        c,
        f"UPDATE {{job}} SET state = '{state}', waits = {waits}, run_at = p.run_at, attempts = 0, rescues = 0,"
        " finished_at = NULL, cancel_requested = false, version = {job}.version + 1,"
        " updated_at = :now"
        f" FROM {d.records('doc', {'id': 'uuid', 'version': 'int', 'run_at': 'timestamptz'})} AS p"
        " WHERE {job}.id = p.id AND {job}.version = p.version",
        {"doc": doc, "now": now},
    )
