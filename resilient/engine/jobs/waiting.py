"""`app.jobs.wait`: until jobs have ended, however many coroutines and threads wait, with one listener and one look.

Whoever waits says so (`Waker.tell_awaited`); workers then tell after each write that jobs have ended, and the listener
starts a look at all jobs that are waited for. What ends in another way (cancelled by hand, say), or without a
notification, is seen by the look that follows a second later. SQLite: every commit starts a look.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from resilient.core.base.errors import InvalidInput, JobNotFound, JobNotOver
from resilient.core.base.loops import PerLoop
from resilient.core.base.misfit import is_number
from resilient.core.base.tracing import running
from resilient.engine.ground.sessions import Transactions
from resilient.store.db import pool
from resilient.store.db.wake import ENDS, Listener
from resilient.store.jobs import queries

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from uuid import UUID

    from sqlalchemy import URL

    from resilient.core.jobs.records import JobInfo
    from resilient.engine.ground.ground import Ground

LOOK: Final = 1.0  # seconds between two looks, whatever was heard
TELL: Final = 1.0  # seconds after which workers that have started meanwhile are told
SHORTEST: Final = 0.01  # seconds between two looks at least
MOST: Final = 500  # jobs of one look
_LONGEST: Final = 1e9  # seconds


class Ends:
    """Hears of jobs that ended, for everybody of an app who waits: one listener, while somebody does."""

    def __init__(self, ground: Ground, listen_url: URL | None = None) -> None:
        self._ground, self._listen_url = ground, listen_url
        self.begin_anew()
        pool.renew_in_children(self)

    def begin_anew(self) -> None:
        """See `pool.renew_in_children`."""
        self._lock = threading.Lock()
        self._wakes: list[Callable[[], None]] = []
        self._listener: Listener | None = None
        self._tell_at = -1e9
        self._looks = PerLoop(lambda: _Look(self, Transactions(self._ground)))

    @contextlib.contextmanager
    def hearing(self, wake: Callable[[], None]) -> Iterator[None]:
        """``wake`` is called, from a thread, whenever jobs may have ended."""
        with self._lock:
            self._wakes.append(wake)
            if self._listener is None:
                database = self._ground.database
                self._listener = Listener(database, self._wake, listen_url=self._listen_url, suffix=ENDS)
                self._listener.start()
        try:
            yield
        finally:
            with self._lock:
                self._wakes.remove(wake)
                last, self._listener = (None, self._listener) if self._wakes else (self._listener, None)
            if last is not None:
                last.end()

    def _wake(self) -> None:
        for wake in list(self._wakes):
            wake()

    def tell(self) -> None:
        """Tell workers that somebody waits, often enough."""
        if time.monotonic() - self._tell_at >= TELL:
            self._tell_at = time.monotonic()
            self._ground.waker.tell_awaited()

    async def wait(self, id_: UUID) -> JobInfo:
        """Until the job has ended. Raises `JobNotFound`."""
        return await self._looks.of(asyncio.get_running_loop()).wait(id_)

    def wait_here(self, id_: UUID, seconds: float | None) -> JobInfo | None:
        """The same in this thread; None if it has not ended by then."""
        db, news = self._ground.database, threading.Event()
        self._ground.ready_sync()
        deadline = None if seconds is None else time.monotonic() + seconds
        with self.hearing(news.set):
            while True:
                self.tell()
                news.clear()
                ended = db.transaction_sync(queries.over, [id_])
                if id_ in ended:
                    return _or_missing(id_, ended[id_])
                rest = LOOK if deadline is None else min(LOOK, deadline - time.monotonic())
                if rest <= 0:
                    return None
                news.wait(rest)


class _Look:
    """Looks at all jobs that the coroutines of one event loop wait for, in one transaction."""

    def __init__(self, ends: Ends, db: Transactions) -> None:
        self._ends, self._db = ends, db
        self._waiting: dict[UUID, set[asyncio.Future[JobInfo]]] = {}
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def wait(self, id_: UUID) -> JobInfo:
        future: asyncio.Future[JobInfo] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(id_, set()).add(future)
        self._news.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="resilient-wait")
        try:
            return await future
        finally:
            waiting = self._waiting.get(id_, set())
            waiting.discard(future)
            if not waiting:
                self._waiting.pop(id_, None)
            if not self._waiting:
                self._news.set()

    async def _run(self) -> None:
        try:
            loop = asyncio.get_running_loop()
            with self._ends.hearing(lambda: _call(loop, self._news.set)):
                while self._waiting:
                    self._ends.tell()
                    self._news.clear()
                    await self._look()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(LOOK):
                            await self._news.wait()
                    await asyncio.sleep(SHORTEST)
        except Exception as error:  # noqa: BLE001 - those who wait are told
            for futures in self._waiting.values():
                for future in futures:
                    if not future.done():
                        future.set_exception(error)

    async def _look(self) -> None:
        ids = list(self._waiting)
        for start in range(0, len(ids), MOST):
            ended = await self._db.read(None, queries.over, ids[start : start + MOST])
            for id_, info in ended.items():
                for future in self._waiting.get(id_, ()):
                    if future.done():
                        continue
                    if info is None:
                        future.set_exception(JobNotFound(queries.missing(id_)))
                    else:
                        future.set_result(info)


def _call(loop: asyncio.AbstractEventLoop, fn: Callable[[], object]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(fn)


def _or_missing(id_: UUID, info: JobInfo | None) -> JobInfo:
    if info is None:
        raise JobNotFound(queries.missing(id_))
    return info


def require_waitable(id_: UUID) -> None:
    """Raises `InvalidInput` in a handler that would wait for itself."""
    if (run := running.get()) is None:
        return
    if id_ in (run.id, *run.ids):
        raise InvalidInput(f"job {id_} waits for its own end: that comes when its handler has returned")
    if run.transaction_open:
        raise InvalidInput(
            f"job {run.id} waits for job {id_} with a transaction of its own open, for which that may wait: end it"
            " before (the block of job.prepare() or job.checkpoint()), or wait before job.complete()"
        )


def checked_timeout(timeout: Any) -> float | None:
    """Seconds, or None for no end. Raises `InvalidInput`."""
    if timeout is None:
        return None
    if not is_number(timeout) or not 0 <= timeout < _LONGEST:
        raise InvalidInput(f"timeout={timeout!r}: give seconds, from 0 on, or None to wait without an end")
    return float(timeout)


def not_over(info: JobInfo, seconds: float | None) -> JobNotOver:
    """The error for a job that has not ended in time."""
    waited = f"job {info.id} ({info.kind}) is still {info.state} after {seconds:g} s"
    return JobNotOver(f"{waited}: `resilient jobs why {info.id}` says why")
