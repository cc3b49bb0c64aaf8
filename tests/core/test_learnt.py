"""The rule of learnt limits: what an event teaches, what no sequence of them may do, and what a fleet gets by it."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.core.gates import learnt
from resilient.core.gates.admission import SLOW_STEP, Level, ResourceFacts, admit, in_force, needs_count
from resilient.core.gates.learnt import (
    CLOSE,
    MARGIN,
    Answers,
    Learnt,
    Refusal,
    allowance,
    answered,
    current,
    throttled,
)
from resilient.core.gates.policy import Policy
from resilient.testing.fake.meter import AtOnce, Bucket, Fixed, Shared, Sliding, Stray
from tests.core.fleet import Fleet

NOW = 1_000_000.0


def refused(state=None, *, told=1.0, accepted=5, seconds=0.2, peak=3, at=NOW, rest=2.0, generation=None, **words):
    """The state after a refusal of a request that was sent under its generation, or under ``generation``."""
    sent = (state.generation if state else 0) if generation is None else generation
    new = (state.generation if state else 0) + 1
    return throttled(state, Refusal(sent, told, accepted, seconds, peak), new, at, at + rest, **words)


@pytest.mark.parametrize(
    ("told", "accepted", "seconds", "kind", "rate"),
    [
        (1.0, 5, 0.2, "rate", 5 * CLOSE),  # a burst; a whole second after it: 5 in a second
        (10.0, 100, 0.5, "rate", 10 * CLOSE),  # 100 in ten seconds
        (1.0, 800, 20.0, "rate", 40 * MARGIN),  # no burst: what went before
        (0.8, 20, 0.2, "rate", 20 * CLOSE),  # to the millisecond
        (45.0, 100, 3.0, "quota", None),
        (3000.0, 900, 60.0, "quota", None),
        (None, 4, 1.0, "slots", None),
    ],
)
def test_the_first_refusal_tells_what_kind_of_limit_it_is(told, accepted, seconds, kind, rate):
    s = refused(told=told, accepted=accepted, seconds=seconds, peak=4)
    assert (s.kind, s.throttles, s.generation, s.previous) == (kind, 1, 1, 0)
    assert s.rate == pytest.approx(rate) if rate else s.rate is None
    assert s.quota == (accepted if kind == "quota" else 0)
    assert s.slots == (4 if kind == "slots" else 0)


@pytest.mark.parametrize("idle", [0.2, 4.0, 8.0, 20.0, 300.0])
@pytest.mark.parametrize("reported", [0, 3])
def test_idle_time_after_a_rest_is_no_pace(idle, reported):
    """An account that waits after a circuit, or is connected and has no job yet; then five pass within a moment."""
    s, at = learnt.rested(None, 1, NOW, NOW), NOW + idle
    if reported:
        s = answered(s, Answers(1, reported), at + 0.1)
    s = refused(s, told=2.0, accepted=5 - reported, seconds=0.13, at=at + 0.13)
    assert s.kind == "rate"
    assert 5 / 3.2 * CLOSE <= s.rate <= 5


def test_a_refusal_of_an_older_generation_is_the_same_event():
    s = refused()
    assert learnt.is_fresh(None, 0)
    assert learnt.is_fresh(s, s.generation)
    assert not learnt.is_fresh(s, s.previous)


def test_answers_that_others_counted_make_the_estimate_larger():
    s = answered(refused(accepted=2), Answers(0, 3), NOW + 0.5)
    assert s.rate == pytest.approx(5 * CLOSE)
    assert answered(s, Answers(0, 3), NOW + 60) == s, "so late they belong to something else"
    assert answered(s, Answers(17, 3), NOW + 0.5) is s


def test_what_was_in_flight_beside_a_refusal_fits():
    s = refused(told=None, accepted=0, peak=0)
    for n in range(4):
        s = answered(s, Answers(0, 1), NOW + 1 + n / 10)
    assert s.slots == 4


def test_a_rate_grows_to_just_below_what_was_refused_and_stays_there():
    s = replace(refused(), rate=2.0, ceiling=5.0)
    rates = []
    for n in range(15):
        s = answered(s, Answers(s.generation, int(s.rate)), NOW + 3 + n)
        rates.append(s.rate)
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(5.0 * MARGIN)


def test_a_failed_probe_goes_back_to_the_plateau_and_the_next_one_comes_later():
    s = replace(refused(), resumes_at=NOW, rests=0)
    at = NOW
    for _ in range(60):
        at += 1
        s = answered(s, Answers(s.generation, 5), at)
        if s.ceiling is None:
            break
    assert at - NOW == pytest.approx(learnt.CALM, abs=2)
    plateau, probe = s.plateau, s.rate
    assert probe == pytest.approx(plateau * learnt.PROBE)
    s = refused(s, accepted=3, at=at + 1)
    assert (s.rate, s.rests, s.ceiling is not None) == (plateau, 1, True)


def dropped():
    """A limit of 20 a second that stayed, and dropped to 5."""
    s = Learnt("rate", 1, rate=19.0, ceiling=20.0, steady=19.0, throttles=2, resumes_at=NOW - 0.5, changed_at=NOW - 3)
    return refused(s, accepted=5)


def until_probe(s):
    """The state at the beginning of its next probe, and the time."""
    at = s.resumes_at
    while s.ceiling is not None:
        at += 1
        s = answered(s, Answers(s.generation, int(s.rate) + 1), at)
    return s, at


def test_what_was_counted_in_a_round_window_is_tried_later_unless_it_was_wrong():
    s, at = until_probe(refused(accepted=30))
    assert at - s.resumes_at == pytest.approx(2 * learnt.CALM, abs=2)
    wrong = refused(refused(accepted=30), accepted=200, at=NOW + 10)
    s, at = until_probe(wrong)
    assert (s.rate < 30, at - s.resumes_at) == (True, pytest.approx(learnt.CALM, abs=3))


def test_a_limit_that_drops_before_the_first_probe_may_rise_to_where_it_was():
    s = refused(accepted=20)
    kept, later = s.rate, NOW + learnt.CALM + 3
    assert refused(refused(s, accepted=400, at=later), accepted=5, at=later + 2.3).former == kept
    assert refused(refused(s, accepted=40, at=NOW + 5), accepted=5, at=NOW + 7.3).former == 0.0, "it was not kept"


def test_after_a_drop_the_tries_come_sooner_and_then_ever_later():
    s = dropped()
    assert (s.former, s.rate < 6) == (19.0, True)
    s, at = until_probe(s)
    assert at - s.resumes_at == pytest.approx(learnt.CALM_AFTER_DROP, abs=3)
    s = replace(s, rests=5, dropped_at=at - 400, ceiling=s.rate / MARGIN, plateau=None, step_at=at, resumes_at=at)
    later = until_probe(s)[1] - at
    assert later == pytest.approx(400 * learnt.CALM_SHARE / (1 - learnt.CALM_SHARE), rel=0.1)


def test_a_probe_that_goes_well_after_a_drop_leads_back_to_the_former_rate():
    s, at = until_probe(dropped())
    rates = [s.rate]
    while s.rate < 19:
        at += 2
        s = answered(s, Answers(s.generation, 2 * int(s.rate) + 2), at)
        rates.append(s.rate)
    assert s.rate == 19.0
    assert rates[-2] < 8, "in one step"
    assert s.ceiling == pytest.approx(20.0), "and no further"
    assert refused(s, accepted=90, at=at + 5).rate > 15, "so late it says nothing about the step"
    s = refused(s, accepted=3, at=at + 1)
    assert s.rate == rates[-2], "it did not rise so far: what went well still does"
    assert answered(s, Answers(s.generation, 60), at + 13).rate > rates[-2], "and the tries go on soon"


@pytest.mark.parametrize(("accepted", "share"), [(1, 0.45), (10, 0.6), (100, 0.85)])
def test_the_more_was_let_through_before_a_refusal_the_less_it_lowers_the_rate(accepted, share):
    s = Learnt("rate", 1, rate=20.0, ceiling=21.0, throttles=2, resumes_at=NOW - 4, changed_at=NOW - 6)
    lower = refused(s, told=None, accepted=accepted)
    assert share * 20 < lower.rate < 0.95 * 20


def test_three_alike_are_a_bucket_and_two_are_chance():
    s = Learnt("rate", 1, rate=20.0, ceiling=21.0, throttles=2, resumes_at=NOW - 1, changed_at=NOW - 3, drain=2.0)
    second = refused(s, told=None, accepted=6)
    assert (second.matched, second.drains, second.rate > 8) == (True, 0, True)
    s = replace(second, resumes_at=NOW + 2)
    third = refused(s, told=None, accepted=6, at=NOW + 3)
    assert (third.drains, third.rate) == (1, pytest.approx(2.0 * MARGIN))


def test_a_rate_far_below_what_was_refused_comes_back_fast():
    """Two refusals in a row, on a machine that stood still, made it a tenth."""
    s = Learnt("rate", 1, rate=0.25, ceiling=2.66, throttles=5, resumes_at=NOW, changed_at=NOW, step_at=NOW)
    at, due = NOW, NOW
    while s.rate < 2.5:
        at += 1
        if at >= due:
            s, due = answered(s, Answers(1, 1), at), max(at, due) + 1 / s.rate
    assert at - NOW <= 45


def test_an_estimate_from_too_few_answers_is_tried_at_once():
    s = refused(accepted=1, seconds=3.7)
    rates, at = [s.rate], s.resumes_at
    while s.rate < 16:
        at += 1
        s = answered(s, Answers(s.generation, int(s.rate) + 1), at)
        rates.append(s.rate)
    assert rates[0] == 0.5, "one in the second that was told and a second more"
    assert at - s.resumes_at <= 15


def test_a_rate_that_is_not_used_does_not_grow_and_is_forgotten_in_the_end():
    s, at = refused(), NOW + 2
    while s is not None and at < NOW + 3_600:
        assert s.rate == pytest.approx(5 * CLOSE)
        at += 1
        s = answered(s, Answers(s.generation, 1), at)
    assert s is None
    assert learnt.FORGOTTEN < at - NOW < learnt.FORGOTTEN + 60


def test_after_a_long_quiet_nothing_holds():
    s = refused()
    assert current(s, NOW + 60) is s
    assert current(s, NOW + learnt.QUIET + 60) is None
    assert current(None, NOW) is None


def test_a_spent_window_does_not_cut_the_rate_but_is_remembered():
    s = learnt.rested(refused(), 2, NOW + 5, NOW + 65)
    assert (s.kind, s.rate) == ("rate", refused().rate)
    assert allowance(s, NOW + 65) == 1


def test_one_refusal_after_nothing_says_nothing_about_a_rate():
    s = refused(accepted=0, told=20.0)
    assert (s.kind, s.rate, s.throttles) == ("free", None, 1)
    s = refused(s, accepted=0, told=20.0, at=NOW + 30)
    assert s.kind == "free"
    assert refused(s, accepted=0, told=20.0, at=NOW + 60).kind == "rate", "so often it does"


def test_of_a_window_no_more_jobs_are_claimed_than_may_still_draw_from_it():
    s = refused(told=60.0, accepted=25)
    now = datetime.fromtimestamp(s.resumes_at + 40, UTC)
    facts = ResourceFacts("p/a", learnt=s)
    policy = in_force(Policy(), s, now)
    assert needs_count(facts, Policy(), now)
    assert admit([Level(facts, policy, {}, 0)], 100, now, "w").count == 25
    verdict = admit([Level(facts, policy, {}, 20)], 100, now, "w")
    assert (verdict.count, verdict.stop.gate) == (5, "limit")
    assert admit([Level(facts, policy, {}, 25)], 100, now, "w").stop.until >= now + SLOW_STEP


def test_what_passed_after_a_rest_that_taught_nothing_is_the_first_estimate():
    """Its answers are in the row already: the refusal itself counted none, and yet it is no limit of one a minute."""
    s = refused(accepted=0, seconds=0.0)
    s = answered(s, Answers(s.generation, 2), s.resumes_at + 0.3)
    s = refused(s, accepted=0, seconds=40.0, at=s.resumes_at + 0.5)
    assert (s.kind, s.burst) == ("rate", 2)
    assert s.rate == pytest.approx(2 * CLOSE)


def test_what_passed_after_a_throttle_that_taught_nothing_is_counted_for_a_while():
    """The load is back, and nothing else is known; but the next throttle comes soon, and then it is."""
    s = refused(accepted=0, seconds=0.0)
    s = answered(s, Answers(s.generation, 40), s.resumes_at + 1)
    assert (s.accepted, allowance(s, s.resumes_at + 1)) == (40, None)
    assert refused(s, accepted=2, seconds=3.0, at=s.resumes_at + 1.2).rate > 15
    assert answered(s, Answers(s.generation, 40), s.resumes_at + learnt.RAMP) is None


def test_what_was_sent_under_a_lesson_that_is_forgotten_is_no_measure():
    """Its process has counted since then only what it did not report yet."""
    s = throttled(None, Refusal(7, 1.0, 1, 3.1, 8), 9, NOW, NOW + 2)
    assert (s.kind, s.rate, s.throttles, s.generation) == ("free", None, 1, 9)


def test_more_than_the_last_window_held_is_tried_faster_and_faster():
    s, at, allowed = refused(told=60.0, accepted=25), NOW + 61, []
    for _ in range(6):
        allowed.append(s.quota)
        at += 1
        s = answered(s, Answers(s.generation, s.quota - s.accepted), at)
    assert allowed == [25, 26, 28, 32, 40, 56]


@pytest.mark.parametrize("late", [0, 1])
def test_slots_that_are_refused_again_and_again_were_a_rate(late):
    """Also if an answer was reported after the refusal that it belongs before."""
    s = refused(told=None, accepted=5)
    for n in range(3):
        s = refused(s, told=None, accepted=5 - late * (n == 1), at=s.resumes_at + 0.3)
    assert s.kind == "rate"
    assert s.rate == pytest.approx(5 * CLOSE), "each burst was as large as the one before: a window, and a short one"


def test_the_facts_may_say_that_it_is_a_limit_of_requests_at_once():
    assert refused(told=1.0, slots=True, peak=6).kind == "slots"
    assert refused(told=None, slots=False).kind == "rate"


def test_a_policy_bounds_the_rate():
    assert refused(accepted=500, bounds=(0.5, 50)).rate == 50
    assert refused(accepted=1, seconds=20.0, bounds=(0.5, 50)).rate == 0.5


def test_the_load_comes_back_as_it_is_answered():
    s = learnt.rested(None, 1, NOW, NOW + 2)
    assert allowance(None, NOW) is None
    assert allowance(s, NOW + 2) == 1
    s = answered(s, Answers(1, 1), NOW + 2.1)
    assert allowance(s, NOW + 2.1) == 2
    s = answered(s, Answers(1, 2), NOW + 2.2)
    assert allowance(s, NOW + 2.2) == 4
    assert allowance(s, NOW + 2 + 15) == 32, "slow answers hold nobody up for ever"
    assert answered(s, Answers(1, 40), NOW + 3) is None, "over, and nothing else is known"


@pytest.mark.parametrize(
    "doc",
    [
        None,
        [],
        "rate",
        {"kind": "new"},
        {"kind": "rate"},
        {"kind": "rate", "rate": -1},
        {"throttles": "many"},
        {"kind": "rate", "rate": 1, "ceiling": "high"},
        {"kind": "rate", "rate": 1, "plateau": [2]},
    ],
)
def test_what_cannot_be_read_is_nothing(doc):
    assert Learnt.from_json(doc) is None


def test_it_is_kept_as_json_and_newer_code_may_have_added_to_it():
    s = refused()
    assert Learnt.from_json(s.to_json() | {"newer": 1}) == s
    assert len(s.to_json()) < 20


STEPS = st.lists(
    st.tuples(
        st.sampled_from(("refused", "answered", "late", "quota")),
        st.floats(0.0, 400.0),
        st.one_of(st.none(), st.floats(0.0, 4000.0)),
        st.integers(0, 500),
    ),
    max_size=40,
)


@given(STEPS, st.sampled_from((None, (0.5, 50.0))))
def test_whatever_happens_a_rate_stays_possible(steps, bounds):
    s, now, generation = None, NOW, 0
    for what, later, told, number in steps:
        now += later
        if what == "refused":
            generation += 1
            r = Refusal(s.generation if s else 0, told, number, min(later, 20.0), number)
            s = throttled(s, r, generation, now, now + (told or 2.0), bounds=bounds)
        elif what == "quota":
            generation += 1
            s = learnt.rested(s, generation, now, now + (told or 2.0))
        elif s is not None:
            s = answered(s, Answers(s.generation if what == "answered" else s.previous, number), now, bounds=bounds)
        if s is None:
            continue
        assert Learnt.from_json(s.to_json()) == s
        assert allowance(s, now) is None or allowance(s, now) >= 1
        if s.kind == "rate":
            assert s.rate >= (bounds[0] if bounds else learnt.LOWEST)
            assert s.rate <= (bounds[1] if bounds else 1e9)
        if s.kind == "slots":
            assert s.slots >= 1
        if s.kind == "quota":
            assert s.quota >= 1


@given(st.floats(0.2, 200.0), st.floats(0.5, 1.0))
def test_a_rate_below_what_was_refused_stays_below_it_until_a_probe(rate, share):
    """Growing alone never crosses what is known to be too much before the plateau's rest is over."""
    s = Learnt("rate", 1, rate=rate * share * MARGIN, ceiling=rate, changed_at=NOW, step_at=NOW, resumes_at=NOW)
    at = NOW
    while s is not None and s.ceiling is not None and at < NOW + 2_000:
        at += 1
        s = answered(s, Answers(1, max(1, int(s.rate))), at)
        if s is not None and s.ceiling is not None:
            assert s.rate <= rate * MARGIN * 1.000001
    assert at >= NOW + learnt.CALM


