"""Salesforce REST: one user in one org, at the org's own address (``instance_url`` of the token answer).

A spent request limit is a 403, at the token endpoint too, where it is easily taken for a dead grant. Errors are a
list. Tokens state no lifetime: the org's session timeout decides. Inserts are made repeatable by an external id.
One refresh token is refreshed by one request at a time: another meanwhile is refused with ``invalid_grant``, which
only its description tells from a dead grant.
"""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING, Final, Unpack

from resilient import BudgetFields, Errors, FailureKind, Incremental, Limit, NextUrl
from resilient import OAuth2, Provider, Rule, Wait, WaitDialect

if TYPE_CHECKING:
    from resilient import Overrides

_LIMIT: Final = "REQUEST_LIMIT_EXCEEDED"
_BUSY: Final = "(?i)token request is already being processed"

SALESFORCE: Final = Provider(
    name="salesforce",
    title="Salesforce",
    base_url="{instance_url}/services/data/v{version}",
    whoami="GET /",
    hosts=("*.salesforce.com", "*.force.com"),
    auth=(
        OAuth2(
            authorize_url="https://login.salesforce.com/services/oauth2/authorize",
            token_url="https://login.salesforce.com/services/oauth2/token",
            offline_scopes=("refresh_token",),
            pkce="supported",
            lifetime=7200,
            keep=("instance_url", "id"),
            errors=Errors(
                code=("error", "[0].errorCode"),
                rules=(
                    Rule(FailureKind.QUOTA, code=_LIMIT, wait=Wait(fallback=900)),
                    Rule(FailureKind.TRANSIENT, code="invalid_grant", text=_BUSY, counts_for_breaker=False),
                ),
            ),
        ),
    ),
    limits={"account": [Limit(15_000, per="1d", name="daily")]},  # Developer Edition; Enterprise has 100,000 and more
    waits=WaitDialect(budgets=(BudgetFields("daily", used="sforce-limit-info"),)),
    errors=Errors(
        code=("[0].errorCode", "error"),
        message=("[0].message", "error_description"),
        rules=(
            Rule(FailureKind.THROTTLED, code=_LIMIT, text="(?i)concurrent", wait=Wait(fallback=20)),
            Rule(FailureKind.QUOTA, code=_LIMIT, wait=Wait(fallback=900)),  # of a rolling day: it frees up slowly
            Rule(FailureKind.CONFLICT, code=("UNABLE_TO_LOCK_ROW", "DUPLICATE_VALUE", "DUPLICATES_DETECTED")),
            Rule(FailureKind.RESET_CURSOR, code="INVALID_QUERY_LOCATOR"),
        ),
    ),
    pagination={"query": NextUrl(items="records", url="nextRecordsUrl", done="done")},
    incremental={
        "query": Incremental(
            style="filter", query="q", form="SystemModstamp >= {cursor}", field="SystemModstamp", deletions="separate"
        )
    },
    verified_on=date(2026, 11, 1),
    sources=(
        "developer.salesforce.com docs salesforce_app_limits_cheatsheet, API limits headers, resources_getdeleted",
        "help.salesforce.com connected app refresh token rotation (off by default)",
        "developer.salesforce.com/docs/platform/salesforce-app-limits-cheatsheet (at once: 5 in the Developer Edition)",
        "help.salesforce.com release-notes.rn_security_refresh_token_error, cited in the next one",
        "segmentio/action-destinations pull 2300 (token request is already being processed)",
        "developer.salesforce.com REST API guide, list of versions (67.0 is Summer '26)",
        "simple-salesforce/simple-salesforce simple_salesforce/api.py",
        "gist.github.com/ndabAP/2ae90f3b871403d822ec2de0bcffb5b0 (the words of a concurrency limit)",
        "singer-io/tap-salesforce pull 221, issue 223",
    ),
    unverified=(
        "whoami",
        "limits: 15,000 a day of the Developer Edition, the smallest; read in quotations of the page only",
        "auth: scope_separator, pkce, two hours of session, offline_scopes",
        "errors.rules: UNABLE_TO_LOCK_ROW, DUPLICATE_VALUE, INVALID_QUERY_LOCATOR",
        "auth: what is answered to too many sign-ins (login rate exceeded)",
        "idempotency: none; upsert by an external id",
        "webhook: none; Platform Events and Pub/Sub instead",
    ),
)


def provider(
    client_id: str = "",
    client_secret: str = "",
    *,
    version: str = "67.0",
    sandbox: bool = False,
    **overrides: Unpack[Overrides],
) -> Provider:
    """Salesforce's facts for one connected app; ``{instance_url}`` belongs to each connection.

    ``sandbox``: people sign in at ``test.salesforce.com``, or where ``sign_in_at`` says (a sandbox's own domain).
    """
    if sandbox:
        overrides.setdefault("sign_in_at", "https://test.salesforce.com")
    return SALESFORCE.configured(client_id, client_secret, **overrides).filled(version=version)
