"""Answers of Linear."""

import hashlib
import hmac

from resilient import FailureKind as K
from resilient import PageRequest, Scope
from resilient.testing.contract import NOW, Dialect, Hook, Page, Pages, Sample


def error(code="", kind=""):
    return {"errors": [{"message": "...", "extensions": {"code": code, "type": kind}}]}


BODY = b'{"action":"update","webhookTimestamp":%d}' % (NOW.timestamp() * 1000)
RESETS = {
    "X-RateLimit-Requests-Remaining": "0",
    "X-RateLimit-Requests-Reset": str(int(NOW.timestamp() * 1000) + 90_000),
}
COMPLEX = {
    "X-RateLimit-Complexity-Remaining": "0",
    "X-RateLimit-Complexity-Reset": str(int(NOW.timestamp() * 1000) + 5_000),
}
POST = "POST /graphql"
DIALECT = Dialect(
    throttled=[
        Sample("requests", 400, K.THROTTLED, error("RATELIMITED"), RESETS, on=POST, wait=90),
        Sample("complexity", 400, K.THROTTLED, error("RATELIMITED"), COMPLEX, on=POST, wait=5),
        Sample("as a 403", 403, K.THROTTLED, error("RATELIMITED"), RESETS, on=POST, wait=90),
        Sample("429", 429, K.THROTTLED, "", {"Retry-After": "7"}, on=POST, wait=7),
    ],
    refused=[
        Sample("forbidden", 200, K.PERMANENT, error("FORBIDDEN", "forbidden"), on=POST),
        Sample("wrong query", 400, K.PERMANENT, error("GRAPHQL_VALIDATION_FAILED", "graphql error"), on=POST),
        Sample("wrong, nothing said", 400, K.PERMANENT, error(), {"X-RateLimit-Requests-Remaining": "100"}, on=POST),
        Sample("wrong as a 500", 500, K.PERMANENT, error("INPUT_ERROR", "invalid input"), on=POST),
    ],
    expired=[
        Sample("expired", 401, K.AUTH, error("AUTHENTICATION_ERROR", "authentication error"), on=POST),
        Sample("as a 200", 200, K.AUTH, error("AUTHENTICATION_ERROR", "authentication error"), on=POST),
    ],
    no_reset="a filter by time takes any time",
    others=[
        Sample("lock", 200, K.CONFLICT, error("", "lock timeout"), on=POST),
        Sample("inside", 500, K.TRANSIENT, error("INTERNAL_SERVER_ERROR", "internal error"), on=POST),
        Sample("data", 200, None, {"data": {}}, on=POST),
    ],
    dead_grant=[Sample("revoked", 400, K.AUTH, {"error": "invalid_grant"})],
    token_errors=[Sample("client", 401, K.AUTH, {"error": "invalid_client"}, scope=Scope.PROVIDER)],
    pages=[
        Pages(
            "list",
            PageRequest("https://api.linear.app/graphql", "POST", {"query": "q"}),
            [
                Page(
                    "query=q", {"data": {"issues": {"nodes": [1], "pageInfo": {"hasNextPage": True, "endCursor": "e"}}}}
                ),
                Page(
                    "variables.after=e",
                    {"data": {"issues": {"nodes": [2], "pageInfo": {"hasNextPage": False, "endCursor": "f"}}}},
                ),
            ],
            items=2,
        ),
    ],
    hooks=[Hook("secret", BODY, {"Linear-Signature": hmac.new(b"secret", BODY, hashlib.sha256).hexdigest()})],
)
