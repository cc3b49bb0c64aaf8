"""Places in a body: a bounded number is looked at, and an event's secret is hidden in the event."""

import pytest

from resilient.core.base.body import hidden_in_item, pick
from resilient.core.base.bounds import LISTED


@pytest.mark.parametrize(("path", "found"), [("list[0]", [1]), ("list[1]", [2]), ("list[2]", []), ("list[3]", [])])
def test_an_index_beyond_the_end_finds_nothing(path, found):
    assert pick({"list": [1, 2]}, path) == found


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_of_many_the_first_are_looked_at(more):
    many = range(LISTED.value + more)
    first = list(many)[: LISTED.value]
    assert pick({"list": list(many)}, "list[]") == first
    assert pick({"names": {f"n{n}": n for n in many}}, "names.*") == first


@pytest.mark.parametrize(
    ("path", "events", "shown"),
    [
        ("events[].token", "events", {"token": "", "a": {"token": "S"}}),
        ("events[0].token", "events", {"token": "", "a": {"token": "S"}}),
        ("events[].a.token", "events", {"token": "S", "a": {"token": ""}}),
        ("*[].token", "events", {"token": "", "a": {"token": "S"}}),
        ("body.events[].token", "body.events", {"token": "", "a": {"token": "S"}}),
        ("events[]", "events", ""),
        ("[].token", "", {"token": "", "a": {"token": "S"}}),
        # not in the events
        ("others[].token", "events", {"token": "S", "a": {"token": "S"}}),
        ("body.others[].token", "body.events", {"token": "S", "a": {"token": "S"}}),
        ("events.token", "events", {"token": "S", "a": {"token": "S"}}),
        ("token", "events", {"token": "S", "a": {"token": "S"}}),
        ("events", "events", {"token": "S", "a": {"token": "S"}}),
        ("body", "body.events", {"token": "S", "a": {"token": "S"}}),
    ],
)
def test_an_event_of_several_is_shown_without_the_secret_in_it(path, events, shown):
    assert hidden_in_item({"token": "S", "a": {"token": "S"}}, path, events) == shown
