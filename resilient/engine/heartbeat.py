"""The heartbeat: a thread that keeps leases, tells the database's time, and watches the event loop.

It is a thread because a handler may block the loop. It names the blocking handler's line in the log, and after
`BLOCKED_LIMIT` seconds it stops renewing on purpose, so that the jobs move to workers that are alive.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import os
import socket
import sys
import threading
import traceback
from functools import cache
from typing import TYPE_CHECKING, Final

from resilient.core.errors import DatabaseUnreachable
from resilient.store import leases, workers
from resilient.store.direct import reserved

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime, timedelta
    from uuid import UUID

    from sqlalchemy import Connection

    from resilient.engine.worker import Worker
    from resilient.store.dialect import Dialect

log = logging.getLogger("resilient.worker")
LONGEST_BEAT: Final = 5.0  # seconds; also how soon a cancel request reaches a running job
TICK: Final = 0.25  # seconds between two looks
SLOW: Final = 1.0  # seconds a beat may take
BLOCKED_WARNING: Final = 1.0
BLOCKED_LIMIT: Final = 300.0


class Heartbeat:
    """Beats for one worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._interval = min(worker.lease.total_seconds() / 4, LONGEST_BEAT)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="resilient-heartbeat", daemon=True)
        self._alive_at = 0.0  # when the loop last moved
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._warned = False
        self._ticker: asyncio.TimerHandle | None = None
        self._unanswered_since: float | None = None  # when the first beat began that has had no answer
        self._error: str | None = None  # of the latest

    async def start(self) -> None:
        """Register the worker and begin."""
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        try:
            await asyncio.to_thread(self._beat)
        except DatabaseUnreachable as error:
            if not self._worker.signed_on:
                raise
            self._failed(error)
        self._tick()
        self._thread.start()

    async def close(self) -> None:
        """Stop beating and take the worker off the list."""
        if self._ticker is not None:
            self._ticker.cancel()
        self._stop.set()
        await asyncio.to_thread(self._thread.join, 5)
        try:
            await self._worker.app.database.transaction(workers.remove, self._worker.id)
        except Exception as error:  # noqa: BLE001 - housekeeping removes it later
            log.debug("cannot sign off worker %s: %s", self._worker.id, type(error).__name__)

    @property
    def is_answered(self) -> bool:
        """Whether the database answered the latest beat, or still has time to."""
        since = self._unanswered_since
        return not self._worker.is_cut_off and (since is None or self._worker.monotonic() - since <= SLOW)

    def _tick(self) -> None:
        if self._loop is None:
            return
        before, self._alive_at = self._alive_at, self._worker.monotonic()
        self._warned = False
        self._report(self._alive_at, self._alive_at - before if before else 0.0)
        self._ticker = self._loop.call_later(TICK, self._tick)

    def _report(self, now: float, passed: float) -> None:
        """Say how the database answers. Time in which this process or its loop stood still is not the database's."""
        w, since = self._worker, self._unanswered_since
        if since is not None and passed > BLOCKED_WARNING:
            self._unanswered_since = since = since + passed
        if since is not None and (w.is_cut_off or now - since > SLOW):
            w.app.alerts.outage.unanswered(w.id, now - since, self._error)
        elif since is None:
            w.app.alerts.outage.answered(w.id, now)

    def _run(self) -> None:
        next_beat = self._worker.monotonic() + self._interval
        while not self._stop.wait(TICK):
            try:
                blocked = self._worker.monotonic() - self._alive_at
                if blocked > BLOCKED_WARNING and not self._warned:
                    self._warned = True
                    self._warn(blocked)
                if self._worker.monotonic() < next_beat or blocked > BLOCKED_LIMIT:
                    continue
                next_beat = self._worker.monotonic() + self._interval
                self._beat()
            except Exception as error:  # noqa: BLE001 - the database may be away; fences hold
                self._failed(error)

    def _failed(self, error: Exception) -> None:
        self._worker.is_cut_off, self._error = True, str(error)
        log.warning("heartbeat failed (%s: %s)", type(error).__name__, error)

    def _beat(self) -> None:
        w = self._worker
        held = w.held()
        if self._unanswered_since is None:
            self._unanswered_since = w.monotonic()
        (now, at), renewed, versions = w.app.database.transaction_sync(beat, _row(w), held, w.lease, w.monotonic)
        self._unanswered_since = self._error = None
        if w.is_cut_off:
            w.is_cut_off, w.back_at = False, w.monotonic()
            log.warning("worker %s reaches the database again", w.id)
        w.synchronise(now, at)
        told: dict[tuple[UUID, int], str] = {}
        for i, fence in held:
            if i not in renewed and versions.get(i, (fence, "running")) != (fence, "running"):
                told[i, fence] = "lost"
            elif renewed.get(i):
                told[i, fence] = "cancel"
        if told and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._tell, told)

    def _tell(self, told: dict[tuple[UUID, int], str]) -> None:
        """The fence too: the job may have ended and been claimed here again while the heartbeat was under way."""
        executor = self._worker.executor
        for (id_, fence), reason in told.items():
            if (execution := executor.found(id_.int)) is not None and execution.fence == fence:
                executor.interrupt(execution, reason)

    def _warn(self, blocked: float) -> None:
        frame = sys._current_frames().get(self._loop_thread)  # noqa: SLF001 - the documented way to see another thread
        where = "".join(traceback.format_stack(frame)[-2:]).strip() if frame is not None else "unknown"
        running = [e for e in list(self._worker.executor.running.values()) if e.started]
        log.warning(
            "the event loop has been blocked for %.1f s by %s: make the handler a plain def, or await its work.\n%s",
            blocked,
            f"one of {len(running)} running jobs" if len(running) != 1 else f"job {running[0].row.kind}",
            where,
        )


def sign_on(w: Worker) -> None:
    """Say that a worker is about to begin. Raises `DatabaseUnreachable`: of a standby, too, which takes no writes."""
    w.app.database.transaction_sync(beat, _row(w), [], w.lease, w.monotonic)
    w.signed_on = True


def _row(w: Worker) -> workers.Beat:
    """What it says of its worker."""
    return workers.Beat(
        id=w.id,
        host=socket.gethostname()[:255],
        pid=os.getpid(),
        kinds=list(w.kinds),
        concurrency=w.concurrency,
        running=len(w.executor.running),
        code_version=code_version(),
        stopping=w.stopping,
    )


@cache
def code_version() -> str:
    """The version that is installed. Reading it takes a millisecond of CPU: once a process."""
    try:
        return importlib.metadata.version("resilient-engine")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


@reserved
def beat(
    c: Connection,
    d: Dialect,
    row: workers.Beat,
    held: list[tuple[UUID, int]],
    lease: timedelta,
    monotonic: Callable[[], float],
) -> tuple[tuple[datetime, float], dict[UUID, bool], dict[UUID, tuple[int, str]]]:
    """Renew what is held and say that the worker lives.

    Returns the database's time with this process's monotonic one, what was renewed, and how the rest stands.
    """
    now = d.steer(c)
    at = monotonic()  # here: a connection may have been waited for
    renewed = leases.renew_if_held(c, d, held, lease, now)
    missing = [i for i, _ in held if i not in renewed]
    versions = leases.held_versions(c, d, missing) if missing else {}
    workers.beat(c, d, row, now)
    return (now, at), renewed, versions
