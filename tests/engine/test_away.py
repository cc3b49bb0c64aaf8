"""The engine's own database is away: how workers come back to it."""

from __future__ import annotations

import random

import pytest

from resilient.core.jobs.backoff import retry_pause, spread_upwards
from resilient.engine.run.execution import LONGEST_INSIDE


@pytest.mark.parametrize(
    ("tries", "roll", "seconds"),
    [
        (0, 0.0, 0.1), (0, 0.5, 0.125), (1, 0.0, 0.2), (3, 0.0, 0.8), (3, 0.75, 1.1),
        (7, 0.0, 10.0), (7, 0.5, 12.5), (1000, 0.0, 10.0), (1000, 0.8, 14.0),
    ],
)  # fmt: skip
def test_pauses_grow_to_ten_seconds_and_are_spread_above_that(tries, roll, seconds):
    assert retry_pause(tries, roll) == pytest.approx(seconds)


def test_while_a_handler_waits_they_are_shorter_and_spread_all_the_same():
    assert [retry_pause(tries, 0.5, LONGEST_INSIDE) for tries in (0, 4, 100)] == [0.125, 1.25, 1.25]


def test_no_two_of_a_fleet_that_lost_its_database_come_back_at_one_moment():
    for tries in (0, 3, 20):
        pauses = [retry_pause(tries, random.Random(worker).random()) for worker in range(200)]
        assert len(set(pauses)) == 200
        assert min(pauses) >= retry_pause(tries, 0.0)  # never earlier
        assert max(pauses) - min(pauses) > 0.45 * retry_pause(tries, 0.0)


def test_spread_upwards():
    assert [spread_upwards(5.0, roll) for roll in (0.0, 0.5)] == [5.0, 6.25]
