"""A refresher that was killed: its account is parked until its lease ends, and nobody else notices."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from types import SimpleNamespace

import pytest
from uuid_utils.compat import uuid7

from resilient import Batch, DatabaseUnreachable, GrantState, Job, Resilient, ResourceStopped, SyncJob, handler
from resilient.engine.accounts import grants as engine_grants
from resilient.engine.run import backend, executor
from resilient.store.accounts import connections, grants
from resilient.store.accounts.secrets import new_key
from tests.helpers import until
from tests.idp import connect

KEY = new_key()
A, B = "idp/acct-a", "idp/acct-b"


@handler("quick", timeout=600)
async def quick(job: Job[None]) -> int:
    response = await job.client.get("/me")
    response.raise_for_status()
    return response.status_code


@handler("hasty", timeout=600)
async def hasty(job: Job[None]) -> int:
    response = await job.client.get("/me")
    response.raise_for_status()
    return response.status_code


@pytest.fixture
async def app(database_url, idp):
    async with Resilient(
        database_url,
        handlers=[quick, hasty, careless, hasty_thread, hasty_batch],
        providers=[idp.provider()],
        secrets=[KEY],
    ) as app:
        yield app


async def die_with_the_lease(app, key, lease):
    """A process took the lease and was killed."""
    grant = (await app.grants.accounts.load(key)).bound.grant
    begun = await app.database.transaction(grants.begin, grant.id, grant.version, lease, refused=False)
    assert begun.may_send
    app.grants.accounts.forget()
    return begun.grant


async def test_its_jobs_park_uncharged_and_the_other_account_keeps_its_pace(database, clock, idp, monkeypatch):
    """The lease ends when the test says so: the other account's jobs end before, however slow the machine is."""
    monkeypatch.setattr(grants, "LAST_CALL", 0.5)
    app = Resilient(database, handlers=[quick], providers=[idp.provider()], secrets=[KEY])
    await connect(app, idp, A, expired=True, now=clock.now())
    await connect(app, idp, B, lasts=3600, now=clock.now())
    grant = await die_with_the_lease(app, A, 6.0)
    for _ in range(40):
        await app.enqueue(quick, resource_key=A)
    worker = app.worker(concurrency=8)
    running = asyncio.create_task(worker.run(signals=False))
    try:

        async def parked():
            return bool((await app.resources.list(A)) and (await app.resources.get(A)).blocked_until)

        await until(parked)
        for _ in range(20):
            await app.enqueue(quick, resource_key=B)

        async def done(key, count):
            return await app.jobs.count(resource=key, state="succeeded") == count

        await until(lambda: done(B, 20))
        assert await app.jobs.count(resource=A, state="succeeded") == 0
        await until(lambda: not worker.executor.running)
        clock.advance(6.5)

        async def last_call():
            return (await app.database.transaction(grants.read, grant.id)).state is GrantState.UNKNOWN

        await until(last_call)
        await until(lambda: not worker.executor.running)
        clock.advance(1)
        await until(lambda: done(A, 40))
    finally:
        worker.stop()
        await running
        await app.close()
    jobs = await app.jobs.list(resource=A, limit=100)
    assert {job.attempts for job in jobs} == {0}
    assert sum(job.deferrals for job in jobs) <= 3 * 8  # those that had been claimed, at each end of the lease
    assert len(idp.asked) == 1


async def test_a_slow_refresh_holds_no_slot_and_kills_no_hasty_job(app, idp, monkeypatch):
    """Its own process is alive: the token endpoint takes its time. They go on with its end, not with its lease's."""
    brief = SimpleNamespace(handler=SimpleNamespace(timeout=1.0))
    assert backend.patience_of(brief) == 0.25  # so that it is deferred long before its timeout
    monkeypatch.setattr(backend, "patience_of", lambda _: 0.25)
    monkeypatch.setattr(engine_grants, "LEASE", 600.0)
    await connect(app, idp, A, expired=True)
    idp.hold.clear()
    ids = [(await app.enqueue(hasty, resource_key=A)).id for _ in range(3)]
    worker = app.worker(concurrency=2)
    running = asyncio.create_task(worker.run(signals=False))
    try:

        async def deferred():
            jobs = [await app.jobs.get(id_) for id_ in ids]
            return any(job.deferrals for job in jobs) and not any(job.state == "running" for job in jobs)

        await until(deferred)
        assert "refreshed" in (await app.jobs.why(ids[0])).text
        idp.hold.set()

        async def done():
            return await app.jobs.count(state="succeeded") == 3

        await until(done)
    finally:
        worker.stop()
        await running
    assert {(await app.jobs.get(id_)).attempts for id_ in ids} == {0}
    assert len(idp.asked) == 1


@handler("careless", timeout=600)
async def careless(job: Job[None]) -> int:
    return (await job.client.get("/me")).status_code


async def test_a_refusal_is_no_answer_while_newer_credentials_are_under_way(app, idp, monkeypatch):
    """The handler would take it for its result, and the job would be over before the refresh is."""
    monkeypatch.setattr(backend, "patience_of", lambda _: 0.25)
    monkeypatch.setattr(engine_grants, "LEASE", 600.0)
    await connect(app, idp, A)
    idp.expire()
    idp.hold.clear()
    id_ = (await app.enqueue(careless, resource_key=A)).id
    worker = app.worker(concurrency=2)
    running = asyncio.create_task(worker.run(signals=False))
    try:

        async def deferred():
            job = await app.jobs.get(id_)
            assert job.state in {"ready", "running"}
            return job.deferrals and job.state == "ready"

        await until(deferred)
        idp.hold.set()
        await until(lambda: succeeded(app, 1))
    finally:
        worker.stop()
        await running
    job = await app.jobs.get(id_)
    assert (job.result, job.attempts, len(idp.asked)) == (200, 0, 1)


