"""Alerts: their rows, and what the periodic rules read.

A finding meets its alert by fingerprint. The process that writes `told_at` under the row's lock sends the alert to
people: one does, however many have the same finding. Rows are written in the order of fingerprints.

What the rules read is bounded: a rule that cannot read all of something reads the latest or the longest waiting. The
elected worker reads it about twice a minute.

May use: `db`, `gates`, `jobs`.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from resilient.core.alerts.rules import NAMES, AlertInfo
from resilient.core.alerts.words import Size
from resilient.core.base.instants import add_seconds
from resilient.store.db.dialect import ID, JSON, TIME
from resilient.store.jobs.leases import STUCK

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence
    from datetime import datetime

    from sqlalchemy import Connection

    from resilient.core.alerts.rules import Finding
    from resilient.store.db.dialect import Dialect


_FIELDS: Final = {
    "fingerprint": "text", "name": "text", "subject": "text", "cause": "text", "detail": "json", "count": "int",
}  # fmt: skip
_COLUMNS: Final = "fingerprint, name, subject, cause, detail, count, first_at, last_at, told_at, resolved_at"
_TYPES: Final[dict[str, Any]] = {
    "fingerprint": None, "name": None, "subject": None, "cause": None, "detail": JSON, "count": None, "first_at": TIME,
    "last_at": TIME, "told_at": TIME, "resolved_at": TIME,
}  # fmt: skip
TELL_LIMIT: Final = 2_000
_DAY: Final = timedelta(days=1)


def record(c: Connection, d: Dialect, findings: Iterable[Finding], now: datetime, *, lasting: bool) -> None:
    """Write findings to their alerts; one that was resolved begins anew.

    Events are counted; a ``lasting`` condition counts once, however often it is recorded.
    """
    rows = {f.fingerprint: f for f in findings}
    if not rows:
        return
    doc = [
        {
            "fingerprint": key, "name": f.name, "subject": f.subject, "cause": f.cause, "detail": dict(f.detail),
            "count": f.count,
        }
        for key, f in sorted(rows.items())
    ]  # fmt: skip
    again = "old.resolved_at IS NOT NULL"
    count = "old.count" if lasting else "old.count + excluded.count"
    d.run(
        c,
        "INSERT INTO {alert} AS old (fingerprint, name, subject, cause, detail, count, first_at, last_at)"
        " SELECT fingerprint, name, subject, cause, detail, count, CAST(:now AS {timestamp}), CAST(:now AS {timestamp})"
        f" FROM {d.records('doc', _FIELDS)} AS r WHERE true ORDER BY fingerprint"
        " ON CONFLICT (fingerprint) DO UPDATE SET detail = excluded.detail, cause = excluded.cause,"
        " last_at = excluded.last_at,"
        f" count = CASE WHEN {again} THEN excluded.count ELSE {count} END,"
        f" first_at = CASE WHEN {again} THEN excluded.first_at ELSE old.first_at END,"
        f" told_at = CASE WHEN {again} THEN NULL ELSE old.told_at END, resolved_at = NULL",
        {"doc": json.dumps(doc), "now": now},
    )


def erased(c: Connection, d: Dialect, since: datetime, now: datetime) -> list[str]:
    """The accounts that are being erased, or whose erasure began after a time: nothing is to be written of them.

    An erasure of which nobody knows how it ended is believed to go on for a day. One that failed counts as none: it is
    refused, or to be done again.
    """
    rows = d.run(
        c,
        "SELECT subject, outcome FROM {audit} WHERE action = 'erase' AND at > :oldest"
        " AND (at > :since OR outcome IS NULL)",
        {"since": since, "oldest": min(since, now - _DAY)},
        subject=None,
        outcome=JSON,
    )
    return [row.subject for row in rows if "error" not in (row.outcome or {})]


def to_tell(
    c: Connection, d: Dialect, now: datetime, before: datetime
) -> tuple[list[tuple[AlertInfo, bool]], dict[str, Size]]:
    """Alerts that the caller is to send now, each with whether it is news, and the sizes of their causes before.

    Those never sent, and those sent until ``before`` that went on since then; with one of these, all of its cause.
    Alerts that only a newer version has words for are its own to send.
    """
    rows = d.run(
        c,
        f"SELECT {_COLUMNS} FROM {{alert}} WHERE resolved_at IS NULL"
        f" AND (told_at IS NULL OR (told_at <= :before AND last_at > told_at)) AND name {d.among('names', 'text')}"
        " ORDER BY fingerprint LIMIT :limit {skip_locked}",
        {"before": before, "limit": TELL_LIMIT, "names": d.pack_keys(sorted(NAMES))},
        **_TYPES,
    ).all()
    by_cause = sizes(c, d, {r.cause for r in rows}, before)
    _set(c, d, [r.fingerprint for r in rows], "told_at = :now", now)
    if again := sorted({r.cause for r in rows if r.told_at is not None}):
        of_causes = d.chosen(
            "SELECT fingerprint FROM {alert} WHERE resolved_at IS NULL AND told_at IS NOT NULL"
            f" AND cause {d.among('causes', 'text')} ORDER BY fingerprint {{skip_locked}}"
        )
        d.run(
            c,
            f"UPDATE {{alert}} SET told_at = :now WHERE fingerprint {of_causes}",
            {"now": now, "causes": _pack(d, again)},
        )
    return [(_info(r), r.told_at is None) for r in rows], by_cause


def sizes(c: Connection, d: Dialect, causes: Collection[str], since: datetime) -> dict[str, Size]:
    """Per cause: how many alerts go on, how many of these were sent since then, how many ended since then."""
    if not causes:
        return {}
    rows = d.run(
        c,
        "SELECT cause, sum(CASE WHEN resolved_at IS NULL THEN 1 ELSE 0 END),"
        " sum(CASE WHEN resolved_at IS NULL AND told_at > :since THEN 1 ELSE 0 END),"
        " sum(CASE WHEN resolved_at > :since THEN 1 ELSE 0 END)"
        f" FROM {{alert}} WHERE cause IN (SELECT value FROM {d.array('causes', 'text')}) GROUP BY cause",
        {"since": since, "causes": _pack(d, sorted(causes))},
    )
    return {r[0]: Size(int(r[1]), int(r[2]), int(r[3])) for r in rows}


def _pack(d: Dialect, texts: list[str]) -> Any:
    """Texts of any characters as one parameter (`Dialect.pack_keys` is for keys)."""
    return texts if d.is_postgresql else json.dumps(texts)


def resolve(
    c: Connection,
    d: Dialect,
    names: Collection[str],
    unseen_since: datetime,
    now: datetime,
    *,
    spare: Collection[tuple[str, str]] = (),
) -> list[AlertInfo]:
    """Close alerts of these names that were not recorded since a time; returns those that had been sent.

    ``spare``: (name, subject) of what the caller cannot judge.
    """
    if not names:
        return []
    rows = d.run(
        c,
        f"SELECT {_COLUMNS} FROM {{alert}} WHERE resolved_at IS NULL AND last_at <= :since"
        f" AND name {d.among('names', 'text')} ORDER BY fingerprint {{skip_locked}}",
        {"since": unseen_since, "names": d.pack_keys(sorted(names))},
        **_TYPES,
    ).all()
    over = [r for r in rows if (r.name, r.subject) not in spare]
    _set(c, d, [r.fingerprint for r in over], "resolved_at = :now", now)
    return [_info(r) for r in over if r.told_at is not None]


def withdraw(c: Connection, d: Dialect, name: str, subjects: Collection[str], now: datetime) -> None:
    """Close alerts that were wrong; one that was not sent yet will never be sent."""
    rows = d.run(
        c,
        "SELECT fingerprint FROM {alert} WHERE resolved_at IS NULL AND name = :name"
        f" AND subject {d.among('subjects', 'text')} ORDER BY fingerprint {{row_lock}}",
        {"name": name, "subjects": d.pack_keys(sorted(subjects))},
    )
    _set(c, d, list(rows.scalars()), "resolved_at = :now", now)


def page(c: Connection, d: Dialect, *, resolved: bool, limit: int) -> list[AlertInfo]:
    """Alerts that go on, or all, the latest first."""
    where = "" if resolved else " WHERE resolved_at IS NULL"
    rows = d.run(
        c,
        f"SELECT {_COLUMNS} FROM {{alert}}{where} ORDER BY last_at DESC, fingerprint LIMIT :limit",
        {"limit": limit},
        **_TYPES,
    )
    return [_info(r) for r in rows]


def of_subject(c: Connection, d: Dialect, subject: str, *, limit: int) -> list[AlertInfo]:
    """Alerts of one subject, ended ones too, the latest first."""
    rows = d.run(
        c,
        f"SELECT {_COLUMNS} FROM {{alert}} WHERE subject = :subject ORDER BY last_at DESC, fingerprint LIMIT :limit",
        {"subject": subject, "limit": limit},
        **_TYPES,
    )
    return [_info(r) for r in rows]


def _set(c: Connection, d: Dialect, fingerprints: list[str], sets: str, now: datetime) -> None:
    if fingerprints:
        d.run(
            c,
            f"UPDATE {{alert}} SET {sets} WHERE fingerprint {d.among('fingerprints', 'text')}",
            {"fingerprints": d.pack_keys(fingerprints), "now": now},
        )


def _info(r: Any) -> AlertInfo:
    return AlertInfo(**{**r._mapping, "detail": r.detail or {}})  # noqa: SLF001 - SQLAlchemy's public name


# -- what the periodic rules read --------------------------------------------------------------------------------------

STOPPED: Final = 1_000  # resources
TURNS: Final = 100  # the oldest
EXECUTIONS: Final = 1_000
SWEPT: Final = 10_000  # jobs
Executions = list[tuple[str, str]]  # kind and resource key

_STOPPED_TYPES: Final[dict[str, Any]] = {
    "key": None, "breaker": None, "open_until": TIME, "opened_at": TIME, "blocked_until": TIME, "blocked_since": TIME,
    "blocked_code": None, "auth": None, "auth_since": TIME, "last_error": None, "last_error_code": None,
}  # fmt: skip


def stopped(c: Connection, d: Dialect, far: datetime) -> list[dict[str, Any]]:
    """Resources with an open breaker, without credentials, or with a cooldown beyond ``far``.

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
    """The resources that have waited longest for a worker: (key, next job, ready since).

    Stopped resources are not among them: they have no ordinary turn.
    """
    keys = d.run(
        c,
        "SELECT resource_key FROM {turn} WHERE parked_on IS NULL ORDER BY id LIMIT :limit",
        {"limit": TURNS},
    ).scalars()
    if not (distinct := sorted(set(keys))):
        return []
    first = "FROM {job} WHERE state = 'ready' AND resource_key = value ORDER BY priority DESC, run_at, id LIMIT 1"
    rows = d.run(
        c,
        f"SELECT value AS key, (SELECT id {first}) AS id, (SELECT run_at {first}) AS run_at"
        f" FROM {d.array('keys', 'text')}",
        {"keys": d.pack_keys(distinct)},
        key=None,
        id=ID,
        run_at=TIME,
    )
    return [(r.key, str(r.id), r.run_at) for r in rows if r.id is not None]


