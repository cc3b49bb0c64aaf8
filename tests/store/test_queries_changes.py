"""Cancel, edit, retry, replay, discard, delete, prune: on both databases, and against a worker that is faster."""

from __future__ import annotations

import json
import threading
from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa
import uuid_utils.compat as uuid

from resilient import InvalidInput, JobFilter, JobState
from resilient.core.jobs.states import TERMINAL
from resilient.store.gates import turns
from resilient.store.jobs import changes, queries
from resilient.store.jobs import insert as jobs
from resilient.store.jobs.changes import Cancel, Delete, Discard, Edit, Retry, Sweep
from resilient.store.jobs.filters import JOB
from tests.helpers import LIMIT

T0 = datetime(2030, 1, 1, 12, tzinfo=UTC)


@pytest.fixture
def add(database):
    """Insert one job as enqueued, then written over with the given columns; its id."""

    def put(**columns):
        id_ = uuid.uuid7()
        unique = {k: columns.pop(k) for k in ("unique_key",) if k in columns}
        new = jobs.NewJob(
            id_,
            columns.pop("kind", "mail.send"),
            columns.pop("resource_key", "github/a"),
            '{"n":1}',
            **unique,
        )

        def run(c, d):
            jobs.insert_unique(c, d, [new])
            if columns.get("state") in TERMINAL:
                columns.setdefault("finished_at", T0)
                columns["unique_lock"] = None
            if columns:
                d.execute(c, sa.update(JOB).where(JOB.c.id == id_).values(**columns))

        database.transaction_sync(run)
        return id_

    return put


@pytest.fixture
def sweep(database):
    """Run a change to its end; what it counted."""

    def run(change, /, *, limit=None, dry_run=False, **criteria):
        s = Sweep(change, JobFilter.of(criteria), limit=limit, dry_run=dry_run)
        while not database.transaction_sync(s.step):
            pass
        stranded = database.transaction_sync(turns.stranded)
        assert stranded == []
        return +s.tally

    return run


@pytest.fixture
def job(database):
    return lambda id_: database.transaction_sync(queries.require, id_)


@pytest.fixture
def clear_turns(database):
    """As if every turn had been taken and settled."""
    return lambda: database.transaction_sync(lambda c, d: d.run(c, "DELETE FROM {turn}"))


def at_states(add):
    return {state: add(state=state.value) for state in JobState}


# -- cancel, discard, delete -----------------------------------------------------------------------------------------


def test_cancel_ends_waiting_jobs_and_asks_running_ones(add, sweep, job):
    ids = at_states(add)
    running = job(ids[JobState.RUNNING])
    assert sweep(Cancel(), ids=ids.values()) == {"cancelled": 3, "requested": 1, "too_late": 3}
    for state in (JobState.BLOCKED, JobState.SCHEDULED, JobState.READY):
        after = job(ids[state])
        assert (after.state, after.version) == (JobState.CANCELLED, 2)
        assert after.finished_at is not None
    after = job(ids[JobState.RUNNING])
    assert (after.state, after.cancel_requested, after.version) == (JobState.RUNNING, True, running.version)
    assert job(ids[JobState.SUCCEEDED]).state == JobState.SUCCEEDED


def test_cancel_frees_the_unique_key(add, sweep, database):
    first = add(unique_key="u")
    sweep(Cancel(), ids=[first])
    second = add(unique_key="u")
    holder = database.transaction_sync(jobs.holder, "mail.send", "u")
    assert holder.id == second


def test_a_filter_without_states_means_those_that_can_be_changed(add, sweep):
    at_states(add)
    assert sweep(Cancel(), kind="mail.send", dry_run=True) == {"cancelled": 3, "requested": 1}
    assert sweep(Retry(), kind="mail.send", dry_run=True) == {"retried": 1}
    assert sweep(Retry(), state="succeeded", dry_run=True) == {"retried": 1}
    assert sweep(Discard(), dry_run=True) == {"discarded": 1}
    assert sweep(Delete(), dry_run=True) == {"deleted": 3}
    assert sweep(Edit(priority=1), dry_run=True) == {"edited": 3}


