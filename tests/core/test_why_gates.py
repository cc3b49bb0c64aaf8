"""`why` of gates: each in its own words, with what is left, what was learnt, and what a person can do about it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import inf, nextafter

import pytest

from resilient.core.gates.admission import Level, ResourceFacts, in_force
from resilient.core.gates.breaker import BreakerFacts
from resilient.core.gates.learnt import Learnt
from resilient.core.gates.policy import Learning, Policy
from resilient.core.gates.rate_limit import Limit, LimitState
from resilient.core.inspect.why import LastError, Reason, budgets, gates, why_job, why_resource
from tests.core.test_why import JOB, NOW, PLAIN, at, level, path

EPOCH = NOW.timestamp()
SINCE = "since 11:58:00 UTC (2 min ago)"
OPEN = BreakerFacts("open", open_until=at(minutes=4), opened_at=at(minutes=-2))
IS_OPEN = f"The circuit of github is open {SINCE}; the next probe is at 12:04:00 UTC (in 4 min)."


def said(*levels, priority=0, **more):
    return list(gates(path(*levels, **more), NOW, priority))


def text_of(*levels, **more):
    """The sentence of the one gate that stops it."""
    (one,) = said(*levels, **more)
    return one.text


# -- what each gate says ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("auth", "remedy"),
    [
        ("needs_reauth", "its account must be connected again"),
        (
            "not_connected",
            (
                "it was never connected: `resilient connect github github/a/search` or"
                " `resilient connections add github/a/search`"
            ),
        ),
        (
            "unreadable",
            (
                "its secrets are encrypted with a key that its workers lack: give them all keys in RESILIENT_SECRETS;"
                " or its connection was changed in the database: the workers' log says so, and `resilient connect"
                " github github/a/search` mends it"
            ),
        ),
        ("app_refused", "the provider refuses the application, check its client_id and client_secret"),
        (
            "suspect_auth",
            (
                "the provider calls too many accounts dead at once; a probe decides, or `resilient connections release`"
                " or `confirm`"
            ),
        ),
    ],
)
def test_missing_credentials_say_what_to_do_about_them(auth, remedy):
    one = level("github/a/search", auth=auth, auth_since=at(minutes=-2))
    text = f"github/a/search lacks valid credentials ({auth}) {SINCE}: {remedy}."
    assert said(one) == [Reason("auth", text, "github/a/search", at(minutes=-2))]


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({}, "github/a was told to slow down and rests until 12:05:00 UTC (in 5 min)."),
        (
            {"blocked_code": "refreshing", "blocked_since": at(minutes=-2)},
            (
                f"The token of github/a is being refreshed {SINCE}: its jobs go on with it, or are tried at"
                " 12:05:00 UTC (in 5 min)."
            ),
        ),
    ],
)
def test_a_rest_says_how_it_ends(facts, text):
    assert text_of(level(blocked_until=at(minutes=5), **facts)) == text


@pytest.mark.parametrize(("running", "now"), [(1, "1 job runs"), (3, "3 jobs run")])
def test_a_load_that_comes_back_says_how_many_run(running, now):
    rested = level(running=running, learnt=Learnt(resumes_at=EPOCH - 1))
    assert text_of(rested) == (
        f"github/a may be asked again since 11:59:59 UTC (1 s ago): its load comes back as it is answered, {now} now."
    )
    closed = level(policy=replace(PLAIN, breaker=replace(PLAIN.breaker, ramp_first=1)), running=running,
                   breaker=BreakerFacts(closed_at=at(seconds=-1)))  # fmt: skip
    assert text_of(closed) == (
        f"github/a works again since 11:59:59 UTC (1 s ago): its load comes back step by step, {now} now."
    )


@pytest.mark.parametrize(
    ("cap", "running", "text"),
    [
        (1, 1, "1 job run at once and 1 does"),
        (4, 4, "4 jobs run at once and 4 do"),
        (1, 2, "1 job run at once and 2 do"),
    ],
)
def test_a_cap_says_how_many_run(cap, running, text):
    one = text_of(level(policy=Policy(concurrency=cap), running=running))
    assert one == f"github/a lets {text}: it goes on when one of them ends."


def test_a_circuit_that_was_opened_by_hand_names_a_reason_only_if_it_has_one():
    by_hand = level(breaker=BreakerFacts("isolated", opened_at=at(minutes=-2)))
    text = (
        f"The circuit of github/a was opened by hand {SINCE}, until somebody runs `resilient resources close github/a`."
    )
    assert text_of(by_hand) == text


def test_a_circuit_that_is_due_is_told_as_a_probe():
    due = level(breaker=replace(OPEN, open_until=at(seconds=-1)))
    text = "The circuit of github/a is due for a probe: the next job to start there is the one."
    assert said(due) == [Reason("probe", text, "github/a", at(minutes=-2))]


def test_a_gate_keeps_its_times_for_programs():
    (one,) = said(level(breaker=OPEN))
    assert (one.code, one.resource, one.since, one.until) == ("breaker", "github/a", at(minutes=-2), at(minutes=4))


# -- an error, and how many wait -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "ends"),
    [
        ("connect error", " connect error."),
        ("HTTP 503.", " HTTP 503."),
        ("x" * 200, f" {'x' * 159}…"),
    ],
)
@pytest.mark.parametrize(("waiting", "there"), [(1, "2 jobs wait there."), (0, "0 jobs wait there.")])
def test_an_error_ends_once_before_the_number_of_those_that_wait(message, ends, waiting, there):
    error = LastError(message, "transient", at=at(minutes=-2))
    text = text_of(level(), level("github", breaker=OPEN), errors={"github": error}, waiting=waiting)
    assert text == f"{IS_OPEN} Last error at 11:58:00 UTC (2 min ago): transient:{ends} {there}"


def test_one_job_waits_at_what_is_above():
    there = replace(path(level(), level("github", breaker=OPEN)), waiting={"github": 1})
    assert [one.text for one in gates(there, NOW)] == [f"{IS_OPEN} 1 job waits there."]


def test_an_error_of_an_unknown_time_has_none():
    text = text_of(level(), level("github", breaker=OPEN), errors={"github": LastError("HTTP 503", "transient")})
    assert text == f"{IS_OPEN} Last error: transient: HTTP 503. 24 jobs wait there."


LACK = LastError("the secrets are encrypted with key k: add it", "undecodable", "missing_key", at(minutes=-2))


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (LACK, True),
        (replace(LACK, is_over=True), False),  # another worker has the key
        (replace(LACK, at=at(minutes=-16)), False),
        (replace(LACK, kind="auth"), False),  # a provider's own code of that name
    ],
)
def test_the_key_that_workers_lack_is_told(error, says):
    answers = [why(path(level(), errors={"github/a": error}), NOW) for why in (why_resource, partial(why_job, JOB))]
    for answer in answers:
        assert [one.code for one in answer.reasons].count("missing_key") == says
        assert ("Nothing stops" in answer.text) is not says
        assert ("RESILIENT_SECRETS to every worker and start it again: the secrets are encrypted with key k"
                in answer.text) is says  # fmt: skip


# -- what throttles taught -------------------------------------------------------------------------------------------

RATE = Learnt("rate", rate=0.5, throttles=3, changed_at=EPOCH - 60, resumes_at=EPOCH - 60, used_at=EPOCH)
SLOTS = replace(RATE, kind="slots", rate=None, slots=4)
TAUGHT = "learnt at 11:59:00 UTC (1 min ago) from 3 throttles"
LEARNT = Reason("learnt", f"github/a is asked no faster than 0.5/s, {TAUGHT}.", "github/a")
UNTAUGHT = Policy(learn=Learning(on=False))


def learns(learnt, policy=PLAIN, key="github/a", **more):
    return level(key, in_force(policy, learnt, NOW), learnt=learnt, **more)


def test_a_learnt_rate_that_stops_nothing_is_told():
    assert said(learns(RATE)) == [LEARNT]
    assert said(learns(RATE), level("github", breaker=OPEN))[0] == LEARNT


def test_a_learnt_rate_that_is_used_up_says_when_the_next_request_may_go():
    used = learns(RATE, limits={"~learnt": LimitState(EPOCH + 7)})
    text = f"github/a is asked no faster than 0.5/s, {TAUGHT}; the next request may go at 12:00:06 UTC (in 6 s)."
    assert said(used) == [Reason("limit", text, "github/a", None, at(seconds=6))]


def test_a_declared_limit_stops_in_its_own_name_whatever_was_learnt():
    declared = Policy(limits=(Limit(60, per=60, burst=1, name="per-minute"),))
    used = learns(RATE, declared, limits={"per-minute": LimitState(EPOCH + 9)})
    assert text_of(used) == "Limit per-minute of github/a is used up until 12:00:08 UTC (in 8 s)."


@pytest.mark.parametrize(
    ("declared", "slots", "running", "text"),
    [
        (None, 4, 4, f"github/a takes 4 at once, {TAUGHT}, and 4 run."),
        (None, 1, 1, f"github/a takes 1 at once, {TAUGHT}, and 1 runs."),
        (8, 4, 5, f"github/a takes 4 at once, {TAUGHT}, and 5 run."),
        (2, 4, 2, "github/a lets 2 jobs run at once and 2 do: it goes on when one of them ends."),
    ],
)
def test_a_learnt_cap_is_told_as_such_if_it_is_the_lower_one(declared, slots, running, text):
    assert text_of(learns(replace(SLOTS, slots=slots), Policy(concurrency=declared), running=running)) == text


def test_what_was_learnt_once_is_not_told_where_learning_is_switched_off():
    assert said(learns(RATE, UNTAUGHT)) == []
    own = learns(SLOTS, replace(UNTAUGHT, concurrency=4), running=4)
    assert text_of(own) == "github/a lets 4 jobs run at once and 4 do: it goes on when one of them ends."
    assert list(budgets(path(budgets=[learns(RATE, UNTAUGHT, "github/a/budget:search")]), NOW)) == []


# -- what is left of a window ----------------------------------------------------------------------------------------

CORE, SEARCH = Limit.stated("core/v2", 100, 60), Limit.stated("search", 1_000, 60)
A, B = Limit(100, per=60, name="a"), Limit(100, per=60, name="b")
KEPT = Policy(reserve=((5, 0.2),))
EVEN = Policy(pace="even")
RESET = EPOCH + 60
UNTIL = "until 12:01:00 UTC (in 1 min), as its answers say"


def rest(remaining, *, tat=0.0, reset=RESET):
    return LimitState(tat, remaining, reset)


def states(policy, running, *stated, **remaining):
    """A key with limits of which answers say what is left."""
    known = {limit.name: state for limit, state in stated if state is not None}
    own = tuple(limit for limit, _ in stated)
    if policy.pace:
        policy = replace(policy, limits=own)
    return Level(ResourceFacts("github/a"), policy, known | remaining, running, own)


@pytest.mark.parametrize(
    ("policy", "running", "remaining", "text"),
    [
        (PLAIN, 0, 0.0, "0 of 100 requests left {}."),
        (PLAIN, 0, 0.9, "0 of 100 requests left {}."),  # no whole one
        (PLAIN, 0, -3.0, "0 of 100 requests left {}."),  # answers cost more than was drawn
        (PLAIN, 0, 1.0, None),
        (PLAIN, 1, 1.0, "1 of 100 requests left {}, and 1 job runs: it goes on as those end."),
        (PLAIN, 2, 1.0, "1 of 100 requests left {}, and 2 jobs run: it goes on as those end."),
        (PLAIN, 1, 2.0, None),
        (KEPT, 0, 1.0, "1 of 100 requests left {}: they are kept for jobs of priority 5 and above."),
        (KEPT, 0, 20.9, "20 of 100 requests left {}: they are kept for jobs of priority 5 and above."),
        (KEPT, 0, 21.0, None),
        (
            KEPT,
            1,
            21.0,
            (
                "21 of 100 requests left {}, 20 of them kept for jobs of priority 5 and above, and 1 job runs: it goes"
                " on as those end."
            ),
        ),
        (KEPT, 1, 22.0, None),
    ],
)
def test_what_is_left_is_told_on_both_sides_of_the_last_request(policy, running, remaining, text):
    one = states(policy, running, (CORE, rest(remaining)))
    expected = [] if text is None else ["github/a has " + text.format(f"{UNTIL} (core/v2)")]
    assert [reason.text for reason in said(one)] == expected


@pytest.mark.parametrize(
    ("policy", "running", "remaining", "tat", "text"),
    [
        (EVEN, 1, 2.0, 31.0, ": they are spread evenly, and the next may go at 12:00:30 UTC (in 30 s)."),
        (EVEN, 1, 1.0, 0.0, ", and 1 job runs: it goes on as those end."),
        (EVEN, 3, 3.0, 0.0, ", and 3 jobs run: it goes on as those end."),
        (
            replace(EVEN, reserve=KEPT.reserve),
            2,
            22.0,
            0.0,
            ", 20 of them kept for jobs of priority 5 and above, and 2 jobs run: it goes on as those end.",
        ),
    ],
)
def test_an_even_pace_waits_for_its_next_moment_or_for_what_runs(policy, running, remaining, tat, text):
    one = states(policy, running, (CORE, rest(remaining, tat=EPOCH + tat)))
    assert text_of(one) == f"github/a has {remaining:.0f} of 100 requests left {UNTIL} (core/v2){text}"


@pytest.mark.parametrize(
    "first",
    [None, rest(500.0), rest(None), rest(0.0, reset=EPOCH), rest(0.0, reset=EPOCH - 5), rest(0.0, reset=None)],
)
def test_the_limit_that_is_used_up_is_the_one_that_is_named(first):
    one = states(PLAIN, 0, (SEARCH, first), (CORE, rest(0.0)))
    assert text_of(one) == f"github/a has 0 of 100 requests left {UNTIL} (core/v2)."


@pytest.mark.parametrize("first", [None, rest(90.0), rest(None), rest(10.0, reset=EPOCH), rest(10.0, reset=None)])
def test_the_declared_limit_that_is_kept_is_the_one_that_is_named(first):
    known = {"b": rest(7.0)} | ({} if first is None else {"a": first})
    one = level(policy=replace(KEPT, limits=(A, B)), limits=known)
    text = f"github/a has 7 of 100 requests left {UNTIL} (b): they are kept for jobs of priority 5 and above."
    assert text_of(one) == text


@pytest.mark.parametrize(("running", "run"), [(1, "1 job runs"), (2, "2 jobs run")])
def test_a_declared_limit_of_which_the_rest_is_kept_waits_for_what_runs(running, run):
    one = level(policy=replace(KEPT, limits=(A,)), limits={"a": rest(20.0 + running)}, running=running)
    assert text_of(one) == (
        f"github/a has {20 + running} of 100 requests left {UNTIL} (a), 20 of them kept for jobs of priority 5 and"
        f" above, and {run}: it goes on as those end."
    )
    assert said(replace(one, running=running - 1)) == []
    assert said(one, priority=5) == []


@pytest.mark.parametrize("remaining", [0.0, 3.0])
def test_a_declared_limit_without_a_reserve_is_used_up_by_its_own_count(remaining):
    drawn = {"a": rest(remaining, tat=EPOCH + 61)}
    one = level(policy=Policy(limits=(A,)), limits=drawn, running=3)
    assert text_of(one) == "Limit a of github/a is used up until 12:01:00 UTC (in 1 min)."


def test_a_pause_is_a_pause_even_if_its_reason_is_named_like_a_limit():
    one = replace(
        states(KEPT, 0, (CORE, rest(7.0))),
        facts=ResourceFacts("github/a", paused_at=at(minutes=-2), paused_reason="reserve"),
    )
    text = f"github/a is paused (reserve) {SINCE}, until somebody runs `resilient resources resume github/a`."
    assert text_of(one) == text


def test_a_resource_is_judged_for_a_job_of_no_priority():
    kept = states(Policy(reserve=((1, 0.2),)), 0, (CORE, rest(7.0)))
    assert why_resource(path(kept), NOW).state == "stopped"
    assert said(kept, priority=1) == []


@pytest.mark.parametrize(
    ("levels", "state"),
    [
        ([level()], "open"),
        ([learns(RATE)], "slowed"),
        ([learns(RATE, limits={"~learnt": LimitState(EPOCH + 7)})], "slowed"),
        ([learns(RATE, limits={"~learnt": LimitState(EPOCH + 70)})], "stopped"),
        ([level(breaker=BreakerFacts(closed_at=at(seconds=-1)), running=10)], "slowed"),  # its load comes back
        ([level(breaker=BreakerFacts("open", opened_at=at(minutes=-1), open_until=NOW))], "slowed"),  # a probe is due
        ([level(), level("github", Policy(concurrency=1), running=1)], "slowed"),
        ([level(), level("github", paused_at=NOW)], "stopped"),
        ([level(auth="needs_reauth")], "stopped"),
    ],
)
def test_only_what_lets_nothing_through_is_called_stopped(levels, state):
    assert why_resource(path(*levels), NOW).state == state


def test_a_window_that_ends_this_very_moment_leaves_no_time_to_wait_for():
    one = states(PLAIN, 0, (CORE, rest(0.0, reset=nextafter(EPOCH, inf))))
    why = why_job(JOB, path(one), NOW)
    assert [(reason.code, reason.until) for reason in why.reasons[1:2]] == [("limit", NOW)]
    assert why.until is None


# -- budgets that the provider names ---------------------------------------------------------------------------------

SEARCHES = "github/acct:7/budget:search"
APART = "What counts for search waits apart"


def test_a_budget_that_rests_is_told_apart():
    rests = level(SEARCHES, blocked_until=at(minutes=5), blocked_since=at(minutes=-2), blocked_code="http_429")
    text = f"{SEARCHES} was told to slow down (http_429) {SINCE} and rests until 12:05:00 UTC (in 5 min)."
    reason = Reason("budget", f"{APART}: {text}", SEARCHES, at(minutes=-2), at(minutes=5))
    assert list(budgets(path(budgets=[rests]), NOW)) == [reason]


def test_a_budget_that_was_taught_a_rate_is_told_apart():
    reason = Reason("budget", f"{APART}: {SEARCHES} is asked no faster than 0.5/s, {TAUGHT}.", SEARCHES)
    assert list(budgets(path(budgets=[learns(RATE, key=SEARCHES)]), NOW)) == [reason]
    used = learns(RATE, key=SEARCHES, limits={"~learnt": LimitState(EPOCH + 7)})
    text = f"{SEARCHES} is asked no faster than 0.5/s, {TAUGHT}; the next request may go at 12:00:06 UTC (in 6 s)."
    reason = Reason("budget", f"{APART}: {text}", SEARCHES, None, at(seconds=6))
    assert list(budgets(path(budgets=[used]), NOW)) == [reason]


def test_a_budget_of_which_nothing_is_known_is_not_told():
    assert list(budgets(path(budgets=[level(SEARCHES)]), NOW)) == []


def test_a_budget_on_the_path_is_told_once_and_the_others_still_are():
    own, other = learns(RATE, key=SEARCHES), learns(RATE, key="github/acct:7/budget:core")
    there = path(own, level("github/acct:7"), level("github"), budgets=[own, other])
    assert [one.resource for one in budgets(there, NOW)] == [other.facts.key]
    assert [one.resource for one in gates(there, NOW)] == [SEARCHES]


def test_a_budget_holds_up_no_other_work():
    rests = level(SEARCHES, blocked_until=at(minutes=5))
    said_of = {
        "job": why_job(JOB, path(learns(RATE), budgets=[rests]), NOW),
        "resource": why_resource(path(learns(RATE), budgets=[rests]), NOW),
    }
    assert {who: [one.code for one in why.reasons] for who, why in said_of.items()} == {
        "job": ["ready", "learnt", "budget", "soon"],
        "resource": ["learnt", "budget", "waiting"],
    }
    assert {why.until for why in said_of.values()} == {None}
    text = f"{APART}: {SEARCHES} was told to slow down and rests until 12:05:00 UTC (in 5 min)."
    assert [why.text.count(text) for why in said_of.values()] == [1, 1]
