"""Two transactions of PostgreSQL side by side, step by step, without any sleep that decides something."""

from __future__ import annotations

import time
from collections.abc import Container
from concurrent.futures import Future

import psycopg

PATIENCE = 150.0  # seconds until something that must come is given up

_WAITERS = (
    "SELECT pid, pg_blocking_pids(pid) FROM pg_stat_activity WHERE datname = current_database() AND state = 'active'"
    " AND wait_event_type = 'Lock'"
)


def waiters(watch: psycopg.Connection) -> dict[int, list[int]]:
    """Who waits for a lock in this database at the moment, and for whom: process ids of the server."""
    return {pid: blockers for pid, blockers in watch.execute(_WAITERS).fetchall() if blockers}


def until_it_waits(watch: psycopg.Connection, running: Future[object], others: Container[int] = ()) -> bool:
    """Return once somebody beside the ``others`` waits for a lock (True), or ``running`` came to its end (False)."""
    deadline = time.monotonic() + PATIENCE
    while not running.done():
        if any(pid not in others for pid in waiters(watch)):
            return True
        assert time.monotonic() < deadline, "it neither waits nor ends"
        time.sleep(0.001)
    return False


def until_somebody_waits(database, thread) -> None:
    """Return once a transaction of the database waits for a lock; raises if the thread that should is over first."""
    with psycopg.connect(**database.driver_arguments(), autocommit=True) as watch:
        deadline = time.monotonic() + PATIENCE
        while not waiters(watch):
            assert thread.is_alive(), "it did not wait"
            assert time.monotonic() < deadline, "nobody waits"
            thread.join(0.01)
