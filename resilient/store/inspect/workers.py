"""Worker rows: heartbeats, so that people and `why` can tell who is alive. Nothing is decided by them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa

from resilient.store.db.dialect import JSON, TIME, Dialect

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection, Row

LATELY: Final = timedelta(seconds=30)
KEPT: Final = timedelta(days=1)


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


def beat(c: Connection, d: Dialect, row: Beat, now: datetime) -> None:
    """Insert or refresh a worker's row."""
    kinds = "CAST(:kinds AS json)" if d.is_postgresql else ":kinds"
    d.run(
        c,
        "INSERT INTO {worker} (id, host, pid, kinds, concurrency, running, code_version, started_at, seen_at, stopping)"
        f" VALUES (:id, :host, :pid, {kinds}, :concurrency, :running, :code_version, :now, :now, :stopping)"
        " ON CONFLICT (id) DO UPDATE SET running = excluded.running, seen_at = excluded.seen_at,"
        " stopping = excluded.stopping",
        {
            "id": row.id,
            "host": row.host,
            "pid": row.pid,
            "kinds": json.dumps(row.kinds),
            "concurrency": row.concurrency,
            "running": row.running,
            "code_version": row.code_version,
            "stopping": row.stopping,
            "now": now,
        },
    )


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
        "SELECT id, host, pid, kinds, concurrency, running, code_version, started_at, seen_at, stopping FROM {worker}"
        " WHERE seen_at >= :since ORDER BY started_at, id",
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
    ).all()
