"""Where each paginator goes on and where it ends: both sides of every limit, and how it asks for the next page."""

import re

import pytest

from resilient.core.base.bounds import CURSOR
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
from resilient.core.sync.paging import Loop, PageRead, PageRequest, PagingError, cursor_at
from tests.core.pages import FIRST, URL, answer

ONE, TWO, THREE = [{"id": 1}], [{"id": 1}, {"id": 2}], [{"id": 1}, {"id": 2}, {"id": 3}]
TEXT = Offset(items="d", query="q", clause="START {offset}", start=1)


def following(paginator, url, page):
    """The URL of the next request, without the host and path that all have; None at the end."""
    request = paginator.read(PageRequest(URL + url), page).next
    return None if request is None else request.url.removeprefix(URL)


def refusal(call, *args):
    with pytest.raises(PagingError) as caught:
        call(*args)
    return str(caught.value)


@pytest.mark.parametrize(
    ("paginator", "url", "body", "expected"),
    [
        # By the number of records of a full page
        (PageNumber(items="d"), "", {"d": []}, None),
        (PageNumber(items="d"), "", {"d": ONE}, "?page=2"),  # not knowing how many, it asks until one is empty
        (PageNumber(items="d", page=3), "?page=4", {"d": THREE}, "?page=5"),
        (PageNumber(items="d", page=3), "?page=4", {"d": TWO}, None),
        (PageNumber(items="d", size="n", page=3), "?n=2", {"d": TWO}, "?n=2&page=2"),  # the request knows better
        (PageNumber(items="d", size="n", page=3), "?n=2", {"d": ONE}, None),
        (PageNumber(items="d", size="n", page=2), "", {"d": ONE}, None),
        (PageNumber(items="d", page=3, more="m"), "", {"d": TWO, "m": True}, "?page=2"),
        (PageNumber(items="d", page=2, more="m"), "", {"d": TWO, "m": False}, None),
        # By how many pages there are
        (PageNumber(items="d", pages="p", page=3), "?page=2", {"d": ONE, "p": 3}, "?page=3"),
        (PageNumber(items="d", pages="p", page=1), "?page=3", {"d": ONE, "p": 3}, None),
        (PageNumber(items="d", pages="p", page=1, start=0), "?page=1", {"d": ONE, "p": 3}, "?page=2"),
        (PageNumber(items="d", pages="p", page=1, start=0), "?page=2", {"d": ONE, "p": 3}, None),
        (PageNumber(items="d", pages="p", page=3), "", {"d": ONE, "p": "many"}, None),
        (PageNumber(items="d", pages="p", page=1), "", {"d": ONE}, "?page=2"),
        # By how many records there are
        (Offset(items="d"), "", {"d": []}, None),
        (Offset(items="d"), "", {"d": ONE}, "?offset=1"),
        (Offset(items="d", page=3), "?offset=6", {"d": THREE}, "?offset=9"),
        (Offset(items="d", page=3), "?offset=6", {"d": TWO}, None),
        (Offset(items="d", size="n", page=3), "?n=2&offset=2", {"d": TWO}, "?n=2&offset=4"),
        (Offset(items="d", size="n", page=1), "?n=2&offset=2", {"d": ONE}, None),
        (Offset(items="d", page=3, more="m"), "", {"d": TWO, "m": True}, "?offset=2"),
        (Offset(items="d", total="t", page=3), "?offset=2", {"d": TWO, "t": 5}, "?offset=4"),
        (Offset(items="d", total="t", page=1), "?offset=3", {"d": TWO, "t": 5}, None),
        (Offset(items="d", total="t", start=1), "?offset=4", {"d": ONE, "t": 5}, "?offset=5"),
        (Offset(items="d", total="t", start=1), "?offset=5", {"d": ONE, "t": 5}, None),
        (Offset(items="d", total="t"), "", {"d": [], "t": 5}, None),
        # By the last record's key
        (LastKey(items="d"), "", {"d": []}, None),
        (LastKey(items="d"), "", {"d": ONE}, "?starting_after=1"),
        (LastKey(items="d", more="m"), "", {"d": [], "m": False}, None),
        (LastKey(items="d", page=3), "", {"d": THREE}, "?starting_after=3"),
        (LastKey(items="d", page=3), "", {"d": TWO}, None),
        (LastKey(items="d", page=3, more="m"), "", {"d": TWO, "m": True}, "?starting_after=2"),
        (LastKey(items="d", size="n", page=3), "?n=2", {"d": TWO}, "?n=2&starting_after=2"),
        (LastKey(items="d", size="n", page=1), "?n=2", {"d": ONE}, None),
        # By what the body names
        (NextUrl(items="d", url="n"), "?page=1", {"d": ONE, "n": "?page=2"}, "?page=2"),
        (NextUrl(items="d", url="n"), "?page=1", {"d": ONE}, None),
        (TEXT, "", {"d": ONE}, "?q=+START+2"),
        (TEXT, "?q=find+start+5", {"d": ONE}, "?q=find+START+6"),
    ],
)
def test_the_next_page(paginator, url, body, expected):
    assert following(paginator, url, answer(body)) == expected


