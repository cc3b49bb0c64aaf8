"""Assertions: another library reads what is signed here, and what is no key is named without being shown."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from urllib.parse import parse_qsl

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, NoEncryption, PrivateFormat
from joserfc import jwt
from joserfc.jwk import import_key

from resilient import Credentials, OAuth2, SetupError
from resilient.wire.oauth import endpoints

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
KEYS = {
    "RS256": (rsa.generate_private_key(65537, 2048), "RSA"),
    "ES256": (ec.generate_private_key(ec.SECP256R1()), "EC"),
}


def pem(private, encryption=None):
    return private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption or NoEncryption()).decode()


def oauth(**facts):
    return OAuth2(token_url="https://idp.example/token", client_id="app", **facts)


@pytest.mark.parametrize("name", KEYS)
def test_a_client_proves_itself_by_its_key(name):
    private, sort = KEYS[name]
    asked = oauth(client_auth="jwt", client_secret=pem(private), key_header={"kid": "k1", "x5t#S256": "thumb"})
    made = endpoints.client_assertion(asked, NOW)
    read = jwt.decode(made["client_assertion"], import_key(pem(private), sort), algorithms=[name])
    assert read.header == {"alg": name, "typ": "JWT", "kid": "k1", "x5t#S256": "thumb"}
    at = int(NOW.timestamp())
    jti = read.claims.pop("jti")
    assert read.claims == {"iss": "app", "sub": "app", "aud": asked.token_url, "iat": at, "exp": at + 300}
    again = endpoints.client_assertion(asked, NOW)
    assert jwt.decode(again["client_assertion"], import_key(pem(private), sort), algorithms=[name]).claims["jti"] != jti


def test_a_service_account_and_the_user_it_acts_for():
    private, sort = KEYS["RS256"]
    account = Credentials(refresh_token=pem(private), user="robot@x", values={"subject": "ann@x", "key_id": "k2"})
    made = endpoints.grant_assertion(oauth(scopes=("a", "b")), account, NOW)
    assert made["grant_type"] == "urn:ietf:params:oauth:grant-type:jwt-bearer"
    read = jwt.decode(made["assertion"], import_key(pem(private), sort), algorithms=["RS256"])
    assert (read.claims["iss"], read.claims["sub"], read.claims["scope"]) == ("robot@x", "ann@x", "a b")
    assert read.header["kid"] == "k2"


@pytest.mark.parametrize(
    "key",
    [
        "canary-no-key",
        "",
        pem(KEYS["RS256"][0], BestAvailableEncryption(b"canary")),
        pem(ec.generate_private_key(ec.SECP384R1())),
        pem(ed25519.Ed25519PrivateKey.generate()),
        pem(KEYS["ES256"][0]).replace("M", "A", 1),
    ],
    ids=["a word", "nothing", "with a password", "another curve", "another kind", "spoilt"],
)
def test_what_is_no_key(key):
    with pytest.raises(SetupError, match="no private key") as raised:
        endpoints.sign({}, key, {}, "the private key of idp/a")
    assert "canary" not in str(raised.value)


async def test_an_account_of_a_key_at_a_provider_where_the_application_has_one_too(rude):
    """The account's assertion is the grant; the application's own key, and its header, have no part in it."""
    asked = []

    async def behave(reader, writer):
        asked.append(dict(parse_qsl((await reader.read(10_000)).decode())))
        writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 20\r\n\r\n{"access_token":"t"}')
        await writer.drain()

    key, token = pem(KEYS["ES256"][0]), endpoints.TokenClient()
    async with rude(behave) as (url, _):
        facts = oauth(client_auth="jwt", client_secret=key, key_header={"kid": "k1"}, flows=("jwt_bearer",))
        account = Credentials(refresh_token=key, user="robot@x")
        answer = await token.by_key(replace(facts, token_url=url), account, NOW)
    await token.aclose()
    assert answer.body == {"access_token": "t"}
    assert asked[0].keys() == {"grant_type", "assertion"}
