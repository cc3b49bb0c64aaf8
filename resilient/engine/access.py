"""What is known about the credentials of accounts: read from the connection's row, or from the app's own table.

Rows are looked at again after `MAX_AGE`; in between, a token that another process has replaced shows itself by
being refused. Decrypted secrets live in this process's memory only.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Protocol, cast
from uuid import NAMESPACE_URL, UUID, uuid5

from resilient.core.errors import ResourceStopped, SetupError
from resilient.core.placeholders import names_in
from resilient.core.tokens import EMPTY, PROBED, USABLE, Credentials, GrantState
from resilient.engine import seals
from resilient.engine.foreign import called
from resilient.engine.token_endpoints import token_key
from resilient.store import connections, grants, lacking
from resilient.store.secrets import VARIABLE, KeyRing, key_id_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from sqlalchemy import Connection

    from resilient.core.auth import OAuth2
    from resilient.core.provider import Provider
    from resilient.engine.app import Resilient
    from resilient.store.connections import Bound
    from resilient.store.dialect import Dialect
    from resilient.store.grants import Grant

log = logging.getLogger("resilient.grants")
MAX_AGE: Final = 2.0  # seconds for which credentials are used without looking again
MOST: Final = 10_000  # accounts that are remembered; beyond that all are read again
TABLE: Final = "resilient_grant"


class CredentialStore(Protocol):
    """An app's own table of tokens; ``Resilient(credentials=...)``."""

    async def load(self, resource_key: str) -> Credentials | None:
        """The account's credentials as they are now; None if there are none."""

    async def save(self, resource_key: str, expected_version: int, credentials: Credentials) -> bool:
        """Commit them if the stored version is still the expected one; whether it was."""


class SyncCredentialStore(Protocol):
    """`CredentialStore` in plain functions: they are run in threads, several at once for several accounts."""

    def load(self, resource_key: str) -> Credentials | None:
        """The account's credentials as they are now; None if there are none."""

    def save(self, resource_key: str, expected_version: int, credentials: Credentials) -> bool:
        """Commit them if the stored version is still the expected one; whether it was."""


def in_threads(store: CredentialStore | SyncCredentialStore) -> CredentialStore:
    """A store whose plain functions do not hold up the event loop. Raises `SetupError` for half a store."""
    if not (callable(getattr(store, "load", None)) and callable(getattr(store, "save", None))):
        raise SetupError(f"credentials={store!r} needs load() and save(): see resilient.CredentialStore")
    return _Foreign(store)


class _Foreign:
    def __init__(self, store: Any) -> None:
        self._store = store

    async def load(self, resource_key: str) -> Credentials | None:
        return cast("Credentials | None", await called(self._store.load, resource_key))

    async def save(self, resource_key: str, expected_version: int, credentials: Credentials) -> bool:
        return cast("bool", await called(self._store.save, resource_key, expected_version, credentials))


@dataclass(frozen=True, slots=True)
class Access:
    """What one account's requests carry; its ``repr`` shows no secret.

    ``headers`` and ``params`` (of the URL) are everything: ``own_headers``, the account's, and ``secret_headers``, its
    credentials. ``base_url``: where the account lives, "" if that is not known yet. ``values`` fill the provider's
    placeholders. ``version`` counts the changes.
    """

    headers: Mapping[str, str] = field(repr=False)
    token: str = field(repr=False)
    expires_at: datetime | None
    version: int
    values: Mapping[str, str] = field(repr=False)
    params: Mapping[str, str] = field(default_factory=lambda: EMPTY, repr=False)
    base_url: str = ""
    own_headers: Mapping[str, str] = field(default_factory=lambda: EMPTY, repr=False)
    secret_headers: Mapping[str, str] = field(default_factory=lambda: EMPTY, repr=False)


