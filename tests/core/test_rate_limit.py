"""GCRA against a count of what went through any window, and the server's word."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.core.base.errors import InvalidInput
from resilient.core.gates.rate_limit import (
    FULL,
    Limit,
    LimitState,
    available,
    draw,
    give_back,
    observe,
    pace,
    ready_at,
    refund,
    seconds,
    take,
)

NOW = 1_900_000_000.0


def spend(limit, gaps, costs, state=FULL):
    """Draw at these moments whatever fits; [(time, cost)] of what went through."""
    at, passed = NOW, []
    for gap, cost in zip(gaps, costs, strict=True):
        at += gap
        found = draw([(limit, state)], cost, at)
        if found.granted:
            passed.append((at, cost))
            (state,) = found.states
    return passed


def most_in_any_window(passed, span):
    most = running = first = 0
    for at, cost in passed:
        running += cost
        while passed[first][0] <= at - span:
            running -= passed[first][1]
            first += 1
        most = max(most, running)
    return most


gaps = st.lists(st.one_of(st.just(0.0), st.floats(0, 3), st.floats(0, 200)), min_size=1, max_size=80)


@given(rate=st.integers(1, 40), per=st.sampled_from([1, 10, 60]), gaps=gaps)
@settings(max_examples=300, deadline=None)
def test_never_more_than_the_rate_in_any_window(rate, per, gaps):
    passed = spend(Limit(rate, per), gaps, [1.0] * len(gaps))
    assert most_in_any_window(passed, per) <= rate


@given(rate=st.integers(5, 40), gaps=gaps, data=st.data())
@settings(max_examples=200, deadline=None)
def test_weights_keep_the_promise_to_less_than_one_unit(rate, gaps, data):
    costs = [data.draw(st.floats(0.1, rate)) for _ in gaps]
    assert most_in_any_window(spend(Limit(rate, 10), gaps, costs), 10) < rate + 1


@given(gaps=gaps, burst=st.integers(1, 30))
@settings(max_examples=200, deadline=None)
def test_a_bucket_holds_what_it_says(gaps, burst):
    """With burst=, the provider has a bucket: burst at once plus the rate."""
    passed = spend(Limit(2, 1, burst=burst), gaps, [1.0] * len(gaps))
    assert most_in_any_window(passed, 10) <= burst + 20


@pytest.mark.parametrize(
    ("rate", "per"), [(1, 1), (2, 1), (7, 1), (20, 1), (1000, 1), (15, 60), (100, 60), (500, "1h"), (0.5, 1)]
)
def test_the_greediest_flow_keeps_the_promise_and_gets_most_of_the_rate(rate, per):
    """A full bucket, then every unit at the first moment it fits: the worst there is."""
    limit, state, at, times = Limit(rate, per), FULL, NOW, []
    while at < NOW + 3 * limit.per / min(1, rate):
        (state,) = draw([(limit, state)], 1, at).states
        times.append((at, 1))
        at = ready_at(limit, state, 1, at)
    assert most_in_any_window(times, limit.per) <= max(1, rate)
    assert len(times) >= 0.8 * 3 * max(1, rate)


@pytest.mark.parametrize(
    ("rate", "per", "of_many", "afterwards"), [(10, 1, 9.10, 9.05), (10, 60, 10.0, 10.0), (100, 60, 91.2, 90.75)]
)
def test_how_much_of_a_rate_is_used(rate, per, of_many, afterwards):
    """On average of 20 windows: the first ones, where the burst counts, and those after the first."""
    limit, state, at, times = Limit(rate, per), FULL, NOW, []
    while at < NOW + 21 * per:
        (state,) = draw([(limit, state)], 1, at).states
        times.append(at - NOW)
        at = ready_at(limit, state, 1, at)
    assert sum(time < 20 * per for time in times) / 20 == pytest.approx(of_many)
    assert sum(time >= per for time in times) / 20 == pytest.approx(afterwards)


def test_a_burst_then_one_at_a_time():
    limit = Limit(2, 1, burst=3)
    state = FULL
    assert available(limit, state, NOW) == 3
    for left in (2, 1, 0):
        (state,) = draw([(limit, state)], 1, NOW).states
        assert available(limit, state, NOW) == pytest.approx(left, abs=1e-5)
    refused = draw([(limit, state)], 1, NOW)
    assert (refused.granted, refused.at) == (False, pytest.approx(NOW + 0.5, abs=1e-3))
    assert refused.states == (state,)
    assert draw([(limit, state)], 1, NOW + 0.5).granted
    assert available(limit, state, NOW + 100) == 3  # never more than the bucket


def test_a_wait_reserves_its_place():
    limit, state = Limit(1, 1, burst=1), FULL
    waits = []
    for _ in range(4):
        found = draw([(limit, state)], 1, NOW, patience=2.0)
        (state,) = found.states
        waits.append(found.wait if found.granted else None)
    assert waits == [0, pytest.approx(1), pytest.approx(2), None]
    assert ready_at(limit, state, 1, NOW) == pytest.approx(NOW + 3, abs=1e-3)


def test_all_or_nothing():
    fast, slow = Limit(100, 1, burst=100), Limit(1, 10, burst=1)
    first = draw([(fast, FULL), (slow, FULL)], 1, NOW)
    assert first.granted
    second = draw([(fast, first.states[0]), (slow, first.states[1])], 1, NOW)
    assert (second.granted, second.by, second.at) == (False, 1, pytest.approx(NOW + 10, abs=1e-3))
    assert second.states == first.states


def test_a_cost_above_the_burst_waits_for_a_longer_rest():
    limit = Limit(10, 10, burst=2)
    assert draw([(limit, FULL)], 8, NOW).granted  # idle for ever
    state = LimitState(tat=NOW)
    found = draw([(limit, state)], 8, NOW)
    assert (found.granted, found.at) == (False, pytest.approx(NOW + 6, abs=1e-3))


def test_giving_back_undoes_a_draw():
    limit = Limit(10, 1, burst=10)
    state = LimitState(tat=NOW, remaining=5, reset_at=NOW + 60, observed_at=NOW)
    drawn = take(limit, state, 3, NOW)
    for after in (give_back(limit, drawn, 3, NOW, drawn.tat), refund(limit, drawn, 3, NOW)):
        assert (after.tat, after.remaining) == (pytest.approx(state.tat, abs=1e-3), 5)


def test_a_place_with_others_behind_it_does_not_come_back():
    limit, state, ends = Limit(4, 1), FULL, []
    for _ in range(3):
        (state,) = draw([(limit, state)], 1, NOW, patience=2.0).states
        ends.append(state.tat)
    assert give_back(limit, state, 1, NOW, ends[1]) == state
    after = give_back(limit, state, 1, NOW, ends[2])
    assert after.tat == pytest.approx(ends[1], abs=1e-3)
    assert give_back(limit, after, 1, NOW, ends[1]).tat == pytest.approx(ends[0], abs=1e-3)


def test_an_answer_that_cost_less_takes_no_moment_from_those_who_wait():
    one, ten = Limit(4, 1), Limit(100, 1)
    for limit, back in ((one, 0), (ten, 9)):
        (first,) = draw([(limit, FULL)], 10, NOW).states
        (then,) = draw([(limit, first)], 1, NOW, patience=60).states
        after = refund(limit, then, 10, NOW, first.tat)
        assert then.tat - after.tat == pytest.approx(back * limit.interval, abs=1e-3)


def test_a_limit_counts_a_request_when_another_lets_it_go():
    own, shared = Limit(4, 1), Limit(100, 1, burst=1)
    found = draw([(shared, LimitState(tat=NOW + 1.5)), (own, FULL)], 1, NOW, patience=2.0)
    assert (found.wait, found.by) == (pytest.approx(1.5), 0)
    assert found.states[1].tat == pytest.approx(NOW + 1.5 + own.interval, abs=1e-3)


class Places:
    """Draws from limits that several accounts share, of which some are never sent, in the order of time."""

    def __init__(self, shared, *own):
        self.limits, self.states = (shared, *own), [FULL] * (1 + len(own))
        self.at, self.sent, self.unsent = NOW, [], []  # (moment, account); (moment it is known, account, tats)

    def draw(self, account, lead, back_after):
        indices = (0, account)
        limits = [(self.limits[i], self.states[i]) for i in indices]
        found = draw(limits, 1.0, self.at + lead, patience=2.0)
        if not found.granted:
            return
        for i, state in zip(indices, found.states, strict=True):
            self.states[i] = state
        if back_after is None:
            self.sent.append((found.at, account))
        else:
            tats = [state.tat for state in found.states]
            self.unsent.append((self.at + back_after * (found.at - self.at), account, tats))

    def advance(self, gap):
        self.at += gap
        due = sorted(one for one in self.unsent if one[0] <= self.at)
        self.unsent = [one for one in self.unsent if one[0] > self.at]
        for at, account, tats in due:
            for i, tat in zip((0, account), tats, strict=True):
                self.states[i] = give_back(self.limits[i], self.states[i], 1.0, at, tat)

    def excess(self):
        """By how many the busiest window of each limit passes its rate."""
        for i, limit in enumerate(self.limits):
            passed = sorted((at, 1.0) for at, account in self.sent if i in (0, account))
            yield most_in_any_window(passed, limit.per) - limit.rate


steps = st.tuples(
    st.sampled_from([0.0, 0.0, 0.05, 0.3, 2.0]),  # seconds since the step before
    st.integers(1, 2),  # account
    st.sampled_from([0.0, 0.0, 0.0, 0.4]),  # seconds that it is drawn ahead
    st.sampled_from([None, None, 0.0, 0.5, 1.0, 1.1]),  # when it is given back, as a part of its wait
)


@given(
    steps=st.lists(steps, min_size=1, max_size=100),
    rates=st.tuples(st.integers(1, 30), st.integers(1, 12), st.integers(1, 12)),
)
@settings(max_examples=600, deadline=None)
def test_places_that_wait_and_places_that_come_back_are_nobodys_excess(steps, rates):
    """Drawn in time or ahead, over two levels, sent or given back before, at and after their moments."""
    places = Places(*(Limit(rate, 1) for rate in rates))
    for gap, account, lead, back_after in steps:
        places.advance(gap)
        places.draw(account, lead, back_after)
    assert max(places.excess()) <= 0


# -- the server's word ---------------------------------------------------------------------------------------


def told(remaining, reset_in, sent_at=NOW, state=FULL):
    return observe(state, remaining, NOW + reset_in, sent_at)


def test_what_the_server_has_left_is_not_exceeded_and_spread():
    limit = Limit(1000, 60, burst=1000)
    state = told(10, 50)
    assert pace(limit, state, NOW) == (5.0, 1)
    assert available(limit, state, NOW) == 1
    times = []
    for _ in range(10):
        found = draw([(limit, state)], 1, at := max(NOW, ready_at(limit, state, 1, NOW)))
        assert found.granted
        times.append(at - NOW)
        (state,) = found.states
    assert times == pytest.approx([0, 5, 10, 15, 20, 25, 30, 35, 40, 45], abs=0.01)
    refused = draw([(limit, state)], 1, NOW + 46)
    assert (refused.granted, refused.at >= NOW + 50) == (False, True)


def test_plenty_left_changes_nothing_but_the_end():
    limit = Limit(1000, 60, burst=1000)
    state = told(400, 5)
    assert pace(limit, state, NOW) == (limit.interval, 400)
    assert draw([(limit, state)], 400, NOW).granted
    assert draw([(limit, state)], 401, NOW).at == NOW + 5


def test_nothing_left_waits_for_the_reset():
    limit = Limit(1000, 60, burst=1000)
    assert ready_at(limit, told(0, 50), 1, NOW) == NOW + 50
    assert available(limit, told(0, 50), NOW) == 0
    assert available(limit, told(0, 50), NOW + 50) == 1000  # a new window: our own view again


def test_the_server_only_lowers_our_view():
    limit = Limit(10, 60, burst=2)
    assert pace(limit, told(5000, 60), NOW) == (limit.interval, limit.capacity)


def test_answers_that_overtake_each_other():
    state = told(90, 60, sent_at=NOW + 1)
    assert told(95, 60, sent_at=NOW, state=state) is state  # its request started before
    assert told(95, 60, sent_at=NOW + 2, state=state).remaining == 90  # within a window it only falls
    assert told(80, 61.5, sent_at=NOW + 2, state=state).remaining == 80  # the same window, rounded differently
    assert told(100, 120, sent_at=NOW + 2, state=state).remaining == 100  # the next window
    assert told(1, 0, sent_at=NOW + 2, state=told(100, 120)).remaining == 100  # one long past


def test_requests_in_flight_are_not_spent_twice():
    limit = Limit(100, 60, burst=100)
    state = told(10, 60)
    for _ in range(4):
        (state,) = draw([(limit, state)], 1, NOW, patience=60).states
    assert observe(state, 9, NOW + 60, NOW + 1).remaining == 6  # three of ours have not been counted yet


def test_a_length_of_time_of_very_many_digits_is_refused_at_once():
    """Read in quadratic time these would take ten minutes."""
    with pytest.raises(InvalidInput, match="is not a span of time"):
        seconds("1" * 200_000)
