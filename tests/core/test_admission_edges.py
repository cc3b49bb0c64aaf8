"""Admission at its edges: slow starts, what was learnt, what the provider says is left, and whom an error is about."""

from dataclasses import replace

import pytest

from resilient.core.base.instants import FAR
from resilient.core.gates.admission import (
    QUICK,
    Level,
    ResourceFacts,
    Stop,
    admit,
    error_shut,
    hand_shut,
    in_force,
    mean,
    needs_count,
    needs_lock,
    paced,
    refusal,
    releasable,
    share,
    spare,
    stop_of,
)
from resilient.core.gates.breaker import BreakerFacts
from resilient.core.gates.learnt import FEWEST, QUIET, Learnt
from resilient.core.gates.policy import BreakerPolicy, Learning, Policy
from resilient.core.gates.rate_limit import LEARNT, Limit, LimitState, take
from tests.core.test_admission import DUE, EPOCH, HALF, NOW, PLAIN, at, level

CORE = Limit.stated("core", 100, 60)
JOBS = Limit(2, 1, burst=3, counts="jobs", name="j")
SENT = Limit(2, 1, burst=3, name="j")
RAMPING = BreakerFacts(closed_at=at(-4))  # four at once
RESTED = Learnt(resumes_at=EPOCH - 1, accepted=2)  # three at once
SINCE_REST = Stop("p/a", "cooldown", at(0.5), at(-1), "slow_start")
SINCE_CLOSED = Stop("p/a", "breaker", at(3), at(-4), "ramp")


def of(facts, policy=PLAIN, most=9, **more):
    verdict = admit([Level(facts, policy, more.pop("limits", {}), **more)], most, NOW, "w")
    return verdict.count, verdict.stop


# -- gates by themselves ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gate", "code", "since", "error_at", "by_error", "by_hand"),
    [
        ("breaker", "open", at(-5), at(-5), True, False),
        ("breaker", "open", at(-5), at(-6), False, False),  # of an outage before
        ("breaker", "open", None, at(-6), True, False),
        ("breaker", "probing", at(-5), None, True, False),
        ("breaker", "isolated", at(-5), at(-1), False, True),
        ("pause", None, at(-5), at(-1), False, True),
        ("pause", "isolated", at(-5), at(-1), False, True),
        ("cooldown", "http_429", at(-5), at(-1), False, False),
        (None, None, None, None, False, False),
    ],
)
def test_who_shut_a_gate(gate, code, since, error_at, by_error, by_hand):
    assert error_shut(gate, code, since, error_at) is by_error
    assert hand_shut(gate, code) is by_hand


def test_what_was_calm_when_it_was_read_stops_nothing():
    calm = ResourceFacts("p/a", DUE, blocked_until=at(9), learnt=RESTED, calm=True)
    assert (stop_of(calm, NOW), refusal(calm, NOW), of(calm)) == (None, None, (9, None))
    assert (needs_count(calm, PLAIN, NOW), needs_lock(calm, PLAIN, NOW)) == (False, False)


def test_every_gate_that_is_shut_is_weighed():
    shut = level(
        paused_at=at(-9), paused_until=at(5), blocked_until=at(4), breaker=replace(DUE, open_until=at(6))
    ).facts
    assert refusal(shut, NOW) == Stop("p/a", "breaker", at(6), at(-5), "open")
    assert refusal(replace(shut, paused_until=at(7)), NOW).gate == "pause"
    assert stop_of(replace(shut, blocked_until=at(8)), NOW).gate == "cooldown"
    assert refusal(replace(shut, auth="needs_reauth"), NOW).gate == "auth"
    assert refusal(level(paused_until=at(5)).facts, NOW) is None, "nobody paused it"


