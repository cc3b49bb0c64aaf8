"""Webhooks of a provider: how they are signed, as facts, and whether one is genuine.

The signature is computed over the raw bytes; parsing first and writing again changes them. Comparisons take
the same time wherever they differ. A signature without a time can be replayed for ever: such a provider's
delivery id is the only guard, so it should be stored. Ed25519 needs a library, so its check is passed in.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from resilient.core.body import hidden, pick
from resilient.core.bounds import WEBHOOK_CHALLENGE
from resilient.core.budgets import Fields
from resilient.core.errors import InvalidInput
from resilient.core.instants import Word, read

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from datetime import datetime

Scheme = Literal["hmac-sha256", "hmac-sha1", "sha256", "ed25519", "equal"]
_PARTS: Final = frozenset({"body", "timestamp", "id", "method", "url", "form", "secret"})
_PART: Final = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """One scheme. ``header``: where the signature is; ``pattern``: a regular expression whose groups are it.

    ``signed``: the signed text, of ``{body}``, ``{timestamp}``, ``{id}``, ``{method}``, ``{url}``, ``{form}``
    (the form's fields sorted, each name with its value) and ``{secret}`` (for a plain hash). ``equal`` signs
    nothing: the header holds the secret itself. ``timestamp``: a place, as `Webhook` has them;
    ``timestamp_pattern``: its part that is the time, in the dialect ``word``; ``tolerance``: seconds it may
    be off, and without ``timestamp`` nothing is checked. ``key``: how the provider writes the secret. Raises
    `InvalidInput`.
    """

    header: str
    scheme: Scheme = "hmac-sha256"
    signed: str = "{body}"
    encoding: Literal["hex", "base64"] = "hex"
    pattern: str = r"(\S+)"
    timestamp: str = ""
    timestamp_pattern: str = r"(\S+)"
    word: Word = Word.EPOCH_S
    tolerance: float = 300.0
    key: Literal["text", "hex", "base64", "whsec"] = "text"

    def __post_init__(self) -> None:
        unknown = set(_PART.findall(self.signed)) - _PARTS
        if unknown or ("{timestamp}" in self.signed and not self.timestamp):
            raise InvalidInput(
                f"Signature(signed={self.signed!r}): use {', '.join(sorted(_PARTS))} in braces, and say"
                " timestamp= for a time that is signed"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """How a provider calls us.

    ``signatures``: the schemes it uses, the best first; none: it signs nothing, so ``token`` is the place of
    what was agreed when the webhook was made. ``delivery``: the place of an id that a repeat carries again, or several
    that name it together, separated by a space; ``event``: of what happened. A place is a header, ``body:`` and a path,
    or ``query:`` and a parameter. ``ping``: it only says that something changed, so two that are alike may mean two
    changes. ``challenge``: how its address is proved: ``echo``: the value at the place ``challenge_field`` is sent
    back; ``hmac``: with its signature; ``status``: by refusing bad signatures with 401. ``answer_within``:
    seconds; ``status``: of an answer. ``repeats``: whether a failed delivery comes again by itself. ``life``: seconds
    after which it must be renewed.
    """

    signatures: tuple[Signature, ...] = ()
    token: str = ""
    delivery: str = ""
    event: str = ""
    challenge: Literal["", "echo", "hmac", "status"] = ""
    challenge_field: str = ""
    ping: bool = False
    answer_within: float | None = None
    status: int = 200
    repeats: bool = True
    life: float | None = None


@dataclass(frozen=True, slots=True)
class Challenge:
    """What to answer a question about the address with. ``text`` "": nothing was asked. ``header``: to send it in."""

    text: str = field(default="", repr=False)
    media: str = "text/plain"
    header: str = ""
    is_open: bool = False


@dataclass(frozen=True, slots=True)
class Delivery:
    """One request that says it is a webhook. ``url``: as the sender wrote it, with scheme, host and query."""

    headers: Mapping[str, str] = field(repr=False)
    body: bytes = field(repr=False)
    url: str = field(default="", repr=False)
    method: str = "POST"


class Received(NamedTuple):
    """A delivery taken apart, into what a signature may be made of. ``id``: what a repeat of it carries again."""

    fields: Fields
    raw: bytes
    body: Any  # its decoded JSON
    url: str
    method: str
    id: str


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
    library; without it Ed25519 raises `InvalidInput`.
    """
    fields, keys = Fields.of(delivery.headers), [secret for secret in secrets if secret]
    if not keys:
        return "no secret is known for it"
    if not webhook.signatures:
        token = value_at(webhook.token, fields, body, delivery.url)
        return "" if any(_same(token, key) for key in keys) else "its token is not the one agreed"
    named = identity(webhook, fields, body, delivery.url)
    received = Received(fields, delivery.body, body, delivery.url, delivery.method, named)
    reason = "it carries no signature"
    for signature in webhook.signatures:
        given = re.findall(signature.pattern, fields.get(signature.header.lower(), ""))
        if not given:
            continue
        if stale := _stale(signature, received, now):
            return stale  # not asked for a weaker scheme, or an old delivery could be replayed by it
        if any(_proves(signature, key, given, received, ed25519) for key in keys):
            return ""
        reason = "its signature does not fit"
    return reason


def value_at(place: str, fields: Mapping[str, str], body: Any, url: str = "") -> str:
    """The text at a place (see `Webhook`); "" if there is none."""
    kind, colon, name = place.partition(":")
    if not colon:
        return fields.get(place.lower(), "")
    if kind == "query":
        return dict(parse_qsl(urlsplit(url).query, keep_blank_values=True)).get(name, "")
    found = pick(body, name)
    return str(found[0]) if found and isinstance(found[0], (str, int)) else ""


def identity(webhook: Webhook, fields: Mapping[str, str], body: Any, url: str = "") -> str:
    """What a repeat of this delivery carries again; "" if the provider says nothing of the kind."""
    values = [value_at(place, fields, body, url) for place in webhook.delivery.split()]
    return " ".join(values) if values and all(values) else ""


def challenge(webhook: Webhook, fields: Mapping[str, str], body: Any, url: str, secrets: Iterable[str]) -> Challenge:
    """What a provider wants to see when it asks whether the address is ours; nothing for ordinary deliveries.

    It is `Challenge.open` where the provider asks before it can sign; then it is not to be believed, only echoed.
    """
    place = webhook.challenge_field
    asked = value_at(place, fields, body, url) if webhook.challenge in ("echo", "hmac") else ""
    if not asked or len(asked) > WEBHOOK_CHALLENGE.value:
        return Challenge()
    if webhook.challenge == "hmac":  # Zoom's, as its documentation words it
        key = next((secret for secret in secrets if secret), "")
        proof = hmac.new(key.encode(), asked.encode(), "sha256").hexdigest()
        return Challenge(json.dumps({"plainToken": asked, "encryptedToken": proof}), "application/json")
    if place.startswith("body:"):
        return Challenge(asked)
    return Challenge(asked, is_open=True) if place.startswith("query:") else Challenge(asked, header=place)


def without_token(webhook: Webhook, body: Any) -> Any:
    """The body without the secret that stands in it, for providers that sign nothing."""
    kind, _, path = webhook.token.partition(":")
    return hidden(body, path) if kind == "body" else body


def signed_text(signature: Signature, received: Received, secret: str) -> bytes:
    """The bytes that were signed."""
    parts: dict[str, bytes] = {
        "body": received.raw,
        "timestamp": _time_text(signature, received).encode(),
        "id": received.id.encode(),
        "method": received.method.encode(),
        "url": received.url.encode(),
        "form": _form(received.raw) if "{form}" in signature.signed else b"",
        "secret": secret.encode(),
    }
    at, text = 0, b""
    for match in _PART.finditer(signature.signed):
        text += signature.signed[at : match.start()].encode() + parts[match[1]]
        at = match.end()
    return text + signature.signed[at:].encode()


def _proves(
    signature: Signature,
    secret: str,
    given: list[str],
    received: Received,
    ed25519: Callable[[bytes, bytes, bytes], bool] | None,
) -> bool:
    """Whether one of the given signatures is that of this secret."""
    if signature.scheme == "equal":
        return any(_same(one, secret) for one in given)
    key = key_bytes(signature, secret)
    if key is None:
        return False
    for url in _spellings(received.url) if "{url}" in signature.signed else (received.url,):
        text = signed_text(signature, received._replace(url=url), secret)
        if signature.scheme == "ed25519":
            if ed25519 is None:
                raise InvalidInput("verify: this provider signs with Ed25519; pass its check as ed25519=")
            proved = any(ed25519(key, _decoded(signature, one), text) for one in given)
        else:
            wanted = _encoded(signature, _digest(signature, key, text))
            proved = any(_same(one, wanted) for one in given)
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
    try:
        if signature.key == "hex":
            return bytes.fromhex(secret)
        if signature.key == "base64":
            return base64.b64decode(secret, validate=True)
        if signature.key == "whsec":
            return base64.b64decode(secret.removeprefix("whsec_"), validate=True)
    except (ValueError, binascii.Error):
        return None
    return secret.encode()


def _encoded(signature: Signature, digest: bytes) -> str:
    return digest.hex() if signature.encoding == "hex" else base64.b64encode(digest).decode("ascii")


def _decoded(signature: Signature, text: str) -> bytes:
    try:
        return bytes.fromhex(text) if signature.encoding == "hex" else base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        return b""


def _time_text(signature: Signature, received: Received) -> str:
    text = value_at(signature.timestamp, received.fields, received.body, received.url)
    found = re.search(signature.timestamp_pattern, text)
    return found[1] if found else ""


def _stale(signature: Signature, received: Received, now: datetime) -> str:
    """Why its time speaks against it; "" if it does not."""
    if not signature.timestamp:
        return ""
    sent = read(_time_text(signature, received), signature.word, now)
    if sent is None:
        return "it does not say when it was sent"
    off = abs((now - sent).total_seconds())
    return "" if off <= signature.tolerance else f"it was sent {off:.0f} s ago or ahead of our clock"


def _form(body: bytes) -> bytes:
    """A form's fields sorted by name, each name with its value, as Twilio signs them."""
    pairs = parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True)
    return "".join(name + value for name, value in sorted(set(pairs))).encode()


def _spellings(url: str) -> tuple[str, ...]:
    """The URL with and without its default port: senders disagree about which they sign."""
    parts = urlsplit(url)
    if parts.hostname is None or "@" in parts.netloc:
        return (url,)
    default = 443 if parts.scheme == "https" else 80
    bare = parts._replace(netloc=parts.netloc.removesuffix(f":{default}")).geturl()
    ported = parts._replace(netloc=f"{parts.netloc.removesuffix(f':{default}')}:{default}").geturl()
    return tuple(dict.fromkeys((url, bare, ported)))


def _same(one: str, other: str) -> bool:
    return bool(one) and hmac.compare_digest(one.encode(), other.encode())
