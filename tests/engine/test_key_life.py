"""A provider remembers an idempotency key for so long: within its life a repeat is safe, after it nobody knows."""

from __future__ import annotations

import asyncio
import json
import threading
from datetime import timedelta

import pytest

from resilient import Fixed, Idempotency, Job, Provider, Resilient, Retry, Snooze, SyncJob, Transient, handler
from resilient.store.db.dialect import JSON
from tests.helpers import LIMIT, drain

LIFE = 3600.0


class Api:
    """Does what is asked, once per key; `lose` answers get lost, `statuses` come instead of 200."""

    def __init__(self):
        self.keys, self.lose, self.statuses = [], 0, []
        self.arrived, self.go = threading.Event(), threading.Event()
        self.go.set()

    async def __call__(self, scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        self.keys.append(dict(scope["headers"]).get(b"idempotency-key", b"").decode())
        self.arrived.set()
        while not self.go.is_set():  # noqa: ASYNC110 - the test is in another thread
            await asyncio.sleep(0.01)
        if len(self.keys) <= self.lose:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})
            raise ConnectionAbortedError  # uvicorn cuts the connection
        status = self.statuses.pop(0) if self.statuses else 200
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"{}"})


@pytest.fixture
def api(serve):
    found = Api()
    found.url = serve(found)
    yield found
    found.go.set()


@pytest.fixture
async def make(api, database_url, clock):
    made = []

    def make(*handlers, life=LIFE):
        provider = Provider(name="pay", base_url=api.url, idempotency=Idempotency(life=life))
        app = Resilient(database_url, handlers=handlers, providers=[provider], upgrade=False, clock=clock.now)
        made.append(app)
        return app

    yield make
    for app in made:
        await app.close()


def charging(delay=60.0, **options):
    @handler("charge", retry=Retry(max_attempts=9, delay=Fixed(delay)), **options)
    async def charge(job: Job[None]) -> None:
        (await job.client.post("/charges", json={"amount": 5})).raise_for_status()

    return charge


async def sent(app):
    (row,) = await app.database.transaction(lambda c, d: d.run(c, "SELECT sent FROM {job}", sent=JSON).all())
    return row[0]


async def test_key_and_time_are_committed_before_the_first_sending(make, api, clock):
    charge = charging()
    app = make(charge)
    await app.enqueue(charge, resource_key="pay/1")
    api.go.clear()
    task = asyncio.create_task(drain(app))
    assert await asyncio.to_thread(api.arrived.wait, LIMIT)
    (mark,) = (await sent(app)).values()
    assert (mark["key"], mark["at"]) == (api.keys[0], clock.now().isoformat(timespec="milliseconds"))
    api.go.set()
    await task
    assert await sent(app) is None


async def test_within_the_life_the_same_key_is_sent_again(make, api, clock):
    api.lose = 1
    charge = charging()
    app = make(charge)
    done = await app.enqueue(charge, resource_key="pay/1")
    await drain(app)
    first = (await sent(app))["POST /charges #1"]["at"]
    assert (await app.jobs.get(done.id)).state == "scheduled"
    clock.advance(LIFE / 2)
    await drain(app)
    assert (await app.jobs.get(done.id)).state == "succeeded"
    assert len(set(api.keys)) == 1
    assert first == (clock.now().replace(hour=12, minute=0)).isoformat(timespec="milliseconds")


@pytest.mark.parametrize(
    ("found", "state", "more"), [(True, "succeeded", 0), (False, "succeeded", 1), (None, "dead", 0)]
)
async def test_after_the_life_it_is_looked_up(make, api, clock, found, state, more):
    api.lose = 9

    async def look(job: Job[None]) -> bool | None:
        return found

    charge = charging(reconcile=look)
    app = make(charge)
    done = await app.enqueue(charge, resource_key="pay/1")
    await drain(app)
    before, api.lose = len(api.keys), 0
    clock.advance(LIFE)
    await drain(app)
    assert (await app.jobs.get(done.id)).state == state
    assert len(api.keys) == before + more


