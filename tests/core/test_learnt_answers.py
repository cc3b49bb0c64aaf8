"""The rule of learnt limits: what answers leave of the state before, and what may be drawn and is shown by it."""

from dataclasses import asdict, replace
from datetime import UTC, datetime

import pytest

from resilient.core.gates.learnt import (
    LOWEST,
    MARGIN,
    PROBE,
    QUIET,
    RAMP,
    STARTED,
    Answers,
    Learnt,
    Refusal,
    allowance,
    answered,
    current,
    summary,
    throttled,
)
from tests.core.test_learnt_steps import BUSY, FREE, NOW, QUOTA, SLOTS, changes

TOP = replace(BUSY, ceiling=10.5, step_at=NOW - 40, uses=400)

# -- answers ---------------------------------------------------------------------------------------------------------

COUNTED = {"accepted": 63, "uses": 53, "count": 23, "used_at": NOW}


def grown(s, accepted=3, **words):
    """What answers change, beside what is counted."""
    after = answered(s, Answers(s.generation, accepted), NOW, **words)
    return after and {
        name: value for name, value in changes(s, after).items() if name not in ("accepted", "count", "used_at")
    }


@pytest.mark.parametrize(
    ("since", "changed"),
    [
        (NOW - 5, {}),
        (NOW - 10, {"since": NOW - 10}),
        (NOW - 11, {"count": 3, "since": NOW, "count_before": 20, "since_before": NOW - 11}),
    ],
)
def test_answers_are_counted_in_stretches(since, changed):
    s = replace(BUSY, since=since, step_at=NOW - 0.5)
    expected = asdict(s) | COUNTED | changed
    assert asdict(answered(s, Answers(4, 3), NOW)) == expected


@pytest.mark.parametrize(
    ("s", "changed"),
    [
        (replace(BUSY, ceiling=20.0, step_at=NOW - 1), {"rate": 12.5}),
        (replace(BUSY, ceiling=20.0, step_at=NOW - 0.9), None),
        (replace(BUSY, ceiling=20.0, resumes_at=NOW - 0.9), None),
        (replace(BUSY, ceiling=12.0), {"rate": 12 * MARGIN}),
        (replace(BUSY, ceiling=30.0), {"rate": 12.5}),
        (replace(BUSY, ceiling=31.0), {"rate": 20}),  # far from what was refused
        (replace(BUSY, ceiling=20.0, window=10.0), {"rate": 12.5}),
        (replace(BUSY, ceiling=20.0, window=10.0, step_at=NOW - 9.9), None),
        (replace(BUSY, ceiling=20.0, window=60.0), {"rate": 12.5}),
        (replace(BUSY, ceiling=2.0, rate=1.0, step_at=NOW - 6), {"rate": 1.25}),
        (replace(BUSY, ceiling=2.0, rate=1.0, step_at=NOW - 5.9), None),
        (replace(BUSY, ceiling=2.0, rate=1.0, step_at=NOW - 2, rests=-3), {"rate": 1.25}),
        (replace(BUSY, ceiling=4.0, rate=1.0, step_at=NOW - 2), {"rate": 2}),
        (replace(BUSY, ceiling=4.0, rate=1.0, step_at=NOW - 1.9), None),
        (replace(BUSY, ceiling=0.2, rate=0.1, step_at=NOW - 30), {"rate": 0.125}),
        (replace(BUSY, ceiling=0.2, rate=0.1, step_at=NOW - 29.9), None),
    ],
)
def test_a_rate_grows_in_steps_up_to_what_was_refused(s, changed):
    expected = {"uses": 53} if changed is None else changed | {"good": s.rate, "step_at": NOW, "uses": 0}
    assert grown(s) == pytest.approx(expected)


PROBED = {"rate": 10 * PROBE, "good": 10, "plateau": 10, "steady": 10, "ceiling": None, "step": PROBE**1.5}


