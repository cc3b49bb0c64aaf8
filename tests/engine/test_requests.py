"""Requests of real jobs to a real server: their marks, what follows from a mark, and who may still send."""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import timedelta

import httpx
import pytest
from pydantic import BaseModel, field_validator

from resilient import Fixed, Job, Provider, Resilient, Retry, SyncJob, handler
from resilient.engine.run import backend
from resilient.store.db.dialect import JSON
from tests.helpers import LIMIT, brisk, until, use_up

SOON = Retry(max_attempts=3, delay=Fixed(0))
STARTED, GO_ON = threading.Event(), threading.Event()


class Api:
    """Counts what arrives. /lost is taken and never answered; /hold is answered once `go` is set."""

    def __init__(self):
        self.seen = []
        self.go = threading.Event()
        self.lost = 1  # how many requests to /lost get no answer

    async def __call__(self, scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        path = scope["path"]
        self.seen.append(path)
        if path == "/lost" and self.seen.count(path) <= self.lost:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})
            raise ConnectionAbortedError  # uvicorn cuts the connection
        if path.startswith("/status/"):
            head = {"type": "http.response.start", "status": int(path.rpartition("/")[2]), "headers": []}
            await send({**head, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"{}"})
            return
        while path == "/hold" and not self.go.is_set():  # noqa: ASYNC110 - the test is in another thread
            await asyncio.sleep(0.01)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"{}"})


@pytest.fixture
def api(serve):
    STARTED.clear()
    GO_ON.clear()
    found = Api()
    found.url = serve(found)
    yield found
    found.go.set()
    GO_ON.set()


@pytest.fixture
async def make(api, database_url):
    """``make(*handlers)``: an app whose provider takes no idempotency keys; several are several programs."""
    made = []

    def make(*handlers):
        app = Resilient(
            database_url, handlers=handlers, providers=[Provider(name="api", base_url=api.url)], upgrade=False
        )
        made.append(app)
        return app

    yield make
    for app in made:
        await app.close()


async def query(app, statement, **params):
    return await app.database.transaction(lambda c, d: d.run(c, statement, params).all())


async def marks(app):
    """The marks on the rows of all jobs, by the path of the request."""
    rows = await app.database.transaction(lambda c, d: d.run(c, "SELECT sent FROM {job}", sent=JSON).all())
    return sorted(name.split()[1] for row in rows for name in row.sent or ())


async def run(app, **options):
    worker = brisk(app.worker(**{"concurrency": 2, "grace": 0.2, **options}))
    return worker, asyncio.create_task(worker.run(signals=False))


async def stop(worker, running):
    worker.stop()
    async with asyncio.timeout(LIMIT):
        await running


# -- marks -------------------------------------------------------------------------------------------------------------


async def test_two_requests_at_once_have_a_mark_each(make, api):
    @handler("two")
    async def two(job: Job[None]) -> None:
        await asyncio.gather(job.client.post("/hold"), job.client.post("/quick"))

    app = make(two)
    await app.enqueue(two, resource_key="api/1")
    worker, running = await run(app)

    async def quick_is_over():  # its mark stays until the end: whoever found the job must not send it again
        return "/quick" in api.seen and "/hold" in api.seen and await marks(app) == ["/hold", "/quick"]

    await until(quick_is_over)
    api.go.set()
    await worker.completer.flushed()
    await until(lambda: _nothing_left(app))
    assert await marks(app) == []
    await stop(worker, running)


async def _nothing_left(app):
    return not await query(app, "SELECT 1 FROM {job} WHERE finished_at IS NULL")


@pytest.mark.parametrize(
    ("took_effect", "state", "sent"), [(True, "succeeded", 1), (False, "succeeded", 2), (None, "dead", 1)]
)
@pytest.mark.parametrize("again", [1, 2])
async def test_a_request_in_doubt_is_looked_up_and_never_repeated_blindly(make, api, took_effect, state, sent, again):
    """Also if the look-up itself fails at first: the mark stands until it is known."""
    looks = []

    async def look(job: Job[None]) -> bool | None:
        looks.append(job.execution)
        if len(looks) < again:
            raise RuntimeError("cannot look")
        return took_effect

    @handler("charge", retry=SOON, reconcile=look)
    async def charge(job: Job[None]) -> None:
        await job.client.post("/lost")

    app = make(charge)
    done = await app.enqueue(charge, resource_key="api/1")
    await app.worker().drain(timeout=LIMIT)
    job = await app.jobs.get(done.id)
    assert (job.state, len(api.seen), len(looks)) == (state, sent, again)
    if state == "dead":
        assert (job.last_error_kind, "unknown outcome" in job.last_error) == ("ambiguous", True)


