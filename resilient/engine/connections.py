"""`app.connections`: the accounts of an app's customers, and their credentials. `app.sync.connections`: synchronous.

Credentials come by hand (`add`), from another system (`import_`), or from the provider's consent page
(`authorize_url`, `complete`). New ones for an account whose grant died open its gate: its jobs go on by themselves.
Nothing here ever shows a secret.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

from uuid_utils.compat import uuid7

from resilient.core import tokens
from resilient.core.errors import ConnectionNotFound, ConsentRefused, InvalidInput, SecretsUnreadable
from resilient.core.misfit import explained_calls
from resilient.core.phrases import nearest
from resilient.core.placeholders import names_in
from resilient.core.plain_text import fits_header
from resilient.core.records import plain
from resilient.core.resource_key import check
from resilient.core.tokens import EMPTY, Credentials, GrantState
from resilient.engine import seals
from resilient.engine.access import adopt, carried
from resilient.engine.consent import Consent
from resilient.engine.sessions import Face, Transactions, blocking
from resilient.store import connections, fuse, grants, lacking
from resilient.store.secrets import key_id_of

if TYPE_CHECKING:
    import builtins
    from collections.abc import Coroutine, Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    from sqlalchemy import Connection

    from resilient.core.auth import OAuth2
    from resilient.core.provider import Provider
    from resilient.engine.access import Accounts
    from resilient.engine.app import Resilient
    from resilient.engine.consent import Granted
    from resilient.store.connections import Bound
    from resilient.store.dialect import Dialect
    from resilient.store.grants import Grant, NewSecrets

log = logging.getLogger("resilient.connections")
T = TypeVar("T")
_BATCH: Final = 200
_ACCOUNT: Final = 2  # segments of an account's key


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionInfo:
    """One connection, without its secrets. Times are aware and in UTC."""

    resource_key: str
    provider: str
    kind: str
    state: GrantState
    state_since: datetime
    grant_id: UUID
    version: int
    expires_at: datetime | None
    refreshed_at: datetime | None
    retry_at: datetime | None  # not before is the next refresh tried
    failures: int  # of refreshes, in a row
    last_code: str | None
    created_at: datetime
    details: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """The stable form for programs."""
        return {name: plain(getattr(self, name)) for name in self.__slots__}


@explained_calls("app.connections")
class Connections:
    """Connections of one app. Raises `BadResourceKey`, `InvalidInput`, and `SetupError` without a key for secrets."""

    def __init__(self, app: Resilient, *, here: bool = False) -> None:
        self._app, self._db, self._here = app, Transactions(app, here=here), here
        self._consent = Consent(app, self._db, here=here)

    @property
    def sync(self) -> SyncConnections:
        """The same for synchronous programs."""
        return SyncConnections(Connections(self._app, here=True))

    # -- looking ---------------------------------------------------------------------------------------------

    async def get(self, key: str) -> ConnectionInfo:
        """One connection. Raises `ConnectionNotFound`."""
        found = await self._db.read(None, connections.find, check(key))
        if found is None:
            raise ConnectionNotFound(f"{key} has no connection: see `resilient connections list`")
        return info_of(found)

    async def list(
        self,
        provider: str | None = None,
        *,
        state: GrantState | str | None = None,
        limit: int = 100,
        after: str = "",
    ) -> builtins.list[ConnectionInfo]:
        """A page of connections by key: of one provider, in one state. The next one is ``after`` the last."""
        if state is not None and state not in list(GrantState):
            words = [one.value for one in GrantState]
            raise InvalidInput(f"state={state!r}: say one of {', '.join(words)}{nearest(str(state), words)}")
        wanted = None if state is None else GrantState(state).value
        found = await self._db.read(None, connections.find_all, under=provider, state=wanted, after=after, limit=limit)
        return [info_of(one) for one in found]

    # -- changing --------------------------------------------------------------------------------------------

    async def add(
        self,
        key: str,
        *,
        token: str = "",
        api_key: str = "",
        user: str = "",
        password: str = "",
        client_credentials: bool = False,
        private_key: str = "",
        issuer: str = "",
        subject: str = "",
        key_id: str = "",
        grant_of: str | None = None,
        details: Mapping[str, str] = EMPTY,
    ) -> ConnectionInfo:
        """Give an account credentials, or new ones: a token, an API key, user and password, or the app's own.

        ``private_key`` (PEM) with ``issuer``: a service account, whose tokens are got by assertions signed with it (RFC
        7523); ``subject``: the user it acts for; ``key_id``: the key's name at the provider. ``grant_of``: share the
        grant of another account instead. ``details`` fill the provider's placeholders.
        """
        said = [bool(token), bool(api_key), bool(user), client_credentials, bool(private_key), grant_of is not None]
        if sum(said) != 1 or bool(private_key) is not bool(issuer):
            raise InvalidInput(
                f"{key}: give one of token, api_key, user, client_credentials, private_key (with issuer) and grant_of"
            )
        if grant_of is not None:
            if self.account_of(key).name != check(grant_of).partition("/")[0]:
                raise InvalidInput(f"{key} cannot share the grant of {grant_of}: that is another provider's")
            await self._db.write(None, _share, check(key), check(grant_of), details, self._app.grants.accounts)
            return await self.get(key)
        if private_key:
            values = {name: text for name, text in (("subject", subject), ("key_id", key_id)) if text}
            credentials = Credentials(refresh_token=private_key, user=issuer, values=values)
            from resilient.wire.assertion import grant_assertion  # noqa: PLC0415 - cryptography: only where it is used

            grant_assertion(self.oauth_of(key, details), credentials, self._app.now())  # whether it is a key at all
            return await self._put(key, "oauth2", credentials, "jwt_bearer", details)
        kind = ("bearer", "api_key", "basic", "oauth2")[said.index(True)]
        _check_sendable(key, token=token, api_key=api_key)
        credentials = Credentials(token=token or api_key or password, user=user)
        return await self._put(key, kind, credentials, "client_credentials" if client_credentials else None, details)

    async def import_(
        self,
        key: str,
        *,
        access_token: str = "",
        refresh_token: str = "",
        expires_at: datetime | None = None,
        details: Mapping[str, str] = EMPTY,
    ) -> ConnectionInfo:
        """Take over OAuth tokens from another system; it must stop refreshing them then."""
        if not (access_token or refresh_token):
            raise InvalidInput(f"{key}: give access_token, refresh_token or both")
        _check_sendable(key, access_token=access_token)
        if expires_at is not None and expires_at.tzinfo is None:
            raise InvalidInput(f"{key}: expires_at={expires_at.isoformat()} has no time zone")
        margin = timedelta(seconds=self.oauth_of(key, details).margin)
        refresh_at = None if expires_at is None or not refresh_token else expires_at - margin
        credentials = Credentials(
            token=access_token, refresh_token=refresh_token, expires_at=expires_at, refresh_at=refresh_at
        )
        return await self._put(key, "oauth2", credentials, "authorization_code", details)

    async def revoke(self, key: str) -> bool:
        """Forget an account's credentials; its jobs wait. False if they were forgotten before.

        Accounts that share the grant lose it too. The provider is not told: see `Connections.disconnect`.
        """
        grant_id = (await self.get(key)).grant_id
        done = await self._db.write(None, grants.give_up, grant_id)
        self._app.grants.accounts.forget()
        return done

    async def disconnect(self, key: str) -> bool:
        """`revoke`, and tell the provider where it can be told; whether it took it."""
        bound, accounts = await self._db.read(None, connections.find, check(key)), self._app.grants.accounts
        known = Credentials() if bound is None else accounts.opened(bound.grant)
        if bound is not None:
            seals.require(accounts.ring, bound, known)
        if bound is not None and bound.grant.secrets is None and accounts.store is not None:
            theirs = await self._theirs(accounts.store.load(key))
            known = theirs or known
        await self.revoke(key)
        if bound is None or bound.grant.kind != "oauth2":
            return False
        oauth, now = self.oauth_of(key, {**known.values, **bound.details}), self._app.now()
        secret = known.refresh_token or known.token
        if not oauth.revoke_url or not secret:
            return False
        if self._here:
            from resilient.wire.oauth import ask_here  # noqa: PLC0415 - httpx: only where something is sent

            return ask_here(lambda client: client.revoke(oauth, secret, now)) is None
        return await self._app.grants.client.revoke(oauth, secret, now) is None

    async def restored(self, key: str) -> None:
        """The app's own table has new credentials for an account whose grant died: its jobs go on."""
        await self._db.write(None, lacking.open_if_shut, check(key), tokens.NOT_CONNECTED)
        bound = await self._db.read(None, connections.find, key)
        if bound is None:  # it was never used: its first job reads the app's table
            return self._app.grants.accounts.forget()
        found = info_of(bound)
        nothing = grants.NewSecrets(None, None, None, None)
        await self._db.write(
            None, grants.authorise, found.grant_id, nothing, kind=found.kind, flow="authorization_code"
        )
        return self._app.grants.accounts.forget()

    async def release(self, provider: str, *, believed: bool = True) -> int:
        """A provider erred when it called many accounts dead at once: they go on. How many grants that were.

        Until then they are `suspect`, the provider is gated as ``suspect_auth``, and no customer was told. Unless they
        are ``believed``, one that is refused once more before it worked again is dead without a doubt.
        """
        return self._decided(await self._db.write(None, fuse.release, check(provider), believed=believed))

    async def confirm(self, provider: str) -> int:
        """They are dead: their accounts wait for their customers, who are told, all others go on. See `release`."""
        return self._decided(await self._db.write(None, fuse.confirm, check(provider), self._app.grants.fuse))

    async def rotate_secrets(self) -> int:
        """Encrypt with the first key of the ring what is encrypted with another one, and seal what is not sealed.

        How many grants that were. From then on a connection that something else changed in the database is refused.
        """
        done, refused = 0, set[str]()
        for waits in (False, True):  # those that somebody refreshes at this moment come last
            turn = _Turn()
            while not turn.over:
                turn = await self._db.write(None, _reseal, self._app.grants.accounts, turn.last, waits=waits)
                done += turn.changed
                refused.update(turn.refused)
        for key in sorted(refused):
            log.warning("the connection of %s does not fit its seal, and is refused: connect it again", key)
        return done

    # -- consent ---------------------------------------------------------------------------------------------

    async def authorize_url(
        self,
        key: str,
        *,
        redirect_uri: str | None = None,
        details: Mapping[str, str] = EMPTY,
        bound_to: str = "",
    ) -> str:
        """Where to send the person who shall grant access to an account; see `complete`. It works for half an hour.

        ``redirect_uri`` must be the one of the provider's configuration, where there is one. ``bound_to`` is what is
        known of the person's session or browser (a secret cookie, the user's id): `complete` must say the same.
        """
        self.account_of(check(key))
        oauth = self.oauth_of(key, details)
        uri = redirect_uri or oauth.redirect_uri
        if not uri or (oauth.redirect_uri and uri != oauth.redirect_uri):
            raise InvalidInput(
                f"{key}: redirect_uri={redirect_uri!r} is not the one of the provider: configure it,"
                " provider(client_id=..., redirect_uri='https://...')"
            )
        return await self._consent.begin(key, oauth, uri, details=details, bound_to=bound_to)

    async def complete(self, parameters: Mapping[str, str], *, bound_to: str = "") -> ConnectionInfo:
        """Take the parameters of the callback: exchange the code and connect the account.

        Raises `ConsentRefused`; the state is used up then too.
        """
        return await self.granted(await self._consent.finish(parameters, bound_to=bound_to))

    @property
    def consent(self) -> Consent:
        """For those who serve the callback's address themselves: the routes and the command line."""
        return self._consent

    async def granted(self, what: Granted) -> ConnectionInfo:
        """Connect the account that somebody granted access to."""
        if self._app.grants.accounts.store is not None:
            return await self._hand_over(what.key, what.credentials)
        return await self._put(what.key, "oauth2", what.credentials, "authorization_code", what.details)

    # -- inside ----------------------------------------------------------------------------------------------

    def _decided(self, found: Sequence[Grant]) -> int:
        self._app.grants.accounts.forget()
        return len(found)

    def _provider(self, key: str) -> Provider:
        name = check(key).partition("/")[0]
        found = self._app.providers.get(name)
        if found is None:
            raise InvalidInput(f"{key}: no provider {name!r} is listed: Resilient(providers=[{name}.provider()])")
        return found

    def account_of(self, key: str) -> Provider:
        """The provider of an account's key. Raises `InvalidInput` for any other key."""
        provider, parts = self._provider(key), check(key).split("/")
        if len(parts) > _ACCOUNT:
            raise InvalidInput(f"{key}: credentials belong to an account: {'/'.join(parts[:2])}")
        if len(parts) < _ACCOUNT and not provider.single_account:
            raise InvalidInput(
                f"{key} is the whole provider: credentials belong to one account of it, such as {key}/main (if it has"
                f" no accounts at all: {key}.provider(single_account=True))"
            )
        return provider

    def oauth_of(self, key: str, details: Mapping[str, str] = EMPTY) -> OAuth2:
        """The OAuth facts for an account. Raises `InvalidInput`."""
        provider = self._provider(key)
        facts = provider.oauth_for(details)
        if facts is None:
            raise InvalidInput(f"provider {provider.name!r} has no OAuth: use add()")
        return facts

    async def _hand_over(self, key: str, credentials: Credentials) -> ConnectionInfo:
        """New credentials for the app's own table; version 0 is the one before the first."""
        store = self._app.grants.accounts.store
        assert store is not None  # noqa: S101 - the caller looked
        known = await self._theirs(store.load(key))
        version = 0 if known is None else known.version
        if not await self._theirs(store.save(key, version, replace(credentials, version=version + 1))):
            raise ConsentRefused(f"{key} was changed by somebody else at the same moment: start again")
        await self._db.write(None, adopt, key, refreshes=bool(credentials.refresh_token))
        await self.restored(key)
        return await self.get(key)

    async def _theirs(self, asked: Coroutine[Any, Any, T]) -> T:
        if not self._here:
            return await asked
        from resilient.wire.oauth import in_own_loop  # noqa: PLC0415 - httpx: only where something is sent

        return in_own_loop(asked)

    async def _put(
        self, key: str, kind: str, credentials: Credentials, flow: str | None, details: Mapping[str, str]
    ) -> ConnectionInfo:
        provider = self.account_of(key)
        carried(provider, kind, credentials)
        before = _untouched(self._app.grants.accounts, await self._db.read(None, connections.find, key))
        values = {**credentials.values, **(details or ({} if before is None else before.details))}
        _require_places(key, provider, kind, values)
        address = provider.base_url_for(values)
        provider.origins(address)  # raises for a stranger's host
        provider.check_address(provider.base_url, address)
        provider.oauth_for(values)
        await self._db.write(None, _put, check(key), kind, credentials, flow, details, self._app.grants.accounts)
        self._app.grants.accounts.forget()
        return await self.get(key)


