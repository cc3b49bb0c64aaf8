"""What the dashboard's pages read, each of bounded cost: a page of rows, or one pass over narrow ones.

Nothing here locks or writes. The columns of a resource are unindexed on purpose, so the stopped ones of 100,000 are
grouped by one scan in the database; jobs are read by their indexes and counted up to a bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

import sqlalchemy as sa

from resilient.core.alerts.overview import folded
from resilient.core.base import resource_key
from resilient.core.inspect.why import stands_still
from resilient.core.jobs.records import AuditInfo, Count
from resilient.store import alerts
from resilient.store.db.dialect import ID, JSON, TIME
from resilient.store.inspect import resources as resource_queries
from resilient.store.inspect import workers as heartbeats
from resilient.store.inspect.resources import RESOURCE
from resilient.store.jobs import queries
from resilient.store.jobs.changes import Unset
from resilient.store.jobs.filters import JOB, in_state, matches, within

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import datetime

    from sqlalchemy import ColumnElement, Connection

    from resilient.core.alerts.rules import AlertInfo
    from resilient.core.jobs.records import AttemptInfo, ResourceInfo
    from resilient.store.db.dialect import Dialect

ACCOUNTS: Final = 1_000_000  # counted up to
DEAD_SAMPLE: Final = 10_000
SUCCESS_SAMPLE: Final = 5_000
_KINDS_SAMPLE: Final = 1_000
_COUNTED_KEYS: Final = 200  # resources of one cause whose jobs are counted
_COUNTED_CAUSES: Final = 100  # of several resources, whose jobs are counted
_COUNTED_ALONE: Final = 2_000  # of one resource
_TURNS: Final = 50
# Of several gates that are shut at once the one that a person has to open stands first.
_SHUT: Final = (
    ("auth", "auth <> 'ok'", "auth", "auth_since", "NULL"),
    ("pause", "paused_at IS NOT NULL AND (paused_until IS NULL OR paused_until > :now)", "NULL", "paused_at",
     "paused_until"),
    ("breaker", "breaker = 'isolated' AND (open_until IS NULL OR open_until > :now)", "'isolated'", "opened_at",
     "open_until"),
    ("breaker", "breaker = 'open' AND open_until > :now", "'open'", "opened_at", "open_until"),
    ("breaker", "breaker = 'half_open' AND probe_until > :now", "'probing'", "opened_at", "probe_until"),
    ("cooldown", "blocked_until > :now", "blocked_code", "blocked_since", "blocked_until"),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Resources of one provider that one gate stops with one code.

    ``since`` is the earliest; ``first_until`` and ``until`` are the first and the last end (None: it has none that is
    known). ``waiting`` counts the ready jobs of some of them, ``example`` is one of them.
    """

    provider: str
    gate: str
    code: str | None
    resources: int
    since: datetime | None
    first_until: datetime | None
    until: datetime | None
    waiting: Count
    example: str
    error: str | None


def causes(c: Connection, d: Dialect, now: datetime) -> list[Cause]:
    """What is stopped, equal causes folded; the cause that most jobs wait for comes first."""
    cases = {
        name: "CASE " + " ".join(f"WHEN {one[1]} THEN {one[n]}" for one in _SHUT) + " END"
        for name, n in (("code", 2), ("since_at", 3), ("until_at", 4))
    }
    gate = "CASE " + " ".join(f"WHEN {one[1]} THEN '{one[0]}'" for one in _SHUT) + " END"
    if not d.is_postgresql:
        cases["until_at"] = cases["until_at"].replace("THEN NULL", "THEN CAST(NULL AS text)")
    else:
        cases["until_at"] = cases["until_at"].replace("THEN NULL", "THEN CAST(NULL AS timestamptz)")
        cases["code"] = cases["code"].replace("THEN NULL", "THEN CAST(NULL AS text)")
    shut = " OR ".join(f"({one[1]})" for one in _SHUT)
    slash = "strpos(key, '/')" if d.is_postgresql else "instr(key, '/')"
    rows = d.run(
        c,
        "SELECT provider, gate, code, count(*) AS resources, min(since_at) AS since_at, min(until_at) AS first_at,"
        " max(until_at) AS until_at, count(until_at) AS ends, min(key) AS example, max(last_error) AS error FROM"
        f" (SELECT CASE WHEN {slash} > 0 THEN substr(key, 1, {slash} - 1) ELSE key END AS provider, {gate} AS gate,"
        f" {cases['code']} AS code, {cases['since_at']} AS since_at, {cases['until_at']} AS until_at, key,"
        " CASE WHEN breaker IN ('open', 'half_open') THEN last_error END AS last_error"
        f" FROM {{resource}} WHERE {shut}) AS stopped GROUP BY provider, gate, code",
        {"now": now},
        provider=None, gate=None, code=None, resources=None, since_at=TIME, first_at=TIME, until_at=TIME, ends=None,
        example=None, error=None,
    ).all()  # fmt: skip
    behind = _jobs_behind(c, d, now, rows)
    folded = [
        Cause(
            provider=r.provider, gate=r.gate, code=r.code, resources=r.resources, since=r.since_at,
            first_until=r.first_at, until=r.until_at if r.ends == r.resources else None,
            waiting=behind.get((r.provider, r.gate, r.code), Count(0, more=True)), example=r.example, error=r.error,
        )
        for r in rows
    ]  # fmt: skip
    return sorted(folded, key=lambda one: (-int(one.waiting), -one.resources, one.provider, one.gate, one.code or ""))


