"""The wire's side of a worker: one pool of connections, one conduct per execution.

`JobConduct` is what the engine does around each request of a job: the gate admits it, its mark is committed on the
job's row, its answer is told to the gate; the account's credentials are added where the provider's hosts are asked,
and refreshed where they are refused. Requests of threads come to the worker's event loop for this.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from resilient.core import marks
from resilient.core.errors import JobFailure, TransactionOpen
from resilient.core.failure import Failure, FailureKind, Scope
from resilient.core.provider import GENERIC
from resilient.core.resource_key import check
from resilient.engine.away import patiently
from resilient.engine.grants import AT_ONCE
from resilient.engine.pauses import InEngine
from resilient.engine.publishers import Publishers
from resilient.engine.relay import require
from resilient.wire.call import AsyncCall, SyncCall
from resilient.wire.client import AsyncClient, Client, build_async_client, build_client
from resilient.wire.conduct import Permit
from resilient.wire.echoes import Hidden
from resilient.wire.explain import Explained, explain
from resilient.wire.pool import Pool
from resilient.wire.redact import without_secrets_in_code
from resilient.wire.trail import Trail, at_account

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from resilient.core.exchange import AnswerFacts, RequestFacts
    from resilient.core.outcomes import Outcome
    from resilient.core.provider import Provider
    from resilient.engine.access import Access
    from resilient.engine.execution import Execution
    from resilient.engine.requests import Sender
    from resilient.engine.worker import Worker


class Wire:
    """Everything a worker's jobs send goes through here."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.pool = Pool()
        # Providers whose accounts have addresses or headers of their own.
        self.scattered = frozenset(p.name for p in worker.app.providers.values() if p.placeholders)
        self.publishers = Publishers(worker.app.outbox.destinations)
        require(worker.app.outbox.destinations, worker.kinds)

    def provider_of(self, resource_key: str) -> Provider:
        """The provider a key's first segment names."""
        found: Provider = self._worker.app.providers.get(resource_key.partition("/")[0], GENERIC)
        return found

    async def prepare(self, execution: Execution) -> None:
        """See that the trail of a job is known before its handler asks for a client.

        Only where the account has an address or headers of its own: their lookup would cost the others a read a job.
        """
        if execution.resource_key.partition("/")[0] in self.scattered:
            with InEngine(execution):
                await self._located(execution, execution.resource_key)

    async def branch(self, execution: Execution, resource_key: str) -> Sender:
        """Another resource for an execution. Raises `ResourceStopped`, `BadResourceKey`."""
        execution.require_running()
        key = check(resource_key)
        with InEngine(execution):
            await self._worker.gate.check(key, probes=execution.probes, own=execution.resource_key)
            return Branch(self, await self._located(execution, key))

    async def _located(self, execution: Execution, key: str) -> Trail:
        found = execution.trails.get(key)
        if found is None and self.provider_of(key).placeholders:
            account = at_account(key)
            access = await self._worker.app.grants.located(account, patience_of(execution))
            if access is not None:
                found = self._trail(execution, key, access.base_url, access.own_headers)
        return found or self._trail(execution, key)

    def trail(self, execution: Execution) -> Trail:
        """The execution's requests through its own resource; made with its first."""
        key = execution.resource_key
        return execution.trails.get(key) or self._trail(execution, key)

    def _trail(
        self, execution: Execution, key: str, base_url: str = "", headers: Mapping[str, str] | None = None
    ) -> Trail:
        prefix = "" if key == execution.resource_key else f"{key} "
        conduct = JobConduct(self._worker, execution, key)
        made = Trail(conduct, self.provider_of(key), base_url, headers, prefix=prefix)
        execution.trails = {**execution.trails, key: made}
        return made

    def async_client(self, trail: Trail) -> AsyncClient:
        """The client of an ``async def`` handler."""
        return build_async_client(trail, self.pool)

    def sync_client(self, trail: Trail) -> Client:
        """The client of a plain handler."""
        return build_client(trail, self.pool, self._worker.from_thread)

    def call(self, trail: Trail, method: str, url: str, words: Mapping[str, Any]) -> AsyncCall:
        """Admit one request of somebody else's client, for an ``async def`` handler."""
        return AsyncCall(trail, method, url, **words)

    def sync_call(self, trail: Trail, method: str, url: str, words: Mapping[str, Any]) -> SyncCall:
        """The same for a plain handler."""
        return SyncCall(trail, self._worker.from_thread, method, url, **words)

    def explain(self, execution: Execution, error: BaseException) -> Explained:
        """What an exception that left a handler means."""
        last = execution.trails.get(execution.asked)
        others = [trail for trail in execution.trails.values() if trail is not last]
        told = explain(error, last, self._worker.now(), *others)
        failure = without_secrets_in_code(told.failure, self.secrets(execution)) or told.failure
        return told if failure is told.failure else told._replace(failure=failure)

    def secrets(self, execution: Execution) -> Hidden:
        """What the requests of an execution carried: nothing that is kept of it may show them."""
        return Hidden(secret for trail in execution.trails.values() for secret in trail.secrets)

    def ended(self, execution: Execution, outcome: Outcome) -> None:
        """An execution is over: what no request said about its resource, its outcome does."""
        gate = self._worker.gate
        gate.ended(execution.resource_key, execution.probes, outcome, answered=execution.answered)
        for key, generation in execution.elected:
            gate.give_back(key, generation)

    async def close(self) -> None:
        """Close the connections."""
        await self.publishers.close()
        await self.pool.aclose()


