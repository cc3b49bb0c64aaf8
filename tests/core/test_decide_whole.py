"""Whole transitions, field by field: what a step leaves as it was, and what the history says of it."""

from datetime import timedelta, timezone

import pytest
import tenacity

from resilient.core.base.errors import FailureKind
from resilient.core.jobs.backoff import FullJitter, Retry
from resilient.core.jobs.outcomes import (
    CancelledByHandler,
    Deferred,
    HandedBack,
    Reconciled,
    Rescued,
    Snoozed,
    Transition,
    share_of_key,
)
from resilient.core.jobs.states import JobState
from tests.core.test_decide import CANCELLED, DEAD, READY, SCHEDULED, SUCCESS, fail, in_, step

DOUBT = "unknown outcome: a request may have been received, and is not repeated blindly; "
LATE = "its key is safe to repeat until 2026-03-01 12:00:20 UTC, and the next try would come later; boom"
ACCOUNT, LOST = "github/acct-7", Rescued("w was lost")


def whole(state, decision, **changed):
    """A transition that leaves the job's counters, but for what is changed."""
    kind = changed.pop("kind", None)
    counters = {"attempts": 1, "deferrals": 2, "rescues": 1, "charged": False}
    return Transition(
        JobState(state), decision, error_kind=None if kind is None else FailureKind(kind), **{**counters, **changed}
    )


def charged(state, decision, **changed):
    return whole(state, decision, **{"charged": True, "attempts": 2, **changed})


