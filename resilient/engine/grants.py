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
import contextlib
import logging
import random
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from resilient.core import bounds, tokens
from resilient.core.client_refusal import Refusal, Verdict, is_explicit, judge
from resilient.core.delays import spread_upwards
from resilient.core.errors import (
    ConnectionNotFound,
    DatabaseUnreachable,
    Permanent,
    ResilientError,
    ResourceStopped,
    SecretsUnreadable,
    SetupError,
)
from resilient.core.failure import Failure, FailureKind
from resilient.core.fuse import APP_REFUSED
from resilient.core.resource_key import check
from resilient.core.tokens import (
    NOT_CONNECTED,
    PROBED,
    UNREADABLE,
    USABLE,
    Credentials,
    GrantEvent,
    GrantState,
    RefreshFailure,
)
from resilient.engine.access import Access, Accounts, CredentialStore, Held, SyncCredentialStore, in_threads
from resilient.engine.fuse import Fuse
from resilient.engine.token_endpoints import TokenEndpoints, nothing_to_refresh
from resilient.store import connections, fuse, gates, grants, lacking
from resilient.wire.trail import at_account

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence
    from datetime import datetime
    from uuid import UUID

    from resilient.core.auth import OAuth2
    from resilient.engine.app import Resilient
    from resilient.engine.gate import Ticket
    from resilient.engine.handler import Kind
    from resilient.store.fuse import Standing
    from resilient.store.grants import Begun, Grant
    from resilient.wire.oauth import TokenAnswer, TokenClient

