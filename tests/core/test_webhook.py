"""Webhooks: genuine ones pass, everything else is refused with its reason."""

import base64
import hashlib
import hmac
import json
from datetime import UTC, datetime, timedelta

import pytest

from resilient.core.base.errors import InvalidInput
from resilient.core.base.instants import Word
from resilient.core.events.webhook import (
    Delivery,
    Proof,
    Signature,
    Webhook,
    prove,
    verify,
    without_token,
)

NOW = datetime(2026, 11, 1, 12, 0, tzinfo=UTC)
BODY = b'{"id":"evt_1"}'
TIMED = Webhook(
    signatures=(
        Signature(header="X-Sig", pattern="v1=([0-9a-f]+)", signed="{timestamp}.{body}", timestamp="X-Time"),
        Signature(header="X-Old", signed="{body}"),
    ),
)


def sign(text, secret=b"secret", algorithm="sha256"):
    return hmac.new(secret, text, algorithm).hexdigest()


def delivery(at=NOW, body=BODY, secret=b"secret", **headers):
    stamp = str(int(at.timestamp()))
    signed = {"X-Sig": "v1=" + sign(stamp.encode() + b"." + body, secret), "X-Time": stamp}
    return Delivery(signed | headers, body)


def test_a_genuine_delivery():
    assert verify(TIMED, delivery(), ["secret"], NOW) == ""


def test_one_of_several_secrets_and_signatures_is_enough():
    assert verify(TIMED, delivery(), ["old", "secret"], NOW) == ""
    both = delivery()
    twice = Delivery({**both.headers, "X-Sig": "v1=00, " + both.headers["X-Sig"]}, BODY)
    assert verify(TIMED, twice, ["secret"], NOW) == ""


@pytest.mark.parametrize(
    ("given", "secrets", "reason"),
    [
        (delivery(secret=b"other"), ["secret"], "its signature does not fit"),
        (Delivery(delivery().headers, BODY + b" "), ["secret"], "its signature does not fit"),
        (Delivery({}, BODY), ["secret"], "it carries no signature"),
        (Delivery({"X-Sig": "v2=00"}, BODY), ["secret"], "it carries no signature"),
        (delivery(), [], "no secret is known for it"),
        (delivery(), [""], "no secret is known for it"),
        (delivery(NOW - timedelta(seconds=301)), ["secret"], "it was sent too long ago, or its clock is ahead of ours"),
        (delivery(NOW + timedelta(seconds=301)), ["secret"], "it was sent too long ago, or its clock is ahead of ours"),
        (delivery(**{"X-Time": "yesterday"}), ["secret"], "it does not say when it was sent"),
        (delivery(NOW - timedelta(seconds=300)), ["secret"], ""),
        (delivery(NOW + timedelta(seconds=300)), ["secret"], ""),
        (delivery(secret=b"\xed\xa0\xbd"), ["\ud83d"], ""),
        (delivery(), ["\ud83d"], "its signature does not fit"),  # half a character is no error of ours
    ],
)
def test_what_is_said_of_each(given, secrets, reason):
    assert verify(TIMED, given, secrets, NOW) == reason


def test_the_scheme_that_proved_it():
    assert prove(TIMED, delivery(), ["secret"], NOW) == Proof("", TIMED.signatures[0])
    old = Delivery({"X-Old": sign(BODY)}, BODY)
    assert prove(TIMED, old, ["secret"], NOW) == Proof("", TIMED.signatures[1])


def test_an_old_delivery_is_not_taken_by_a_weaker_scheme():
    old = delivery(NOW - timedelta(days=1))
    assert verify(TIMED, Delivery({**old.headers, "X-Old": sign(BODY)}, BODY), ["secret"], NOW)
    assert verify(TIMED, Delivery({"X-Old": sign(BODY)}, BODY), ["secret"], NOW) == ""


def test_an_empty_body_is_signed_too():
    assert verify(TIMED, delivery(body=b""), ["secret"], NOW) == ""


