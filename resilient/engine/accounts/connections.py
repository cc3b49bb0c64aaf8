"""`app.connections`: the accounts of an app's customers, and their credentials. `app.sync.connections`: synchronous.

Credentials come by hand (`add`), from another system (`import_`), or from the provider's consent page
(`authorize_url`, `complete`). New ones for an account whose grant died open its gate: its jobs go on by themselves.
Nothing here ever shows a secret.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

from uuid_utils.compat import uuid7

from resilient.core.accounts import tokens
from resilient.core.accounts.tokens import EMPTY, Credentials, GrantState
from resilient.core.base.errors import ConnectionNotFound, ConsentRefused, InvalidInput, ResilientError, SetupError
from resilient.core.base.frames import frameless_calls
from resilient.core.base.instants import add, in_utc
from resilient.core.base.loggers import logger
from resilient.core.base.misfit import check_storable, explained_calls
from resilient.core.base.phrases import fits_header, nearest
from resilient.core.base.resource_key import check, check_stored
from resilient.core.jobs.records import plain
from resilient.core.provider.placeholders import names_in
from resilient.engine.accounts import seals, sharing
from resilient.engine.accounts.access import adopt, carried, kind_of
from resilient.engine.accounts.consent import Consent
from resilient.engine.accounts.seals import reseal_grants, reseal_payloads
from resilient.engine.ground.audited import audited
from resilient.engine.ground.providers import account_of, oauth_of
from resilient.engine.ground.sessions import SyncFacade, Transactions, blocking
from resilient.store.accounts import connections, fuse, grants
from resilient.store.gates import controls as gates

if TYPE_CHECKING:
    import builtins
    from collections.abc import Coroutine, Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    from sqlalchemy import Connection

    from resilient.core.provider.auth import OAuth2
    from resilient.core.provider.facts import Provider
    from resilient.engine.accounts.access import Accounts
    from resilient.engine.accounts.consent import Granted
    from resilient.engine.accounts.grants import Grants
    from resilient.engine.ground.ground import Ground
    from resilient.store.accounts.connections import Bound
    from resilient.store.accounts.grants import Grant, NewSecrets
    from resilient.store.db.dialect import Dialect

log = logger("connections")
T = TypeVar("T")
_SHOWN: Final = 5  # accounts in a line of the log


class _AccountErased(ConsentRefused):
    """The account was erased while the code of its consent was exchanged."""


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
    retry_at: datetime | None  # the next refresh is tried no earlier
    failures: int  # of refreshes, in a row
    last_code: str | None
    created_at: datetime
    details: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """The stable form for programs."""
        return {name: plain(getattr(self, name)) for name in self.__slots__}


@frameless_calls
@explained_calls("app.connections")
class Connections:
    """Connections of one app. Raises `BadResourceKey`, `InvalidInput`, and `SetupError` without a key for secrets."""

    def __init__(self, ground: Ground, grants: Grants, *, here: bool = False) -> None:
        self._ground, self._grants, self._db, self._here = ground, grants, Transactions(ground, here=here), here
        self._consent = Consent(ground, grants, self._db, here=here)

    @property
    def sync(self) -> SyncConnections:
        """The same for synchronous programs."""
        return SyncConnections(Connections(self._ground, self._grants, here=True))

    # -- looking ---------------------------------------------------------------------------------------------

    async def get(self, key: str) -> ConnectionInfo:
        """One connection. Raises `ConnectionNotFound`."""
        bound = await self._db.read(None, connections.find, check_stored(key))
        if bound is None:
            raise _not_connected(key)
        return info_of(bound)

    async def list(
        self,
        provider: str | None = None,
        *,
        state: GrantState | str | None = None,
        limit: int = 100,
        after: str = "",
    ) -> builtins.list[ConnectionInfo]:
        """A page of connections by key: of one provider, in one state. The next page is ``after`` the last key."""
        if state is not None and state not in list(GrantState):
            words = [one.value for one in GrantState]
            raise InvalidInput(f"state={state!r}: say one of {', '.join(words)}{nearest(str(state), words)}")
        for what, text in (("provider", provider), ("after", after)):
            check_storable(what, text or "")
        name = None if state is None else GrantState(state).value
        rows = await self._db.read(None, connections.find_all, under=provider, state=name, after=after, limit=limit)
        return [info_of(row) for row in rows]

    # -- changing --------------------------------------------------------------------------------------------

    @audited("connections add")
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
        grant of another account instead; new credentials of that one are for both then, new ones of ``key`` for itself
        alone. ``details`` fill the provider's placeholders.
        """
        ways = [bool(token), bool(api_key), bool(user), client_credentials, bool(private_key), grant_of is not None]
        if sum(ways) != 1 or bool(private_key) is not bool(issuer):
            raise InvalidInput(
                f"{key}: give one of token, api_key, user, client_credentials, private_key (with issuer) and grant_of"
            )
        if grant_of is not None:
            if self.account_of(key).name != check(grant_of).partition("/")[0]:
                raise InvalidInput(f"{key} cannot share the grant of {grant_of}: that is another provider's")
            self._ground.foresight.look_at(key)
            if (source := await self._db.read(None, connections.find, grant_of)) is not None:
                values = self._grants.accounts.decrypt(source.grant).values
                await self._check_places(key, source.grant.kind, values, details)
            await self._db.write(None, _share, check(key), check(grant_of), details, self._grants)
            self._grants.accounts.forget()
            return await self.get(key)
        if private_key:
            values = {name: text for name, text in (("subject", subject), ("key_id", key_id)) if text}
            credentials = Credentials(refresh_token=private_key, user=issuer, values=values)
            from resilient.wire.oauth.endpoints import grant_assertion  # noqa: PLC0415 - cryptography: only where it is used

            grant_assertion(self.oauth_of(key, details), credentials, self._ground.now())  # raises if it is no key
            return await self._put(key, "oauth2", credentials, "jwt_bearer", details)
        kind = ("bearer", "api_key", "basic", "oauth2")[ways.index(True)]
        _check_sendable(key, token=token, api_key=api_key)
        credentials = Credentials(token=token or api_key or password, user=user)
        return await self._put(key, kind, credentials, "client_credentials" if client_credentials else None, details)

    @audited("connections import")
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
        expires_at = None if expires_at is None else in_utc(expires_at)
        refresh_at = None if expires_at is None or not refresh_token else add(expires_at, -margin)
        credentials = Credentials(
            token=access_token, refresh_token=refresh_token, expires_at=expires_at, refresh_at=refresh_at
        )
        return await self._put(key, "oauth2", credentials, "authorization_code", details)

    @audited("connections revoke")
    async def revoke(self, key: str) -> bool:
        """Delete an account's credentials; its jobs wait. False if they were deleted before.

        Accounts that share the grant lose it too. Nothing is sent to the provider: see `Connections.disconnect`.
        """
        await self.get(key)
        return await self._give_up(key) is not None

    @audited("connections disconnect")
    async def disconnect(self, key: str) -> bool:
        """`revoke`, and revoke the token at the provider if it has an endpoint for that; returns whether it did."""
        bound, accounts = await self._db.read(None, connections.find, check_stored(key)), self._grants.accounts
        if bound is None:
            raise _not_connected(key)
        seals.require(accounts.ring, bound, accounts.decrypt(bound.grant))
        own = None
        if bound.grant.secrets is None and accounts.store is not None:
            own = await self._on_table(accounts.store.load(key))
        last = await self._give_up(key)
        if last is None or last.kind != "oauth2":
            return False
        credentials = own or accounts.decrypt(last)  # a refresh may have ended meanwhile
        return await self._revoke_at_provider(key, credentials, last.flow, bound.details)

    async def _revoke_at_provider(
        self, key: str, credentials: Credentials, flow: str | None, details: Mapping[str, str]
    ) -> bool:
        """Revoke credentials at the provider if it has an endpoint for that; returns whether it did."""
        oauth = self.oauth_of(key, {**credentials.values, **details})
        secret = tokens.revocable(credentials, flow)
        if not oauth.revoke_url or not secret:
            return False
        now = await self._db.read(None, _time)
        if self._here:
            from resilient.wire.oauth.endpoints import ask_here  # noqa: PLC0415 - httpx: only where something is sent

            settings = self._ground.http_of(key.partition("/")[0])
            return ask_here(lambda client: client.revoke(oauth, secret, now), settings) is None
        return await self._grants.client_of(key.partition("/")[0]).revoke(oauth, secret, now) is None

    async def restored(self, key: str) -> None:
        """Let the jobs of an account go on whose grant died, and which has new credentials in the app's own table.

        Raises `SetupError` without such a table.
        """
        if self._grants.accounts.store is None:
            raise SetupError(
                f"{key}: there is no table of the app's own to take credentials from: Resilient(credentials=...); new"
                " ones for the engine's own table come by connections.add, import_ or complete"
            )
        await self._db.write(None, gates.open_auth, check_stored(key), tokens.NOT_CONNECTED)
        bound = await self._db.read(None, connections.find, key)
        rest: builtins.list[str] = [] if bound is None else await self._db.read(None, sharing.who_stays, bound)
        if bound is not None and rest:
            await self._db.write(None, _hand_over, key, bound.grant.kind, EMPTY, self._grants.accounts)
            bound = await self._db.read(None, connections.find, key)
        if bound is None:  # it was never used: its first job reads the app's table
            return self._grants.accounts.forget()
        info = info_of(bound)
        nothing = grants.NewSecrets(None, None, None, None)
        await self._db.write(None, grants.authorise, info.grant_id, nothing, kind=info.kind, flow="authorization_code")
        if info.state not in tokens.USABLE:
            await self._db.write(None, self._grants.fuse.hush, info.provider, [key])
        return self._grants.accounts.forget()

    @audited("connections release")
    async def release(self, provider: str, *, believed: bool = True) -> int:
        """Let accounts go on that their provider refused in error, many at once. Returns the number of their grants.

        Until then these are `suspect`, the provider is gated as ``suspect_auth``, and no customer is told. With
        ``believed=False`` a grant that is refused again before it has worked is dead at once.
        """
        return self._forget_and_count(await self._db.write(None, fuse.release, check(provider), believed=believed))

    @audited("connections confirm")
    async def confirm(self, provider: str) -> int:
        """Declare the suspects of a provider dead: their customers are told, all other accounts go on. See `release`.

        Returns the number of dead grants.
        """
        return self._forget_and_count(await self._db.write(None, fuse.confirm, check(provider), self._grants.fuse))

    @audited("connections rotate_secrets")
    async def rotate_secrets(self) -> int:
        """Encrypt all credentials and sealed payloads with the first key of the ring, and seal all connections.

        Returns how many grants and payloads were changed. From then on a connection that something else changed in the
        database is refused.
        """
        done = await reseal_grants(self._db, self._grants.accounts)
        return done + await reseal_payloads(self._db, self._grants.accounts.ring)

    # -- consent ---------------------------------------------------------------------------------------------

    async def authorize_url(
        self,
        key: str,
        *,
        redirect_uri: str | None = None,
        details: Mapping[str, str] = EMPTY,
        bound_to: str = "",
    ) -> str:
        """The address of the consent page for an account, valid for half an hour; see `complete`.

        ``redirect_uri`` must be the one of the provider's configuration, where there is one. ``bound_to`` identifies
        the person's session or browser (a secret cookie, the user's id): `complete` must get the same text.
        """
        self.account_of(check(key))
        self._ground.foresight.look_at(key)
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

        Raises `ConsentRefused`. The state can be used once, also if the callback is refused.
        """
        return await self.granted(await self._consent.finish(parameters, bound_to=bound_to))

    @property
    def consent(self) -> Consent:
        """The consent flow, for the routes and the command line: they serve the callback's address themselves."""
        return self._consent

    async def granted(self, consent: Granted) -> ConnectionInfo:
        """Connect the account that a person has granted access to.

        Raises `ConsentRefused` if the account was erased since the callback came.
        """
        key, credentials, details = consent.key, consent.credentials, consent.details
        try:
            if self._grants.accounts.store is None:
                return await self._put(key, "oauth2", credentials, "authorization_code", details, consent=consent.id)
            await self._db.write(None, _end_return, key, consent.id)
        except _AccountErased:
            if await self._db.read(None, connections.find, key) is None:  # else it might revoke the newer ones, too
                with contextlib.suppress(ResilientError):
                    await self._revoke_at_provider(key, credentials, "authorization_code", details)
            raise
        return await self._hand_over(key, credentials, details)

    # -- inside ----------------------------------------------------------------------------------------------

    async def _give_up(self, key: str) -> Grant | None:
        """See `store.accounts.connections.give_up`."""
        last: Grant | None = await self._db.write(None, connections.give_up, key)
        self._grants.accounts.forget()
        return last

    def _forget_and_count(self, rows: Sequence[Grant]) -> int:
        self._grants.accounts.forget()
        return len(rows)

    def account_of(self, key: str) -> Provider:
        """The provider of an account's key. Raises `InvalidInput` for any other key."""
        return account_of(self._ground.providers, key)

    def oauth_of(self, key: str, details: Mapping[str, str] = EMPTY) -> OAuth2:
        """The OAuth facts for an account. Raises `InvalidInput`."""
        return oauth_of(self._ground.providers, key, details)

    async def _hand_over(self, key: str, credentials: Credentials, details: Mapping[str, str]) -> ConnectionInfo:
        """Save new credentials in the app's own table; version 0 means that it has none yet."""
        store = self._grants.accounts.store
        assert store is not None  # noqa: S101 - the caller looked
        before = await self._on_table(store.load(key))
        version = 0 if before is None else before.version
        if not await self._on_table(store.save(key, version, replace(credentials, version=version + 1))):
            raise ConsentRefused(f"{key} was changed by somebody else at the same moment: start again")
        kind = kind_of(self.account_of(key), credentials)
        await self._db.write(None, _hand_over, key, kind, details, self._grants.accounts)
        await self.restored(key)
        return await self.get(key)

    async def _on_table(self, call: Coroutine[Any, Any, T]) -> T:
        """The result of a call of the app's `CredentialStore`, on this loop or on one of its own."""
        if not self._here:
            return await call
        from resilient.wire.oauth.endpoints import in_own_loop  # noqa: PLC0415 - httpx: only where something is sent

        return in_own_loop(call)

    async def _check_places(self, key: str, kind: str, values: Mapping[str, str], details: Mapping[str, str]) -> None:
        """Raise `InvalidInput` for details that lack a place of the account's addresses, or lead to a stranger.

        ``values`` are what the credentials say about the account.
        """
        provider, before = self.account_of(key), await self._db.read(None, connections.find, key)
        values = {**values, **_details_of(self._grants.accounts, before, details)}
        _require_places(key, provider, kind, values)
        address = provider.base_url_for(values)
        provider.origins(address)
        provider.check_address(provider.base_url, address)
        provider.oauth_for(values)

    async def _put(
        self,
        key: str,
        kind: str,
        credentials: Credentials,
        flow: str | None,
        details: Mapping[str, str],
        *,
        consent: str = "",
    ) -> ConnectionInfo:
        provider = self.account_of(key)
        self._ground.foresight.look_at(key)
        carried(provider, kind, credentials)
        await self._check_places(key, kind, credentials.values, details)
        args = check(key), kind, credentials, flow, sharing.without_guest_note(details), self._grants
        rest = await self._db.write(None, _put, *args, consent=consent)
        self._grants.accounts.forget()
        if rest:
            log.warning(
                "%s has a grant of its own now; %s stay with the one it shared (grant_of= would share the new one)",
                key, ", ".join(rest[:_SHOWN]) + (" and others" if len(rest) > _SHOWN else ""),
            )  # fmt: skip
        return await self.get(key)


