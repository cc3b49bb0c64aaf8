"""A worker that stood still for longer than its lease begins nothing more of what others do by now.

That it stands still is a clock that is ahead; the last test stops a process.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
from datetime import timedelta

import pytest
from sqlmodel import Session

from resilient import Batch, DatabaseUnreachable, Event, Job, Provider, Resilient, SyncJob, handler
from resilient.engine.accounts import grants as engine_grants
from resilient.engine.events.publishers import Publishers
from resilient.engine.run.backend import HandlerBackend, JobHooks
from resilient.engine.run.worker import Worker
from resilient.store.accounts import grants
from resilient.store.accounts.secrets import new_key
from resilient.store.db.dialect import TIME
from resilient.store.jobs import leases
from resilient.wire.oauth.endpoints import TokenClient
from tests import nursery
from tests.helpers import LIMIT, brisk, bury, drain, until
from tests.idp import answer, connect, me

A = "idp/acct-1"


class Api:
    """Answers at once, and keeps what arrives."""

    def __init__(self):
        self.seen = []

    async def __call__(self, scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        self.seen.append(scope["method"])
        await answer(send, 200, {})


async def not_charged(_job):
    return False


@handler("post", reconcile=not_charged)
async def post(job: Job[None]) -> None:
    await job.client.post("/charge")


@handler("put")
async def put(job: Job[None]) -> None:
    await job.client.put("/contact")


def not_charged_either(_job):
    return False


@handler("in-thread", reconcile=not_charged_either)
def in_thread(job: SyncJob[None]) -> None:
    job.client.post("/charge")


@handler("by-call", reconcile=not_charged)
async def by_call(job: Job[None]) -> None:
    async with job.call("POST", "/charge") as call:
        answer = await job.deps.post(call.url)
        call.report(answer.status_code)


@handler("batch", batch=5)
async def batch(jobs: Batch[None]) -> None:
    for job in jobs:
        await job.client.put("/contact")


@pytest.fixture
async def app(api, database_url, client):
    provider = Provider(name="api", base_url=api.url)
    handlers = [post, put, in_thread, by_call, batch]
    async with Resilient(database_url, handlers=handlers, providers=[provider], deps=client, upgrade=False) as app:
        yield app


@pytest.fixture
async def client():
    import httpx

    async with httpx.AsyncClient(trust_env=False) as client:
        yield client


@pytest.fixture
def stand_still(monkeypatch):
    """Let this process have stood still for an hour."""
    hours, clock = [], leases.clock
    monkeypatch.setattr(leases, "clock", lambda: clock() + 3600.0 * len(hours))
    return lambda: hours.append(1)


@pytest.fixture
def freeze(app, stand_still):
    """The same, once; meanwhile the job was given to another worker."""
    frozen = []

    def freeze():
        if not frozen:
            frozen.append(1)
            stand_still()
            app.database.transaction_sync(lambda c, d: d.run(c, "UPDATE {job} SET version = version + 1") and None)

    return freeze


def at_last_look(monkeypatch, what):
    """Call ``what`` in the moment before the first byte."""
    is_late = JobHooks.is_late
    monkeypatch.setattr(JobHooks, "is_late", lambda self, permit: what() or is_late(self, permit))


async def taken_over(app):
    """Another worker goes on."""
    await bury(app)
    await app.worker().sweeper.rescue()
    await drain(app)


@pytest.mark.parametrize("kind", [post, put, in_thread, by_call])
async def test_a_request_of_a_job_that_another_worker_has_is_not_sent(app, api, freeze, monkeypatch, kind):
    job = await app.enqueue(kind, resource_key="api/1")
    at_last_look(monkeypatch, freeze)
    await drain(app)
    assert (api.seen, (await app.jobs.get(job.id)).state) == ([], "running")
    await taken_over(app)
    assert (len(api.seen), (await app.jobs.get(job.id)).state) == (1, "succeeded")


@pytest.mark.parametrize("kind", [put, in_thread, batch])
async def test_a_handler_of_a_job_that_another_worker_has_does_not_begin(app, api, freeze, monkeypatch, kind):
    """Frozen between the claim and what it brought."""
    submit, look = Worker._submit, JobHooks.admit
    begun = []
    monkeypatch.setattr(Worker, "_submit", lambda self, claimed: (claimed.jobs and freeze()) or submit(self, claimed))
    monkeypatch.setattr(JobHooks, "admit", lambda self, request: begun.append(1) or look(self, request))
    jobs = [await app.enqueue(kind, resource_key="api/1") for _ in range(2)]
    worker = app.worker(concurrency=4)
    await worker.drain(timeout=LIMIT)
    assert (begun, api.seen, worker.outcomes["handed_back"]) == ([], [], 2)
    await taken_over(app)
    assert [(await app.jobs.get(job.id)).state for job in jobs] == ["succeeded"] * 2


async def test_a_job_that_nobody_took_goes_on_under_a_new_lease(app, api, stand_still, monkeypatch):
    """Its lease is over, and it is held all the same: it is asked for once, not for each request."""
    lease = "SELECT lease_until FROM {job}"
    asked, keep, frozen = [], leases.keep_if_held, []

    def over():
        if not frozen:
            frozen.append(1)
            stand_still()
            app.database.transaction_sync(lambda c, d: d.run(c, "UPDATE {job} SET lease_until = created_at") and None)

    def kept(c, d, *args):
        is_kept = keep(c, d, *args)
        asked.append(d.run(c, lease, lease_until=TIME).scalar() > d.now(c))
        return is_kept

    monkeypatch.setattr(leases, "keep_if_held", kept)
    job = await app.enqueue(post, resource_key="api/1")
    at_last_look(monkeypatch, over)
    await drain(app)
    await app.enqueue(post, resource_key="api/1")
    await drain(app)
    assert (api.seen, asked, (await app.jobs.get(job.id)).state) == (["POST", "POST"], [True], "succeeded")


async def test_one_that_stands_still_again_while_it_asks_asks_again(app, api, freeze, stand_still, monkeypatch):
    asked, keep = [], leases.keep_if_held

    def kept(c, d, *args):
        asked.append(keep(c, d, *args))
        if len(asked) == 1:
            stand_still()
            d.run(c, "UPDATE {job} SET version = version + 1")
        return asked[-1]

    monkeypatch.setattr(leases, "keep_if_held", kept)
    await app.enqueue(post, resource_key="api/1")
    frozen = []
    at_last_look(monkeypatch, lambda: frozen or frozen.append(1) or stand_still())
    await drain(app)
    assert (api.seen, asked) == ([], [True, False])


@pytest.mark.parametrize("kind", [post, by_call])
async def test_while_nobody_can_tell_nothing_is_sent_nor_charged(app, api, stand_still, monkeypatch, kind):
    def away(*_):
        raise DatabaseUnreachable("away")

    monkeypatch.setattr(leases, "keep_if_held", away)
    job = await app.enqueue(kind, resource_key="api/1")
    frozen = []
    at_last_look(monkeypatch, lambda: frozen or frozen.append(1) or stand_still())
    worker = app.worker(concurrency=4)
    await worker.drain(timeout=LIMIT)
    found = await app.jobs.get(job.id)
    assert (api.seen, found.attempts, found.last_error_kind) == ([], 0, "database")
    marks = app.database.transaction_sync(lambda c, d: d.run(c, "SELECT sent FROM {job}").scalar())
    assert marks in (None, "{}", {})


async def test_a_heartbeat_moves_it_on(app, monkeypatch):
    execution = []

    @handler("waits")
    async def waits(job: Job[None]) -> None:
        execution.append(job._backend._execution)
        first = execution[0].held_until
        await until(lambda: execution[0].held_until > first)

    async with Resilient(app.database, handlers=[waits]) as other:
        job = await other.enqueue(waits, resource_key="api/1")
        before = leases.clock()
        await brisk(other.worker(lease=40.0)).drain(timeout=LIMIT)
        assert before + 30.0 < execution[0].held_until < leases.clock() + 30.0
        assert (await other.jobs.get(job.id)).state == "succeeded"


async def test_it_knows_how_late_it_is_before_the_database_tells(app, stand_still):
    """`time.monotonic` stands still while a machine sleeps; by it, a key that is forgotten by now was used again."""
    worker = app.worker()
    before = worker.now()
    stand_still()
    assert worker.now() - before >= timedelta(hours=1)
    assert worker._age(before) >= 3600.0


class Placed(Event, type="placed"):
    number: int


@pytest.mark.parametrize("where", ["before its draw", "while it connects"])
async def test_an_event_that_another_worker_has_is_not_published(app, freeze, monkeypatch, where):
    told, admit, connect, opened = [], HandlerBackend.admit, Publishers._connect, []

    async def shop(message):
        told.append(message.id)

    async def connected(self, name, destination):
        publisher = await connect(self, name, destination)
        opened.append(name)
        if len(opened) == 1:
            del self._open[name]  # the batch has begun, and the connection is lost
        else:
            freeze()
        return publisher

    if where == "before its draw":
        monkeypatch.setattr(HandlerBackend, "admit", lambda self, last_look: freeze() or admit(self, last_look))
    else:
        monkeypatch.setattr(Publishers, "_connect", connected)
    async with Resilient(app.database, destinations={"shop": shop}) as other:
        with Session(other.database.sync_engine) as session:
            other.outbox.publish(session, Placed(number=1), to=["shop"])
            session.commit()
        await drain(other)
        assert told == []
        await taken_over(other)
        assert len(told) == 1


async def test_a_refresh_that_another_process_has_sent_is_not_sent_again(database_url, idp, stand_still, monkeypatch):
    """Frozen at the socket: a refresh token that comes twice may end all tokens of its consent."""
    monkeypatch.setattr(grants, "LAST_CALL", 0.0)
    send, frozen = TokenClient._send, []
    app, other = (
        Resilient(database_url, handlers=[me], providers=[idp.provider()], secrets=[KEY], upgrade=False)
        for _ in range(2)
    )
    await connect(app, idp, A, expired=True)

    async def freeze(self, request, **words):
        if not frozen:
            frozen.append(1)
            stand_still()
            over = "UPDATE {grant} SET lease_until = created_at"
            await app.database.transaction(lambda c, d: d.run(c, over) and None)
            await until(lambda: renewed(other))
        return await send(self, request, **words)

    monkeypatch.setattr(TokenClient, "_send", freeze)
    await app.enqueue(me, resource_key=A)
    await drain(app)
    assert len(idp.asked) == 1
    assert (await app.connections.get(A)).state == "active"
    await app.close()
    await other.close()


async def renewed(app):
    try:
        return await app.credentials(A)
    except engine_grants.ResourceStopped:
        return None


KEY = new_key()
CHILD = """
import asyncio, os, signal, sys
from resilient import Provider, Resilient, handler
from resilient.engine.run import execution
from resilient.wire.requests import flow

