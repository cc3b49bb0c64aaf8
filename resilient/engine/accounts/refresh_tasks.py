"""The refreshes that are under way in this process. Each goes on to its end, also if its callers are cancelled.

A refresh uses up a refresh token, so it must not be broken off: it is a task of its own. An app may be used from
several event loops, one after the other; only the loop that a task began in can wait for it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from resilient.core.base.loggers import apart

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any
    from uuid import UUID

    Refresh = Coroutine[Any, Any, None]
    RefreshTask = asyncio.Task[None]


class RefreshTasks:
    """The refresh tasks of one process."""

    def __init__(self) -> None:
        self._tasks: set[RefreshTask] = set()
        self._by_grant: dict[tuple[asyncio.AbstractEventLoop, UUID], RefreshTask] = {}

    async def join(self, id_: UUID, refresh: Callable[[], Refresh], patience: float | None) -> bool:
        """Wait for a grant's refresh, and start it if there is none.

        Returns False if it has not ended after ``patience`` seconds.
        """
        id_in_loop = asyncio.get_running_loop(), id_
        task = self._by_grant.get(id_in_loop)
        if task is None:
            task = self._by_grant[id_in_loop] = self._start(refresh())
            task.add_done_callback(lambda _: self._by_grant.pop(id_in_loop))
        done, _ = await asyncio.wait({task}, timeout=patience)
        if done:
            task.result()
        return bool(done)

    async def run_alone(self, refresh: Refresh) -> None:
        """Start a refresh that nobody else joins, and wait for it."""
        task = self._start(refresh)
        await asyncio.wait({task})
        task.result()

    async def wait_all(self) -> None:
        """Wait for all refreshes of this loop. A cancelled caller cancels none of them."""
        loop = asyncio.get_running_loop()
        while under_way := [one for one in self._tasks if one.get_loop() is loop]:
            await asyncio.wait(under_way)

    def _start(self, refresh: Refresh) -> RefreshTask:
        task = asyncio.create_task(refresh, name="refresh", context=apart())
        self._tasks.add(task)
        task.add_done_callback(self._remove)
        return task

    def _remove(self, task: RefreshTask) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # its waiters have it
