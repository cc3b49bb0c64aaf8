"""The signals that stop a process, who hears them, and how often it was given one."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

SAME_WITHIN: Final = (
    1.0  # seconds in which signals are one: a terminal and a wrapper (`uv run`, `timeout`) each send theirs
)


class SignalCount:
    """Counts signals to stop; those within a second are one."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic, self._at, self._count = monotonic, float("-inf"), 0

    def next(self) -> int:
        """Count one more: 1 for the first, 2 for the second, and so on; 0 for one that is the same as before."""
        now = self._monotonic()
        if now - self._at < SAME_WITHIN:
            return 0
        self._at = now
        self._count += 1
        return self._count


def stop_signals() -> list[int]:
    """SIGTERM, SIGINT, and that of a terminal which closes, unless the process was told to ignore it (``nohup``)."""
    hangup: int | None = getattr(signal, "SIGHUP", None)  # not on Windows
    is_heard = hangup is not None and signal.getsignal(hangup) is not signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *([hangup] if hangup is not None and is_heard else [])]


class _Registration(NamedTuple):
    """One signal of a loop: who listens, the handler that asyncio installed for it, and the one that was there."""

    listeners: list[Callable[[], None]]
    handler: Any
    previous: Any


_LISTENERS: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, dict[int, _Registration]]] = WeakKeyDictionary()


def hear(loop: asyncio.AbstractEventLoop, listener: Callable[[], None]) -> Callable[[], None]:
    """Call ``listener`` at each of `stop_signals`, until what this returns is called; all workers of a loop hear.

    A signal that a web server hears, or that the program has given to its loop, stays theirs: a server that is deaf to
    SIGTERM stops for nobody, and it ends the worker as it ends whatever it has begun. A handler that the program has
    given to `signal.signal` is put back when the last listener leaves.
    """
    by_number, numbers = _LISTENERS.setdefault(loop, {}), list[int]()
    for number in stop_signals():
        if number not in by_number:
            if _is_anothers(loop, number):
                continue
            previous = signal.getsignal(number)
            listeners: list[Callable[[], None]] = []
            try:
                loop.add_signal_handler(number, _tell, loop, listeners)
            except (NotImplementedError, RuntimeError, ValueError):  # not the main thread, or Windows
                break
            by_number[number] = _Registration(listeners, signal.getsignal(number), previous)
        by_number[number].listeners.append(listener)
        numbers.append(number)

    def leave() -> None:
        while numbers:
            number = numbers.pop()
            by_number[number].listeners.remove(listener)
            if not by_number[number].listeners:
                _give_back(loop, number, by_number.pop(number))

    return leave


def _tell(loop: asyncio.AbstractEventLoop, listeners: list[Callable[[], None]]) -> None:
    for listener in listeners:
        loop.call_soon(listener)  # one that raises keeps the signal from no other


def _give_back(loop: asyncio.AbstractEventLoop, number: int, registration: _Registration) -> None:
    """Remove a handler from the loop; the process gets the one it had before, or keeps what it was given since."""
    current = signal.getsignal(number)
    loop.remove_signal_handler(number)  # sets the default one
    handler = registration.previous if current == registration.handler else current
    if handler is not None:  # None: not of Python, which cannot set it
        signal.signal(number, handler)


def _is_anothers(loop: asyncio.AbstractEventLoop, number: int) -> bool:
    """Whether a signal is heard by uvicorn, or by whoever gave it to the loop (of asyncio or uvloop)."""
    handler = signal.getsignal(number)
    owner = getattr(handler, "__self__", None)
    return getattr(handler, "__name__", "") == "_sighandler_noop" or owner is loop or hasattr(owner, "should_exit")
