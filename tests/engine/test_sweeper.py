"""What time alone brings: limited keys at the pace of their limits, slots of vanished workers to those who wait."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from uuid import uuid4

from resilient import Job, Limit, Resilient, Retry, handler
from resilient.engine.run import sweeper
from resilient.store.gates import controls as gates
from resilient.store.gates import resources, turns
from resilient.store.jobs import claim
from resilient.store.jobs import insert as jobs
from tests.helpers import until


@handler("work", retry=Retry(max_rescues=1))
async def work(job: Job[dict]) -> None:
    """Nothing to do."""


def put(database, *keys):
    new = [jobs.NewJob(uuid4(), "work", key, "{}") for key in keys]
    database.transaction_sync(jobs.insert, new)
    database.transaction_sync(resources.ensure, [*keys, "p"])
    return [job.id for job in new]


async def test_a_limit_of_jobs_is_used_up(database, monkeypatch):
    """Twenty a second with one at once: not only as many as the staging looks by itself, one a second."""
    monkeypatch.setattr(sweeper, "TICK", 3600.0)
    put(database, *["p/a"] * 25)
    app = Resilient(database, handlers=[work], limits={"p/a": [Limit(20, 1, burst=1, counts="jobs")]}, upgrade=False)
    worker = app.worker(concurrency=4)
    running = asyncio.create_task(worker.run(signals=False))
    await until(lambda: worker.completer.written >= 25)
    worker.stop()
    await running


async def test_a_rescued_job_frees_its_slot_for_whoever_waits(database):
    """Its job is dead, so nobody finishes it; the key that is parked on the cap must not wait for its recheck."""
    put(database, "p/a", "p/b")
    app = Resilient(database, handlers=[work], concurrency={"p": 1}, upgrade=False)
    worker = app.worker()
    ask = claim.Ask("gone", 10, ["work"], timedelta(seconds=-1), app.policies.for_key, lambda: 0.5)
    assert len((await database.transaction(claim.claim, ask)).jobs) == 1
    assert await database.transaction(turns.take, turns.Selection(10)) == []
    await worker.sweeper.rescue()
    assert [turn.resource_key for turn in await database.transaction(turns.take, turns.Selection(10))] == ["p/b"]


async def test_a_probe_that_was_lost_with_its_worker_is_replaced_at_once(database):
    """Not only when the probe's own lease of a minute is over."""
    put(database, "p/a", "p/a")
    app = Resilient(database, handlers=[work], upgrade=False)
    now = await database.transaction(lambda c, d: d.now(c))
    await database.transaction(_isolate, "p/a", now)
    ask = claim.Ask("gone", 10, ["work"], timedelta(seconds=-1), app.policies.for_key, lambda: 0.5)
    claimed = await database.transaction(claim.claim, ask)
    assert [key for ((key, _),) in claimed.probes.values()] == ["p/a"]
    assert await database.transaction(turns.take, turns.Selection(10)) == []  # the other job waits for the probe
    await app.worker().sweeper.rescue()
    again = await database.transaction(claim.claim, claim.Ask(
        "next", 10, ["work"], timedelta(seconds=60), app.policies.for_key, lambda: 0.5))  # fmt: skip
    assert [key for ((key, _),) in again.probes.values()] == ["p/a"]


async def test_a_probe_of_a_living_worker_is_left_alone(database):
    put(database, "p/a", "p/b")
    app = Resilient(database, handlers=[work], upgrade=False)
    now = await database.transaction(lambda c, d: d.now(c))
    gone = claim.Ask("gone", 10, ["work"], timedelta(seconds=-1), app.policies.for_key, lambda: 0.5)
    assert len((await database.transaction(claim.claim, gone)).jobs) == 2
    await database.transaction(_isolate, "p", now)
    put(database, "p/c")
    alive = claim.Ask("alive", 10, ["work"], timedelta(seconds=60), app.policies.for_key, lambda: 0.5)
    probing = (await database.transaction(claim.claim, alive)).probes
    assert [key for ((key, _),) in probing.values()] == ["p"]
    await app.worker().sweeper.rescue()
    assert (await database.transaction(resources.read, ["p"]))["p"].breaker.probe_owner == "alive"
    assert (await database.transaction(claim.claim, alive)).jobs == []


def _isolate(c, d, key, now):
    gates.open_(c, d, key, until=now - timedelta(seconds=1))