@pytest.mark.parametrize(
    ("change", "state", "says"),
    [
        (Cancel(), "dead", "dead jobs cannot be cancelled: blocked, ready, running, scheduled can"),
        (Retry(), "running", "running jobs cannot be retried: cancelled, dead, succeeded can"),
        (Delete(), "ready", "ready jobs cannot be deleted"),
    ],
)
def test_a_state_that_cannot_be_changed_is_refused(change, state, says):
    with pytest.raises(InvalidInput, match=says):
        Sweep(change, JobFilter.of({"state": state}))


def test_a_dry_run_writes_nothing(add, sweep, job):
    ids = at_states(add)
    before = {i: job(i) for i in ids.values()}
    for change in (Cancel(), Edit(priority=5, payload=None), Retry(), Discard(), Delete()):
        sweep(change, ids=ids.values(), dry_run=True)
    assert {i: job(i) for i in ids.values()} == before


def test_discard_keeps_error_and_history(add, sweep, job):
    ids = at_states(add)
    dead = add(state="dead", last_error="gone", last_error_kind="permanent")
    assert sweep(Discard(), ids=[*ids.values(), dead]) == {"discarded": 2, "not_dead": 6}
    assert (job(dead).state, job(dead).last_error) == (JobState.CANCELLED, "gone")


def test_delete_takes_the_history_along_and_leaves_what_is_not_over(add, sweep, database):
    ids = at_states(add)

    def history(c, d):
        for id_ in ids.values():
            row = {"job_id": id_, "execution": 1, "finished_at": T0, "decision": "retry", "charged": True}
            d.execute(c, sa.insert(queries.ATTEMPT).values(**row))

    database.transaction_sync(history)
    assert sweep(Delete(), ids=ids.values()) == {"deleted": 3, "not_finished": 4}
    left = database.transaction_sync(queries.page, JobFilter())
    assert {j.state for j in left} == set(JobState) - TERMINAL
    for state, id_ in ids.items():
        assert len(database.transaction_sync(queries.attempts, id_)) == (0 if state in TERMINAL else 1)


def test_a_limit_and_batches(add, sweep, monkeypatch):
    monkeypatch.setattr(changes, "BATCH", 3)
    for _ in range(8):
        add()
    assert sweep(Cancel(), limit=4) == {"cancelled": 4}
    assert sweep(Cancel(), limit=3) == {"cancelled": 3}
    assert sweep(Cancel()) == {"cancelled": 1}
    with pytest.raises(InvalidInput, match="limit=0"):
        sweep(Cancel(), limit=0)


# -- retry and replay ------------------------------------------------------------------------------------------------


def test_retry_gives_a_fresh_budget_and_a_turn(add, sweep, job, clear_turns, database):
    spent = {"attempts": 9, "executions": 12, "rescues": 3, "last_error": "boom", "cancel_requested": True}
    ids = [add(state=s, **spent) for s in ("dead", "cancelled", "succeeded")]
    waiting = add(state="scheduled", attempts=4)
    clear_turns()
    assert sweep(Retry(), ids=[*ids, waiting]) == {"retried": 3, "not_finished": 1}
    for id_ in ids:
        after = job(id_)
        assert (after.state, after.attempts, after.rescues, after.finished_at) == (JobState.READY, 0, 0, None)
        assert (after.executions, after.last_error, after.cancel_requested) == (12, "boom", False)
    assert job(waiting).attempts == 4
    assert [t.resource_key for t in database.transaction_sync(turns.take, turns.Selection(9))] == ["github/a"]


