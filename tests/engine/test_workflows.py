"""Workflows: typed steps, fan-out and fan-in, results, compensation, and what people see of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from datetime import UTC, datetime, timedelta

import pytest
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import event
from sqlalchemy.orm import Session

from resilient import (
    Ambiguous,
    Cancel,
    Fixed,
    InvalidInput,
    Job,
    JobState,
    LostLease,
    NoResult,
    Permanent,
    Resilient,
    Retention,
    Retry,
    Snooze,
    SyncJob,
    Throttled,
    Transient,
    UnknownKind,
    WorkflowNotFound,
    WorkflowOver,
    WorkflowState,
    handler,
)
from resilient.core.jobs.workflow import StepFacts, plan, stands_still
from resilient.engine.jobs import workflows
from resilient.store.jobs import workflows as store
from resilient.store.jobs.dependencies import release_followers
from tests.helpers import LIMIT, brisk, drain, settle, until, use_up

LOG: list[object] = []
BROKEN: dict[str, Exception] = {}


class Order(BaseModel):
    id: int
    fails: str = ""


class Receipt(BaseModel):
    charge: str
    cents: int


def did(name):
    LOG.append(name)
    if (error := BROKEN.get(name)) is not None:
        raise error


@handler("charge")
async def charge(job: Job[Order]) -> Receipt:
    did("charge")
    return Receipt(charge=f"ch_{job.payload.id}", cents=995)


@handler("reserve")
def reserve(job: SyncJob[Order]) -> int:
    did("reserve")
    return job.payload.id * 2


@handler("ship")
async def ship(job: Job[Order]) -> str:
    receipt = await job.result_of(charge)
    places = await job.results_of(reserve)
    did("ship")
    return f"{receipt.charge} {receipt.cents} {places}"


@handler("notify")
def notify(job: SyncJob[Order]) -> None:
    did(f"notify {job.result_of(ship)}")


@handler("refund")
async def refund(job: Job[Order]) -> None:
    try:
        receipt = (await job.result_of(charge)).charge
    except NoResult:
        receipt = "whatever was charged"
    did(f"refund {receipt}")


@handler("release")
async def release(job: Job[Order]) -> None:
    did("release")


HANDLERS = [charge, reserve, ship, notify, refund, release]


@pytest.fixture
async def app(database):
    LOG.clear()
    BROKEN.clear()
    app = Resilient(database, handlers=HANDLERS, upgrade=False)
    yield app
    await app.close()


async def begin(app, **options):
    order = Order(id=7)
    async with app.workflow("order", resource_key="shop/1", **options) as wf:
        paid = wf.step(charge, order, undo=refund)
        held = wf.step(reserve, order, resource_key="stock", undo=release)
        sent = wf.step(ship, order, after=[paid, held])
        wf.step(notify, order, after=sent)
    return wf.id


def states(info):
    return {s.name: str(s.state) for s in info.steps}


class TestForward:
    async def test_all_steps(self, app):
        id_ = await begin(app)
        assert states(await app.workflows.get(id_)) == {
            "charge": "ready", "reserve": "ready", "ship": "blocked", "notify": "blocked",
        }  # fmt: skip
        await settle(app)
        info = await app.workflows.get(id_)
        assert (info.state, info.name, info.reason) == ("succeeded", "order", None)
        assert set(states(info).values()) == {"succeeded"}
        assert info.finished_at is not None
        assert (sorted(LOG[:2]), LOG[2:]) == (["charge", "reserve"], ["ship", "notify ch_7 995 [14]"])
        assert info.step("ship").result == "ch_7 995 [14]"
        assert info.step("ship").after == ("charge", "reserve")
        assert info.step("charge").undo == "refund"

    def test_sync(self, database):
        LOG.clear()
        BROKEN.clear()
        app = Resilient(database, handlers=HANDLERS, upgrade=False)
        with app.sync.workflow("order", resource_key="shop/1") as wf:
            a = wf.step(charge, Order(id=1))
            wf.step(reserve, Order(id=1), after=a)
        assert states(app.sync.workflows.get(wf.id)) == {"charge": "ready", "reserve": "blocked"}
        assert [w.id for w in app.sync.workflows.list(state="running")] == [wf.id]

    async def test_nothing_is_written_after_an_error(self, app):
        async def fails():
            async with app.workflow("order", resource_key="shop/1") as wf:
                wf.step(charge, Order(id=1))
                raise RuntimeError("no")

        with pytest.raises(RuntimeError, match="no"):
            await fails()
        assert (await app.workflows.list(), await app.jobs.list()) == ([], [])

    @pytest.mark.parametrize("commit", [True, False])
    async def test_in_the_callers_transaction(self, app, commit):
        with Session(app.database.sync_engine) as session:
            await begin(app, session=session)
            if commit:
                session.commit()
        await settle(app)
        found = await app.workflows.list()
        assert [w.state for w in found] == (["succeeded"] if commit else [])
        assert await app.jobs.count() == (4 if commit else 0)

    async def test_a_step_that_is_called_as_the_next_one_would_be_takes_no_place_from_it(self, app):
        async with app.workflow("order", resource_key="shop/1") as wf:
            wf.step(charge, Order(id=1), name="reserve-2")
            parts = [wf.step(reserve, Order(id=n)) for n in range(3)]
        assert [s.name for s in parts] == ["reserve", "reserve-3", "reserve-4"]
        assert [s.job_id for s in (await app.workflows.get(wf.id)).steps] == [s.id for s in wf.steps]

    async def test_fan_out_and_fan_in(self, app):
        async with app.workflow("many", resource_key="shop/1") as wf:
            wf.step(charge, Order(id=1))
            parts = [wf.step(reserve, Order(id=n)) for n in range(1, 6)]
            wf.step(ship, Order(id=9), after=[*parts, wf.steps[0]])
        assert [s.name for s in wf.steps[1:6]] == ["reserve", *(f"reserve-{n}" for n in range(2, 6))]
        await settle(app)
        info = await app.workflows.get(wf.id)
        assert (info.state, info.step("ship").result) == ("succeeded", "ch_1 995 [2, 4, 6, 8, 10]")

    async def test_a_step_that_fails_and_is_tried_again(self, database, clock):
        LOG.clear()
        BROKEN.clear()
        app = Resilient(database, handlers=HANDLERS, upgrade=False)
        BROKEN["charge"] = Transient("later")
        id_ = await begin(app)
        await settle(app)
        assert (await app.workflows.get(id_)).state == "running"
        BROKEN.clear()
        clock.advance(hours=1)
        await settle(app)
        assert (await app.workflows.get(id_)).state == "succeeded"
        await app.close()

    async def test_steps_of_a_running_workflow_are_not_pruned(self, database, clock):
        LOG.clear()
        BROKEN.clear()
        app = Resilient(database, handlers=HANDLERS, upgrade=False)
        async with app.workflow("slow", resource_key="shop/1") as wf:
            a = wf.step(charge, Order(id=1))
            wf.step(reserve, Order(id=1), after=a, delay=86400 * 30)
        await settle(app)
        clock.advance(days=20)
        assert (await app.prune(older_than="1d")).succeeded == 0
        clock.advance(days=20)
        await settle(app)
        assert (await app.workflows.get(wf.id)).state == "succeeded"
        clock.advance(days=400)
        await app.prune(older_than="1d")
        assert await app.jobs.count() == 0
        await app.prune()
        assert await app.workflows.list() == []
        await app.close()


class TestBack:
    async def test_a_dead_step_undoes_the_others_in_reverse(self, app):
        BROKEN["ship"] = Permanent("no such street")
        id_ = await begin(app)
        await settle(app)
        info = await app.workflows.get(id_)
        assert (info.state, info.reason) == ("undone", "step ship is dead")
        assert LOG[2:] == ["ship", "release", "refund ch_7"]
        assert states(info)["notify"] == "cancelled"
        assert [s.undo_state for s in info.steps] == ["succeeded", "succeeded", None, None]

    async def test_what_may_have_happened_is_undone_too(self, app):
        BROKEN["charge"] = Ambiguous("no answer")
        async with app.workflow("order", resource_key="shop/1") as wf:
            paid = wf.step(charge, Order(id=7), undo=refund)
            wf.step(reserve, Order(id=7), after=paid, undo=release)
        await settle(app)
        info = await app.workflows.get(wf.id)
        assert (info.state, states(info)) == ("undone", {"charge": "dead", "reserve": "cancelled"})
        assert LOG == ["charge", "refund whatever was charged"]

    async def test_what_certainly_did_not_happen_is_not_undone(self, app):
        BROKEN["charge"] = Permanent("card declined")
        async with app.workflow("order", resource_key="shop/1") as wf:
            paid = wf.step(charge, Order(id=7), undo=refund)
            wf.step(reserve, Order(id=7), after=paid, undo=release)
        await settle(app)
        assert (await app.workflows.get(wf.id)).state == "failed"
        assert LOG == ["charge"]

    async def test_cancelled_by_hand(self, app):
        async with app.workflow("order", resource_key="shop/1") as wf:
            paid = wf.step(charge, Order(id=7), undo=refund)
            wf.step(reserve, Order(id=7), after=paid, delay=3600)
        await settle(app)
        assert (await app.workflows.cancel(wf.id)).state == "undoing"
        await settle(app)
        info = await app.workflows.get(wf.id)
        assert (info.state, info.reason, LOG) == ("undone", "it was cancelled", ["charge", "refund ch_7"])
        assert (await app.workflows.cancel(wf.id)).state == "undone"

    async def test_a_step_cancelled_by_hand(self, app):
        async with app.workflow("order", resource_key="shop/1") as wf:
            paid = wf.step(charge, Order(id=7), undo=refund)
            held = wf.step(reserve, Order(id=7), after=paid, delay=3600)
        await settle(app)
        await app.jobs.cancel(held.id)
        await settle(app)
        assert (await app.workflows.get(wf.id)).reason == "step reserve was cancelled"
        assert LOG == ["charge", "refund ch_7"]

    async def test_a_running_step_is_waited_for(self, app):
        started, go = asyncio.Event(), asyncio.Event()

        @handler("slow")
        async def slow(_job: Job[Order]) -> str:
            started.set()
            while True:  # it has come too far to stop
                try:
                    await go.wait()
                except asyncio.CancelledError:
                    continue
                return "done"

        @handler("unslow")
        async def unslow(_job: Job[Order]) -> None:
            did("unslow")

        own = Resilient(app.database, handlers=[*HANDLERS, slow, unslow], upgrade=False)
        BROKEN["charge"] = Permanent("no")
        async with own.workflow("order", resource_key="shop/1") as wf:
            wf.step(slow, Order(id=1), undo=unslow)
            wf.step(charge, Order(id=1), delay=0)
        run = asyncio.create_task(own.worker(lease=300).drain(timeout=LIMIT))
        await started.wait()

        async def is_undoing():
            await own.database.transaction(workflows.attend)
            return (await own.workflows.get(wf.id)).state == "undoing"

        await until(is_undoing)
        assert LOG == ["charge"]
        assert (await own.jobs.get(wf.steps[0].id)).cancel_requested
        go.set()
        await run
        await settle(own)
        info = await own.workflows.get(wf.id)
        assert (info.state, info.step("slow").state, LOG) == ("undone", "succeeded", ["charge", "unslow"])

    @pytest.mark.parametrize("why", ["cancel", "timeout", "its own word"])
    async def test_a_step_that_was_broken_off_may_have_happened(self, app, why):
        """Its request was answered; nobody was told."""
        charged = asyncio.Event()

        @handler("charge", timeout=300, retry=Retry(max_attempts=1))
        async def charge(job: Job[Order]) -> Receipt:
            did("charge")
            charged.set()
            if why == "timeout":
                use_up(job)
            try:
                await asyncio.sleep(LIMIT)
            except asyncio.CancelledError:
                if why == "its own word":
                    raise Cancel("I took it back") from None
                raise
            raise AssertionError("nobody broke it off")

        own = Resilient(app.database, handlers=[charge, refund], upgrade=False)
        async with own.workflow("order", resource_key="shop/1") as wf:
            wf.step(charge, Order(id=7), undo=refund)
        run = asyncio.create_task(brisk(own.worker()).drain(timeout=LIMIT))
        await charged.wait()
        if why != "timeout":
            await own.workflows.cancel(wf.id)
            await own.database.transaction(workflows.attend)
        await run
        info = await own.workflows.get(wf.id)
        undone = [] if why == "its own word" else ["refund whatever was charged"]
        assert (info.state, LOG) == ("undone" if undone else "failed", ["charge", *undone])

    @pytest.mark.parametrize("then", ["expired", "stopped", "refused", "throttled", "away"])
    async def test_so_may_one_that_was_broken_off_before_whatever_came_after_it(self, app, then):
        """The first execution charged the card and did not come to say so; what ends the step is another matter."""
        charged = asyncio.Event()
        retry = Retry(max_attempts=3, delay=lambda attempt: 0 if attempt == 1 and then != "expired" else 3600)

        @handler("charge", timeout=300, retry=retry)
        async def charge(job: Job[Order]) -> None:
            did("charge")
            if not charged.is_set():
                charged.set()
                if then != "stopped":
                    use_up(job)
                await asyncio.sleep(LIMIT)
            raise {"throttled": Throttled(3600), "away": Transient("away")}.get(then, Permanent("card declined"))

        own = Resilient(app.database, handlers=[charge, refund], upgrade=False)
        async with own.workflow("order", resource_key="shop/1") as wf:
            step = wf.step(charge, Order(id=7), undo=refund, **({"expires_in": 1800} if then == "expired" else {}))
        worker = brisk(own.worker(grace=0))
        run = asyncio.create_task(worker.run(signals=False) if then == "stopped" else worker.drain(timeout=LIMIT))
        await charged.wait()
        if then == "stopped":
            worker.stop()
        await run
        assert (await own.jobs.get(step.id)).state != "running"
        await own.workflows.cancel(wf.id)
        await settle(own)
        info = await own.workflows.get(wf.id)
        tries = {"expired": 1, "stopped": 1}.get(then, 2)
        assert (info.state, LOG) == ("undone", ["charge"] * tries + ["refund whatever was charged"])

    async def test_steps_cannot_be_retried_any_more(self, app):
        BROKEN["ship"] = Permanent("no")
        id_ = await begin(app)
        await settle(app)
        info = await app.workflows.get(id_)
        done = await app.jobs.retry([s.job_id for s in info.steps])
        assert (done.retried, done.undone) == (0, 4)
        assert states(await app.workflows.get(id_)) == states(info)

    async def test_a_step_of_one_that_succeeded_may_be_replayed(self, app):
        id_ = await begin(app)
        await settle(app)
        before = await app.workflows.get(id_)
        assert (await app.jobs.retry(before.step("ship").job_id)).retried == 1
        await settle(app)
        after = await app.workflows.get(id_)
        assert (after.state, after.finished_at) == ("succeeded", before.finished_at)
        assert LOG.count("ship") == 2

    async def test_a_dead_undo_is_told_and_retried(self, app):
        BROKEN.update({"ship": Permanent("no"), "release": Permanent("stock system is gone")})
        id_ = await begin(app)
        worker = app.worker()
        told = []
        app.alerts.add = told.append
        await worker.drain(timeout=LIMIT)
        info = await app.workflows.get(id_)
        assert (info.state, info.step("reserve").undo_state, info.step("charge").undo_job_id) == ("stuck", "dead", None)
        assert [(f.name, f.subject, f.detail) for f in told if f.name == "stuck_workflow"] == [
            ("stuck_workflow", "order", {"workflow": str(id_)})
        ]
        told.clear()
        undo = info.step("reserve").undo_job_id
        why = (await app.jobs.why(undo)).text
        assert f"It was to undo step 'reserve' of workflow {id_}, which is stuck because of it" in why
        assert f"`resilient jobs retry {undo}`" in why
        assert f"`resilient dead discard {undo}`" in why
        assert (await app.jobs.retry(undo)).retried == 1
        await app.database.transaction(workflows.attend)
        assert (await app.workflows.get(id_)).state == "undoing"
        await app.worker().drain(timeout=LIMIT)  # and is dead again
        assert [f.name for f in told if f.name == "stuck_workflow"] == ["stuck_workflow"]
        BROKEN.pop("release")
        assert (await app.jobs.retry(info.step("reserve").undo_job_id)).retried == 1
        await settle(app)
        assert (await app.workflows.get(id_)).state == "undone"
        assert LOG[-2:] == ["release", "refund ch_7"]

    async def test_no_retry_is_recommended_that_would_be_refused(self, app):
        BROKEN["ship"] = Permanent("no")
        id_ = await begin(app)
        await settle(app)
        dead = (await app.workflows.get(id_)).step("ship").job_id
        assert (await app.jobs.retry(dead)).undone == 1
        why = (await app.jobs.why(dead)).text
        assert "jobs retry" not in why
        assert f"It is step 'ship' of workflow {id_}, which turned around (undone): it is not retried any more" in why

    async def test_a_dead_undo_is_given_up(self, app):
        BROKEN.update({"ship": Permanent("no"), "release": Permanent("stock system is gone")})
        id_ = await begin(app)
        await settle(app)
        info = await app.workflows.get(id_)
        await app.jobs.discard(info.step("reserve").undo_job_id)
        await settle(app)
        assert (await app.workflows.get(id_)).state == "undone"
        assert LOG[-1] == "refund ch_7"

    async def test_jobs_of_one_that_is_stuck_are_not_pruned(self, database, clock):
        LOG.clear()
        BROKEN.clear()
        BROKEN.update({"ship": Permanent("no"), "refund ch_7": Permanent("no money")})
        app = Resilient(database, handlers=HANDLERS, upgrade=False)
        id_ = await begin(app)
        await settle(app)
        before = await app.workflows.get(id_)
        assert (before.state, before.step("reserve").undo_state, before.step("charge").undo_state) == (
            "stuck", "succeeded", "dead",
        )  # fmt: skip
        clock.advance(days=91)
        for pruned in (await app.prune(dry_run=True), await app.prune()):
            assert (pruned.succeeded, pruned.dead, pruned.cancelled) == (0, 0, 0)
        assert await app.jobs.count() == 6
        await settle(app)
        assert [s.to_json() for s in (await app.workflows.get(id_)).steps] == [s.to_json() for s in before.steps]
        BROKEN.pop("refund ch_7")
        assert (await app.jobs.retry(before.step("charge").undo_job_id)).retried == 1
        await settle(app)
        assert (await app.workflows.get(id_)).state == "undone"
        assert LOG.count("release") == 1
        clock.advance(days=91)
        await app.prune()
        assert await app.jobs.count() == 0  # it is over
        await app.close()

    async def test_a_dead_undo_that_was_deleted_is_not_taken_for_done(self, app):
        BROKEN.update({"ship": Permanent("no"), "release": Permanent("stock system is gone")})
        id_ = await begin(app)
        await settle(app)
        info = await app.workflows.get(id_)

        def delete(c, d):  # as `jobs delete` does
            job = info.step("reserve").undo_job_id
            release_followers(c, d, [job], [], d.now(c), gone=True)
            d.run(c, "DELETE FROM {job} WHERE id = :id", {"id": d.id(job)})

        await app.database.transaction(delete)
        await settle(app)
        assert (await app.workflows.get(id_)).state == "stuck"
        assert "refund ch_7" not in LOG


async def test_those_whose_jobs_a_program_holds_hold_up_no_others(postgres_database):
    """They are looked at again; as many as one look takes must not be all that is ever looked at."""
    app = Resilient(postgres_database, handlers=HANDLERS, upgrade=False)

    async def begun():
        async with app.workflow("order", resource_key="shop/1") as wf:
            wf.step(charge, Order(id=1), delay=3600)
        await app.workflows.cancel(wf.id)
        return wf

    held, free = [await begun() for _ in range(store.DUE_LIMIT)], await begun()
    with Session(postgres_database.sync_engine) as s:
        assert app.sync.jobs.cancel([wf.steps[0].id for wf in held], session=s).cancelled == len(held)
        sweeper = app.worker().sweeper
        for _ in range(2):
            await sweeper._attend_workflows()
        assert (await app.workflows.get(free.id)).state == "failed"
    await settle(app)
    assert {one.state for one in await app.workflows.list()} == {"failed"}
    await app.close()


async def test_a_program_that_cancels_one_waits_for_no_job_with_it_locked(postgres_database):
    """Whoever ends a step has that job, and asks for a look at its workflow: the two waited for each other."""
    app = Resilient(postgres_database, handlers=HANDLERS, upgrade=False)
    async with app.workflow("order", resource_key="shop/1") as wf:
        paid = wf.step(charge, Order(id=1), delay=3600)
        wf.step(reserve, Order(id=1), after=paid)

    def end(c, d):
        app.sync.jobs.cancel(paid.id, session=c)

    with Session(postgres_database.sync_engine) as s:
        assert app.sync.workflows.cancel(wf.id, session=s).state == "undoing"
        await asyncio.wait_for(asyncio.to_thread(postgres_database.transaction_sync, end), LIMIT)
        assert app.sync.jobs.cancel([one.id for one in wf.steps], session=s).cancelled == 1
        assert (await app.workflows.get(wf.id)).state == "running"
        s.commit()
    info = await app.workflows.get(wf.id)
    assert (info.state, info.reason) == ("undoing", "it was cancelled")
    await settle(app)
    assert (await app.workflows.get(wf.id)).state == "failed"
    await app.close()


async def test_one_that_a_program_cancels_in_vain_goes_on(database):
    app = Resilient(database, handlers=HANDLERS, upgrade=False)
    async with app.workflow("order", resource_key="shop/1") as wf:
        wf.step(reserve, Order(id=1))
    with Session(database.sync_engine) as s:
        app.sync.workflows.cancel(wf.id, session=s)
        s.rollback()
        with contextlib.suppress(ZeroDivisionError), s.begin_nested():
            app.sync.workflows.cancel(wf.id, session=s)
            raise ZeroDivisionError
        s.commit()
    await settle(app)
    assert (await app.workflows.get(wf.id)).state == "succeeded"
    await app.close()


@pytest.mark.parametrize("is_cancelled", [False, True], ids=["forward", "backwards"])
async def test_looks_read_no_results(database, is_cancelled):
    """Each step's end has somebody look at all steps: a thousand of 1 MiB were a gigabyte, a thousand times."""
    LOG.clear()
    BROKEN.clear()
    app = Resilient(database, handlers=HANDLERS, upgrade=False)
    async with app.workflow("order", resource_key="shop/1") as wf:
        wf.step(charge, Order(id=1), undo=refund)
        wf.step(reserve, Order(id=1), delay=3600)
    await drain(app)
    if is_cancelled:
        await app.workflows.cancel(wf.id)
    statements = []
    event.listen(database.sync_engine, "before_cursor_execute", lambda _c, _cu, sql, *_: statements.append(sql))
    database.transaction_sync(lambda c, d: store.look_at(c, d, [wf.id], d.now(c)))
    database.transaction_sync(workflows.attend)
    assert any("resilient_step" in sql for sql in statements)
    assert not [sql for sql in statements if "j.result" in sql]
    await settle(app)
    assert (await app.workflows.get(wf.id)).state == ("undone" if is_cancelled else "running")
    await app.close()


