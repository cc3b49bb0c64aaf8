"""Requests to token endpoints, and the URL of a consent page.

Authlib prepares the parameters, the client's authentication and PKCE. This module sends the request, and reads the
answer within bounds: the provider's dialect says what is a token and what a refusal (`core.accounts.tokens`).
Nothing here follows redirects, takes proxies out of the environment or keeps a connection between two accounts' secrets
longer than a few seconds. Neither errors nor logs carry the request or the answer.
"""

from __future__ import annotations

import asyncio
import base64
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar
from urllib.parse import parse_qsl, quote_plus, urlencode

import httpx
from authlib.oauth2.auth import ClientAuth  # type: ignore[import-untyped]
from authlib.oauth2.rfc6749.parameters import prepare_grant_uri, prepare_token_request  # type: ignore[import-untyped]
from authlib.oauth2.rfc7636 import create_s256_code_challenge  # type: ignore[import-untyped]
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa, utils
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from uuid_utils.compat import uuid4

from resilient.core.accounts.tokens import EXCHANGE_TIMEOUT, classify_token
from resilient.core.base.body import BOM
from resilient.core.base.bounds import TOKEN_ANSWER
from resilient.core.base.errors import Failure, FailureKind, SetupError
from resilient.core.base.exchange import AnswerFacts
from resilient.core.base.frames import Hidden, frameless
from resilient.core.provider.rules import NONE
from resilient.wire.requests import redact
from resilient.wire.requests.answer import ASKED_FOR, Intake, NoCookies
from resilient.wire.requests.flow import fields
from resilient.wire.requests.guard import AddressDenied, PublicNetwork
from resilient.wire.requests.pool import PoolSettings, certificates, keep_apart
from resilient.wire.requests.proxy import ProxyTransport

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping
    from datetime import datetime

    from resilient.core.accounts.tokens import Credentials
    from resilient.core.provider.auth import OAuth2


# -- signed assertions ------------------------------------------------------------------------------------------------
#
# RFC 7523: an application that proves itself by a key, and accounts that consist of one. RS256 for RSA keys, ES256 for
# those on P-256 (RFC 7518): the key says which. Each assertion is for one token endpoint, used once and good for five
# minutes.

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
    """The parameters that exchange an account's own key for a token. Raises `SetupError`."""
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


# -- token endpoints --------------------------------------------------------------------------------------------------

T = TypeVar("T")
P = ParamSpec("P")
if TYPE_CHECKING:
    Look = Callable[[], Awaitable[None]]  # called before a request's first byte; what it raises comes out, unsent
LONGEST_NUMBER: Final = 20  # digits
_METHODS: Final = {"post": "client_secret_post", "basic": "client_secret_basic", "none": "none", "jwt": "none"}
_JSON_STARTS: Final = (b"{", b"[")
_FIRST_BYTE: Final = "http11.send_request_headers.started"


@dataclass(frozen=True, slots=True)
class TokenAnswer:
    """The JSON of a token endpoint's answer, or the failure. The ``repr`` shows no token."""

    body: Any = field(default=None, repr=False)
    failure: Failure | None = None


