"""Where a limit stands, at the very edges: what a draw, a report, a refund leave, and what a limit is called."""

from dataclasses import replace

import pytest

from resilient.core.base.errors import InvalidInput
from resilient.core.gates.rate_limit import (
    FULL,
    LEARNT,
    Draw,
    Limit,
    LimitState,
    available,
    draw,
    give_back,
    observe,
    pace,
    ready_at,
    refund,
    stated_limit,
    take,
)

NOW = 1_900_000_000.0
ONE = Limit(1, 1, burst=1)  # one a second
TEN = Limit(1, 1, burst=10)


def granted(wait, at, by, *tats):
    return Draw(granted=True, wait=wait, at=NOW + at, by=by, states=tuple(LimitState(NOW + tat) for tat in tats))


def bare(state):
    """The state without what it says of the limit that was drawn from."""
    return LimitState(*state[:4])


def bare_draw(*args, **kwargs):
    found = draw(*args, **kwargs)
    return replace(found, states=tuple(bare(state) for state in found.states))


def told(remaining, reset_in, *, tat=0.0, sent_at=NOW):
    return LimitState(tat, remaining, NOW + reset_in, sent_at)


# -- declarations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rate", "per", "interval", "capacity"),
    [
        (100, 60, 60.18 / 91, 10),
        (20, 1, 1.1 / 19, 2),
        (10, 1, 1.1 / 10, 1),
        (1, 10, 10.18, 1),
        (0.5, 1, 2.2, 1),
        (1e-20, 1, 1.1e20, 1),
    ],
)
def test_how_a_limit_paces(rate, per, interval, capacity):
    limit = Limit(rate, per)
    assert (limit.interval, limit.capacity) == (pytest.approx(interval), capacity)


@pytest.mark.parametrize(("per", "lease"), [(1, 0.02), (4, 0.08), (5, 0.1), (60, 0.1)])
def test_how_far_ahead_a_limit_may_be_drawn(per, lease):
    assert Limit(100, per).lease == pytest.approx(lease)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Limit(rate=True, per=1), "Limit(rate=True): write a number, such as Limit(100, per='1m', burst=20)"),
        (lambda: Limit(1, 1, burst="9"), "Limit(burst='9'): write a number, such as Limit(100, per='1m', burst=20)"),
        (
            lambda: Limit(1, "1m", burst=0.5),
            "Limit(1, per='1m', burst=0.5): rate must be positive, burst at least 1",
        ),
        (
            lambda: Limit(1, 1, burst=float("inf")),
            "Limit(burst=inf): write a number, such as Limit(100, per='1m', burst=20)",
        ),
        (
            lambda: Limit(1, 1, name="x" * 65),
            f"{'x' * 65!r} cannot name a limit: use at most 64 letters, digits and ._:@+/-",
        ),
        (
            lambda: Limit(1, "soon"),
            "'soon' is not a span of time: write seconds, or text such as '90s', '15m', '1h', '1d'",
        ),
        (lambda: Limit(1, 0), "a span of time must be positive, not 0"),
        (lambda: Limit.parse("100"), "'100' is not a limit: write '100/min', '5000/1h' or '2/s burst 40'"),
        (
            lambda: Limit.parse("1/s burst x"),
            "'1/s burst x' is not a limit: write '100/min', '5000/1h' or '2/s burst 40'",
        ),
        (lambda: Limit.from_json(5), "5 is not a limit: give rate, per and perhaps burst, name, counts"),
        (
            lambda: Limit.from_json({"rate": 1}),
            "{'rate': 1} is not a limit: give rate, per and perhaps burst, name, counts",
        ),
    ],
)
def test_a_limit_that_means_nothing_says_what_to_write(make, text):
    with pytest.raises(InvalidInput) as error:
        make()
    assert str(error.value) == text


def test_limits_as_text_have_the_rest_of_a_limit_too():
    assert Limit.parse("2/s burst 40", counts="jobs", name="n") == Limit(2, 1, burst=40, counts="jobs", name="n")
    assert Limit.parse("2/s").counts == "requests"
    assert Limit(2, ".5 m").per == 30
    assert Limit(2, 1, burst=1).capacity == 1


def test_a_limit_as_json_has_what_was_said():
    assert Limit(2, 1).to_json() == {"rate": 2, "per": 1, "name": "2/1s", "counts": "requests"}
    full = {"rate": 2, "per": 1, "burst": 4, "name": "n", "counts": "jobs"}
    assert Limit(2, 1, burst=4, name="n", counts="jobs").to_json() == full


