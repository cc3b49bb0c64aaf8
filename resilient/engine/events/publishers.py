"""The open connections to destinations: each worker has one for each destination, opened for the first event.

A connection that was lost is closed, and the next event opens another one; events that were in flight over it have
their own errors. (A publisher that ``mends`` itself stays open: it has a connection for each event.) A destination that
confirms nothing in time is treated as lost; a confirmation after that is ignored.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, TypeVar

from resilient.core.base.errors import FailureKind, JobFailure, ResourceStopped
from resilient.core.base.loggers import apart, logger
from resilient.engine.events.outbox import PREFIX
from resilient.engine.ground.foreign import contained
from resilient.wire.publishers.base import ConnectionLost, lost

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable, Mapping

    from resilient.core.base.errors import Failure
    from resilient.core.events.message import Message
    from resilient.wire.publishers.base import Destination, Publisher

T = TypeVar("T")
log = logger("outbox")
_CLOSE_PATIENCE: Final = 5.0  # seconds


class Publishers:
    """The connections of one worker, on its loop."""

    def __init__(self, destinations: Mapping[str, Destination]) -> None:
        self._destinations = destinations
        self._open: dict[str, Publisher] = {}
        self._opening: dict[str, asyncio.Task[Publisher]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._well: set[str] = set()

    def is_well(self, name: str) -> bool:
        """Whether a destination answered its latest event, and was not away."""
        return name in self._well

    def note(self, name: str, *, is_well: bool) -> None:
        """Note whether a destination answered an event, or was away."""
        (self._well.add if is_well else self._well.discard)(name)

    async def publish(self, name: str, message: Message) -> None:
        """Hand one event over; returns when it is confirmed. `wire.publishers.base` says what it raises."""
        await self.hand_over(name, await self.open(name), message)

    async def hand_over(self, name: str, publisher: Publisher, message: Message) -> None:
        """`publish` over a connection that is open. An error of `open` is none of these: then nothing was sent."""
        destination = self._destinations[name]
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
        """The connection to a destination. Events that wait while it is opened share one attempt and its error."""
        if (publisher := self._open.get(name)) is not None:
            return publisher
        task, destination = self._opening.get(name), self._destinations[name]
        if task is None:
            task = self._opening[name] = asyncio.get_running_loop().create_task(
                self._connect(name, destination), context=apart()
            )
            task.add_done_callback(lambda _: self._opening.pop(name, None))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            raise _broken_off(name) from None
        except ConnectionLost as error:
            raise lost(str(error), error.failure.code or "") from error

    async def _connect(self, name: str, destination: Destination) -> Publisher:
        try:
            async with asyncio.timeout(destination.timeout):
                publisher = self._open[name] = await _through(name, destination.connect())
        except TimeoutError:
            raise lost(f"{name} does not answer within {destination.timeout:g} s", "broker_down") from None
        except ResourceStopped:
            raise
        except Exception as error:  # no event's own fault, and a gate must close: each batch would try it anew
            failure = error.failure if isinstance(error, JobFailure) else None
            if failure is not None and _closes_a_gate(failure):
                raise
            kind = type(error).__name__
            code = kind if failure is None or not failure.code else failure.code
            raise lost(f"{name} cannot be connected to: {kind}: {error}", code) from error
        return publisher

    def _forget(self, name: str, publisher: Publisher) -> None:
        if self._open.get(name) is publisher and not getattr(publisher, "mends", False):
            self._close(name)

    def _close(self, name: str) -> None:
        task = asyncio.get_running_loop().create_task(_close(name, self._open.pop(name)), context=apart())
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


def _closes_a_gate(failure: Failure) -> bool:
    """Whether all events wait for what it says: for a time, or for the destination's circuit."""
    if failure.kind in (FailureKind.THROTTLED, FailureKind.QUOTA):
        return True
    return failure.kind is FailureKind.TRANSIENT and failure.counts_for_breaker is not False


async def _through(name: str, work: Awaitable[T]) -> T:
    """Await what a destination does, which may be the program's own code."""
    with contained():
        try:
            return await work
        except asyncio.CancelledError:
            raise _broken_off(name) from None


def _broken_off(name: str) -> ConnectionLost:
    """The error for a client that cancels the task waiting for it. Taken for a worker's, it would lose the event.

    Raises `CancelledError` if this task itself is cancelled.
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


def require(destinations: Mapping[str, Destination], kinds: Iterable[str]) -> None:
    """Raise `MissingExtra` if a worker of these kinds could not publish: when it is made, not with the first event."""
    names = set(kinds)
    for name, one in destinations.items():
        if PREFIX + name in names:
            one.require()
