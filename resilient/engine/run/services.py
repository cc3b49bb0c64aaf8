"""What runs beside a worker's claiming: services, started in one order and closed in the opposite one.

A `Loop` polls: it calls a function that does one piece of work and says in how many seconds it wants to do the next.
No error ends a loop, because the database may be away: it polls again after a pause that grows from a tenth of a second
to ten seconds, and is random, so that the workers of a fleet do not all come back at one moment. The first failure is
logged, the fifth, and then each thirtieth.
"""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from resilient.core.base.loggers import logger
from resilient.core.jobs.backoff import retry_pause
from resilient.store.db.wake import Listener, listener_name

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence

    from sqlalchemy import URL

    from resilient.store.db.database import Database

T = TypeVar("T")
log = logger("worker")
HURRY: Final = 5.0  # seconds that are left for what must come to its end, once its task was cancelled
NEXT_CANCEL: Final = 1.0  # seconds between the cancels of what has not ended by then
_MOST_CANCELS: Final = 20
SMALL_FLEET: Final = 8  # workers, up to which each looks as often as if it were alone
LONGEST_REST: Final = 3.0  # times as long between two looks as alone


def idle_pause(seconds: float, spread: float, fleet: int, roll: float) -> float:
    """Seconds until the next look of an idle worker, by a ``roll`` from 0 to 1.

    Alone it rests ``seconds`` on average, from ``1 - spread`` to ``1 + spread`` times as long. ``fleet`` workers look
    for the same: the more there are, the longer each rests, on average up to `LONGEST_REST` times as long. The shortest
    rest stays the same, so that workers that woke at one moment do not look at one moment again.
    """
    least, rest = 1 - spread, max(1.0, min(LONGEST_REST, fleet / SMALL_FLEET))
    return seconds * (least + 2 * (rest - least) * roll)


async def to_its_end(name: str, coroutine: Coroutine[Any, Any, T], *, stop: Callable[[], bool] = lambda: True) -> T:
    """Await what a cancel of this task must not break off at once: it has `HURRY` seconds left, before it is cancelled.

    Then it is cancelled again and again, because it may have more than one thing to end; what ends by none of
    `_MOST_CANCELS` is left alone. ``stop``: called at the cancel; False if there is nothing to wait for.
    """
    task = asyncio.create_task(coroutine, name=f"resilient-{name}")
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        loop, cancels = asyncio.get_running_loop(), 0
        until = loop.time() + (HURRY if stop() else 0.0)
        while not task.done() and cancels < _MOST_CANCELS:
            if loop.time() >= until:
                task.cancel()
                until, cancels = loop.time() + NEXT_CANCEL, cancels + 1
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([task], timeout=until - loop.time())
        if not task.done():
            log.warning("%s does not end; nothing waits for it any more", name)
        elif not task.cancelled() and (error := task.exception()) is not None:
            log.warning("%s failed (%s: %s)", name, type(error).__name__, error)
        raise


async def until_over(is_over: Callable[[], bool], seconds: float) -> None:
    """Wait for a thread's end, at most so long. In none of the loop's threads: the program may have filled them."""
    until = asyncio.get_running_loop().time() + seconds
    while not is_over() and asyncio.get_running_loop().time() < until:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


class Service(Protocol):
    """Something that runs from `start` to `close`."""

    async def start(self) -> None:
        """Begin; raises if it cannot, and is not closed then."""

    async def close(self) -> None:
        """End, with all that must be done before."""


class Loop:
    """Polls until it is closed. ``poll`` returns seconds until the next; ``rest`` waits so long or until a wake-up."""

    def __init__(
        self,
        name: str,
        poll: Callable[[], Awaitable[float]],
        roll: Callable[[], float],
        *,
        rest: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._name, self._poll, self._roll, self._rest = name, poll, roll, rest
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to poll."""
        self._task = asyncio.create_task(self.run(), name=f"resilient-{self._name}")

    async def close(self) -> None:
        """End; a poll under way is cancelled."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Poll until ``until()``. Only the cancellation of its own task ends it, not that of what a poll waits for.

        A cancel that was lost in a poll takes effect after it. asyncio.wait_for of Python 3.11 loses one that comes in
        the moment of an answer, and psycopg up to 3.3.5 waits with it.
        """
        failures, task = 0, asyncio.current_task()
        cancels = 0 if task is None else task.cancelling()

        def is_cancelled() -> bool:
            return task is not None and task.cancelling() > cancels

        while not until():
            pause = 0.0
            try:
                delay = await self._poll()
                if delay > 0 and not is_cancelled():
                    await self._rest(delay)
                failures = 0
            except (Exception, asyncio.CancelledError) as error:  # the database may be away; the loop stays
                if isinstance(error, asyncio.CancelledError) and (task is None or is_cancelled()):
                    raise
                pause = retry_pause(failures, self._roll())
                failures += 1
                if failures in (1, 5) or failures % 30 == 0:
                    log.warning(
                        "%s failed (%s: %s); trying again in %.1f s", self._name, type(error).__name__, error, pause
                    )
            if is_cancelled():
                raise asyncio.CancelledError
            if pause:
                await asyncio.sleep(pause)


class Wakeups:
    """The listener for commits and gates of other processes, in the worker's loop."""

    def __init__(
        self,
        database: Database,
        wake: Callable[[], None],
        gates_changed: Callable[[Sequence[str]], None],
        listen_url: URL | None,
        roll: Callable[[], float],
        worker_id: str,
    ) -> None:
        self._listener = Listener(
            database, wake, gates_changed, listen_url=listen_url, roll=roll, name=listener_name(worker_id)
        )

    async def start(self) -> None:
        """Begin to listen."""
        self._listener.start(asyncio.get_running_loop())

    async def close(self) -> None:
        """Stop."""
        self._listener.end()
        await until_over(lambda: self._listener.is_over, 2.0)


class Attachment:
    """A service that is two functions."""

    def __init__(self, start: Callable[[], object], close: Callable[[], Awaitable[object] | None]) -> None:
        self._start, self._close = start, close

    async def start(self) -> None:
        """Call the first."""
        self._start()

    async def close(self) -> None:
        """Call the second."""
        if (end := self._close()) is not None:
            await end


class Services:
    """Services as a block: ``async with Services(...)``. What follows one that cannot start is not started.

    All are closed, whoever is cancelled meanwhile.
    """

    def __init__(self, services: Iterable[Service]) -> None:
        self._services = services

    async def __aenter__(self) -> None:
        self._stack = AsyncExitStack()
        try:
            for service in self._services:
                await service.start()
                self._stack.push_async_callback(service.close)
        except BaseException:
            await to_its_end("closing", self._stack.aclose())
            raise

    async def __aexit__(self, *_: object) -> None:
        await to_its_end("closing", self._stack.aclose())
