"""Airtable: one user's grant; the limit is per base, so each base is an endpoint of its own.

A 429 tells nothing and costs 30 seconds. A refresh token used twice revokes the integration for its user. The
place in a list (``offset``) expires. A month's calls are counted for each workspace: 1,000 on the free plan, which
blocks the rest of the month, 100,000 on Team, which is slower after them, any number on others; override
``limits`` there. A webhook is only a ping, signed with a key written in base64, and ends after
seven days unless renewed.
"""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING, Final, Unpack

from resilient import Bearer, Errors, FailureKind, Incremental, Limit, NextCursor, OAuth2
from resilient import Provider, Rotation, Rule, Scope, Signature, Wait, Webhook

if TYPE_CHECKING:
    from resilient import Overrides, RequestFacts


def route(request: RequestFacts) -> tuple[str, float]:
    """The base."""
    parts = request.path.strip("/").split("/")
    base = parts[1] if len(parts) > 1 else ""
    return (base, 1) if base.startswith("app") and base.isalnum() else ("", 1)


AIRTABLE: Final = Provider(
    name="airtable",
    title="Airtable",
    base_url="https://api.airtable.com/v0",
    whoami="GET /meta/whoami",
    auth=(
        OAuth2(
            authorize_url="https://airtable.com/oauth2/v1/authorize",
            token_url="https://airtable.com/oauth2/v1/token",
            client_auth="basic",
            pkce="required",
            lifetime=3600,
            rotation=Rotation.SINGLE_USE,
            refresh_lifetime=60 * 86400,
            refresh_lifetime_field="refresh_expires_in",
        ),
        Bearer(),
    ),
    limits={
        "account": [Limit(50, per="1s", name="user"), Limit(1000, per="31d", name="month")],  # a month: the free plan
        "account/app*": [Limit(5, per="1s", name="base")],
    },
    route=route,
    reads=("POST /v0/app*/*/listRecords",),
    errors=Errors(
        code=("error.type", "error", "errors[0].error"),
        message=("error.message", "errors[0].message"),
        rules=(
            Rule(FailureKind.QUOTA, status=429, code="PUBLIC_API_BILLING_LIMIT_EXCEEDED", wait=Wait(period="month")),
            Rule(FailureKind.THROTTLED, status=429, scope=Scope.ENDPOINT, wait=Wait(fallback=30)),
            Rule(FailureKind.RESET_CURSOR, status=422, code="LIST_RECORDS_ITERATOR_NOT_AVAILABLE"),
        ),
    ),
    pagination={"list": NextCursor(items="records", cursor="offset", query="offset", size="pageSize", most=100)},
    incremental={
        "formula": Incremental(
            style="filter",
            query="filterByFormula",
            form="LAST_MODIFIED_TIME() >= '{cursor}'",
            field="LAST_MODIFIED_TIME()",
            deletions="webhook",
        ),
        "payloads": Incremental(
            style="token",
            query="cursor",
            cursor="cursor",
            source="every_page",
            deletions="marked",
            deleted="changedTablesById.*.destroyedRecordIds",
            deleted_key="changedTablesById.*.destroyedRecordIds",
            life=7 * 86400,
        ),
    },
    webhook=Webhook(
        signatures=(Signature(header="x-airtable-content-mac", pattern="hmac-sha256=([0-9a-f]+)", key="base64"),),
        life=7 * 86400,
    ),
    verified_on=date(2026, 11, 1),
    sources=(
        "airtable.com/developers/web/api/oauth-reference, /rate-limits, webhooks overview",
        "Airtable/airtable.js src/base.ts; gtalarico/pyairtable pyairtable/api/retrying.py, models/webhook.py",
        "airbytehq/airbyte issue 25278",
        "support.airtable.com/articles/7735693959 (10 August 2026: months are counted on Free and Team only)",
        "limits: month: Airtable's notice of 2 December 2024 to its free plan, as codenote.net quotes it",
    ),
    unverified=(
        "whoami",
        "errors.rules: PUBLIC_API_BILLING_LIMIT_EXCEEDED, LIST_RECORDS_ITERATOR_NOT_AVAILABLE",
        "limits: user, told of personal access tokens; taken to be so for OAuth too",
        "limits: month, declared for an account, though it is counted for each workspace",
        "incremental",
        "reads",
        "auth: scope_separator, what two refreshes at once are answered",
    ),
)


def provider(client_id: str = "", client_secret: str = "", **overrides: Unpack[Overrides]) -> Provider:
    """Airtable's facts for one app."""
    return AIRTABLE.configured(client_id, client_secret, **overrides)