@pytest.mark.parametrize(
    ("paginator", "headers", "expected"),
    [
        (PageNumber(header="X-Next"), {"x_next": " 7 "}, "?page=7"),
        (PageNumber(header="X-Next"), {"x_next": " "}, None),
        (PageNumber(header="X-Next"), {}, None),
        (PageNumber(), {"x_next": "7"}, "?page=2"),
        (NextCursor(header="X-Next", query="after"), {"x_next": "c"}, "?after=c"),
        (NextCursor(header="X-Next", query="after"), {}, None),
        (LinkHeader(), {"link": '<?page=2>; rel="next"'}, "?page=2"),
        (LinkHeader(), {}, None),
    ],
)
def test_the_next_page_by_a_header(paginator, headers, expected):
    assert following(paginator, "", answer(ONE, **headers)) == expected


def test_an_offset_in_the_body():
    paginator = Offset(items="d", body="page.start", size="page.size", page=1)
    request = PageRequest(URL + "?offset=50", "POST", {"page": {"start": 4, "size": 2}})
    read = paginator.read(request, answer({"d": TWO}))
    assert read.next == PageRequest(URL + "?offset=50", "POST", {"page": {"start": 6, "size": 2}})
    assert paginator.read(request, answer({"d": ONE})).next is None


@pytest.mark.parametrize(
    ("facts", "request_", "expected"),
    [
        ({"size": "n", "most": 50}, FIRST, FIRST.with_query(n=50)),
        ({"size": "n"}, PageRequest(URL + "?q=a%20b"), PageRequest(URL + "?q=a%20b")),
        ({"most": 50}, FIRST, FIRST),
    ],
)
def test_a_size_is_asked_for_where_both_its_name_and_the_most_are_known(facts, request_, expected):
    assert OnePage(**facts).first(request_) == expected


@pytest.mark.parametrize("paginator", [LastKey, PageNumber, Offset])
def test_who_wants_larger_pages_than_there_are_reads_on(paginator):
    """The provider gives two at most: a page of two is a full one, whatever was wanted."""
    reader = paginator(items="d", size="n", most=2)
    request = FIRST.with_query(n=50)
    assert reader.read(request, answer({"d": TWO})).next is not None
    assert reader.read(request, answer({"d": ONE})).next is None


def test_a_link_behind_what_is_read_of_a_header_is_not_the_end():
    long = ", ".join(f'<?page={n}>; rel="p{n}"' for n in range(1_000))
    with pytest.raises(PagingError, match="longer than 8192 characters"):
        LinkHeader().read(FIRST, answer(ONE, link=f'{long}, <?page=2>; rel="next"'))
    read = LinkHeader().read(FIRST, answer(ONE, link=f'<?page=2>; rel="next", {long}'))
    assert read.next == FIRST.at("?page=2")


# -- cursors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://h/x?a=1", "https://h/x/more?c=n"),
        ("https://h/x/?a=1", "https://h/x/more?c=n"),
        ("https://h/X?a=1", "https://h/X/more?c=n"),
        ("https://h/x/more?a=1", "https://h/x/more?c=n"),
        ("https://h/x?a=/more", "https://h/x/more?c=n"),  # the path counts, not the query
        ("https://h/x?a=1?b=2", "https://h/x/more?c=n"),
    ],
)
def test_pages_after_the_first_with_a_path_of_their_own(url, expected):
    paginator = NextCursor(cursor="n", query="c", path="/more", alone=True)
    assert paginator.from_cursor(PageRequest(url), "n").url == expected


def test_a_cursor_alone_leaves_out_every_other_parameter():
    second = NextCursor(cursor="n", query="c", alone=True).from_cursor(PageRequest("https://h/x?a=1?b=2"), "n")
    assert second.url == "https://h/x?c=n"


def test_a_cursor_alone_in_the_body_keeps_the_headers():
    request = PageRequest(URL, "POST", {"path": "/x"}, {"Api-Version": "3"})
    second = NextCursor(cursor="n", body="cursor", alone=True).from_cursor(request, "c")
    assert second == PageRequest(URL, "POST", {"cursor": "c"}, {"Api-Version": "3"})


def test_the_first_cursor_that_says_something_counts():
    assert cursor_at(answer({"c": [None, "", 0, "x", "y"]}), "c[]") == "x"


def test_a_cursor_has_a_longest_length():
    longest = "x" * CURSOR.value
    assert cursor_at(answer({"c": longest}), "c") == longest
    assert (
        refusal(cursor_at, answer({"c": longest + "x"}), "c")
        == "'c' has 8,193 characters: more than 8,192 are no cursor"
    )
    assert refusal(cursor_at, answer({"c": {"a": 1}}), "c") == "'c' is dict where a cursor should be"


