"""Webhooks of a provider: how they are signed, as facts, and whether one is genuine.

The signature is computed over the raw bytes; parsing first and writing again changes them. Comparisons take
the same time wherever they differ. A signature without a time can be replayed for ever, so each
delivery is noted; what decides whether another one is a repeat must be signed itself, or whoever caught a delivery
could send it again under another id (`repeat_key`). Ed25519 needs a library, so its check is passed in.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import re
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from resilient.core.base.body import hidden, hidden_in_item, pick
from resilient.core.base.bounds import WEBHOOK_CHALLENGE, WEBHOOK_FIELDS
from resilient.core.base.budgets import Fields
from resilient.core.base.errors import InvalidInput
from resilient.core.base.instants import Word, read
from resilient.core.base.misfit import (
    check_braces,
    check_number,
    check_paths,
    check_pattern,
    check_texts,
    check_word,
    explained_class,
)
from resilient.core.base.phrases import plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from datetime import datetime

Scheme = Literal["hmac-sha256", "hmac-sha1", "sha256", "ed25519", "equal"]
Encoding = Literal["hex", "base64"]
Key = Literal["text", "hex", "base64", "whsec"]
Challenges = Literal["", "echo", "hmac", "status", "secret"]
_MOST_SIGNATURES: Final = 20  # of one header are looked at: each costs a check, and anybody may send
_PARTS: Final = frozenset({"body", "timestamp", "id", "method", "url", "form", "secret"})
_PART: Final = re.compile(r"\{(\w+)\}")


@explained_class
@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """One scheme of signing.

    ``header``: where the signature is; ``pattern``: a regular expression with one group, which is it (a header may
    hold several). ``scheme``: ``hmac-sha256``, ``hmac-sha1``, ``sha256`` (a plain hash with the ``{secret}`` in its
    text), ``ed25519``, or ``equal``: nothing is signed, the header holds the secret itself. ``signed``: the signed
    text, of ``{body}``, ``{timestamp}``, ``{id}``, ``{method}``, ``{url}``, ``{form}`` (the fields of a form, sorted,
    each name with its value; nothing for any other body) and ``{secret}``. ``body_hash``: the place, as `Webhook` has
    them, of the SHA-256 of the body in hex, for those that sign only the address of a body that is no form.
    ``encoding``: of the signature, ``hex`` or ``base64``.

    ``timestamp``: a place; ``timestamp_pattern``: one group, its part that is the time, in the dialect ``word``;
    ``tolerance``: seconds it may be off, 300 by default; without ``timestamp`` nothing is checked. ``key``: how the
    provider writes the secret: ``text``, ``hex``, ``base64`` (padded or not), or ``whsec`` (Standard Webhooks: base64,
    perhaps behind ``whsec_``). Raises `InvalidInput`.
    """

    header: str
    scheme: Scheme = "hmac-sha256"
    signed: str = "{body}"
    encoding: Encoding = "hex"
    pattern: str = r"(\S+)"
    timestamp: str = ""
    timestamp_pattern: str = r"(\S+)"
    word: Word = Word.EPOCH_S
    tolerance: float = 300.0
    key: Key = "text"
    body_hash: str = ""

    def __post_init__(self) -> None:
        check_word("Signature", "scheme", self.scheme, Scheme)
        check_word("Signature", "encoding", self.encoding, Encoding)
        check_word("Signature", "key", self.key, Key)
        check_word("Signature", "word", self.word, Word)
        check_braces("Signature", "signed", self.signed, _PARTS)
        check_pattern("Signature", "pattern", self.pattern, groups=(0, 1))
        check_pattern("Signature", "timestamp_pattern", self.timestamp_pattern, groups=(1,))
        check_number("Signature", "tolerance", self.tolerance)
        _check_place("Signature", "timestamp", self.timestamp)
        _check_place("Signature", "body_hash", self.body_hash)
        if not self.header:
            raise InvalidInput("Signature(header=''): say in which header the signature stands")
        if "{timestamp}" in self.signed and not self.timestamp:
            raise InvalidInput(f"Signature(signed={self.signed!r}): say timestamp=, the place of the time in braces")
        if self.scheme != "equal" and "{body}" not in self.signed and "{form}" not in self.signed:
            raise InvalidInput(
                f"Signature(signed={self.signed!r}): without {{body}} or {{form}} in it anybody could change the body"
            )

    def covers(self, place: str) -> bool:
        """Whether what stands at a place is signed with the rest."""
        kind, colon, _ = place.partition(":")
        if self.scheme == "equal":  # whoever knows the secret could have written all of it
            return True
        if not colon:
            return "{id}" in self.signed
        if kind == "query":
            return "{url}" in self.signed
        return "{body}" in self.signed or "{form}" in self.signed


@explained_class
@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """How a provider calls us.

    A place is a header, ``body:`` and a path, ``query:`` and a parameter, or, with ``events``, ``item:`` and a path
    into one event. ``signatures``: the schemes it uses, the best first; none: it signs nothing, so ``token`` is the
    place of what was agreed when the webhook was made (of several events, each must carry it). ``events``: the path of
    the list in a body that holds several events ("" if the body is that list; None: it holds one): each becomes a job
    of its own. ``delivery``: the place of an id that a repeat carries again, or several that name it together,
    separated by a space; what is not signed is shown, but does not decide. ``event``: the place of what happened, or
    several, joined by a point. ``ping``: two that are alike may mean two changes. ``varies``: paths of what differs in
    a repeat (a time of sending, a count of attempts), which is left out where the rest tells a repeat.

    ``challenge``: how its address is proved: ``echo``: the value at the place ``challenge_field`` is sent
    back; ``hmac``: with its signature; ``status``: by refusing bad signatures with 401; ``secret``: it sends, unsigned,
    the secret it will sign with, for `Inbound`'s ``handshake``. ``answer_within``: seconds; ``status``: of an answer.
    ``repeats``: whether a failed delivery comes again by itself. ``life``: seconds after which it must be renewed.
    Raises `InvalidInput`.
    """

    signatures: tuple[Signature, ...] = ()
    token: str = ""
    delivery: str = ""
    event: str = ""
    challenge: Challenges = ""
    challenge_field: str = ""
    ping: bool = False
    answer_within: float | None = None
    status: int = 200
    repeats: bool = True
    life: float | None = None
    events: str | None = None
    varies: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_texts("Webhook", self, "varies")
        check_paths("Webhook", self, "varies")
        check_word("Webhook", "challenge", self.challenge, Challenges)
        check_number("Webhook", "answer_within", self.answer_within)
        check_number("Webhook", "life", self.life)
        if not self.signatures and not self.token:
            raise InvalidInput("Webhook(): without signatures= or token= nobody could tell a forged delivery")
        if self.signatures and self.token:
            raise InvalidInput("Webhook(): token= is for what is not signed; beside it use Signature(scheme='equal')")
        if (self.challenge in ("echo", "hmac", "secret")) != bool(self.challenge_field):
            raise InvalidInput(
                f"Webhook(challenge={self.challenge!r}, challenge_field={self.challenge_field!r}): 'echo', 'hmac' and"
                " 'secret' need the place of the value, the others have none"
            )
        if not 200 <= self.status < 300:  # noqa: PLR2004 - HTTP's own border of success
            raise InvalidInput(f"Webhook(status={self.status!r}): say which 2xx a delivery is answered with")
        if self.events:
            pick(None, self.events)  # raises for what is no path
        for name in ("token", "delivery", "event", "challenge_field"):
            for place in getattr(self, name).split():
                _check_place("Webhook", name, place, items=self.events is not None)

    @property
    def needs_body(self) -> bool:
        """Whether the body has to be decoded before a delivery can be verified."""
        places = [self.token] + [place for one in self.signatures for place in (one.timestamp, one.body_hash)]
        places += self.delivery.split() if any("{id}" in one.signed for one in self.signatures) else []
        return any(place.startswith(("body:", "item:")) for place in places)


def _check_place(where: str, name: str, place: str, *, items: bool = False) -> None:
    """Refuse a place nobody can read. Raises `InvalidInput`."""
    kind, colon, path = place.partition(":")
    kinds = ("body", "query", "item") if items else ("body", "query")
    if colon and (kind not in kinds or (not path and kind != "item")):
        choices = ", ".join(f"'{one}:...'" for one in kinds)
        raise InvalidInput(f"{where}({name}={place!r}): a place is a header, or {choices}")
    if kind in ("body", "item"):
        pick(None, path)


@dataclass(frozen=True, slots=True)
class Challenge:
    """What to answer a question about the address with. ``text`` "": nothing was asked. ``header``: to send it in.

    ``is_open``: it cannot be signed yet, and is only sent back; ``is_secret``: it is the secret of what will be sent.
    """

    text: str = field(default="", repr=False)
    media: str = "text/plain"
    header: str = ""
    is_open: bool = False
    is_secret: bool = False


@dataclass(frozen=True, slots=True)
class Delivery:
    """One request that says it is a webhook. ``url``: as the sender wrote it, with scheme, host and query."""

    headers: Mapping[str, str] = field(repr=False)
    body: bytes = field(repr=False)
    url: str = field(default="", repr=False)
    method: str = "POST"


class Received(NamedTuple):
    """The parts of a delivery that a signature may be made of. ``id``: what a repeat of it carries again."""

    fields: Fields
    raw: bytes
    body: Any  # its decoded JSON
    url: str
    method: str
    id: str


class Proof(NamedTuple):
    """What verifying gave: why a delivery is refused ("": it is genuine), and the scheme that proved it."""

    reason: str
    signature: Signature | None = None


def verify(
    webhook: Webhook,
    delivery: Delivery,
    secrets: Iterable[str],
    now: datetime,
    *,
    body: Any = None,
    ed25519: Callable[[bytes, bytes, bytes], bool] | None = None,
) -> str:
    """Why a delivery is refused; "" if one of ``secrets`` (several while they rotate) proves it genuine.

    ``body``: the decoded JSON, for facts that stand in it. ``ed25519(key, signature, text)``: the check by a
    library; without it Ed25519 raises `InvalidInput`. Reasons are a few fixed texts, so that a log of them can be
    bounded.
    """
    return prove(webhook, delivery, secrets, now, body=body, ed25519=ed25519).reason


def prove(
    webhook: Webhook,
    delivery: Delivery,
    secrets: Iterable[str],
    now: datetime,
    *,
    body: Any = None,
    ed25519: Callable[[bytes, bytes, bytes], bool] | None = None,
) -> Proof:
    """`verify`, and which scheme proved it."""
    fields, keys = Fields.of(delivery.headers), [secret for secret in secrets if secret and not secret.isspace()]
    if not keys:
        return Proof("no secret is known for it")
    if not webhook.signatures:
        return Proof("" if _has_token(webhook, fields, body, delivery.url, keys) else "its token is not the one agreed")
    named = identity(webhook, fields, body, delivery.url)
    received = Received(fields, delivery.body, body, delivery.url, delivery.method, named)
    reason = "it carries no signature"
    for signature in webhook.signatures:
        matches = re.finditer(signature.pattern, fields.get(signature.header.lower(), ""))
        signatures = [one[1] if one.re.groups else one[0] for one in islice(matches, _MOST_SIGNATURES)]
        if not signatures:
            continue
        if stale := _stale(signature, received, now):
            return Proof(stale)  # no weaker scheme is tried: by it an old delivery could be replayed
        if any(_proves(signature, key, signatures, received, ed25519) for key in keys):
            return Proof("", signature)
        reason = "its signature does not fit"
    return Proof(reason)


def _has_token(webhook: Webhook, fields: Fields, body: Any, url: str, keys: list[str]) -> bool:
    """Whether there is a token and each one is in ``keys``; of several events, each carries its own."""
    each = [None]
    if webhook.token.startswith("item:"):
        each = items_of(webhook, body) or []
    tokens = [value_at(webhook.token, fields, body, url, item) for item in each]
    return bool(tokens) and all(any(_same(token, key) for key in keys) for token in tokens)


def items_of(webhook: Webhook, body: Any) -> list[Any] | None:
    """The events in a body that holds several; None if it is one event itself, or has another shape."""
    if webhook.events is None:
        return None
    values = pick(body, webhook.events)
    return values[0] if values and isinstance(values[0], list) else None


def value_at(place: str, fields: Mapping[str, str], body: Any, url: str, item: Any = None) -> str:
    """The text at a place (see `Webhook`), such as every database takes; "" if there is none."""
    kind, colon, name = place.partition(":")
    if not colon:
        return plain(fields.get(place.lower(), ""))
    if kind == "query":
        try:
            return plain(dict(form_fields(urlsplit(url).query)).get(name, ""))
        except ValueError:
            return ""
    values = pick(item if kind == "item" else body, name)
    return plain(str(values[0])) if values and isinstance(values[0], (str, int)) else ""


def identity(webhook: Webhook, fields: Mapping[str, str], body: Any, url: str, item: Any = None) -> str:
    """The id that a repeat of this delivery carries again; "" if the provider sends none."""
    return " ".join(_ids(webhook, fields, body, url, item))


def event_name(webhook: Webhook, fields: Mapping[str, str], body: Any, url: str, item: Any = None) -> str:
    """The name of what happened, as a delivery or one event of it says; "" if the provider does not say."""
    values = [value_at(place, fields, body, url, item) for place in webhook.event.split()]
    return ".".join(value for value in values if value)


def repeat_key(webhook: Webhook, proof: Proof, delivery: Delivery, body: Any, account: str, item: Any = None) -> str:
    """The key that a genuine delivery, or an event of it, shares with its repeats; "" where equal ones may be two.

    The provider's id decides where it is signed, or where nothing is, so that all of the request stands and falls
    with the secret. Else what was signed decides: whoever caught a delivery can give it another id, but not another
    body. The name of what happened counts too, also where a header says it: two events may have one body. ``item``:
    one event of several.
    """
    fields, signature, url = Fields.of(delivery.headers), proof.signature, delivery.url
    signed = signature is None or all(signature.covers(place) for place in webhook.delivery.split())
    if signed and (named := _ids(webhook, fields, body, url, item)):
        return json.dumps(["id", account, *named])
    sent = ""
    if webhook.ping:
        if signature is None or "{timestamp}" not in signature.signed:
            return ""
        sent = value_at(signature.timestamp, fields, body, url)
    kind = "event" if item is not None else "body"
    return json.dumps([kind, account, event_name(webhook, fields, body, url, item), sent, _sha256(_content(
        webhook, signature, fields, delivery, body if item is None else item, whole=item is None
    ))])  # fmt: skip


def _ids(webhook: Webhook, fields: Mapping[str, str], body: Any, url: str, item: Any) -> list[str]:
    values = [value_at(place, fields, body, url, item) for place in webhook.delivery.split()]
    return values if all(values) else []


def _content(
    webhook: Webhook, signature: Signature | None, fields: Fields, delivery: Delivery, value: Any, *, whole: bool
) -> bytes:
    """The signed contents, in one spelling: a form's fields sorted, JSON with sorted keys, or the body as it is."""
    if whole and signature is not None and "{body}" not in signature.signed and _is_form(fields):
        return _form(delivery.body)
    if whole and not webhook.varies:
        return delivery.body
    for path in webhook.varies:
        value = hidden(value, path)
    return json.dumps(value, sort_keys=True).encode()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def challenge(webhook: Webhook, fields: Mapping[str, str], body: Any, url: str, secrets: Iterable[str]) -> Challenge:
    """The answer to a provider that asks whether the address is ours; an empty one for ordinary deliveries.

    It is `Challenge.is_open` where the provider asks before it can sign: then it proves nothing, and is only echoed.
    """
    place = webhook.challenge_field
    question = value_at(place, fields, body, url) if webhook.challenge in ("echo", "hmac", "secret") else ""
    if not question or len(question) > WEBHOOK_CHALLENGE.value:
        return Challenge()
    if webhook.challenge == "secret":
        signs = any(fields.get(one.header.lower()) for one in webhook.signatures)
        return Challenge() if signs else Challenge(question, is_secret=True)
    if webhook.challenge == "hmac":  # Zoom's, as its documentation words it
        key = next((secret for secret in secrets if secret), "")
        proof = hmac.new(key.encode(), question.encode(), "sha256").hexdigest()
        return Challenge(json.dumps({"plainToken": question, "encryptedToken": proof}), "application/json")
    if place.startswith("body:"):
        return Challenge(question)
    if place.startswith("query:"):
        return Challenge(question, is_open=True)
    return Challenge(question, header=place, is_secret=True)


