"""What a delivery says beside its proof: its id, its event, whether it is a repeat, and the question it may be."""

import hashlib
import hmac
import json

import pytest

from resilient.core.base.budgets import Fields
from resilient.core.events.webhook import (
    Challenge,
    Delivery,
    Proof,
    Signature,
    Webhook,
    challenge,
    event_name,
    identity,
    items_of,
    repeat_key,
    value_at,
)

URL = "https://h.test/in?id=q-1&kind=made&empty="
FIELDS = Fields.of({"X-Id": "h-1", "X-Kind": "thing"})
BODY = {"id": "b-1", "kind": "made", "n": 7, "list": [1], "a": {"x:y": "deep"}, "value": [{"id": "i-1"}]}


def sha256(content):
    return hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("X-Id", "h-1"),
        ("x-id", "h-1"),
        ("X-None", ""),
        ("query:id", "q-1"),
        ("query:none", ""),
        ("query:empty", ""),
        ("body:id", "b-1"),
        ("body:n", "7"),
        ("body:list", ""),
        ("body:none", ""),
        ("body:a['x:y']", "deep"),
        ("item:id", "i-1"),
        ("item:n", ""),
    ],
)
def test_what_stands_at_a_place(place, text):
    assert value_at(place, FIELDS, BODY, URL, {"id": "i-1"}) == text


def test_the_last_parameter_of_a_name_counts():
    """Also when it is empty."""
    assert value_at("query:id", FIELDS, None, "https://h.test/in?id=1&id=") == ""


@pytest.mark.parametrize(
    ("delivery", "id_"),
    [
        ("", ""),
        ("X-Id", "h-1"),
        ("X-Id body:id query:id item:id", "h-1 b-1 q-1 i-1"),
        ("X-Id X-None", ""),  # a part of it may be of many
    ],
)
def test_the_id_of_a_delivery(delivery, id_):
    webhook = Webhook(token="X-Token", events="value", delivery=delivery)
    assert identity(webhook, FIELDS, BODY, URL, {"id": "i-1"}) == id_


@pytest.mark.parametrize(
    ("event", "name"),
    [
        ("", ""),
        ("X-Kind", "thing"),
        ("X-Kind query:kind", "thing.made"),
        ("X-Kind X-None body:kind", "thing.made"),
        ("item:kind", "gone"),
    ],
)
def test_the_name_of_an_event(event, name):
    webhook = Webhook(token="X-Token", events="value", event=event)
    assert event_name(webhook, FIELDS, BODY, URL, {"kind": "gone"}) == name


@pytest.mark.parametrize(
    ("events", "body", "items"),
    [
        (None, BODY, None),
        ("value", BODY, [{"id": "i-1"}]),
        ("value", {"value": []}, []),
        ("value", {"value": {"id": "i-1"}}, None),
        ("value", {}, None),
        ("", [1, 2], [1, 2]),
        ("", {}, None),
    ],
)
def test_the_events_of_a_delivery(events, body, items):
    assert items_of(Webhook(token="X-Token", events=events), body) == items


@pytest.mark.parametrize(
    ("signed", "covered"),
    [
        ("{body}", {"body:id", "item:id"}),
        ("{form}", {"body:id", "item:id"}),
        ("{url}{form}", {"body:id", "item:id", "query:id", "query:a:b"}),
        ("{id}.{body}", {"body:id", "item:id", "X-Id"}),
    ],
)
def test_what_is_signed_with_the_rest(signed, covered):
    places = ("X-Id", "query:id", "query:a:b", "body:id", "item:id")
    signature = Signature(header="X-Sig", signed=signed)
    assert {place for place in places if signature.covers(place)} == covered
    known = Signature(header="X-Sig", scheme="equal", signed="")
    assert all(known.covers(place) for place in places)


# -- repeats -----------------------------------------------------------------------------------------------------------

RAW = json.dumps(BODY).encode()
GIVEN = Delivery({"X-Id": "h-1", "X-Kind": "thing", "X-Time": "1793534400"}, RAW, URL)
FORM = {"Content-Type": "application/x-www-form-urlencoded"}


def key(given=GIVEN, body=BODY, item=None, signed="{body}", timestamp="", **facts):
    """The key of a repeat, read again, of a delivery proved by a signature over this; None: nothing is signed."""
    if signed is None:
        webhook, proof = Webhook(token="X-Token", **facts), Proof("")
    else:
        signature = Signature(header="X-Sig", signed=signed, timestamp=timestamp)
        webhook, proof = Webhook(signatures=(signature,), **facts), Proof("", signature)
    text = repeat_key(webhook, proof, given, body, "acct", item)
    return json.loads(text) if text else text


