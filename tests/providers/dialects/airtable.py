"""Answers of Airtable."""

import base64
import hashlib
import hmac

from resilient import FailureKind as K
from resilient import PageRequest, Scope
from resilient.testing.contract import Dialect, Hook, Page, Pages, Sample

BODY = b'{"base":{"id":"app1"}}'
KEY = base64.b64encode(b"mac secret").decode()
BASE = "/v0/appAbc123/Tasks"
DIALECT = Dialect(
    throttled=[
        Sample(
            "a base",
            429,
            K.THROTTLED,
            {"errors": [{"error": "RATE_LIMIT_REACHED", "message": "..."}]},
            on=f"GET {BASE}",
            key="appAbc123",
            scope=Scope.ENDPOINT,
            wait=30,
        ),
        Sample(
            "the month",
            429,
            K.QUOTA,
            {"errors": [{"error": "PUBLIC_API_BILLING_LIMIT_EXCEEDED"}]},
            on=f"GET {BASE}",
            wait=29.5 * 86400,
        ),
    ],
    refused=[
        Sample(
            "permission",
            403,
            K.PERMANENT,
            {"error": {"type": "INVALID_PERMISSIONS_OR_MODEL_NOT_FOUND"}},
            on=f"GET {BASE}",
        ),
        Sample("not there", 404, K.PERMANENT, {"error": "NOT_FOUND"}, on="GET /v0/meta/bases", key=""),
        Sample("field", 422, K.PERMANENT, {"error": {"type": "UNKNOWN_FIELD_NAME"}}, on=f"POST {BASE}"),
    ],
    expired=[Sample("expired", 401, K.AUTH, {"error": {"type": "AUTHENTICATION_REQUIRED"}})],
    reset=[
        Sample(
            "place", 422, K.RESET_CURSOR, {"error": {"type": "LIST_RECORDS_ITERATOR_NOT_AVAILABLE"}}, on=f"GET {BASE}"
        ),
        Sample(
            "place, as text", 422, K.RESET_CURSOR, {"error": "LIST_RECORDS_ITERATOR_NOT_AVAILABLE"}, on=f"GET {BASE}"
        ),
    ],
    others=[
        Sample("down", 503, K.TRANSIENT, {"error": {"type": "SERVICE_UNAVAILABLE"}}),
        Sample("a record that got lost", 502, K.AMBIGUOUS, "", on=f"POST {BASE}"),
    ],
    dead_grant=[Sample("used twice", 400, K.AUTH, {"error": "invalid_grant"})],
    token_errors=[Sample("client", 401, K.AUTH, {"error": "invalid_client"}, scope=Scope.PROVIDER)],
    pages=[
        Pages(
            "list",
            PageRequest(f"https://api.airtable.com{BASE}"),
            [
                Page("pageSize=100", {"records": [1], "offset": "itr/rec"}),
                Page("offset=itr/rec", {"records": [2]}),
            ],
            items=2,
        ),
    ],
    hooks=[
        Hook(
            KEY,
            BODY,
            {"X-Airtable-Content-MAC": "hmac-sha256=" + hmac.new(b"mac secret", BODY, hashlib.sha256).hexdigest()},
        ),
    ],
)
