"""What providers call: genuine deliveries become one job each, everything else becomes none."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from resilient import (
    Bearer,
    Delivery,
    Inbound,
    Job,
    Provider,
    Resilient,
    SetupError,
    Signature,
    Webhook,
    WebhookEvent,
    handler,
    providers_by_name,
)
from resilient.store import events
from resilient.testing.fake import answers
from tests.helpers import LIMIT

URL = "https://shop.example/webhooks"
SECRET = "canary-webhook-secret"
ACME = Provider(
    name="acme", base_url="https://acme.example", auth=(Bearer(),),
    webhook=Webhook(signatures=(Signature(header="x-sign"),), delivery="x-id", event="x-event"),
)  # fmt: skip
NOTHING = Provider(name="none", base_url="https://none.example", webhook=Webhook(token="x-token"))
DONE = []


@handler("acme.thing")
async def thing(job: Job[WebhookEvent]) -> str:
    return job.payload.event


@handler("acme.other")
async def other(job: Job[WebhookEvent]) -> str:
    return job.payload.event


@handler("acme.any")
async def anything(job: Job[WebhookEvent]) -> str:
    return job.payload.event


KINDS = [thing, other, anything]


@pytest.fixture
async def make(database_url):
    made = []

    def make_(*inbound, providers=(ACME, NOTHING), **options):
        app = Resilient(database_url, handlers=KINDS, providers=providers, webhooks=inbound, **options)
        made.append(app)
        return app

    yield make_
    for app in made:
        await app.close()


@pytest.fixture
def app(make):
    return make(Inbound(provider="acme", secrets=[SECRET], jobs={"thing.*": thing, "other": other}))


def signed(body=b'{"n": 1}', *, event="thing.made", id_="d-1", secret=SECRET, **changes):
    sign = hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()
    headers = {"X-Sign": sign, "X-Event": event, "X-Id": id_, "Content-Type": "application/json", **changes}
    return Delivery({name: text for name, text in headers.items() if text}, body, URL)


async def statuses(app, *deliveries, **options):
    return [(await app.webhooks.receive("acme", one, **options)).status for one in deliveries]


async def payloads(app):
    found = await app.jobs.list()
    return [job.payload for job in reversed(found)]


# -- genuine ---------------------------------------------------------------------------------------------------


async def test_a_delivery_becomes_a_job_of_its_event(app):
    answer = await app.webhooks.receive("acme", signed())
    assert (answer.status, answer.body) == (200, "")
    (job,) = await app.jobs.list()
    assert (job.id, job.kind, job.resource_key) == (answer.job, "acme.thing", "acme/webhooks")
    assert job.payload["body"] == {"n": 1}
    assert (job.payload["event"], job.payload["delivery"]) == ("thing.made", "d-1")
    await app.worker().drain()
    assert (await app.jobs.get(job.id)).result == "thing.made"


async def test_events_nobody_wants_are_acknowledged_and_dropped(app):
    assert await statuses(app, signed(event="boring"), signed(event="", id_="d-2")) == [200, 200]
    assert await app.jobs.count() == 0


async def test_what_a_job_goes_through(make):
    by_event = Inbound(
        provider="acme", secrets=[SECRET], jobs=anything,
        resource_key=lambda event: f"acme/{event.body['n']}" if event.body["n"] else None,
    )  # fmt: skip
    app = make(by_event)
    assert await statuses(app, signed(), signed(b'{"n": 0}', id_="d-2")) == [200, 200]
    assert [job.resource_key for job in await app.jobs.list()] == ["acme/1"]
    by_address = make(Inbound(provider="acme", secrets=[SECRET], jobs=anything))
    assert await statuses(by_address, signed(id_="d-3"), account="acct-7") == [200]
    (job,) = await app.jobs.list(resource="acme/acct-7")
    assert job.payload["account"] == "acct-7"


async def test_secrets_and_signatures_are_not_stored(app, read_all):
    await app.webhooks.receive("acme", signed(Authorization="Bearer canary-other", Cookie="canary-cookie"))
    (event,) = await payloads(app)
    assert event["headers"] == {"x-event": "thing.made", "x-id": "d-1", "content-type": "application/json"}
    graph = providers_by_name()["microsoft_graph"]()
    body = {"value": [{"clientState": "canary-state", "resource": "me"}, {"clientState": "canary-state"}]}
    there = Resilient(
        app.database, providers=[graph], handlers=KINDS,
        webhooks=[Inbound(provider="microsoft_graph", secrets=["canary-state"], jobs=anything)],
    )  # fmt: skip
    answer = await there.webhooks.receive("microsoft_graph", Delivery({}, json.dumps(body).encode(), URL))
    assert answer.job
    assert "canary" not in str(read_all("SELECT * FROM {job}"))


async def test_forms_and_text(make):
    app = make(Inbound(provider="acme", secrets=[SECRET], jobs=anything))
    form = signed(b"a=1&b=x+y", **{"Content-Type": "application/x-www-form-urlencoded"})
    await statuses(app, form, signed(b"hello", id_="d-2"), signed(b"", id_="d-3"))
    await statuses(app, signed(b"\xef\xbb\xbf{}", id_="d-4"))  # some put a mark before JSON
    assert [event["body"] for event in await payloads(app)] == [{"a": "1", "b": "x y"}, "hello", None, {}]


# -- not genuine -----------------------------------------------------------------------------------------------


async def test_what_is_not_genuine_is_refused_and_leaves_nothing(app, caplog):
    forged = [
        signed(secret="another"),
        signed(**{"X-Sign": ""}),
        signed(**{"X-Sign": "0" * 64}),
        Delivery(signed().headers, b'{"n": 2}', URL),
    ]
    assert await statuses(app, *forged, *forged) == [401] * 8
    assert await app.jobs.count() == 0
    lines = [record.message for record in caplog.records if record.name == "resilient.webhooks"]
    assert len(lines) == 2  # one for each reason, not one for each delivery
    assert "canary" not in caplog.text


async def test_a_flood_of_forged_deliveries_is_a_few_lines_of_the_log(make, caplog, monkeypatch):
    """Each with another time, size and account; nothing is looked for in a list that grows with them."""
    slack, now = providers_by_name()["slack"](), [1_000.0]
    app = make(Inbound(provider="slack", secrets=["s"], jobs=anything), providers=[slack], max_payload=50_000)
    monkeypatch.setattr("resilient.engine.events.webhooks.time.monotonic", lambda: now[0])
    for n in range(500):
        headers = {"X-Slack-Signature": f"v0={n:064x}", "X-Slack-Request-Timestamp": str(n)}
        for one in (
            Delivery(headers, b"{}", URL),
            Delivery(headers, b"x" * (50_001 + n), URL),
            Delivery({}, b"{}", URL),
        ):
            assert (await app.webhooks.receive("slack", one, account=f"a{n}")).status in (401, 413)
        now[0] += 0.01
    assert len(caplog.records) == 3
    now[0] += 60
    await app.webhooks.receive("slack", Delivery({}, b"{}", URL))
    assert "499 more" in caplog.text


def test_a_flood_in_a_synchronous_program(database, caplog):
    app = Resilient(
        database, handlers=KINDS, providers=[ACME], webhooks=[Inbound(provider="acme", secrets=[SECRET], jobs=anything)]
    )
    for _ in range(50):
        assert app.sync.webhooks.receive("acme", signed(secret="x")).status == 401
    assert len([one for one in caplog.records if one.name == "resilient.webhooks"]) == 1


async def test_what_is_forged_or_too_large_is_not_decoded(make, monkeypatch):
    decoded = []
    monkeypatch.setattr("resilient.engine.events.webhooks._decoded", lambda one: decoded.append(len(one.body)))
    app = make(Inbound(provider="acme", secrets=[SECRET], jobs=anything), max_payload=100_000)
    large = b"[" + b"{}," * 60_000 + b"0]"
    assert await statuses(app, signed(large), signed(large, secret="x"), signed(b"[]", secret="x")) == [413, 413, 401]
    assert not decoded


@pytest.mark.parametrize("secret", ["", " ", "whsec_", "whsec_===", "whsec_!"])
def test_secrets_that_prove_nothing_are_refused(database, secret):
    """HMAC takes an empty key, which everybody knows."""
    gitlab = providers_by_name()["gitlab"]()
    forged = hmac.new(b"", b"e.1.{}", hashlib.sha256).digest()
    assert forged
    facts = replace(gitlab, webhook=replace(gitlab.webhook, signatures=gitlab.webhook.signatures[:1]))
    with pytest.raises(SetupError, match=r"gitlab.*secret"):
        Resilient(
            database, handlers=KINDS, providers=[facts],
            webhooks=[Inbound(provider="gitlab", secrets=[secret], jobs=anything)],
        )  # fmt: skip


async def test_an_empty_key_of_a_function_verifies_nothing(make):
    gitlab = providers_by_name()["gitlab"]()
    app = make(Inbound(provider="gitlab", secrets=lambda _: ["whsec_", "", " "], jobs=anything), providers=[gitlab])
    at = str(int(datetime.now(UTC).timestamp()))
    for key in (b"", b"whsec_", b" "):
        sign = base64.b64encode(hmac.new(key, f"e.{at}.{{}}".encode(), hashlib.sha256).digest()).decode()
        headers = {
            "idempotency-key": "e",
            "webhook-timestamp": at,
            "webhook-signature": f"v1,{sign}",
            "x-gitlab-token": "",
        }
        assert (await app.webhooks.receive("gitlab", Delivery(headers, b"{}", URL))).status == 401


@pytest.mark.parametrize("name", ["mailchimp", "microsoft_graph", "stripe", "slack", "zoom", "linear", "notion"])
@pytest.mark.parametrize("text", ["\ud83d", "\udfff x", "\x00", "\x1b[2J"])
async def test_half_a_character_is_no_error_of_ours(make, name, text):
    """Before it is verified, and after."""
    provider = providers_by_name()[name]()
    app = make(Inbound(provider=name, secrets=["s"], jobs=anything), providers=[provider])
    forged = json.dumps({"value": [{"clientState": text}], "webhookTimestamp": text, "id": text, "challenge": text})
    for headers in ({}, {"x-slack-signature": f"v0={'0' * 64}", "x-goog-channel-token": text}):
        answer = await app.webhooks.receive(name, Delivery(headers, forged.encode(), f"{URL}?secret=%ED%A0%BD"))
        assert answer.status in (401, 403)
    body = {"type": text, "id": text, "event": {"type": text}, "event_id": text, "action": text}
    body = {"value": [body]} if name == "microsoft_graph" else body
    sent = answers.deliver(provider, URL, body, datetime.now(UTC), secret="s", delivery="")
    assert (await app.webhooks.receive(name, sent)).status == 200
    assert await app.jobs.count() == 1


async def test_notions_token_is_shown_to_whoever_expects_it(make):
    shown = []

    def show(account, token):
        shown.append((account, token))
        return True

    body = b'{"verification_token": "secret_canary"}'
    assert (await asked(make, "notion", Delivery({}, body, URL), handshake=show)).status == 200
    assert shown == [("a", "secret_canary")]
    assert (await asked(make, "notion", Delivery({}, body, URL))).status == 403
    signed_ = Delivery({"X-Notion-Signature": "sha256=00"}, body, URL)  # an ordinary event that names one
    assert (await asked(make, "notion", signed_, handshake=show)).status == 401
    assert len(shown) == 1


async def test_several_secrets_while_they_rotate_and_a_function_of_the_account(make):
    rotating = make(Inbound(provider="acme", secrets=["new", SECRET], jobs=anything))
    assert await statuses(rotating, signed(), signed(id_="d-2", secret="new"), signed(secret="old")) == [200, 200, 401]

    async def of_account(account):
        return ["theirs"] if account == "a" else []

    app = make(Inbound(provider="acme", secrets=of_account, jobs=anything))
    assert await statuses(app, signed(id_="d-3", secret="theirs"), account="a") == [200]
    assert await statuses(app, signed(id_="d-4", secret="theirs"), account="b") == [401]


async def test_an_old_delivery_is_refused(make, clock):
    slack = providers_by_name()["slack"]()
    app = make(Inbound(provider="slack", secrets=["s"], jobs=anything), providers=[slack], clock=clock.now)
    sent = answers.deliver(slack, URL, {"event": {"type": "message"}}, clock.now(), secret="s", delivery="Ev1")
    clock.advance(301)
    assert (await app.webhooks.receive("slack", sent)).status == 401
    clock.advance(-2)
    assert (await app.webhooks.receive("slack", sent)).status == 200


async def test_unknown_providers_and_methods(app):
    assert (await app.webhooks.receive("other", signed())).status == 404
    got = await app.webhooks.receive("acme", Delivery({}, b"", URL, "GET"))
    assert (got.status, got.headers["Allow"]) == (405, "POST")


# -- once ------------------------------------------------------------------------------------------------------


async def test_a_repeat_is_acknowledged_and_dropped(app):
    first = await app.webhooks.receive("acme", signed())
    again = await app.webhooks.receive("acme", signed())
    assert (first.status, again.status, again.job) == (200, 200, None)
    await app.worker().drain()
    assert await statuses(app, signed(), signed(b'{"n": 2}', id_="d-2")) == [200, 200]
    assert await app.jobs.count() == 2


async def test_what_is_not_signed_decides_nothing(app):
    """Whoever caught a delivery cannot have it done again under another id, nor take the id of one to come."""
    assert await statuses(app, signed(), signed(id_="d-2"), signed(id_=""), signed(**{"X-More": "1"})) == [200] * 4
    assert await app.jobs.count() == 1
    assert await statuses(app, signed(b'{"n": 2}')) == [200]  # with the id of the first
    assert await app.jobs.count() == 2


async def test_two_events_may_have_one_body(app):
    """Shopify sends one product for orders/create and orders/paid: the header alone says which it is."""
    assert (
        await statuses(app, signed(event="thing.made"), signed(event="thing.paid"), signed(event="thing.paid"))
        == [200] * 3
    )
    assert [event["event"] for event in await payloads(app)] == ["thing.made", "thing.paid"]


async def test_what_differs_in_a_repeat_does_not_count(make):
    """Linear writes the time of sending into the body it signs."""
    linear = providers_by_name()["linear"]()
    app = make(Inbound(provider="linear", secrets=["s"], jobs=anything), providers=[linear])
    for number, more in enumerate(({"a": 1}, {"a": 1}, {"a": 2})):
        at = datetime.now(UTC) - timedelta(seconds=number)
        sent = answers.deliver(linear, URL, more, at, secret="s", delivery=f"d-{number}")
        assert (await app.webhooks.receive("linear", sent)).status == 200
    assert await app.jobs.count() == 2


async def test_alike_bodies_with_a_signed_time_are_as_many_as_were_sent(make):
    """Zendesk's bodies are made by the customer: each change of a ticket may send the same."""
    zendesk, now = providers_by_name()["zendesk"](), datetime.now(UTC)
    app = make(Inbound(provider="zendesk", secrets=["s"], jobs=anything), providers=[zendesk])
    for number in (0, 10, 0):
        at = now - timedelta(seconds=number)
        sent = answers.deliver(zendesk, URL, {"ticket": 5}, at, secret="s", delivery=f"d-{number}")
        caught = Delivery({**sent.headers, "x-zendesk-webhook-invocation-id": "another"}, sent.body, URL)
        for one in (sent, sent, caught):
            assert (await app.webhooks.receive("zendesk", one)).status == 200
    assert await app.jobs.count() == 2


