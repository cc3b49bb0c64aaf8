"""Answers of Zoom."""

import hashlib
import hmac

from resilient import FailureKind as K
from resilient import PageRequest, Scope
from resilient.testing.contract import NOW, Dialect, Hook, Page, Pages, Sample

AT = str(int(NOW.timestamp()) - 5)
BODY = b'{"event":"meeting.started"}'
SIGNED = hmac.new(b"secret-token", f"v0:{AT}:".encode() + BODY, hashlib.sha256).hexdigest()
RESET = str(int(NOW.timestamp()) + 2)
DIALECT = Dialect(
    throttled=[
        Sample(
            "a second",
            429,
            K.THROTTLED,
            {"code": 429, "message": "You have reached the maximum per-second rate limit"},
            {"X-RateLimit-Type": "QPS", "X-RateLimit-Reset": RESET, "X-RateLimit-Remaining": "0"},
            wait=2,
        ),
        Sample("a second, told nothing", 429, K.THROTTLED, {"code": 429}, {"X-RateLimit-Type": "QPS"}, wait=1),
        Sample(
            "the day",
            429,
            K.QUOTA,
            {"code": 429},
            {"X-RateLimit-Type": "Daily-limit", "Retry-After": "2026-11-02T00:00:00Z"},
            on="GET /v2/report/users",
            key="heavy",
            wait=12 * 3600,
        ),
        Sample(
            "a busy object",
            429,
            K.CONFLICT,
            {
                "code": 429,
                "message": "Too many concurrent requests. A request to disassociate this user has already been made.",
            },
        ),
    ],
    refused=[
        Sample("scope", 400, K.PERMANENT, {"code": 4711, "message": "Invalid access token, does not contain scopes"}),
        Sample("scope as 401", 401, K.PERMANENT, {"code": 4711}),
        Sample("plan", 403, K.PERMANENT, {"code": 200, "message": "No permission"}, {"X-RateLimit-Remaining": "9"}),
    ],
    expired=[
        Sample("expired", 401, K.AUTH, {"code": 124, "message": "Access token is expired."}),
        Sample("authorised anew", 400, K.AUTH, {"code": 4741}),
    ],
    no_reset="windows of dates, no cursor",
    others=[Sample("no meeting", 404, K.PERMANENT, {"code": 3001})],
    dead_grant=[
        Sample("used up", 400, K.AUTH, {"reason": "Invalid Token!", "error": "invalid_grant"}),
        Sample("authorised anew", 401, K.AUTH, {"code": 4741}),
    ],
    token_errors=[Sample("client", 401, K.AUTH, {"error": "invalid_client"}, scope=Scope.PROVIDER)],
    pages=[
        Pages(
            "list",
            PageRequest("https://api.zoom.us/v2/users/me/meetings"),
            [
                Page("page_size=300", {"meetings": [1], "next_page_token": "t"}),
                Page("next_page_token=t", {"meetings": [2], "next_page_token": ""}),
            ],
            items=2,
        ),
    ],
    hooks=[Hook("secret-token", BODY, {"x-zm-signature": f"v0={SIGNED}", "x-zm-request-timestamp": AT})],
)
