"""The signals that stop a process, who hears them, and how often it was given one."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

SAME: Final = 1.0  # seconds in which signals are one: a terminal and a wrapper (`uv run`, `timeout`) each send theirs


class SignalCount:
    """Counts signals to stop; those within a second are one."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic, self._at, self._count = monotonic, float("-inf"), 0

    def next(self) -> int:
        """Count one more: 1 for the first, 2 for the second, and so on; 0 for one that is the same as before."""
        now = self._monotonic()
        if now - self._at < SAME:
            return 0
        self._at = now
        self._count += 1
        return self._count


def stop_signals() -> list[int]:
    """SIGTERM, SIGINT, and that of a terminal which closes, unless the process was told to ignore it (``nohup``)."""
    hangup: int | None = getattr(signal, "SIGHUP", None)  # not on Windows
    is_heard = hangup is not None and signal.getsignal(hangup) is not signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *([hangup] if hangup is not None and is_heard else [])]


_HEARD: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, dict[int, list[Callable[[], None]]]]] = WeakKeyDictionary()


def hear(loop: asyncio.AbstractEventLoop, listener: Callable[[], None]) -> Callable[[], None]:
    """Call ``listener`` at each of `stop_signals`, until what this returns is called; all workers of a loop hear.

    A signal that a web server hears, or that the program has given to its loop, stays theirs: a server that is deaf to
    SIGTERM stops for nobody. It ends the worker as it ends whatever it has begun.
    """
    by_number, numbers = _HEARD.setdefault(loop, {}), list[int]()
    for number in stop_signals():
        if number not in by_number:
            if _is_anothers(loop, number):
                continue
            listeners: list[Callable[[], None]] = []
            try:
                loop.add_signal_handler(number, _tell, listeners)
            except (NotImplementedError, RuntimeError, ValueError):  # not the main thread, or Windows
                break
            by_number[number] = listeners
        by_number[number].append(listener)
        numbers.append(number)

    def leave() -> None:
        for number in numbers:
            by_number[number].remove(listener)
            if not by_number[number]:
                del by_number[number]
                loop.remove_signal_handler(number)

    return leave


def _tell(listeners: list[Callable[[], None]]) -> None:
    for listener in list(listeners):
        listener()


def _is_anothers(loop: asyncio.AbstractEventLoop, number: int) -> bool:
    """Whether a signal is heard by uvicorn, or by whoever gave it to the loop (of asyncio or uvloop)."""
    handler = signal.getsignal(number)
    owner = getattr(handler, "__self__", None)
    return getattr(handler, "__name__", "") == "_sighandler_noop" or owner is loop or hasattr(owner, "should_exit")
