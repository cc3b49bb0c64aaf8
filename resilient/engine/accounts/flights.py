"""The refreshes that are under way in this process. Each goes on to its end, also if its callers are cancelled.

A refresh uses up a refresh token, so it must not be broken off. It is a task of its own (a flight). An app may be used
from several event loops, one after the other; only the loop that a flight began in can wait for it.
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
        self._by_grant: dict[tuple[asyncio.AbstractEventLoop, UUID], Flight] = {}

    async def join(self, id_: UUID, refresh: Callable[[], Refresh], patience: float | None) -> bool:
        """Wait for the flight of a grant, and start it if there is none.

        Returns False if it has not ended after ``patience`` seconds.
        """
        place = asyncio.get_running_loop(), id_
        flight = self._by_grant.get(place)
        if flight is None:
            flight = self._by_grant[place] = self._start(refresh())
            flight.add_done_callback(lambda _: self._by_grant.pop(place))
        done, _ = await asyncio.wait({flight}, timeout=patience)
        if done:
            flight.result()
        return bool(done)

    async def run_alone(self, refresh: Refresh) -> None:
        """Start a flight that nobody else joins, and wait for it."""
        flight = self._start(refresh)
        await asyncio.wait({flight})
        flight.result()

    async def wait_all(self) -> None:
        """Wait for all flights of this loop. A caller that is cancelled breaks none of them off."""
        loop = asyncio.get_running_loop()
        while under_way := [one for one in self._flights if one.get_loop() is loop]:
            await asyncio.wait(under_way)

    def _start(self, refresh: Refresh) -> Flight:
        flight = asyncio.create_task(refresh, name="refresh", context=apart())
        self._flights.add(flight)
        flight.add_done_callback(self._remove)
        return flight

    def _remove(self, flight: Flight) -> None:
        self._flights.discard(flight)
        if not flight.cancelled():
            flight.exception()  # its waiters have it
