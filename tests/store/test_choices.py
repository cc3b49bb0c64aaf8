"""A result meets a cancel, or a wish for one more execution: what is written is what `decide` says to who heard of it.

Two connections: on PostgreSQL the result waits for the row that the other transaction has changed, and chooses by what
that one leaves behind; SQLite has one writer at a time.
"""

import contextlib
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from uuid import uuid4

import psycopg
import pytest
import sqlalchemy as sa

from resilient import Failure, FailureKind, JobFilter, JobState, Retry
from resilient.core.jobs import marks
from resilient.core.jobs.decide import decide
from resilient.core.jobs.outcomes import SUCCEEDED, Deferred, Failed, HandedBack, JobFacts, Reconciled, Snoozed
from resilient.core.jobs.states import TERMINAL
from resilient.engine.run import completer
from resilient.store.jobs import changes, finishing
from resilient.store.jobs import insert as jobs
from resilient.store.jobs.columns import NewJob
from resilient.store.jobs.filters import JOB
from tests.interleaving import until_it_waits

NOW = datetime(2031, 1, 1, 12, tzinfo=UTC)
RETRY = Retry(max_attempts=5, delay=20)
KEYED = {"a": {"key": "k", "at": "2031-01-01T11:59:00+00:00", "until": "2031-01-02T12:00:00+00:00"}}
UNKEYED = {"a": {"at": "2031-01-01T11:59:00+00:00"}}


def failed(kind):
    return Failed(Failure(FailureKind(kind), code="c"), "boom")


CASES = {  # outcome, marks, more of the job
    "success": (SUCCEEDED, {}, {}),
    "retry": (failed("transient"), {}, {}),
    "retry under a key": (failed("transient"), KEYED, {}),
    "out of attempts": (failed("bug"), {}, {"attempts": 4}),
    "dead": (failed("permanent"), {}, {}),
    "dead, a key is unanswered": (failed("permanent"), KEYED, {}),
    "to be looked up": (failed("transient"), UNKEYED, {"can_reconcile": True}),
    "unknown": (failed("ambiguous"), UNKEYED, {}),
    "took effect": (Reconciled(took_effect=True), UNKEYED, {}),
    "took none": (Reconciled(took_effect=False), UNKEYED, {"can_reconcile": True}),
    "expired": (failed("transient"), {}, {"expires_at": NOW + timedelta(seconds=5)}),
    "throttled": (failed("throttled"), {}, {}),
    "refused by a gate": (Deferred("a"), {}, {}),
    "refused before its begin": (Deferred("a"), {}, {"called": False}),
    "snoozed": (Snoozed(60), {}, {}),
    "handed back": (HandedBack("stopped"), {}, {}),
}
WISHES = {"cancel": {"cancel_requested": True}, "once more": {"once_more": True},
          "both": {"cancel_requested": True, "once_more": True}}  # fmt: skip


@pytest.fixture
def job(database):
    """A running job at version 2, with a unique key that is held until it ends."""
    new = NewJob(uuid4(), "k", "a/1", "null", unique_key="u", unique_until="finish", idempotency_key="first")
    database.transaction_sync(jobs.insert_unique, [new])

    def claimed(c, d):
        sets = "state = 'running', version = 2, locked_by = 'w', lease_until = updated_at, executions = 1"
        d.run(c, f"UPDATE {{job}} SET {sets}, rescues = 1")
        d.run(c, "DELETE FROM {turn}")

    database.transaction_sync(claimed)
    return new.id


def row_of(database, id_):
    def read(c, d):
        row = d.execute(c, sa.select(JOB).where(JOB.c.id == id_)).mappings().one()
        decisions = [r[0] for r in d.run(c, "SELECT decision FROM {attempt}").all()]
        turns = len(d.run(c, "SELECT 1 FROM {turn}").all())
        return SimpleNamespace(**row, decisions=decisions, turns=turns)

    return database.transaction_sync(read)


def wish(c, d, id_, wished):
    if "once_more" in wished:
        jobs.mark_once_more(c, d, id_, NOW)
    if "cancel_requested" in wished:
        changes.Sweep(changes.Cancel(), JobFilter(ids=(id_,))).step(c, d)


