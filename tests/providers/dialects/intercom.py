"""Answers of Intercom."""

import hashlib
import hmac

from resilient import FailureKind as K
from resilient import PageRequest, Scope
from resilient.testing.contract import NOW, Dialect, Hook, Page, Pages, Sample


def error(code):
    return {"type": "error.list", "request_id": "r", "errors": [{"code": code, "message": "..."}]}


BODY = b'{"type":"notification_event","id":"notif_1"}'
DIALECT = Dialect(
    throttled=[
        Sample(
            "429",
            429,
            K.THROTTLED,
            error("rate_limit_exceeded"),
            {
                "X-RateLimit-Limit": "1666",
                "X-RateLimit-Remaining": "0",
                "X-RateLimit-Reset": str(int(NOW.timestamp()) + 8),
            },
            wait=8,
        ),
        Sample("another scroll", 400, K.CONFLICT, error("scroll_exists"), on="GET /companies/scroll", wait=60),
    ],
    refused=[
        Sample("plan", 403, K.PERMANENT, error("api_plan_restricted"), {"X-RateLimit-Remaining": "50"}),
        Sample("wrong", 400, K.PERMANENT, error("parameter_invalid")),
    ],
    expired=[Sample("revoked", 401, K.AUTH, error("token_revoked"))],
    no_reset="a search by time takes any time",
    others=[
        Sample("there already", 409, K.CONFLICT, error("conflict"), on="POST /contacts"),
        Sample("a search that got lost", 502, K.TRANSIENT, "", on="POST /contacts/search"),
    ],
    token_errors=[Sample("client", 401, K.AUTH, {"error": "invalid_client"}, scope=Scope.PROVIDER)],
    pages=[
        Pages(
            "list",
            PageRequest("https://api.intercom.io/contacts"),
            [
                Page("per_page=150", {"data": [1], "pages": {"next": {"page": 2, "starting_after": "s"}}}),
                Page("starting_after=s", {"data": [2], "pages": {}}),
            ],
            items=2,
        ),
        Pages(
            "search",
            PageRequest("https://api.intercom.io/contacts/search", "POST", {"query": {}}),
            [
                Page("pagination.per_page=150", {"data": [1], "pages": {"next": {"starting_after": "s"}}}),
                Page("pagination.starting_after=s", {"data": [2], "pages": {"next": None}}),
            ],
            items=2,
        ),
        Pages(
            "scroll",
            PageRequest("https://api.intercom.io/companies/scroll"),
            [
                Page("/scroll", {"data": [1], "scroll_param": "s"}),
                Page("scroll_param=s", {"data": [], "scroll_param": None}),
            ],
            items=1,
        ),
    ],
    hooks=[
        Hook(
            "client-secret",
            BODY,
            {"X-Hub-Signature": "sha1=" + hmac.new(b"client-secret", BODY, hashlib.sha1).hexdigest()},
        ),
    ],
)
