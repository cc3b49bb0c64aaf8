"""What becomes of a job: the table, every rule that wins over another, and what holds for anything at all."""

from datetime import UTC, datetime, timedelta, timezone

import pytest
import tenacity
from hypothesis import given
from hypothesis import strategies as st

from resilient.core.base.errors import UNCHARGED, Failure, FailureKind, Scope
from resilient.core.base.phrases import moment
from resilient.core.jobs.backoff import Decorrelated, Linear, Retry
from resilient.core.jobs.decide import decide
from resilient.core.jobs.outcomes import (
    SUCCEEDED,
    CancelledByHandler,
    Deferred,
    Expired,
    Failed,
    HandedBack,
    JobFacts,
    Reconciled,
    Rescued,
    Snoozed,
    Succeeded,
)
from resilient.core.jobs.states import TERMINAL, JobState, permitted

NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
RETRY = Retry(max_attempts=5, delay=Linear(step=10))
JOB = JobFacts(attempts=1, max_attempts=5, deferrals=2, rescues=1, resource_key="github/acct-7/search")
READY, SCHEDULED, DEAD = JobState.READY, JobState.SCHEDULED, JobState.DEAD
SUCCESS, CANCELLED = JobState.SUCCEEDED, JobState.CANCELLED


def in_(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def fail(kind: str, message: str = "boom", **rest) -> Failed:
    outcome = {k: rest.pop(k) for k in ("traceback", "repeatable", "resource") if k in rest}
    return Failed(Failure(FailureKind(kind), **rest), message, **outcome)


def step(outcome, job=JOB, retry=RETRY, roll=0.5, **facts):
    return decide(job._replace(**facts), outcome, retry, NOW, roll)


# -- the table -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "state", "decision", "run_at", "attempts", "deferrals", "rescues"),
    [
        (SUCCEEDED, SUCCESS, "succeeded", None, 1, 2, 1),
        (fail("throttled"), READY, "defer", None, 1, 3, 1),
        (fail("throttled", retry_in=90.0), READY, "defer", None, 1, 3, 1),
        (fail("quota", retry_at=in_(7200)), READY, "defer", None, 1, 3, 1),
        (fail("auth"), READY, "defer", None, 1, 3, 1),
        (fail("transient"), SCHEDULED, "retry", in_(20), 2, 2, 1),
        (fail("bug"), SCHEDULED, "retry", in_(20), 2, 2, 1),
        (fail("timeout"), SCHEDULED, "retry", in_(20), 2, 2, 1),
        (fail("conflict"), SCHEDULED, "retry", in_(0.625), 2, 2, 1),
        (fail("ambiguous", repeatable=True), SCHEDULED, "retry", in_(20), 2, 2, 1),
        (fail("ambiguous"), DEAD, "dead", None, 2, 2, 1),
        (fail("permanent"), DEAD, "dead", None, 2, 2, 1),
        (fail("undecodable"), DEAD, "dead", None, 1, 2, 1),
        (fail("expired"), DEAD, "dead", None, 1, 2, 1),
        (fail("lost_worker"), DEAD, "dead", None, 1, 2, 1),
        (fail("reset_cursor"), READY, "reset_cursor", None, 1, 3, 1),
        (Deferred("github", "breaker", None, "open"), READY, "defer", None, 1, 3, 1),
        (Deferred("github/acct-7", "limit", in_(30), "spent"), READY, "defer", None, 1, 3, 1),
        (Snoozed(delay=60), SCHEDULED, "snooze", in_(60), 1, 3, 1),
        (Snoozed(delay=timedelta(hours=1)), SCHEDULED, "snooze", in_(3600), 1, 3, 1),
        (Snoozed(until=in_(5)), SCHEDULED, "snooze", in_(5), 1, 3, 1),
        (Snoozed(), SCHEDULED, "snooze", in_(30), 1, 3, 1),  # the policy's delay for the third deferral
        (Snoozed(delay=0), READY, "snooze", NOW, 1, 3, 1),
        (Snoozed(delay=-5), READY, "snooze", NOW, 1, 3, 1),
        (Snoozed(until=in_(-5)), READY, "snooze", NOW, 1, 3, 1),
        (Snoozed(delay=float("nan")), SCHEDULED, "snooze", in_(30), 1, 3, 1),
        (HandedBack("its worker stopped"), READY, "handed_back", None, 1, 2, 1),
        (Rescued(), READY, "rescued", None, 1, 2, 2),
        (CancelledByHandler("no longer wanted"), CANCELLED, "cancelled", None, 1, 2, 1),
        (Expired(), DEAD, "expired", None, 1, 2, 1),
        (Reconciled(took_effect=True), SUCCESS, "succeeded", None, 1, 2, 1),
        (Reconciled(took_effect=False), READY, "reconciled", None, 1, 2, 1),
        (Reconciled(took_effect=None), DEAD, "dead", None, 2, 2, 1),
    ],
)
def test_table(outcome, state, decision, run_at, attempts, deferrals, rescues):
    t = step(outcome)
    assert (t.state, t.decision, t.run_at) == (state, decision, run_at)
    assert (t.attempts, t.deferrals, t.rescues) == (attempts, deferrals, rescues)
    assert t.charged == (attempts == 2)


