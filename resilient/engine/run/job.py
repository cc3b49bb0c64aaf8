"""What a handler sees: its job, or a `Batch` of jobs of one resource.

`Job` is for ``async def`` handlers, `SyncJob` for plain ones (they run in a thread). Both are made by the executor, or
by ``resilient.testing.job(...)`` without a database. `Requests` and `SyncRequests`, how a handler sends requests, are
what they and the objects of ``job.through(...)`` (`Through`) have in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, overload

from resilient.core.base.errors import InvalidInput
from resilient.engine.ground.sessions import BlockingBlock, one_by_one, to_the_end
from resilient.engine.jobs.workflows import BaseWorkflow, SyncWorkflow, Workflow, the_one

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping
    from contextlib import AbstractAsyncContextManager, AbstractContextManager
    from typing import Unpack
    from uuid import UUID

    import httpx
    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncSession
    from sqlalchemy.orm import Session

    from resilient.engine.ground.encoder import Enqueued, JobOptions
    from resilient.engine.ground.kinds import Handler, Kind
    from resilient.engine.jobs.workflows import Step
    from resilient.engine.run.stream_reader import Sweep
    from resilient.engine.sync import Page, Stream
    from resilient.store.db.dialect import Dialect
    from resilient.wire.requests.call import AsyncCall, SyncCall
    from resilient.wire.requests.client import AsyncClient, Client

ClientT = TypeVar("ClientT")
TransportT = TypeVar("TransportT")
CallT = TypeVar("CallT")


class Sender(Protocol):
    """Sends requests through one resource."""

    def http_client(self) -> Any:
        """The resource's client: for coroutines, or for the thread of a plain handler."""

    def admitted_call(self, method: str, url: str, words: Mapping[str, Any]) -> Any:
        """A call that admits one request of somebody else's client; see `Requests.call`."""


class _Requests(Generic[ClientT, TransportT, CallT]):
    """Requests through the resource of ``_backend``, by the client and the calls of coroutines or of threads."""

    __slots__ = ()
    _backend: Any

    @property
    def client(self) -> ClientT:
        """An ``httpx.AsyncClient`` (in plain handlers an ``httpx.Client``) that keeps the resource's rules.

        It obeys the limits and the gate, sends idempotency keys and classifies answers.
        """
        client: ClientT = self._backend.http_client()
        return client

    @property
    def transport(self) -> TransportT:
        """The client's transport, for an SDK that builds its own: ``httpx.AsyncClient(transport=job.transport)``.

        Closing such a client closes nothing.
        """
        transport: TransportT = self._backend.http_client()._transport  # noqa: SLF001 - httpx has no name for it
        return transport

    def call(
        self,
        method: str,
        url: str,
        *,
        cost: float | None = None,
        op: str | None = None,
        idempotent: bool | None = None,
        idempotency_key: str | None = None,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        trusted: bool = True,
    ) -> CallT:
        """Admit one request that somebody else's client makes: ``async with job.call("POST", url) as call:``.

        In plain handlers ``with job.call(...)``. Entering admits or raises, before any I/O; send ``call.headers`` (to
        ``call.url``, if the provider takes its key in the URL), then say ``call.report(status, headers, body)``.
        ``cost`` is in units of the limits. ``op`` names the request (its key and mark), ``idempotent`` says that
        repeating it is harmless. ``body``, if given, tells requests of one name apart. ``headers``: what the client
        would send by itself, so that an idempotency key of the caller's is used, and one an SDK made up is not.
        ``trusted=False``: no credentials, wherever it goes. `resilient.adapters` do all this for requests and aiohttp.
        """
        words: dict[str, Any] = {"cost": cost, "op": op, "idempotent": idempotent, "idempotency_key": idempotency_key}
        call: CallT = self._backend.admitted_call(
            method, url, words | {"body": body, "headers": headers, "trusted": trusted}
        )
        return call


