"""HubSpot: one portal for one app.

Which budget is spent stands in ``policyName``; Retry-After is not always sent. A dead grant is not called
``invalid_grant``. HubSpot asks to refresh by ``expires_in``, not on 401. A search gives 10,000 results at most, so
a long time span has to be cut. The token address of before (``/oauth/v1/token``) ends on 2027-02-16.
"""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING, Final, Unpack

from resilient import Bearer, BudgetFields, Errors, FailureKind, Incremental, Limit, NextCursor, OAuth2
from resilient import Provider, Rule, Scope, Signature, Wait, WaitDialect, Webhook, Word

if TYPE_CHECKING:
    from resilient import Overrides, RequestFacts


def route(request: RequestFacts) -> tuple[str, float]:
    """Search has a limit of its own."""
    return ("search", 1) if request.path.endswith("/search") else ("", 1)


HUBSPOT: Final = Provider(
    name="hubspot",
    title="HubSpot",
    base_url="https://api.hubapi.com",
    whoami="GET /account-info/v3/details",
    auth=(
        OAuth2(
            authorize_url="https://app.hubspot.com/oauth/authorize",
            token_url="https://api.hubapi.com/oauth/2026-03/token",
            lifetime=1800,
            errors=Errors(
                code=("error", "status", "subCategory"),
                rules=(
                    Rule(FailureKind.AUTH, code=("BAD_REFRESH_TOKEN", "INVALID_TOKEN")),
                    Rule(FailureKind.AUTH, code="BAD_CLIENT_*", scope=Scope.PROVIDER),
                ),
            ),
        ),
        Bearer(),
    ),
    limits={  # of Free and Starter portals; an app by OAuth has 110
        "account": [Limit(100, per="10s", name="ten-seconds"), Limit(250_000, per="1d", name="daily")],
        "account/search": [Limit(5, per="1s", name="search")],
    },
    route=route,
    reads=("POST */search", "POST */batch/read"),
    waits=WaitDialect(
        budgets=(
            BudgetFields(
                "ten-seconds",
                limit="x-hubspot-ratelimit-max",
                remaining="x-hubspot-ratelimit-remaining",
                reset="x-hubspot-ratelimit-interval-milliseconds",
                word=Word.DELTA_MS,
            ),
            BudgetFields("daily", limit="x-hubspot-ratelimit-daily", remaining="x-hubspot-ratelimit-daily-remaining"),
        )
    ),
    errors=Errors(
        code=("policyName", "subCategory", "category", "errorType"),
        rules=(
            Rule(FailureKind.QUOTA, status=429, code="DAILY", wait=Wait(period="day")),
            Rule(FailureKind.THROTTLED, status=429, code="TEN_SECONDLY_ROLLING", wait=Wait(fallback=10)),
            Rule(FailureKind.THROTTLED, status=429, code="SECONDLY", wait=Wait(fallback=1)),
            Rule(FailureKind.QUOTA, status=477),  # the portal is being moved
            Rule(FailureKind.AUTH, status=530),  # a malformed token
        ),
    ),
    pagination={
        "list": NextCursor(items="results", cursor="paging.next.after", query="after", size="limit", most=100),
        "search": NextCursor(items="results", cursor="paging.next.after", body="after", size="limit", most=100),
    },
    incremental={
        "search": Incremental(
            style="filter",
            body="filterGroups",
            field="properties.hs_lastmodifieddate",
            precision=1,
            deletions="separate",
        )
    },
    webhook=Webhook(
        signatures=(
            Signature(
                header="x-hubspot-signature-v3",
                encoding="base64",
                signed="{method}{url}{body}{timestamp}",
                timestamp="x-hubspot-request-timestamp",
                word=Word.EPOCH_MS,
            ),
        ),
        delivery="item:eventId item:subscriptionId item:objectId item:occurredAt",  # an eventId alone may come twice
        event="item:subscriptionType",
        events="",
        varies=("attemptNumber",),
    ),
    verified_on=date(2026, 11, 22),
    sources=(
        "developers.hubspot.com docs usage guidelines, OAuth tokens, changelog",
        "developers.hubspot.com changelog v1-oauth-api-deprecation, in a stored copy of 2026",
        "HubSpot/hubspot-api-nodejs src/services/decorators/RetryDecorator.ts",
        "HubSpot/hubspot-api-python hubspot/utils/signature.py",
    ),
    unverified=(
        "whoami",
        "auth: pkce, the code of a refused client",
        "errors.rules: 477, and that the day of a portal ends at midnight UTC rather than in its own time zone",
        "webhook: that a repeat of an event keeps these four fields",
        "idempotency: none; objects are upserted by a unique property",
    ),
)


def provider(client_id: str = "", client_secret: str = "", **overrides: Unpack[Overrides]) -> Provider:
    """HubSpot's facts for one app."""
    return HUBSPOT.configured(client_id, client_secret, **overrides)
