"""A request whose job ends while the engine works on it: what is known of it counts, and nothing of it stays open."""

from __future__ import annotations

import asyncio
import threading

import pytest

from resilient import AnswerFacts, Failure, FailureKind, Job, Provider, Resilient, SyncJob, handler
from resilient.core.gates.policy import Policies
from resilient.engine.gates.gate import Gate
from resilient.engine.run import backend
from resilient.store.gates import circuits
from resilient.testing import new_key
from tests.helpers import LIMIT, until
from tests.idp import connect

KEY = new_key()
THROTTLED = Failure(FailureKind.THROTTLED, status=429, code="http_429", retry_in=600.0)
A = "idp/acct-1"


class Api:
    """Says when a request has arrived, and answers it only if it is let to."""

    def __init__(self):
        self.arrived, self.status, self.answers = threading.Event(), 200, threading.Event()

    async def __call__(self, _scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        self.arrived.set()
        while not self.answers.is_set():  # noqa: ASYNC110 - the test is in another thread
            await asyncio.sleep(0.01)
        await send({"type": "http.response.start", "status": self.status, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"{}"})


@pytest.fixture(autouse=True)
def api(serve):
    api = Api()
    api.url = serve(api)
    yield api
    api.answers.set()


class Seen:
    """What the handlers of a test have met."""

    def __init__(self, *errors):
        self.errors, self.status = list(errors), []


def wrong():
    raise KeyError("mine")


def open_requests(gate):
    return {key: flow.in_flight for key, flow in gate._lessons.flows._flows.items() if flow.in_flight}


async def interrupted(app, kind, key, when):
    """Stop a worker at once ``when()``; its job, and its gate's open requests."""
    id_ = (await app.enqueue(kind, resource_key=key)).id
    worker = app.worker(concurrency=2, grace=0)
    running = asyncio.create_task(worker.run(signals=False))
    await until(when)
    worker.stop()
    await running
    return await app.jobs.get(id_), open_requests(worker.gate)


# -- a host that nobody declared --------------------------------------------------------------------------------------


async def test_a_stop_charges_nothing_for_a_request_to_a_foreign_host(api, database_url):
    seen = Seen()

    @handler("go")
    async def go(job: Job[None]) -> None:
        try:
            await job.client.get(f"{api.url}/slow")
        except BaseException as error:
            seen.errors.append(type(error))
            raise

    provider = Provider(name="own", base_url="https://own.example")
    async with Resilient(database_url, handlers=[go], providers=[provider]) as app:
        job, _ = await interrupted(app, go, "own/1", api.arrived.is_set)
    assert seen.errors == [asyncio.CancelledError]
    assert (job.state, job.attempts) == ("ready", 0)


async def test_a_block_for_a_foreign_host_raises_what_was_raised_in_it(api, database_url):
    seen = Seen()

    @handler("go")
    async def go(job: Job[None]) -> None:
        try:
            async with job.call("GET", api.url):
                wrong()
        except BaseException as error:
            seen.errors.append(type(error))
            raise

    provider = Provider(name="own", base_url="https://own.example")
    async with Resilient(database_url, handlers=[go], providers=[provider]) as app:
        await app.enqueue(go, resource_key="own/1", max_attempts=1)
        await app.worker().drain(timeout=LIMIT)
    assert seen.errors == [KeyError]


async def test_what_a_thread_gives_up_is_given_up_on_the_loop(api, database_url, monkeypatch):
    """The counts of requests under way are the loop's: a thread beside it would lose one now and then."""
    threads, real = [], Gate.abandoned

    def abandoned(gate, permit):
        threads.append(threading.current_thread())
        return real(gate, permit)

    monkeypatch.setattr(Gate, "abandoned", abandoned)

    @handler("go")
    def go(job: SyncJob[None]) -> None:
        with job.call("GET", api.url):
            wrong()

    provider = Provider(name="own", base_url=api.url)
    async with Resilient(database_url, handlers=[go], providers=[provider]) as app:
        await app.enqueue(go, resource_key="own/1", max_attempts=1)
        worker = app.worker()
        await worker.drain(timeout=LIMIT)
    assert threads == [threading.current_thread()]
    assert open_requests(worker.gate) == {}


# -- 401 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["client", "call"])
async def test_a_stop_during_a_refresh_leaves_no_doubt_about_the_request_that_was_refused(
    idp, database_url, monkeypatch, how
):
    """It had no effect: 401. The job goes on elsewhere, and is not dead of an unknown outcome."""
    monkeypatch.setattr(backend, "patience_of", lambda _: LIMIT)

    @handler("client")
    async def client(job: Job[None]) -> None:
        (await job.client.post("/charge")).raise_for_status()

    @handler("call")
    async def call(job: Job[None]) -> None:
        async with job.call("POST", f"{idp.url}/charge") as one:
            one.report(401)

    kinds = {"client": client, "call": call}
    async with Resilient(database_url, handlers=[client, call], providers=[idp.provider()], secrets=[KEY]) as app:
        await connect(app, idp, A)
        idp.expire()
        idp.hold.clear()
        job, requests = await interrupted(app, kinds[how], A, lambda: idp.asked)
        idp.hold.set()
    assert (job.state, job.attempts, requests) == ("ready", 0, {})


async def test_a_refusal_is_no_answer_once_newer_credentials_are_there(idp, database_url, monkeypatch):
    """A gate that shuts before the repeat defers the job; its handler is not told of credentials that are replaced."""
    seen, permits = Seen(), []

    @handler("go")
    async def go(job: Job[None]) -> int:
        response = await job.client.get("/me")
        seen.status.append(response.status_code)
        return response.status_code

    async with Resilient(database_url, handlers=[go], providers=[idp.provider()], secrets=[KEY]) as app:
        await connect(app, idp, A)
        idp.expire()
        real = backend.JobHooks.refreshed

        async def refreshed(hooks, permit, failure):
            is_renewed = await real(hooks, permit, failure)
            permits.append(is_renewed)
            if len(permits) == 1:
                await app.resources.pause(A)
                hooks._wire.gate.forget([A])
            return is_renewed

        monkeypatch.setattr(backend.JobHooks, "refreshed", refreshed)
        id_ = (await app.enqueue(go, resource_key=A)).id
        await app.worker().drain(timeout=LIMIT)
        assert seen.status == []
        await app.resources.resume(A)
        await app.worker().drain(timeout=LIMIT)
        job = await app.jobs.get(id_)
    assert (job.state, job.result, job.attempts, seen.status) == ("succeeded", 200, 0, [200])
    assert permits == [True]


# -- 429 ----------------------------------------------------------------------------------------------------------


class Held:
    """A transaction of somebody else's that holds a resource's row; on SQLite the whole database."""

    def __init__(self, database, key):
        self._database, self._key = database, key
        self.begun, self._end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._hold)

    def _hold(self):
        def fn(c, d):
            d.run(c, "UPDATE {resource} SET updated_at = updated_at WHERE key = :key", {"key": self._key})
            self.begun.set()
            assert self._end.wait(LIMIT)

        self._database.transaction_sync(fn)

    def __enter__(self):
        self._thread.start()
        assert self.begun.wait(LIMIT)
        return self

    def __exit__(self, *_):
        self._end.set()
        self._thread.join()