@frameless_calls
class SyncConnections(SyncFacade[Connections]):
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
    """Raise `InvalidInput` if a placeholder of the account's addresses has no value and no token answer gives one."""
    places = names_in(provider.base_url)
    if kind == "oauth2" and (oauth := provider.oauth) is not None:
        places |= names_in(oauth.token_url, oauth.refresh_url, oauth.revoke_url)
        places -= {path.rpartition(".")[2] for path in oauth.keep} | set(oauth.keep_callback)
    if missing := sorted(places - values.keys()):
        example = ", ".join(f"{name!r}: '...'" for name in missing)
        raise InvalidInput(f"{key}: the address of its account is not known: give details={{{example}}}")


def _not_connected(key: str) -> ConnectionNotFound:
    return ConnectionNotFound(f"{key} has no connection: see `resilient connections list`")


def info_of(bound: Bound) -> ConnectionInfo:
    """A connection as people see it."""
    g = bound.grant
    return ConnectionInfo(
        resource_key=bound.resource_key, provider=g.provider, kind=g.kind, state=g.state, state_since=g.state_since,
        grant_id=g.id, version=g.version, expires_at=g.expires_at, refreshed_at=g.refreshed_at, retry_at=g.retry_at,
        failures=g.failures, last_code=g.last_code, created_at=g.created_at,
        details=sharing.without_guest_note(bound.details),
    )  # fmt: skip