class SyncConnections(Face[Connections]):
    """`Connections` for synchronous programs: the same methods, without ``await``."""

    get = blocking(Connections.get)
    list = blocking(Connections.list)
    add = blocking(Connections.add)
    import_ = blocking(Connections.import_)
    revoke = blocking(Connections.revoke)
    disconnect = blocking(Connections.disconnect)
    authorize_url = blocking(Connections.authorize_url)
    complete = blocking(Connections.complete)
    restored = blocking(Connections.restored)
    release = blocking(Connections.release)
    confirm = blocking(Connections.confirm)
    rotate_secrets = blocking(Connections.rotate_secrets)


def _require_places(key: str, provider: Provider, kind: str, values: Mapping[str, str]) -> None:
    """Raise `InvalidInput` if the account's address cannot be told, now or by a token's answer."""
    wanted = names_in(provider.base_url)
    if kind == "oauth2" and (oauth := provider.oauth) is not None:
        wanted |= names_in(oauth.token_url, oauth.refresh_url, oauth.revoke_url)
        wanted -= {path.rpartition(".")[2] for path in oauth.keep} | set(oauth.keep_callback)
    if missing := sorted(wanted - values.keys()):
        example = ", ".join(f"{name!r}: '...'" for name in missing)
        raise InvalidInput(f"{key}: the address of its account is not known: give details={{{example}}}")


