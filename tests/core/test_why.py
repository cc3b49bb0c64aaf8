"""`why` names every cause, since when, until when and how many wait."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from resilient.core.base import phrases
from resilient.core.gates.admission import Level, ResourceFacts
from resilient.core.gates.breaker import BreakerFacts
from resilient.core.gates.policy import Policy
from resilient.core.gates.rate_limit import Limit, LimitState
from resilient.core.inspect.why import LastError, Path, TurnSeen, WorkerSeen, why_job, why_resource
from resilient.core.jobs.records import Count, JobInfo
from resilient.core.jobs.states import JobState

NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)
PLAIN, CLOSED, ORDINARY = Policy(), BreakerFacts(), TurnSeen()
ID = UUID("0195f3a2-7c1e-7d3a-9b0e-2f6f3c1a8e55")
JOB = JobInfo(
    id=ID, kind="mail.send", resource_key="github/a", state=JobState.READY, payload=None, payload_version=1, priority=0,
    run_at=NOW - timedelta(seconds=30), expires_at=None, attempts=0, max_attempts=8, executions=0, deferrals=0,
    rescues=0, version=1, locked_by=None, lease_until=None, started_at=None, unique_key=None, idempotency_key=None,
    sent=None, tags=None, progress=None, result=None, last_error=None, last_error_kind=None, last_error_code=None,
    waiting_for=None, ordering_key=None, order_no=None, ordering_policy=None, waits=0,
    cancel_requested=False, created_at=NOW - timedelta(minutes=1), updated_at=NOW, finished_at=None,
)  # fmt: skip
WORKER = WorkerSeen("w1", frozenset({"mail.send"}), concurrency=50, running=3, stopping=False, seen_at=NOW)


def at(**parts):
    return NOW + timedelta(**parts)


def level(key="github/a", policy=PLAIN, limits=None, running=0, breaker=CLOSED, **facts):
    return Level(ResourceFacts(key, breaker, **facts), policy, limits or {}, running)


def path(*levels, waiting=12, workers=(WORKER,), turn=ORDINARY, **more):
    levels = levels or (level(), level("github"))
    counts = {one.facts.key: Count(waiting * n) for n, one in enumerate(levels, 1)}
    return Path(levels, counts, turn=turn, workers=workers, **more)


def texts(why):
    return why.text.splitlines()


def codes(why):
    return [reason.code for reason in why.reasons]


# -- gates -----------------------------------------------------------------------------------------------------------

GATES = [
    (
        level(blocked_until=at(minutes=5), blocked_since=at(seconds=-40), blocked_code="http_429"),
        "cooldown",
        (
            "github/a was told to slow down (http_429) since 11:59:20 UTC (40 s ago) and rests until 12:05:00 UTC"
            " (in 5 min)."
        ),
    ),
    (
        level(paused_at=at(hours=-3), paused_reason="migration"),
        "pause",
        (
            "github/a is paused (migration) since 09:00:00 UTC (3 h ago), until somebody runs"
            " `resilient resources resume github/a`."
        ),
    ),
    (
        level(paused_at=at(hours=-3), paused_until=at(days=1)),
        "pause",
        "github/a is paused since 09:00:00 UTC (3 h ago), until 2030-01-02 12:00:00 UTC (in 1 d).",
    ),
    (
        level(auth="needs_reauth", auth_since=at(hours=-1)),
        "auth",
        (
            "github/a lacks valid credentials (needs_reauth) since 11:00:00 UTC (1 h ago): its account must be"
            " connected"
            " again."
        ),
    ),
    (
        level(breaker=BreakerFacts("open", open_until=at(seconds=20), opened_at=at(minutes=-2))),
        "breaker",
        (
            "The circuit of github/a is open since 11:58:00 UTC (2 min ago); the next probe is at 12:00:20 UTC"
            " (in 20 s)."
            " Last error at 11:58:00 UTC (2 min ago): transient http_503: HTTP 503"
        ),
    ),
    (
        level(breaker=BreakerFacts("half_open", opened_at=at(minutes=-2), probe_owner="w", probe_until=at(seconds=50))),
        "breaker",
        (
            "The circuit of github/a is open since 11:58:00 UTC (2 min ago); a probe is under way, decided by"
            " 12:00:50 UTC"
            " (in 50 s). Last error at 11:58:00 UTC (2 min ago): transient http_503: HTTP 503"
        ),
    ),
    (
        level(breaker=BreakerFacts("isolated", opened_at=at(minutes=-2)), paused_reason="incident 7"),
        "breaker",
        (
            "The circuit of github/a was opened by hand (incident 7) since 11:58:00 UTC (2 min ago), until"
            " somebody runs"
            " `resilient resources close github/a`. Last error at 11:58:00 UTC (2 min ago): transient http_503:"
            " HTTP 503"
        ),
    ),
    (
        level(breaker=BreakerFacts(closed_at=at(seconds=-1)), running=2),
        "breaker",
        "github/a works again since 11:59:59 UTC (1 s ago): its load comes back step by step, 2 jobs run now.",
    ),
    (
        level(policy=Policy(concurrency=4), running=4),
        "concurrency",
        "github/a lets 4 jobs run at once and 4 do: it goes on when one of them ends.",
    ),
]


@pytest.mark.parametrize(("stopped", "gate", "text"), GATES)
def test_each_gate_in_one_sentence(stopped, gate, text):
    errors = {"github/a": LastError("HTTP 503", "transient", "http_503", at(minutes=-2))}
    why = why_job(JOB, path(stopped, level("github"), errors=errors), NOW)
    reason = next(r for r in why.reasons if r.code == gate)
    assert (reason.text, reason.resource) == (text, "github/a")


def test_a_used_up_limit_names_when_it_is_refilled():
    limit = Limit(60, per=60, burst=1, name="per-minute", counts="jobs")
    full = {"per-minute": LimitState(tat=NOW.timestamp() + 7)}
    why = why_job(JOB, path(level(policy=Policy(limits=(limit,)), limits=full), level("github")), NOW)
    assert "Limit per-minute of github/a is used up until 12:00:07 UTC (in 7 s)." in texts(why)
    assert why.until == at(seconds=7)


CORE = Limit.stated("core", 100, 60)
RESERVE = Policy(reserve=((5, 0.2), (9, 0.1)))
EVEN = Policy(pace="even", limits=(CORE,))


@pytest.mark.parametrize(
    ("policy", "priority", "remaining", "running", "text"),
    [
        (RESERVE, 0, 25, 0, ": they are kept for jobs of priority 5 and above."),
        (RESERVE, 5, 8, 0, ": they are kept for jobs of priority 9 and above."),
        (RESERVE, 9, 25, 0, None),
        (RESERVE, 0, 40, 0, None),
        (PLAIN, 0, 25, 0, None),
        (PLAIN, 9, 0, 0, "."),
        (PLAIN, 0, 3, 3, ", and 3 jobs run: it goes on as those end."),
        (EVEN, 0, 50, 0, ": they are spread evenly, and the next may go at 12:00:06 UTC (in 6 s)."),
    ],
)
def test_what_the_provider_says_is_left_is_named(policy, priority, remaining, running, text):
    state = LimitState(NOW.timestamp() + 12.0 if policy is EVEN else 0.0, remaining, NOW.timestamp() + 60)
    own = Level(ResourceFacts("github/a"), policy, {CORE.name: state}, running, (CORE,))
    why = why_job(replace(JOB, priority=priority), path(own, level("github")), NOW)
    left = f"github/a has {remaining} of 100 requests left until 12:01:00 UTC (in 1 min), as its answers say (core)"
    assert [r.text for r in why.reasons if r.code == "limit"] == ([] if text is None else [left + text])


def test_a_declared_limit_is_kept_in_part_too():
    limit = Limit(100, per=60, name="per-minute")
    state = LimitState(0.0, 10.0, NOW.timestamp() + 60)
    own = level(policy=replace(RESERVE, limits=(limit,)), limits={"per-minute": state})
    (reason,) = [r for r in why_job(JOB, path(own, level("github")), NOW).reasons if r.code == "limit"]
    assert reason.text.endswith("as its answers say (per-minute): they are kept for jobs of priority 5 and above.")
    assert reason.until == at(seconds=60)


def test_every_gate_of_the_path_is_named_and_the_last_one_to_end_decides():
    own = level(blocked_until=at(minutes=1))
    above = level("github", breaker=BreakerFacts("open", open_until=at(minutes=4)))
    why = why_job(JOB, path(own, above), NOW)
    assert codes(why)[1:3] == ["cooldown", "breaker"]
    assert why.reasons[2].text.endswith("24 jobs wait there.")
    assert why.until == at(minutes=4)
    assert why.to_json()["until"] == "2030-01-01T12:04:00.000Z"


def test_an_error_without_a_full_stop_gets_one_before_what_follows():
    above = level("github", breaker=BreakerFacts("open", open_until=at(minutes=4)))
    errors = {"github": LastError("connect error", "transient", "connect_error", at(minutes=-2))}
    why = why_job(JOB, path(level(), above, errors=errors), NOW)
    assert texts(why)[1].endswith("connect error. 24 jobs wait there.")


def test_a_stop_without_an_end_leaves_the_end_open():
    why = why_job(JOB, path(level(blocked_until=at(minutes=1)), level("github", paused_at=NOW)), NOW)
    assert why.until is None


def test_a_circuit_that_is_due_says_who_tries_next():
    due = level(breaker=BreakerFacts("open", open_until=at(seconds=-1), opened_at=at(minutes=-2)))
    assert "probe" in codes(why_job(JOB, path(due), NOW))


# -- states ----------------------------------------------------------------------------------------------------------


def test_nothing_stops_it():
    why = why_job(JOB, path(), NOW, ahead=Count(0))
    assert texts(why) == [
        "It is ready since 11:59:30 UTC (30 s ago).",
        "It is the next one of github/a.",
        "Nothing stops it: a worker should start it within moments.",
    ]
    assert (why.until, why.waiting) == (None, 12)


def test_its_place_in_line():
    why = why_job(JOB, path(), NOW, ahead=Count(1000, more=True))
    assert texts(why)[1] == "1,000+ jobs are ahead of it in the line of github/a; 12 jobs wait there."
    assert "soon" not in codes(why)


def test_a_retry_says_why_and_when():
    tried = replace(
        JOB, state=JobState.SCHEDULED, run_at=at(minutes=2), attempts=3, executions=5, deferrals=2,
        last_error="HTTP 503 from api\nsecond line", last_error_kind="transient", last_error_code="http_503",
        waiting_for="github", expires_at=at(hours=1),
    )  # fmt: skip
    why = why_job(tried, path(), NOW)
    assert texts(why) == [
        "It is tried again at 12:02:00 UTC (in 2 min).",
        "Last time (3 of 8 attempts used): transient http_503: HTTP 503 from api",
        "It was sent back 2 times without spending an attempt, the last time for github.",
        "It expires at 13:00:00 UTC (in 1 h) if it has not started by then.",
    ]
    assert why.until == at(minutes=2)


def test_due_but_not_ready_yet():
    assert codes(why_job(replace(JOB, state=JobState.SCHEDULED), path(), NOW)) == ["due", "soon"]


def test_running_and_what_if_its_worker_is_gone():
    running = replace(
        JOB, state=JobState.RUNNING, locked_by="w9", started_at=at(minutes=-2), executions=1,
        lease_until=at(seconds=30), cancel_requested=True,
    )  # fmt: skip
    assert texts(why_job(running, path(), NOW)) == [
        "It runs since 11:58:00 UTC (2 min ago) on worker w9 (execution 1).",
        "It was asked to stop and has not ended yet.",
    ]
    lost = why_job(replace(running, lease_until=at(seconds=-5)), path(workers=()), NOW)
    assert codes(lost) == ["running", "lease_over", "no_worker", "cancel_requested"]


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        ({"last_error_kind": "permanent"}, f"To run it again: `resilient jobs retry {ID}`."),
        (
            {"last_error_kind": "ambiguous"},
            f"`resilient jobs retry {ID} --repeat-ambiguous` or `resilient dead discard {ID}`.",
        ),
        (
            {"sent": {"charge": {"at": "2026-11-01T12:00:00+00:00"}}},
            f"`resilient jobs retry {ID} --repeat-ambiguous` or `resilient dead discard {ID}`.",
        ),
    ],
)
def test_dead_says_what_happened_and_what_to_do(error, ends):
    dead = replace(
        JOB, state=JobState.DEAD, finished_at=at(hours=-1), attempts=8, last_error="no such contact", **error
    )
    lines = texts(why_job(dead, path(), NOW))
    assert lines[0] == "It is dead since 11:00:00 UTC (1 h ago) after 8 of 8 attempts and will not run again by itself."
    assert lines[1].endswith("no such contact")
    assert lines[2].endswith(ends)


@pytest.mark.parametrize("state", [JobState.SUCCEEDED, JobState.CANCELLED, JobState.BLOCKED])
def test_other_states_have_one_sentence(state):
    assert codes(why_job(replace(JOB, state=state), path(), NOW)) == [state.value]


# -- workers and turns -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "code"),
    [
        ((), "no_worker"),
        ((replace(WORKER, stopping=True),), "no_worker"),
        ((replace(WORKER, kinds=frozenset({"other"})),), "unknown_kind"),
        ((replace(WORKER, resources=("crm/*", "github/b")),), "unserved_resource"),
        ((replace(WORKER, running=50), replace(WORKER, id="w2", kinds=frozenset())), "busy"),
    ],
)
def test_who_is_there_to_run_it(workers, code):
    why = why_job(JOB, path(workers=workers), NOW)
    assert code in codes(why)
    assert "soon" not in codes(why)


def test_a_worker_of_this_resource_is_enough():
    served = replace(WORKER, resources=("git*/a",))
    assert "unserved_resource" not in codes(why_job(JOB, path(workers=(WORKER, served)), NOW))
    assert "unserved_resource" not in codes(why_job(JOB, path(workers=(served,)), NOW))


def test_a_kind_this_program_does_not_declare():
    assert "not_declared" in codes(why_job(JOB, path(), NOW, is_declared=False))
    assert "not_declared" not in codes(why_job(JOB, path(), NOW, is_declared=True))


def test_a_missing_turn_and_a_parked_one():
    assert "no_turn" in codes(why_job(JOB, path(turn=None), NOW))
    parked = TurnSeen("github", at(seconds=40))
    why = why_job(JOB, path(turn=parked), NOW)
    assert "github/a was stopped by github and is looked at again by 12:00:40 UTC (in 40 s)." in texts(why)
    stopped = why_job(JOB, path(level(paused_at=NOW), turn=parked), NOW)
    assert "parked" not in codes(stopped)


# -- resources -------------------------------------------------------------------------------------------------------


def test_an_open_resource_and_a_stopped_one():
    assert texts(why_resource(path(), NOW, example=ID)) == [
        "Nothing stops github/a.",
        f"12 jobs are ready at or below github/a, for example {ID}.",
    ]
    stopped = why_resource(path(level(), level("github", paused_at=NOW), waiting=0, workers=()), NOW)
    assert (stopped.state, codes(stopped)) == ("stopped", ["pause", "waiting"])


# -- wording ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "less than 1 s"), (0.4, "less than 1 s"), (59.4, "59 s"), (60, "1 min"), (200, "3 min 20 s"),
        (599, "9 min 59 s"), (601, "10 min"), (3600, "1 h"), (7500, "2 h 5 min"), (86399, "23 h"), (86400, "1 d"),
        (273600, "3 d 4 h"), (86400 * 400, "400 d"),
    ],
)  # fmt: skip
def test_spans(seconds, text):
    assert phrases.span(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.5, "0.5 s"), (1, "1 s"), (60, "1 min"), (90, "90 s"), (600, "10 min"), (5400, "90 min"), (604800, "7 d")],
)
def test_lengths_as_they_were_declared(seconds, text):
    assert phrases.length(seconds) == text


def test_figures():
    assert [phrases.figure(n) for n in (5, 0.5, 2500000, 1 / 3, 0.25)] == ["5", "0.5", "2,500,000", "0.333333", "0.25"]


def test_moments_are_told_to_the_second():
    at = NOW.replace(microsecond=123456)
    assert phrases.moment(at, NOW) == f"{NOW:%H:%M:%S} UTC"
    assert phrases.moment(at) == f"{NOW:%Y-%m-%d %H:%M:%S} UTC"


def test_counts_and_brief():
    counts = [phrases.counted(n, "job") for n in (0, 1, 1204, Count(10000, more=True), Count(1, more=True))]
    assert counts == ["0 jobs", "1 job", "1,204 jobs", "10,000+ jobs", "1+ jobs"]
    assert phrases.brief("  a\nb") == "a"
    assert phrases.brief(None) == ""
    assert phrases.brief("x" * 200, 10) == "xxxxxxxxx…"
