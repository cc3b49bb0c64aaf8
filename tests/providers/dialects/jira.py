"""Answers of Jira Cloud."""

import hashlib
import hmac

from resilient import FailureKind as K
from resilient import PageRequest, Scope
from resilient.testing.contract import Dialect, Hook, Page, Pages, Sample

BODY = b'{"webhookEvent":"jira:issue_updated"}'
DIALECT = Dialect(
    throttled=[
        Sample(
            "burst",
            429,
            K.THROTTLED,
            {},
            {"Retry-After": "5", "RateLimit-Reason": "jira-burst-based"},
            wait=5,
            scope=Scope.ENDPOINT,
        ),
        Sample(
            "hourly points",
            429,
            K.QUOTA,
            {},
            {
                "RateLimit-Reason": "jira-quota-global-based",
                "X-RateLimit-Reset": "2026-11-01T13:00Z",
                "X-RateLimit-Remaining": "0",
            },
            wait=3600,
        ),
        Sample(
            "one issue",
            429,
            K.CONFLICT,
            {},
            {"Retry-After": "2", "RateLimit-Reason": "jira-per-issue-on-write"},
            on="PUT /ex/jira/1/rest/api/3/issue/A-1",
            wait=2,
        ),
    ],
    refused=[
        Sample(
            "permission",
            403,
            K.PERMANENT,
            {"errorMessages": ["You do not have permission."]},
            {"X-RateLimit-Remaining": "1000", "X-RateLimit-Reset": "2026-11-01T13:00Z"},
        ),
        Sample("scope", 401, K.PERMANENT, {"code": 401, "message": "Unauthorized; scope does not match"}),
    ],
    expired=[Sample("expired", 401, K.AUTH, {"code": 401, "message": "Unauthorized"})],
    no_reset="JQL takes any time",
    others=[
        Sample("overload", 503, K.TRANSIENT, {}, {"Retry-After": "30"}, wait=30),
        Sample("a search that got lost", 502, K.TRANSIENT, "", on="POST /ex/jira/1/rest/api/3/search/jql"),
    ],
    dead_grant=[
        Sample("family revoked", 403, K.AUTH, {"error": "invalid_grant"}),
        Sample("gone", 403, K.AUTH, {"error": "unauthorized_client", "error_description": "refresh_token is invalid"}),
    ],
    token_errors=[
        Sample("client", 401, K.AUTH, {"error": "access_denied"}, scope=Scope.PROVIDER),
        Sample("forbidden", 403, K.PERMANENT, {"error": "access_denied"}),
    ],
    pages=[
        Pages(
            "search",
            PageRequest("https://api.atlassian.com/ex/jira/1/rest/api/3/search/jql?jql=x"),
            [
                Page("maxResults=100", {"issues": [1], "nextPageToken": "t"}),
                Page("nextPageToken=t", {"issues": [2]}),
            ],
            items=2,
        ),
        Pages(
            "list",
            PageRequest("https://api.atlassian.com/ex/jira/1/rest/api/3/project/search"),
            [
                Page("maxResults=50", {"values": [1, 2], "startAt": 0, "total": 3}),
                Page("startAt=2", {"values": [3], "startAt": 2, "total": 3}),
            ],
            items=3,
        ),
    ],
    hooks=[
        Hook("shared", BODY, {"X-Hub-Signature": "sha256=" + hmac.new(b"shared", BODY, hashlib.sha256).hexdigest()}),
    ],
)
