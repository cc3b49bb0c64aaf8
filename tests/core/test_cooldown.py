"""Throttles: how long they rest, and which are the same one."""

from datetime import UTC, datetime, timedelta

import pytest

from resilient.core.gates.admission import ResourceFacts
from resilient.core.gates.learnt import Learnt, Refusal
from resilient.core.gates.retry_after import cooled

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def at(seconds):
    return NOW + timedelta(seconds=seconds)


def resting(since, until, **more):
    return ResourceFacts("a", blocked_since=at(since), blocked_until=at(until), **more)


def test_a_told_time_is_waited_out_and_a_little_longer():
    assert cooled(ResourceFacts("a"), at(60), NOW, 0.0) == at(61)
    assert at(61) < cooled(ResourceFacts("a"), at(60), NOW, 0.99) <= at(67)
    assert cooled(ResourceFacts("a"), at(36000), NOW, 0.99) <= at(36031)


@pytest.mark.parametrize(
    ("facts", "told", "sent_at", "expected"),
    [
        (ResourceFacts("a"), None, None, at(1)),  # half of 2 s, and a roll of 0
        (resting(-1, 30), at(29), None, None),  # covered
        (resting(-1, 30), at(60), None, at(61)),  # longer
        (resting(-1, 30), None, None, None),  # resting anyway
        (resting(-5, -1), None, at(-6), None),  # was in flight when the first came back
        (resting(-5, -1), None, at(-1), at(4)),  # again soon after: twice as long
        (resting(-500, -100), None, at(-1), at(1)),  # long ago
        (resting(-300, -1), None, at(-1), at(150)),  # five minutes at most
        (resting(-5, -1), at(-3), at(-1), at(4)),  # a told time that is over is none
        (resting(-5, -1), NOW, at(-1), at(4)),
        (resting(-1, 30), at(30), None, None),  # as long as it rests anyway
        (resting(-5, 0), None, at(-1), at(5)),  # the rest is over
        (resting(-5, -1), None, at(-5), None),  # sent in the moment in which it began
        (resting(-65, -60), None, at(-1), at(1)),  # a minute is long ago
        (resting(-1.5, -1), None, at(-0.5), at(1)),  # never shorter than the first
    ],
)
def test_one_signal(facts, told, sent_at, expected):
    assert cooled(facts, told, NOW, 0.0, sent_at) == expected


def test_nobody_comes_back_in_the_same_moment():
    assert [cooled(ResourceFacts("a"), None, NOW, roll) for roll in (0.0, 0.5, 1.0)] == [at(1), at(1.5), at(2)]


@pytest.mark.parametrize(
    ("accepted", "unreported", "seconds"), [(0, None, 4), (0, 0, 4), (1, None, 1), (0, 1, 1), (1, 1, 1)]
)
def test_a_rest_is_no_longer_than_the_first_once_something_passed(accepted, unreported, seconds):
    refusal = None if unreported is None else Refusal(0, accepted=unreported)
    facts = resting(-5, -1, learnt=Learnt(accepted=accepted))
    assert cooled(facts, None, NOW, 0.0, at(-0.5), refusal=refusal) == at(seconds)


@pytest.mark.parametrize(
    ("kind", "strikes", "accepted", "seconds"),
    [("slots", 0, 7, 0.25), ("slots", 0, 6, 1), ("slots", 1, 7, 1), ("rate", 0, 7, 1)],
)
def test_one_too_many_at_once_rests_briefly_where_it_is_sure_to_be_that(kind, strikes, accepted, seconds):
    """A rate that is taken for a limit of requests at once needs its whole window to pass."""
    facts = ResourceFacts("a", learnt=Learnt(kind, slots=2, strikes=strikes, accepted=accepted))
    assert cooled(facts, None, NOW, 0.0) == at(seconds)