def test_names_that_nobody_can_declare():
    one = Limit.learnt(5.0, 1.0, 2.0)
    assert (one.name, one.rate, one.per, one.burst, one.counts) == (LEARNT, 5, 1, 2, "requests")
    core = Limit.stated("core/v2", 5000, 3600)
    assert (core.name, core.rate, core.per, core.burst) == ("~5000/core/v2", 5000, 3600, None)
    assert stated_limit(core.name, 3600) == core
    assert stated_limit("~2.5e+20/x", 0.5) == Limit.stated("x", 2.5e20, 1)
    assert stated_limit("~5/x", 1.5).per == 1.5
    assert [stated_limit(name, 60) for name in (LEARNT, "core", "5/core", "")] == [None] * 4
    for name in (LEARNT, core.name):
        with pytest.raises(InvalidInput):
            Limit(1, 1, name=name)


# -- what may go, and when -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "state", "result"),
    [
        (TEN, FULL, (1, 10)),
        (TEN, told(0, 0), (1, 10)),  # that window is over
        (TEN, LimitState(0.0, 5.0), (1, 10)),  # of no window at all
        (TEN, LimitState(0.0, None, NOW + 50), (1, 10)),
        (TEN, told(0.5, 50), (50, 1)),
        (TEN, told(1, 50), (50, 1)),
        (TEN, told(15, 50), (50 / 15, 1.5)),
        (TEN, told(200, 1000), (5, 10)),
        (TEN, told(5, 5), (1, 5)),  # just the declared pace
        (TEN, told(50, 5), (1, 10)),
    ],
)
def test_pace(limit, state, result):
    assert pace(limit, state, NOW) == result


@pytest.mark.parametrize(
    ("state", "cost", "at"),
    [
        (FULL, 1, 0),
        (LimitState(NOW), 1, 0),
        (LimitState(NOW + 5e-7), 1, 0),  # less than floats are exact by
        (LimitState(NOW + 3), 1, 3),
        (LimitState(NOW + 3), 2, 4),
        (LimitState(NOW + 3, 5.0), 1, 3),
        (LimitState(NOW + 3, None, NOW + 50), 1, 3),
        (told(1, 50), 1, 0),
        (told(1, 50), 1.5, 50),
        (told(1, 50, tat=NOW + 60), 2, 110),  # a unit in 50 seconds
    ],
)
def test_when_a_draw_fits(state, cost, at):
    assert ready_at(ONE, state, cost, NOW) == NOW + at


@pytest.mark.parametrize(
    ("limit", "state", "ahead", "units"),
    [
        (TEN, FULL, 0, 10),
        (TEN, FULL, 3, 13),
        (TEN, LimitState(NOW + 4), 0, 6),
        (TEN, LimitState(NOW + 4), 3, 9),
        (TEN, LimitState(NOW + 20), 0, 0),
        (TEN, LimitState(NOW + 20), 12, 2),
        (TEN, LimitState(NOW + 4, 5.0), 1, 7),  # of no window
        (TEN, told(5, 5), 0, 5),
        (TEN, told(5, 5), 3, 5),  # no more than is left
        (TEN, told(20, 100), 0, 2),
        (TEN, told(20, 100), 10, 4),
        (TEN, told(20, 100, tat=NOW + 5), 0, 1),
        (TEN, told(20, 100, tat=NOW + 50), 0, 0),
        (TEN, told(3, 0), 0, 10),  # a new window
    ],
)
def test_how_much_is_there(limit, state, ahead, units):
    assert available(limit, state, NOW, ahead) == pytest.approx(units, abs=1e-5)


# -- what is left behind ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "at", "after"),
    [
        (FULL, None, LimitState(NOW + 2)),
        (FULL, NOW + 5, LimitState(NOW + 7)),
        (LimitState(NOW + 9), NOW + 5, LimitState(NOW + 11)),
        (LimitState(NOW, None, NOW - 1, NOW - 2), None, LimitState(NOW + 2, None, NOW - 1, NOW - 2)),
        (told(5, 50), None, LimitState(NOW + 20, 3, NOW + 50, NOW)),
        (told(5, 0), None, LimitState(NOW + 2, None, NOW, NOW)),  # that window is over
        (LimitState(NOW, 5.0), None, LimitState(NOW + 2)),
    ],
)
def test_what_a_draw_of_two_leaves(state, at, after):
    assert bare(take(TEN, state, 2, NOW, at)) == after


@pytest.mark.parametrize(
    ("until", "back"),
    [(10, 2), (10 + 5e-7, 2), (10.1, 0), (9.9, 0)],
)
def test_a_draw_that_is_not_the_last_leaves_its_place(until, back):
    state = LimitState(NOW + 10, None, NOW - 1, NOW - 2)
    after = LimitState(NOW + 10 - back, None, NOW - 1, NOW - 2)
    assert give_back(TEN, state, 2, NOW, NOW + until) == after


