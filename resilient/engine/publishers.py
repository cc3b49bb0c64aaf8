"""The open connections to destinations: one of a destination and worker, opened when its first event is due.

One that was lost is closed and forgotten, and the next event opens another one; events that were in flight over it have
their own errors. (One that mends itself stays: there each event has a connection of its own.) A destination that
confirms nothing in time is treated as lost: what comes late is not waited for.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, TypeVar

from resilient.engine.foreign import contained
from resilient.wire.publishers.base import ConnectionLost, lost

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping

    from resilient.core.message import Message
    from resilient.wire.publishers.base import Destination, Publisher

T = TypeVar("T")
log = logging.getLogger("resilient.outbox")
_CLOSE_PATIENCE: Final = 5.0  # seconds


class Publishers:
    """The connections of one worker, on its loop."""

    def __init__(self, destinations: Mapping[str, Destination]) -> None:
        self._destinations = destinations
        self._open: dict[str, Publisher] = {}
        self._opening: dict[str, asyncio.Task[Publisher]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def publish(self, name: str, message: Message) -> None:
        """Hand one event over; returns when it is confirmed. See `wire.publishers.base` for what it raises."""
        destination = self._destinations[name]
        try:
            publisher = self._open.get(name) or await self.open(name)
        except asyncio.CancelledError:
            raise _broken_off(name) from None
        try:
            async with asyncio.timeout(destination.timeout):
                await _through(name, publisher.publish(message))
        except TimeoutError:
            self._forget(name, publisher)
            raise lost(f"{name} confirmed nothing within {destination.timeout:g} s", "no_confirm") from None
        except ConnectionLost:
            self._forget(name, publisher)
            raise

    async def open(self, name: str) -> Publisher:
        """The connection to a destination: one, and one failure to open it, however many events ask for it."""
        if (found := self._open.get(name)) is not None:
            return found
        task, destination = self._opening.get(name), self._destinations[name]
        if task is None:
            task = self._opening[name] = asyncio.get_running_loop().create_task(self._connect(name, destination))
            task.add_done_callback(lambda _: self._opening.pop(name, None))
        try:
            return await asyncio.shield(task)
        except ConnectionLost as error:
            raise lost(str(error), error.failure.code or "") from error

    async def _connect(self, name: str, destination: Destination) -> Publisher:
        try:
            async with asyncio.timeout(destination.timeout):
                found = self._open[name] = await _through(name, destination.connect())
        except TimeoutError:
            raise lost(f"{name} does not answer within {destination.timeout:g} s", "broker_down") from None
        return found

    def _forget(self, name: str, publisher: Publisher) -> None:
        if self._open.get(name) is publisher and not getattr(publisher, "mends", False):
            self._close(name)

    def _close(self, name: str) -> None:
        task = asyncio.get_running_loop().create_task(_close(name, self._open.pop(name)))
        self._closing.add(task)  # the loop keeps no strong reference
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close them all."""
        for task in list(self._opening.values()):
            task.cancel()
        await asyncio.gather(*self._opening.values(), return_exceptions=True)
        for name in list(self._open):
            self._close(name)
        if self._closing:
            await asyncio.gather(*self._closing)


async def _through(name: str, work: Awaitable[T]) -> T:
    """Await what a destination does, which may be the program's own code."""
    with contained():
        try:
            return await work
        except asyncio.CancelledError:
            raise _broken_off(name) from None


def _broken_off(name: str) -> ConnectionLost:
    """Clients cancel what waits for them; taken for our own, that cancellation would end nothing and lose an event.

    Raises `CancelledError` if it is this task that is cancelled.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
    return lost(f"{name}: the client broke it off", "broken_off")


async def _close(name: str, publisher: Publisher) -> None:
    try:
        async with asyncio.timeout(_CLOSE_PATIENCE):
            with contained():
                await publisher.close()
    except Exception as error:  # noqa: BLE001 - it is gone either way
        log.debug("closing the connection to %s: %s: %s", name, type(error).__name__, error)