class TestRepair:
    async def test_one_that_stands_still_is_found(self, app):
        """What no code does: the last step ends, and nobody asks for a look at its workflow."""
        id_ = await begin(app)
        await settle(app)
        other = await begin(app)  # goes on as it should
        lost = "UPDATE {workflow} SET state = 'running', finished_at = NULL WHERE finished_at IS NOT NULL"
        app.database.transaction_sync(lambda c, d: d.run(c, lost))
        worker = app.worker()
        await worker.sweeper.chores()
        assert worker.sweeper.repaired == 1
        await worker.sweeper.stage()
        assert [(await app.workflows.get(i)).state for i in (id_, other)] == ["succeeded", "running"]

    async def test_one_without_steps_is_over(self, app):
        async with app.workflow("empty") as wf:
            pass
        await settle(app)
        assert (await app.workflows.get(wf.id)).state == "succeeded"


class Strict(BaseModel):
    model_config = ConfigDict(strict=True)
    at: datetime = Field(alias="theTime")


class TestResults:
    async def test_of_a_strict_model_with_aliases(self, app):
        time, seen = datetime(2030, 1, 1, tzinfo=UTC), []

        @handler("note")
        async def note(job: Job[None]) -> Strict:
            return Strict(theTime=time)

        @handler("look")
        async def look(job: Job[None]) -> None:
            seen.append(await job.result_of(note))

        own = Resilient(app.database, handlers=[*HANDLERS, note, look], upgrade=False)
        async with own.workflow("w", resource_key="shop/1") as wf:
            wf.step(look, after=wf.step(note))
        await settle(own)
        assert seen == [Strict(theTime=time)]

    async def test_there_is_none(self, app):
        found = []

        @handler("curious")
        async def curious(job: Job[str]) -> None:
            for step in (charge, ship):
                try:
                    await job.result_of(step)
                except NoResult as error:
                    found.append(str(error))

        own = Resilient(app.database, handlers=[*HANDLERS, curious], upgrade=False)
        async with own.workflow("w", resource_key="shop/1") as wf:
            wf.step(curious, "x")
            wf.step(charge, Order(id=1), delay=3600)
        await own.enqueue(curious, "alone", resource_key="shop/2")
        await settle(own)
        assert sorted(text[:30] for text in found) == sorted(
            [f"step charge of workflow {wf.id}"[:30], f"workflow {wf.id} (w) has no step 'ship'"[:30]]
            + [f"job {(await own.jobs.list(resource='shop/2'))[0].id} is not"[:30]] * 2
        )

    async def test_of_one_of_several(self, app):
        caught = []

        @handler("join")
        async def join(job: Job[None]) -> int:
            try:
                await job.result_of(reserve)
            except NoResult as error:
                caught.append(str(error))
            return sum(await job.results_of(reserve))

        own = Resilient(app.database, handlers=[*HANDLERS, join], upgrade=False)
        async with own.workflow("w", resource_key="shop/1") as wf:
            parts = [wf.step(reserve, Order(id=n)) for n in (1, 2)]
            wf.step(join, None, after=parts)
        await settle(own)
        assert caught == ["2 steps are 'reserve': ask for results_of, or by the name of one"]
        assert (await own.workflows.get(wf.id)).step("join").result == 6