@pytest.mark.parametrize("took_effect", [True, False])
async def test_a_job_whose_worker_was_lost_in_a_request_is_looked_up_first(make, api, took_effect):
    async def look(job: Job[None]) -> bool:
        return took_effect

    @handler("charge", retry=SOON, reconcile=look)
    async def charge(job: Job[None]) -> None:
        await job.client.post("/hold")

    lost, other = make(charge), make(charge)
    done = await lost.enqueue(charge, resource_key="api/1")
    worker, running = await run(lost, concurrency=1, grace=LIMIT)  # its slot is in use: no claim is under way

    async def sent():
        return api.seen == ["/hold"]

    await until(sent)
    worker.stop()  # it claims nothing more
    sweeper = other.worker().sweeper
    sweeper._spare = 0.0

    async def rescued():
        await query(other, "UPDATE {job} SET lease_until = created_at RETURNING id")  # as if nobody had renewed it
        await sweeper.rescue()
        return sweeper.rescued == 1

    await until(rescued)
    assert await marks(other) == ["/hold"]
    await running  # it hears that its lease is lost; what it still says changes nothing
    assert await marks(other) == ["/hold"]
    api.go.set()
    await other.worker().drain(timeout=LIMIT)
    job = await other.jobs.get(done.id)
    assert (job.state, job.rescues, len(api.seen)) == ("succeeded", 1, 1 if took_effect else 2)


async def test_without_a_look_up_it_is_dead_at_once(make, api):
    @handler("charge", retry=SOON)
    async def charge(job: Job[None]) -> None:
        await job.client.post("/lost")

    app = make(charge)
    done = await app.enqueue(charge, resource_key="api/1")
    await app.worker().drain(timeout=LIMIT)
    job = await app.jobs.get(done.id)
    assert (job.state, job.last_error_kind, api.seen) == ("dead", "ambiguous", ["/lost"])


async def test_a_mark_whose_write_was_cut_off_is_gone_with_the_execution(make, api, monkeypatch):
    """It was committed, but nobody heard of it, and the request was never sent: nothing is in doubt."""

    jobs = []

    @handler("charge", retry=SOON, timeout=600)
    async def charge(job: Job[None]) -> None:
        if job.attempt == 1:
            jobs.append(job)
            await job.client.post("/charge")

    app = make(charge)
    real = app.database.transaction

    async def transaction(fn, *args, **kwargs):
        result = await real(fn, *args, **kwargs)
        if fn is backend._mark:
            use_up(jobs[0])
            await asyncio.Event().wait()
        return result

    monkeypatch.setattr(app.database, "transaction", transaction)
    done = await app.enqueue(charge, resource_key="api/1")
    await app.worker().drain(timeout=LIMIT)
    job = await app.jobs.get(done.id)
    assert (job.state, job.attempts, api.seen, await marks(app)) == ("succeeded", 1, [], [])
    assert [a.kind for a in await app.jobs.attempts(done.id)] == ["timeout"]


@pytest.mark.parametrize("end", ["cancel", "stop", "timeout"])
@pytest.mark.parametrize("known", [False, True], ids=["nobody can tell", "looked up"])
async def test_however_it_ends_while_a_request_is_unanswered_it_is_not_repeated_blindly(make, api, end, known):
    """Cancelled, handed back by a worker that stops, out of time: each leaves the question open."""

    async def look(job: Job[None]) -> bool:
        return True

    @handler("charge", retry=SOON, timeout=600 if end == "timeout" else None, reconcile=look if known else None)
    async def charge(job: Job[None]) -> None:
        jobs.append(job)
        await job.client.post("/hold")

    app, jobs = make(charge), []
    done = await app.enqueue(charge, resource_key="api/1")
    worker, running = await run(app)

    async def sent():
        return api.seen == ["/hold"]

    await until(sent)
    if end == "cancel":
        await app.jobs.cancel(done.id)
    if end == "stop":
        await stop(worker, running)
    if end == "timeout":
        use_up(jobs[0])

    async def ended():
        return (await app.jobs.get(done.id)).state != "running"

    await until(ended)
    if end != "stop":
        await stop(worker, running)
    await app.worker().drain(timeout=LIMIT)
    job = await app.jobs.get(done.id)
    assert api.seen == ["/hold"]
    if known and end != "cancel":
        assert job.state == "succeeded"  # as the look-up said
    else:
        assert (job.state, job.last_error_kind, "unknown outcome" in job.last_error) == ("dead", "ambiguous", True)


