"""The rule of learnt limits, step by step: what each event and each answer leaves of the state before."""

from dataclasses import asdict, replace

import pytest

from resilient.core.gates.learnt import (
    CLOSE,
    LOWEST,
    MARGIN,
    STARTED,
    Learnt,
    Refusal,
    is_fresh,
    prolonged,
    rested,
    slowed,
    throttled,
)

NOW = 1_000_000.0
BUSY = Learnt(
    "rate", 4, 3, changed_at=NOW - 100, resumes_at=NOW - 98, throttles=5, accepted=60, burst=9, basis=9,
    used_at=NOW - 1, count=20, since=NOW - 5, count_before=30, since_before=NOW - 15, rate=10.0, ceiling=11.0,
    good=9.0, step=1.25, step_at=NOW - 10, uses=50, rests=1, steady=8.0, drain=0.5,
)  # fmt: skip
FREE = Learnt(
    "free", 4, 3, changed_at=NOW - 100, resumes_at=NOW - 50, throttles=1, accepted=60, count=20, since=NOW - 5,
    count_before=30, since_before=NOW - 15, used_at=NOW - 1, step_at=NOW - 50,
)  # fmt: skip
SLOTS = replace(FREE, kind="slots", slots=5, strikes=1, basis=3, accepted=7)
QUOTA = replace(FREE, kind="quota", quota=100, basis=100, reset_at=NOW - 20)
BURST = replace(BUSY, resumes_at=NOW - 0.5, changed_at=NOW - 3, accepted=4, rate=20.0, ceiling=21.0)
PROBING = replace(BUSY, ceiling=None, plateau=5.0, rate=7.0, good=6.5)
# what is the same for every event
BEGUN = {
    "generation": 8, "previous": 4, "changed_at": NOW, "resumes_at": NOW + 2, "throttles": 6, "accepted": 0,
    "burst": 66, "step": 1, "step_at": NOW, "uses": 0, "good": None, "used_at": NOW, "count": 0, "since": NOW,
    "count_before": 0, "since_before": NOW,
}  # fmt: skip
LESSON = {"step", "good", "drain", "basis", *(set(asdict(BUSY)) - set(BEGUN))}


def changes(before, after):
    """The fields in which two states differ."""
    old = asdict(before or Learnt())
    return {name: value for name, value in asdict(after).items() if value != old[name]}


def refused(s, wait=1.0, accepted=6, *, seconds=7.0, peak=3, slots=None):
    return throttled(s, Refusal(s.generation if s else 0, wait, accepted, seconds, peak), 8, NOW, NOW + 2, slots=slots)


def lesson(s, *arguments, **words):
    after = refused(s, *arguments, **words)
    return {name: value for name, value in changes(s, after).items() if name in LESSON}


# -- events ----------------------------------------------------------------------------------------------------------


def test_an_event_begins_a_generation():
    rate = {"rate": 9 * MARGIN, "ceiling": 10, "basis": 0, "drain": 0.66}
    assert changes(BUSY, refused(BUSY)) == pytest.approx(BEGUN | rate)
    assert is_fresh(BUSY, 4)
    assert not is_fresh(BUSY, 3)


def test_a_rest_begins_one_too_and_teaches_nothing():
    first = Learnt(generation=3, resumes_at=NOW + 5, step_at=NOW, used_at=NOW, since=NOW, since_before=NOW)
    assert rested(None, 3, NOW, NOW + 5) == first
    begun = {name: value for name, value in BEGUN.items() if name not in ("changed_at", "throttles", "burst")}
    assert changes(BUSY, rested(BUSY, 8, NOW, NOW + 2)) == begun | {"basis": 0}
    above = rested(replace(BUSY, ceiling=None, rate=9.5, step_at=NOW + 1), 8, NOW, NOW + 2)
    assert (above.ceiling, above.step_at) == (pytest.approx(10), NOW + 1)
    assert rested(FREE, 8, NOW, NOW + 2).ceiling is None
    assert rested(replace(QUOTA, basis=7), 8, NOW, NOW + 2).basis == 100


