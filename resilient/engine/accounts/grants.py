"""Credentials for requests: read, decrypted, and refreshed before they expire, by one process at a time.

A refresh begins in the database (lease, fence, write-ahead mark), is sent with no transaction open, and is committed
before anybody uses its token. Whoever waits for it, in this process or another, reads the committed token. A refused
token counts as expired for everybody. While no refresh succeeds, the old token is used until it expires; then jobs wait
for the token endpoint, a resource of its own (`token_endpoints.py`). A dead grant gates its accounts, unless too many
die at once (`fuse.py`).

An app's own table can be the only store of its tokens (`CredentialStore`): lease, fence and state are in our tables
then, and the secrets never are.
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

from resilient.core.accounts import tokens
from resilient.core.accounts.tokens import (
    NOT_CONNECTED,
    PROBED,
    UNREADABLE,
    USABLE,
    Credentials,
    GrantEvent,
    GrantState,
    RefreshFailure,
)
from resilient.core.alerts.rules import of_credentials
from resilient.core.base import bounds
from resilient.core.base.errors import (
    ConnectionNotFound,
    DatabaseUnreachable,
    Failure,
    FailureKind,
    Permanent,
    ResilientError,
    ResourceStopped,
    SecretsUnreadable,
    SetupError,
)
from resilient.core.base.frames import frameless_calls
from resilient.core.base.loggers import logger
from resilient.core.base.resource_key import check_stored
from resilient.core.jobs.backoff import spread_upwards
from resilient.engine.accounts.access import (
    Access,
    Account,
    Accounts,
    CredentialStore,
    RefusedCredentials,
    SyncCredentialStore,
    in_threads,
)
from resilient.engine.accounts.application import Application
from resilient.engine.accounts.fuse import Fuse
from resilient.engine.accounts.missing_keys import GATE, MissingKeys
from resilient.engine.accounts.refresh_tasks import RefreshTasks
from resilient.engine.accounts.revocation import revoke_if_unwanted
from resilient.engine.accounts.token_endpoints import TokenEndpoints
from resilient.store.accounts import connections, grants
from resilient.store.gates import controls as gates
from resilient.store.jobs import leases
from resilient.wire.requests.request_log import at_account

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from datetime import datetime

    from resilient.core.provider.auth import OAuth2
    from resilient.engine.alerts import Alerts
    from resilient.engine.gates.permits import GatePermit
    from resilient.engine.ground.ground import Ground
    from resilient.engine.ground.kinds import Kind
    from resilient.store.accounts.grants import Grant, Lease
    from resilient.store.accounts.secrets import KeyRing
    from resilient.wire.oauth.endpoints import Look, TokenAnswer, TokenClient

log = logger("grants")
LEASE: Final = 20.0  # seconds; kept up while the request is under way, so that a dead process's ends soon
COMMITTING: Final = 60.0  # seconds of attempts to store a new token
HURRY: Final = 5.0  # seconds that are left for them once the refresh was cancelled
LONGEST: Final = 2 * tokens.EXCHANGE_TIMEOUT + 20.0  # seconds that a caller without a job waits for a refresh
PATIENCE: Final = 1.0  # seconds for which a job waits in its slot; then its account is parked
POLL: Final = 0.1
LOOK: Final = 5.0  # seconds of a look for accounts that lacked something, and for one of them at most
FRESH: Final = 60.0  # seconds; a token this young that is refused will not get better by another refresh
NOTED: Final = timedelta(hours=1)  # between two notes that credentials work
WARN_AT: Final = 3  # unexplained refusals in a row, at which the log warns
_NO_TOKEN: Final = Failure(FailureKind.TRANSIENT, code="no_token", provider_wide=True)


class _GrantDied(ResourceStopped):
    """The provider answered this refresh with a refusal for good."""


@frameless_calls
class Grants:
    """The credentials of one app."""

    def __init__(
        self, ground: Ground, alerts: Alerts, ring: KeyRing, store: CredentialStore | SyncCredentialStore | None,
        on_needs_reauth: Kind[Any] | None = None,
    ) -> None:  # fmt: skip
        table = None if store is None else in_threads(store)
        self._ground, self._alerts, self._store = ground, alerts, table
        self.accounts = Accounts(ground, ring, table)
        self.missing_keys = MissingKeys(ground, ring)
        self.fuse = Fuse(ground, alerts, self.accounts, self.probe, on_needs_reauth)
        self._application = Application(ground, self.fuse)
        self._endpoints = TokenEndpoints(ground, alerts.note_breaker)
        self._refused_credentials, self._refreshes = RefusedCredentials(), RefreshTasks()
        self._last_looked_at: dict[str, str] = {}  # by what accounts lack: the last one that was looked at again
        self._roll = random.random  # of the module: a forked child has other dice than its siblings

    def client_of(self, provider: str) -> TokenClient:
        """The HTTP client for a provider's token endpoint."""
        return self._endpoints.client_of(provider)

    async def close(self) -> None:
        """Let refreshes under way end (their answers must be committed), then close the connections."""
        await self._refreshes.wait_all()
        await self._endpoints.close()

    # -- using -----------------------------------------------------------------------------------------------

    async def access(self, key: str, patience: float | None = None) -> Access | None:
        """What an account's requests carry; None if it has no connection. Raises `ResourceStopped`.

        ``patience``: seconds for which a job waits for a refresh; then its account is parked until the refresh ends.
        """
        account = await self.accounts.load_usable(key)
        if account is None:
            return None
        if account.has_ended(self.accounts.now()):
            await self._mark_dead(account, "no_refresh_token", certain=True)
            raise ResourceStopped(key, "auth")
        bad = self._refused_credentials.has(key, account.access)
        if account.oauth is not None and (bad or tokens.needs_refresh(account.credentials, self.accounts.now())):
            try:
                account = await self._refresh_once(account, refused=bad, patience=patience)
            except ResourceStopped as stopped:
                if bad or tokens.is_expired(account.credentials, self.accounts.now()):
                    account = await self._park(account, stopped, waits=patience is not None)
        return account.access

    async def _park(self, account: Account, stopped: ResourceStopped, *, waits: bool) -> Account:
        """The account with a token that came meanwhile; else its jobs are parked. Raises `ResourceStopped`.

        ``waits``: the caller is a job.
        """
        if stopped.gate != "cooldown" or not waits:
            raise stopped
        key = account.bound.resource_key
        until = await self._run(grants.park, account.bound.grant.id)
        if until is not None:
            raise ResourceStopped(key, "auth", until)
        newer = await self._reload(key)
        if newer.access.issue != account.access.issue:
            return newer
        if stopped.until is None:  # its lease has just ended: the next look is soon enough
            raise ResourceStopped(key, "auth")
        raise stopped

    async def for_job(self, key: str, patience: float, *, anonymous: bool) -> Access | None:
        """`access` for a job; None if its requests need no credentials.

        An account without credentials, or whose secrets cannot be decrypted here, is gated. Raises `ResourceStopped`,
        `Permanent`.
        """
        async with self._readable(key):
            access = await self.access(key, patience)
        facts = self._ground.providers.get(key.partition("/")[0])
        if access is not None or anonymous or facts is None or not facts.auth or facts.anonymous:
            return access
        if "/" not in key and not facts.single_account:
            raise Permanent(
                f"{key} is a whole provider, and credentials belong to its accounts: enqueue this job on one, such as"
                f" {key}/main, or declare what needs none: anonymous=True",
                code="no_account",
            )
        self.accounts.forget(key)
        if await self._run(connections.shut_unconnected, key, tell=self._wants_alert):
            log.warning("%s is not connected, its jobs wait: `resilient connect %s %s`", key, facts.name, key)
            self._alerts.soon()
        raise ResourceStopped(key, "auth")

    @contextlib.asynccontextmanager
    async def _readable(self, key: str) -> AsyncIterator[None]:
        """Gate the account if its credentials cannot be decrypted in this block, here and elsewhere.

        Raises `ResourceStopped`.
        """
        try:
            yield
        except SecretsUnreadable as error:
            bound = await self._run(connections.find, key)
            if await self.missing_keys.are_elsewhere(bound):
                if self.missing_keys.note(key):
                    log.log(self.missing_keys.level(bound), "%s is left to other workers: %s", key, error)
                    self._alerts.add(of_credentials(key, UNREADABLE, self.accounts.now()))
                    await self._run(connections.note_left, key, str(error))
                raise ResourceStopped(key, GATE) from error
            if bound is not None:
                log.log(self.missing_keys.level(bound), "%s waits: %s", key, error)
                await self._run(
                    connections.shut_unreadable, key, bound.grant.id, bound.grant.version, tell=self._wants_alert
                )
                self._alerts.soon()
            raise ResourceStopped(key, "auth") from error

    @property
    def _wants_alert(self) -> bool:
        return self._alerts.config.wants("needs_reauth")

    async def keep_house(self) -> None:
        """Open the gates of accounts that have credentials now, or whose secrets can be decrypted now."""
        for auth in (UNREADABLE, NOT_CONNECTED) if self._store is not None else (UNREADABLE,):
            await self._reopen_gates(auth, time.monotonic() + LOOK)

    async def _reopen_gates(self, auth: str, until: float) -> None:
        """Look at one account at least, then until the time is up, on from where the last look ended."""
        while keys := await self._run(connections.shut, auth, self._last_looked_at.get(auth, ""), 50):
            for key in keys:
                self._last_looked_at[auth] = key
                await self._open_if_complete(key, auth)
                if time.monotonic() > until:
                    return
        self._last_looked_at[auth] = ""

    async def _open_if_complete(self, key: str, auth: str) -> None:
        self.accounts.forget(key)
        try:
            async with asyncio.timeout(LOOK):
                account = await self.accounts.load(key)
        except SecretsUnreadable:
            if await self.missing_keys.are_elsewhere(await self._run(connections.find, key)):
                await self._run(gates.open_auth, key, auth)
            return
        except ResilientError:  # it lacks the same as before
            return
        except Exception as error:  # noqa: BLE001 - of the app's own table; one account's error keeps no other waiting
            log.warning("credentials.load() of %s failed (%s): it waits on", key, type(error).__name__)
            return
        if account is not None:
            await self._run(gates.open_auth, key, auth)

    async def required(self, key: str) -> Access:
        """`access` of the account of a resource. Raises `ResourceStopped`, `ConnectionNotFound`."""
        access = await self.access(at_account(check_stored(key)))
        if access is None:
            raise ConnectionNotFound(f"{key} has no connection: add one with app.connections.add")
        return access

    async def located(self, key: str, patience: float | None = None) -> Access | None:
        """The address and headers of a job's account; its token may be expired. Raises `ResourceStopped`."""
        async with self._readable(key):
            account = await self.accounts.load_usable(key)
            if account is None or account.access.base_url or account.oauth is None:
                return None if account is None else account.access
            return await self.access(key, patience)  # the first token answer may contain the address

    async def renew(self, key: str, access: Access, patience: float | None = None) -> bool:
        """Refresh credentials that the provider refused; returns whether there are newer ones now."""
        account = await self.accounts.load_usable(key)
        if account is None or account.oauth is None:
            return False
        if account.access.issue == access.issue:
            self._refused_credentials.note(key, access)
            try:
                account = await self._refresh_once(account, refused=True, patience=patience)
            except ResourceStopped as stopped:
                if stopped.gate == "cooldown" and patience is not None:
                    await self._run(grants.park, account.bound.grant.id)
                return False
        return account.access.issue != access.issue

    async def refused(self, key: str, access: Access, failure: Failure, patience: float | None = None) -> None:
        """Mark credentials dead that are refused after `renew`. Raises `ResourceStopped` if a job's refresh goes on."""
        self.accounts.forget(key)
        account = await self.accounts.load_usable(key)
        if account is None or account.access.issue != access.issue:
            return
        if self._refused_credentials.has(key, access):
            if patience is not None:  # the job runs again with the newer credentials
                raise ResourceStopped(key, "auth")
            return
        at = account.bound.grant.refreshed_at
        if account.oauth is None or (at is not None and self.accounts.now() - at < timedelta(seconds=FRESH)):
            await self._mark_dead(account, failure.code or "refused")
        else:
            await self.renew(key, access, patience)

    async def _mark_dead(self, account: Account, code: str, *, certain: bool = False) -> None:
        """Mark credentials dead that no refresh mends. ``certain``: see `store.accounts.fuse.die_if_version`."""
        death, key = await self.fuse.refused(account.bound.grant, code, certain=certain), account.bound.resource_key
        self.accounts.forget(key)
        if death.died:
            log.warning("the credentials of %s are refused (%s)", key, code)

    async def worked(self, key: str, used: Access) -> None:
        """The provider accepted credentials: written once an hour, because the fuse counts only grants that worked."""
        account = self.accounts.peek(key)
        if account is None or account.access.issue != used.issue:
            return
        grant, now = account.bound.grant, self.accounts.now()
        if grant.worked_at is not None and grant.doubted_at is None and now - grant.worked_at < NOTED:
            return
        account.bound = replace(account.bound, grant=replace(grant, worked_at=now, doubted_at=None))
        with contextlib.suppress(DatabaseUnreachable):  # the next success is noted
            await self._run(grants.note_worked, grant.id, grant.version)

    async def test(self, key: str) -> Access | None:
        """Refresh now, whatever the token's age and the gates; an account that cannot be refreshed: as `access`."""
        self.accounts.forget(key)
        account = await self.accounts.load(key)
        if account is None or account.oauth is None or account.bound.grant.state not in PROBED:
            return await self.access(key)
        await self._refreshes.run_alone(self._probe_now(account))
        return (await self._reload(key)).access

    # -- refreshing ------------------------------------------------------------------------------------------

    async def _refresh_once(self, account: Account, *, refused: bool, patience: float | None = None) -> Account:
        """The account, refreshed: once at a time for each grant in this process. Raises `ResourceStopped`.

        Another account of the same grant may have begun the refresh: what stops that one alone stops no other.
        """
        id_, key = account.bound.grant.id, account.bound.resource_key
        try:
            has_ended = await self._refreshes.join(id_, lambda: self._refresh(account, refused=refused), patience)
        except ResourceStopped as stopped:
            if stopped.resource in (key, account.endpoint, account.provider.name):
                raise
            raise ResourceStopped(key, stopped.gate, stopped.until) from None
        if not has_ended:
            raise ResourceStopped(account.endpoint, "cooldown")
        return await self._reload(key)

    async def probe(self, key: str) -> bool | None:
        """Refresh an account, whatever the gates say; returns whether its grant lives.

        None if it cannot be refreshed, or if the endpoint did not answer.
        """
        self.accounts.forget(key)
        account = await self.accounts.load(key)
        if account is None or account.oauth is None:
            return None
        try:
            await self._refreshes.run_alone(self._probe_now(account))
        except _GrantDied:
            return False
        except ResourceStopped:
            return None
        return True

    async def _probe_now(self, account: Account) -> None:
        """Refresh now. Raises `ResourceStopped`, also if another process is refreshing the grant."""
        key, grant, since = account.bound.resource_key, account.bound.grant, leases.clock()
        lease: Lease | None = await self._run(grants.begin, grant.id, grant.version, LEASE, refused=False, probe=True)
        if lease is None:
            raise ResourceStopped(key, "auth")
        if not lease.may_send:
            raise ResourceStopped(account.endpoint, "cooldown", lease.grant.lease_until)
        await self._send(account, lease, since)

    async def _refresh(self, account: Account, *, refused: bool) -> None:
        """Take the lease and send, or wait for the process that has it. Raises `ResourceStopped`."""
        grant, endpoint = account.bound.grant, account.endpoint
        await self._endpoints.check(endpoint)
        semaphore, patience, pause = await self._endpoints.semaphore(endpoint), time.monotonic() + LONGEST, POLL
        while True:
            async with semaphore:
                since = leases.clock()
                lease: Lease | None = await self._run(grants.begin, grant.id, grant.version, LEASE, refused=refused)
                if lease is not None and lease.may_send:
                    return await self._send(account, lease, since)
            self._require_progress(account, lease, refused=refused, last=time.monotonic() > patience)
            if lease is None or lease.grant.version != grant.version or lease.grant.state not in USABLE:
                return None
            await asyncio.sleep(pause * (0.5 + self._roll()))
            pause = min(1.2 * pause, 10 * POLL)

    def _require_progress(self, account: Account, lease: Lease | None, *, refused: bool, last: bool) -> None:
        """Raise `ResourceStopped` if waiting for another process can bring no newer token."""
        key, endpoint = account.bound.resource_key, account.endpoint
        if lease is None:
            raise ResourceStopped(key, "auth")
        if lease.shut:
            raise ResourceStopped(account.provider.name, "auth")
        now, waits = lease.grant, lease.grant.retry_at
        if now.version != account.bound.grant.version or now.state not in USABLE:
            return
        if waits is not None and waits > lease.now:
            raise ResourceStopped(endpoint, "cooldown", waits)
        if last or (not refused and not tokens.is_expired(account.credentials, lease.now)):
            raise ResourceStopped(endpoint, "cooldown", now.lease_until)  # until then the old token is used

    async def _reload(self, key: str) -> Account:
        """The account as the process that refreshed it has written it. Raises `ResourceStopped`."""
        self.accounts.forget(key)
        account = await self.accounts.load_usable(key)
        if account is None:
            raise ResourceStopped(key, "auth")
        return account

    async def _send(self, account: Account, lease: Lease, since: float) -> None:
        """Refresh under the lease, which was taken after ``since``; raises `ResourceStopped` if the lease is lost."""
        key, oauth, grant = account.bound.resource_key, account.oauth, lease.grant
        assert oauth is not None  # noqa: S101 - callers looked
        own, permit = grant.secrets is not None, None
        async with self._lease_kept(grant):
            try:
                store = None if own else self._store
                credentials = self.accounts.decrypt(grant) if store is None else await store.load(key)
                if credentials is not None and (own or credentials.version == account.credentials.version):
                    permit = await self._endpoints.admit(account.endpoint)
            except BaseException:
                await self._let_go(grant)
                raise
            if credentials is None or permit is None:  # the app's table has moved on
                await self._let_go(grant)
                return None
            look = partial(self._require_lease, account.endpoint, grant, since)
            return await self._exchange(account, oauth, credentials, permit, lease, look, own=own)

    async def _let_go(self, grant: Grant) -> None:
        """Give the lease back; where the database is away it ends by itself, and what came before is not hidden."""
        with contextlib.suppress(DatabaseUnreachable):
            await self._run(grants.let_go, grant)

    async def _require_lease(self, endpoint: str, grant: Grant, since: float) -> None:
        """Raise `ResourceStopped` if another may have refreshed: a token sent twice may end all those of its consent.

        This process may have stood still for longer than the lease, which nobody kept up then.
        """
        for _ in range(3):  # it may stand still in between, too
            if leases.clock() - since < LEASE / 2:
                return
            since = leases.clock()
            if not await self._run(grants.keep_up, grant, LEASE):
                raise ResourceStopped(endpoint, "cooldown")

    @contextlib.asynccontextmanager
    async def _lease_kept(self, grant: Grant) -> AsyncIterator[None]:
        """Renew the grant's lease for as long as the block runs."""
        over = asyncio.Event()

        async def keep() -> None:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LEASE / 4):
                        await over.wait()
                        return
                with contextlib.suppress(Exception):  # the next time; the answer that comes is committed in any case
                    await self._run(grants.keep_up, grant, LEASE)

        task = asyncio.create_task(keep(), name="resilient-refresh-lease")
        try:
            yield
        finally:
            over.set()
            await task

    async def _exchange(
        self, account: Account, oauth: OAuth2, credentials: Credentials, permit: GatePermit, lease: Lease, look: Look,
        *, own: bool,
    ) -> None:  # fmt: skip
        """Send the refresh and write its outcome."""
        key, grant = account.bound.resource_key, lease.grant
        try:
            await look()
            answer = await self._endpoints.trace(key, self._ask(oauth, grant, credentials, lease.now, look))
            older = tokens.replay(credentials, lease.now)
            if older and answer.failure and tokens.refresh_failure(answer.failure) is RefreshFailure.DEAD:
                credentials = replace(credentials, refresh_token=older)
                answer = await self._endpoints.trace(key, self._ask(oauth, grant, credentials, lease.now, look))
        except (SetupError, ResourceStopped):  # nothing was sent: an invalid key, a lost lease
            await self._endpoints.unsent(permit)
            await self._let_go(grant)
            raise
        if answer.failure is None or not account.has_own_endpoint or await self._run(grants.keep_up, grant, LEASE):
            await self._endpoints.answered(permit, answer.failure)
        else:  # another refresh has the lease, or the account and its endpoint were erased
            await self._endpoints.unsent(permit)
        fresh = None if answer.failure is not None else tokens.merge(credentials, answer.body, oauth, lease.now)
        if fresh is None:
            await self._settle_failure(account, grant, answer.failure or _NO_TOKEN)
            return
        if grant.flow == "jwt_bearer":  # its key is what stays
            fresh = replace(fresh, refresh_token=credentials.refresh_token, previous="", previous_until=None)
        await self._commit(account, oauth, grant, credentials, fresh, own=own)

    async def _ask(self, oauth: OAuth2, grant: Grant, old: Credentials, now: datetime, look: Look) -> TokenAnswer:
        client = self.client_of(grant.provider)
        if grant.flow == "client_credentials":
            return await client.client_credentials(oauth, now, look)
        if grant.flow == "jwt_bearer":
            return await client.by_key(oauth, old, now, look)
        oauth = replace(oauth, redirect_uri=old.values.get("redirect_uri", oauth.redirect_uri))
        return await client.refresh(oauth, old.refresh_token, now, look)

    async def _commit(
        self, account: Account, oauth: OAuth2, grant: Grant, old: Credentials, fresh: Credentials, *, own: bool
    ) -> None:
        """Store the new credentials before anybody uses them; try for `COMMITTING` seconds if the database is away."""
        until, cancelled = time.monotonic() + COMMITTING, None
        while True:
            try:
                if await self._store_new(account, oauth, grant, old, fresh, own=own, last=time.monotonic() > until):
                    break
                await asyncio.sleep(spread_upwards(1.0, self._roll()))
            except asyncio.CancelledError as error:  # as at the end of a loop, which waits for those it cancels
                if time.monotonic() > until:
                    raise
                cancelled, until = error, min(until, time.monotonic() + HURRY)
        if cancelled is not None:
            raise cancelled

    async def _store_new(
        self, account: Account, oauth: OAuth2, grant: Grant, old: Credentials, fresh: Credentials, *, own: bool,
        last: bool,
    ) -> bool:  # fmt: skip
        key = account.bound.resource_key
        try:
            if own:
                new: Any = partial(self.accounts.encrypt_renewed, credentials=fresh)
            elif self._store is not None and await self._store.save(key, old.version, fresh):
                new = grants.NewSecrets(None, None, fresh.expires_at, fresh.refresh_at)
            else:
                await self._run(grants.let_go, grant)
                return True
            is_ours = await self._run(grants.renew_if_held, grant, new)
        except Exception as error:
            if last:
                raise
            if not isinstance(error, DatabaseUnreachable):
                log.warning("a new token of %s could not be stored (%s): it is tried again", key, type(error).__name__)
            return False
        if is_ours:
            log.info("the token of %s was refreshed (version %d)", key, grant.version + 1)
            await self._application.note_accepted(key.partition("/")[0])
        if not is_ours:
            await revoke_if_unwanted(self._endpoints, self._ground, account, oauth, grant, old, fresh)
        return True

    async def _settle_failure(self, account: Account, grant: Grant, failure: Failure) -> None:
        """Write what a failed refresh means. Raises `ResourceStopped` unless another process refreshed the grant."""
        key, name, endpoint = account.bound.resource_key, account.provider.name, account.endpoint
        kind, now = tokens.refresh_failure(failure), self.accounts.now()
        if kind is RefreshFailure.DEAD and not self._application.is_tenant_owned(account):
            await self._application.note_accepted(name)
        unexplained = kind in (RefreshFailure.UNEXPLAINED, RefreshFailure.MISCONFIGURED)
        is_hopeless = unexplained and tokens.is_hopeless(grant.refusals + 1, grant.refused_since, now)
        if kind is RefreshFailure.DEAD or is_hopeless:
            return await self._settle_death(key, name, grant, failure)
        retry_at = now + timedelta(seconds=tokens.delay(grant.failures + 1, self._roll()))
        if kind is RefreshFailure.THROTTLED:
            most = float(bounds.TOLD_WAIT.value)
            wait = (failure.retry_at - now).total_seconds() if failure.retry_at else failure.retry_in or 0.0
            retry_at = max(now + timedelta(seconds=min(wait, most)), retry_at)
        event = GrantEvent.LOST if kind is RefreshFailure.LOST else GrantEvent.REFUSED
        client = kind is RefreshFailure.MISCONFIGURED
        row = await self._run(
            grants.settle_if_held, grant, event, failure.code, retry_at, unexplained=unexplained, client=client
        )
        self.accounts.forget(key)
        if row is None or row.version != grant.version:
            return None
        warns = kind is RefreshFailure.LOST or (unexplained and row.refusals == WARN_AT)
        level = logging.WARNING if warns else logging.INFO
        log.log(level, "the token of %s could not be refreshed: %s (%s)", key, kind.value, failure.code)
        if client and await self._application.is_refused(account, grant, failure):
            raise ResourceStopped(name, "auth")
        raise ResourceStopped(key if unexplained else endpoint, "cooldown", retry_at)

    async def _settle_death(self, key: str, provider: str, grant: Grant, failure: Failure) -> None:
        death = await self.fuse.died(grant, failure.code)
        self.accounts.forget(key)
        if not death.died:
            return
        log.warning("the token of %s could not be refreshed: dead (%s)", key, failure.code)
        doubted = death.grant is not None and death.grant.state is GrantState.SUSPECT
        raise _GrantDied(provider if doubted else key, "auth")

    # -- inside ----------------------------------------------------------------------------------------------

    async def _run(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        return await self._ground.database.transaction(fn, *args, **kwargs)
