"""What watches the connections to a server, over its looks: the times are given, the server is real."""

import contextlib
import logging
import threading
import time

import psycopg
import pytest

from resilient.store.db import pool
from resilient.store.db.pool import LONG, Session, Watch


@pytest.fixture
def busy(postgres_server):
    """A connection on which a statement runs."""
    with psycopg.connect(postgres_server.url(), autocommit=True) as connection:
        thread = threading.Thread(target=_sleep, args=[connection])
        thread.start()
        while not pool._is_busy(connection):
            time.sleep(0.001)
        yield connection
        with psycopg.connect(postgres_server.url(), autocommit=True) as other:
            other.execute("SELECT pg_cancel_backend(%s)", [connection.info.backend_pid])
        thread.join()


def _sleep(connection):
    with contextlib.suppress(psycopg.errors.QueryCanceled):
        connection.execute("SELECT pg_sleep(60)")


def test_a_long_statement_is_logged_at_growing_distances(busy, caplog):
    pid = busy.info.backend_pid
    watch = Watch("db.example", lambda: {pid: Session("active", 1.0)})
    watch.close()
    watch._drivers.add(busy)
    with caplog.at_level(logging.WARNING, "resilient.database"):
        for second in range(0, 1_000, 5):
            watch.look(1_000.0 + second)
    seconds = [record.args[1] for record in caplog.records]
    assert seconds == [LONG, 2 * LONG, 4 * LONG, 8 * LONG, 16 * LONG]
    assert caplog.records[0].getMessage() == f"a statement has been running on db.example for 60 s (pid {pid})"
