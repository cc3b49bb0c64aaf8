"""Declarations of cursors that cannot be meant."""

import pytest

from resilient.core.errors import InvalidInput
from resilient.core.incremental import Incremental


@pytest.mark.parametrize(
    ("facts", "wanted"),
    [
        ({"style": "filter", "query": "since"}, "field="),
        ({"style": "key", "query": "after"}, "field="),
        ({"style": "token", "query": "cursor"}, "found="),
        ({"style": "link"}, "found="),
        ({"style": "filter", "field": "updated", "form": "updated > x"}, "cursor"),
        ({"style": "token", "found": "next", "deletions": "marked"}, "deleted="),
    ],
)
def test_what_is_missing_is_named(facts, wanted):
    with pytest.raises(InvalidInput, match=wanted):
        Incremental(**facts)


def test_conditional_requests_need_neither():
    assert Incremental(style="conditional", header="If-None-Match").taken == "items"
