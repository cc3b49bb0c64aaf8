"""The thread that keeps leases: also while a handler blocks the event loop, but not for ever."""

from __future__ import annotations

import asyncio
import time

import pytest

from resilient import Job, Resilient, handler
from resilient.engine.run import heartbeat
from resilient.store.db.dialect import TIME
from tests.helpers import until


@pytest.mark.parametrize(("limit", "kept"), [(300.0, True), (0.6, False)])
async def test_a_loop_that_is_blocked_for_too_long_keeps_no_job_from_other_workers(
    database_url, monkeypatch, limit, kept
):
    """A handler that never gives the loop back would hold all the worker's jobs for as long as the process lives."""
    monkeypatch.setattr(heartbeat, "BLOCKED_LIMIT", limit)
    held = []

    @handler("blocks")
    async def blocks(job: Job[None]) -> None:
        time.sleep(3.0)  # noqa: ASYNC251 - the point
        lease = "SELECT lease_until FROM {job}"
        until, now = app.database.transaction_sync(lambda c, d: (d.run(c, lease, lease_until=TIME).scalar(), d.now(c)))
        held.append(until > now)

    app = Resilient(database_url, handlers=[blocks], upgrade=False)
    await app.enqueue(blocks, resource_key="p/1")
    await app.worker(lease=1.0).drain(timeout=20)
    assert held == [kept]
    await app.close()


async def test_the_loop_counts_as_alive_after_the_engine_failed_over_an_alert(database_url, monkeypatch, caplog):
    """Otherwise it would seem to stand still, and after a while the worker would renew no lease."""

    @handler("works")
    async def works(job: Job[None]) -> None:
        pass

    app = Resilient(database_url, handlers=[works], upgrade=False)
    worker, failures = app.worker(), []
    task = asyncio.create_task(worker.run(signals=False))
    await until(lambda: worker.heartbeat._ticker)

    def fail(*_):
        failures.append(worker.heartbeat._alive_at)
        raise LookupError("a mistake")

    monkeypatch.setattr(worker.heartbeat, "_report", fail)
    await until(lambda: len(failures) >= 2)
    worker.stop()
    await task
    assert failures[0] < failures[1]
    assert "the engine failed over an alert of the database" in caplog.text
    await app.close()


async def test_an_outage_is_one_line_however_many_beats_it_lasts(sqlite_url, caplog):
    @handler("works")
    async def works(job: Job[None]) -> None:
        pass

    app = Resilient(sqlite_url, handlers=[works], upgrade=False)
    worker = app.worker(lease=1.0)

    def rename(before, after):
        app.database.transaction_sync(lambda c, _d: c.exec_driver_sql(f"ALTER TABLE {before} RENAME TO {after}"))

    def lines(text):
        return [record.levelname for record in caplog.records if text in record.getMessage()]

    caplog.set_level("DEBUG", "resilient.worker")
    task = asyncio.create_task(worker.run(signals=False))
    await until(lambda: worker.heartbeat._ticker)
    rename("resilient_worker", "away")
    await until(lambda: len(lines("heartbeat failed")) >= 3)
    rename("away", "resilient_worker")
    await until(lambda: lines("reaches the database again"))
    worker.stop()
    await task
    await app.close()
    first, *others = lines("heartbeat failed")
    assert (first, set(others)) == ("WARNING", {"DEBUG"})
    assert lines("reaches the database again") == ["WARNING"]
