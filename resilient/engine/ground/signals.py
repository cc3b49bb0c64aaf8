"""The signals that stop a process, and how often it was given one."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
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
