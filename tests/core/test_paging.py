"""Paginators: to the end, no further, and never in a circle."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.core.sync.paginators import (
    GraphQLPages,
    LastKey,
    LinkHeader,
    NextCursor,
    NextUrl,
    Offset,
    OnePage,
    PageNumber,
    links,
)
from resilient.core.sync.paging import Loop, PageRead, PageRequest, PagingError
from tests.core.pages import FIRST, URL, answer


def walk(paginator, server, request=FIRST, most=100):
    """Everything a server gives, by the paginator's own requests."""
    request, loop, items, resume = paginator.first(request), Loop(), [], None
    for _ in range(most):
        read = paginator.read(request, server(request))
        loop = loop.step(request, read)
        items += read.items
        request, resume = read.next, read.resume
        if request is None:
            return items, resume
    raise AssertionError("no end")


RECORDS = [{"id": n} for n in range(1, 8)]


def by_page(request):
    page, size = int(request.query("page") or 1), int(request.query("per_page") or 3)
    return answer(RECORDS[(page - 1) * size : page * size])


def by_offset(request):
    start, size = int(request.query("offset") or 0), int(request.query("limit") or 3)
    return answer({"items": RECORDS[start : start + size], "total": len(RECORDS)})


def by_key(request):
    after, size = int(request.query("after") or 0), 3
    found = [r for r in RECORDS if r["id"] > after]
    return answer({"data": found[:size], "has_more": len(found) > size})


def by_cursor(request):
    start = int(request.query("cursor") or 0)
    more = start + 3 < len(RECORDS)
    return answer({"data": RECORDS[start : start + 3], "next": str(start + 3) if more else "", "sync": "s"})


def by_link(request):
    page = int(request.query("page") or 1)
    more = page * 3 < len(RECORDS)
    header = f'<{URL}?page={page + 1}>; rel="next", <{URL}?page=1>; rel="first"' if more else ""
    return answer(RECORDS[(page - 1) * 3 : page * 3], link=header)


@pytest.mark.parametrize(
    ("paginator", "server", "resume"),
    [
        (PageNumber(page=3), by_page, None),
        (PageNumber(size="per_page", most=4), by_page, None),
        (PageNumber(), by_page, None),  # until a page is empty
        (Offset(items="items", total="total"), by_offset, None),
        (Offset(items="items", size="limit", most=5), by_offset, None),
        (Offset(items="items"), by_offset, None),
        (LastKey(items="data", query="after", more="has_more"), by_key, None),
        (LastKey(items="data", query="after", page=3), by_key, None),
        (NextCursor(items="data", cursor="next", query="cursor", resume="sync"), by_cursor, "s"),
        (LinkHeader(), by_link, None),
    ],
)
def test_every_record_once(paginator, server, resume):
    assert walk(paginator, server) == (RECORDS, resume)