def test_what_went_wrong_is_kept():
    outcome = fail("transient", "down", code="http_503", status=503, traceback="Trace")
    t = step(outcome)
    assert (t.error, t.error_kind, t.error_code, t.status) == ("down", FailureKind.TRANSIENT, "http_503", 503)
    assert (t.traceback, t.resource_key, t.waiting_for) == ("Trace", "github/acct-7", None)
    assert step(fail("permanent", "x" * 10_000)).error == "x" * 8_000
    assert step(fail("permanent", "")).error == "permanent"  # never nothing
    assert step(fail("transient", "")).error == "transient"


def test_a_success_carries_its_result_and_clears_the_mark():
    t = step(Succeeded('{"n": 1}'), sent=True)
    assert (t.state, t.result, t.clear_sent, t.error) == (SUCCESS, '{"n": 1}', True, None)
    assert not step(fail("transient")).clear_sent


# -- waiting for a resource ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scope", "resource"),
    [(Scope.ENDPOINT, "github/acct-7/search"), (Scope.ACCOUNT, "github/acct-7"), (Scope.PROVIDER, "github")],
)
def test_a_throttled_job_waits_for_the_resource_it_names(scope, resource):
    t = step(fail("throttled", scope=scope))
    assert (t.state, t.waiting_for, t.resource_key, t.run_at) == (READY, resource, resource, None)


def test_a_deferral_waits_for_what_stopped_it():
    t = step(Deferred("github", "breaker", None, "resource 'github' is stopped"))
    assert (t.waiting_for, t.resource_key, t.error) == ("github", "github", "resource 'github' is stopped")
    assert t.error_kind is None


def test_a_job_whose_handler_was_not_called_was_not_executed():
    """Whatever becomes of it, and whatever was in the way: a gate, a payload of a newer version, a worker's end."""
    for facts in ({}, {"cancel_requested": True}, {"expires_at": NOW}, {"sent": True}):
        for outcome in (Deferred("github", "cooldown", in_(9)), Snoozed(60), HandedBack("stopped"), fail("bug")):
            for called in (True, False):
                t = step(outcome, called=called, **facts)
                assert [one.unbegun for one in t.choices()] == [not called] * len(t.choices())


@pytest.mark.parametrize("resource", ["other/acct", "github/acct-7/search/deep", "github/acct-70"])
@pytest.mark.parametrize(
    ("until", "expected"),
    [(in_(100), in_(106)), (None, in_(45)), (in_(-5), in_(45))],
    ids=["told", "open end", "past"],
)
def test_a_resource_off_the_jobs_path_gates_no_claim_so_the_job_is_scheduled(resource, until, expected):
    """Ready, it would be claimed at once, be refused again, and so on without end."""
    t = step(Deferred(resource, "cooldown", until))
    assert (t.state, t.decision, t.waiting_for, t.run_at) == (SCHEDULED, "defer", resource, expected)
    t = step(fail("throttled", resource=resource, retry_at=until))
    assert (t.state, t.decision, t.waiting_for, t.run_at) == (SCHEDULED, "defer", resource, expected)
    assert (t.attempts, t.deferrals) == (1, 3)