if TYPE_CHECKING:
    _OfCoroutines = _Requests[AsyncClient, httpx.AsyncBaseTransport, AsyncCall]
    _OfThreads = _Requests[Client, httpx.BaseTransport, SyncCall]
else:
    _OfCoroutines = _OfThreads = _Requests


class Requests(_OfCoroutines):
    """Requests from coroutines."""

    __slots__ = ()


class SyncRequests(_OfThreads):
    """Requests from a thread."""

    __slots__ = ()


class _Elsewhere:
    """Another resource than the job's: its own address, credentials, gate and limits."""

    __slots__ = ("_backend", "resource_key")

    def __init__(self, resource_key: str, backend: Sender) -> None:
        self.resource_key, self._backend = resource_key, backend

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.resource_key}>"


class Through(_Elsewhere, Requests):
    """What ``await job.through(...)`` gives."""

    __slots__ = ()


class SyncThrough(_Elsewhere, SyncRequests):
    """What ``job.through(...)`` gives a plain handler."""

    __slots__ = ()


P = TypeVar("P")
Q = TypeVar("Q")
R = TypeVar("R")
T = TypeVar("T")
W = TypeVar("W", bound=BaseWorkflow)


class JobBackend(Sender, Protocol):
    """What stands behind a job object. For a plain handler its coroutines await nothing that suspends."""

    @property
    def app(self) -> Any:
        """The app."""

    @property
    def deps(self) -> Any:
        """What the app's handlers share."""

    @property
    def cancel_requested(self) -> bool:
        """Whether the handler should stop."""

    async def through(self, resource_key: str) -> Sender:
        """The sender of another resource."""

    def prepare(self) -> AbstractAsyncContextManager[Any]:
        """A block whose writes are committed before the remote call."""

    def complete(self) -> AbstractAsyncContextManager[Any]:
        """A block whose writes are committed with the end of the job."""

    def after_commit(self, fn: Callable[[], Any]) -> None:
        """Call a function after the commit of `complete`."""

    def then(
        self, kind: Kind[Any] | str, payload: Any, resource_key: str | None, options: Mapping[str, Any]
    ) -> Enqueued:
        """Enqueue a job with the end of this one."""

    @property
    def work(self) -> Any:
        """The handler's transactions, if it has begun one; see `execution.Work`."""

    def require_held(self, c: Connection, d: Dialect) -> None:
        """Raises `LostLease`, in a transaction, if the job was given to another worker; it is held until the commit."""

    def pages(self, stream: Stream[Any], params: dict[str, Any]) -> AsyncGenerator[Page[Any], None]:
        """The pages of a stream."""

    def checkpoint(self, page: Page[Any]) -> AbstractAsyncContextManager[Any]:
        """A block whose writes are committed with the cursor."""

    def sweep(self, stream: Stream[Any], params: dict[str, Any]) -> AbstractAsyncContextManager[Any]:
        """A block in which rows that a full pass did not see are deleted."""

    async def results_of(self, job_id: UUID, step: Step[Any] | Kind[Any]) -> list[Any]:
        """The results of earlier steps of the job's workflow."""

    async def progress(self, value: Any) -> None:
        """Save progress."""


