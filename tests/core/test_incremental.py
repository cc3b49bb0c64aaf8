"""Declarations of cursors that cannot be meant: each refusal names the option and what to write."""

import re

import pytest

from resilient.core.base.errors import InvalidInput
from resilient.core.sync.incremental import Incremental

FILTER = {"style": "filter", "query": "since", "field": "updated"}
TOKEN = {"style": "token", "query": "t", "cursor": "next", "source": "last_page"}
NO_PATH = "'a]' is no path into a body: write error.code, errors[0].code, errors[].code"
PLACE = "say where its cursor is sent with one of query=, body=, header=, not with"
TOLD = "say source='last_page', 'every_page' or 'before_pass', for its cursor is told, not made of the items"
STYLES = "style is one of 'filter', 'token', 'link', 'key', 'conditional'"
SOURCES = "source is one of 'last_page', 'every_page', 'before_pass', 'items'"
DELETIONS = "deletions is one of 'never', 'marked', 'separate', 'webhook'"


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (FILTER | {"style": "since"}, f"(style='since'): {STYLES}"),
        (TOKEN | {"source": "end"}, f"(source='end'): {SOURCES}"),
        (FILTER | {"deletions": "all"}, f"(deletions='all'): {DELETIONS}"),
        (FILTER | {"precision": -1}, "(precision=-1): precision is a number from 0"),
        (FILTER | {"life": 0}, "(life=0): life is a number above 0"),
        (
            FILTER | {"form": "> {cursor} {now}"},
            "(form='> {cursor} {now}'): nothing fills {now}; in braces use {cursor}",
        ),
        (FILTER | {"form": "updated > x"}, "(form='updated > x') has no place for the {cursor}"),
        (TOKEN | {"cursor": "a]"}, f"(cursor=...): {NO_PATH}"),
        (FILTER | {"field": "a]"}, f"(field=...): {NO_PATH}"),
        ({"style": "filter", "query": "since"}, "(style='filter') needs field=, which its cursor is made of"),
        ({"style": "key", "query": "after"}, "(style='key') needs field=, which its cursor is made of"),
        ({"style": "token", "query": "cursor"}, "(style='token') needs cursor=, where its cursor is read"),
        ({"style": "link"}, "(style='link') needs cursor=, where its cursor is read"),
        ({"style": "filter", "field": "updated"}, f"(style='filter'): {PLACE} none"),
        ({"style": "key", "field": "id"}, f"(style='key'): {PLACE} none"),
        ({"style": "token", "cursor": "next", "source": "last_page"}, f"(style='token'): {PLACE} none"),
        ({"style": "conditional"}, f"(style='conditional'): {PLACE} none"),
        (FILTER | {"header": "h"}, f"(style='filter'): {PLACE} query and header"),
        (FILTER | {"body": "b", "header": "h"}, f"(style='filter'): {PLACE} query and body and header"),
        (FILTER | {"source": "last_page"}, "(style='filter', source='last_page'): its cursor is made of the 'items'"),
        (
            {"style": "key", "query": "q", "field": "id", "source": "every_page"},
            "(style='key', source='every_page'): its cursor is made of the 'items'",
        ),
        (TOKEN | {"source": "items"}, f"(style='token'): {TOLD}"),
        ({"style": "link", "cursor": "next"}, f"(style='link'): {TOLD}"),
        (FILTER | {"deleted": "gone"}, "(deletions='never'): deleted= is for deletions='marked'"),
        (
            FILTER | {"deleted_key": "id", "deletions": "webhook"},
            "(deletions='webhook'): deleted_key= is for deletions='marked'",
        ),
        (TOKEN | {"deletions": "marked"}, "(deletions='marked') needs deleted=, the field that marks them"),
        (FILTER | {"deletions": "marked", "deleted": "a]"}, f"(deleted=...): {NO_PATH}"),
        (FILTER | {"deletions": "marked", "deleted": "a]=1"}, f"(deleted=...): {NO_PATH}"),
        (FILTER | {"deletions": "marked", "deleted": "gone", "deleted_key": "id a]"}, f"(deleted_key=...): {NO_PATH}"),
    ],
)
def test_what_is_missing_is_named(facts, message):
    with pytest.raises(InvalidInput, match=f"^{re.escape('Incremental' + message)}$"):
        Incremental(**facts)


@pytest.mark.parametrize(
    "facts",
    [
        FILTER,
        FILTER | {"precision": 0, "life": 0.5, "form": 'updated >= "{cursor}"'},
        FILTER | {"deletions": "marked", "deleted": "a=b]", "deleted_key": "id ids[]"},
        FILTER | {"deletions": "separate"},
        {"style": "key", "body": "after", "field": "id"},
        TOKEN,
        TOKEN | {"source": "before_pass"},
        {"style": "link", "cursor": "next", "source": "every_page"},  # the link is the whole request
        {"style": "conditional", "header": "If-None-Match"},
        {"style": "conditional", "header": "If-None-Match", "source": "before_pass"},
    ],
)
def test_what_can_be_meant_is_taken_as_it_is(facts):
    made = Incremental(**facts)
    assert {name: getattr(made, name) for name in facts} == facts


def test_conditional_requests_need_neither():
    assert Incremental(style="conditional", header="If-None-Match").source == "items"