async def test_after_the_life_without_a_look_up_it_is_shown_to_a_person(make, api, clock):
    api.lose = 9
    charge = charging()
    app = make(charge)
    done = await app.enqueue(charge, resource_key="pay/1")
    await drain(app)
    before = len(api.keys)
    clock.advance(LIFE)
    await drain(app)
    job = await app.jobs.get(done.id)
    assert (job.state, job.last_error_kind, len(api.keys)) == ("dead", "ambiguous", before)
    assert "unknown outcome" in job.last_error
    assert "POST /charges #1 was first sent at 2030-01-01 12:00:00 UTC" in job.last_error
    again = await app.jobs.retry(done.id)
    assert again.ambiguous == 1  # a person has to say that it may be done twice


async def test_a_next_try_that_would_come_too_late_is_decided_at_once(make, api, clock):
    api.lose = 9
    charge = charging(delay=2 * LIFE)
    app = make(charge)
    done = await app.enqueue(charge, resource_key="pay/1")
    await drain(app)
    job = await app.jobs.get(done.id)
    assert (job.state, job.last_error_kind) == ("dead", "ambiguous")
    assert "safe to repeat until 2030-01-01 12:59:00 UTC" in job.last_error


async def test_a_handler_that_repeats_too_late_sends_nothing(make, api, clock):
    """The last line: an execution that outlives the key."""
    api.lose = 9

    @handler("charge", retry=Retry(max_attempts=1))
    async def charge(job: Job[None]) -> None:
        for _ in range(2):
            try:
                await job.client.post("/charges", json={})
            except Exception:  # noqa: BLE001 - whatever it is, the handler goes on
                clock.advance(LIFE)
                count.append(len(api.keys))

    count: list[int] = []
    app = make(charge)
    await app.enqueue(charge, resource_key="pay/1")
    await drain(app)
    assert len(count) == 2
    assert count[0] == count[1] == len(api.keys)


@pytest.mark.parametrize("status", [500, 503, 409])
async def test_a_servers_failure_leaves_the_outcome_open(make, api, clock, status):
    api.statuses = [status] * 9
    charge = charging()
    app = make(charge)
    await app.enqueue(charge, resource_key="pay/1")
    await drain(app)
    assert list(await sent(app)) == ["POST /charges #1"]


@pytest.mark.parametrize("status", [429, 401])
async def test_a_refusal_of_the_first_sending_leaves_nothing_open(make, api, clock, status):
    api.statuses = [status] * 9
    charge = charging()
    app = make(charge)
    await app.enqueue(charge, resource_key="pay/1")
    await drain(app)
    assert await sent(app) is None


async def test_a_refusal_of_a_repeat_leaves_the_first_sending_open(make, api, clock):
    api.lose, api.statuses = 1, [429]
    charge = charging()
    app = make(charge)
    done = await app.enqueue(charge, resource_key="pay/1")
    await drain(app)
    clock.advance(120)
    await drain(app)
    assert (await app.jobs.get(done.id)).last_error_kind == "throttled"
    assert list(await sent(app)) == ["POST /charges #1"]


async def test_what_never_left_this_machine_ages_no_key(make, api, clock):
    charge = charging()
    provider = Provider(name="pay", base_url="http://127.0.0.1:1", idempotency=Idempotency(life=LIFE))
    app = make(charge)
    app.providers = {"pay": provider}
    done = await app.enqueue(charge, resource_key="pay/1")
    await drain(app)
    assert await sent(app) is None
    clock.advance(2 * LIFE)
    app.providers = {"pay": Provider(name="pay", base_url=api.url, idempotency=Idempotency(life=LIFE))}
    await drain(app)
    assert (await app.jobs.get(done.id)).state == "succeeded"