def info_of(bound: Bound) -> ConnectionInfo:
    """A connection for people."""
    g = bound.grant
    return ConnectionInfo(
        resource_key=bound.resource_key, provider=g.provider, kind=g.kind, state=g.state, state_since=g.state_since,
        grant_id=g.id, version=g.version, expires_at=g.expires_at, refreshed_at=g.refreshed_at, retry_at=g.retry_at,
        failures=g.failures, last_code=g.last_code, created_at=g.created_at, details=dict(bound.details),
    )  # fmt: skip


def _put(
    c: Connection,
    d: Dialect,
    key: str,
    kind: str,
    credentials: Credentials,
    flow: str | None,
    details: Mapping[str, str],
    accounts: Accounts,
) -> None:
    """New credentials: of the grant the account has, else of a new one."""
    credentials, found = seals.noted(credentials), connections.find(c, d, key)
    known = _untouched(accounts, found)
    if known is None:
        id_, now = uuid7(), d.now(c)
        new: NewSecrets = accounts.sealed(id_, credentials)
        made = replace(
            grants.new(id_, key, kind, now, flow=flow),
            secrets=new.secrets, expires_at=new.expires_at, refresh_at=new.refresh_at,
        )  # fmt: skip
        grants.insert_if_new(c, d, made, new.key_id)
        seal = seals.seal(accounts.ring, key, id_, details)
        if found is not None:  # what stands there is not what this program wrote
            return connections.bind(c, d, key, id_, details, "ok", seal=seal)
        if connections.bind_if_new(c, d, key, id_, details, seal=seal):
            return None
        grants.delete(c, d, id_)  # somebody else connected the account at the same moment
        known = connections.find(c, d, key)
        assert known is not None  # noqa: S101 - theirs is committed
    id_ = known.grant.id
    locked = grants.lock(c, d, id_) or known.grant
    before = _wants_seals(accounts, locked)
    grants.authorise(c, d, id_, accounts.sealed(id_, credentials), kind=kind, flow=flow)
    details = details or known.details
    connections.bind(c, d, key, id_, details, "ok", seal=seals.seal(accounts.ring, key, id_, details))
    seals.seal_all(c, d, accounts.ring, id_, noted_before=before)
    return None


