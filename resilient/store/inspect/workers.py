"""Worker rows: heartbeats, so that people and `why` can tell who is alive.

Nothing is decided by them but how often idle workers look.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa

from resilient.store.db.dialect import JSON, TIME, Dialect

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection, Row

LATELY: Final = timedelta(seconds=30)
KEPT: Final = timedelta(days=1)
AWAKE: Final = timedelta(seconds=12)  # two beats and a little: that a worker is gone must soon be known


@dataclass(frozen=True, slots=True)
class Beat:
    """A worker's heartbeat: what it is, and how busy."""

    id: str
    host: str
    pid: int
    kinds: list[str]
    concurrency: int
    running: int
    code_version: str
    stopping: bool
    resources: list[str] = field(default_factory=list)  # patterns of what it serves; none: everything
    loop_lag: float | None = None  # seconds: the longest that its event loop stood still since the beat before


def beat(c: Connection, d: Dialect, row: Beat, now: datetime) -> None:
    """Insert or refresh a worker's row."""
    kinds, resources = (f"CAST(:{name} AS json)" if d.is_postgresql else f":{name}" for name in ("kinds", "resources"))
    d.run(
        c,
        "INSERT INTO {worker} (id, host, pid, kinds, concurrency, running, code_version, started_at, seen_at, stopping,"
        f" resources, loop_lag) VALUES (:id, :host, :pid, {kinds}, :concurrency, :running, :code_version, :now, :now,"
        f" :stopping, {resources}, :loop_lag)"
        " ON CONFLICT (id) DO UPDATE SET running = excluded.running, seen_at = excluded.seen_at,"
        " stopping = excluded.stopping, loop_lag = excluded.loop_lag",
        {
            "id": row.id,
            "host": row.host,
            "pid": row.pid,
            "kinds": json.dumps(row.kinds),
            "resources": json.dumps(row.resources) if row.resources else None,
            "concurrency": row.concurrency,
            "running": row.running,
            "code_version": row.code_version,
            "stopping": row.stopping,
            "loop_lag": row.loop_lag,
            "now": now,
        },
    )


def count_alike(c: Connection, d: Dialect, worker_id: str, now: datetime) -> int:
    """How many live workers that are not stopping run the same kinds in the same order, this one included."""
    return int(
        d.run(
            c,
            "SELECT count(*) FROM {worker} WHERE seen_at >= :since AND stopping = :no AND CAST(kinds AS text) ="
            " (SELECT CAST(kinds AS text) FROM {worker} WHERE id = :id)",
            {"since": now - AWAKE, "no": False, "id": worker_id},
        ).scalar_one()
    )


def has_others(c: Connection, d: Dialect, ids: Sequence[str]) -> bool:
    """Whether workers live that are not among these, and are not stopping."""
    rows = d.run(
        c,
        "SELECT id FROM {worker} WHERE seen_at >= :since AND stopping = :no ORDER BY id LIMIT :limit",
        {"since": d.now(c) - LATELY, "no": False, "limit": len(ids) + 1},
    )
    return any(row[0] not in ids for row in rows)


def remove(c: Connection, d: Dialect, worker_id: str) -> None:
    """Delete the row of a worker that ends."""
    d.run(c, "DELETE FROM {worker} WHERE id = :id", {"id": worker_id})


def forget_silent(c: Connection, d: Dialect, now: datetime) -> int:
    """Drop rows of workers that vanished long ago; returns how many."""
    return int(d.run(c, "DELETE FROM {worker} WHERE seen_at < :before", {"before": now - KEPT}).rowcount)


def alive(c: Connection, d: Dialect, now: datetime, within: timedelta = LATELY) -> Sequence[Row[Any]]:
    """Workers with a heartbeat lately, oldest first."""
    return d.run(
        c,
        "SELECT id, host, pid, kinds, concurrency, running, code_version, started_at, seen_at, stopping, resources,"
        " loop_lag"
        " FROM {worker} WHERE seen_at >= :since ORDER BY started_at, id",
        {"since": now - within},
        id=None,
        host=None,
        pid=None,
        kinds=JSON,
        concurrency=None,
        running=None,
        code_version=None,
        started_at=TIME,
        seen_at=TIME,
        stopping=sa.Boolean(),
        resources=JSON,
        loop_lag=None,
    ).all()
