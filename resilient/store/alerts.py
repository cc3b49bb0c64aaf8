"""Rows of alerts: what was found, who tells it, what is over.

A finding meets its alert by fingerprint. Whoever writes `told_at` under the row's lock tells people; so an alert is
told by one process, however many found it. Rows are written in the order of fingerprints.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from resilient.core.alert_groups import Size
from resilient.core.alerts import AlertInfo
from resilient.store.dialect import JSON, TIME

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from datetime import datetime

    from sqlalchemy import Connection

    from resilient.core.alerts import Finding
    from resilient.store.dialect import Dialect

_FIELDS: Final = {
    "fingerprint": "text", "name": "text", "subject": "text", "cause": "text", "detail": "json", "count": "int",
}  # fmt: skip
_COLUMNS: Final = "fingerprint, name, subject, cause, detail, count, first_at, last_at, told_at, resolved_at"
_TYPES: Final[dict[str, Any]] = {
    "fingerprint": None, "name": None, "subject": None, "cause": None, "detail": JSON, "count": None, "first_at": TIME,
    "last_at": TIME, "told_at": TIME, "resolved_at": TIME,
}  # fmt: skip
TOLD_AT_ONCE: Final = 2_000


def record(c: Connection, d: Dialect, findings: Iterable[Finding], now: datetime, *, lasting: bool) -> None:
    """Write findings to their alerts; one that was resolved begins anew.

    Events are counted; a ``lasting`` condition counts once, however often it is seen.
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


def to_tell(
    c: Connection, d: Dialect, now: datetime, before: datetime
) -> tuple[list[tuple[AlertInfo, bool]], dict[str, Size]]:
    """Alerts to tell now, whether they are news, and the sizes of their causes before; the caller tells them.

    Those never told, and those told until ``before`` that went on since then; with one of these, all of its cause.
    """
    rows = d.run(
        c,
        f"SELECT {_COLUMNS} FROM {{alert}} WHERE resolved_at IS NULL"
        " AND (told_at IS NULL OR (told_at <= :before AND last_at > told_at))"
        " ORDER BY fingerprint LIMIT :limit {skip_locked}",
        {"before": before, "limit": TOLD_AT_ONCE},
        **_TYPES,
    ).all()
    found = sizes(c, d, {r.cause for r in rows}, before)
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
    return [(_info(r), r.told_at is None) for r in rows], found


def sizes(c: Connection, d: Dialect, causes: Collection[str], since: datetime) -> dict[str, Size]:
    """How many alerts causes have: that go on, were told since then among those, ended since then."""
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
    """Any text, not only keys."""
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
    """Close alerts of these names that were not found since a time; returns those that people had been told of.

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
    """These are not so after all: close them; people who were not told yet never are."""
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


def _set(c: Connection, d: Dialect, fingerprints: list[str], sets: str, now: datetime) -> None:
    if fingerprints:
        d.run(
            c,
            f"UPDATE {{alert}} SET {sets} WHERE fingerprint {d.among('fingerprints', 'text')}",
            {"fingerprints": d.pack_keys(fingerprints), "now": now},
        )


def _info(r: Any) -> AlertInfo:
    return AlertInfo(**{**r._mapping, "detail": r.detail or {}})  # noqa: SLF001 - SQLAlchemy's public name
