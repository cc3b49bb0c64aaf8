"""What time alone brings: limited keys at the pace of their limits, slots of vanished workers to those who wait."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from uuid import uuid4

from resilient import Job, Limit, Resilient, Retry, handler
from resilient.store import claim, jobs, resources, turns


@handler("work", retry=Retry(max_rescues=1))
async def work(job: Job[dict]) -> None:
    """Nothing to do."""


def put(database, *keys):
    new = [jobs.NewJob(uuid4(), "work", key, "{}") for key in keys]
    database.transaction_sync(jobs.insert, new)
    database.transaction_sync(resources.ensure, [*keys, "p"])
    return [job.id for job in new]


async def test_a_limit_of_jobs_is_used_up(database):
    """Twenty a second with one at once: more than the looks of the staging."""
    put(database, *["p/a"] * 25)
    app = Resilient(database, handlers=[work], limits={"p/a": [Limit(20, 1, burst=1, counts="jobs")]}, upgrade=False)
    worker = app.worker(concurrency=4)
    running = asyncio.create_task(worker.run(signals=False))
    began = asyncio.get_running_loop().time()
    while worker.completer.written < 25:
        await asyncio.sleep(0.02)
        assert asyncio.get_running_loop().time() - began < 4.0, worker.completer.written
    worker.stop()
    await running


async def test_a_rescued_job_frees_its_slot_for_whoever_waits(database):
    """Its job is dead, so nobody finishes it; the key that is parked on the cap must not wait for its recheck."""
    put(database, "p/a", "p/b")
    app = Resilient(database, handlers=[work], concurrency={"p": 1}, upgrade=False)
    worker = app.worker()
    ask = claim.Ask("gone", 10, ["work"], timedelta(seconds=-1), app.policies.for_key, lambda: 0.5)
    assert len((await database.transaction(claim.claim, ask)).jobs) == 1
    assert await database.transaction(turns.take, 10) == []
    await worker.sweeper.rescue()
    assert [turn.resource_key for turn in await database.transaction(turns.take, 10)] == ["p/b"]