@pytest.mark.parametrize(("until", "end"), [(NOW + 9, NOW + 9), (NOW - 99, NOW - 98)])
def test_the_longer_rest_counts(until, end):
    assert prolonged(BUSY, until) == replace(BUSY, resumes_at=end)


@pytest.mark.parametrize(
    ("throttles", "accepted", "unreported", "wait", "kind", "count"),
    [
        (0, 0, 0, 20.0, "free", 1),
        (1, 0, 0, 20.0, "free", 2),
        (2, 0, 0, 20.0, "rate", 3),  # so often it does
        (1, 1, 0, 20.0, "rate", 2),
        (1, 0, 1, 20.0, "rate", 2),
        (1, 1, 1, 20.0, "rate", 2),
        (1, 0, 0, None, "slots", 2),
    ],
)
def test_a_refusal_after_nothing_says_nothing(throttles, accepted, unreported, wait, kind, count):
    before = replace(FREE, throttles=throttles, accepted=accepted)
    s = refused(before, wait, unreported)
    assert (s.kind, s.throttles, s.generation, s.resumes_at) == (kind, count, 8, NOW + 2)
    assert kind != "free" or s == replace(rested(before, 8, NOW, NOW + 2), throttles=count)


def test_nothing_is_known_of_what_was_sent_under_a_lesson_that_is_forgotten():
    told = throttled(None, Refusal(7, 1.0, 6, 7.0), 8, NOW, NOW + 2)
    assert told == replace(rested(None, 8, NOW, NOW + 2), throttles=1)
    assert throttled(None, Refusal(7, None, 6, 7.0), 8, NOW, NOW + 2).kind == "slots"


@pytest.mark.parametrize(
    ("s", "times", "changed"),
    [
        (BUSY, 2.0, {"rate": 5, "ceiling": 10}),
        (PROBING, 2.0, {"rate": 3.5, "ceiling": 7, "plateau": None}),
        (replace(BUSY, rate=0.02), 2.0, {"rate": LOWEST, "ceiling": 0.02}),
        (SLOTS, 2.0, {"slots": 2, "strikes": 0}),
        (SLOTS, 9.0, {"slots": 1, "strikes": 0}),
        (FREE, 2.0, {"kind": "slots", "slots": 3}),
        (None, 2.0, {"kind": "slots", "slots": 3}),
    ],
)
def test_slow_answers_leave_half_and_nobody_rests(s, times, changed):
    before = s or Learnt()
    begun = BEGUN | {"previous": before.generation, "throttles": before.throttles + 1, "resumes_at": NOW}
    expected = asdict(before) | begun | {"accepted": STARTED, "basis": 0, "burst": before.burst} | changed
    expected["good"] = None
    assert asdict(slowed(s, Refusal(4, peak=7), 8, NOW, times)) == pytest.approx(expected)


# -- which kind of limit it is ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("s", "wait", "slots", "changed"),
    [
        (FREE, 30.0, None, {"kind": "quota", "quota": 66, "basis": 66, "reset_at": NOW + 30}),
        (BUSY, 60.0, True, {"kind": "quota", "quota": 66, "basis": 66, "reset_at": NOW + 60, "rate": None}),
        (QUOTA, 10.0, None, {"quota": 66, "basis": 66, "reset_at": NOW + 10}),  # 30 s after the window before
        (FREE, None, None, {"kind": "slots", "slots": 3, "strikes": 1, "basis": 1}),
        (FREE, 1.0, True, {"kind": "slots", "slots": 3, "strikes": 1, "basis": 1}),
        (BUSY, 1.0, True, {"kind": "slots", "slots": 3, "strikes": 1, "rests": 0, "basis": 1}),
        (SLOTS, 1.0, True, {"slots": 4, "basis": 0}),
        (replace(SLOTS, slots=1), 1.0, True, {"basis": 0}),
        (SLOTS, None, None, {"slots": 4, "strikes": 2, "basis": 0}),
        (replace(SLOTS, slots=2, strikes=2), None, None, {"slots": 1, "strikes": 3, "basis": 0}),
    ],
)
def test_kinds(s, wait, slots, changed):
    step = {"good": None, "step": 1.0, "drain": 0.66}
    expected = changed | {name: value for name, value in step.items() if getattr(s, name) != value}
    if s.kind != "rate":
        expected.pop("drain")
    assert lesson(s, wait, slots=slots) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("s", "wait", "slots"),
    [
        (FREE, 29.9, None),
        (replace(QUOTA, reset_at=NOW - 19.9), 10.0, None),
        (FREE, None, False),
        (SLOTS, None, False),
        (SLOTS, 1.0, None),
        (replace(SLOTS, slots=1), None, None),
        (replace(SLOTS, strikes=3), None, None),
    ],
)
def test_anything_else_is_a_rate(s, wait, slots):
    assert refused(s, wait, slots=slots).kind == "rate"