class TestChangedSteps:
    """Somebody retries or edits a step while its workflow goes forward."""

    @pytest.mark.parametrize("end", ["dies", "is cancelled"])
    async def test_a_step_that_succeeded_once_is_undone_whatever_its_retry_comes_to(self, app, end):
        async with app.workflow("order", resource_key="shop/1") as wf:
            paid = wf.step(charge, Order(id=7), undo=refund)
            wf.step(ship, Order(id=7), after=paid, delay=600)
        await drain(app)
        if end == "dies":
            BROKEN["charge"] = Permanent("it is charged already")
            await app.jobs.retry(paid.id)
        else:
            await app.jobs.retry(paid.id)
            await app.jobs.cancel(paid.id)
        await settle(app)
        info = await app.workflows.get(wf.id)
        assert (info.state, LOG[-1]) == ("undone", "refund whatever was charged")

    @pytest.mark.parametrize("word", ["edit", "retry"])
    @pytest.mark.parametrize("mark", [{}, {"key": "k", "until": "2999-01-01T00:00:00+00:00"}], ids=["no key", "key"])
    async def test_a_request_that_a_new_operation_leaves_in_doubt_is_undone(self, app, word, mark):
        """Whatever the new operation comes to: nobody asks about the request any more."""
        later = {"retry": Retry(max_attempts=3, delay=Fixed(3600))}
        own = Resilient(app.database, handlers=[handler("charge", **later)(charge.fn), refund, ship], upgrade=False)
        async with own.workflow("order", resource_key="shop/1") as wf:
            paid = wf.step(charge, Order(id=7), undo=refund)
            wf.step(ship, Order(id=7), after=paid)
        BROKEN["charge"] = Transient("no answer")
        await drain(own)
        dead = ", state = 'dead', finished_at = run_at" if word == "retry" else ""  # nobody has looked at it yet
        row = f"UPDATE {{job}} SET sent = :sent{dead} WHERE id = :id"
        sent = json.dumps({"charge": mark})
        await own.database.transaction(lambda c, d: d.run(c, row, {"id": d.id(paid.id), "sent": sent}) and None)
        BROKEN["charge"] = Permanent("card declined")
        if word == "edit":
            assert (await own.jobs.edit(paid.id, payload={"id": 8}, delay=0, new_operation=True)).edited == 1
        else:
            assert (await own.jobs.retry(paid.id, repeat_ambiguous=True, new_operation=True)).retried == 1
        await settle(own)
        assert (await own.workflows.get(wf.id)).state == "undone"
        assert LOG == ["charge", "charge", "refund whatever was charged"]

    @pytest.mark.parametrize("how", ["edit", "retry"])
    async def test_a_new_operation_after_a_certain_failure_leaves_nothing_to_undo(self, app, how):
        own = Resilient(app.database, handlers=[charge, refund, ship], upgrade=False)
        async with own.workflow("order", resource_key="shop/1") as wf:
            paid = wf.step(charge, Order(id=7), undo=refund)
        BROKEN["charge"] = Transient("refused")
        await drain(own)
        BROKEN["charge"] = Permanent("card declined")
        if how == "edit":
            assert (await own.jobs.edit(paid.id, payload={"id": 8}, delay=0, new_operation=True)).edited == 1
        else:
            dies = "UPDATE {job} SET state = 'dead', finished_at = run_at WHERE id = :id"
            await own.database.transaction(lambda c, d: d.run(c, dies, {"id": d.id(paid.id)}) and None)
            assert (await own.jobs.retry(paid.id, new_operation=True)).retried == 1
        await settle(own)
        assert ((await own.workflows.get(wf.id)).state, LOG) == ("failed", ["charge", "charge"])

    async def test_history_that_says_what_is_to_be_undone_is_not_pruned(self, database, clock):
        """A step that goes on for longer than history is kept; its other executions go."""
        LOG.clear()
        BROKEN.clear()
        app = Resilient(database, handlers=HANDLERS, upgrade=False, retention=Retention(attempts=timedelta(days=1)))
        async with app.workflow("order", resource_key="shop/1") as wf:
            paid = wf.step(charge, Order(id=7), undo=refund)
            wf.step(ship, Order(id=7), after=paid, delay=86400 * 30)
        await drain(app)
        await app.jobs.retry(paid.id)
        BROKEN["charge"] = Snooze(86400 * 3)
        await drain(app)
        clock.advance(days=2)
        assert (await app.prune()).attempts == 1
        assert [one.decision for one in await app.jobs.attempts(paid.id)] == ["retried"]
        BROKEN["charge"] = Permanent("it is charged already")
        clock.advance(days=2)
        await settle(app)
        assert ((await app.workflows.get(wf.id)).state, LOG[-1]) == ("undone", "refund whatever was charged")
        await app.prune()
        assert [one.decision for one in await app.jobs.attempts(paid.id)] == ["dead"]  # the workflow is over
        await app.close()

    async def test_a_request_in_doubt_is_undone_also_if_its_execution_was_pruned(self, database, clock):
        """While the row's mark spoke of it, nobody needed that execution; the new operation clears the mark."""
        LOG.clear()
        BROKEN.clear()
        later = handler("charge", retry=Retry(max_attempts=3, delay=Fixed(86400 * 5)))(charge.fn)
        kept = Retention(attempts=timedelta(days=1))
        app = Resilient(database, handlers=[later, refund, ship], upgrade=False, retention=kept)
        async with app.workflow("order", resource_key="shop/1") as wf:
            paid = wf.step(later, Order(id=7), undo=refund)
        BROKEN["charge"] = Transient("no answer")
        await drain(app)
        mark = "UPDATE {job} SET sent = :sent WHERE id = :id"
        await app.database.transaction(
            lambda c, d: d.run(c, mark, {"id": d.id(paid.id), "sent": '{"charge": {}}'}) and None
        )
        clock.advance(days=2)
        assert (await app.prune()).attempts == 1
        BROKEN["charge"] = Permanent("card declined")
        await app.jobs.edit(paid.id, payload={"id": 8}, delay=0, new_operation=True)
        await settle(app)
        assert ((await app.workflows.get(wf.id)).state, LOG[-1]) == ("undone", "refund whatever was charged")
        await app.close()

    async def test_an_undo_gets_the_payload_that_its_step_ran_with_if_it_runs_no_more(self, app):
        """The workflow has turned around: an edit of a dead step says nothing of what is to be undone."""
        BROKEN["charge"], BROKEN["release"] = Ambiguous("no answer"), Permanent("somebody is in the way")
        async with app.workflow("order", resource_key="shop/1") as wf:
            wf.step(reserve, Order(id=7), undo=release)
            paid = wf.step(charge, Order(id=7), undo=refund, delay=60)
            stuck = wf.step(reserve, Order(id=7), undo=release, name="again")
        await drain(app)
        await app.jobs.edit(paid.id, delay=0)
        await settle(app)
        info = await app.workflows.get(wf.id)
        assert (info.state, info.step("again").undo_state) == ("stuck", "dead")
        assert (await app.jobs.edit(paid.id, payload={"id": 8}, new_operation=True)).edited == 1
        BROKEN.clear()
        await app.jobs.retry(info.step(stuck.name).undo_job_id)
        await settle(app)
        undo = (await app.workflows.get(wf.id)).step("charge").undo_job_id
        assert (await app.jobs.get(undo)).payload == {"id": 7, "fails": ""}

    async def test_an_undo_gets_the_payload_that_its_step_was_given_later(self, database, clock):
        seen = []

        @handler("pay")
        async def pay(job: Job[Order]) -> None:
            seen.append(("pay", job.payload.id))

        @handler("pay.back")
        async def pay_back(job: Job[Order]) -> None:
            seen.append(("pay back", job.payload.id))

        @handler("fails")
        async def fails(job: Job[Order]) -> None:
            raise Permanent("out of stock")

        app = Resilient(database, handlers=[pay, pay_back, fails], upgrade=False)
        async with app.workflow("order", resource_key="shop/1") as wf:
            paid = wf.step(pay, Order(id=1), undo=pay_back, delay=60)
            wf.step(fails, Order(id=1), after=paid)
        assert (await app.jobs.edit(paid.id, payload={"id": 2})).edited == 1
        clock.advance(60)
        await settle(app)
        assert (seen, (await app.workflows.get(wf.id)).state) == ([("pay", 2), ("pay back", 2)], "undone")
        await app.close()

    async def test_its_jobs_are_not_deleted_while_a_workflow_is_stuck(self, app):
        BROKEN["refund ch_7"] = BROKEN["ship"] = Permanent("no")
        id_ = await begin(app)
        await settle(app)
        info = await app.workflows.get(id_)
        undo = info.step("charge").undo_job_id
        assert info.state == "stuck"
        done = await app.jobs.delete([undo, info.step("ship").job_id])
        assert (done.deleted, done.in_workflow) == (0, 2)
        BROKEN.clear()
        assert (await app.jobs.retry(undo)).retried == 1
        await settle(app)
        assert (await app.workflows.get(id_)).state == "undone"
        assert (await app.jobs.delete(undo)).deleted == 1

    async def test_a_step_whose_undo_is_not_known_here_keeps_its_payload(self, database):
        app = Resilient(database, handlers=HANDLERS, upgrade=False)
        async with app.workflow("order", resource_key="shop/1") as wf:
            paid = wf.step(charge, Order(id=1), undo=refund, delay=60)
        other = Resilient(database, handlers=[charge], upgrade=False)
        with pytest.raises(UnknownKind, match="no handler is declared for kind 'refund'"):
            await other.jobs.edit(paid.id, payload={"id": 2})
        assert (await app.jobs.get(paid.id)).payload["id"] == 1
        await other.close()
        await app.close()


