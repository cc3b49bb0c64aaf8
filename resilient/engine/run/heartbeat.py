"""The heartbeat: a thread that keeps leases, tells the database's time, and watches the event loop.

It is a thread because a handler may block the loop. It names the blocking handler's line in the log, and after
`BLOCKED_LIMIT` seconds it stops renewing on purpose, so that the jobs move to workers that are alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import logging
import sys
import threading
import time
import traceback
from functools import cache
from typing import TYPE_CHECKING, Final, Protocol

from resilient.core.base.errors import DatabaseUnreachable
from resilient.core.base.loggers import logger
from resilient.engine.run.services import until_over
from resilient.store.db.direct import direct, operation, reserved
from resilient.store.inspect import throughput, workers
from resilient.store.jobs import leases

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import datetime, timedelta
    from uuid import UUID

    from sqlalchemy import Connection

    from resilient.engine.alerts import Outage
    from resilient.engine.ground.counts import Counts
    from resilient.engine.run.execution import Execution
    from resilient.engine.run.executor import Executor
    from resilient.store.db.database import Database
    from resilient.store.db.dialect import Dialect

log = logger("worker")
LONGEST_BEAT: Final = 5.0  # seconds; also how soon a cancel request reaches a running job
TICK: Final = 0.25  # seconds between two looks
SLOW: Final = 1.0  # seconds a beat may take
BLOCKED_WARNING: Final = 1.0
BLOCKED_LIMIT: Final = 300.0


class DatabaseLink:
    """How a worker reaches its database. ``back_at``: when a beat reached it again, after some that did not."""

    def __init__(self) -> None:
        self.monotonic = time.monotonic
        self.is_signed_on = False  # it was reached once
        self.is_cut_off = False  # the latest beat did not reach it
        self.back_at = -1e9
        self.fleet = 1  # workers that run the same kinds, as of the latest beat


class Pulse(Protocol):
    """The worker that a heartbeat beats for."""

    def facts(self) -> workers.Beat:
        """What it says of itself."""

    def fences(self) -> list[tuple[UUID, int]]:
        """Every job it holds, with its fence."""

    def synchronise(self, database_time: datetime, at: float) -> None:
        """Take the database's time, read at the time ``at`` of `leases.clock`."""