@pytest.mark.parametrize(
    ("key", "written", "secret"),
    [
        ("text", "s3cret", b"s3cret"),
        ("text", " s3cret ", b" s3cret "),
        ("hex", b"s3cret".hex(), b"s3cret"),
        ("base64", base64.b64encode(b"s3cret").decode(), b"s3cret"),
        ("base64", "AAAX", b"\x00\x00\x17"),
        ("base64", "czNjcmV0cw===", b"s3crets"),  # pasted with too much padding
        ("base64", base64.b64encode(b"s3cret+").decode().rstrip("=") + "\n", b"s3cret+"),
        ("whsec", "whsec_" + base64.b64encode(b"s3cret").decode(), b"s3cret"),
        ("whsec", base64.b64encode(b"s3cret").decode(), b"s3cret"),
        ("whsec", "whsec_" + base64.b64encode(b"s3cret++").decode().rstrip("="), b"s3cret++"),
    ],
)
def test_secrets_as_they_are_written(key, written, secret):
    webhook = Webhook(signatures=(Signature(header="X-Sig", key=key),))
    given = Delivery({"X-Sig": sign(BODY, secret)}, BODY)
    assert verify(webhook, given, [written], NOW) == ""
    if key != "text":
        for other in ("not so written!", f"{written}!!!!", f"!!!!{written}", f"x_{written}"):
            assert verify(webhook, given, [other], NOW) == "its signature does not fit"
        assert verify(webhook, given, ["not so written!", written], NOW) == ""


def test_a_prefix_belongs_to_one_way_of_writing():
    webhook = Webhook(signatures=(Signature(header="X-Sig", key="base64"),))
    written = "whsec_" + base64.b64encode(b"s3cret").decode()
    assert verify(webhook, Delivery({"X-Sig": sign(BODY, b"s3cret")}, BODY), [written], NOW)


@pytest.mark.parametrize("scheme", ["hmac-sha1", "hmac-sha256"])
def test_schemes_and_encodings(scheme):
    digest = hmac.new(b"secret", BODY, scheme.removeprefix("hmac-")).digest()
    for encoding, text in (("hex", digest.hex()), ("base64", base64.b64encode(digest).decode())):
        webhook = Webhook(signatures=(Signature(header="X-Sig", scheme=scheme, encoding=encoding),))
        assert verify(webhook, Delivery({"x-sig": text}, BODY), ["secret"], NOW) == ""


@pytest.mark.parametrize("place", ["X-Id", "body:id", "query:id"])
def test_an_id_in_the_signed_text(place):
    webhook = Webhook(signatures=(Signature(header="X-Sig", signed="v0:{id}.{body}:"),), delivery=place)
    given = Delivery({"X-Sig": sign(b"v0:evt_1." + BODY + b":"), "X-Id": "evt_1"}, BODY, "https://h.test/in?id=evt_1")
    assert verify(webhook, given, ["secret"], NOW, body=json.loads(BODY)) == ""
    other = Delivery({**given.headers, "X-Id": "evt_2"}, BODY, "https://h.test/in?id=evt_2")
    assert verify(webhook, other, ["secret"], NOW, body={"id": "evt_2"}) == "its signature does not fit"


def test_a_plain_hash_with_the_secret_in_it():
    webhook = Webhook(signatures=(Signature(header="X-Sig", scheme="sha256", signed="{secret}{method}{url}{body}"),))
    url = "https://hooks.example.com/in?x=1"
    text = b"secretPOST" + url.encode() + BODY
    assert verify(webhook, Delivery({"X-Sig": hashlib.sha256(text).hexdigest()}, BODY, url), ["secret"], NOW) == ""


@pytest.mark.parametrize(
    ("signed", "received"),
    [
        ("https://h.test:443/in", "https://h.test/in"),
        ("https://h.test/in", "https://h.test:443/in"),
        ("http://h.test:80/in", "http://h.test/in"),
        ("https://h.test/in", "https://h.test:8443/in"),  # Twilio leaves any port out
        ("https://h.test:8443/in", "https://h.test:8443/in"),
    ],
)
def test_a_url_is_tried_with_and_without_its_default_port(signed, received):
    webhook = Webhook(signatures=(Signature(header="X-Sig", signed="{url}{form}"),))
    headers = {"X-Sig": sign(signed.encode() + b"A1B2"), "Content-Type": "application/x-www-form-urlencoded"}
    given = Delivery(headers, b"B=2&A=1", received)
    assert verify(webhook, given, ["secret"], NOW) == ""
    other = Delivery(given.headers, given.body, "https://other.test/in")
    assert verify(webhook, other, ["secret"], NOW)