class TestMoreSteps:
    async def test_a_step_adds_steps_and_a_retry_adds_nothing_twice(self, database, clock):
        LOG.clear()
        BROKEN.clear()

        @handler("split")
        async def split(job: Job[int]) -> None:
            async with job.workflow() as wf:
                parts = [wf.step(reserve, Order(id=n)) for n in range(job.payload)]
                wf.step(total, None, after=parts)
            if job.attempt == 1:
                raise Transient("after it added them")

        @handler("total")
        async def total(job: Job[None]) -> int:
            return sum(await job.results_of(reserve))

        app = Resilient(database, handlers=[*HANDLERS, split, total], upgrade=False)
        async with app.workflow("dynamic", resource_key="shop/1") as wf:
            wf.step(split, 4)
        await settle(app)
        clock.advance(hours=1)
        await settle(app)
        info = await app.workflows.get(wf.id)
        assert (info.state, len(info.steps), info.step("total").result) == ("succeeded", 6, 12)
        assert await app.jobs.count() == 6
        await app.close()

    @pytest.mark.parametrize("is_async", [True, False])
    @pytest.mark.parametrize("is_step", [True, False])
    async def test_who_lost_the_job_adds_no_steps(self, database, is_async, is_step):
        """Steps in a transaction of their own are under the job's fence, as those of `complete` are."""
        LOG.clear()
        refused = []

        def steal(job):
            sql = "UPDATE {job} SET version = version + 1, state = 'ready' WHERE id = :id"
            job.app.database.transaction_sync(lambda c, d: d.run(c, sql, {"id": d.id(job.id)}))

        @handler("robbed")
        async def robbed(job: Job[None]) -> None:
            await asyncio.to_thread(steal, job)
            try:
                async with job.workflow() as wf:
                    wf.step(reserve, Order(id=1))
            except LostLease:
                refused.append(job.execution)
                raise

        @handler("robbed")
        def robbed_plain(job: SyncJob[None]) -> None:
            steal(job)
            try:
                with job.workflow() as wf:
                    wf.step(reserve, Order(id=1))
            except LostLease:
                refused.append(job.execution)
                raise

        declared = robbed if is_async else robbed_plain
        app = Resilient(database, handlers=[*HANDLERS, declared], upgrade=False)
        if is_step:
            async with app.workflow("dynamic", resource_key="shop/1") as wf:
                wf.step(declared, None)
        else:
            await app.enqueue(declared, None, resource_key="shop/1")
        await app.worker(concurrency=1).drain(timeout=LIMIT)
        assert (refused, len(await app.workflows.list()), await app.jobs.count(kind="reserve")) == ([1], is_step, 0)
        await app.close()

    async def test_what_a_later_step_adds_is_undone_before_it_also_where_a_retry_kept_steps(self, database, clock):
        LOG.clear()
        BROKEN.clear()
        BROKEN["ship"] = Permanent("no such street")

        @handler("split")
        async def split(job: Job[None]) -> None:
            async with job.workflow() as wf:
                wf.step(reserve, Order(id=1), name="one")
                wf.step(reserve, Order(id=2), name="two")
                if job.attempt > 1:
                    wf.step(grow, None, undo=shrink)
            if job.attempt == 1:
                raise Transient("after it added two")

        @handler("grow")
        async def grow(job: Job[None]) -> None:
            async with job.workflow() as wf:
                wf.step(ship, Order(id=7), after=wf.step(charge, Order(id=7), undo=refund))

        @handler("shrink")
        async def shrink(_job: Job[None]) -> None:
            did("shrink")

        app = Resilient(database, handlers=[*HANDLERS, split, grow, shrink], upgrade=False)
        async with app.workflow("dynamic", resource_key="shop/1") as wf:
            wf.step(split, None)
        await settle(app)
        clock.advance(hours=1)
        await settle(app)
        info = await app.workflows.get(wf.id)
        assert (info.state, LOG[-2:]) == ("undone", ["refund ch_7", "shrink"])
        assert [s.name for s in info.steps] == ["split", "one", "two", "grow", "charge", "ship"]
        await app.close()

    async def test_within_complete_they_belong_to_the_success(self, database, clock, tmp_path):  # noqa: ARG002
        LOG.clear()
        BROKEN.clear()

        @handler("split")
        async def split(job: Job[int]) -> None:
            async with job.complete():
                async with job.workflow() as wf:
                    parts = [wf.step(reserve, Order(id=n)) for n in range(job.payload)]
                    wf.step(total, None, after=parts)
                LOG.append(await job.results_of(charge))
            if job.attempt == 1:
                raise Transient("after it added them")

        @handler("total")
        def total(job: SyncJob[None]) -> int:
            with job.complete():
                return sum(job.results_of(reserve))

        app = Resilient(database, handlers=[*HANDLERS, split, total], upgrade=False)
        async with app.workflow("dynamic", resource_key="shop/1") as wf:
            wf.step(split, 4, after=wf.step(charge, Order(id=3)))
        await settle(app)
        assert len((await app.workflows.get(wf.id)).steps) == 2
        clock.advance(hours=1)
        await settle(app)
        info = await app.workflows.get(wf.id)
        assert (info.state, len(info.steps), info.step("total").result) == ("succeeded", 7, 12)
        assert LOG[1] == [Receipt(charge="ch_3", cents=995)]
        await app.close()

    async def test_steps_added_in_a_completion_and_a_sibling_that_ends_do_not_block_each_other(self, postgres_database):
        """Both want their common follower and the workflow: jobs first, then workflows, whoever comes first."""
        added, attempts = asyncio.Event(), []

        @handler("quick")
        async def quick(job: Job[None]) -> None:
            attempts.append(("quick", job.attempt))
            await added.wait()

        @handler("adds")
        async def adds(job: Job[None]) -> None:
            attempts.append(("adds", job.attempt))
            async with job.complete():
                async with job.workflow() as wf:
                    wf.step(last, None, name="more")
                added.set()
                await asyncio.sleep(0.5)  # the sibling's end is on its way to the workflow meanwhile

        @handler("last")
        async def last(job: Job[None]) -> None:
            attempts.append(("last", job.attempt))

        app = Resilient(postgres_database, handlers=[quick, adds, last], upgrade=False)
        async with app.workflow("w", resource_key="shop/1") as wf:
            wf.step(last, None, after=[wf.step(quick, None), wf.step(adds, None)])
        await app.worker().drain(timeout=LIMIT)
        await app.worker().drain(timeout=LIMIT)
        assert sorted(attempts) == [("adds", 1), ("last", 1), ("last", 1), ("quick", 1)]
        assert (await app.workflows.get(wf.id)).state == "succeeded"
        await app.close()

    async def test_steps_are_not_added_to_a_workflow_that_turned_around_meanwhile(self, postgres_database):
        cancelled = []

        @handler("adds")
        async def adds(job: Job[None]) -> None:
            async with job.complete():
                async with job.workflow() as more:
                    more.step(adds, None, name="more")
                if not cancelled:
                    cancelled.append(await job.app.workflows.cancel(wf.id))

        app = Resilient(postgres_database, handlers=[adds], upgrade=False)
        async with app.workflow("w", resource_key="shop/1") as wf:
            wf.step(adds, None)
        await app.worker().drain(timeout=LIMIT)
        info = await app.workflows.get(wf.id)
        assert len(info.steps) == 1
        assert cancelled
        await app.close()

    async def test_steps_of_a_block_that_was_undone_do_not_refuse_the_commit(self, postgres_database):
        """The block is undone and its error caught: nothing was added, so the workflow may turn around."""

        @handler("tries", mode="atomic")
        async def tries(job: Job[None]) -> str:
            with pytest.raises(ZeroDivisionError):  # noqa: PT012 - the block itself raises
                async with job.prepare():
                    async with job.workflow() as more:
                        more.step(tries, None, name="more")
                    raise ZeroDivisionError
            await job.app.workflows.cancel(wf.id)
            async with job.complete():
                return "done"

        app = Resilient(postgres_database, handlers=[tries], upgrade=False)
        async with app.workflow("w", resource_key="shop/1") as wf:
            step = wf.step(tries, None)
        await app.worker().drain(timeout=LIMIT)
        job = await app.jobs.get(step.id)
        assert (job.state, job.result) == ("succeeded", "done")
        assert len((await app.workflows.get(wf.id)).steps) == 1
        await app.close()

    async def test_an_ordinary_job_begins_one(self, app):
        @handler("start")
        async def start(job: Job[int]) -> None:
            async with job.workflow("started") as wf:
                wf.step(charge, Order(id=job.payload))

        own = Resilient(app.database, handlers=[*HANDLERS, start], upgrade=False)
        await own.enqueue(start, 3, resource_key="shop/9")
        await settle(own)
        (found,) = await own.workflows.list(name="started")
        assert (found.state, found.steps[0].resource_key) == ("succeeded", "shop/9")

    async def test_not_after_it_turned_around(self, app):
        caught = []

        @handler("late")
        async def late(job: Job[None]) -> None:
            await job.app.workflows.cancel((await job.app.workflows.list())[0].id)
            try:
                async with job.workflow() as wf:
                    wf.step(charge, Order(id=1))
            except WorkflowOver as error:
                caught.append(str(error))

        own = Resilient(app.database, handlers=[*HANDLERS, late], upgrade=False)
        async with own.workflow("w", resource_key="shop/1") as wf:
            wf.step(late)
        await settle(own)
        assert caught == [f"workflow {wf.id} (w) is undoing: it takes no more steps"]


