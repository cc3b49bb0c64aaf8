"""Webhooks as a provider sends them: signed by its scheme, over the very bytes that are sent."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

from resilient.core.body import pick
from resilient.core.budgets import Fields
from resilient.core.errors import InvalidInput
from resilient.core.webhook import Delivery, Received, items_of, key_bytes, signed_text, verify
from resilient.testing.fake.shapes import fitting, put, said

if TYPE_CHECKING:
    from datetime import datetime

    from resilient.core.provider import Provider
    from resilient.core.webhook import Signature, Webhook

_SEED: Final = hashlib.sha256(b"resilient.testing").digest()


def secret_of(provider: Provider) -> str:
    """A secret as this provider writes them: for Ed25519 the public key."""
    signature = provider.webhook.signatures[0] if provider.webhook and provider.webhook.signatures else None
    if signature is not None and signature.scheme == "ed25519":
        return str(_private().public_key().public_bytes_raw().hex())
    raw = hashlib.sha256(provider.name.encode()).digest()
    if signature is None or signature.key == "text":
        return f"secret-of-{provider.name}"
    return raw.hex() if signature.key == "hex" else base64.b64encode(raw).decode()


def deliver(
    provider: Provider, url: str, body: Any, now: datetime, *, secret: str, event: str = "", delivery: str | None = None
) -> Delivery:
    """A genuine delivery. Raises `InvalidInput` where the facts allow none.

    ``body``: JSON, or bytes as they are; where the provider sends several events in one delivery, the whole body or
    one event of it. Of several events the first has the id ``delivery``, the others that and their number; None keeps
    the id that the body has (else it is "1"), "" puts none anywhere.
    """
    webhook = provider.webhook
    if webhook is None:
        raise InvalidInput(f"provider {provider.name!r} declares no webhook")
    headers: dict[str, str] = {"content-type": "application/json"}
    if webhook.events is not None and not isinstance(body, bytes) and items_of(webhook, body) is None:
        body = put(None, webhook.events, [body]) if webhook.events else [body]
    delivery = _id_of(webhook, body) if delivery is None else delivery
    places = [*((place, delivery) for place in webhook.delivery.split()), ((*webhook.event.split(), "")[0], event)]
    places += [] if webhook.signatures else [(webhook.token, secret)]
    for place, value in places:
        if place and value:
            url, body = _placed(place, value, url, body, headers, webhook)
    signature = webhook.signatures[0] if webhook.signatures else None
    if signature is not None and signature.timestamp.startswith("body:"):
        _, body = _placed(signature.timestamp, said(signature.word, 0, now), url, body, headers, webhook)
    if signature is not None and "{form}" in signature.signed and isinstance(body, dict):
        headers["content-type"] = "application/x-www-form-urlencoded"
        body = urlencode(body).encode()
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    if signature is not None and signature.body_hash and "form" not in headers["content-type"]:
        url, _ = _placed(signature.body_hash, hashlib.sha256(raw).hexdigest(), url, raw, headers, webhook)
    if signature is not None:
        _sign(signature, headers, raw, url, secret, now, delivery)
    made = Delivery(headers, raw, url)
    parsed = None if isinstance(body, bytes) else body
    if reason := verify(webhook, made, [secret], now, body=parsed, ed25519=_check):
        raise InvalidInput(f"provider {provider.name!r}: its webhook's facts cannot be signed backwards: {reason}")
    return made


def _id_of(webhook: Webhook, body: Any) -> str:
    """The id that the body has, else "1"."""
    return next((text for place in webhook.delivery.split() if (text := _standing(place, body))), "1")


def _standing(place: str, body: Any) -> str:
    """The id that the body has at this place; empty if none."""
    kind, _, path = place.partition(":")
    found = pick(body, path) if kind == "body" and not isinstance(body, bytes) else []
    return next((str(one) for one in found if isinstance(one, (str, int))), "")


def _placed(place: str, value: str, url: str, body: Any, headers: dict[str, str], webhook: Webhook) -> tuple[str, Any]:
    kind, colon, name = place.partition(":")
    if kind == "item" and (items := items_of(webhook, body)) is not None:
        numbered = place in webhook.delivery.split()
        each = [
            put(item, name, f"{value}-{number}" if numbered and number else value) for number, item in enumerate(items)
        ]
        return url, put(body, webhook.events, each) if webhook.events else each
    if not colon:
        headers[place] = value
    elif kind == "query":
        url += f"{'&' if '?' in url else '?'}{urlencode({name: value})}"
    elif not isinstance(body, bytes):
        body = put(body, name, value)
    return url, body


def _sign(
    signature: Signature, headers: dict[str, str], raw: bytes, url: str, secret: str, now: datetime, delivery: str
) -> None:
    stamp = ""
    if signature.timestamp and ":" not in signature.timestamp:
        stamp = fitting(signature.timestamp_pattern, {1: said(signature.word, 0, now)})
        headers[signature.timestamp] = stamp
    body = json.loads(raw) if raw[:1] in (b"{", b"[") else None
    text = signed_text(signature, Received(Fields.of(headers), raw, body, url, "POST", delivery), secret)
    written = fitting(signature.pattern, {1: _signature(signature, secret, text)})
    shared = signature.header.lower() == signature.timestamp.lower()
    headers[signature.header] = f"{stamp},{written}" if shared else written


def _signature(signature: Signature, secret: str, text: bytes) -> str:
    if signature.scheme == "equal":
        return secret
    if signature.scheme == "ed25519":
        digest = _private().sign(text)
    elif signature.scheme == "sha256":
        digest = hashlib.sha256(text).digest()
    else:
        digest = hmac.new(key_bytes(signature, secret) or b"", text, signature.scheme.removeprefix("hmac-")).digest()
    return digest.hex() if signature.encoding == "hex" else base64.b64encode(digest).decode()


def _private() -> Any:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # noqa: PLC0415 - for few

    return Ed25519PrivateKey.from_private_bytes(_SEED)


def _check(key: bytes, signature: bytes, text: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature  # noqa: PLC0415 - for few providers only
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey  # noqa: PLC0415

    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, text)
    except (InvalidSignature, ValueError):
        return False
    return True