@pytest.mark.parametrize(
    ("signed", "received"),
    [("//:80/in", "/in"), ("https://u@h.test/in", "https://u@h.test:8443/in")],
)
def test_an_address_without_a_host_or_with_a_user_is_taken_as_it_is(signed, received):
    webhook = Webhook(signatures=(Signature(header="X-Sig", signed="{url}{body}"),))
    for text, reason in ((received, ""), (signed, "its signature does not fit")):
        given = Delivery({"X-Sig": sign(text.encode() + BODY)}, BODY, received)
        assert verify(webhook, given, ["secret"], NOW) == reason


def test_a_time_in_the_body():
    webhook = Webhook(signatures=(Signature(header="X-Sig", timestamp="body:sent", word=Word.EPOCH_MS),))
    given = Delivery({"X-Sig": sign(BODY)}, BODY)
    assert verify(webhook, given, ["secret"], NOW, body={"sent": int(NOW.timestamp() * 1000)}) == ""
    assert "when it was sent" in verify(webhook, given, ["secret"], NOW, body=None)


def test_a_time_in_the_address_or_as_a_date():
    epoch = Webhook(signatures=(Signature(header="X-Sig", timestamp="query:t"),))
    url = f"https://h.test/in?t={NOW.timestamp():.0f}"
    assert verify(epoch, Delivery({"X-Sig": sign(BODY)}, BODY, url), ["secret"], NOW) == ""
    date = Signature(header="X-Sig", timestamp="X-Time", timestamp_pattern="(.+)", word=Word.HTTP_DATE)
    for text, reason in (("Sunday, 01-Nov-26 12:00:00 GMT", ""), ("", "it does not say when it was sent")):
        given = Delivery({"X-Sig": sign(BODY), "X-Time": text}, BODY)
        assert verify(Webhook(signatures=(date,)), given, ["secret"], NOW) == reason


@pytest.mark.parametrize(
    ("token", "headers", "body", "url"),
    [
        ("X-Token", {"x-token": "agreed"}, None, ""),
        ("body:value[0].state", {}, {"value": [{"state": "agreed"}]}, ""),
        ("query:secret", {}, None, "https://h.test/in?a=1&secret=agreed"),
    ],
)
def test_without_signatures_the_agreed_token_counts(token, headers, body, url):
    webhook = Webhook(token=token)
    assert verify(webhook, Delivery(headers, BODY, url), ["agreed"], NOW, body=body) == ""
    refused = "its token is not the one agreed"
    assert verify(webhook, Delivery(headers, BODY, url), ["other"], NOW, body=body) == refused
    assert verify(webhook, Delivery({}, BODY), ["agreed"], NOW) == refused


@pytest.mark.parametrize(
    ("body", "is_genuine"),
    [
        ({"value": [{"state": "agreed"}, {"state": "agreed"}]}, True),
        ({"value": [{"state": "agreed"}, {"state": "other"}]}, False),
        ({"value": [{"state": "agreed"}, {}]}, False),
        ({"value": []}, False),
        ({"value": {"state": "agreed"}}, False),
        ({"state": "agreed"}, False),
    ],
)
def test_each_of_several_events_carries_the_token(body, is_genuine):
    webhook = Webhook(token="item:state", events="value")
    assert (verify(webhook, Delivery({}, BODY), ["agreed"], NOW, body=body) == "") is is_genuine


def test_half_a_character_in_a_token_is_no_error():
    webhook = Webhook(signatures=(Signature(header="X-Token", scheme="equal"),))
    assert verify(webhook, Delivery({"X-Token": "\ud83d"}, BODY), ["agreed"], NOW) == "its signature does not fit"
    assert verify(webhook, Delivery({"X-Token": "agreed"}, BODY), ["\ud83d"], NOW) == "its signature does not fit"


def test_the_secret_itself_in_a_header():
    webhook = Webhook(signatures=(Signature(header="Authorization", scheme="equal", pattern=r"Bearer (\S+)"),))
    assert verify(webhook, Delivery({"Authorization": "Bearer agreed"}, BODY), ["agreed"], NOW) == ""
    assert verify(webhook, Delivery({"Authorization": "agreed"}, BODY), ["agreed"], NOW)


