"""The way of a person through a provider's consent page: the address that begins it, the callback that ends it.

The state parameter is 256 random bits and the hash of the account's key, signed by the key ring. A state that was not
signed here is refused without a query. The database keeps only its hash, so it can hand the state to no other account.
The first callback uses it up. Beside the hash stands, encrypted, what the callback must fit: PKCE's verifier, the
address, and who began (``bound_to``). So nobody can finish what another person began: neither a victim who is sent an
attacker's link, nor an attacker who is sent a victim's.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from resilient.core.accounts import tokens
from resilient.core.accounts.tokens import EMPTY, Credentials
from resilient.core.base.bounds import CALLBACK_CODE, CALLBACK_VALUE
from resilient.core.base.errors import ConsentRefused, InvalidInput, SetupError, UnexpectedCallback
from resilient.core.base.frames import frameless
from resilient.core.base.phrases import fits_header
from resilient.core.provider.placeholders import names_in
from resilient.engine.ground.providers import account_of, oauth_of
from resilient.store.accounts import connections, fuse

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from sqlalchemy import Connection

    from resilient.core.provider.auth import OAuth2
    from resilient.core.provider.facts import Provider
    from resilient.engine.accounts.grants import Grants
    from resilient.engine.ground.ground import Ground
    from resilient.engine.ground.sessions import Transactions
    from resilient.store.db.dialect import Dialect
    from resilient.wire.oauth.endpoints import TokenAnswer

LASTS: Final = timedelta(minutes=30)  # to come back from a consent page
_TABLE: Final = "resilient_authorization"
_LONGEST_STATE: Final = 200
_KEY: Final = 32  # hexadecimal digits, so 128 bits, of the account's key within a state


@dataclass(frozen=True, slots=True)
class Granted:
    """The credentials that a callback brought. ``note`` is that of `Consent.begin`. The ``repr`` shows no secret."""

    key: str
    credentials: Credentials
    details: Mapping[str, str]
    note: str
    id: str  # of its row, which an erasure of the account deletes


@dataclass(frozen=True, slots=True)
class _Expected:
    """What is stored, encrypted, until the callback."""

    verifier: str
    uri: str
    details: Mapping[str, str]
    bound: str
    note: str


class Consent:
    """The consent pages of one app's providers."""

    def __init__(self, ground: Ground, grants: Grants, db: Transactions, *, here: bool) -> None:
        self._ground, self._grants, self._db, self._here = ground, grants, db, here

    @frameless
    async def begin(
        self,
        key: str,
        oauth: OAuth2,
        uri: str,
        *,
        details: Mapping[str, str] = EMPTY,
        bound_to: str = "",
        note: str = "",
    ) -> str:
        """The address to send the person to. Raises `SetupError`."""
        account_of(self._ground.providers, key)
        if not oauth.client_id or not oauth.authorize_url:
            raise SetupError(f"{key}: the provider has no client_id: provider(client_id=..., client_secret=...)")
        ring = self._grants.accounts.ring
        state = ring.signed(secrets.token_urlsafe(32) + _hashed(key)[:_KEY])
        verifier = secrets.token_urlsafe(48)
        id_ = _hashed(state)
        doc = {"verifier": verifier, "uri": uri, "details": dict(details), "bound": _hashed(bound_to), "note": note}
        sealed = ring.seal(json.dumps(doc), _TABLE, id_, "secrets")
        await self._db.write(None, _expect, id_, key, sealed)
        from resilient.wire.oauth.endpoints import consent_url  # noqa: PLC0415 - httpx: only where something is sent

        return consent_url(oauth, uri, state, verifier)

    @frameless
    async def finish(self, parameters: Mapping[str, str], *, bound_to: str = "") -> Granted:
        """Exchange the code of a callback. Raises `ConsentRefused`. The state can be used once, also if that fails."""
        from resilient.wire.oauth.endpoints import callback_error  # noqa: PLC0415 - httpx: only where something is sent

        key, expected, now = await self._use_state(parameters.get("state") or "")
        if not hmac.compare_digest(expected.bound, _hashed(bound_to)):
            raise ConsentRefused("this callback belongs to another browser or another user: start again from your own")
        oauth = oauth_of(self._ground.providers, key, expected.details)
        if not oauth.is_issuer(parameters.get("iss")):
            raise ConsentRefused(f"{key}: this callback comes from another authorization server: start again")
        if (error := callback_error(parameters)) is not None or not parameters.get("code"):
            raise ConsentRefused(f"access to {key} was not granted: {error or 'no code came back'}")
        code = parameters["code"]
        if len(code) > CALLBACK_CODE.value or not (code.isascii() and code.isprintable()):  # RFC 6749, A.11
            raise ConsentRefused(f"{key}: the callback's code is none: start again at the consent page")
        values = _callback_values(self._ground.providers[key.partition("/")[0]], key, parameters, expected.details)
        answer = await self._exchange(key.partition("/")[0], oauth, code, expected, now)
        credentials = None if answer.failure is not None else tokens.merge(Credentials(), answer.body, oauth, now)
        if credentials is None:
            reason = "no token" if answer.failure is None else answer.failure.code
            raise ConsentRefused(f"{key}: the provider gave no token for the code ({reason}): start again")
        name = key.partition("/")[0]
        facts = self._ground.providers[name].oauth
        if facts is not None and not facts.at_tenants:
            await self._db.write(None, fuse.note_accepted, name)
        uri = {"redirect_uri": expected.uri} if oauth.refresh_redirect else {}
        credentials = replace(credentials, values={**credentials.values, **values, **uri})
        return Granted(key, credentials, {**expected.details, **values}, expected.note, _hashed(parameters["state"]))

    async def _use_state(self, state: str) -> tuple[str, _Expected, datetime]:
        """The account of a callback, what it must fit, and the database's time; the state is used up."""
        ring, unexpected = self._grants.accounts.ring, "this callback is not expected (any more)"
        if len(state) > _LONGEST_STATE or not ring.is_signed(state):
            raise UnexpectedCallback(f"{unexpected}: start again at the consent page")
        row = await self._db.write(None, connections.arrived, _hashed(state), LASTS)
        if row is None or not row[2]:
            raise UnexpectedCallback(f"{unexpected}: start again at the consent page")
        if not hmac.compare_digest(state.partition(".")[0][-_KEY:], _hashed(row[0])[:_KEY]):
            raise ConsentRefused(f"{unexpected}, for {row[0]}: start again at the consent page")
        doc: dict[str, Any] = json.loads(ring.open(row[1], _TABLE, _hashed(state), "secrets"))
        return row[0], _Expected(**doc), row[3]

    async def _exchange(
        self, provider: str, oauth: OAuth2, code: str, expected: _Expected, now: datetime
    ) -> TokenAnswer:
        verifier = expected.verifier if oauth.pkce != "none" else ""
        if self._here:
            from resilient.wire.oauth.endpoints import ask_here  # noqa: PLC0415 - httpx: only where something is sent

            settings = self._ground.http_of(provider)
            return ask_here(lambda client: client.exchange(oauth, code, verifier, expected.uri, now), settings)
        return await self._grants.client_of(provider).exchange(oauth, code, verifier, expected.uri, now)


