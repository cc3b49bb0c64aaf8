"""The cursor of a stream, field by field: what a pass begins with, what each page adds, and what its end leaves."""

from dataclasses import replace
from datetime import UTC, date, datetime, timedelta

import pytest

from resilient.core.base.budgets import Fields
from resilient.core.base.errors import InvalidInput
from resilient.core.base.exchange import AnswerFacts
from resilient.core.sync.incremental import Incremental
from resilient.core.sync.paging import Loop, PageRead, PageRequest
from resilient.core.sync.stream import (
    EDGE,
    SLICE,
    Cursor,
    CursorInfo,
    Record,
    Rules,
    TooManyRecords,
    asked_since,
    begin,
    refuse,
    restart,
    take,
    take_in_slices,
    unchanged,
)
from resilient.core.sync.stream import _digest as digest_of

NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)
EARLIER = NOW - timedelta(days=1)
BEGAN = 1000.0  # of a pass, by the provider's clock, in most of these tests
ASK, NEXT = PageRequest("https://a.test/x"), PageRequest("https://a.test/x?page=2")
FILTER = Rules(incremental=Incremental(style="filter", query="since", field="at"), overlap=60)
KEY = Rules(incremental=Incremental(style="key", query="after", field="n"))
TOKEN = Rules(incremental=Incremental(style="token", query="t", cursor="told", source="every_page"))
BUSY = Cursor(
    version=7, pass_id=3, full=False, next=NEXT, since="5", provider_cursor="told", newest="9", began=BEGAN,
    edge=(("a", 1.0),), fresh=(("b", 2.0),), loop=Loop("kept", 3, 4, "page"), resets=2, nameless=4, full_pass=1,
    full_nameless=1, swept_pass=1, pages=5, records=6, rejected=7, full_at=EARLIER, completed_at=EARLIER, error="why",
    expected=60.0,
)  # fmt: skip
IDLE = replace(BUSY, next=None)


def answered(body=None, headers=()):
    return AnswerFacts(200, Fields.of(headers), body=body)


def page(cursor, items, rules=FILTER, following=None, *, resume=None, answer=None):
    return take(cursor, ASK, answer or answered(items), PageRead(items, following, resume), rules, NOW)


def after(cursor, items, rules=FILTER, following=None, **options):
    return page(cursor, items, rules, following, **options)[1]


def at(*seconds):
    """Records of these moments, in the spelling that they have here."""
    return [{"id": number, "at": one} for number, one in enumerate(seconds)]


# -- stored ------------------------------------------------------------------------------------------------------------


def test_only_what_is_not_a_column_is_stored():
    assert Cursor().to_json() == {"loop": ["", 0, 1, ""]}
    assert Cursor(resets=1).to_json() == {"loop": ["", 0, 1, ""], "resets": 1}
    assert BUSY.to_json() == {
        "next": {"url": "https://a.test/x?page=2"}, "since": "5", "told": "told", "newest": "9", "began": 1000.0,
        "edge": (("a", 1.0),), "fresh": (("b", 2.0),), "loop": ["kept", 3, 4, "page"], "resets": 2, "nameless": 4,
        "full_nameless": 1,
    }  # fmt: skip


def test_what_is_not_stored_is_as_in_a_new_cursor():
    assert Cursor.from_json({}) == Cursor()
    assert Cursor.from_json({}, version=2, pages=3) == Cursor(version=2, pages=3)


@pytest.mark.parametrize("doc", [None, [], "x"])
def test_what_is_no_cursor_is_refused(doc):
    with pytest.raises(InvalidInput) as caught:
        Cursor.from_json(doc)
    assert str(caught.value) == "the stored cursor is none: reset the stream, so that it starts a full pass"


@pytest.mark.parametrize(
    ("cursor", "doing"),
    [
        (Cursor(), "to be read anew"),
        (Cursor(next=ASK), "full pass"),
        (Cursor(next=ASK, full=False, completed_at=NOW), "changes"),
        (Cursor(completed_at=NOW), "up to date"),
        (Cursor(completed_at=NOW, error="refused"), "to be read anew"),
        (Cursor(error="refused"), "to be read anew"),
    ],
)
def test_what_a_stream_is_doing(cursor, doing):
    assert CursorInfo("r", "s", "", cursor, NOW).doing == doing


