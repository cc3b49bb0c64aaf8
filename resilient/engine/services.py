"""What runs beside a worker's claiming, opened and closed together."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

from resilient.core.errors import SetupError
from resilient.engine.heartbeat import Heartbeat
from resilient.store.wake import Listener

if TYPE_CHECKING:
    from collections.abc import Sequence

    from resilient.engine.worker import Worker

log = logging.getLogger("resilient.worker")


class Services:
    """Completer and heartbeat; with ``background`` also what looks by itself: listener, staging, rescue, chores."""

    def __init__(self, worker: Worker, *, background: bool = True) -> None:
        self._worker, self._background = worker, background
        self._tasks: list[asyncio.Task[Any]] = []

    async def __aenter__(self) -> None:
        w = self._worker
        if w.executor.closed:
            raise SetupError(f"worker {w.id} has run and ended: make another one with app.worker(...)")
        w.loop = asyncio.get_running_loop()
        self._heartbeat = Heartbeat(w)
        await self._heartbeat.start()  # first: if the database does not answer, there is nothing to close yet
        w.executor.start()
        await w.gate.start()
        self._completer = asyncio.create_task(w.completer.run(), name="resilient-completer")
        self._listener = Listener(
            w.app.database, w.wake, self._gates_changed, listen_url=w.app.listen_url, roll=w.rng.random
        )
        if self._background:
            self._listener.start()
            self._tasks = w.sweeper.tasks()
        w.app.local_workers.add(w)

    async def __aexit__(self, *_: object) -> None:
        w = self._worker
        w.app.local_workers.discard(w)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._background:
            await asyncio.to_thread(self._listener.close)
        await w.executor.close()
        w.completer.close()
        await self._completer
        await w.gate.close()
        await w.wire.close()
        w.app.alerts.outage.left(w.id, reached=self._heartbeat.is_answered)
        if self._background:
            await w.app.alerts.close()  # the process may end with this worker
        await self._heartbeat.close()
        w.threads.shutdown(wait=False, cancel_futures=True)

    def _gates_changed(self, keys: Sequence[str]) -> None:
        """Another process shut or opened these gates; called from the listener's thread."""
        loop = self._worker.loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._worker.gate.forget, keys)


def exit_if_stuck(worker: Worker) -> None:
    """End a process whose handlers never end; otherwise the interpreter would wait for them for ever.

    Call it on the worker's loop, once `Worker.run` has returned and nothing else is left to do.
    """
    if worker.executor.stuck:
        log.error("%d handlers never ended; the process ends without them", len(worker.executor.stuck))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