log = logging.getLogger("resilient.grants")
LEASE: Final = 20.0  # seconds; kept up while the request is under way, so that a dead process's ends soon
COMMITTING: Final = 60.0  # seconds for which a new token is tried to be stored
LONGEST: Final = 2 * tokens.PATIENCE + 20.0  # seconds for which somebody without a job waits for another's refresh
AT_ONCE: Final = 1.0  # seconds for which a job waits in its slot; then its account is parked
POLL: Final = 0.1
LOOK: Final = 5.0  # seconds of a look for accounts that lacked something, and for one of them at most
MOST: Final = 10_000  # refused tokens that are remembered
FRESH: Final = 60.0  # seconds; a token this young that is refused will not get better by another refresh
NOTED: Final = timedelta(hours=1)  # how often it is written down that credentials work
TOLD: Final = 3  # unexplained refusals in a row of which the log warns
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
        self.fuse, self._kind = Fuse(app, on_needs_reauth), on_needs_reauth
        self._endpoints = TokenEndpoints(app)
        self._bad: dict[str, int] = {}  # versions that were refused, the latest last; see `_is_bad`
        self._flights: dict[UUID, asyncio.Task[Held]] = {}
        self._witnesses: set[UUID] = set()
        self._looked: dict[str, str] = {}  # by what accounts lack: the last one that was looked at again
        self._roll = random.random  # of the module: a forked child has other dice than its siblings

    def twin(self, app: Any) -> Grants:
        """The same credentials on another loop; see `sync_side`."""
        made = Grants(app, (), self._store, self._kind)
        made.accounts.ring = self.accounts.ring
        return made

    @property
    def client(self) -> TokenClient:
        """Who talks to token endpoints."""
        return self._endpoints.client

    async def close(self) -> None:
        """Let refreshes under way end (their answers must be committed), then close the connections."""
        if self._endpoints.is_on(asyncio.get_running_loop()):
            await asyncio.gather(*self._flights.values(), return_exceptions=True)
        await self._endpoints.close()

    # -- using -----------------------------------------------------------------------------------------------

    async def access(self, key: str, patience: float | None = None) -> Access | None:
        """What an account's requests carry; None if it has no connection. Raises `ResourceStopped`.

        ``patience``: seconds for which a refresh is waited for; then the account is parked until it ended.
        """
        held = await self.accounts.held(key)
        if held is None:
            return None
        bad = self._is_bad(key, held.access.version)
        if held.oauth is not None and (bad or tokens.due(held.credentials, self.accounts.now())):
            try:
                held = await self._renewed(held, refused=bad, patience=patience)
            except ResourceStopped as stopped:
                if bad or tokens.expired(held.credentials, self.accounts.now()):
                    held = await self._parked(held, stopped, waits=patience is not None)
        return held.access

    async def _parked(self, held: Held, stopped: ResourceStopped, *, waits: bool) -> Held:
        """There is no usable token: the account's jobs wait until there may be one. Raises `ResourceStopped`.

        Unless there is a newer one meanwhile. ``waits``: it is a job that asks.
        """
        if stopped.gate != "cooldown" or not waits:
            raise stopped
        key = held.bound.resource_key
        until = await self._run(grants.park, held.bound.grant.id)
        if until is not None:
            raise ResourceStopped(key, "auth", until)
        newer = await self._again(key)
        if newer.access.version != held.access.version:
            return newer
        if stopped.until is None:  # its lease has just ended: the next look is soon enough
            raise ResourceStopped(key, "auth")
        raise stopped

    async def for_job(self, key: str, patience: float, *, anonymous: bool) -> Access | None:
        """`access` for a job; None if its request needs no credentials.

        An account that has none, or whose secrets cannot be read here, is gated. Raises `ResourceStopped`, `Permanent`.
        """
        async with self._readable(key):
            found = await self.access(key, patience)
        facts = self._app.providers.get(key.partition("/")[0])
        if found is not None or anonymous or facts is None or not facts.auth or facts.anonymous:
            return found
        if "/" not in key and not facts.single_account:
            raise Permanent(
                f"{key} is a whole provider, and credentials belong to its accounts: enqueue this job on one, such as"
                f" {key}/main, or declare what needs none: anonymous=True",
                code="no_account",
            )
        self.accounts.forget(key)
        if await self._run(lacking.shut_unconnected, key, tell=self._tells):
            log.warning("%s is not connected, its jobs wait: `resilient connect %s %s`", key, facts.name, key)
            self._app.alerts.soon()
        raise ResourceStopped(key, "auth")

    @contextlib.asynccontextmanager
    async def _readable(self, key: str) -> AsyncIterator[None]:
        """An account whose credentials cannot be read here is gated. Raises `ResourceStopped`."""
        try:
            yield
        except SecretsUnreadable as error:
            bound = await self._run(connections.find, key)
            if bound is not None:
                log.warning("%s waits: %s", key, error)
                await self._run(lacking.shut_unreadable, key, bound.grant.id, bound.grant.version, tell=self._tells)
                self._app.alerts.soon()
            raise ResourceStopped(key, "auth") from error

    @property
    def _tells(self) -> bool:
        return self._app.alerts.config.wants("needs_reauth")

    async def keep_house(self) -> None:
        """Accounts that lacked something may have it now."""
        for auth in (UNREADABLE, NOT_CONNECTED) if self._store is not None else (UNREADABLE,):
            await self._look_again(auth, time.monotonic() + LOOK)

    async def _look_again(self, auth: str, until: float) -> None:
        """One account after the other, on from where the last look ended, which may have been a slow one."""
        while keys := await self._run(lacking.shut, auth, self._looked.get(auth, ""), 50):
            for key in keys:
                if time.monotonic() > until:
                    return
                self._looked[auth] = key
                await self._open_if_complete(key, auth)
        self._looked[auth] = ""

    async def _open_if_complete(self, key: str, auth: str) -> None:
        self.accounts.forget(key)
        try:
            async with asyncio.timeout(LOOK):
                held = await self.accounts.loaded(key)
        except ResilientError:  # it lacks the same as before
            return
        except Exception as error:  # noqa: BLE001 - of the app's own table; that of one account keeps no other waiting
            log.warning("credentials.load() of %s failed (%s): it waits on", key, type(error).__name__)
            return
        if held is not None:
            await self._run(lacking.open_if_shut, key, auth)

    async def required(self, key: str) -> Access:
        """`access` of the account of a resource. Raises `ConnectionNotFound` too."""
        found = await self.access(at_account(check(key)))
        if found is None:
            raise ConnectionNotFound(f"{key} has no connection: add one with app.connections.add")
        return found

    async def located(self, key: str, patience: float | None = None) -> Access | None:
        """`access` for a job, with a token that may be due: for the account's address and headers alone."""
        async with self._readable(key):
            held = await self.accounts.held(key)
            if held is None or held.access.base_url or held.oauth is None:
                return None if held is None else held.access
            return await self.access(key, patience)  # the first token answer may tell the address

    async def renew(self, key: str, seen: Access, patience: float | None = None) -> bool:
        """The provider refused these: whether there are newer ones now."""
        held = await self.accounts.held(key)
        if held is None or held.oauth is None:
            return False
        if held.access.version == seen.version:
            self._note_bad(key, seen.version)
            try:
                held = await self._renewed(held, refused=True, patience=patience)
            except ResourceStopped as stopped:
                if stopped.gate == "cooldown" and patience is not None:
                    await self._run(grants.park, held.bound.grant.id)
                return False
        return held.access.version != seen.version

    async def refused(self, key: str, seen: Access, failure: Failure, patience: float | None = None) -> None:
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
            await self.renew(key, seen, patience)

    async def worked(self, key: str, used: Access) -> None:
        """The provider took these; noted once an hour, because only what has worked is missed when it dies."""
        held = self.accounts.known(key)
        if held is None or held.access.version != used.version:
            return
        grant, now = held.bound.grant, self.accounts.now()
        if grant.worked_at is not None and grant.doubted_at is None and now - grant.worked_at < NOTED:
            return
        held.bound = replace(held.bound, grant=replace(grant, worked_at=now, doubted_at=None))
        with contextlib.suppress(DatabaseUnreachable):  # the next success is noted
            await self._run(grants.note_worked, grant.id, grant.version)

    async def test(self, key: str) -> Access | None:
        """Refresh now where that is possible, whatever the token's age and the gates; as `access` otherwise."""
        self.accounts.forget(key)
        held = await self.accounts.loaded(key)
        if held is None or held.oauth is None or held.bound.grant.state not in PROBED:
            held = await self.accounts.held(key)
            return None if held is None else held.access
        return (await self._probed(held)).access

    # -- refreshing ------------------------------------------------------------------------------------------

    async def _renewed(self, held: Held, *, refused: bool, patience: float | None = None) -> Held:
        """The account with newer credentials: one flight per grant in this process. Raises `ResourceStopped`."""
        id_, key = held.bound.grant.id, held.bound.resource_key
        flight = self._flights.get(id_)
        if flight is None:
            flight = asyncio.create_task(self._refresh(held, refused=refused), name="resilient-refresh")
            self._flights[id_] = flight
            flight.add_done_callback(lambda done: self._landed(id_, done))
        done, _ = await asyncio.wait({flight}, timeout=patience)  # it goes on, whoever waits
        if not done:
            raise ResourceStopped(held.endpoint, "cooldown")
        found = flight.result()
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
            raise ResourceStopped(held.endpoint, "cooldown", begun.grant.lease_until)
        return await self._send(held, begun)

    async def _refresh(self, held: Held, *, refused: bool) -> Held:
        """Take the lease and send, or wait for whoever has it."""
        grant, endpoint = held.bound.grant, held.endpoint
        await self._endpoints.check(endpoint)
        room, patience = await self._endpoints.room(endpoint), time.monotonic() + LONGEST
        pause = POLL
        while True:
            async with room:
                begun: Begun | None = await self._run(grants.begin, grant.id, grant.version, LEASE, refused=refused)
                if begun is not None and begun.mine:
                    return await self._send(held, begun)
            self._require_hope(held, begun, refused=refused, last=time.monotonic() > patience)
            if begun is None or begun.grant.version != grant.version or begun.grant.state not in USABLE:
                return await self._again(held.bound.resource_key)
            await asyncio.sleep(pause * (0.5 + self._roll()))
            pause = min(1.2 * pause, 10 * POLL)

    def _require_hope(self, held: Held, begun: Begun | None, *, refused: bool, last: bool) -> None:
        """Raise `ResourceStopped` unless a newer token may come while somebody waits here."""
        key, endpoint = held.bound.resource_key, held.endpoint
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
            ticket = await self._endpoints.admit(held.endpoint)
        except BaseException:
            await self._run(grants.let_go, mine)
            raise
        async with self._kept_up(mine):
            return await self._sent(held, oauth, credentials, ticket, begun, own=own)

    @contextlib.asynccontextmanager
    async def _kept_up(self, mine: Grant) -> AsyncIterator[None]:
        """Its lease lasts as long as the block."""
        over = asyncio.Event()

        async def keep() -> None:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LEASE / 4):
                        await over.wait()
                        return
                with contextlib.suppress(DatabaseUnreachable):
                    await self._run(grants.keep_up, mine, LEASE)

        task = asyncio.create_task(keep(), name="resilient-refresh-lease")
        try:
            yield
        finally:
            over.set()
            await task

    async def _sent(
        self, held: Held, oauth: OAuth2, credentials: Credentials, ticket: Ticket, begun: Begun, *, own: bool
    ) -> Held:
        """Send, and write down what came of it."""
        key, mine = held.bound.resource_key, begun.grant
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
            return nothing_to_refresh()
        oauth = replace(oauth, redirect_uri=credentials.values.get("redirect_uri", oauth.redirect_uri))
        answer = await self.client.refresh(oauth, credentials.refresh_token, now)
        older = tokens.replay(credentials, now)
        if answer.failure is None or not older or tokens.failed(answer.failure) is not RefreshFailure.DEAD:
            return answer
        return await self.client.refresh(oauth, older, now)

    async def _commit(self, key: str, mine: Grant, old: Credentials, fresh: Credentials, *, own: bool) -> None:
        """Store what came before anybody uses it; for a while, if the database is away."""
        until = time.monotonic() + COMMITTING
        while not await self._stored(key, mine, old, fresh, own=own, last=time.monotonic() > until):  # noqa: ASYNC110
            await asyncio.sleep(spread_upwards(1.0, self._roll()))

    async def _stored(
        self, key: str, mine: Grant, old: Credentials, fresh: Credentials, *, own: bool, last: bool
    ) -> bool:
        try:
            if own:
                new: Any = partial(self.accounts.renewed, credentials=fresh)
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
            await self.client_taken(key.partition("/")[0])
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
        key, name, endpoint = held.bound.resource_key, held.provider.name, held.endpoint
        kind, now = tokens.failed(failure), self.accounts.now()
        if kind is RefreshFailure.DEAD and not self._is_tenants(held):
            await self.client_taken(name)
        unexplained = kind in (RefreshFailure.UNEXPLAINED, RefreshFailure.MISCONFIGURED)
        hopeless = unexplained and tokens.is_hopeless(mine.refusals + 1, mine.refused_since, now)
        if kind is RefreshFailure.DEAD or hopeless:
            return await self._died(key, name, mine, failure)
        retry_at = now + timedelta(seconds=tokens.delay(mine.failures + 1, self._roll()))
        if kind is RefreshFailure.THROTTLED:
            most = float(bounds.TOLD_WAIT.value)
            told_in = (failure.retry_at - now).total_seconds() if failure.retry_at else failure.retry_in or 0.0
            retry_at = max(now + timedelta(seconds=min(told_in, most)), retry_at)
        event = GrantEvent.LOST if kind is RefreshFailure.LOST else GrantEvent.REFUSED
        client = kind is RefreshFailure.MISCONFIGURED
        left = await self._run(
            grants.settle_if_held, mine, event, failure.code, retry_at, unexplained=unexplained, client=client
        )
        self.accounts.forget(key)
        if left is None or left.version != mine.version:
            return None
        told = kind is RefreshFailure.LOST or (unexplained and left.refusals == TOLD)
        level = logging.WARNING if told else logging.INFO
        log.log(level, "the token of %s could not be refreshed: %s (%s)", key, kind.value, failure.code)
        if client and await self._is_application(held, mine, failure):
            raise ResourceStopped(name, "auth")
        raise ResourceStopped(key if unexplained else endpoint, "cooldown", retry_at)

    async def _is_application(self, held: Held, mine: Grant, failure: Failure) -> bool:
        """Whether a refusal is about the application (its provider is shut then); see `core.client_refusal`."""
        assert held.oauth is not None  # noqa: S101 - it was refreshed
        known: Standing = await self._run(fuse.standing, mine)
        said = Refusal(
            explicit=is_explicit(failure, held.oauth), tenants=self._is_tenants(held), credible=known.credible,
            others=known.others, lately=known.lately, witness=mine.id in self._witnesses,
        )  # fmt: skip
        verdict, name = judge(said), held.provider.name
        if verdict is Verdict.OPEN:
            if known.witnesses:
                return await self._ask_witness(name, known.witnesses)
            verdict = Verdict.APPLICATION
        if verdict is Verdict.APPLICATION:
            await self.fuse.app_refused(name, failure.code)
        return verdict is Verdict.APPLICATION

    async def _ask_witness(self, name: str, ids: Sequence[UUID]) -> bool:
        """Refresh a grant of proven health: whether its provider is shut after that."""
        for id_ in ids:
            self._witnesses.add(id_)
            try:
                lives = await self.fuse.lives([id_])
            finally:
                self._witnesses.discard(id_)
            if await self._run(gates.auth_of, name) == APP_REFUSED:
                return True
            if lives is not None:
                break
        return False

    def _is_tenants(self, held: Held) -> bool:
        """Whether the account's customer owns the endpoint, or the key it is asked with."""
        facts = self._app.providers[held.provider.name].oauth
        return (facts is not None and facts.at_tenants) or held.bound.grant.flow == "jwt_bearer"

    async def client_taken(self, name: str) -> None:
        """The provider took our client: whoever waited because it did not goes on."""
        await self._run(fuse.client_taken, name)

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
