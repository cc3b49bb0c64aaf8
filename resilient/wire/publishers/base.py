"""What every destination shares.

A `Destination` is what a program declares: a value, without a connection. When the first event is due, a worker calls
its `connect` on its own event loop and gets a `Publisher`. ``publish`` returns when the destination has confirmed. The
relay calls it for many events at once, but never for two of one key. What it raises says what becomes of the event:

- `lost(...)`: the connection is unusable; the event is sent again later, over a new one;
- `cut_off(...)`: the same, but the destination works: it closed the connection because of this event, or (`CutOff`)
  because of another one; then this one is sent at once over a new connection;
- `refused(...)`: the destination did not take the event, and the connection is usable; the event is sent again later;
- `Throttled`: all events for this destination wait;
- `Permanent`: the event can never be taken; it is dead at once (`Unsendable`: nothing of it was sent).

An event whose confirmation was lost is sent again: consumers recognise duplicates by the event's id.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from resilient.core.base.errors import (
    Failure,
    FailureKind,
    InvalidInput,
    JobFailure,
    MissingExtra,
    Permanent,
    SetupError,
)
from resilient.core.base.misfit import explained_class, is_number, is_whole
from resilient.core.jobs.backoff import FullJitter, Retry

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from resilient.core.events.message import Message


# A broker that is away is tried again without end, at most a minute apart. A bug of the program's is not: its event
# would block the others of its key for ever, and nobody would look.
BROKER_RETRY: Final = Retry(max_attempts=None, delay=FullJitter(base=0.5, cap=60.0), by_kind={"bug": Retry(20)})


class ConnectionLost(JobFailure):
    """The connection to a destination is unusable: the next event opens another one."""


class CutOff(ConnectionLost):
    """The destination closed the connection because of another event: it may take this one over a new connection."""


class Unsendable(Permanent):
    """The event can never be taken. Nothing of it was sent, so this says nothing about the destination."""


class Publisher(Protocol):
    """A live connection to a destination.

    One whose attribute ``mends`` is true replaces lost connections itself: the engine does not close it after `lost`.
    One that has a method ``silence(message)`` is asked why an event was not confirmed in time; it returns a failure, or
    None if it does not know. It must not wait long.
    """

    async def publish(self, message: Message) -> None:
        """Send one event; return when it is confirmed."""

    async def close(self) -> None:
        """Close the connection; never raises."""


@dataclass(frozen=True, kw_only=True)
class Destination:
    """Where events go. ``timeout``: seconds one event may take to be confirmed, up to 300. ``retry``: see `Retry`.

    ``batch``: how many events a worker takes at once, up to 1,000. ``when_dead``: an event that is dead (refused for
    good) makes the others of its key wait until a person retries or discards it (``"block"``), or not (``"skip"``).
    Raises `InvalidInput`.
    """

    retry: Retry = field(default=BROKER_RETRY, repr=False)
    timeout: float = 10.0
    batch: int = 200
    when_dead: Literal["block", "skip"] = "block"

    def __post_init__(self) -> None:
        if not is_number(self.timeout) or not 0 < self.timeout <= _LONGEST_TIMEOUT:
            raise InvalidInput(f"timeout={self.timeout!r}: one event may take up to {_LONGEST_TIMEOUT} s")
        if not is_whole(self.batch, most=_LARGEST_BATCH):
            raise InvalidInput(f"batch={self.batch!r}: take 1 to {_LARGEST_BATCH} events at once")
        if self.when_dead not in ("block", "skip"):
            raise InvalidInput(f'when_dead must be "block" or "skip", not {self.when_dead!r}')

    @property
    def at_once(self) -> int | None:
        """The most events at once from all workers, unless the program says (`concurrency=`); None: no bound."""
        return None

    def require(self) -> None:
        """Raise `MissingExtra` if a library is missing; called when a worker that publishes here is made."""

    async def connect(self) -> Publisher:
        """Open a connection; raises `lost(...)`. Any other error but a throttle means the same."""
        raise NotImplementedError


_LONGEST_TIMEOUT: Final = 300
_LARGEST_BATCH: Final = 1_000
_CLOSE_TIMEOUT: Final = 1.0  # seconds
_LOGIN: Final = frozenset({  # errors of the libraries: of RabbitMQ and Redis, of Kafka
    "AuthenticationError", "ProbableAuthenticationError", "AuthenticationFailedError", "SaslAuthenticationFailed",
})  # fmt: skip


def extra(module: str, name: str) -> Any:
    """A library that comes with an extra; raises `MissingExtra`."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise MissingExtra(
            f"publishing to this destination needs {module}: pip install 'resilient-engine[{name}]'"
        ) from None


