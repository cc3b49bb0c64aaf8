"""What a batch handler sees: many jobs of one resource at once.

Each job of a batch keeps its own lease, fence, attempts, client and outcome; only the call of the handler is shared.
`Batch` is for ``async def`` handlers, `SyncBatch` for plain ones; ``resilient.testing.batch(...)`` makes one without a
database.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from resilient.core.errors import InvalidInput
from resilient.engine.job import BaseJob, Job, SyncJob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

P = TypeVar("P")
J = TypeVar("J", bound=BaseJob[Any])


class BaseBatch(Sequence[J], Generic[J]):
    """What both kinds of batch share."""

    __slots__ = ("_jobs", "_open", "_settle", "failed", "succeeded")

    def __init__(self, jobs: Iterable[J], settle: Callable[[J, BaseException | None, Any], None]) -> None:
        self._jobs = tuple(jobs)
        self._open = set(self._jobs)
        self._settle = settle
        self.failed: dict[J, BaseException] = {}  # what `fail` was told
        self.succeeded: dict[J, Any] = {}  # what `succeed` was told, with the results

    def __repr__(self) -> str:
        """Without payloads: they may hold secrets."""
        return f"<{type(self).__name__} of {len(self)} {self.kind} jobs on {self.resource_key}>"

    def __len__(self) -> int:
        """How many jobs."""
        return len(self._jobs)

    @overload
    def __getitem__(self, at: int) -> J: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[J, ...]: ...
    def __getitem__(self, at: int | slice) -> J | tuple[J, ...]:
        """One job, or some of them."""
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
        """This job failed, or is told to `Snooze` or `Cancel`: as if a handler of its own had raised ``error``."""
        if not isinstance(error, BaseException):
            raise InvalidInput(f"fail takes an exception, such as Transient() or Permanent(), not {error!r}")
        self._settled(job)
        self.failed[job] = error
        self._settle(job, error, None)

    def succeed(self, job: J, result: Any = None) -> None:
        """This job is done, whatever becomes of the others; ``result`` is kept as its result (any JSON)."""
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

    A job that is not failed has succeeded when the handler returns; what leaves the handler as an exception counts for
    every job that was not settled before.
    """

    __slots__ = ()


class SyncBatch(BaseBatch[SyncJob[P]], Generic[P]):
    """The jobs of a plain batch handler, in a thread: a sequence of `SyncJob`. See `Batch`."""

    __slots__ = ()
