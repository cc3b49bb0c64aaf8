"""The thread that keeps leases: also while a handler blocks the event loop, but not for ever."""

from __future__ import annotations

import time

import pytest

from resilient import Job, Resilient, handler
from resilient.engine import heartbeat
from resilient.store.dialect import TIME


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