@pytest.mark.parametrize("status", [502, 504])
async def test_a_gateway_that_gave_up_on_a_post_says_nothing_of_what_happened(make, api, status):
    @handler("charge", retry=SOON)
    async def charge(job: Job[None]) -> None:
        (await job.client.post(f"/status/{status}")).raise_for_status()

    app = make(charge)
    done = await app.enqueue(charge, resource_key="api/1")
    await app.worker().drain(timeout=LIMIT)
    job = await app.jobs.get(done.id)
    assert (job.state, job.last_error_kind, len(api.seen)) == ("dead", "ambiguous", 1)


# -- who may still send ------------------------------------------------------------------------------------------------


def sends_on(failures):
    """Two handlers that send whatever they are told: one swallows its cancellation, one is a thread."""

    @handler("coroutine", timeout=None)
    async def coroutine(job: Job[None]) -> None:
        while not GO_ON.is_set():
            try:
                await job.client.get("/tick")
                await asyncio.sleep(0.02)
            except BaseException as error:  # noqa: BLE001 - the point
                failures.append(error)
                await asyncio.sleep(0.02)

    @handler("thread", timeout=None)
    def thread(job: SyncJob[None]) -> None:
        while not GO_ON.is_set():
            try:
                job.client.get("/tick")
            except Exception as error:  # noqa: BLE001 - the point
                failures.append(error)
            time.sleep(0.02)

    return coroutine, thread


@pytest.mark.parametrize("kind", [0, 1], ids=["coroutine", "thread"])
async def test_a_worker_that_lost_the_lease_sends_nothing_more(make, api, kind):
    failures = []
    handlers = sends_on(failures)
    app = make(*handlers)
    done = await app.enqueue(handlers[kind], resource_key="api/1")
    worker, running = await run(app)

    async def sending():
        return len(api.seen) > 2

    await until(sending)
    # Another worker has it now, as after a rescue.
    await query(app, "UPDATE {job} SET version = version + 2, locked_by = 'other', lease_until = NULL RETURNING id")
    execution = worker.executor.running[done.id.int]

    async def told():
        return execution.lost

    await until(told)
    await until(lambda: failures)  # what was under way then is over
    before = await arrived(api)
    more = len(failures) + 5
    await until(lambda: len(failures) >= more)
    assert await arrived(api) == before
    assert (await app.jobs.get(done.id)).state == "running"  # the other's
    GO_ON.set()
    await stop(worker, running)


async def arrived(api):
    """How many ticks had been sent by now: of each client one more request is answered, and what came before it."""
    async with httpx.AsyncClient(timeout=LIMIT, trust_env=False) as client:
        for _ in range(2):
            await client.get(f"{api.url}/marker")
    return api.seen.count("/tick")


async def test_a_thread_past_its_timeout_sends_nothing_more(make, api):
    @handler("late", retry=SOON, timeout=600)
    def late(job: SyncJob[None]) -> None:
        if job.attempt == 1:
            use_up(job)
            while not job.cancel_requested:
                time.sleep(0.01)
            job.client.post("/late")

    app = make(late)
    done = await app.enqueue(late, resource_key="api/1")
    worker, running = await run(app)

    async def again():
        return (await app.jobs.get(done.id)).state == "succeeded"

    await until(again)
    await stop(worker, running)
    assert api.seen == []


# -- rows that cannot run ----------------------------------------------------------------------------------------------