def test_so_many_signatures_of_one_header_are_looked_at():
    """Anybody may send them, and each costs a check of the whole body."""
    webhook = Webhook(signatures=(Signature(header="X-Sig", scheme="ed25519", key="hex"),))
    checked = []
    header = " ".join(["ab" * 64] * 1_000)
    verify(webhook, Delivery({"X-Sig": header}, BODY), ["00"], NOW, ed25519=lambda *a: bool(checked.append(a)))
    assert len(checked) == 20


def test_ed25519_needs_its_check():
    webhook = Webhook(signatures=(Signature(header="X-Sig", scheme="ed25519", key="hex"),))
    given = Delivery({"X-Sig": "0a"}, BODY)
    text = "^verify: this provider signs with Ed25519; pass its check as ed25519=$"
    with pytest.raises(InvalidInput, match=text):
        verify(webhook, given, ["00"], NOW)
    seen = []
    assert verify(webhook, given, ["00"], NOW, ed25519=lambda *a: bool(seen.append(a)) or True) == ""
    assert seen == [(b"\x00", b"\x0a", BODY)]


@pytest.mark.parametrize(
    ("encoding", "text", "signature"),
    [("base64", "AQIDBA==", b"\1\2\3\4"), ("base64", "AQIDB!", b""), ("hex", "0a0b", b"\n\x0b"), ("hex", "x", b"")],
)
def test_a_signature_of_ed25519_as_it_is_written(encoding, text, signature):
    webhook = Webhook(signatures=(Signature(header="X-Sig", scheme="ed25519", key="hex", encoding=encoding),))
    seen = []
    verify(webhook, Delivery({"X-Sig": text}, BODY), ["00"], NOW, ed25519=lambda *a: bool(seen.append(a)))
    assert seen == [(b"\x00", signature, BODY)]


def test_nothing_secret_in_the_repr():
    assert "canary" not in repr(Delivery({"a": "canary"}, b"canary", "https://h/?x=canary"))


JSON = {"Content-Type": "application/json"}
FORM = {"Content-Type": "application/x-www-form-urlencoded"}
HASHED = Webhook(signatures=(Signature(header="X-Sig", signed="{url}{form}", body_hash="query:bodySHA256"),))


def hashed(body, headers=JSON, told=None, signed=b""):
    url = f"https://h.test/in?bodySHA256={told or hashlib.sha256(body).hexdigest()}"
    return Delivery({"X-Sig": sign(url.encode() + signed), **headers}, body, url)


def test_a_body_that_only_its_hash_in_the_address_covers():
    """Twilio's JSON: the address is signed, and holds the hash."""
    assert verify(HASHED, hashed(BODY), ["secret"], NOW) == ""
    assert verify(HASHED, hashed(BODY, told=hashlib.sha256(BODY).hexdigest().upper()), ["secret"], NOW) == ""
    assert verify(HASHED, hashed(BODY + b" ", told=hashlib.sha256(BODY).hexdigest()), ["secret"], NOW)
    assert verify(HASHED, hashed(b"A=1", FORM), ["secret"], NOW)  # it says it is a form, which would have to be signed
    bare = "https://h.test/in"
    assert verify(HASHED, Delivery({"X-Sig": sign(bare.encode()), **JSON}, BODY, bare), ["secret"], NOW)
    assert verify(HASHED, Delivery({"X-Sig": sign(bare.encode())}, b"", bare), ["secret"], NOW) == ""


def test_a_signed_form_is_not_taken_as_something_else():
    """Its fields make the same text as another body would: only what says it is a form is one."""
    url, text = "https://h.test/in", b'{"a":1}'
    signature = {"X-Sig": sign(url.encode() + text)}
    assert verify(HASHED, Delivery({**signature, **FORM}, text, url), ["secret"], NOW) == ""
    charset = {"content-type": " Application/X-WWW-Form-URLencoded ; charset=utf-8"}
    assert verify(HASHED, Delivery({**signature, **charset}, text, url), ["secret"], NOW) == ""
    assert verify(HASHED, Delivery({**signature, **JSON}, text, url), ["secret"], NOW)


