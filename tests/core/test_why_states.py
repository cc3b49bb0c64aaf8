"""`why` of a job's own row and of its line: each reason whole, with what programs read beside the sentence."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import pytest

from resilient.core.gates.admission import Level, ResourceFacts
from resilient.core.gates.policy import Policy
from resilient.core.inspect.blocked import JobSeen, Waits
from resilient.core.inspect.why import (
    Path,
    Reason,
    TurnSeen,
    Why,
    WorkerSeen,
    line,
    of_state,
    stuck,
    why_job,
    why_resource,
    workers,
)
from resilient.core.jobs.records import Count
from resilient.core.jobs.states import JobState
from tests.core.test_why import ID, JOB, NOW, WORKER, at, level, path

OTHER = UUID(int=7)
SCHEDULED = replace(JOB, state=JobState.SCHEDULED, run_at=at(minutes=2))
RUNNING = replace(
    JOB, state=JobState.RUNNING, locked_by="w9", started_at=at(minutes=-2), executions=3, lease_until=at(seconds=30)
)
DEAD = replace(JOB, state=JobState.DEAD, finished_at=at(hours=-1), attempts=8)
RUNS = Reason("running", "It runs since 11:58:00 UTC (2 min ago) on worker w9 (execution 3).", since=at(minutes=-2))
IS_DEAD = Reason(
    "dead",
    "It is dead since 11:00:00 UTC (1 h ago) after 8 of 8 attempts and will not run again by itself.",
    since=at(hours=-1),
)
REMEDY = Reason("remedy", f"To run it again: `resilient jobs retry {ID}`.")
LOOK = Reason(
    "ambiguous",
    "Its last request may have taken effect: look at the provider, then"
    f" `resilient jobs retry {ID} --repeat-ambiguous` or `resilient dead discard {ID}`.",
)
AGAIN = Reason("scheduled", "It is tried again at 12:02:00 UTC (in 2 min).", until=at(minutes=2))
DUE = Reason("due", "It is due since 12:00:00 UTC (less than 1 s ago) and about to become ready.", since=NOW)


def sent_back(resource, times):
    text = f"It was sent back {times} without spending an attempt, the last time for {resource}."
    return Reason("deferred", text, resource)


def waits_for(resource):
    text = f"It waits for {resource} and goes on with it (`resilient resources show {resource}`)."
    return Reason("waits_for", text, resource)


@pytest.mark.parametrize(
    ("job", "reasons"),
    [
        (
            replace(JOB, state=JobState.SUCCEEDED, finished_at=at(minutes=-5)),
            [Reason("succeeded", "It succeeded at 11:55:00 UTC (5 min ago).", since=at(minutes=-5))],
        ),
        (replace(JOB, state=JobState.SUCCEEDED), [Reason("succeeded", "It succeeded.")]),
        (
            replace(JOB, state=JobState.CANCELLED, finished_at=at(minutes=-5)),
            [Reason("cancelled", "It was cancelled at 11:55:00 UTC (5 min ago).", since=at(minutes=-5))],
        ),
        (replace(JOB, state=JobState.CANCELLED), [Reason("cancelled", "It was cancelled.")]),
        (replace(JOB, state=JobState.BLOCKED), [Reason("blocked", "It is blocked: other jobs come before it.")]),
        (JOB, [Reason("ready", "It is ready since 11:59:30 UTC (30 s ago).", since=at(seconds=-30))]),
        (  # it was to run before it was enqueued
            replace(JOB, run_at=at(hours=-1)),
            [Reason("ready", "It is ready since 11:59:00 UTC (1 min ago).", since=at(minutes=-1))],
        ),
        (
            replace(JOB, waiting_for="github", deferrals=1),
            [
                Reason("ready", "It is ready since 11:59:30 UTC (30 s ago).", since=at(seconds=-30)),
                sent_back("github", "1 time"),
            ],
        ),
    ],
)
def test_a_state_is_said_with_its_time_where_one_is_known(job, reasons):
    assert list(of_state(job, path(), NOW)) == reasons


@pytest.mark.parametrize(
    ("job", "reasons"),
    [
        (DEAD, [IS_DEAD, REMEDY]),
        (
            replace(DEAD, last_error="no such contact", last_error_kind="permanent", last_error_code="http_404"),
            [IS_DEAD, Reason("last_error", "Last error: permanent http_404: no such contact"), REMEDY],
        ),
        (replace(DEAD, last_error_kind="ambiguous"), [IS_DEAD, LOOK]),
        (replace(DEAD, sent={"charge": {"at": "2026-11-01T12:00:00+00:00"}}), [IS_DEAD, LOOK]),
        (
            replace(DEAD, finished_at=None, attempts=1, max_attempts=1),
            [Reason("dead", "It is dead after 1 of 1 attempt and will not run again by itself."), REMEDY],
        ),
        (
            replace(DEAD, finished_at=None, attempts=1, max_attempts=None),
            [Reason("dead", "It is dead after 1 attempt and will not run again by itself."), REMEDY],
        ),
        (
            replace(DEAD, finished_at=None, attempts=1_200, max_attempts=None),
            [Reason("dead", "It is dead after 1,200 attempts and will not run again by itself."), REMEDY],
        ),
    ],
)
def test_a_dead_job_says_after_how_many_tries_and_what_to_do(job, reasons):
    assert list(of_state(job, path(), NOW)) == reasons


def stuck_text(text):
    return Reason(
        "stuck", f"Its handler should have ended at 11:59:00 UTC (1 min ago): it {text}.", since=at(minutes=-1)
    )


def lost(seconds, ago):
    text = f"Its worker lost it at {ago}: another worker will take it over."
    return Reason("lease_over", text, since=at(seconds=seconds))


@pytest.mark.parametrize(
    ("job", "reasons"),
    [
        (RUNNING, [RUNS]),
        (
            replace(RUNNING, started_at=None, lease_until=None),
            [Reason("running", "It runs on worker w9 (execution 3).")],
        ),
        (
            replace(
                RUNNING, last_error="ran out of time", last_error_code="stuck", last_error_kind="timeout",
                updated_at=at(minutes=-1),
            ),
            [RUNS, stuck_text("ran out of time")],
        ),
        (replace(RUNNING, last_error="HTTP 503", last_error_code="http_503"), [RUNS]),  # of the time before
        (replace(RUNNING, lease_until=at(seconds=1)), [RUNS]),
        (replace(RUNNING, lease_until=NOW), [RUNS, lost(0, "12:00:00 UTC (less than 1 s ago)")]),
        (replace(RUNNING, lease_until=at(seconds=-5)), [RUNS, lost(-5, "11:59:55 UTC (5 s ago)")]),
        (
            replace(RUNNING, cancel_requested=True),
            [RUNS, Reason("cancel_requested", "It was asked to stop and has not ended yet.")],
        ),
    ],
)  # fmt: skip
def test_a_running_job_says_where_and_whether_it_should_still_run(job, reasons):
    assert list(of_state(job, path(), NOW)) == reasons


def test_who_takes_a_lost_job_over_needs_a_handler_of_its_kind():
    there = path(workers=(replace(WORKER, kinds=frozenset({"crm.push"})),))
    said = list(of_state(replace(RUNNING, lease_until=NOW), there, NOW))
    text = "1 worker runs, but none has a handler for kind 'mail.send': deploy one that has."
    assert said[2:] == [Reason("unknown_kind", text)]


@pytest.mark.parametrize(
    ("job", "reasons"),
    [
        (
            SCHEDULED,
            [Reason("scheduled", "It is scheduled to run at 12:02:00 UTC (in 2 min).", until=at(minutes=2))],
        ),
        (replace(SCHEDULED, executions=1), [AGAIN]),
        (  # of a run that the row has forgotten
            replace(SCHEDULED, last_error="HTTP 503", last_error_kind="transient"),
            [Reason("scheduled", "It is scheduled to run at 12:02:00 UTC (in 2 min).", until=at(minutes=2))],
        ),
        (
            replace(SCHEDULED, executions=1, attempts=1, last_error="HTTP 503", last_error_kind="transient"),
            [AGAIN, Reason("last_error", "Last time (1 of 8 attempts used): transient: HTTP 503")],
        ),
        (  # above it: its own gates say what it waits for
            replace(SCHEDULED, executions=1, waiting_for="github", deferrals=2),
            [AGAIN, sent_back("github", "2 times")],
        ),
        (
            replace(SCHEDULED, executions=1, waiting_for="github/a", deferrals=1),
            [AGAIN, sent_back("github/a", "1 time")],
        ),
        (
            replace(SCHEDULED, executions=1, waiting_for="gitlab/b", deferrals=1),
            [
                waits_for("gitlab/b"),
                Reason("scheduled", "It is looked at again at 12:02:00 UTC (in 2 min).", until=at(minutes=2)),
                sent_back("gitlab/b", "1 time"),
            ],
        ),
        (replace(SCHEDULED, run_at=NOW), [DUE]),
        (replace(SCHEDULED, run_at=NOW, waiting_for="gitlab/b", deferrals=1), [DUE, sent_back("gitlab/b", "1 time")]),
    ],
)
def test_a_scheduled_job_says_when_and_for_whom_it_waits(job, reasons):
    assert list(of_state(job, path(), NOW)) == reasons


# -- line, turn, workers ---------------------------------------------------------------------------------------------

PARKED = TurnSeen("github", at(seconds=40))
IN_LINE = "ahead of it in the line of github/a;"


@pytest.mark.parametrize(
    ("there", "ahead", "stopped", "reasons"),
    [
        (path(), None, False, []),
        (path(), Count(0), False, [Reason("first", "It is the next one of github/a.", "github/a")]),
        (path(), Count(1), False, [Reason("line", f"1 job is {IN_LINE} 12 jobs wait there.", "github/a")]),
        (path(waiting=1), Count(2), False, [Reason("line", f"2 jobs are {IN_LINE} 1 job waits there.", "github/a")]),
        (
            replace(path(), waiting={}),  # at least those before it
            Count(3),
            False,
            [Reason("line", f"3 jobs are {IN_LINE} 3 jobs wait there.", "github/a")],
        ),
        (
            path(turn=None),
            None,
            False,
            [
                Reason(
                    "no_turn",
                    "github/a is not in line: a worker takes jobs of it right now, or housekeeping repairs it in a"
                    " minute.",
                    "github/a",
                )
            ],
        ),
        (
            path(turn=PARKED),
            None,
            False,
            [
                Reason(
                    "parked",
                    "github/a was stopped by github and is looked at again by 12:00:40 UTC (in 40 s).",
                    "github",
                    until=at(seconds=40),
                )
            ],
        ),
        (path(turn=PARKED), None, True, []),  # the gate says it
        (path(turn=replace(PARKED, recheck_at=None)), None, False, []),
    ],
)
def test_the_line_is_told_with_its_place_and_whether_it_moves(there, ahead, stopped, reasons):
    assert list(line(there, ahead, NOW, stopped=stopped)) == reasons


def test_a_worker_of_one_account_may_hold_jobs_below_a_provider_but_runs_none_of_its_own():
    root = Path([Level(ResourceFacts("github"), Policy(), {})], {}, workers=[replace(WORKER, resources=("github/a",))])
    assert list(workers(root, None)) == []
    assert [one.code for one in workers(root, "mail.send")] == ["unserved_resource"]


def test_the_handlers_that_one_key_may_leave_stuck_are_a_quarter_of_the_slots():
    def most(slots):
        seen = WorkerSeen("w1", frozenset(), concurrency=slots, running=0, stopping=False, seen_at=NOW)
        (one,) = stuck(path(workers=(seen,), stuck={"w1": 2}))
        return one.text.split(" such handlers")[0].rpartition(" ")[2]

    assert [most(slots) for slots in (1, 16, 19, 20, 400)] == ["4", "4", "4", "5", "100"]


# -- the answers -----------------------------------------------------------------------------------------------------


def test_an_answer_for_programs():
    why = why_job(
        replace(SCHEDULED, run_at=at(seconds=5)), replace(path(), waiting={"github/a": Count(9, more=True)}), NOW
    )
    assert why.to_json() == {
        "subject": str(ID),
        "state": "scheduled",
        "until": "2030-01-01T12:00:05.000Z",
        "waiting": 9,
        "waiting_is_more": True,
        "reasons": [
            {
                "code": "scheduled",
                "text": "It is scheduled to run at 12:00:05 UTC (in 5 s).",
                "resource": None,
                "since": None,
                "until": "2030-01-01T12:00:05.000Z",
            }
        ],
    }


def test_where_nobody_counted_nothing_waits():
    there = replace(path(), waiting={})
    for why in (why_job(JOB, there, NOW), why_resource(there, NOW)):
        assert (why.waiting, why.to_json()["waiting"], why.to_json()["waiting_is_more"]) == (0, 0, False)


def test_an_answer_reads_as_its_sentences():
    why = Why("github/a", "open", None, Count(0), (Reason("open", "One."), Reason("waiting", "Two.")))
    assert str(why) == why.text == "One.\nTwo."


def test_a_blocked_job_names_what_it_waits_for_after_its_state():
    waits = Waits([JobSeen(OTHER, "crm.push", JobState.READY)])
    why = why_job(replace(JOB, state=JobState.BLOCKED), path(), NOW, waits=waits)
    assert (why.subject, why.state, why.until) == (str(ID), "blocked", None)
    assert why.reasons == (
        Reason("blocked", "It is blocked: other jobs come before it."),
        Reason("blocker", f"It waits for job {OTHER} (crm.push, ready)."),
    )


def test_a_job_that_expires_says_when():
    soon = Reason("soon", "Nothing stops it: a worker should start it within moments.")
    expires = Reason("expires", "It expires at 13:00:00 UTC (in 1 h) if it has not started by then.", until=at(hours=1))
    why = why_job(replace(JOB, expires_at=at(hours=1)), path(), NOW)
    assert why.reasons[1:] == (expires, soon)
    assert why.until is None  # nothing stops it until then


def test_a_resource_says_that_nothing_stops_it_and_how_many_wait():
    is_open = Reason("open", "Nothing stops github/a.", "github/a")
    why = why_resource(path(waiting=1), NOW)
    assert why == Why(
        "github/a",
        "open",
        None,
        Count(1),
        (is_open, Reason("waiting", "1 job is ready at or below github/a.", "github/a")),
    )
    assert why_resource(path(), NOW, example=OTHER).reasons == (
        is_open,
        Reason("waiting", f"12 jobs are ready at or below github/a, for example {OTHER}.", "github/a"),
    )


def test_that_no_job_waits_is_no_number():
    assert why_resource(path(waiting=0), NOW).reasons[-1].text == "No job is ready at or below github/a."


def test_a_stopped_resource_says_how_long_and_how_many_wait():
    why = why_resource(path(level(blocked_until=at(minutes=5))), NOW)
    assert (why.subject, why.state, why.until, why.waiting) == ("github/a", "stopped", at(minutes=5), 12)
    assert why.reasons == (
        Reason("cooldown", "github/a was told to slow down and rests until 12:05:00 UTC (in 5 min).", "github/a", None,
               at(minutes=5)),
        Reason("waiting", "12 jobs are ready at or below github/a.", "github/a"),
    )  # fmt: skip
