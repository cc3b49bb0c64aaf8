"""Mailchimp Marketing: one account, in its own data centre (``{dc}``, told by the metadata call).

Tokens do not expire (``expires_in`` is 0), and the metadata call answers 200 for a dead one. The limits are ten
connections at once and 500 open batches; no header tells of them. A 403 or 429 without JSON comes from the network in
front of it and passes; a 403 with JSON is a missing permission. A webhook's secret stands in its address.
"""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING, Final, Unpack

from resilient import Basic, Errors, FailureKind, Incremental, OAuth2, Offset, Provider, Rule, Webhook

if TYPE_CHECKING:
    from resilient import Overrides

MAILCHIMP: Final = Provider(
    name="mailchimp",
    title="Mailchimp",
    base_url="https://{dc}.api.mailchimp.com/3.0",
    whoami="GET /ping",
    hosts=("*.api.mailchimp.com", "login.mailchimp.com"),
    auth=(
        OAuth2(
            authorize_url="https://login.mailchimp.com/oauth2/authorize",
            token_url="https://login.mailchimp.com/oauth2/token",
            zero_lifetime="endless",
            refreshes=False,
        ),
        Basic(user="anything", password="API key"),
    ),
    concurrency={"account": 10},
    errors=Errors(
        code=("title", "error"),
        message=("detail", "errors[0].message"),
        rules=(
            Rule(FailureKind.THROTTLED, status=(403, 429), json=False),
            Rule(FailureKind.AUTH, status=200, where={"error": "invalid_token"}),
            Rule(FailureKind.CONFLICT, status=400, code="Member Exists"),
        ),
    ),
    pagination={"list": Offset(items="members", size="count", most=1000, total="total_items")},
    incremental={"members": Incremental(style="filter", query="since_last_changed", field="last_changed")},
    webhook=Webhook(token="query:secret", event="body:type"),
    verified_on=date(2026, 11, 1),
    sources=(
        "mailchimp.com/developer limits and errors, by way of api-evangelist/mailchimp (read again 2026-08-13)",
        "mailchimp.com/developer release notes of 2021-11-16 (500 open batches, then 429)",
        "requests/requests-oauthlib issue 509; docs.unified.to skills/mailchimp-oauth-app",
    ),
    unverified=(
        "whoami",
        "auth: pkce",
        "errors.rules: Member Exists",
        "webhook: the parameter is ours to choose; X-Mailchimp-Signature of newer webhooks is not described here",
        "webhook: no id of a delivery was found; hookdeck/webhook-skills knows no signature either",
        "idempotency: none; PUT /members/{md5 of the address} is an upsert",
    ),
)


def provider(client_id: str = "", client_secret: str = "", **overrides: Unpack[Overrides]) -> Provider:
    """Mailchimp's facts for one app; ``{dc}`` belongs to each connection."""
    return MAILCHIMP.configured(client_id, client_secret, **overrides)