# -- attempts --------------------------------------------------------------------------------------


def test_out_of_attempts():
    assert step(fail("transient"), attempts=3).state is SCHEDULED
    t = step(fail("transient", "down", code="http_503"), attempts=4)
    assert (t.state, t.decision, t.attempts, t.charged) == (DEAD, "dead", 5, True)
    assert t.error == "down (attempt 5 of 5)"
    assert (t.error_kind, t.error_code, t.run_at) == (FailureKind.TRANSIENT, "http_503", None)
    assert step(fail("transient"), attempts=9).state is DEAD


def test_without_end_a_job_is_tried_for_ever():
    for attempts in (5, 1000, 10**9):
        t = step(fail("bug"), attempts=attempts, max_attempts=None, retry=Retry(max_attempts=None))
        assert (t.state, t.attempts) == (SCHEDULED, attempts + 1)


def test_a_kind_may_have_its_own_limit_and_delay():
    retry = Retry(5, Linear(step=10), by_kind={"bug": Retry(max_attempts=2, delay=99)})
    assert step(fail("bug"), attempts=0, retry=retry).run_at == in_(99)
    assert step(fail("bug"), attempts=1, retry=retry).state is DEAD
    assert step(fail("transient"), attempts=1, retry=retry).run_at == in_(20)


def test_waiting_never_costs_an_attempt():
    for outcome in (
        fail("throttled"),
        fail("quota"),
        fail("auth"),
        Deferred("github"),
        Snoozed(1),
        HandedBack(),
        Rescued(),
    ):
        t = step(outcome, attempts=4)
        assert (t.attempts, t.charged) == (4, False), outcome
        assert t.state not in TERMINAL


def test_what_the_provider_told_is_a_floor():
    assert step(fail("transient", retry_in=5.0)).run_at == in_(20)
    assert step(fail("transient", retry_in=100.0)).run_at == in_(106)  # +1 s, + half of 10 %
    assert step(fail("transient", retry_at=in_(100)), roll=0.0).run_at == in_(101)
    assert step(fail("transient", retry_at=in_(-100))).run_at == in_(20)
    assert step(fail("transient", retry_in=-1.0)).run_at == in_(20)
    assert step(fail("transient", retry_in=float("nan"))).run_at == in_(20)


def test_a_delay_of_zero_is_ready_at_the_back_of_the_line():
    t = step(fail("transient"), retry=Retry(5, 0))
    assert (t.state, t.run_at, t.attempts) == (READY, NOW, 2)


@pytest.mark.parametrize("delay", [lambda _: 1 / 0, lambda _: "soon", tenacity.wait_exception(lambda _: {}["x"])])
def test_a_delay_function_that_fails_does_not_lose_the_job(delay):
    t = step(fail("transient", "down"), retry=Retry(5, delay))
    assert (t.state, t.run_at) == (SCHEDULED, in_(1.25))
    assert t.error.startswith("down (its delay function failed, the default is used: ")
    assert step(Snoozed(), retry=Retry(5, delay)).state is SCHEDULED


def test_a_delay_function_is_called_once_for_a_decision():
    calls = []

    def delay(_):
        calls.append(1)
        return 5.0

    t = step(fail("transient"), retry=Retry(5, delay), safe_until=in_(1), can_reconcile=True)
    assert (t.decision, t.run_at, calls) == ("reconcile", in_(5), [1])


def test_a_timeout_is_charged_unless_it_checkpointed():
    assert step(fail("timeout"), checkpointed=False).charged
    t = step(fail("timeout"), checkpointed=True, attempts=4)
    assert (t.state, t.decision, t.charged, t.run_at) == (READY, "slice", False, NOW)  # back of the line
    assert (t.attempts, t.deferrals) == (4, 3)


# -- lost workers ----------------------------------------------------------------------------------


def test_the_third_rescue_is_the_last():
    assert step(Rescued(), rescues=1).state is READY
    t = step(Rescued("worker w1 was lost"), rescues=2)
    assert (t.state, t.error_kind, t.rescues) == (DEAD, FailureKind.LOST_WORKER, 3)
    assert t.error == "worker w1 was lost; 3 workers were lost while they ran it"
    assert (t.attempts, t.charged) == (1, False)
    assert step(Rescued(), rescues=2, retry=Retry(max_rescues=4)).state is READY
    alone = step(Rescued("w was lost"), rescues=0, retry=Retry(max_rescues=1))
    assert (alone.state, alone.error) == (DEAD, "w was lost; 1 worker was lost while it ran it")


