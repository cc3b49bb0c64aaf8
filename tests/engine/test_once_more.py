"""A job that was enqueued again while it ran: what its next run is, and when the wish is over."""

from datetime import timedelta

import pytest

from resilient import Fixed, Job, Permanent, Resilient, Retry, Transient, handler
from tests.helpers import drain

WORDS = {"resource_key": "p/1", "unique_key": "u", "unique_until": "finish"}
AGAIN = WORDS | {"while_running": "once_more"}
RUNS = []


def runs_with(options, *, first=None, payload="v2"):
    """A handler whose first run enqueues it again, and then ends as ``first`` says."""
    RUNS.clear()

    @handler("again", retry=Retry(max_attempts=5, delay=Fixed(60)))
    async def again(job: Job[str]) -> None:
        RUNS.append(job.payload)
        if len(RUNS) == 1:
            done = await job.app.enqueue(again, payload, **AGAIN, **options)
            assert not done.created
            if first is not None:
                raise first

    return again


@pytest.fixture
async def made(database, clock):
    apps = []

    def make(*handlers):
        app = Resilient(database, handlers=handlers, clock=clock.now)
        apps.append(app)
        return app

    yield make
    for app in apps:
        await app.close()


@pytest.mark.parametrize("first", [None, Permanent("no such thing")], ids=["succeeds", "dies"])
async def test_it_is_then_what_the_newer_one_says(made, clock, first):
    options = {"on_conflict": "replace", "priority": 7, "tags": {"n": "2"}, "max_attempts": 2, "expires_in": 3600}
    again = runs_with(options, first=first)
    app = made(again)
    done = await app.enqueue(again, "v1", **WORDS, expires_in=60)
    assert await drain(app) == 2
    job = await app.jobs.get(done.id)
    assert RUNS == ["v1", "v2"]
    assert (job.state, job.payload, job.priority, job.tags, job.max_attempts) == ("succeeded", "v2", 7, {"n": "2"}, 2)
    assert job.expires_at == clock.now() + timedelta(seconds=3600)


async def test_the_operation_that_runs_keeps_its_payload_to_its_end(made, clock):
    """Its next try goes under the same idempotency key."""
    again = runs_with({"on_conflict": "replace"}, first=Transient("later"))
    app = made(again)
    await app.enqueue(again, "v1", **WORDS)
    await drain(app)
    clock.advance(60)
    assert await drain(app) == 2
    assert RUNS == ["v1", "v1", "v2"]


async def test_a_time_of_its_own_counts(made, clock):
    again = runs_with({"on_conflict": "replace", "delay": 600})
    app = made(again)
    done = await app.enqueue(again, "v1", **WORDS)
    assert await drain(app) == 1
    job = await app.jobs.get(done.id)
    assert (job.state, job.run_at) == ("scheduled", clock.now() + timedelta(seconds=600))
    clock.advance(600)
    await drain(app)
    assert RUNS == ["v1", "v2"]


async def test_one_that_is_kept_runs_once_more_as_it_is(made):
    again = runs_with({})
    app = made(again)
    await app.enqueue(again, "v1", **WORDS)
    assert await drain(app) == 2
    assert RUNS == ["v1", "v1"]


async def test_the_last_of_several_wishes_counts(made):
    RUNS.clear()

    @handler("again")
    async def again(job: Job[str]) -> None:
        RUNS.append(job.payload)
        if len(RUNS) == 1:
            for payload, on_conflict in (("v2", "replace"), ("v3", "replace"), ("v4", "keep")):
                await job.app.enqueue(again, payload, **AGAIN, on_conflict=on_conflict)

    app = made(again)
    await app.enqueue(again, "v1", **WORDS)
    assert await drain(app) == 2
    assert RUNS == ["v1", "v3"]


@pytest.mark.parametrize("on_conflict", ["keep", "replace"])
async def test_an_expiry_that_passed_meanwhile_was_the_first_runs(made, clock, on_conflict):
    RUNS.clear()

    @handler("again")
    async def again(job: Job[str]) -> None:
        RUNS.append(job.payload)
        if len(RUNS) == 1:
            await job.app.enqueue(again, "v2", **AGAIN, on_conflict=on_conflict)
            clock.advance(65)

    app = made(again)
    done = await app.enqueue(again, "v1", **WORDS, expires_in=60)
    await drain(app)
    await app.worker().sweeper._expire()
    assert (await app.jobs.get(done.id)).state == "succeeded"
    assert len(RUNS) == 2


@pytest.mark.parametrize("end", ["cancelled", "discarded", "expired"])
async def test_no_wish_outlives_its_job(made, clock, end):
    """Else a retry would run it twice."""
    again = runs_with({"on_conflict": "replace"}, first=Transient("later"))
    app = made(again)
    done = await app.enqueue(again, "v1", **WORDS, expires_in=3600)
    await drain(app)
    if end == "expired":
        clock.advance(hours=2)
        await app.worker().sweeper._expire()
    else:
        await app.jobs.cancel(done.id)
    assert (await app.jobs.get(done.id)).state == ("dead" if end == "expired" else "cancelled")
    if end == "discarded":
        await app.jobs.retry(done.id)
        await app.jobs.cancel(done.id)
    await app.jobs.retry(done.id)
    await drain(app)
    assert RUNS == ["v1", "v1"]