@pytest.mark.parametrize("mark", [{"sent": {"name": "charge"}}, {"last_error_kind": "ambiguous"}])
def test_an_unknown_outcome_is_not_repeated_blindly(add, sweep, job, mark):
    id_ = add(state="dead", **mark)
    assert sweep(Retry(), ids=[id_]) == {"ambiguous": 1}
    assert sweep(Retry()) == {"ambiguous": 1}
    assert job(id_).state == JobState.DEAD
    assert sweep(Retry(repeat_ambiguous=True), ids=[id_]) == {"retried": 1}
    assert (job(id_).state, job(id_).sent) == (JobState.READY, None)


@pytest.mark.parametrize("state", ["dead", "succeeded", "cancelled"])
def test_a_retry_keeps_the_idempotency_key(add, sweep, job, state):
    """A provider that did it already is to recognise it; only of an event that was published a broker is not to."""
    for key, kept in (("p/1", True), ("outbox/a", state != "succeeded"), ("outboxes/a", True)):
        id_ = add(state=state, resource_key=key)
        assert sweep(Retry(), ids=[id_])["retried"] == 1
        assert (job(id_).idempotency_key is None) is kept


def test_retry_as_a_new_operation_changes_the_idempotency_key(add, sweep, job):
    id_ = add(state="succeeded")
    sweep(Retry(), ids=[id_])
    assert job(id_).idempotency_key is None
    sweep(Cancel(), ids=[id_])
    sweep(Retry(new_operation=True), ids=[id_])
    first = job(id_).idempotency_key
    sweep(Cancel(), ids=[id_])
    sweep(Retry(new_operation=True), ids=[id_])
    assert None is not first != job(id_).idempotency_key is not None


def test_a_unique_key_held_by_another_job_is_not_taken(add, sweep, job, database):
    free, held = add(unique_key="free", state="dead"), add(unique_key="held", state="dead")
    twin = add(unique_key="free", state="dead")
    holder = add(unique_key="held")
    assert sweep(Retry()) == {"retried": 1, "duplicates": 2}
    assert [job(i).state for i in (free, held, twin)] == [JobState.READY, JobState.DEAD, JobState.DEAD]
    assert database.transaction_sync(jobs.holder, "mail.send", "free").id == free
    assert database.transaction_sync(jobs.holder, "mail.send", "held").id == holder


def test_a_passed_expiry_is_forgotten_a_coming_one_is_not(clock, add, sweep, job):
    passed, coming = T0 - timedelta(hours=1), T0 + timedelta(hours=1)
    ids = [add(state="dead", expires_at=e) for e in (passed, coming)]
    sweep(Retry(), ids=ids)
    assert [job(i).expires_at for i in ids] == [None, coming]


def test_replay_at_a_bounded_rate_is_spread_over_batches(clock, add, sweep, job, monkeypatch):
    monkeypatch.setattr(changes, "BATCH", 3)
    ids = [add(state="dead", attempts=5) for _ in range(7)]
    assert sweep(Retry(spacing=timedelta(seconds=0.5))) == {"retried": 7}
    after = [job(i) for i in ids]
    assert [(j.run_at - clock.now()).total_seconds() for j in after] == [0, 0.5, 1, 1.5, 2, 2.5, 3]
    assert [j.state for j in after] == [JobState.READY] + [JobState.SCHEDULED] * 6
    assert {(j.attempts, j.finished_at, j.version) for j in after} == {(0, None, 2)}


# -- edit ------------------------------------------------------------------------------------------------------------


def test_edit_writes_only_what_is_given(add, sweep, job):
    id_ = add(priority=3, tags={"user": "7"}, max_attempts=5)
    before = job(id_)
    assert sweep(Edit(max_attempts=None), ids=[id_]) == {"edited": 1}
    assert (job(id_).max_attempts, job(id_).tags, job(id_).priority) == (None, {"user": "7"}, 3)
    assert sweep(Edit(tags=None, payload={"n": 2}, payload_version=4, expires_at=T0), ids=[id_]) == {"edited": 1}
    after = job(id_)
    assert (after.tags, after.payload, after.payload_version, after.expires_at) == (None, {"n": 2}, 4, T0)
    assert (after.run_at, after.version, after.kind) == (before.run_at, 3, before.kind)
    sweep(Edit(payload=None, priority=-1), ids=[id_])
    assert (job(id_).payload, job(id_).priority) == (None, -1)


