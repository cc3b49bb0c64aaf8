"""The open connections to destinations: one of a destination and worker, opened when its first event is due.

One that was lost is closed and forgotten, and the next event opens another one; events that were in flight over it have
their own errors. A destination that confirms nothing in time is treated as lost: what comes late is not waited for.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from resilient.wire.publishers.base import ConnectionLost, lost

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.core.message import Message
    from resilient.wire.publishers.base import Destination, Publisher

log = logging.getLogger("resilient.outbox")
_CLOSE_PATIENCE: Final = 5.0  # seconds


class Publishers:
    """The connections of one worker, on its loop."""

    def __init__(self, destinations: Mapping[str, Destination]) -> None:
        self._destinations = destinations
        self._open: dict[str, Publisher] = {}
        self._opening: dict[str, asyncio.Lock] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def publish(self, name: str, message: Message) -> None:
        """Hand one event over; returns when it is confirmed. See `wire.publishers.base` for what it raises."""
        destination = self._destinations[name]
        publisher = self._open.get(name) or await self._opened(name, destination)
        try:
            async with asyncio.timeout(destination.timeout):
                await publisher.publish(message)
        except TimeoutError:
            self._forget(name, publisher)
            raise lost(f"{name} confirmed nothing within {destination.timeout:g} s", "no_confirm") from None
        except ConnectionLost:
            self._forget(name, publisher)
            raise

    async def _opened(self, name: str, destination: Destination) -> Publisher:
        """One connection, however many events ask for it."""
        async with self._opening.setdefault(name, asyncio.Lock()):
            if (found := self._open.get(name)) is None:
                try:
                    async with asyncio.timeout(destination.timeout):
                        found = await destination.connect()
                except TimeoutError:
                    raise lost(f"{name} does not answer within {destination.timeout:g} s", "broker_down") from None
                self._open[name] = found
            return found

    def _forget(self, name: str, publisher: Publisher) -> None:
        if self._open.get(name) is publisher:
            del self._open[name]
            task = asyncio.get_running_loop().create_task(_close(name, publisher))
            self._closing.add(task)  # the loop keeps no strong reference
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close them all."""
        for name, publisher in list(self._open.items()):
            self._forget(name, publisher)
        if self._closing:
            await asyncio.gather(*self._closing)


async def _close(name: str, publisher: Publisher) -> None:
    try:
        async with asyncio.timeout(_CLOSE_PATIENCE):
            await publisher.close()
    except Exception as error:  # noqa: BLE001 - it is gone either way
        log.debug("closing the connection to %s: %s: %s", name, type(error).__name__, error)
