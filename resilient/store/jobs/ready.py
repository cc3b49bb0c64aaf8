"""The one way into `ready`: every INSERT and COPY of jobs, and every UPDATE that may leave one ready.

A key with a ready job has a turn, a parked turn, or a claim in progress. So whatever may make a job ready inserts the
turn in the same transaction, where it can in the same statement. `tests/store/test_ready.py` finds what goes another
way.

An UPDATE names the version it was decided on (the fence) and raises it; jobs that no longer match are not written and
are missing from the ids it returns.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from resilient.store.db import direct
from resilient.store.db.dialect import ID, TIME
from resilient.store.gates import turns

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    from sqlalchemy import Connection

    from resilient.store.db.dialect import Dialect


STAGE_LIMIT: Final = 500


class ChangedJob(NamedTuple):
    """A job as an UPDATE left it."""

    id: UUID
    state: str
    resource_key: str
    priority: int
    followed: bool
    ordering_key: str | None  # no IS NOT NULL in SQL: SQLite 3.40 finds it true of every column in RETURNING


_CHANGED: Final = " RETURNING " + ", ".join(f"{{job}}.{name}" for name in ChangedJob._fields)
_NEW: Final = " RETURNING id, resource_key, priority, state"
_TURNS: Final = (
    "INSERT INTO {turn} (resource_key, priority)"
    " SELECT resource_key, max(priority) FROM new WHERE state = 'ready' GROUP BY resource_key"
)


def update(c: Connection, d: Dialect, sets: str, where: str, params: Mapping[str, Any]) -> list[ChangedJob]:
    """UPDATE jobs SET ``sets``, [FROM ...] WHERE ``where``, and give the keys of ready ones turns."""
    rows = d.run(c, f"UPDATE {{job}} SET {sets}{where}{_CHANGED}", params, id=ID)
    changed = [ChangedJob._make(row) for row in rows.all()]
    turns.insert(c, d, best_of((job.resource_key, job.priority) for job in changed if job.state == "ready"))
    return changed


def insert(
    c: Connection, d: Dialect, what: str, params: Mapping[str, Any], *, first: str = "", ids: bool = True
) -> set[UUID]:
    """INSERT INTO jobs ``what``, "(columns) SELECT ..." or VALUES, and give the keys of ready ones turns.

    ``first``: what stands in front of it in the WITH of its statement (PostgreSQL). Returns the ids that are new, or
    without ``ids`` perhaps nothing: a result costs a third of a short statement.
    """
    if d.is_postgresql:
        result = d.run(c, _inserting(what, first, ids), params)
        return {row.id for row in result.all()} if ids else set()
    rows = d.run(c, f"INSERT INTO {{job}} {what}{_NEW}", params, id=ID).all()
    turns.insert(c, d, best_of((row.resource_key, row.priority) for row in rows if row.state == "ready"))
    return {row.id for row in rows}


@lru_cache(maxsize=64)
def _inserting(what: str, first: str, ids: bool) -> str:  # noqa: FBT001 - of a cached function
    new = f"WITH {first}new AS (INSERT INTO {{job}} {what}{_NEW})"
    return f"{new}, turned AS ({_TURNS}) SELECT id FROM new" if ids else f"{new} {_TURNS}"


def copy(c: Connection, d: Dialect, columns: Sequence[str], lines: Iterable[str], best: Mapping[str, int]) -> None:
    """COPY jobs (PostgreSQL). ``best``: the priority of the best ready one of each key, noted while they are sent."""
    direct.copy(c, d.named(f"COPY {{job}} ({', '.join(columns)}) FROM STDIN"), lines)
    turns.insert(c, d, best)


def best_of(rows: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Resource keys with the priority of their best row."""
    best: dict[str, int] = {}
    for key, priority in rows:
        if priority > best.get(key, -32768):
            best[key] = priority
    return best


# -- jobs whose time has come, or that wait for nothing more ---------------------------------------------------------


