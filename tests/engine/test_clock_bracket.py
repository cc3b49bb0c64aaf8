"""The database's clock, seen from here: however long the way to it is, the bracket holds the truth."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.engine.gates.drawing import ClockBracket

ways = st.lists(st.tuples(st.floats(0, 0.5), st.floats(0, 0.5), st.floats(0, 30)), min_size=1, max_size=30)


@given(ways, st.floats(-1e4, 1e4), st.floats(-2e-4, 2e-4))
def test_the_truth_is_between(ways, ahead, drift):
    """``ahead``: their clock less ours at 0; it gains ``drift`` a second."""
    bracket, at = ClockBracket(), 1000.0
    for there, back, pause in ways:
        before, read, after = at, at + there, at + there + back
        theirs = read + ahead + drift * read
        bracket.learn(theirs, before, after)
        at = after + pause
        asked = after + ahead + drift * after  # what their clock says as we hear the answer
        assert bracket.earliest(asked) <= after + 1e-6 <= bracket.latest(asked) + 2e-6


def test_the_quickest_exchange_decides():
    bracket = ClockBracket()
    for way in (0.5, 0.002, 0.5):
        bracket.learn(5000.0, 100.0 - way, 100.0 + way)
    assert bracket.earliest(5000.0) == pytest.approx(99.998, abs=1e-3)
    assert bracket.latest(5000.0) == pytest.approx(100.002, abs=1e-3)


def test_a_clock_that_was_set_begins_anew():
    bracket = ClockBracket()
    for n in range(10):
        bracket.learn(5000.0 + n, 100.0 + n, 100.001 + n)
    assert bracket.is_narrowest
    bracket.learn(9000.0, 120.0, 120.01)
    assert not bracket.is_narrowest
    assert bracket.earliest(9000.0) == pytest.approx(120.0)
    assert bracket.latest(9000.0) == pytest.approx(120.01)
