"""A timer of an event loop: it calls a function once, at the earliest time that it was set to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient.core.base.loggers import apart

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable


class Timer:
    """Calls ``call`` at the earliest time that was set since the last call."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._handle: asyncio.Handle | None = None
        self._at = 0.0  # the loop's time; kept here, because uvloop's handle may not tell it

    def call_by(self, loop: asyncio.AbstractEventLoop, at: float) -> None:
        """Call at the loop's time ``at``, or earlier if it was set so before."""
        if self._handle is not None:
            if self._at <= at:
                return
            self._handle.cancel()
        self._at, self._handle = at, loop.call_at(at, self._fire, context=apart())

    def cancel(self) -> None:
        """Do not call until it is set again."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self) -> None:
        self._handle = None
        self._call()
