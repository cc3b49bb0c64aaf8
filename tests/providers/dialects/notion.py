"""Answers of Notion."""

import hashlib
import hmac

from resilient import FailureKind as K
from resilient import PageRequest, Scope
from resilient.testing.contract import Dialect, Hook, Page, Pages, Sample


def error(code):
    return {"object": "error", "code": code, "message": "..."}


BODY = b'{"id":"1"}'
DIALECT = Dialect(
    throttled=[
        Sample("429", 429, K.THROTTLED, error("rate_limited"), {"Retry-After": "12"}, wait=12),
        Sample(
            "the workspace",
            429,
            K.THROTTLED,
            error("rate_limited") | {"additional_data": {"rate_limit_reason": "w"}},
            {"Retry-After": "300"},
            wait=300,
        ),
    ],
    refused=[
        Sample("capability", 403, K.PERMANENT, error("restricted_resource")),
        Sample("not shared", 404, K.PERMANENT, error("object_not_found")),
    ],
    expired=[Sample("expired", 401, K.AUTH, error("unauthorized"))],
    no_reset="a filter by time takes any time",
    others=[
        Sample("overload", 529, K.TRANSIENT, error("service_overload"), {"Retry-After": "20"}, wait=20),
        Sample("conflict", 409, K.CONFLICT, error("conflict_error"), on="PATCH /v1/pages/1"),
        Sample("a query that got lost", 504, K.TRANSIENT, error("gateway_timeout"), on="POST /v1/databases/1/query"),
        Sample("a page that got lost", 504, K.AMBIGUOUS, error("gateway_timeout"), on="POST /v1/pages"),
    ],
    dead_grant=[Sample("used up", 400, K.AUTH, {"error": "invalid_grant"})],
    token_errors=[Sample("client", 401, K.AUTH, {"error": "invalid_client"}, scope=Scope.PROVIDER)],
    pages=[
        Pages(
            "list",
            PageRequest("https://api.notion.com/v1/users"),
            [
                Page("page_size=100", {"results": [1], "has_more": True, "next_cursor": "c"}),
                Page("start_cursor=c", {"results": [2], "has_more": False, "next_cursor": None}),
            ],
            items=2,
        ),
        Pages(
            "query",
            PageRequest("https://api.notion.com/v1/databases/1/query", "POST", {"sorts": []}),
            [
                Page("page_size=100", {"results": [1], "has_more": True, "next_cursor": "c"}),
                Page("start_cursor=c", {"results": [2], "has_more": False, "next_cursor": None}),
            ],
            items=2,
        ),
    ],
    hooks=[
        Hook(
            "verification",
            BODY,
            {"X-Notion-Signature": "sha256=" + hmac.new(b"verification", BODY, hashlib.sha256).hexdigest()},
        ),
    ],
)
