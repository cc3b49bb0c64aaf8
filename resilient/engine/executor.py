"""The executor: one claimed job through its handler to a decision.

Slots are long-lived tasks that take executions from a queue; a task per job would cost more than many jobs do. What a
handler raises, even SystemExit, ends its job and nothing else. Interrupts (timeout, cancel, stop, lost lease) cancel
the slot; the reason is noted before, so that a handler which swallows its cancellation still ends as what it was.
A function in a thread cannot be interrupted: at its timeout its sockets are shut, so that no server can hold it.

What still does not end (a coroutine may swallow its cancellation) is *stuck*. While it lasts, its job stays claimed:
the heartbeat keeps its lease, it counts against every cap of its path, and nobody runs it a second time beside itself.
If it ends after all, it ends as any other. After `patience` seconds the job goes on without it: as timed out, or in
doubt if a request of it is unanswered; what it still writes is refused by the fence. A stuck handler keeps its thread,
not its slot: another slot takes its place, for as many as `most_stuck`. Of one resource key only a quarter of these
(`crowded`): while it has them, this worker runs nothing more of it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, Final

from resilient.core.outcomes import HandedBack, Outcome
from resilient.core.stuck import LEAST_STUCK, share_of_key
from resilient.engine.batch_run import BatchRun
from resilient.engine.calls import call, call_batch, uncancel
from resilient.engine.endings import broken, interrupted
from resilient.engine.foreign import ends_task
from resilient.engine.pauses import is_overdue
from resilient.engine.readiness import prepared, refusal

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor as ThreadPool

    from resilient.core.errors import ResourceStopped
    from resilient.engine.execution import Execution

log = logging.getLogger("resilient.worker")
BREATH: Final = 16  # jobs a slot may run without letting the loop breathe
DEADLINE_LOOK: Final = 0.1  # seconds between two looks for executions past their timeout
SOLO_PATIENCE: Final = 5.0  # seconds a suspect waits for the others to end
CANCEL_PATIENCE: Final = 5.0  # seconds a coroutine may take to end after its cancellation
CLOSE_PATIENCE: Final = 1.0
_WEIGHT: Final = {None: 0, "stop": 1, "cancel": 2, "timeout": 3, "lost": 4}  # the heavier reason wins


class Executor:
    """Runs executions in a fixed number of slots."""

    def __init__(
        self,
        concurrency: int,
        threads: ThreadPool,
        *,
        on_done: Callable[[Execution, Outcome], None],
        on_stuck: Callable[[Execution], None],
        patience: float,
        before: Callable[[Execution], ResourceStopped | None],
    ) -> None:
        self.concurrency = concurrency
        self._threads = threads
        self._on_done, self._on_stuck, self._before = on_done, on_stuck, before
        self._stuck_patience = patience
        self.most_stuck = max(LEAST_STUCK, concurrency)
        self.aside: dict[int, Execution] = {}  # stuck, by number: not decided, and beside the running ones
        self._queue: deque[Execution | BatchRun] = deque()
        self._idle: deque[asyncio.Future[None]] = deque()
        self._slots: list[asyncio.Task[None]] = []
        self.running: dict[int, Execution] = {}  # by number: claimed and not yet decided, waiting ones included
        self._solo: deque[Execution | BatchRun] = deque()  # suspects: rescued before
        self._alone: Execution | BatchRun | None = None  # the suspect that runs now
        self._gathering: dict[tuple[str, str], BatchRun] = {}  # by kind and resource: not started, takes more
        self._shared = 0  # executions beyond the first of each batch: they take no slot
        self.beside = 0  # how many of those have ended
        self._patience = 0.0
        self._deadlines: asyncio.TimerHandle | None = None
        self._closing = False
        self._started = 0  # handlers that run and are not given up
        self.stuck: set[Execution | BatchRun] = set()  # did not end when they should, and have not yet
        self._replaced = 0  # how many of them another slot stands for

    # -- feeding --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Open the slots."""
        self._slots = [asyncio.create_task(self._slot(), name=f"resilient-slot-{n}") for n in range(self.concurrency)]

    def submit(self, execution: Execution) -> None:
        """Run an execution as soon as a slot is free; one that was rescued before runs alone in this process."""
        if (old := self.found(execution.number)) is not None:  # this process slept through its lease
            self.interrupt(old, "lost")
        self.running[execution.number] = execution
        execution.since = time.monotonic()
        if self._deadlines is None:
            self._deadlines = asyncio.get_running_loop().call_later(DEADLINE_LOOK, self._check_deadlines)
        unit: Execution | BatchRun = execution
        if execution.handler.batch and not execution.sent:  # a request without an answer is looked up alone
            unit = self._gather(execution)
            if len(unit.members) > 1:
                return  # it waits already
        if execution.row.rescues:
            if not self._solo:
                loop = asyncio.get_running_loop()
                self._patience = loop.time() + SOLO_PATIENCE
                loop.call_later(SOLO_PATIENCE, self._wake_one)
            self._solo.append(unit)
        else:
            self._queue.append(unit)
            if len(self._queue) > 1:
                return  # the slot that was woken for the first one wakes the next
        self._wake_one()

    def _gather(self, execution: Execution) -> BatchRun:
        """The batch it will run in: one of its kind and resource that waits for a slot, or a new one."""
        place = (execution.row.kind, execution.resource_key)
        run = self._gathering.get(place)
        if run is None or run.full or execution.row.rescues:
            run = BatchRun(execution, self._close)
            if not execution.row.rescues:
                self._gathering[place] = run
        else:
            self._shared += 1
        run.add(execution)
        return run

    def _wake_one(self) -> None:
        while self._idle:
            future = self._idle.popleft()
            if not future.done():
                future.set_result(None)
                return

    def found(self, number: int) -> Execution | None:
        """An execution that is claimed and not decided, by its job's number."""
        return self.running.get(number) or self.aside.get(number)

    @property
    def crowded(self) -> set[str]:
        """Resource keys with so many stuck handlers here that nothing more of them is run."""
        if not self.stuck:
            return set()
        most = share_of_key(self.most_stuck)
        return {key for key, n in Counter(unit.row.resource_key for unit in self.stuck).items() if n >= most}

    @property
    def _blocked(self) -> int:
        """Slots that nobody stands for."""
        return len(self.stuck) - self._replaced

    @property
    def closed(self) -> bool:
        """Whether its slots are gone for good."""
        return self._closing

    @property
    def wants_quiet(self) -> bool:
        """Whether nothing more should be claimed: a suspect waits for its time or runs, or all slots are stuck."""
        return self._alone is not None or bool(self._solo) or self._blocked >= self.concurrency

    @property
    def taken(self) -> int:
        """Slots in use or promised."""
        return len(self.running) - self._shared + self._blocked

    def _plain(self) -> bool:
        """Whether the next execution may just be started."""
        return bool(self._queue) and not self._solo and self._alone is None and not self._closing

    def _next(self) -> Execution | BatchRun | None:
        """The execution to start now. A suspect starts once nothing else runs, or when patience ends."""
        if self._alone is not None or self._closing:
            return None
        patient = bool(self._solo) and asyncio.get_running_loop().time() < self._patience
        if self._queue and (patient or not self._solo):
            return self._queue.popleft()
        if not self._solo or (self._started and patient):
            return None
        self._alone = self._solo.popleft()
        return self._alone

    # -- running --------------------------------------------------------------------------------------------------

    async def _slot(self) -> None:
        loop, this = asyncio.get_running_loop(), asyncio.current_task()
        breath = 0
        while True:
            while (execution := self._queue.popleft() if self._plain() else self._next()) is None:
                if self._closing:
                    return
                future = loop.create_future()
                self._idle.append(future)
                await future
            # Each slot that starts wakes two more while there is work: jobs that never wait cost no wake-up at all.
            if self._queue and self._idle:
                self._wake_one()
                self._wake_one()
            execution.task = this
            execution.started = loop.time()
            self._started += 1
            if isinstance(execution, BatchRun):
                await self._run_batch(execution)
            else:
                try:
                    outcome = refusal(execution, self._before) or await call(execution, self._threads)
                except BaseException as error:
                    if self._closing and ends_task(error):
                        raise
                    log.exception("the engine failed over job %s (%s)", execution.id, execution.row.kind)
                    outcome = broken(error)
                self._close(execution, outcome)
            if not await self._freed(execution):
                return
            breath += 1
            if breath >= BREATH:
                breath = 0
                await asyncio.sleep(0)

    async def _freed(self, unit: Execution | BatchRun) -> bool:
        """Wait for the end of a thread that was given up; False if another slot stands here by now."""
        if unit.future is not None and not unit.future.done():
            self._keep_stuck(unit)
            await asyncio.wait([unit.future])
        self.stuck.discard(unit)
        self._replaced -= unit.replaced
        return not unit.replaced

    def _close(self, execution: Execution, outcome: Outcome) -> None:
        """An execution ended: pass its outcome on, unless it was given up before."""
        if self._leave(execution):
            self._on_done(execution, outcome)

    def _leave(self, execution: Execution) -> bool:
        """It does not count as running any more, and may send and mark nothing more; False: it did not before."""
        execution.over = True
        held = self.found(execution.number) is execution
        if held:
            self.running.pop(execution.number, None)
            self.aside.pop(execution.number, None)
        unit: Execution | BatchRun = execution
        if execution.run is not None:
            unit = execution.run
            if unit.leave(execution):
                self._shared -= not unit.aside
                self.beside += 1
            if unit.members:
                return held
        if unit.task is not None:
            self._started -= not unit.aside
            unit.task = None
        if self._alone is unit:
            self._alone = None
            self._wake_one()
        elif self._solo:
            self._wake_one()
        return held

    def _set_aside(self, execution: Execution) -> None:
        """It does not end: its job stays claimed beside those that run, and its slot goes on with another task."""
        unit = execution.run or execution
        if execution.started == 0 or unit.aside:
            return
        members = list(unit.members.values()) if isinstance(unit, BatchRun) else [unit]
        unit.aside = True
        self._started -= 1
        self._shared -= len(members) - 1
        for one in members:
            one.aside = True
            self.aside[one.number] = self.running.pop(one.number)
        if self._alone is unit:
            self._alone = None
        self._keep_stuck(unit)
        for one in members:
            self._on_stuck(one)

    def _keep_stuck(self, unit: Execution | BatchRun) -> None:
        """Open another slot in place of a stuck one, within bounds; what can start no more goes to other workers."""
        if unit in self.stuck or self._closing:
            return
        self.stuck.add(unit)
        if self._replaced < self.most_stuck:
            unit.replaced = True
            self._replaced += 1
            number = len(self._slots)
            self._slots = [slot for slot in self._slots if not slot.done()]
            self._slots.append(asyncio.create_task(self._slot(), name=f"resilient-slot-{number}"))
        log.error(
            "a handler of kind %s does not end (job %s on %s): %d stuck, %d of %d slots are taken by them%s%s",
            unit.row.kind,
            unit.id,
            unit.row.resource_key,
            len(self.stuck),
            self._blocked,
            self.concurrency,
            f"; nothing more of {unit.row.resource_key} is run here" if unit.row.resource_key in self.crowded else "",
            "; restart this worker" if self._blocked >= self.concurrency else "",
        )
        crowded, full = self.crowded, self._blocked >= self.concurrency
        for one in [e for e in self.running.values() if not e.started and (full or e.resource_key in crowded)]:
            self._withdraw(one, HandedBack("its worker runs nothing more beside handlers that do not end"))

    def _withdraw(self, execution: Execution, outcome: Outcome) -> None:
        """End one that waits for a slot."""
        run = execution.run
        for queue in (self._queue, self._solo):
            if run is None and execution in queue:
                queue.remove(execution)
        self._close(execution, outcome)
        if run is not None and not run.members:
            self._drop(run)

    def _check_deadlines(self) -> None:
        """Interrupt what has run for too long. One look at all costs less than a timer for each."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        for execution in list(self.running.values()):
            if execution.cancelled_at and now - execution.cancelled_at >= CANCEL_PATIENCE:
                if execution.lost:
                    self.abandon(execution)
                else:
                    self._set_aside(execution)
            elif is_overdue(execution, now):
                self.interrupt(execution, "timeout")
        for execution in list(self.aside.values()):
            if now - execution.cancelled_at >= self._stuck_patience:
                self.abandon(execution)
        watched = self.running or self.aside
        self._deadlines = loop.call_later(DEADLINE_LOOK, self._check_deadlines) if watched else None

    async def _run_batch(self, run: BatchRun) -> None:
        """Run the handler of a batch and end all its jobs."""
        if self._gathering.get(run.place) is run:
            del self._gathering[run.place]
        run.begin()
        try:
            for one in list(run.members.values()):
                if (refused := refusal(one, self._before) or await prepared(one)) is not None:
                    self._close(one, refused)
            if run.members:
                await call_batch(run, self._threads)
        except asyncio.CancelledError as error:  # before its handler was called
            uncancel(run)
            run.end(None, error)
        except BaseException as error:
            log.exception("the engine failed over a batch of %s (%s)", run.row.kind, run.row.resource_key)
            for one in list(run.members.values()):
                self._close(one, broken(error))

    # -- interrupting ---------------------------------------------------------------------------------------------

    def interrupt(self, execution: Execution, reason: str) -> None:
        """Stop an execution: "timeout", "cancel", "stop" or "lost". A waiting one is dropped, a thread only told."""
        if self.aside.get(execution.number) is execution:
            if reason == "lost":
                execution.lost, execution.reason = True, reason  # not its patience is over
                self.abandon(execution)
            return
        if _WEIGHT[reason] <= _WEIGHT[execution.reason] or self.running.get(execution.number) is not execution:
            return
        if execution.over:
            return  # its end is committed
        execution.reason = reason
        execution.lost = execution.lost or reason == "lost"
        self._interrupt(execution, reason)

    def _interrupt(self, execution: Execution, reason: str) -> None:
        run = execution.run
        if run is not None and run.started:
            run.interrupt(reason)
        elif run is not None:
            self._close(execution, interrupted(execution))
            if not run.members:
                self._drop(run)
        elif execution.task is None:
            if execution in self._queue or execution in self._solo:
                self._withdraw(execution, interrupted(execution))
        elif not execution.thread:
            execution.cancelled_at = execution.cancelled_at or asyncio.get_running_loop().time()
            execution.task.cancel()
        elif reason in ("timeout", "lost"):
            execution.cancelled_at = execution.cancelled_at or asyncio.get_running_loop().time()
            execution.line.cut()

    def _drop(self, run: BatchRun) -> None:
        """A batch that waited has no job left."""
        for queue in (self._queue, self._solo):
            if run in queue:
                queue.remove(run)
        if self._gathering.get(run.place) is run:
            del self._gathering[run.place]

    def abandon(self, execution: Execution) -> None:
        """Give up waiting for a function that does not stop; what it still does is refused by the fence."""
        if self.found(execution.number) is not execution:
            return
        unit = execution.run or execution
        outcome = (execution.run and execution.run.last) or interrupted(execution)
        self._leave(execution)
        if execution.thread:
            execution.line.cut()
        if execution.started:
            self._keep_stuck(unit)
        self._on_done(execution, outcome)

    async def close(self) -> None:
        """Close the slots; what still runs (the worker was cancelled) is handed back, but for what is stuck."""
        self._closing = True
        for execution in list(self.running.values()):
            self.interrupt(execution, "stop")
        if self._deadlines is not None:
            self._deadlines.cancel()
        for slot in self._slots:
            slot.cancel()
        if self._slots:
            await asyncio.wait(self._slots, timeout=CLOSE_PATIENCE)
        for execution in [*self.running.values(), *self.aside.values()]:
            self.abandon(execution)