def test_a_hash_in_a_header():
    webhook = Webhook(signatures=(Signature(header="X-Sig", signed="{url}{form}", body_hash="X-Hash"),))
    headers = {"X-Sig": sign(b"https://h.test/in"), "X-Hash": hashlib.sha256(BODY).hexdigest()}
    assert verify(webhook, Delivery(headers, BODY, "https://h.test/in"), ["secret"], NOW) == ""
    assert verify(webhook, Delivery(headers, BODY + b" ", "https://h.test/in"), ["secret"], NOW)


def test_a_form_that_is_no_text_is_no_error():
    webhook = Webhook(signatures=(Signature(header="X-Sig", signed="{form}"),))
    signature = {"X-Sig": sign("A\ufffd".encode())}
    assert verify(webhook, Delivery({**signature, **FORM}, b"A=\xff", ""), ["secret"], NOW) == ""
    assert verify(webhook, Delivery({"X-Sig": sign(b"A=\xff"), **FORM}, b"A=\xff", ""), ["secret"], NOW)


PLACES = "a place is a header, or 'body:...', 'query:...'"
ROOT = "is no path into a body: write error.code, errors[0].code, errors[].code"


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"header": ""}, "header=''): say in which header the signature stands"),
        (
            {"scheme": "hmac-md5"},
            "scheme='hmac-md5'): scheme is one of 'hmac-sha256', 'hmac-sha1', 'sha256', 'ed25519', 'equal'",
        ),
        ({"encoding": "base32"}, "encoding='base32'): encoding is one of 'hex', 'base64'"),
        ({"key": "pem"}, "key='pem'): key is one of 'text', 'hex', 'base64', 'whsec'"),
        ({"word": "epoch"}, f"word='epoch'): word is one of {', '.join(f'Word.{one.name}' for one in Word)}"),
        ({"pattern": "(a)(b)"}, "pattern='(a)(b)') has 2 groups, not 0 or 1: the group is what is read"),
        ({"timestamp_pattern": "a"}, "timestamp_pattern='a') has 0 groups, not 1: the group is what is read"),
        ({"tolerance": 0}, "tolerance=0): tolerance is a number above 0"),
        ({"timestamp": "bdy:x"}, f"timestamp='bdy:x'): {PLACES}"),
        ({"timestamp": "item:x"}, f"timestamp='item:x'): {PLACES}"),
        ({"body_hash": "query:"}, f"body_hash='query:'): {PLACES}"),
        (
            {"signed": "{nonsense}{body}"},
            (
                "signed='{nonsense}{body}'): nothing fills {nonsense}; in braces use {body}, {form}, {id}, {method},"
                " {secret}, {timestamp}, {url}"
            ),
        ),
        (
            {"signed": "{timestamp}.{body}"},
            "signed='{timestamp}.{body}'): say timestamp=, the place of the time in braces",
        ),
        ({"signed": "{url}"}, "signed='{url}'): without {body} or {form} in it anybody could change the body"),
    ],
)
def test_what_is_wrong_with_a_signature_is_said(facts, text):
    with pytest.raises(InvalidInput) as caught:
        Signature(**{"header": "X-Sig", **facts})
    assert str(caught.value) == f"Signature({text}"


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"token": ""}, "): without signatures= or token= nobody could tell a forged delivery"),
        (
            {"signatures": (Signature(header="X"),)},
            "): token= is for what is not signed; beside it use Signature(scheme='equal')",
        ),
        (
            {"challenge": "ping"},
            "challenge='ping'): challenge is one of '', 'echo', 'hmac', 'status', 'secret'",
        ),
        *(
            (
                {"challenge": word, "challenge_field": place},
                (
                    f"challenge='{word}', challenge_field='{place}'): 'echo', 'hmac' and 'secret' need the place of the"
                    " value, the others have none"
                ),
            )
            for word, place in (("echo", ""), ("hmac", ""), ("secret", ""), ("status", "X-A"), ("", "X-A"))
        ),
        ({"status": 199}, "status=199): say which 2xx a delivery is answered with"),
        ({"status": 300}, "status=300): say which 2xx a delivery is answered with"),
        ({"answer_within": 0}, "answer_within=0): answer_within is a number above 0"),
        ({"life": -1}, "life=-1): life is a number above 0"),
        ({"varies": "sent"}, "varies='sent'): varies lists texts: write ('sent',)"),
        ({"varies": ("a]",)}, f"varies=...): 'a]' {ROOT}"),
        ({"delivery": "X-Id item:id"}, f"delivery='item:id'): {PLACES}"),
        ({"delivery": "itm:id", "events": ""}, f"delivery='itm:id'): {PLACES}, 'item:...'"),
        ({"event": "body:"}, f"event='body:'): {PLACES}"),
        ({"token": "query:", "events": ""}, f"token='query:'): {PLACES}, 'item:...'"),
        ({"challenge": "echo", "challenge_field": "bdy:x"}, f"challenge_field='bdy:x'): {PLACES}"),
    ],
)
def test_what_is_wrong_with_a_webhook_is_said(facts, text):
    with pytest.raises(InvalidInput) as caught:
        Webhook(**{"token": "X-Token", **facts})
    assert str(caught.value) == f"Webhook({text}"


