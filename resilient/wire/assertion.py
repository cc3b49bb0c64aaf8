"""Signed assertions (RFC 7523): an application that proves itself by a key, and accounts that consist of one.

RS256 for RSA keys, ES256 for those on P-256 (RFC 7518): the key says which. Each assertion is for one token endpoint,
used once and good for five minutes.
"""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any, Final

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa, utils
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from uuid_utils.compat import uuid4

from resilient.core.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from resilient.core.auth import OAuth2
    from resilient.core.tokens import Credentials

LIFE: Final = 300  # seconds
CLIENT: Final = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"
GRANT: Final = "urn:ietf:params:oauth:grant-type:jwt-bearer"
_P256: Final = 32  # bytes of each half of a signature


def client_assertion(oauth: OAuth2, now: datetime) -> dict[str, str]:
    """What an application sends instead of its secret; its key is ``client_secret``. Raises `SetupError`."""
    claims = {"iss": oauth.client_id, "sub": oauth.client_id, **_common(oauth.token_url, now)}
    signed = sign(claims, oauth.client_secret, oauth.key_header, "the client_secret of client_auth='jwt'")
    return {"client_assertion_type": CLIENT, "client_assertion": signed}


def grant_assertion(oauth: OAuth2, account: Credentials, now: datetime) -> dict[str, str]:
    """What an account's own key is exchanged for a token with. Raises `SetupError`."""
    claims = {"iss": account.user, **_common(oauth.token_url, now)}
    if subject := account.values.get("subject"):
        claims["sub"] = subject
    if scope := oauth.scope_text():
        claims["scope"] = scope
    key_id = account.values.get("key_id")
    signed = sign(claims, account.refresh_token, {"kid": key_id} if key_id else {}, "the private key of the account")
    return {"grant_type": GRANT, "assertion": signed}


def sign(claims: Mapping[str, Any], key: str, header: Mapping[str, str], what: str) -> str:
    """A compact JWS. Raises `SetupError` for what is no private key in PEM; it never shows it."""
    try:
        private = load_pem_private_key(key.encode(), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        private = None
    name = _algorithm(private)
    if not name:
        raise SetupError(f"{what} is no private key in PEM without a password: RSA or P-256")
    text = f"{_written({'alg': name, 'typ': 'JWT', **header})}.{_written(claims)}"
    return f"{text}.{_encoded(_signature(private, text.encode()))}"


def _algorithm(private: Any) -> str:
    if isinstance(private, ec.EllipticCurvePrivateKey):
        return "ES256" if isinstance(private.curve, ec.SECP256R1) else ""
    return "RS256" if isinstance(private, rsa.RSAPrivateKey) else ""


def _signature(private: Any, text: bytes) -> bytes:
    if isinstance(private, rsa.RSAPrivateKey):
        return private.sign(text, padding.PKCS1v15(), SHA256())
    return _halves(private.sign(text, ec.ECDSA(SHA256())))


def _common(audience: str, now: datetime) -> dict[str, Any]:
    at = int(now.timestamp())
    return {"aud": audience, "iat": at, "exp": at + LIFE, "jti": str(uuid4())}


def _halves(der: bytes) -> bytes:
    """An ECDSA signature as RFC 7518, 3.4 wants it."""
    r, s = utils.decode_dss_signature(der)
    return r.to_bytes(_P256, "big") + s.to_bytes(_P256, "big")


def _written(doc: Mapping[str, Any]) -> str:
    return _encoded(json.dumps(doc, separators=(",", ":")).encode())


def _encoded(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode("ascii").rstrip("=")
