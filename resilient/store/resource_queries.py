"""Reading resources for people: one, a page, what is stopped and how much waits for it.

Nothing here locks or writes (`gates.py` does). Counts are bounded: a resource with a million waiting jobs is
as cheap to show as one with ten. The columns of a resource row are unindexed on purpose (cheap updates), so
looking for the stopped ones reads them all: some 100 ms for 100,000 resources.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import sqlalchemy as sa

from resilient.core.admission import ResourceFacts, Stop, error_shut, hand_shut, stop_of
from resilient.core.breaker import BreakerFacts
from resilient.core.errors import InvalidInput
from resilient.core.records import Count, ResourceInfo, StoppedGroup
from resilient.core.resource_key import matches as matches_key
from resilient.core.resource_key import path
from resilient.store import resources, tables
from resilient.store.filters import JOB, in_state, matches, within
from resilient.store.queries import COUNT_LIMIT, PAGE_LIMIT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    from sqlalchemy import ColumnElement, Connection

    from resilient.store.dialect import Dialect

Gate: TypeAlias = Literal["breaker", "cooldown", "pause", "auth"]
Between: TypeAlias = "tuple[datetime | None, datetime | None]"  # from the first on, before the second
KEYS_PAGE: Final = 500
STOPPED_LIMIT: Final = 10_000  # rows of a summary
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
    rows = d.execute(c, sa.select(RESOURCE).where(*where).order_by(RESOURCE.c.key).limit(limit)).mappings().all()
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

    ``between``: only those that it stopped in that time; of any gate, if none is said.
    """
    where = [matches(RESOURCE.c.key, pattern, d), RESOURCE.c.key > after]
    if gate is not None or between != (None, None):
        where.append(_stopped(gate or "any", d.now(c), between))
    keys = sa.select(RESOURCE.c.key).where(*where).order_by(RESOURCE.c.key).limit(limit)
    return list(d.execute(c, keys).scalars())


def queued_keys(c: Connection, d: Dialect, pattern: str) -> list[str]:
    """The keys that match a pattern at or below which jobs wait or run, and which have no row: nobody used them yet."""
    prefix = re.split(r"[*?]", pattern.removesuffix("/**"), maxsplit=1)[0]
    params = {"low": prefix, "high": prefix + _FAR}
    # For three states an index leads from key to key, however many jobs each has; scheduled ones are read through.
    found: set[str] = set()
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
        found.update(rows.scalars())
    rows = d.run(
        c,
        "SELECT DISTINCT resource_key FROM {job} WHERE state = 'scheduled' AND resource_key >= :low"
        " AND resource_key < :high",
        params,
    )
    found.update(rows.scalars())
    wanted = sorted({level for key in found for level in path(key) if matches_key(level, pattern)})
    rows = d.run(c, f"SELECT key FROM {{resource}} WHERE key {d.among('keys', 'text')}", {"keys": d.pack_keys(wanted)})
    used = set(rows.scalars())
    return [key for key in wanted if key not in used]


def get(c: Connection, d: Dialect, key: str) -> ResourceInfo:
    """One resource; as untouched as can be if it has no row yet."""
    if found := page(c, d, pattern=key, limit=1):
        return found[0]
    untouched = {"key": key, "breaker": "closed", "reopens": 0, "auth": "ok"}
    row = {**dict.fromkeys(RESOURCE.c.keys()), **untouched}
    running = resources.count_running(c, d, [key])[key]
    return _info(row, waiting(c, d, [key])[key], running, d.now(c))


def summary(c: Connection, d: Dialect) -> list[StoppedGroup]:
    """What is stopped, grouped by provider, gate and code; the group most jobs wait for comes first."""
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
    if (found := d.execute(c, own).scalar()) is None:
        below = sa.select(JOB.c.id).where(in_state("ready"), within(JOB.c.resource_key, key)).limit(1)
        found = d.execute(c, below).scalar()
    return found


def _stopped(gate: str, now: datetime, between: Between = (None, None)) -> ColumnElement[bool]:
    """Rows that a gate may stop now, and since when; `stop_of` has the last word."""
    t = RESOURCE.c
    found = {
        "breaker": t.breaker != "closed",
        "cooldown": t.blocked_until > now,
        "pause": t.paused_at.is_not(None) & (t.paused_until.is_(None) | (t.paused_until > now)),
        "auth": t.auth != "ok",
    }
    since = {"breaker": t.opened_at, "cooldown": t.blocked_since, "pause": t.paused_at, "auth": t.auth_since}
    for name, column in since.items():
        bounds = [column >= between[0]] if between[0] is not None else []
        bounds += [column < between[1]] if between[1] is not None else []
        found[name] = sa.and_(found[name], *bounds)
    if gate == "any":
        return sa.or_(*found.values())
    if gate not in found:
        raise InvalidInput(f"{gate!r} is not a gate: use one of {', '.join(found)}, or any")
    return found[gate]


def _facts(row: Mapping[Any, Any]) -> ResourceFacts:
    b = BreakerFacts(
        row["breaker"], row["generation"], row["open_until"], row["opened_at"], row["closed_at"],
        row["reopens"], row["probe_owner"], row["probe_until"],
    )  # fmt: skip
    return ResourceFacts(
        row["key"], b, row["blocked_until"], row["blocked_since"], row["blocked_code"], row["paused_at"],
        row["paused_until"], row["paused_reason"], row["auth"], row["auth_since"], row["policy"],
    )  # fmt: skip


def _info(row: Mapping[Any, Any], waits: Count, running: int, now: datetime) -> ResourceInfo:
    stop = stop_of(_facts(row), now)
    same = {name: row[name] for name in _SAME}
    return ResourceInfo(
        gate=stop.gate if stop else None,
        code=stop.code if stop else None,
        since=stop.since if stop else None,
        until=stop.until if stop else None,
        waiting=waits,
        running=running,
        **same,
    )


_SAME: Final = tuple(
    name for name in ResourceInfo.__slots__ if name not in ("gate", "code", "since", "until", "waiting", "running")
)