def _jobs_behind(c: Connection, d: Dialect, now: datetime, rows: Sequence[Any]) -> dict[tuple[str, str, str], Count]:
    """The ready jobs behind causes, by provider, gate and code.

    Codes are other people's words, so there may be as many causes as resources: those of one resource are counted
    together, and of all only so many, the largest first.
    """
    behind: dict[tuple[str, str, str], Count] = {}
    alone = sorted((r for r in rows if r.resources == 1), key=lambda r: r.example)[:_COUNTED_ALONE]
    for n in range(0, len(alone), _COUNTED_KEYS):
        part = alone[n : n + _COUNTED_KEYS]
        counts = resource_queries.waiting(c, d, [r.example for r in part])
        behind |= {(r.provider, r.gate, r.code): counts[r.example] for r in part}
    several = sorted((r for r in rows if r.resources > 1), key=lambda r: (-r.resources, r.example))
    for r in several[:_COUNTED_CAUSES]:
        keys = _stopped_keys(c, d, now, r.provider, r.gate, r.code)
        counts = resource_queries.waiting(c, d, keys)
        more = r.resources > len(keys) or any(n.more for n in counts.values())
        behind[r.provider, r.gate, r.code] = Count(sum(counts.values()), more=more)
    return behind


def _condition(gate: str, code: str | Unset | None) -> str:
    """The rows of one cause: this gate is shut with this code (unset: any), and none that stands before it.

    No row has a gate that there is not.
    """
    fits: list[str] = []
    earlier: list[str] = []
    for name, shut, its_code, _, _ in _SHUT:
        if name == gate:
            same = f"{its_code} IS NULL" if code is None else f"{its_code} = :code"
            every = its_code == "NULL" or isinstance(code, Unset)
            parts = [f"({shut})", "1 = 1" if every else same, *(f"NOT {one}" for one in earlier)]
            fits.append(" AND ".join(parts))
        earlier.append(f"coalesce({shut}, false)")
    return "(" + (" OR ".join(f"({one})" for one in fits) or "1 = 0") + ")"


def _stopped_keys(c: Connection, d: Dialect, now: datetime, provider: str, gate: str, code: str | None) -> list[str]:
    """Some of the resources of a cause, by key."""
    return list(
        d.run(
            c,
            "SELECT key FROM {resource} WHERE key >= :low AND key < :high AND (key = :low OR key > :below)"
            f" AND {_condition(gate, code)} ORDER BY key LIMIT :limit",
            {
                "now": now,
                "low": provider,
                "below": f"{provider}/",
                "high": f"{provider}0",
                "code": code,
                "limit": _COUNTED_KEYS,
            },
        ).scalars()
    )


@dataclass(frozen=True, slots=True)
class Totals:
    """``accounts``: resources in use below a provider. ``oldest``: since when the job is ready that waits longest."""

    accounts: Count
    oldest: datetime | None
    oldest_job: UUID | None


