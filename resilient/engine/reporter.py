"""The reporter of one worker: writes what requests came to, when it is due, and says what changed.

One write at a time, in batches, deepest keys first. What could not be written is kept and tried again. A
circuit that opens or closes is one clean line in the log.
"""

from __future__ import annotations

import asyncio
import logging
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy.exc import DBAPIError

from resilient.core.errors import DatabaseUnreachable
from resilient.core.phrases import moment
from resilient.engine.tally import Tally
from resilient.store import circuits, patience
from resilient.store.circuits import Evidence

if TYPE_CHECKING:
    from collections.abc import Callable

    from resilient.core.policy import Policies
    from resilient.engine.drawing import Drawing
    from resilient.engine.snapshot import Snapshot
    from resilient.store.circuits import Change
    from resilient.store.database import Database

log = logging.getLogger("resilient.gate")
_BATCH: Final = 500  # resources in one write
_RETRY: Final = 1.0  # seconds until a failed write is tried again


class Reporter:
    """Sums (`tally`), their timer and their writes."""

    def __init__(
        self,
        database: Database,
        policies: Policies,
        *,
        snapshot: Snapshot,
        drawing: Drawing,
        monotonic: Callable[[], float],
        roll: Callable[[], float],
        on_change: Callable[[Change], None] | None,
    ) -> None:
        self._database, self._policies, self._roll = database, policies, roll
        self._snapshot, self._drawing, self._on_change = snapshot, drawing, on_change
        self.tally = Tally(monotonic, roll)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._writing = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Timers run on this loop; before there is one, only `flush` writes."""
        self._loop = loop

    async def close(self) -> None:
        """Wait for what is under way, and write everything."""
        if self._timer is not None:
            self._timer.cancel()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            await self.flush()
        except Exception as error:  # noqa: BLE001 - counts may be lost at the end, jobs may not
            log.warning("could not save what requests came to (%s: %s)", type(error).__name__, error)

    async def flush(self) -> None:
        """Write all sums now."""
        await self._write(everything=True)
        await self._drawing.flush()

    async def _write(self, *, everything: bool = False) -> None:
        async with self._writing:
            evidence = self.tally.collect(everything=everything)
            evidence.sort(key=lambda one: (-one.key.count("/"), one.key))
            batches, held = [evidence[n : n + _BATCH] for n in range(0, len(evidence), _BATCH)], list[Evidence]()
            try:
                while batches:
                    batches[:1] = await self._report(batches[0], held)
            finally:
                self.tally.put_back([*held, *chain(*batches)])
        if held:
            raise DatabaseUnreachable(f"a transaction that is open holds resource {held[0].key}")

    async def _report(self, batch: list[Evidence], held: list[Evidence]) -> list[list[Evidence]]:
        """Write it; or what to write instead, where somebody holds one of these resources: in the end all but that."""
        try:
            changes = await self._database.transaction(circuits.report_if_current, batch, self._policies, self._roll)
        except DBAPIError as error:
            if not patience.was_held_up(error):
                raise
            if half := len(batch) // 2:
                return [batch[:half], batch[half:]]
            held += batch
            return []
        for change in changes:
            self._changed(change)
        return []

    def _changed(self, change: Change) -> None:
        self._snapshot.put(change.after)
        before, after = change.before.breaker, change.after.breaker
        if after.state == "open" and after.open_until is not None:
            code = change.failure and (change.failure.code or change.failure.status or change.failure.kind)
            why = f"{after.streak} failures in a row" if before.state == "closed" else "its probe"
            log.warning(
                "%s: circuit open until %s after %s, latest %s; its jobs wait",
                change.after.key, moment(after.open_until), why, code or "without an answer",
            )  # fmt: skip
        elif after.state == "closed":
            log.info("%s: circuit closed, load comes back step by step", change.after.key)
        if self._on_change is not None:
            self._on_change(change)

    def wake(self, delay: float) -> None:
        """See that due sums are written in ``delay`` seconds."""
        if self._loop is None:
            return
        at = self._loop.time() + delay
        if self._timer is not None:
            if self._timer.when() <= at and not self._timer.cancelled():
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.spawn(self._write_due())

    async def _write_due(self) -> None:
        try:
            await self._write()
            await self._drawing.flush()
        except Exception as error:  # noqa: BLE001 - the database may be away; nothing is lost
            log.warning("cannot save what requests came to (%s: %s); trying again", type(error).__name__, error)
            self.wake(_RETRY)
            return
        if (delay := self.tally.due()) is not None:
            self.wake(delay)

    def spawn(self, coroutine: Any) -> None:
        """Run a coroutine beside; its error is logged."""
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._spawned)

    def _spawned(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("gate: %s: %s", type(error).__name__, error)
