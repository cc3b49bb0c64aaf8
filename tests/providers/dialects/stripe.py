"""Answers of Stripe."""

import hashlib
import hmac

from resilient import FailureKind as K
from resilient import PageRequest, Scope
from resilient.testing.contract import NOW, Dialect, Hook, Page, Pages, Sample

AT = str(int(NOW.timestamp()) - 200)
BODY = b'{"id":"evt_1","type":"charge.succeeded"}'
SIGNED = hmac.new(b"whsec_test", f"{AT}.".encode() + BODY, hashlib.sha256).hexdigest()
DIALECT = Dialect(
    throttled=[
        Sample("rate", 429, K.THROTTLED, {"error": {"code": "rate_limit", "type": "invalid_request_error"}}, wait=None),
        Sample(
            "one endpoint",
            429,
            K.THROTTLED,
            {"error": {"code": "rate_limit"}},
            {"Stripe-Rate-Limited-Reason": "endpoint-rate"},
            on="GET /v1/customers",
            key="customers",
            scope=Scope.ENDPOINT,
        ),
        Sample("a busy object", 429, K.CONFLICT, {"error": {"code": "lock_timeout"}}, {"Stripe-Should-Retry": "true"}),
    ],
    refused=[
        Sample("permission", 403, K.PERMANENT, {"error": {"type": "invalid_request_error", "code": "permission"}}),
        Sample(
            "declined",
            402,
            K.PERMANENT,
            {"error": {"type": "card_error", "code": "card_declined"}},
            on="POST /v1/payment_intents",
        ),
        Sample("key used otherwise", 400, K.PERMANENT, {"error": {"type": "idempotency_error"}}, on="POST /v1/charges"),
    ],
    expired=[
        Sample("key", 401, K.AUTH, {"error": {"type": "invalid_request_error", "message": "Invalid API Key"}}),
        Sample("disconnected", 403, K.AUTH, {"error": {"code": "account_invalid"}}),
    ],
    no_reset="events are read by time, and kept for 30 days",
    others=[
        Sample("a fault", 500, K.TRANSIENT, {"error": {"type": "api_error"}}, on="POST /v1/charges"),
        Sample("lost, but with a key", 502, K.TRANSIENT, "", on="POST /v1/charges"),
        Sample("said to pass", 409, K.TRANSIENT, {"error": {}}, {"Stripe-Should-Retry": "true"}, on="POST /v1/charges"),
        Sample("said not to pass", 500, K.PERMANENT, {"error": {}}, {"Stripe-Should-Retry": "false"}),
        Sample("key in use", 409, K.CONFLICT, {"error": {"type": "idempotency_error"}}, on="POST /v1/charges"),
        Sample("a file", 200, None, {}, on="POST /v1/files", key="files-write"),
        Sample("a search", 200, None, {}, on="GET /v1/charges/search", key="search"),
    ],
    token_errors=[Sample("code", 400, K.AUTH, {"error": "invalid_grant"})],
    pages=[
        Pages(
            "list",
            PageRequest("https://api.stripe.com/v1/customers"),
            [
                Page("limit=100", {"data": [{"id": "cus_1"}, {"id": "cus_2"}], "has_more": True}),
                Page("starting_after=cus_2", {"data": [{"id": "cus_3"}], "has_more": False}),
            ],
            items=3,
        ),
        Pages(
            "search",
            PageRequest("https://api.stripe.com/v1/charges/search?query=x"),
            [
                Page("query=x", {"data": [1], "has_more": True, "next_page": "p"}),
                Page("page=p", {"data": [2], "has_more": False, "next_page": None}),
            ],
            items=2,
        ),
    ],
    hooks=[Hook("whsec_test", BODY, {"Stripe-Signature": f"t={AT},v1={'0' * 64},v1={SIGNED},v0=x"})],
)
