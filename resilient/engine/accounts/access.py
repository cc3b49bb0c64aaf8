"""The credentials of accounts, as this process has read them: from the connection's row, or from the app's own table.

A row is read again after `MAX_AGE`. Until then this process may use a token that another process has replaced; the
provider then refuses it. Decrypted secrets are in this process's memory only.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Protocol, cast
from uuid import NAMESPACE_URL, UUID, uuid5

from resilient.core.accounts.endpoints import token_key
from resilient.core.accounts.tokens import (
    EMPTY,
    PROBED,
    USABLE,
    Credentials,
    GrantState,
    is_expired,
    is_renewable,
)
from resilient.core.base.errors import ResourceStopped, SecretsUnreadable, SetupError
from resilient.core.base.frames import frameless
from resilient.core.base.loggers import logger
from resilient.core.provider.placeholders import names_in
from resilient.engine.accounts import seals, sharing
from resilient.engine.ground.foreign import called
from resilient.store.accounts import connections, grants
from resilient.store.accounts.secrets import VARIABLE, key_id_of
from resilient.store.db.direct import direct

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy import Connection

    from resilient.core.provider.auth import OAuth2
    from resilient.core.provider.facts import Provider
    from resilient.engine.ground.ground import Ground
    from resilient.store.accounts.connections import Bound
    from resilient.store.accounts.grants import Grant
    from resilient.store.accounts.secrets import KeyRing
    from resilient.store.db.dialect import Dialect

log = logger("grants")
MAX_AGE: Final = 2.0  # seconds for which credentials are used without reading them again
MOST: Final = 10_000  # accounts that are remembered, beyond that all are read again; and refused credentials
TABLE: Final = "resilient_grant"


class CredentialStore(Protocol):
    """An app's own table of tokens; ``Resilient(credentials=...)``."""

    async def load(self, resource_key: str) -> Credentials | None:
        """The account's credentials as they are now; None if there are none."""

    async def save(self, resource_key: str, expected_version: int, credentials: Credentials) -> bool:
        """Commit them if the stored version is still the expected one; returns whether it was."""


class SyncCredentialStore(Protocol):
    """`CredentialStore` in plain functions: they are run in threads, several at once for several accounts."""

    def load(self, resource_key: str) -> Credentials | None:
        """The account's credentials as they are now; None if there are none."""

    def save(self, resource_key: str, expected_version: int, credentials: Credentials) -> bool:
        """Commit them if the stored version is still the expected one; returns whether it was."""


def in_threads(store: CredentialStore | SyncCredentialStore) -> CredentialStore:
    """A store whose plain functions run in threads. Raises `SetupError` for a store without ``load`` or ``save``."""
    if not (callable(getattr(store, "load", None)) and callable(getattr(store, "save", None))):
        raise SetupError(f"credentials={store!r} needs load() and save(): see resilient.CredentialStore")
    return _ThreadedStore(store)


class _ThreadedStore:
    def __init__(self, store: Any) -> None:
        self._store = store

    async def load(self, resource_key: str) -> Credentials | None:
        return cast("Credentials | None", await called(self._store.load, resource_key))

    async def save(self, resource_key: str, expected_version: int, credentials: Credentials) -> bool:
        return cast("bool", await called(self._store.save, resource_key, expected_version, credentials))