class BaseJob(Generic[P]):
    """What both kinds of job share."""

    __slots__ = (
        "_backend",
        "_idempotency_key",
        "attempt",
        "execution",
        "id",
        "kind",
        "order_no",
        "ordering_key",
        "payload",
        "resource_key",
        "tags",
    )

    def __init__(
        self,
        *,
        id: UUID,  # noqa: A002 - the user's word
        kind: str,
        payload: P,
        resource_key: str,
        attempt: int,
        execution: int,
        idempotency_key: str | None,
        tags: Mapping[str, str],
        backend: JobBackend,
        ordering_key: str | None = None,
        order_no: int | None = None,
    ) -> None:
        self.id = id
        self.kind = kind
        self.payload = payload
        self.resource_key = resource_key
        self.attempt = attempt  # 1 for the first; deferrals do not count
        self.execution = execution  # counts every start
        self._idempotency_key = idempotency_key
        self.tags = tags
        self.ordering_key = ordering_key
        self.order_no = order_no  # from 1, without gaps, in the order of commits; None without an ordering key
        self._backend = backend

    def __repr__(self) -> str:
        """Without the payload: it may hold secrets."""
        return f"<{type(self).__name__} {self.kind} {self.id} on {self.resource_key}, attempt {self.attempt}>"

    @property
    def idempotency_key(self) -> str:
        """Stable over retries; each request derives its own from it."""
        return self._idempotency_key or str(self.id)

    @property
    def app(self) -> Any:
        """The `Resilient` app that runs this job."""
        return self._backend.app

    @property
    def deps(self) -> Any:
        """What was given as ``Resilient(deps=...)``."""
        return self._backend.deps

    @overload
    def then(
        self,
        handler: Kind[None],
        payload: None = None,
        *,
        resource_key: str | None = None,
        **options: Unpack[JobOptions],
    ) -> Enqueued: ...
    @overload
    def then(
        self, handler: Kind[Q], payload: Q, *, resource_key: str | None = None, **options: Unpack[JobOptions]
    ) -> Enqueued: ...
    @overload
    def then(
        self, handler: str, payload: Any = None, *, resource_key: str | None = None, **options: Unpack[JobOptions]
    ) -> Enqueued: ...
    def then(
        self,
        handler: Kind[Any] | str,
        payload: Any = None,
        *,
        resource_key: str | None = None,
        **options: Unpack[JobOptions],
    ) -> Enqueued:
        """Enqueue a follow-up job that exists only if this one succeeds: written in the transaction of its end.

        ``resource_key`` is this job's by default; options as for ``app.enqueue``, and the same errors.
        """
        return self._backend.then(handler, payload, resource_key, options)

    def after_commit(self, fn: Callable[[], Any]) -> None:
        """Call ``fn()`` once the transaction of `complete` is committed, and not if it is rolled back.

        For an ``async def`` handler it may return an awaitable. A crash right after the commit loses the call.
        """
        self._backend.after_commit(fn)

    def _begin(self, kind: type[W], name: str | None, session: Any, resource_key: str | None) -> W:
        work = self._backend.work
        own_session = None if work is None or work.opened is None else work.opened.session
        key = resource_key or self.resource_key
        wf = kind(self.app.ground, name or self.kind, session or own_session, key, self.id)
        if own_session is not None and (session is None or session is own_session):
            wf.checked_later = work.workflows
        elif session is None:  # no transaction of the job's holds its fence
            wf.check = self._backend.require_held
        return wf

    @property
    def cancel_requested(self) -> bool:
        """Whether somebody asked to cancel the job, or its worker is about to stop."""
        return self._backend.cancel_requested


def backend_of(job: BaseJob[Any]) -> JobBackend:
    """What stands behind a job: for the engine's own handlers, and `resilient.testing`."""
    return job._backend  # noqa: SLF001 - of this file