# -- what is said ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("paginator", "body", "message"),
    [
        (OnePage(items="d"), {}, "the answer has no list of records at 'd'"),
        (OnePage(), {}, "the answer has no list of records at 'its top'"),
        (
            NextCursor(items="d", cursor="n", query="c", more="m"),
            {"d": [], "m": True},
            "'m' says that there are more pages, but NextCursor finds no way there",
        ),
        (
            NextUrl(items="d", url="n", done="e"),
            {"d": [], "e": False},
            "'e' says that there are more pages, but NextUrl finds no way there",
        ),
        (LastKey(items="d"), {"d": [{}]}, "the last record has no 'id', after which the next page begins"),
        (
            GraphQLPages(),
            {"data": {"a": {"pageInfo": {"hasNextPage": False}}}},
            "the connection has neither nodes nor edges: ask for one of them in the query",
        ),
        (GraphQLPages(), {"data": {}}, "the answer has 0 connections with a pageInfo: say connection="),
        (GraphQLPages(connection="a.b"), {"data": {}}, "the answer has 0 connections with a pageInfo at a.b"),
        *(
            (
                GraphQLPages(),
                {"data": {"a": {"nodes": [], "pageInfo": {"hasNextPage": True, "endCursor": cursor}}}},
                "pageInfo has a next page but no endCursor: ask for both in the query",
            )
            for cursor in (None, "", 5)
        ),
    ],
)
def test_what_is_wrong_with_an_answer(paginator, body, message):
    assert refusal(paginator.read, FIRST, answer(body)) == message


def test_an_answer_that_is_only_true_says_nothing_of_further_pages():
    assert OnePage().read(FIRST, answer(body=True, status=204)) == PageRead([], None)


# -- GraphQL ---------------------------------------------------------------------------------------------------


def test_graphql_records_may_stand_in_edges():
    edges = [{"cursor": "a", "node": 1}, None, {"node": 2}]
    body = {"data": {"a": {"edges": edges, "pageInfo": {"hasNextPage": False}}}}
    assert GraphQLPages().read(FIRST, answer(body)) == PageRead([1, 2], None)


def test_graphql_connections_are_looked_for_down_to_six_levels():
    found = {"nodes": [1], "pageInfo": {"hasNextPage": False}}
    for name in "fedcba":
        found = {name: found}
    assert GraphQLPages().read(FIRST, answer({"data": found})).items == [1]
    message = refusal(GraphQLPages().read, FIRST, answer({"data": {"deeper": found}}))
    assert message == "the answer has 0 connections with a pageInfo: say connection="


# -- Link headers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "found"),
    [
        ("</a>, ; rel=next", {}),  # a comma ends what is said of a target
        ('</a>; rel=""', {}),
        ("</a>; rel; rel=next", {"next": "/a"}),
        ("</a>; =next; rel=last", {"last": "/a"}),
    ],
)
def test_relations_of_a_link_header(header, found):
    assert links(header) == found


# -- going round -----------------------------------------------------------------------------------------------


def step(loop, number, items):
    here, there = (FIRST.with_query(p=n) for n in (number, number + 1))
    return loop.step(here, PageRead(items, there))


def test_the_page_that_is_kept_is_replaced_at_every_power_of_two():
    loop, seen = Loop(), []
    for number in range(1, 10):
        loop = step(loop, number, [number])
        kept = next(n for n in range(1, 10) if FIRST.with_query(p=n).fingerprint == loop.kept)
        seen.append((kept, loop.steps, loop.until))
    kept = [(1, 1, 2), (2, 2, 4), (2, 3, 4), (4, 4, 8), (4, 5, 8), (4, 6, 8), (4, 7, 8), (8, 8, 16), (8, 9, 16)]
    assert seen == kept


@pytest.mark.parametrize("empty", [2, 3, 4])
def test_an_empty_page_between_does_not_hide_that_the_records_are_the_same(empty):
    loop = Loop()
    for number in range(1, empty):
        loop = step(loop, number, [{"id": number, "name": "x"}])
    loop = step(loop, empty, [])
    again = [{"name": "x", "id": empty - 1}]  # in whatever order its fields are
    message = refusal(step, loop, empty + 1, again)
    assert message == "two pages in a row hold the same records: the server does not go on"


def test_how_many_pages_there_were_before_they_went_round():
    loop = step(step(Loop(), 1, [1]), 2, [2])
    message = "the pages go round: after 2 the same one is asked for again"
    with pytest.raises(PagingError, match=f"^{re.escape(message)}$"):
        loop.step(FIRST.with_query(p=2), PageRead([3], None))


def test_a_loop_is_stored_in_few_letters():
    loop = step(Loop(), 1, [{"id": 1}])
    assert [len(loop.kept), len(loop.page)] == [16, 16]