def totals(c: Connection, d: Dialect) -> Totals:
    """How many accounts there are, and of the jobs that start next at the first 50 turns the one ready for longest."""
    number: int = d.run(
        c,
        "SELECT count(*) FROM (SELECT 1 FROM {resource} WHERE key LIKE '%/%' LIMIT :limit) AS sample",
        {"limit": ACCOUNTS + 1},
    ).scalar_one()
    keys = d.run(
        c, "SELECT resource_key FROM {turn} WHERE parked_on IS NULL ORDER BY id LIMIT :limit", {"limit": _TURNS}
    ).scalars()
    first = "FROM {job} WHERE state = 'ready' AND resource_key = value ORDER BY priority DESC, run_at, id LIMIT 1"
    rows = d.run(
        c,
        f"SELECT (SELECT id {first}) AS id, (SELECT run_at {first}) AS run_at FROM {d.array('keys', 'text')}",
        {"keys": d.pack_keys(sorted(set(keys)))},
        id=ID,
        run_at=TIME,
    )
    oldest = min(((r.run_at, r.id) for r in rows if r.id is not None), default=(None, None))
    return Totals(Count(min(number, ACCOUNTS), more=number > ACCOUNTS), *oldest)


@dataclass(frozen=True, slots=True)
class GrantStatus:
    """The state of an account's credentials, and when they end."""

    state: str
    expires_at: datetime | None


def resource_page(
    c: Connection,
    d: Dialect,
    *,
    patterns: Sequence[str] = (),
    cause: tuple[str, str | Unset | None] | None = None,
    after: str | None = None,
    limit: int = 50,
) -> list[tuple[ResourceInfo, GrantStatus | None]]:
    """A page of resources by key, behind ``after``, each with its credentials.

    ``patterns``: those that fit one of them; ``cause``: those that a gate stops with a code (None: without one).
    """
    now = d.now(c)
    where: list[ColumnElement[bool]] = [] if after is None else [RESOURCE.c.key > after]
    if patterns:
        where.append(sa.or_(*(matches(RESOURCE.c.key, one, d) for one in patterns)))
    if cause is not None:
        where.append(d.sql(_condition(*cause)))  # type: ignore[arg-type] # a text is a condition, too
    keys = sa.select(RESOURCE.c.key).where(*where).order_by(RESOURCE.c.key).limit(limit)
    values = {} if cause is None else {"now": now} | ({"code": cause[1]} if ":code" in _condition(*cause) else {})
    chosen = list(d.execute(c, keys, values).scalars())
    statuses = _grant_statuses(c, d, chosen)
    return [(one, statuses.get(one.key)) for one in resource_queries.of_keys(c, d, chosen)]


@dataclass(frozen=True, slots=True)
class Successes:
    """When jobs of resources succeeded last. ``since``: what is not among them was before that, None: it is not kept.

    Successes are written to no resource (that would be a write for every job), so they are those of the latest jobs.
    """

    at: dict[str, datetime]
    since: datetime | None

    def of(self, key: str, noted: datetime | None) -> datetime | None:
        """The last one of a resource; ``noted``: one that its row has, from a time when its breaker counted."""
        latest = self.at.get(key)
        return max((one for one in (latest, noted) if one is not None), default=None)


def successes(c: Connection, d: Dialect, keys: Sequence[str]) -> Successes:
    """The last success at or below each key, among the latest 5,000 jobs that succeeded."""
    rows = d.run(
        c,
        "SELECT resource_key, max(finished_at) AS at, min(finished_at) AS first_at, count(*) AS number FROM (SELECT"
        " resource_key, finished_at FROM {job} WHERE state = 'succeeded' AND finished_at IS NOT NULL ORDER BY"
        " finished_at DESC LIMIT :limit) AS latest GROUP BY resource_key",
        {"limit": SUCCESS_SAMPLE},
        resource_key=None, at=TIME, first_at=TIME, number=None,
    ).all()  # fmt: skip
    latest: dict[str, datetime] = {}
    for r in rows:
        for key in (r.resource_key, *resource_key.ancestors(r.resource_key)):
            latest[key] = max(latest.get(key, r.at), r.at)
    more = sum(r.number for r in rows) == SUCCESS_SAMPLE
    since = min(r.first_at for r in rows) if more else None
    return Successes({key: latest[key] for key in keys if key in latest}, since)


def _grant_statuses(c: Connection, d: Dialect, keys: Sequence[str]) -> dict[str, GrantStatus]:
    rows = d.run(
        c,
        "SELECT n.resource_key, g.state, g.expires_at FROM {connection} n JOIN {grant} g ON g.id = n.grant_id"
        f" WHERE n.resource_key {d.among('keys', 'text')}",
        {"keys": d.pack_keys(keys)},
        resource_key=None,
        state=None,
        expires_at=TIME,
    )
    return {r.resource_key: GrantStatus(r.state, r.expires_at) for r in rows}