@pytest.mark.parametrize("name", ["gitlab", "box"])
async def test_a_signed_id_decides(make, name):
    """They sign it; a repeat may then be written otherwise, and two alike are two events."""
    provider = providers_by_name()[name]()
    secret = answers.secret_of(provider)
    app = make(Inbound(provider=name, secrets=[secret], jobs=anything), providers=[provider])

    def sent(id_, body):
        return answers.deliver(provider, URL, body, datetime.now(UTC), secret=secret, delivery=id_)

    for one, jobs in ((sent("e-1", {"a": 1}), 1), (sent("e-1", {"a": 1, "attempt": 2}), 1), (sent("e-2", {"a": 1}), 2)):
        assert (await app.webhooks.receive(name, one)).status == 200
        assert await app.jobs.count() == jobs


async def test_gitlab_tells_a_repeat_with_a_secret_token_too(make):
    """Without a signing token it sends no webhook-id; two alike are two events."""
    app = make(
        Inbound(provider="gitlab", secrets=["agreed"], jobs=anything), providers=[providers_by_name()["gitlab"]()]
    )
    for key in ("e-1", "e-1", "e-2"):
        one = Delivery({"x-gitlab-token": "agreed", "idempotency-key": key}, b"{}", URL)
        assert (await app.webhooks.receive("gitlab", one)).status == 200
    assert await app.jobs.count() == 2


