"""The cursor's state machine: borders, generations, resets, and when rows may be deleted."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient import providers_by_name
from resilient.core.base.budgets import Fields
from resilient.core.base.exchange import AnswerFacts
from resilient.core.sync.incremental import Incremental, instant, later, shifted
from resilient.core.sync.paging import PageRead, PageRequest, PagingError
from resilient.core.sync.stream import Cursor, Rules, asked_since, begin, refuse, restart, take, unchanged

NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)
FILTER = Rules(incremental=Incremental(style="filter", query="since", field="at", precision=60), overlap=60)
ASK = PageRequest("https://a.test/x")
NEXT = PageRequest("https://a.test/x?page=2")


def record(id_, minutes):
    return {"id": id_, "at": (NOW + timedelta(minutes=minutes)).isoformat().replace("+00:00", "Z")}


def one_page(cursor, items, rules=FILTER, now=NOW, following=None, request=ASK):
    answer = AnswerFacts(200, Fields.of([("date", "Tue, 01 Jan 2030 12:00:00 GMT")]), body=items)
    return take(begin(cursor, now, rules), request, answer, PageRead(items, following), rules, now)


def ids(records):
    return [r.raw["id"] for r in records]


def test_what_stands_at_the_border_comes_once():
    first, cursor = one_page(Cursor(), [record(1, -10), record(2, -1), record(3, -1)])
    assert (ids(first), cursor.full_pass, cursor.may_sweep) == ([1, 2, 3], 1, True)
    assert asked_since(cursor, FILTER) == "2030-01-01T11:58:00Z"
    news, cursor = one_page(cursor, [record(2, -1), record(3, -1), record(4, -1)])
    assert (ids(news), cursor.full, cursor.pass_id) == ([4], False, 2)
    news, cursor = one_page(cursor, [record(2, -1), record(3, -1), record(4, -1), record(2, -0.5)])
    assert ids(news) == [2]


def test_a_long_pass_does_not_move_the_border_beyond_its_beginning():
    _, cursor = one_page(Cursor(), [record(1, -5), record(2, 30)])
    assert cursor.since == "2030-01-01T12:00:00Z"


def test_an_interrupted_full_pass_allows_no_sweep_and_a_reset_starts_another():
    _, cursor = one_page(Cursor(), [record(1, -5)], following=NEXT)
    assert (cursor.next, cursor.may_sweep) == (NEXT, False)
    assert begin(cursor, NOW, FILTER) == cursor
    again = restart(cursor, "refused")
    assert (again.next, again.since, again.resets, again.may_sweep) == (None, None, 1, False)
    _, ended = one_page(again, [record(1, -5)])
    assert (ended.pass_id, ended.full_pass, ended.resets, ended.may_sweep) == (2, 2, 0, True)


def test_a_rejected_record_without_a_key_forbids_the_sweep():
    _, cursor = one_page(Cursor(), [record(1, -5)])
    assert refuse(cursor, ["1"]).may_sweep
    assert not refuse(cursor, [None]).may_sweep


def test_pages_that_go_round_are_errors():
    _, cursor = one_page(Cursor(), [record(1, -5)], following=NEXT)
    with pytest.raises(PagingError):
        one_page(cursor, [record(2, -5)], following=ASK, request=ASK)


def test_full_passes_return_when_due_or_when_the_cursor_is_too_old():
    _, cursor = one_page(Cursor(), [record(1, -5)])
    day = NOW + timedelta(days=1)
    assert not begin(cursor, day, FILTER).full
    assert begin(cursor, day, Rules(incremental=FILTER.incremental, full_every=3600)).full
    short = Incremental(style="token", query="t", cursor="t", source="last_page", life=3600)
    assert begin(cursor, day, Rules(incremental=short)).full


def test_nothing_new_keeps_the_cursor():
    _, cursor = one_page(Cursor(), [record(1, -5)])
    assert unchanged(begin(cursor, NOW, FILTER), NOW).since == cursor.since
    _, after = one_page(cursor, [])
    assert after.since == cursor.since


def test_a_stored_cursor_is_read_back():
    _, cursor = one_page(Cursor(), [record(1, -5), record(2, -1)], following=NEXT)
    stored = Cursor.from_json(cursor.to_json(), pass_id=1, pages=1, records=2)
    assert stored == cursor


@pytest.mark.parametrize(
    ("value", "seconds", "expected"),
    [
        ("2030-01-01T00:00:00Z", -60, "2029-12-31T23:59:00Z"),
        ("2030-01-01T00:00:00.123+0100", 1, "2030-01-01T00:00:01.123+0100"),
        ("2030-01-02", -86400, "2030-01-01"),
        ("1700000000", -5, "1699999995"),
        ("1700000000000", -5, "1699999995000"),
        ("1700000000.000200", -5, "1699999995.000200"),
        ("1700000000000.5", -5, "1699999995000.500"),
        ("opaque", -5, "opaque"),
    ],
)
def test_times_keep_their_spelling(value, seconds, expected):
    assert shifted(value, seconds) == expected


@given(st.integers(0, 2**33), st.integers(0, 2**33))
def test_later_is_an_order(a, b):
    assert later(str(a), str(b)) == (instant(str(a)) > instant(str(b)))


TOLD = [
    ("matrix", "sync", {"event_id": "$r", "type": "m.room.redaction", "redacts": "$1"}, ["$1"]),
    ("matrix", "sync", {"event_id": "$r", "type": "m.room.redaction", "content": {"redacts": "$1"}}, ["$1"]),
    ("matrix", "sync", {"event_id": "$r", "type": "m.room.redaction"}, []),
    ("matrix", "sync", {"event_id": "$2", "type": "m.room.message"}, []),
    ("stripe", "events", {"id": "evt_1", "type": "customer.deleted", "data": {"object": {"id": "cus_1"}}}, ["cus_1"]),
    ("stripe", "events", {"id": "evt_2", "type": "customer.updated", "data": {"object": {"id": "cus_1"}}}, []),
    ("box", "events", {"event_id": "e", "event_type": "ITEM_TRASH", "source": {"id": "f1"}}, ["f1"]),
    ("asana", "events", {"action": "deleted", "resource": {"gid": "12"}}, ["12"]),
    ("google", "gmail", {"id": 9, "messagesAdded": [{}], "messagesDeleted": [
        {"message": {"id": "m1"}}, {"message": {"id": "m2"}}]}, ["m1", "m2"]),
    ("google", "drive", {"fileId": "f1", "removed": True}, ["f1"]),
    ("airtable", "payloads", {"changedTablesById": {"t": {"destroyedRecordIds": ["r1", "r2"]}}}, ["r1", "r2"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "feed", "raw", "gone"), TOLD)
def test_an_event_that_tells_of_a_deletion_names_what_is_gone(name, feed, raw, gone):
    """Its own key is that of the event: deleting by it would delete nothing, or the wrong row."""
    told = providers_by_name()[name]().incremental[feed]
    rules = Rules(key="event_id" if name == "matrix" else "id", incremental=told, deleted=told.deleted,
                  deleted_key=told.deleted_key)  # fmt: skip
    (found,), _ = one_page(Cursor(), [raw], rules)
    assert (list(found.deleted), found.gone) == (gone, False)


def test_a_record_that_is_gone_itself_is_named_by_its_key():
    rules = Rules(deleted="status=cancelled")
    found, _ = one_page(Cursor(), [{"id": 1, "status": "cancelled"}, {"id": 2}, {"status": "cancelled"}], rules)
    assert [(one.gone, one.deleted) for one in found] == [(True, ("1",)), (False, ()), (True, ())]


CHANGED, REMOVED = {"fileId": "x", "removed": False}, {"fileId": "x", "removed": True}


@pytest.mark.parametrize(
    ("feed", "in_force"),
    [
        ([CHANGED, REMOVED], [(REMOVED, ("x",))]),
        ([REMOVED, CHANGED], [(REMOVED, ()), (CHANGED, ())]),  # shared again
        ([CHANGED | {"n": 1}, REMOVED, CHANGED], [(CHANGED | {"n": 1}, ()), (REMOVED, ()), (CHANGED, ())]),
    ],
)
def test_a_record_and_the_event_of_its_deletion_under_one_key_give_the_later_of_the_two(feed, in_force):
    """Whoever deletes first, and then writes, must not bring the record back; nor delete it the other way round."""
    told = providers_by_name()["google"]().incremental["drive"]
    rules = Rules(key="fileId", incremental=told, deleted=told.deleted, deleted_key=told.deleted_key)
    records, _ = one_page(Cursor(), feed, rules)
    assert [(one.raw, one.deleted) for one in records] == in_force
