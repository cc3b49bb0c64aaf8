"""Google Workspace: Gmail, Calendar and Drive, with one grant.

A throttle comes as 403 as often as 429, so only the reason tells it from a missing permission; the time to
wait, if any, stands inside Gmail's message. Without ``prompt=consent`` a second consent gives no refresh token.
A grant dies after six months unused, after seven days while the consent screen is in testing, and silently when
an account has about a hundred of them for one client.
"""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING, Final, Unpack

from resilient import Errors, FailureKind, Incremental, Limit, NextCursor, OAuth2, Provider, Rule, Wait, Webhook, Word

if TYPE_CHECKING:
    from resilient import Overrides, RequestFacts

_UNITS: Final = {  # of Gmail, by the path's last word, or by the list something is in
    "GET messages": 5,
    "GET messages/*": 20,
    "GET threads": 10,
    "GET threads/*": 40,
    "POST threads/*": 10,
    "GET drafts": 5,
    "GET drafts/*": 20,
    "GET history": 2,
    "POST send": 100,
    "POST trash": 20,
    "POST messages": 25,
    "POST import": 25,
    "POST batchModify": 50,
    "POST batchDelete": 50,
}
_RETRY_AFTER: Final = Wait(text=r"[Rr]etry after (?P<value>[0-9T:.+Z-]+)", word=Word.ISO8601)


def _list(items: str, most: int, size: str = "maxResults", resume: str = "") -> NextCursor:
    """Google pages everywhere alike, and leaves an empty list out."""
    return NextCursor(
        items=items, cursor="nextPageToken", query="pageToken", absent="empty", size=size, most=most, resume=resume
    )


def route(request: RequestFacts) -> tuple[str, float]:
    """Gmail, Calendar and Drive count per user, each for itself; Gmail and Drive in units, by method."""
    parts = request.path.strip("/").removeprefix("upload/").split("/")
    if parts[0] == "gmail":
        collection = next((part for part in ("messages", "threads", "drafts") if part in parts), "")
        units = _UNITS.get(f"{request.method} {parts[-1]}") or _UNITS.get(f"{request.method} {collection}/*", 5)
        return "gmail", units
    if parts[0] == "drive":
        if request.method != "GET":
            return "drive", 50
        return "drive", 100 if parts[-1] in ("files", "changes", "drives") else 5
    return ("calendar", 1) if parts[0] == "calendar" else ("", 1)


GOOGLE: Final = Provider(
    name="google",
    title="Google Workspace",
    base_url="https://www.googleapis.com",
    hosts=("gmail.googleapis.com", "people.googleapis.com"),
    auth=(
        OAuth2(
            authorize_url="https://accounts.google.com/o/oauth2/v2/auth",
            token_url="https://oauth2.googleapis.com/token",
            authorize_params={"access_type": "offline", "prompt": "consent"},
            flows=("authorization_code", "jwt_bearer"),
            pkce="supported",
            lifetime=3600,
        ),
    ),
    limits={
        "provider": [Limit(1_200_000, per="1m", name="gmail-project")],
        # Projects since 2026-05-01; those that used Gmail in the half year before it keep 15,000.
        "account/gmail": [Limit(6_000, per="1m", name="gmail-units")],
        "account/calendar": [Limit(600, per="1m", name="calendar")],
        "account/drive": [Limit(325_000, per="1m", name="drive-units")],
    },
    route=route,
    errors=Errors(
        code=("error.errors[0].reason", "error.status"),
        rules=(
            Rule(FailureKind.RESET_CURSOR, status=404, path="*/users/*/history"),  # Gmail: historyId too old
            Rule(FailureKind.RESET_CURSOR, status=410, code=("fullSyncRequired", "updatedMinTooLongAgo")),
            Rule(
                FailureKind.QUOTA,
                status=(403, 429),
                code=("quotaExceeded", "dailyLimitExceeded"),
                wait=Wait(fallback=3600),
            ),
            Rule(
                FailureKind.THROTTLED,
                status=(403, 429),
                code=("rateLimitExceeded", "userRateLimitExceeded"),
                wait=_RETRY_AFTER,
            ),
            Rule(FailureKind.THROTTLED, status=429, wait=_RETRY_AFTER),
        ),
    ),
    pagination={
        "calendar": _list("items", 250, resume="nextSyncToken"),
        "gmail": _list("messages", 500),
        "gmail_history": _list("history", 500, resume="historyId"),
        "drive": _list("files", 1000, "pageSize"),
        "drive_changes": _list("changes", 1000, "pageSize", resume="newStartPageToken"),
    },
    incremental={
        "calendar": Incremental(
            style="token",
            query="syncToken",
            cursor="nextSyncToken",
            source="last_page",
            deletions="marked",
            deleted="status=cancelled",
        ),
        "gmail": Incremental(
            style="token",
            query="startHistoryId",
            cursor="historyId",
            source="before_pass",
            deletions="marked",
            deleted="messagesDeleted",
            deleted_key="messagesDeleted[].message.id",
            life=7 * 86400,
        ),
        "drive": Incremental(
            style="token",
            query="pageToken",
            cursor="newStartPageToken",
            source="before_pass",
            deletions="marked",
            deleted="removed",
            deleted_key="fileId",
        ),
    },
    webhook=Webhook(
        token="x-goog-channel-token",
        delivery="x-goog-channel-id x-goog-message-number",
        event="x-goog-resource-state",
        life=7 * 86400,
    ),
    verified_on=date(2026, 11, 1),
    sources=(
        "developers.google.com/identity/protocols/oauth2",
        "developers.google.com/workspace/gmail/api/reference/quota (in stored copies of 2026) and guides/sync",
        "developers.google.com/workspace/calendar/api/guides/quota (the same), guides/sync and guides/errors",
        "developers.google.com/workspace/drive/api/guides/limits (the same) and guides/manage-changes",
    ),
    unverified=(
        "incremental: where Gmail's history and Drive's changes name what was deleted",
        "auth: pkce, service accounts",
        "limits: Gmail's units as of 2026-05, by what others noted from its page; 5 for what is not named",
        "limits: a project's 10,000 of Calendar and 1,000,000 units of Drive are not counted apart from Gmail's",
        "limits: Drive's 200 units for a download count as 5, as those of a read",
        "pagination: the largest sizes",
        "webhook: how long a channel lives, and Gmail's push",
        "idempotency: a repeated insert with a client-made id gives 409",
    ),
)


def provider(client_id: str = "", client_secret: str = "", **overrides: Unpack[Overrides]) -> Provider:
    """Google's facts for one OAuth client."""
    return GOOGLE.configured(client_id, client_secret, **overrides)
