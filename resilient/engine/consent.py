"""People on their way through a provider's consent page, and what they come back with.

The state parameter is 256 random bits and whose account it is about, signed by the key ring: what was not signed here
costs no look into the database, which keeps only its hash, once, and cannot make it another account's. The first
callback uses it up. Beside it waits, encrypted, what the callback has to fit: PKCE's verifier, the address, and who
began (``bound_to``), so that nobody can finish what another person began: neither a victim who is sent an attacker's
link, nor an attacker who is sent a victim's.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from resilient.core import tokens
from resilient.core.errors import ConsentRefused, SetupError
from resilient.core.tokens import EMPTY, Credentials
from resilient.store import connections, fuse

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sqlalchemy import Connection

    from resilient.core.auth import OAuth2
    from resilient.engine.app import Resilient
    from resilient.engine.sessions import Transactions
    from resilient.store.dialect import Dialect
    from resilient.wire.oauth import TokenAnswer

LASTS: Final = timedelta(minutes=30)  # to come back from a consent page
_TABLE: Final = "resilient_authorization"
_LONGEST_STATE: Final = 200
_KEY: Final = 32  # hexadecimal digits, so 128 bits, of the account's key within a state


@dataclass(frozen=True, slots=True)
class Granted:
    """What somebody came back with. ``note``: what was said when they were sent. The ``repr`` shows no secret."""

    key: str
    credentials: Credentials
    details: Mapping[str, str]
    note: str


@dataclass(frozen=True, slots=True)
class _Expected:
    """What waits for a callback."""

    verifier: str
    uri: str
    details: Mapping[str, str]
    bound: str
    note: str


class Consent:
    """The consent pages of one app's providers."""

    def __init__(self, app: Resilient, db: Transactions, *, here: bool) -> None:
        self._app, self._db, self._here = app, db, here

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
        """Where to send the person. Raises `SetupError`."""
        self._app.connections.account_of(key)
        if not oauth.client_id or not oauth.authorize_url:
            raise SetupError(f"{key}: the provider has no client_id: provider(client_id=..., client_secret=...)")
        ring = self._app.grants.accounts.ring
        state = ring.signed(secrets.token_urlsafe(32) + _hashed(key)[:_KEY])
        verifier = secrets.token_urlsafe(48)
        id_ = _hashed(state)
        doc = {"verifier": verifier, "uri": uri, "details": dict(details), "bound": _hashed(bound_to), "note": note}
        sealed = ring.seal(json.dumps(doc), _TABLE, id_, "secrets")
        await self._db.write(None, _expect, id_, key, sealed)
        from resilient.wire.oauth import consent_url  # noqa: PLC0415 - httpx: only where something is sent

        return consent_url(oauth, uri, state, verifier)

    async def finish(self, parameters: Mapping[str, str], *, bound_to: str = "") -> Granted:
        """Exchange what a callback brought. Raises `ConsentRefused`; the state is used up then too."""
        from resilient.wire.oauth import callback_error  # noqa: PLC0415 - httpx: only where something is sent

        key, expected = await self._arrived(parameters.get("state") or "")
        if not hmac.compare_digest(expected.bound, _hashed(bound_to)):
            raise ConsentRefused("this callback belongs to another browser or another user: start again from your own")
        oauth, now = self._app.connections.oauth_of(key, expected.details), self._app.now()
        if not oauth.is_issuer(parameters.get("iss")):
            raise ConsentRefused(f"{key}: this callback comes from another authorization server: start again")
        if (error := callback_error(parameters)) is not None or not parameters.get("code"):
            raise ConsentRefused(f"access to {key} was not granted: {error or 'no code came back'}")
        answer = await self._exchange(oauth, parameters["code"], expected)
        made = None if answer.failure is not None else tokens.merged(Credentials(), answer.body, oauth, now)
        if made is None:
            code = "no token" if answer.failure is None else answer.failure.code
            raise ConsentRefused(f"{key}: the provider gave no token for the code ({code}): start again")
        name = key.partition("/")[0]
        facts = self._app.providers[name].oauth
        if facts is not None and not facts.at_tenants:
            await self._db.write(None, fuse.client_taken, name)
        kept = {name: parameters[name] for name in oauth.keep_callback if parameters.get(name)}
        uri = {"redirect_uri": expected.uri} if oauth.refresh_redirect else {}
        made = replace(made, values={**made.values, **kept, **uri})
        return Granted(key, made, {**expected.details, **kept}, expected.note)

    async def _arrived(self, state: str) -> tuple[str, _Expected]:
        """Whose callback that is; used up by asking."""
        ring, unexpected = self._app.grants.accounts.ring, "this callback is not expected (any more)"
        if len(state) > _LONGEST_STATE or not ring.is_signed(state):
            raise ConsentRefused(f"{unexpected}: start again at the consent page")
        found = await self._db.write(None, connections.arrived, _hashed(state))
        if found is None or not found[2]:
            raise ConsentRefused(f"{unexpected}: start again at the consent page")
        if not hmac.compare_digest(state.partition(".")[0][-_KEY:], _hashed(found[0])[:_KEY]):
            raise ConsentRefused(f"{unexpected}, for {found[0]}: start again at the consent page")
        doc: dict[str, Any] = json.loads(ring.open(found[1], _TABLE, _hashed(state), "secrets"))
        return found[0], _Expected(**doc)

    async def _exchange(self, oauth: OAuth2, code: str, expected: _Expected) -> TokenAnswer:
        verifier, now = expected.verifier if oauth.pkce != "none" else "", self._app.now()
        if self._here:
            from resilient.wire.oauth import ask_here  # noqa: PLC0415 - httpx: only where something is sent

            return ask_here(lambda client: client.exchange(oauth, code, verifier, expected.uri, now))
        return await self._app.grants.client.exchange(oauth, code, verifier, expected.uri, now)


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _expect(c: Connection, d: Dialect, id_: str, key: str, sealed: str) -> None:
    connections.expect(c, d, id_, key, sealed, d.now(c) + LASTS)
