"""Linear (GraphQL): one workspace for one user or app.

A throttle is a 400 whose code says so, and resets are in milliseconds; another 400 is a wrong query and must not be
repeated. Requests and complexity are separate budgets. The same refresh within 30 minutes gives the same answer.
"""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING, Final, Unpack

from resilient import Bearer, BudgetFields, Errors, FailureKind, GraphQLPages, Incremental, Limit, OAuth2
from resilient import Provider, Rotation, Rule, Signature, WaitDialect, Webhook, Word

if TYPE_CHECKING:
    from resilient import Overrides

_ANY: Final = (200, 400, 401, 403, 500)  # errors stand in the body, whatever the status


def _fields(name: str) -> BudgetFields:
    stem = f"x-ratelimit-{name}"
    return BudgetFields(
        name, limit=f"{stem}-limit", remaining=f"{stem}-remaining", reset=f"{stem}-reset", word=Word.EPOCH_MS
    )


LINEAR: Final = Provider(
    name="linear",
    title="Linear",
    base_url="https://api.linear.app",
    whoami="{ viewer { id } }",
    auth=(
        OAuth2(
            authorize_url="https://linear.app/oauth/authorize",
            token_url="https://api.linear.app/oauth/token",
            scope_separator=",",
            pkce="supported",
            rotation=Rotation.GRACE,
            grace=1800,
        ),
        Bearer(prefix=""),
    ),
    limits={"account": [Limit(2500, per="1h", name="requests")]},  # of an API key; an OAuth app has 5,000
    waits=WaitDialect(budgets=(_fields("requests"), _fields("complexity"))),
    errors=Errors(
        code=("errors[].extensions.code", "errors[].extensions.type"),
        message=("errors[0].extensions.userPresentableMessage", "errors[0].message"),
        rules=(
            Rule(FailureKind.THROTTLED, status=(*_ANY, 429), code=("RATELIMITED", "ratelimited")),
            Rule(FailureKind.AUTH, status=_ANY, code="authentication error"),
            Rule(FailureKind.CONFLICT, status=_ANY, code="lock timeout"),
            Rule(FailureKind.TRANSIENT, status=_ANY, code=("internal error", "network error"), provider_wide=True),
            Rule(
                FailureKind.PERMANENT,
                status=_ANY,
                code=(
                    "forbidden",
                    "feature not accessible",
                    "usage limit exceeded",
                    "invalid input",
                    "user error",
                    "graphql error",
                ),
            ),
        ),
    ),
    pagination={"list": GraphQLPages()},
    incremental={
        "updated": Incremental(
            style="filter",
            body="variables.filter.updatedAt.gte",
            field="updatedAt",
            deletions="marked",
            deleted="archivedAt",
        )
    },
    webhook=Webhook(
        signatures=(Signature(header="linear-signature", timestamp="body:webhookTimestamp", word=Word.EPOCH_MS),),
        delivery="linear-delivery",
        varies=("webhookTimestamp",),
        event="linear-event",
        answer_within=5,
    ),
    verified_on=date(2026, 11, 1),
    sources=(
        "linear.app/developers/rate-limiting, as others noted it on 2026-09-27",
        "linear.app/developers/webhooks, in copies of 2026 (headers, five seconds for an answer)",
        "linear/linear packages/sdk/src/error.ts, packages/sdk/src/webhooks/client.ts",
        "airbytehq/airbyte airbyte-integrations/connectors/source-linear",
    ),
    unverified=(
        "whoami",
        "limits: what the page itself says today; the headers say",
        "limits: lower ones of single queries, told in x-ratelimit-endpoint-requests-*, are not read",
        "idempotency: a client-made id is accepted on creation",
        "auth: how long an access token lasts",
        "webhook: the tolerated age; that an attempt keeps the delivery's id",
    ),
)


def provider(client_id: str = "", client_secret: str = "", **overrides: Unpack[Overrides]) -> Provider:
    """Linear's facts for one app."""
    return LINEAR.configured(client_id, client_secret, **overrides)