def test_a_stream_for_programs():
    shown = {
        "resource_key": "r", "stream": "s", "part": "p", "doing": "changes", "pass_id": 3, "full": False,
        "full_pass": 1, "may_sweep": False, "pages": 5, "records": 6, "rejected": 7, "error": "why",
        "full_at": "2029-12-31T12:00:00+00:00", "completed_at": "2029-12-30T12:00:00+00:00",
        "updated_at": "2030-01-01T12:00:00+00:00",
    }  # fmt: skip
    cursor = replace(BUSY, completed_at=EARLIER - timedelta(days=1))
    assert CursorInfo("r", "s", "p", cursor, NOW).to_json() == shown
    never = CursorInfo("r", "s", "p", replace(cursor, full_at=None, completed_at=None), NOW).to_json()
    assert never == shown | {"full_at": None, "completed_at": None}


@pytest.mark.parametrize(
    ("changes", "may"),
    [
        ({}, True),
        ({"full_pass": 2}, False),  # its rows are swept already
        ({"full_nameless": 1}, False),
        ({"next": NEXT}, False),
        ({"next": NEXT, "full": False}, True),
        ({"error": "reset by hand"}, False),
    ],
)
def test_when_rows_that_were_not_seen_may_be_deleted(changes, may):
    assert replace(Cursor(full_pass=3, swept_pass=2), **changes).may_sweep is may


# -- a pass begins and ends --------------------------------------------------------------------------------------------


def test_a_pass_under_way_goes_on_as_it_is():
    assert begin(BUSY, NOW, replace(FILTER, expected=90)) == replace(BUSY, expected=90)


def test_a_new_pass_has_read_nothing():
    assert begin(IDLE, NOW, replace(FILTER, expected=90)) == replace(
        IDLE, expected=90, pass_id=4, provider_cursor=None, newest=None, began=None, fresh=(), loop=Loop(), nameless=0,
        pages=0, records=0, rejected=0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "rules", "full"),
    [
        ({}, {}, False),
        ({}, {"incremental": None}, True),
        ({"since": None}, {}, True),
        ({}, {"full_every": 86400}, True),  # a day ago
        ({}, {"full_every": 86401}, False),
        ({"full_at": None}, {"full_every": 86401}, True),
        ({}, {"incremental": replace(FILTER.incremental, life=86400)}, True),
        ({}, {"incremental": replace(FILTER.incremental, life=86401)}, False),
        ({"completed_at": None}, {"incremental": replace(FILTER.incremental, life=86401)}, True),
        ({"completed_at": None, "full_at": None}, {}, False),
    ],
)
def test_which_passes_are_full(changes, rules, full):
    assert begin(replace(IDLE, **changes), NOW, replace(FILTER, **rules)).full is full


@pytest.mark.parametrize(
    ("since", "rules", "asked"),
    [
        (None, FILTER, ""),
        ("100", FILTER, "40"),
        ("100.5", replace(FILTER, overlap=0), "100.5"),  # in the provider's own spelling
        ("100", replace(KEY, overlap=60), "100"),
        ("100", replace(TOKEN, overlap=60), "100"),
        ("100", Rules(overlap=60), "100"),
    ],
)
def test_only_a_time_goes_back_by_the_overlap(since, rules, asked):
    assert asked_since(Cursor(since=since), rules) == asked


def test_nothing_changed_since_the_last_pass():
    done = replace(BUSY, next=None, pages=6, completed_at=NOW, error=None, resets=0)
    assert unchanged(BUSY, NOW) == done


def test_to_begin_anew_forgets_where_the_stream_stood():
    assert restart(BUSY, "gone") == replace(
        BUSY, full=True, next=None, since=None, provider_cursor=None, newest=None, began=None, edge=(), fresh=(),
        loop=Loop(), resets=3, error="gone",
    )  # fmt: skip


