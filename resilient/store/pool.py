"""One budget of connections for a process, however many engines it has.

SQLAlchemy's pools each keep what they once opened, and know nothing of each other: a worker held up to ninety of the
hundred that PostgreSQL gives by default. Here a connection is taken under a permit (`Share`), first come, first served,
by threads and coroutines alike. A pool that must open one while all of the budget are open closes one that rests in
another pool: since a permit is held, there is one. What has rested for `IDLE` seconds is closed. Waiting holds nothing.

Handlers' sessions have a share within the budget that leaves two for the engine, so that handlers that hold one each,
and ask for a second, wait for no one who waits for them. Heartbeat and finish have pools of one connection each.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.pool import ConnectionPoolEntry, Pool
from sqlalchemy.util import await_only

if TYPE_CHECKING:
    from collections.abc import Sequence

DEFAULT: Final = 10  # connections of a process
RESERVED: Final = 4  # for listening, telling, heartbeat and finish
LEAST: Final = 6
IDLE: Final = 30.0  # seconds until a connection that rests is closed
PATIENCE: Final = 30.0  # seconds somebody waits for a permit


class _Waiter:
    """Somebody who waits for a permit, in a thread or on a loop."""

    def __init__(self, *, asynchronous: bool) -> None:
        self.granted = False
        self._event = None if asynchronous else threading.Event()
        self._loop = asyncio.get_running_loop() if asynchronous else None
        self._future = None if self._loop is None else self._loop.create_future()

    def grant(self) -> bool:
        """Say that it has one; False if nobody can hear it any more. Call it under the share's lock."""
        self.granted = True
        if self._event is not None:
            self._event.set()
        elif self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(self._tell)
            except RuntimeError:  # the loop is closed
                return False
        return True

    def _tell(self) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    def wait(self, seconds: float) -> None:
        """Until it is granted, or the time is over."""
        if self._event is not None:
            self._event.wait(seconds)
        elif self._future is not None:
            await_only(asyncio.wait([self._future], timeout=seconds))


class Share:
    """Permits to use a connection, given in the order in which they were asked for."""

    def __init__(self, size: int) -> None:
        self._free, self._waiters, self._lock = size, deque[_Waiter](), threading.Lock()

    def take(self, seconds: float, *, asynchronous: bool) -> None:
        """A permit. Raises SQLAlchemy's ``TimeoutError``."""
        with self._lock:
            if self._free > 0:
                self._free -= 1
                return
            waiter = _Waiter(asynchronous=asynchronous)
            self._waiters.append(waiter)
        try:
            waiter.wait(seconds)
        except BaseException:  # cancelled
            if not self._left(waiter):
                self.give()
            raise
        if self._left(waiter):
            raise PoolTimeout(f"no connection within {seconds:g} s")

    def _left(self, waiter: _Waiter) -> bool:
        """Whether it goes away without a permit."""
        with self._lock:
            if not waiter.granted:
                self._waiters.remove(waiter)
            return not waiter.granted

    def give(self) -> None:
        """A permit back."""
        with self._lock:
            while self._waiters:
                if self._waiters.popleft().grant():
                    return
            self._free += 1


class Budget:
    """How many connections some pools may have open together."""

    def __init__(self, size: int) -> None:
        self._size, self._open, self._lock = size, 0, threading.Lock()
        self._pools: weakref.WeakSet[BudgetPool] = weakref.WeakSet()

    def join(self, pool: BudgetPool) -> None:
        """One more pool."""
        with self._lock:
            self._pools.add(pool)

    def _all(self) -> list[BudgetPool]:
        with self._lock:
            return list(self._pools)

    def open_one(self) -> None:
        """Count one that is about to be opened, and make room for it."""
        with self._lock:
            self._open += 1
            crowded = self._open > self._size
        if crowded:
            any(pool.close_one() for pool in self._all())

    def closed_one(self) -> None:
        """Count one that is not open any more."""
        with self._lock:
            self._open -= 1

    def close_idle(self, now: float) -> None:
        """Close what has rested for long."""
        for pool in self._all():
            while pool.close_one(before=now - IDLE):
                pass


