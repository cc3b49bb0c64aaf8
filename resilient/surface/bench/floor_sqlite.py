"""The bare limit of a SQLite file: the least code that could pass for a durable queue.

One table with one partial index, the standard library's sqlite3, WAL with ``synchronous=FULL`` (what the
engine uses), ``BEGIN IMMEDIATE``; one connection in a worker, because SQLite has one writer. A waiting
worker looks at ``PRAGMA data_version`` every 2 ms: SQLite notifies nobody.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from resilient.surface.bench.crew import BenchFailed

if TYPE_CHECKING:
    from resilient.surface.bench.crew import Start
    from resilient.surface.scratch import Scratch

_TABLE: Final = """
CREATE TABLE floor_job (
    id integer PRIMARY KEY, resource_key text NOT NULL, payload text, status integer NOT NULL DEFAULT 0,
    run_at real NOT NULL DEFAULT ((julianday('now') - 2440587.5) * 86400), locked_at real, done_at real
);
CREATE INDEX floor_job_ready ON floor_job (run_at, id) WHERE status = 0;
"""
_CLAIM: Final = """
UPDATE floor_job SET status = 1, locked_at = (julianday('now') - 2440587.5) * 86400 WHERE id IN (
    SELECT id FROM floor_job WHERE status = 0 ORDER BY run_at, id LIMIT ?
) RETURNING id, resource_key, payload
"""
_COMPLETE: Final = """
UPDATE floor_job SET status = 2, done_at = (julianday('now') - 2440587.5) * 86400
WHERE id IN (SELECT value FROM json_each(?)) AND status = 1
"""
_INSERT: Final = "INSERT INTO floor_job (resource_key, payload) VALUES (?, ?)"
_BATCH: Final = 100
_POLL: Final = 0.002  # seconds


def connect(place: Scratch) -> sqlite3.Connection:
    """A connection without the driver's own transactions."""
    c = sqlite3.connect(place.path, timeout=30, isolation_level=None)
    c.execute("PRAGMA journal_mode=WAL")
    c.execute("PRAGMA synchronous=FULL")
    return c


def create(place: Scratch) -> None:
    """Make the table."""
    c = connect(place)
    c.executescript(_TABLE)
    c.close()


def fill(place: Scratch, jobs: int, resources: int) -> float:
    """Insert ``jobs`` in one transaction; returns the seconds that takes."""
    c = connect(place)
    began = time.perf_counter()
    c.execute("BEGIN IMMEDIATE")
    c.executemany(_INSERT, ((f"bench/{n % resources}", '{"n": 1}') for n in range(jobs)))
    c.execute("COMMIT")
    seconds = time.perf_counter() - began
    c.close()
    return seconds


def drain(start: Start, place: Scratch) -> dict[str, Any]:
    """Claim 100, complete 100, until nothing is left (a task of `run_crew`)."""
    c = connect(place)
    done = 0
    start()
    while ids := [row[0] for row in _write(c, _CLAIM, (_BATCH,))]:
        _write(c, _COMPLETE, ("[" + ",".join(map(str, ids)) + "]",))
        done += len(ids)
    c.close()
    return {"done": done}


def single(place: Scratch, jobs: int) -> list[float]:
    """Insert and commit one row at a time; returns the seconds of each."""
    c = connect(place)
    seconds = []
    for n in range(jobs):
        began = time.perf_counter()
        _write(c, _INSERT, (f"bench/{n}", '{"n": 1}'))
        seconds.append(time.perf_counter() - began)
    _write(c, "DELETE FROM floor_job", ())
    c.close()
    return seconds


def pickup(place: Scratch, jobs: int) -> list[float]:
    """Poll ``data_version`` and claim one job at a time; returns the seconds from each commit to its claim."""
    claimed: list[float] = []
    receipt = threading.Event()

    def poll() -> None:
        c = connect(place)
        version = None
        while len(claimed) < jobs:
            latest = c.execute("PRAGMA data_version").fetchone()
            if latest == version:
                time.sleep(_POLL)
            elif _write(c, _CLAIM, (1,)):
                claimed.append(time.perf_counter())
                receipt.set()
            version = latest
        c.close()

    poller = threading.Thread(target=poll, daemon=True)
    poller.start()
    committed = []
    c = connect(place)
    for n in range(jobs):
        time.sleep(0.01)  # idle between two jobs
        _write(c, _INSERT, (f"bench/{n}", '{"n": 1}'))
        committed.append(time.perf_counter())
        if not receipt.wait(10):
            raise BenchFailed("a polling worker did not find its job within 10 s")
        receipt.clear()
    poller.join(10)
    _write(c, "DELETE FROM floor_job", ())
    c.close()
    return [after - before for before, after in zip(committed, claimed, strict=True)]


def _write(c: sqlite3.Connection, statement: str, params: tuple[Any, ...]) -> list[Any]:
    """One statement in one durable transaction."""
    c.execute("BEGIN IMMEDIATE")
    rows = c.execute(statement, params).fetchall()
    c.execute("COMMIT")
    return rows
