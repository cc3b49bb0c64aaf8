"""Intercom: one workspace for one app, in one of three regions.

Tokens do not expire and there is nothing to refresh: a refused one is dead. Only one scroll may be open in a
workspace; a second one is a 400 that passes. The minute's limit is granted in steps of ten seconds.
"""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING, Final, Literal, Unpack

from resilient import Bearer, BudgetFields, Errors, FailureKind, Incremental, Limit, NextCursor, OAuth2
from resilient import Provider, Rule, Signature, Wait, WaitDialect, Webhook, Word

if TYPE_CHECKING:
    from resilient import Overrides

_REGIONS: Final = {
    "us": "https://api.intercom.io",
    "eu": "https://api.eu.intercom.io",
    "au": "https://api.au.intercom.io",
}

INTERCOM: Final = Provider(
    name="intercom",
    title="Intercom",
    base_url=_REGIONS["us"],
    whoami="GET /me",
    headers={"Intercom-Version": "2.11", "Accept": "application/json"},
    auth=(
        OAuth2(
            authorize_url="https://app.intercom.com/oauth",
            token_url="https://api.intercom.io/auth/eagle/token",
            refreshes=False,
        ),
        Bearer(),
    ),
    limits={"account": [Limit(1666, per="10s", name="app")]},  # 10,000 a minute in steps
    reads=("POST /contacts/search", "POST /conversations/search", "POST /companies/list"),
    waits=WaitDialect(
        budgets=(
            BudgetFields(
                "app",
                limit="x-ratelimit-limit",
                remaining="x-ratelimit-remaining",
                reset="x-ratelimit-reset",
                word=Word.EPOCH_S,
            ),
        )
    ),
    errors=Errors(
        code=("errors[0].code",),
        message=("errors[0].message",),
        rules=(Rule(FailureKind.CONFLICT, status=400, code="scroll_exists", wait=Wait(fallback=60)),),
    ),
    pagination={
        "list": NextCursor(
            items="data", cursor="pages.next.starting_after", query="starting_after", size="per_page", most=150
        ),
        "search": NextCursor(
            items="data",
            cursor="pages.next.starting_after",
            body="pagination.starting_after",
            size="pagination.per_page",
            most=150,
        ),
        "scroll": NextCursor(items="data", cursor="scroll_param", query="scroll_param"),
    },
    incremental={"search": Incremental(style="filter", body="query", field="updated_at", precision=86400)},
    webhook=Webhook(
        signatures=(Signature(header="x-hub-signature", scheme="hmac-sha1", pattern="sha1=([0-9a-f]+)"),),
        delivery="body:id",
        event="body:topic",
    ),
    verified_on=date(2026, 11, 1),
    sources=(
        "developers.intercom.com docs/references/rest-api/errors/rate-limiting; intercom/Intercom-OpenAPI descriptions",
        "automatelab.tech saas-webhooks/intercom (a notification has an id and counts its attempts)",
        "hookdeck/webhook-skills pull 46",
        "airbytehq/airbyte airbyte-integrations/connectors/source-intercom",
    ),
    unverified=(
        "whoami",
        "auth: pkce, that tokens do not expire",
        "headers: how long 2.11 is served; there are later versions, up to 2.17",
        "limits: 25,000 a minute for all apps of a workspace are not counted",
        "pagination: sizes, and starting_after outside of search",
        "webhook: that a notification keeps its id over its attempts, by its shape; how long it waits for an answer",
        "idempotency: none",
    ),
)


def provider(
    client_id: str = "",
    client_secret: str = "",
    *,
    region: Literal["us", "eu", "au"] = "us",
    **overrides: Unpack[Overrides],
) -> Provider:
    """Intercom's facts for one app and region; ``base_url`` goes before the region's."""
    overrides.setdefault("base_url", _REGIONS[region])
    return INTERCOM.configured(client_id, client_secret, **overrides)
