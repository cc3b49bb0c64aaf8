"""Reading resources for people: one, a page, what is stopped and how much waits for it.

Nothing here locks or writes (`gates.py` does). Counts are bounded: a resource with a million waiting jobs is
as cheap to show as one with ten. The columns of a resource row are unindexed on purpose (cheap updates), so
looking for the stopped ones reads them all: some 100 ms for 100,000 resources.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import sqlalchemy as sa

from resilient.core.base.errors import InvalidInput
from resilient.core.base.resource_key import BUDGET, path
from resilient.core.base.resource_key import matches as matches_key
from resilient.core.gates.admission import ResourceFacts, Stop, error_shut, hand_shut, stop_of
from resilient.core.gates.breaker import BreakerFacts
from resilient.core.gates.learnt import Learnt
from resilient.core.gates.learnt import summary as learnt_summary
from resilient.core.jobs.records import Count, ResourceInfo, StoppedGroup
from resilient.store.db import tables
from resilient.store.gates import resources
from resilient.store.jobs.filters import JOB, in_state, matches, within
from resilient.store.jobs.queries import COUNT_LIMIT, PAGE_LIMIT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    from sqlalchemy import ColumnElement, Connection

    from resilient.store.db.dialect import Dialect

Gate: TypeAlias = Literal["breaker", "cooldown", "pause", "auth"]
Between: TypeAlias = "tuple[datetime | None, datetime | None]"  # from the first on, before the second
KEYS_PAGE: Final = 500
STOPPED_LIMIT: Final = 10_000  # rows of a summary
LEARNT_LIMIT: Final = 200
RESOURCE: Final[sa.Table] = tables.metadata.tables["resilient_resource"]
_COUNTED_KEYS: Final = 1_000  # of one group
_FAR: Final = "~"  # sorts after every character a key may have


def page(
    c: Connection,
    d: Dialect,
    *,
    pattern: str | None = None,
    gate: Gate | Literal["any"] | None = None,
    limit: int = 100,
    after: str | None = None,
) -> list[ResourceInfo]:
    """Up to ``limit`` resources by key, from the one that follows ``after``.

    ``gate``: only those it stops.
    """
    if not 1 <= limit <= PAGE_LIMIT:
        raise InvalidInput(f"limit={limit}: ask for 1 to {PAGE_LIMIT} resources at a time")
    where: list[ColumnElement[bool]] = [] if after is None else [RESOURCE.c.key > after]
    if pattern is not None:
        where.append(matches(RESOURCE.c.key, pattern, d))
    now = d.now(c)
    if gate is not None:
        where.append(_stopped(gate, now))
    return _infos(c, d, sa.select(RESOURCE).where(*where).order_by(RESOURCE.c.key).limit(limit), now)


def of_keys(c: Connection, d: Dialect, keys: Sequence[str]) -> list[ResourceInfo]:
    """Those of ``keys`` that are in use, by key."""
    return _infos(c, d, sa.select(RESOURCE).where(RESOURCE.c.key.in_(keys)).order_by(RESOURCE.c.key), d.now(c))


def _infos(c: Connection, d: Dialect, statement: sa.Select[Any], now: datetime) -> list[ResourceInfo]:
    rows = d.execute(c, statement).mappings().all()
    keys = [row["key"] for row in rows]
    waits, runs = waiting(c, d, keys), resources.count_running(c, d, keys)
    return [_info(row, waits[row["key"]], runs[row["key"]], now) for row in rows]


def keys_of(
    c: Connection,
    d: Dialect,
    pattern: str,
    *,
    gate: str | None = None,
    between: Between = (None, None),
    after: str = "",
    limit: int = KEYS_PAGE,
) -> list[str]:
    """The keys of existing resources that match a pattern, in their order; with ``gate`` those it stops.

    ``between``: only those that the gate (without one: any gate) stopped in that time.
    """
    where = [matches(RESOURCE.c.key, pattern, d), RESOURCE.c.key > after]
    if gate is not None or between != (None, None):
        where.append(_stopped(gate or "any", d.now(c), between))
    keys = sa.select(RESOURCE.c.key).where(*where).order_by(RESOURCE.c.key).limit(limit)
    return list(d.execute(c, keys).scalars())


def queued_keys(c: Connection, d: Dialect, pattern: str) -> list[str]:
    """Keys that match a pattern and have jobs at or below them, but no row, because nothing was claimed there yet."""
    prefix = re.split(r"[*?]", pattern.removesuffix("/**"), maxsplit=1)[0]
    params = {"low": prefix, "high": prefix + _FAR}
    # For three states an index leads from key to key, however many jobs each has; scheduled ones are read through.
    keys: set[str] = set()
    for state in ("ready", "running", "blocked"):
        step = (
            f"(SELECT resource_key FROM {{job}} WHERE state = '{state}' AND resource_key {{than}}"
            " AND resource_key < :high ORDER BY resource_key LIMIT 1)"
        )
        rows = d.run(
            c,
            f"WITH RECURSIVE keys(key) AS (SELECT {step.replace('{than}', '>= :low')}"
            f" UNION ALL SELECT {step.replace('{than}', '> keys.key')} FROM keys WHERE keys.key IS NOT NULL)"
            " SELECT key FROM keys WHERE key IS NOT NULL",
            params,
        )
        keys.update(rows.scalars())
    rows = d.run(
        c,
        "SELECT DISTINCT resource_key FROM {job} WHERE state = 'scheduled' AND resource_key >= :low"
        " AND resource_key < :high",
        params,
    )
    keys.update(rows.scalars())
    levels = sorted({level for key in keys for level in path(key) if matches_key(level, pattern)})
    rows = d.run(c, f"SELECT key FROM {{resource}} WHERE key {d.among('keys', 'text')}", {"keys": d.pack_keys(levels)})
    used = set(rows.scalars())
    return [key for key in levels if key not in used]


def get(c: Connection, d: Dialect, key: str) -> ResourceInfo:
    """One resource; with defaults if it has no row yet."""
    if infos := page(c, d, pattern=key, limit=1):
        return replace(infos[0], budgets=_budgets(c, d, key))
    untouched = {"key": key, "breaker": "closed", "reopens": 0, "auth": "ok"}
    row = {**dict.fromkeys(RESOURCE.c.keys()), **untouched}
    running = resources.count_running(c, d, [key])[key]
    return _info(row, waiting(c, d, [key])[key], running, d.now(c))


def _budgets(c: Connection, d: Dialect, key: str) -> dict[str, dict[str, Any]]:
    """The named budgets of an account that throttles taught something about; see `ResourceInfo`."""
    now, budgets = d.now(c), dict[str, dict[str, Any]]()
    for budget, facts in resources.read(c, d, resources.budgets_of(c, d, key)).items():
        stop = stop_of(facts, now)
        learnt = learnt_summary(facts.learnt, now.timestamp())
        if stop is not None or learnt is not None:
            name = budget.rpartition("/")[2].removeprefix(BUDGET)
            budgets[name] = {"until": None if stop is None else stop.until, "learnt": learnt}
    return budgets


def summary(c: Connection, d: Dialect) -> list[StoppedGroup]:
    """The stopped resources, grouped by provider, gate and code, the group with most waiting jobs first."""
    now = d.now(c)
    rows = d.execute(
        c, sa.select(RESOURCE).where(_stopped("any", now)).order_by(RESOURCE.c.key).limit(STOPPED_LIMIT)
    ).mappings()
    groups: dict[tuple[str, str, str | None], list[tuple[Stop, Mapping[Any, Any]]]] = defaultdict(list)
    for row in rows:
        if (stop := stop_of(_facts(row), now)) is not None:
            code = None if stop.gate == "pause" else stop.code
            groups[row["key"].partition("/")[0], stop.gate, code].append((stop, row))
    made = [_group(c, d, *name, members) for name, members in groups.items()]
    return sorted(made, key=lambda g: (-int(g.waiting), g.provider, g.gate))


def learnt_limits(c: Connection, d: Dialect, now: datetime) -> dict[str, dict[str, Any]]:
    """What throttles taught, by resource, of the first `LEARNT_LIMIT` by key."""
    columns = sa.select(RESOURCE.c.key, RESOURCE.c.learnt).where(RESOURCE.c.learnt.is_not(None))
    rows = d.execute(c, columns.order_by(RESOURCE.c.key).limit(LEARNT_LIMIT)).all()
    limits = {key: learnt_summary(Learnt.from_json(doc), now.timestamp()) for key, doc in rows}
    return {key: limit for key, limit in limits.items() if limit is not None}


def _group(
    c: Connection, d: Dialect, provider: str, gate: str, code: str | None, members: Sequence[tuple[Stop, Any]]
) -> StoppedGroup:
    keys = [stop.resource for stop, _ in members]
    ends = [stop.until for stop, _ in members]
    counts = waiting(c, d, keys[:_COUNTED_KEYS])
    total = sum(counts.values())
    busiest = max(counts, key=lambda key: counts[key])
    errors = [row["last_error"] for s, row in members if error_shut(gate, code, s.since, row["last_error_at"])]
    return StoppedGroup(
        provider=provider,
        gate=gate,
        code=code,
        resources=len(keys),
        since=min((s.since for s, _ in members if s.since is not None), default=None),
        until=None if None in ends else max(end for end in ends if end is not None),
        waiting=Count(total, more=len(keys) > len(counts) or any(n.more for n in counts.values())),
        example=busiest,
        example_job=first_job(c, d, busiest),
        last_error=next((error for error in reversed(errors) if error), None),
        first_until=min((end for end in ends if end is not None), default=None),
        reason=next((row["paused_reason"] for _, row in members if row["paused_reason"]), None)
        if hand_shut(gate, code)
        else None,
    )


def waiting(c: Connection, d: Dialect, keys: Sequence[str], *, limit: int = COUNT_LIMIT) -> dict[str, Count]:
    """Ready jobs at or below each key, counted up to ``limit`` each."""
    if not keys:
        return {}
    rows = d.run(
        c,
        "SELECT value, (SELECT count(*) FROM (SELECT 1 FROM {job} WHERE state = 'ready'"
        "   AND resource_key = value LIMIT :limit) AS own)"
        " + (SELECT count(*) FROM (SELECT 1 FROM {job} WHERE state = 'ready'"
        "   AND resource_key > value || '/' AND resource_key < value || '0' LIMIT :limit) AS below)"
        f" FROM {d.array('keys', 'text')}",
        {"keys": d.pack_keys(keys), "limit": limit + 1},
    )
    return {row[0]: Count(min(row[1], limit), more=row[1] > limit) for row in rows}


def first_job(c: Connection, d: Dialect, key: str) -> UUID | None:
    """The ready job that comes first at a key, or one below it."""
    own = sa.select(JOB.c.id).where(in_state("ready"), JOB.c.resource_key == key)
    own = own.order_by(JOB.c.priority.desc(), JOB.c.run_at, JOB.c.id).limit(1)
    if (id_ := d.execute(c, own).scalar()) is None:
        below = sa.select(JOB.c.id).where(in_state("ready"), within(JOB.c.resource_key, key)).limit(1)
        id_ = d.execute(c, below).scalar()
    return id_


def _stopped(gate: str, now: datetime, between: Between = (None, None)) -> ColumnElement[bool]:
    """Rows that a gate may stop now, and since when; `stop_of` has the last word."""
    t = RESOURCE.c
    stopped = {
        "breaker": t.breaker != "closed",
        "cooldown": t.blocked_until > now,
        "pause": t.paused_at.is_not(None) & (t.paused_until.is_(None) | (t.paused_until > now)),
        "auth": t.auth != "ok",
    }
    since = {"breaker": t.opened_at, "cooldown": t.blocked_since, "pause": t.paused_at, "auth": t.auth_since}
    for name, column in since.items():
        bounds = [column >= between[0]] if between[0] is not None else []
        bounds += [column < between[1]] if between[1] is not None else []
        stopped[name] = sa.and_(stopped[name], *bounds)
    if gate == "any":
        return sa.or_(*stopped.values())
    if gate not in stopped:
        raise InvalidInput(f"{gate!r} is not a gate: use one of {', '.join(stopped)}, or any")
    return stopped[gate]


def _facts(row: Mapping[Any, Any]) -> ResourceFacts:
    b = BreakerFacts(
        row["breaker"], row["generation"], row["open_until"], row["opened_at"], row["closed_at"],
        row["reopens"], row["probe_owner"], row["probe_until"],
    )  # fmt: skip
    return ResourceFacts(
        row["key"], b, row["blocked_until"], row["blocked_since"], row["blocked_code"], row["paused_at"],
        row["paused_until"], row["paused_reason"], row["auth"], row["auth_since"], row["policy"],
        learnt=Learnt.from_json(row["learnt"]),
    )  # fmt: skip


def _info(row: Mapping[Any, Any], waits: Count, running: int, now: datetime) -> ResourceInfo:
    facts = _facts(row)
    stop = stop_of(facts, now)
    same = {name: row[name] for name in _SAME}
    return ResourceInfo(
        gate=stop.gate if stop else None,
        code=stop.code if stop else None,
        since=stop.since if stop else None,
        until=stop.until if stop else None,
        waiting=waits,
        running=running,
        learnt=learnt_summary(facts.learnt, now.timestamp()),
        **same,
    )


_SAME: Final = tuple(
    name
    for name in ResourceInfo.__slots__
    if name not in ("gate", "code", "since", "until", "waiting", "running", "learnt", "budgets")
)