def without_token(webhook: Webhook, body: Any, item: Any = None) -> Any:
    """The body, or one event of several, without the secret that stands in it, for providers that sign nothing."""
    kind, _, path = webhook.token.partition(":")
    if item is not None and kind == "body":
        return hidden_in_item(item, path, webhook.events or "")
    if item is not None:
        return hidden(item, path) if kind == "item" else item
    return hidden(body, path) if kind == "body" else body


def signed_text(signature: Signature, received: Received, secret: str) -> bytes:
    """The bytes that were signed."""
    parts: dict[str, bytes] = {
        "body": received.raw,
        "timestamp": _time_text(signature, received).encode(),
        "id": received.id.encode(),
        "method": received.method.encode(),
        "url": received.url.encode(),
        "form": _form(received.raw) if "{form}" in signature.signed and _is_form(received.fields) else b"",
        "secret": _bytes(secret),
    }
    at, text = 0, b""
    for match in _PART.finditer(signature.signed):
        text += signature.signed[at : match.start()].encode() + parts[match[1]]
        at = match.end()
    return text + signature.signed[at:].encode()


def _proves(
    signature: Signature,
    secret: str,
    signatures: list[str],
    received: Received,
    ed25519: Callable[[bytes, bytes, bytes], bool] | None,
) -> bool:
    """Whether one of ``signatures`` was made with this secret."""
    if signature.scheme == "equal":
        return any(_same(one, secret) for one in signatures)
    key = key_bytes(signature, secret)
    if key is None or not _fits_hash(signature, received):
        return False
    for url in _spellings(received.url) if "{url}" in signature.signed else (received.url,):
        text = signed_text(signature, received._replace(url=url), secret)
        if signature.scheme == "ed25519":
            if ed25519 is None:
                raise InvalidInput("verify: this provider signs with Ed25519; pass its check as ed25519=")
            proved = any(ed25519(key, _decoded(signature, one), text) for one in signatures)
        else:
            expected = _encoded(signature, _digest(signature, key, text))
            proved = any(_same(one, expected) for one in signatures)
        if proved:
            return True
    return False