def test_edit_leaves_running_and_finished_jobs_alone_but_corrects_dead_ones(add, sweep, job):
    ids = at_states(add)
    counted = {"edited": 4, "running": 1, "too_late": 2}
    assert sweep(Edit(payload={"n": 9}), ids=ids.values()) == counted
    assert job(ids[JobState.DEAD]).payload == {"n": 9}
    assert job(ids[JobState.RUNNING]).payload == {"n": 1}
    assert sweep(Edit(run_at=T0), ids=[ids[JobState.DEAD]]) == {"too_late": 1}


@pytest.mark.parametrize("mark", [{"sent": {"name": "charge"}}, {"executions": 1}])
def test_a_payload_that_may_have_been_sent_is_only_replaced_as_a_new_operation(add, sweep, job, mark):
    id_ = add(**mark)
    assert sweep(Edit(payload={"n": 2}), ids=[id_]) == {"sent": 1}
    assert sweep(Edit(priority=2), ids=[id_]) == {"edited": 1}
    assert (job(id_).payload, job(id_).idempotency_key) == ({"n": 1}, None)
    assert sweep(Edit(payload={"n": 2}, new_operation=True), ids=[id_]) == {"edited": 1}
    assert (job(id_).payload, job(id_).sent) == ({"n": 2}, None)
    assert job(id_).idempotency_key is not None


def test_a_better_priority_brings_a_turn_of_that_priority(add, sweep, clear_turns, database):
    id_ = add()
    add(resource_key="github/b")
    sweep(Edit(priority=7), ids=[id_])
    assert [(t.resource_key, t.priority) for t in database.transaction_sync(turns.take, turns.Selection(1))] == [
        ("github/a", 7)
    ]


def test_edit_of_the_time_moves_between_ready_and_scheduled(clock, add, sweep, job, clear_turns, database):
    ids = {s: add(state=s.value, run_at=clock.now() + timedelta(hours=5)) for s in changes.WAITING}
    later, sooner = clock.now() + timedelta(hours=1), clock.now() - timedelta(hours=1)
    sweep(Edit(run_at=later), ids=ids.values())
    assert {s: job(i).state for s, i in ids.items()} == {
        JobState.BLOCKED: JobState.BLOCKED, JobState.SCHEDULED: JobState.SCHEDULED, JobState.READY: JobState.SCHEDULED
    }  # fmt: skip
    assert {job(i).run_at for i in ids.values()} == {later}
    clear_turns()
    sweep(Edit(run_at=sooner), ids=ids.values())
    assert {s: job(i).state for s, i in ids.items()} == {
        JobState.BLOCKED: JobState.BLOCKED, JobState.SCHEDULED: JobState.READY, JobState.READY: JobState.READY
    }  # fmt: skip
    assert job(ids[JobState.BLOCKED]).run_at == sooner
    assert len(database.transaction_sync(turns.take, turns.Selection(9))) == 1


@pytest.mark.parametrize("state", [JobState.SCHEDULED, JobState.READY])
def test_a_job_that_was_put_off_to_a_time_waits_for_no_gate_any_more(clock, add, sweep, job, database, state):
    """Else it would begin when that gate opens, and not when somebody said."""
    id_ = add(state=state.value, run_at=clock.now() + timedelta(seconds=30), waiting_for="crm/a")
    later = clock.now() + timedelta(hours=1)
    sweep(Edit(run_at=later), ids=[id_])
    assert database.transaction_sync(turns.hasten, "crm/a", 10, clock.now()) == 0
    assert (job(id_).state, job(id_).run_at, job(id_).waiting_for) == (JobState.SCHEDULED, later, None)


