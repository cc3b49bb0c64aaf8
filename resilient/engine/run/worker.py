"""The worker: wires claiming, running and finishing into one process and stops them gracefully.

Threads and tasks: the event loop runs dispatcher, slots and completer; a thread of its own sends heartbeats, so that a
handler that blocks the loop is seen (and named in the log) instead of costing every other job its lease. Once the loop
has been blocked for longer than `BLOCKED_LIMIT` the heartbeat stops on purpose: the jobs move to other workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from resilient.core.alerts.rules import of_stuck_handlers
from resilient.core.base.errors import BadResourceKey, DatabaseUnreachable, SetupError
from resilient.core.base.loggers import apart, label_records, logger
from resilient.core.base.misfit import is_number, is_whole
from resilient.core.base.phrases import counted, nearest
from resilient.core.base.resource_key import check_pattern
from resilient.core.jobs.backoff import retry_pause
from resilient.core.jobs.outcomes import LEAST_STUCK
from resilient.engine.gates.gate import Gate
from resilient.engine.ground.counts import Figures
from resilient.engine.ground.garbage import rare_collections
from resilient.engine.ground.ground import DEFAULT_CONCURRENCY, GRACE, LEASE, STUCK_PATIENCE
from resilient.engine.ground.providers import warn_of_roots
from resilient.engine.ground.sessions import Transactions, Writer
from resilient.engine.ground.signals import SignalCount, hear
from resilient.engine.jobs.waiting import checked_timeout
from resilient.engine.run.backend import Wire
from resilient.engine.run.dispatcher import Dispatcher, Shares
from resilient.engine.run.execution import Execution, RunContext, WorkerLoop, elapsed
from resilient.engine.run.executor import Executor
from resilient.engine.run.heartbeat import DatabaseLink, Heartbeat, code_version
from resilient.engine.run.pipeline import Finisher, stuck_text
from resilient.engine.run.services import Attachment, Loop, Services, Wakeups, to_its_end
from resilient.engine.run.sweeper import Sweeper
from resilient.store.db.wake import AWAITED
from resilient.store.gates import resources
from resilient.store.inspect import health, workers
from resilient.store.jobs import leases

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from uuid import UUID

    from resilient.engine.ground.kinds import Handler
    from resilient.engine.run.execution import Features
    from resilient.engine.run.services import Service
    from resilient.store.jobs.claim import Claimed

log = logger("worker")
_MOST_SLOTS: Final = 100_000
_LONGEST_SPAN: Final = 1e8  # seconds
_LEAST: Final = {"lease": 0.1}  # seconds; four beats fit into it, and each is a transaction
UNSAID: Final = 2.0  # seconds for which a worker that stops waits for its results without a word
LAST_PATIENCE: Final = 5.0  # seconds for which one that was told so twice goes on trying to save them


class Worker:
    """Runs jobs until told to stop. ``lease`` and ``grace`` are seconds; see `Resilient.worker`."""

    def __init__(
        self,
        features: Features,
        *,
        concurrency: int = DEFAULT_CONCURRENCY,
        kinds: Sequence[str] | None = None,
        except_kinds: Sequence[str] = (),
        resources: Sequence[str] = (),
        lease: float = LEASE,
        grace: float = GRACE,
        patience: float = STUCK_PATIENCE,
        rng: random.Random | None = None,
    ) -> None:
        ground = features.ground
        _check(concurrency, kinds, except_kinds, ground.kinds)
        self.resources = _patterns(resources)
        warn_of_roots(self.resources, ground.providers)
        _check_seconds(lease=lease, grace=grace, patience=patience)
        self._features, self._ground = features, ground
        label_records()
        self.id = f"{socket.gethostname()[:80]}:{os.getpid()}:{secrets.token_hex(3)}"
        self.kinds = tuple(kind for kind in kinds or ground.kinds if kind not in except_kinds)
        self.concurrency, self.grace = concurrency, grace
        self.lease = timedelta(seconds=lease)
        self.rng = rng or random.Random()  # noqa: S311 - jitter
        self.monotonic = time.monotonic
        self._loop = WorkerLoop(self.id)
        self._wake = asyncio.Event()
        self._watched = False  # somebody waits until an execution has ended
        self._is_claiming = False
        self._stopping = asyncio.Event()
        self._handed_back = asyncio.Event()
        self._signals = SignalCount(self.monotonic)
        self._told = (datetime.now(UTC), leases.clock())
        self._notes: set[asyncio.Task[None]] = set()
        self.executions = 0
        self._make_parts(patience)

    def _make_parts(self, patience: float) -> None:
        features, ground, roll = self._features, self._ground, self.rng.random
        self.gate = Gate(
            ground.database, ground.policies, owner=self.id, rng=self.rng, on_change=features.alerts.note_breaker,
            on_cooldown=ground.note_cooldown,
        )  # fmt: skip
        self.wire = Wire(features, self.kinds, self.gate, self._loop, self.now)
        self.context = RunContext(
            ground=ground, on_loop=Transactions(ground), in_threads=Transactions(ground, here=True), worker_id=self.id,
            gate=self.gate, sessions=features.sessions, writer=Writer(), patience=patience, now=self.now, roll=roll,
            app=features.app, deps=features.deps,
        )  # fmt: skip
        self.threads = ThreadPoolExecutor(self.concurrency + max(LEAST_STUCK, self.concurrency), "resilient-handler")
        self.finisher = Finisher(self.context, features, self.wire, on_end=self._ended, on_written=self._written)
        self.completer = self.finisher.completer
        self.executor = Executor(
            self.concurrency, self.threads, self.wire, on_done=self.finisher.conclude, on_stuck=self._stuck,
            patience=patience,
        )  # fmt: skip
        self.dispatcher = Dispatcher(
            ground.database,
            worker_id=self.id,
            kinds=self.kinds,
            concurrency=self.concurrency,
            lease=self.lease,
            policies=ground.policies,
            monotonic=self.monotonic,
            rng=self.rng,
            batches={kind: size for kind in self.kinds if (size := ground.kinds[kind].batch)},
            resources=self.resources,
        )
        self.shares = Shares(self.concurrency, self.monotonic)
        self.dispatcher.rooms, self.dispatcher.stated = self.shares.rooms, self.gate.stated.limits
        self.dispatcher.budgets = self.gate.budgets_by_kind
        self.completer.on_saved = ground.waker.tell_ended
        self.link = DatabaseLink()
        self.dispatcher.fleet = lambda: self.link.fleet
        self.sweeper = Sweeper(features, self.link, lease=self.lease, wake=self.wake, now=self.now, roll=roll)
        self.heartbeat = Heartbeat(
            ground.database, self.id, self.lease, self.link, self, self.executor, features.alerts.outage, ground.counts
        )

    def _services(self, *, background: bool = True) -> Services:
        """What runs while this worker does; with ``background`` also what looks by itself.

        The heartbeat is first: if the database does not answer, there is nothing to close yet. The executor is closed
        before what it hands its results to.
        """
        if self.executor.closed:
            raise SetupError(f"worker {self.id} has run and ended: make another one with app.worker(...)")
        ground, features = self._ground, self._features
        services: list[Service] = [
            Attachment(self._loop.attach, _nothing),
            self.heartbeat,
            Attachment(_nothing, self._shut_threads),
            Attachment(_nothing, partial(self._leave_alerts, background=background)),
            Attachment(_nothing, self.wire.close),
            self.gate,
            self.completer,
            self.executor,
        ]
        if background:
            changed, listen_url = self._gates_changed, features.listen_url
            services.append(Wakeups(ground.database, self._wake.set, changed, listen_url, self.rng.random, self.id))
            services += self.sweeper.loops()
        services.append(Attachment(partial(ground.workers.add, self), partial(ground.workers.discard, self)))
        return Services(services)

    async def _leave_alerts(self, *, background: bool) -> None:
        alerts = self._features.alerts
        alerts.outage.leave(self.id, reached=self.heartbeat.is_answered)
        if background:
            await alerts.close()  # the process may end with this worker

    def _shut_threads(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)

    def _gates_changed(self, keys: Sequence[str]) -> None:
        """Another process shut or opened these gates, or waits for jobs."""
        if AWAITED in keys:
            self._ground.waker.note_awaited()
        self.gate.forget(keys)

    # -- life -----------------------------------------------------------------------------------------------------

    async def run(self, *, signals: bool = True) -> None:
        """Work until `stop` (or a signal, see `hear`); then finish or hand back what is running, and return.

        ``signals=False`` in a process that is not the worker's alone: signals and garbage collection stay as they are.
        """
        loop = asyncio.get_running_loop()
        leave = hear(loop, self._signalled) if signals else None
        try:
            if not await self._until_ready():
                return
            with rare_collections() if signals else contextlib.nullcontext():
                await self._run()
        finally:
            self._features.alerts.outage.leave(self.id, reached=False)  # it may end before its services begin
            if leave is not None:
                leave()
        log.info("worker %s stopped after %s", self.id, counted(self.executions, "execution"))

    async def _until_ready(self) -> bool:
        """Wait for a database that is away; False if the worker was stopped meanwhile. Raises `SetupError`."""
        tries, began, outage = 0, self.monotonic(), self._features.alerts.outage
        while not self._stopping.is_set():
            try:
                await self._ground.ready()
                await self._features.grants.accounts.check_keys()
                await self._look_for_room()
                await self._look_for_accounts()
                await self._ground.database.call(self.heartbeat.sign_on)
            except DatabaseUnreachable as error:
                if tries in (0, 5) or tries % 30 == 0:
                    log.warning("worker %s waits for the database: %s", self.id, error)
                outage.unanswered(self.id, self.monotonic() - began, str(error))
                await self._wake_or(retry_pause(tries, self.rng.random()))
                tries += 1
            else:
                return True
        return False

    async def _look_for_room(self) -> None:
        """Say it now if the server has no room for this process's connections."""
        database = self._ground.database
        if database.is_sqlite or not database.is_own:
            return
        server, most = await database.transaction(health.server), database.connections.most
        if server.room and server.sessions + most > server.room:
            log.warning(
                "the database has %d connections for everybody, %d are in use, and this worker may open %d: it waits"
                " whenever there is none (raise max_connections, or lower Resilient(connections=...))",
                server.room, server.sessions, most,
            )  # fmt: skip

    async def _look_for_accounts(self) -> None:
        """Whether an account could be in the way of others, before the first claim; later ones are met there."""
        if not self.shares.is_shared:
            self.shares.is_shared = await self._ground.database.transaction(resources.has_accounts)

    async def _run(self) -> None:
        async with self._services():
            where = f", resources {', '.join(self.resources)}" if self.resources else ""
            log.info("worker %s started: %d slots, kinds %s%s", self.id, self.concurrency, ", ".join(self.kinds), where)
            claiming = Loop("claiming", self._claim_step, self.rng.random, rest=self._wake_or)
            await to_its_end("claiming", claiming.run(self._stopping.is_set), stop=self._stop_claiming)
            await self._wind_down()

    async def drain(self, *, timeout: float | None = None) -> int:  # noqa: ASYNC109 - the caller's bound
        """Run until nothing is ready or running any more (what is due later, blocked or parked stays); for tests.

        Returns how many executions ended.
        """
        seconds = checked_timeout(timeout)
        await self._ground.ready()
        await self._features.grants.accounts.check_keys()
        await self._look_for_accounts()
        before, self._watched = self.ended, True
        async with asyncio.timeout(seconds), self._services(background=False):
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

    def _stop_claiming(self) -> bool:
        """`stop`; whether a claim is under way, whose jobs nobody knows yet."""
        self.stop()
        return self._is_claiming

    def hand_back(self) -> None:
        """Stop without waiting for what runs: it is handed back at once. Call it from the worker's loop."""
        self.grace = 0.0
        self._handed_back.set()
        self._interrupt_all()
        self.stop()

    def _signalled(self) -> None:
        number = self._signals.next()
        if number == 0:
            return
        if number > 1:
            self.hand_back()
        running = counted(len(self.executor.running), "job still runs", "jobs still run")
        log.info("worker %s is stopping: %s", self.id, running)
        self.stop()

    # -- claiming -------------------------------------------------------------------------------------------------

    async def _claim_step(self) -> float:
        """Claim once if it is worth it; returns how long to wait before the next step."""
        self.dispatcher.ended(self.ended - self.executor.beside)
        slots = 0 if self.executor.wants_quiet else self.dispatcher.slots_to_claim(self.executor.slots_in_use)
        self._watched = slots <= 0
        if self._watched:
            return 0.005 if self.executor.running else 0.05
        if self.completer.full:  # not awaited: the database may be away for hours, and a signal must be heard
            return 0.05
        self._wake.clear()
        claimed, delay = await self._take(slots)
        if claimed is not None:
            if claimed.stops:
                self.sweeper.parked(claimed.stops.values())
            await asyncio.sleep(0)
        return delay

    async def _claim_all(self) -> int:
        """Claim until a look brings nothing; for `drain`."""
        total = 0
        for _ in range(1000):
            slots = self.concurrency - self.executor.slots_in_use
            if slots <= 0 or self.executor.wants_quiet:
                return total
            claimed, delay = await to_its_end("claiming", self._take(slots))
            if claimed is not None:
                total += len(claimed.jobs)
            elif delay > 0:
                return total
        return total

    async def _claim(self, slots: int) -> tuple[Claimed | None, float]:
        """One look of the dispatcher, past what has its share of this worker."""
        has_share = self.shares.look(self.executor.running.values(), self.dispatcher.least_free)
        self.dispatcher.avoid = self.executor.crowded | has_share | self._features.grants.missing_keys.resources
        claimed, delay = await self.dispatcher.poll(slots)
        if claimed is not None and claimed.full:
            self.shares.passed(claimed.full)
        return claimed, delay

    async def _take(self, slots: int) -> tuple[Claimed | None, float]:
        """Give a look's jobs to the slots. To its end: a worker that is cancelled hands back only what it knows of."""
        self._is_claiming = True
        try:
            claimed, delay = await self._claim(slots)
            if claimed is not None:
                self._submit(claimed)
        finally:
            self._is_claiming = False
        return claimed, delay

    def _submit(self, claimed: Claimed) -> None:
        self.gate.learn(claimed.facts, claimed.now)
        self.executions += len(claimed.jobs)
        context, handlers, probes = self.context, self._ground.kinds, claimed.probes
        for row in claimed.jobs:
            self.executor.submit(Execution(context, row, handlers[row.kind], probes.get(row.id, ())), claimed.since)

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
        self._loop.call_soon(self._wake.set)

    # -- deciding -------------------------------------------------------------------------------------------------

    @property
    def ended(self) -> int:
        """How many executions have ended."""
        return self.finisher.ended

    @property
    def outcomes(self) -> dict[str, int]:
        """How many ended how."""
        return self.finisher.outcomes

    def _ended(self, execution: Execution) -> None:
        seconds, counts, row = elapsed(execution), self._ground.counts, execution.row
        counts.durations[row.kind].observe(seconds)
        if execution.started:
            counts.waits[row.kind].observe(max(0.0, self._age(row.run_at) - seconds))
        if self.shares.ended(execution.resource_key, seconds) or self._watched:
            self._wake.set()

    def _written(self, is_followed: bool, is_released: bool) -> None:  # noqa: FBT001 - a callback
        if is_followed:
            self.sweeper.nudge()  # it may be a step of a workflow
        if is_released:  # what waited for them may be ready now
            self._wake.set()

    def _stuck(self, execution: Execution) -> None:
        """Its handler does not end: raise an alert, and note it on the job's row."""
        text = f"{stuck_text(execution)}; it runs on in worker {self.id}"
        since = self.now() - timedelta(seconds=asyncio.get_running_loop().time() - execution.cancelled_at)
        alert = of_stuck_handlers(execution.row.kind, 1, str(execution.id), execution.resource_key, since)
        try:
            self._features.alerts.add(alert)
        except Exception:
            log.exception("the alert failed over job %s", execution.id)
        task = asyncio.get_running_loop().create_task(
            self._note(execution, text), name="resilient-stuck", context=apart()
        )
        self._notes.add(task)
        task.add_done_callback(self._notes.discard)

    async def _note(self, execution: Execution, text: str) -> None:
        try:
            await self._ground.database.transaction(leases.note_stuck_if_held, execution.id, execution.fence, text)
        except Exception as error:  # noqa: BLE001 - the database may be away; the log and the alert say it too
            log.debug("that job %s is stuck is not written (%s)", execution.id, type(error).__name__)

    def now(self) -> datetime:
        """The database's time, as last told plus what has passed since: workers' clocks may be hours apart."""
        if (clock := self._ground.database.dialect.clock) is not None:
            return clock()
        database_time, at = self._told
        return database_time + timedelta(seconds=leases.clock() - at)

    def _age(self, moment: datetime) -> float:
        """Seconds since then; what `now` says, without making a time for each job."""
        if (clock := self._ground.database.dialect.clock) is not None:
            return (clock() - moment).total_seconds()
        database_time, at = self._told
        return (database_time - moment).total_seconds() + leases.clock() - at

    def synchronise(self, database_time: datetime, at: float) -> None:
        """Take the database's time, read at the time ``at`` of `leases.clock`: a machine that sleeps counts on."""
        self._told = (database_time, at)

    @property
    def stopping(self) -> bool:
        """Whether it claims nothing more."""
        return self._stopping.is_set()

    def facts(self) -> workers.Beat:
        """What it says of itself with each heartbeat."""
        return workers.Beat(
            id=self.id,
            host=socket.gethostname()[:255],
            pid=os.getpid(),
            kinds=list(self.kinds),
            concurrency=self.concurrency,
            running=len(self.executor.running),
            code_version=code_version(),
            stopping=self.stopping,
            resources=list(self.resources),
            loop_lag=round(self.heartbeat.lag, 3),
        )

    def figures(self) -> Figures:
        """How it stands; from any thread."""
        running = len(self.executor.running)
        return Figures(running, self.concurrency, self.completer.stale, self.heartbeat.lag)

    def fences(self) -> list[tuple[UUID, int]]:
        """Every job this worker holds, with its fence (heartbeat)."""
        executor, unwritten = self.executor, self.finisher.unwritten
        executions = [*unwritten.values(), *executor.running.values(), *executor.aside.values()]
        latest = {e.number: e for e in executions if not e.lost}
        return [(e.id, e.fence) for e in latest.values()]

    # -- stopping -------------------------------------------------------------------------------------------------

    async def _wind_down(self) -> None:
        """Hand back what waits for a slot, give what runs its grace, hand back the rest, write all results."""
        self._watched = True
        for execution in [e for e in self.executor.running.values() if not e.started]:
            self.executor.interrupt(execution, "stop")
        began = self.monotonic()
        while self.executor.running and (rest := began + self.grace - self.monotonic()) > 0:  # `hand_back` ends it
            await self._wake_or(min(0.05, rest))
            self._wake.clear()
        self._interrupt_all()
        deadline = self.monotonic() + 5.0
        while any(not e.thread for e in self.executor.running.values()) and self.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for execution in [*self.executor.running.values(), *self.executor.aside.values()]:  # that will not stop
            if not execution.over:
                log.warning(
                    "job %s (%s) does not stop; it goes on elsewhere, and what it still does here is refused",
                    execution.id,
                    execution.row.kind,
                )
            self.executor.abandon(execution)
        await self._save_results()

    async def _save_results(self) -> None:
        """Wait until results are written, however long their database is away; a second signal ends that."""
        flushed = asyncio.create_task(self.completer.flushed())
        handed_back = asyncio.create_task(self._handed_back.wait())
        try:
            await asyncio.wait([flushed, handed_back], timeout=UNSAID, return_when=asyncio.FIRST_COMPLETED)
            if not flushed.done() and not handed_back.done():
                log.warning(
                    "worker %s stops once %s can be saved; another signal leaves them, and their jobs run again",
                    self.id, counted(len(self.finisher.unwritten), "result"),
                )  # fmt: skip
                await asyncio.wait([flushed, handed_back], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([flushed], timeout=LAST_PATIENCE)
            if not flushed.done():
                log.error(
                    "worker %s leaves %s unsaved, because its database does not answer: their jobs run again once their"
                    " leases end (first: job %s)",
                    self.id, counted(len(self.finisher.unwritten), "result"), self._first_unwritten(),
                )  # fmt: skip
                await self.completer.abandon()
        finally:
            flushed.cancel()
            handed_back.cancel()

    def _first_unwritten(self) -> UUID | None:
        return next((execution.id for execution in self.finisher.unwritten.values()), None)

    def _interrupt_all(self) -> None:
        for execution in list(self.executor.running.values()):
            self.executor.interrupt(execution, "stop")


def _nothing() -> None:
    """Nothing to start, or nothing to close."""


def _check(
    concurrency: int,
    kinds: Sequence[str] | None,
    except_kinds: Sequence[str],
    handlers: Mapping[str, Handler[Any, Any]],
) -> None:
    """Raise `SetupError` for what no worker can be."""
    if not is_whole(concurrency, most=_MOST_SLOTS):
        raise SetupError(f"concurrency must be a whole number from 1 to {_MOST_SLOTS:,}, not {concurrency!r}")
    if isinstance(kinds, str) or isinstance(except_kinds, str):
        raise SetupError("kinds and except_kinds are lists of kinds, such as ['mail.send']")
    if unknown := {*(kinds or ()), *except_kinds} - set(handlers):
        names, word = ", ".join(sorted(handlers)) or "none", min(unknown)
        raise SetupError(
            f"no handler is declared for {word!r}{nearest(word, handlers)}; those of this app are: {names}"
        )
    if not handlers:
        raise SetupError("this app declares no handlers: list them in Resilient(handlers=[...])")
    if set(kinds or handlers) <= set(except_kinds):
        raise SetupError("this worker would run no kind at all: except_kinds (--except-kind) names all of its kinds")


def _patterns(resources: Sequence[str]) -> tuple[str, ...]:
    """The patterns of the resources that a worker serves. Raises `SetupError`."""
    if isinstance(resources, str):
        raise SetupError("resources is a list of patterns, such as ['github/*']")
    try:
        return tuple(dict.fromkeys(map(check_pattern, resources)))
    except BadResourceKey as error:
        raise SetupError(str(error)) from None


def _check_seconds(**spans: float) -> None:
    """Raise `SetupError` for what is no length of time."""
    for name, seconds in spans.items():
        least = _LEAST.get(name, 0.0)
        if not is_number(seconds) or not least <= seconds <= _LONGEST_SPAN:
            raise SetupError(f"{name} is a number of seconds from {least:g} to {_LONGEST_SPAN:,.0f}, not {seconds!r}")


def exit_if_stuck(worker: Worker) -> None:
    """End a process whose handlers never end; otherwise the interpreter would wait for them for ever.

    Call it on the worker's loop, once `Worker.run` has returned and nothing else is left to do.
    """
    if worker.executor.stuck:
        log.error("%d handlers never ended; the process ends without them", len(worker.executor.stuck))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