@pytest.mark.parametrize(
    ("s", "changed"),
    [
        (TOP, PROBED),
        (replace(TOP, step_at=NOW - 39.9), None),
        (replace(TOP, rests=2), None),
        (replace(TOP, rests=0, step_at=NOW - 20, uses=200), PROBED),
        (replace(TOP, rests=9, step_at=NOW - 600, resumes_at=NOW - 700, uses=6000), PROBED),
        (replace(TOP, rests=9, step_at=NOW - 599, resumes_at=NOW - 700, uses=6000), None),
        # after a drop: sooner
        (replace(TOP, rests=9, dropped_at=NOW - 60, step_at=NOW - 15, uses=200), PROBED),
        (replace(TOP, rests=9, dropped_at=NOW - 60, step_at=NOW - 14.9, uses=200), None),
        (replace(TOP, rests=9, dropped_at=NOW - 160), PROBED),
        (replace(TOP, rests=9, dropped_at=NOW - 161), None),
        (replace(TOP, rests=1, dropped_at=NOW - 999), PROBED),
        # of a bucket
        (replace(TOP, drains=2, drain_rate=9.0), PROBED | {"steady": 0.0, "drains": 2}),
        (replace(TOP, drains=2, drain_rate=8.6), PROBED | {"drains": 0}),
        (replace(TOP, windowed=True, returned=True), PROBED | {"windowed": False, "returned": False}),
        # it goes on
        (replace(TOP, ceiling=None, plateau=9.0, step=1.5, step_at=NOW - 1, windowed=True),
         {"rate": 15, "good": 10, "step": 1.5**1.5, "windowed": False}),
        (replace(TOP, ceiling=None, plateau=9.0, step=1.9, step_at=NOW - 1), {"rate": 19, "good": 10, "step": 2}),
        (replace(TOP, ceiling=None, plateau=9.0, step=1.9, step_at=NOW - 1, drains=1),
         {"rate": 19, "good": 10, "step": 2}),
        (replace(TOP, ceiling=None, plateau=9.0, step=1.15, step_at=NOW - 1, drains=2),
         {"rate": 11.5, "good": 10, "step": 1.2}),
        # unused: it proves nothing
        (replace(TOP, uses=336), {"step": PROBE}),
        (replace(TOP, uses=337), PROBED),
        (replace(TOP, uses=336, step=PROBE), {}),
    ],
)  # fmt: skip
def test_above_what_was_refused_a_rate_is_tried(s, changed):
    expected = {"uses": s.uses + 3} if changed is None else changed | {"step_at": NOW, "uses": 0}
    expected = {name: value for name, value in expected.items() if value != getattr(s, name)}
    assert grown(s) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("uses", "learnt_ago", "forgotten"), [(100, 601, True), (197, 601, False), (196, 601, True), (100, 600, False)]
)
def test_a_rate_of_which_less_than_half_is_used_is_forgotten(uses, learnt_ago, forgotten):
    s = replace(TOP, uses=uses, changed_at=NOW - learnt_ago)
    assert (grown(s) is None) is forgotten


RISEN = replace(TOP, ceiling=None, plateau=8.0, former=19.0, dropped_at=NOW - 599, step=1.5, step_at=NOW - 1)