# -- requests in doubt -----------------------------------------------------------------------------

GOING_ON = [
    *[
        fail(kind)
        for kind in (
            "transient",
            "bug",
            "timeout",
            "conflict",
            "ambiguous",
            "throttled",
            "auth",
            "reset_cursor",
        )
    ],
    fail("ambiguous", repeatable=True),
    Deferred("github"),
    Snoozed(5),
    HandedBack("its worker stopped"),
    Rescued(),
]


@pytest.mark.parametrize("outcome", GOING_ON)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_an_unanswered_request_is_never_blindly_repeated(outcome, checkpointed):
    t = step(outcome, sent=True, checkpointed=checkpointed)
    assert (t.state, t.decision, t.error_kind) == (DEAD, "dead", FailureKind.AMBIGUOUS)
    assert t.error.startswith("unknown outcome: a request may have been received")
    assert not t.clear_sent


@pytest.mark.parametrize("outcome", GOING_ON)
def test_with_a_reconcile_hook_the_mark_stands_until_it_is_looked_up(outcome):
    t = step(outcome, sent=True, can_reconcile=True)
    assert t.state in (READY, SCHEDULED)
    assert not t.clear_sent
    assert not t.set_mark


def test_reconciling_is_scheduled_and_charged():
    t = step(fail("transient", "connection reset", code="read_error"), sent=True, can_reconcile=True)
    assert (t.state, t.decision, t.run_at, t.attempts) == (SCHEDULED, "reconcile", in_(20), 2)
    assert (t.error, t.error_code) == ("unknown outcome, will be looked up: connection reset", "read_error")
    assert t.error_kind is FailureKind.AMBIGUOUS


def test_an_ambiguous_failure_without_a_mark_asks_for_one():
    t = step(fail("ambiguous"), sent=False, can_reconcile=True)
    assert (t.decision, t.set_mark) == ("reconcile", True)


def test_one_look_beyond_the_last_attempt_and_no_more():
    assert step(fail("ambiguous"), attempts=4, can_reconcile=True).decision == "reconcile"
    assert step(fail("transient"), attempts=5, sent=True, can_reconcile=True).state is DEAD


def test_a_rescue_with_a_mark_reconciles_uncharged():
    t = step(Rescued(), sent=True, can_reconcile=True)
    assert (t.state, t.decision, t.charged, t.rescues) == (READY, "reconcile", False, 2)
    t = step(Rescued(), sent=True)
    assert (t.state, t.error_kind, t.charged, t.rescues) == (DEAD, FailureKind.AMBIGUOUS, False, 2)


def test_a_key_makes_an_ambiguous_request_repeatable_but_not_another_unanswered_one():
    assert step(fail("ambiguous", repeatable=True)).decision == "retry"
    assert step(fail("ambiguous", repeatable=True), sent=True).state is DEAD


def test_other_ways_to_die_mention_the_request_in_doubt():
    t = step(fail("permanent", "gone"), sent=True)
    assert (t.error_kind, t.error) == (
        FailureKind.PERMANENT,
        "gone; another request of this job may have been received",
    )


def test_a_cancelled_job_with_a_mark_is_shown_to_a_person():
    for outcome in (*GOING_ON, CancelledByHandler("cancelled on request")):
        if outcome == fail("ambiguous", repeatable=True):
            continue
        t = step(outcome, sent=True, can_reconcile=True, cancel_requested=True)
        assert (t.state, t.error_kind) == (DEAD, FailureKind.AMBIGUOUS), outcome
    assert step(CancelledByHandler(), sent=True).state is CANCELLED  # its own word, not a request


