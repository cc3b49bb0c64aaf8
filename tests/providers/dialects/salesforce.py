"""Answers of Salesforce."""

from resilient import FailureKind as K
from resilient import PageRequest, Scope
from resilient.testing.contract import Dialect, Page, Pages, Sample


def error(code, message=""):
    return [{"errorCode": code, "message": message}]


BASE = "https://acme.my.salesforce.com/services/data/v67.0"
DIALECT = Dialect(
    throttled=[
        Sample(
            "the day",
            403,
            K.QUOTA,
            error("REQUEST_LIMIT_EXCEEDED", "TotalRequests Limit exceeded."),
            {"Sforce-Limit-Info": "api-usage=100000/100000"},
            wait=900,
        ),
        Sample(
            "long ones at once",
            403,
            K.THROTTLED,
            error("REQUEST_LIMIT_EXCEEDED", "ConcurrentPerOrgLongTxn Limit exceeded."),
            wait=20,
        ),
    ],
    refused=[
        Sample("API off", 403, K.PERMANENT, error("API_DISABLED_FOR_ORG"), {"Sforce-Limit-Info": "api-usage=18/5000"}),
        Sample("no access", 403, K.PERMANENT, error("INSUFFICIENT_ACCESS")),
    ],
    expired=[Sample("expired", 401, K.AUTH, error("INVALID_SESSION_ID", "Session expired or invalid"))],
    reset=[Sample("locator", 400, K.RESET_CURSOR, error("INVALID_QUERY_LOCATOR"))],
    others=[
        Sample(
            "row lock", 400, K.CONFLICT, error("UNABLE_TO_LOCK_ROW"), on="PATCH /services/data/v67.0/sobjects/Account/1"
        ),
        Sample(
            "there already", 400, K.CONFLICT, error("DUPLICATE_VALUE"), on="POST /services/data/v67.0/sobjects/Account"
        ),
        Sample("down", 503, K.TRANSIENT, error("SERVER_UNAVAILABLE")),
    ],
    dead_grant=[
        Sample("revoked", 400, K.AUTH, {"error": "invalid_grant", "error_description": "expired access/refresh token"}),
    ],
    token_errors=[
        Sample("the limit, at the token", 403, K.QUOTA, error("REQUEST_LIMIT_EXCEEDED"), wait=900),
        Sample(
            "two refreshes at once",
            400,
            K.TRANSIENT,
            {"error": "invalid_grant", "error_description": "token request is already being processed"},
        ),
        Sample("client", 400, K.AUTH, {"error": "invalid_client"}, scope=Scope.PROVIDER),
    ],
    pages=[
        Pages(
            "query",
            PageRequest(f"{BASE}/query?q=SELECT+Id+FROM+Account"),
            [
                Page(
                    "/query",
                    {"records": [1, 2], "done": False, "nextRecordsUrl": "/services/data/v67.0/query/01g-2000"},
                ),
                Page("/query/01g-2000", {"records": [3], "done": True}),
            ],
            items=3,
        ),
    ],
)