def lost(message: str, code: str) -> ConnectionLost:
    """The error for a connection that is gone, or could not be opened."""
    return ConnectionLost(message, failure=Failure(FailureKind.TRANSIENT, code=code))


def away(broker: str, error: BaseException) -> ConnectionLost:
    """The error for a broker that cannot be reached, or that does not let the program's user in."""
    if type(error).__name__ in _LOGIN or "authorization violation" in str(error).lower():
        return lost(f"{broker} does not let this user in: {error}", "no_login")
    return lost(f"{broker} is not there: {type(error).__name__}: {error}", "broker_down")


async def close_quickly(close: Callable[[], Awaitable[Any]]) -> None:
    """Close what failed to open or does not answer, within a bound: a hung broker would keep its socket open."""
    with contextlib.suppress(Exception):
        async with asyncio.timeout(_CLOSE_TIMEOUT):
            await close()


def cut_off(message: str, code: str, *, by_another: bool = False) -> ConnectionLost:
    """The error for a connection that its destination closed because of one event: a new one takes the others."""
    kind = CutOff if by_another else ConnectionLost
    return kind(message, failure=Failure(FailureKind.TRANSIENT, code=code, counts_for_breaker=False))


def refused(message: str, code: str, *, ill: bool = False) -> JobFailure:
    """The error for an event that the destination did not take; ``ill``: it seems to take none at all."""
    return JobFailure(message, failure=Failure(FailureKind.TRANSIENT, code=code, counts_for_breaker=ill))


def is_away(failure: Failure) -> bool:
    """Whether a failure means that the destination is away."""
    return failure.kind in (FailureKind.TRANSIENT, FailureKind.AMBIGUOUS) and failure.counts_for_breaker is not False


def fill(template: str | Callable[[Message], str], message: Message) -> str:
    """A topic, subject or routing key: a text with ``{type}`` and ``{key}``, or a function of the message."""
    if not isinstance(template, str):
        return template(message)
    return template.replace("{type}", message.type).replace("{key}", message.key or "")


def is_fixed(template: str | Callable[[Message], str]) -> bool:
    """Whether it is the same for every event. Then an error about it concerns the whole destination."""
    return isinstance(template, str) and "{type}" not in template and "{key}" not in template


# -- a function as a destination --------------------------------------------------------------------------------------


@explained_class
@dataclass(frozen=True)
class Callback(Destination):
    """``Callback(fn)``: an event is published when ``await fn(message)`` returns.

    Its exceptions are classified like a handler's: raise `Transient`, `Throttled` or `Permanent`.
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


def destination(name: str, value: Any) -> Destination:
    """What ``destinations={name: value}`` means; a coroutine function is a `Callback`. Raises `SetupError`."""
    if isinstance(value, Destination):
        return value
    if inspect.iscoroutinefunction(value) or inspect.iscoroutinefunction(getattr(value, "__call__", None)):  # noqa: B004 - an object with an async call
        return Callback(value)
    raise SetupError(
        f"destination {name!r} is {value!r}: give RabbitMQ(...), another Destination, or an async function"
    )
