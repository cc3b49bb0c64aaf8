"""A job that was enqueued again while it ran: what its next run is, and when the wish is over."""

from datetime import timedelta

import pytest

from resilient import Cancel, Fixed, Job, Permanent, Resilient, Retry, Transient, handler
from resilient.engine.run import completer, sweeper
from tests.helpers import bury, drain, settle

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


@pytest.mark.parametrize(
    "first", [None, Permanent("no such thing"), Cancel("it is gone")], ids=["succeeds", "dies", "cancels itself"]
)
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


@pytest.mark.parametrize("end", ["cancelled", "discarded"])
async def test_no_wish_outlives_its_job(made, end):
    """Else a retry would run it twice."""
    again = runs_with({"on_conflict": "replace"}, first=Transient("later"))
    app = made(again)
    done = await app.enqueue(again, "v1", **WORDS)
    await drain(app)
    await app.jobs.cancel(done.id)
    assert (await app.jobs.get(done.id)).state == "cancelled"
    if end == "discarded":
        await app.jobs.retry(done.id)
        await app.jobs.cancel(done.id)
    await app.jobs.retry(done.id)
    await drain(app)
    assert RUNS == ["v1", "v1"]


@pytest.mark.parametrize("lane", [{}, {"ordering_key": "lane"}], ids=["alone", "in order"])
@pytest.mark.parametrize("on_conflict", ["keep", "replace"])
async def test_an_expiry_while_the_first_run_waits_for_its_next_try_ends_that_one_alone(made, clock, on_conflict, lane):
    again = runs_with({"on_conflict": on_conflict} | lane, first=Transient("later"))
    app = made(again)
    done = await app.enqueue(again, "v1", **WORDS, **lane, expires_in=3600)
    await drain(app)
    await app.resources.pause("p/1")
    clock.advance(hours=2)
    await app.worker().sweeper._expire()
    assert (await app.jobs.get(done.id)).state == "ready"
    assert (await app.jobs.attempts(done.id))[-1].decision == "expired"
    await app.resources.resume("p/1")
    await settle(app)
    second = "v1" if on_conflict == "keep" else "v2"
    assert RUNS[1:] == [second]
    assert (await app.jobs.get(done.id)).state == "succeeded"


async def test_a_wish_with_an_expiry_of_its_own_ends_with_that(made, clock):
    again = runs_with({"on_conflict": "replace", "expires_in": 1800}, first=Transient("later"))
    app = made(again)
    done = await app.enqueue(again, "v1", **WORDS, expires_in=3600)
    await drain(app)
    clock.advance(hours=2)
    for _ in range(2):  # the first ends the operation that waits, the second the wish
        await app.worker().sweeper._expire()
    job = await app.jobs.get(done.id)
    assert (job.state, job.last_error_kind, job.payload) == ("dead", "expired", "v2")
    assert RUNS == ["v1"]


async def test_an_expiry_lets_nothing_run_once_more_while_a_request_is_in_doubt(made, clock):
    again = runs_with({}, first=Transient("later"))
    app = made(again)
    done = await app.enqueue(again, "v1", **WORDS, expires_in=3600)
    await drain(app)
    mark = "UPDATE {job} SET sent = :sent"
    await app.database.transaction(lambda c, d: d.run(c, mark, {"sent": '{"charge": {}}'}) and None)
    clock.advance(hours=2)
    await app.worker().sweeper._expire()
    assert (await app.jobs.get(done.id)).state == "dead"


async def test_it_goes_under_the_key_that_the_newer_one_names(made):
    keys = []

    @handler("again")
    async def again(job: Job[str]) -> None:
        keys.append(job.idempotency_key)
        if len(keys) == 1:
            await job.app.enqueue(again, "v2", **AGAIN, on_conflict="replace", idempotency_key="order-2")

    app = made(again)
    await app.enqueue(again, "v1", **WORDS, idempotency_key="order-1")
    assert await drain(app) == 2
    assert keys == ["order-1", "order-2"]


@pytest.mark.parametrize("end", [Permanent("no such thing"), Cancel("it is gone")], ids=["dies", "cancels itself"])
async def test_a_cancel_that_ends_the_wish_leaves_the_operation_its_key(made, end):
    """It was claimed with the wish, and the cancel came while it ran: a retry of it is no other operation."""
    keys = []

    @handler("again", retry=Retry(max_attempts=5, delay=Fixed(0)))
    async def again(job: Job[str]) -> None:
        keys.append(job.idempotency_key)
        if len(keys) == 1:
            await job.app.enqueue(again, "v2", **AGAIN, on_conflict="keep")
            raise Transient("later")
        if len(keys) == 2:
            await job.app.jobs.cancel(job.id)
            raise end

    app = made(again)
    done = await app.enqueue(again, "v1", **WORDS)
    await drain(app)
    assert (await app.jobs.get(done.id)).state == ("cancelled" if isinstance(end, Cancel) else "dead")
    assert (await app.jobs.retry(done.id)).retried == 1
    await drain(app)
    assert len(keys) == 3
    assert len(set(keys)) == 1


async def test_a_rescue_that_lets_it_run_once_more_is_not_taken_for_its_success(made, clock):
    """The worker that it was taken from would believe its commit, whose answer was lost, to be done."""
    believed = []

    @handler("again")
    async def again(job: Job[str]) -> None:
        if not believed:
            app, version = job.app, "SELECT version FROM {job}"
            fence = await app.database.transaction(lambda c, d: d.run(c, version).first()[0])
            await app.enqueue(again, "v2", **AGAIN, on_conflict="keep")
            clock.advance(65)
            await bury(app)
            (rescued,) = await app.database.transaction(sweeper.rescue, app.worker().sweeper._rules())
            assert rescued.decision == "expired"
            mine = [(job.id, fence, None)]
            believed.append(await app.database.transaction(completer.write, mine, [], {}, again=True))

    app = made(again)
    await app.enqueue(again, "v1", **WORDS, expires_in=60)
    await drain(app)
    assert believed == [set()]
