"""Whatever an answer names as a cursor is carried by the next request and by a row, or refused as no cursor."""

import re

import pytest

from resilient.core.base.bounds import CURSOR
from resilient.core.sync.paginators import GraphQLPages, LastKey, NextCursor, NextUrl, Offset, PageNumber
from resilient.core.sync.paging import PageRead, PageRequest, PagingError
from resilient.core.sync.stream import Cursor, Rules, begin, take
from tests.core.pages import FIRST, URL, answer
from tests.core.test_sync_cursor import FILTER, KEY, NOW, conditional

MANY_DIGITS = "9" * 5_000  # more than Python reads as a number
LONGEST = "x" * CURSOR.value


def connection(cursor):
    return answer({"data": {"x": {"pageInfo": {"hasNextPage": True, "endCursor": cursor}, "nodes": [1]}}})


PLACES = {
    "NextUrl": (NextUrl(items="d", url="u"), lambda cursor: answer({"d": [1], "u": cursor})),
    "NextCursor": (NextCursor(items="d", cursor="c", query="q"), lambda cursor: answer({"d": [1], "c": cursor})),
    "NextCursor header": (NextCursor(header="x-next", query="q"), lambda cursor: answer([1], x_next=cursor)),
    "PageNumber header": (PageNumber(header="x-next"), lambda cursor: answer([1], x_next=cursor)),
    "LastKey": (LastKey(key="id"), lambda cursor: answer([{"id": cursor}])),
    "GraphQLPages": (GraphQLPages(), connection),
}


@pytest.mark.parametrize(("paginator", "page"), PLACES.values(), ids=PLACES)
@pytest.mark.parametrize(
    ("cursor", "why"), [("half \ud800", "holds half a character"), (LONGEST + "x", "more than 8,192 are no")]
)
def test_what_no_request_carries_is_no_cursor(paginator, page, cursor, why):
    with pytest.raises(PagingError, match=why):
        paginator.read(FIRST, page(cursor))


@pytest.mark.parametrize(("paginator", "page"), [one for name, one in PLACES.items() if name != "NextUrl"])
def test_the_longest_is_carried(paginator, page):
    assert paginator.read(FIRST, page(LONGEST)).next is not None


def test_a_flag_is_no_key_of_a_record():
    with pytest.raises(PagingError, match=re.escape("'id' is bool where a cursor should be")):
        LastKey(key="id").read(FIRST, answer([{"id": True}]))


@pytest.mark.parametrize("paginator", [PageNumber(), PageNumber(header="x-next"), Offset()])
def test_a_request_with_a_number_of_thousands_of_digits(paginator):
    asked = PageRequest(f"{URL}?{paginator.query}={MANY_DIGITS}")
    assert paginator.read(asked, answer([1], x_next="7")).next is not None


def since(items, rules, **headers):
    cursor = begin(Cursor(), NOW, rules)
    return take(cursor, FIRST, answer(items, **headers), PageRead(items, None), rules, NOW)[1].since


@pytest.mark.parametrize("ident", ["half \ud800", LONGEST + "x", "", True, None])
def test_the_next_pass_begins_at_no_key_that_no_request_carries(ident):
    assert since([{"n": "5"}, {"n": ident}], KEY) == "5"


def test_nor_at_such_a_time():
    assert since([{"at": "2029-01-01T00:00:00Z"}, {"at": LONGEST + "x"}], FILTER) == "2029-01-01T00:00:00Z"


@pytest.mark.parametrize("time", ["never", "n/a", "nan", "2029-13-01"])
def test_a_time_that_is_none_keeps_no_stream_at_its_beginning(time):
    """As a text it is later than any other: each later pass was a full one."""
    assert since([{"at": "2029-01-01T00:00:00Z"}, {"at": time}], FILTER) == "2029-01-01T00:00:00Z"


@pytest.mark.parametrize(
    ("tag", "kept"), [('W/"1"', 'W/"1"'), ('"\xe9"', None), (LONGEST, LONGEST), (LONGEST + "x", None)]
)
def test_a_tag_that_no_header_of_ours_carries_is_none(tag, kept):
    """Without one the next pass reads the whole feed: it says so, instead of failing for ever."""
    rules = Rules(incremental=conditional("If-None-Match"))
    assert since([1], rules, etag=tag) == kept
