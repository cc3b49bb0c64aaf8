"""Answers of Microsoft Graph and Entra ID."""

from resilient import FailureKind as K
from resilient import PageRequest, Scope
from resilient.testing.contract import Dialect, Hook, Page, Pages, Sample

DIALECT = Dialect(
    throttled=[
        Sample("429", 429, K.THROTTLED, {"error": {"code": "TooManyRequests"}}, {"Retry-After": "120"}, wait=120),
        Sample("part of a batch", 429, K.THROTTLED, None, {"Retry-After": "0.249"}, wait=0.249),
        Sample(
            "a mailbox",
            429,
            K.THROTTLED,
            {"error": {"code": "ApplicationThrottled"}},
            {"Retry-After": "10"},
            on="GET /v1.0/me/messages",
            key="outlook",
            wait=10,
        ),
        Sample("notes", 429, K.THROTTLED, None, on="GET /v1.0/me/onenote/pages", key="onenote", wait=None),
    ],
    refused=[
        Sample("no permission", 403, K.PERMANENT, {"error": {"code": "Authorization_RequestDenied", "message": "No"}}),
        Sample("denied", 403, K.PERMANENT, {"error": {"code": "ErrorAccessDenied"}}, {"Retry-After": "9"}),
    ],
    expired=[Sample("expired", 401, K.AUTH, {"error": {"code": "InvalidAuthenticationToken"}})],
    reset=[
        Sample("gone", 410, K.RESET_CURSOR, {"error": {"code": "Gone"}}, on="GET /v1.0/users/delta", key="directory"),
        Sample("state", 400, K.RESET_CURSOR, {"error": {"code": "x", "innerError": {"code": "syncStateNotFound"}}}),
    ],
    others=[
        Sample("overload", 503, K.TRANSIENT, None, {"Retry-After": "20"}, wait=20),
        Sample("etag", 412, K.CONFLICT, {"error": {"code": "ErrorIrresolvableConflict"}}, on="PATCH /v1.0/me/events/1"),
    ],
    dead_grant=[
        Sample("revoked", 400, K.AUTH, {"error": "invalid_grant", "suberror": "bad_token"}),
        Sample("sign in", 400, K.AUTH, {"error": "interaction_required"}),
    ],
    token_errors=[
        Sample("secret", 401, K.AUTH, {"error": "invalid_client"}, scope=Scope.PROVIDER),
        Sample("busy", 503, K.TRANSIENT, {"error": "temporarily_unavailable"}, {"Retry-After": "7"}, wait=7),
    ],
    pages=[
        Pages(
            "list",
            PageRequest("https://graph.microsoft.com/v1.0/users/delta?$select=id"),
            [
                Page(
                    "$top=100",
                    {
                        "value": [{"id": 1}, {"id": 2}],
                        "@odata.nextLink": "https://graph.microsoft.com/v1.0/users/delta?$skiptoken=a%2Bb",
                    },
                ),
                Page(
                    "$skiptoken=a+b",
                    {
                        "value": [{"id": 3, "@removed": {"reason": "deleted"}}],
                        "@odata.deltaLink": "https://graph.microsoft.com/v1.0/users/delta?$deltatoken=d",
                    },
                ),
            ],
            items=3,
            resume="https://graph.microsoft.com/v1.0/users/delta?$deltatoken=d",
        ),
    ],
    hooks=[Hook("agreed", b'{"value":[{"clientState":"agreed"}]}', {})],
)
