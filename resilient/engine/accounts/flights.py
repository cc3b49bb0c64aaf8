"""Refreshes under way in this process: whoever waits for one may go, and it goes on to its end.

A refresh uses up a refresh token, so a caller that is cancelled must not break it off. Each is a task of its own, in
the event loop that it began in: an app is used from one loop after another, and only that loop can wait for it.
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
    Flight = asyncio.Task[None]


class Flights:
    """The refreshes that one process has under way."""

    def __init__(self) -> None:
        self._flights: set[Flight] = set()
        self._of_grants: dict[tuple[asyncio.AbstractEventLoop, UUID], Flight] = {}

    async def join(self, id_: UUID, refresh: Callable[[], Refresh], patience: float | None) -> bool:
        """Wait for the flight of a grant, begun if there is none; False if ``patience`` seconds were not enough."""
        place = asyncio.get_running_loop(), id_
        flight = self._of_grants.get(place)
        if flight is None:
            flight = self._of_grants[place] = self._begun(refresh())
            flight.add_done_callback(lambda _: self._of_grants.pop(place))
        done, _ = await asyncio.wait({flight}, timeout=patience)
        if done:
            flight.result()
        return bool(done)

    async def alone(self, refresh: Refresh) -> None:
        """Wait for a flight that nobody else joins."""
        flight = self._begun(refresh)
        await asyncio.wait({flight})
        flight.result()

    async def landed(self) -> None:
        """Wait for those of this loop. A caller that is cancelled meanwhile breaks none of them off."""
        loop = asyncio.get_running_loop()
        while under_way := [one for one in self._flights if one.get_loop() is loop]:
            await asyncio.wait(under_way)

    def _begun(self, refresh: Refresh) -> Flight:
        flight = asyncio.create_task(refresh, name="refresh", context=apart())
        self._flights.add(flight)
        flight.add_done_callback(self._over)
        return flight

    def _over(self, flight: Flight) -> None:
        self._flights.discard(flight)
        if not flight.cancelled():
            flight.exception()  # its waiters have it
