"""How long things are kept."""

from datetime import timedelta

import pytest

from resilient.core.base.errors import InvalidInput
from resilient.core.inspect.retention import Pruned, Retention


def test_spans_in_every_notation():
    kept = Retention(succeeded="12h", dead=timedelta(days=3), cancelled=60, attempts=None)
    assert kept.age("succeeded") == timedelta(hours=12)
    assert kept.age("dead") == timedelta(days=3)
    assert kept.age("cancelled") == timedelta(minutes=1)
    assert kept.age("attempts") is None
    assert kept.age("resources") == timedelta(days=30)


def test_published_events_are_kept_as_long_as_other_succeeded_jobs_unless_said():
    assert Retention(succeeded="2d").age("events") == timedelta(days=2)
    assert Retention(succeeded=None).age("events") is None
    assert not Retention(succeeded="2d").events_apart
    assert Retention(events="1d").events_apart


@pytest.mark.parametrize("batch", [1, 10_000])
def test_the_smallest_and_the_largest_batch(batch):
    assert Retention(batch=batch).batch == batch


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"dead": "soon"}, "dead='soon' is not a span of time: write '7d'"),
        ({"succeeded": 0}, "succeeded=0 is not a span of time"),
        ({"cancelled": -5}, "cancelled=-5 is not a span of time"),
        ({"attempts": "9" * 30 + "d"}, "attempts=.* is not a span of time"),
        ({"batch": 0}, r"Retention\(batch=0\): delete 1 to 10,000 rows"),
        ({"batch": 10_001}, r"Retention\(batch=10001\)"),
        ({"batch": 1.5}, r"Retention\(batch=1.5\)"),
    ],
)
def test_mistakes(given, words):
    with pytest.raises(InvalidInput, match=words):
        Retention(**given)


def test_what_went():
    assert Pruned(succeeded=2, attempts=3).total == 5
    others = dict.fromkeys(("succeeded", "events", "cancelled", "attempts", "resources", "inbox"), 0)
    assert Pruned(dead=1).to_json() == {"dead": 1, **others}
