"""What sends requests, for programs and threads without an event loop: see `SyncSide`."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from resilient.core.base.errors import SetupError
from resilient.engine.ground.foreign import CallResult, tried
from resilient.engine.run.services import until_over
from resilient.store.db import pool

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from concurrent.futures import Future

    from resilient.core.inspect.whoami import RequestTest
    from resilient.engine.accounts.access import Access
    from resilient.engine.accounts.grants import Grants
    from resilient.engine.accounts.whoami import RequestTests
    from resilient.engine.alerts import Alerts
    from resilient.engine.ground.ground import Ground

T = TypeVar("T")


class Credentials(NamedTuple):
    """The features that `Resilient.credentials` and `Resources.test` need, on one ground."""

    alerts: Alerts
    grants: Grants
    tests: RequestTests


class _Side(NamedTuple):
    loop: asyncio.AbstractEventLoop
    thread: threading.Thread
    features: Credentials
    calls: set[Future[Any]]  # that threads wait for


class SyncSide:
    """``app.sync.credentials`` and ``app.sync.resources.test``, for programs and threads without an event loop.

    A refresh needs a loop for its request, and the app's own may be busy, or none. So there is one in a thread of its
    own, started by the first call, with its own connections to token endpoints; its transactions are synchronous. The
    app and this side share nothing but the database, as two processes do. ``make`` makes the features on a ground.
    """

    def __init__(self, ground: Ground, make: Callable[[Ground], Credentials]) -> None:
        self._ground, self._make = ground, make
        self.begin_anew()
        pool.renew_in_children(self)

    def begin_anew(self) -> None:
        """See `pool.renew_in_children`."""
        self._lock = threading.Lock()
        self._side: _Side | None = None

    def credentials(self, key: str) -> Access:
        """See `Resilient.credentials`. Raises `SetupError` if the app is closed while it waits."""
        self._ground.ready_sync()
        return self._run(lambda features: features.grants.required(key))

    async def test(self, key: str) -> RequestTest:
        """See `Resources.test`; it blocks its thread and awaits nothing. Raises `SetupError` as `credentials` does."""
        return self._run(lambda features: features.tests.send(key))

    def _run(self, ask: Callable[[Credentials], Coroutine[Any, Any, T]]) -> T:
        with self._lock:  # begun under it, too: `close` ends every call of the side that it takes away
            side = self._side = self._side or self._opened()
            call = asyncio.run_coroutine_threadsafe(ask(side.features), side.loop)
            side.calls.add(call)
        try:
            return call.result()
        except CancelledError:
            text = "the app was closed while a thread waited for credentials or an answer: ask again"
            raise SetupError(text) from None
        finally:
            side.calls.discard(call)

    def _opened(self) -> _Side:
        features, loop = self._make(self._ground.in_threads()), asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="resilient-sync", daemon=True)
        thread.start()
        return _Side(loop, thread, features, set())

    def close(self) -> None:
        """Stop the loop and its thread; `Resilient.close` does it too. The next call of `credentials` starts them.

        Refreshes under way end first. Calls that wait for anything else raise `SetupError`.
        """
        with self._lock:
            side, self._side = self._side, None
        if side is None:
            return
        asyncio.run_coroutine_threadsafe(side.features.grants.close(), side.loop).result()
        for call in side.calls.copy():
            call.cancel()
        asyncio.run_coroutine_threadsafe(_closed(side.features), side.loop).result()
        side.loop.call_soon_threadsafe(side.loop.stop)
        side.thread.join()
        side.loop.close()

    async def aclose(self) -> None:
        """`close`, in a thread of its own: the program may have filled those of its loop."""
        if self._side is None:
            return
        ended: list[CallResult] = []
        thread = threading.Thread(target=lambda: ended.append(tried(self.close)), name="resilient-sync-close")
        thread.start()
        await until_over(lambda: not thread.is_alive(), inf)
        ended[0].unpacked()


async def _closed(features: Credentials) -> None:
    """Close the features, and end what is left of calls that were cancelled."""
    await features.grants.close()  # a call may have begun a refresh while the others ended
    await features.alerts.close()
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_default_executor()
