"""Batch handlers: one call for many jobs of a resource, each with an outcome of its own."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager

import pytest

from resilient import (
    Batch,
    Cancel,
    Fixed,
    InvalidInput,
    Job,
    Limit,
    Permanent,
    Resilient,
    Retry,
    SetupError,
    Snooze,
    SyncBatch,
    SyncJob,
    Transient,
    handler,
    testing,
)
from resilient.engine.run import executor, pipeline
from tests.helpers import LIMIT, drain, until, use_up

SEEN: list = []
ONCE = Retry(max_attempts=1)


@pytest.fixture(autouse=True)
def _seen():
    SEEN.clear()


def saw(jobs):
    SEEN.append((jobs.kind, jobs.resource_key, [job.payload for job in jobs]))


@handler("many", batch=4, retry=Retry(delay=Fixed(10)))
async def many(jobs: Batch[int]) -> None:
    saw(jobs)


@handler("plain", batch=4)
def plain(jobs: SyncBatch[int]) -> None:
    saw(jobs)
    SEEN.append(threading.current_thread().name)


@handler("single")
async def single(job: Job[int]) -> None:
    SEEN.append(job.payload)


HANDLERS = [many, plain, single]


@pytest.fixture
async def make(database):
    apps = []

    def make(*handlers, **options):
        apps.append(Resilient(database, handlers=[*HANDLERS, *handlers], upgrade=False, **options))
        return apps[-1]

    yield make
    for app in apps:
        await app.close()


@pytest.fixture
def app(make):
    return make()


async def states(app, kind):
    return {job.payload: job.state for job in await app.jobs.list(kind=kind, limit=1000)}


async def sizes(app, kind, count, key="p/1", **options):
    await app.enqueue_many(kind, range(count), resource_key=key)
    assert await drain(app, **options) == count
    assert set((await states(app, kind)).values()) == {"succeeded"}
    return [len(s[2]) for s in SEEN if len(s) == 3]


async def test_jobs_of_one_resource_share_calls_in_their_order(app):
    await app.enqueue_many(many, range(10), resource_key="p/1")
    await app.enqueue_many(many, range(10, 13), resource_key="p/2")
    assert await drain(app) == 13
    assert set((await states(app, "many")).values()) == {"succeeded"}
    assert all(len(payloads) <= 4 for _, _, payloads in SEEN)
    assert [n for _, key, payloads in SEEN if key == "p/1" for n in payloads] == list(range(10))
    assert ("many", "p/2", [10, 11, 12]) in SEEN
    assert len(SEEN) == 4


async def test_a_plain_function_runs_in_a_thread(app):
    await app.enqueue_many(plain, range(3), resource_key="p/1")
    assert await drain(app) == 3
    assert SEEN[0] == ("plain", "p/1", [0, 1, 2])
    assert SEEN[1].startswith("resilient-handler")


async def test_a_batch_takes_one_slot_and_is_filled_beyond_them(make):
    @handler("large", batch=200)
    async def large(jobs: Batch[int]) -> None:
        saw(jobs)

    assert await sizes(make(large), "large", 500, concurrency=2) == [200, 200, 100]


async def test_kinds_are_not_mixed(app):
    await app.enqueue(single, 0, resource_key="p/1")
    await app.enqueue_many(many, [1, 2], resource_key="p/1")
    await app.enqueue_many(plain, [3, 4], resource_key="p/1")
    await app.enqueue(many, 5, resource_key="p/1")
    assert await drain(app) == 6
    assert sorted(x for s in SEEN if isinstance(s, tuple) for x in s[2]) == [1, 2, 3, 4, 5]
    assert all(len({job in (3, 4) for job in s[2]}) == 1 for s in SEEN if isinstance(s, tuple))


async def test_a_concurrency_cap_counts_jobs(make):
    app = make(concurrency={"p/*": 3})
    assert max(await sizes(app, "many", 9)) <= 3


async def test_a_job_limit_counts_jobs(make):
    app = make(limits={"p/*": [Limit(2, per="1h", burst=2, counts="jobs")]})
    await app.enqueue_many(many, range(5), resource_key="p/1")
    assert await drain(app) == 2
    assert sorted((await states(app, "many")).values()) == ["ready"] * 3 + ["succeeded"] * 2


# -- outcomes ------------------------------------------------------------------------------------------------


@handler("sorted", batch=10, retry=Retry(max_attempts=2, delay=Fixed(10)))
async def by_word(jobs: Batch[str]) -> None:
    for job in jobs:
        errors = {"bad": Permanent("no"), "later": Transient("not now"), "snooze": Snooze(60), "stop": Cancel("enough")}
        if job.payload in errors:
            jobs.fail(job, errors[job.payload])
        elif job.payload == "told":
            jobs.succeed(job, {"id": 7})


@handler("sorted", batch=10, retry=Retry(max_attempts=2, delay=Fixed(10)))
def by_word_plain(jobs: SyncBatch[str]) -> None:
    for job in jobs:
        errors = {"bad": Permanent("no"), "later": Transient("not now"), "snooze": Snooze(60), "stop": Cancel("enough")}
        if job.payload in errors:
            jobs.fail(job, errors[job.payload])
        elif job.payload == "told":
            jobs.succeed(job, {"id": 7})


@pytest.mark.parametrize("declared", [by_word, by_word_plain])
@pytest.mark.parametrize("order", [1, -1])
async def test_each_job_has_its_own_outcome(make, declared, order):
    app = make(declared)
    words = ["fine", "bad", "later", "snooze", "stop", "told"][::order]
    await app.enqueue_many(declared, words, resource_key="p/1")
    assert await drain(app) == 6
    found = {job.payload: job for job in await app.jobs.list(kind="sorted")}
    assert {word: job.state for word, job in found.items()} == {
        "fine": "succeeded", "bad": "dead", "later": "scheduled", "snooze": "scheduled", "stop": "cancelled",
        "told": "succeeded",
    }  # fmt: skip
    assert {word: job.attempts for word, job in found.items() if job.attempts} == {"bad": 1, "later": 1}
    assert (found["told"].result, found["fine"].result) == ({"id": 7}, None)
    assert "not now" in found["later"].last_error


async def test_an_exception_counts_for_every_job_that_is_not_settled(make):
    @handler("half", batch=10, retry=Retry(max_attempts=3, delay=Fixed(10)))
    async def half(jobs: Batch[int]) -> None:
        jobs.succeed(jobs[0])
        jobs.fail(jobs[1], Permanent("its own"))
        raise Transient("the rest")

    app = make(half)
    await app.enqueue_many(half, range(4), resource_key="p/1")
    assert await drain(app) == 4
    assert await states(app, "half") == {0: "succeeded", 1: "dead", 2: "scheduled", 3: "scheduled"}
    resource = await app.resources.get("p/1")
    assert resource.breaker == "closed"  # two failures of the resource: a job's own, and one call's


async def test_an_exception_of_many_jobs_is_one_failure_of_the_resource(make):
    @handler("all", batch=50, retry=Retry(max_attempts=3, delay=Fixed(10)))
    async def everybody(jobs: Batch[int]) -> None:
        error = Transient("down")
        for job in jobs[:25]:
            jobs.fail(job, error)
        raise error

    app = make(everybody)
    await app.enqueue_many(everybody, range(50), resource_key="p/1")
    assert await drain(app, concurrency=50) == 50
    assert (await app.resources.get("p/1")).breaker == "closed"


async def test_what_it_returns_counts_for_the_rest(make):
    @handler("told", batch=10)
    async def told(jobs: Batch[int]) -> Snooze:
        jobs.succeed(jobs[0])
        return Snooze(60)

    app = make(told)
    await app.enqueue_many(told, range(3), resource_key="p/1")
    await drain(app)
    assert await states(app, "told") == {0: "succeeded", 1: "scheduled", 2: "scheduled"}


async def test_a_payload_that_cannot_be_read_fails_alone(make):
    @handler("typed", batch=10)
    async def typed(jobs: Batch[int]) -> None:
        saw(jobs)

    app = make(typed)
    await app.enqueue_many(typed, [1, 2], resource_key="p/1")
    bad = await app.enqueue(typed, 3, resource_key="p/1")
    app.database.transaction_sync(
        lambda c, d: c.exec_driver_sql(f"UPDATE resilient_job SET payload = '\"x\"' WHERE id = '{d.id(bad.id)}'")
    )
    await drain(app)
    assert SEEN == [("typed", "p/1", [1, 2])]
    assert (await app.jobs.get(bad.id)).last_error_kind == "undecodable"


async def test_a_settled_job_ends_at_once(make):
    """What is settled is finished before the handler returns; a crash repeats only the rest."""
    at_once = {}

    @handler("slow", batch=10)
    async def slow(jobs: Batch[int]) -> None:
        jobs.succeed(jobs[0])

        async def has_ended():
            return (await jobs.app.jobs.get(jobs[0].id)).state == "succeeded"

        at_once["ended"] = await until(has_ended)

    app = make(slow)
    await app.enqueue_many(slow, range(3), resource_key="p/1")
    assert await drain(app) == 3
    assert at_once == {"ended": True}


def test_a_job_is_settled_once():
    jobs = testing.batch([1, 2])
    jobs.fail(jobs[0], Transient())
    with pytest.raises(InvalidInput, match="settled before"):
        jobs.succeed(jobs[0])
    with pytest.raises(InvalidInput, match="not in this batch"):
        jobs.succeed(testing.job(1))
    with pytest.raises(InvalidInput, match="takes an exception"):
        jobs.fail(jobs[1], "oops")
    assert (list(jobs.failed), list(jobs.succeeded)) == ([jobs[0]], [])


@pytest.mark.parametrize("size", [0, -1, 1001, 2.5])
def test_sizes_are_checked(size):
    with pytest.raises(SetupError, match="batch of handler"):
        handler("x", batch=size)


async def test_the_test_kit_calls_batch_handlers():
    jobs = testing.batch(["bad", "told", "fine"])
    await by_word(jobs)
    assert str(jobs.failed[jobs[0]]) == "no"
    assert jobs.succeeded == {jobs[1]: {"id": 7}}
    plain_jobs = testing.sync_batch(["bad", "fine"], resource_key="x/1")
    by_word_plain(plain_jobs)
    assert (len(plain_jobs.failed), plain_jobs.resource_key, len(plain_jobs[:1])) == (1, "x/1", 1)


# -- interruptions ---------------------------------------------------------------------------------------------


@asynccontextmanager
async def running(app, **options):
    worker = app.worker(**{"concurrency": 4, **options})
    task = asyncio.create_task(worker.run(signals=False))
    yield worker
    worker.stop()
    await asyncio.wait_for(task, LIMIT)


async def test_a_timeout_is_for_what_is_not_settled(make):
    @handler("hangs", batch=10, timeout=600, retry=ONCE)
    async def hangs(jobs: Batch[int]) -> None:
        jobs.succeed(jobs[0])
        use_up(jobs[1])
        await asyncio.Event().wait()

    app = make(hangs)
    await app.enqueue_many(hangs, range(3), resource_key="p/1")
    assert await drain(app) == 3
    assert await states(app, "hangs") == {0: "succeeded", 1: "dead", 2: "dead"}
    (dead, _) = await app.jobs.list(kind="hangs", state="dead")
    assert dead.last_error_kind == "timeout"


async def test_a_thread_that_runs_too_long_is_given_up(make, monkeypatch):
    go_on = threading.Event()

    @handler("hangs", batch=10, timeout=600, retry=ONCE)
    def hangs(jobs: SyncBatch[int]) -> None:
        jobs.succeed(jobs[0])
        use_up(jobs[1])
        go_on.wait(LIMIT)
        jobs.succeed(jobs[1])  # too late

    app = make(hangs)
    await app.enqueue_many(hangs, range(3), resource_key="p/1")
    monkeypatch.setattr(executor, "CANCEL_PATIENCE", 0.2)
    async with running(app, patience=0.2):

        async def both_are_over():
            return await app.jobs.count(kind="hangs", state="dead") == 2

        await until(both_are_over)
        go_on.set()
    assert await states(app, "hangs") == {0: "succeeded", 1: "dead", 2: "dead"}


async def test_a_stopping_worker_hands_back_what_is_not_settled(make):
    started = asyncio.Event()

    @handler("hangs", batch=10)
    async def hangs(jobs: Batch[int]) -> None:
        jobs.succeed(jobs[0])
        started.set()
        await asyncio.Event().wait()

    app = make(hangs)
    await app.enqueue_many(hangs, range(3), resource_key="p/1")
    async with running(app, grace=0.0):
        await asyncio.wait_for(started.wait(), LIMIT)
    assert await states(app, "hangs") == {0: "succeeded", 1: "ready", 2: "ready"}


@pytest.mark.parametrize("reason", ["stop", "timeout", "cancel"])
async def test_a_batch_that_ends_before_its_call_leaves_no_job_without_an_outcome(make, monkeypatch, reason):
    """It waits for its database, or for what says where its account lives; its slot goes on after that."""
    waiting = asyncio.Event()

    admitted = pipeline.admit_late

    async def admit_late(execution, wire):
        if waiting.is_set():  # what was stopped is claimed again, by the same worker
            return await admitted(execution, wire)
        waiting.set()
        return await asyncio.Event().wait()

    app = make()
    await app.enqueue_many(many, range(3), resource_key="p/1")
    worker = app.worker(concurrency=1)
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "admit_late", admit_late)
        running = asyncio.create_task(worker.run(signals=False))
        await until(waiting.is_set)
        first = list(worker.executor.running.values())
        for one in first:
            worker.executor.interrupt(one, reason)
        await until(lambda: not any(one is other for one in worker.executor.running.values() for other in first))
    await app.enqueue(single, 7, resource_key="p/2")
    await until(lambda: 7 in SEEN)
    worker.stop()
    await running
    ends = {"stop": {"ready", "succeeded"}, "timeout": {"scheduled"}, "cancel": {"cancelled"}}[reason]
    assert set((await states(app, "many")).values()) <= ends


async def test_the_cancel_of_one_job_leaves_the_others_alone(make):
    started, go_on = asyncio.Event(), asyncio.Event()

    @handler("waits", batch=10)
    async def waits(jobs: Batch[int]) -> None:
        started.set()
        await asyncio.wait_for(go_on.wait(), LIMIT)
        SEEN.extend(job.payload for job in jobs if not job.cancel_requested)

    app = make(waits)
    ids = [e.id for e in await app.enqueue_many(waits, range(3), resource_key="p/1")]
    async with running(app) as worker:
        await asyncio.wait_for(started.wait(), LIMIT)
        await app.jobs.cancel(ids[1])
        worker.executor.interrupt(next(e for e in worker.executor.running.values() if e.id == ids[1]), "cancel")
        go_on.set()
        await until(lambda: app.jobs.count(kind="waits", state="succeeded"))
    assert SEEN == [0, 2]
    assert await states(app, "waits") == {0: "succeeded", 1: "cancelled", 2: "succeeded"}


async def test_a_call_whose_jobs_are_all_cancelled_is_cancelled(make):
    started = asyncio.Event()

    @handler("waits", batch=10)
    async def waits(jobs: Batch[int]) -> None:
        started.set()
        await asyncio.Event().wait()

    app = make(waits)
    ids = [e.id for e in await app.enqueue_many(waits, range(2), resource_key="p/1")]
    async with running(app) as worker:
        await asyncio.wait_for(started.wait(), LIMIT)
        for id_ in ids:
            await app.jobs.cancel(id_)
            worker.executor.interrupt(next(e for e in worker.executor.running.values() if e.id == id_), "cancel")

        async def all_cancelled():
            return await app.jobs.count(kind="waits", state="cancelled") == 2

        await until(all_cancelled)


async def test_a_lost_lease_is_that_job_s_alone(make):
    @handler("robbed", batch=10)
    async def robbed(jobs: Batch[int]) -> None:
        saw(jobs)
        if len(jobs) == 3:
            stolen = jobs.app.database.dialect.id(jobs[1].id)
            sql = f"UPDATE resilient_job SET version = version + 1, state = 'ready' WHERE id = '{stolen}'"
            await jobs.app.database.transaction(lambda c, _d: c.exec_driver_sql(sql))

    app = make(robbed)
    await app.enqueue_many(robbed, range(3), resource_key="p/1")
    worker = app.worker(concurrency=4)
    await worker.drain(timeout=LIMIT)
    assert worker.completer.stale == 1
    assert await states(app, "robbed") == {0: "succeeded", 1: "ready", 2: "succeeded"}


async def test_a_job_that_was_rescued_runs_alone(make):
    app = make()
    await app.enqueue_many(many, range(3), resource_key="p/1")
    app.database.transaction_sync(
        lambda c, _d: c.exec_driver_sql("UPDATE resilient_job SET rescues = 1 WHERE CAST(payload AS text) = '1'")
    )
    assert await drain(app) == 3
    assert ("many", "p/1", [1]) in SEEN


async def test_an_unanswered_request_is_looked_up_alone(make):
    async def look(job: Job[int]) -> bool:
        SEEN.append(("looked", job.payload))
        return True

    @handler("sends", batch=10, reconcile=look)
    async def sends(jobs: Batch[int]) -> None:
        saw(jobs)

    app = make(sends)
    await app.enqueue_many(sends, range(3), resource_key="p/1")
    app.database.transaction_sync(
        lambda c, _d: c.exec_driver_sql(
            "UPDATE resilient_job SET sent = '{\"x\": {}}' WHERE CAST(payload AS text) = '1'"
        )
    )
    assert await drain(app) == 3
    assert ("looked", 1) in SEEN
    assert [s for s in SEEN if s[0] == "sends"] == [("sends", "p/1", [0, 2])]
    assert set((await states(app, "sends")).values()) == {"succeeded"}


async def test_the_slots_are_counted_right_after_batches(make):
    """A slip in counting shared slots would let a worker claim ever more, or nothing."""
    app = make()
    worker = app.worker(concurrency=3)
    for round_ in range(5):
        await app.enqueue_many(many, range(20), resource_key=f"p/{round_}")
        await app.enqueue_many(plain, range(7), resource_key=f"q/{round_}")
    assert await worker.drain(timeout=LIMIT) == 135
    assert (worker.executor.slots_in_use, worker.executor._shared, worker.executor._started) == (0, 0, 0)
    assert not worker.executor._gathering
    assert worker.ended - worker.executor.beside == len([s for s in SEEN if isinstance(s, tuple)])


async def test_a_handler_declared_for_both_is_told_apart():
    assert (many.batch, single.batch) == (4, None)

    def one(job: SyncJob[int]) -> None: ...

    assert handler("x")(one).batch is None


async def test_an_ordering_key_is_kept_within_and_between_batches(make):
    """Only the head of a key is ready, so a batch never holds two of one key; a failing one holds up its own key."""

    @handler("lanes", batch=50, retry=Retry(max_attempts=1))
    async def lanes(jobs: Batch[str]) -> None:
        keys = [job.payload[0] for job in jobs]
        assert len(keys) == len(set(keys))
        for job in jobs:
            SEEN.append(job.payload)
            if job.payload == "b1":
                jobs.fail(job, Permanent("stuck"))

    app = make(lanes)
    for n in range(4):
        for key in "abc":
            await app.enqueue(lanes, f"{key}{n}", resource_key="p/1", ordering_key=key)
    await drain(app)
    assert [x for x in SEEN if x[0] == "a"] == ["a0", "a1", "a2", "a3"]
    assert [x for x in SEEN if x[0] == "b"] == ["b0", "b1"]
    assert [x for x in SEEN if x[0] == "c"] == ["c0", "c1", "c2", "c3"]
