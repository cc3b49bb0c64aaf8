"""What `why` and `status` read, without a lock: everything about one path, and everything at a glance.

The parts are read one after the other, so they may be a moment apart. The costs are bounded: nothing here reads more
than some thousand rows of an index.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from resilient.core.alerts.overview import Overview, Trouble, folded
from resilient.core.base import resource_key
from resilient.core.base.errors import DatabaseUnreachable
from resilient.core.base.resource_key import account, serves
from resilient.core.gates.admission import Level, ResourceFacts, in_force, needs_count, paced
from resilient.core.gates.rate_limit import stated_limit
from resilient.core.inspect.blocked import MOST_NAMED, HeldLane, JobSeen, StepSeen, Waits
from resilient.core.inspect.why import LastError, Path, TurnSeen, WorkerSeen
from resilient.core.jobs.records import Count
from resilient.core.jobs.states import JobState
from resilient.core.jobs.workflow import WorkflowState
from resilient.store import alerts
from resilient.store.db import tables
from resilient.store.db.address import shown
from resilient.store.db.dialect import ID, is_lock_timeout, limit_lock_waits
from resilient.store.gates import limits, resources, turns
from resilient.store.inspect import resources as resource_queries
from resilient.store.inspect import workers
from resilient.store.inspect.resources import RESOURCE
from resilient.store.jobs import queries
from resilient.store.jobs.filters import JOB, JobFilter, in_state
from resilient.store.jobs.leases import STUCK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    from sqlalchemy import Connection, Row

    from resilient.core.gates.policy import Policy
    from resilient.core.gates.rate_limit import Limit, LimitState
    from resilient.core.jobs.records import JobInfo
    from resilient.store.db.dialect import Dialect


AHEAD_LIMIT: Final = 1_000
TURN: Final[sa.Table] = tables.metadata.tables["resilient_turn"]


def path_of(
    c: Connection, d: Dialect, key: str, policy: Callable[[str, Mapping[str, Any] | None], Policy]
) -> tuple[Path, datetime]:
    """Everything about a key and its ancestors, and the time at which that was true."""
    keys = list(resource_key.path(key))
    facts = resources.read(c, d, keys)
    now = d.now(c)
    path = [facts.get(k, ResourceFacts(k, calm=True)) for k in keys]
    states = limits.read(c, d, keys)
    stated = {k: _stated(limits_of, now.timestamp()) for k, limits_of in states.items()}
    declared = [paced(policy(f.key, f.policy_override), stated.get(f.key, ())) for f in path]
    policies = [in_force(p, f.learnt, now) for f, p in zip(path, declared, strict=True)]
    counted = [f.key for f, p in zip(path, policies, strict=True) if stated.get(f.key) or needs_count(f, p, now)]
    running = resources.count_running(c, d, counted) if counted else {}
    levels = [
        Level(f, p, states.get(f.key, {}), running.get(f.key, 0), stated.get(f.key, ()))
        for f, p in zip(path, policies, strict=True)
    ]
    waiting = resource_queries.waiting(c, d, keys)
    return Path(
        levels, waiting, _errors(c, d, keys), turn_of(c, d, key), seen_workers(c, d, now), stuck_jobs(c, d, key),
        _budgets(c, d, resource_key.account(key), policy, now), _count(c, d, state=("blocked",), within=key),
        *held_below(c, d, key),
    ), now  # fmt: skip


def _budgets(
    c: Connection, d: Dialect, account: str, policy: Callable[[str, Mapping[str, Any] | None], Policy], now: datetime
) -> list[Level]:
    """The named budgets of an account that throttles taught something about."""
    keys = resources.budgets_of(c, d, account)
    if not keys:
        return []
    facts, states = resources.read(c, d, keys), limits.read(c, d, keys)
    return [
        Level(f, in_force(policy(k, f.policy_override), f.learnt, now), states.get(k, {})) for k, f in facts.items()
    ]


def _stated(states: Mapping[str, LimitState], now: float) -> tuple[Limit, ...]:
    """The budgets that answers stated and nobody declared, as long as their windows last."""
    ends = {name: state.reset_at - now for name, state in states.items() if state.reset_at is not None}
    made = (stated_limit(name, seconds) for name, seconds in ends.items() if seconds > 0)
    return tuple(limit for limit in made if limit is not None)


def _errors(c: Connection, d: Dialect, keys: Sequence[str]) -> dict[str, LastError]:
    t = RESOURCE.c
    rows = d.execute(
        c,
        sa.select(
            t.key,
            t.last_error,
            t.last_error_kind,
            t.last_error_code,
            t.last_error_at,
            sa.func.coalesce(t.last_success_at > t.last_error_at, sa.false()),
        ).where(t.key.in_(keys), t.last_error.is_not(None)),
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
    """Workers with a recent heartbeat, the oldest first."""
    return [
        WorkerSeen(
            row.id,
            frozenset(row.kinds or ()),
            row.concurrency,
            row.running,
            bool(row.stopping),
            row.seen_at,
            tuple(row.resources or ()),
            row.loop_lag,
        )
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
    number: int = d.execute(c, sa.select(sa.func.count()).select_from(inner)).scalar_one()
    return Count(min(number, AHEAD_LIMIT), more=number > AHEAD_LIMIT)


def waits_of(c: Connection, d: Dialect, job: JobInfo) -> Waits:
    """Which jobs a blocked one waits for, and which wait for a dead one."""
    blockers = _blockers(c, d, job.id)
    steps = _steps(c, d, [job.id, *(one.id for one in blockers[:MOST_NAMED])])
    named = [replace(one, is_over=_is_over(steps, one)) for one in blockers[:MOST_NAMED]]
    waits = Waits(named, len(blockers[MOST_NAMED:]), step=steps.get(job.id))
    if job.ordering_key is None:
        return waits
    params = {"key": job.resource_key, "name": job.ordering_key, "n": job.order_no}
    row = d.run(
        c,
        "SELECT o.head_id AS id, j.kind, j.state, j.last_error FROM {order} o LEFT JOIN {job} j ON j.id = o.head_id"
        " WHERE o.resource_key = :key AND o.ordering_key = :name",
        params,
        id=ID,
    ).first()
    head = None if row is None or row.id is None else _job_seen(row)
    if head is not None:
        head = replace(head, is_over=_is_over(_steps(c, d, [head.id]), head))
    ahead, behind = _count_blocked(c, d, "<", params), _count_blocked(c, d, ">", params)
    return replace(waits, head=head, ahead=ahead, behind=behind)


def _blockers(c: Connection, d: Dialect, job_id: UUID) -> list[JobSeen]:
    rows = d.run(
        c,
        "SELECT e.blocker_id AS id, j.kind, j.state, j.last_error FROM {dependency} e"
        " LEFT JOIN {job} j ON j.id = e.blocker_id WHERE e.job_id = :id ORDER BY e.blocker_id",
        {"id": d.id(job_id)},
        id=ID,
    )
    return [_job_seen(row) for row in rows]


def _steps(c: Connection, d: Dialect, ids: Sequence[UUID]) -> dict[UUID, StepSeen]:
    """The workflows that these jobs are steps of, or undos of steps."""
    steps = dict["UUID", StepSeen]()
    for column in ("job_id", "undo_job_id"):
        rows = d.run(
            c,
            f"SELECT s.{column} AS id, s.workflow_id, s.name, w.state FROM {{step}} s JOIN {{workflow}} w"
            f" ON w.id = s.workflow_id WHERE s.{column} {d.among('ids', 'uuid')}",
            {"ids": d.pack_ids(sorted(ids))},
            id=ID, workflow_id=ID, name=None, state=None,
        )  # fmt: skip
        for row in rows:
            steps[row.id] = StepSeen(row.workflow_id, row.name, WorkflowState(row.state), column == "undo_job_id")
    return steps


def _is_over(steps: Mapping[UUID, StepSeen], one: JobSeen) -> bool:
    step = steps.get(one.id)
    return step is not None and step.is_over


def _job_seen(row: Row[Any]) -> JobSeen:
    return JobSeen(row.id, row.kind, None if row.state is None else JobState(row.state), row.last_error)


def _count_blocked(c: Connection, d: Dialect, side: str, params: Mapping[str, Any]) -> Count:
    """Blocked jobs of an ordering key on one side of a number."""
    number: int = d.run(
        c,
        "SELECT count(*) FROM (SELECT 1 FROM {job} WHERE state = 'blocked' AND resource_key = :key"
        f" AND ordering_key = :name AND order_no {side} :n LIMIT {AHEAD_LIMIT + 1}) AS found",
        params,
    ).scalar_one()
    return Count(min(number, AHEAD_LIMIT), more=number > AHEAD_LIMIT)


# -- ordering keys that a dead job holds up ----------------------------------------------------------------------------

_MOST_HELD: Final = 10  # that are named
_MOST_DEAD: Final = 5_000


def _held_overall(c: Connection, d: Dialect) -> tuple[list[HeldLane], Count]:
    """Among the latest dead jobs: those that hold up an ordering key."""
    latest = (
        "(SELECT id, kind, resource_key, ordering_key FROM {job} WHERE state = 'dead' AND finished_at IS NOT NULL"
        " ORDER BY finished_at DESC LIMIT :most)"
    )
    return _held(c, d, latest, {"most": _MOST_DEAD})


def held_below(c: Connection, d: Dialect, key: str) -> tuple[list[HeldLane], Count]:
    """Among the first blocked jobs at or below a key: dead jobs that they wait for."""
    heads = (
        "(SELECT DISTINCT j.id, j.kind, j.resource_key, j.ordering_key FROM (SELECT resource_key, ordering_key"
        " FROM {job} WHERE state = 'blocked' AND (resource_key = :key OR (resource_key > :low"
        " AND resource_key < :high)) ORDER BY resource_key, ordering_key LIMIT :most) AS b JOIN {order} p"
        " ON p.resource_key = b.resource_key AND p.ordering_key = b.ordering_key JOIN {job} j ON j.id = p.head_id"
        " WHERE j.state = 'dead')"
    )
    return _held(c, d, heads, {"key": key, "low": f"{key}/", "high": f"{key}0", "most": AHEAD_LIMIT})


def _held(c: Connection, d: Dialect, dead: str, params: Mapping[str, Any]) -> tuple[list[HeldLane], Count]:
    rows = d.run(
        c,
        f"SELECT j.id, j.kind, j.resource_key, j.ordering_key FROM {dead} AS j JOIN {{order}} o"
        " ON o.resource_key = j.resource_key AND o.ordering_key = j.ordering_key AND o.head_id = j.id"
        " WHERE EXISTS (SELECT 1 FROM {job} b WHERE b.state = 'blocked' AND b.resource_key = j.resource_key"
        " AND b.ordering_key = j.ordering_key) ORDER BY j.resource_key, j.ordering_key LIMIT :lanes",
        {**params, "lanes": AHEAD_LIMIT + 1},
        id=ID, kind=None, resource_key=None, ordering_key=None,
    ).all()  # fmt: skip
    lanes = [
        HeldLane(
            resource_key=row.resource_key, ordering_key=row.ordering_key, job=row.id, kind=row.kind,
            behind=_count_blocked(c, d, ">", {"key": row.resource_key, "name": row.ordering_key, "n": -1}),
        )
        for row in rows[:_MOST_HELD]
    ]  # fmt: skip
    return lanes, Count(min(len(rows), AHEAD_LIMIT), more=len(rows) > AHEAD_LIMIT)


# -- everything at a glance --------------------------------------------------------------------------------------------

SAMPLE: Final = 1_000
MOST_ALERTS: Final = 100
_MOST_ALIKE: Final = 3  # lines of one kind and account that differ by their codes alone
LATELY: Final = timedelta(hours=1)
_PATIENCE: Final = "10s"  # of a person, with a lock that no reader waits for as a rule
_GRACE: Final = timedelta(seconds=5)  # staging looks every second or so
_PRESENT: Final = (JobState.SCHEDULED, JobState.READY, JobState.RUNNING, JobState.BLOCKED, JobState.DEAD)
_TROUBLE: Final = (
    JOB.c.id, JOB.c.kind, JOB.c.resource_key, JOB.c.attempts, JOB.c.run_at, JOB.c.last_error, JOB.c.last_error_kind,
    JOB.c.last_error_code,
)  # fmt: skip


def overview(c: Connection, d: Dialect) -> Overview:
    """Everything at a glance."""
    present = glance(c, d)
    learnt = resource_queries.learnt_limits(c, d, present.at)
    return replace(present, stopped=resource_queries.summary(c, d), learnt=learnt)


def overview_soon(c: Connection, d: Dialect) -> Overview:
    """`overview` for a person who waits for it. Raises `DatabaseUnreachable` if somebody locks a table for long."""
    limit_lock_waits(c, d, _PATIENCE)
    try:
        return overview(c, d)
    except DBAPIError as error:
        if not is_lock_timeout(error):
            raise
        raise DatabaseUnreachable(
            f"a table in {shown(c.engine.url)} has been locked against everybody for {_PATIENCE}:"
            " `resilient doctor` names who does that"
        ) from None


def glance(c: Connection, d: Dialect) -> Overview:
    """Everything but what is stopped, and what is learnt."""
    now, workers = d.now(c), seen_workers(c, d, d.now(c))
    unserved, unserved_accounts = _unserved(c, d, [one for one in workers if not one.stopping])
    jobs = {state.value: _count(c, d, state=(state.value,)) for state in _PRESENT}
    lanes, lane_count = _held_overall(c, d) if jobs["dead"] and jobs["blocked"] else ([], Count(0))
    lately = {s: _count(c, d, state=(s,), finished_after=now - LATELY) for s in ("succeeded", "dead", "cancelled")}
    return Overview(
        at=now,
        jobs=jobs,
        lately=lately,
        overdue=_count(c, d, state=("scheduled",), run_before=now - _GRACE),
        workers=workers,
        stopped=[],
        retrying=_troubles(_retrying(c, d), dead=False),
        died=_troubles(_died(c, d, now), dead=True),
        alerts=alerts.page(c, d, resolved=False, limit=MOST_ALERTS),
        stranded=len(turns.stranded(c, d)),
        unserved=unserved,
        unserved_accounts=unserved_accounts,
        lanes=lanes,
        lane_count=lane_count,
    )


def _unserved(c: Connection, d: Dialect, workers: Sequence[WorkerSeen]) -> tuple[dict[str, Count], dict[str, Count]]:
    """Kinds of ready jobs that none of the workers has, and accounts that none of those serves, in a sample of them."""
    sample = sa.select(JOB.c.kind, JOB.c.resource_key).where(in_state("ready")).limit(SAMPLE).subquery()
    columns = (sample.c.kind, sample.c.resource_key)
    rows = d.execute(c, sa.select(*columns, sa.func.count()).group_by(*columns)).all()
    full = sum(number for _, _, number in rows) >= SAMPLE
    kinds, accounts = Counter[str](), Counter[str]()
    for kind, key, number in rows:
        able = [one for one in workers if kind in one.kinds]
        if not able:
            kinds[kind] += number
        elif not any(serves(key, one.resources) for one in able):
            accounts[account(key)] += number
    by_kind, by_account = (
        {name: Count(number, more=full) for name, number in sorted(counts.items())} for counts in (kinds, accounts)
    )
    return by_kind, by_account


def _count(c: Connection, d: Dialect, **criteria: Any) -> Count:
    return queries.count(c, d, JobFilter(**criteria))


def _retrying(c: Connection, d: Dialect) -> Iterable[Row[Any]]:
    """Among the jobs that are due next, those that have failed before."""
    first = sa.select(*_TROUBLE).where(in_state("scheduled")).order_by(JOB.c.run_at, JOB.c.id).limit(SAMPLE).subquery()
    return d.execute(c, sa.select(first).where(first.c.attempts > 0))


def _died(c: Connection, d: Dialect, now: datetime) -> Iterable[Row[Any]]:
    last = sa.select(*_TROUBLE).where(in_state("dead"), JOB.c.finished_at >= now - LATELY)
    return d.execute(c, last.order_by(JOB.c.finished_at.desc()).limit(SAMPLE))


def _troubles(rows: Iterable[Row[Any]], *, dead: bool) -> list[Trouble]:
    """Grouped by kind and error, the largest group first."""
    groups: dict[tuple[Any, ...], list[Row[Any]]] = defaultdict(list)
    total = 0
    for row in rows:
        groups[row.kind, row.last_error_kind, row.last_error_code].append(row)
        total += 1

    def alone(members: list[Row[Any]]) -> tuple[Any, ...] | None:
        first, *others = {account(row.resource_key) for row in members}
        return None if others else (members[0].kind, members[0].last_error_kind, first)

    made = []
    for line in folded(groups.values(), alone, _MOST_ALIKE):
        members = [row for group in line for row in group]
        first = members[0]
        made.append(
            Trouble(
                kind=first.kind,
                error_kind=first.last_error_kind,
                error_code=first.last_error_code,
                count=Count(len(members), more=total >= SAMPLE),
                example=first.id,
                resource_key=first.resource_key,
                error=first.last_error,
                next_at=None if dead else min(row.run_at for row in members),
                codes=len(line),
            )
        )
    return sorted(made, key=lambda t: -int(t.count))
