"""Answers of GitLab."""

import base64
import hashlib
import hmac

from resilient import FailureKind as K
from resilient import PageRequest, Scope
from resilient.testing.contract import NOW, Dialect, Hook, Page, Pages, Sample

ID, AT = "f5e5f430", str(int(NOW.timestamp()))
BODY = b'{"object_kind":"push"}'
KEY = "whsec_" + base64.b64encode(b"a signing key").decode()
SIGNED = base64.b64encode(hmac.new(b"a signing key", f"{ID}.{AT}.".encode() + BODY, hashlib.sha256).digest()).decode()
DIALECT = Dialect(
    throttled=[
        Sample(
            "by the rack",
            429,
            K.THROTTLED,
            "Retry later\n",
            {
                "Retry-After": "40",
                "RateLimit-Limit": "2000",
                "RateLimit-Remaining": "0",
                "RateLimit-Name": "throttle",
                "RateLimit-ResetTime": "Sun, 01 Nov 2026 12:00:40 GMT",
            },
            wait=40,
        ),
        Sample(
            "by the application",
            429,
            K.THROTTLED,
            {"message": {"error": "This endpoint has been requested too many times. Try again later."}},
            on="GET /api/v4/projects",
            key="projects",
            wait=60,
        ),
        Sample(
            "of one project", 429, K.THROTTLED, "Retry later\n", on="GET /api/v4/projects/7", key="project", wait=60
        ),
        Sample("of groups", 429, K.THROTTLED, "Retry later\n", on="GET /api/v4/groups", key="groups", wait=60),
        Sample("of issues", 429, K.THROTTLED, "Retry later\n", on="GET /api/v4/projects/7/issues", key="", wait=60),
    ],
    refused=[
        Sample("scope", 403, K.PERMANENT, {"error": "insufficient_scope", "error_description": "needs api"}),
        Sample("forbidden", 403, K.PERMANENT, {"message": "403 Forbidden"}, {"RateLimit-Remaining": "1900"}),
    ],
    expired=[Sample("expired", 401, K.AUTH, {"error": "invalid_token", "error_description": "Token is expired."})],
    no_reset="updated_after takes any time",
    dead_grant=[Sample("used up", 400, K.AUTH, {"error": "invalid_grant"})],
    token_errors=[Sample("client", 401, K.AUTH, {"error": "invalid_client"}, scope=Scope.PROVIDER)],
    pages=[
        Pages(
            "list",
            PageRequest("https://gitlab.com/api/v4/projects/1/issues"),
            [
                Page(
                    "per_page=100", [1], {"Link": '<http://gitlab.com/api/v4/projects/1/issues?id_after=1>; rel="next"'}
                ),
                Page("id_after=1", [2]),
            ],
            items=2,
        ),
        Pages(
            "numbered",
            PageRequest("https://gitlab.com/api/v4/projects"),
            [
                Page("/projects", [1], {"X-Next-Page": "2"}),
                Page("page=2", [2], {"X-Next-Page": ""}),
            ],
            items=2,
        ),
    ],
    hooks=[
        Hook(
            KEY,
            BODY,
            {
                "Idempotency-Key": ID,
                "webhook-id": ID,
                "webhook-timestamp": AT,
                "webhook-signature": f"v1,{SIGNED}",
            },
            delivery=ID,
        ),
    ],
)