def test_reconciled():
    job = {"sent": True, "can_reconcile": True}
    done = step(Reconciled(took_effect=True), **job)
    assert (done.state, done.clear_sent) == (SUCCESS, True)
    again = step(Reconciled(took_effect=False), **job)
    assert (again.state, again.clear_sent, again.charged) == (READY, True, False)
    nobody = step(Reconciled(took_effect=None), **job)
    assert (nobody.state, nobody.error_kind, nobody.clear_sent) == (DEAD, FailureKind.AMBIGUOUS, False)
    assert step(Reconciled(took_effect=False), cancel_requested=True, **job).state is CANCELLED


# -- cancel, expiry, once more ---------------------------------------------------------------------


def test_a_cancel_wins_over_going_on_but_not_over_an_end():
    for outcome in GOING_ON:
        t = step(outcome, cancel_requested=True)
        if outcome == fail("ambiguous"):
            assert t.state is DEAD
        else:
            assert (t.state, t.decision, t.run_at, t.waiting_for) == (CANCELLED, "cancelled", None, None), outcome
    assert step(SUCCEEDED, cancel_requested=True).state is SUCCESS
    assert step(fail("permanent"), cancel_requested=True).state is DEAD
    assert step(fail("bug"), cancel_requested=True, attempts=4).state is DEAD
    charged = step(fail("transient", "down"), cancel_requested=True)
    assert (charged.attempts, charged.error) == (2, "down")


@pytest.mark.parametrize(
    ("outcome", "expires_in", "dead"),
    [
        (fail("transient"), 21, False),
        (fail("transient"), 20, True),
        (fail("transient", retry_in=100.0), 105, True),
        (fail("throttled"), 1, False),
        (fail("throttled", retry_in=100.0), 101, False),
        (fail("throttled", retry_in=100.0), 100, True),  # it certainly cannot run in time
        (Deferred("github", "cooldown", in_(100)), 99, True),
        (Deferred("github", "breaker", in_(100)), 99, False),  # may be opened by hand
        (Snoozed(60), 60, True),
        (Snoozed(60), 61, False),
        (HandedBack(), 1, False),
        (HandedBack(), 0, True),
        (Rescued(), -1, True),
        (fail("reset_cursor"), -1, True),
        (Reconciled(took_effect=False), -1, True),
    ],
)
def test_what_cannot_run_before_its_expiry_is_dead_at_once(outcome, expires_in, dead):
    t = step(outcome, expires_at=in_(expires_in))
    assert (t.state is DEAD) == dead
    if dead:
        assert (t.decision, t.error_kind, t.run_at) == ("expired", FailureKind.EXPIRED, None)
        assert t.error.startswith(f"expires at {moment(in_(expires_in))}, could not run before ")


def test_an_expiry_says_what_went_wrong_last():
    for broken_off in (fail("timeout"), Rescued("lost"), HandedBack("stopped", interrupted=True)):
        t = step(broken_off, expires_at=in_(0))
        assert (t.error_kind, t.error_code) == (FailureKind.EXPIRED, "interrupted")
    t = step(fail("transient", "down"), expires_at=in_(5))
    assert t.error == f"expires at {moment(in_(5))}, could not run before {moment(in_(20))}; down"
    assert (t.attempts, t.charged) == (2, True)
    assert step(Expired("too late"), expires_at=in_(-5)).error.endswith("; too late")
    assert step(Expired("too late"), expires_at=in_(-5)).error_code is None
    assert step(Expired()).error == "expired"


def test_an_expiry_never_hides_a_request_in_doubt():
    for expires_in in (5, 20):  # the look would be at 20
        t = step(fail("transient"), sent=True, can_reconcile=True, expires_at=in_(expires_in))
        assert (t.state, t.error_kind) == (DEAD, FailureKind.AMBIGUOUS)
    assert step(fail("transient"), sent=True, can_reconcile=True, expires_at=in_(21)).decision == "reconcile"