class TestRefused:
    async def test_a_step_behind_the_end_of_the_block_which_nobody_would_write(self, app):
        async with app.workflow("w", resource_key="shop/1") as wf:
            wf.step(charge, Order(id=1))
        with pytest.raises(InvalidInput, match="the block of this workflow has ended"):
            wf.step(reserve, Order(id=1))
        with app.sync.workflow("w", resource_key="shop/1") as plain:
            plain.step(charge, Order(id=1))
        with pytest.raises(InvalidInput, match="the block of this workflow has ended"):
            plain.step(reserve, Order(id=1))

    async def test_wrong_steps(self, app):
        wf = app.workflow("w", resource_key="shop/1")
        other = app.workflow("v", resource_key="shop/1").step(charge, Order(id=1))
        with pytest.raises(InvalidInput, match="'charge' belongs to another workflow"):
            wf.step(reserve, Order(id=1), after=other)
        with pytest.raises(InvalidInput, match="a step takes no unique_key"):
            wf.step(reserve, Order(id=1), unique_key="u")
        with pytest.raises(InvalidInput, match="needs a resource_key"):
            app.workflow("w").step(charge, Order(id=1))
        wf.step(charge, Order(id=1), name="a")
        with pytest.raises(InvalidInput, match="two steps are called 'a'"):
            wf.step(charge, Order(id=1), name="a")
        with pytest.raises(InvalidInput, match="the name of a workflow must be 1 to 255"):
            app.workflow("")

    @pytest.mark.parametrize("is_named", [True, False])
    async def test_more_steps_than_a_workflow_takes(self, app, is_named, monkeypatch):
        monkeypatch.setattr(workflows, "MAX_STEPS", 2)
        wf = app.workflow("w", resource_key="shop/1")
        for n in range(2):
            wf.step(charge, Order(id=1), name=f"step {n}" if is_named else None)
        with pytest.raises(InvalidInput, match="a workflow has at most 2 steps"):
            wf.step(charge, Order(id=1), name="one more" if is_named else None)

    async def test_no_such_workflow(self, app):
        with pytest.raises(WorkflowNotFound, match="there is no workflow 0195f3a2"):
            await app.workflows.get("0195f3a2-7c1e-7d3a-9b0e-2f6f3c1a8e55")
        with pytest.raises(WorkflowNotFound):
            await app.workflows.cancel("0195f3a2-7c1e-7d3a-9b0e-2f6f3c1a8e55")
        with pytest.raises(InvalidInput, match="'dead' is not a workflow state"):
            await app.workflows.list(state="dead")