@pytest.mark.parametrize(
    ("signed", "delivery", "ids"),
    [
        (None, "X-Id", ["h-1"]),
        (None, "X-Id query:id body:id", ["h-1", "q-1", "b-1"]),
        ("{id}.{body}", "X-Id", ["h-1"]),
        ("{body}", "body:id", ["b-1"]),
        ("{url}{body}", "query:id body:id", ["q-1", "b-1"]),
    ],
)
def test_a_signed_id_tells_a_repeat(signed, delivery, ids):
    assert key(signed=signed, delivery=delivery) == ["id", "acct", *ids]


@pytest.mark.parametrize("delivery", ["", "X-Id", "body:id X-Id", "body:none"])
def test_without_a_signed_id_what_was_signed_tells_it(delivery):
    for place in ("body:kind", "query:kind"):
        told = key(delivery=delivery, event=f"X-Kind {place}")
        assert told == ["body", "acct", "thing.made", "", sha256(RAW)]


def test_an_event_of_several():
    item = {"b": 1, "a": "é"}
    own = json.dumps(item, sort_keys=True).encode()
    assert key(item=item, events="value") == ["event", "acct", "", "", sha256(own)]
    assert key(item={"id": "i-1"}, events="value", delivery="item:id", event="item:id") == ["id", "acct", "i-1"]
    assert key(item={"id": "i-1"}, events="value", event="item:id")[2] == "i-1"
    form = Delivery({**GIVEN.headers, **FORM}, b"B=2&A=1", URL)
    assert key(form, item=item, events="value", signed="{form}") == ["event", "acct", "", "", sha256(own)]


def test_alike_pings_are_as_many_as_there_are_signed_times():
    assert key(ping=True) == key(ping=True, signed=None) == ""
    assert key(ping=True, timestamp="X-Time") == ""  # it is not signed
    told = ["body", "acct", "", "1793534400", sha256(RAW)]
    assert key(ping=True, signed="{timestamp}.{body}", timestamp="X-Time") == told
    assert key(ping=True, signed="{timestamp}.{body}", timestamp="body:n")[3] == "7"
    assert key(ping=True, signed="{timestamp}.{body}", timestamp="query:id")[3] == "q-1"


def test_a_form_in_any_order():
    form = Delivery({**GIVEN.headers, **FORM}, b"B=2&A=1", URL)
    assert key(form, signed="{form}")[-1] == sha256(b"A1B2")
    assert key(form, signed="{form}{body}")[-1] == sha256(b"B=2&A=1")
    assert key(form, signed=None)[-1] == sha256(b"B=2&A=1")
    assert key(Delivery(GIVEN.headers, b"B=2&A=1", URL), signed="{form}")[-1] == sha256(b"B=2&A=1")


def test_what_varies_is_left_out():
    rest = {**BODY, "n": "", "a": {"x:y": ""}}
    assert key(varies=("n", "a['x:y']"))[-1] == sha256(json.dumps(rest, sort_keys=True).encode())
    assert key(item={"n": 1, "a": 2}, events="value", varies=("n",))[-1] == sha256(b'{"a": 2, "n": ""}')


# -- questions ---------------------------------------------------------------------------------------------------------


def asked(word, place, body=None, fields=FIELDS, url=URL, secrets=("", "secret", "old"), **facts):
    facts = facts or {"token": "X-Token"}
    return challenge(Webhook(challenge=word, challenge_field=place, **facts), fields, body, url, secrets)


def test_an_echo():
    assert asked("echo", "body:id", BODY) == Challenge("b-1")
    assert asked("echo", "query:id") == Challenge("q-1", is_open=True)
    assert asked("echo", "X-Id") == Challenge("h-1", header="X-Id", is_secret=True)


def test_a_proof_of_the_secret():
    proof = hmac.new(b"secret", b"b-1", "sha256").hexdigest()
    text = json.dumps({"plainToken": "b-1", "encryptedToken": proof})
    assert asked("hmac", "body:id", BODY) == Challenge(text, "application/json")
    without = json.loads(asked("hmac", "body:id", BODY, secrets=()).text)
    assert without["encryptedToken"] == hmac.new(b"", b"b-1", "sha256").hexdigest()


def test_a_secret_that_is_told_before_anything_is_signed():
    signatures = (Signature(header="X-Sig"), Signature(header="X-Other"))
    told = asked("secret", "body:id", BODY, signatures=signatures)
    assert told == Challenge("b-1", is_secret=True)
    signed = Fields.of({"X-Other": "00"})
    assert asked("secret", "body:id", BODY, signed, signatures=signatures) == Challenge()


@pytest.mark.parametrize("word", ["echo", "hmac", "secret"])
def test_an_ordinary_delivery_is_no_question(word):
    assert asked(word, "body:question", BODY) == Challenge()
    assert asked(word, "body:id", None) == Challenge()
    assert asked(word, "body:id", {"id": "x" * 1001}) == Challenge()
    assert asked(word, "body:id", {"id": "x" * 1000}).text


def test_who_asks_by_signing_badly_asks_nothing():
    assert asked("status", "", BODY) == asked("", "", BODY) == Challenge()
