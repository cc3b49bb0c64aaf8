"""What `why` needs to know, read without a lock: gates, limits, counts, turn and workers of one path.

The parts are read one after the other, so they may be a moment apart; whoever asks again sees the next
moment.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa

from resilient.core import resource_key
from resilient.core.admission import Level, ResourceFacts, needs_count
from resilient.core.blocked import TOLD, JobSeen, Waits
from resilient.core.reasons import LastError, Path, TurnSeen, WorkerSeen
from resilient.core.records import Count
from resilient.core.states import JobState
from resilient.store import limits, resource_queries, resources, tables, workers
from resilient.store.dialect import ID
from resilient.store.filters import JOB, in_state
from resilient.store.leases import STUCK
from resilient.store.resource_queries import RESOURCE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    from sqlalchemy import Connection, Row

    from resilient.core.policy import Policy
    from resilient.core.records import JobInfo
    from resilient.store.dialect import Dialect

AHEAD_LIMIT: Final = 1_000
TURN: Final[sa.Table] = tables.metadata.tables["resilient_turn"]


def path_of(
    c: Connection, d: Dialect, key: str, policy: Callable[[str, Mapping[str, Any] | None], Policy]
) -> tuple[Path, datetime]:
    """Everything about a key and its ancestors, and the time at which that was true."""
    keys = list(resource_key.path(key))
    facts = resources.read(c, d, keys)
    now = d.now(c)
    found = [facts.get(k, ResourceFacts(k, calm=True)) for k in keys]
    policies = [policy(f.key, f.policy_override) for f in found]
    states = limits.read(c, d, keys)
    counted = [f.key for f, p in zip(found, policies, strict=True) if needs_count(f, p, now)]
    running = resources.count_running(c, d, counted) if counted else {}
    levels = [Level(f, p, states.get(f.key, {}), running.get(f.key, 0)) for f, p in zip(found, policies, strict=True)]
    waiting = resource_queries.waiting(c, d, keys)
    return Path(
        levels, waiting, _errors(c, d, keys), turn_of(c, d, key), seen_workers(c, d, now), stuck_jobs(c, d, key)
    ), now


def _errors(c: Connection, d: Dialect, keys: Sequence[str]) -> dict[str, LastError]:
    t = RESOURCE.c
    rows = d.execute(
        c,
        sa.select(t.key, t.last_error, t.last_error_kind, t.last_error_code, t.last_error_at).where(
            t.key.in_(keys), t.last_error.is_not(None)
        ),
    )
    return {row.key: LastError(*tuple(row)[1:]) for row in rows}


def turn_of(c: Connection, d: Dialect, key: str) -> TurnSeen | None:
    """The turn of a key: an ordinary one if it has both."""
    ordinary = sa.select(TURN.c.parked_on, TURN.c.recheck_at).where(TURN.c.resource_key == key)
    for parked in (TURN.c.parked_on.is_(None), TURN.c.parked_on.is_not(None)):
        if (row := d.execute(c, ordinary.where(parked).limit(1)).first()) is not None:
            return TurnSeen(*row)
    return None


def stuck_jobs(c: Connection, d: Dialect, key: str) -> dict[str, int]:
    """Running jobs of this very key whose handlers should have ended and do not, by worker."""
    rows = d.run(
        c,
        "SELECT locked_by, count(*) FROM {job} WHERE state = 'running' AND resource_key = :key"
        " AND last_error_code = :code AND locked_by IS NOT NULL GROUP BY locked_by",
        {"key": key, "code": STUCK},
    )
    return {worker: number for worker, number in rows}  # noqa: C416 - rows of two


def seen_workers(c: Connection, d: Dialect, now: datetime) -> list[WorkerSeen]:
    """Workers heard of lately, the oldest first."""
    return [
        WorkerSeen(row.id, frozenset(row.kinds or ()), row.concurrency, row.running, bool(row.stopping), row.seen_at)
        for row in workers.alive(c, d, now)
    ]


def ahead_of(c: Connection, d: Dialect, job: JobInfo) -> Count:
    """Ready jobs of the same key that come before this one, counted up to `AHEAD_LIMIT`."""
    t = JOB.c
    earlier = sa.tuple_(t.run_at, t.id) < sa.tuple_(
        sa.literal(job.run_at, t.run_at.type), sa.literal(job.id, t.id.type)
    )
    before = sa.or_(t.priority > job.priority, sa.and_(t.priority == job.priority, earlier))
    line = sa.select(sa.literal(1)).where(in_state("ready"), t.resource_key == job.resource_key, before)
    inner = line.limit(AHEAD_LIMIT + 1).subquery()
    found: int = d.execute(c, sa.select(sa.func.count()).select_from(inner)).scalar_one()
    return Count(min(found, AHEAD_LIMIT), more=found > AHEAD_LIMIT)


def waits_of(c: Connection, d: Dialect, job: JobInfo) -> Waits:
    """Which jobs a blocked one waits for, and which wait for a dead one."""
    blockers = _blockers(c, d, job.id)
    seen = Waits(blockers[:TOLD], len(blockers[TOLD:]))
    if job.ordering_key is None:
        return seen
    lane = {"key": job.resource_key, "name": job.ordering_key, "n": job.order_no}
    row = d.run(
        c,
        "SELECT o.head_id AS id, j.kind, j.state, j.last_error FROM {order} o LEFT JOIN {job} j ON j.id = o.head_id"
        " WHERE o.resource_key = :key AND o.ordering_key = :name",
        lane,
        id=ID,
    ).first()
    head = None if row is None or row.id is None else _seen(row)
    ahead, behind = _count(c, d, "<", lane), _count(c, d, ">", lane)
    return replace(seen, head=head, ahead=ahead, behind=behind)


def _blockers(c: Connection, d: Dialect, job_id: UUID) -> list[JobSeen]:
    rows = d.run(
        c,
        "SELECT e.blocker_id AS id, j.kind, j.state, j.last_error FROM {dependency} e"
        " LEFT JOIN {job} j ON j.id = e.blocker_id WHERE e.job_id = :id ORDER BY e.blocker_id",
        {"id": d.id(job_id)},
        id=ID,
    )
    return [_seen(row) for row in rows]


def _seen(row: Row[Any]) -> JobSeen:
    return JobSeen(row.id, row.kind, None if row.state is None else JobState(row.state), row.last_error)


def _count(c: Connection, d: Dialect, side: str, lane: Mapping[str, Any]) -> Count:
    """Blocked jobs of a lane on one side of a number."""
    found: int = d.run(
        c,
        "SELECT count(*) FROM (SELECT 1 FROM {job} WHERE state = 'blocked' AND resource_key = :key"
        f" AND ordering_key = :name AND order_no {side} :n LIMIT {AHEAD_LIMIT + 1}) AS found",
        lane,
    ).scalar_one()
    return Count(min(found, AHEAD_LIMIT), more=found > AHEAD_LIMIT)
