"""A unique key that counts until the start, of a job that was claimed and whose handler was not called.

If the claim gave the key away for good, each enqueue would add a job while an account is paused, or while only workers
of an older program run.
"""

import pytest

from resilient import Job, Permanent, Resilient, handler
from tests.helpers import LIMIT, drain

RUNS = []
WORDS = {"resource_key": "crm/1", "unique_key": "sync crm/1"}


def syncing(version):
    @handler("sync.account", version=version)
    async def sync(job: Job[dict[str, int]]) -> None:
        RUNS.append((version, job.payload))

    return sync


@pytest.fixture
async def made(database_url, clock):
    RUNS.clear()
    apps = []

    def make(handler, **options):
        app = Resilient(database_url, handlers=[handler], clock=clock.now, upgrade=False, **options)
        apps.append(app)
        return app

    yield make
    for app in apps:
        await app.close()


async def test_a_payload_that_waits_for_a_newer_worker_is_enqueued_once(made, clock):
    new, old = made(syncing(2)), made(syncing(1))
    created = []
    for _ in range(4):
        created.append((await new.enqueue("sync.account", {"a": 1}, **WORDS)).created)
        await drain(old)
        clock.advance(120)
    assert created == [True, False, False, False]
    (job,) = await new.jobs.list()
    assert (job.executions, RUNS) == (0, [])
    await drain(new)
    assert RUNS == [(2, {"a": 1})]


async def test_its_own_key_is_taken_back_and_no_other_jobs(made, clock):
    """Two that were claimed side by side: one has it again, and both are done."""
    new, old = made(syncing(2)), made(syncing(1))
    first = await new.enqueue("sync.account", {"a": 1}, **WORDS)
    taken = "UPDATE {job} SET unique_lock = NULL"  # as between a claim and what becomes of it
    await new.database.transaction(lambda c, d: d.run(c, taken) and None)
    second = await new.enqueue("sync.account", {"a": 2}, **WORDS)
    assert second.created
    await drain(old, concurrency=1)
    holders = "SELECT count(*) FROM {job} WHERE unique_lock IS NOT NULL"
    assert await new.database.transaction(lambda c, d: d.run(c, holders).scalar()) == 1
    assert not (await new.enqueue("sync.account", {"a": 3}, **WORDS)).created
    clock.advance(120)
    await drain(new)
    assert sorted(payload["a"] for _, payload in RUNS) == [1, 2]
    assert {(await new.jobs.get(one.id)).state for one in (first, second)} == {"succeeded"}


async def test_two_that_take_it_back_at_once_are_written_one_by_one(made, clock):
    """Of one batch of results: the second finds it taken, and nothing is lost."""
    new, old = made(syncing(2)), made(syncing(1))
    for number in (1, 2):
        await new.enqueue("sync.account", {"a": number}, **WORDS)
        await new.database.transaction(lambda c, d: d.run(c, "UPDATE {job} SET unique_lock = NULL") and None)
    await old.worker(concurrency=4).drain(timeout=LIMIT)
    assert [job.state for job in await new.jobs.list()] == ["scheduled", "scheduled"]
    clock.advance(120)
    await drain(new)
    assert len(RUNS) == 2


async def test_one_that_ran_and_is_tried_again_has_none(made, clock):
    """What changed after its start may have come too late for it."""

    @handler("sync.account")
    async def sync(job: Job[dict[str, int]]) -> None:
        RUNS.append(job.attempt)
        if job.attempt == 1:
            raise ConnectionError("later")

    app = made(sync)
    await app.enqueue(sync, {"a": 1}, **WORDS)
    await drain(app)
    assert (await app.enqueue(sync, {"a": 2}, **WORDS)).created


async def test_one_that_ran_and_whose_next_try_does_not_start_has_none_either(made, clock):
    @handler("sync.account", version=2)
    async def sync(job: Job[dict[str, int]]) -> None:
        RUNS.append((job.attempt, job.payload["a"]))
        if job.attempt == 1 and job.payload["a"] == 1:
            raise ConnectionError("later")

    new, old = made(sync), made(syncing(1))
    first = await new.enqueue(sync, {"a": 1}, **WORDS)
    await drain(new)
    clock.advance(3600)
    await drain(old)
    assert (await new.jobs.attempts(first.id))[-1].decision == "snooze"
    assert (await new.enqueue(sync, {"a": 2}, **WORDS)).created
    clock.advance(3600)
    await drain(new)
    assert sorted(RUNS) == [(1, 1), (1, 2), (2, 1)]


@pytest.mark.parametrize("end", ["dies", "succeeds"])
async def test_one_that_is_retried_by_hand_and_does_not_start_has_it(made, clock, end):
    """It is a new run, that has not begun: each enqueue was one more."""
    is_broken = [end == "dies"]

    @handler("sync.account", version=2)
    async def sync(job: Job[dict[str, int]]) -> None:
        RUNS.append(job.payload["a"])
        if is_broken[0]:
            raise Permanent("no such account")

    new, old = made(sync), made(syncing(1))
    first = await new.enqueue(sync, {"a": 1}, **WORDS)
    await drain(new)
    await new.jobs.retry(first.id)
    is_broken[0] = False
    for _ in range(2):
        await drain(old)
        assert not (await new.enqueue(sync, {"a": 2}, **WORDS)).created
        clock.advance(120)
    await drain(new)
    assert RUNS == [1, 1]
