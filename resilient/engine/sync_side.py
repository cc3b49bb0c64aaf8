"""`app.sync`, and credentials for programs and threads without an event loop.

A refresh needs a loop for its request, and the app's own may be busy, or none. So there is one in a thread of its own,
made with the first question, with its own connections to token endpoints; transactions are the synchronous ones. What
several sides of one program must agree on, they agree on in the database, as several processes would.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from resilient.engine.alerts import Alerts
from resilient.store import forks

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from resilient.engine.access import Access
    from resilient.engine.app import Resilient
    from resilient.engine.grants import Grants
    from resilient.store.circuits import Change
    from resilient.store.database import Database

T = TypeVar("T")


class SyncApp:
    """The synchronous face of an app: the same names, for threads and scripts."""

    def __init__(self, app: Resilient) -> None:
        self._app = app
        self.enqueue = app.enqueue_sync
        self.enqueue_many = app.enqueue_many_sync
        self.workflow = app.workflow_sync
        self.workflows = app.workflows.sync
        self.jobs = app.jobs.sync
        self.resources = app.resources.sync
        self.streams = app.streams.sync
        self.inbox = app.inbox.sync
        self.outbox = app.outbox.sync
        self.schedules = app.schedules.sync
        self.connections = app.connections.sync
        self.webhooks = app.webhooks.sync
        self.alerts = app.alerts.sync
        self.prune = app.prune_sync
        side = SyncSide(app)
        self.credentials, self.close = side.credentials, side.close


class _InThreads:
    """A `Database` whose transactions for coroutines run in threads: its engine belongs to no other loop."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def __getattr__(self, name: str) -> Any:
        return getattr(self._database, name)

    async def transaction(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """See `Database.transaction`."""
        return await asyncio.to_thread(self._database.transaction_sync, fn, *args, **kwargs)


class _Side:
    """An app as its credentials see it, on another loop."""

    def __init__(self, app: Resilient) -> None:
        self._app = app
        self.database = _InThreads(app.database)
        self.alerts = Alerts(self, app.alerts.config)  # type: ignore[arg-type]
        self.grants = app.grants.twin(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._app, name)

    def circuit_changed(self, change: Change) -> None:
        """See `Resilient.circuit_changed`."""
        self.alerts.circuit(change)


class SyncSide:
    """The loop, its thread, and the credentials that live there."""

    def __init__(self, app: Resilient) -> None:
        self._app = app
        self.begin_anew()
        forks.renew_in_children(self)

    def begin_anew(self) -> None:
        """See `forks`."""
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._side: _Side | None = None

    def credentials(self, key: str) -> Access:
        """See `Resilient.credentials`."""
        self._app.ready_sync()
        return self._run(lambda grants: grants.required(key))

    def _run(self, ask: Callable[[Grants], Coroutine[Any, Any, T]]) -> T:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="resilient-sync", daemon=True)
                self._thread.start()
                self._side = _Side(self._app)
            loop, side = self._loop, self._side
        assert side is not None  # noqa: S101 - made with the loop
        return asyncio.run_coroutine_threadsafe(ask(side.grants), loop).result()

    def close(self) -> None:
        """End the refreshing of credentials beside; `Resilient.close` does it too. It begins anew when needed."""
        with self._lock:
            loop, side, thread = self._loop, self._side, self._thread
            self._loop = self._side = self._thread = None
        if loop is None or side is None or thread is None:
            return
        asyncio.run_coroutine_threadsafe(_closed(side), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _closed(side: _Side) -> None:
    await side.grants.close()
    await side.alerts.close()
    await asyncio.get_running_loop().shutdown_default_executor()
