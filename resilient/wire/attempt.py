"""Short repeats within one call: tenacity's, bounded to a few tries in a few seconds.

Only what is safe to repeat comes here (see `exchange`). Whatever needs longer is the job's: it ends its
execution and waits as a row, so nobody sleeps on a claim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import tenacity
from tenacity import (
    DoSleep,
    RetryCallState,
    Retrying,
    stop_after_attempt,
    stop_before_delay,
    wait_random_exponential,
)

if TYPE_CHECKING:
    from resilient.core.failure import Failure
    from resilient.wire.pool import PoolSettings

FIRST: Final = 0.2  # seconds; full jitter, doubling
LONGEST: Final = 1.0


class _Failed(Exception):
    """Never raised, only shown to tenacity."""


class Repeats:
    """Decides between the tries of one call; made only once the first has failed."""

    __slots__ = ("_retrying", "_state")

    def __init__(self, settings: PoolSettings, started: float) -> None:
        """``started``: when the call began, by ``time.monotonic``."""
        stop = stop_after_attempt(settings.tries) | stop_before_delay(settings.tries_within)
        self._retrying = Retrying(stop=stop, wait=wait_random_exponential(multiplier=FIRST, max=LONGEST))
        self._retrying.begin()
        self._state = RetryCallState(self._retrying, None, (), {})
        self._state.start_time = started

    def next_delay(self, failure: Failure) -> float | None:
        """Seconds until the next try, or None if this was the last. A told wait is never undercut."""
        self._state.set_exception((_Failed, _Failed(), None))
        try:
            step = self._retrying.iter(self._state)
        except tenacity.RetryError:
            return None
        if not isinstance(step, DoSleep):
            return None
        self._state.prepare_for_next_attempt()
        if failure.retry_in is not None and failure.retry_in > step:
            return None
        return float(step)