S, D, C, B, RUN = JobState.SUCCEEDED, JobState.DEAD, JobState.CANCELLED, JobState.BLOCKED, JobState.RUNNING


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([(S,), (S,)], ("succeeded", None, (), None)),
        ([(S,), (B,)], ("running", None, (), None)),
        ([(D,), (B,), (RUN,)], ("undoing", "step s0 is dead", ("s1", "s2"), None)),
        ([(S,), (None,)], ("failed", "step s1 was deleted", (), None)),
        ([(S, None, True), (S, None, True), (C,)], ("undoing", "step s2 was cancelled", (), "s1")),
        ([(S, None, True), (S, None, True, True, RUN), (C,)], ("undoing", "step s2 was cancelled", (), None)),
        ([(S, None, True), (S, None, True, True, S), (C,)], ("undoing", "step s2 was cancelled", (), "s0")),
        ([(S, None, True), (S, None, True, True, C), (C,)], ("undoing", "step s2 was cancelled", (), "s0")),
        ([(S, None, True), (S, None, True, True, None), (C,)], ("stuck", "step s2 was cancelled", (), None)),
        ([(S, None, True), (S, None, True, True, D), (C,)], ("stuck", "step s2 was cancelled", (), None)),
        ([(D, "ambiguous", True)], ("undoing", "step s0 is dead", (), "s0")),
        ([(D, "permanent", True)], ("failed", "step s0 is dead", (), None)),
        ([(D, "ambiguous", True, True, S)], ("undone", "step s0 is dead", (), None)),
        ([(D, "transient", True, False, None, True)], ("undoing", "step s0 is dead", (), "s0")),
        ([(C, None, True, False, None, True)], ("undoing", "step s0 was cancelled", (), "s0")),
        ([(D, "lost_worker", True)], ("undoing", "step s0 is dead", (), "s0")),
        ([(D, "bug", True)], ("failed", "step s0 is dead", (), None)),
        ([(C, "timeout", True)], ("undoing", "step s0 was cancelled", (), "s0")),
        ([(C, "ambiguous", True)], ("failed", "step s0 was cancelled", (), None)),
    ],
)
def test_plans(steps, expected):
    facts = [StepFacts(f"s{n}", n, *step) for n, step in enumerate(steps)]
    assert tuple(plan(WorkflowState.RUNNING, facts)) == expected