def jobs_by_kind(c: Connection, d: Dialect, key: str) -> dict[str, dict[str, Count]]:
    """Jobs at or below a key by kind and state; of a state with more than 1,000 a sample."""
    kinds: dict[str, dict[str, Count]] = {}
    for state in ("ready", "running", "scheduled", "blocked"):
        sample = sa.select(JOB.c.kind).where(in_state(state), within(JOB.c.resource_key, key)).limit(_KINDS_SAMPLE + 1)
        some = sample.subquery()
        rows = d.execute(c, sa.select(some.c.kind, sa.func.count()).group_by(some.c.kind)).all()
        more = sum(number for _, number in rows) > _KINDS_SAMPLE
        for kind, number in rows:
            kinds.setdefault(kind, {})[state] = Count(number, more=more)
    return dict(sorted(kinds.items()))


@dataclass(frozen=True, slots=True)
class LimitUse:
    """What a provider says is left of a limit until its window ends."""

    name: str
    remaining: float


def limit_uses(c: Connection, d: Dialect, keys: Sequence[str]) -> dict[str, list[LimitUse]]:
    """What providers say is left now, by resource; nothing of windows that have ended."""
    rows = d.run(
        c,
        "SELECT resource_key, name, remaining FROM {rate_limit}"
        f" WHERE resource_key {d.among('keys', 'text')} AND remaining IS NOT NULL AND reset_at > :epoch"
        " ORDER BY resource_key, name",
        {"keys": d.pack_keys(keys), "epoch": d.now(c).timestamp()},
    )
    by_key: dict[str, list[LimitUse]] = {}
    for r in rows:
        by_key.setdefault(r.resource_key, []).append(LimitUse(r.name, r.remaining))
    return by_key


_MOST_ALIKE: Final = 10  # groups of one kind and account that differ by their codes alone


@dataclass(frozen=True, slots=True)
class DeadGroup:
    """Dead jobs of one kind, provider and error; ``example`` is one of them.

    ``codes``: of an account with many codes of its own, these are together; ``account`` is that account.
    """

    kind: str
    provider: str
    error_kind: str | None
    error_code: str | None
    count: Count
    example: UUID
    error: str | None
    first_at: datetime
    last_at: datetime
    codes: int = 1
    account: str | None = None


def dead_groups(c: Connection, d: Dialect) -> list[DeadGroup]:
    """The latest 10,000 dead jobs, grouped; the largest group first."""
    position = "strpos" if d.is_postgresql else "instr"
    slash = f"{position}(resource_key, '/')"
    account = f"substr(resource_key, 1, {slash} + {position}(substr(resource_key, {slash} + 1) || '/', '/') - 1)"
    provider = f"CASE WHEN {slash} > 0 THEN substr(resource_key, 1, {slash} - 1) ELSE resource_key END"
    rows = d.run(
        c,
        "SELECT kind, provider, last_error_kind, last_error_code, count(*) AS number, max(CAST(id AS text)) AS example,"
        " max(last_error) AS error, min(finished_at) AS first_at, max(finished_at) AS last_at,"
        f" min(account) AS low, max(account) AS high FROM (SELECT id, kind, {provider} AS provider,"
        f" {account} AS account, last_error_kind, last_error_code, substr(last_error, 1, 500) AS last_error,"
        " finished_at FROM {job} WHERE state = 'dead' AND finished_at IS NOT NULL ORDER BY finished_at DESC"
        " LIMIT :limit) AS dead GROUP BY kind, provider, last_error_kind, last_error_code",
        {"limit": DEAD_SAMPLE + 1},
        kind=None, provider=None, last_error_kind=None, last_error_code=None, number=None, example=None, error=None,
        first_at=TIME, last_at=TIME, low=None, high=None,
    ).all()  # fmt: skip
    more = sum(r.number for r in rows) > DEAD_SAMPLE
    lines = folded(rows, lambda r: (r.kind, r.last_error_kind, r.low) if r.low == r.high else None, _MOST_ALIKE)
    groups = [_dead_group(line, more=more) for line in lines]
    return sorted(groups, key=lambda one: (-int(one.count), one.kind, one.provider, one.error_code or ""))