def _encodable(method: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """The method, raising `SetupError` for text that cannot be encoded: an encoder's error shows the text."""

    @wraps(method)
    async def encodable(*args: P.args, **words: P.kwargs) -> T:
        try:
            return await method(*args, **words)
        except UnicodeError:
            pass
        raise SetupError("a client's id or secret, or a token, has characters that cannot be sent")

    return frameless(encodable)


class TokenClient:
    """Asks token endpoints; its connections are its own. Of ``settings`` proxy and certificates count."""

    def __init__(self, settings: PoolSettings | None = None) -> None:
        self._settings = settings or PoolSettings()
        self._client: httpx.AsyncClient | None = None
        self._guarded: httpx.AsyncClient | None = None  # for hosts that an account chose
        self._loop: asyncio.AbstractEventLoop | None = None  # an app may be used from one loop after another
        redact.install()

    @_encodable
    async def refresh(self, oauth: OAuth2, refresh_token: str, now: datetime, look: Look | None = None) -> TokenAnswer:
        """A new access token for a refresh token."""
        redirect = oauth.redirect_uri if oauth.refresh_redirect else None
        body = prepare_token_request(
            "refresh_token", redirect_uri=redirect, refresh_token=refresh_token, **oauth.refresh_params
        )
        return await self._ask(oauth, oauth.refresh_url or oauth.token_url, body, now, look)

    @_encodable
    async def exchange(self, oauth: OAuth2, code: str, verifier: str, redirect_uri: str, now: datetime) -> TokenAnswer:
        """Tokens for the code a consent page gave; it works once."""
        extra = {"code_verifier": verifier} if verifier else {}
        body = prepare_token_request(
            "authorization_code", redirect_uri=redirect_uri, code=code, **extra, **oauth.token_params
        )
        return await self._ask(oauth, oauth.token_url, body, now)

    @_encodable
    async def client_credentials(self, oauth: OAuth2, now: datetime, look: Look | None = None) -> TokenAnswer:
        """A token of the application's own."""
        scope = {"scope": oauth.scope_text()} if oauth.scopes else {}
        body = prepare_token_request("client_credentials", **scope, **oauth.token_params)
        return await self._ask(oauth, oauth.token_url, body, now, look)

    @_encodable
    async def by_key(self, oauth: OAuth2, account: Credentials, now: datetime, look: Look | None = None) -> TokenAnswer:
        """A token for an account that consists of a key (RFC 7523, 2.1)."""
        body = urlencode({**grant_assertion(oauth, account, now), **oauth.token_params})
        own = replace(oauth, client_auth="none", client_id="", key_header=NONE)  # the application proves nothing here
        return await self._ask(own, oauth.token_url, body, now, look)

    @_encodable
    async def revoke(self, oauth: OAuth2, token: str, now: datetime) -> Failure | None:
        """Tell the provider that a token is not used any more (RFC 7009); returns the failure, or None."""
        body = urlencode({"token": token})
        answer = await self._ask(oauth, oauth.revoke_url, body, now, revoking=True)
        return answer.failure

    async def aclose(self) -> None:
        """Close the connections."""
        clients, self._client, self._guarded = (self._client, self._guarded), None, None
        for client in clients:
            if client is not None and self._loop is asyncio.get_running_loop():
                await client.aclose()

    # -- inside ----------------------------------------------------------------------------------------------

    async def _ask(
        self, oauth: OAuth2, url: str, body: str, now: datetime, look: Look | None = None, *, revoking: bool = False
    ) -> TokenAnswer:
        request = self._request(oauth, url, body, now)
        if look is not None:
            request.extensions["trace"] = _before_first_byte(look)
        secrets = _secrets_in(request)
        try:
            async with asyncio.timeout(EXCHANGE_TIMEOUT):
                answer = await self._send(request, guarded=oauth.guarded)
        except AddressDenied as denied:
            return TokenAnswer(failure=denied.failure)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol):
            return TokenAnswer(failure=Failure(FailureKind.TRANSIENT, code="connect", provider_wide=True))
        except (httpx.HTTPError, TimeoutError):
            kind = FailureKind.TRANSIENT if oauth.replayable else FailureKind.AMBIGUOUS
            return TokenAnswer(failure=Failure(kind, code="no_answer", provider_wide=True))
        if revoking and httpx.codes.is_success(answer.status):  # RFC 7009 says 200; some say 204
            return TokenAnswer()
        failure = redact.without_secrets_in_code(classify_token(answer, oauth, now), secrets)
        return TokenAnswer(answer.body if failure is None else None, failure)

    def _request(self, oauth: OAuth2, url: str, body: str, now: datetime) -> httpx.Request:
        headers = {"Accept": "application/json", "Accept-Encoding": ASKED_FOR, **oauth.token_headers}
        if oauth.client_id:
            name, secret = oauth.client_id, oauth.client_secret
            if oauth.client_auth == "basic":  # each is form-encoded first (RFC 6749, 2.3.1), which Authlib leaves out
                name, secret = quote_plus(name), quote_plus(secret)
            auth = ClientAuth(name, secret, _METHODS[oauth.client_auth])
            _, headers, body = auth.prepare("POST", url, headers, body)
        if oauth.client_auth == "jwt":
            body += "&" + urlencode(client_assertion(oauth, now))
        if oauth.body == "json":
            headers["Content-Type"] = "application/json"
            body = json.dumps(dict(parse_qsl(body, keep_blank_values=True)))
        else:
            headers["Content-Type"] = "application/x-www-form-urlencoded"
        headers.pop("Content-Length", None)
        return self._opened(guarded=oauth.guarded).build_request("POST", url, headers=headers, content=body)

    async def _send(self, request: httpx.Request, *, guarded: bool) -> AnswerFacts:
        response = await self._opened(guarded=guarded).send(request, stream=True)
        coding = ",".join(response.headers.get_list("content-encoding"))
        intake = Intake(coding, TOKEN_ANSWER.value, EXCHANGE_TIMEOUT, request)
        try:
            async for data in response.aiter_raw():
                if not intake.take(data):
                    break
            else:
                intake.end()
        finally:
            await response.aclose()
        raw = intake.content()
        return AnswerFacts(
            response.status_code,
            fields(response.headers),
            body=_decoded(raw),
            text=raw.decode("utf-8", "replace"),
        )

    def _opened(self, *, guarded: bool) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._client, self._guarded = loop, None, None
        if guarded:
            self._guarded = self._guarded or _client(self._settings, guarded=True)
            return self._guarded
        self._client = self._client or _client(self._settings, guarded=False)
        return self._client