@pytest.mark.parametrize(
    ("outcome", "facts", "transition"),
    [
        (
            fail("transient", code="E1", status=503), {"attempts": 4},
            charged(DEAD, "dead", attempts=5, error="boom (attempt 5 of 5)", kind="transient", error_code="E1",
                    status=503, resource_key=ACCOUNT),
        ),
        (
            fail("transient", code="E1"), {},
            charged(SCHEDULED, "retry", run_at=in_(20), error="boom", kind="transient", error_code="E1",
                    resource_key=ACCOUNT),
        ),
        (
            fail("transient", code="E1"), {"safe_until": in_(20.001)},
            charged(SCHEDULED, "retry", run_at=in_(20), error="boom", kind="transient", error_code="E1",
                    resource_key=ACCOUNT),
        ),
        (
            fail("transient", code="E1"), {"safe_until": in_(20)},
            charged(DEAD, "dead", error=DOUBT + LATE, kind="ambiguous", error_code="E1", resource_key=ACCOUNT),
        ),
        (
            fail("transient", code="E1"), {"safe_until": in_(20), "can_reconcile": True},
            charged(SCHEDULED, "reconcile", run_at=in_(20), error="unknown outcome, will be looked up: " + LATE,
                    kind="ambiguous", error_code="E1", resource_key=ACCOUNT, set_mark=True),
        ),
        (
            fail("ambiguous"), {"sent": True, "can_reconcile": True},
            charged(SCHEDULED, "reconcile", run_at=in_(20), error="unknown outcome, will be looked up: boom",
                    kind="ambiguous", resource_key=ACCOUNT),
        ),
        (
            fail("transient"), {"attempts": 4, "safe_until": in_(50)},
            charged(DEAD, "dead", attempts=5, kind="transient", resource_key=ACCOUNT,
                    error="boom (attempt 5 of 5); another request of this job may have been received"),
        ),
        (LOST, {}, whole(READY, "rescued", rescues=2, error="w was lost", kind="lost_worker")),
        (LOST, {"sent": True, "can_reconcile": True},
         whole(READY, "reconcile", rescues=2, error="w was lost", kind="lost_worker")),
        (LOST, {"sent": True}, whole(DEAD, "dead", rescues=2, error=DOUBT + "w was lost", kind="ambiguous")),
        (LOST, {"cancel_requested": True},
         whole(CANCELLED, "cancelled", rescues=2, error="w was lost", kind="lost_worker")),
        (CancelledByHandler("why"), {}, whole(CANCELLED, "cancelled", error="why")),
        (CancelledByHandler("why", interrupted=True), {},
         whole(CANCELLED, "cancelled", error="why", error_code="interrupted")),
        (CancelledByHandler("why"), {"sent": True}, whole(CANCELLED, "cancelled", error="why")),
        (CancelledByHandler("why"), {"sent": True, "cancel_requested": True},
         charged(DEAD, "dead", error=DOUBT + "why", kind="ambiguous")),
        (Reconciled(took_effect=None), {"sent": True},
         charged(DEAD, "dead", error=DOUBT + "its reconcile hook cannot tell", kind="ambiguous")),
        (Reconciled(took_effect=True), {"sent": True},
         whole(SUCCESS, "succeeded", clear_sent=True, clear_error=True)),
        (Reconciled(took_effect=False), {"sent": True}, whole(READY, "reconciled", clear_sent=True)),
        (HandedBack("it stops"), {}, whole(READY, "handed_back", error="it stops")),
        (HandedBack(), {}, whole(READY, "handed_back")),
        (HandedBack("it stops", interrupted=True), {},
         whole(READY, "handed_back", error="it stops", error_code="interrupted")),
        *(
            (outcome, {"sent": True}, charged(DEAD, "dead", error=DOUBT + why, kind="ambiguous"))
            for outcome, why in (
                (HandedBack("it stops"), "it stops"), (HandedBack(), "handed_back"), (Deferred("github"), "defer"),
                (Snoozed(5), "snooze"),
            )
        ),
        (fail("throttled", code="E1"), {"sent": True},
         charged(DEAD, "dead", error=DOUBT + "boom", kind="ambiguous", error_code="E1", resource_key=ACCOUNT)),
        (fail("timeout", code="E1"), {"checkpointed": True},
         whole(READY, "slice", deferrals=3, run_at=in_(0), error="boom", kind="timeout", error_code="E1",
               resource_key=ACCOUNT)),
        (Snoozed(5, message="later", kind=FailureKind.AUTH, code="E1"), {},
         whole(SCHEDULED, "snooze", deferrals=3, run_at=in_(5), error="later", kind="auth", error_code="E1")),
        (Deferred("github", "cooldown", in_(100), "rests"), {"expires_at": in_(60)},
         whole(DEAD, "expired", deferrals=3, kind="expired", resource_key="github",
               error="expires at 2026-03-01 12:01:00 UTC, could not run before 2026-03-01 12:01:40 UTC; rests")),
        (fail("database"), {},
         whole(SCHEDULED, "defer", deferrals=3, run_at=in_(3.75), error="boom", kind="database")),
        (fail("throttled", code="E1"), {"deferrals": 20},
         whole(READY, "defer", deferrals=21, error="boom", kind="throttled", error_code="E1", waiting_for=ACCOUNT,
               resource_key=ACCOUNT)),
        (fail("auth"), {},
         whole(READY, "defer", deferrals=3, error="boom", kind="auth", waiting_for=ACCOUNT, resource_key=ACCOUNT)),
        *(
            (fail("auth"), {"deferrals": before},
             whole(SCHEDULED, "defer", deferrals=before + 1, run_at=in_(pause), error="boom", kind="auth",
                   waiting_for=ACCOUNT, resource_key=ACCOUNT))
            for before, pause in ((3, 0.75), (4, 1.5), (8, 24), (9, 45), (13, 45), (2_000, 45))
        ),
        (fail("reset_cursor"), {"deferrals": 5},
         whole(SCHEDULED, "reset_cursor", deferrals=6, run_at=in_(3), error="boom", kind="reset_cursor",
               resource_key=ACCOUNT)),
    ],
)  # fmt: skip
def test_a_step_is_this_and_nothing_else(outcome, facts, transition):
    assert step(outcome, **facts)._replace(if_cancelled=None, if_once_more=None) == transition


def test_who_lost_too_many_workers_is_dead_and_may_be_enqueued_again():
    dead = step(LOST, retry=Retry(max_rescues=2))
    text = "w was lost; 2 workers were lost while they ran it"
    assert dead._replace(if_once_more=None) == whole(DEAD, "dead", rescues=2, error=text, kind="lost_worker")
    again = whole(READY, "dead", attempts=0, rescues=1, run_at=in_(0), error=text, kind="lost_worker", fresh_key=True,
                  clear_sent=True)  # fmt: skip
    assert dead.if_once_more == again  # and can be told from a finish of the lost worker's
    assert step(LOST, retry=Retry(max_rescues=3)).state == READY


def test_a_told_time_is_kept_where_our_database_failed_and_where_nothing_stops_the_job():
    """With a moment for all who wait for it: `resume_at`."""
    assert in_(90) < step(fail("database", retry_in=90.0)).run_at <= in_(100)
    assert in_(90) < step(fail("auth", retry_in=90.0), deferrals=3).run_at <= in_(100)
    assert step(fail("auth", retry_in=1.0), deferrals=2_000).run_at == in_(45)


