"""What stands behind the job that a handler sees: its requests, transactions, streams, progress and follow-up jobs.

`Wire` has what all jobs of a worker send through, one pool of connections; `HandlerBackend` is one execution's.

`JobHooks` is what the engine does around each request of a job: the gate admits it, its mark is committed on the
job's row, its answer is reported to the gate. The account's credentials are added to requests to the provider's hosts,
and refreshed when they are refused. For a request of a thread this runs on the worker's event loop.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from resilient.core.base.bounds import PROGRESS
from resilient.core.base.errors import (
    Failure,
    FailureKind,
    JobFailure,
    ResilientError,
    ResourceStopped,
    Scope,
    TransactionOpen,
)
from resilient.core.base.numbers import json_text
from resilient.core.base.resource_key import check
from resilient.core.jobs import marks
from resilient.core.jobs.records import START
from resilient.core.provider.facts import GENERIC
from resilient.engine.accounts.grants import PATIENCE
from resilient.engine.events.publishers import Publishers, require
from resilient.engine.gates.permits import Reservation
from resilient.engine.ground.encoder import Enqueued, with_trace
from resilient.engine.jobs.workflows import results_of
from resilient.engine.run import stream_reader, two_phase
from resilient.engine.run.execution import InEngine, patiently
from resilient.engine.run.lease import require_lease
from resilient.engine.run.stream_reader import Reader
from resilient.store.db.direct import direct
from resilient.store.jobs import leases
from resilient.wire.requests.call import AsyncCall, SyncCall
from resilient.wire.requests.client import AsyncClient, Client, build_async_client, build_client
from resilient.wire.requests.hooks import Permit
from resilient.wire.requests.pool import Pool
from resilient.wire.requests.request_log import RequestLog, at_account
from resilient.wire.requests.sockets import join

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Mapping
    from contextlib import AbstractAsyncContextManager
    from datetime import datetime
    from uuid import UUID

    from sqlalchemy import Connection

    from resilient.core.base.exchange import AnswerFacts, RequestFacts
    from resilient.core.base.tracing import Tracing
    from resilient.core.jobs.outcomes import Outcome
    from resilient.core.provider.facts import Provider
    from resilient.engine.accounts.access import Access
    from resilient.engine.gates.gate import Gate
    from resilient.engine.ground.counts import Counts
    from resilient.engine.ground.kinds import Kind
    from resilient.engine.jobs.workflows import Step
    from resilient.engine.run.execution import Execution, Features, Work, WorkerLoop
    from resilient.engine.sync import Page, Stream
    from resilient.store.db.dialect import Dialect


T = TypeVar("T")
AT_FIRST: Final = 0.05  # seconds until its first request of a handler that begins with one
Now: TypeAlias = "Callable[[], datetime]"


class Wire:
    """Everything a worker's jobs send goes through here."""

    def __init__(self, features: Features, kinds: Iterable[str], gate: Gate, loop: WorkerLoop, now: Now) -> None:
        self._providers, self.grants = features.ground.providers, features.grants
        self.gate, self.loop, self.now = gate, loop, now
        self._tracing = features.ground.tracing
        http = features.ground.http
        self.pool = Pool(http.get("*"))
        self._pools = {name: Pool(settings) for name, settings in http.items() if name != "*"}
        # Providers whose accounts have addresses or headers of their own.
        self.scattered = frozenset(p.name for p in self._providers.values() if p.placeholders)
        self._habits: dict[str, float] = {}  # kinds whose handlers begin with a request, and what that costs
        self.publishers = Publishers(features.destinations)
        require(features.destinations, kinds)

    def from_thread(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the worker's loop, for a handler in a thread, and wait for it."""
        return self.loop.run(coroutine)

    def provider_of(self, resource_key: str) -> Provider:
        """The provider a key's first segment names."""
        return self._providers.get(resource_key.partition("/")[0], GENERIC)

    def pool_of(self, provider: Provider) -> Pool:
        """The connections to a provider."""
        return self._pools.get(provider.name, self.pool)

    async def prepare(self, execution: Execution) -> None:
        """Make the request log of a job before its handler asks for a client.

        Only where accounts have an address or headers of their own: looking them up costs each job a read.
        """
        if execution.resource_key.partition("/")[0] in self.scattered:
            with InEngine(execution):
                await self._located(execution, execution.resource_key)

    def lines_up(self, execution: Execution) -> bool:
        """Whether an execution reserves the place of its first request before its handler is called.

        It does if a limit of its resource was learnt from throttles, and handlers of its kind begin with a request.
        """
        kind, alone = execution.row.kind, execution.run is None and not execution.probes
        return alone and kind in self._habits and self.gate.is_taught(self._first_of(execution))

    def _first_of(self, execution: Execution) -> str:
        """The resource key that its first request counts for, as far as is known."""
        names, key = self.gate.names, execution.resource_key
        return names.first_of(key, execution.row.kind) if names.groups else key

    async def line_up(self, execution: Execution) -> None:
        """Reserve that place and wait for it, unless the database is away. Raises `ResourceStopped`."""
        try:
            with InEngine(execution):
                key, cost = self._first_of(execution), self._habits[execution.row.kind]
                execution.reservation = await self.gate.reserve(key, cost)
        except ResourceStopped as stopped:
            if stopped.gate != "database":  # its request knows what to do then
                raise

    def begin(self, execution: Execution) -> None:
        """Its handler is called now."""
        execution.begun_at = asyncio.get_running_loop().time()

    def note_first(self, execution: Execution, request: RequestFacts) -> None:
        """Take in the first request of a handler: what those of its kind begin with."""
        if not execution.begun_at:
            return
        seconds, execution.begun_at = asyncio.get_running_loop().time() - execution.begun_at, 0.0
        if request.key == execution.resource_key and seconds < AT_FIRST:
            self._habits[execution.row.kind] = request.cost
        else:
            self._habits.pop(execution.row.kind, None)

    async def branch(self, execution: Execution, resource_key: str) -> Branch:
        """Another resource for an execution. Raises `ResourceStopped`, `BadResourceKey`."""
        execution.require_running()
        key = check(resource_key)
        with InEngine(execution):
            await self.gate.check(key, probes=execution.probes, own=execution.resource_key)
            return Branch(self, execution, await self._located(execution, key))

    async def _located(self, execution: Execution, key: str) -> RequestLog:
        request_log = execution.request_logs.get(key)
        if request_log is None and self.provider_of(key).placeholders:
            account = at_account(key)
            try:
                access = await self.grants.located(account, patience_of(execution))
            except ResourceStopped as stopped:
                self.grants.missing_keys.note_stop(stopped, account, execution.resource_key)
                raise
            if access is not None:
                request_log = self._request_log(execution, key, access.base_url, access.own_headers)
        return request_log or self._request_log(execution, key)

    def request_log(self, execution: Execution) -> RequestLog:
        """The execution's requests through its own resource; made with its first."""
        key = execution.resource_key
        return execution.request_logs.get(key) or self._request_log(execution, key)

    def _request_log(
        self, execution: Execution, key: str, base_url: str = "", headers: Mapping[str, str] | None = None
    ) -> RequestLog:
        prefix = "" if key == execution.resource_key else f"{key} "
        hooks = JobHooks(self, execution, key)
        request_log = RequestLog(hooks, self.provider_of(key), base_url, headers, prefix=prefix, tracing=self._tracing)
        execution.request_logs = {**execution.request_logs, key: request_log}
        return request_log

    def ended(self, execution: Execution, outcome: Outcome) -> None:
        """An execution is over: report its outcome to the gate; give back its place and elected probes."""
        gate = self.gate
        if execution.reservation is not None:
            gate.release(execution.reservation)
        gate.ended(execution.resource_key, execution.probes, outcome, answered=execution.is_answered)
        for key, generation in execution.elected:
            gate.give_back(key, generation)

    async def close(self) -> None:
        """Close the connections."""
        await self.publishers.close()
        for one in (self.pool, *self._pools.values()):
            await one.aclose()


class Branch:
    """What sends the requests of one execution through one resource. ``request_log``: None for the job's own."""

    __slots__ = ("_client", "_execution", "_request_log", "_wire")

    def __init__(self, wire: Wire, execution: Execution, request_log: RequestLog | None = None) -> None:
        self._wire, self._execution, self._request_log = wire, execution, request_log
        self._client: Any = None

    def http_client(self) -> AsyncClient | Client:
        """Its client: for coroutines, or for the thread of a plain handler."""
        if self._client is None:
            wire, request_log = self._wire, self._request_log or self._wire.request_log(self._execution)
            pool = wire.pool_of(request_log.provider)
            if self._execution.handler.is_async:
                self._client = build_async_client(request_log, pool)
            else:
                self._client = build_client(request_log, pool, self._from_thread)
        return self._client  # type: ignore[no-any-return]

    def admitted_call(self, method: str, url: str, words: Mapping[str, Any]) -> AsyncCall | SyncCall:
        """Admit one request of somebody else's client."""
        request_log = self._request_log or self._wire.request_log(self._execution)
        if self._execution.handler.is_async:
            return AsyncCall(request_log, method, url, **words)
        return SyncCall(request_log, self._from_thread, method, url, **words)

    def _from_thread(self, step: Coroutine[Any, Any, T]) -> T:
        """`Wire.from_thread`, in any thread of the handler's: one that it started ends with its time, too."""
        join(self._execution.line)
        return self._wire.from_thread(step)


def stored_payload(execution: Execution) -> str | None:
    """The JSON text of its payload. Raises `BadPayload`, and `KeyNotHereError` for one sealed with another key."""
    text = execution.row.payload
    if text is None or not text.startswith(START):
        return text
    return execution.context.ground.encoder.unseal(execution.row.kind, text)


class HandlerBackend(Branch):
    """What stands behind the job of one execution: see `job.JobBackend`."""

    __slots__ = ()

    @property
    def app(self) -> Any:
        """The app."""
        return self._execution.context.app

    @property
    def deps(self) -> Any:
        """What the app's handlers share."""
        return self._execution.context.deps

    @property
    def cancel_requested(self) -> bool:
        """Whether the handler should stop."""
        return self._execution.cancel_requested

    # -- requests -------------------------------------------------------------------------------------------------

    async def through(self, resource_key: str) -> Branch:
        """What sends through another resource."""
        branch = self._wire.branch(self._execution, resource_key)
        return self._wire.from_thread(branch) if not self._execution.handler.is_async else await branch

    async def admit(self, last_look: Callable[[], Awaitable[T]]) -> T:
        """Draw the resource's request limits and look at its gates, for what is sent without a client.

        ``last_look`` is awaited at the end. Returns what it returns; if it raises, what was drawn is given back. Raises
        `ResourceStopped`, or `LostLease` for a job that another worker runs by now.
        """
        execution = self._execution
        gate = execution.context.gate
        permit = await gate.admit(execution.resource_key, probes=execution.probes)
        gate.abandoned(permit)  # the gate counts the job's outcome instead
        try:
            execution.require_running()
            value = await last_look()
            if execution.is_unsure:
                await require_lease(execution)
        except BaseException:
            if (draw := permit.draw) is not None:
                gate.release(Reservation(permit.key, draw.cost, draw.limits, (), draw))
            raise
        return value

    @property
    def publishers(self) -> Publishers:
        """What events are published with."""
        return self._wire.publishers

    @property
    def counts(self) -> Counts:
        """What this process counts."""
        return self._execution.context.ground.counts

    def now(self) -> datetime:
        """The engine's clock."""
        return self._wire.now()

    @property
    def tracing(self) -> Tracing:
        """Where the spans of what it sends go."""
        return self._execution.context.ground.tracing

    # -- progress and follow-ups ----------------------------------------------------------------------------------

    async def progress(self, value: Any) -> None:
        """Save progress."""
        execution, text = self._execution, self._progress_text(value)
        step = partial(execution.db.transaction, _progress, execution.id, execution.fence, text)
        execution.require_held(await patiently(execution, step, execution.db.rest))

    def _progress_text(self, value: Any) -> str:
        execution = self._execution
        if execution.transaction_open:
            raise TransactionOpen(
                f"job {execution.id} ({execution.row.kind}) has a transaction open: progress is written in another"
                " one, so save it before that one begins"
            )
        try:
            text = json_text(value)
        except (TypeError, ValueError) as error:
            raise ResilientError(f"progress of job {execution.id} is not JSON: {error}") from None
        if len(text) > PROGRESS.value:
            raise ResilientError(
                f"progress of job {execution.id} has {len(text):,} bytes of JSON: {PROGRESS.value:,} at most"
            )
        return text

    def then(
        self, kind: Kind[Any] | str, payload: Any, resource_key: str | None, options: Mapping[str, Any]
    ) -> Enqueued:
        """Enqueue a job with the end of this one."""
        execution = self._execution
        execution.require_running()
        ground = execution.context.ground
        job_request = ground.encoder.encode(kind, payload, resource_key or execution.resource_key, **options)
        (job_request,) = with_trace([job_request], ground.tracing)
        ground.foresight.look([job_request])
        two_phase.follow(execution, job_request)
        return Enqueued(job_request.row.id, created=None)

    # -- transactions ---------------------------------------------------------------------------------------------

    def prepare(self) -> AbstractAsyncContextManager[Any]:
        """A block whose writes are committed before the remote call."""
        return two_phase.prepare(self._execution)

    def complete(self) -> AbstractAsyncContextManager[Any]:
        """A block whose writes are committed with the end of the job."""
        return two_phase.complete(self._execution)

    def after_commit(self, fn: Callable[[], Any]) -> None:
        """Call a function after that commit."""
        two_phase.require_open(self._execution).after.append(fn)

    @property
    def work(self) -> Work | None:
        """The handler's transactions, if it has begun one."""
        return self._execution.work

    def require_held(self, c: Connection, d: Dialect) -> None:
        """See `job.JobBackend`."""
        execution = self._execution
        execution.require_running()
        execution.require_held(leases.is_held(c, d, execution.id, execution.fence))

    # -- streams --------------------------------------------------------------------------------------------------

    def pages(self, stream: Stream[Any], params: dict[str, Any]) -> AsyncGenerator[Page[Any], None]:
        """The pages of a stream."""
        return Reader(self._execution, self.http_client(), stream, params).pages()

    def checkpoint(self, page: Page[Any]) -> AbstractAsyncContextManager[Any]:
        """A block whose writes are committed with the cursor."""
        return stream_reader.checkpoint(self._execution, page, self._wire.loop)

    def sweep(self, stream: Stream[Any], params: dict[str, Any]) -> AbstractAsyncContextManager[Any]:
        """A block in which rows that a full pass did not see are deleted."""
        return stream_reader.sweep(self._execution, stream, params, self._wire.loop)

    # -- workflows ------------------------------------------------------------------------------------------------

    async def results_of(self, job_id: UUID, step: Step[Any] | Kind[Any]) -> list[Any]:
        """The results of earlier steps of the job's workflow."""
        execution = self._execution
        return await results_of(execution.db, execution.context.ground.kinds, job_id, step, self._open_session())

    def _open_session(self) -> Any:
        """The session of the job's transaction: with one writer at a time, another one would wait for ever."""
        work = self._execution.work
        return None if work is None or work.opened is None else work.opened.session


class JobHooks:
    """See `wire.requests.flow.RequestHooks`. ``resource_key``: the job's, or the one its handler goes through."""

    __slots__ = ("_execution", "_wire", "resource_key")

    def __init__(self, wire: Wire, execution: Execution, resource_key: str) -> None:
        self._wire, self._execution, self.resource_key = wire, execution, resource_key

    @property
    def base_key(self) -> str:
        """What idempotency keys are derived from."""
        row = self._execution.row
        return row.idempotency_key or str(row.id)

    def now(self) -> datetime:
        """The engine's clock."""
        return self._wire.now()

    async def admit(self, request: RequestFacts) -> Permit:
        """Draw limits and check the gates, or refuse."""
        execution = self._execution
        execution.require_running()
        execution.require_time()
        execution.request_resource = self.resource_key
        if execution.transaction_open:
            raise TransactionOpen(
                f"job {execution.id} ({execution.row.kind}) has a transaction open: send"
                f" {request.method} {request.path} before it begins or after it ended, so that no row stays"
                " locked while a provider thinks"
            )
        if not request.gated:
            return Permit(request)
        with InEngine(execution):
            access = await self._access(request) if request.trusted else None
            self._wire.note_first(execution, request)
            kind, names = execution.row.kind, self._wire.gate.names
            key = names.key_for(request.key, kind, request.method, request.path) if names.groups else request.key
            admit = partial(
                self._wire.gate.admit, key, request.cost, probes=execution.probes, own=execution.resource_key,
                reservation=execution.reservation,
            )  # fmt: skip
            began = time.perf_counter()
            state = await patiently(execution, admit)
            if (draw := state.draw) is not None:
                counts, reservation = execution.context.ground.counts, execution.reservation
                waited = reservation.waited if reservation is not None and reservation.draw is draw else 0.0
                counts.draws[counts.provider_of(request.key)].observe(waited + time.perf_counter() - began)
        if state.elected:
            execution.probes += state.elected
            execution.elected += state.elected
        try:  # the draw may have taken long
            execution.require_running()
            execution.require_time()
            if access is not None:  # what was looked at before may have ended meanwhile, or been replaced
                access = await self._access(request)
        except BaseException:
            self._wire.gate.abandoned(state)
            raise
        if access is None:
            return Permit(request, probing=bool(state.probing), state=state)
        carried = access.secret_headers, access.params
        return Permit(request, *carried, probing=bool(state.probing), state=state, access=access)

    async def _access(self, request: RequestFacts) -> Access | None:
        """The account's credentials, if it has a connection; none for a foreign host."""
        return await self.connection(at_account(request.key))

    async def connection(self, account: str) -> Access | None:
        """What requests of an account carry; None if they need nothing. Raises `ResourceStopped`."""
        for_job, execution = self._wire.grants.for_job, self._execution
        patience, anonymous = patience_of(execution), execution.handler.anonymous
        try:
            with InEngine(execution):
                return await patiently(execution, partial(for_job, account, patience, anonymous=anonymous))
        except ResourceStopped as stopped:
            self._wire.grants.missing_keys.note_stop(stopped, account, execution.resource_key)
            raise

    async def mark(self, permit: Permit) -> None:
        """Commit the mark of a request on the job's row, before it is sent for the first time."""
        request, mark, now = permit.request, self._execution.mark_of(permit.request.name), self._wire.now()
        grant = "" if permit.access is None else permit.access.grant
        if mark is None or not request.is_forgettable:
            with InEngine(self._execution):
                return await self._execution.mark(request.name, marks.made(request, now, grant), self._commit_marks)
        permit.fresh = False
        mark = marks.under(mark, grant, now)
        old = marks.forgotten({request.name: mark}, now)
        self._execution.restore_mark(request.name, marks.without_answer(mark) if old else mark)
        if old:
            failure = Failure(FailureKind.AMBIGUOUS, code="key_forgotten")
            raise JobFailure(f"not sent again, because it may then be done twice: {old}", failure=failure)
        return None

    async def _commit_marks(self, text: str) -> bool:
        execution = self._execution
        run = execution.context.ground.database.transaction
        return await patiently(execution, partial(run, _mark, execution.id, execution.fence, text))

    def is_late(self, permit: Permit) -> bool:
        """Whether lease or gates must be checked again: the process may have stood still since `admit`."""
        if self._execution.is_unsure:
            return True
        return permit.state is not None and self._wire.gate.is_late(permit.state)

    async def again(self, permit: Permit) -> None:
        """Renew the lease, draw limits and check the gates once more, as far as there is need."""
        gate, execution = self._wire.gate, self._execution
        await require_lease(execution)
        if permit.state is not None and gate.is_late(permit.state):
            with InEngine(execution):
                await gate.again(permit.state)
            await require_lease(execution)

    def clear(self, permit: Permit, *, took_effect: bool) -> None:
        """The outcome of a request is known: its mark on the row goes with the finish, or with the next mark."""
        keyed = permit.request.is_forgettable
        mark = self._execution.unmark(permit.request.name, took_effect=took_effect, keyed=keyed)
        if keyed:
            permit.mark = mark

    def cut_off(self, permit: Permit, *, by_us: bool = False) -> None:
        """The answer broke off: its mark stands again, as on the row. Unless ``by_us``, the gate counts a failure."""
        self._execution.restore_mark(permit.request.name, permit.mark)
        if permit.state is not None and not by_us:
            self._wire.loop.send(self._wire.gate.failed(permit.state, permit.request.key, _BROKE_OFF))

    async def answered(self, permit: Permit, answer: AnswerFacts, failure: Failure | None) -> None:
        """Tell the gate."""
        self._execution.count_answer()
        with InEngine(self._execution):
            await self._answered(permit, answer, failure)

    async def _answered(self, permit: Permit, answer: AnswerFacts, failure: Failure | None) -> None:
        self._count(permit, failure)
        if answer.budget:
            request, kind, name = permit.request, self._execution.row.kind, answer.budget
            usual = {one.name for one in self._wire.provider_of(request.key).waits.budgets if one.named_by}
            apart = bool(usual) and name not in usual
            self._wire.gate.names.take_in(request.key, kind, request.method, request.path, name, apart=apart)
        await self._wire.gate.answered(permit.state, permit.request.key, answer, failure)
        if permit.access is None:
            return
        account = at_account(permit.request.key)
        if failure is None:
            await self._wire.grants.worked(account, permit.access)
        elif _refuses_credentials(failure):
            refused = partial(self._wire.grants.refused, account, permit.access, failure)
            await patiently(self._execution, partial(refused, patience_of(self._execution)))

    async def failed(self, permit: Permit, failure: Failure) -> None:
        """Tell the gate."""
        self._execution.count_answer()
        self._count(permit, failure)
        with InEngine(self._execution):
            await self._wire.gate.failed(permit.state, permit.request.key, failure)

    def _count(self, permit: Permit, failure: Failure | None) -> None:
        seconds = None if permit.sent_at is None else time.perf_counter() - permit.sent_at
        counts, request = self._execution.context.ground.counts, permit.request
        counts.request(request.key, request.method, "ok" if failure is None else failure.kind, seconds)

    def abandoned(self, permit: Permit) -> None:
        """Give a permit back; nothing is counted. A thread's goes back on the loop, where requests are counted."""
        if permit.state is None:
            return
        if self._execution.handler.is_async:
            self._wire.gate.abandoned(permit.state)
        else:
            self._wire.loop.call_soon(self._wire.gate.abandoned, permit.state)

    async def refreshed(self, permit: Permit, failure: Failure) -> bool:
        """Refresh refused credentials; whether there are newer ones now, by this refresh or by another process's."""
        if permit.access is None or not _refuses_credentials(failure):
            return False
        account, patience = at_account(permit.request.key), patience_of(self._execution)
        with InEngine(self._execution):
            return await self._wire.grants.renew(account, permit.access, patience)


@direct
def _progress(c: Connection, d: Dialect, id_: UUID, fence: int, text: str) -> bool:
    return leases.set_progress_if_held(c, d, id_, fence, text, d.now(c))


@direct
def _mark(c: Connection, d: Dialect, id_: UUID, fence: int, text: str) -> bool:
    return leases.mark_sent_if_held(c, d, id_, fence, text, d.now(c))


def patience_of(execution: Execution) -> float:
    """Seconds for which a job waits in its slot for a refresh, whoever carries it out."""
    timeout = execution.handler.timeout
    return PATIENCE if timeout is None else min(PATIENCE, timeout / 4)


_BROKE_OFF: Final = Failure(FailureKind.TRANSIENT, code="broke_off", provider_wide=True)


def _refuses_credentials(failure: Failure) -> bool:
    return failure.kind is FailureKind.AUTH and failure.scope is not Scope.PROVIDER
