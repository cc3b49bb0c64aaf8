"""One delivery makes a bounded number of jobs: the one who stores them holds up all others of the database."""

from __future__ import annotations

import hashlib
import hmac
import json

import pytest

from resilient import Bearer, Delivery, Inbound, Job, Provider, Resilient, Signature, Webhook, WebhookEvent, handler
from resilient.core.base.bounds import WEBHOOK_EVENTS

SECRET = "canary-webhook-secret"
MOST = WEBHOOK_EVENTS.value
ACME = Provider(
    name="acme", base_url="https://acme.example", auth=(Bearer(),),
    webhook=Webhook(
        signatures=(Signature(header="x-sign"),), delivery="item:id", event="item:type", events="value"
    ),
)  # fmt: skip


@handler("acme.thing")
async def thing(job: Job[WebhookEvent]) -> None: ...


@pytest.fixture
async def app(database_url):
    inbound = Inbound(provider="acme", secrets=[SECRET], jobs={"wanted": thing})
    app = Resilient(database_url, handlers=[thing], providers=[ACME], webhooks=[inbound])
    yield app
    await app.close()


def delivery(count, type_="wanted"):
    body = json.dumps({"value": [{"id": n, "type": type_} for n in range(count)]}).encode()
    return Delivery({"x-sign": hmac.new(SECRET.encode(), body, hashlib.sha256).hexdigest()}, body, "https://x/acme")


@pytest.mark.parametrize("type_", ["wanted", "boring"])
async def test_a_delivery_of_too_many_events_is_refused_whole(app, caplog, type_):
    sent = delivery(MOST + 1, type_)
    answers = [await app.webhooks.receive("acme", sent), await app.webhooks.receive("acme", sent)]
    assert [(one.status, one.body, one.jobs) for one in answers] == [
        (413, "more than 1,000 events in one delivery: none was stored", ())
    ] * 2
    assert await app.jobs.count() == 0
    assert caplog.text.count("a webhook of acme is too large: more than 1,000 events") == 1
    answer = await app.webhooks.receive("acme", delivery(2))  # nothing of it was noted as seen
    assert (answer.status, len(answer.jobs)) == (200, 2)


async def test_a_delivery_of_as_many_events_as_may_be_is_stored(app):
    answer = await app.webhooks.receive("acme", delivery(MOST))
    assert (answer.status, len(answer.jobs), await app.jobs.count()) == (200, MOST, MOST)


def test_the_synchronous_twin_refuses_it_too(app):
    assert app.sync.webhooks.receive("acme", delivery(MOST + 1)).status == 413