def test_once_more():
    t = step(Succeeded("1"), once_more=True, attempts=4, rescues=2)
    assert (t.state, t.decision, t.run_at, t.result) == (READY, "once_more", NOW, "1")
    assert (t.attempts, t.rescues, t.clear_sent, t.charged) == (0, 0, True, False)
    assert step(SUCCEEDED, once_more=True, cancel_requested=True).state is SUCCESS
    dead = step(fail("permanent"), once_more=True)
    assert (dead.state, dead.decision, dead.run_at, dead.attempts) == (READY, "dead", NOW, 0)
    assert step(fail("permanent"), once_more=True, cancel_requested=True).state is DEAD
    assert step(CancelledByHandler(), once_more=True).state is READY
    assert step(CancelledByHandler(), once_more=True, cancel_requested=True).state is CANCELLED
    assert step(fail("ambiguous"), once_more=True).state is DEAD
    assert step(fail("permanent"), once_more=True, safe_until=in_(60)).state is DEAD  # a request is unanswered
    lost = step(Rescued("its worker is gone"), once_more=True, rescues=1, expires_at=in_(-1))
    assert (lost.state, lost.decision, lost.rescues) == (READY, "expired", 1)  # that worker can tell it from a success


def test_a_policy_is_asked_once_for_each_decision():
    calls = []
    decide(JOB, fail("transient"), Retry(delay=lambda n: calls.append(n) or 5.0), NOW, 0.5)
    assert len(calls) == 1


# -- anything at all -------------------------------------------------------------------------------

SPAN = (datetime(2026, 1, 1), datetime(2027, 1, 1))  # noqa: DTZ001 - Hypothesis adds the zone
TIMES = st.datetimes(*SPAN)
WHEN = (
    st.none()
    | TIMES
    | TIMES.map(lambda t: t.replace(tzinfo=UTC))
    | TIMES.map(lambda t: t.replace(tzinfo=timezone(timedelta(hours=5, minutes=30))))
)
SECONDS = st.none() | st.floats()
KEYS = st.sampled_from(["", "a", "a/b", "a/b/c", "x/y"])
JOBS = st.builds(
    JobFacts,
    attempts=st.integers(0, 20),
    max_attempts=st.none() | st.integers(1, 20),
    deferrals=st.integers(0, 50),
    rescues=st.integers(0, 4),
    expires_at=st.none() | TIMES.map(lambda t: t.replace(tzinfo=UTC)),
    sent=st.booleans(),
    cancel_requested=st.booleans(),
    once_more=st.booleans(),
    resource_key=KEYS,
    can_reconcile=st.booleans(),
    checkpointed=st.booleans(),
)
FAILURES = st.builds(
    Failure,
    kind=st.sampled_from(FailureKind),
    scope=st.sampled_from(Scope),
    retry_at=WHEN,
    retry_in=SECONDS,
    code=st.none() | st.text(max_size=5),
)
TEXT = st.text(max_size=10)
OUTCOMES = st.one_of(
    st.builds(Succeeded, st.none() | TEXT),
    st.builds(Failed, FAILURES, TEXT, st.none() | TEXT, st.booleans(), st.none() | KEYS),
    st.builds(Deferred, KEYS, st.sampled_from(["breaker", "cooldown", "limit", "auth"]), WHEN, TEXT),
    st.builds(Snoozed, SECONDS | st.timedeltas(), WHEN, TEXT),
    st.builds(CancelledByHandler, TEXT),
    st.builds(HandedBack, TEXT),
    st.builds(Rescued, TEXT),
    st.builds(Reconciled, st.none() | st.booleans()),
    st.builds(Expired, TEXT),
)
RETRIES = st.builds(
    Retry,
    st.none() | st.integers(1, 20),
    st.sampled_from([Linear(), Decorrelated(), 0, 7, lambda n: n, lambda _: 1 / 0, lambda _: float("inf")]),
    by_kind=st.sampled_from([None, {"bug": Retry(2)}, {"transient": Retry(None)}]),
    max_rescues=st.integers(1, 4),
)
ROLLS = st.floats(0, 1, exclude_max=True)


@given(JOBS, OUTCOMES, RETRIES, ROLLS)
def test_every_step_is_permitted_and_consistent(job, outcome, retry, roll):
    t = decide(job, outcome, retry, NOW, roll)
    assert permitted(JobState.RUNNING, t.state)
    if not t.fresh_key:
        assert t.attempts == job.attempts + t.charged
        assert 0 <= t.rescues - job.rescues <= 1
    assert 0 <= t.deferrals - job.deferrals <= 1
    if t.state in TERMINAL:
        assert t.run_at is None
        assert t.waiting_for is None
    else:
        assert not job.cancel_requested
        assert (
            job.expires_at is None
            or isinstance(outcome, Succeeded | Reconciled)
            or t.fresh_key
            or (t.run_at or NOW) < job.expires_at
        )
    if t.state is SCHEDULED:
        assert t.run_at > NOW
    if t.state is DEAD:
        assert t.error_kind is not None
        assert t.error
    if isinstance(outcome, Failed) and outcome.failure.kind in UNCHARGED and t.error_kind is not FailureKind.AMBIGUOUS:
        assert not t.charged


