"""The open connections to destinations: a worker has one to each destination, and opens it for the first event.

A connection that is lost is closed, and the next event opens another one. Each event that was in flight over it gets
an error of its own, or is sent again if it was lost over another event. A publisher that ``mends`` itself stays open:
it has a connection for each event. An event that is not confirmed in time means that the connection is lost, unless
others are confirmed meanwhile or the publisher knows better; a later confirmation is ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from resilient.core.base.errors import FailureKind, JobFailure, ResourceStopped
from resilient.core.base.loggers import apart, logger
from resilient.core.base.phrases import value_text
from resilient.engine.events.outbox import PREFIX
from resilient.engine.ground.foreign import contained
from resilient.wire.publishers.base import ConnectionLost, CutOff, is_away, lost, refused

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping

    from resilient.core.base.errors import Failure
    from resilient.core.events.message import Message
    from resilient.wire.publishers.base import Destination, Publisher

T = TypeVar("T")
log = logger("outbox")
_CLOSE_TIMEOUT: Final = 5.0  # seconds
_SILENCE_TIMEOUT: Final = 1.0  # seconds


class Publishers:
    """The connections of one worker, on its loop."""

    def __init__(self, destinations: Mapping[str, Destination]) -> None:
        self._destinations = destinations
        self._open: dict[str, Publisher] = {}
        self._opening: dict[str, asyncio.Task[Publisher]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._answering: set[str] = set()
        self._confirmed: dict[str, float] = {}  # when the latest event was, by the loop's clock

    def is_well(self, name: str) -> bool:
        """Whether a destination has answered its latest event."""
        return name in self._answering

    def note(self, name: str, *, is_well: bool) -> None:
        """Note whether a destination has answered an event (or was away)."""
        (self._answering.add if is_well else self._answering.discard)(name)

    async def publish(self, name: str, message: Message) -> None:
        """Hand one event over; returns when it is confirmed. `wire.publishers.base` says what it raises."""
        await self.hand_over(name, await self.open(name), message)

    async def hand_over(self, name: str, publisher: Publisher, message: Message) -> None:
        """Publish over an open connection: each error then concerns this event, and not the connecting."""
        timeout, cut = self._destinations[name].timeout, None
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            async with asyncio.timeout(timeout):
                while True:
                    try:
                        await _run_alone(name, publisher.publish, message)
                    except CutOff as error:
                        cut = error
                        self._forget(name, publisher)
                        publisher = await self.open(name)
                    else:
                        self._confirmed[name] = clock()
                        return
        except TimeoutError:
            if cut is not None:
                raise cut from None
            failure = await self._silence(name, publisher, message, began + timeout / 2)
            if isinstance(failure, ConnectionLost):
                self._forget(name, publisher)
            raise failure from None
        except ConnectionLost:
            self._forget(name, publisher)
            raise

    async def _silence(self, name: str, publisher: Publisher, message: Message, since: float) -> JobFailure:
        """The failure of an event that was not confirmed in time; ``since``: others were confirmed after that."""
        text = f"{name} confirmed nothing within {self._destinations[name].timeout:g} s"
        if (explain := getattr(publisher, "silence", None)) is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SILENCE_TIMEOUT):
                    if (failure := await _run_alone(name, explain, message)) is not None:
                        return cast("JobFailure", failure)
        if self._confirmed.get(name, 0.0) > since:
            return refused(f"{text}, but other events meanwhile", "no_confirm")
        return lost(text, "no_confirm")

    async def open(self, name: str) -> Publisher:
        """Open the connection to a destination, if it is not open. All callers meanwhile share one attempt."""
        if (publisher := self._open.get(name)) is not None:
            return publisher
        task, destination = self._opening.get(name), self._destinations[name]
        if task is None:
            task = self._opening[name] = asyncio.get_running_loop().create_task(
                self._connect(name, destination), context=apart()
            )
            task.add_done_callback(partial(self._end_opening, name))
        try:
            async with asyncio.timeout(2 * destination.timeout):  # `connect` may catch its own timeout's cancellation
                return await asyncio.shield(task)
        except TimeoutError:
            raise lost(f"{name} does not answer, and what connects to it does not end", "broker_down") from None
        except asyncio.CancelledError:
            raise _cancelled_by_client(name) from None
        except ConnectionLost as error:
            raise lost(str(error), error.failure.code or "") from error

    async def _connect(self, name: str, destination: Destination) -> Publisher:
        try:
            async with asyncio.timeout(destination.timeout):
                publisher = self._open[name] = await _run_alone(name, destination.connect)
        except TimeoutError:
            raise lost(f"{name} does not answer within {destination.timeout:g} s", "broker_down") from None
        except ResourceStopped:
            raise
        except Exception as error:  # it must close a gate: else each batch would connect again
            failure = error.failure if isinstance(error, JobFailure) else None
            if failure is not None and _closes_gate(failure):
                raise
            kind = type(error).__name__
            code = kind if failure is None or not failure.code else failure.code
            raise lost(f"{name} cannot be connected to: {kind}: {value_text(error)}", code) from error
        return publisher

    def _end_opening(self, name: str, task: asyncio.Task[Publisher]) -> None:
        self._opening.pop(name, None)
        if not task.cancelled():
            task.exception()  # its waiters have it, unless they were all cancelled

    def _forget(self, name: str, publisher: Publisher) -> None:
        if self._open.get(name) is publisher and not getattr(publisher, "mends", False):
            self._close(name)

    def _close(self, name: str) -> None:
        task = asyncio.get_running_loop().create_task(_close(name, self._open.pop(name)), context=apart())
        self._closing.add(task)  # the loop keeps no strong reference
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close them all; one that does not end is left behind."""
        opening = list(self._opening.values())
        for task in opening:
            task.cancel()
        await _wait(opening)
        for name in list(self._open):
            self._close(name)
        await _wait(self._closing)