async def test_ids_of_two_accounts_never_meet(make):
    facts = Webhook(signatures=(Signature(header="x-sign"),), delivery="body:id")
    acme = Provider(name="acme", base_url="https://acme.example", webhook=facts)
    app = make(Inbound(provider="acme", secrets=[SECRET], jobs=anything), providers=[acme])
    for account, body in (("a", b'{"id": "b:c"}'), ("a:b", b'{"id": "c"}'), ("", b'{"id": "a:b:c"}')):
        assert await statuses(app, signed(body), signed(body), account=account) == [200, 200]
    assert await app.jobs.count() == 3


@pytest.mark.parametrize("account", ["../x", "a/b", "a b", "é", "*", "a\nb", "a\x00", "x" * 300])
async def test_what_cannot_name_an_account_is_no_address(app, account):
    assert await statuses(app, signed(), account=account) == [404]
    assert await app.jobs.count() == 0


# -- several events in one delivery ----------------------------------------------------------------------------


HUBSPOT = providers_by_name()["hubspot"]()


def hubspot(*events):
    made = [
        {
            "eventId": e,
            "subscriptionId": 1,
            "objectId": 7,
            "occurredAt": 5,
            "portalId": p,
            "subscriptionType": t,
            **more,
        }
        for e, p, t, *rest in events
        for more in (rest[0] if rest else {},)
    ]
    return answers.deliver(HUBSPOT, f"{URL}/hubspot", made, datetime.now(UTC), secret=SECRET, delivery="")


