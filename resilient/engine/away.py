"""What a running job does while the engine's own database is away.

A pooled connection may have been cut while it rested, so everything is tried twice. Beyond that, what has done nothing
yet is handed back: it costs nothing to run it again. What has done something that must not be done twice waits here,
for as long as its lease and its timeout allow, because its outcome is known and only cannot be written.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final, TypeVar

from resilient.core.delays import spread_upwards
from resilient.store import trouble

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from resilient.engine.execution import Execution

T = TypeVar("T")
LONGEST_PAUSE: Final = 10.0
LONGEST_INSIDE: Final = 1.0  # while a handler waits


def retry_pause(tries: int, roll: float, longest: float = LONGEST_PAUSE) -> float:
    """Seconds to wait before talking to a database that did not answer, growing to ``longest``, plus up to half.

    ``roll``, from 0 to below 1, spreads it: the workers of a fleet lose their database at one moment, and must not all
    come back to it at another.
    """
    return spread_upwards(min(0.1 * 2 ** min(tries, 10), longest), roll)


async def patiently(execution: Execution, step: Callable[[], Awaitable[T]]) -> T:
    """``step``, which writes nothing twice when it is repeated; see the top of this file."""
    tries = 0
    while True:
        try:
            result = await step()
        except Exception as error:
            if _gives_up(execution, error, tries):
                raise
        else:
            execution.away = None
            return result
        await asyncio.sleep(retry_pause(tries, execution.worker.rng.random(), LONGEST_INSIDE))
        tries += 1


def patiently_sync(execution: Execution, step: Callable[[], T]) -> T:
    """`patiently` for threads."""
    tries = 0
    while True:
        try:
            result = step()
        except Exception as error:
            if _gives_up(execution, error, tries):
                raise
        else:
            execution.away = None
            return result
        time.sleep(retry_pause(tries, execution.worker.rng.random(), LONGEST_INSIDE))
        tries += 1


def _gives_up(execution: Execution, error: Exception, tries: int) -> bool:
    """Note that the database is away; whether that is for the handler to know."""
    stopped = execution.over or execution.lost or execution.reason is not None
    waits = trouble.met(error) and not stopped and (execution.effect is not None or not tries)
    execution.away = error if waits else execution.away if stopped else None
    return not waits
