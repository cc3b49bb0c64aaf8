"""A clock that moves only when told: ``Resilient(Database(url, clock=clock.now), ...)``, then ``clock.advance(60)``."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

START: Final = datetime(2030, 1, 1, 12, tzinfo=UTC)


class FakeClock:
    """Tells a time you set."""

    def __init__(self, start: datetime = START) -> None:
        self.time = start

    def now(self) -> datetime:
        """The time, aware UTC."""
        return self.time

    def advance(self, seconds: float = 0.0, *, minutes: float = 0.0, hours: float = 0.0, days: float = 0.0) -> datetime:
        """Move forward; returns the new time."""
        self.time += timedelta(seconds=seconds, minutes=minutes, hours=hours, days=days)
        return self.time

    def set(self, time: datetime) -> None:
        """Jump."""
        self.time = time
