"""Credentials for requests: read, decrypted, refreshed in time, by one process at a time.

A refresh is begun in the database (lease, fence, write-ahead mark), sent with no transaction open, and committed
before anybody uses its token. Waiters, in this process or another, read the winner's token. A token that a refusal
proved bad counts as expired for everybody. While a refresh cannot be had, the old token is used as long as it lasts;
after that jobs wait for the token endpoint, a resource of its own (``github:token``) with its own limits and cooldown.

An app's own table can stay the only store of its tokens (`CredentialStore`): lease, fence and state are ours then,
the secrets never touch our tables.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from resilient.core import tokens
from resilient.core.errors import DatabaseUnreachable, ResourceStopped
from resilient.core.failure import Failure, FailureKind
from resilient.core.tokens import USABLE, Credentials, GrantEvent, RefreshFailure
from resilient.engine.access import Access, Accounts, CredentialStore, Held
from resilient.engine.gate import Gate
from resilient.store import gates, grants, resources
from resilient.wire.oauth import PATIENCE, TokenAnswer, TokenClient

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime
    from uuid import UUID

    from sqlalchemy import Connection

    from resilient.core.auth import OAuth2
    from resilient.core.provider import Provider
    from resilient.engine.app import Resilient
    from resilient.store.dialect import Dialect
    from resilient.store.grants import Begun, Grant

log = logging.getLogger("resilient.grants")
LEASE: Final = 2 * PATIENCE + 20.0  # seconds; two requests may be sent under one lease
POLL: Final = 0.1
FRESH: Final = 60.0  # seconds; a token this young that is refused will not get better by another refresh
APP_REFUSED: Final = "app_refused"
_EVENTS: Final = {RefreshFailure.DEAD: GrantEvent.DIED, RefreshFailure.LOST: GrantEvent.LOST}
_NO_TOKEN: Final = Failure(FailureKind.TRANSIENT, code="no_token")


class Grants:
    """The credentials of one app."""

    def __init__(self, app: Resilient, keys: Iterable[str], store: CredentialStore | None) -> None:
        self._app, self.accounts, self._store = app, Accounts(app, keys, store), store
        self.client = TokenClient()
        self._bad: dict[str, int] = {}  # versions that were refused
        self._flights: dict[UUID, asyncio.Task[Held]] = {}
        self._gate: Gate | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._roll = random.Random().random  # noqa: S311 - jitter

    async def close(self) -> None:
        """Let refreshes under way end (their answers must be committed), then close the connections."""
        if self._loop is asyncio.get_running_loop():
            await asyncio.gather(*self._flights.values(), return_exceptions=True)
            if self._gate is not None:
                await self._gate.close()
        await self.client.aclose()
        self._gate, self._loop = None, None

    # -- using -----------------------------------------------------------------------------------------------

    async def access(self, key: str) -> Access | None:
        """What an account's requests carry; None if it has no connection. Raises `ResourceStopped`."""
        held = await self.accounts.held(key)
        if held is None:
            return None
        bad = self._bad.get(key) == held.access.version
        if held.oauth is not None and (bad or tokens.due(held.credentials, self.accounts.now())):
            try:
                held = await self._renewed(held, refused=bad)
            except ResourceStopped:
                if bad or tokens.expired(held.credentials, self.accounts.now()):
                    raise
        return held.access

    async def renew(self, key: str, seen: Access) -> bool:
        """The provider refused these: whether there are newer ones now."""
        held = await self.accounts.held(key)
        if held is None or held.oauth is None:
            return False
        if held.access.version == seen.version:
            self._bad[key] = seen.version
            try:
                held = await self._renewed(held, refused=True)
            except ResourceStopped:
                return False
        return held.access.version != seen.version

    async def refused(self, key: str, seen: Access, failure: Failure) -> None:
        """A refusal nothing could be done about: the account waits for a person."""
        self.accounts.forget(key)
        held = await self.accounts.held(key)
        if held is None or held.access.version != seen.version or self._bad.get(key) == seen.version:
            return
        grant, at = held.bound.grant, held.bound.grant.refreshed_at
        if held.oauth is None or (at is not None and self.accounts.now() - at < timedelta(seconds=FRESH)):
            code = failure.code or "refused"
            if await self._run(grants.die_if_version, grant.id, grant.version, code):
                log.warning("the credentials of %s are refused (%s): it needs to be authorised again", key, code)
        else:
            await self.renew(key, seen)

    async def test(self, key: str) -> Access | None:
        """Refresh now where that is possible, whatever the token's age; as `access` otherwise."""
        self.accounts.forget(key)
        held = await self.accounts.held(key)
        if held is None or held.oauth is None:
            return None if held is None else held.access
        return (await self._renewed(held, refused=False)).access

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

    async def _refresh(self, held: Held, *, refused: bool) -> Held:
        """Take the lease and send, or wait for whoever has it."""
        key, grant = held.bound.resource_key, held.bound.grant
        endpoint, patience = token_key(held.provider), time.monotonic() + LEASE
        while True:
            begun: Begun | None = await self._run(grants.begin, grant.id, grant.version, LEASE, refused=refused)
            if begun is None:
                raise ResourceStopped(key, "auth")
            if begun.mine:
                return await self._send(held, begun)
            now = begun.grant
            if now.version != grant.version or now.state not in USABLE:
                return await self._again(key)
            if not refused and not tokens.expired(held.credentials, begun.now):
                raise ResourceStopped(endpoint, "cooldown", now.lease_until)  # the old one does meanwhile
            if now.retry_at is not None and now.retry_at > begun.now:
                raise ResourceStopped(endpoint, "cooldown", now.retry_at)
            if time.monotonic() > patience:
                raise ResourceStopped(endpoint, "cooldown", now.lease_until)
            await asyncio.sleep(POLL * (0.5 + self._roll()))

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
            gate = await self._opened_gate()
            await gate.admit(token_key(held.provider))
        except BaseException:
            await self._run(grants.let_go, mine)
            raise
        answer = await self._ask(oauth, mine, credentials, begun.now)
        fresh = None if answer.failure is not None else tokens.merged(credentials, answer.body, oauth, begun.now)
        if fresh is None:
            await self._failed(held, mine, answer.failure or _NO_TOKEN)
            return await self._again(key)
        await self._commit(key, mine, credentials, fresh, own=own)
        return await self._again(key)

    async def _ask(self, oauth: OAuth2, grant: Grant, credentials: Credentials, now: datetime) -> TokenAnswer:
        if grant.flow == "client_credentials":
            return await self.client.client_credentials(oauth, now)
        if not credentials.refresh_token:
            return _nothing_to_refresh()
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
            elif self._store is not None and await self._store.save(key, old.version, fresh):
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

    async def _failed(self, held: Held, mine: Grant, failure: Failure) -> None:
        """Write down what a failed refresh means; raises `ResourceStopped` unless somebody else was faster."""
        key, provider, endpoint = held.bound.resource_key, held.provider, token_key(held.provider)
        kind, now = tokens.failed(failure), self.accounts.now()
        retry_at = now + timedelta(seconds=tokens.delay(mine.failures + 1, self._roll()))
        if kind is RefreshFailure.THROTTLED:
            told = failure.retry_at or (failure.retry_in and now + timedelta(seconds=failure.retry_in)) or None
            await (await self._opened_gate()).cool_down(endpoint, told, failure.code)
            retry_at = max(told or retry_at, retry_at)
        again = None if kind is RefreshFailure.DEAD else retry_at
        event = _EVENTS.get(kind, GrantEvent.REFUSED)
        left = await self._run(grants.settle_if_held, mine, event, failure.code, again)
        self.accounts.forget(key)
        if left is None or left.version != mine.version:
            return
        level = logging.WARNING if kind in _EVENTS else logging.INFO
        log.log(level, "the token of %s could not be refreshed: %s (%s)", key, kind.value, failure.code)
        if kind is RefreshFailure.DEAD:
            raise ResourceStopped(key, "auth")
        if kind is RefreshFailure.MISCONFIGURED:
            log.error("%s refuses this app (%s): check client_id and client_secret", provider.name, failure.code)
            await self._run(gates.set_auth, provider.name, APP_REFUSED)
            raise ResourceStopped(provider.name, "auth")
        raise ResourceStopped(endpoint, "cooldown", retry_at)

    # -- inside ----------------------------------------------------------------------------------------------

    async def _opened_gate(self) -> Gate:
        loop = asyncio.get_running_loop()
        if self._gate is None or self._loop is not loop:
            self._gate, self._loop = Gate(self._app.database, self._app.policies), loop
            await self._gate.start()
        return self._gate

    async def _run(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        return await self._app.database.transaction(fn, *args, **kwargs)


def token_key(provider: Provider) -> str:
    """The resource that a provider's token endpoint is."""
    return f"{provider.name}:token"


def _nothing_to_refresh() -> TokenAnswer:
    return TokenAnswer(failure=Failure(FailureKind.AUTH, code="no_refresh_token"))


def _app_is_well(c: Connection, d: Dialect, name: str) -> None:
    """The provider took our client: whoever waited because it did not goes on."""
    facts = resources.read(c, d, [name]).get(name)
    if facts is not None and facts.auth == APP_REFUSED:
        gates.set_auth(c, d, name, "ok")