class Heartbeat:
    """Beats for one worker."""

    def __init__(
        self,
        database: Database,
        worker_id: str,
        lease: timedelta,
        link: DatabaseLink,
        pulse: Pulse,
        executor: Executor,
        outage: Outage,
        counts: Counts,
    ) -> None:
        self._database, self._worker_id, self._lease = database, worker_id, lease
        self._link, self._pulse, self._executor, self._outage = link, pulse, executor, outage
        self._counts = counts
        executor.lease = lease.total_seconds()
        self._interval = min(executor.lease / 4, LONGEST_BEAT)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="resilient-heartbeat", daemon=True)
        self._alive_at = 0.0  # when the loop last moved
        self._worst = self._worst_before = 0.0  # seconds it stood still: since the latest beat, and the one before
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._warned = False
        self._ticker: asyncio.TimerHandle | None = None
        self._unanswered_since: float | None = None  # when the first beat began that has had no answer
        self._error: str | None = None  # of the latest

    def sign_on(self) -> None:
        """Say that its worker is about to begin. Raises `DatabaseUnreachable`: of a standby too."""
        self._database.transaction_sync(beat, self._pulse.facts(), [], self._lease, leases.clock)
        self._link.is_signed_on = True

    async def start(self) -> None:
        """Register the worker and begin."""
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        try:
            await self._database.call(self._beat)
        except DatabaseUnreachable as error:
            if not self._link.is_signed_on:
                raise
            self._failed(error)
        self._tick()
        self._thread.start()

    async def close(self) -> None:
        """Stop beating and take the worker off the list."""
        if self._ticker is not None:
            self._ticker.cancel()
        self._stop.set()
        await until_over(lambda: not self._thread.is_alive(), 5.0)
        sums = self._counts.take_sums()
        try:
            await self._database.transaction(sign_off, self._worker_id, sums)
        except Exception as error:  # noqa: BLE001 - housekeeping removes it later
            self._counts.give_back(sums)
            log.debug("cannot sign off worker %s: %s", self._worker_id, type(error).__name__)

    @property
    def is_answered(self) -> bool:
        """Whether the database answered the latest beat, or still has time to."""
        since = self._unanswered_since
        return not self._link.is_cut_off and (since is None or self._link.monotonic() - since <= SLOW)

    @property
    def lag(self) -> float:
        """Seconds: the longest for which the event loop stood still since the last beat but one, or stands now."""
        now = self._link.monotonic() - self._alive_at - TICK if self._alive_at else 0.0
        return max(now, self._worst, self._worst_before)

    def _tick(self) -> None:
        if self._loop is None:
            return
        before, self._alive_at = self._alive_at, self._link.monotonic()
        self._warned = False
        if before:
            self._worst = max(self._worst, self._alive_at - before - TICK)
        try:
            self._report(self._alive_at, self._alive_at - before if before else 0.0)
        except Exception:
            log.exception("the engine failed over an alert of the database")
        self._ticker = self._loop.call_later(TICK, self._tick)

    def _report(self, now: float, passed: float) -> None:
        """Say how the database answers. Time in which this process or its loop stood still is not the database's."""
        since = self._unanswered_since
        if since is not None and passed > BLOCKED_WARNING:
            self._unanswered_since = since = since + passed
        if since is not None and (self._link.is_cut_off or now - since > SLOW):
            self._outage.unanswered(self._worker_id, now - since, self._error)
        elif since is None:
            self._outage.answered(self._worker_id, now)

    def _run(self) -> None:
        next_beat = self._link.monotonic() + self._interval
        while not self._stop.wait(TICK):
            try:
                blocked = self._link.monotonic() - self._alive_at
                if blocked > BLOCKED_WARNING and not self._warned:
                    self._warned = True
                    self._warn(blocked)
                if self._link.monotonic() < next_beat or blocked > BLOCKED_LIMIT:
                    continue
                next_beat = self._link.monotonic() + self._interval
                self._beat()
            except Exception as error:  # noqa: BLE001 - the database may be away; fences hold
                self._failed(error)

    def _failed(self, error: Exception) -> None:
        level = logging.DEBUG if self._link.is_cut_off else logging.WARNING  # a line for an outage, not for each beat
        self._link.is_cut_off, self._error = True, str(error)
        log.log(level, "heartbeat failed (%s: %s)", type(error).__name__, error)

    def _beat(self) -> None:
        link, fences = self._link, self._pulse.fences()
        if self._unanswered_since is None:
            self._unanswered_since = link.monotonic()
        row, run = self._pulse.facts(), self._database.transaction_sync
        self._worst, self._worst_before = 0.0, self._worst
        sums, began = self._counts.take_sums(), leases.clock()
        try:
            (now, at), renewed, versions, fleet = run(beat, row, fences, self._lease, leases.clock, sums)
        except BaseException:
            self._counts.give_back(sums)
            raise
        self._unanswered_since = self._error = None
        if link.is_cut_off:
            link.is_cut_off, link.back_at = False, link.monotonic()
            log.warning("worker %s reaches the database again", self._worker_id)
        self._pulse.synchronise(now, at)
        link.fleet = fleet
        reasons: dict[tuple[UUID, int], str] = {}
        for i, fence in fences:
            if i not in renewed and versions.get(i) != (fence, "running"):  # None: its row was deleted
                reasons[i, fence] = "lost"
            elif renewed.get(i):
                reasons[i, fence] = "cancel"
            if i in renewed and (execution := self._executor.find(i.int)) is not None and execution.fence == fence:
                execution.hold(began)
        if reasons and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it is closed
                self._loop.call_soon_threadsafe(self._tell, reasons)

    def _tell(self, reasons: dict[tuple[UUID, int], str]) -> None:
        """The fence too: the job may have ended and been claimed here again while the heartbeat was under way."""
        executor = self._executor
        for (id_, fence), reason in reasons.items():
            if (execution := executor.find(id_.int)) is not None and execution.fence == fence:
                executor.interrupt(execution, reason)

    def _warn(self, blocked: float) -> None:
        frame = sys._current_frames().get(self._loop_thread)  # noqa: SLF001 - the documented way to see another thread
        where = "".join(traceback.format_stack(frame)[-2:]).strip() if frame is not None else "unknown"
        running = [e for e in list(self._executor.running.values()) if e.started]
        log.warning("the event loop has been blocked for %.1f s %s. It is at %s", blocked, _suspects(running), where)


def _suspects(running: list[Execution]) -> str:
    """Who may block the loop, and what to do."""
    if not running:
        return "while no job ran: by this program beside its handlers, or because the machine is busy"
    one = f"job {running[0].row.kind}" if len(running) == 1 else f"one of {len(running)} running jobs"
    return f"by {one}: make the handler a plain def, or await its work"


@cache
def code_version() -> str:
    """The version that is installed. Reading it takes a millisecond of CPU: once a process."""
    try:
        return importlib.metadata.version("resilient-engine")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


@direct
@reserved
@operation("heartbeat")
def beat(
    c: Connection,
    d: Dialect,
    row: workers.Beat,
    fences: list[tuple[UUID, int]],
    lease: timedelta,
    clock: Callable[[], float],
    sums: Mapping[throughput.Series, int] | None = None,
) -> tuple[tuple[datetime, float], dict[UUID, bool], dict[UUID, tuple[int, str]], int]:
    """Renew what is held and say that the worker lives.

    Returns the database's time with that of this process's ``clock``, what was renewed, how the rest stands, and how
    many workers are like this one.
    """
    now = d.steer(c)
    at = clock()  # here: a connection may have been waited for
    renewed = leases.renew_if_held(c, d, fences, lease, now)
    missing = [i for i, _ in fences if i not in renewed]
    versions = leases.held_versions(c, d, missing) if missing else {}
    workers.beat(c, d, row, now)
    if sums:
        throughput.add(c, d, row.id, sums, now)
    return (now, at), renewed, versions, workers.count_alike(c, d, row.id, now)


def sign_off(c: Connection, d: Dialect, worker_id: str, sums: Mapping[throughput.Series, int]) -> None:
    """Delete the row of a worker that ends, and add up what it has counted since its last beat."""
    workers.remove(c, d, worker_id)
    if sums:
        throughput.add(c, d, worker_id, sums, d.now(c))
