"""A waiting job that a newer one with its unique key replaces."""

from resilient import Job, Resilient, handler
from resilient.store.gates import turns

WORDS = {"resource_key": "p/1", "unique_key": "u"}


@handler("replaced.send")
async def send(job: Job[str]) -> None:
    """Send it."""


async def test_a_job_that_is_replaced_by_one_for_later_waits_for_no_gate_any_more(database, clock):
    """Else it would begin when that gate opens, and not at the time of the newer one."""
    app = Resilient(database, handlers=[send])
    old = await app.enqueue(send, "old", delay=30, **WORDS)
    await database.transaction(lambda c, d: d.run(c, "UPDATE {job} SET waiting_for = 'p/1'"))
    new = await app.enqueue(send, "new", delay=3600, on_conflict="replace", **WORDS)
    later = clock.advance(seconds=1)
    assert await database.transaction(turns.hasten, "p/1", 10, later) == 0
    job = await app.jobs.get(old.id)
    assert (new.id, job.state, job.waiting_for) == (old.id, "scheduled", None)
    assert (job.run_at - later).total_seconds() == 3599
    await app.close()
