"""What the periodic rules look at: stopped resources, waiting jobs, failed executions, deaths nobody saw.

Everything is bounded: a rule that cannot see all of something looks at the latest or the longest waiting. It
is read by the elected worker about twice a minute.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from resilient.store.dialect import ID, TIME
from resilient.store.leases import STUCK

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from sqlalchemy import Connection

    from resilient.store.dialect import Dialect

STOPPED: Final = 1_000  # resources
TURNS: Final = 100
EXECUTIONS: Final = 1_000
SWEPT: Final = 10_000
Executions = list[tuple[str, str]]  # kind and resource key

_STOPPED_TYPES: Final[dict[str, Any]] = {
    "key": None, "breaker": None, "open_until": TIME, "opened_at": TIME, "blocked_until": TIME, "blocked_since": TIME,
    "blocked_code": None, "auth": None, "auth_since": TIME, "last_error": None, "last_error_code": None,
}  # fmt: skip


def stopped(c: Connection, d: Dialect, far: datetime) -> list[dict[str, Any]]:
    """Resources with an open circuit, without credentials, or told to wait until after ``far``.

    Their columns are unindexed (cheap updates), so all rows are read: some 50 ms for 100,000.
    """
    rows = d.run(
        c,
        f"SELECT {', '.join(_STOPPED_TYPES)} FROM {{resource}} WHERE breaker IN ('open', 'half_open')"
        " OR auth <> 'ok' OR blocked_until > :after ORDER BY key LIMIT :limit",
        {"after": far, "limit": STOPPED},
        **_STOPPED_TYPES,
    )
    return [dict(r._mapping) for r in rows]  # noqa: SLF001 - SQLAlchemy's public name


def waiting(c: Connection, d: Dialect) -> list[tuple[str, str, datetime]]:
    """Of the resources that wait longest to be served and may be: (key, next job, ready since).

    A stopped resource has no ordinary turn.
    """
    keys = d.run(
        c,
        "SELECT resource_key FROM {turn} WHERE parked_on IS NULL ORDER BY id LIMIT :limit",
        {"limit": TURNS},
    ).scalars()
    if not (known := sorted(set(keys))):
        return []
    first = "FROM {job} WHERE state = 'ready' AND resource_key = value ORDER BY priority DESC, run_at, id LIMIT 1"
    rows = d.run(
        c,
        f"SELECT value AS key, (SELECT id {first}) AS id, (SELECT run_at {first}) AS run_at"
        f" FROM {d.array('keys', 'text')}",
        {"keys": d.pack_keys(known)},
        key=None,
        id=ID,
        run_at=TIME,
    )
    return [(r.key, str(r.id), r.run_at) for r in rows if r.id is not None]


def executions(c: Connection, d: Dialect, since: datetime, volume: int) -> tuple[Executions, Executions]:
    """The latest executions since a time that went well, and those that were charged as failures.

    Both are cut to the time that both samples cover. Too few failures to matter (``volume``) are none at all.
    """
    ended = _latest_history(c, d)
    if len(ended) == EXECUTIONS:
        since = max(since, ended[-1].finished_at)
    failed = [r for r in ended if r.charged and r.finished_at >= since]
    if len(failed) < volume:
        return [], []
    well = d.run(
        c,
        "SELECT kind, resource_key, finished_at FROM {job} WHERE state = 'succeeded' AND finished_at IS NOT NULL"
        " AND finished_at >= :since ORDER BY finished_at DESC LIMIT :limit",
        {"since": since, "limit": EXECUTIONS},
        kind=None,
        resource_key=None,
        finished_at=TIME,
    ).all()
    if len(well) == EXECUTIONS:
        since = max(since, well[-1].finished_at)
    good, bad = ([(r.kind, r.resource_key) for r in rows if r.finished_at >= since] for rows in (well, failed))
    return good, bad


def _latest_history(c: Connection, d: Dialect) -> Sequence[Any]:
    """The latest executions that did not simply succeed, newest first."""
    return d.run(
        c,
        "SELECT j.kind, j.resource_key, a.charged, a.finished_at FROM"
        " (SELECT id, job_id, charged, finished_at FROM {attempt} ORDER BY id DESC LIMIT :limit) AS a"
        " JOIN {job} j ON j.id = a.job_id ORDER BY a.id DESC",
        {"limit": EXECUTIONS},
        kind=None,
        resource_key=None,
        charged=None,
        finished_at=TIME,
    ).all()


def swept(c: Connection, d: Dialect, since: datetime, until: datetime) -> list[tuple[str, str, int, str]]:
    """Jobs that expired or lost too many workers in that time: (kind, error kind, how many, one of them)."""
    rows = d.run(
        c,
        "SELECT kind, last_error_kind, count(*), min(CAST(id AS text)) FROM"
        " (SELECT kind, last_error_kind, id FROM {job} WHERE state = 'dead' AND finished_at IS NOT NULL"
        " AND finished_at >= :since AND finished_at < :until"
        " AND last_error_kind IN ('expired', 'lost_worker') LIMIT :limit) AS found"
        " GROUP BY kind, last_error_kind ORDER BY kind, last_error_kind",
        {"since": since, "until": until, "limit": SWEPT},
    )
    return [(r[0], r[1], r[2], str(UUID(r[3]))) for r in rows]


def stuck_handlers(c: Connection, d: Dialect) -> list[tuple[str, int, str, str, datetime]]:
    """Running jobs whose handlers should have ended and do not: (kind, how many, the first one, its key, since)."""
    rows = d.run(
        c,
        "SELECT id, kind, resource_key, updated_at FROM {job} WHERE state = 'running' AND last_error_code = :code"
        " AND last_error_kind = 'timeout' ORDER BY updated_at DESC, id LIMIT :limit",
        {"code": STUCK, "limit": STOPPED},
        id=ID,
        kind=None,
        resource_key=None,
        updated_at=TIME,
    ).all()
    found: dict[str, tuple[str, int, str, str, datetime]] = {}
    for r in rows:
        found[r.kind] = (
            r.kind,
            found[r.kind][1] + 1 if r.kind in found else 1,
            str(r.id),
            r.resource_key,
            r.updated_at,
        )
    return list(found.values())


def silent_streams(
    c: Connection, d: Dialect, now: datetime, periods: int
) -> list[tuple[str, int, str, datetime, bool]]:
    """Streams of which no pass ended for ``periods`` of the time they say: how many of its accounts, and the worst.

    (stream, resources, the one that waits longest, since when, whether a pass ever ended). Accounts without usable
    credentials are told of elsewhere.
    """
    paces = d.run(c, "SELECT DISTINCT stream, expected FROM {cursor} WHERE expected IS NOT NULL ORDER BY 1, 2").all()
    found = []
    for stream, expected in paces:
        rows = d.run(
            c,
            "SELECT s.resource_key, s.completed_at, coalesce(s.completed_at, s.created_at) AS since,"
            " count(*) OVER () AS resources FROM {cursor} s LEFT JOIN {connection} n ON n.resource_key = s.resource_key"
            " LEFT JOIN {grant} g ON g.id = n.grant_id WHERE s.stream = :stream AND s.expected = :expected"
            " AND coalesce(s.completed_at, s.created_at) < :before"
            " AND (g.state IS NULL OR g.state IN ('active', 'refreshing', 'unknown')) ORDER BY 3, 1 LIMIT 1",
            {"stream": stream, "expected": expected, "before": now - timedelta(seconds=expected * periods)},
            resource_key=None,
            completed_at=TIME,
            since=TIME,
            resources=None,
        )
        found += [(stream, r.resources, r.resource_key, r.since, r.completed_at is not None) for r in rows]
    return found