class Job(BaseJob[P], Requests):
    """A job as its ``async def`` handler sees it."""

    __slots__ = ()

    async def through(self, resource_key: str) -> Through:
        """Another resource, for requests of this job: ``other = await job.through("slack/team-1")``.

        It has a ``client`` and ``call()`` of its own, with that account's address, credentials, gate and limits. Raises
        `ResourceStopped` if it is stopped: let it pass, and the job waits for that resource, no attempt charged.
        """
        return Through(resource_key, await self._backend.through(resource_key))

    async def progress(self, value: Any) -> None:
        """Save how far the job is (any JSON value); raises `LostLease` if it was given to another worker."""
        await self._backend.progress(value)

    async def result_of(self, step: Step[R] | Handler[Any, R]) -> R:
        """What an earlier step of this job's workflow returned, as the type its handler returns.

        Named by its handler, or by the step itself. Raises `NoResult`.
        """
        return the_one(await self.results_of(step), step)

    async def results_of(self, step: Step[R] | Handler[Any, R]) -> list[R]:
        """What several steps of one kind returned, in their order; see `result_of`."""
        return await self._backend.results_of(self.id, step)

    def workflow(
        self, name: str | None = None, *, session: AsyncSession | None = None, resource_key: str | None = None
    ) -> Workflow:
        """``async with job.workflow() as wf:`` adds steps to the workflow of which this job is one.

        A job that is none begins a workflow, called ``name`` or after its kind. Within `complete` they exist only if
        the job succeeds; a step whose name is there already is kept, so a retried job adds nothing twice.
        """
        return self._begin(Workflow, name, session, resource_key)

    def pages(self, stream: Stream[T], **params: Any) -> AsyncIterator[Page[T]]:
        """The pages of a stream from where it stands: a full pass first, then what changed.

        Each page must be saved by `checkpoint` before the next one is asked for; else `ResilientError`. ``params``
        go to the stream's request; each set of them has a cursor of its own.
        """
        return self._backend.pages(stream, params)

    def checkpoint(self, page: Page[Any]) -> AbstractAsyncContextManager[AsyncSession]:
        """``async with job.checkpoint(page) as session:`` rows written there and the cursor are committed together.

        Raises `LostLease` (nothing is committed) if the job was given to another worker. The handler's timeout
        begins anew.
        """
        return self._backend.checkpoint(page)

    def prepare(self) -> AbstractAsyncContextManager[AsyncSession]:
        """``async with job.prepare() as session:`` rows written there are committed at the end of the block.

        A short transaction before a remote call, under the job's fence: raises `LostLease` (nothing is committed) if
        the job was given to another worker. With ``@handler(mode="atomic")`` the block is a savepoint of the job's one
        transaction.
        """
        return self._backend.prepare()

    def complete(self) -> AbstractAsyncContextManager[AsyncSession]:
        """``async with job.complete() as session:`` rows written there are committed with the end of the job.

        When the handler returns, these rows, the job's success, its result and its follow-up jobs (`then`) are
        committed together. An exception, before or after the end of the block, undoes them all, and the job is
        retried; so does a `Snooze`, a `Cancel` or a lost lease. From the block on nothing can be sent
        (`TransactionOpen`).
        """
        return self._backend.complete()

    def sweep(self, stream: Stream[Any], **params: Any) -> AbstractAsyncContextManager[Sweep[AsyncSession] | None]:
        """``async with job.sweep(stream) as sweep:`` is None unless a full pass ended since the last sweep.

        Delete the rows whose latest ``page.pass_id`` is less than ``sweep.pass_id``, with ``sweep.session``.
        """
        return self._backend.sweep(stream, params)


class SyncJob(BaseJob[P], SyncRequests):
    """A job as its plain handler sees it, in a thread."""

    __slots__ = ()

    def through(self, resource_key: str) -> SyncThrough:
        """See `Job.through`."""
        return SyncThrough(resource_key, to_the_end(self._backend.through(resource_key)))

    def progress(self, value: Any) -> None:
        """Save how far the job is (any JSON value); raises `LostLease` if it was given to another worker."""
        to_the_end(self._backend.progress(value))

    def result_of(self, step: Step[R] | Handler[Any, R]) -> R:
        """See `Job.result_of`."""
        return the_one(self.results_of(step), step)

    def results_of(self, step: Step[R] | Handler[Any, R]) -> list[R]:
        """See `Job.results_of`."""
        return to_the_end(self._backend.results_of(self.id, step))

    def workflow(
        self, name: str | None = None, *, session: Session | None = None, resource_key: str | None = None
    ) -> SyncWorkflow:
        """See `Job.workflow`: ``with job.workflow() as wf:``."""
        return self._begin(SyncWorkflow, name, session, resource_key)

    def pages(self, stream: Stream[T], **params: Any) -> Iterator[Page[T]]:
        """See `Job.pages`."""
        return one_by_one(self._backend.pages(stream, params))

    def checkpoint(self, page: Page[Any]) -> AbstractContextManager[Session]:
        """See `Job.checkpoint`."""
        return BlockingBlock(self._backend.checkpoint(page))

    def prepare(self) -> AbstractContextManager[Session]:
        """See `Job.prepare`."""
        return BlockingBlock(self._backend.prepare())

    def complete(self) -> AbstractContextManager[Session]:
        """See `Job.complete`."""
        return BlockingBlock(self._backend.complete())

    def sweep(self, stream: Stream[Any], **params: Any) -> AbstractContextManager[Sweep[Session] | None]:
        """See `Job.sweep`."""
        return BlockingBlock(self._backend.sweep(stream, params))


