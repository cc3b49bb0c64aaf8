"""A test request: the harmless one that a provider's facts name, through an account's credentials and gates.

A person wants to know now whether an account works, and no job may be there to show it. The request is admitted as one
of a job: a pause, a cooldown and dead credentials refuse it before anything is sent, limits are drawn for it, and a
circuit that is due elects it as its probe. What comes back counts as any other answer: for the breaker, for cooldowns,
for what is learnt, for the credentials. It is sent once, except that refused credentials are refreshed and the
request is repeated. Limits of jobs at once do not apply, because it is no job.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from uuid_utils.compat import uuid7

from resilient.core.base import resource_key
from resilient.core.base.errors import (
    ConnectionNotFound,
    Failure,
    FailureKind,
    InvalidInput,
    JobFailure,
    ResilientError,
    ResourceStopped,
    Scope,
)
from resilient.core.inspect.whoami import RequestTest, lessons_of
from resilient.store.inspect import resources
from resilient.wire.requests.request_log import at_account

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from sqlalchemy import Connection

    from resilient.core.base.budgets import Budget
    from resilient.core.base.exchange import AnswerFacts, RequestFacts
    from resilient.core.jobs.records import ResourceInfo
    from resilient.core.provider.facts import Provider
    from resilient.engine.accounts.access import Access
    from resilient.engine.accounts.grants import Grants
    from resilient.engine.alerts import Alerts
    from resilient.engine.gates.gate import Gate
    from resilient.engine.ground.ground import Ground
    from resilient.store.db.dialect import Dialect
    from resilient.wire.requests.hooks import Permit

LONGEST: Final = 30.0  # seconds for which a person waits
_UNSENT: Final = "no test request was sent"


class RequestTests:
    """The test requests of one app."""

    def __init__(self, ground: Ground, grants: Grants, alerts: Alerts) -> None:
        self._ground, self._grants, self._alerts = ground, grants, alerts

    async def send(self, key: str) -> RequestTest:
        """Send the test request of a resource's provider, once; how it ended.

        Raises `ResourceStopped` if a gate refuses it, `ConnectionNotFound`, `InvalidInput` where the facts name none,
        `ResilientError` if there was no answer in `LONGEST` seconds.
        """
        await self._ground.ready()
        provider = self._provider_of(key)
        try:
            async with asyncio.timeout(LONGEST) as limit:
                await self._require_connection(key, provider)
                return await self._send(key, provider)
        except ResourceStopped as stopped:
            raise ResourceStopped(stopped.resource, stopped.gate, stopped.until, then=_UNSENT) from None
        except TimeoutError:
            if not limit.expired():  # that of a connection, say
                raise
            raise ResilientError(f"{key}: the test request was given up after {LONGEST:.0f} s without answer") from None

    def _provider_of(self, key: str) -> Provider:
        name = resource_key.check(key).partition("/")[0]
        provider = self._ground.providers.get(name)
        if provider is None:
            raise InvalidInput(
                f"{key}: no provider {name!r} is known here, so neither is a request to test it with: list it in"
                " Resilient(providers=[...]), and say --app on the command line"
            )
        if not provider.whoami:
            raise InvalidInput(
                f"{key}: the facts of provider {name!r} name no request to test it with: Provider(whoami='GET /me')"
            )
        if "/" not in key and not (provider.single_account or provider.anonymous):
            raise InvalidInput(f"{key} is a whole provider: test one of its accounts, such as {key}/main")
        return provider

    async def _require_connection(self, key: str, provider: Provider) -> None:
        """Raise `ConnectionNotFound` before a row is made for a key that may be a slip of the pen."""
        if provider.auth and not provider.anonymous:
            account = at_account(key)
            if await self._grants.accounts.load_usable(account) is None:
                raise ConnectionNotFound(f"{account} has no connection, so {_UNSENT}: `resilient connections list`")

    async def _send(self, key: str, provider: Provider) -> RequestTest:
        from resilient.engine.gates.gate import Gate  # noqa: PLC0415 - only where something is sent
        from resilient.wire.requests.pool import Pool, PoolSettings  # noqa: PLC0415 - httpx: as above

        ground = self._ground
        gate = Gate(
            ground.database, ground.policies, owner=f"test:{uuid7()}", on_change=self._alerts.note_breaker,
            on_cooldown=ground.note_cooldown,
        )  # fmt: skip
        pool = Pool(replace(ground.http_of(provider.name) or PoolSettings(), tries=1))
        await gate.start()
        try:
            await gate.check(key, own="")  # before a refresh of credentials that could not be used
            hooks = _Hooks(ground, self._grants, gate, key)
            before = await self._infos(key)
            await hooks.ask(provider, pool)
        finally:
            await pool.aclose()
            await gate.close()
        after = await self._infos(*hooks.keys)
        lessons = lessons_of(before, after, hooks.budgets, gate.now())
        failure = hooks.failure
        return RequestTest(
            key=key, request=provider.whoami, status=hooks.status, seconds=hooks.seconds,
            failure=None if failure is None else failure.kind, code=None if failure is None else failure.code,
            probe=hooks.probe, lessons=lessons,
        )  # fmt: skip

    async def _infos(self, *keys: str) -> dict[str, ResourceInfo]:
        """The resources of these paths, by key."""
        levels = dict.fromkeys(level for key in keys for level in resource_key.path(key))
        infos: dict[str, ResourceInfo] = await self._ground.database.transaction(_infos, list(levels))
        return infos


def _infos(c: Connection, d: Dialect, keys: Sequence[str]) -> dict[str, ResourceInfo]:
    return {key: resources.get(c, d, key) for key in keys}


class _Hooks:
    """See `wire.requests.hooks.RequestHooks`: those of a request without a job."""

    def __init__(self, ground: Ground, grants: Grants, gate: Gate, key: str) -> None:
        self._ground, self._grants, self._gate = ground, grants, gate
        self.resource_key, self.base_key = key, str(uuid7())
        self.keys = [key]
        self.status: int | None = None
        self.seconds = 0.0
        self.failure: Failure | None = None
        self._refusal: Failure | None = None  # of credentials that were renewed; the repeat says whether that helped
        self.budgets: tuple[Budget, ...] = ()
        self.probe = False

    async def ask(self, provider: Provider, pool: Any) -> None:
        """Send the request; what came of it stands in the attributes."""
        import httpx  # noqa: PLC0415 - only where something is sent

        from resilient.wire.requests.client import build_async_client  # noqa: PLC0415 - as above
        from resilient.wire.requests.request_log import RequestLog  # noqa: PLC0415 - as above

        access = await self._access()
        own = ("", None) if access is None else (access.base_url, access.own_headers)
        log = RequestLog(self, provider, *own, tracing=self._ground.tracing)
        if not log.base_url:
            raise InvalidInput(f"{self.resource_key}: {log.without_address()}")
        async with build_async_client(log, pool) as client:
            try:
                if provider.whoami.startswith("{"):
                    await client.graphql(provider.whoami)
                else:
                    await client.request(*provider.whoami_at(log.base_url), extensions={"idempotent": True})
            except JobFailure as error:  # of GraphQL, which has its errors within a success
                self.failure = self.failure or error.failure
            except ResourceStopped:
                if self._refusal is None:
                    raise  # else a gate has shut since the credentials were renewed: the refusal is what there is
            except httpx.RequestError:  # `failed` has told the gate, and knows what it was
                if self.failure is None:
                    raise

    async def _access(self) -> Access | None:
        return await self._grants.access(at_account(self.resource_key))

    # -- what the wire calls -------------------------------------------------------------------------------------

    def now(self) -> datetime:
        """The database's time."""
        return self._gate.now()

    async def connection(self, account: str) -> object:
        """The account's credentials."""
        return await self._grants.access(account)

    async def admit(self, request: RequestFacts) -> Permit:
        """Draw limits and check the gates, or refuse."""
        from resilient.wire.requests.hooks import Permit  # noqa: PLC0415 - as above

        access = await self._access() if request.trusted else None
        gate_permit = await self._gate.admit(request.key, request.cost, own="")
        self._refusal = None
        self.keys = list(dict.fromkeys([*self.keys, request.key]))
        self.probe = self.probe or bool(gate_permit.probing)
        carried = ({}, {}) if access is None else (access.secret_headers, access.params)
        return Permit(request, *carried, probing=bool(gate_permit.probing), state=gate_permit, access=access)

    async def mark(self, permit: Permit) -> None:
        """Nothing: what only reads needs no mark."""

    def is_late(self, permit: Permit) -> bool:
        """Ask the gate."""
        return self._gate.is_late(permit.state)

    async def again(self, permit: Permit) -> None:
        """Draw limits and check the gates once more."""
        await self._gate.again(permit.state)

    def clear(self, permit: Permit, *, took_effect: bool) -> None:
        """Nothing: there is no mark."""

    def cut_off(self, permit: Permit, *, by_us: bool = False) -> None:
        """Nothing: nobody reads on after the answer was taken in."""

    async def answered(self, permit: Permit, answer: AnswerFacts, failure: Failure | None) -> None:
        """Tell the gate, and the credentials."""
        self._note(permit, answer.status, failure)
        self.budgets = answer.budgets
        await self._gate.answered(permit.state, permit.request.key, answer, failure)
        if permit.access is None:
            return
        account = at_account(self.resource_key)
        if failure is None:
            await self._grants.worked(account, permit.access)
        elif _refuses_credentials(failure):
            with contextlib.suppress(ResourceStopped):  # they are known to be dead by now: the answer says so
                await self._grants.refused(account, permit.access, failure)

    async def failed(self, permit: Permit, failure: Failure) -> None:
        """Tell the gate."""
        self._note(permit, None, failure)
        await self._gate.failed(permit.state, permit.request.key, failure)

    def _note(self, permit: Permit, status: int | None, failure: Failure | None) -> None:
        self.seconds = 0.0 if permit.sent_at is None else time.perf_counter() - permit.sent_at
        self.status, self.failure = status, failure or self._refusal
        request = permit.request
        outcome = "ok" if failure is None else failure.kind
        self._ground.counts.request(request.key, request.method, outcome, self.seconds)

    def abandoned(self, permit: Permit) -> None:
        """Neutral for every count; a circuit it was to try out gets another probe."""
        self._gate.abandoned(permit.state)
        for key, generation in permit.state.elected:
            self._gate.give_back(key, generation)

    async def refreshed(self, permit: Permit, failure: Failure) -> bool:
        """Refresh, or find that somebody else has done it."""
        if permit.access is None or not _refuses_credentials(failure):
            return False
        is_renewed = await self._grants.renew(at_account(self.resource_key), permit.access)
        self._refusal = failure if is_renewed else None
        return is_renewed


def _refuses_credentials(failure: Failure) -> bool:
    return failure.kind is FailureKind.AUTH and failure.scope is not Scope.PROVIDER