# -- a fleet against a provider; the figures of whole runs are in `docs/limits.md` ---------------------------------

CHANGES = [(0.0, 20), (60.0, 5), (120.0, 20)]
PROVIDERS = {  # allowance, seconds, refused at first, share of refusals later, share of what is allowed
    "5 a second": (lambda: Sliding(5), 120, 10, 0.01, 0.90),
    "5 a second, told to the millisecond": (lambda: Sliding(5, hint="exact"), 120, 10, 0.01, 0.90),
    "40 at once, then 2 a second": (lambda: Bucket(40, 2), 120, 30, 0.03, 0.97),
    "100 a minute": (lambda: Fixed(100, 60, begun=20), 360, 60, 0.02, 0.97),
    "20, then 5, then 20 a second": (lambda: Sliding(CHANGES), 180, 15, 0.01, 0.86),
    "5 a second, nothing told": (lambda: Sliding(5, hint="none"), 120, 15, 0.02, 0.75),
    "30 a second": (lambda: Sliding(30), 120, 100, 0.005, 0.89),
    "1,000 an hour": (lambda: Fixed(1000, 3600, begun=1800), 7200, 100, 0.003, 0.99),
    "10 a second, half of it used by others": (lambda: Shared(Sliding(10), 5), 120, 15, 0.02, 0.85),
    # the rule was not made on these
    "12 a second, nothing told": (lambda: Sliding(12, hint="none"), 120, 15, 0.02, 0.85),
    "bucket of 100, 10 a second": (lambda: Bucket(100, 10), 120, 60, 0.02, 0.95),
    "100 in 10 seconds": (lambda: Sliding(100, 10.0), 120, 60, 0.01, 0.80),
    "60 in 15 seconds": (lambda: Sliding(60, 15.0), 240, 60, 0.01, 0.80),
    "3 a second": (lambda: Sliding(3), 120, 15, 0.02, 0.80),
    "10, then 2, then 10 a second": (lambda: Sliding([(0.0, 10), (70.0, 2), (150.0, 10)]), 240, 15, 0.01, 0.80),
    "20, then 5, then 8 a second": (lambda: Sliding([(0.0, 20), (60.0, 5), (120.0, 8)]), 180, 15, 0.01, 0.80),
    "50, then 20, then 50 a second": (lambda: Sliding([(0.0, 50), (55.0, 20), (100.0, 50)]), 180, 30, 0.01, 0.72),
    "20, then 5 a second for good": (lambda: Sliding([(0.0, 20), (60.0, 5)]), 300, 15, 0.01, 0.85),
    "bucket of 10, 1 a second, nothing told": (lambda: Bucket(10, 1, hint="none"), 240, 20, 0.15, 0.5),
}


