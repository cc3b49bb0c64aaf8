"""Answers of Box."""

import base64
import hashlib
import hmac

from resilient import FailureKind as K
from resilient import PageRequest, Scope
from resilient.testing.contract import Dialect, Hook, Page, Pages, Sample

AT = "2026-11-01T11:59:00-00:00"
BODY = b'{"id":"eb0c4e06-751f-442c-86f8-fd5bb404dbec","trigger":"FILE.UPLOADED"}'
SIGNED = base64.b64encode(hmac.new(b"primary", BODY + AT.encode(), hashlib.sha256).digest()).decode()
DIALECT = Dialect(
    throttled=[
        Sample("429", 429, K.THROTTLED, {"code": "rate_limit_exceeded"}, {"Retry-After": "11"}, wait=11),
        Sample("search", 429, K.THROTTLED, "", {"Retry-After": "1"}, on="GET /2.0/search", key="search", wait=1),
    ],
    refused=[
        Sample(
            "permission",
            403,
            K.PERMANENT,
            {"code": "access_denied_insufficient_permissions", "message": "Access denied"},
        )
    ],
    expired=[Sample("expired", 401, K.AUTH, "")],
    no_reset="a stream position does not expire, as far as is known",
    others=[Sample("changed", 412, K.CONFLICT, {"code": "precondition_failed"}, on="PUT /2.0/files/1")],
    dead_grant=[
        Sample("used up", 400, K.AUTH, {"error": "invalid_grant", "error_description": "Refresh token has expired"})
    ],
    token_errors=[Sample("client", 400, K.AUTH, {"error": "invalid_client"}, scope=Scope.PROVIDER)],
    pages=[
        Pages(
            "marker",
            PageRequest("https://api.box.com/2.0/folders/0/items?usemarker=true"),
            [
                Page("limit=1000", {"entries": [1], "next_marker": "m"}),
                Page("marker=m", {"entries": [2], "next_marker": ""}),
            ],
            items=2,
        ),
        Pages(
            "offset",
            PageRequest("https://api.box.com/2.0/users"),
            [
                Page("limit=1000", {"entries": [1, 2], "total_count": 3}),
                Page("offset=2", {"entries": [3], "total_count": 3}),
            ],
            items=3,
        ),
    ],
    hooks=[
        Hook(
            "primary",
            BODY,
            {"BOX-SIGNATURE-PRIMARY": SIGNED, "BOX-DELIVERY-TIMESTAMP": AT, "BOX-DELIVERY-ID": "of this attempt"},
            delivery="eb0c4e06-751f-442c-86f8-fd5bb404dbec",
        )
    ],
)