async def test_each_event_of_a_delivery_is_a_job_of_its_own(make):
    inbound = Inbound(
        provider="hubspot", secrets=[SECRET], jobs={"deal.*": other, "contact.*": thing},
        resource_key=lambda event: f"hubspot/{event.body['portalId']}",
    )  # fmt: skip
    app = make(inbound, providers=[HUBSPOT])
    first = hubspot((1, "p1", "boring.x"), (2, "p1", "deal.change"), (3, "p2", "contact.made"))
    answer = await app.webhooks.receive("hubspot", first)
    found = sorted((job.kind, job.resource_key, job.payload["body"]["eventId"]) for job in await app.jobs.list())
    assert found == [("acme.other", "hubspot/p1", 2), ("acme.thing", "hubspot/p2", 3)]
    assert sorted(answer.jobs) == sorted(job.id for job in await app.jobs.list())
    # what came already is known, beside what is new and however it is grouped
    again = hubspot((3, "p2", "contact.made", {"attemptNumber": 1}), (4, "p1", "deal.change"))
    assert len((await app.webhooks.receive("hubspot", again)).jobs) == 1
    assert (await app.webhooks.receive("hubspot", hubspot())).jobs == ()


async def test_alike_events_of_one_delivery_are_as_many_as_there_are(make):
    asana = providers_by_name()["asana"]()
    app = make(Inbound(provider="asana", secrets=[SECRET], jobs=anything), providers=[asana])
    body = {"events": [{"action": "added", "resource": {"resource_type": "task"}}] * 2}
    sent = answers.deliver(asana, URL, body, datetime.now(UTC), secret=SECRET, delivery="")
    assert [len((await app.webhooks.receive("asana", sent)).jobs) for _ in range(2)] == [2, 0]
    assert [payload["event"] for payload in await payloads(app)] == ["task.added"] * 2