@pytest.mark.parametrize(
    "facts", [{"event": "body:a]"}, {"events": "a]"}, {"events": "", "event": "item:a]"}, {"varies": ("a]",)}]
)
def test_what_is_no_path_is_refused(facts):
    with pytest.raises(InvalidInput, match="is no path into a body"):
        Webhook(token="X-Token", **facts)


def test_what_is_no_pattern_is_refused():
    for name in ("pattern", "timestamp_pattern"):
        with pytest.raises(InvalidInput, match=rf"^Signature\({name}='\('\) is no regular expression: "):
            Signature(header="X-Sig", **{name: "("})


def test_facts_at_the_edge_of_what_is_taken():
    assert Signature(header="X-Sig", pattern="[0-9a-f]+").pattern == "[0-9a-f]+"
    assert Signature(header="X-Sig", scheme="equal", signed="").scheme == "equal"
    assert [Webhook(token="X-Token", status=status).status for status in (200, 299)] == [200, 299]
    places = Webhook(token="item:", events="", delivery="query:id item:id", event="body:a['x:y']")
    assert places.delivery == "query:id item:id"


@pytest.mark.parametrize(
    ("events", "token", "body"),
    [
        ("value", "body:value[0].state", {"value": [{"state": "S", "id": 1}, {"state": "S", "id": 2}]}),
        ("value", "body:value[].state", {"value": [{"state": "S", "id": 1}, {"state": "S", "id": 2}]}),
        ("a.b", "body:a['b'][0].state", {"a": {"b": [{"state": "S", "id": 1}, {"state": "S", "id": 2}]}}),
        ("", "body:[0].state", [{"state": "S", "id": 1}, {"state": "S", "id": 2}]),
        ("value", "item:state", {"value": [{"state": "S", "id": 1}, {"state": "S", "id": 2}]}),
    ],
)
def test_an_event_of_several_is_shown_without_the_token(events, token, body):
    webhook = Webhook(token=token, events=events)
    for n in (1, 2):
        assert without_token(webhook, body, {"state": "S", "id": n}) == {"state": "", "id": n}
    other = Webhook(token="body:state", events=events)
    assert without_token(other, body, {"state": "mine"}) == {"state": "mine"}


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        ("body:state", {"state": "", "a": {"x:y": "S"}, "query": "q"}),
        ("body:a['x:y']", {"state": "S", "a": {"x:y": ""}, "query": "q"}),
        ("query:query", {"state": "S", "a": {"x:y": "S"}, "query": "q"}),
        ("state", {"state": "S", "a": {"x:y": "S"}, "query": "q"}),
    ],
)
def test_a_body_is_shown_without_the_token(token, shown):
    body = {"state": "S", "a": {"x:y": "S"}, "query": "q"}
    assert without_token(Webhook(token=token), body) == shown
    assert body["state"] == "S"


@pytest.mark.parametrize("token", ["query:state", "state"])
def test_an_event_is_shown_whole_where_the_token_stands_elsewhere(token):
    assert without_token(Webhook(token=token, events=""), [{"state": "S"}], {"state": "S"}) == {"state": "S"}