@dataclass(frozen=True, slots=True)
class Access:
    """What one account's requests carry; its ``repr`` shows no secret.

    ``headers`` are all of them: ``own_headers``, the account's, and ``secret_headers``, its credentials. ``params`` are
    those of the URL. ``base_url``: where the account's API is, "" as long as that is unknown. ``values`` fill the
    provider's placeholders. ``version`` counts the changes. ``grant`` identifies the grant: a refresh keeps it, a new
    consent changes it.
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
    grant: str = field(default="", repr=False)

    @property
    def issue(self) -> tuple[str, int]:
        """Identifies the credentials: versions are counted anew for each grant."""
        return self.grant, self.version


class RefusedCredentials:
    """The credentials that providers refused since this process has used them: they count as expired."""

    def __init__(self) -> None:
        self._issues: dict[str, tuple[str, int]] = {}  # `Access.issue` by account, the latest last

    def has(self, key: str, access: Access) -> bool:
        """Whether these credentials of an account were refused; a note about other ones is deleted."""
        if self._issues.get(key, access.issue) != access.issue:
            del self._issues[key]
        return key in self._issues

    def note(self, key: str, access: Access) -> None:
        """Note that they were refused."""
        self._issues.pop(key, None)
        self._issues[key] = access.issue
        if len(self._issues) > MOST:  # the oldest would be refused once more, if it is ever used again
            del self._issues[next(iter(self._issues))]


@dataclass(slots=True)
class Account:
    """A connection with its credentials decrypted."""

    bound: Bound
    credentials: Credentials
    provider: Provider
    access: Access
    endpoint: str = ""  # the resource that its token endpoint is
    owners: Sequence[str] = ()  # of the grant, if the account is a guest of it: see `sharing.owners`

    @property
    def oauth(self) -> OAuth2 | None:
        """The OAuth facts by which it is refreshed; None if it cannot be."""
        grant = self.bound.grant
        can_be = grant.kind == "oauth2" and is_renewable(self.credentials, grant.flow)
        return self.provider.oauth if can_be else None

    @property
    def has_own_endpoint(self) -> bool:
        """Whether its token endpoint is at a host that it names, with a resource of its own."""
        return self.endpoint != token_key(self.provider.name, None, None)

    def has_ended(self, now: datetime) -> bool:
        """Whether it has a token of ours that is over by its own word, and nothing to renew it with."""
        grant = self.bound.grant
        return (
            self.oauth is None and grant.kind == "oauth2" and bool(grant.secrets) and is_expired(self.credentials, now)
        )


class Accounts:
    """The accounts of one app, as far as this process has used them."""

    def __init__(self, ground: Ground, ring: KeyRing, store: CredentialStore | None) -> None:
        self._ground, self.ring, self.store = ground, ring, store
        self._accounts: dict[str, Account | None] = {}
        self._read_at: dict[str, float] = {}
        self._clock_difference = timedelta()  # the database's clock less this host's

    def now(self) -> datetime:
        """The database's time: this host's clock, corrected by the difference at the last read."""
        return self._ground.now() + self._clock_difference

    def forget(self, key: str | None = None) -> None:
        """Read the credentials again before their next use: of one account, or of all."""
        if key is None:
            self._read_at.clear()
        self._read_at.pop(key or "", None)

    def peek(self, key: str) -> Account | None:
        """An account as it was last read here; None if it never was, or has no connection."""
        return self._accounts.get(key)

    async def load_usable(self, key: str) -> Account | None:
        """An account whose grant can be used; None without a connection. Raises `ResourceStopped` for other grants."""
        account = await self.load(key)
        if account is not None and (state := account.bound.grant.state) not in USABLE:
            raise ResourceStopped(account.provider.name if state is GrantState.SUSPECT else key, "auth")
        return account

    @frameless
    async def load(self, key: str) -> Account | None:
        """An account, whatever its grant's state; None without a connection."""
        at = time.monotonic()
        account = self._accounts.get(key)
        if at - self._read_at.get(key, -1e9) > MAX_AGE:
            account = await self._read(key)
            if len(self._accounts) >= MOST and key not in self._accounts:
                self._accounts.clear()
                self._read_at.clear()
            self._accounts[key], self._read_at[key] = account, at
        return account

    async def _read(self, key: str) -> Account | None:
        bound, owners, now = await self._run(_find, key)
        self._clock_difference = now - self._ground.now()
        external = bound is not None and bound.grant.secrets is None and bound.grant.state in PROBED
        if (bound is None or external) and self.store is not None:
            return await self._read_from_app(key, bound)
        if bound is None:
            return None
        credentials = self.decrypt(bound.grant)
        if bound.grant.state in PROBED:
            seals.require(self.ring, bound, credentials)
        account = self._account_of(bound, credentials)
        account.owners = owners
        return account

    async def _read_from_app(self, key: str, bound: Bound | None) -> Account | None:
        """An account of the app's own table; its row (lease, state) is inserted at its first use."""
        assert self.store is not None  # noqa: S101 - the caller looked
        credentials = await self.store.load(key)
        if credentials is None:
            return None
        kind = kind_of(self._provider(key), credentials)  # the app may have put other ones there
        if bound is None:
            bound = await self._ground.database.transaction(adopt, key, kind=kind)
        seals.require(self.ring, bound, credentials)
        return self._account_of(replace(bound, grant=replace(bound.grant, kind=kind)), credentials)

    def _account_of(self, bound: Bound, credentials: Credentials) -> Account:
        provider = self._provider(bound.resource_key)
        facts = provider.oauth
        values = {**credentials.values, **bound.details}
        if bound.grant.kind == "oauth2" and _placeholders(provider.oauth):
            provider = provider.filled(**values)
        secret, params = carried(provider, bound.grant.kind, credentials)
        own = provider.headers_for(values)
        access = Access(
            headers={**own, **secret}, token=credentials.token,
            expires_at=credentials.expires_at, version=credentials.version, values=values, params=params,
            base_url=provider.base_url_for(values), own_headers=own, secret_headers=secret,
            grant=f"{bound.grant.id} {bound.grant.authorised_at}",
        )  # fmt: skip
        endpoint = token_key(provider.name, facts, provider.oauth)
        return Account(bound, credentials, provider, access, endpoint)

    def _provider(self, key: str) -> Provider:
        name = key.partition("/")[0]
        provider = self._ground.providers.get(name)
        if provider is None:
            raise SetupError(f"{key} has a connection, but no provider {name!r} is listed: Resilient(providers=[...])")
        return provider

    @frameless
    def decrypt(self, grant: Grant) -> Credentials:
        """A grant's credentials. Raises `SetupError` without the key of its secrets."""
        if grant.secrets is None:
            return Credentials(version=grant.version)
        doc = json.loads(self.ring.open(grant.secrets, TABLE, grant.id.hex, "secrets"))
        until = doc.pop("previous_until", None)
        return Credentials(
            **doc, previous_until=None if until is None else datetime.fromisoformat(until),
            expires_at=grant.expires_at, refresh_at=grant.refresh_at, version=grant.version,
        )  # fmt: skip

    @frameless
    def encrypt(self, id_: UUID, credentials: Credentials) -> grants.NewSecrets:
        """Credentials as they stand in a grant's row. Raises `SetupError` without a key."""
        until = credentials.previous_until
        doc = {
            "token": credentials.token, "refresh_token": credentials.refresh_token, "user": credentials.user,
            "previous": credentials.previous, "previous_until": None if until is None else until.isoformat(),
            "values": dict(credentials.values),
        }  # fmt: skip
        text = self.ring.seal(json.dumps(doc), TABLE, id_.hex, "secrets")
        return grants.NewSecrets(text, key_id_of(text), credentials.expires_at, credentials.refresh_at)

    @frameless
    def encrypt_renewed(self, now: Grant, credentials: Credentials) -> grants.NewSecrets:
        """`encrypt` for the row as it is ``now``: it keeps the row's note that connections are sealed."""
        return self.encrypt(now.id, seals.with_note(credentials) if self.wants_seals(now) else credentials)

    def wants_seals(self, grant: Grant) -> bool:
        """Whether connections to a grant must be sealed: if its secrets say so, or if no key here opens them.

        Whoever encrypts secrets under a key that is not here yet notes it in them.
        """
        try:
            return grant.secrets is not None and seals.has_note(self.decrypt(grant))
        except SecretsUnreadable:
            return True

    async def check_keys(self) -> None:
        """Raise `SetupError` if no stored credentials can be decrypted; log an error if some cannot."""
        sealed: dict[str, int] = await self._run(connections.sealed_with)
        missing, every = connections.unreadable(sealed, self.ring.key_ids), sum(sealed.values())
        if missing and missing == every:
            raise SetupError(
                f"none of the stored credentials ({every}) can be read with the keys given ({len(self.ring.key_ids)}):"
                f" set {VARIABLE} (or Resilient(secrets=[...])) to what the other processes have;"
                " nothing was started"
            )
        if missing:
            log.error(
                "%d of %d stored credentials cannot be read with the keys given: their accounts wait", missing, every
            )

    async def _run(self, fn: Any, *args: Any) -> Any:
        return await self._ground.database.transaction(fn, *args)


