"""The executor: one claimed job through its handler to a decision.

Slots are long-lived tasks that take executions from a queue; a task per job would cost more than many jobs do. What a
handler raises, even SystemExit, ends its job and nothing else. Interrupts (timeout, cancel, stop, lost lease) cancel
the slot; the reason is noted before, so that a handler which swallows its cancellation still ends for that reason.
A function in a thread cannot be interrupted: at its timeout its sockets are shut, so that no server can hold it.

What still does not end (a coroutine may swallow its cancellation) is *stuck*. While it lasts, its job stays claimed:
the heartbeat keeps its lease, it counts against every cap of its path, and nobody runs it a second time beside itself.
If it ends after all, it ends as any other. After `patience` seconds the job goes on without it: as timed out, or in
doubt if it sent a write without a key; what it still writes is refused by the fence. A stuck handler keeps its thread,
not its slot: another slot takes its place, for as many as `most_stuck`. A resource key with a quarter of these is
`crowded`: while it is, this worker runs nothing more of it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from typing import TYPE_CHECKING, Any, Final

from resilient.core.base.loggers import logger
from resilient.core.base.tracing import running
from resilient.core.jobs.outcomes import LEAST_STUCK, HandedBack, Outcome, Succeeded, share_of_key
from resilient.engine.ground.foreign import ends_task
from resilient.engine.run.execution import LEAST_PROLONGED, Execution, SharedCall
from resilient.engine.run.job import Batch, SyncBatch
from resilient.engine.run.mishap import explain_bug
from resilient.engine.run.pipeline import (
    explain_error,
    explain_interruption,
    explain_result,
    run_batch,
    run_job,
    uncancel,
)
from resilient.engine.run.two_phase import AFTER_COMMIT_PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor as ThreadPool

    from resilient.engine.run.backend import Wire
    from resilient.engine.run.job import BaseJob

log = logger("worker")
BREATH: Final = 16  # jobs that a slot runs before it gives the loop a turn
DEADLINE_LOOK: Final = 0.1  # seconds between two looks for executions past their timeout
SOLO_PATIENCE: Final = 5.0  # seconds a suspect waits for the others to end
CANCEL_PATIENCE: Final = 5.0  # seconds a coroutine may take to end after its cancellation
AFTER_PATIENCE: Final = AFTER_COMMIT_PATIENCE + CANCEL_PATIENCE  # seconds that calls after a commit may keep a slot
CLOSE_PATIENCE: Final = 1.0  # seconds the slots may take to end when the worker closes
_WEIGHT: Final = {None: 0, "stop": 1, "cancel": 2, "timeout": 3, "lost": 4}  # the heavier reason wins


class BatchRun(SharedCall):
    """One call of a batch handler: what its handler is given, and what its answers mean for each job.

    Only the slot, the thread and their interruption are shared. A job that is settled ends at once, so that a crash
    later on repeats as little as possible; the last one stays until the handler returns, and with it the batch. A
    timeout and a stopping worker interrupt the whole call; one job's cancel or lost lease does not, unless it is true
    of all that remain.
    """

    def __init__(self, first: Execution, close: Callable[[Execution, Outcome], None]) -> None:
        super().__init__(first)
        self._errors: list[BaseException] = []  # the errors that its jobs ended with, each once
        self._close = close

    def batch(self, jobs: list[Any]) -> Batch[Any] | SyncBatch[Any]:
        """What its handler is called with."""
        loop = asyncio.get_running_loop()
        by_job: dict[BaseJob[Any], Execution] = {job: self.members[job.id.int] for job in jobs}

        def settle(job: BaseJob[Any], error: BaseException | None, result: Any) -> None:
            one = by_job[job]
            self._count_once(one, error)
            try:
                outcome = explain_result(one, result, reconciling=False) if error is None else explain_error(one, error)
            except BaseException as second:  # noqa: BLE001 - a result of the program's own that cannot be read
                outcome = explain_bug(one, second)
            if self.thread:
                with contextlib.suppress(RuntimeError):  # the loop has ended: its worker gave these jobs up
                    loop.call_soon_threadsafe(self._settle, one, outcome)
            else:
                self._settle(one, outcome)

        return (Batch if self.handler.is_async else SyncBatch)(jobs, settle)

    def _count_once(self, execution: Execution, error: BaseException | None) -> None:
        """Let one error that many jobs end with be one failure of their resource: the others count as answered."""
        if error is not None:
            if any(error is one for one in self._errors):
                execution.count_answer()
            else:
                self._errors.append(error)

    def _settle(self, execution: Execution, outcome: Outcome) -> None:
        self.is_warned = self.is_warned or execution.is_warned
        if len(self.members) > 1 or execution.number not in self.members:
            self._close(execution, outcome)
        else:
            self.last = outcome

    def end(self, result: Any, error: BaseException | None) -> None:
        """The handler returned or raised: what that means for every job which it did not settle."""
        is_cancelling = self.is_warned or any(one.is_warned for one in self.members.values())
        for one in list(self.members.values()):
            if self.last is not None:
                outcome = self.last
            elif error is not None:
                outcome = explain_error(one, error)
                self._count_once(one, error)
            elif one.reason is not None and (
                is_cancelling or self.line.broke or (self.interrupted and not self.thread)
            ):
                outcome = explain_interruption(one)  # it swallowed its cancellation, or looked and left early
            else:
                outcome = explain_result(one, result, reconciling=False)
            self._close(one, outcome)


class Executor:
    """Runs executions in a fixed number of slots."""

    def __init__(
        self,
        concurrency: int,
        threads: ThreadPool,
        wire: Wire,
        *,
        on_done: Callable[[Execution, Outcome], None],
        on_stuck: Callable[[Execution], None],
        patience: float,
    ) -> None:
        self.concurrency = concurrency
        self._threads, self._wire = threads, wire
        self._on_done, self._on_stuck = on_done, on_stuck
        self._stuck_patience = patience
        self.most_stuck = max(LEAST_STUCK, concurrency)
        self.aside: dict[int, Execution] = {}  # stuck, by number: not decided, and beside the running ones
        self._queue: deque[Execution | SharedCall] = deque()
        self._idle: deque[asyncio.Future[None]] = deque()
        self._slots: list[asyncio.Task[None]] = []
        self.running: dict[int, Execution] = {}  # by number: claimed and not yet decided, waiting ones included
        self._outdated: list[Execution] = []  # their jobs were claimed here again, and they have not ended
        self._solo: deque[Execution | SharedCall] = deque()  # suspects: rescued before
        self._alone: Execution | SharedCall | None = None  # the suspect that runs now
        self._gathering: dict[tuple[str, str], BatchRun] = {}  # by kind and resource: not started, takes more
        self._shared = 0  # executions beyond the first of each batch: they take no slot
        self.beside = 0  # executions that ended before the last of their batch: they freed no slot
        self._patience = 0.0
        self._deadlines: asyncio.TimerHandle | None = None
        self._closing = False
        self._started = 0  # handlers that run and are not given up
        self.stuck: set[Execution | SharedCall] = set()  # were told to end or given up, and go on
        self._replaced = 0  # how many of them another slot stands for
        self._widening = False  # `_widen` will run when the loop turns
        self.lease = 0.0  # seconds; the heartbeat knows

    # -- feeding --------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open the slots."""
        self._slots = [asyncio.create_task(self._slot(), name=f"resilient-slot-{n}") for n in range(self.concurrency)]

    def submit(self, execution: Execution, since: float) -> None:
        """Run an execution as soon as a slot is free; one that was rescued before runs alone in this process.

        ``since``: see `Claimed.since`.
        """
        if (old := self.find(execution.number)) is not None:  # this process slept through its lease
            self.interrupt(old, "lost")
            if self.running.pop(old.number, None) is old:  # its slot, or its batch, goes on for a moment or for long
                self._outdated.append(old)
        self.running[execution.number] = execution
        loop = asyncio.get_running_loop()
        execution.since, execution.lease = loop.time(), self.lease
        execution.hold(since)
        if self._deadlines is None:
            self._deadlines = loop.call_later(DEADLINE_LOOK, self._check_deadlines)
        unit: Execution | SharedCall = execution
        if execution.handler.batch and not execution.sent:  # a request without an answer is looked up alone
            unit = self._gather(execution)
            if len(unit.members) > 1:
                return  # the batch stands in a queue already
        if execution.row.rescues:
            if not self._solo:
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

    def _widen(self) -> None:
        """Wake slots for what still waits, as the loop turns: two for each handler that has begun to wait.

        Handlers that never wait give the loop a turn only after `BREATH` jobs, so they cost next to no wake-up.
        """
        self._widening = False
        for _ in range(min(len(self._queue), max(1, 2 * self._started))):
            self._wake_one()

    def find(self, number: int) -> Execution | None:
        """An execution that is claimed and not decided, by its job's number."""
        return self.running.get(number) or self.aside.get(number)

    def _is_here(self, execution: Execution) -> bool:
        """Whether it is claimed and not decided; another execution of its job may be here, too."""
        return self.find(execution.number) is execution or execution in self._outdated

    @property
    def crowded(self) -> set[str]:
        """Resource keys with so many stuck handlers here that nothing more of them is run."""
        if not self.stuck:
            return set()
        most = share_of_key(self.most_stuck)
        return {key for key, n in Counter(unit.row.resource_key for unit in self.stuck).items() if n >= most}

    @property
    def _blocked(self) -> int:
        """The number of slots that stuck handlers take and no other slots replace."""
        return len(self.stuck) - self._replaced

    @property
    def closed(self) -> bool:
        """Whether its slots are gone for good."""
        return self._closing

    @property
    def wants_quiet(self) -> bool:
        """Whether nothing more should be claimed: a suspect waits to run alone or runs, or all slots are stuck."""
        return self._alone is not None or bool(self._solo) or self._blocked >= self.concurrency

    @property
    def slots_in_use(self) -> int:
        """The number of slots that are taken, or that waiting executions will take."""
        return len(self.running) + len(self._outdated) - self._shared + self._blocked

    def _plain(self) -> bool:
        """Whether the first of the queue may start without a look at suspects."""
        return bool(self._queue) and not self._solo and self._alone is None and not self._closing

    def _next(self) -> Execution | SharedCall | None:
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
            if self._queue and self._idle and not self._widening:
                self._widening = True
                loop.call_soon(self._widen)
            execution.task = this
            execution.started = loop.time()
            self._started += 1
            token = running.set(execution)
            try:
                await (self._run_batch(execution) if isinstance(execution, SharedCall) else self._run_one(execution))
            finally:
                running.reset(token)
                if execution.span is not None:
                    execution.span.leave()
            if getattr(this, "_must_cancel", False):  # until Python 3.13 `uncancel` leaves it to the next wait
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0)
            if not await self._freed(execution):
                return
            breath += 1
            if breath >= BREATH:
                breath = 0
                await asyncio.sleep(0)

    async def _run_one(self, execution: Execution) -> None:
        """Run a job of its own and end it."""
        try:
            outcome = await run_job(execution, self._wire, self._threads)
        except BaseException as error:
            if self._closing and ends_task(error):
                raise
            log.exception("the engine failed over job %s (%s)", execution.id, execution.row.kind)
            outcome = explain_bug(execution, error)
        self._close(execution, outcome)

    async def _freed(self, unit: Execution | SharedCall) -> bool:
        """Wait for the end of a thread that was given up; False if another slot stands here by now."""
        if unit.future is not None and not unit.future.done():
            self._keep_stuck(unit)
            await asyncio.wait([unit.future])
        self.stuck.discard(unit)
        self._replaced -= unit.replaced
        return not unit.replaced

    def _close(self, execution: Execution, outcome: Outcome) -> None:
        """An execution ended: pass its outcome on, unless it was given up before. A mistake costs no slot."""
        if self._leave(execution):
            self._conclude(execution, outcome)

    def _conclude(self, execution: Execution, outcome: Outcome) -> None:
        try:
            self._on_done(execution, outcome)
        except Exception:
            log.exception("the engine failed over the end of job %s (%s)", execution.id, execution.row.kind)

    def _leave(self, execution: Execution) -> bool:
        """Take an execution out of those that run: it may send and mark nothing more. False if it was out before."""
        execution.leave()
        was_running = self._is_here(execution)
        if was_running:
            if self.running.get(execution.number) is execution:
                del self.running[execution.number]
            elif self.aside.get(execution.number) is execution:
                del self.aside[execution.number]
            else:
                self._outdated.remove(execution)
        unit: Execution | SharedCall = execution
        if execution.run is not None:
            unit = execution.run
            if unit.leave(execution):
                self._shared -= not unit.aside
                self.beside += 1
            if unit.members:
                self._end_if_idle(unit)
                return was_running
        if unit.task is not None:
            self._started -= not unit.aside
            unit.task = None
        self._make_room(unit)
        return was_running

    def _end_if_idle(self, run: SharedCall) -> None:
        """Interrupt a call whose remaining jobs were all interrupted, unless its handler returns at once."""
        if run.started and all(one.reason is not None for one in run.members.values()):
            reason = "lost" if all(one.lost for one in run.members.values()) else "cancel"
            asyncio.get_running_loop().call_soon(run.interrupt, reason)

    def _make_room(self, unit: Execution | SharedCall) -> None:
        """Wake a slot for what waited until a unit no longer counts as running."""
        if self._alone is unit:
            self._alone = None
            self._wake_one()
        elif self._solo:
            self._wake_one()

    def _set_aside(self, execution: Execution) -> None:
        """Put a stuck execution aside: its job stays claimed, and another slot takes the place of its own."""
        unit = execution.run or execution
        if execution.started == 0 or unit.aside:
            return
        members = list(unit.members.values()) if isinstance(unit, SharedCall) else [unit]
        unit.aside = True
        self._started -= 1
        self._shared -= len(members) - 1
        members = [one for one in members if self.running.get(one.number) is one]
        for one in members:
            one.aside = True
            self.aside[one.number] = self.running.pop(one.number)
        self._make_room(unit)  # there may be no new slot
        self._keep_stuck(unit)
        for one in members:
            self._on_stuck(one)

    def _keep_stuck(self, unit: Execution | SharedCall) -> None:
        """Open another slot in place of a stuck one, within bounds; what cannot start here goes to other workers."""
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
        """End an execution that waits for a slot."""
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
        for execution in self._all():
            try:
                self._check_deadline(execution, now)
            except Exception:
                log.exception("the engine failed over the timeout of job %s (%s)", execution.id, execution.row.kind)
        self._deadlines = loop.call_later(DEADLINE_LOOK, self._check_deadlines) if self._all() else None

    def _all(self) -> list[Execution]:
        return [*self.running.values(), *self.aside.values(), *self._outdated]

    def _check_deadline(self, execution: Execution, now: float) -> None:
        if execution.over:  # it is committed, and its calls after the commit run
            execution.cancelled_at = execution.cancelled_at or now
            if now - execution.cancelled_at >= AFTER_PATIENCE:
                self.abandon(execution)
        elif execution.aside:
            if now - execution.cancelled_at >= self._stuck_patience:
                self.abandon(execution)
        elif execution.cancelled_at and now - execution.cancelled_at >= CANCEL_PATIENCE:
            if execution.lost:
                self.abandon(execution)
            else:
                self._set_aside(execution)
        elif is_overdue(execution, now):
            self.interrupt(execution, "timeout")

    async def _run_batch(self, run: SharedCall) -> None:
        """Run the handler of a batch and end all its jobs."""
        if self._gathering.get(run.place) is run:
            del self._gathering[run.place]
        run.begin()
        try:
            await run_batch(run, self._wire, self._threads, self._close)
        except asyncio.CancelledError as error:  # before its handler was called
            uncancel(run)
            run.end(None, error)
        except BaseException as error:
            log.exception("the engine failed over a batch of %s (%s)", run.row.kind, run.row.resource_key)
            for one in list(run.members.values()):
                self._close(one, explain_bug(one, error))

    # -- interrupting ---------------------------------------------------------------------------------------------

    def interrupt(self, execution: Execution, reason: str) -> None:
        """Stop an execution: "timeout", "cancel", "stop" or "lost".

        One that waits ends at once. A thread cannot be stopped: after a timeout or a lost lease its sockets are shut.
        """
        if self.aside.get(execution.number) is execution:
            if reason == "lost":
                execution.lost, execution.reason = True, reason  # abandoned for that, not for the end of its patience
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
            self._close(execution, explain_interruption(execution))
            if not run.members:
                self._drop(run)
        elif execution.task is None:
            if execution in self._queue or execution in self._solo:
                self._withdraw(execution, explain_interruption(execution))
        elif not execution.thread:
            execution.cancelled_at = execution.cancelled_at or asyncio.get_running_loop().time()
            execution.task.cancel()
        elif reason in ("timeout", "lost"):
            execution.cancelled_at = execution.cancelled_at or asyncio.get_running_loop().time()
            execution.line.cut()

    def _drop(self, run: SharedCall) -> None:
        """Take a batch that has no job left out of the queues."""
        for queue in (self._queue, self._solo):
            if run in queue:
                queue.remove(run)
        if self._gathering.get(run.place) is run:
            del self._gathering[run.place]

    def abandon(self, execution: Execution) -> None:
        """Give up waiting for a function that does not stop; what it still does is refused by the fence.

        One that has committed its job has ended it, whatever it waits for after that.
        """
        if not self._is_here(execution):
            return
        unit = execution.run or execution
        if execution.over:
            outcome: Outcome = Succeeded(written=True)
        else:
            outcome = (execution.run and execution.run.last) or explain_interruption(execution)
        self._leave(execution)
        if execution.thread:
            execution.line.cut()
        if execution.started:
            self._keep_stuck(unit)
        self._conclude(execution, outcome)

    async def close(self) -> None:
        """Close the slots. What runs (the worker was cancelled) is handed back; what does not end is abandoned."""
        self._closing = True
        for execution in list(self.running.values()):
            self.interrupt(execution, "stop")
        if self._deadlines is not None:
            self._deadlines.cancel()
        for slot in self._slots:
            slot.cancel()
        try:
            if self._slots:
                await asyncio.wait(self._slots, timeout=CLOSE_PATIENCE)
        finally:
            for execution in self._all():
                self.abandon(execution)


def is_overdue(execution: Execution, now: float) -> bool:
    """Whether its handler has used up its timeout. While the engine's database is away, waiting for it counts too."""
    timeout = execution.handler.timeout
    if timeout is None or not execution.started or now - execution.started < timeout:
        return False
    if execution.outage is not None:
        return True
    pause = min((execution.run or execution).pause(now), max(timeout, LEAST_PROLONGED))
    return now - execution.started - pause >= timeout