def _digest(signature: Signature, key: bytes, text: bytes) -> bytes:
    if signature.scheme == "sha256":
        return hashlib.sha256(text).digest()
    name = signature.scheme.removeprefix("hmac-")
    return hmac.new(key, text, name).digest()


def key_bytes(signature: Signature, secret: str) -> bytes | None:
    """The key as bytes; None if it is not written as the provider writes it."""
    secret = secret.strip() if signature.key != "text" else secret
    try:
        if signature.key == "hex":
            return bytes.fromhex(secret) or None
        if signature.key in ("base64", "whsec"):
            bare = secret.removeprefix("whsec_") if signature.key == "whsec" else secret
            return _base64(bare) or None  # an empty key would let anybody sign
    except (ValueError, binascii.Error):
        return None
    return _bytes(secret) or None


def _base64(text: str) -> bytes:
    """Base64 as people paste it: with or without its padding."""
    bare = text.rstrip("=")
    return base64.b64decode(bare + "=" * (-len(bare) % 4), validate=True)


def _encoded(signature: Signature, digest: bytes) -> str:
    return digest.hex() if signature.encoding == "hex" else base64.b64encode(digest).decode("ascii")


def _decoded(signature: Signature, text: str) -> bytes:
    try:
        return bytes.fromhex(text) if signature.encoding == "hex" else _base64(text)
    except (ValueError, binascii.Error):
        return b""