@pytest.mark.parametrize(
    "value",
    [
        [{"clientState": SECRET, "n": 1}, {"clientState": "forged", "n": 2}],
        [{"clientState": "forged", "n": 2}, {"clientState": SECRET, "n": 1}],
        [{"clientState": SECRET, "n": 1}, {"n": 2}],
        [{"clientState": SECRET, "n": 1}] * 150 + [{"n": 2}],
        [{"clientState": SECRET}, SECRET],
        [{"clientState": [SECRET]}],
        [],
        SECRET,
    ],
)
async def test_every_notification_carries_what_was_agreed(make, value):
    graph = providers_by_name()["microsoft_graph"]()
    app = make(Inbound(provider="microsoft_graph", secrets=[SECRET], jobs=anything), providers=[graph])
    body = json.dumps({"value": value}).encode()
    answer = await app.webhooks.receive("microsoft_graph", Delivery({}, body, URL))
    assert (answer.status, answer.jobs) == (401, ())


async def test_two_deliveries_with_the_same_events_in_other_orders(make):
    app = make(Inbound(provider="hubspot", secrets=[SECRET], jobs=anything), providers=[HUBSPOT])
    events = [(n, "p", "t") for n in range(30)]
    sent = [hubspot(*events), hubspot(*reversed(events)), hubspot(*events[15:], *events[:15])]
    answers = await asyncio.gather(*(app.webhooks.receive("hubspot", one) for one in sent * 3))
    assert [answer.status for answer in answers] == [200] * 9
    assert sum(len(answer.jobs) for answer in answers) == await app.jobs.count() == 30