@pytest.mark.parametrize(
    ("s", "is_back"),
    [
        (RISEN, True),
        (replace(RISEN, plateau=8.7), False),
        (replace(RISEN, plateau=None), False),
        (replace(RISEN, dropped_at=NOW - 600), False),
        (replace(RISEN, former=10.0), False),
    ],
)
def test_a_limit_that_rises_again_comes_back_in_one_step(s, is_back):
    back = {
        "rate": 19,
        "good": 10,
        "step": PROBE,
        "ceiling": 19 / MARGIN,
        "plateau": None,
        "former": 0,
        "dropped_at": 0,
    }
    back |= {"returned": True}
    on = {"rate": 15, "good": 10, "step": 1.5**1.5}
    expected = (back if is_back else on) | {"step_at": NOW, "uses": 0}
    assert grown(s) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("s", "changed"),
    [
        (SLOTS, {"slots": 6, "rests": 1, "step_at": NOW}),
        (replace(SLOTS, step_at=NOW - 20), {}),
        (replace(SLOTS, resumes_at=NOW - 20, step_at=NOW - 30), {}),
        (replace(SLOTS, rests=1), {"slots": 6, "rests": 2, "step_at": NOW}),
        (replace(SLOTS, rests=2), {}),
        (replace(SLOTS, rests=9, resumes_at=NOW - 601, step_at=NOW - 601), {"slots": 6, "rests": 10, "step_at": NOW}),
        (replace(SLOTS, rests=9, resumes_at=NOW - 600, step_at=NOW - 600), {}),
        (replace(SLOTS, accepted=12, step_at=NOW), {"strikes": 0}),  # it lasts
        (replace(SLOTS, accepted=11, step_at=NOW), {}),
        (replace(SLOTS, accepted=12, step_at=NOW, resumes_at=NOW - 3), {}),
        (replace(SLOTS, accepted=12), {"slots": 6, "rests": 1, "step_at": NOW, "strikes": 0}),
    ],
)
def test_slots_grow_by_one_ever_later(s, changed):
    assert grown(s) == {"uses": 3} | changed


@pytest.mark.parametrize(
    ("accepted", "unreported", "quota"), [(90, 3, 100), (97, 3, 101), (100, 3, 107), (96, 3, 100), (300, 0, 501)]
)
def test_more_than_a_window_held_is_tried(accepted, unreported, quota):
    s = answered(replace(QUOTA, accepted=accepted), Answers(4, unreported), NOW)
    assert s.quota == quota


@pytest.mark.parametrize(
    ("s", "kept"),
    [
        (replace(FREE, resumes_at=NOW - RAMP), False),
        (replace(FREE, resumes_at=NOW - RAMP + 1), True),
        (replace(FREE, resumes_at=NOW - RAMP + 1, throttles=0), False),
        (replace(FREE, resumes_at=NOW - RAMP + 1, throttles=0, accepted=STARTED - 4), True),
    ],
)
def test_what_is_counted_after_a_rest_is_kept_for_a_while(s, kept):
    assert (answered(s, Answers(4, 3), NOW) is not None) is kept


LATE_SLOTS = replace(SLOTS, changed_at=NOW - 2, basis=3)
LATE_RATE = replace(BUSY, changed_at=NOW - 3, resumes_at=NOW - 9)
LATE_QUOTA = replace(QUOTA, changed_at=NOW - 3, resumes_at=NOW - 9)


@pytest.mark.parametrize(
    ("s", "peak", "changed"),
    [
        (LATE_SLOTS, 0, {"basis": 9, "slots": 8}),
        (replace(LATE_SLOTS, slots=9), 0, {"basis": 9}),
        (LATE_SLOTS, 2, {"slots": 7}),
        (replace(LATE_SLOTS, changed_at=NOW - 29), 0, {"basis": 9, "slots": 8}),
        (replace(LATE_SLOTS, changed_at=NOW - 30), 0, {}),
        (replace(LATE_SLOTS, basis=0), 0, {}),
        (LATE_RATE, 0, {"basis": 15, "rate": 10 * 15 / 9, "ceiling": 11 * 15 / 9}),
        (replace(LATE_RATE, ceiling=None), 0, {"basis": 15, "rate": 10 * 15 / 9}),
        (replace(LATE_RATE, basis=0), 0, {}),
        (replace(LATE_RATE, changed_at=NOW - 4), 0, {}),
        (replace(LATE_RATE, changed_at=NOW - 4, resumes_at=NOW), 0,
         {"basis": 15, "rate": 10 * 15 / 9, "ceiling": 11 * 15 / 9}),
        (LATE_QUOTA, 0, {"basis": 106, "quota": 106}),
        (replace(LATE_QUOTA, changed_at=NOW - 4), 0, {}),
        (replace(FREE, basis=3, changed_at=NOW), 0, {}),
    ],
)  # fmt: skip
def test_answers_of_the_generation_before_belong_to_the_estimate(s, peak, changed):
    after = answered(s, Answers(3, 6, peak), NOW)
    assert changes(s, after) == pytest.approx(changed)
    assert answered(s, Answers(2, 6, peak), NOW) is s