def _time_text(signature: Signature, received: Received) -> str:
    text = value_at(signature.timestamp, received.fields, received.body, received.url)
    match = re.search(signature.timestamp_pattern, text)
    return match[1] if match else ""


def _stale(signature: Signature, received: Received, now: datetime) -> str:
    """Why its time makes it void; "" if its time is fine."""
    if not signature.timestamp:
        return ""
    sent = read(_time_text(signature, received), signature.word, now)
    if sent is None:
        return "it does not say when it was sent"
    off = abs((now - sent).total_seconds())
    return "" if off <= signature.tolerance else "it was sent too long ago, or its clock is ahead of ours"


def _fits_hash(signature: Signature, received: Received) -> bool:
    """Whether the body fits the hash in the signed text, where the signature does not cover the body itself."""
    if "{body}" in signature.signed:
        return True
    if not signature.body_hash or not (
        body_hash := value_at(signature.body_hash, received.fields, received.body, received.url)
    ):
        return _is_form(received.fields) or not received.raw
    return not _is_form(received.fields) and _same(body_hash.lower(), _sha256(received.raw))


def _is_form(fields: Mapping[str, str]) -> bool:
    return fields.get("content-type", "").partition(";")[0].strip().lower() == "application/x-www-form-urlencoded"


def form_fields(text: str) -> list[tuple[str, str]]:
    """The fields of a form or a query. Raises ValueError for more than `WEBHOOK_FIELDS`."""
    return parse_qsl(text, keep_blank_values=True, max_num_fields=WEBHOOK_FIELDS.value)


def _form(body: bytes) -> bytes:
    """A form's fields sorted by name, each with its value, as Twilio signs them; of too many, what nobody signs."""
    try:
        pairs = form_fields(body.decode("utf-8", "replace"))
    except ValueError:
        return b"\0" + body
    return "".join(name + value for name, value in sorted(set(pairs))).encode()


def _spellings(url: str) -> tuple[str, ...]:
    """The URL as it is, without its port and with its default one: senders disagree about which they sign."""
    parts = urlsplit(url)
    if parts.hostname is None or "@" in parts.netloc:
        return (url,)
    host = re.sub(r":[0-9]*$", "", parts.netloc)
    default = 443 if parts.scheme == "https" else 80
    bare, ported = (parts._replace(netloc=one).geturl() for one in (host, f"{host}:{default}"))
    return tuple(dict.fromkeys((url, bare, ported)))


def _same(one: str, other: str) -> bool:
    return bool(one) and hmac.compare_digest(_bytes(one), _bytes(other))


def _bytes(text: str) -> bytes:
    """A text that may hold half a character: that fits nothing, and is no error."""
    return text.encode("utf-8", "surrogatepass")