@pytest.mark.parametrize(("peak", "slots"), [(0, 1), (1, 1), (9, 9)])
def test_at_least_one_fits_at_once(peak, slots):
    assert refused(None, None, peak=peak).slots == slots


# -- the first estimate ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wait", "accepted", "seconds", "changed"),
    [
        (1.0, 5, 0.2, {"rate": 5 * CLOSE, "ceiling": 5, "rests": 1, "window": 1, "windowed": True, "basis": 5}),
        (3.0, 16, 0.2, {"rate": 5 * CLOSE, "ceiling": 5, "window": 3.2, "windowed": True, "basis": 16}),
        (1.0, 8, 1.0, {"rate": 8 * MARGIN, "ceiling": 8, "basis": 8}),  # no burst
        (5.0, 12, 3.0, {"rate": 4 * MARGIN, "ceiling": 4, "basis": 12}),
        (5.0, 12, 2.5, {"rate": 12 / 7.5 * CLOSE, "ceiling": 1.6, "window": 7.5, "windowed": True, "basis": 12}),
        (1.0, 800, 20.0, {"rate": 40 * MARGIN, "ceiling": 40, "rests": -2, "basis": 800}),
        (1.0, 40, 10.0, {"rate": 4 * MARGIN, "ceiling": 4, "rests": -2, "basis": 40}),
        (1.0, 36, 9.0, {"rate": 4 * MARGIN, "ceiling": 4, "basis": 36}),
        (1.0, 5, 2.0, {"rate": 2.5 * MARGIN, "ceiling": 2.5, "basis": 5}),
        (1.0, 4, 5.0, {"rate": 0.8, "plateau": 0.8, "rests": -3, "step": 2, "basis": 4}),  # from too few
        (1.0, 4, 16.0, {"rate": 0.5, "plateau": 0.5, "rests": -3, "step": 2, "basis": 4}),
        (29.0, 40, 4000.0, {"rate": LOWEST * MARGIN, "ceiling": LOWEST, "rests": -2, "basis": 40}),
        (None, 10, 5.0, {"rate": 2 * MARGIN, "ceiling": 8, "basis": 10}),
        (None, 0, 5.0, {"rate": LOWEST, "ceiling": 4 * LOWEST, "basis": 1}),
    ],
)
def test_the_first_refusal_of_all(wait, accepted, seconds, changed):
    expected = {"kind": "rate"} | changed
    expected["rate"] = max(expected["rate"], LOWEST)
    assert lesson(None, wait, accepted, seconds=seconds, slots=False) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("s", "wait", "accepted", "rate"),
    [
        (FREE, 1.0, 6, 56 / 15),
        (replace(FREE, count_before=0), 1.0, 4, 24 / 5),
        (replace(FREE, resumes_at=NOW - 4), 1.0, 6, 56 / 4),
        (replace(FREE, count_before=0, since=NOW - 0.5, resumes_at=NOW - 4), 1.0, 6, 26),
        (FREE, None, 6, 0.66),  # since the event before
        (replace(FREE, accepted=0), None, 6, 0.06),
        (replace(FREE, changed_at=NOW - 120), None, 6, 56 / 15),  # so long ago it says nothing
        (replace(FREE, changed_at=NOW - 119), None, 53, 113 / 119),
        (replace(FREE, generation=0), 1.0, 6, 56 / 15),  # after a rest the row has counted
        (replace(FREE, changed_at=0.0), 1.0, 6, 56 / 15),
        (replace(FREE, generation=0, changed_at=0.0), 1.0, 14, 2),  # nothing has
    ],
)
def test_the_first_estimate_of_a_row_that_counts(s, wait, accepted, rate):
    assert refused(s, wait, accepted, slots=False).rate == pytest.approx(rate * MARGIN)


