"""A job that expired is not started, however long ago housekeeping looked."""

from __future__ import annotations

from datetime import timedelta

import pytest

from resilient import Batch, Failure, FailureKind, Job, JobFailure, Resilient, SyncJob, handler

RAN = []


@handler("one")
async def one(job: Job[str]) -> None:
    RAN.append(job.payload)


@handler("plain")
def plain(job: SyncJob[str]) -> None:
    RAN.append(job.payload)


@handler("many", batch=10)
async def many(batch: Batch[str]) -> None:
    RAN.extend(job.payload for job in batch)


async def took_effect(job: Job[str]) -> bool:
    RAN.append("looked up")
    return True


@handler("doubtful", reconcile=took_effect)
async def doubtful(job: Job[str]) -> None:
    RAN.append(job.payload)
    raise JobFailure("no answer", failure=Failure(FailureKind.AMBIGUOUS))


@pytest.fixture
async def app(clock, database):
    RAN.clear()
    made = Resilient(database, handlers=[one, plain, many, doubtful], upgrade=False)
    yield made
    await made.close()


async def ends(app):
    return [(job.state.value, job.last_error_kind, job.last_error) for job in await app.jobs.list(order="oldest")]


@pytest.mark.parametrize("kind", [one, plain, many])
async def test_it_is_not_started(app, clock, kind):
    late = (clock.now() + timedelta(seconds=10)).replace(microsecond=0)
    for word, at in (("late", late), ("in time", late + timedelta(seconds=21)), ("whenever", None)):
        await app.enqueue(kind, word, resource_key="a", expires_at=at)
    clock.advance(30)
    await app.worker().drain()
    assert sorted(RAN) == ["in time", "whenever"]
    found = await ends(app)
    assert found[0] == (
        "dead", "expired", "expires at 2030-01-01 12:00:10 UTC, could not run before 2030-01-01 12:00:30 UTC"
    )  # fmt: skip
    assert [state for state, *_ in found[1:]] == ["succeeded", "succeeded"]
    (job, *_) = await app.jobs.list(order="oldest")
    assert job.attempts == 0  # it never ran
    assert [(one.decision, one.charged) for one in await app.jobs.attempts(job.id)] == [("expired", False)]


async def test_the_next_of_its_line_goes_on(app, clock):
    await app.enqueue(one, "late", resource_key="a", ordering_key="k", expires_in=10)
    await app.enqueue(one, "next", resource_key="a", ordering_key="k")
    clock.advance(30)
    await app.worker().drain()
    assert RAN == ["next"]


async def test_what_may_have_been_sent_is_looked_up_first(app, clock):
    job = await app.enqueue(doubtful, "sent", resource_key="a", expires_in=60)
    worker = app.worker()
    await worker.drain()
    assert (await app.jobs.get(job.id)).state.value == "scheduled"
    clock.advance(59)
    later = "UPDATE {job} SET expires_at = :early_at"
    early = clock.now() - timedelta(seconds=1)
    await app.database.transaction(lambda c, d: d.run(c, later, {"early_at": early}))
    await app.worker().drain()
    assert RAN == ["sent", "looked up"]
    assert (await app.jobs.get(job.id)).state.value == "succeeded"