def test_the_end_of_an_incremental_pass():
    ended = replace(
        BUSY, next=None, since="told", provider_cursor=None, newest=None, began=None, edge=(), fresh=(), loop=Loop(),
        resets=0, pages=6, completed_at=NOW, error=None,
    )  # fmt: skip
    assert after(BUSY, [], TOKEN) == ended
    assert after(replace(BUSY, provider_cursor=None), [], TOKEN) == replace(ended, since="5")


def test_the_end_of_a_full_pass():
    full = replace(BUSY, full=True)
    ended = replace(after(BUSY, [], TOKEN), full=True, full_pass=3, full_at=NOW, full_nameless=4)
    assert after(full, [], TOKEN) == ended
    assert after(replace(full, provider_cursor=None), [], TOKEN) == replace(ended, since=None)


def test_a_page_within_a_pass():
    cursor = after(replace(BUSY, provider_cursor=None, error=None), [{"id": 1}], TOKEN, NEXT)
    expected = replace(
        BUSY,
        provider_cursor=None,
        error=None,
        pages=6,
        records=7,
        loop=BUSY.loop.step(ASK, PageRead([digest_of({"id": 1})], NEXT)),
    )
    assert cursor == expected


@pytest.mark.parametrize(
    ("full", "pass_id", "full_nameless"),
    [
        (True, 1, 6),  # the page was the last of the full pass
        (True, 3, 1),  # the full pass goes on
        (False, 1, 1),
        (False, 3, 1),
    ],
)
def test_rejected_records_are_counted(full, pass_id, full_nameless):
    cursor = replace(BUSY, full=full, pass_id=pass_id)
    assert refuse(cursor, iter([None, "1", None])) == replace(
        cursor, rejected=10, nameless=6, full_nameless=full_nameless
    )


@pytest.mark.parametrize(
    ("sent", "began"),
    [
        ("Tue, 01 Jan 2030 11:59:00 GMT", NOW - timedelta(minutes=1)),
        ("Tuesday, 01-Jan-30 11:58:00 GMT", NOW - timedelta(minutes=2)),  # of this century, by our clock
        (None, NOW - timedelta(seconds=300)),  # our clock may be ahead
        ("soon", NOW - timedelta(seconds=300)),
    ],
)
def test_when_a_pass_began(sent, began):
    answer = answered([], [] if sent is None else [("Date", sent)])
    assert after(Cursor(), [], FILTER, NEXT, answer=answer).began == began.timestamp()
    assert after(BUSY, [], FILTER, ASK.with_query(page=3), answer=answer).began == BEGAN


# -- the border --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "moments", "since"),
    [
        (None, [], None),
        (None, ["900", "950", "800"], "950"),
        ("700", ["900"], "900"),
        ("700", ["600"], "700"),  # never backwards
        ("700", [], "700"),
        ("700", ["soon"], "700"),
        ("900.50", ["900.5"], "900.50"),
        (None, ["1000.0"], "1000.0"),  # not beyond the pass's beginning, and up to it in the record's spelling
        (None, ["1001.0"], "1000.000000"),
        ("1200", ["1300"], "1200"),
    ],
)
def test_where_the_next_incremental_pass_begins(before, moments, since):
    cursor = Cursor(began=BEGAN, full=before is None, since=before)
    assert after(cursor, at(*moments)).since == since


def test_a_full_pass_forgets_where_the_last_one_stood():
    assert after(Cursor(began=BEGAN, since="700"), []).since is None
    assert after(Cursor(began=BEGAN, since="700"), at("600")).since == "600"


