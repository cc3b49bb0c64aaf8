"""Answers of QuickBooks Online."""

import base64
import hashlib
import hmac

from resilient import FailureKind as K
from resilient import PageRequest, Scope
from resilient.testing.contract import Dialect, Hook, Page, Pages, Sample


def fault(code, message=""):
    return {"Fault": {"Error": [{"code": code, "Message": message}], "type": "ValidationFault"}}


PATH = "/v3/company/1"
BODY = b'[{"id":"1"}]'
DIALECT = Dialect(
    throttled=[
        Sample("429", 429, K.THROTTLED, fault("003001", "ThrottleExceeded"), wait=60),
        Sample("429 without a body", 429, K.THROTTLED, "", wait=60),
        Sample("by its code", 403, K.THROTTLED, fault("3001", "message=ThrottleExceeded; errorCode=003001"), wait=60),
        Sample(
            "as XML",
            403,
            K.THROTTLED,
            '<Error code="3001"><Message>message=ThrottleExceeded; errorCode=003001; statusCode=403</Message></Error>',
            wait=60,
        ),
        Sample("batches", 429, K.THROTTLED, "", on=f"POST {PATH}/batch", key="batch", wait=60),
    ],
    refused=[
        Sample(
            "scope",
            403,
            K.PERMANENT,
            {"fault": {"error": [{"code": "3100", "message": "ApplicationAuthorizationFailed"}]}},
        ),
        Sample("rule", 400, K.PERMANENT, fault("6000"), on=f"POST {PATH}/invoice"),
    ],
    expired=[
        Sample("expired", 401, K.AUTH, {"fault": {"error": [{"code": "3200", "message": "AuthenticationFailed"}]}}),
    ],
    no_reset="changes are read by time, 30 days back",
    others=[
        Sample("stale", 400, K.CONFLICT, fault("5010"), on=f"POST {PATH}/invoice"),
        Sample("there already", 400, K.CONFLICT, fault("6240"), on=f"POST {PATH}/customer"),
        Sample("lost, but with a key", 504, K.TRANSIENT, "", on=f"POST {PATH}/invoice"),
        Sample("overload", 503, K.TRANSIENT, ""),
    ],
    dead_grant=[Sample("gone", 400, K.AUTH, {"error": "invalid_grant", "error_description": "Incorrect Token type"})],
    token_errors=[Sample("client", 401, K.AUTH, {"error": "invalid_client"}, scope=Scope.PROVIDER)],
    pages=[
        Pages(
            "query",
            PageRequest(f"https://quickbooks.api.intuit.com{PATH}/query?query=select+%2A+from+Invoice"),
            [
                Page(
                    "query=select * from Invoice",
                    {"QueryResponse": {"Invoice": [1, 2], "startPosition": 1, "maxResults": 2}},
                ),
                Page(
                    "query=select * from Invoice STARTPOSITION 3",
                    {"QueryResponse": {"Invoice": [3], "startPosition": 3}},
                ),
                Page("query=select * from Invoice STARTPOSITION 4", {"QueryResponse": {}}),
            ],
            items=3,
        ),
    ],
    hooks=[
        Hook(
            "verifier",
            BODY,
            {"intuit-signature": base64.b64encode(hmac.new(b"verifier", BODY, hashlib.sha256).digest()).decode()},
        ),
    ],
)
