"""The database server of a bench, as far as its CPU time can be read."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from resilient.surface.bench.cpu import postmaster, server_cpu

if TYPE_CHECKING:
    from resilient.surface.scratch import Scratch

_SETTLE: Final = 0.1  # seconds: an ending connection is for a moment neither a process nor its parent's past


class Server:
    """Reads the CPU seconds of the PostgreSQL server, if it runs here; SQLite has none."""

    def __init__(self, place: Scratch) -> None:
        self._pid = None
        if not place.is_sqlite:
            import psycopg  # noqa: PLC0415 - needs the postgres extra

            with psycopg.connect(place.conninfo, autocommit=True) as c:
                self._pid = postmaster(c)

    def cpu(self) -> float | None:
        """CPU seconds so far; None where they cannot be read."""
        return server_cpu(self._pid)

    def total(self, workers: float, before: float | None) -> float:
        """The workers' CPU seconds and the server's since ``before``."""
        time.sleep(_SETTLE)
        now = self.cpu()
        used = now - before if now is not None and before is not None else 0.0
        return round(workers + used, 3)
