"""Answers of Google's APIs."""

from resilient import FailureKind as K
from resilient import PageRequest, Scope
from resilient.testing.contract import Dialect, Hook, Page, Pages, Sample


def said(code, reason, message="", status=""):
    return {"error": {"code": code, "message": message, "status": status, "errors": [{"reason": reason}]}}


DIALECT = Dialect(
    throttled=[
        Sample("by reason", 403, K.THROTTLED, said(403, "userRateLimitExceeded"), wait=None),
        Sample("project", 403, K.THROTTLED, said(403, "rateLimitExceeded"), wait=None),
        Sample(
            "Gmail",
            429,
            K.THROTTLED,
            said(429, "rateLimitExceeded", "User-rate limit exceeded.  Retry after 2026-11-01T12:10:00.000Z"),
            on="GET /gmail/v1/users/me/messages",
            key="gmail",
            wait=600,
        ),
        Sample(
            "Calendar",
            403,
            K.THROTTLED,
            said(403, "userRateLimitExceeded"),
            on="GET /calendar/v3/calendars/a/events",
            key="calendar",
            wait=None,
        ),
        Sample(
            "Drive",
            403,
            K.THROTTLED,
            said(403, "userRateLimitExceeded"),
            on="GET /drive/v3/files",
            key="drive",
            wait=None,
        ),
        Sample(
            "without a reason", 429, K.THROTTLED, {"error": {"message": "Retry after 2026-11-01T12:00:30Z"}}, wait=30
        ),
        Sample("the day", 403, K.QUOTA, said(403, "dailyLimitExceeded"), wait=3600),
    ],
    refused=[
        Sample("scope", 403, K.PERMANENT, said(403, "insufficientPermissions", status="PERMISSION_DENIED")),
        Sample("API off", 403, K.PERMANENT, said(403, "accessNotConfigured")),
    ],
    expired=[Sample("expired", 401, K.AUTH, said(401, "authError", status="UNAUTHENTICATED"))],
    reset=[
        Sample("Gmail", 404, K.RESET_CURSOR, said(404, "notFound"), on="GET /gmail/v1/users/me/history"),
        Sample(
            "Calendar", 410, K.RESET_CURSOR, said(410, "fullSyncRequired"), on="GET /calendar/v3/calendars/a/events"
        ),
    ],
    others=[
        Sample(
            "an event that is gone",
            410,
            K.PERMANENT,
            said(410, "deleted"),
            on="DELETE /calendar/v3/calendars/a/events/1",
        ),
        Sample("a mail that is gone", 404, K.PERMANENT, said(404, "notFound"), on="GET /gmail/v1/users/me/messages/1"),
        Sample("made already", 409, K.CONFLICT, said(409, "duplicate"), on="POST /calendar/v3/calendars/a/events"),
        Sample("backend", 503, K.TRANSIENT, said(503, "backendError")),
    ],
    dead_grant=[
        Sample("revoked", 400, K.AUTH, {"error": "invalid_grant", "error_description": "Token has been revoked"})
    ],
    token_errors=[
        Sample("client", 401, K.AUTH, {"error": "invalid_client"}, scope=Scope.PROVIDER),
        Sample("inside", 500, K.TRANSIENT, {"error": "internal_failure"}),
    ],
    pages=[
        Pages(
            "calendar",
            PageRequest("https://www.googleapis.com/calendar/v3/calendars/a/events"),
            [
                Page("maxResults=250", {"items": [1, 2], "nextPageToken": "p2"}),
                Page("pageToken=p2", {"items": [3], "nextSyncToken": "s9"}),
            ],
            items=3,
            resume="s9",
        ),
        Pages(
            "gmail",
            PageRequest("https://gmail.googleapis.com/gmail/v1/users/me/messages?q=x"),
            [
                Page("q=x", {"messages": [{"id": "a"}], "nextPageToken": "7"}),
                Page("pageToken=7", {"resultSizeEstimate": 0}),
            ],
            items=1,
        ),
        Pages(
            "gmail_history",
            PageRequest("https://gmail.googleapis.com/gmail/v1/users/me/history?startHistoryId=5"),
            [
                Page("startHistoryId=5", {"historyId": "9"}),
            ],
            items=0,
            resume="9",
        ),
        Pages(
            "drive",
            PageRequest("https://www.googleapis.com/drive/v3/files"),
            [
                Page("pageSize=1000", {"files": [1], "nextPageToken": "n"}),
                Page("pageToken=n", {"files": [2]}),
            ],
            items=2,
        ),
        Pages(
            "drive_changes",
            PageRequest("https://www.googleapis.com/drive/v3/changes?pageToken=1"),
            [
                Page("pageToken=1", {"changes": [1], "nextPageToken": "2"}),
                Page("pageToken=2", {"changes": [{"removed": True}], "newStartPageToken": "3"}),
            ],
            items=2,
            resume="3",
        ),
    ],
    hooks=[Hook("channel-token", b"", {"X-Goog-Channel-Token": "channel-token", "X-Goog-Message-Number": "3"})],
)
