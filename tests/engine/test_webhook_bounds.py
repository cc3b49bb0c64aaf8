"""One delivery makes a bounded number of jobs: the one who stores them holds up all others of the database."""

from __future__ import annotations

import hashlib
import hmac
import json
from datetime import UTC, datetime

import pytest

from resilient import Bearer, Delivery, Inbound, Job, Provider, Resilient, Signature, Webhook, WebhookEvent, handler
from resilient.core.base.bounds import (
    WEBHOOK_EVENTS,
    WEBHOOK_FIELDS,
    WEBHOOK_HEADER,
    WEBHOOK_HEADERS,
    WEBHOOK_NAME,
    WEBHOOK_SHOWN,
)
from resilient.core.events.webhook import prove, value_at

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


# -- what each event's job is shown ------------------------------------------------------------------------------------


async def shown(app, answer):
    return [(await app.jobs.get(one)).payload for one in answer.jobs]


def crowded(count, headers):
    made = delivery(count)
    return Delivery({**made.headers, **headers}, made.body, made.url)


async def test_events_of_one_delivery_keep_its_headers_within_one_bound(app):
    """64 headers of a thousand characters with a thousand events were 64 MB."""
    sent = crowded(MOST, {f"x-{n}": "é" * 1_000 for n in range(64)})
    answer = await app.webhooks.receive("acme", sent)
    assert (answer.status, len(answer.jobs)) == (200, MOST)
    payload = (await shown(app, answer))[0]
    assert len(json.dumps(payload["headers"])) * MOST <= WEBHOOK_SHOWN.value


async def test_an_honest_deliverys_headers_are_shown_whole(app):
    usual = {f"x-usual-{n}": "a value of some forty characters or more" for n in range(20)}
    answer = await app.webhooks.receive("acme", crowded(MOST, usual))
    assert (await shown(app, answer))[-1]["headers"] == usual
    answer = await app.webhooks.receive("acme", crowded(1, {"x-trace": "other", "x-long": "y" * 2_000}))
    assert answer.jobs == ()  # a repeat of its first event


async def test_one_event_alone_is_shown_as_much_as_ever(app):
    answer = await app.webhooks.receive("acme", crowded(1, {f"x-{n}": "y" * 2_000 for n in range(70)}))
    (payload,) = await shown(app, answer)
    assert [len(text) for text in payload["headers"].values()] == [WEBHOOK_HEADER.value] * WEBHOOK_HEADERS.value


NAMED = Provider(
    name="named", base_url="https://named.example", auth=(Bearer(),),
    webhook=Webhook(signatures=(Signature(header="x-sign"),), delivery="x-id", event="x-event", events="value"),
)  # fmt: skip


async def test_a_name_or_id_in_a_header_is_shown_to_its_bound(database_url):
    inbound = Inbound(provider="named", secrets=[SECRET], jobs=thing)
    app = Resilient(database_url, handlers=[thing], providers=[NAMED], webhooks=[inbound])
    answer = await app.webhooks.receive("named", crowded(3, {"x-id": "i" * 60_000, "x-event": "e" * 60_000}))
    for payload in await shown(app, answer):
        assert [len(payload[name]) for name in ("delivery", "event")] == [WEBHOOK_NAME.value] * 2
    await app.close()


# -- forms and queries ------------------------------------------------------------------------------------------------


def form(count):
    body = b"&".join(b"f%04d=1" % n for n in range(count))
    headers = {"x-sign": hmac.new(SECRET.encode(), body, hashlib.sha256).hexdigest()}
    return Delivery({**headers, "content-type": "application/x-www-form-urlencoded"}, body, "https://x/acme")


@pytest.mark.parametrize("more", [0, 1])
async def test_a_form_of_too_many_fields_is_a_text(database_url, more):
    facts = Provider(
        name="forms", base_url="https://forms.example", auth=(Bearer(),),
        webhook=Webhook(signatures=(Signature(header="x-sign"),)),
    )  # fmt: skip
    inbound = Inbound(provider="forms", secrets=[SECRET], jobs=thing)
    app = Resilient(database_url, handlers=[thing], providers=[facts], webhooks=[inbound])
    answer = await app.webhooks.receive("forms", form(WEBHOOK_FIELDS.value + more))
    (payload,) = await shown(app, answer)
    assert isinstance(payload["body"], str if more else dict)
    await app.close()


def test_a_signed_form_of_too_many_fields_fits_no_signature():
    signature = Signature(header="x-sign", signed="{url}{form}")
    webhook = Webhook(signatures=(signature,))
    for count, genuine in ((WEBHOOK_FIELDS.value, True), (WEBHOOK_FIELDS.value + 1, False)):
        sent = form(count)
        text = sent.url + "".join(sorted(f"f{n:04}1" for n in range(count)))
        for signed in (text, sent.url):
            sign = hmac.new(SECRET.encode(), signed.encode(), hashlib.sha256).hexdigest()
            one = Delivery({**sent.headers, "x-sign": sign}, sent.body, sent.url)
            proof = prove(webhook, one, [SECRET], datetime(2030, 1, 1, tzinfo=UTC))
            assert (not proof.reason) is (genuine and signed is text)


@pytest.mark.parametrize(("more", "value"), [(0, "here"), (1, "")])
def test_a_query_of_too_many_fields_says_nothing(more, value):
    url = "https://x/acme?" + "a=1&" * (WEBHOOK_FIELDS.value - 1 + more) + "id=here"
    assert value_at("query:id", {}, None, url) == value
