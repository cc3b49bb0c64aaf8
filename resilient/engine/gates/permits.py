"""Leave to send a request, as the gate gives it out and takes it back, and the place kept for one that is to come."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from datetime import datetime

    from resilient.core.gates.breaker import Probes
    from resilient.engine.gates.drawing import Limits, TimedDraw
    from resilient.engine.gates.lessons import Flight


@dataclass(slots=True)
class GatePermit:
    """Leave to send one request: the generations it is sent under, and what was drawn for it."""

    key: str
    generations: tuple[int, ...]  # of `path(key)`
    probing: tuple[str, ...]
    sent_at: datetime
    elected: Probes = ()  # circuits it tries out by election of its own
    fresh_until: float = 0.0  # monotonic; the gates were looked at so lately
    draw: TimedDraw | None = field(default=None, repr=False)
    flights: tuple[Flight, ...] = field(default=(), repr=False)


@dataclass(slots=True)
class Reservation:
    """The place of a request that a job is about to send: what was drawn for it, by which limits, and its flight."""

    key: str
    cost: float
    limits: Limits
    flights: tuple[Flight, ...]
    draw: TimedDraw | None = None
    waited: float = 0.0  # seconds, for the place
    is_open: bool = True  # neither used nor given back
    timer: asyncio.TimerHandle | None = None  # at its end it is given back

    def take(self) -> bool:
        """Take it, once; whether it was there."""
        if self.timer is not None:
            self.timer.cancel()
        was_open, self.is_open = self.is_open, False
        return was_open
