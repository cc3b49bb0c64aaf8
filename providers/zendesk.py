"""Zendesk Support: one account, at its own subdomain.

A refresh deletes the previous tokens; since 2026 tokens expire. The incremental export has a limit of its own, and
its order is by ``generated_timestamp``, which may differ from ``updated_at``. One ticket that is refused must not
stop a stream.
"""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING, Final, Unpack

from resilient import Basic, BudgetFields, Errors, FailureKind, Idempotency, Incremental, Limit, NextCursor, NextUrl
from resilient import OAuth2, Provider, Rotation, Rule, Scope, Signature, WaitDialect, Webhook, Word

if TYPE_CHECKING:
    from resilient import Overrides, RequestFacts


def route(request: RequestFacts) -> tuple[str, float]:
    """The incremental export has a limit of its own."""
    return ("incremental", 1) if "/incremental/" in request.path else ("", 1)


ZENDESK: Final = Provider(
    name="zendesk",
    title="Zendesk Support",
    base_url="https://{subdomain}.zendesk.com/api/v2",
    whoami="GET /users/me.json",
    hosts=("*.zendesk.com",),
    auth=(
        OAuth2(
            authorize_url="https://{subdomain}.zendesk.com/oauth/authorizations/new",
            token_url="https://{subdomain}.zendesk.com/oauth/tokens",
            pkce="supported",
            rotation=Rotation.SINGLE_USE,
        ),
        Basic(user="e-mail address and /token", password="API token"),
    ),
    limits={
        "account": [Limit(200, per="1m", name="account")],  # the smallest plan
        "account/incremental": [Limit(10, per="1m", name="incremental")],
    },
    route=route,
    waits=WaitDialect(
        budgets=(
            BudgetFields(
                "account",
                limit="ratelimit-limit",
                remaining="ratelimit-remaining",
                reset="ratelimit-reset",
                word=Word.DELTA_S,
            ),
            BudgetFields("account", limit="x-rate-limit", remaining="x-rate-limit-remaining"),
            BudgetFields("incremental", combined="zendesk-ratelimit-incremental-exports", word=Word.DELTA_S),
        )
    ),
    errors=Errors(
        code=("error", "error.title"),
        message=("description", "error.message"),
        rules=(Rule(FailureKind.THROTTLED, status=429, path="*/incremental/*", scope=Scope.ENDPOINT),),
    ),
    idempotency=Idempotency(paths=("/api/v2/tickets", "/api/v2/tickets.json"), life=7200),
    pagination={
        "list": NextUrl(items="tickets", url="links.next", more="meta.has_more", size="page[size]", most=100),
        "export": NextCursor(
            items="tickets", cursor="after_cursor", query="cursor", done="end_of_stream", resume="after_cursor"
        ),
    },
    incremental={
        "export": Incremental(
            style="token",
            query="cursor",
            cursor="after_cursor",
            source="every_page",
            deletions="marked",
            deleted="status=deleted",
        )
    },
    webhook=Webhook(
        signatures=(
            Signature(
                header="x-zendesk-webhook-signature",
                signed="{timestamp}{body}",
                encoding="base64",
                timestamp="x-zendesk-webhook-signature-timestamp",
                word=Word.ISO8601,
            ),
        ),
        delivery="x-zendesk-webhook-invocation-id",
        ping=True,  # the customer writes the body, so two changes may send the same
    ),
    verified_on=date(2026, 11, 22),
    sources=(
        "developer.zendesk.com api-reference/introduction/rate-limits, documentation/webhooks/verifying",
        "developer.zendesk.com/documentation/webhooks/anatomy-of-a-webhook-request",
        "developer.zendesk.com/api-reference/ticketing/oauth/grant_type_tokens (PKCE)",
        "support.zendesk.com/hc/en-us/articles/9182123625370 (tokens expire, a refresh deletes the previous ones)",
        "support.zendesk.com/hc/en-us/articles/4408831387930 (invalid_grant)",
        "zendesk/zendesk_api_client_rb lib/zendesk_api/middleware/request/retry.rb",
        "eesel.ai blog on Zendesk idempotency keys (secondary)",
    ),
    unverified=(
        "whoami",
        "auth: scope_separator",
        "errors: code and message",
        "idempotency: read in a secondary source",
        "limits: that of the incremental export, read in others' copies of the page",
        "waits: the name of the incremental export's header, seen in others' code only",
        "webhook: that an invocation keeps its id over its attempts",
    ),
)


def provider(client_id: str = "", client_secret: str = "", **overrides: Unpack[Overrides]) -> Provider:
    """Zendesk's facts for one OAuth client; ``{subdomain}`` belongs to each connection."""
    return ZENDESK.configured(client_id, client_secret, **overrides)
