"""QuickBooks Online: one company (realm) for one app.

A 429 tells no time; Intuit asks for 60 seconds. A throttle was seen as a 403 too, and as XML. The monthly cap of the
Builder tier is the same 429 and ends with the month: nothing in the answer tells them apart. The refresh token
changes about once a day, and only the last one is sure to work. A repeat with the same ``requestid`` gets the first
answer. A webhook wants its answer in three seconds; later events wait behind one that had none.
"""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING, Final, Unpack

from resilient import Errors, FailureKind, Idempotency, Incremental, Limit, OAuth2, Offset
from resilient import Provider, Rotation, Rule, Signature, Wait, Webhook

if TYPE_CHECKING:
    from resilient import Overrides, RequestFacts


def route(request: RequestFacts) -> tuple[str, float]:
    """Batches have a limit of their own."""
    return ("batch", 1) if request.path.endswith("/batch") else ("", 1)


QUICKBOOKS: Final = Provider(
    name="quickbooks",
    title="QuickBooks Online",
    base_url="https://quickbooks.api.intuit.com/v3/company/{realm_id}",
    whoami="GET /query?query=select%20Id%20from%20CompanyInfo",
    headers={"Accept": "application/json"},
    auth=(
        OAuth2(
            authorize_url="https://appcenter.intuit.com/connect/oauth2",
            token_url="https://oauth.platform.intuit.com/oauth2/v1/tokens/bearer",
            client_auth="basic",
            lifetime=3600,
            rotation=Rotation.SINGLE_USE,
            refresh_lifetime=8_726_400,
            refresh_lifetime_field="x_refresh_token_expires_in",
            keep_callback=("realmId",),
        ),
    ),
    limits={
        "account": [Limit(500, per="1m", name="minute"), Limit(10, per="1s", name="second")],
        "account/batch": [Limit(40, per="1m", name="batches")],
    },
    route=route,
    reads=("POST */query",),
    errors=Errors(
        code=("Fault.Error[0].code", "fault.error[0].code"),
        message=("Fault.Error[0].Message", "fault.error[0].message", "Fault.Error[0].Detail"),
        rules=(
            Rule(FailureKind.THROTTLED, status=429, wait=Wait(fallback=60)),
            Rule(FailureKind.THROTTLED, code=("3001", "003001"), wait=Wait(fallback=60)),
            Rule(FailureKind.THROTTLED, text="message=ThrottleExceeded", wait=Wait(fallback=60)),  # XML, at times
            Rule(FailureKind.AUTH, status=401, code="3200"),
            Rule(FailureKind.CONFLICT, code=("5010", "6140", "6240")),  # stale, or there already
        ),
    ),
    idempotency=Idempotency(header="", query="requestid", paths=("/v3/company/*",)),
    pagination={
        "query": Offset(
            items="QueryResponse.*", absent="empty", query="query", start=1, clause="STARTPOSITION {offset}"
        )
    },
    incremental={
        "query": Incremental(
            style="filter",
            query="query",
            form="MetaData.LastUpdatedTime >= '{cursor}'",
            field="MetaData.LastUpdatedTime",
        ),
        "changes": Incremental(
            style="filter",
            query="changedSince",
            field="MetaData.LastUpdatedTime",
            deletions="marked",
            deleted="status=Deleted",
            life=30 * 86400,
        ),
    },
    webhook=Webhook(
        signatures=(Signature(header="intuit-signature", encoding="base64"),),
        events="",
        delivery="item:id",
        event="item:type",
        answer_within=3,
    ),
    verified_on=date(2026, 11, 22),
    sources=(
        "developer.intuit.com OAuth 2.0 pages, change data capture, webhooks",
        "developer.intuit.com/app/developer/qbo/docs/learn/limits-and-throttles",
        "blogs.intuit.com/2025/11/12/upcoming-change-to-webhooks-payload-structure (CloudEvents)",
        "developer.intuit.com/app/developer/qbo/docs/develop/webhooks/data-objects",
        "developer.intuit.com/hub/blog/2017/06/08/top-quickbooks-online-api-errors-and-how-to-handle-them (6240)",
        "routablehq/python-quickbooks issues 43 (3001 as 403, in XML), 127 (5010)",
        "intuit/oauth-pythonclient intuitlib/client.py",
    ),
    unverified=(
        "whoami",
        "auth: scope_separator, pkce, whether an older refresh token still works",
        "errors.rules: 6140; that 3001 still comes as 403",
        "idempotency: how long a requestid is kept",
        "pagination",
        "webhook: that an event keeps its id when it is sent again",
    ),
)


def provider(client_id: str = "", client_secret: str = "", **overrides: Unpack[Overrides]) -> Provider:
    """QuickBooks' facts for one app; ``{realm_id}`` belongs to each connection."""
    return QUICKBOOKS.configured(client_id, client_secret, **overrides)
