"""When a moment of the database's clock is on this process's own: at the earliest, at the latest.

Each exchange with the database that names its time brackets the difference of the two clocks: the time was read after
the question left and before the answer was here. The narrowest bracket of late is kept; drift widens it. A clock that
was set breaks it, and a new one begins.
"""

from __future__ import annotations

from typing import Final

_DRIFT: Final = 5e-4  # seconds a second, of two clocks that nobody disciplines
_ENOUGH: Final = 8  # exchanges after which the bracket is as narrow as the way to the database allows


class ClockBracket:
    """See the top of this file. Moments of the database are epoch seconds, one's own are monotonic."""

    def __init__(self) -> None:
        self._low = self._high = self._at = 0.0  # the database's clock less one's own
        self._exchanges = 0

    @property
    def settled(self) -> bool:
        """Whether more exchanges would not make it narrower."""
        return self._exchanges >= _ENOUGH

    def learn(self, moment: float, before: float, after: float) -> None:
        """The database's time was ``moment`` between these two of one's own."""
        drift = (after - before) * _DRIFT
        mine = moment - after - drift, moment - before + drift
        low, high = mine
        if self._exchanges:
            drift = (after - self._at) * _DRIFT
            low, high = max(low, self._low - drift), min(high, self._high + drift)
        if low > high:
            (low, high), self._exchanges = mine, 0
        self._low, self._high, self._at = low, high, after
        self._exchanges += 1

    def earliest(self, moment: float) -> float:
        """Before this of one's own, it is not yet ``moment`` there."""
        return moment - self._high

    def latest(self, moment: float) -> float:
        """From this of one's own on, it is ``moment`` there."""
        return moment - self._low
