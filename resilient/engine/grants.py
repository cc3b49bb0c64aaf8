"""Credentials for requests: read, decrypted, refreshed in time, by one process at a time.

A refresh is begun in the database (lease, fence, write-ahead mark), sent with no transaction open, and committed
before anybody uses its token. Waiters, in this process or another, read the winner's token. A token that a refusal
proved bad counts as expired for everybody. While a refresh cannot be had, the old token is used as long as it lasts;
after that jobs wait for the token endpoint, a resource of its own (`token_endpoints.py`). A dead grant gates its
accounts, unless too many die at once (`fuse.py`).

An app's own table can stay the only store of its tokens (`CredentialStore`): lease, fence and state are ours then,
the secrets never touch our tables.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from resilient.core import tokens
from resilient.core.errors import ConnectionNotFound, DatabaseUnreachable, ResourceStopped, SetupError
from resilient.core.failure import Failure, FailureKind
from resilient.core.fuse import APP_REFUSED
from resilient.core.resource_key import check
from resilient.core.tokens import PROBED, USABLE, Credentials, GrantEvent, GrantState, RefreshFailure
from resilient.engine.access import Access, Accounts, CredentialStore, Held, SyncCredentialStore, in_threads
from resilient.engine.fuse import Fuse
from resilient.engine.token_endpoints import TokenEndpoints, token_key
from resilient.store import gates, grants, resources
from resilient.wire.oauth import PATIENCE, TokenAnswer, TokenClient
from resilient.wire.trail import at_account

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime
    from uuid import UUID

    from sqlalchemy import Connection

    from resilient.core.auth import OAuth2
    from resilient.engine.app import Resilient
    from resilient.engine.handler import Kind
    from resilient.store.dialect import Dialect
    from resilient.store.grants import Begun, Grant

log = logging.getLogger("resilient.grants")
LEASE: Final = 2 * PATIENCE + 20.0  # seconds; two requests may be sent under one lease
POLL: Final = 0.1
MOST: Final = 10_000  # refused tokens that are remembered
FRESH: Final = 60.0  # seconds; a token this young that is refused will not get better by another refresh
_NO_TOKEN: Final = Failure(FailureKind.TRANSIENT, code="no_token", provider_wide=True)


class _Died(ResourceStopped):
    """The provider's word in answer to this refresh."""