def test_what_has_passed_of_a_draw_does_not_come_back():
    state = LimitState(NOW + 10)
    assert give_back(TEN, state, 4, NOW + 9, NOW + 10) == LimitState(NOW + 9)
    assert give_back(TEN, state, 4, NOW + 11, NOW + 10) == state
    assert refund(TEN, state, 4, NOW) == LimitState(NOW + 6)
    assert give_back(TEN, told(3, 50, tat=NOW + 60), 2, NOW, NOW + 60) == told(5, 50, tat=NOW + 40)
    assert give_back(TEN, told(3, 50, tat=NOW + 60), 2, NOW, NOW) == told(5, 50, tat=NOW + 60)


@pytest.mark.parametrize(
    ("tat", "until", "back"),
    [
        (20, 15, 9),  # others wait behind it: the last of them keeps its moment
        (20, 20, 12),  # nobody drew after it
        (20, None, 12),
        (10, 9.5, 9.5),  # nobody has to wait
        (10.5, 10, 9),
    ],
)
def test_a_refund_takes_no_moment_from_those_who_wait(tat, until, back):
    until = None if until is None else NOW + until
    assert refund(TEN, LimitState(NOW + tat), 12, NOW, until) == LimitState(NOW + tat - back)


def test_a_draw_that_fits_just_within_patience():
    one, two = (ONE, LimitState(NOW + 2)), (TEN, LimitState(NOW + 11))
    assert bare_draw([two, one], 1, NOW, patience=2.0) == granted(2, 2, 0, 12, 3)
    refused = Draw(granted=False, wait=0.0, at=NOW + 2, by=0, states=(one[1], two[1]))
    assert bare_draw([one, two], 1, NOW, patience=1.9) == refused
    assert bare_draw([two, (ONE, FULL)], 1, NOW, patience=2.0) == granted(2, 2, 0, 12, 3)
    assert bare_draw([(ONE, FULL)], 1, NOW) == granted(0, 0, 0, 1)
    assert bare_draw([], 1, NOW) == granted(0, 0, 0)


OLD = LimitState(7.0, 20.0, NOW + 60, NOW)


@pytest.mark.parametrize(
    ("state", "remaining", "reset_in", "sent_in", "after"),
    [
        (FULL, 5, 60, 0, LimitState(0.0, 5, NOW + 60, NOW)),
        (FULL, -5, 60, 0, LimitState(0.0, 0, NOW + 60, NOW)),
        (OLD, 15, 60, 0, LimitState(7.0, 15, NOW + 60, NOW)),  # sent in the same moment
        (OLD, 15, 60, -1, OLD),
        (OLD, 25, 62, 1, LimitState(7.0, 20, NOW + 62, NOW + 1)),  # the same window, rounded up
        (OLD, 25, 58, 1, LimitState(7.0, 20, NOW + 58, NOW + 1)),  # or down
        (OLD, 25, 62.5, 1, LimitState(7.0, 25, NOW + 62.5, NOW + 1)),
        (OLD, 15, 57.5, 1, OLD),
        (OLD._replace(remaining=None), 25, 57, 1, LimitState(7.0, 25, NOW + 57, NOW + 1)),
    ],
)
def test_what_the_server_said(state, remaining, reset_in, sent_in, after):
    assert observe(state, remaining, NOW + reset_in, NOW + sent_in) == after


def test_what_nobody_declared_is_full_again_at_its_reset():
    """What was drawn at the pace of another word, a day's say, binds no longer than the new one."""
    slow = LimitState(NOW + 9000)
    assert observe(slow, 90, NOW + 60, NOW, is_declared=False) == LimitState(NOW + 60, 90, NOW + 60, NOW)
    assert observe(slow, 90, NOW + 60, NOW).tat == NOW + 9000
    known = observe(LimitState(NOW + 70, 9, NOW + 60, NOW), 8, NOW + 61, NOW, is_declared=False)
    assert known.tat == NOW + 70, "the same window"


def test_a_limit_of_four_a_second_comes_back_by_quarters():
    four, state = Limit(4, 1, burst=10), LimitState(NOW + 1)
    assert available(four, state, NOW) == pytest.approx(6, abs=1e-4)
    assert available(four, state, NOW, 2.0) == pytest.approx(14, abs=1e-4)
    assert bare(take(four, state, 2, NOW)) == LimitState(NOW + 1.5)
    assert refund(four, LimitState(NOW + 5), 2, NOW) == LimitState(NOW + 4.5)
    assert refund(four, LimitState(NOW + 5), 12, NOW, NOW + 4) == LimitState(NOW + 2.75)
    assert refund(four, LimitState(NOW + 2), 12, NOW, NOW + 1.5) == LimitState(NOW + 0.5)
    assert refund(TEN, told(5, 50, tat=NOW + 50), 2, NOW) == told(7, 50, tat=NOW + 50 - 2 * 50 / 7)
    assert not draw([(ONE, LimitState(NOW + 0.5))], 1, NOW).granted