async def test_a_lost_worker_repeats_within_the_life_and_looks_after_it(make, api, clock):
    """Rescued from a crash between the sending and the answer."""
    charge = charging()
    app = make(charge)
    for late in (False, True):
        done = await app.enqueue(charge, resource_key=f"pay/{late}")
        since = clock.now()
        until = since + timedelta(seconds=3000)
        mark = {"POST /charges #1": {"at": since.isoformat(), "key": "k", "hash": None, "until": until.isoformat()}}
        await app.database.transaction(
            lambda c, d, id_=done.id, mark=mark, since=since: d.run(
                c,
                "UPDATE {job} SET state = 'running', locked_by = 'gone', lease_until = :at, started_at = :at,"
                f" executions = 1, sent = {'CAST(:mark AS json)' if d.is_postgresql else ':mark'} WHERE id = :id",
                {"id": d.id(id_), "at": since, "mark": json.dumps(mark)},
            )
        )
        clock.advance(3001 if late else 2900)
        worker = app.worker()
        await worker.sweeper.rescue()
        assert worker.sweeper.rescued == 1
        assert (await app.jobs.get(done.id)).state == ("dead" if late else "ready")  # a person hears of it at once
        await drain(app)
        assert (await app.jobs.get(done.id)).state == ("dead" if late else "succeeded")
    assert len(api.keys) == 1


async def test_a_key_that_is_remembered_for_ever_needs_no_mark(make, api, clock):
    api.lose = 9
    charge = charging()
    app = make(charge, life=None)
    done = await app.enqueue(charge, resource_key="pay/1")
    await drain(app)
    assert await sent(app) is None
    api.lose = 0
    clock.advance(days=30)
    await drain(app)
    assert (await app.jobs.get(done.id)).state == "succeeded"
    assert len(set(api.keys)) == 1


async def test_a_foreign_client_and_a_thread_keep_the_same_rules(make, api, clock):
    @handler("call", retry=Retry(max_attempts=9, delay=Fixed(60)))
    def call(job: SyncJob[None]) -> None:
        with job.call("POST", f"{api.url}/charges") as call:
            keys.append(call.headers["Idempotency-Key"])
            call.report(503)
        call.raise_for_failure()

    keys: list[str] = []
    app = make(call)
    done = await app.enqueue(call, resource_key="pay/1")
    await drain(app)
    assert list(await sent(app)) == ["POST /charges #1"]
    clock.advance(LIFE)
    await drain(app)
    assert (await app.jobs.get(done.id)).state == "dead"
    assert len(keys) == 1


async def test_a_replay_within_the_life_keeps_counting_from_the_first_sending(make, api, clock):
    api.statuses = [503] * 99
    charge = charging()
    app = make(charge)
    done = await app.enqueue(charge, resource_key="pay/1", max_attempts=1)
    await drain(app)
    assert (await app.jobs.get(done.id)).state == "dead"
    assert (await app.jobs.retry(done.id)).retried == 1
    clock.advance(LIFE)
    before = len(api.keys)
    await drain(app)
    assert ((await app.jobs.get(done.id)).last_error_kind, len(api.keys)) == ("ambiguous", before)
    api.statuses = []
    await app.jobs.retry(done.id, repeat_ambiguous=True)
    await drain(app)
    assert (await app.jobs.get(done.id)).state == "succeeded"


@pytest.mark.parametrize("ends", ["dead", "cancelled"])
async def test_a_step_with_an_unanswered_request_is_undone(make, api, ends):
    """It may have taken effect, whatever its key: the customer may have been charged."""
    undone = []

    @handler("charge", retry=Retry(max_attempts=1 if ends == "dead" else 9, delay=Fixed(60)))
    async def charge(job: Job[None]) -> None:
        (await job.client.post("/charges", json={"amount": 5})).raise_for_status()

    @handler("refund")
    async def refund(job: Job[None]) -> None:
        undone.append(job.resource_key)

    api.lose = 1
    app = make(charge, refund)
    async with app.workflow("order", resource_key="pay/1") as wf:
        wf.step(charge, undo=refund)
    await drain(app)
    if ends == "cancelled":
        await app.workflows.cancel(wf.id)
        await drain(app)
    info = await app.workflows.get(wf.id)
    assert (info.step("charge").state, info.state, undone) == (ends, "undone", ["pay/1"])