def stage(c: Connection, d: Dialect, now: datetime) -> int:
    """Make scheduled jobs that are due ready; returns how many (call again until fewer than `STAGE_LIMIT`)."""
    due = d.chosen(
        "SELECT id FROM {job} WHERE state = 'scheduled' AND run_at <= :now"
        " ORDER BY run_at, id LIMIT :limit {skip_locked}"
    )
    sets = "state = 'ready', version = {job}.version + 1, updated_at = :now"
    return len(update(c, d, sets, f" WHERE id {due}", {"now": now, "limit": STAGE_LIMIT}))


def make_ready_if_version(
    c: Connection, d: Dialect, versions: Mapping[UUID, int], now: datetime, *, reset: bool = False
) -> list[UUID]:
    """Make jobs ready that still have these versions, whatever their state, which the caller has checked.

    With ``reset`` attempts, rescues and the finish are forgotten (retry, replay).
    """
    if not versions:
        return []
    doc = json.dumps([{"id": d.id(i), "version": v} for i, v in sorted(versions.items())])
    sets = "state = 'ready', run_at = :now, version = {job}.version + 1, updated_at = :now"
    if reset:
        sets += ", attempts = 0, rescues = 0, finished_at = NULL, cancel_requested = false, waits = 0"
    source = f" FROM {d.records('doc', {'id': 'uuid', 'version': 'int'})} AS r"
    where = source + " WHERE {job}.id = r.id AND {job}.version = r.version"
    return [job.id for job in update(c, d, sets, where, {"doc": doc, "now": now})]


def unblock(c: Connection, d: Dialect, fewer: Mapping[UUID, int], now: datetime) -> set[UUID]:
    """Lower ``waits`` of blocked jobs by ``fewer``; those that wait for nothing more become ready, or scheduled.

    Returns the ids that were still blocked.
    """
    if not fewer:
        return set()
    doc = json.dumps([{"id": d.id(i), "n": n} for i, n in sorted(fewer.items())])
    sets = (
        "state = CASE WHEN {job}.waits > p.n THEN 'blocked' WHEN {job}.run_at > :now THEN 'scheduled' ELSE 'ready' END,"
        " waits = CASE WHEN {job}.waits > p.n THEN {job}.waits - p.n ELSE 0 END,"
        " version = {job}.version + 1, updated_at = :now"
    )
    where = f" FROM {d.records('doc', {'id': 'uuid', 'n': 'int'})} AS p WHERE {{job}}.id = p.id AND {{is_blocked}}"
    return {job.id for job in update(c, d, sets, where, {"doc": doc, "now": now})}


# -- what is due -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Due:
    """When the next scheduled job and the next parked turn are due, and whether edges or workflows need a look."""

    now: datetime
    job_at: datetime | None
    turn_at: datetime | None
    edges: bool
    workflows: bool

    @property
    def anything(self) -> bool:
        """Whether there is something to do at once."""
        return (
            self.edges or self.workflows or any(at is not None and at <= self.now for at in (self.job_at, self.turn_at))
        )


@direct.direct
@direct.operation("stage")
def read_due(c: Connection, d: Dialect) -> Due:
    """Read what is due, without locks: a worker with nothing to stage sends one statement a second, not ten."""
    now = d.host_now()
    params: dict[str, Any] = {} if now is None else {"now": now}
    row = d.run(
        c,
        f"SELECT {d.now_sql} AS now,"
        " (SELECT run_at FROM {job} WHERE state = 'scheduled' ORDER BY run_at LIMIT 1) AS job_at,"
        " (SELECT recheck_at FROM {turn} WHERE parked_on IS NOT NULL ORDER BY recheck_at LIMIT 1) AS turn_at,"
        " EXISTS (SELECT 1 FROM {dependency} WHERE NOT resolved) AS edges,"
        " EXISTS (SELECT 1 FROM {workflow} WHERE attention) AS workflows",
        params,
        now=TIME,
        job_at=TIME,
        turn_at=TIME,
        edges=None,
        workflows=None,
    ).one()
    return Due(row[0], row[1], row[2], bool(row[3]), bool(row[4]))
