"""Answers of Slack."""

from datetime import UTC, datetime

from resilient import FailureKind as K
from resilient import PageRequest, Scope
from resilient.testing.contract import Dialect, Hook, Page, Pages, Sample, Token

BODY = b"token=xyzz0WbapA4vBCDEFasx0q6G&team_id=T1DC2JH3J&team_domain=testteamnow&channel_id=G8PSS9T3V&channel_name=foobar&user_id=U2CERLKJA&user_name=roadrunner&command=%2Fwebhook-collect&text=&response_url=https%3A%2F%2Fhooks.slack.com%2Fcommands%2FT1DC2JH3J%2F397700885554%2F96rGlfmibIGlgcZRskXaIFfN&trigger_id=398738663015.47445629121.803a0bc887a14d10d2c447fce8b6703c"  # noqa: E501
SENT = {"channel": "C024BE91L", "text": "hello"}


def error(code):
    return {"ok": False, "error": code}


DIALECT = Dialect(
    throttled=[
        Sample(
            "429",
            429,
            K.THROTTLED,
            error("ratelimited"),
            {"Retry-After": "30"},
            on="POST /api/users.list",
            scope=Scope.ENDPOINT,
            key="users.list",
            wait=30,
        ),
        Sample("429 without a body", 429, K.THROTTLED, "", {"Retry-After": "5"}, scope=Scope.ENDPOINT, wait=5),
        Sample("as a 200", 200, K.THROTTLED, error("rate_limited"), scope=Scope.ENDPOINT, wait=None),
        Sample(
            "one channel",
            429,
            K.THROTTLED,
            error("ratelimited"),
            {"Retry-After": "1"},
            sent=SENT,
            on="POST /api/chat.postMessage",
            key="chat.postMessage:C024BE91L",
            scope=Scope.ENDPOINT,
        ),
    ],
    refused=[
        Sample("scope", 200, K.PERMANENT, error("missing_scope")),
        Sample("not a member", 200, K.PERMANENT, error("not_in_channel")),
        Sample("by the owner", 403, K.PERMANENT, error("access_denied")),
    ],
    expired=[
        Sample("expired", 200, K.AUTH, error("token_expired")),
        Sample("uninstalled", 200, K.AUTH, error("account_inactive")),
        Sample("401", 401, K.AUTH, error("invalid_auth")),
    ],
    no_reset="a history is read by time",
    others=[
        Sample("part may be done", 200, K.AMBIGUOUS, error("fatal_error"), on="POST /api/chat.postMessage"),
        Sample("a read", 200, K.TRANSIENT, error("internal_error"), on="POST /api/users.list"),
        Sample("down", 200, K.TRANSIENT, error("service_unavailable")),
        Sample("fine", 200, None, {"ok": True}),
    ],
    dead_grant=[
        Sample("used up", 200, K.AUTH, error("invalid_refresh_token")),
        Sample("revoked", 200, K.AUTH, error("token_revoked")),
    ],
    token_errors=[
        Sample("secret", 200, K.AUTH, error("bad_client_secret"), scope=Scope.PROVIDER),
        Sample("limit", 429, K.THROTTLED, error("ratelimited"), {"Retry-After": "3"}, wait=3),
        Sample("user token", 200, None, {"ok": True, "authed_user": {"access_token": "xoxp"}}),
    ],
    tokens=[
        Token(
            "a bot's",
            {
                "ok": True,
                "access_token": "xoxe.xoxb-1",
                "expires_in": 43200,
                "refresh_token": "xoxe-1",
                "team": {"id": "T1"},
                "authed_user": {"id": "U1"},
                "bot_user_id": "B1",
            },
            "xoxe.xoxb-1",
            "xoxe-1",
            43200,
            {"id": "U1", "bot_user_id": "B1"},
        )
    ],
    pages=[
        Pages(
            "list",
            PageRequest("https://slack.com/api/conversations.list"),
            [
                Page("limit=200", {"ok": True, "channels": [1, 2], "response_metadata": {"next_cursor": "dGVhbQ=="}}),
                Page("cursor=dGVhbQ==", {"ok": True, "channels": [3], "response_metadata": {"next_cursor": ""}}),
            ],
            items=3,
        ),
    ],
    hooks=[  # the example of Slack's own documentation
        Hook(
            "8f742231b10e8888abcd99yyyzzz85a5",
            BODY,
            {
                "X-Slack-Request-Timestamp": "1531420618",
                "X-Slack-Signature": "v0=a2114d57b48eac39b9ad189dd8316235a7b4a8d21a10bd27519666489c69b503",
            },
            at=datetime(2018, 7, 12, 18, 37, tzinfo=UTC),
        ),
    ],
)