def _time(c: Connection, d: Dialect) -> datetime:
    return d.now(c)


def _end_return(c: Connection, d: Dialect, key: str, consent: str) -> None:
    if not connections.end_return(c, d, consent):
        raise _AccountErased(f"{key} was erased meanwhile: start again at the consent page")


def _put(
    c: Connection,
    d: Dialect,
    key: str,
    kind: str,
    credentials: Credentials,
    flow: str | None,
    details: Mapping[str, str],
    app_grants: Grants,
    *,
    consent: str = "",
) -> list[str]:
    """Write new credentials: into the account's own grant, else into a new one; returns who stays with the old one.

    ``consent``: the row of the return that brought them. Raises `_AccountErased`.
    """
    if consent:
        _end_return(c, d, key, consent)
    accounts, sealable, row = app_grants.accounts, seals.with_note(credentials), connections.lock(c, d, key)
    old = _untouched(accounts, row)
    rest = [] if old is None else sharing.who_stays(c, d, old)
    details = _details_of(accounts, row, details)
    if old is None or rest:
        id_, now = uuid7(), d.now(c)
        new: NewSecrets = accounts.encrypt(id_, sealable)
        new_grant = replace(
            grants.new(id_, key, kind, now, flow=flow),
            secrets=new.secrets, expires_at=new.expires_at, refresh_at=new.refresh_at,
        )  # fmt: skip
        grants.insert_if_new(c, d, new_grant, new.key_id)
        seal = seals.seal(accounts.ring, key, id_, details)
        if row is not None:  # something else has changed that row, or others stay with its grant
            connections.bind(c, d, key, id_, details, "ok", seal=seal)
            grants.gate(c, d, id_, "ok")
        elif not connections.bind_if_new(c, d, key, id_, details, seal=seal):
            grants.delete(c, d, id_)  # somebody else connected the account at the same moment, and has committed
            return _put(c, d, key, kind, credentials, flow, details, app_grants)
    else:
        id_ = old.grant.id
        before = _wants_seals(accounts, old.grant)
        grants.authorise(c, d, id_, accounts.encrypt(id_, sealable), kind=kind, flow=flow)
        connections.bind(c, d, key, id_, details, "ok", seal=seals.seal(accounts.ring, key, id_, details))
        seals.seal_all(c, d, accounts.ring, id_, was_required=before)
    _withdraw_notices(c, d, app_grants, row, grants.keys_of(c, d, id_))
    return rest