# -- answered, and then something else failed --------------------------------------------------------------------------


def stumbling(*, delay=60.0, attempts=9, error=ValueError, **options):
    """Charges, and fails afterwards the first time."""
    runs = []

    @handler("charge", retry=Retry(max_attempts=attempts, delay=Fixed(delay)), **options)
    async def charge(job: Job[None]) -> None:
        runs.append(job.execution)
        if len(runs) == 1 or job.tags.get("sends") != "once":
            (await job.client.post("/charges", json={"amount": 5})).raise_for_status()
        if len(runs) == 1:
            raise error("a line after the charge")

    return charge


async def begin(make, charge, **options):
    """An app in which a job of ``charge`` has run once, and that job."""
    app = make(charge)
    done = await app.enqueue(charge, resource_key="pay/1", **options)
    await drain(app)
    return app, done


async def finish(app, done):
    """The job, after all that is due has run."""
    await drain(app)
    return await app.jobs.get(done.id)


@pytest.mark.parametrize("error", [ValueError, Transient, Snooze], ids=lambda error: error.__name__)
async def test_what_was_answered_is_not_sent_again_after_the_keys_life(make, api, clock, error):
    """The provider would do it again."""
    charge = stumbling(error=(lambda _text: Snooze(60)) if error is Snooze else error)
    app, done = await begin(make, charge)
    assert len(api.keys) == 1
    clock.advance(LIFE)
    job = await finish(app, done)
    assert (job.state, job.last_error_kind, len(api.keys)) == ("dead", "ambiguous", 1)
    assert "POST /charges #1 was first sent at 2030-01-01 12:00:00 UTC" in job.last_error
    await app.jobs.retry(done.id, repeat_ambiguous=True)
    assert ((await finish(app, done)).state, len(api.keys)) == ("succeeded", 2)


async def test_what_was_answered_is_sent_again_within_the_keys_life(make, api, clock):
    charge = stumbling()
    app, done = await begin(make, charge)
    clock.advance(LIFE / 2)
    assert ((await finish(app, done)).state, len(api.keys), len(set(api.keys))) == ("succeeded", 2, 1)
    assert await sent(app) is None


async def test_who_does_not_send_it_again_is_not_stopped_over_it(make, api, clock):
    """A handler that sees what it has done, and goes on behind it."""
    charge = stumbling()
    app, done = await begin(make, charge, tags={"sends": "once"})
    assert (await sent(app))["POST /charges #1"]["answered"] is True
    clock.advance(2 * LIFE)
    assert ((await finish(app, done)).state, len(api.keys)) == ("succeeded", 1)


async def test_a_person_who_retries_it_after_the_keys_life_hears_why_it_is_not_sent(make, api, clock):
    charge = stumbling(attempts=1)
    app, done = await begin(make, charge)
    assert (await app.jobs.get(done.id)).last_error_kind == "bug"
    clock.advance(days=2)
    await app.jobs.retry(done.id)
    job = await finish(app, done)
    assert (job.state, job.last_error_kind, len(api.keys)) == ("dead", "ambiguous", 1)


async def test_what_was_answered_is_looked_up_before_it_is_sent_again_after_the_keys_life(make, api, clock):
    async def look(job: Job[None]) -> bool:
        return True

    charge = stumbling(reconcile=look)
    app, done = await begin(make, charge)
    clock.advance(LIFE)
    await drain(app)
    clock.advance(120)
    assert ((await finish(app, done)).state, len(api.keys)) == ("succeeded", 1)


async def test_a_new_operation_is_sent_under_its_own_key(make, api, clock):
    charge = stumbling(attempts=1)
    app, done = await begin(make, charge)
    clock.advance(days=2)
    await app.jobs.retry(done.id, new_operation=True)
    assert ((await finish(app, done)).state, len(set(api.keys))) == ("succeeded", 2)