async def test_without_an_id_the_body_tells_a_repeat(make):
    facts = Webhook(signatures=(Signature(header="x-sign"),), event="x-event")
    app = make(
        Inbound(provider="acme", secrets=[SECRET], jobs=anything),
        providers=[Provider(name="acme", base_url="https://acme.example", webhook=facts)],
    )
    assert await statuses(app, signed(), signed(), signed(b'{"n": 2}')) == [200] * 3
    assert await app.jobs.count() == 2


async def test_alike_pings_are_merged_until_the_work_begins(make):
    """The body only says whose files changed: what changes after the job began is told by an equal body."""
    dropbox = providers_by_name()["dropbox"]()
    app = make(Inbound(provider="dropbox", secrets=["s"], jobs=anything), providers=[dropbox])
    sent = answers.deliver(dropbox, URL, {"list_folder": {"accounts": ["a"]}}, datetime.now(UTC), secret="s")
    for _ in range(3):
        assert (await app.webhooks.receive("dropbox", sent)).status == 200
    assert await app.jobs.count() == 1
    await app.worker().drain()
    assert (await app.webhooks.receive("dropbox", sent)).job is not None
    assert await app.jobs.count() == 2


async def test_the_same_id_of_two_channels_is_two_deliveries(make):
    google = providers_by_name()["google"]()
    app = make(Inbound(provider="google", secrets=["s"], jobs=anything), providers=[google])
    for channel in ("c1", "c2", "c1"):
        headers = {"X-Goog-Channel-Token": "s", "X-Goog-Channel-Id": channel, "X-Goog-Message-Number": "1"}
        assert (await app.webhooks.receive("google", Delivery(headers, b"", URL))).status == 200
    assert await app.jobs.count() == 2


async def test_two_at_the_same_moment_are_one_job(app):
    answers = await asyncio.gather(*(app.webhooks.receive("acme", signed()) for _ in range(8)))
    assert [a.status for a in answers] == [200] * 8
    assert len([a for a in answers if a.job]) == 1
    assert await app.jobs.count() == 1


