"""Asana: one user's grant; limits are per token, and refused requests count too.

Retry-After is always sent. The cost of a request is charged afterwards and not published. The answer to a sync
token that is too old (412) carries a new one. A webhook is sent at most once, unless it is not answered: then again
for a day, and removed after it.
"""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING, Final, Unpack

from resilient import Bearer, Errors, FailureKind, Incremental, Limit, NextCursor
from resilient import OAuth2, Provider, Rule, Signature, Webhook

if TYPE_CHECKING:
    from resilient import Overrides, RequestFacts


def route(request: RequestFacts) -> tuple[str, float]:
    """Search has a limit of its own."""
    return ("search", 1) if request.path.endswith("/tasks/search") else ("", 1)


ASANA: Final = Provider(
    name="asana",
    title="Asana",
    base_url="https://app.asana.com/api/1.0",
    whoami="GET /users/me",
    auth=(
        OAuth2(
            authorize_url="https://app.asana.com/-/oauth_authorize",
            token_url="https://app.asana.com/-/oauth_token",
            pkce="supported",
            lifetime=3600,
        ),
        Bearer(),
    ),
    limits={
        "account": [Limit(150, per="1m", name="token")],  # of the free plan; paid ones have 1500
        "account/search": [Limit(60, per="1m", name="search")],
    },
    concurrency={"account": 15},  # writes in flight; 50 reads
    route=route,
    errors=Errors(
        code=("errors[0].error",), message=("errors[0].message",), rules=(Rule(FailureKind.RESET_CURSOR, status=412),)
    ),
    pagination={
        "list": NextCursor(items="data", cursor="next_page.offset", query="offset", size="limit", most=100),
        "events": NextCursor(items="data", cursor="sync", query="sync", more="has_more", resume="sync"),
    },
    incremental={
        "events": Incremental(
            style="token",
            query="sync",
            cursor="sync",
            source="every_page",
            deletions="marked",
            deleted="action=deleted",
            deleted_key="resource.gid",
            life=86400,
        ),
        "tasks": Incremental(style="filter", query="modified_since", field="modified_at"),
    },
    webhook=Webhook(
        signatures=(Signature(header="x-hook-signature"),),
        events="events",
        event="item:resource.resource_type item:action",
        challenge="echo",
        challenge_field="x-hook-secret",
        answer_within=10,
    ),
    verified_on=date(2026, 11, 22),
    sources=(
        "Asana/developer-docs source/includes/markdown/_rate-limits.html.md, _webhooks.html.md",
        "Asana/developer-docs defs/asana_oas.yaml",
        "developers.asana.com/docs/rate-limits, /docs/webhooks-guide, /docs/oauth",
    ),
    unverified=(
        "whoami",
        "auth: scope_separator, what a dead grant is told",
        "errors: 402 and 451",
        "idempotency: none",
        "incremental: action=deleted",
        "webhook: the event's name",
    ),
)


def provider(client_id: str = "", client_secret: str = "", **overrides: Unpack[Overrides]) -> Provider:
    """Asana's facts for one app."""
    return ASANA.configured(client_id, client_secret, **overrides)
