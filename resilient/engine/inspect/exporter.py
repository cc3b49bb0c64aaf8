"""The one process of a fleet that shows the database's gauges, so that no series comes twice.

It is elected by a lease when somebody reads: a fleet that nobody scrapes asks the database nothing. Another process
takes over once the lease has run out.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from resilient.core.base.loggers import logger
from resilient.store.inspect import gauges
from resilient.store.schedules import ticks

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

    from resilient.engine.ground.ground import Ground
    from resilient.store.inspect.gauges import Gauges

log = logger("metrics")
CACHED: Final = 10.0  # seconds
LEASE: Final = timedelta(seconds=45)  # beyond the usual intervals of a scrape, so that one process stays the one
CHORE: Final = "engine:metrics"


class Exporter:
    """Reads the gauges if this process is the one; from any thread."""

    def __init__(self, ground: Ground, destinations: Iterable[str]) -> None:
        self._database, self._destinations = ground.database, tuple(destinations)
        self._lease: datetime | None = None
        self._gauges: Gauges | None = None
        self._read_at = -1e9
        self._lock = threading.Lock()
        self.monotonic = time.monotonic
        self.is_reached = False  # the database answered the latest reading

    def read(self) -> Gauges | None:
        """The gauges, at most `CACHED` seconds old; None if another process shows them or the database is away."""
        with self._lock:
            if self.monotonic() - self._read_at >= CACHED:
                self._gauges, self._read_at = self._look(), self.monotonic()
            return self._gauges

    def _look(self) -> Gauges | None:
        try:
            self._lease = self._database.transaction_sync(ticks.lead, CHORE, self._lease, LEASE)
            self.is_reached = True
            return self._database.transaction_sync(gauges.read, self._destinations) if self._lease else None
        except Exception as error:  # noqa: BLE001 - a scrape shows what the process counts all the same
            self.is_reached = False
            log.warning("the database's gauges cannot be read (%s: %s)", type(error).__name__, error)
            return None