@pytest.mark.parametrize(
    ("burst", "accepted", "elapsed", "wait", "rate"),
    [
        (20, 17, 0.5, None, 20),
        (20, 23, 0.5, None, 23),
        (20, 16, 0.5, None, None),
        (2, 1, 0.5, None, 2),
        (2, 4, 0.5, None, None),
        (20, 20, 1.0, None, None),
        (0, 1, 0.5, None, None),
    ],
)
def test_two_bursts_alike_are_a_window_of_a_second(burst, accepted, elapsed, wait, rate):
    s = replace(SLOTS, burst=burst, strikes=3, accepted=0, resumes_at=NOW - elapsed, changed_at=NOW - 10)
    after = refused(s, wait, accepted)
    assert after.window == (0 if rate is None else 1)
    assert after.rate == pytest.approx(accepted / 10 * MARGIN if rate is None else rate * CLOSE)


@pytest.mark.parametrize(
    ("elapsed", "wait", "window"),
    [
        (0.2, 0.8, 1.0),
        (0.05, 0.8, 0.85),
        (0.2, 0.92, 1.0),
        (0.1, 1.04, 1.0),  # a whole second, but for what has passed of it
        (0.1, 1.06, 1.16),
        (0.1, 0.96, 1.0),
        (0.3, 2.0, 2.3),
        (0.5, 9.5, 10.0),
        (0.5, 10.0, 10.0),
        (0.9, 10.0, 10.0),
        (0.1, 9.0, 9.1),
        (0.5, 10.5, 11.0),
        (1.0, 9.1, 10.0),
        (2.0, 25.0, 27.0),
    ],
)
def test_the_window_that_a_burst_shows(elapsed, wait, window):
    assert refused(None, wait, 9, seconds=elapsed).window == pytest.approx(window)


# -- a rate that is refused ------------------------------------------------------------------------------------------

USUAL = {"basis": 0, "good": None, "step": 1.0, "drain": 0.66}
OFBURST = USUAL | {"basis": 10, "drain": 10 / 3, "window": 1, "windowed": True}
SAME = replace(BUSY, matched=True, drain=0.65)


