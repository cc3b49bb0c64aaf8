"""Twilio: one account or subaccount, by an API key.

A 429 was not processed, so even a POST may be repeated, whatever its code (20429, and limits of single products such as
25109); only the limits of tries of the Verify product are none that waiting heals. Concurrency is limited, how far is
not published. A webhook's signature covers the address and the form; of a JSON body the hash, which stands in the
address.
"""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING, Final, Unpack

from resilient import Basic, Errors, FailureKind, Incremental, NextUrl, Provider, Rule, Signature, Webhook

if TYPE_CHECKING:
    from resilient import Overrides

_TRIES: Final = ("60202", "60203", "60308", "60310")  # of one verification, challenge or factor

TWILIO: Final = Provider(
    name="twilio",
    title="Twilio",
    base_url="https://api.twilio.com/2010-04-01/Accounts/{account_sid}",
    whoami="GET /Balance.json",
    hosts=("*.twilio.com",),
    auth=(Basic(user="API key SID", password="API key secret"),),
    limits={},
    errors=Errors(
        code=("code",),
        rules=(
            Rule(FailureKind.PERMANENT, status=429, code=_TRIES),
            Rule(FailureKind.AUTH, status=401, code="20003"),
        ),
    ),
    pagination={
        "list": NextUrl(items="messages", url="next_page_uri", size="PageSize", most=1000),
        "meta": NextUrl(items="services", url="meta.next_page_url", size="PageSize", most=100),
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
    verified_on=date(2026, 11, 22),
    sources=(
        "www.twilio.com/docs/api/errors 20429, 60202, 60203, 60308, 60310, in stored copies of 2025",
        "twilio/twilio-python twilio/request_validator.py, twilio/base/page.py",
    ),
    unverified=(
        "whoami",
        "errors: 20003 for refused credentials; that 429 with any other code is a limit of requests",
        "idempotency: none on sending a message",
        "incremental",
        "limits: messages per second by the kind of number: declare them",
        "pagination: the largest sizes",
    ),
)


def provider(client_id: str = "", client_secret: str = "", **overrides: Unpack[Overrides]) -> Provider:
    """Twilio's facts; its credentials belong to each connection."""
    return TWILIO.configured(client_id, client_secret, **overrides)