# -- slow starts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "running", "count", "stop"),
    [
        ({"learnt": RESTED}, 0, 3, SINCE_REST),
        ({"learnt": RESTED}, 2, 1, SINCE_REST),
        ({"learnt": RESTED}, 5, 0, SINCE_REST),
        ({"learnt": replace(RESTED, accepted=99)}, 0, 9, None),
        ({"breaker": RAMPING}, 1, 3, SINCE_CLOSED),
        ({"breaker": RAMPING, "learnt": RESTED}, 0, 3, SINCE_REST),  # the lower of both
        ({"breaker": RAMPING, "learnt": replace(RESTED, accepted=3)}, 0, 4, SINCE_REST),
        ({"breaker": RAMPING, "learnt": replace(RESTED, accepted=4)}, 0, 4, SINCE_CLOSED),
    ],
)
def test_the_load_comes_back_slowly(facts, running, count, stop):
    facts = level(**facts).facts
    assert of(facts, running=running) == (count, stop)
    slow = stop is not None
    assert needs_count(facts, PLAIN, NOW) is needs_lock(facts, PLAIN, NOW) is slow
    assert releasable(facts, PLAIN, NOW, 100) == (count + running if slow and count else 100 if not slow else 3)
    assert releasable(facts, PLAIN, NOW, 2) == 2


@pytest.mark.parametrize(
    ("running", "count", "stop"), [(0, 4, "concurrency"), (3, 1, "concurrency"), (4, 0, "concurrency")]
)
def test_of_equals_the_cap_is_named(running, count, stop):
    verdict = of(level(breaker=RAMPING).facts, Policy(concurrency=4), running=running)
    assert (verdict[0], verdict[1].gate) == (count, stop)


def test_room_for_just_as_many_stops_nothing():
    assert of(level().facts, Policy(concurrency=4), most=4) == (4, None)
    assert of(level(learnt=RESTED).facts, most=3) == (3, None)
    assert of(level().facts, Policy(limits=(JOBS,)), most=3) == (3, None)
    assert of(level().facts, most=0) == (0, None)


# -- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "tat", "count", "until"),
    [
        (JOBS, 0, 3, 0.5),
        (JOBS, 1.25, 0, 0.25),  # half of one is there
        (JOBS, 1.0, 1, 0.5),
        (JOBS, 9.0, 0, 8.0),
        (SENT, 0, 5, 0.5),
        (SENT, 2.0, 1, 0.5),  # one is there, and two come back within the second
        (SENT, 4.0, 0, 2.0),
    ],
)
def test_when_a_limit_has_room_again(limit, tat, count, until):
    verdict = of(level().facts, Policy(limits=(limit,)), limits={"j": LimitState(EPOCH + tat)})
    assert verdict[0] == count
    assert (verdict[1].gate, verdict[1].code) == ("limit", "j")
    assert (verdict[1].until - NOW).total_seconds() == pytest.approx(until, abs=1e-4)


@pytest.mark.parametrize("limit", [Limit.parse("1/99999999999d"), Limit.stated("b", 1, 1e15), Limit(1e-300, per=60)])
def test_a_limit_that_has_room_again_after_the_calendars_end_stops_until_then(limit):
    drawn = take(limit, LimitState(), 1, EPOCH)
    count, stop = of(level().facts, Policy(limits=(limit,)), limits={limit.name: drawn})
    assert (count, stop.gate, stop.until) == (0, "limit", FAR)


