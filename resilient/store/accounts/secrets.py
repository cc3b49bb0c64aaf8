"""Secrets in columns: AES-256-GCM, bound to the table, row and column they belong to, under a ring of keys.

The first key of the ring encrypts, all of them decrypt, so that keys are changed while everything runs: put the new
one in front everywhere, re-encrypt (``resilient secrets rotate``), take the old one away. A ciphertext that was moved
to another row or column cannot be read there.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
from typing import TYPE_CHECKING, Final

from resilient.core.base.errors import SecretsUnreadable, SetupError
from resilient.core.base.frames import frameless

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

VARIABLE: Final = "RESILIENT_SECRETS"
PREFIX: Final = "rsk1_"
_NONCE: Final = 12  # bytes; random, which is safe for 2**32 values under one key (NIST SP 800-38D, 8.3)
_BYTES: Final = 32
_MARK: Final = "1"  # the version of marks
HOW: Final = (
    f"make one with `resilient secrets new` and give it as {VARIABLE} or Resilient(secrets=[...]), the same in every"
    " process"
)


class KeyRing:
    """Encrypts with its first key, decrypts with any."""

    @frameless
    def __init__(self, keys: Iterable[str] = ()) -> None:
        """Raises `SetupError` for a text that is no key, without quoting it."""
        self._keys: dict[str, AESGCM] = {}
        self._signing: dict[str, bytes] = {}
        for number, text in enumerate(keys, 1):
            raw = _decoded(text, number)
            key_id = hashlib.sha256(b"resilient key id" + raw).hexdigest()[:12]
            self._keys[key_id] = _cipher(raw)
            self._signing[key_id] = hmac.digest(raw, b"resilient signing", "sha256")

    def __repr__(self) -> str:
        return f"<KeyRing of {len(self._keys)} keys>"

    def __bool__(self) -> bool:
        return bool(self._keys)

    @property
    def key_ids(self) -> frozenset[str]:
        """The ids of its keys."""
        return frozenset(self._keys)

    @property
    def current(self) -> str:
        """The id of the key that encrypts. Raises `SetupError` without any."""
        for key_id in self._keys:
            return key_id
        raise SetupError(f"credentials are stored encrypted, and there is no key: {HOW}")

    @frameless
    def seal(self, text: str, *place: str) -> str:
        """``text`` encrypted for one place: table, row, column."""
        key_id, nonce = self.current, os.urandom(_NONCE)
        sealed = self._keys[key_id].encrypt(nonce, text.encode(), _place(place))
        return f"{key_id}:{base64.b64encode(nonce + sealed).decode('ascii')}"

    def signed(self, text: str) -> str:
        """``text`` with a signature of the first key behind it."""
        key_id = self.current
        return f"{text}.{key_id}.{self._signature(key_id, text)}"

    def is_signed(self, text: str) -> bool:
        """Whether one of the keys signed it."""
        body, _, rest = text.partition(".")
        key_id, _, signature = rest.partition(".")
        return key_id in self._signing and hmac.compare_digest(
            self._signature(key_id, body).encode(), signature.encode()
        )

    def mark(self, purpose: str, text: str) -> str:
        """What proves that this ring wrote ``text``, kept beside it: ``1.<key id>.<signature>``."""
        key_id = self.current
        return f"{_MARK}.{key_id}.{self._signature(key_id, _marked(purpose, text))}"

    def is_mark(self, mark: str, purpose: str, text: str) -> bool:
        """Whether one of the keys made it for that purpose and text."""
        version, _, rest = mark.partition(".")
        key_id, _, signature = rest.partition(".")
        if version != _MARK or key_id not in self._signing:
            return False
        expected = self._signature(key_id, _marked(purpose, text))
        return hmac.compare_digest(expected.encode(), signature.encode())

    def is_current(self, mark: str) -> bool:
        """Whether a mark names the key that signs now."""
        return mark.split(".")[1:2] == [self.current]

    def _signature(self, key_id: str, text: str) -> str:
        digest = hmac.digest(self._signing[key_id], text.encode(), "sha256")
        return base64.urlsafe_b64encode(digest).decode("ascii").rstrip("=")

    @frameless
    def open(self, sealed: str, *place: str) -> str:
        """The text sealed for that place. Raises `SecretsUnreadable` if no key of the ring opens it."""
        from cryptography.exceptions import InvalidTag  # noqa: PLC0415 - see `_cipher`

        key_id, _, data = sealed.partition(":")
        key = self._keys.get(key_id)
        where = f"the secrets of {place[0]} {place[1]}"
        if key is None:
            raise SecretsUnreadable(
                f"{where} are encrypted with key {key_id}, which is not among the {len(self._keys)} given: add the"
                f" missing key to {VARIABLE} or Resilient(secrets=[...])" + ("" if self._keys else f"; or {HOW}")
            )
        try:
            raw = base64.b64decode(data)
            return key.decrypt(raw[:_NONCE], raw[_NONCE:], _place(place)).decode()
        except (InvalidTag, ValueError):  # ValueError: cut off, or never written by us
            raise SecretsUnreadable(
                f"{where} were changed or belong to another row: authorise that account again"
            ) from None


def _cipher(raw: bytes) -> AESGCM:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415 - only where there are keys

    return AESGCM(raw)


def key_id_of(sealed: str) -> str:
    """The id of the key that sealed a text."""
    return sealed.partition(":")[0]


def new_key() -> str:
    """A fresh key, as text."""
    return PREFIX + base64.urlsafe_b64encode(os.urandom(_BYTES)).decode("ascii").rstrip("=")


def from_environment() -> list[str]:
    """The keys of ``RESILIENT_SECRETS``: separated by commas or spaces, the current one first."""
    return os.environ.get(VARIABLE, "").replace(",", " ").split()


def _marked(purpose: str, text: str) -> str:
    """The bytes to sign; no state parameter looks like them."""
    return f"mark {_MARK}|{purpose}|{text}"


def _place(parts: tuple[str, ...]) -> bytes:
    return "|".join(parts).encode()


def _decoded(text: str, number: int) -> bytes:
    body = text.strip().removeprefix(PREFIX)
    try:
        raw = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
    except ValueError:
        raw = b""
    if len(raw) != _BYTES or not text.strip().startswith(PREFIX):
        raise SetupError(f"key {number} of the secrets is no key: {HOW}")
    return raw