@dataclass(slots=True)
class Held:
    """A connection with its credentials decrypted, and when it was read."""

    bound: Bound
    credentials: Credentials
    provider: Provider
    at: float
    access: Access
    endpoint: str = ""  # the resource that its token endpoint is

    @property
    def oauth(self) -> OAuth2 | None:
        """How it is refreshed; None if it cannot be."""
        return self.provider.oauth if self.bound.grant.kind == "oauth2" else None


class Accounts:
    """The accounts of one app, as far as this process has used them."""

    def __init__(self, app: Resilient, keys: Iterable[str], store: CredentialStore | None) -> None:
        self._app, self.ring, self.store = app, KeyRing(keys), store
        self._known: dict[str, Held | None] = {}
        self._looked: dict[str, float] = {}
        self._ahead = timedelta()  # the database's clock before ours

    def now(self) -> datetime:
        """The database's time, as well as it is known here."""
        return self._app.now() + self._ahead

    def forget(self, key: str | None = None) -> None:
        """Read again before the next use: of one account, or of all."""
        if key is None:
            self._looked.clear()
        self._looked.pop(key or "", None)

    def known(self, key: str) -> Held | None:
        """An account's connection as it was last read here."""
        return self._known.get(key)

    async def held(self, key: str) -> Held | None:
        """An account's connection; None if it has none. Raises `ResourceStopped` for one that is dead, or in doubt."""
        held = await self.loaded(key)
        if held is not None and (state := held.bound.grant.state) not in USABLE:
            raise ResourceStopped(held.provider.name if state is GrantState.SUSPECT else key, "auth")
        return held

    async def loaded(self, key: str) -> Held | None:
        """The same, whatever its state."""
        at = time.monotonic()
        held = self._known.get(key)
        if at - self._looked.get(key, -1e9) > MAX_AGE:
            held = await self._load(key, at)
            if len(self._known) >= MOST and key not in self._known:
                self._known.clear()
                self._looked.clear()
            self._known[key], self._looked[key] = held, at
        return held

    async def _load(self, key: str, at: float) -> Held | None:
        bound, now = await self._run(_find, key)
        self._ahead = now - self._app.now()
        external = bound is not None and bound.grant.secrets is None and bound.grant.state in PROBED
        if (bound is None or external) and self.store is not None:
            return await self._load_theirs(key, bound, at)
        if bound is None:
            return None
        credentials = self.opened(bound.grant)
        if bound.grant.state in PROBED:
            seals.require(self.ring, bound, credentials)
        return self._made(bound, credentials, at)

    async def _load_theirs(self, key: str, bound: Bound | None, at: float) -> Held | None:
        """From the app's own table; the row that carries lease and state is made with the first use."""
        assert self.store is not None  # noqa: S101 - the caller looked
        found = await self.store.load(key)
        if found is None:
            return None
        if bound is None:
            refreshes = self._provider(key).oauth is not None and bool(found.refresh_token)
            bound = await self._app.database.transaction(adopt, key, refreshes=refreshes)
        seals.require(self.ring, bound, found)
        return self._made(bound, found, at)

    def _made(self, bound: Bound, credentials: Credentials, at: float) -> Held:
        provider = self._provider(bound.resource_key)
        facts = provider.oauth
        values = {**credentials.values, **bound.details}
        if bound.grant.kind == "oauth2" and _names(provider.oauth):
            provider = provider.filled(**values)
        secret, params = carried(provider, bound.grant.kind, credentials)
        own = provider.headers_for(values)
        access = Access(
            headers={**own, **secret}, token=credentials.token,
            expires_at=credentials.expires_at, version=credentials.version, values=values, params=params,
            base_url=provider.base_url_for(values), own_headers=own, secret_headers=secret,
        )  # fmt: skip
        endpoint = token_key(provider.name, facts, provider.oauth)
        return Held(bound, credentials, provider, at, access, endpoint)

    def _provider(self, key: str) -> Provider:
        name = key.partition("/")[0]
        found = self._app.providers.get(name)
        if found is None:
            raise SetupError(f"{key} has a connection, but no provider {name!r} is listed: Resilient(providers=[...])")
        return found

    def opened(self, grant: Grant) -> Credentials:
        """A grant's secrets. Raises `SetupError` without their key."""
        if grant.secrets is None:
            return Credentials(version=grant.version)
        doc = json.loads(self.ring.open(grant.secrets, TABLE, grant.id.hex, "secrets"))
        until = doc.pop("previous_until", None)
        return Credentials(
            **doc, previous_until=None if until is None else datetime.fromisoformat(until),
            expires_at=grant.expires_at, refresh_at=grant.refresh_at, version=grant.version,
        )  # fmt: skip

    def sealed(self, id_: UUID, credentials: Credentials) -> grants.NewSecrets:
        """Secrets for a grant's row. Raises `SetupError` without a key."""
        until = credentials.previous_until
        doc = {
            "token": credentials.token, "refresh_token": credentials.refresh_token, "user": credentials.user,
            "previous": credentials.previous, "previous_until": None if until is None else until.isoformat(),
            "values": dict(credentials.values),
        }  # fmt: skip
        text = self.ring.seal(json.dumps(doc), TABLE, id_.hex, "secrets")
        return grants.NewSecrets(text, key_id_of(text), credentials.expires_at, credentials.refresh_at)

    def renewed(self, now: Grant, credentials: Credentials) -> grants.NewSecrets:
        """`sealed`, with the note about seals that the row has got meanwhile."""
        has = now.secrets is not None and seals.is_noted(self.opened(now))
        return self.sealed(now.id, seals.noted(credentials) if has else credentials)

    async def check_keys(self) -> None:
        """Refuse to work without the keys that credentials are encrypted with. Raises `SetupError`."""
        sealed: dict[str, int] = await self._run(lacking.sealed_with)
        missing, every = lacking.unreadable(sealed, self.ring.key_ids), sum(sealed.values())
        if missing and missing == every:
            raise SetupError(
                f"none of the {every} stored credentials can be read with the {len(self.ring.key_ids)} keys"
                f" given: set {VARIABLE} (or Resilient(secrets=[...])) to what the other processes have;"
                " nothing was started"
            )
        if missing:
            log.error(
                "%d of %d stored credentials cannot be read with the keys given: their accounts wait", missing, every
            )

    async def _run(self, fn: Any, *args: Any) -> Any:
        return await self._app.database.transaction(fn, *args)


