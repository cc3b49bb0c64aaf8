"""Signals to pages that something changed: one LISTEN a process, however many pages are open.

A signal says only that there may be news; the page then fetches its live part again, and gets 304 if it is the same.
Signals come at most once a second, so that a burst of commits is one. On SQLite nothing can listen: pages poll.

This is plain streaming and not sse-starlette: there is one message without id or data, nothing to replay, and a
stream that ends is opened again by the browser. What would be left for a library is the end of the server, which
waits for open streams: `_is_stopping` looks for it, and no stream outlives `LONGEST`.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from resilient.store.db.wake import Listener

from starlette.responses import Response, StreamingResponse  # isort: skip - `visit` says which extra is missing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from sqlalchemy.engine import URL

    from resilient.store.db.database import Database
    from resilient.surface.web.dashboard.visit import Visit

MOST: Final = 500  # streams of one process; further pages poll
PACE: Final = 1.0  # seconds between two signals to one page
SETTLE: Final = 0.1  # seconds in which further commits join a signal
LONGEST: Final = 60.0  # seconds of one stream: a right that was taken away ends with it
SIGNAL: Final = "data: changed\n\n"
_BEAT: Final = "\n: still here\n\n"  # a proxy that hears nothing for long closes the stream
_BEATS: Final = 15.0  # seconds


class Bell:
    """Tells the open streams of a database that somebody committed; it listens while there is at least one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}
        self._listener: Listener | None = None

    @contextmanager
    def stream(self, database: Database, listen_url: URL | None) -> Iterator[asyncio.Event]:
        """An event of the running loop that every signal sets."""
        event = asyncio.Event()
        with self._lock:
            self._streams[event] = asyncio.get_running_loop()
            if self._listener is None:
                self._listener = Listener(database, self._ring, lambda _keys: self._ring(), listen_url=listen_url)
                self._listener.start()
        try:
            yield event
        finally:
            self._leave(event)

    def _leave(self, event: asyncio.Event) -> None:
        with self._lock:
            del self._streams[event]
            last = None if self._streams else self._listener
            self._listener = None if last is not None else self._listener
        if last is not None:  # closing it waits for its thread, which may be connecting
            threading.Thread(target=last.close, name="resilient-dashboard-bell", daemon=True).start()

    @property
    def is_full(self) -> bool:
        """Whether it has as many streams as it takes."""
        return len(self._streams) >= MOST

    def _ring(self) -> None:
        with self._lock:
            streams = list(self._streams.items())
        for event, loop in streams:
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)


_BELLS: Final[WeakKeyDictionary[Database, Bell]] = WeakKeyDictionary()
_MAKING: Final = threading.Lock()


async def live(visit: Visit) -> Response:
    """The stream of signals of one page; 204 on SQLite and where too many are open: then pages poll."""
    database = visit.app.database
    with _MAKING:
        bell = _BELLS.setdefault(database, Bell())
    if database.is_sqlite or bell.is_full:
        return Response(status_code=204, headers={"Cache-Control": "no-store"})
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(_signals(bell, visit), media_type="text/event-stream", headers=headers)


async def _signals(bell: Bell, visit: Visit) -> AsyncIterator[str]:
    began = sent_at = time.monotonic()
    with bell.stream(visit.app.database, visit.app.listen_url) as event:
        yield "retry: 2000\n\n"
        while time.monotonic() - began < LONGEST and not _is_stopping():
            if await _is_set_within(event, PACE):
                await asyncio.sleep(SETTLE)
                event.clear()
                yield SIGNAL
                sent_at = time.monotonic()
                await asyncio.sleep(PACE)
            elif time.monotonic() - sent_at >= _BEATS:
                yield _BEAT
                sent_at = time.monotonic()


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return False
    return True


def _is_stopping() -> bool:
    """Whether this process's uvicorn was told to stop: it waits for streams, and asks nobody else to end them."""
    server = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return bool(getattr(server, "should_exit", False))