# -- what may be drawn, and what is shown ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("s", "bounds", "rate", "ceiling"),
    [
        (LATE_RATE, None, 50 / 3, 55 / 3),
        (LATE_RATE, (1.0, 12.0), 12, 55 / 3),
        (replace(LATE_RATE, ceiling=None), (1.0, 12.0), 12, None),
        (LATE_RATE, (30.0, 50.0), 30, 30),
        (LATE_RATE, (17.0, 50.0), 17, 55 / 3),
        (replace(LATE_RATE, rate=0.001, ceiling=0.002), (0.0001, 50.0), LOWEST, LOWEST),
        (replace(LATE_RATE, rate=0.001, ceiling=0.002), None, LOWEST, LOWEST),
    ],
)
def test_a_rate_stays_within_bounds(s, bounds, rate, ceiling):
    after = answered(s, Answers(3, 6), NOW, bounds=bounds)
    assert (after.rate, after.ceiling) == (pytest.approx(rate), ceiling and pytest.approx(ceiling))


def test_every_event_and_answer_knows_the_bounds():
    bounds = (0.1, 9.0)
    r = Refusal(4, 1.0, 6, 7.0)
    assert throttled(replace(BUSY, rate=50.0), r, 8, NOW, NOW + 2, bounds=bounds).rate == 9
    assert answered(TOP, Answers(4, 9), NOW, bounds=bounds).rate == 9


@pytest.mark.parametrize(
    ("accepted", "elapsed", "most"),
    [
        (0, -5, 1),
        (0, 0, 1),
        (0, 2.9, 1),
        (0, 3, 2),
        (3, 3, 4),
        (3, 9, 8),
        (31, 0, 32),
        (32, 0, None),
        (0, 29.9, 512),
        (0, 30, None),
    ],
)
def test_allowance(accepted, elapsed, most):
    assert allowance(Learnt(accepted=accepted, resumes_at=NOW - elapsed), NOW) == most


@pytest.mark.parametrize("name", ["used_at", "resumes_at", "reset_at"])
def test_nothing_holds_after_an_hour_without_a_request(name):
    s = Learnt(**{name: NOW - QUIET})
    assert current(s, NOW) is s
    assert current(s, NOW + 1) is None


WHEN = datetime.fromtimestamp(NOW - 100, UTC)
SHOWN = {"kind": "rate", "rate": 10.0, "at_once": None, "in_a_window": None, "at": WHEN, "throttles": 5}


@pytest.mark.parametrize(
    ("s", "shown"),
    [
        (None, None),
        (FREE, None),
        (replace(QUOTA, quota=19), None),
        (BUSY, SHOWN),
        (replace(BUSY, rate=1.23456, slots=3, quota=30), SHOWN | {"rate": 1.23}),
        (SLOTS, SHOWN | {"kind": "slots", "rate": None, "at_once": 5, "throttles": 1}),
        (replace(QUOTA, quota=20), SHOWN | {"kind": "quota", "rate": None, "in_a_window": 20, "throttles": 1}),
        (replace(BUSY, used_at=NOW - 9999, resumes_at=0.0), None),
    ],
)
def test_what_is_shown(s, shown):
    assert summary(s, NOW) == shown


@pytest.mark.parametrize(
    ("doc", "kind"),
    [
        ({}, "free"),
        ({"kind": "rate", "rate": 0.5}, "rate"),
        ({"kind": "rate", "rate": 0}, None),
        ({"kind": "slots"}, "slots"),
        ({"kind": "quota", "rate": -1}, "quota"),
        ({"kind": "rate", "rate": 1, "accepted": None}, None),
        ({"kind": "rate", "rate": "1"}, None),
        ({"kind": None}, None),
        ({"kind": []}, None),
    ],
)
def test_what_a_row_holds(doc, kind):
    s = Learnt.from_json(doc)
    assert (s and s.kind) == kind