@pytest.mark.parametrize(
    ("s", "words", "changed"),
    [
        (BUSY, {}, {"rate": 9 * MARGIN, "ceiling": 10}),
        (BUSY, {"wait": None}, {"rate": 9 * MARGIN, "ceiling": 10}),
        (replace(BUSY, good=None), {}, {"rate": 10 * (1 - 1 / 8.6) * MARGIN, "ceiling": 10}),
        (replace(BUSY, good=99.0), {}, {"rate": 10 * MARGIN, "ceiling": 10}),
        (replace(BUSY, accepted=1494), {}, {"rate": 10 * MARGIN, "ceiling": 10, "drain": 15}),
        (replace(BUSY, rests=-2), {}, {"rate": 9 * MARGIN, "ceiling": 10, "rests": 0}),
        (replace(BUSY, step_at=NOW - 20), {}, {"rate": 9 * MARGIN, "ceiling": 10, "steady": 10}),
        (replace(BUSY, step_at=NOW - 20, drains=1), {}, {"rate": 9 * MARGIN, "ceiling": 10}),
        (replace(BUSY, step_at=NOW - 20, resumes_at=NOW - 19), {}, {"rate": 9 * MARGIN, "ceiling": 10}),
        (replace(BUSY, windowed=True, rests=4), {}, {"rate": 9 * MARGIN, "ceiling": 10, "rests": 0, "windowed": False,
                                                     "broken": 1}),
        # a step to the former rate that was refused
        (replace(BUSY, returned=True, good=6.0, step_at=NOW - 3, windowed=True), {},
         {"rate": 6, "ceiling": 6 / MARGIN, "rests": -2, "returned": False, "windowed": False}),
        (replace(BUSY, returned=True, good=6.0, step_at=NOW - 9, window=10.0, plateau=1.0), {},
         {"rate": 6, "ceiling": 6 / MARGIN, "rests": -2, "returned": False, "plateau": None}),
        (replace(BUSY, returned=True, step_at=NOW - 4), {}, {"rate": 9 * MARGIN, "ceiling": 10}),
        # a bucket: the same drain again and again
        (SAME, {}, {"rate": 0.66 * MARGIN, "ceiling": 0.66 * 1.04, "drains": 1, "drain_rate": 0.66, "rests": 0,
                    "former": 8, "dropped_at": NOW, "steady": 0}),
        (replace(SAME, drains=1, matched=False, steady=0.5), {},
         {"rate": 0.66 * MARGIN, "ceiling": 0.66 * 1.04, "drains": 2, "drain_rate": 0.66, "rests": 0, "matched": True}),
        (replace(SAME, matched=False), {}, {"rate": 9 * MARGIN, "ceiling": 10, "matched": True}),
        (replace(SAME, drain=0.6), {}, {"rate": 9 * MARGIN, "ceiling": 10, "matched": False}),
        (replace(SAME, drain=0.72), {}, {"rate": 9 * MARGIN, "ceiling": 10, "matched": False}),
        (replace(SAME, drain=None), {}, {"rate": 9 * MARGIN, "ceiling": 10, "matched": False}),
        (replace(SAME, rate=0.67, ceiling=0.7), {},
         {"rate": 0.66 * MARGIN, "ceiling": 0.67, "drains": 1, "drain_rate": 0.66}),
        (replace(SAME, rate=0.6, ceiling=0.7), {},
         {"rate": 0.6 * MARGIN, "ceiling": 0.6, "drains": 1, "drain_rate": 0.66}),
        # the rest was a long part of it: less alike is alike
        (replace(SAME, drain=0.6, resumes_at=NOW - 60), {},
         {"rate": 0.66 * MARGIN, "ceiling": 0.66 * 1.04, "drains": 1, "drain_rate": 0.66, "rests": 0, "former": 8,
          "dropped_at": NOW, "steady": 0}),
        (replace(SAME, drain=0.56, resumes_at=NOW - 60), {}, {"rate": 9 * MARGIN, "ceiling": 10, "matched": False}),
        (replace(SAME, drain=0.77, resumes_at=NOW - 60), {}, {"rate": 9 * MARGIN, "ceiling": 10, "matched": False}),
        (replace(SAME, drain=0.6, resumes_at=NOW - 66), {}, {"rate": 9 * MARGIN, "ceiling": 10, "matched": False}),
    ],
)  # fmt: skip
def test_a_rate_that_is_refused(s, words, changed):
    expected = asdict(s) | USUAL | changed
    assert {name: value for name, value in asdict(refused(s, **words)).items() if name in LESSON} == pytest.approx(
        {name: value for name, value in expected.items() if name in LESSON}
    )


