"""Declarations of cursors that cannot be meant."""

import pytest

from resilient.core.base.errors import InvalidInput
from resilient.core.sync.incremental import Incremental


@pytest.mark.parametrize(
    ("facts", "wanted"),
    [
        ({"style": "filter", "query": "since"}, "field="),
        ({"style": "key", "query": "after"}, "field="),
        ({"style": "token", "query": "cursor"}, "cursor="),
        ({"style": "link"}, "cursor="),
        ({"style": "filter", "query": "q", "field": "updated", "form": "updated > x"}, "cursor"),
        ({"style": "token", "query": "q", "cursor": "next", "source": "last_page", "deletions": "marked"}, "deleted="),
        ({"style": "filter", "field": "updated"}, "query="),
        ({"style": "filter", "field": "updated", "query": "q", "header": "h"}, "query and header"),
        ({"style": "filter", "field": "updated", "query": "q", "source": "last_page"}, "items"),
        ({"style": "token", "query": "q", "cursor": "next"}, "last_page"),
        ({"style": "filter", "query": "q", "field": "updated", "deleted": "gone"}, "deletions='marked'"),
    ],
)
def test_what_is_missing_is_named(facts, wanted):
    with pytest.raises(InvalidInput, match=wanted):
        Incremental(**facts)


def test_conditional_requests_need_neither():
    assert Incremental(style="conditional", header="If-None-Match").source == "items"