@pytest.mark.parametrize(
    ("before", "keys", "since"),
    [
        (None, ["7", "12", "9"], "12"),
        ("5", ["7"], "7"),
        ("5", ["3"], "5"),
        ("5", [], "5"),
        ("5", [3, 8], "8"),
        (None, ["b", "c", "a"], "c"),
        (None, [True, "", None, {}, ["x"]], None),
        (None, [0], "0"),
        (None, [1.5], "1.5"),
    ],
)
def test_the_last_key(before, keys, since):
    cursor = Cursor(began=BEGAN, full=before is None, since=before, edge=(("a", 1.0),))
    items = [{"n": key} for key in keys]
    assert after(cursor, items, KEY, NEXT).fresh == ()
    ended = after(cursor, items, KEY)
    assert (ended.since, ended.edge) == (since, ())


def moments(cursor):
    return [moment for _, moment in cursor.fresh]


@pytest.mark.parametrize(
    ("read", "kept"),
    [
        (["900"], [900]),
        (["900", "840"], [900, 840]),  # the border: the newest, and the overlap before it
        (["900", "839"], [900]),
        (["900", "839", "soon"], [900]),
        (["1200", "940", "939"], [1200, 940]),  # the border is not beyond the pass's beginning
        (["900", None, True, ""], [900]),
    ],
)
def test_which_records_stand_at_the_border(read, kept):
    cursor = after(Cursor(began=BEGAN), at(*read), FILTER, NEXT)
    assert moments(cursor) == kept


def test_the_newest_record_stays_the_newest():
    for read in (["900", "100"], ["900", "870"], ["100", "900"]):
        assert after(Cursor(began=BEGAN), at(*read), FILTER, NEXT).newest == "900"
    assert after(Cursor(began=BEGAN), at("900", "soon"), FILTER, NEXT).newest == "900"  # "soon" is no time


def test_a_border_without_a_time_keeps_nothing():
    ended = after(Cursor(began=BEGAN), at("soon"))
    assert (ended.since, ended.edge) == (None, ())


def test_the_border_of_an_incremental_pass_is_that_of_both():
    edge = (("before", 839.0), ("on", 840.0), ("after", 900.0))
    cursor = Cursor(began=BEGAN, full=False, since="900", edge=edge)
    assert after(cursor, []).edge == edge[1:]
    assert [one for _, one in after(cursor, at("900")).edge] == [840, 900, 900]
    assert [one for _, one in after(replace(cursor, full=True), at("900")).edge] == [900]
    zero = Cursor(began=BEGAN, full=False, since="0", edge=(("a", 0.0), ("b", 0.5)))
    assert after(zero, [], replace(FILTER, overlap=0)).edge == zero.edge


def test_no_more_of_the_border_is_kept_than_agreed():
    edge = tuple((str(number), 900.0) for number in range(EDGE + 1))
    cursor = Cursor(began=BEGAN, full=False, since="900", edge=edge)
    assert after(cursor, []).edge == edge[1:]
    assert after(replace(cursor, edge=edge[1:]), []).edge == edge[1:]


@pytest.mark.parametrize(
    ("count", "on_border", "left"),
    [
        (2 * EDGE - 1, EDGE, 2 * EDGE),
        (2 * EDGE, EDGE - 101, EDGE - 100),  # with the new one too many: those before the border go
        (2 * EDGE, 2 * EDGE, EDGE),
    ],
)
def test_a_pass_does_not_remember_ever_more_of_its_records(count, on_border, left):
    fresh = tuple((str(n), 839.0 if n < count - on_border else 840.0) for n in range(count))
    cursor = after(Cursor(began=BEGAN, newest="900", fresh=fresh), at("900"), FILTER, NEXT)
    assert (len(cursor.fresh), cursor.fresh[-1][1], cursor.newest) == (left, 900, "900")
    assert cursor.fresh[:-1] == fresh[count - left + 1 :]


def test_a_record_that_was_read_before_comes_once_whatever_the_order_of_its_fields():
    one, same, day = {"id": 1, "at": "900"}, {"at": "900", "id": 1}, {"id": 2, "at": date(2030, 1, 1)}
    news, cursor = page(Cursor(began=BEGAN), [one, same, day, day])
    assert [record.raw for record in news] == [one, day]
    assert [len(digest) for digest, _ in cursor.edge] == [16]
    assert cursor.records == 2
    assert page(begin(cursor, NOW, FILTER), [same])[0] == []
    full = replace(begin(cursor, NOW, FILTER), full=True)
    assert page(full, [same])[0] == [Record(same, "1", gone=False)]  # a full pass sees every record


