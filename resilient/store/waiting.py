"""Jobs that wait for a resource off their own path: scheduled, with ``waiting_for``.

No turn of theirs can be parked there, because their key may have other work. So the rows themselves wait, and are never
run to find out: when one is due while its resource is still stopped, staging puts it off (`put_off`), and whatever
opens that resource's gate makes the first of them due at once (`hasten`). Neither waits for a locked job row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from datetime import datetime

    from sqlalchemy import Connection

    from resilient.store.dialect import Dialect

BATCH: Final = 500
_KEYS: Final = 200
_WAITS: Final = "state = 'scheduled' AND waiting_for IS NOT NULL"


def due_for(c: Connection, d: Dialect, now: datetime) -> list[str]:
    """The resources that due jobs have been waiting for."""
    rows = d.run(
        c,
        f"SELECT DISTINCT waiting_for FROM {{job}} WHERE {_WAITS} AND run_at <= :now ORDER BY waiting_for LIMIT :limit",
        {"now": now, "limit": _KEYS},
    )
    return [row[0] for row in rows]


def put_off(c: Connection, d: Dialect, key: str, now: datetime, until: datetime, *, spare: int) -> int:
    """Due jobs that wait for ``key`` wait on, but for the best ``spare`` of them; returns how many."""
    others = d.chosen(
        f"SELECT id FROM {{job}} WHERE {_WAITS} AND waiting_for = :key AND run_at <= :now"
        " ORDER BY priority DESC, run_at, id LIMIT :limit OFFSET :spare {skip_locked}"
    )
    rows = d.run(
        c,
        f"UPDATE {{job}} SET run_at = :until, updated_at = :now WHERE id {others} RETURNING 1",
        {"key": key, "now": now, "until": until, "limit": BATCH, "spare": spare},
    ).all()
    return len(rows)


def hasten(c: Connection, d: Dialect, key: str, limit: int, now: datetime) -> int:
    """The gate of ``key`` opened: the best ``limit`` of the jobs that wait for it are due; returns how many.

    Call it in a statement after the one that wrote the resource row.
    """
    best = d.chosen(
        f"SELECT id FROM {{job}} WHERE {_WAITS} AND waiting_for = :key AND run_at > :now"
        " ORDER BY priority DESC, run_at, id LIMIT :limit {skip_locked}"
    )
    rows = d.run(
        c,
        f"UPDATE {{job}} SET run_at = :now, updated_at = :now WHERE id {best} RETURNING 1",
        {"key": key, "now": now, "limit": min(limit, BATCH)},
    ).all()
    return len(rows)