def _withdraw_notices(c: Connection, d: Dialect, app_grants: Grants, before: Bound | None, keys: Sequence[str]) -> None:
    """Withdraw the notices that the credentials of accounts (``before``) were dead: they have new ones."""
    if before is not None and before.grant.state not in tokens.USABLE:
        app_grants.fuse.hush(c, d, before.grant.provider, keys)


def _hand_over(c: Connection, d: Dialect, key: str, kind: str, details: Mapping[str, str], accounts: Accounts) -> None:
    """Let an account use the app's own table from now on; details that were given before stay if there are no new."""
    before = connections.lock(c, d, key)
    details = _details_of(accounts, before, details)
    grant = adopt(c, d, key, kind=kind, details=details, ring=accounts.ring).grant
    if before is not None and before.grant.id != grant.id:
        grants.delete_if_unused(c, d, before.grant.id)


def _wants_seals(accounts: Accounts, grant: Grant) -> bool:
    """Whether connections to a grant must be sealed; True for one whose secrets are not in our table."""
    return grant.secrets is None or accounts.wants_seals(grant)


def _untouched(accounts: Accounts, bound: Bound | None) -> Bound | None:
    """The connection, if this program wrote it; None if something else changed it, or may have."""
    if bound is None or not accounts.ring or not _wants_seals(accounts, bound.grant):
        return bound
    return bound if seals.fits(accounts.ring, bound) else None