@pytest.mark.parametrize(
    ("learnt", "policy", "limits", "cap"),
    [
        (None, PLAIN, (), None),
        (Learnt(used_at=EPOCH), PLAIN, (), None),
        (Learnt("rate", rate=2.3456, used_at=EPOCH), PLAIN, ((2.35, 1, 1, LEARNT),), None),
        (Learnt("rate", rate=2.3456, used_at=EPOCH), Policy(learn=Learning(on=False)), (), None),
        (Learnt("rate", rate=2.3456, used_at=EPOCH - QUIET - 1), PLAIN, (), None),
        (Learnt("rate", rate=None, used_at=EPOCH), PLAIN, ((1, 1, 1, LEARNT),), None),
        (Learnt("rate", rate=2.0, used_at=EPOCH), Policy((JOBS,)), ((2, 1, 3, "j"), (2, 1, 1, LEARNT)), None),
        (Learnt("slots", slots=4, used_at=EPOCH), PLAIN, (), 4),
        (Learnt("slots", slots=4, used_at=EPOCH), Policy(concurrency=3), (), 3),
        (Learnt("slots", slots=4, used_at=EPOCH), Policy(concurrency=5), (), 4),
        (Learnt("quota", quota=FEWEST, used_at=EPOCH), PLAIN, ((0.5, 1, FEWEST, LEARNT),), None),
        (Learnt("quota", quota=FEWEST - 1, used_at=EPOCH), PLAIN, (), None),
    ],
)
def test_what_was_learnt_is_in_force(learnt, policy, limits, cap):
    forced = in_force(policy, learnt, NOW)
    assert (tuple((x.rate, x.per, x.burst, x.name) for x in forced.limits), forced.concurrency) == (limits, cap)
    assert in_force(forced, learnt, NOW) == forced, "it is put in once"
    facts = ResourceFacts("p/a", learnt=learnt and replace(learnt, accepted=99))
    window = learnt is not None and learnt.kind == "quota" and limits != ()
    assert needs_count(facts, policy, NOW) is (window or cap is not None)


def test_a_window_that_was_learnt_counts_those_that_run():
    learnt = Learnt("quota", quota=20, used_at=EPOCH, accepted=99)
    facts = ResourceFacts("p/a", learnt=learnt)
    policy = in_force(PLAIN, learnt, NOW)
    assert of(facts, policy, most=50) == (20, Stop("p/a", "limit", at(1), code="learnt"))
    assert of(facts, policy, most=50, running=5) == (15, Stop("p/a", "limit", at(0.5), code="learnt"))
    assert of(facts, policy, most=50, running=25) == (0, Stop("p/a", "limit", at(0.5), code="learnt"))
    used = {LEARNT: LimitState(EPOCH + 36)}  # eighteen
    assert of(facts, policy, most=50, running=1, limits=used)[0] == 1
    full = {LEARNT: LimitState(EPOCH + 44)}
    assert of(facts, policy, most=50, running=1, limits=full)[1].until == at(5)
    rate = in_force(PLAIN, Learnt("rate", rate=2.0, used_at=EPOCH), NOW)
    assert of(level().facts, rate, most=50, running=2)[0] == 3, "a rate does not"


# -- what the provider says is left ----------------------------------------------------------------------------------


def left(remaining, reset_in=60):
    return {CORE.name: LimitState(0.0, remaining, EPOCH + reset_in, EPOCH - 1)}


@pytest.mark.parametrize(
    ("remaining", "reset_in", "running", "count", "code", "until"),
    [
        (5, 60, 0, 5, CORE.name, 0.5),
        (5, 60, 3, 2, CORE.name, 0.5),
        (5, 60, 7, 0, CORE.name, 0.5),
        (5, 0.25, 3, 2, CORE.name, 0.25),
        (0.5, 60, 0, 0, CORE.name, 60),
        (1, 60, 0, 1, CORE.name, 0.5),
        (9, 60, 0, 9, None, 0),
        (5, 0, 0, 9, None, 0),  # that window is over
        (5, -9, 0, 9, None, 0),
        (2.9999999999, 60, 0, 3, CORE.name, 0.5),
    ],
)
def test_no_more_start_than_the_provider_says_is_left(remaining, reset_in, running, count, code, until):
    stop = code and Stop("p/a", "limit", at(until), code=code)
    more = {"limits": left(remaining, reset_in), "running": running, "stated": (CORE,)}
    assert of(level().facts, **more) == (count, stop)
    assert of(replace(level().facts, calm=True), **more) == (count, stop), "calm rows, too"


