"""A limit that is declared anew under its name: what was drawn from the old one counts for the new one, in units."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.core.gates.rate_limit import (
    FULL,
    Limit,
    LimitState,
    available,
    charge,
    draw,
    give_back,
    observe,
    ready_at,
    refund,
    take,
)

NOW, DAY = 1_900_000_000.0, 86_400.0


def limit(rate, per="1d", burst=None, counts="requests"):
    return Limit(rate, per, burst=burst, name="daily", counts=counts)


def units(of, state, now=NOW):
    return pytest.approx(available(of, state, now), abs=1e-3)


@pytest.mark.parametrize("counts", ["requests", "jobs"])
def test_what_is_raised_is_not_stopped_by_the_old_one(counts):
    old, new = limit(10, burst=10, counts=counts), limit(10_000, burst=1000, counts=counts)
    state = take(old, FULL, 10, NOW)
    assert not draw([(old, state)], 1, NOW).granted
    assert units(new, state) == 990
    assert ready_at(new, state, 1, NOW) == NOW
    found = draw([(new, state)], 990, NOW)
    assert found.granted
    assert not draw([(new, found.states[0])], 1, NOW).granted


def test_the_moment_that_is_told_does_not_move():
    """One a day becomes a hundred: after a hundredth of a day the next one, whenever somebody looks."""
    old, new = limit(1, burst=1), limit(100, burst=1)
    state = take(old, FULL, 1, NOW)
    for seconds in (0, 100, 800, 863):
        assert ready_at(new, state, 1, NOW + seconds) == pytest.approx(NOW + DAY / 100)
        assert not draw([(new, state)], 1, NOW + seconds).granted
    assert draw([(new, state)], 1, NOW + 865).granted


def test_what_is_lowered_counts_what_was_drawn():
    old, new = limit(100, 100, burst=20), limit(10, 100, burst=20)
    state = take(old, FULL, 15, NOW)
    assert units(old, state, NOW + 5) == 10
    assert units(new, state, NOW + 5) == 5.5
    assert units(new, take(new, state, 5, NOW + 5), NOW + 5) == 0.5


@pytest.mark.parametrize("burst", [10, None])
def test_what_is_lowered_stops_for_its_window_at_most(burst):
    old, new = limit(10_000, burst=1000), limit(10, burst=burst)
    state = take(old, FULL, 1000, NOW)
    assert ready_at(new, state, 1, NOW) == pytest.approx(NOW + DAY)
    assert not draw([(new, state)], 1, NOW + DAY - 9).granted
    (after,) = draw([(new, state)], 1, NOW + DAY).states
    assert after.tat == pytest.approx(NOW + DAY + new.capacity * new.interval)
    assert ready_at(new, after, 1, NOW + DAY) == pytest.approx(NOW + DAY + new.interval)


def test_seconds_beyond_its_window_that_the_old_one_took_are_waited_for():
    old, new = limit(10, burst=10), limit(1, per=20_000, burst=1)
    state = take(old, FULL, 9, NOW)
    assert ready_at(new, state, 1, NOW) == pytest.approx(NOW + 0.9 * DAY)


def test_what_nobody_declared_keeps_its_seconds():
    one, two = Limit.learnt(1, 1, 5), Limit.learnt(2, 1, 5)
    state = take(one, FULL, 5, NOW)
    assert state == LimitState(NOW + 5)
    assert ready_at(two, state, 5, NOW) == NOW + 5
    for stated in (Limit.stated("core", 100, 60), Limit.stated("core", 100, 30)):
        assert take(stated, FULL, 1, NOW)[4:] == (None, None)
    assert refund(two, state._replace(interval=1.0, drawn_at=NOW), 2, NOW) == LimitState(NOW + 4)


def test_older_code_left_nothing_to_convert_by():
    for state in (LimitState(NOW + DAY), LimitState(NOW + DAY, interval=5.0)):
        assert ready_at(limit(10_000, burst=1), state, 1, NOW) == NOW + DAY


def test_what_the_server_says_is_kept_along():
    old, new = limit(10, burst=10), limit(1000, burst=10)
    state = observe(take(old, FULL, 10, NOW), 50, NOW + 500, NOW)
    assert ready_at(new, state, 1, NOW) == pytest.approx(NOW + DAY / 1000 * 10 - 4 * 10)
    assert state.interval == old.interval
    assert take(new, state, 1, NOW).remaining == 49


def test_charges_refunds_and_places_that_come_back_are_of_the_same_units():
    slow, fast = limit(10, burst=10), limit(1000, burst=100)
    state = take(fast, FULL, 50, NOW)
    more = charge(slow, state, 5, NOW)  # by a worker that does not know the new one
    assert units(fast, more) == 45
    less = refund(slow, more, 5, NOW)
    assert units(fast, less) == 50
    assert give_back(slow, state, 1, NOW, state.tat + 1) == state  # somebody has drawn since
    assert units(fast, give_back(fast, state, 1, NOW, state.tat)) == 51


def test_a_place_that_waits_for_another_limit_is_counted_from_its_moment():
    old, new = limit(10, 100, burst=1), limit(100, 100, burst=1)
    state = take(old, FULL, 1, NOW, NOW + 1.5)
    assert (state.tat, state.drawn_at) == (NOW + 11.5, NOW + 1.5)
    assert ready_at(new, state, 1, NOW) == pytest.approx(NOW + 2.5)
    again = take(old, state, 1, NOW, NOW + 1.5)
    assert (again.tat, again.drawn_at) == (NOW + 21.5, NOW)


STEPS = st.lists(st.tuples(st.booleans(), st.floats(0, 60), st.integers(1, 5)), max_size=60)
LIMITS = st.builds(limit, st.integers(1, 100), st.sampled_from([10, 100, 1000]), st.integers(1, 50))


@settings(max_examples=200, deadline=None)
@given(one=LIMITS, two=LIMITS, steps=STEPS)
def test_two_workers_with_two_declarations_send_no_more_than_the_greater_allows(one, two, steps):
    """A rollout: nothing is lost or made by counting now this way and now that."""
    interval, most = min(one.interval, two.interval), max(one.capacity, two.capacity)
    state, at, used, last = FULL, NOW, 0.0, NOW
    for is_one, gap, cost in steps:
        at += gap
        found = draw([(one if is_one else two, state)], cost, at)
        if not found.granted:
            continue
        (state,) = found.states
        used, last = max(0.0, used - (at - last) / interval) + cost, at
        assert used <= max(most, cost) + 1e-3


def test_two_workers_that_draw_in_turns_both_go_on():
    slow, fast = limit(60, "1m", burst=5), limit(600, "1m", burst=50)
    state, done = FULL, {slow.rate: 0, fast.rate: 0}
    for n in range(600):  # half a second each: five minutes
        of = (slow, fast)[n % 2]
        found = draw([(of, state)], 1, NOW + n / 2)
        if found.granted:
            (state,) = found.states
            done[of.rate] += 1
    assert done[fast.rate] == 300
    assert 100 <= done[slow.rate] <= 300