def _dead_group(rows: Sequence[Any], *, more: bool) -> DeadGroup:
    last = max(rows, key=lambda r: r.last_at)
    return DeadGroup(
        last.kind, last.provider, last.last_error_kind, last.last_error_code,
        Count(sum(r.number for r in rows), more=more), UUID(last.example), last.error,
        min(r.first_at for r in rows), last.last_at, len(rows), last.low if len(rows) > 1 else None,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class WorkflowRow:
    """A workflow with the number of its steps, and of those that succeeded."""

    id: UUID
    name: str
    state: str
    reason: str | None
    created_at: datetime
    steps: int
    succeeded: int


def workflows(c: Connection, d: Dialect, *, state: str | None, after: UUID | None, limit: int) -> list[WorkflowRow]:
    """A page of workflows, the newest first, behind ``after``. What their steps hold is not read."""
    where, params = ["1 = 1"], dict[str, Any](limit=limit)
    if state is not None:
        where.append("w.state = :state")
        params["state"] = state
    if after is not None:
        where.append("w.id < :after_id")
        params["after_id"] = d.id(after)
    rows = d.run(
        c,
        "SELECT w.id, w.name, w.state, w.reason, w.created_at,"
        " (SELECT count(*) FROM {step} s WHERE s.workflow_id = w.id) AS steps,"
        " (SELECT count(*) FROM {step} s JOIN {job} j ON j.id = s.job_id WHERE s.workflow_id = w.id"
        " AND j.state = 'succeeded') AS succeeded"
        f" FROM {{workflow}} w WHERE {' AND '.join(where)} ORDER BY w.id DESC LIMIT :limit",
        params,
        id=ID, name=None, state=None, reason=None, created_at=TIME, steps=None, succeeded=None,
    )  # fmt: skip
    return [WorkflowRow(*row) for row in rows]


@dataclass(frozen=True, slots=True)
class StreamRow:
    """Where a sync stream stands; never its position, which may name customers' data."""

    resource_key: str
    stream: str
    part: str
    is_full: bool
    pages: int
    records: int
    rejected: int
    completed_at: datetime | None
    expected: float | None
    error: str | None
    updated_at: datetime


def streams(
    c: Connection,
    d: Dialect,
    *,
    within_key: str | None = None,
    after: tuple[str, str, str] | None = None,
    limit: int = 50,
) -> list[StreamRow]:
    """A page of sync streams by resource, behind ``after``."""
    where = ["1 = 1"]
    params: dict[str, Any] = {"limit": limit}
    if within_key is not None:
        where.append("(resource_key = :key OR (resource_key > :low AND resource_key < :high))")
        params |= {"key": within_key, "low": f"{within_key}/", "high": f"{within_key}0"}
    if after is not None:
        where.append("(resource_key, stream, part) > (:a_key, :a_stream, :a_part)")
        params |= {"a_key": after[0], "a_stream": after[1], "a_part": after[2]}
    rows = d.run(
        c,
        "SELECT resource_key, stream, part, is_full, pages, records, rejected, completed_at, expected, error,"
        f" updated_at FROM {{cursor}} WHERE {' AND '.join(where)} ORDER BY resource_key, stream, part LIMIT :limit",
        params,
        resource_key=None, stream=None, part=None, is_full=sa.Boolean(), pages=None, records=None, rejected=None,
        completed_at=TIME, expected=None, error=None, updated_at=TIME,
    )  # fmt: skip
    return [StreamRow(*row) for row in rows]


@dataclass(frozen=True, slots=True)
class DestinationRow:
    """Where events are published to: how many wait, since when the oldest of them does, and how many are dead.

    ``blocked_keys``: ordering keys whose events wait behind a dead one.
    """

    name: str
    waiting: Count
    oldest: datetime | None
    dead: Count
    blocked_keys: Count


def destinations(c: Connection, d: Dialect, declared: Iterable[str]) -> list[DestinationRow]:
    """Every destination that is declared, and up to 200 that workers sent events to; of each state 10,000 jobs."""
    used = d.run(c, "SELECT key FROM {resource} WHERE key > 'outbox/' AND key < 'outbox0' ORDER BY key LIMIT 200")
    rows = []
    for key in sorted({*used.scalars(), *(f"outbox/{name}" for name in declared)}):
        counts = [_jobs_of(c, d, key, state) for state in ("ready", "scheduled", "blocked")]
        waiting = Count(sum(number for number, _ in counts), more=any(number.more for number, _ in counts))
        oldest = min((at for _, at in counts if at is not None), default=None)
        dead = _jobs_of(c, d, key, "dead")[0]
        blocked_keys = _blocked_keys(c, d, key) if dead else Count(0)
        rows.append(DestinationRow(key.partition("/")[2], waiting, oldest, dead, blocked_keys))
    return rows


def _blocked_keys(c: Connection, d: Dialect, key: str) -> Count:
    """How many ordering keys of a resource a dead job holds up."""
    number: int = d.run(
        c,
        "SELECT count(*) FROM (SELECT 1 FROM {job} j JOIN {order} o ON o.head_id = j.id AND o.resource_key ="
        " j.resource_key AND o.ordering_key = j.ordering_key WHERE j.state = 'dead' AND j.resource_key = :key"
        " LIMIT :limit) AS held",
        {"key": key, "limit": DEAD_SAMPLE + 1},
    ).scalar_one()
    return Count(min(number, DEAD_SAMPLE), more=number > DEAD_SAMPLE)


def _jobs_of(c: Connection, d: Dialect, key: str, state: str) -> tuple[Count, datetime | None]:
    """How many jobs of a key are in a state, and when the first of them was enqueued."""
    where = (in_state(state), JOB.c.resource_key == key)
    some = sa.select(JOB.c.created_at).where(*where).limit(DEAD_SAMPLE + 1).subquery()
    number, first = d.execute(c, sa.select(sa.func.count(), sa.func.min(some.c.created_at)).select_from(some)).one()
    return Count(min(number, DEAD_SAMPLE), more=number > DEAD_SAMPLE), first


def grants_by_provider(c: Connection, d: Dialect) -> dict[str, dict[str, int]]:
    """How many grants each provider has in which state."""
    rows = d.run(c, "SELECT provider, state, count(*) FROM {grant} GROUP BY provider, state ORDER BY provider, state")
    providers: dict[str, dict[str, int]] = {}
    for provider, state, number in rows.all():
        providers.setdefault(provider, {})[state] = number
    return providers


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """A worker process as of its last heartbeat. ``is_alive``: that was within half a minute."""

    id: str
    host: str
    pid: int
    kinds: list[str]
    resources: list[str]  # patterns of what it serves; none: everything
    concurrency: int
    running: int
    code_version: str
    started_at: datetime
    seen_at: datetime
    is_stopping: bool
    is_alive: bool
    loop_lag: float | None  # seconds: the longest that its event loop stood still lately
    is_still: bool  # for so long that its other jobs suffered


def workers(c: Connection, d: Dialect, *, limit: int = 200) -> list[WorkerRow]:
    """Workers, the one heard of last first; housekeeping forgets those silent for a day."""
    now = d.now(c)
    rows = d.run(
        c,
        "SELECT id, host, pid, kinds, resources, concurrency, running, code_version, started_at, seen_at, stopping,"
        " loop_lag FROM {worker}"
        " ORDER BY seen_at DESC, id LIMIT :limit",
        {"limit": limit},
        id=None, host=None, pid=None, kinds=JSON, resources=JSON, concurrency=None, running=None, code_version=None,
        started_at=TIME, seen_at=TIME, stopping=sa.Boolean(), loop_lag=None,
    ).all()  # fmt: skip
    return [
        WorkerRow(
            r.id, r.host, r.pid, list(r.kinds or ()), list(r.resources or ()), r.concurrency, r.running, r.code_version,
            r.started_at, r.seen_at, r.stopping, now - r.seen_at <= heartbeats.LATELY,
            r.loop_lag, stands_still(r.loop_lag),
        )
        for r in rows
    ]  # fmt: skip


# -- one account: what happened there ----------------------------------------------------------------------------------

AUDITED: Final = 5_000  # of the latest changes


@dataclass(frozen=True, slots=True)
class Past:
    """What is kept of a resource's past: its alerts, changes by people, and executions of some of its jobs."""

    alerts: list[AlertInfo]
    changes: list[AuditInfo]
    attempts: list[tuple[UUID, AttemptInfo]]


def past(c: Connection, d: Dialect, key: str, jobs: Sequence[UUID], *, limit: int = 10) -> Past:
    """The latest of each; changes among the last 5,000, executions of ``jobs`` that did not simply succeed."""
    changes = d.run(
        c,
        "SELECT id, at, who, via, action, subject, why, outcome FROM (SELECT * FROM {audit} ORDER BY id DESC"
        " LIMIT :some) AS latest WHERE subject = :key ORDER BY id DESC LIMIT :limit",
        {"some": AUDITED, "key": key, "limit": limit},
        id=None, at=TIME, who=None, via=None, action=None, subject=None, why=None, outcome=JSON,
    )  # fmt: skip
    attempts = [(one, attempt) for one in jobs for attempt in queries.attempts(c, d, one, limit=limit)]
    attempts.sort(key=lambda pair: pair[1].finished_at, reverse=True)
    return Past(alerts.of_subject(c, d, key, limit=limit), [AuditInfo(*row) for row in changes], attempts[:limit])