# -- records -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "key"),
    [
        ({"id": 0}, "0"),
        ({"id": "a"}, "a"),
        ({"id": ["a", "b"]}, "a"),
        ({"id": ""}, None),
        ({"id": None}, None),
        ({"id": True}, None),
        ({"id": 1.5}, None),
        ({"id": {}}, None),
        ({"id": [None, ""]}, None),
        ({}, None),
        ("text", None),
    ],
)
def test_the_key_of_a_record(raw, key):
    assert page(Cursor(), [raw], Rules())[0] == [Record(raw, key, gone=False)]


@pytest.mark.parametrize(
    ("deleted", "raw", "gone"),
    [
        ("", {"id": 1, "gone": True}, False),
        ("gone", {"id": 1}, False),
        *(("gone", {"id": 1, "gone": nothing}, False) for nothing in (None, False, "", [], {})),
        *(("gone", {"id": 1, "gone": something}, True) for something in (True, "now", ["x"], {"at": 1})),
        ("state=off*", {"id": 1, "state": "off-line"}, True),
        ("state=off*", {"id": 1, "state": "on"}, False),
        ("state=OFF", {"id": 1, "state": "off"}, False),
        ("state=a=b", {"id": 1, "state": "a=b"}, True),
        ("state=", {"id": 1, "state": ""}, True),
    ],
)
def test_which_records_are_gone(deleted, raw, gone):
    (record,), _ = page(Cursor(), [raw], Rules(deleted=deleted))
    assert record == Record(raw, "1", gone=gone, deleted=("1",) if gone else ())


A, B, GONE, NAMELESS = {"id": 1, "n": 1}, {"id": 1, "n": 2}, {"id": 1, "gone": True}, {"gone": True}


@pytest.mark.parametrize(
    ("items", "in_force"),
    [
        ([A, GONE], [GONE]),
        ([GONE, A], [A]),
        ([A, GONE, A], [A]),  # made again as it was
        ([GONE, A, GONE], [GONE]),
        ([A, B, GONE, {"id": 2}], [GONE, {"id": 2}]),
        ([GONE, A, B], [A, B]),
        ([A, B], [A, B]),
        ([NAMELESS, A, GONE, {"n": 3}], [NAMELESS, GONE, {"n": 3}]),
    ],
)
def test_a_record_and_its_deletion_on_one_page(items, in_force):
    """Programs write a page's items and its deletions in either order."""
    records, cursor = page(Cursor(), items, Rules(deleted="gone"))
    assert [one.raw for one in records] == in_force
    assert cursor.records == len(in_force)


def stamped(record, at):
    return record | {"at": at}


@pytest.mark.parametrize(
    ("items", "in_force"),
    [
        ([stamped(GONE, "900"), stamped(A, "800")], [stamped(GONE, "900")]),  # the newest first
        ([stamped(A, "900"), stamped(GONE, "800")], [stamped(A, "900")]),
        ([stamped(A, "800"), stamped(GONE, "900"), stamped(B, "850")], [stamped(GONE, "900")]),
        ([stamped(GONE, "800"), stamped(A, "800")], [stamped(A, "800")]),
        ([stamped(A, "900"), GONE], [GONE]),  # only one has a time
        ([GONE, stamped(A, "900")], [stamped(A, "900")]),
    ],
)
def test_the_later_of_a_record_and_its_deletion_is_that_of_the_later_time(items, in_force):
    records, _ = page(Cursor(began=BEGAN), items, replace(FILTER, deleted="gone"))
    assert [one.raw for one in records] == in_force


def test_a_deletion_that_is_an_event_undoes_no_record():
    event = {"id": 1, "type": "gone", "of": "1"}
    records, _ = page(Cursor(), [A, event, A | {"n": 5}], Rules(deleted="type=gone", deleted_key="of"))
    assert [(one.raw, one.deleted) for one in records] == [(A, ()), (event, ("1",)), (A | {"n": 5}, ())]


