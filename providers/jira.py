"""Jira Cloud by OAuth 2.0 (3LO): one site for one user's grant, which may cover several sites.

The old refresh token can be replayed for ten minutes; after that its use revokes the whole family. A dead grant is
a 403, and ``unauthorized_client`` may mean one. A 401 about the scope is no expired token. One issue takes few
writes at a time: that 429 concerns the issue, not the account; one for a burst concerns its endpoint and method. Times
of change count in minutes, in the user's time zone, and deletions are told by webhook only.
"""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING, Final, Unpack

from resilient import BudgetFields, Errors, FailureKind, Incremental, NextCursor, OAuth2, Offset, Provider
from resilient import Rotation, Rule, Scope, Signature, Wait, WaitDialect, Webhook, Word

if TYPE_CHECKING:
    from resilient import Overrides

JIRA: Final = Provider(
    name="jira",
    title="Jira Cloud",
    base_url="https://api.atlassian.com/ex/jira/{cloud_id}/rest/api/3",
    whoami="GET https://api.atlassian.com/oauth/token/accessible-resources",
    auth=(
        OAuth2(
            authorize_url="https://auth.atlassian.com/authorize",
            token_url="https://auth.atlassian.com/oauth/token",
            authorize_params={"audience": "api.atlassian.com", "prompt": "consent"},
            offline_scopes=("offline_access",),
            body="json",
            lifetime=3600,
            rotation=Rotation.GRACE,
            grace=600,
            refresh_lifetime=90 * 86400,
            shared=True,
            errors=Errors(code=("error",), rules=(Rule(FailureKind.AUTH, status=403, code="unauthorized_client"),)),
        ),
    ),
    reads=("POST */rest/api/3/search/jql",),
    waits=WaitDialect(
        budgets=(
            BudgetFields(
                "points",
                limit="x-ratelimit-limit",
                remaining="x-ratelimit-remaining",
                reset="x-ratelimit-reset",
                word=Word.ISO8601,
            ),
        )
    ),
    errors=Errors(
        message=("errorMessages[0]", "message"),
        rules=(
            Rule(FailureKind.CONFLICT, status=429, header={"ratelimit-reason": "per-issue"}),
            Rule(FailureKind.THROTTLED, status=429, header={"ratelimit-reason": "burst"}, scope=Scope.ENDPOINT),
            Rule(
                FailureKind.QUOTA,
                status=429,
                header={"ratelimit-reason": "quota"},
                wait=Wait(header="x-ratelimit-reset", word=Word.ISO8601),
            ),
            Rule(FailureKind.PERMANENT, status=401, text="scope does not match"),
        ),
    ),
    pagination={
        "search": NextCursor(
            items="issues", cursor="nextPageToken", query="nextPageToken", size="maxResults", most=100
        ),
        "list": Offset(items="values", query="startAt", total="total", size="maxResults", most=50),
    },
    incremental={
        "search": Incremental(
            style="filter",
            query="jql",
            form='updated >= "{cursor}"',
            field="fields.updated",
            precision=60,
            deletions="webhook",
        )
    },
    webhook=Webhook(
        signatures=(Signature(header="x-hub-signature", pattern="sha256=([0-9a-f]+)"),),
        delivery="x-atlassian-webhook-identifier",
        event="body:webhookEvent",
        life=30 * 86400,
    ),
    verified_on=date(2026, 11, 1),
    sources=(
        "developer.atlassian.com/cloud/jira/platform/rate-limiting, /oauth-2-3lo-apps",
        "developer.atlassian.com/cloud/jira/platform/build-an-app-that-respects-rate-limits (of 2026-10-20)",
        "developer.atlassian.com/cloud/oauth/getting-started/making-calls-to-api (whoami)",
        "MrRefactoring/jira.js src/core/oauth, src/core/errors/oauthError.ts",
        "MrRefactoring/jira.js src/webhooks/headers.ts (a delivery's id stays the same over its attempts)",
        "the REST API's description of refreshWebhooks (thirty days), by way of pub.dev atlassian_apis WebhooksApi",
        "airbytehq/airbyte airbyte-integrations/connectors/source-jira",
    ),
    unverified=(
        "auth: pkce, the client's authentication",
        "limits: hourly points by the tenant's tier, told in the answers only",
        "pagination: sizes, and startAt elsewhere than in search",
        "webhook: the signature",
        "idempotency: none",
    ),
)


def provider(client_id: str = "", client_secret: str = "", **overrides: Unpack[Overrides]) -> Provider:
    """Jira's facts for one app; ``{cloud_id}`` belongs to each connection."""
    return JIRA.configured(client_id, client_secret, **overrides)