def carried(provider: Provider, kind: str, credentials: Credentials) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """The headers, and the parameters of the URL, that carry the credentials.

    Raises `SetupError` for a kind the provider does not know.
    """
    for auth in provider.auth:
        if auth.kind != kind:
            continue
        if auth.kind == "basic":
            return auth.headers(credentials.user, credentials.token), EMPTY
        if auth.kind == "oauth2":
            return auth.sends.headers(credentials.token) if credentials.token else {}, EMPTY
        return auth.headers(credentials.token), EMPTY if auth.kind == "bearer" else auth.params(credentials.token)
    known = ", ".join(auth.kind for auth in provider.auth) or "none"
    raise SetupError(f"provider {provider.name!r} takes no credentials of the kind {kind!r}: it knows {known}")


def _names(oauth: OAuth2 | None) -> frozenset[str]:
    if oauth is None:
        return frozenset()
    return names_in(oauth.authorize_url, oauth.token_url, oauth.refresh_url, oauth.revoke_url)


def _find(c: Connection, d: Dialect, key: str) -> tuple[Bound | None, datetime]:
    return connections.find(c, d, key), d.now(c)


def adopt(c: Connection, d: Dialect, key: str, *, refreshes: bool) -> Bound:
    """The row that carries lease and state of an account whose secrets are elsewhere."""
    now = d.now(c)
    grant = grants.new(uuid5(NAMESPACE_URL, f"resilient:{key}"), key, "oauth2" if refreshes else "bearer", now)
    grants.insert_if_new(c, d, grant, None)
    connections.bind(c, d, key, grant.id, {}, "ok")
    found = connections.find(c, d, key)
    assert found is not None  # noqa: S101 - it was just bound
    return found