# -- batches ----------------------------------------------------------------------------------------------------------
#
# What a batch handler sees: many jobs of one resource at once.
#
# Each job of a batch keeps its own lease, fence, attempts, client and outcome; only the call of the handler is shared.
# `Batch` is for ``async def`` handlers, `SyncBatch` for plain ones; ``resilient.testing.batch(...)`` makes one without
# a database.

J = TypeVar("J", bound=BaseJob[Any])


class BaseBatch(Sequence[J], Generic[J]):
    """What both kinds of batch share."""

    __slots__ = ("_jobs", "_open", "_settle", "failed", "succeeded")

    def __init__(self, jobs: Iterable[J], settle: Callable[[J, BaseException | None, Any], None]) -> None:
        self._jobs = tuple(jobs)
        self._open = set(self._jobs)
        self._settle = settle
        self.failed: dict[J, BaseException] = {}  # the errors that `fail` was called with
        self.succeeded: dict[J, Any] = {}  # the results that `succeed` was called with

    def __repr__(self) -> str:
        """Without payloads: they may hold secrets."""
        return f"<{type(self).__name__} of {len(self)} {self.kind} jobs on {self.resource_key}>"

    def __len__(self) -> int:
        """The number of its jobs."""
        return len(self._jobs)

    @overload
    def __getitem__(self, at: int) -> J: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[J, ...]: ...
    def __getitem__(self, at: int | slice) -> J | tuple[J, ...]:
        """One job by its index, or several by a slice."""
        return self._jobs[at]

    @property
    def kind(self) -> str:
        """The kind of all its jobs."""
        return self._jobs[0].kind

    @property
    def resource_key(self) -> str:
        """The resource that all its jobs go through."""
        return self._jobs[0].resource_key

    @property
    def app(self) -> Any:
        """The `Resilient` app that runs it."""
        return self._jobs[0].app

    @property
    def deps(self) -> Any:
        """What was given as ``Resilient(deps=...)``."""
        return self._jobs[0].deps

    def fail(self, job: J, error: BaseException) -> None:
        """End a job as if a handler of its own had raised ``error``; a `Snooze` or a `Cancel` snoozes or cancels it."""
        if not isinstance(error, BaseException):
            raise InvalidInput(f"fail takes an exception, such as Transient() or Permanent(), not {error!r}")
        self._settled(job)
        self.failed[job] = error
        self._settle(job, error, None)

    def succeed(self, job: J, result: Any = None) -> None:
        """End a job as succeeded, whatever becomes of the others; ``result`` is kept as its result (any JSON)."""
        self._settled(job)
        self.succeeded[job] = result
        self._settle(job, None, result)

    def _settled(self, job: J) -> None:
        if job in self.failed or job in self.succeeded:
            raise InvalidInput(f"job {job.id} of this batch was settled before: succeed or fail it once")
        if job not in self._open:
            raise InvalidInput(f"{job!r} is not in this batch")
        self._open.remove(job)


class Batch(BaseBatch[Job[P]], Generic[P]):
    """The jobs of an ``async def`` batch handler: a sequence of `Job`.

    When the handler returns, each job that it did not fail has succeeded. An exception that leaves the handler counts
    for every job that was not settled before.
    """

    __slots__ = ()


class SyncBatch(BaseBatch[SyncJob[P]], Generic[P]):
    """The jobs of a plain batch handler, in a thread: a sequence of `SyncJob`. See `Batch`."""

    __slots__ = ()