async def test_what_cannot_be_read_is_dead_and_the_others_go_on(make):
    @handler("typed")
    async def typed(job: Job[int]) -> int:
        return job.payload

    def upgrade(payload, version):
        raise KeyError("volume")

    @handler("moved", version=2, upgrade=upgrade)
    async def moved(job: Job[int]) -> int:
        return job.payload

    app = make(typed, moved)
    bad = await app.enqueue(typed, 1, resource_key="api/1")
    await query(app, "UPDATE {job} SET payload = '\"no number\"' RETURNING id")
    old = await app.enqueue(moved, 1, resource_key="api/1")
    await query(app, "UPDATE {job} SET payload_version = 1 WHERE kind = 'moved' RETURNING id")
    good = await app.enqueue(typed, 7, resource_key="api/1")
    await app.worker().drain(timeout=LIMIT)
    job = await app.jobs.get(bad.id)
    assert (job.state, job.last_error_kind) == ("dead", "undecodable")
    assert "does not fit the model of 'typed'" in job.last_error
    assert "no number" not in job.last_error  # values may be secrets
    job = await app.jobs.get(old.id)
    assert (job.state, job.last_error_kind) == ("dead", "undecodable")
    assert "upgrade of payload version 1: KeyError" in job.last_error
    assert (await app.jobs.get(good.id)).result == 7


async def test_a_validator_that_fails_over_a_stored_payload_is_named(make):
    class Sized(BaseModel):
        values: object

        @field_validator("values")
        @classmethod
        def some(cls, value):
            return value if len(value) else None

    @handler("sized")
    async def sized(job: Job[Sized]) -> None: ...

    app = make(sized)
    bad = await app.enqueue(sized, {"values": [1]}, resource_key="api/1")
    await query(app, "UPDATE {job} SET payload = :payload RETURNING id", payload='{"values": 5}')
    await app.worker().drain(timeout=LIMIT)
    job = await app.jobs.get(bad.id)
    assert (job.state, job.last_error_kind) == ("dead", "undecodable")
    assert job.last_error == "validator of the model: TypeError: object of type 'int' has no len()"


async def test_a_payload_newer_than_the_program_waits_for_a_newer_one(make):
    @handler("typed")
    async def typed(job: Job[int]) -> int:
        return job.payload

    app = make(typed)
    newer = await app.enqueue(typed, 1, resource_key="api/1")
    await query(app, "UPDATE {job} SET payload_version = 2 RETURNING id")
    good = await app.enqueue(typed, 7, resource_key="api/1")
    await app.worker().drain(timeout=LIMIT)
    job = await app.jobs.get(newer.id)
    assert (job.state, job.attempts) == ("scheduled", 0)
    (attempt,) = await app.jobs.attempts(newer.id)
    assert "waiting for a newer worker" in attempt.message
    assert (await app.jobs.get(good.id)).state == "succeeded"


async def test_a_worker_that_stops_tells_its_last_alerts(make):
    @handler("fails", retry=Retry(max_attempts=1))
    async def fails(job: Job[None]) -> None:
        raise ValueError("trouble")

    app = make(fails)
    await app.enqueue(fails, resource_key="api/1")
    worker, running = await run(app)
    await until(lambda: _nothing_left(app))
    await stop(worker, running)
    assert "dead" in {one.name for one in await app.alerts.list()}


@pytest.mark.parametrize("plain", [False, True])
async def test_the_probe_of_a_circuit_sends_one_request(api, make, plain):
    """In an outage the provider hears of one request a probe; what fails in passing is else sent up to three times."""

    @handler("get", retry=Retry(max_attempts=1))
    async def get(job: Job[None]) -> None:
        (await job.client.get("/status/503")).raise_for_status()

    @handler("get", retry=Retry(max_attempts=1))
    def get_plainly(job: SyncJob[None]) -> None:
        job.client.get("/status/503").raise_for_status()

    app = make(get_plainly if plain else get)
    await app.ready()
    await app.resources.open("api/a", until=app.now() + timedelta(seconds=1))
    done = await app.enqueue("get", resource_key="api/a")
    async with asyncio.timeout(LIMIT):
        while (await app.jobs.get(done.id)).state != "dead":
            await app.worker().drain()
    assert api.seen == ["/status/503"]
    other = await app.enqueue("get", resource_key="api/b")
    await app.worker().drain()
    assert (await app.jobs.get(other.id)).state == "dead"
    assert len(api.seen) > 2
