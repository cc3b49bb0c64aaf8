"""A refresher that was killed: its account is parked until its lease ends, and nobody else notices."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta

import pytest
from uuid_utils.compat import uuid7

from resilient import Batch, Resilient, ResourceStopped, SyncJob, handler
from resilient.core.tokens import GrantState
from resilient.engine import grants as engine_grants
from resilient.engine import pauses, wiring
from resilient.engine.job import Job
from resilient.store import connections, grants
from resilient.store.secrets import new_key

KEY = new_key()
A, B = "idp/acct-a", "idp/acct-b"


@handler("quick", timeout=3)
async def quick(job: Job[None]) -> int:
    response = await job.client.get("/me")
    response.raise_for_status()
    return response.status_code


@handler("hasty", timeout=1)
async def hasty(job: Job[None]) -> int:
    response = await job.client.get("/me")
    response.raise_for_status()
    return response.status_code


@pytest.fixture
async def app(database_url, idp):
    async with Resilient(
        database_url, handlers=[quick, hasty, hasty_thread, hasty_batch], providers=[idp.provider()], secrets=[KEY]
    ) as app:
        yield app


async def connect(app, idp, key, *, lasts=-5):
    access, refresh = idp.issue()
    at = datetime.now(UTC) + timedelta(seconds=lasts)
    await app.connections.import_(key, access_token=access, refresh_token=refresh, expires_at=at)


async def die_with_the_lease(app, key, lease):
    """A process took the lease and was killed."""
    grant = (await app.grants.accounts.loaded(key)).bound.grant
    begun = await app.database.transaction(grants.begin, grant.id, grant.version, lease, refused=False)
    assert begun.mine
    app.grants.accounts.forget()
    return begun.grant


async def wait_until(what, limit=40.0):
    async with asyncio.timeout(limit):
        while not await what():  # noqa: ASYNC110 - the database says it
            await asyncio.sleep(0.05)


async def test_its_jobs_park_uncharged_and_the_other_account_keeps_its_pace(app, idp, monkeypatch):
    monkeypatch.setattr(grants, "LAST_CALL", 0.5)
    await connect(app, idp, A)
    await connect(app, idp, B, lasts=3600)
    await die_with_the_lease(app, A, 6.0)
    for _ in range(40):
        await app.enqueue(quick, resource_key=A)
    worker = app.worker(concurrency=8)
    running, began = asyncio.create_task(worker.run(signals=False)), time.monotonic()
    try:

        async def parked():
            return bool((await app.resources.list(A)) and (await app.resources.get(A)).blocked_until)

        await wait_until(parked)
        for _ in range(20):
            await app.enqueue(quick, resource_key=B)

        async def done(key, count):
            return await app.jobs.count(resource=key, state="succeeded") == count

        await wait_until(lambda: done(B, 20))
        assert await app.jobs.count(resource=A, state="succeeded") == 0
        assert time.monotonic() - began < 5.0, "the other account waited for the dead lease"
        await wait_until(lambda: done(A, 40))
    finally:
        worker.stop()
        await running
    jobs = await app.jobs.list(resource=A, limit=100)
    assert {job.attempts for job in jobs} == {0}
    assert sum(job.deferrals for job in jobs) <= 3 * 8  # those that had been claimed, at each end of the lease
    assert len(idp.asked) == 1


async def test_a_slow_refresh_holds_no_slot_and_kills_no_hasty_job(app, idp):
    """Its own process is alive: the token endpoint takes its time."""
    await connect(app, idp, A)
    idp.hold.clear()
    ids = [(await app.enqueue(hasty, resource_key=A)).id for _ in range(3)]
    worker = app.worker(concurrency=2)
    running = asyncio.create_task(worker.run(signals=False))
    try:

        async def deferred():
            jobs = [await app.jobs.get(id_) for id_ in ids]
            return any(job.deferrals for job in jobs) and not any(job.state == "running" for job in jobs)

        await wait_until(deferred)
        assert "refreshed" in (await app.jobs.why(ids[0])).text
        idp.hold.set()

        async def done():
            return await app.jobs.count(state="succeeded") == 3

        began = time.monotonic()
        await wait_until(done)
        assert time.monotonic() - began < 10.0  # with the end of the refresh, not of its lease
    finally:
        worker.stop()
        await running
    assert {(await app.jobs.get(id_)).attempts for id_ in ids} == {0}
    assert len(idp.asked) == 1


@handler("hasty_thread", timeout=1)
def hasty_thread(job: SyncJob[None]) -> int:
    response = job.client.get("/me")
    response.raise_for_status()
    return response.status_code


@handler("hasty_batch", timeout=1, batch=2)
async def hasty_batch(batch: Batch[None]) -> None:
    for job in batch:
        (await job.client.get("/me")).raise_for_status()


@pytest.mark.parametrize("kind", [hasty, hasty_thread, hasty_batch])
async def test_time_in_which_it_waits_for_a_refresh_is_not_the_handlers(app, idp, monkeypatch, kind):
    """The engine's own work takes longer than the timeout, as on a machine under load."""
    monkeypatch.setattr(wiring, "patience_of", lambda _: 30.0)
    await connect(app, idp, A)
    idp.hold.clear()
    ids = [(await app.enqueue(kind, resource_key=A)).id for _ in range(2)]
    worker = app.worker(concurrency=2)
    running = asyncio.create_task(worker.run(signals=False))
    try:
        await wait_until_overdue(worker, 1.5 * kind.timeout)
        assert [(await app.jobs.get(id_)).state for id_ in ids] == ["running"] * 2
        idp.hold.set()
        await wait_until(lambda: succeeded(app, 2))
    finally:
        worker.stop()
        await running
    assert {(await app.jobs.get(id_)).attempts for id_ in ids} == {0}
    assert len(idp.asked) == 1


