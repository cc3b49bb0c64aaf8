"""Slack Web API. A workspace's installation is an account.

Errors come as 200 with ``ok: false``. Limits are per method, workspace and app, in four tiers, so each method is
an endpoint of its own; a channel takes about one message a second. ``fatal_error`` may have done part of the
work. History and replies are 1 request a minute for apps outside the marketplace made after 2025-05-29; for internal
ones and those in it they are tier 3: declare it with ``limits=``.
"""

from __future__ import annotations

import re
from datetime import date
from typing import TYPE_CHECKING, Final, Unpack

from resilient import Bearer, Errors, FailureKind, Incremental, Limit, NextCursor, OAuth2
from resilient import Provider, Rotation, Rule, Scope, Signature, Webhook

if TYPE_CHECKING:
    from resilient import Overrides, RequestFacts

_TIER_2, _TIER_3, _TIER_4 = (Limit(n, per="1m", name="tier") for n in (20, 50, 100))
_DEAD: Final = (
    "token_expired",
    "invalid_auth",
    "not_authed",
    "account_inactive",
    "token_revoked",
    "org_login_required",
)


def route(request: RequestFacts) -> tuple[str, float]:
    """The method; for a message the channel too."""
    method = request.path.rpartition("/")[2]
    if not request.path.startswith("/api/") or "." not in method:
        return "", 1
    if method != "chat.postMessage":
        return method, 1
    channel = re.search(rb'(?:"channel"\s*:\s*"|(?:^|&)channel=)([A-Z0-9]+)', request.body or b"")
    return f"{method}:{channel[1].decode()}" if channel else method, 1


SLACK: Final = Provider(
    name="slack",
    title="Slack",
    base_url="https://slack.com/api",
    whoami="POST /auth.test",
    auth=(
        OAuth2(
            authorize_url="https://slack.com/oauth/v2/authorize",
            token_url="https://slack.com/api/oauth.v2.access",
            scope_separator=",",
            margin=7200,
            rotation=Rotation.SINGLE_USE,  # if the app has token rotation at all; then tokens last 12 hours
            success=("access_token", "authed_user.access_token"),
            keep=("team.id", "enterprise.id", "bot_user_id", "authed_user.id"),
            errors=Errors(
                code=("error",),
                rules=(
                    Rule(FailureKind.AUTH, code=("invalid_refresh_token", *_DEAD)),
                    Rule(FailureKind.AUTH, code=("invalid_client_id", "bad_client_secret"), scope=Scope.PROVIDER),
                    Rule(FailureKind.THROTTLED, code="ratelimited"),
                ),
            ),
        ),
        Bearer(),
    ),
    limits={
        "account/*": [_TIER_3],
        "account/chat.postMessage:*": [Limit(1, per="1s", name="channel")],
        "account/conversations.list": [_TIER_2],
        "account/conversations.history": [Limit(1, per="1m", name="tier")],
        "account/conversations.replies": [Limit(1, per="1m", name="tier")],
        "account/users.list": [_TIER_2],
        "account/users.info": [_TIER_4],
    },
    route=route,
    errors=Errors(
        code=("error",),
        message=("error", "response_metadata.messages[0]"),
        rules=(
            Rule(FailureKind.THROTTLED, status=(200, 429), code=("ratelimited", "rate_limited"), scope=Scope.ENDPOINT),
            Rule(FailureKind.THROTTLED, status=429, scope=Scope.ENDPOINT),
            Rule(FailureKind.AUTH, status=(200, 401), code=_DEAD),
            Rule(FailureKind.AMBIGUOUS, status=(200, 500), code=("fatal_error", "internal_error")),
            Rule(
                FailureKind.TRANSIENT,
                status=(200, 503),
                code=("service_unavailable", "request_timeout"),
                provider_wide=True,
            ),
            Rule(FailureKind.PERMANENT, status=200, where={"ok": False}),
        ),
    ),
    reads=("POST /api/*.list", "POST /api/*.info", "POST /api/*.history", "POST /api/*.replies", "POST /api/auth.test"),
    pagination={
        "list": NextCursor(
            items="channels", cursor="response_metadata.next_cursor", query="cursor", size="limit", most=200
        )
    },
    incremental={
        "history": Incremental(style="filter", query="oldest", field="ts", precision=0.000001, deletions="webhook")
    },
    webhook=Webhook(
        signatures=(
            Signature(
                header="x-slack-signature",
                pattern="v0=([0-9a-f]+)",
                signed="v0:{timestamp}:{body}",
                timestamp="x-slack-request-timestamp",
            ),
        ),
        delivery="body:event_id",
        event="body:event.type",
        challenge="echo",
        challenge_field="body:challenge",
        answer_within=3,
    ),
    verified_on=date(2026, 11, 22),
    sources=(
        "docs.slack.dev/apis/web-api/rate-limits",
        "docs.slack.dev/authentication/using-token-rotation",
        "slackapi/python-slack-sdk slack_sdk/signature, slack_sdk/oauth/token_rotation",
    ),
    unverified=(
        "whoami",
        "auth: pkce, the client's authentication, the codes of a refused client and of a dead refresh token",
        "errors.rules: a throttle as 200, token_revoked, org_login_required, service_unavailable, request_timeout",
        "limits: the tiers of methods not named in the documentation read",
        "pagination: the largest size",
        "webhook: event_id as the id of a delivery, three seconds to answer",
    ),
)


def provider(client_id: str = "", client_secret: str = "", **overrides: Unpack[Overrides]) -> Provider:
    """Slack's facts for one app."""
    return SLACK.configured(client_id, client_secret, **overrides)
