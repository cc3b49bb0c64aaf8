"""Microsoft Graph, with grants of Entra ID.

Requests that are refused count against the limits too. Retry-After is usually sent, but not by every service
behind Graph. A delta link may be stored only after the last page; an old one is answered by 410.
"""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING, Final, Unpack

from resilient import AnswerFacts, BatchEndpoint, Errors, FailureKind, Incremental, Limit, NextUrl, OAuth2
from resilient import Provider, RequestFacts, Rotation, Rule, WaitDialect, Webhook, Word

if TYPE_CHECKING:
    from resilient import Overrides

_MAILBOX: Final = frozenset({"messages", "mailFolders", "events", "calendar", "calendars", "calendarView", "contacts"})
_DIRECTORY: Final = frozenset({"users", "groups", "directoryObjects", "applications", "servicePrincipals"})


def route(request: RequestFacts) -> tuple[str, float]:
    """Outlook, OneNote and the directory have limits of their own."""
    parts = [part for part in request.path.split("/") if part][1:]  # without the version
    if "onenote" in parts:
        return "onenote", 1
    if _MAILBOX.intersection(parts):
        return "outlook", 1
    return ("directory", 1) if parts and parts[0] in _DIRECTORY else ("", 1)


def cost(answer: AnswerFacts) -> float | None:
    """The directory says what a request cost in resource units."""
    units = answer.headers.get("x-ms-resource-unit", "")
    return float(units) if units.isascii() and units.isdigit() else None


GRAPH: Final = Provider(
    name="microsoft_graph",
    title="Microsoft Graph",
    base_url="https://graph.microsoft.com/v1.0",
    whoami="GET /me",
    auth=(
        OAuth2(
            authorize_url="https://login.microsoftonline.com/{tenant}/oauth2/v2.0/authorize",
            token_url="https://login.microsoftonline.com/{tenant}/oauth2/v2.0/token",
            flows=("authorization_code", "client_credentials"),
            offline_scopes=("offline_access",),
            pkce="supported",
            lifetime=3600,
            early_field="refresh_in",
            rotation=Rotation.OLD_KEPT,
            refresh_lifetime=90 * 86400,
            errors=Errors(code=("error", "suberror"), rules=(Rule(FailureKind.AUTH, code="interaction_required"),)),
        ),
    ),
    limits={
        "provider": [Limit(130_000, per="10s", name="app")],
        "account/outlook": [Limit(10_000, per="10m", name="outlook")],
        "account/onenote": [Limit(120, per="1m", name="minute"), Limit(400, per="1h", name="hour")],
        "account/directory": [Limit(3500, per="10s", name="resource-units")],  # of the smallest tenants
    },
    concurrency={"account": 4},  # requests to one mailbox at once
    route=route,
    cost=cost,
    waits=WaitDialect(retry_after=Word.DELTA_S_FLOAT),  # parts of a $batch answer say 0.249
    errors=Errors(
        code=("error.code", "error.innerError.code", "error.innererror.code"),
        rules=(
            Rule(FailureKind.RESET_CURSOR, code=("resyncRequired", "syncStateNotFound", "SyncStateInvalid")),
            Rule(FailureKind.RESET_CURSOR, status=410),
        ),
    ),
    pagination={
        "list": NextUrl(items="value", url="['@odata.nextLink']", resume="['@odata.deltaLink']", size="$top", most=100)
    },
    incremental={
        "delta": Incremental(
            style="link",
            cursor="['@odata.deltaLink']",
            source="last_page",
            deletions="marked",
            deleted="['@removed']",
            life=7 * 86400,
        )
    },
    webhook=Webhook(
        token="item:clientState",
        events="value",
        challenge="echo",
        challenge_field="query:validationToken",
        ping=True,
        answer_within=10,
    ),
    batch=BatchEndpoint(path="/$batch", most=20),
    verified_on=date(2026, 11, 22),
    sources=(
        "learn.microsoft.com/graph/json-batching",
        "learn.microsoft.com/entra/identity-platform/refresh-tokens",
        "learn.microsoft.com/graph/throttling-limits (130,000 in 10 seconds; older copies have 2,000 a second)",
        "learn.microsoft.com/graph/change-notifications-delivery-webhooks",
        "microsoftgraph/microsoft-graph-docs-contrib concepts/throttling.md, concepts/throttling-limits.md",
        "microsoftgraph/microsoft-graph-docs-contrib concepts/delta-query-overview.md",
        "learn.microsoft.com/graph/change-notifications-lifecycle-events",
        "AzureAD/microsoft-authentication-library-for-python msal/application.py",
    ),
    unverified=(
        "whoami",
        "auth: pkce, lifetime, interaction_required outside invalid_grant",
        "pagination: the largest $top, which differs by resource",
        "limits: of the directory today (read in an older copy), of Outlook (third parties), of OneNote",
        "webhook: that two alike may mean two changes",
        "idempotency: none in general; events take a transactionId",
    ),
)


def provider(
    client_id: str = "", client_secret: str = "", *, tenant: str = "common", **overrides: Unpack[Overrides]
) -> Provider:
    """Graph for one application; ``tenant``: whose accounts may sign in (an id, or ``organizations``)."""
    return GRAPH.configured(client_id, client_secret, **overrides).filled(tenant=tenant)