def _before_first_byte(look: Look) -> Callable[[str, Any], Coroutine[Any, Any, None]]:
    async def trace(event: str, _info: Any) -> None:
        if event == _FIRST_BYTE:
            await look()

    return trace


def _client(settings: PoolSettings, *, guarded: bool) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=50, keepalive_expiry=4.0)
    verify = certificates(settings.verify)
    if settings.proxy is not None:
        transport: httpx.AsyncHTTPTransport = ProxyTransport(
            settings.proxy, verify=verify, limits=limits, trust_env=False
        )
    else:
        transport = httpx.AsyncHTTPTransport(verify=verify, limits=limits, trust_env=False)
    if guarded and settings.proxy is None:  # a proxy looks names up itself
        transport._pool._network_backend = PublicNetwork()  # noqa: SLF001 - httpx has no argument for it
    keep_apart(transport)
    client = httpx.AsyncClient(transport=transport, timeout=EXCHANGE_TIMEOUT, trust_env=False)
    client._cookies = NoCookies()  # noqa: SLF001 - httpx makes its own out of any that it is given
    return client


def ask_here(ask: Callable[[TokenClient], Coroutine[Any, Any, T]], settings: PoolSettings | None) -> T:
    """Call ``ask`` with a client of its own, from synchronous code, whatever loop may run in this thread."""

    async def alone() -> T:
        client = TokenClient(settings)
        try:
            return await ask(client)
        finally:
            await client.aclose()

    return in_own_loop(alone())


def in_own_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in a thread of its own, and wait for it."""
    with ThreadPoolExecutor(1, thread_name_prefix="resilient-oauth") as thread:
        return thread.submit(asyncio.run, coroutine).result()


def consent_url(oauth: OAuth2, redirect_uri: str, state: str, verifier: str) -> str:
    """Where to send a person who shall grant access."""
    extra: dict[str, Any] = dict(oauth.authorize_params)
    if oauth.pkce != "none":
        extra |= {"code_challenge": create_s256_code_challenge(verifier), "code_challenge_method": "S256"}
    if scope := oauth.scope_text():
        extra["scope"] = scope
    url: str = prepare_grant_uri(
        oauth.authorize_url, oauth.client_id, "code", redirect_uri=redirect_uri, state=state, **extra
    )
    return url


def callback_error(parameters: Mapping[str, str]) -> str | None:
    """The error a provider sent a person back with, in few harmless characters; None if there is none."""
    error = parameters.get("error")
    return None if not error else "".join(c for c in error[:60] if c.isalnum() or c in "_.-") or "error"


def _secrets_in(request: httpx.Request) -> Hidden:
    """What a request carries that no code may echo: each field of its form, user and password."""
    raw = request.content.decode()
    fields_ = json.loads(raw).values() if raw[:1] == "{" else [value for _, value in parse_qsl(raw)]
    harmless = {"refresh_token", "authorization_code", "client_credentials"}
    basic = [value for name, value in request.headers.items() if name == "authorization"]
    return Hidden(str(value) for value in (*fields_, *basic) if value not in harmless)


def _decoded(raw: bytes) -> Any:
    """The JSON document in ``raw``; None if it holds none."""
    if raw[:64].removeprefix(BOM).lstrip()[:1] not in _JSON_STARTS:
        return None
    try:
        return json.loads(raw, parse_int=_whole)
    except (ValueError, RecursionError):
        return None


def _whole(digits: str) -> int | None:
    """A whole number; None for one of too many digits, so that the rest of the answer, with its tokens, is not lost."""
    return int(digits) if len(digits) <= LONGEST_NUMBER else None