# -- against a worker ------------------------------------------------------------------------------------------------


def claim(c, d, id_, version):
    """What a claim writes, by its optimistic lock."""
    row = d.run(
        c,
        "UPDATE {job} SET state = 'running', version = version + 1 WHERE id = :id AND version = :version"
        " AND state = 'ready' RETURNING 1",
        {"id": d.id(id_), "version": version},
    ).first()
    return row is not None


@pytest.mark.parametrize("change", [Cancel(), Edit(priority=1), Edit(run_at=T0 + timedelta(days=1))])
def test_a_claim_that_saw_the_job_before_it_was_changed_loses(clock, add, sweep, job, database, change):
    id_ = add()
    seen = job(id_).version
    sweep(change, ids=[id_])
    assert database.transaction_sync(claim, id_, seen) is False


def test_a_job_that_was_claimed_between_the_look_and_the_lock(open_database, postgres_url):
    """Two connections: the claim commits while the sweep waits for its row lock."""
    mine, theirs = open_database(postgres_url), open_database(postgres_url)
    id_ = uuid.uuid7()
    mine.transaction_sync(jobs.insert, [jobs.NewJob(id_, "k", "github/a", "null")])
    held, claimed = threading.Event(), threading.Event()

    def worker(c, d):
        assert claim(c, d, id_, 1)
        held.set()
        assert claimed.wait(LIMIT)

    thread = threading.Thread(target=lambda: theirs.transaction_sync(worker))
    thread.start()
    assert held.wait(LIMIT)
    sweeps = [Sweep(Cancel(), JobFilter.of({"state": "ready"})), Sweep(Cancel(), JobFilter.of({"kind": "k"}))]
    threading.Timer(0.2, claimed.set).start()
    for s in sweeps:
        mine.transaction_sync(s.step)
    thread.join()
    # Only ready jobs were asked for, and it is none any more; the other sweep may ask the worker to stop.
    assert [+s.tally for s in sweeps] == [{}, {"requested": 1}]
    after = mine.transaction_sync(queries.require, id_)
    assert (after.state, after.cancel_requested, after.version) == (JobState.RUNNING, True, 2)


def test_retries_that_race_an_enqueue_for_a_unique_key_fail_only_for_that_job(open_database, postgres_url):
    mine, theirs = open_database(postgres_url), open_database(postgres_url)
    dead = [uuid.uuid7(), uuid.uuid7()]
    new = [jobs.NewJob(i, "k", "github/a", "null", unique_key=f"u{n}") for n, i in enumerate(dead)]

    def prepare(c, d):
        jobs.insert_unique(c, d, new)
        d.execute(c, sa.update(JOB).values(state="dead", finished_at=T0, unique_lock=None))

    mine.transaction_sync(prepare)
    inserted, go = threading.Event(), threading.Event()

    def enqueue(c, d):
        jobs.insert_unique(c, d, [jobs.NewJob(uuid.uuid7(), "k", "github/a", "null", unique_key="u0")])
        inserted.set()
        assert go.wait(LIMIT)

    thread = threading.Thread(target=lambda: theirs.transaction_sync(enqueue))
    thread.start()
    assert inserted.wait(LIMIT)
    threading.Timer(0.2, go.set).start()
    sweep = Sweep(Retry(), JobFilter.of({"state": "dead"}))
    mine.transaction_sync(sweep.step)
    thread.join()
    assert +sweep.tally == {"retried": 1, "duplicates": 1}
    assert [mine.transaction_sync(queries.require, i).state for i in dead] == [JobState.DEAD, JobState.READY]


def test_payloads_stay_json_whatever_they_hold(add, sweep, job):
    id_ = add()
    payload = {"text": "ü\u2028'\"", "deep": [1, None, {"x": 1.5}]}
    sweep(Edit(payload=payload), ids=[id_])
    assert json.loads(json.dumps(job(id_).payload)) == payload
