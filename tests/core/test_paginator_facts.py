"""Facts of paginators that make no sense are refused where they are written, with the option and what to write."""

import re

import pytest

from resilient.core.base.errors import InvalidInput
from resilient.core.sync.paginators import (
    GraphQLPages,
    LastKey,
    LinkHeader,
    NextCursor,
    NextUrl,
    Offset,
    OnePage,
    PageNumber,
)

NO_PATH = "'a]' is no path into a body: write error.code, errors[0].code, errors[].code"
CURSOR = {"cursor": "n", "query": "c"}


@pytest.mark.parametrize(
    ("paginator", "facts", "message"),
    [
        (OnePage, {"absent": "ok"}, "OnePage(absent='ok'): absent is one of 'error', 'empty'"),
        (OnePage, {"items": "a]"}, f"OnePage(items=...): {NO_PATH}"),
        (OnePage, {"more": "a]"}, f"OnePage(more=...): {NO_PATH}"),
        (OnePage, {"done": "a]"}, f"OnePage(done=...): {NO_PATH}"),
        (OnePage, {"resume": "a]"}, f"OnePage(resume=...): {NO_PATH}"),
        (OnePage, {"more": "m", "done": "d"}, "OnePage(more='m', done='d'): one flag says whether it goes on"),
        (OnePage, {"most": 0}, "OnePage(most=0): a number of records, from 1"),
        (OnePage, {"most": True}, "OnePage(most=True): a number of records, from 1"),
        (LastKey, {"page": 0}, "LastKey(page=0): a number of records, from 1"),
        (PageNumber, {"page": 1.5}, "PageNumber(page=1.5): a number of records, from 1"),
        (LinkHeader, {"rel": ""}, "LinkHeader(): say rel=, not none of them"),
        (NextUrl, {"url": ""}, "NextUrl(): say url=, not none of them"),
        (NextUrl, {"url": "a]"}, f"NextUrl(url=...): {NO_PATH}"),
        (NextCursor, {"query": "c"}, "NextCursor(): say cursor= or header=, not none of them"),
        (NextCursor, CURSOR | {"header": "h"}, "NextCursor(): say cursor= or header=, not cursor and header"),
        (NextCursor, {"cursor": "n"}, "NextCursor(): say query= or body=, not none of them"),
        (NextCursor, CURSOR | {"body": "b"}, "NextCursor(): say query= or body=, not query and body"),
        (NextCursor, CURSOR | {"cursor": "a]"}, f"NextCursor(cursor=...): {NO_PATH}"),
        (LastKey, {"key": ""}, "LastKey(): say key=, not none of them"),
        (LastKey, {"query": ""}, "LastKey(): say query=, not none of them"),
        (LastKey, {"key": "a]"}, f"LastKey(key=...): {NO_PATH}"),
        (PageNumber, {"query": ""}, "PageNumber(): say query=, not none of them"),
        (PageNumber, {"pages": "p", "header": "h"}, "PageNumber(): say pages= or header=, not pages and header"),
        (PageNumber, {"pages": "a]"}, f"PageNumber(pages=...): {NO_PATH}"),
        (Offset, {"query": ""}, "Offset(): say query=, not none of them"),
        (Offset, {"clause": "START {offset}", "body": "b"}, "Offset(): say clause= or body=, not clause and body"),
        (
            Offset,
            {"clause": "START {offset} {n}"},
            "Offset(clause='START {offset} {n}'): nothing fills {n}; in braces use {offset}",
        ),
        (Offset, {"clause": "START"}, "Offset(clause='START') has no place for the {offset}"),
        (Offset, {"total": "a]"}, f"Offset(total=...): {NO_PATH}"),
        (GraphQLPages, {"variable": ""}, "GraphQLPages(): say variable=, not none of them"),
        (GraphQLPages, {"connection": "a]"}, f"GraphQLPages(connection=...): {NO_PATH}"),
    ],
)
def test_what_makes_no_sense_is_refused(paginator, facts, message):
    with pytest.raises(InvalidInput, match=f"^{re.escape(message)}$"):
        paginator(**facts)


@pytest.mark.parametrize(
    ("paginator", "facts"),
    [
        (OnePage, {"most": 1}),
        (PageNumber, {"pages": "p"}),
        (PageNumber, {"header": "h"}),
        (Offset, {"body": "start", "query": ""}),  # sent in the body, it needs no parameter
        (Offset, {"clause": "START {offset}", "query": "q"}),
        (NextCursor, {"header": "x-next", "body": "after"}),
    ],
)
def test_what_makes_sense_is_taken_as_it_is(paginator, facts):
    made = paginator(**facts)
    assert {name: getattr(made, name) for name in facts} == facts


@pytest.mark.parametrize(("paginator", "facts"), [(PageNumber, {}), (NextCursor, {"query": "c"})])
def test_headers_are_looked_up_in_small_letters(paginator, facts):
    assert paginator(header="X-Next-Page", **facts).header == "x-next-page"
