"""Answers of HubSpot."""

import base64
import hashlib
import hmac

from resilient import FailureKind as K
from resilient import PageRequest, Scope
from resilient.testing.contract import NOW, Dialect, Hook, Page, Pages, Sample, Token


def policy(name):
    return {"status": "error", "message": "You have reached your limit.", "errorType": "RATE_LIMIT", "policyName": name}


AT = str(int(NOW.timestamp() * 1000) - 1500)
URL = "https://hooks.example.com/in?a=1"
BODY = b'[{"eventId":1}]'
SIGNED = base64.b64encode(
    hmac.new(b"client-secret", f"POST{URL}".encode() + BODY + AT.encode(), hashlib.sha256).digest()
)
DIALECT = Dialect(
    throttled=[
        Sample("ten seconds", 429, K.THROTTLED, policy("TEN_SECONDLY_ROLLING"), wait=10),
        Sample(
            "ten seconds, told",
            429,
            K.THROTTLED,
            policy("TEN_SECONDLY_ROLLING"),
            {
                "X-HubSpot-RateLimit-Max": "110",
                "X-HubSpot-RateLimit-Remaining": "0",
                "X-HubSpot-RateLimit-Interval-Milliseconds": "10000",
            },
            wait=10,
        ),
        Sample(
            "search",
            429,
            K.THROTTLED,
            policy("SECONDLY"),
            on="POST /crm/v3/objects/contacts/search",
            key="search",
            wait=1,
        ),
        Sample("the day", 429, K.QUOTA, policy("DAILY"), {"X-HubSpot-RateLimit-Daily-Remaining": "0"}, wait=12 * 3600),
        Sample("moving", 477, K.QUOTA, {"message": "migration in progress"}, {"Retry-After": "86000"}, wait=86000),
    ],
    refused=[
        Sample(
            "scope",
            403,
            K.PERMANENT,
            {"category": "MISSING_SCOPES", "message": "requires all of crm.objects"},
            {"X-HubSpot-RateLimit-Remaining": "100"},
        ),
    ],
    expired=[
        Sample("expired", 401, K.AUTH, {"category": "EXPIRED_AUTHENTICATION"}),
        Sample("malformed", 530, K.AUTH, ""),
    ],
    no_reset="a search by time takes any time",
    others=[
        Sample("there already", 409, K.CONFLICT, {"category": "CONFLICT"}, on="POST /crm/v3/objects/contacts"),
        Sample("locked", 423, K.CONFLICT, {}),
    ],
    dead_grant=[
        Sample("gone", 400, K.AUTH, {"status": "BAD_REFRESH_TOKEN", "message": "missing or invalid refresh token"}),
        Sample("gone, by the RFC's word too", 400, K.AUTH, {"error": "invalid_grant", "status": "BAD_REFRESH_TOKEN"}),
        Sample("gone, newly", 400, K.AUTH, {"category": "VALIDATION_ERROR", "subCategory": "INVALID_TOKEN"}),
    ],
    token_errors=[
        Sample("client", 400, K.AUTH, {"status": "BAD_CLIENT_SECRET"}, scope=Scope.PROVIDER),
        Sample("else", 400, K.PERMANENT, {"status": "MISMATCH"}),
    ],
    tokens=[Token("a portal's", {"access_token": "a", "refresh_token": "r", "expires_in": 1800}, "a", "r", 1800)],
    pages=[
        Pages(
            "list",
            PageRequest("https://api.hubapi.com/crm/v3/objects/contacts"),
            [
                Page("limit=100", {"results": [1], "paging": {"next": {"after": "5", "link": "x"}}}),
                Page("after=5", {"results": [2]}),
            ],
            items=2,
        ),
        Pages(
            "search",
            PageRequest("https://api.hubapi.com/crm/v3/objects/contacts/search", "POST", {"filterGroups": []}),
            [
                Page("limit=100", {"total": 2, "results": [1], "paging": {"next": {"after": "1"}}}),
                Page("after=1", {"total": 2, "results": [2]}),
            ],
            items=2,
        ),
    ],
    hooks=[
        Hook(
            "client-secret",
            BODY,
            {"X-HubSpot-Signature-v3": SIGNED.decode(), "X-HubSpot-Request-Timestamp": AT},
            url=URL,
        ),
    ],
)