def test_a_repeat_waits_for_one_that_is_being_stored(postgres_database):
    """Acknowledged before the first one is committed, it would be lost if that one is rolled back."""
    database, inside, go, found = postgres_database, threading.Event(), threading.Event(), []
    once = json.dumps(["body", "", "thing.made", "", hashlib.sha256(signed().body).hexdigest()])

    def first(c, d):
        assert events.first_seen(c, d, "webhook:acme", once, d.now(c))
        inside.set()
        assert go.wait(LIMIT)
        raise RuntimeError("the database went away")

    def deliver_first():
        with pytest.raises(RuntimeError):
            database.transaction_sync(first)

    app = Resilient(
        database, handlers=KINDS, providers=[ACME], webhooks=[Inbound(provider="acme", secrets=[SECRET], jobs=anything)]
    )
    app.ready_sync()
    threads = [
        threading.Thread(target=deliver_first),
        threading.Thread(target=lambda: found.append(app.sync.webhooks.receive("acme", signed()))),
    ]
    threads[0].start()
    assert inside.wait(LIMIT)
    threads[1].start()
    threads[1].join(0.3)
    assert not found
    go.set()
    for thread in threads:
        thread.join(LIMIT)
    assert found[0].job is not None


# -- what goes wrong -------------------------------------------------------------------------------------------


async def test_success_is_said_after_the_commit_only(app, monkeypatch, caplog):
    from resilient.core.base.errors import DatabaseUnreachable

    async def away(*_, **__):
        raise DatabaseUnreachable("the database does not answer")

    await app.ready()
    monkeypatch.setattr(app.database, "transaction", away)
    answer = await app.webhooks.receive("acme", signed())
    assert (answer.status, answer.headers["Retry-After"]) == (503, "10")
    assert "not stored" in caplog.text
    monkeypatch.undo()
    assert (await app.webhooks.receive("acme", signed())).job is not None


async def test_what_no_job_can_hold(make, caplog):
    app = make(Inbound(provider="acme", secrets=[SECRET], jobs=anything), max_payload=1_000)
    assert await statuses(app, signed(json.dumps("x" * 2_000).encode())) == [413]
    assert "too large" in caplog.text
    assert await app.jobs.count() == 0
    assert await statuses(app, signed(b"1")) == [200]  # the id was not used up


@pytest.mark.parametrize("body", [b'{"n": "\\ud83d"}', b'{"n":' * 300 + b"1" + b"}" * 300, b'{"n": "\\u0000"}'])
async def test_what_a_payload_cannot_hold_decoded_comes_as_text(app, body):
    assert await statuses(app, signed(body), signed(body)) == [200, 200]
    (payload,) = await payloads(app)
    found = payload["body"]
    assert (json.loads(found) if isinstance(found, str) else found) == json.loads(body)
    assert payload["event"] == "thing.made"


# -- is the address yours? -------------------------------------------------------------------------------------


async def asked(make, name, delivery, **options):
    provider = providers_by_name()[name]()
    app = make(Inbound(provider=name, secrets=["s"], jobs=anything, **options), providers=[provider])
    answer = await app.webhooks.receive(name, delivery, account="a")
    assert await app.jobs.count() == 0
    return answer


async def test_slack_asks_with_a_signature(make):
    slack = providers_by_name()["slack"]()
    body = {"type": "url_verification", "challenge": "canary-echo"}
    sent = answers.deliver(slack, URL, body, datetime.now(UTC), secret="s", delivery="")
    answer = await asked(make, "slack", sent)
    assert (answer.status, answer.body) == (200, "canary-echo")
    assert answer.headers["Content-Type"].startswith("text/plain")
    assert (await asked(make, "slack", Delivery({}, sent.body, URL))).status == 401


@pytest.mark.parametrize(
    ("name", "method", "query"),
    [("microsoft_graph", "POST", "validationToken=canary%20%3Cb%3E"), ("dropbox", "GET", "challenge=canary%20%3Cb%3E")],
)
async def test_those_that_ask_before_they_can_sign_get_an_echo_as_plain_text(make, name, method, query):
    answer = await asked(make, name, Delivery({}, b"", f"{URL}?{query}", method))
    assert (answer.status, answer.body) == (200, "canary <b>")
    assert answer.headers["Content-Type"].startswith("text/plain")
    long = await asked(make, name, Delivery({}, b"", f"{URL}?{query}{'x' * 1_000}", method))
    assert long.status in (401, 405)