@pytest.mark.parametrize("name", PROVIDERS)
def test_a_fleet_comes_near_a_limit_that_nobody_told(name):
    make, seconds, cold, later, good = PROVIDERS[name]
    found = Fleet(make(), seconds).run().figures()
    assert found["cold"] <= cold
    assert found["later"] <= later
    assert found["good"] >= good


@pytest.mark.parametrize(
    ("name", "good"), [("5 a second", 0.62), ("30 a second", 0.74), ("12 a second, nothing told", 0.68)]
)
def test_a_busy_machine_whose_requests_come_late_keeps_most_of_it(name, good):
    """Three steps of ten come 0.1 s late on average; at the best constant rate it would be 0.72 of 5 a second."""
    make, seconds, *_ = PROVIDERS[name]
    figures = [Fleet(make(), seconds, seed=seed, late=0.1).run().figures() for seed in range(1, 10)]
    assert sorted(one["good"] for one in figures)[4] >= good


def test_requests_at_once_are_a_limit_too():
    found = Fleet(AtOnce(4, 1.0), 120, latency=1.0).run().figures()
    assert (found["cold"] <= 8, found["later"] <= 0.005) == (True, True)
    assert found["good"] >= 0.88  # the claim's round trips are in it


def test_one_stray_refusal_soon_slows_nothing():
    fleet = Fleet(Stray(30, 20 / 0.235), 120, latency=0.2, slots=10).run()
    assert fleet.figures()["refused"] == 1
    assert fleet.figures()["good"] >= 0.88  # of which the slow beginning, twice, is most
    assert fleet.state.rate > 100