def test_the_jobs_own_number_of_attempts_and_the_kinds_count():
    for facts in ({"attempts": 1}, {"attempts": 2, "sent": True, "can_reconcile": True}):
        assert step(fail("transient"), max_attempts=2, **facts).state == DEAD
        assert step(fail("transient"), max_attempts=3, **facts).state == SCHEDULED
    looks = Retry(5, 10, by_kind={"ambiguous": Retry(max_attempts=2, delay=10)})
    for attempts, state in ((1, SCHEDULED), (2, DEAD)):
        assert step(fail("transient"), retry=looks, attempts=attempts, sent=True, can_reconcile=True).state == state


def test_a_look_for_a_key_that_ends_before_the_next_try_is_spread_too():
    spread = Retry(5, FullJitter(base=20, factor=1, cap=20))
    for roll, at in ((0.0, 10), (0.5, 15)):
        look = step(fail("transient"), retry=spread, roll=roll, safe_until=in_(9), can_reconcile=True)
        assert (look.decision, look.run_at) == ("reconcile", in_(at))


def test_a_delay_function_sees_the_failure_and_what_it_raises_is_said():
    by_code = tenacity.wait_exception(lambda error: {"E1": 7, "E2": 70}[error.failure.code])
    assert [step(fail("bug", code=code), retry=Retry(5, by_code)).run_at for code in ("E1", "E2")] == [in_(7), in_(70)]
    note = " (its delay function failed, the default is used: ZeroDivisionError: division by zero)"
    assert step(fail("bug"), retry=Retry(5, lambda _: 1 / 0)).error == "boom" + note


@pytest.mark.parametrize(
    ("hint", "ahead"),
    [
        ({"retry_in": 0.5}, True),
        ({"retry_in": 0}, False),
        ({"retry_at": in_(0.5)}, True),
        ({"retry_at": in_(0)}, False),
        ({"retry_at": in_(-0.5)}, False),
    ],
)
def test_a_hint_counts_if_it_lies_ahead(hint, ahead):
    t = step(fail("transient", **hint), retry=Retry(5, 0))
    assert (t.state, t.run_at > in_(0.5)) == ((SCHEDULED, True) if ahead else (READY, False))
    t = step(Deferred("other/acct", "cooldown", hint.get("retry_at")))
    assert (t.run_at < in_(10)) == (ahead and "retry_at" in hint)


def test_a_time_of_another_zone_is_that_moment():
    elsewhere = in_(60).astimezone(timezone(timedelta(hours=5, minutes=30)))
    assert step(Snoozed(until=elsewhere)).run_at == in_(60)
    assert step(Snoozed(until=in_(60).replace(tzinfo=None))).run_at == in_(60)


def test_a_dead_job_with_an_unanswered_request_does_not_begin_anew():
    assert step(fail("permanent"), once_more=True, sent=True).state == DEAD
    assert step(fail("permanent"), once_more=True).state == READY


@pytest.mark.parametrize("mark", [False, True])
def test_what_a_database_refuses_is_left_out_of_every_step_that_may_be_written(mark):
    words = {"error": "x\0", "error_code": "x", "traceback": "x", "result": "x"}
    instead = whole(CANCELLED, "cancelled", resource_key=ACCOUNT, **words)
    again = whole(READY, "once_more", fresh_key=True, **words)
    stored = charged(SCHEDULED, "retry", run_at=in_(20), kind="bug", **words)
    stored = stored._replace(if_cancelled=instead, if_once_more=again)
    bare = {"error": "(its error cannot be stored)", "error_code": None, "traceback": None, "result": None}
    assert stored.without_words(mark=mark) == stored._replace(
        **bare,
        set_mark=mark,
        if_cancelled=instead._replace(**bare, set_mark=mark),
        if_once_more=again._replace(**bare, set_mark=mark),
    )
    marked = whole(READY, "once_more", set_mark=True)
    assert marked.without_words(mark=mark) == marked


@pytest.mark.parametrize(("most_stuck", "share"), [(1, 1), (4, 1), (7, 1), (8, 2), (16, 4), (100, 25)])
def test_with_how_many_stuck_handlers_a_key_gets_no_more(most_stuck, share):
    assert share_of_key(most_stuck) == share