def test_an_event_names_each_record_that_is_gone_once():
    raw = {"id": 9, "type": "gone", "a": [1, 2, None], "b": "2"}
    (record,), _ = page(Cursor(), [raw], Rules(deleted="type=gone", deleted_key="a b"))
    assert record == Record(raw, "9", gone=False, deleted=("1", "2"))


# -- the provider's own cursors ----------------------------------------------------------------------------------------


def told(source):
    return Incremental(style="token", query="t", cursor="told", source=source)


def conditional(header):
    return Incremental(style="conditional", header=header)


@pytest.mark.parametrize(
    ("incremental", "following", "cursor"),
    [
        (None, NEXT, "delta"),
        (told("before_pass"), NEXT, "delta"),
        (told("every_page"), NEXT, "of the body"),
        (told("every_page"), None, "of the body"),
        (told("last_page"), NEXT, "delta"),
        (told("last_page"), None, "of the body"),
        (replace(told("every_page"), cursor="elsewhere"), NEXT, "delta"),
        (conditional("If-None-Match"), NEXT, "tag"),
        (conditional("if-none-match"), NEXT, "tag"),
        (conditional("If-Modified-Since"), NEXT, "day"),
        (replace(conditional("If-None-Match"), source="before_pass"), NEXT, "delta"),
        (Incremental(style="filter", query="q", field="at", cursor="told"), NEXT, "delta"),
        (Incremental(style="filter", query="q", field="at"), NEXT, "delta"),
    ],
)
def test_the_cursor_that_an_answer_tells(incremental, following, cursor):
    answer = answered({"told": "of the body"}, [("ETag", "tag"), ("Last-Modified", "day")])
    found = after(Cursor(), [], Rules(incremental=incremental), following, resume="delta", answer=answer)
    assert (found.provider_cursor if following else found.since) == cursor
    kept = after(Cursor(provider_cursor="old"), [], Rules(incremental=incremental), following, answer=answered({}))
    assert (kept.provider_cursor if following else kept.since) == "old"  # a page that tells none forgets none


# -- large pages -------------------------------------------------------------------------------------------------------


def breaths(cursor, items, rules, **options):
    """How often the work on a page pauses, and what it comes to."""
    steps, count = take_in_slices(cursor, ASK, answered(items), PageRead(items, NEXT), rules, NOW, **options), 0
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return count, end.value
        count += 1


@pytest.mark.parametrize(
    ("size", "gone", "count"),
    [(0, False, 0), (SLICE, False, 0), (SLICE + 1, False, 1), (5 * SLICE, False, 4), (5 * SLICE, True, 8)],
)
def test_a_large_page_is_worked_on_in_slices(size, gone, count):
    rules = replace(FILTER, deleted="gone")
    items = [{"id": n, "at": "2030-01-01T00:00:00Z", "gone": gone} for n in range(size)]
    assert breaths(BUSY, items, rules) == (count, take(BUSY, ASK, answered(items), PageRead(items, NEXT), rules, NOW))


def test_a_page_of_more_records_than_its_bound_is_refused():
    items = [{"id": n} for n in range(6)]
    assert breaths(BUSY, items, TOKEN, most=6)[1][0]
    with pytest.raises(TooManyRecords, match="a page holds 6 records, and 5 are the most"):
        breaths(BUSY, items, TOKEN, most=5)


def test_a_page_that_tells_of_more_deletions_than_its_bound_is_refused():
    rules = Rules(deleted="gone", deleted_key="keys")
    items = [{"id": n, "gone": True, "keys": [f"{n}-{m}" for m in range(4)]} for n in range(2)]
    assert [one.deleted for one in breaths(BUSY, items, rules, most=8)[1][0]] == [
        tuple(f"{n}-{m}" for m in range(4)) for n in range(2)
    ]
    for few in (7, 3, 2):
        with pytest.raises(TooManyRecords, match=f"more than {few} deletions"):
            breaths(BUSY, items, rules, most=few)