@handler("hasty_thread", timeout=600)
def hasty_thread(job: SyncJob[None]) -> int:
    response = job.client.get("/me")
    response.raise_for_status()
    return response.status_code


@handler("hasty_batch", timeout=600, batch=2)
async def hasty_batch(batch: Batch[None]) -> None:
    for job in batch:
        (await job.client.get("/me")).raise_for_status()


@pytest.mark.parametrize("kind", [quick, hasty_thread, hasty_batch])
async def test_time_in_which_it_waits_for_a_refresh_is_not_the_handlers(app, idp, monkeypatch, kind):
    """The engine's own work takes longer than the timeout, as on a machine under load."""
    monkeypatch.setattr(backend, "patience_of", lambda _: 30.0)
    await connect(app, idp, A, expired=True)
    idp.hold.clear()
    ids = [(await app.enqueue(kind, resource_key=A)).id for _ in range(2)]
    worker = app.worker(concurrency=2)
    running = asyncio.create_task(worker.run(signals=False))
    try:
        await wait_inside(worker, monkeypatch, 1.5 * kind.timeout)
        assert [(await app.jobs.get(id_)).state for id_ in ids] == ["running"] * 2
        idp.hold.set()
        await until(lambda: succeeded(app, 2))
    finally:
        worker.stop()
        await running
    assert {(await app.jobs.get(id_)).attempts for id_ in ids} == {0}
    assert len(idp.asked) == 1


async def wait_inside(worker, monkeypatch, seconds):
    """The jobs of this worker have waited for the engine for so long, and their timeouts were looked at since."""
    running, looks = worker.executor.running.values(), []
    await until(lambda: len(running) == 2 and all((one.run or one).waits for one in running))
    for unit in {id(one.run or one): one.run or one for one in running}.values():
        unit.waits_since -= seconds
    for one in running:
        one.started -= seconds

    is_overdue = executor.is_overdue

    def look(*args):
        looks.append(is_overdue(*args))
        return looks[-1]

    monkeypatch.setattr(executor, "is_overdue", look)
    await until(lambda: len(looks) > 4)
    assert not any(looks)


async def succeeded(app, count):
    return await app.jobs.count(state="succeeded") == count


async def test_a_timeout_ends_what_waits_inside_the_engine_without_end(app, idp, monkeypatch):
    monkeypatch.setattr(backend, "patience_of", lambda _: 30.0)
    await connect(app, idp, A, expired=True)
    idp.hold.clear()
    id_ = (await app.enqueue(quick, resource_key=A)).id
    worker = app.worker(concurrency=1)
    running = asyncio.create_task(worker.run(signals=False))
    try:
        await until(lambda: any(one.waits for one in worker.executor.running.values()))
        for one in worker.executor.running.values():
            one.started -= 1e6
            one.waits_since -= 1e6

        async def charged():
            return (await app.jobs.get(id_)).last_error_kind == "timeout"

        await until(charged)
    finally:
        idp.hold.set()
        worker.stop()
        await running


async def test_a_lease_is_kept_up_as_long_as_its_request_takes(app, idp, monkeypatch):
    monkeypatch.setattr(engine_grants, "LEASE", 1.0)
    await connect(app, idp, A, expired=True)
    idp.hold.clear()
    asking = asyncio.create_task(app.credentials(A))

    async def asked():
        return len(idp.asked) == 1

    await until(asked)
    id_ = (await app.connections.get(A)).grant_id
    first = (await app.database.transaction(grants.read, id_)).lease_until

    async def extended():
        return (await app.database.transaction(grants.read, id_)).lease_until > first + timedelta(seconds=1)

    await until(extended)
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
    assert (begun.may_send, begun.grant.state) == (False, GrantState.UNKNOWN)
    clock.advance(1)
    assert not begin(database, held).may_send
    assert database.transaction_sync(grants.renew_if_held, held, FRESH)
    assert database.transaction_sync(grants.read, held.id).state is GrantState.ACTIVE


def test_after_the_last_call_the_next_one_takes_over(database, clock, held):
    clock.advance(21)
    assert not begin(database, held).may_send
    clock.advance(grants.LAST_CALL + 0.1)
    assert begin(database, held).may_send
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
    await connect(app, idp, A, expired=True)
    idp.script = ["down"]
    with pytest.raises(ResourceStopped) as stopped:
        await app.credentials(A)
    assert stopped.value.resource == "idp:token"


async def test_what_ended_a_refresh_is_not_hidden_where_its_lease_cannot_be_given_back(app, idp, clock, monkeypatch):
    await connect(app, idp, A, expired=True, now=clock.now())
    why = ResourceStopped("idp", "circuit")

    async def admit(_endpoint):
        raise why

    def let_go(*_):
        raise DatabaseUnreachable("it is away")

    monkeypatch.setattr(app.grants._endpoints, "admit", admit)
    monkeypatch.setattr(grants, "let_go", let_go)
    account = await app.grants.accounts.load_usable(A)
    with pytest.raises(ResourceStopped, match=str(why)):
        await app.grants._refresh_once(account, refused=True, patience=None)