async def _wait(tasks: Collection[asyncio.Task[Any]]) -> None:
    if tasks:  # each is bounded, unless it catches its cancellation
        await asyncio.wait(tasks, timeout=_CLOSE_TIMEOUT + 1)


def _closes_gate(failure: Failure) -> bool:
    """Whether it closes a gate that all events wait for: a throttle, or the destination's circuit."""
    return failure.kind in (FailureKind.THROTTLED, FailureKind.QUOTA) or is_away(failure)


async def _run_alone(name: str, fn: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Call a function of a destination in a task of its own: the program's code, or a library, may cancel its task."""
    try:
        return await asyncio.get_running_loop().create_task(_contain(fn, *args))
    except asyncio.CancelledError:
        raise _cancelled_by_client(name) from None


async def _contain(fn: Callable[..., Awaitable[T]], *args: Any) -> T:
    with contained(), contextlib.suppress(asyncio.CancelledError):
        return await fn(*args)
    raise asyncio.CancelledError  # it ends this task alone, whoever cancelled it


def _cancelled_by_client(name: str) -> ConnectionLost:
    """The error for a call that was cancelled, but not by the worker; raises `CancelledError` if it was.

    A cancellation by the client would be taken for one by the worker, and its event would be lost.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
    return lost(f"{name}: the client broke it off", "broken_off")


async def _close(name: str, publisher: Publisher) -> None:
    try:
        async with asyncio.timeout(_CLOSE_TIMEOUT):
            with contained():
                await publisher.close()
    except Exception as error:  # noqa: BLE001 - it is gone either way
        log.debug("closing the connection to %s: %s: %s", name, type(error).__name__, error)


def require(destinations: Mapping[str, Destination], kinds: Iterable[str]) -> None:
    """Raise `MissingExtra` if a library is missing that a worker of these kinds publishes with.

    Called when the worker is made, before the first event.
    """
    names = set(kinds)
    for name, one in destinations.items():
        if PREFIX + name in names:
            one.require()