def _wants_seals(accounts: Accounts, grant: Grant) -> bool:
    """Whether connections to a grant must be sealed; nobody can say so of secrets that no key opens."""
    try:
        return grant.secrets is None or seals.is_noted(accounts.opened(grant))
    except SecretsUnreadable:
        return True


def _untouched(accounts: Accounts, bound: Bound | None) -> Bound | None:
    """A connection that this program wrote; None for one that somebody else changed, or may have."""
    if bound is None or not accounts.ring or not _wants_seals(accounts, bound.grant):
        return bound
    return bound if seals.fits(accounts.ring, bound) else None


def _share(c: Connection, d: Dialect, key: str, other: str, details: Mapping[str, str], accounts: Accounts) -> None:
    found = connections.find(c, d, other)
    if found is None:
        raise ConnectionNotFound(f"{other} has no connection whose grant {key} could share")
    if found.grant.secrets is not None:
        seals.require(accounts.ring, found, accounts.opened(found.grant))
    before = connections.find(c, d, key)
    ids = {found.grant.id} if before is None else {found.grant.id, before.grant.id}
    locked = {id_: grants.lock(c, d, id_) for id_ in sorted(ids)}
    grant = locked.pop(found.grant.id) or found.grant
    auth = "ok" if grant.state in tokens.USABLE else grant.state.value
    connections.bind(c, d, key, grant.id, details, auth, seal=seals.seal(accounts.ring, key, grant.id, details))
    for left in locked:
        grants.delete_if_unused(c, d, left)


