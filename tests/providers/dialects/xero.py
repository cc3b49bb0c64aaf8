"""Answers of Xero."""

import base64
import hashlib
import hmac

from resilient import FailureKind as K
from resilient import PageRequest, Scope
from resilient.testing.contract import Dialect, Hook, Page, Pages, Sample, Token

BODY = b'{"events":[],"firstEventSequence":0}'
DIALECT = Dialect(
    throttled=[
        Sample("the minute", 429, K.THROTTLED, "", {"X-Rate-Limit-Problem": "minute", "Retry-After": "31"}, wait=31),
        Sample("at once", 429, K.THROTTLED, "", {"X-Rate-Limit-Problem": "concurrent", "Retry-After": "1"}, wait=1),
        Sample(
            "the day",
            429,
            K.QUOTA,
            "",
            {"X-Rate-Limit-Problem": "day", "Retry-After": "40000", "X-DayLimit-Remaining": "0"},
            wait=40000,
        ),
        Sample("the day, told nothing", 429, K.QUOTA, "", {"X-Rate-Limit-Problem": "Day"}, wait=12 * 3600),
        Sample(
            "the app",
            429,
            K.THROTTLED,
            "",
            {"X-Rate-Limit-Problem": "appminute", "Retry-After": "12"},
            scope=Scope.PROVIDER,
            wait=12,
        ),
    ],
    refused=[
        Sample(
            "scope",
            403,
            K.PERMANENT,
            {"Title": "Forbidden", "Detail": "insufficient scope"},
            {"X-DayLimit-Remaining": "0"},
        ),
        Sample("validation", 400, K.PERMANENT, {"ErrorNumber": 10, "Type": "ValidationException"}, on="POST /Invoices"),
    ],
    expired=[
        Sample("expired", 401, K.AUTH, {"Title": "Unauthorized", "Detail": "TokenExpired: token expired at ..."}),
        Sample("disconnected", 403, K.AUTH, {"Title": "Forbidden", "Detail": "AuthenticationUnsuccessful"}),
    ],
    no_reset="If-Modified-Since takes any time",
    others=[Sample("lost, but with a key", 502, K.TRANSIENT, "", on="PUT /Invoices")],
    dead_grant=[Sample("gone", 400, K.AUTH, {"error": "invalid_grant"})],
    token_errors=[Sample("client", 400, K.AUTH, {"error": "invalid_client"}, scope=Scope.PROVIDER)],
    tokens=[
        Token(
            "a grant's",
            {"access_token": "a", "refresh_token": "r", "expires_in": 1800, "id_token": "i"},
            "a",
            "r",
            1800,
        )
    ],
    pages=[
        Pages(
            "list",
            PageRequest("https://api.xero.com/api.xro/2.0/Invoices?pageSize=2"),
            [
                Page("pageSize=2", {"Id": "x", "pagination": {"page": 1}, "Invoices": [1, 2]}),
                Page("page=2", {"Id": "x", "pagination": {"page": 2}, "Invoices": [3]}),
            ],
            items=3,
        ),
    ],
    hooks=[
        Hook(
            "webhook-key",
            BODY,
            {"x-xero-signature": base64.b64encode(hmac.new(b"webhook-key", BODY, hashlib.sha256).digest()).decode()},
        ),
    ],
)
