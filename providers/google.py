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

_COSTS: Final = {"GET messages": 5, "POST send": 100, "GET history": 2}  # Gmail's units per request
_RETRY_AFTER: Final = Wait(text=r"[Rr]etry after (?P<value>[0-9T:.+Z-]+)", word=Word.ISO8601)


def _list(items: str, most: int, size: str = "maxResults", resume: str = "") -> NextCursor:
    """Google pages everywhere alike, and leaves an empty list out."""
    return NextCursor(
        items=items, found="nextPageToken", query="pageToken", absent="empty", size=size, most=most, resume=resume
    )


def route(asked: RequestFacts) -> tuple[str, float]:
    """Gmail counts units per user, by method."""
    parts = asked.path.strip("/").split("/")
    if parts[0] != "gmail":
        return "", 1
    named = next((part for part in ("history", "send", "messages") if part in parts), "")
    return "gmail", _COSTS.get(f"{asked.method} {named}", 5)


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
        "account/gmail": [Limit(15_000, per="1m", name="gmail-units")],
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
            found="nextSyncToken",
            taken="last_page",
            deletions="marked",
            deleted="status=cancelled",
        ),
        "gmail": Incremental(
            style="token",
            query="startHistoryId",
            found="historyId",
            taken="before_pass",
            deletions="marked",
            deleted="messagesDeleted",
            deleted_key="messagesDeleted[].message.id",
            life=7 * 86400,
        ),
        "drive": Incremental(
            style="token",
            query="pageToken",
            found="newStartPageToken",
            taken="before_pass",
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
        "developers.google.com/workspace/gmail/api/reference/quota and guides/sync",
        "developers.google.com/workspace/calendar/api/guides/sync and guides/errors",
        "developers.google.com/workspace/drive/api/guides/manage-changes",
    ),
    unverified=(
        "incremental: where Gmail's history and Drive's changes name what was deleted",
        "auth: pkce, service accounts",
        "limits: costs of Gmail methods not named above; those of Calendar and Drive are set in the console",
        "pagination: the largest sizes",
        "webhook: how long a channel lives, and Gmail's push",
        "idempotency: a repeated insert with a client-made id gives 409",
    ),
)


def provider(client_id: str = "", client_secret: str = "", **overrides: Unpack[Overrides]) -> Provider:
    """Google's facts for one OAuth client."""
    return GOOGLE.configured(client_id, client_secret, **overrides)
