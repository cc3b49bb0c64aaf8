"""The worker: wires claiming, running and finishing into one process and stops them gracefully.

Threads and tasks: the event loop runs dispatcher, slots and completer; a thread of its own sends heartbeats, so that a
handler that blocks the loop is seen (and named in the log) instead of costing every other job its lease. Once the loop
has been blocked for longer than `BLOCKED_LIMIT` the heartbeat stops on purpose: the jobs move to other workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import secrets
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

from resilient.core.alerts import of_stuck_handlers
from resilient.core.decide import decide
from resilient.core.errors import DatabaseUnreachable, LostLease, ResourceStopped, SetupError
from resilient.core.outcomes import Outcome, Succeeded
from resilient.core.phrases import counted, error_line
from resilient.core.states import TERMINAL
from resilient.core.stuck import LEAST_STUCK
from resilient.engine.away import retry_pause
from resilient.engine.collector import rare_collections
from resilient.engine.completer import Completer
from resilient.engine.defaults import DEFAULT_CONCURRENCY, GRACE, LEASE, STUCK_PATIENCE
from resilient.engine.dispatcher import Dispatcher
from resilient.engine.endings import broken, finish_of, stuck_text
from resilient.engine.execution import Execution
from resilient.engine.executor import Executor
from resilient.engine.gate import Gate
from resilient.engine.heartbeat import sign_on
from resilient.engine.services import Services
from resilient.engine.sweeper import Sweeper
from resilient.engine.user_sessions import Writer
from resilient.engine.wiring import Wire
from resilient.store import health, leases

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from uuid import UUID

    from resilient.engine.app import Resilient
    from resilient.store.claim import Claimed

T = TypeVar("T")
log = logging.getLogger("resilient.worker")
_WAITS: Final = frozenset({"defer", "handed_back"})
LOOP_LOOK: Final = 1.0  # seconds between two looks of a waiting thread whether the loop is still there


class Worker:
    """Runs jobs until told to stop. ``lease`` and ``grace`` are seconds; see `Resilient.worker`."""

    def __init__(
        self,
        app: Resilient,
        *,
        concurrency: int = DEFAULT_CONCURRENCY,
        kinds: Sequence[str] | None = None,
        lease: float = LEASE,
        grace: float = GRACE,
        patience: float = STUCK_PATIENCE,
        rng: random.Random | None = None,
    ) -> None:
        if concurrency < 1:
            raise SetupError(f"concurrency must be at least 1, not {concurrency}")
        if unknown := set(kinds or ()) - set(app.kinds):
            known = ", ".join(sorted(app.kinds)) or "none"
            raise SetupError(f"no handler is declared for {min(unknown)!r}; those of this app are: {known}")
        if not app.kinds:
            raise SetupError("this app declares no handlers: list them in Resilient(handlers=[...])")
        self.app = app
        self.id = f"{socket.gethostname()[:80]}:{os.getpid()}:{secrets.token_hex(3)}"
        self.kinds = tuple(kinds or app.kinds)
        self.concurrency, self.grace = concurrency, grace
        self.lease = timedelta(seconds=lease)
        self.rng = rng or random.Random()  # noqa: S311 - jitter
        self.monotonic = time.monotonic
        self.gate = Gate(
            app.database, app.policies, owner=self.id, rng=self.rng, on_change=app.circuit_changed,
            on_cooldown=app.cooled_down,
        )  # fmt: skip
        self.wire = Wire(self)
        self.writer = Writer()
        self.threads = ThreadPoolExecutor(concurrency + max(LEAST_STUCK, concurrency), "resilient-handler")
        self.completer = Completer(
            app.database, self.gate.capped, self._written, self._refused, app.poke, roll=self.rng.random
        )
        self.patience = patience
        self.executor = Executor(
            concurrency, self.threads, on_done=self._done, on_stuck=self._stuck, patience=patience, before=self._stopped
        )
        self.dispatcher = Dispatcher(
            app.database,
            worker_id=self.id,
            kinds=self.kinds,
            concurrency=concurrency,
            lease=self.lease,
            policies=app.policies,
            monotonic=self.monotonic,
            rng=self.rng,
            batches={kind: size for kind in self.kinds if (size := app.kinds[kind].batch)},
        )
        self.sweeper = Sweeper(self)
        self.loop: asyncio.AbstractEventLoop | None = None  # while it runs, and after
        self._wake = asyncio.Event()
        self.signed_on = False  # it has reached the database once
        self.is_cut_off = False  # the latest heartbeat did not reach the database
        self.back_at = -1e9  # when a heartbeat did again, after some that did not
        self._watched = False  # somebody waits until an execution has ended
        self._stopping = asyncio.Event()
        self._told = (datetime.now(UTC), self.monotonic())
        self._notes: set[asyncio.Task[None]] = set()
        self._unwritten: dict[int, Execution] = {}  # decided, not yet committed: their leases still matter
        self.ended = 0
        self.executions = 0
        self.outcomes: dict[str, int] = {}

    # -- life -----------------------------------------------------------------------------------------------------

    async def run(self, *, signals: bool = True) -> None:
        """Work until `stop` (or SIGTERM, SIGINT); then finish or hand back what is running, and return.

        ``signals=False`` in a process that is not the worker's alone: signals and garbage collection stay as they are.
        """
        loop = asyncio.get_running_loop()
        handled = self._on_signals(loop) if signals else []
        try:
            if not await self._until_ready():
                return
            with rare_collections() if signals else contextlib.nullcontext():
                await self._run()
        finally:
            for number in handled:
                loop.remove_signal_handler(number)
        log.info("worker %s stopped after %d executions", self.id, self.executions)

    async def _until_ready(self) -> bool:
        """Wait for a database that is away; False if the worker was stopped meanwhile. Raises `SetupError`."""
        tries, began, outage = 0, self.monotonic(), self.app.alerts.outage
        while not self._stopping.is_set():
            try:
                await self.app.ready()
                await self.app.grants.accounts.check_keys()
                await self._look_for_room()
                await asyncio.to_thread(sign_on, self)
            except DatabaseUnreachable as error:
                if tries in (0, 5) or tries % 30 == 0:
                    log.warning("worker %s waits for the database: %s", self.id, error)
                outage.unanswered(self.id, self.monotonic() - began, str(error))
                await self._wake_or(retry_pause(tries, self.rng.random()))
                tries += 1
            else:
                return True
        outage.left(self.id, reached=False)
        return False

    async def _look_for_room(self) -> None:
        """Say it now if the server has no room for this process's connections."""
        database = self.app.database
        if database.is_sqlite or not database.is_own:
            return
        server, most = await database.transaction(health.server), database.connections.most
        if server.room and server.sessions + most > server.room:
            log.warning(
                "the database has %d connections for everybody, %d are in use, and this worker may open %d: it waits"
                " whenever there is none (raise max_connections, or lower Resilient(connections=...))",
                server.room, server.sessions, most,
            )  # fmt: skip

    async def _run(self) -> None:
        async with Services(self):
            log.info("worker %s started: %d slots, kinds %s", self.id, self.concurrency, ", ".join(self.kinds))
            await self._claim_until_stopped()
            await self._wind_down()

    async def drain(self, *, timeout: float | None = None) -> int:  # noqa: ASYNC109 - the caller's bound
        """Run until nothing is ready or running any more (what is due later, blocked or parked stays); for tests.

        Returns how many executions ended.
        """
        await self.app.ready()
        await self.app.grants.accounts.check_keys()
        before, self._watched = self.ended, True
        async with asyncio.timeout(timeout), Services(self, background=False):
            while True:
                staged = await self.sweeper.stage()
                claimed = await self._claim_all()
                while self.executor.running:
                    await self._wake_or(0.01)
                await self.completer.flushed()
                await self.gate.flush()
                if not staged and not claimed and not await self._claim_all():
                    if self.executor.running:
                        continue
                    break
            await self._wind_down()
        return self.ended - before

    def stop(self) -> None:
        """Claim nothing more, then finish or hand back what is running. Call it from the worker's loop."""
        self._stopping.set()
        self._wake.set()

    def _on_signals(self, loop: asyncio.AbstractEventLoop) -> list[int]:
        handled: list[int] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            try:
                loop.add_signal_handler(number, self._signalled)
                handled.append(number)
            except (NotImplementedError, RuntimeError, ValueError):  # not the main thread, or Windows
                break
        return handled

    def _signalled(self) -> None:
        if self._stopping.is_set():  # the second time: hand back now
            self.grace = 0.0
            self._interrupt_all()
        running = counted(len(self.executor.running), "job still runs", "jobs still run")
        log.info("worker %s is stopping: %s", self.id, running)
        self.stop()

    # -- claiming -------------------------------------------------------------------------------------------------

    async def _claim_until_stopped(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            try:
                delay = await self._claim_step()
                failures = 0
            except Exception as error:  # noqa: BLE001 - the database may be away; the worker stays
                delay = retry_pause(failures, self.rng.random())
                failures += 1
                if failures in (1, 5) or failures % 30 == 0:
                    log.warning("cannot claim (%s: %s); trying again in %.1f s", type(error).__name__, error, delay)
                await asyncio.sleep(delay)
                continue
            if delay > 0:
                await self._wake_or(delay)

    async def _claim_step(self) -> float:
        """Claim once if it is worth it; returns how long to wait before the next step."""
        self.dispatcher.ended(self.ended - self.executor.beside)
        self.dispatcher.avoid = self.executor.crowded
        slots = 0 if self.executor.wants_quiet else self.dispatcher.wanted(self.executor.taken)
        self._watched = slots <= 0
        if self._watched:
            return 0.005 if self.executor.running else 0.05
        if self.completer.full:
            await self.completer.room()
        self._wake.clear()
        claimed, delay = await self.dispatcher.poll(slots)
        if claimed is not None:
            self._submit(claimed)
            if claimed.stops:
                self.sweeper.parked(claimed.stops.values())
            await asyncio.sleep(0)
        return delay

    async def _claim_all(self) -> int:
        """Claim until a look brings nothing; for `drain`."""
        total = 0
        for _ in range(1000):
            slots, self.dispatcher.avoid = self.concurrency - self.executor.taken, self.executor.crowded
            if slots <= 0 or self.executor.wants_quiet:
                return total
            claimed, delay = await self.dispatcher.poll(slots)
            if claimed is not None:
                self._submit(claimed)
                total += len(claimed.jobs)
            elif delay > 0:
                return total
        return total

    def _submit(self, claimed: Claimed) -> None:
        self.gate.learn(claimed.facts, claimed.now)
        self.executions += len(claimed.jobs)
        handlers = self.app.kinds
        for row in claimed.jobs:
            self.executor.submit(Execution(self, row, handlers[row.kind], claimed.probes.get(row.id, ())))

    async def _wake_or(self, delay: float) -> None:
        if self._wake.is_set():
            await asyncio.sleep(0)
        else:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._wake.wait()
        self._wake.clear()

    def wake(self) -> None:
        """There may be work; call it from any thread."""
        loop = self.loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._wake.set)

    def from_thread(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the worker's loop, for a handler in a thread, and wait for it."""
        loop = self.loop
        if loop is None or loop.is_closed():
            coroutine.close()
            raise LostLease(f"worker {self.id} has stopped")
        future = asyncio.run_coroutine_threadsafe(coroutine, loop)
        while True:
            try:
                return future.result(LOOP_LOOK)
            except TimeoutError:
                if future.done():  # the coroutine's own
                    raise
                if loop.is_closed():  # nobody will ever run it
                    coroutine.close()
                    raise LostLease(f"worker {self.id} has stopped") from None

    # -- deciding -------------------------------------------------------------------------------------------------

    def _stopped(self, execution: Execution) -> ResourceStopped | None:
        """The gate once more, right before the start: it may have closed since the claim."""
        stop = self.gate.stop(execution.resource_key, probes=execution.probes)
        return None if stop is None else ResourceStopped(stop.resource, stop.gate, stop.until)

    def _done(self, execution: Execution, outcome: Outcome) -> None:
        """An execution is over: what it came to goes to the completer."""
        self.ended += 1
        self._unwritten[execution.number] = execution
        if isinstance(outcome, Succeeded):
            result = outcome.result
            self._count("succeeded")
            if outcome.written:
                self.completer.written += 1
                self._written([execution.id], released=True)
            else:
                if execution.follow_ups is not None:
                    self.completer.follow(execution.id, execution.follow_ups)
                self.completer.succeed(execution.id, execution.fence, result, execution.resource_key)
        else:
            self._decide(execution, outcome)
        self._tell(self.wire.ended, execution, outcome)
        if self._watched:
            self._wake.set()

    def _stuck(self, execution: Execution) -> None:
        """Its handler does not end: people are told, and its row says so."""
        text = f"{stuck_text(execution)}; it runs on in worker {self.id}"
        since = self.now() - timedelta(seconds=asyncio.get_running_loop().time() - execution.cancelled_at)
        found = of_stuck_handlers(execution.row.kind, 1, str(execution.id), execution.resource_key, since)
        self._tell(lambda *_: self.app.alerts.found(found), execution, None)
        task = asyncio.get_running_loop().create_task(self._note(execution, text), name="resilient-stuck")
        self._notes.add(task)
        task.add_done_callback(self._notes.discard)

    async def _note(self, execution: Execution, text: str) -> None:
        try:
            await self.app.database.transaction(leases.note_stuck_if_held, execution.id, execution.fence, text)
        except Exception as error:  # noqa: BLE001 - the database may be away; the log and the alert say it too
            log.debug("that job %s is stuck is not written (%s)", execution.id, type(error).__name__)

    def _decide(self, execution: Execution, outcome: Outcome) -> None:
        now = self.now()
        facts, retry, roll = execution.facts(), execution.handler.retry, self.rng.random()
        try:
            transition = decide(facts, outcome, retry, now, roll)
        except BaseException as error:  # noqa: BLE001 - a handler said something impossible: a time that is none, say
            transition = decide(facts, broken(error), retry, now, roll)
        self._count(transition.decision)
        started = now - timedelta(seconds=max(0.0, self._elapsed(execution)))
        if execution.follow_ups is not None and transition.decision in ("succeeded", "once_more"):
            self.completer.follow(execution.id, execution.follow_ups)
        self.completer.finish(finish_of(execution, transition, self.id, started), execution.resource_key)
        level = logging.WARNING if transition.state in TERMINAL and transition.decision != "cancelled" else logging.INFO
        if transition.decision in _WAITS:  # its gate has told, once for all of them
            level = logging.DEBUG
        if log.isEnabledFor(level):
            log.log(
                level,
                "job %s (%s on %s): %s%s",
                execution.id,
                execution.row.kind,
                execution.resource_key,
                transition.decision,
                f": {error_line(transition.error_kind, transition.error_code, transition.error, 2_000)}"
                if transition.error
                else "",
            )
        self._tell(self.app.noticed, execution, transition)

    def _tell(self, hear: Callable[[Execution, Any], None], execution: Execution, what: Any) -> None:
        """Gate and alerts hear how it ended: counts may be lost, slots may not."""
        try:
            hear(execution, what)
        except Exception:
            log.exception("%s failed over job %s", getattr(hear, "__qualname__", hear), execution.id)

    def _elapsed(self, execution: Execution) -> float:
        return asyncio.get_running_loop().time() - execution.started if execution.started else 0.0

    def _count(self, decision: str) -> None:
        self.outcomes[decision] = self.outcomes.get(decision, 0) + 1

    def _written(self, ids: Sequence[UUID], released: bool) -> None:  # noqa: FBT001 - a callback
        for id_ in ids:
            execution = self._unwritten.pop(id_.int, None)
            if execution is not None and execution.row.followed:
                self.sweeper.nudge()  # it may be a step of a workflow
            released = released or (execution is not None and bool(execution.probes))
        if released:  # what waited for them may be ready now
            self._wake.set()

    def _refused(self, id_: UUID, error: Exception) -> None:
        """The follow-up jobs of a job cannot be written, so neither can its end: it has failed."""
        if (execution := self._unwritten.get(id_.int)) is not None:
            execution.follow_ups = None
            self._decide(execution, broken(error))

    def now(self) -> datetime:
        """The database's time, as last told plus what has passed since: workers' clocks may be hours apart."""
        if (clock := self.app.database.dialect.clock) is not None:
            return clock()
        told, at = self._told
        return told + timedelta(seconds=self.monotonic() - at)

    def synchronise(self, told: datetime, at: float) -> None:
        """Take the database's time, read at the monotonic time ``at``."""
        self._told = (told, at)

    @property
    def stopping(self) -> bool:
        """Whether it claims nothing more."""
        return self._stopping.is_set()

    def held(self) -> list[tuple[UUID, int]]:
        """Every job this worker holds, with its fence (heartbeat)."""
        known = {**self._unwritten, **self.executor.running, **self.executor.aside}
        return [(e.id, e.fence) for e in list(known.values()) if not e.lost]

    # -- stopping -------------------------------------------------------------------------------------------------

    async def _wind_down(self) -> None:
        """Drop what waits, give what runs its grace, hand the rest back, write everything."""
        self._watched = True
        for execution in [e for e in self.executor.running.values() if not e.started]:
            self.executor.interrupt(execution, "stop")
        deadline = self.monotonic() + self.grace
        while self.executor.running and self.monotonic() < deadline:
            await self._wake_or(min(0.05, max(0.0, deadline - self.monotonic())))
            self._wake.clear()
        self._interrupt_all()
        deadline = self.monotonic() + 5.0
        while any(not e.thread for e in self.executor.running.values()) and self.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for execution in [*self.executor.running.values(), *self.executor.aside.values()]:  # that will not stop
            log.warning(
                "job %s (%s) does not stop; it goes on elsewhere, and what it still does here is refused",
                execution.id,
                execution.row.kind,
            )
            self.executor.abandon(execution)
        await self.completer.flushed()

    def _interrupt_all(self) -> None:
        for execution in list(self.executor.running.values()):
            self.executor.interrupt(execution, "stop")