class Connections:
    """The connections of a process: what is reserved, and what its engines share. ``most`` is all of them."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.begin_anew()

    def begin_anew(self) -> None:
        """In a forked child: nothing is open, and nobody waits."""
        shared = max(1, self.most - RESERVED)
        self.budget, self._general, self._sessions = Budget(shared), Share(shared), Share(max(1, shared - 2))

    def place(self, pool: Pool, use: str, patience: float = PATIENCE) -> None:
        """Give a pool its place by its use: "engine", "sessions" or "reserved" (one connection of its own)."""
        assert isinstance(pool, BudgetPool)  # noqa: S101 - ours
        if use == "reserved":
            pool.place(Budget(1), [Share(1)], patience)
        elif use == "sessions":
            pool.place(self.budget, [self._sessions, self._general], patience)
        else:
            pool.place(self.budget, [self._general], patience)


class BudgetPool(Pool):
    """The connections of one engine that rest; see the top of this file. `place` says to what it belongs."""

    _is_asyncio = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._resting: deque[tuple[ConnectionPoolEntry, float]] = deque()
        self._over = False
        self.place(Budget(1), [Share(1)])

    def place(self, budget: Budget, shares: Sequence[Share], patience: float = PATIENCE) -> None:
        """Count here, and take a permit of each of these shares, in this order."""
        self._budget, self._shares, self._patience = budget, tuple(shares), patience
        budget.join(self)

    def _do_get(self) -> ConnectionPoolEntry:
        with contextlib.ExitStack() as undo:
            for share in self._shares:
                share.take(self._patience, asynchronous=self._is_asyncio)
                undo.callback(share.give)
            with contextlib.suppress(IndexError):
                entry = self._resting.pop()[0]
                undo.pop_all()
                return entry
            self._budget.open_one()
            undo.callback(self._budget.closed_one)
            entry = self._create_connection()
            undo.pop_all()
            return entry

    def _do_return_conn(self, record: ConnectionPoolEntry) -> None:
        if self._over or record.dbapi_connection is None:
            self._finish(record)
        else:
            self._resting.append((record, time.monotonic()))
        for share in reversed(self._shares):
            share.give()

    def close_one(self, before: float | None = None) -> bool:
        """Close the one that has rested longest, if it has since ``before``; whether there was one."""
        try:
            entry, since = self._resting.popleft()
        except IndexError:
            return False
        if before is not None and since > before:
            self._resting.appendleft((entry, since))
            return False
        self._finish(entry)
        return True

    def _finish(self, entry: Any) -> None:
        """Close it at once, from any thread and outside every loop: libpq says goodbye and asks for no answer."""
        connection, entry.dbapi_connection = entry.dbapi_connection, None
        if connection is not None:
            with contextlib.suppress(Exception):  # it is gone
                getattr(connection, "driver_connection", connection).pgconn.finish()
        self._budget.closed_one()

    def recreate(self) -> Pool:
        """The pool of an engine that was disposed of."""
        new = type(self)(
            self._creator, recycle=self._recycle, echo=self.echo, logging_name=self._orig_logging_name,
            reset_on_return=self._reset_on_return, pre_ping=self._pre_ping, _dispatch=self.dispatch,
            dialect=self._dialect,
        )  # fmt: skip
        new.place(self._budget, self._shares, self._patience)
        return new

    def dispose(self) -> None:
        """Close what rests, and what is in use once it comes back."""
        self._over = True
        while self.close_one():
            pass

    def status(self) -> str:
        """For logs."""
        return f"{len(self._resting)} connections rest"


class AsyncBudgetPool(BudgetPool):
    """The same for an asynchronous engine."""

    _is_asyncio = True
