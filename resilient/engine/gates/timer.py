"""One call on an event loop, at the earliest of the times that were asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient.core.base.loggers import apart

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable


class Timer:
    """Calls ``call``, once for all that was asked for until then."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._handle: asyncio.Handle | None = None
        self._at = 0.0  # the loop's time; kept beside, for uvloop's handle may not know

    def ring_by(self, loop: asyncio.AbstractEventLoop, at: float) -> None:
        """Have it called at the loop's time ``at``, or before."""
        if self._handle is not None:
            if self._at <= at:
                return
            self._handle.cancel()
        self._at, self._handle = at, loop.call_at(at, self._ring, context=apart())

    def cancel(self) -> None:
        """Have it not called."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _ring(self) -> None:
        self._handle = None
        self._call()
