"""Xero: one organisation each; one grant may serve several, so its tokens are refreshed once for all.

A lost answer to a refresh can be asked for again for 30 minutes. Which budget is spent stands in
``X-Rate-Limit-Problem``: a day's may mean many hours, the app's own stops all accounts. A disconnected organisation
answers 403. It remembers a key for six minutes from the first call, and answers a repeat with what it answered then.
"""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING, Final, Unpack

from resilient import BudgetFields, Errors, FailureKind, Idempotency, Incremental, Limit, OAuth2, PageNumber
from resilient import Provider, Rotation, Rule, Scope, Signature, Wait, WaitDialect, Webhook

if TYPE_CHECKING:
    from resilient import Overrides

XERO: Final = Provider(
    name="xero",
    title="Xero",
    base_url="https://api.xero.com/api.xro/2.0",
    whoami="GET https://api.xero.com/connections",
    headers={"Accept": "application/json", "Xero-tenant-id": "{tenant_id}"},
    auth=(
        OAuth2(
            authorize_url="https://login.xero.com/identity/connect/authorize",
            token_url="https://identity.xero.com/connect/token",
            client_auth="basic",
            pkce="supported",
            offline_scopes=("offline_access",),
            lifetime=1800,
            rotation=Rotation.GRACE,
            grace=1800,
            refresh_lifetime=60 * 86400,
            shared=True,
        ),
    ),
    limits={  # of the Starter tier, since March 2026; the larger ones have 5,000 a day
        "provider": [Limit(10_000, per="1m", name="app-minute")],
        "account": [Limit(60, per="1m", name="minute"), Limit(1000, per="1d", name="day")],
    },
    concurrency={"account": 5},
    waits=WaitDialect(
        budgets=(
            BudgetFields("minute", remaining="x-minlimit-remaining", window=60),
            BudgetFields("day", remaining="x-daylimit-remaining"),
            BudgetFields("app-minute", remaining="x-appminlimit-remaining", window=60),
        )
    ),
    errors=Errors(
        code=("Type", "ErrorNumber", "Title"),
        message=("Elements[0].ValidationErrors[0].Message", "Message", "Detail"),
        rules=(
            Rule(FailureKind.QUOTA, status=429, header={"x-rate-limit-problem": "(?i)^day"}, wait=Wait(period="day")),
            Rule(
                FailureKind.THROTTLED,
                status=429,
                header={"x-rate-limit-problem": "(?i)^appminute"},
                scope=Scope.PROVIDER,
            ),
            Rule(FailureKind.AUTH, status=403, text="AuthenticationUnsuccessful"),
        ),
    ),
    idempotency=Idempotency(methods=frozenset({"POST", "PUT", "PATCH"}), life=360),
    pagination={"list": PageNumber(items="*", size="pageSize", most=1000)},
    incremental={
        "modified": Incremental(style="filter", header="If-Modified-Since", field="UpdatedDateUTC"),
        "journals": Incremental(style="key", query="offset", field="JournalNumber"),
    },
    webhook=Webhook(
        signatures=(Signature(header="x-xero-signature", encoding="base64"),),
        events="events",
        event="item:eventCategory item:eventType",
        challenge="status",
        answer_within=5,
    ),
    verified_on=date(2026, 11, 22),
    sources=(
        "developer.xero.com/faq/oauth2, documentation of OAuth2 limits",
        "XeroAPI/xero-node docs/accounting, issue 382; XeroAPI/xero-python docs",
        "waynerobinson/xeroizer pull 585",
    ),
    unverified=(
        "whoami",
        "auth: scope_separator, that one grant serves several organisations is told by users",
        "errors: code, message",
        "limits: the day's of the Starter tier; Xero's own pages in the stored copies name 5,000",
        "idempotency: the six minutes, as others quote the guide of Xero",
        "webhook: five seconds to answer, and the fields of an event's name",
    ),
)


def provider(client_id: str = "", client_secret: str = "", **overrides: Unpack[Overrides]) -> Provider:
    """Xero's facts for one app; ``{tenant_id}`` belongs to each connection."""
    return XERO.configured(client_id, client_secret, **overrides)