def _callback_values(
    provider: Provider, key: str, parameters: Mapping[str, str], details: Mapping[str, str]
) -> dict[str, str]:
    """What a callback says of the account, and requests to it will carry. Raises `ConsentRefused`.

    It came through a browser, whose person may have written it: it is short and printable, and fits its place.
    """
    names = () if provider.oauth is None else provider.oauth.keep_callback
    values = {name: parameters[name] for name in names if parameters.get(name)}
    for name, value in values.items():
        if len(value) > CALLBACK_VALUE.value or not value.isprintable():
            raise ConsentRefused(
                f"{key}: the callback's {name} is too long, or not printable: start again at the consent page"
            )
    if not values:
        return {}
    _require_places(provider, details)  # what the program itself gave
    try:
        _require_places(provider, {**details, **values})
    except InvalidInput:
        raise ConsentRefused(
            f"{key}: the callback's {' and '.join(values)} cannot be part of an address or a header: start again at the"
            " consent page"
        ) from None
    return values


def _require_places(provider: Provider, values: Mapping[str, str]) -> None:
    """Raise `InvalidInput` if a value does not fit the place of its placeholder, in an address or a header."""
    address = provider.base_url_for(values)
    provider.origins(address)
    provider.check_address(provider.base_url, address)
    provider.oauth_for(values)
    places = names_in(*provider.headers.values())
    if wrong := [name for name, value in values.items() if name in places and not fits_header(value)]:
        raise InvalidInput(f"no header can hold the {wrong[0]}")


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _expect(c: Connection, d: Dialect, id_: str, key: str, sealed: str) -> None:
    connections.expect(c, d, id_, key, sealed, d.now(c) + LASTS)