@pytest.mark.parametrize(
    ("s", "accepted", "changed"),
    [
        (BURST, 6, {"rate": 10 * CLOSE, "ceiling": 10, "rests": 0}),
        (replace(BURST, steady=15.0), 6,
         {"rate": 10 * CLOSE, "ceiling": 10, "rests": 0, "former": 15, "dropped_at": NOW, "steady": 0}),
        (replace(BURST, ceiling=20.0, steady=15.0), 8,  # not much less than before
         {"rate": 12 * CLOSE, "ceiling": 12, "basis": 12, "drain": 4}),
        (BURST, 36, {"rate": 20 * CLOSE, "ceiling": 20, "basis": 40, "drain": 40 / 3}),
        (replace(BURST, windowed=True, rests=3), 16,
         {"rate": 20 * CLOSE, "ceiling": 20, "basis": 20, "drain": 20 / 3, "rests": 0, "broken": 1}),
        (replace(BURST, windowed=True, broken=1, good=None), 16,  # its promise was broken before
         {"rate": 20 * (1 - 1 / 4) * MARGIN, "ceiling": 20, "basis": 0, "drain": 20 / 3, "rests": 0, "broken": 2,
          "windowed": False}),
        (replace(BURST, windowed=True, broken=1, good=None), 6,
         {"rate": 10 * (1 - 1 / 3) * MARGIN, "ceiling": 10, "basis": 0, "rests": 0, "broken": 2, "windowed": False,
          "former": 8, "dropped_at": NOW, "steady": 0}),
        (replace(BURST, resumes_at=NOW - 8, changed_at=NOW - 10, window=10.0, steady=0.0), 46,  # within its window
         {"rate": 5 * CLOSE, "ceiling": 5, "basis": 50, "drain": 5, "rests": 0, "window": 10}),
        (replace(BURST, resumes_at=NOW - 11, changed_at=NOW - 20, window=10.0, steady=0.0), 40,
         {"rate": 4 * CLOSE, "ceiling": 4, "basis": 44, "drain": 2.2, "rests": 0, "window": 10}),
        (replace(BURST, resumes_at=NOW - 12, changed_at=NOW - 20, window=10.0), 40,
         {"rate": 20 * (1 - 1 / 6.4) * MARGIN, "ceiling": 20, "basis": 0, "drain": 2.2, "window": 10,
          "windowed": False}),
        (replace(BURST, resumes_at=NOW - 8, changed_at=NOW - 20, window=60.0), 40,
         {"rate": 20 * (1 - 1 / 6.4) * MARGIN, "ceiling": 20, "basis": 0, "drain": 2.2, "window": 60,
          "windowed": False}),
    ],
)  # fmt: skip
def test_a_rate_that_is_refused_in_a_burst(s, accepted, changed):
    expected = asdict(s) | OFBURST | changed
    assert {
        name: value for name, value in asdict(refused(s, 1.0, accepted)).items() if name in LESSON
    } == pytest.approx({name: value for name, value in expected.items() if name in LESSON})


@pytest.mark.parametrize(
    ("s", "rate", "ceiling", "rests"),
    [
        (PROBING, 6.5 * 0.85, 6.5 * 0.85 / MARGIN, 2),
        (replace(PROBING, good=5.5, rests=-3), 5, 5 / MARGIN, 1),
        (replace(PROBING, good=None), 5, 5 / MARGIN, 2),
        (replace(PROBING, rate=7.5), 6.5 * 0.85, 6.5 * 0.85 / MARGIN, 2),
        (replace(PROBING, rate=8.0, good=7.8, windowed=True), 7.8 * 0.7, 7.8, 0),  # one step too far, well above it
        (replace(PROBING, rate=8.0, good=None), 5.6, 8, 0),
        (replace(PROBING, rate=8.0, good=4.0), 5, 5, 0),
        (replace(PROBING, rate=8.0, good=7.8, drain=0.65, drains=2), 5, 5 / MARGIN, 2),  # a bucket is empty again
        (replace(PROBING, rate=8.0, good=7.8, drain=0.65, drains=1), 7.8 * 0.7, 7.8, 0),
    ],
)
def test_a_probe_that_is_refused(s, rate, ceiling, rests):
    matched = s.drain == 0.65
    expected = (
        asdict(s) | USUAL | {"rate": rate, "ceiling": ceiling, "rests": rests, "plateau": None, "matched": matched}
    )
    expected |= {"windowed": False}
    assert {name: value for name, value in asdict(refused(s)).items() if name in LESSON} == pytest.approx(
        {name: value for name, value in expected.items() if name in LESSON}
    )
