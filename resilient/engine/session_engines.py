"""The engines of handlers' sessions: apart from the engine's own connections, which keep leases and write results.

Handlers may hold as many transactions open as there are slots; they wait for each other's connections here, and never
take the last one from the heartbeat. An engine that was handed over serves both, as its owner has set it up.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from resilient.core.errors import SetupError

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from resilient.store.database import Database

PATIENCE: Final = 120.0  # seconds a handler waits for a connection


class SessionEngines:
    """Made on first use, closed with the app."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._sync: Engine | None = None
        self._async: AsyncEngine | None = None

    @property
    def synchronous(self) -> Engine:
        """For plain handlers."""
        database = self._database
        if database.is_sqlite or not database.is_own:
            return database.sync_engine
        with self._lock:
            if self._sync is None:
                self._sync = database.new_engine("sessions", patience=PATIENCE)
            return self._sync

    @property
    def asynchronous(self) -> AsyncEngine:
        """For ``async def`` handlers."""
        database = self._database
        if not database.is_own and (handed_over := database.async_engine) is not None:
            return handed_over
        if self._async is None:
            self._async = self._made_async()
        return self._async

    def _made_async(self) -> AsyncEngine:
        database = self._database
        if not database.is_sqlite:
            return database.new_async_engine("sessions", patience=PATIENCE)
        if database.file is None:
            raise SetupError("a database in memory has no second connection for sessions: use a file")
        url, options = database.url.set(drivername="sqlite+aiosqlite"), {"timeout": 30}
        return create_async_engine(url, hide_parameters=True, connect_args=options)

    async def close(self) -> None:
        """Close what was made here."""
        if self._async is not None:
            await self._async.dispose()
        if self._sync is not None:
            self._sync.dispose()