@pytest.mark.parametrize(
    ("priority", "remaining", "running", "count", "code"),
    [
        (0, 50, 0, 9, None),
        (0, 25, 0, 5, CORE.name),  # 20 of 100 are kept
        (0, 25, 3, 2, CORE.name),
        (0, 20.5, 0, 0, "reserve"),
        (0, 21, 0, 1, CORE.name),
        (0, 1, 0, 0, "reserve"),
        (0, 0.5, 0, 0, CORE.name),
        (4, 12, 0, 0, "reserve"),
        (5, 12, 0, 9, None),
    ],
)
def test_a_share_of_it_is_kept_for_higher_priorities(priority, remaining, running, count, code):
    policy = Policy((Limit(999, 1, burst=999, counts="jobs"),), reserve=((5, 0.2),))
    one = Level(level().facts, policy, left(remaining), running, (CORE,))
    verdict = admit([one], 9, NOW, "w", priority)
    assert (verdict.count, verdict.stop and verdict.stop.code) == (count, code)
    assert needs_count(replace(level().facts, calm=True), policy, NOW) is True


def test_what_was_stated_is_spread_if_the_pace_is_even():
    even = Policy((JOBS,), pace="even")
    assert paced(even, (CORE,)).limits == (CORE, JOBS)
    assert paced(even, ()) == even
    assert paced(PLAIN, (CORE,)) == PLAIN


# -- what is started -------------------------------------------------------------------------------------------------


def test_what_started_is_counted_at_every_level():
    states = {"other": LimitState(5.0)}
    leaf = Level(level(breaker=DUE, revision=7).facts, Policy((JOBS,), 9), states, 1, (CORE,))
    verdict = admit([leaf, level("p", calm=True)], 1, NOW, "w")
    (after, calm) = verdict.levels
    assert (verdict.count, verdict.stop, verdict.probes) == (1, None, ("p/a",))
    assert (after.running, after.stated, after.policy, after.facts.revision) == (2, (CORE,), leaf.policy, 8)
    assert after.limits == {"other": LimitState(5.0), "j": LimitState(EPOCH + 0.5, interval=0.5, drawn_at=EPOCH)}
    assert after.facts.breaker.probe_owner == "w"
    assert calm == level("p", calm=True)
    calm_but = Level(ResourceFacts("p", calm=True), PLAIN, {}, 1, (CORE,))
    capped = Level(ResourceFacts("p", calm=True), Policy(concurrency=9), {}, 1)
    assert [one.running for one in admit([calm_but, capped], 3, NOW, "w").levels] == [4, 4]


def test_of_several_that_wanted_to_start_the_others_wait_for_the_probe():
    policy = Policy(breaker=BreakerPolicy(probe_lease=7))
    levels = [level("p/a/x", calm=True), level("p/a", breaker=DUE), level("p", policy, breaker=replace(DUE, reopens=3))]
    assert admit(levels, 1, NOW, "w").stop is None
    verdict = admit(levels, 2, NOW, "w")
    assert (verdict.count, verdict.stop) == (1, Stop("p/a", "breaker", at(60), code="probing"))
    capped = [*levels[:2], replace(levels[2], policy=Policy(concurrency=1))]
    assert admit(capped, 5, NOW, "w").stop == Stop("p/a", "breaker", at(60), code="probing")
    assert releasable(level(breaker=DUE).facts, PLAIN, NOW, 9) == 1
    assert releasable(level(breaker=HALF).facts, PLAIN, NOW, 9) == 0


# -- shares ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slots", "free", "quick", "alone", "many"),
    [(1, 1, 1, 1, 1), (2, 1, 1, 1, 1), (19, 1, 18, 9, 1), (40, 4, 36, 20, 4)],
)
def test_shares_of_slots(slots, free, quick, alone, many):
    assert (spare(slots), share(slots, 3, QUICK / 2), share(slots, 0), share(slots, 1), share(slots, 999)) == (
        free, quick, alone, alone, many,
    )  # fmt: skip
    assert share(40, 2, QUICK) == 18
    assert (mean(1.0, 0.5), mean(0.0, 60.0), mean(0.5, 0.5)) == (0.9, 0.2, 0.5)