def differing(step, instead):
    """The fields that are written and differ."""
    names = {name for name in step._fields if not name.startswith("if_")}
    return {name for name in names if instead is not None and getattr(step, name) != getattr(instead, name)}


@given(JOBS, OUTCOMES, RETRIES, ROLLS)
def test_what_is_written_instead_is_what_had_been_decided_on_hearing_of_it(job, outcome, retry, roll):
    job = job._replace(cancel_requested=False, once_more=False)
    t = decide(job, outcome, retry, NOW, roll)
    cancelled = decide(job._replace(cancel_requested=True), outcome, retry, NOW, roll)
    again = decide(job._replace(once_more=True), outcome, retry, NOW, roll)
    both = decide(job._replace(cancel_requested=True, once_more=True), outcome, retry, NOW, roll)
    assert t.if_cancelled == (None if cancelled.state == t.state else cancelled)
    assert t.if_once_more == (None if again.state == t.state else again._replace(if_cancelled=None))
    assert both == cancelled
    assert differing(t, t.if_cancelled).isdisjoint({"clear_error", "fresh_key", "result"})
    assert differing(t, t.if_once_more) <= {
        "state", "decision", "run_at", "attempts", "rescues", "fresh_key", "clear_sent"
    }  # fmt: skip
    assert len({one.state for one in t.choices()}) == len(t.choices())  # so that the state says which was written
    assert all(permitted(JobState.RUNNING, one.state) for one in t.choices())


@given(JOBS, OUTCOMES, RETRIES, ROLLS)
def test_a_request_in_doubt_is_never_run_again_without_looking(job, outcome, retry, roll):
    t = decide(job._replace(sent=True), outcome, retry, NOW, roll)
    if t.state not in TERMINAL:
        looked_up = isinstance(outcome, Succeeded | Reconciled)
        assert t.clear_sent == looked_up
        assert looked_up or job.can_reconcile


@given(JOBS, FAILURES, RETRIES, ROLLS)
def test_no_try_is_earlier_than_told(job, failure, retry, roll):
    t = decide(job, Failed(failure), retry, NOW, roll)
    told = failure.retry_at
    if told is not None and t.state is SCHEDULED:
        assert t.run_at > (told if told.tzinfo else told.replace(tzinfo=UTC))


@given(JOBS, st.sampled_from(["transient", "bug", "timeout", "conflict"]), ROLLS)
def test_a_failing_job_ends_after_exactly_its_attempts(job, kind, roll):
    retry = Retry(max_attempts=job.max_attempts)
    job = job._replace(
        attempts=0, sent=False, cancel_requested=False, expires_at=None, checkpointed=False, once_more=False
    )
    for n in range(1, 25):
        t = decide(job, fail(kind), retry, NOW, roll)
        assert t.attempts == n
        if job.max_attempts is not None and n == job.max_attempts:
            assert t.state is DEAD
            return
        assert t.state in (SCHEDULED, READY)
        job = job._replace(attempts=t.attempts)
    assert job.max_attempts is None


@pytest.mark.parametrize("kind", ["auth", "reset_cursor"])
def test_credentials_and_cursors_that_are_refused_again_and_again_are_not_tried_at_full_pace(kind):
    """No gate shut: each refusal was about another token, or the handler resets no cursor. It backs off, uncharged."""
    assert step(fail(kind), deferrals=2).state == READY
    pauses = []
    for deferrals in (3, 4, 5, 12, 500):
        found = step(fail(kind), deferrals=deferrals, roll=0.0)
        assert (found.state, found.charged, found.attempts) == (SCHEDULED, False, 1)
        pauses.append((found.run_at - NOW).total_seconds())
    assert pauses == [1, 2, 4, 60, 60]
