"""Calls of the program's own functions beside its handlers: credentials, accounts of schedules, sinks, destinations.

Python gives some exceptions a meaning of their own: a future refuses `StopIteration` and then never ends,
`CancelledError` looks like the end of the task that calls, `SystemExit` and `KeyboardInterrupt` end the event loop. Out
of a function of the program they all mean the same: this call has failed. Plain functions run in threads of their own,
which nobody waits for: one that hangs takes no thread from others, and does not hold up the end of the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from resilient.core.base.errors import ResilientError
from resilient.core.base.loops import PerLoop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MOST: Final = 32  # calls that somebody waits for at once, on one event loop
_turns: Final = PerLoop(lambda: asyncio.Semaphore(MOST))


class Escaped(ResilientError):
    """A function of the program's own raised what is no `Exception`; its ``__cause__`` is what it raised."""


class NoThread(Exception):
    """A function was not called: there is no thread for it."""


class CallResult(NamedTuple):
    """How a call in a thread ended: a value, so that no future has to carry an exception it refuses."""

    result: Any
    error: BaseException | None = None

    def unpacked(self) -> Any:
        """The result. Raises what it raised."""
        if self.error is not None:
            raise self.error
        return self.result


def tried(fn: Callable[[], Any]) -> CallResult:
    """Call a function; whatever it raises is returned."""
    try:
        return CallResult(fn())
    except BaseException as error:  # noqa: BLE001 - that is what it is for
        return CallResult(None, error)


def ends_task(error: BaseException) -> bool:
    """Whether an error is the cancellation of the task that runs, and not one that foreign code has raised."""
    if not isinstance(error, asyncio.CancelledError):
        return False
    try:
        task = asyncio.current_task()
    except RuntimeError:  # in a thread
        return False
    return task is not None and task.cancelling() > 0


@contextlib.contextmanager
def contained() -> Iterator[None]:
    """Around a call of foreign code: raises `Escaped` for whatever is no `Exception`.

    The cancellation of the task that runs it passes.
    """
    try:
        yield
    except BaseException as error:
        if (isinstance(error, Exception) and not isinstance(error, StopIteration)) or ends_task(error):
            raise
        raise Escaped(f"a function of the program raised {type(error).__name__}") from error


def is_async(fn: Any) -> bool:
    """Whether calling it makes a coroutine: a coroutine function, or an object with an async ``__call__``."""
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004


async def called(fn: Callable[..., Any], *args: Any) -> Any:
    """Call a function, a plain one in a thread, and await its result if that can be awaited.

    Raises the `Exception` it raises, and `Escaped` for anything else.
    """
    with contained():
        result = fn(*args) if is_async(fn) else await _in_thread(lambda: fn(*args))
        return await result if inspect.isawaitable(result) else result


async def _in_thread(fn: Callable[[], Any]) -> Any:
    loop = asyncio.get_running_loop()
    async with _turns.of(loop):
        end = await _one_thread(loop, fn)
    return end.unpacked()


def _one_thread(loop: asyncio.AbstractEventLoop, fn: Callable[[], Any]) -> asyncio.Future[CallResult]:
    future: asyncio.Future[CallResult] = loop.create_future()

    def call() -> None:
        end = tried(fn)
        with contextlib.suppress(RuntimeError):  # the loop is closed meanwhile
            loop.call_soon_threadsafe(_settle, future, end)

    threading.Thread(target=call, name="resilient-foreign", daemon=True).start()
    return future


def _settle(future: asyncio.Future[CallResult], end: CallResult) -> None:
    if not future.done():  # its caller was cancelled
        future.set_result(end)
