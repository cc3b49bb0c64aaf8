"""Answers of Zendesk."""

import base64
import hashlib
import hmac

from resilient import FailureKind as K
from resilient import PageRequest, Scope
from resilient.testing.contract import Dialect, Hook, Page, Pages, Sample

AT = "2026-11-01T11:59:30Z"
BODY = b'{"id":1}'
SIGNED = base64.b64encode(hmac.new(b"signing-secret", AT.encode() + BODY, hashlib.sha256).digest()).decode()
DIALECT = Dialect(
    throttled=[
        Sample(
            "account",
            429,
            K.THROTTLED,
            {"error": "APIRateLimitExceeded", "description": "Number of allowed API requests"},
            {"Retry-After": "17", "ratelimit-remaining": "0", "ratelimit-reset": "17"},
            wait=17,
        ),
        Sample(
            "account, by its budget",
            429,
            K.THROTTLED,
            "",
            {"ratelimit-remaining": "0", "ratelimit-reset": "21"},
            wait=21,
        ),
        Sample(
            "export",
            429,
            K.THROTTLED,
            "",
            {"zendesk-ratelimit-incremental-exports": "total=10; remaining=0; resets=41"},
            on="GET /api/v2/incremental/tickets/cursor",
            key="incremental",
            scope=Scope.ENDPOINT,
            wait=41,
        ),
    ],
    refused=[
        Sample(
            "forbidden",
            403,
            K.PERMANENT,
            {"error": {"title": "Forbidden", "message": "You do not have access"}},
            {"ratelimit-remaining": "100", "ratelimit-reset": "9"},
        ),
        Sample("one ticket", 404, K.PERMANENT, {"error": "RecordNotFound"}),
        Sample("invalid", 422, K.PERMANENT, {"error": "RecordInvalid"}, on="POST /api/v2/tickets"),
    ],
    expired=[Sample("expired", 401, K.AUTH, {"error": "invalid_token"})],
    no_reset="the export's cursor does not expire, as far as is documented",
    others=[
        Sample("maintenance", 503, K.TRANSIENT, "", {"Retry-After": "90"}, wait=90),
        Sample("collision", 409, K.CONFLICT, {"error": "conflict"}, on="PUT /api/v2/tickets/1"),
        Sample("a ticket that got lost", 502, K.TRANSIENT, "", on="POST /api/v2/tickets"),
        Sample("a user that got lost", 502, K.AMBIGUOUS, "", on="POST /api/v2/users"),
    ],
    dead_grant=[Sample("used up", 400, K.AUTH, {"error": "invalid_grant"})],
    token_errors=[Sample("client", 401, K.AUTH, {"error": "invalid_client"}, scope=Scope.PROVIDER)],
    pages=[
        Pages(
            "list",
            PageRequest("https://acme.zendesk.com/api/v2/tickets"),
            [
                Page(
                    "page[size]=100",
                    {
                        "tickets": [1],
                        "meta": {"has_more": True},
                        "links": {"next": "https://acme.zendesk.com/api/v2/tickets?page%5Bafter%5D=x"},
                    },
                ),
                Page("page[after]=x", {"tickets": [2], "meta": {"has_more": False}, "links": {"next": None}}),
            ],
            items=2,
        ),
        Pages(
            "export",
            PageRequest("https://acme.zendesk.com/api/v2/incremental/tickets/cursor?start_time=1"),
            [
                Page("start_time=1", {"tickets": [1], "after_cursor": "a", "end_of_stream": False}),
                Page("cursor=a", {"tickets": [2], "after_cursor": "b", "end_of_stream": True}),
            ],
            items=2,
            resume="b",
        ),
    ],
    hooks=[
        Hook(
            "signing-secret", BODY, {"X-Zendesk-Webhook-Signature": SIGNED, "X-Zendesk-Webhook-Signature-Timestamp": AT}
        ),
    ],
)
