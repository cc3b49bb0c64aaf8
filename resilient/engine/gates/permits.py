"""The gate's part of a permit to send a request, and the reservation for a request that is about to come."""

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
    """The gate's part of a permit: the generations that the request is sent under, and its draw."""

    key: str
    generations: tuple[int, ...]  # of `path(key)`
    probing: tuple[str, ...]  # resources whose circuits it tries out
    sent_at: datetime
    elected: Probes = ()  # circuits it tries out by election of its own
    fresh_until: float = 0.0  # monotonic; the gates were looked at so lately
    draw: TimedDraw | None = field(default=None, repr=False)
    flights: tuple[Flight, ...] = field(default=(), repr=False)


@dataclass(slots=True)
class Reservation:
    """What is reserved for the request that a job is about to send: its draw, its limits and its flights."""

    key: str
    cost: float
    limits: Limits
    flights: tuple[Flight, ...]
    draw: TimedDraw | None = None
    waited: float = 0.0  # seconds, for the draw's moment
    is_open: bool = True  # neither used nor given back
    timer: asyncio.TimerHandle | None = None  # at its end it is given back

    def take(self) -> bool:
        """Use it up; returns False if it was used or given back before."""
        if self.timer is not None:
            self.timer.cancel()
        was_open, self.is_open = self.is_open, False
        return was_open
