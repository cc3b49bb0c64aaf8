"""Shopify Admin API: one shop for one app.

GraphQL throttles as 200, counts points, and says in each answer what it cost. Expiring tokens (obligatory for
public apps from 2027-01-01) rotate; the old refresh token can be replayed until its successor is used. The token
goes into a header of Shopify's own. Deletions are told by webhook and events only.
"""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING, Any, Final, Unpack

from resilient import Bearer, BudgetFields, Errors, FailureKind, GraphQLPages, Incremental, Limit, LinkHeader, OAuth2
from resilient import Provider, Rotation, Rule, Scope, Signature, Wait, WaitDialect, Webhook, Word

if TYPE_CHECKING:
    from resilient import AnswerFacts, Overrides, RequestFacts


def route(request: RequestFacts) -> tuple[str, float]:
    """REST counts requests, GraphQL points: ten until the answer says how many."""
    return ("graphql", 10) if request.path.endswith("/graphql.json") else ("rest", 1)


def cost(answer: AnswerFacts) -> float | None:
    """The points a GraphQL query really cost."""
    points = _cost_of(answer.body).get("actualQueryCost")
    return float(points) if isinstance(points, (int, float)) else None


def _cost_of(body: Any) -> dict[str, Any]:
    cost = (body.get("extensions") or {}).get("cost") if isinstance(body, dict) else None
    return cost if isinstance(cost, dict) else {}


def _until_enough(body: Any) -> float:
    """Seconds until the bucket holds what the refused query asks for."""
    query_cost = _cost_of(body)
    status = query_cost["throttleStatus"]
    lacking: float = (query_cost["requestedQueryCost"] - status["currentlyAvailable"]) / status["restoreRate"]
    return lacking


SHOPIFY: Final = Provider(
    name="shopify",
    title="Shopify",
    base_url="https://{shop}.myshopify.com/admin/api/{version}",
    whoami="{ shop { id } }",
    hosts=("*.myshopify.com",),
    graphql="/graphql.json",
    auth=(
        OAuth2(
            authorize_url="https://{shop}.myshopify.com/admin/oauth/authorize",
            token_url="https://{shop}.myshopify.com/admin/oauth/access_token",
            scope_separator=",",
            token_params={"expiring": "1"},
            sends=Bearer(header="X-Shopify-Access-Token", prefix=""),
            rotation=Rotation.GRACE,  # until the new one is used, 30 days at most
            refresh_lifetime=90 * 86400,
            refresh_lifetime_field="refresh_token_expires_in",
        ),
        Bearer(header="X-Shopify-Access-Token", prefix=""),
    ),
    limits={
        "account/rest": [Limit(2, per="1s", burst=40, name="rest")],
        "account/graphql": [Limit(100, per="1s", burst=1000, name="points")],
    },
    route=route,
    cost=cost,
    waits=WaitDialect(
        retry_after=Word.DELTA_S_FLOAT, budgets=(BudgetFields("rest", used="x-shopify-shop-api-call-limit"),)
    ),
    errors=Errors(
        code=("errors[].extensions.code",),
        message=("errors[0].message", "errors", "error_description"),
        rules=(
            Rule(
                FailureKind.THROTTLED,
                status=200,
                code="THROTTLED",
                scope=Scope.ENDPOINT,
                wait=Wait(seconds=_until_enough, fallback=1),
            ),
            Rule(FailureKind.THROTTLED, status=430, wait=Wait(fallback=60)),  # a security rejection
            Rule(FailureKind.PERMANENT, status=423),  # the shop is locked
        ),
    ),
    pagination={"rest": LinkHeader(items="products", size="limit", most=250), "graphql": GraphQLPages()},
    incremental={
        "rest": Incremental(style="filter", query="updated_at_min", field="updated_at", deletions="webhook"),
        "graphql": Incremental(
            style="filter",
            body="variables.query",
            form="updated_at:>='{cursor}'",
            field="updatedAt",
            deletions="webhook",
        ),
    },
    webhook=Webhook(
        signatures=(Signature(header="x-shopify-hmac-sha256", encoding="base64"),),
        delivery="x-shopify-event-id",
        event="x-shopify-topic",
    ),
    verified_on=date(2026, 11, 22),
    sources=(
        "shopify.dev docs api usage limits; apps/build/webhooks/ignore-duplicates, in stored copies of 2025-2026",
        "shopify.dev docs offline access tokens and changelog 2025-2026",
        "Shopify/shopify-app-js lib/auth/oauth/refresh-token.ts",
        "Shopify/shopify-api-ruby lib/shopify_api/utils/hmac_validator.rb, lib/shopify_api/webhooks/registry.rb",
    ),
    unverified=(
        "whoami",
        "auth: scope_separator, pkce",
        "errors.rules: 430 and 423",
        "idempotency: some mutations take an idempotencyKey as an argument",
        "incremental",
        "limits: the bucket of GraphQL points, of which the plan's rate is known",
    ),
)


def provider(
    client_id: str = "", client_secret: str = "", *, version: str = "2026-07", **overrides: Unpack[Overrides]
) -> Provider:
    """Shopify's facts for one app and version of the API; ``{shop}`` belongs to each connection."""
    return SHOPIFY.configured(client_id, client_secret, **overrides).filled(version=version)
