"""Cursors of streams in the database: which of them a reset or a forgetting changes, and what is left of them."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from sqlalchemy import event

from resilient.core.sync.paging import PageRequest
from resilient.core.sync.stream import Cursor
from resilient.store import sync as cursors
from resilient.store.sync import Where

NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)
BUSY = Cursor(
    pass_id=3, full=False, next=PageRequest("/x?page=2"), since="5", newest="9", edge=(("a", 1.0),), resets=2,
    nameless=4, full_pass=2, full_nameless=1, swept_pass=1, pages=5, records=6, rejected=7, full_at=NOW,
    completed_at=NOW, execution=2, expected=60.0,
)  # fmt: skip
FRESH = Cursor(
    version=2, pass_id=3, full_pass=2, swept_pass=1, pages=5, records=6, rejected=7, full_at=NOW, completed_at=NOW,
    error="asked", expected=60.0,
)  # fmt: skip
PLACES = [
    ("p/1", "items", ""), ("p/1", "items", "repo=a"), ("p/1", "items", "repo=b"), ("p/1", "things", ""),
    ("p/12", "items", ""), ("p/1/x", "items", ""), ("q/1", "items", ""),
]  # fmt: skip
WHICH = [
    (Where(), [0, 1, 2, 3, 4, 5, 6]),
    (Where("items"), [0, 1, 2, 4, 5, 6]),
    (Where("items", "p/*"), [0, 1, 2, 4]),
    (Where("items", "p/**"), [0, 1, 2, 4, 5]),
    (Where(None, "p/1"), [0, 1, 2, 3]),
    (Where("items", "p/1", ""), [0]),
    (Where("items", None, "repo=a"), [1]),
    (Where("item"), []),
]


@pytest.fixture
def places(database):
    for place in PLACES:
        assert database.transaction_sync(cursors.write_if_unmoved, place, BUSY, None, NOW)
    return PLACES


@pytest.mark.parametrize(("where", "numbers"), WHICH)
def test_which_cursors_fit(database, places, where, numbers):
    infos = database.transaction_sync(cursors.list_cursors, where)
    assert {(one.resource_key, one.stream, one.part) for one in infos} == {places[n] for n in numbers}


@pytest.mark.parametrize(("where", "numbers"), WHICH)
def test_a_reset_leaves_of_each_that_fits_what_it_has_done(database, places, where, numbers):
    assert database.transaction_sync(cursors.reset, where, "asked") == len(numbers)
    left = [database.transaction_sync(cursors.read, place)[0] for place in places]
    assert left == [FRESH if n in numbers else replace(BUSY, version=1) for n in range(len(places))]


@pytest.mark.parametrize(("where", "numbers"), WHICH)
def test_those_that_are_forgotten_were_never_read(database, places, where, numbers):
    assert database.transaction_sync(cursors.forget, where) == len(numbers)
    left = [database.transaction_sync(cursors.read, place)[0] for place in places]
    assert left == [Cursor() if n in numbers else replace(BUSY, version=1) for n in range(len(places))]


def test_many_are_reset_in_one_statement(database, places):
    """A statement for each account would hold SQLite's only writer for a second per some thousand."""
    statements = []
    event.listen(database.sync_engine, "before_cursor_execute", lambda *args: statements.append(args[2]))
    database.transaction_sync(cursors.reset, Where("items"), "asked")
    assert [one.split()[:2] for one in statements if one.startswith(("UPDATE", "INSERT", "DELETE"))] == [
        ["UPDATE", "resilient_cursor"]
    ]
