"""A write without a key that was answered, and whose job ended before its handler did: it is not done again blindly.

Only the handler's own word runs it again: a failure that it raises, a Snooze.
"""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from resilient import Batch, Fixed, Idempotency, Job, Provider, Resilient, Retry, Snooze, SyncJob, Transient, handler
from resilient.engine.run import heartbeat
from tests.helpers import LIMIT, brisk, until, use_up
from tests.idp import answer

SOON = Retry(max_attempts=3, delay=Fixed(0))
ENDS = ["stop", "timeout", "cancel", "bug", "exit"]


class Api:
    """Answers at once, and counts what arrives."""

    def __init__(self):
        self.seen = []

    async def __call__(self, scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        self.seen.append(dict(scope["headers"]).get(b"idempotency-key", b"").decode())
        await answer(send, 200, {})


@pytest.fixture(autouse=True)
def _quick_beats(monkeypatch):
    """A running job learns of its cancel with the next beat."""
    monkeypatch.setattr(heartbeat, "LONGEST_BEAT", 0.3)


@pytest.fixture
async def make(api, database_url):
    made = []

    def make(*handlers, idempotency=None):
        provider = Provider(name="api", base_url=api.url, idempotency=idempotency)
        app = Resilient(database_url, handlers=handlers, providers=[provider], upgrade=False)
        made.append(app)
        return app

    yield make
    for app in made:
        await app.close()


def fail(end, job):
    """Raise what the handler raises by itself, the first time; others wait for their end."""
    raised = {"bug": KeyError("id"), "exit": SystemExit(3), "transient": Transient("later"), "snooze": Snooze(0)}
    if job.execution == 1 and end in raised:
        raise raised[end]


class Handlers:
    """Handlers that send once and then come to an end; in later executions they do nothing more than send."""

    def __init__(self, end, look=None):
        self.answered = threading.Event()
        options = {"retry": SOON, "timeout": 600 if end == "timeout" else None}

        def answered(job):
            self.answered.set()
            if end == "timeout" and job.execution == 1:
                use_up(job)
            fail(end, job)

        async def ends(job):
            answered(job)
            await asyncio.sleep(60 if job.execution == 1 else 0)

        @handler("coroutine", reconcile=look, **options)
        async def coroutine(job: Job[None]) -> None:
            (await job.client.post("/charge")).raise_for_status()
            await ends(job)

        @handler("thread", **options)
        def thread(job: SyncJob[None]) -> None:
            job.client.post("/charge").raise_for_status()
            answered(job)
            while job.execution == 1 and not job.cancel_requested:
                time.sleep(0.01)

        @handler("batch", batch=5, **options)
        async def batch(jobs: Batch[None]) -> None:
            for job in jobs:
                (await job.client.post("/charge")).raise_for_status()
                await ends(job)

        self.all = [coroutine, thread, batch]


async def bring_to(app, handlers, kind, end):
    """The job's first execution, to its end."""
    done = await app.enqueue(handlers.all[kind], resource_key="api/1")
    grace = 0.2 if end == "stop" else LIMIT  # else the next execution may have begun, and is not to be cut off
    worker = brisk(app.worker(concurrency=2, grace=grace))
    running = asyncio.create_task(worker.run(signals=False))
    assert await asyncio.to_thread(handlers.answered.wait, LIMIT)
    if end == "cancel":
        await app.jobs.cancel(done.id)
    if end == "stop":
        worker.stop()
        await running

    async def ended():
        job = await app.jobs.get(done.id)
        return job.state != "running" and job.executions > 0

    await until(ended)
    if end != "stop":
        worker.stop()
        await running
    await app.worker().drain(timeout=LIMIT)
    return await app.jobs.get(done.id)


@pytest.mark.parametrize("kind", [0, 1, 2], ids=["coroutine", "thread", "batch"])
@pytest.mark.parametrize("end", ENDS)
async def test_however_its_job_ends_it_is_shown_to_a_person(make, api, end, kind):
    handlers = Handlers(end)
    job = await bring_to(make(*handlers.all), handlers, kind, end)
    assert (job.state, job.last_error_kind, len(api.seen)) == ("dead", "ambiguous", 1)
    assert "unknown outcome" in job.last_error
    assert "POST /charge #1 was answered, and then: " in job.last_error


@pytest.mark.parametrize(("found", "state", "sent"), [(True, "succeeded", 1), (False, "succeeded", 2)])
@pytest.mark.parametrize("end", ["stop", "timeout", "bug"])
async def test_it_is_looked_up_where_that_can_be_done(make, api, end, found, state, sent):
    looks = []

    async def look(job: Job[None]) -> bool:
        looks.append(job.execution)
        return found

    handlers = Handlers(end, look)
    job = await bring_to(make(*handlers.all), handlers, 0, end)
    assert (job.state, len(api.seen), looks) == (state, sent, [2])


@pytest.mark.parametrize("kind", [0, 1], ids=["coroutine", "thread"])
@pytest.mark.parametrize("end", ["transient", "snooze"])
async def test_the_handlers_own_word_runs_it_again(make, api, end, kind):
    handlers = Handlers(end)
    job = await bring_to(make(*handlers.all), handlers, kind, end)
    assert (job.state, len(api.seen)) == ("succeeded", 2)


@pytest.mark.parametrize("end", ["stop", "timeout", "bug"])
async def test_with_a_key_it_is_sent_again(make, api, end):
    handlers = Handlers(end)
    job = await bring_to(make(*handlers.all, idempotency=Idempotency()), handlers, 0, end)
    assert (job.state, len(api.seen), len(set(api.seen))) == ("succeeded", 2, 1)


async def test_a_worker_that_lost_its_lease(make, api):
    """Another one finds the mark on the row; what the first still says counts for nothing."""
    handlers = Handlers("lost")
    first, other = make(*handlers.all), make(*handlers.all)
    done = await first.enqueue(handlers.all[0], resource_key="api/1")
    worker = brisk(first.worker(grace=LIMIT))
    running = asyncio.create_task(worker.run(signals=False))
    assert await asyncio.to_thread(handlers.answered.wait, LIMIT)
    worker.stop()
    sweeper = other.worker().sweeper
    sweeper._spare = 0.0

    async def rescued():
        await other.database.transaction(
            lambda c, d: d.run(c, "UPDATE {job} SET lease_until = created_at RETURNING id").all()
        )
        await sweeper.rescue()
        return sweeper.rescued == 1

    await until(rescued)
    await running
    await other.worker().drain(timeout=LIMIT)
    job = await other.jobs.get(done.id)
    assert (job.state, job.last_error_kind, len(api.seen)) == ("dead", "ambiguous", 1)


async def test_an_execution_that_hears_of_a_lost_lease_while_it_still_holds_it(make, api):
    handlers = Handlers("lost")
    app = make(*handlers.all)
    done = await app.enqueue(handlers.all[0], resource_key="api/1")
    worker = app.worker()
    running = asyncio.create_task(worker.run(signals=False))
    assert await asyncio.to_thread(handlers.answered.wait, LIMIT)
    worker.executor.interrupt(worker.executor.running[done.id.int], "lost")

    async def ended():
        return (await app.jobs.get(done.id)).state != "running"

    await until(ended)
    worker.stop()
    await running
    await app.worker().drain(timeout=LIMIT)
    job = await app.jobs.get(done.id)
    assert (job.state, job.last_error_kind, len(api.seen)) == ("dead", "ambiguous", 1)
