"""One call of a batch handler: the executions that share it, and who is told what.

Only the slot, the thread and their interruption are shared. A job that is settled ends at once, so that a crash later
on repeats as little as possible; the last one stays until the handler returns, and with it the batch. A timeout and a
stopping worker interrupt the whole call; one job's cancel or lost lease does not, unless it is true of all that are
left.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from resilient.engine.batch import Batch, SyncBatch
from resilient.engine.endings import interrupted, raised, returned
from resilient.engine.pauses import Pausable
from resilient.wire.sockets import Line

if TYPE_CHECKING:
    from collections.abc import Callable

    from resilient.core.outcomes import Outcome
    from resilient.engine.execution import Execution
    from resilient.engine.job import BaseJob

    Close = Callable[[Execution, Outcome], None]


class BatchRun(Pausable):
    """It stands in the executor's queue and slot where an execution of its own would."""

    def __init__(self, first: Execution, close: Close) -> None:
        self.row, self.handler, self.id = first.row, first.handler, first.id  # for the log
        self.place = (first.row.kind, first.resource_key)
        self.members: dict[int, Execution] = {}  # claimed and not yet ended
        self.last: Outcome | None = None  # of the member that stays until the end, if it is settled
        self.task: asyncio.Task[Any] | None = None
        self.started = 0.0
        self.thread = False
        self.line = Line()  # what its thread waits for
        self.aside = self.replaced = False  # see `Executor`
        self.future: asyncio.Future[Any] | None = None
        self.interrupted = False  # the call was told to end
        self.heard = False  # the handler looked, and saw that it should stop
        self._errors: list[BaseException] = []  # that some job ended with, each once
        self._close = close

    def add(self, execution: Execution) -> None:
        """One more, before it starts."""
        self.members[execution.number] = execution
        execution.run = self

    def leave(self, execution: Execution) -> bool:
        """One ended; True if others are left, so that the slot stays taken."""
        return self.members.pop(execution.number, None) is not None and bool(self.members)

    @property
    def full(self) -> bool:
        """Whether it takes no more."""
        return len(self.members) >= (self.handler.batch or 1)

    def begin(self) -> None:
        """It has a slot now."""
        for one in self.members.values():
            one.started = self.started
            one.thread = not self.handler.is_async

    def take_thread(self, line: Line) -> None:
        """Its function is called in a thread, which waits on this line."""
        self.thread, self.line = True, line
        for one in self.members.values():
            one.line = line

    def batch(self, jobs: list[Any]) -> Batch[Any] | SyncBatch[Any]:
        """What its handler is called with."""
        loop = asyncio.get_running_loop()
        by_job: dict[BaseJob[Any], Execution] = {job: self.members[job.id.int] for job in jobs}

        def settle(job: BaseJob[Any], error: BaseException | None, result: Any) -> None:
            one = by_job[job]
            self._count_once(one, error)
            outcome = returned(one, result, reconciling=False) if error is None else raised(one, error)
            if self.thread:
                loop.call_soon_threadsafe(self._settle, one, outcome)
            else:
                self._settle(one, outcome)

        return (Batch if self.handler.is_async else SyncBatch)(jobs, settle)

    def _count_once(self, execution: Execution, error: BaseException | None) -> None:
        """One error that many jobs end with is one failure of their resource."""
        if error is not None:
            if any(error is known for known in self._errors):
                execution.answered = True
            else:
                self._errors.append(error)

    def _settle(self, execution: Execution, outcome: Outcome) -> None:
        self.heard = self.heard or execution.heard
        if len(self.members) > 1 or execution.number not in self.members:
            self._close(execution, outcome)
        else:
            self.last = outcome

    def end(self, result: Any, error: BaseException | None) -> None:
        """The handler returned or raised: what that means for every job which it did not settle."""
        heard = self.heard or any(one.heard for one in self.members.values())
        for one in list(self.members.values()):
            if self.last is not None:
                outcome = self.last
            elif error is not None:
                outcome = raised(one, error)
                self._count_once(one, error)
            elif one.reason is not None and (heard or self.line.broke or (self.interrupted and not self.thread)):
                outcome = interrupted(one)  # it swallowed its cancellation, or looked and left early
            else:
                outcome = returned(one, result, reconciling=False)
            self._close(one, outcome)

    def interrupt(self, reason: str) -> None:
        """One of its jobs was interrupted; end the call if it is for nothing now."""
        everybody = reason in ("timeout", "stop")
        if everybody:
            for one in self.members.values():
                if one.reason is None or (reason == "timeout" and not one.lost):
                    one.reason = reason
        if not everybody and any(one.reason is None for one in self.members.values()):
            return
        if self.task is None or (self.thread and reason not in ("timeout", "lost")):
            return
        now = asyncio.get_running_loop().time()
        for one in self.members.values():
            one.cancelled_at = one.cancelled_at or now
        if not self.interrupted:
            self.interrupted = True
            if self.thread:
                self.line.cut()
            else:
                self.task.cancel()