async def wait_until_overdue(worker, seconds):
    """A job of this worker runs for that long, and its timeout was looked at since."""

    async def overdue():
        now = asyncio.get_running_loop().time()
        return any(one.started and now - one.started > seconds for one in worker.executor.running.values())

    await wait_until(overdue)


async def succeeded(app, count):
    return await app.jobs.count(state="succeeded") == count


async def test_a_timeout_ends_what_waits_inside_the_engine_without_end(app, idp, monkeypatch):
    monkeypatch.setattr(wiring, "patience_of", lambda _: 30.0)
    monkeypatch.setattr(pauses, "LEAST", 0.1)
    await connect(app, idp, A)
    idp.hold.clear()
    id_ = (await app.enqueue(hasty, resource_key=A)).id
    worker = app.worker(concurrency=1)
    running = asyncio.create_task(worker.run(signals=False))
    try:

        async def charged():
            return (await app.jobs.get(id_)).last_error_kind == "timeout"

        await wait_until(charged)
    finally:
        idp.hold.set()
        worker.stop()
        await running


async def test_a_lease_is_kept_up_as_long_as_its_request_takes(app, idp, monkeypatch):
    monkeypatch.setattr(engine_grants, "LEASE", 1.0)
    await connect(app, idp, A)
    idp.hold.clear()
    asking = asyncio.create_task(app.credentials(A))

    async def asked():
        return len(idp.asked) == 1

    await wait_until(asked)
    id_ = (await app.connections.get(A)).grant_id
    first = (await app.database.transaction(grants.read, id_)).lease_until

    async def extended():
        return (await app.database.transaction(grants.read, id_)).lease_until > first + timedelta(seconds=1)

    await wait_until(extended)
    idp.hold.set()
    assert (await asking).version == 2


def begin(database, grant, lease=20.0):
    return database.transaction_sync(grants.begin, grant.id, grant.version, lease, refused=False)


@pytest.fixture
def held(database, clock):
    def insert(c, d):
        grant = grants.new(uuid7(), A, "oauth2", d.now(c))
        grants.insert_if_new(c, d, grant, None)
        return grant

    return begin(database, database.transaction_sync(insert)).grant


FRESH = grants.NewSecrets("sealed", "key", None, None)


def test_who_could_not_reach_the_database_commits_at_the_last_call(database, clock, held):
    """The database was away for longer than the lease: the new refresh token must not be lost to a second refresh."""
    clock.advance(60)
    begun = begin(database, held)
    assert (begun.mine, begun.grant.state) == (False, GrantState.UNKNOWN)
    clock.advance(1)
    assert not begin(database, held).mine
    assert database.transaction_sync(grants.renew_if_held, held, FRESH)
    assert database.transaction_sync(grants.read, held.id).state is GrantState.ACTIVE


def test_after_the_last_call_the_next_one_takes_over(database, clock, held):
    clock.advance(21)
    assert not begin(database, held).mine
    clock.advance(grants.LAST_CALL + 0.1)
    assert begin(database, held).mine
    assert not database.transaction_sync(grants.renew_if_held, held, FRESH)


def test_a_parked_account_goes_on_with_the_refresh_that_ends(database, clock, held):
    database.transaction_sync(lambda c, d: connections.bind(c, d, A, held.id, {}, "ok"))
    until = database.transaction_sync(grants.park, held.id)
    assert (until - clock.now()).total_seconds() == pytest.approx(20)

    def rests():
        return database.transaction_sync(
            lambda c, d: d.run(c, "SELECT blocked_until FROM {resource} WHERE key = :key", {"key": A}).scalar()
        )

    assert rests() is not None
    database.transaction_sync(grants.renew_if_held, held, FRESH)
    assert rests() is None
    assert database.transaction_sync(grants.park, held.id) is None


async def test_a_program_without_a_job_hears_why_it_waits(app, idp):
    await connect(app, idp, A)
    idp.script = ["down"]
    with pytest.raises(ResourceStopped) as stopped:
        await app.credentials(A)
    assert stopped.value.resource == "idp:token"
