"""The wire's side of a worker: one pool of connections, one conduct per execution.

`JobConduct` is what the engine does around each request of a job: the gate admits it, its mark is committed on the
job's row, its answer is told to the gate; the account's credentials are added where the provider's hosts are asked,
and refreshed where they are refused. Requests of threads come to the worker's event loop for this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resilient.core.errors import TransactionOpen
from resilient.core.failure import FailureKind, Scope
from resilient.core.provider import GENERIC
from resilient.engine.publishers import Publishers
from resilient.wire.call import AsyncCall, SyncCall, call, call_sync
from resilient.wire.client import AsyncClient, Client, build_async_client, build_client
from resilient.wire.conduct import Permit
from resilient.wire.explain import Explained, explain
from resilient.wire.pool import Pool
from resilient.wire.trail import Trail, at_account

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from resilient.core.exchange import AnswerFacts, RequestFacts
    from resilient.core.failure import Failure
    from resilient.core.outcomes import Outcome
    from resilient.core.provider import Provider
    from resilient.engine.access import Access
    from resilient.engine.execution import Execution
    from resilient.engine.worker import Worker


class Wire:
    """Everything a worker's jobs send goes through here."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.pool = Pool()
        self.publishers = Publishers(worker.app.outbox.destinations)

    def provider_of(self, resource_key: str) -> Provider:
        """The provider a key's first segment names."""
        found: Provider = self._worker.app.providers.get(resource_key.partition("/")[0], GENERIC)
        return found

    def trail(self, execution: Execution) -> Trail:
        """The execution's requests; made with its first."""
        if execution.trail is None:
            execution.trail = Trail(JobConduct(self._worker, execution), self.provider_of(execution.resource_key))
        return execution.trail

    def async_client(self, execution: Execution) -> AsyncClient:
        """The client of an ``async def`` handler."""
        return build_async_client(self.trail(execution), self.pool)

    def sync_client(self, execution: Execution) -> Client:
        """The client of a plain handler."""
        return build_client(self.trail(execution), self.pool, self._worker.from_thread)

    def call(self, execution: Execution, method: str, url: str, words: Mapping[str, Any]) -> AsyncCall:
        """Admit one request of somebody else's client, for an ``async def`` handler."""
        return call(self.trail(execution), method, url, **words)

    def sync_call(self, execution: Execution, method: str, url: str, words: Mapping[str, Any]) -> SyncCall:
        """The same for a plain handler."""
        return call_sync(self.trail(execution), self._worker.from_thread, method, url, **words)

    def explain(self, execution: Execution, error: BaseException) -> Explained:
        """What an exception that left a handler means."""
        return explain(error, execution.trail, self._worker.now())

    def ended(self, execution: Execution, outcome: Outcome) -> None:
        """An execution is over: what no request said about its resource, its outcome does."""
        self._worker.gate.ended(execution.resource_key, execution.probes, outcome, answered=execution.answered)

    async def close(self) -> None:
        """Close the connections."""
        await self.publishers.close()
        await self.pool.aclose()


class JobConduct:
    """See `resilient.wire.conduct.Conduct`."""

    __slots__ = ("_execution", "_worker")

    def __init__(self, worker: Worker, execution: Execution) -> None:
        self._worker, self._execution = worker, execution

    @property
    def resource_key(self) -> str:
        """The job's resource key."""
        return self._execution.resource_key

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
        if execution.transaction_open:
            raise TransactionOpen(
                f"job {execution.id} ({execution.row.kind}) has a transaction open: send {asked.method} {asked.path}"
                " before it begins or after it ended, so that no row stays locked while a provider thinks"
            )
        if not asked.gated:
            return Permit(asked)
        access = await self._access(asked) if asked.trusted else None
        state = await self._worker.gate.admit(asked.key, asked.cost, probes=execution.probes)
        execution.require_running()  # it may have waited
        return Permit(asked, headers={} if access is None else access.headers, state=state, access=access)

    async def _access(self, asked: RequestFacts) -> Access | None:
        """The account's credentials, if it has a connection; none for a foreign host."""
        return await self._worker.app.grants.access(at_account(asked.key))

    async def mark(self, permit: Permit) -> None:
        """Commit the mark of a request on the job's row, before it is sent."""
        asked = permit.asked
        mark = {"hash": asked.body_hash, "at": self._worker.now().isoformat()}
        await self._execution.mark(asked.name, mark)

    async def clear(self, permit: Permit) -> None:
        """Remove it: the outcome is known."""
        await self._execution.mark(permit.asked.name, None)

    async def answered(self, permit: Permit, answer: AnswerFacts, failure: Failure | None) -> None:
        """Tell the gate."""
        self._execution.answered = True
        await self._worker.gate.answered(permit.state, permit.asked.key, answer, failure)
        if permit.access is not None and failure is not None and _refuses_credentials(failure):
            await self._worker.app.grants.refused(at_account(permit.asked.key), permit.access, failure)

    async def failed(self, permit: Permit, failure: Failure) -> None:
        """Tell the gate."""
        self._execution.answered = True
        await self._worker.gate.failed(permit.state, permit.asked.key, failure)

    def abandoned(self, permit: Permit) -> None:
        """Neutral for every count."""
        self._worker.gate.abandoned(permit.state)

    async def refreshed(self, permit: Permit, failure: Failure) -> bool:
        """Refresh, or find that somebody else has done it."""
        if permit.access is None or not _refuses_credentials(failure):
            return False
        return await self._worker.app.grants.renew(at_account(permit.asked.key), permit.access)


def _refuses_credentials(failure: Failure) -> bool:
    return failure.kind is FailureKind.AUTH and failure.scope is not Scope.PROVIDER