@dataclass(frozen=True, slots=True)
class _Turn:
    """What one transaction of `rotate_secrets` did: up to which grant, how many, which connections it refused."""

    last: UUID | None = None
    changed: int = 0
    refused: tuple[str, ...] = ()
    over: bool = False


def _reseal(c: Connection, d: Dialect, accounts: Accounts, after: UUID | None, *, waits: bool) -> _Turn:
    found, changed, refused = grants.with_secrets(c, d, after, _BATCH, waits=waits), 0, list[str]()
    for grant in found:
        known = accounts.opened(grant)
        refused += seals.seal_all(c, d, accounts.ring, grant.id, noted_before=seals.is_noted(known))
        if key_id_of(grant.secrets or "") == accounts.ring.current and seals.is_noted(known):
            continue
        new = accounts.sealed(grant.id, seals.noted(known))
        grants.reseal(c, d, grant.id, new.secrets or "", new.key_id or "")
        changed += 1
    return _Turn(found[-1].id if found else after, changed, tuple(refused), over=not found)


def _check_sendable(key: str, **values: str) -> None:
    """Refuse a token that no header can hold, such as one with a line break. Raises `InvalidInput`, without it."""
    wrong = [name for name, value in values.items() if not fits_header(value)]
    if wrong:
        raise InvalidInput(
            f"{key}: {wrong[0]} holds a character that no header can (a line break, a blank at an end, a letter beyond"
            " Latin-1): copy it again"
        )