def result_of(id_, case, **wished):
    """The step that a worker decided on, and what writes it."""
    outcome, unanswered, more = CASES[case]
    facts = JobFacts(
        **{"attempts": 0, "max_attempts": 5, "rescues": 1, "resource_key": "a/1", **more, **wished},
        sent=marks.in_doubt(unanswered, NOW), safe_until=marks.safe_until(unanswered),
    )  # fmt: skip
    step = decide(facts, outcome, RETRY, NOW, 0.0)

    def write(c, d):
        if outcome is SUCCEEDED:
            return finishing.succeed_if_held(c, d, [(id_, 2, None)], NOW)
        return finishing.finish_if_held(c, d, [finishing.Finish(id_, 2, step, unanswered, 1, "w", NOW)], NOW)

    return step, write


@contextlib.contextmanager
def meeting(database):
    """``then(write)`` runs it as another transaction; on PostgreSQL it waits for the one that is open here."""
    d, results = database.dialect, []
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(1))
        c = stack.enter_context(database.sync_engine.connect())
        with c.begin():
            if d.is_postgresql:
                url = database.url.render_as_string(hide_password=False).replace("postgresql+psycopg", "postgresql")
                watch = stack.enter_context(psycopg.connect(url, autocommit=True))

                def then(write):
                    future = pool.submit(database.transaction_sync, write)
                    assert until_it_waits(watch, future), "it did not wait"
                    results.append(future.result)
            else:

                def then(write):
                    results.append(lambda _: database.transaction_sync(write))

            yield c, d, then, results
        results[:] = [ask(30) for ask in results]


@pytest.mark.parametrize("wished", WISHES.values(), ids=WISHES)
@pytest.mark.parametrize("case", CASES)
def test_what_is_written_is_what_had_been_decided_on_hearing_of_it(database, job, case, wished):
    before = row_of(database, job)
    _, write = result_of(job, case)
    with meeting(database) as (c, d, then, results):
        wish(c, d, job, wished)
        then(write)
    assert results == [{job}]
    expected, _ = result_of(job, case, **wished)
    after, over = row_of(database, job), expected.state in TERMINAL
    assert after.state == expected.state
    if case == "success":
        counters = {"attempts": 0, "rescues": 0 if expected.fresh_key else 1, "deferrals": 0}
    else:
        counters = {name: getattr(expected, name) for name in ("attempts", "rescues", "deferrals")}
        assert after.decisions == [expected.decision]
    assert {name: getattr(after, name) for name in counters} == counters
    assert after.executions == (0 if case == "refused before its begin" else 1)
    assert after.run_at == (expected.run_at or before.run_at)
    assert after.last_error_kind == expected.error_kind
    assert after.waiting_for == expected.waiting_for
    assert after.finished_at == (NOW if over else None)
    assert after.unique_lock == (None if over else "u")
    assert after.idempotency_key == (
        f"{job if database.dialect.is_postgresql else job.hex}-3" if expected.fresh_key else "first"
    )
    assert after.sent == (None if expected.clear_sent else CASES[case][1] or None)
    assert (after.version, after.turns) == (3, int(expected.state == JobState.READY))
    goes_on = not over and not expected.fresh_key  # the same operation: another one is still to come after it
    assert (after.cancel_requested, after.locked_by) == (False, None)
    assert after.once_more == ("once_more" in wished and goes_on)


@pytest.mark.parametrize("wished", [WISHES["cancel"], WISHES["once more"]], ids=["cancel", "once more"])
@pytest.mark.parametrize("case", CASES)
def test_who_comes_after_the_result_finds_it_written(database, job, case, wished):
    step, write = result_of(job, case)
    with meeting(database) as (c, d, then, _):
        assert write(c, d) == {job}
        then(lambda c, d: wish(c, d, job, wished))
    after = row_of(database, job)
    ends_at_once = "cancel_requested" in wished and step.state not in TERMINAL
    assert after.state == (JobState.CANCELLED if ends_at_once else step.state)
    assert (after.cancel_requested, after.once_more) == (False, False)


@pytest.mark.parametrize("wished", [{}, *WISHES.values()], ids=["nothing", *WISHES])
@pytest.mark.parametrize("case", CASES)
def test_a_result_whose_answer_was_lost_is_recognised(database, job, case, wished):
    step, write = result_of(job, case)
    database.transaction_sync(lambda c, d: wish(c, d, job, wished))
    database.transaction_sync(write)
    done, finishes = ([(job, 2, None)], []) if case == "success" else ([], [finishing.Finish(job, 2, step)])
    assert database.transaction_sync(lambda c, d: completer.write(c, d, done, finishes, {}, again=True)) == {job}