async def test_zoom_wants_a_proof(make):
    zoom = providers_by_name()["zoom"]()
    body = {"event": "endpoint.url_validation", "payload": {"plainToken": "canary"}}
    sent = answers.deliver(zoom, URL, body, datetime.now(UTC), secret="s")
    answer = await asked(make, "zoom", sent)
    proof = hmac.new(b"s", b"canary", hashlib.sha256).hexdigest()
    assert json.loads(answer.body) == {"plainToken": "canary", "encryptedToken": proof}
    assert answer.headers["Content-Type"].startswith("application/json")


async def test_asana_tells_its_secret_once_to_those_who_expect_it(make):
    kept = {}

    async def keep(account, secret):
        kept[account] = secret
        return account == "a"

    hello = Delivery({"X-Hook-Secret": "canary-new"}, b"", URL)
    answer = await asked(make, "asana", hello, handshake=keep)
    assert (answer.status, answer.headers["x-hook-secret"], kept) == (200, "canary-new", {"a": "canary-new"})
    assert (await asked(make, "asana", hello)).status == 403
    assert (await asked(make, "asana", hello, handshake=lambda *_: False)).status == 403


async def test_discord_and_xero_prove_by_refusing(make):
    for name, status in (("discord", 204), ("xero", 200)):
        provider = providers_by_name()[name]()
        secret = answers.secret_of(provider)
        sent = answers.deliver(provider, URL, {"type": 0}, datetime.now(UTC), secret=secret)
        app = make(Inbound(provider=name, secrets=[secret], jobs={}), providers=[provider])
        assert (await app.webhooks.receive(name, sent)).status == status
        assert (await app.webhooks.receive(name, Delivery(sent.headers, b"{}", URL))).status == 401


async def test_every_providers_deliveries_are_taken_once(make):
    every = [provider for make_provider in providers_by_name().values() if (provider := make_provider()).webhook]
    assert len(every) > 20
    inbound = [Inbound(provider=one.name, secrets=[answers.secret_of(one)], jobs=anything) for one in every]
    app = make(*inbound, providers=every)
    for provider in every:
        secret = answers.secret_of(provider)
        sent = answers.deliver(provider, URL, {"a": "1"}, datetime.now(UTC), secret=secret, event="it", delivery="d-1")
        repeats = [await app.webhooks.receive(provider.name, sent) for _ in range(2)]
        assert [a.status for a in repeats] == [provider.webhook.status] * 2, provider.name
        (job,) = await app.jobs.list(resource=f"{provider.name}/webhooks")
        assert repeats[0].job == job.id
        assert job.payload["event"] == ("it" if provider.webhook.event else "")
        assert secret not in str(job.payload)


# -- declarations ----------------------------------------------------------------------------------------------


def test_what_cannot_be_declared(database):
    def declare(*inbound):
        Resilient(database, handlers=KINDS, providers=[ACME, Provider(name="bare")], webhooks=inbound)

    good = Inbound(provider="acme", secrets=[SECRET], jobs=thing)
    assert SECRET not in repr(good)
    with pytest.raises(SetupError, match="is not listed"):
        declare(Inbound(provider="nobody", secrets=[SECRET], jobs=thing))
    with pytest.raises(SetupError, match="has no webhooks"):
        declare(Inbound(provider="bare", secrets=[SECRET], jobs=thing))
    with pytest.raises(SetupError, match="two Inbound"):
        declare(good, good)
    with pytest.raises(SetupError, match="takes handlers"):
        Inbound(provider="acme", secrets=[SECRET], jobs={"*": "acme.thing"})
    with pytest.raises(SetupError, match="takes a list"):
        Inbound(provider="acme", secrets=SECRET, jobs=thing)
    with pytest.raises(SetupError, match="without a secret"):
        Inbound(provider="acme", secrets=[], jobs=thing)


def test_the_synchronous_twin(database):
    app = Resilient(
        database, handlers=KINDS, providers=[ACME],
        webhooks=[Inbound(provider="acme", secrets=lambda _: [SECRET], jobs=anything)],
    )  # fmt: skip
    answer = app.sync.webhooks.receive("acme", signed())
    assert (answer.status, app.sync.jobs.get(answer.job).kind) == (200, "acme.any")
    assert app.sync.webhooks.receive("acme", signed()).job is None
