"""What the program's own functions raise ends what called them: never a slot, a task, or the event loop."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from datetime import UTC, datetime

import pytest
from sqlmodel import Session

from resilient import AlertInfo, Batch, Event, Job, Notice, Resilient, Retry, SyncBatch, SyncJob, Transient, handler
from resilient.core.jobs.backoff import Custom
from resilient.engine.alerts import Sinks
from resilient.engine.ground.foreign import MOST, Escaped, called
from resilient.engine.schedules import schedules
from tests.helpers import LIMIT

ONCE = Retry(max_attempts=1)


class Unheard(BaseException):
    """Nobody catches it by ``except Exception``."""


def raises(error):
    """A method that does."""

    def method(self, *_):
        raise error("unreadable")

    return method


# What cannot be looked at: each raises over another of the ways to read an exception.
UNREADABLE = {
    "no truth value": type("Untrue", (Exception,), {"__bool__": raises(RuntimeError)}),
    "no text": type("Textless", (Exception,), {"__str__": raises(SystemExit), "__repr__": raises(SystemExit)}),
    "no class": type("Classless", (Exception,), {"__class__": property(raises(RuntimeError))}),
    "no attributes": type("Closed", (Exception,), {"__getattribute__": raises(SystemExit)}),
    "no cause": type("Causeless", (Exception,), {"__cause__": property(raises(RuntimeError))}),
    "no notes": type("Noteless", (Exception,), {"__notes__": property(raises(SystemExit))}),
    "no traceback": type("Untraced", (Exception,), {"__traceback__": property(raises(RuntimeError))}),
}
RAISED = {
    "StopIteration": StopIteration,
    "a StopIteration of one's own": type("Mine", (StopIteration,), {}),
    "StopAsyncIteration": StopAsyncIteration,
    "GeneratorExit": GeneratorExit,
    "SystemExit": SystemExit,
    "KeyboardInterrupt": KeyboardInterrupt,
    "CancelledError": asyncio.CancelledError,
    "InvalidStateError": asyncio.InvalidStateError,
    "TimeoutError": TimeoutError,
    "BaseException": Unheard,
    "a group": lambda: BaseExceptionGroup("several", [SystemExit(), StopIteration()]),
}
every = pytest.mark.parametrize("what", RAISED)


def fail(what):
    raise (RAISED | UNREADABLE)[what]()  # noqa: RSE102 - one is a function


class Happened(Event, type="foreign.happened"):
    what: str


@handler("plain", retry=ONCE)
def plain(job: SyncJob[str]) -> None:
    fail(job.payload)


@handler("coroutine", retry=ONCE)
async def coroutine(job: Job[str]) -> None:
    fail(job.payload)


@handler("plain.batch", batch=2, retry=ONCE)
def plain_batch(jobs: SyncBatch[str]) -> None:
    fail(jobs[0].payload)


@handler("coroutine.batch", batch=2, retry=ONCE)
async def coroutine_batch(jobs: Batch[str]) -> None:
    fail(jobs[0].payload)


@handler("told", batch=2, retry=ONCE)
def told(jobs: SyncBatch[str]) -> None:
    for job in jobs:
        jobs.fail(job, (RAISED | UNREADABLE)[job.payload]())


@handler("looked.up", retry=ONCE, reconcile=lambda job: fail(job.payload))
def looked_up(job: SyncJob[str]) -> None:
    pass


@handler("in.complete", retry=ONCE)
def in_complete(job: SyncJob[str]) -> None:
    with job.complete():
        fail(job.payload)


@handler("in.complete.coroutine", retry=ONCE)
async def in_complete_coroutine(job: Job[str]) -> None:
    async with job.complete():
        fail(job.payload)


@handler("lazy")
async def lazy(job: Job[str]) -> object:
    return UNREADABLE[job.payload]()


@handler("waits", retry=Retry(max_attempts=2, delay=Custom(lambda _: fail(WAITS[0]))))
async def waits(job: Job[str]) -> None:
    raise Transient("later")


@handler("upgraded", version=2, upgrade=lambda payload, _: fail(payload))
async def upgraded(job: Job[str]) -> None:
    pass


@handler("committed")
def committed(job: SyncJob[str]) -> None:
    with job.complete():
        job.after_commit(lambda: fail(job.payload))


@handler("committed.coroutine")
async def committed_coroutine(job: Job[str]) -> None:
    async with job.complete():
        job.after_commit(lambda: fail(job.payload))


@handler("ok")
async def ok(job: Job[None]) -> None:
    pass


WAITS = [""]
ENDED = [plain, coroutine, plain_batch, coroutine_batch, told]
BLOCKS = [in_complete, in_complete_coroutine]
HANDLERS = [*ENDED, looked_up, waits, upgraded, committed, committed_coroutine, *BLOCKS, lazy, ok]


@pytest.fixture
async def app(database_url):
    app = Resilient(database_url, handlers=HANDLERS, upgrade=False)
    yield app
    await app.close()


@pytest.fixture
async def still(database, clock):
    """An app whose time stands still: what waits for its next try waits on, however slow the machine is."""
    app = Resilient(database, handlers=HANDLERS, upgrade=False)
    yield app
    await app.close()


async def run(app, *jobs):
    """With two slots, so that two that are lost are seen: each of the jobs, and one more of another kind at the end."""
    ids = [(await app.enqueue(*job, resource_key="p/1")).id for job in jobs]
    await app.worker(concurrency=2).drain(timeout=LIMIT)
    last = await app.enqueue(ok, resource_key="p/2")
    await app.worker(concurrency=2).drain(timeout=LIMIT)
    assert (await app.jobs.get(last.id)).state == "succeeded"
    return [await app.jobs.get(one) for one in ids]


def test_loops_whose_calls_waited_for_each_other_are_not_kept():
    loops, others = [], threading.Event()

    async def crowd():
        loops.append(weakref.ref(asyncio.get_running_loop()))
        others.clear()
        calls = [asyncio.create_task(called(others.wait, LIMIT)) for _ in range(MOST + 1)]
        await asyncio.sleep(0)  # the last one waits
        others.set()
        await asyncio.gather(*calls)

    for _ in range(3):
        asyncio.run(crowd())
    gc.collect()
    assert [loop() for loop in loops[:2]] == [None, None]


@every
@pytest.mark.parametrize("kind", ENDED, ids=lambda kind: kind.kind)
async def test_whatever_a_handler_raises_ends_its_job_as_a_bug(app, kind, what):
    found = await run(app, *[(kind, what)] * 4)
    assert [(job.state, job.last_error_kind, job.attempts) for job in found] == [("dead", "bug", 1)] * 4


@pytest.mark.parametrize("what", UNREADABLE)
@pytest.mark.parametrize("kind", [*ENDED, *BLOCKS], ids=lambda kind: kind.kind)
async def test_what_a_handler_raises_may_raise_itself(app, kind, what):
    jobs = await run(app, *[(kind, what)] * 4)
    assert [(job.state, job.last_error_kind, job.attempts) for job in jobs] == [("dead", "bug", 1)] * 4
    assert all(job.last_error for job in jobs)


@pytest.mark.parametrize("what", UNREADABLE)
async def test_so_may_what_the_programs_other_functions_raise(still, what):
    WAITS[0] = what
    later, again = [await still.enqueue(kind, what, resource_key="p/1") for kind in (waits, upgraded)]
    payload = "UPDATE {job} SET payload_version = 1 WHERE kind = 'upgraded'"
    await still.database.transaction(lambda c, d: d.run(c, payload))
    jobs = await run(still, *[(kind, what) for kind in (committed, committed_coroutine)])
    assert [job.state for job in jobs] == ["succeeded"] * 2
    assert "its delay function failed" in (await still.jobs.get(later.id)).last_error
    assert (await still.jobs.get(again.id)).last_error_kind == "undecodable"


@pytest.mark.parametrize("what", UNREADABLE)
async def test_a_result_that_cannot_be_read_fails_nothing(app, what):
    (job,) = await run(app, (lazy, what))
    assert (job.state, job.attempts) == ("succeeded", 0)
    assert list(job.result) == ["result_not_kept"]


@every
async def test_whatever_a_reconcile_hook_raises_does(still, what):
    app = still
    job = await app.enqueue(looked_up, what, resource_key="p/1")
    mark = '{"POST /": {"at": "2030-01-01T00:00:00+00:00", "hash": "x"}}'
    await app.database.transaction(lambda c, d: d.run(c, "UPDATE {job} SET sent = :mark", {"mark": mark}))
    await app.worker(concurrency=1).drain(timeout=LIMIT)
    found = await app.jobs.get(job.id)
    assert (found.state, found.last_error_kind, found.attempts) == ("scheduled", "ambiguous", 1)


@every
async def test_whatever_a_delay_function_raises_is_replaced_by_the_default(still, what):
    WAITS[0] = what
    found = await run(still, (waits, "x"), (waits, "x"), (waits, "x"))
    assert [(job.state, job.attempts) for job in found] == [("scheduled", 1)] * 3
    assert "its delay function failed" in found[0].last_error


@every
async def test_whatever_an_upgrade_raises_is_an_unreadable_payload(app, what):
    ids = [(await app.enqueue(upgraded, what, resource_key="p/1")).id for _ in range(3)]
    await app.database.transaction(lambda c, d: d.run(c, "UPDATE {job} SET payload_version = 1"))
    await run(app)
    found = [await app.jobs.get(one) for one in ids]
    assert [(job.state, job.last_error_kind) for job in found] == [("dead", "undecodable")] * 3


@every
@pytest.mark.parametrize("kind", [committed, committed_coroutine], ids=lambda kind: kind.kind)
async def test_whatever_is_raised_after_the_commit_changes_nothing(app, kind, what):
    assert [job.state for job in await run(app, *[(kind, what)] * 3)] == ["succeeded"] * 3


async def within(seconds, awaitable):
    async with asyncio.timeout(seconds):
        return await awaitable


@every
@pytest.mark.parametrize("sort", ["plain", "coroutine", "awaitable"])
async def test_a_call_ends_with_an_exception(sort, what):
    def plain():
        fail(what)

    async def coroutine():
        fail(what)

    def awaitable():
        return coroutine()

    fn = {"plain": plain, "coroutine": coroutine, "awaitable": awaitable}[sort]
    with pytest.raises(Exception) as caught:
        await within(20, called(fn))
    assert not isinstance(caught.value, BaseExceptionGroup) or isinstance(caught.value, ExceptionGroup)
    if what in ("SystemExit", "KeyboardInterrupt", "CancelledError", "GeneratorExit", "BaseException"):
        assert isinstance(caught.value, Escaped)
    assert asyncio.current_task().cancelling() == 0


async def test_the_end_of_the_calling_task_is_none_of_the_functions():
    go_on = threading.Event()
    try:
        task = asyncio.create_task(called(go_on.wait, LIMIT))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await within(20, task)
    finally:
        go_on.set()


@every
@pytest.mark.parametrize("sort", ["plain", "coroutine"])
async def test_a_sink_costs_no_other_its_alert(caplog, sort, what):
    def plain(_):
        fail(what)

    async def coroutine(_):
        fail(what)

    heard = []
    sinks = Sinks([{"plain": plain, "coroutine": coroutine}[sort], heard.append])
    now = datetime.now(UTC)
    alert = AlertInfo(fingerprint="f", name="dead", subject="sync", detail={}, count=1, first_at=now, last_at=now)
    sinks.tell([Notice("new", alert, "text")])
    await within(20, sinks.finish())
    assert len(heard) == 1
    assert "did not reach the function" in caplog.text


@every
@pytest.mark.parametrize("sort", ["plain", "generator", "coroutine", "async generator"])
async def test_accounts_that_cannot_be_told_are_an_error_of_the_schedule(sort, what):
    def plain():
        fail(what)

    def generator():
        yield "p/1"
        fail(what)

    async def coroutine():
        fail(what)

    async def async_generator():
        yield "p/1"
        fail(what)

    source = {"plain": plain, "generator": generator, "coroutine": coroutine, "async generator": async_generator}[sort]
    with pytest.raises(Exception):  # noqa: B017 - `serve` catches any
        await within(20, anext(aiter(schedules._keys(Nothing(), source))))


class Nothing:
    """A database that is not asked."""

    transaction = None


@every
async def test_a_destination_ends_its_event_and_no_other(database, what):
    seen = []

    async def sink(message):
        seen.append(message.event["data"]["what"])
        if message.event["data"]["what"] == "bad":
            fail(what)

    app = Resilient(database, destinations={"d": sink}, routes={Happened: ["d"]}, upgrade=False)
    with Session(database.sync_engine) as session:
        for word in ("bad", "good"):
            app.outbox.publish(session, Happened(what=word))
        session.commit()
    await app.worker(concurrency=2).drain(timeout=LIMIT)
    assert {"bad", "good"} <= set(seen)
    left = await app.jobs.list(kind="outbox.d", state=["ready", "scheduled", "dead"])
    assert [job.kind for job in left] == ["outbox.d"]
    await app.close()
