"""Zoom: one account's or user's grant. Limits are shared by all apps of the account, by category of endpoint.

A spent daily limit puts a date-time into Retry-After. "Too many concurrent requests" means a busy object, not a spent
limit. A new authorisation revokes the tokens before it (4741). A ``next_page_token`` lives 15 minutes. The limits come
from other sources than Zoom's own pages.
"""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING, Final, Unpack

from resilient import Errors, FailureKind, Incremental, Limit, NextCursor, OAuth2, Provider
from resilient import Rotation, Rule, Signature, Wait, WaitDialect, Webhook, Word

if TYPE_CHECKING:
    from resilient import Overrides, RequestFacts

_HEAVY: Final = frozenset({"report", "dashboard", "metrics"})


def route(request: RequestFacts) -> tuple[str, float]:
    """Reports and dashboards are heavy; the rest counts as medium."""
    parts = request.path.strip("/").split("/")
    return ("heavy", 1) if _HEAVY.intersection(parts[1:3]) else ("", 1)


ZOOM: Final = Provider(
    name="zoom",
    title="Zoom",
    base_url="https://api.zoom.us/v2",
    whoami="GET /users/me",
    auth=(
        OAuth2(
            authorize_url="https://zoom.us/oauth/authorize",
            token_url="https://zoom.us/oauth/token",
            client_auth="basic",
            pkce="supported",
            lifetime=3600,
            rotation=Rotation.SINGLE_USE,
            refresh_lifetime=90 * 86400,
            errors=Errors(code=("error", "code"), rules=(Rule(FailureKind.AUTH, code="4741"),)),
        ),
    ),
    limits={
        # Of Free accounts; Pro has 20 a second, and for heavy ones 10 a second and 30,000 a day.
        "account": [Limit(2, per="1s", name="medium"), Limit(2000, per="1d", name="medium-daily")],
        "account/heavy": [Limit(1, per="1s", name="heavy"), Limit(1000, per="1d", name="daily")],
    },
    route=route,
    waits=WaitDialect(retry_after=Word.AUTO),
    errors=Errors(
        code=("code",),
        rules=(
            Rule(FailureKind.QUOTA, status=429, header={"x-ratelimit-type": "(?i)daily"}, wait=Wait(period="day")),
            Rule(FailureKind.CONFLICT, status=429, text="(?i)concurrent requests"),
            Rule(
                FailureKind.THROTTLED, status=429, wait=Wait(header="x-ratelimit-reset", word=Word.EPOCH_S, fallback=1)
            ),
            Rule(FailureKind.AUTH, code=("124", "4741")),
            Rule(FailureKind.PERMANENT, code="4711"),  # a missing scope, whatever the status
        ),
    ),
    pagination={
        "list": NextCursor(
            items="meetings", cursor="next_page_token", query="next_page_token", size="page_size", most=300
        )
    },
    incremental={"window": Incremental(style="filter", query="from", field="start_time", precision=86400)},
    webhook=Webhook(
        signatures=(
            Signature(
                header="x-zm-signature",
                pattern="v0=([0-9a-f]+)",
                signed="v0:{timestamp}:{body}",
                timestamp="x-zm-request-timestamp",
            ),
        ),
        event="body:event",
        challenge="hmac",
        challenge_field="body:payload.plainToken",
    ),
    verified_on=date(2026, 11, 22),
    sources=(
        "developers.zoom.us docs/commerce/rate-limits, in a stored copy of 2026, without its tables",
        "developers.zoom.us, by way of anthropics/knowledge-work-plugins partner-built/zoom-plugin rate-limits.md",
        "the same plugin's token-lifecycle.md (Zoom's partner text)",
    ),
    unverified=(
        "whoami",
        "errors.rules: 124, 4711",
        "limits: which endpoints are heavy",
        "pagination",
        "incremental",
        "webhook: the tolerated age",
        "idempotency: none",
    ),
)


def provider(client_id: str = "", client_secret: str = "", **overrides: Unpack[Overrides]) -> Provider:
    """Zoom's facts for one app."""
    return ZOOM.configured(client_id, client_secret, **overrides)