def _details_of(accounts: Accounts, before: Bound | None, details: Mapping[str, str]) -> dict[str, str]:
    """The details that are given now; those that were given before if there are no new."""
    untouched = None if details else _untouched(accounts, before)
    return sharing.without_guest_note(details if untouched is None else untouched.details)


def _share(c: Connection, d: Dialect, key: str, other: str, details: Mapping[str, str], app_grants: Grants) -> None:
    accounts, locked = app_grants.accounts, connections.lock_all(c, d, {key, other})
    source, before = locked.get(other), locked.get(key)
    if source is None:
        raise ConnectionNotFound(f"{other} has no connection whose grant {key} could share")
    grant = source.grant
    if grant.secrets is not None:
        seals.require(accounts.ring, source, accounts.decrypt(grant))
    auth = "ok" if grant.state in tokens.USABLE else grant.state.value
    is_same, guest = before is not None and before.grant.id == grant.id, sharing.GUEST
    stays = is_same and before is not None and (key == other or guest in source.details)  # the owner stays the owner
    is_guest = guest in before.details if stays and before is not None else True
    details = {**_details_of(accounts, before, details), **({guest: "1"} if is_guest else {})}
    connections.bind(c, d, key, grant.id, details, auth, seal=seals.seal(accounts.ring, key, grant.id, details))
    if before is not None and not is_same:
        grants.delete_if_unused(c, d, before.grant.id)
        if auth == "ok":
            _withdraw_notices(c, d, app_grants, before, [key])


def _check_sendable(key: str, **values: str) -> None:
    """Raise `InvalidInput`, without the token in it, for one that no header can hold, such as with a line break."""
    wrong = [name for name, value in values.items() if not fits_header(value)]
    if wrong:
        raise InvalidInput(
            f"{key}: {wrong[0]} holds a character that no header can (a line break, a blank at an end, a letter beyond"
            " Latin-1): copy it again"
        )
