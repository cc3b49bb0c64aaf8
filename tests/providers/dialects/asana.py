"""Answers of Asana."""

import hashlib
import hmac

from resilient import FailureKind as K
from resilient import PageRequest, Scope
from resilient.testing.contract import Dialect, Hook, Page, Pages, Sample


def error(message):
    return {"errors": [{"message": message}]}


BODY = b'{"events":[]}'
DIALECT = Dialect(
    throttled=[
        Sample(
            "429", 429, K.THROTTLED, error("You have made too many requests recently."), {"Retry-After": "30"}, wait=30
        ),
        Sample(
            "search",
            429,
            K.THROTTLED,
            error("..."),
            {"Retry-After": "2"},
            on="GET /api/1.0/workspaces/1/tasks/search",
            key="search",
            wait=2,
        ),
    ],
    refused=[
        Sample("forbidden", 403, K.PERMANENT, error("You do not have access")),
        Sample("plan", 402, K.PERMANENT, error("Payment Required")),
        Sample("law", 451, K.PERMANENT, error("Unavailable")),
    ],
    expired=[Sample("expired", 401, K.AUTH, error("The bearer token has expired."))],
    reset=[
        Sample(
            "sync token",
            412,
            K.RESET_CURSOR,
            {"errors": [{"message": "Sync token invalid or too old."}], "sync": "new"},
            on="GET /api/1.0/events",
        ),
    ],
    others=[Sample("inside", 500, K.TRANSIENT, {"errors": [{"phrase": "6 sad squid snuggle softly"}]})],
    dead_grant=[Sample("revoked", 400, K.AUTH, {"error": "invalid_grant"})],
    token_errors=[Sample("client", 401, K.AUTH, {"error": "invalid_client"}, scope=Scope.PROVIDER)],
    pages=[
        Pages(
            "list",
            PageRequest("https://app.asana.com/api/1.0/tasks?project=1"),
            [
                Page("limit=100", {"data": [1], "next_page": {"offset": "o", "path": "/tasks", "uri": "https://..."}}),
                Page("offset=o", {"data": [2], "next_page": None}),
            ],
            items=2,
        ),
        Pages(
            "events",
            PageRequest("https://app.asana.com/api/1.0/events?resource=1&sync=a"),
            [
                Page("sync=a", {"data": [1], "sync": "b", "has_more": True}),
                Page("sync=b", {"data": [], "sync": "c", "has_more": False}),
            ],
            items=1,
            resume="c",
        ),
    ],
    hooks=[
        Hook("hook-secret", BODY, {"X-Hook-Signature": hmac.new(b"hook-secret", BODY, hashlib.sha256).hexdigest()}),
    ],
)