def executions(c: Connection, d: Dialect, since: datetime, volume: int) -> tuple[Executions, Executions]:
    """The latest executions since a time that went well, and those that were charged as failures.

    Both are cut to the time that both samples cover. With fewer than ``volume`` failures both are empty.
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
    """The latest executions that did not simply succeed, newest first; not the notes of new operations."""
    return d.run(
        c,
        "SELECT j.kind, j.resource_key, a.charged, a.finished_at FROM"
        " (SELECT id, job_id, charged, finished_at FROM {attempt}"
        " WHERE charged OR decision NOT IN ('retried', 'once_more') ORDER BY id DESC LIMIT :limit) AS a"
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
    groups: dict[str, tuple[str, int, str, str, datetime]] = {}
    for r in rows:
        groups[r.kind] = (
            r.kind,
            groups[r.kind][1] + 1 if r.kind in groups else 1,
            str(r.id),
            r.resource_key,
            r.updated_at,
        )
    return list(groups.values())


def silent_streams(
    c: Connection, d: Dialect, now: datetime, periods: int
) -> list[tuple[str, int, str, datetime, bool]]:
    """Streams of which no pass ended for ``periods`` of their expected time: how many accounts, and the worst one.

    (stream, resources, the one that waits longest, since when, whether a pass ever ended). Accounts without usable
    credentials have an alert of their own.
    """
    paces = d.run(c, "SELECT DISTINCT stream, expected FROM {cursor} WHERE expected IS NOT NULL ORDER BY 1, 2").all()
    result = []
    for stream, expected in paces:
        rows = d.run(
            c,
            "SELECT s.resource_key, s.completed_at, coalesce(s.completed_at, s.created_at) AS since,"
            " count(*) OVER () AS resources FROM {cursor} s LEFT JOIN {connection} n ON n.resource_key = s.resource_key"
            " LEFT JOIN {grant} g ON g.id = n.grant_id WHERE s.stream = :stream AND s.expected = :expected"
            " AND coalesce(s.completed_at, s.created_at) < :before"
            " AND (g.state IS NULL OR g.state IN ('active', 'refreshing', 'unknown')) ORDER BY 3, 1 LIMIT 1",
            {"stream": stream, "expected": expected, "before": add_seconds(now, -expected * periods)},
            resource_key=None,
            completed_at=TIME,
            since=TIME,
            resources=None,
        )
        result += [(stream, r.resources, r.resource_key, r.since, r.completed_at is not None) for r in rows]
    return result