class Branch:
    """What stands behind ``job.through(...)``: one trail, and the client made for it."""

    __slots__ = ("_client", "_trail", "_wire")

    def __init__(self, wire: Wire, trail: Trail) -> None:
        self._wire, self._trail = wire, trail
        self._client: Any = None

    def async_client(self) -> AsyncClient:
        """A client for coroutines."""
        self._client = self._client or self._wire.async_client(self._trail)
        return self._client  # type: ignore[no-any-return]

    def sync_client(self) -> Client:
        """A client for threads."""
        self._client = self._client or self._wire.sync_client(self._trail)
        return self._client  # type: ignore[no-any-return]

    def async_call(self, method: str, url: str, words: Mapping[str, Any]) -> AsyncCall:
        """Admit one foreign request."""
        return self._wire.call(self._trail, method, url, words)

    def sync_call(self, method: str, url: str, words: Mapping[str, Any]) -> SyncCall:
        """The same for threads."""
        return self._wire.sync_call(self._trail, method, url, words)


class JobConduct:
    """See `resilient.wire.conduct.Conduct`. ``resource_key``: the job's, or the one its handler goes through."""

    __slots__ = ("_execution", "_worker", "resource_key")

    def __init__(self, worker: Worker, execution: Execution, resource_key: str) -> None:
        self._worker, self._execution, self.resource_key = worker, execution, resource_key

    @property
    def base_key(self) -> str:
        """What idempotency keys are derived from."""
        row = self._execution.row
        return row.idempotency_key or str(row.id)

    def now(self) -> datetime:
        """The engine's clock."""
        return self._worker.now()

    async def admit(self, asked: RequestFacts) -> Permit:
        """Draw limits and check the gates, or refuse."""
        execution = self._execution
        execution.require_running()
        execution.require_time()
        execution.asked = self.resource_key
        if execution.transaction_open:
            raise TransactionOpen(
                f"job {execution.id} ({execution.row.kind}) has a transaction open: send {asked.method} {asked.path}"
                " before it begins or after it ended, so that no row stays locked while a provider thinks"
            )
        if not asked.gated:
            return Permit(asked)
        with InEngine(execution):
            access = await self._access(asked) if asked.trusted else None
            admit = partial(
                self._worker.gate.admit, asked.key, asked.cost, probes=execution.probes, own=execution.resource_key
            )
            state = await patiently(execution, admit)
        if state.elected:
            execution.probes += tuple(key for key, _ in state.elected)
            execution.elected += state.elected
        execution.require_running()  # it may have waited
        execution.require_time()
        if access is None:
            return Permit(asked, probing=bool(state.probing), state=state)
        carried = access.secret_headers, access.params
        return Permit(asked, *carried, probing=bool(state.probing), state=state, access=access)

    async def _access(self, asked: RequestFacts) -> Access | None:
        """The account's credentials, if it has a connection; none for a foreign host."""
        return await self.connection(at_account(asked.key))

    async def connection(self, account: str) -> Access | None:
        """What requests of an account carry; None if they need nothing. Raises `ResourceStopped`."""
        for_job, execution = self._worker.app.grants.for_job, self._execution
        patience, anonymous = patience_of(execution), execution.handler.anonymous
        with InEngine(execution):
            return await patiently(execution, partial(for_job, account, patience, anonymous=anonymous))

    async def mark(self, permit: Permit) -> None:
        """Commit the mark of a request on the job's row, before it is sent for the first time."""
        asked, known = permit.asked, self._execution.mark_of(permit.asked.name)
        if known is None or asked.key_life is None:
            with InEngine(self._execution):
                return await self._execution.mark(asked.name, marks.made(asked, self._worker.now()))
        permit.fresh = False
        if old := marks.forgotten({asked.name: known}, self._worker.now()):
            failure = Failure(FailureKind.AMBIGUOUS, code="key_forgotten")
            raise JobFailure(f"not sent again, because it may then be done twice: {old}", failure=failure)
        return None

    def is_late(self, permit: Permit) -> bool:
        """Ask the gate; a worker that stood still for a while finds out here."""
        return permit.state is not None and self._worker.gate.is_late(permit.state)

    async def again(self, permit: Permit) -> None:
        """Draw limits and check the gates once more."""
        self._execution.require_running()
        with InEngine(self._execution):
            await self._worker.gate.again(permit.state)

    def clear(self, permit: Permit, *, took_effect: bool) -> None:
        """The outcome is known: the mark leaves the row with the finish, or with the next mark."""
        keyed = permit.asked.key_life is not None
        known = self._execution.unmark(permit.asked.name, took_effect=took_effect and not keyed)
        if keyed:
            permit.mark = known

    def cut_off(self, permit: Permit) -> None:
        """Its row has never heard otherwise. The circuits have: that it began was life, that it broke off is none."""
        self._execution.remark(permit.asked.name, permit.mark)
        worker = self._worker
        if permit.state is not None and worker.loop is not None:
            told = worker.gate.failed(permit.state, permit.asked.key, _BROKE_OFF)
            asyncio.run_coroutine_threadsafe(told, worker.loop)

    async def answered(self, permit: Permit, answer: AnswerFacts, failure: Failure | None) -> None:
        """Tell the gate."""
        self._execution.answered = True
        with InEngine(self._execution):
            await self._answered(permit, answer, failure)

    async def _answered(self, permit: Permit, answer: AnswerFacts, failure: Failure | None) -> None:
        await self._worker.gate.answered(permit.state, permit.asked.key, answer, failure)
        if permit.access is None:
            return
        account = at_account(permit.asked.key)
        if failure is None:
            await self._worker.app.grants.worked(account, permit.access)
        elif _refuses_credentials(failure):
            refused = partial(self._worker.app.grants.refused, account, permit.access, failure)
            await patiently(self._execution, partial(refused, patience_of(self._execution)))

    async def failed(self, permit: Permit, failure: Failure) -> None:
        """Tell the gate."""
        self._execution.answered = True
        with InEngine(self._execution):
            await self._worker.gate.failed(permit.state, permit.asked.key, failure)

    def abandoned(self, permit: Permit) -> None:
        """Neutral for every count."""
        self._worker.gate.abandoned(permit.state)

    async def refreshed(self, permit: Permit, failure: Failure) -> bool:
        """Refresh, or find that somebody else has done it."""
        if permit.access is None or not _refuses_credentials(failure):
            return False
        account, patience = at_account(permit.asked.key), patience_of(self._execution)
        with InEngine(self._execution):
            return await self._worker.app.grants.renew(account, permit.access, patience)


def patience_of(execution: Execution) -> float:
    """Seconds for which a job waits in its slot for a refresh, whoever carries it out."""
    timeout = execution.handler.timeout
    return AT_ONCE if timeout is None else min(AT_ONCE, timeout / 4)


_BROKE_OFF: Final = Failure(FailureKind.TRANSIENT, code="broke_off", provider_wide=True)


def _refuses_credentials(failure: Failure) -> bool:
    return failure.kind is FailureKind.AUTH and failure.scope is not Scope.PROVIDER
