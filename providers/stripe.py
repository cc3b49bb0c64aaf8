"""Stripe: one connected account each, by the platform's key and ``Stripe-Account``, or by OAuth.

429 with ``lock_timeout`` is a busy object, no throttle. Where Stripe says ``Stripe-Should-Retry``, that overrules
the status. Version 1 saves the first answer of a key even if it is a 500: a repeat with the same key only gets the
saved one, so what happened has to be read back; after 24 hours a key is forgotten, and a repeat acts again.
"""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING, Final, Unpack

from resilient import Bearer, Errors, FailureKind, Idempotency, Incremental, LastKey, Limit
from resilient import NextCursor, OAuth2, Provider, Rule, Scope, Signature, Webhook

if TYPE_CHECKING:
    from resilient import Overrides, RequestFacts

_MADE_UP: Final = r"(?:stripe-python-retry-)?[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"  # by Stripe's own SDKs


def route(request: RequestFacts) -> tuple[str, float]:
    """Each endpoint has a limit; files one for reading and one for writing."""
    parts = request.path.strip("/").split("/")
    if parts[-1] == "search":
        return "search", 1
    if "files" in parts[:2]:
        return ("files-read" if request.method == "GET" else "files-write"), 1
    return (parts[1], 1) if len(parts) > 1 and parts[1].replace("_", "").isalnum() else ("", 1)


STRIPE: Final = Provider(
    name="stripe",
    title="Stripe",
    base_url="https://api.stripe.com",
    whoami="GET /v1/account",
    hosts=("files.stripe.com",),
    headers={"Stripe-Account": "{account}"},
    auth=(
        Bearer(),
        OAuth2(
            authorize_url="https://connect.stripe.com/oauth/authorize",
            token_url="https://connect.stripe.com/oauth/token",
            refreshes=False,  # of Connect; Stripe Apps have their own addresses and rotate
            keep=("stripe_user_id",),
        ),
    ),
    limits={
        "account": [Limit(100, per="1s", name="live")],  # a sandbox has 25
        "account/*": [Limit(25, per="1s", name="endpoint")],
        "account/search": [Limit(20, per="1s", name="search")],
        "account/files-read": [Limit(20, per="1s", name="files")],
        "account/files-write": [Limit(20, per="1s", name="files")],
    },
    route=route,
    errors=Errors(
        code=("error.code", "error.type"),
        rules=(
            Rule(FailureKind.CONFLICT, status=429, code="lock_timeout"),
            Rule(
                FailureKind.THROTTLED,
                status=429,
                header={"stripe-rate-limited-reason": "^(endpoint|resource)"},
                scope=Scope.ENDPOINT,
            ),
            Rule(FailureKind.THROTTLED, status=429),
            Rule(FailureKind.AUTH, status=403, code="account_invalid"),
            Rule(FailureKind.TRANSIENT, header={"stripe-should-retry": "^true$"}),
            Rule(FailureKind.PERMANENT, status=range(500, 600), header={"stripe-should-retry": "^false$"}),
        ),
    ),
    idempotency=Idempotency(paths=("/v1/*", "/v2/*"), life=86400, made_up=_MADE_UP),
    pagination={
        "list": LastKey(items="data", key="id", query="starting_after", more="has_more", size="limit", most=100),
        "search": NextCursor(items="data", cursor="next_page", query="page", more="has_more", size="limit", most=100),
    },
    incremental={
        "created": Incremental(style="filter", query="created[gte]", field="created", deletions="separate"),
        "events": Incremental(
            style="filter",
            query="created[gte]",
            field="created",
            deletions="marked",
            deleted="type=*.deleted",
            deleted_key="data.object.id",
            life=30 * 86400,
        ),
    },
    webhook=Webhook(
        signatures=(
            Signature(
                header="stripe-signature",
                pattern="v1=([0-9a-f]+)",
                signed="{timestamp}.{body}",
                timestamp="stripe-signature",
                timestamp_pattern="t=([0-9]+)",
            ),
        ),
        delivery="body:id",
        event="body:type",
    ),
    verified_on=date(2026, 11, 22),
    sources=(
        "docs.stripe.com/rate-limits, and a whole copy: alecpos/contexts docs/stripe/api/rate-limits.md",
        "docs.stripe.com/api/idempotent_requests",
        "stripe/stripe-python stripe/_http_client.py, stripe/_webhook.py",
    ),
    unverified=(
        "whoami",
        "auth: scope_separator, the client's authentication, that tokens of Connect do not expire",
        "errors.rules: account_invalid",
        "idempotency: made_up",
        "incremental: where an event names what was deleted",
    ),
)


def provider(client_id: str = "", client_secret: str = "", **overrides: Unpack[Overrides]) -> Provider:
    """Stripe's facts; a client's id and secret are needed for OAuth only."""
    return STRIPE.configured(client_id, client_secret, **overrides)
