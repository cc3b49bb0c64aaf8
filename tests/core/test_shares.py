"""How many slots one account may hold."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.core.base.resource_key import account
from resilient.core.gates.admission import QUICK, UNKNOWN, mean, share, spare

SLOTS = st.integers(1, 2_000)
ACTIVE = st.integers(1, 5_000)


@pytest.mark.parametrize(
    ("slots", "active", "most"),
    [(50, 1, 25), (50, 2, 22), (50, 9, 5), (50, 1000, 5), (8, 1, 4), (8, 20, 1), (1, 1, 1), (1, 30, 1), (2, 2, 1)],
)
def test_share(slots, active, most):
    assert share(slots, active) == most


@given(slots=SLOTS, active=ACTIVE)
def test_it_is_at_least_one_and_shrinks_with_the_others(slots, active):
    assert 1 <= share(slots, active + 1) <= share(slots, active) <= slots


@given(slots=st.integers(2, 2_000))
def test_whoever_works_alone_leaves_half(slots):
    assert slots // 2 == share(slots, 1)


@given(slots=SLOTS, active=st.integers(1, 10))
def test_a_few_that_all_hang_leave_some(slots, active):
    """As long as a fair share is more than what each may have in any case."""
    if share(slots, active) > spare(slots):
        assert slots - active * share(slots, active) >= spare(slots)


@given(slots=st.integers(10, 2_000), active=st.integers(10, 5_000))
def test_beside_many_one_that_hangs_leaves_nine_tenths(slots, active):
    assert slots - share(slots, active) >= 0.9 * slots


@given(slots=st.integers(2, 2_000), active=ACTIVE)
def test_whose_jobs_are_quick_leaves_the_spare_ones(slots, active):
    assert share(slots, active, QUICK) == share(slots, active) <= share(slots, active, 0.0) == slots - spare(slots)


@given(st.lists(st.floats(0, 1e6), max_size=50))
def test_the_mean_stays_within_bounds(seconds):
    value = UNKNOWN
    for one in seconds:
        value = mean(value, one)
        assert 0 <= value <= UNKNOWN


def test_it_takes_a_number_of_quick_jobs_to_be_quick_and_one_slow_one_not_to_be():
    value, n = UNKNOWN, 0
    while value >= QUICK:
        value, n = mean(value, 0.005), n + 1
    assert n == 19
    assert mean(value, 60.0) > QUICK


@given(slots=SLOTS, keys=st.lists(st.sampled_from(["a/1", "a/1/x", "a/2", "b/1", "c"]), max_size=300))
def test_slots_given_one_after_the_other(slots, keys):
    """Nobody ever ends: none holds more than its share was when it got its last slot, and none is left without."""
    held: dict[str, int] = {}
    for name in map(account, keys):
        before = held.get(name, 0)
        if sum(held.values()) < slots and before < share(slots, len({*held, name})):
            held[name] = before + 1
    assert all(1 <= n <= max(1, slots // 2) for n in held.values())


def test_an_account_is_the_first_two_segments():
    assert [account(key) for key in ("a", "a/1", "a/1/x", "a/1/x/y")] == ["a", "a/1", "a/1", "a/1"]
