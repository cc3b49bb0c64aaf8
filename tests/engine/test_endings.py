"""How executions end in odd ways, and that none of them costs a slot, another job's result, or the job itself."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from datetime import UTC, datetime, timedelta

import httpx
import pytest

from resilient import (
    Cancel,
    Failure,
    FailureKind,
    Fixed,
    Job,
    Permanent,
    Resilient,
    ResourceStopped,
    Retry,
    Snooze,
    SyncJob,
    Throttled,
    Transient,
    handler,
)
from resilient.core.base.bounds import RESULT
from resilient.core.jobs.outcomes import Transition
from resilient.engine.run import completer as completer_module
from resilient.engine.run import executor
from resilient.engine.run.completer import Completer
from resilient.store.db.dialect import ID
from resilient.store.gates import resources
from resilient.store.jobs.finishing import Finish
from resilient.wire.requests.answer import failed_answer
from resilient.wire.requests.redact import text_of
from tests import helpers
from tests.helpers import LIMIT, brisk, drain

ONCE = Retry(max_attempts=1)
STARTED, GO_ON = threading.Event(), threading.Event()
SEEN: list = []


class Textless(Exception):
    """An exception whose text cannot be had."""

    def __str__(self):
        raise RuntimeError("no text")


class Speechless:
    """A value whose text cannot be had."""

    def __str__(self):
        raise RuntimeError("no text")


def hidden(fn):
    """A decorator that hides that a function is async."""

    @functools.wraps(fn)
    def call(job: Job[None]):
        return fn(job)

    del call.__wrapped__
    return call


@handler("ok")
async def ok(job: Job[None]) -> None:
    SEEN.append(job.id)


@handler("sleeps")
async def sleeps(job: Job[None]) -> None:
    STARTED.set()
    await asyncio.sleep(30)


@handler("raises", retry=ONCE)
async def raises(job: Job[str]) -> None:
    raise {
        "textless": Textless,
        "nul": lambda: ValueError("a\x00b"),
        "surrogate": lambda: ValueError("a\ud800b"),
        "cancelled": asyncio.CancelledError,
        "no time": lambda: Throttled(until=60),
        "no delay": lambda: Transient(retry_after="soon"),
        "secret": lambda: OSError("no amqp://app:hunter2@mq/v and no host=db password=hunter2"),
        "secret reason": lambda: Cancel("redis://:hunter2@cache is gone"),
    }[job.payload]()  # noqa: RSE102 - a function that makes the error


@handler("result")
async def result(job: Job[None]) -> list[str]:
    return ["a\x00b", "c\\u0000d"]


@handler("odd.result", retry=ONCE)
async def odd_result(job: Job[str]) -> object:
    if job.payload == "progress":
        await job.progress("x" * (RESULT.value + 1))
    return {
        "object": object(),
        "unreadable": Unreadable(),
        "large": "x" * (RESULT.value + 1),
        "wide": "é" * (RESULT.value // 2),
        "largest": "x" * (RESULT.value - 2),
    }[job.payload]


@handler("says.no")
async def says_no(job: Job[str]) -> object:
    if job.payload == "returned":
        return Cancel(Speechless())
    raise Cancel(Speechless())


@handler("enqueues.once", retry=ONCE)
async def enqueues_once(job: Job[None]) -> None:
    job.then(ok, unique_key="one", on_conflict="raise")


@handler("meets.a.gate")
async def meets_a_gate(job: Job[None]) -> None:
    raise ResourceStopped("q", "limit", datetime.now(UTC) + timedelta(minutes=1))


@handler("hidden", retry=ONCE)
@hidden
async def never_awaited(job: Job[None]) -> None:
    SEEN.append(job.id)


@handler("grouped")
async def grouped(job: Job[str]) -> None:
    told = {"snooze": Snooze(60), "stopped": ResourceStopped("p/1", "limit"), "permanent": Permanent("no")}[job.payload]
    async with asyncio.TaskGroup() as group:
        group.create_task(fail(told))


async def fail(error):
    raise error


@handler("stopped")
async def stopped(job: Job[None]) -> None:
    try:
        await fail(ResourceStopped("p/1", "limit"))
    except ResourceStopped as refusal:
        raise Permanent("then never") from refusal


@handler("returns.early")
def returns_early(job: SyncJob[None]) -> None:
    STARTED.set()
    while not job.cancel_requested:
        time.sleep(0.005)


@handler("finishes")
def finishes(job: SyncJob[None]) -> str:
    STARTED.set()
    assert GO_ON.wait(LIMIT)
    return "all of it"


@handler("swallows")
async def swallows(job: Job[None]) -> str:
    STARTED.set()
    try:
        await asyncio.sleep(30)
    except asyncio.CancelledError:
        return "half of it"
    return "all of it"


@handler("cannot.wait", retry=Retry(max_attempts=3, delay=Fixed(3600)))
async def cannot_wait(job: Job[None]) -> None:
    STARTED.set()
    await job.deps.wait()
    raise Transient("later")


@handler("hangs", timeout=0.2, retry=ONCE)
def hangs(job: SyncJob[None]) -> None:
    GO_ON.wait(LIMIT)


HANDLERS = [
    hangs,
    ok,
    sleeps,
    raises,
    result,
    never_awaited,
    odd_result,
    meets_a_gate,
    grouped,
    stopped,
    says_no,
    enqueues_once,
    returns_early,
    finishes,
    swallows,
    cannot_wait,
]


@pytest.fixture
async def app(database_url):
    STARTED.clear()
    GO_ON.clear()
    SEEN.clear()
    app = Resilient(database_url, handlers=HANDLERS, upgrade=False, deps=asyncio.Event())
    yield app
    await app.close()


async def started(app, *, renewing=lambda worker: worker, **options):
    worker = renewing(app.worker(**{"concurrency": 2, **options}))
    running = asyncio.create_task(worker.run(signals=False))
    async with asyncio.timeout(LIMIT):
        while not STARTED.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    return worker, running


async def until(app, id_, state):
    async with asyncio.timeout(LIMIT):
        while (job := await app.jobs.get(id_)).state != state:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return job


# -- what a handler raises or returns ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("textless", "Textless: (its text cannot be had: RuntimeError)"),
        ("nul", r"ValueError: a\x00b"),
        ("surrogate", r"ValueError: a\ud800b"),
        ("cancelled", "CancelledError"),
        ("no time", "until takes a datetime"),
        ("no delay", "takes seconds or a timedelta, not 'soon'"),
    ],
)
async def test_whatever_is_raised_is_charged_and_written(app, what, text):
    bad = await app.enqueue(raises, what, resource_key="p/1")
    more = [await app.enqueue(ok, resource_key="p/1") for _ in range(3)]
    assert await drain(app) == 4
    job = await app.jobs.get(bad.id)
    assert (job.state, job.attempts) == ("dead", 1)
    assert text in job.last_error
    assert {(await app.jobs.get(one.id)).state for one in more} == {"succeeded"}


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("secret", "OSError: no amqp://mq/v and no host=db password=[hidden]"),
        ("secret reason", "redis://cache is gone"),
    ],
)
async def test_passwords_in_a_text_are_not_kept(app, what, text):
    bad = await app.enqueue(raises, what, resource_key="p/1")
    await drain(app)
    job, history = await app.jobs.get(bad.id), await app.jobs.attempts(bad.id)
    assert "hunter2" not in repr((job, history))  # the history has the traceback too
    assert text in repr(history)


async def test_a_result_with_a_nul(app):
    done = await app.enqueue(result, resource_key="p/1")
    await drain(app)
    assert (await app.jobs.get(done.id)).result == ["a\ufffdb", "c\\u0000d"]


class Unreadable:
    def __iter__(self):
        raise SystemExit


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("object", "it is not JSON (PydanticSerializationError: object)"),
        ("unreadable", "it is not JSON (PydanticSerializationError: Unreadable)"),
        ("large", "it has 1,048,579 bytes of JSON, and 1,048,576 are kept at most"),
        ("wide", "it has 1,048,578 bytes of JSON, and 1,048,576 are kept at most"),
    ],
)
async def test_a_result_that_cannot_be_kept_is_said_in_its_place(app, what, said, caplog):
    """The work is done: the job is not dead and not run again."""
    done = await app.enqueue(odd_result, what, resource_key="p/1")
    await drain(app)
    job = await app.jobs.get(done.id)
    assert (job.state, job.attempts, job.executions, job.result) == ("succeeded", 0, 1, {"result_not_kept": said})
    assert f"is not kept: {said}" in caplog.text


async def test_a_result_of_the_largest_size_is_kept(app):
    done = await app.enqueue(odd_result, "largest", resource_key="p/1")
    await drain(app)
    assert len((await app.jobs.get(done.id)).result) == RESULT.value - 2


async def test_progress_that_is_too_large_is_refused(app):
    done = await app.enqueue(odd_result, "progress", resource_key="p/1")
    await drain(app)
    job = await app.jobs.get(done.id)
    assert (job.last_error_kind, "1,048,579 bytes of JSON: 1,048,576 at most" in job.last_error) == ("bug", True)


async def test_jobs_that_wait_for_a_gate_write_no_line_each(app, caplog):
    """The gate tells once; thousands that meet it say nothing."""
    caplog.set_level("INFO", "resilient")
    for _ in range(30):
        await app.enqueue(meets_a_gate, resource_key="p/1")
    await drain(app)
    assert (await app.jobs.attempts((await app.jobs.list(limit=1))[0].id))[0].decision == "defer"
    assert [r.getMessage() for r in caplog.records if r.name == "resilient.worker" and "defer" in r.getMessage()] == []


async def test_a_coroutine_that_nobody_awaited_is_no_success(app):
    done = await app.enqueue(never_awaited, resource_key="p/1")
    await drain(app)
    job = await app.jobs.get(done.id)
    assert (job.state, SEEN) == ("dead", [])
    assert "a decorator hides that it is async" in job.last_error


@pytest.mark.parametrize(("what", "state"), [("snooze", "scheduled"), ("stopped", "scheduled"), ("permanent", "dead")])
async def test_what_a_task_group_wraps_is_found(app, what, state):
    done = await app.enqueue(grouped, what, resource_key="p/2")  # p/1 is not on its path
    await drain(app)
    job = await app.jobs.get(done.id)
    assert (job.state, job.attempts) == (state, int(state == "dead"))


@pytest.mark.parametrize("how", ["returned", "raised"])
async def test_a_reason_without_a_text_cancels_all_the_same(app, how):
    done = await app.enqueue(says_no, how, resource_key="p/1")
    await drain(app)
    job, (attempt,) = await app.jobs.get(done.id), await app.jobs.attempts(done.id)
    assert (job.state, attempt.decision) == ("cancelled", "cancelled")
    assert attempt.message == "(its text cannot be had: RuntimeError)"


async def test_an_end_that_cannot_be_written_counts_once(app):
    """Its success was decided, and taken back: what was to follow it must not be enqueued."""
    holder = await app.enqueue(ok, resource_key="p/2", unique_key="one", delay=3600)
    done = await app.enqueue(enqueues_once, resource_key="p/1")
    worker = app.worker()
    await worker.drain(timeout=LIMIT)
    job = await app.jobs.get(done.id)
    assert (job.state, job.last_error_code) == ("dead", "DuplicateJob")
    assert (worker.outcomes, worker.ended) == ({"dead": 1}, 1)
    assert (await app.jobs.get(holder.id)).state == "scheduled"


async def test_a_failure_raised_over_a_refusal_counts(app):
    done = await app.enqueue(stopped, resource_key="p/1")
    await drain(app)
    assert (await app.jobs.get(done.id)).state == "dead"


# -- stopping ----------------------------------------------------------------------------------------------------------


async def test_a_worker_that_is_cancelled_hands_back_and_ends(app):
    done = await app.enqueue(sleeps, resource_key="p/1")
    before = set(asyncio.all_tasks())
    _, running = await started(app)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(LIMIT):
            await running
    job = await app.jobs.get(done.id)
    assert (job.state, job.attempts, job.rescues) == ("ready", 0, 0)
    left = [task.get_name() for task in asyncio.all_tasks() - before]
    assert [name for name in left if name.startswith("resilient-slot")] == []


async def test_a_drain_that_takes_too_long_hands_back_and_says_so(app):
    done = await app.enqueue(sleeps, resource_key="p/1")
    with pytest.raises(TimeoutError):
        await app.worker(concurrency=2).drain(timeout=0.5)
    assert (await app.jobs.get(done.id)).state == "ready"


@pytest.mark.parametrize("kind", [returns_early, swallows])
async def test_a_handler_that_heard_of_the_stop_and_returned_has_not_done_its_work(app, kind):
    done = await app.enqueue(kind, resource_key="p/1")
    other = await app.enqueue(swallows, resource_key="p/2")
    worker, running = await started(app, grace=0.05)
    worker.stop()
    await running
    assert (await app.jobs.get(done.id)).state == "ready"
    assert (await app.jobs.get(other.id)).state == "ready"


@pytest.mark.parametrize("kind", [returns_early, swallows])
async def test_a_handler_that_heard_of_the_cancel_and_returned_is_cancelled(app, kind):
    done = await app.enqueue(kind, resource_key="p/1")
    worker, running = await started(app, renewing=brisk)
    await app.jobs.cancel(done.id)
    await until(app, done.id, "cancelled")
    worker.stop()
    await running


async def test_a_thread_that_never_heard_of_the_cancel_and_finished_has_succeeded(app):
    done = await app.enqueue(finishes, resource_key="p/1")
    worker, running = await started(app, renewing=brisk)
    await app.jobs.cancel(done.id)
    execution = worker.executor.running[done.id.int]
    await helpers.until(lambda: execution.reason)  # the worker has heard of it; the function does not look
    GO_ON.set()
    assert (await until(app, done.id, "succeeded")).result == "all of it"
    worker.stop()
    await running


async def test_a_cancel_that_comes_before_the_handler_fails_is_not_forgotten(app):
    """The worker hears of it with its heartbeat, in some seconds; the job ends before."""
    done = await app.enqueue(cannot_wait, resource_key="p/1")
    worker, running = await started(app)
    assert (await app.jobs.cancel(done.id)).requested == 1
    app.deps.set()
    async with asyncio.timeout(LIMIT):
        while worker.completer.written < 1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    worker.stop()
    await running
    job = await app.jobs.get(done.id)
    assert (job.state, job.finished_at is None) == ("cancelled", False)
    assert [a.decision for a in await app.jobs.attempts(done.id)] == ["cancelled"]


async def test_what_was_claimed_and_has_not_started_is_handed_back_when_the_worker_stops(app):
    done = [await app.enqueue(finishes, resource_key="p/1") for _ in range(3)]
    worker = app.worker(concurrency=1)
    worker.dispatcher._concurrency = 3  # so many are claimed; there is one slot
    running = asyncio.create_task(worker.run(signals=False))
    assert await asyncio.to_thread(STARTED.wait, LIMIT)
    worker.stop()
    async with asyncio.timeout(LIMIT):
        while await app.jobs.count(state="ready") < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    GO_ON.set()
    await running
    jobs = [await app.jobs.get(one.id) for one in done]
    assert sorted((job.state, job.executions, job.attempts) for job in jobs) == [
        ("ready", 0, 0), ("ready", 0, 0), ("succeeded", 1, 0)
    ]  # fmt: skip


async def test_what_waits_behind_handlers_that_do_not_end_goes_to_other_workers(app, monkeypatch):
    """Every slot is taken for good: what was claimed for them is handed back, not kept until the process ends."""
    monkeypatch.setattr(executor, "LEAST_STUCK", 1)
    monkeypatch.setattr(executor, "CANCEL_PATIENCE", 0.2)
    done = [await app.enqueue(hangs, resource_key="p/1") for _ in range(3)]
    worker = app.worker(concurrency=1)
    worker.concurrency = 3  # so many are claimed; there is one slot
    try:
        await worker.drain(timeout=LIMIT)
    finally:
        GO_ON.set()
    found = sorted(
        [((await app.jobs.get(one.id)).state, (await app.jobs.attempts(one.id))[0].decision) for one in done]
    )
    assert found == [("dead", "dead"), ("ready", "handed_back"), ("ready", "handed_back")]
    assert sorted([(await app.jobs.get(one.id)).attempts for one in done]) == [0, 0, 1]


# -- the engine's own troubles -----------------------------------------------------------------------------------------


async def test_what_was_claimed_is_run_though_new_rows_cannot_be_made(app, monkeypatch):
    await app.enqueue(ok, resource_key="p/1")
    await drain(app)
    real, refused = app.database.statement, []

    async def statement(fn, *args):
        if fn is resources.ensure and not refused:
            refused.append(fn)
            raise OSError("away")
        return await real(fn, *args)

    monkeypatch.setattr(app.database, "statement", statement)
    known = await app.enqueue(ok, resource_key="p/1")
    fresh = await app.enqueue(ok, resource_key="p/2")
    worker = app.worker(concurrency=4)
    running = asyncio.create_task(worker.run(signals=False))
    await until(app, known.id, "succeeded")
    await until(app, fresh.id, "succeeded")
    worker.stop()
    await running
    assert refused


async def test_what_the_gate_fails_over_costs_no_slot(app, monkeypatch):
    worker = app.worker(concurrency=1)

    def fails(*_):
        raise RuntimeError("broken")

    monkeypatch.setattr(worker.wire, "ended", fails)
    done = [await app.enqueue(ok, resource_key="p/1") for _ in range(3)]
    assert await worker.drain(timeout=LIMIT) == 3
    assert {(await app.jobs.get(one.id)).state for one in done} == {"succeeded"}


async def test_what_a_heartbeat_says_of_an_older_execution_is_not_meant_for_a_newer_one(app):
    """The job ended and was claimed here again while the heartbeat was under way."""
    done = await app.enqueue(sleeps, resource_key="p/1")
    worker, running = await started(app)
    execution = worker.executor.running[done.id.int]
    beat = worker.heartbeat
    beat._tell({(done.id, execution.fence - 1): "lost"})
    await asyncio.sleep(0.05)
    assert execution.reason is None
    beat._tell({(done.id, execution.fence): "lost"})
    assert execution.reason == "lost"
    worker.stop()
    await running


async def test_a_result_no_database_takes_holds_up_no_other(app, caplog):
    """As if something had passed all checks: the others are written, and the job itself without its result."""
    ids = [(await app.enqueue(ok, resource_key=f"p/{n % 3}")).id for n in range(9)]
    running = await app.database.transaction(
        lambda c, d: d.run(c, "UPDATE {job} SET state = 'running' RETURNING id, version, resource_key", id=ID).all()
    )
    written = []
    completer = Completer(
        app.database,
        lambda _: (),
        lambda ids, *_: written.extend(i for i, _ in ids),
        lambda *_: None,
        app.poke,
        roll=lambda: 0.0,
    )
    for n, row in enumerate(sorted(running)):
        if n == 7:
            completer.finish(
                Finish(row.id, row.version, Transition("dead", "dead", error="e", error_kind="bug", result="not JSON")),
                row.resource_key,
            )
        else:
            completer.succeed(row.id, row.version, "not JSON" if n == 4 else str(n), row.resource_key)
    await completer.start()
    async with asyncio.timeout(LIMIT):
        await completer.close()
    assert sorted(written) == sorted(ids)
    found = [await app.jobs.get(id_) for id_ in sorted(ids)]
    assert [(j.state, j.result) for j in found] == [
        ("dead" if n == 7 else "succeeded", None if n in (4, 7) else n) for n in range(9)
    ]
    assert found[7].last_error == "(its error cannot be stored)"
    assert "cannot save" in caplog.text
    assert '"result":' not in caplog.text  # PostgreSQL quotes what it refuses; that may be anybody's data


async def test_results_that_wait_for_the_database_are_a_line_where_that_begins_and_one_where_it_ends(
    app, caplog, monkeypatch
):
    await app.enqueue(ok, resource_key="p/1")
    (row,) = await app.database.transaction(
        lambda c, d: d.run(c, "UPDATE {job} SET state = 'running' RETURNING id, version, resource_key", id=ID).all()
    )
    completer = Completer(app.database, lambda _: (), lambda *_: None, lambda *_: None, app.poke, roll=lambda: 0.0)
    real, failures = app.database.transaction, []

    async def away(*args, **options):
        if len(failures) < 4:
            failures.append(1)
            raise OSError("the database is away")
        return await real(*args, **options)

    for name in ("transaction", "statement"):
        monkeypatch.setattr(app.database, name, away)
    monkeypatch.setattr(completer_module, "retry_pause", lambda *_: 0.0)
    completer.succeed(row.id, row.version, "1", row.resource_key)
    await completer.start()
    async with asyncio.timeout(LIMIT):
        await completer.close()
    assert (completer.written, len(failures)) == (1, 4)
    lines = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert [line.partition(" (")[0] for line in lines] == ["cannot save 1 results", "results can be saved again"]


def test_of_an_answer_what_its_kind_and_code_tell_is_not_said_twice():
    request = httpx.Request("POST", "https://api.crm.example/contacts")
    failure = Failure(FailureKind.PERMANENT, code="invalid_card")
    error = failed_answer(httpx.Response(422, request=request), failure, "This card is no good.")
    where = "POST https://api.crm.example/contacts answered 422:"
    assert str(error) == f"{where} permanent (invalid_card): This card is no good."
    assert text_of(error) == f"{where} This card is no good."
    assert text_of(Permanent("no such user")) == "no such user"
    assert text_of(type("NoSuchUser", (Permanent,), {})("user 7")) == "NoSuchUser: user 7"
    assert text_of(ValueError("odd")) == "ValueError: odd"
