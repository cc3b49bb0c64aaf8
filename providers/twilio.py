"""Twilio: one account or subaccount, by an API key.

A 429 with code 20429 was not processed, so even a POST may be repeated; another 429 is a limit of tries of the
Verify product and no waiting helps. Concurrency is limited, how far is not published. A webhook's signature covers
the address and the form; of a JSON body it covers the hash, which stands in the address.
"""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING, Final, Unpack

from resilient import Basic, Errors, FailureKind, Incremental, NextUrl, Provider, Rule, Signature, Webhook

if TYPE_CHECKING:
    from resilient import Overrides

TWILIO: Final = Provider(
    name="twilio",
    title="Twilio",
    base_url="https://api.twilio.com/2010-04-01/Accounts/{account_sid}",
    hosts=("*.twilio.com",),
    auth=(Basic(user="API key SID", password="API key secret"),),
    limits={},
    errors=Errors(
        code=("code",),
        rules=(
            Rule(FailureKind.THROTTLED, status=429, code="20429"),
            Rule(FailureKind.THROTTLED, status=429, json=False),
            Rule(FailureKind.PERMANENT, status=429),
        ),
    ),
    pagination={
        "list": NextUrl(items="messages", found="next_page_uri", size="PageSize", most=1000),
        "meta": NextUrl(items="services", found="meta.next_page_url", size="PageSize", most=100),
    },
    incremental={"sent": Incremental(style="filter", query="DateSent>", field="date_sent", precision=86400)},
    webhook=Webhook(
        signatures=(
            Signature(
                header="x-twilio-signature",
                scheme="hmac-sha1",
                signed="{url}{form}",
                body_hash="query:bodySHA256",
                encoding="base64",
            ),
        ),
        delivery="i-twilio-idempotency-token",
    ),
    verified_on=date(2026, 11, 1),
    sources=(
        "www.twilio.com/docs/errors/20429",
        "twilio/twilio-python twilio/request_validator.py, twilio/base/page.py",
    ),
    unverified=(
        "errors: 20003 for refused credentials",
        "idempotency: none on sending a message",
        "incremental",
        "limits: messages per second by the kind of number: declare them",
        "pagination: the largest sizes",
    ),
)


def provider(client_id: str = "", client_secret: str = "", **overrides: Unpack[Overrides]) -> Provider:
    """Twilio's facts; its credentials belong to each connection."""
    return TWILIO.configured(client_id, client_secret, **overrides)