@given(st.integers(0, 30), st.integers(1, 7))
def test_every_record_once_whatever_the_sizes(count, size):
    records = [{"id": n} for n in range(1, count + 1)]

    def server(request):
        start = int(request.query("offset") or 0)
        return answer({"items": records[start : start + size]})

    assert walk(Offset(items="items", page=size), server)[0] == records

    def numbered(request):
        page = int(request.query("page") or 1)
        return answer({"items": records[(page - 1) * size : page * size], "pages": -(-count // size)})

    assert walk(PageNumber(items="items", pages="pages"), numbered)[0] == records


def test_pages_may_be_counted_from_zero():
    def server(request):
        page = int(request.query("page") or 0)
        return answer({"items": RECORDS[page * 3 : page * 3 + 3], "pages": 3})

    assert walk(PageNumber(items="items", start=0, pages="pages"), server)[0] == RECORDS


def test_an_offset_within_a_query_language():
    paginator = Offset(items="r", query="q", clause="STARTPOSITION {offset}", start=1)
    read = paginator.read(PageRequest(URL + "?q=select+x+MAXRESULTS+9"), answer({"r": [1, 2]}))
    assert read.next.query("q") == "select x MAXRESULTS 9 STARTPOSITION 3"
    read = paginator.read(PageRequest(URL + "?q=select+x+startposition+5+MAXRESULTS+9"), answer({"r": [1, 2]}))
    assert read.next.query("q") == "select x STARTPOSITION 7 MAXRESULTS 9"


@pytest.mark.parametrize("given", [{}, {"clause": "STARTPOSITION {offset}"}])
def test_an_offset_of_more_digits_than_a_number_has_is_the_first(given):
    query = "STARTPOSITION+" if given else ""
    read = Offset(items="r", query="q", start=1, **given).read(
        PageRequest(f"{URL}?q={query}{'9' * 5_000}"), answer({"r": [1, 2]})
    )
    assert read.next.query("q").endswith("3")


def test_a_cursor_with_a_path_of_its_own_is_sent_alone():
    paginator = NextCursor(items="e", cursor="c", body="cursor", more="m", path="/continue", alone=True)
    request = PageRequest(URL, "POST", {"path": "/x"})
    second = paginator.read(request, answer({"e": [1], "c": "c1", "m": True})).next
    assert second == PageRequest(URL + "/continue", "POST", {"cursor": "c1"})
    third = paginator.read(second, answer({"e": [2], "c": "c2", "m": True})).next
    assert third == PageRequest(URL + "/continue", "POST", {"cursor": "c2"})


def test_a_cursor_alone_in_the_query():
    paginator = NextCursor(items="e", cursor="c", query="cursor", alone=True)
    assert paginator.read(PageRequest(URL + "?a=1"), answer({"e": [1], "c": "x"})).next.url == URL + "?cursor=x"


def test_the_size_is_asked_for_unless_the_caller_said_one():
    paginator = NextCursor(items="d", cursor="n", body="start", size="page_size", most=100)
    assert paginator.first(PageRequest(URL, "POST", {})).body == {"page_size": 100}
    assert paginator.first(PageRequest(URL, "POST", {"page_size": 5})).body == {"page_size": 5}
    assert LinkHeader(size="per_page", most=100).first(PageRequest(URL + "?per_page=5")).url == URL + "?per_page=5"


@pytest.mark.parametrize("cursor", [None, "", False])
def test_no_cursor_is_the_end(cursor):
    body = {"d": []} | ({} if cursor is False else {"n": cursor})
    assert NextCursor(items="d", cursor="n", query="c").read(FIRST, answer(body)) == PageRead([], None)


def test_a_cursor_may_be_a_number_but_zero_is_the_beginning_and_so_the_end():
    paginator = NextCursor(items="d", cursor="n", query="c")
    assert paginator.read(FIRST, answer({"d": [], "n": 17})).next.query("c") == "17"
    assert paginator.read(FIRST, answer({"d": [], "n": 0})).next is None


@pytest.mark.parametrize("cursor", [{"a": 1}, ["x"], True, 1.5, "x" * 9000, "a\ud800"])
def test_what_is_no_cursor_is_an_error(cursor):
    with pytest.raises(PagingError, match=r"cursor should be|no cursor"):
        NextCursor(items="d", cursor="n", query="c").read(FIRST, answer({"d": [], "n": cursor}))


@pytest.mark.parametrize(
    "paginator",
    [
        NextCursor(items="d", cursor="n", query="c", more="more"),
        NextUrl(items="d", url="n", more="more"),
        NextUrl(items="d", url="n", done="more"),
    ],
)
def test_more_without_a_way_there_is_an_error_not_the_end(paginator):
    with pytest.raises(PagingError, match="more pages"):
        paginator.read(FIRST, answer({"d": [1], "more": paginator.more != ""}))


def test_the_flag_ends_it_whatever_else_is_there():
    paginator = NextCursor(items="d", cursor="n", query="c", more="more", resume="n")
    assert paginator.read(FIRST, answer({"d": [1], "n": "x", "more": False})) == PageRead([1], None, "x")
    done = NextCursor(items="d", cursor="n", query="c", done="end", resume="n")
    assert done.read(FIRST, answer({"d": [1], "n": "x", "end": True})) == PageRead([1], None, "x")


def test_only_the_last_page_says_where_the_next_pass_begins():
    paginator = NextUrl(items="d", url="n", resume="delta")
    assert paginator.read(FIRST, answer({"d": [], "n": "?p=2", "delta": "x"})).resume is None


@pytest.mark.parametrize("body", [None, {}, {"d": None}, {"d": {}}, {"d": "x"}, [], "text"])
def test_a_page_without_its_list_is_an_error(body):
    with pytest.raises(PagingError, match="no list"):
        OnePage(items="d").read(FIRST, answer(body))


def test_unless_the_provider_leaves_empty_lists_out():
    paginator = OnePage(items="d", absent="empty")
    assert paginator.read(FIRST, answer({})).items == []
    with pytest.raises(PagingError):
        paginator.read(FIRST, answer(None))  # no JSON at all is never an empty page
    assert OnePage(items="d").read(FIRST, answer(None, status=204)).items == []


def test_a_record_without_its_key_is_an_error():
    with pytest.raises(PagingError, match="'id'"):
        LastKey(items="d", more="more").read(FIRST, answer({"d": [{}], "more": True}))


def test_a_next_page_elsewhere_is_refused():
    with pytest.raises(PagingError, match="another host"):
        LinkHeader().read(FIRST, answer([1], link='<https://evil.test/>; rel="next"'))


# -- GraphQL -------------------------------------------------------------------------------------------------


def graphql(**connections):
    return answer({"data": {"owner": connections}})


def connection(items, cursor=None, more=None):
    return {
        "nodes": items,
        "pageInfo": {"hasNextPage": cursor is not None if more is None else more, "endCursor": cursor},
    }


QUERY = PageRequest(URL, "POST", {"query": "q", "variables": {"owner": "a"}})


def test_graphql_pages_through_its_only_connection():
    read = GraphQLPages().read(QUERY, graphql(issues=connection([1], "c")))
    assert read.items == [1]
    assert read.next.body == {"query": "q", "variables": {"owner": "a", "after": "c"}}
    assert GraphQLPages().read(QUERY, graphql(issues=connection([2]))) == PageRead([2], None)


def test_graphql_connections_within_records_are_not_paged():
    inner = {"labels": connection([7], "inner")}
    assert GraphQLPages().read(QUERY, graphql(issues=connection([inner]))).next is None


def test_graphql_with_two_connections_asks_which():
    both = graphql(issues=connection([1]), pulls=connection([2], "p"))
    with pytest.raises(PagingError, match="connection="):
        GraphQLPages().read(QUERY, both)
    read = GraphQLPages(connection="owner.pulls", variable="afterPull").read(QUERY, both)
    assert (read.items, read.next.body["variables"]["afterPull"]) == ([2], "p")


@pytest.mark.parametrize("body", [{"data": None, "errors": [{}]}, {"errors": []}, None, [], {"data": {}}])
def test_graphql_without_data_is_an_error(body):
    with pytest.raises(PagingError):
        GraphQLPages().read(QUERY, answer(body))


def test_graphql_with_more_but_no_cursor_is_an_error():
    with pytest.raises(PagingError, match="endCursor"):
        GraphQLPages().read(QUERY, graphql(issues=connection([1], None, more=True)))
    with pytest.raises(PagingError, match="nodes nor edges"):
        GraphQLPages().read(QUERY, graphql(issues={"pageInfo": {"hasNextPage": False}}))


# -- Link headers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "found"),
    [
        ('<https://a/2>; rel="next"', {"next": "https://a/2"}),
        ("<https://a/2>; rel=next, <https://a/9>;rel=last", {"next": "https://a/2", "last": "https://a/9"}),
        (
            '<https://a/2?x=1,2>; title="a, b; rel=no"; rel="next last"',
            {"next": "https://a/2?x=1,2", "last": "https://a/2?x=1,2"},
        ),
        ('</2>; REL="Next"', {"next": "/2"}),
        ('</1>; rel="next", </2>; rel="next"', {"next": "/1"}),
        ('</1>; title="with \\" quote"; rel="next"', {"next": "/1"}),
        ("", {}),
        ("nonsense", {}),
        ("<https://a/2>", {}),
        ("<https://a/2; rel=next", {}),
    ],
)
def test_link_headers(header, found):
    assert links(header) == found


@pytest.mark.parametrize("header", ["<" * 5000, '<a>; rel="' * 2000, "<a>;" + " ;" * 5000, "<a>" + '; a="' * 3000])
def test_a_hostile_link_header_costs_no_time(header):
    links(header)


# -- going round ---------------------------------------------------------------------------------------------


def turn_to(request, items=()):
    return PageRead(list(items), request)


def pages_of(n):
    return [FIRST.with_query(p=i) for i in range(n)]


@given(st.integers(0, 40), st.integers(1, 40))
def test_a_circle_is_noticed_wherever_it_begins(tail, circle):
    pages = pages_of(tail + circle)
    loop, at = Loop(), 0
    for _ in range(4 * (tail + circle) + 4):
        following = at + 1 if at + 1 < len(pages) else tail
        try:
            loop = loop.step(pages[at], turn_to(pages[following], [at, object()]))
        except PagingError as error:
            assert "round" in str(error)  # noqa: PT017 - how many steps it takes is not fixed
            return
        at = following
    pytest.fail("went round for ever")


@given(st.integers(1, 300))
def test_a_straight_way_is_no_circle(n):
    loop = Loop()
    for at, page in enumerate(pages_of(n)):
        loop = loop.step(page, turn_to(FIRST.with_query(p=at + 1), [at]))
        assert loop == Loop(*loop)  # and can be stored as it is
    assert loop.steps == n


def test_the_same_records_under_another_number_are_noticed():
    one, two, three = pages_of(3)
    loop = Loop().step(one, turn_to(two, [{"id": 1}]))
    with pytest.raises(PagingError, match="same records"):
        loop.step(two, turn_to(three, [{"id": 1}]))


def test_two_empty_pages_are_no_circle():
    one, two, three = pages_of(3)
    Loop().step(one, turn_to(two)).step(two, turn_to(three))


def test_the_last_page_may_look_like_the_one_before():
    one, two, _ = pages_of(3)
    Loop().step(one, turn_to(two, [1])).step(two, PageRead([1], None))
