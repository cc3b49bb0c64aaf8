"""Where alerts go: the log, functions, webhooks.

A sink that fails or hangs hurts nobody: it has a time limit, three tries if it is a webhook, and a line in the log.
Plain functions run in a thread.
"""

from __future__ import annotations

import asyncio
import logging
import random
from asyncio import sleep
from typing import TYPE_CHECKING, Final

from resilient.core.delays import spread_upwards
from resilient.engine.foreign import called
from resilient.wire import notify

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from resilient.core.alerts import Notice, Sink

log = logging.getLogger("resilient.alerts")
LONGEST: Final = 10.0  # seconds one sink may take for one notice
PAUSES: Final = (1.0, 5.0)  # seconds before a webhook is tried again, plus up to half: a fleet meets one outage
MOST_WAITING: Final = 10  # batches under way, beyond which the log has to do


class Sinks:
    """Tells people, beside everything else."""

    def __init__(self, sinks: Sequence[Sink], roll: Callable[[], float] = random.random) -> None:
        self._sinks, self._roll = tuple(sinks), roll
        self._under_way: set[asyncio.Task[None]] = set()

    def tell(self, notices: Sequence[Notice]) -> None:
        """Log notices now and begin to deliver them."""
        for one in notices:
            level = logging.INFO if one.state == "resolved" else logging.WARNING
            log.log(level, "%s: %s", one.alert.name, one.text)
        if not notices or not self._sinks:
            return
        if len(self._under_way) >= MOST_WAITING:
            log.warning("the sinks of alerts are too slow: %d alerts are only logged", len(notices))
            return
        task = asyncio.get_running_loop().create_task(self._deliver(tuple(notices)), name="resilient-alerts")
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def delivered(self) -> None:
        """Wait for what is under way."""
        await asyncio.gather(*self._under_way, return_exceptions=True)

    async def _deliver(self, notices: Sequence[Notice]) -> None:
        await asyncio.gather(*(_deliver(sink, notices, self._roll) for sink in self._sinks))


async def _deliver(sink: Sink, notices: Sequence[Notice], roll: Callable[[], float]) -> None:
    for number, one in enumerate(notices):
        try:
            if isinstance(sink, str):
                await _post(sink, one, roll)
            else:
                async with asyncio.timeout(LONGEST):
                    await called(sink, one)
        except Exception as error:  # noqa: BLE001 - somebody else's code or server
            left = len(notices) - number
            log.warning("%d alerts did not reach %s: %s", left, _name(sink), _reason(error))
            return


async def _post(url: str, notice: Notice, roll: Callable[[], float]) -> None:
    document = notice.to_json()
    for pause in PAUSES:
        try:
            async with asyncio.timeout(LONGEST):
                return await notify.post(url, document)
        except (notify.NotDelivered, TimeoutError):
            await sleep(spread_upwards(pause, roll()))
    async with asyncio.timeout(LONGEST):
        return await notify.post(url, document)


def _name(sink: Sink) -> str:
    if isinstance(sink, str):
        return f"the webhook at {notify.host_of(sink)}"
    return f"the function {getattr(sink, '__qualname__', type(sink).__name__)}"


def _reason(error: Exception) -> str:
    """What may be logged: our own words, or the name of a stranger's exception."""
    return str(error) if isinstance(error, notify.NotDelivered) else type(error).__name__