S = JobState


@pytest.mark.parametrize(
    ("state", "steps", "expected"),
    [
        ("running", [(S.SUCCEEDED,), (S.BLOCKED,)], False),
        ("running", [(S.SUCCEEDED,), (S.SUCCEEDED,)], True),
        ("running", [], True),
        ("running", [(S.RUNNING,), (S.DEAD,)], True),
        ("running", [(S.RUNNING,), (None,)], True),
        ("undoing", [(S.RUNNING,), (S.DEAD,)], False),  # it was asked to stop
        ("undoing", [(S.READY,), (S.DEAD,)], True),
        ("undoing", [(S.SUCCEEDED, None, True), (S.DEAD,)], True),
        ("undoing", [(S.SUCCEEDED, None, True, True, S.READY), (S.DEAD,)], False),
        ("undoing", [(S.SUCCEEDED, None, True, True, S.DEAD), (S.DEAD,)], True),
        ("undoing", [(S.SUCCEEDED, None, True, True, S.SUCCEEDED), (S.DEAD,)], True),
        ("stuck", [(S.SUCCEEDED, None, True, True, S.DEAD), (S.DEAD,)], False),
        ("stuck", [(S.SUCCEEDED, None, True, True, S.READY), (S.DEAD,)], True),
        ("succeeded", [(None,)], False),
    ],
)
def test_stands_still(state, steps, expected):
    facts = [StepFacts(f"s{n}", n, *step) for n, step in enumerate(steps)]
    assert stands_still(WorkflowState(state), facts) is expected


async def test_a_step_with_an_ordering_key_is_followed(app):
    """On PostgreSQL the one job of a lane that a transaction writes goes a way of its own: it says this, too."""
    async with app.workflow("order", resource_key="shop/1") as wf:
        wf.step(charge, Order(id=7), ordering_key="order-7")
    rows = await app.database.transaction(
        lambda c, d: d.run(c, "SELECT followed FROM {job} WHERE ordering_key IS NOT NULL").all()
    )
    assert [bool(row[0]) for row in rows] == [True]
    await settle(app)
    assert (await app.workflows.get(wf.id)).state is WorkflowState.SUCCEEDED
