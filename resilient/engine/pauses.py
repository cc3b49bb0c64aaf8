"""Time that a handler waits inside the engine: for a refresh, at the gate, for a draw, for a mark's commit.

It does not count against the handler's timeout, because waiting costs no attempt. Each such wait ends by itself, with
an admission or a deferral. Together they prolong a call by no more than its timeout or `LEAST`, whichever is longer, so
that a timeout ends even what waits all the time in one branch while another hangs.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from resilient.engine.batch_run import BatchRun
    from resilient.engine.execution import Execution

LEAST: Final = 60.0  # seconds


class Pausable:
    """What has a timeout. Its attributes change on the worker's loop alone."""

    # Class attributes: most executions never change them.
    waits = 0  # requests that wait inside the engine now
    waits_since = 0.0  # loop time at which the first of them began
    waited_before = 0.0  # seconds of the waits that have ended

    def pause(self, now: float) -> float:
        """Seconds in which at least one of its requests waited."""
        return self.waited_before + (now - self.waits_since if self.waits else 0.0)


class InEngine:
    """A block in which a handler waits for the engine: ``with InEngine(execution):``."""

    __slots__ = ("_unit",)

    def __init__(self, execution: Execution) -> None:
        self._unit: Execution | BatchRun = execution.run or execution

    def __enter__(self) -> None:
        unit = self._unit
        if not unit.waits:
            unit.waits_since = asyncio.get_running_loop().time()
        unit.waits += 1

    def __exit__(self, *_: object) -> None:
        unit = self._unit
        unit.waits -= 1
        if not unit.waits:
            unit.waited_before += asyncio.get_running_loop().time() - unit.waits_since


def is_overdue(execution: Execution, now: float) -> bool:
    """Whether its handler has used up its timeout. While the engine's database is away, waiting for it counts too."""
    timeout = execution.handler.timeout
    if timeout is None or not execution.started or now - execution.started < timeout:
        return False
    if execution.away is not None:
        return True
    pause = min((execution.run or execution).pause(now), max(timeout, LEAST))
    return now - execution.started - pause >= timeout