execution.TRUSTED = 0.2 / 60  # of its lease, so that nobody waits for that

async def not_charged(job):
    return False

@handler("charge", reconcile=not_charged)
async def charge(job):
    await job.client.get("/")  # over a connection that is open, so that the next one is sent at once
    try:
        await job.client.post("/charge")
        print("sent", flush=True)
    except BaseException as error:
        print(type(error).__name__, flush=True)
        raise

outgoing = flow.outgoing

def freeze(request, *args):
    made = outgoing(request, *args)
    if request.method == "POST":
        print("frozen", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    return made

flow.outgoing = freeze

async def main():
    url, server = sys.argv[1:]
    api = Provider(name="api", base_url=server)
    async with Resilient(url, handlers=[charge], providers=[api], upgrade=False) as app:
        worker = app.worker()
        worker.heartbeat._interval = 3600.0  # it tells nothing, and is not stopped while it writes
        await worker.run(signals=False)

asyncio.run(main())
"""


async def test_a_process_that_was_stopped_before_its_first_byte_does_not_send_when_it_wakes(postgres_url, api):
    """Not on SQLite: a process that is stopped while a thread of it writes keeps everybody from writing."""

    @handler("charge", reconcile=not_charged)
    async def charge(job: Job[None]) -> None:
        await job.client.post("/charge")

    provider = Provider(name="api", base_url=api.url)
    async with Resilient(postgres_url, handlers=[charge], providers=[provider], upgrade=False) as app:
        await app.enqueue(charge, resource_key="api/1")
        child = nursery.start(CHILD, postgres_url, api.url, stdout=subprocess.PIPE)
        try:
            assert await asyncio.to_thread(child.stdout.readline) == "frozen\n"
            began = leases.clock()
            await taken_over(app)
            assert api.seen == ["GET", "POST"]
            await until(lambda: leases.clock() > began + 0.3)  # by its own clock, too
            child.send_signal(signal.SIGCONT)
            assert await asyncio.to_thread(child.stdout.readline) in ("LostLease\n", "CancelledError\n")
        finally:
            child.kill()
            await asyncio.to_thread(child.communicate)
        assert api.seen == ["GET", "POST"]