@pytest.fixture
async def gate(database):
    gate = Gate(database, Policies(), owner="w1")
    await gate.start()
    yield gate
    await gate.close()


async def test_a_throttle_is_written_though_the_job_that_met_it_is_cut_off(gate, database, open_database, database_url):
    permit = await gate.admit("p/a")
    with Held(open_database(database_url), "p/a"):
        telling = asyncio.create_task(gate.answered(permit, "p/a", AnswerFacts(429), THROTTLED))
        await until(lambda: "p/a" in gate._resting)
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
        assert open_requests(gate) == {}
        assert gate.stop("p/a") is not None
    await until(lambda: "p/a" in gate._snapshot.restricted)
    rests = await database.transaction(lambda c, d: circuits.lock(c, d, ["p/a"])["p/a"].blocked_until)
    assert rests is not None


async def test_a_throttle_waits_for_nobody_who_holds_its_resource(postgres_database, open_database, postgres_url):
    """The answer is its job's, which would else be told that its time is over."""
    gate = Gate(postgres_database, Policies(), owner="w1")
    await gate.start()
    permit = await gate.admit("p/a")
    with Held(open_database(postgres_url), "p/a"):
        async with asyncio.timeout(LIMIT / 5):
            await gate.answered(permit, "p/a", AnswerFacts(429), THROTTLED)
        assert gate.stop("p/a") is not None
    await until(lambda: not gate._resting)
    await gate.close()
    rests = await postgres_database.transaction(lambda c, d: circuits.lock(c, d, ["p/a"])["p/a"].blocked_until)
    assert rests is not None
