"""A coroutine function of the program's own as a destination."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from resilient.core.errors import SetupError
from resilient.core.misfit import explained_class
from resilient.wire.publishers.base import Destination

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from resilient.core.message import Message


@explained_class
@dataclass(frozen=True)
class Callback(Destination):
    """``Callback(fn)``: ``await fn(message)`` hands an event over; when it returns, the event is published.

    What it raises is classified as a handler's exception is: raise `Transient`, `Throttled` or `Permanent`.
    """

    fn: Callable[[Message], Awaitable[Any]]

    async def connect(self) -> _Calls:
        """Nothing to open."""
        return _Calls(self.fn)


class _Calls:
    def __init__(self, fn: Callable[[Message], Awaitable[Any]]) -> None:
        self._fn = fn

    async def publish(self, message: Message) -> None:
        """Call it."""
        await self._fn(message)

    async def close(self) -> None:
        """Nothing to close."""


def destination(name: str, given: Any) -> Destination:
    """What ``destinations={name: given}`` means; a coroutine function is a `Callback`. Raises `SetupError`."""
    if isinstance(given, Destination):
        return given
    if inspect.iscoroutinefunction(given) or inspect.iscoroutinefunction(getattr(given, "__call__", None)):  # noqa: B004 - an object with an async call
        return Callback(given)
    raise SetupError(
        f"destination {name!r} is {given!r}: give RabbitMQ(...), another Destination, or an async function"
    )
