"""What a handler sees: its job.

`Job` is for ``async def`` handlers, `SyncJob` for plain ones (they run in a thread). Both are made by the executor, or
by ``resilient.testing.job(...)`` without a database.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from resilient.engine import sync, workflow_job
from resilient.engine.requests import Requests, SyncRequests
from resilient.engine.steps import SyncWorkflow, Workflow
from resilient.engine.workflows import the_one

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping
    from contextlib import AbstractAsyncContextManager, AbstractContextManager
    from uuid import UUID

    from sqlalchemy.ext.asyncio import AsyncSession
    from sqlalchemy.orm import Session

    from resilient.engine.enqueue import Enqueued
    from resilient.engine.execution import Side
    from resilient.engine.handler import Handler, Kind
    from resilient.engine.requests import SyncThrough, Through
    from resilient.engine.steps import Step
    from resilient.engine.streams import Page, Stream
    from resilient.engine.sync import Sweep

P = TypeVar("P")
Q = TypeVar("Q")
R = TypeVar("R")
T = TypeVar("T")


class BaseJob(Generic[P]):
    """What both kinds of job share."""

    __slots__ = (
        "_idempotency_key",
        "_side",
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
        side: Side,
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
        self._side = side

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
        return self._side.app

    @property
    def deps(self) -> Any:
        """What was given as ``Resilient(deps=...)``."""
        return self._side.deps

    @overload
    def then(
        self, handler: Kind[None], payload: None = None, *, resource_key: str | None = None, **options: Any
    ) -> Enqueued: ...
    @overload
    def then(self, handler: Kind[Q], payload: Q, *, resource_key: str | None = None, **options: Any) -> Enqueued: ...
    @overload
    def then(
        self, handler: str, payload: Any = None, *, resource_key: str | None = None, **options: Any
    ) -> Enqueued: ...
    def then(
        self, handler: Kind[Any] | str, payload: Any = None, *, resource_key: str | None = None, **options: Any
    ) -> Enqueued:
        """Enqueue a follow-up job that exists only if this one succeeds: written in the transaction of its end.

        ``resource_key`` is this job's by default; options as for ``app.enqueue``, and the same errors.
        """
        return self._side.then(handler, payload, resource_key, options)

    def after_commit(self, fn: Callable[[], Any]) -> None:
        """Call ``fn()`` once the transaction of `complete` is committed, and not if it is rolled back.

        For an ``async def`` handler it may return an awaitable. A crash right after the commit loses the call.
        """
        self._side.after_commit(fn)

    @property
    def cancel_requested(self) -> bool:
        """Whether somebody asked to cancel the job, or its worker is about to stop."""
        return self._side.cancel_requested


class Job(BaseJob[P], Requests):
    """A job as its ``async def`` handler sees it."""

    __slots__ = ()

    async def through(self, resource_key: str) -> Through:
        """Another resource, for requests of this job: ``other = await job.through("slack/team-1")``.

        It has a ``client`` and ``call()`` of its own, with that account's address, credentials, gate and limits. Raises
        `ResourceStopped` if it is stopped: let it pass, and the job waits for that resource, no attempt charged.
        """
        other: Through = await self._side.through(resource_key)
        return other

    async def progress(self, value: Any) -> None:
        """Save how far the job is (any JSON value); raises `LostLease` if it was given to another worker."""
        await self._side.progress(value)

    async def result_of(self, step: Step[R] | Handler[Any, R]) -> R:
        """What an earlier step of this job's workflow returned, as the type its handler returns.

        Named by its handler, or by the step itself. Raises `NoResult`.
        """
        return the_one(await workflow_job.results(self, step), step)

    async def results_of(self, step: Step[R] | Handler[Any, R]) -> list[R]:
        """The same of several steps of one kind, in their order."""
        return await workflow_job.results(self, step)

    def workflow(
        self, name: str | None = None, *, session: AsyncSession | None = None, resource_key: str | None = None
    ) -> Workflow:
        """``async with job.workflow() as wf:`` adds steps to the workflow of which this job is one.

        A job that is none begins a workflow, called ``name`` or after its kind. Within `complete` they exist only if
        the job succeeds; a step whose name is there already is kept, so a retried job adds nothing twice.
        """
        return workflow_job.begin(self, Workflow, name, session, resource_key)

    def pages(self, stream: Stream[T], **params: Any) -> AsyncIterator[Page[T]]:
        """The pages of a stream from where it stands: a full pass first, then what changed.

        Each page must be saved by `checkpoint` before the next one is asked for; else `ResilientError`. ``params``
        go to the stream's request; each set of them has a cursor of its own.
        """
        return sync.pages(self._side, stream, params)

    def checkpoint(self, page: Page[Any]) -> AbstractAsyncContextManager[AsyncSession]:
        """``async with job.checkpoint(page) as session:`` rows written there and the cursor are committed together.

        Raises `LostLease` (nothing is committed) if the job was given to another worker. The handler's timeout
        begins anew.
        """
        return sync.checkpoint(self._side, page)

    def prepare(self) -> AbstractAsyncContextManager[AsyncSession]:
        """``async with job.prepare() as session:`` rows written there are committed at the end of the block.

        A short transaction before a remote call, under the job's fence: raises `LostLease` (nothing is committed) if
        the job was given to another worker. With ``@handler(mode="atomic")`` a savepoint of the job's one transaction.
        """
        return self._side.prepare()

    def complete(self) -> AbstractAsyncContextManager[AsyncSession]:
        """``async with job.complete() as session:`` rows written there are committed with the end of the job.

        When the handler returns, these rows, the job's success, its result and its follow-up jobs (`then`) are
        committed together. An exception, before or after the end of the block, undoes them all, and the job is
        retried; so does a `Snooze`, a `Cancel` or a lost lease. From the block on nothing can be sent
        (`TransactionOpen`).
        """
        return self._side.complete()

    def sweep(self, stream: Stream[Any], **params: Any) -> AbstractAsyncContextManager[Sweep[AsyncSession] | None]:
        """``async with job.sweep(stream) as sweep:`` is None unless a full pass ended since the last sweep.

        Delete the rows whose latest ``page.pass_id`` is less than ``sweep.pass_id``, with ``sweep.session``.
        """
        return sync.sweep(self._side, stream, params)


class SyncJob(BaseJob[P], SyncRequests):
    """A job as its plain handler sees it, in a thread."""

    __slots__ = ()

    def through(self, resource_key: str) -> SyncThrough:
        """See `Job.through`."""
        other: SyncThrough = self._side.through_sync(resource_key)
        return other

    def progress(self, value: Any) -> None:
        """Save how far the job is (any JSON value); raises `LostLease` if it was given to another worker."""
        self._side.progress_sync(value)

    def result_of(self, step: Step[R] | Handler[Any, R]) -> R:
        """See `Job.result_of`."""
        return the_one(workflow_job.results_sync(self, step), step)

    def results_of(self, step: Step[R] | Handler[Any, R]) -> list[R]:
        """See `Job.results_of`."""
        return workflow_job.results_sync(self, step)

    def workflow(
        self, name: str | None = None, *, session: Session | None = None, resource_key: str | None = None
    ) -> SyncWorkflow:
        """See `Job.workflow`: ``with job.workflow() as wf:``."""
        return workflow_job.begin(self, SyncWorkflow, name, session, resource_key)

    def pages(self, stream: Stream[T], **params: Any) -> Iterator[Page[T]]:
        """See `Job.pages`."""
        return sync.pages_sync(self._side, stream, params)

    def checkpoint(self, page: Page[Any]) -> AbstractContextManager[Session]:
        """See `Job.checkpoint`."""
        return sync.checkpoint_sync(self._side, page)

    def prepare(self) -> AbstractContextManager[Session]:
        """See `Job.prepare`."""
        return self._side.prepare_sync()

    def complete(self) -> AbstractContextManager[Session]:
        """See `Job.complete`."""
        return self._side.complete_sync()

    def sweep(self, stream: Stream[Any], **params: Any) -> AbstractContextManager[Sweep[Session] | None]:
        """See `Job.sweep`."""
        return sync.sweep_sync(self._side, stream, params)