def carried(provider: Provider, kind: str, credentials: Credentials) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """The headers, and the parameters of the URL, that carry the credentials.

    Raises `SetupError` for a kind that the provider does not take.
    """
    for auth in provider.auth:
        if auth.kind != kind:
            continue
        if auth.kind == "basic":
            return auth.headers(credentials.user, credentials.token), EMPTY
        if auth.kind == "oauth2":
            return auth.sends.headers(credentials.token) if credentials.token else {}, EMPTY
        return auth.headers(credentials.token), EMPTY if auth.kind == "bearer" else auth.params(credentials.token)
    kinds = ", ".join(auth.kind for auth in provider.auth) or "none"
    raise SetupError(f"provider {provider.name!r} takes no credentials of the kind {kind!r}: it knows {kinds}")


def _placeholders(oauth: OAuth2 | None) -> frozenset[str]:
    if oauth is None:
        return frozenset()
    return names_in(oauth.authorize_url, oauth.token_url, oauth.refresh_url, oauth.revoke_url)


@direct
def _find(c: Connection, d: Dialect, key: str) -> tuple[Bound | None, Sequence[str], datetime]:
    """The connection of an account, the owners of its grant if it is a guest there, and the time."""
    bound = connections.find(c, d, key)
    is_guest = bound is not None and sharing.GUEST in bound.details
    return bound, sharing.owners(c, d, bound) if bound is not None and is_guest else (), d.now(c)


def kind_of(provider: Provider, credentials: Credentials) -> str:
    """The kind of credentials that are in the app's own table."""
    takes_bare = any(auth.kind == "bearer" for auth in provider.auth)
    return "oauth2" if provider.oauth is not None and (credentials.refresh_token or not takes_bare) else "bearer"


def adopt(
    c: Connection, d: Dialect, key: str, *, kind: str, details: Mapping[str, str] = EMPTY, ring: KeyRing | None = None
) -> Bound:
    """The row for lease and state of an account whose secrets are in the app's own table; inserted if there is none."""
    grant = grants.new(uuid5(NAMESPACE_URL, f"resilient:{key}"), key, kind, d.now(c))
    grants.insert_if_new(c, d, grant, None)
    seal = seals.seal(ring, key, grant.id, details) if ring else None
    connections.bind(c, d, key, grant.id, details, "ok", seal=seal)
    bound = connections.find(c, d, key)
    assert bound is not None  # noqa: S101 - it was just bound
    return bound