class Grants:
    """The credentials of one app."""

    def __init__(
        self,
        app: Resilient,
        keys: Iterable[str],
        store: CredentialStore | SyncCredentialStore | None,
        on_needs_reauth: Kind[Any] | None = None,
    ) -> None:
        theirs = None if store is None else in_threads(store)
        self._app, self.accounts, self._store = app, Accounts(app, keys, theirs), theirs
        self.client, self.fuse, self._kind = TokenClient(), Fuse(app, on_needs_reauth), on_needs_reauth
        self._endpoints = TokenEndpoints(app)
        self._bad: dict[str, int] = {}  # versions that were refused, the latest last; see `_is_bad`
        self._flights: dict[UUID, asyncio.Task[Held]] = {}
        self._roll = random.Random().random  # noqa: S311 - jitter

    def twin(self, app: Any) -> Grants:
        """The same credentials on another loop; see `sync_side`."""
        made = Grants(app, (), self._store, self._kind)
        made.accounts.ring = self.accounts.ring
        return made

    async def close(self) -> None:
        """Let refreshes under way end (their answers must be committed), then close the connections."""
        if self._endpoints.is_on(asyncio.get_running_loop()):
            await asyncio.gather(*self._flights.values(), return_exceptions=True)
        await self._endpoints.close()
        await self.client.aclose()

    # -- using -----------------------------------------------------------------------------------------------

    async def access(self, key: str) -> Access | None:
        """What an account's requests carry; None if it has no connection. Raises `ResourceStopped`."""
        held = await self.accounts.held(key)
        if held is None:
            return None
        bad = self._is_bad(key, held.access.version)
        if held.oauth is not None and (bad or tokens.due(held.credentials, self.accounts.now())):
            try:
                held = await self._renewed(held, refused=bad)
            except ResourceStopped:
                if bad or tokens.expired(held.credentials, self.accounts.now()):
                    raise
        return held.access

    async def required(self, key: str) -> Access:
        """`access` of the account of a resource. Raises `ConnectionNotFound` too."""
        found = await self.access(at_account(check(key)))
        if found is None:
            raise ConnectionNotFound(f"{key} has no connection: add one with app.connections.add")
        return found

    async def located(self, key: str) -> Access | None:
        """`access`, with a token that may be due: for the account's address and headers alone."""
        held = await self.accounts.held(key)
        if held is None or held.access.base_url or held.oauth is None:
            return None if held is None else held.access
        return await self.access(key)  # the first token answer may tell the address

    async def renew(self, key: str, seen: Access) -> bool:
        """The provider refused these: whether there are newer ones now."""
        held = await self.accounts.held(key)
        if held is None or held.oauth is None:
            return False
        if held.access.version == seen.version:
            self._note_bad(key, seen.version)
            try:
                held = await self._renewed(held, refused=True)
            except ResourceStopped:
                return False
        return held.access.version != seen.version

    async def refused(self, key: str, seen: Access, failure: Failure) -> None:
        """A refusal nothing could be done about: the account waits for a person."""
        self.accounts.forget(key)
        held = await self.accounts.held(key)
        if held is None or held.access.version != seen.version or self._is_bad(key, seen.version):
            return
        grant, at = held.bound.grant, held.bound.grant.refreshed_at
        if held.oauth is None or (at is not None and self.accounts.now() - at < timedelta(seconds=FRESH)):
            code = failure.code or "refused"
            death = await self.fuse.refused(grant, code)
            if death.died:
                self.accounts.forget(key)
                log.warning("the credentials of %s are refused (%s)", key, code)
        else:
            await self.renew(key, seen)

    async def test(self, key: str) -> Access | None:
        """Refresh now where that is possible, whatever the token's age and the gates; as `access` otherwise."""
        self.accounts.forget(key)
        held = await self.accounts.loaded(key)
        if held is None or held.oauth is None or held.bound.grant.state not in PROBED:
            held = await self.accounts.held(key)
            return None if held is None else held.access
        return (await self._probed(held)).access

    # -- refreshing ------------------------------------------------------------------------------------------

    async def _renewed(self, held: Held, *, refused: bool) -> Held:
        """The account with newer credentials: one flight per grant in this process. Raises `ResourceStopped`."""
        id_, key = held.bound.grant.id, held.bound.resource_key
        flight = self._flights.get(id_)
        if flight is None:
            flight = asyncio.create_task(self._refresh(held, refused=refused), name="resilient-refresh")
            self._flights[id_] = flight
            flight.add_done_callback(lambda done: self._landed(id_, done))
        found = await asyncio.shield(flight)
        if found.bound.resource_key != key:  # another account of the same grant flew first
            self.accounts.forget(key)
            other = await self.accounts.held(key)
            if other is None:
                raise ResourceStopped(key, "auth")
            return other
        return found

    def _landed(self, id_: UUID, flight: asyncio.Task[Held]) -> None:
        self._flights.pop(id_, None)
        if not flight.cancelled():
            flight.exception()  # its waiters have it

    async def probe(self, key: str) -> bool | None:
        """Refresh to find out whether the provider is well, whatever the gates say: whether this grant lives.

        None if that cannot be asked, or nobody answered.
        """
        self.accounts.forget(key)
        held = await self.accounts.loaded(key)
        if held is None or held.oauth is None:
            return None
        if not held.credentials.refresh_token and held.bound.grant.flow != "client_credentials":
            return None
        try:
            await self._probed(held)
        except _Died:
            return False
        except ResourceStopped:
            return None
        return True

    async def _probed(self, held: Held) -> Held:
        """One refresh at once, or `ResourceStopped`."""
        key, grant = held.bound.resource_key, held.bound.grant
        begun: Begun | None = await self._run(grants.begin, grant.id, grant.version, LEASE, refused=False, probe=True)
        if begun is None:
            raise ResourceStopped(key, "auth")
        if not begun.mine:
            raise ResourceStopped(token_key(held.provider), "cooldown", begun.grant.lease_until)
        return await self._send(held, begun)

    async def _refresh(self, held: Held, *, refused: bool) -> Held:
        """Take the lease and send, or wait for whoever has it."""
        grant, endpoint = held.bound.grant, token_key(held.provider)
        await self._endpoints.check(endpoint)
        room, patience = await self._endpoints.room(endpoint), time.monotonic() + LEASE
        while True:
            async with room:
                begun: Begun | None = await self._run(grants.begin, grant.id, grant.version, LEASE, refused=refused)
                if begun is not None and begun.mine:
                    return await self._send(held, begun)
            self._require_hope(held, begun, refused=refused, last=time.monotonic() > patience)
            if begun is None or begun.grant.version != grant.version or begun.grant.state not in USABLE:
                return await self._again(held.bound.resource_key)
            await asyncio.sleep(POLL * (0.5 + self._roll()))

    def _require_hope(self, held: Held, begun: Begun | None, *, refused: bool, last: bool) -> None:
        """Raise `ResourceStopped` unless a newer token may come while somebody waits here."""
        key, endpoint = held.bound.resource_key, token_key(held.provider)
        if begun is None:
            raise ResourceStopped(key, "auth")
        if begun.shut:
            raise ResourceStopped(held.provider.name, "auth")
        now, waits = begun.grant, begun.grant.retry_at
        if now.version != held.bound.grant.version or now.state not in USABLE:
            return
        if waits is not None and waits > begun.now:
            raise ResourceStopped(endpoint, "cooldown", waits)
        if last or (not refused and not tokens.expired(held.credentials, begun.now)):
            raise ResourceStopped(endpoint, "cooldown", now.lease_until)  # the old one does meanwhile

    async def _again(self, key: str) -> Held:
        """What the winner left. Raises `ResourceStopped`."""
        self.accounts.forget(key)
        held = await self.accounts.held(key)
        if held is None:
            raise ResourceStopped(key, "auth")
        return held

    async def _send(self, held: Held, begun: Begun) -> Held:
        """One refresh under the lease, to its commit."""
        key, oauth, mine = held.bound.resource_key, held.oauth, begun.grant
        assert oauth is not None  # noqa: S101 - callers looked
        own = mine.secrets is not None
        credentials = self.accounts.opened(mine) if own or self._store is None else await self._store.load(key)
        if credentials is None or (not own and credentials.version != held.credentials.version):
            await self._run(grants.let_go, mine)  # the app's table has moved on
            return await self._again(key)
        try:
            ticket = await self._endpoints.admit(token_key(held.provider))
        except BaseException:
            await self._run(grants.let_go, mine)
            raise
        try:
            answer = await self._ask(oauth, mine, credentials, begun.now)
        except SetupError:  # nothing was sent: a key that is none
            await self._endpoints.unsent(ticket)
            await self._run(grants.let_go, mine)
            raise
        await self._endpoints.answered(ticket, answer.failure)
        fresh = None if answer.failure is not None else tokens.merged(credentials, answer.body, oauth, begun.now)
        if fresh is None:
            await self._failed(held, mine, answer.failure or _NO_TOKEN)
            return await self._again(key)
        if mine.flow == "jwt_bearer":  # its key is what stays
            fresh = replace(fresh, refresh_token=credentials.refresh_token, previous="", previous_until=None)
        await self._commit(key, mine, credentials, fresh, own=own)
        return await self._again(key)

    async def _ask(self, oauth: OAuth2, grant: Grant, credentials: Credentials, now: datetime) -> TokenAnswer:
        if grant.flow == "client_credentials":
            return await self.client.client_credentials(oauth, now)
        if grant.flow == "jwt_bearer":
            return await self.client.by_key(oauth, credentials, now)
        if not credentials.refresh_token:
            return _nothing_to_refresh()
        oauth = replace(oauth, redirect_uri=credentials.values.get("redirect_uri", oauth.redirect_uri))
        answer = await self.client.refresh(oauth, credentials.refresh_token, now)
        older = tokens.replay(credentials, now)
        if answer.failure is None or not older or tokens.failed(answer.failure) is not RefreshFailure.DEAD:
            return answer
        return await self.client.refresh(oauth, older, now)

    async def _commit(self, key: str, mine: Grant, old: Credentials, fresh: Credentials, *, own: bool) -> None:
        """Store what came before anybody uses it; as long as the lease lasts, if the database is away."""
        until = time.monotonic() + LEASE - PATIENCE
        while not await self._stored(key, mine, old, fresh, own=own, last=time.monotonic() > until):  # noqa: ASYNC110
            await asyncio.sleep(1)

    async def _stored(
        self, key: str, mine: Grant, old: Credentials, fresh: Credentials, *, own: bool, last: bool
    ) -> bool:
        try:
            if own:
                new = self.accounts.sealed(mine.id, fresh)
            elif self._store is not None and await self._saved(key, old, fresh, last=last):
                new = grants.NewSecrets(None, None, fresh.expires_at, fresh.refresh_at)
            else:
                await self._run(grants.let_go, mine)
                return True
            won = await self._run(grants.renew_if_held, mine, new)
        except DatabaseUnreachable:
            if last:
                raise
            return False
        if won:
            log.info("the token of %s was refreshed (version %d)", key, mine.version + 1)
            await self._run(_app_is_well, key.partition("/")[0])
        return True

    async def _saved(self, key: str, old: Credentials, fresh: Credentials, *, last: bool) -> bool:
        """Whether the app's table took them. Its troubles are not ours, but the old token may be used up."""
        assert self._store is not None  # noqa: S101 - callers looked
        try:
            return await self._store.save(key, old.version, fresh)
        except Exception as error:
            if last or isinstance(error, DatabaseUnreachable):
                raise
            log.warning("credentials.save() of %s failed (%s): it is tried again", key, type(error).__name__)
            raise DatabaseUnreachable(f"credentials.save() of {key} failed: see the log") from error

    async def _failed(self, held: Held, mine: Grant, failure: Failure) -> None:
        """Write down what a failed refresh means; raises `ResourceStopped` unless somebody else was faster."""
        key, name, endpoint = held.bound.resource_key, held.provider.name, token_key(held.provider)
        kind, now = tokens.failed(failure), self.accounts.now()
        if kind is RefreshFailure.DEAD:
            return await self._died(key, name, mine, failure)
        retry_at = now + timedelta(seconds=tokens.delay(mine.failures + 1, self._roll()))
        if kind is RefreshFailure.THROTTLED:
            told = failure.retry_at or (failure.retry_in and now + timedelta(seconds=failure.retry_in)) or None
            retry_at = max(told or retry_at, retry_at)
        event = GrantEvent.LOST if kind is RefreshFailure.LOST else GrantEvent.REFUSED
        left = await self._run(grants.settle_if_held, mine, event, failure.code, retry_at)
        self.accounts.forget(key)
        if left is None or left.version != mine.version:
            return None
        level = logging.WARNING if kind is RefreshFailure.LOST else logging.INFO
        log.log(level, "the token of %s could not be refreshed: %s (%s)", key, kind.value, failure.code)
        if kind is RefreshFailure.MISCONFIGURED:
            await self.fuse.app_refused(name, failure.code)
            raise ResourceStopped(name, "auth")
        raise ResourceStopped(endpoint, "cooldown", retry_at)

    async def _died(self, key: str, provider: str, mine: Grant, failure: Failure) -> None:
        death = await self.fuse.died(mine, failure.code)
        self.accounts.forget(key)
        if not death.died:
            return
        log.warning("the token of %s could not be refreshed: dead (%s)", key, failure.code)
        doubted = death.grant is not None and death.grant.state is GrantState.SUSPECT
        raise _Died(provider if doubted else key, "auth")

    # -- inside ----------------------------------------------------------------------------------------------

    def _is_bad(self, key: str, version: int) -> bool:
        """Whether the version in use was refused; what is known of an older one is forgotten."""
        if self._bad.get(key, version) != version:
            del self._bad[key]
        return key in self._bad

    def _note_bad(self, key: str, version: int) -> None:
        self._bad.pop(key, None)
        self._bad[key] = version
        if len(self._bad) > MOST:  # the oldest would be refused once more, if it is ever used again
            del self._bad[next(iter(self._bad))]

    async def _run(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        return await self._app.database.transaction(fn, *args, **kwargs)


def _nothing_to_refresh() -> TokenAnswer:
    return TokenAnswer(failure=Failure(FailureKind.AUTH, code="no_refresh_token"))


def _app_is_well(c: Connection, d: Dialect, name: str) -> None:
    """The provider took our client: whoever waited because it did not goes on."""
    facts = resources.read(c, d, [name]).get(name)
    if facts is not None and facts.auth == APP_REFUSED:
        gates.set_auth(c, d, name, "ok")
