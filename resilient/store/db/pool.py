"""Connections: one budget for a process, however many engines it has, and the watch over those to PostgreSQL.

SQLAlchemy's pools each keep what they once opened, and know nothing of each other: a worker held up to ninety of the
hundred that PostgreSQL gives by default. Here a connection is taken under a permit (`Share`), first come, first served,
by threads and coroutines alike. A pool that must open one while all of the budget are open closes one that rests in
another pool: since a permit is held, there is one. What has rested for `IDLE` seconds is closed. Waiting holds nothing.

Of the ten of a process four are reserved: listening, notifying, heartbeat and finish have one each. Six are shared
(claims, staging, what a program asks), and handlers' sessions hold at most four of these (`Connections.of_handlers`):
the engine keeps two, so that it goes on while handlers that hold one connection each wait for a second one.

After a fork (a preforking server, `multiprocessing`) the child leaves the parent's connections alone: two processes on
one connection read each other's answers. Threads do not live on in a child either. Whatever has connections or threads
begins anew there (`renew_in_children`). A SQLite file must not even be open when its process forks: see below.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import socket
import stat
import sys
import threading
import time
import weakref
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.pool import ConnectionPoolEntry, Pool
from sqlalchemy.util import await_only

from resilient.core.base.loggers import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from sqlalchemy import Engine

DEFAULT: Final = 10  # connections of a process
RESERVED: Final = 4  # for listening, notifying, heartbeat and finish
KEPT: Final = 2  # of the others: what handlers' sessions leave
LEAST: Final = RESERVED + 2
LAST_CONNECT: Final = 5.0  # seconds a thread that ends may still take: as long as to connect (`connect_args`)
IDLE: Final = 30.0  # seconds until a connection that rests is closed
_HAS_POLL: Final = hasattr(select, "poll")
TIMEOUT: Final = 30.0  # seconds somebody waits for a permit, or for both that a session needs

for _name in ("BudgetPool", "AsyncBudgetPool"):  # SQLAlchemy logs what drivers say, by the name of the pool's class
    logger(f"store.db.pool.{_name}").setLevel(logging.WARNING)  # each connection that an outage ends: who waits says so


class _Waiter:
    """Somebody who waits for a permit, in a thread or on a loop."""

    def __init__(self, *, asynchronous: bool) -> None:
        self.granted = False
        self._event = None if asynchronous else threading.Event()
        self._loop = asyncio.get_running_loop() if asynchronous else None
        self._future = None if self._loop is None else self._loop.create_future()

    def grant(self) -> bool:
        """Give it the permit; False if its loop is closed. Call it under the share's lock."""
        if self._event is not None:
            self._event.set()
        elif self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(self._tell)
            except RuntimeError:  # the loop is closed
                return False
        self.granted = True
        return True

    def _tell(self) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    def wait(self, seconds: float) -> None:
        """Wait until the permit is granted, or the time is over."""
        if self._event is not None:
            self._event.wait(seconds)
        elif self._future is not None:
            await_only(asyncio.wait([self._future], timeout=seconds))


class Share:
    """Permits to use a connection, given in the order in which they were asked for."""

    def __init__(self, size: int) -> None:
        self._free, self._waiters, self._lock = size, deque[_Waiter](), threading.Lock()

    def take(self, seconds: float, *, asynchronous: bool) -> None:
        """Take a permit. Raises SQLAlchemy's ``TimeoutError``."""
        with self._lock:
            if self._free > 0:
                self._free -= 1
                return
            waiter = _Waiter(asynchronous=asynchronous)
            self._waiters.append(waiter)
        try:
            waiter.wait(seconds)
        except BaseException:  # cancelled
            if not self._withdraw(waiter):
                self.give()
            raise
        if self._withdraw(waiter):
            raise PoolTimeout(f"no connection within {seconds:g} s")

    def _withdraw(self, waiter: _Waiter) -> bool:
        """Stop waiting; True if it goes away without a permit."""
        with self._lock:
            if not waiter.granted:
                with contextlib.suppress(ValueError):  # its loop is closed, so `give` has passed over it
                    self._waiters.remove(waiter)
            return not waiter.granted

    def give(self) -> None:
        """Give a permit back."""
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
        """Count the connections of one more pool."""
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
    """The connections of a process.

    ``most`` is all of them: `RESERVED` ones, and ``shared`` ones, of which handlers' sessions hold ``of_handlers``.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.shared = max(1, most - RESERVED)
        self.of_handlers = max(1, self.shared - KEPT)
        self.begin_anew()

    def begin_anew(self) -> None:
        """In a forked child: forget what was open, and who waited."""
        self.budget = Budget(self.shared)
        self._general, self._sessions = Share(self.shared), Share(self.of_handlers)

    def place(self, pool: Pool, use: str, timeout: float = TIMEOUT) -> None:
        """Give a pool its place by its use: "engine", "sessions" or "reserved" (one connection of its own)."""
        assert isinstance(pool, BudgetPool)  # noqa: S101 - ours
        if use == "reserved":
            pool.place(Budget(1), [Share(1)], timeout)
        elif use == "sessions":
            pool.place(self.budget, [self._sessions, self._general], timeout)
        else:
            pool.place(self.budget, [self._general], timeout)


class BudgetPool(Pool):
    """The idle connections of one engine; see the top of this file. `place` gives it its budget and shares."""

    _is_asyncio = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._resting: deque[tuple[ConnectionPoolEntry, float]] = deque()
        self._over = False
        self.place(Budget(1), [Share(1)])

    def place(self, budget: Budget, shares: Sequence[Share], timeout: float = TIMEOUT) -> None:
        """Count here, and take a permit of each of these shares, in this order."""
        self._budget, self._shares, self._timeout = budget, tuple(shares), timeout
        budget.join(self)

    def _do_get(self) -> ConnectionPoolEntry:
        deadline = time.monotonic() + self._timeout  # for all permits together
        with contextlib.ExitStack() as undo:
            for share in self._shares:
                share.take(max(0.0, deadline - time.monotonic()), asynchronous=self._is_asyncio)
                undo.callback(share.give)
            while (entry := self._take_resting()) is not None:
                if not has_word(_driver(entry.dbapi_connection)):
                    undo.pop_all()
                    return entry
                self._finish(entry)
            self._budget.open_one()
            undo.callback(self._budget.closed_one)
            entry = self._create_connection()
            undo.pop_all()
            return entry

    def _take_resting(self) -> ConnectionPoolEntry | None:
        try:
            return self._resting.pop()[0]
        except IndexError:
            return None

    def _do_return_conn(self, record: ConnectionPoolEntry) -> None:
        if record.dbapi_connection is None:
            self._finish(record)
        else:
            self._resting.append((record, time.monotonic()))
            if self._over:  # looked at behind the append: `dispose` may have been called in between
                self.dispose()
        for share in reversed(self._shares):
            share.give()

    def close_one(self, before: float | None = None) -> bool:
        """Close the connection that is idle for longest, if it is since ``before``; False if there is none."""
        try:
            if before is not None and self._resting[0][1] > before:  # not taken out: it may be needed at this moment
                return False
            entry, _ = self._resting.popleft()
        except IndexError:
            return False
        self._finish(entry)
        return True

    def _finish(self, entry: Any) -> None:
        """Close it at once, from any thread and outside every loop: libpq waits for no answer."""
        connection, entry.dbapi_connection = entry.dbapi_connection, None
        if connection is not None:
            with contextlib.suppress(Exception):  # it is gone
                _driver(connection).pgconn.finish()
        self._budget.closed_one()

    def recreate(self) -> Pool:
        """The pool of an engine that was disposed of."""
        new = type(self)(
            self._creator, recycle=self._recycle, echo=self.echo, logging_name=self._orig_logging_name,
            reset_on_return=self._reset_on_return, pre_ping=self._pre_ping, _dispatch=self.dispatch,
            dialect=self._dialect,
        )  # fmt: skip
        new.place(self._budget, self._shares, self._timeout)
        return new

    def dispose(self) -> None:
        """Close what rests, and what is in use once it comes back."""
        self._over = True
        while self.close_one():
            pass

    def status(self) -> str:
        """For logs."""
        return f"{len(self._resting)} connections rest"


def end(engine: Engine) -> None:
    """Close what an engine has open. It is not used again: whoever still does so leaves no connection at rest."""
    engine.dispose()
    engine.pool.dispose()  # the one that `Engine.dispose` has put in its place


class AsyncBudgetPool(BudgetPool):
    """The same for an asynchronous engine."""

    _is_asyncio = True


# -- forked children ---------------------------------------------------------------------------------------------------
#
# libsqlite3 keeps in memory which files its process has locked. A child inherits that memory, but none of the locks: on
# a file that was open at the fork it would take none, another process would hold itself to be the last one that has the
# file open, and would delete the log with the commits of the child. So each SQLite database is closed before a fork,
# and what is open then nevertheless (a session of a handler, a connection of the program's own) is never used in the
# child, by whatever object: `PARENTS_FILES`.

FORK_WAIT: Final = 5.0  # seconds that a fork may wait for the transactions of other threads


class Renewed(Protocol):
    """An object that has connections or threads."""

    def begin_anew(self) -> None:
        """Forget in a child what was opened or started, without I/O, and without closing anything of the parent's."""


class Paused(Protocol):
    """An object that must have nothing open while its process forks."""

    def pause(self, seconds: float) -> bool:
        """Close what rests, and open nothing until `resume`; False if that cannot be had within so many seconds."""

    def resume(self) -> None:
        """The fork is done: in the parent, and in the child."""


_RENEWED: Final[weakref.WeakSet[Any]] = weakref.WeakSet()
_PAUSED: Final[weakref.WeakSet[Any]] = weakref.WeakSet()
_LOCK: Final = threading.RLock()
_forking: Final = threading.local()
PARENTS_POOLS: Final[list[object]] = []  # kept for ever in a child: if they were collected, they would be closed
PARENTS_FILES: Final[dict[int, tuple[int, int]]] = {}  # in a child: the files that were open at the fork, by number


def renew_in_children(one: Renewed) -> None:
    """Call `Renewed.begin_anew` in every forked child."""
    _RENEWED.add(one)


def pause_for_forks(one: Paused) -> None:
    """Call `Paused.pause` before every fork."""
    with _LOCK:
        _PAUSED.add(one)


def is_parents(path: Path) -> bool:
    """Whether a file was open when this process was forked, and still is."""
    if not PARENTS_FILES:
        return False
    try:
        place = path.stat()
    except OSError:
        return False
    id_ = place.st_dev, place.st_ino
    return any(one == id_ and _file_of(number) == id_ for number, one in PARENTS_FILES.items())


def _before_fork() -> None:
    _LOCK.acquire()  # until the fork is done: a child inherits no lock that nobody will release
    deadline = time.monotonic() + FORK_WAIT
    paused = _forking.paused = []
    paused.extend(one for one in list(_PAUSED) if one.pause(max(0.0, deadline - time.monotonic())))


def _resume() -> None:
    paused = _forking.__dict__.pop("paused", None)
    if paused is not None:
        for one in paused:
            one.resume()
        _LOCK.release()


def _in_child() -> None:
    _resume()
    PARENTS_FILES.clear()
    PARENTS_FILES.update((number, id_) for number in _numbers() if (id_ := _file_of(number)) is not None)
    for one in list(_RENEWED):
        one.begin_anew()


def _numbers() -> Iterable[int]:
    """The numbers of the open files, or all that there may be."""
    with contextlib.suppress(KeyError, OSError):
        return [int(one.name) for one in Path(_OPEN[sys.platform]).iterdir()]
    return range(min(os.sysconf("SC_OPEN_MAX"), _MOST_FILES))


_OPEN: Final = {"linux": "/proc/self/fd", "darwin": "/dev/fd"}
_MOST_FILES: Final = 65_536


def _file_of(number: int) -> tuple[int, int] | None:
    """The device and inode of an open file; None for a socket, or if it is closed."""
    try:
        place = os.fstat(number)
    except OSError:
        return None
    return (place.st_dev, place.st_ino) if stat.S_ISREG(place.st_mode) else None


if hasattr(os, "register_at_fork"):  # not on Windows, which forks nothing
    os.register_at_fork(before=_before_fork, after_in_parent=_resume, after_in_child=_in_child)


# -- the watch --------------------------------------------------------------------------------------------------------
#
# Watching our own connections to PostgreSQL: a server that does not answer is noticed, whatever waits for it.
#
# TCP notices a host that is gone (`address.connect_args`). A server that is stopped, or a network that drops what it
# takes, acknowledges everything and answers nothing: no timeout of TCP or of PostgreSQL's ends that. A deadline for
# each statement would, and would also end what rightly waits for a lock. So a thread looks at the connections, which
# costs the statements nothing: one that has been busy for `SUSPECT` seconds makes it ask the server over a new
# connection.
#
# - No answer: the server is gone. Every connection that waits is cut; what waited raises `DatabaseUnreachable`.
# - The server reports that the session is idle, or has no such session (it is another server now): that one is cut.
# - The server reports that the session is active, or waits for a lock: it is left alone.
#
# `SUSPECT`, `CONNECT`, `ANSWER` and a `TICK` make 12.5 seconds at most.

log = logger("database")
TICK: Final = 0.5  # seconds between two looks
SUSPECT: Final = 5.0  # seconds without an answer after which the watch queries the server
CONNECT: Final = 4  # seconds the new connection may take
ANSWER: Final = 3.0  # seconds its answer may take
LONG: Final = 60.0  # seconds a statement may take before it is logged
_BUSY: Final = 1  # libpq's PQTRANS_ACTIVE: a command is in progress
_SESSIONS: Final = (
    "SELECT pid, state, coalesce(extract(epoch FROM clock_timestamp() - state_change), 0)::float,"
    " pid = pg_backend_pid() FROM pg_stat_activity WHERE backend_type = 'client backend'"
)


class Session(NamedTuple):
    """One of the server's sessions, as `pg_stat_activity` reports it."""

    state: str
    seconds: float  # since it is in that state


Sessions = dict[int, Session]  # by process id; empty: the server reported none


class Watch:
    """Watches the connections it is given; ``ask`` gives the server's sessions, None if it does not answer.

    ``also`` is called with each look.
    """

    def __init__(
        self,
        address: str,
        ask: Callable[[], Sessions | None],
        *,
        suspect: float = SUSPECT,
        also: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._address, self._ask, self.suspect, self._also = address, ask, suspect, also
        self.begin_anew()
        renew_in_children(self)

    def begin_anew(self) -> None:
        """See `pool.renew_in_children`."""
        self._lock = threading.Lock()
        self._drivers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._since: dict[Any, float] = {}
        self._loud_at: dict[Any, float] = {}  # seconds after which a statement is logged, doubled each time
        self._last_ask = -1e9
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, driver: Any) -> None:
        """Watch a psycopg connection until it is closed."""
        with self._lock:
            self._drivers.add(driver)
            if self._thread is None:
                closed = self._closed = threading.Event()
                self._thread = threading.Thread(target=self._run, args=(closed,), name="resilient-watch", daemon=True)
                self._thread.start()

    def close(self) -> threading.Thread | None:
        """Stop; what is added later is watched again. Returns the thread that ends."""
        with self._lock:
            self._closed.set()
            thread, self._thread = self._thread, None
        return thread

    def _run(self, closed: threading.Event) -> None:
        while not closed.wait(TICK):
            try:
                now = time.monotonic()
                self._also(now)
                self.look(now)
            except Exception as error:  # noqa: BLE001 - the next look comes soon
                log.debug("cannot look at the connections to %s: %s", self._address, type(error).__name__)

    def look(self, now: float) -> None:
        """Look at the connections once."""
        with self._lock:
            drivers = list(self._drivers)
        self._since = {one: self._since.get(one, now) for one in drivers if _is_busy(one)}
        self._loud_at = {one: self._loud_at.get(one, LONG) for one in self._since}
        late = [one for one, since in self._since.items() if now - since >= self.suspect]
        if not late or now - self._last_ask < self.suspect:
            return
        self._last_ask = now
        sessions = self._ask()
        waiting = [one for one in late if _is_busy(one)]
        if sessions is None:
            log.error(
                "the database %s has not answered for %.0f s, nor does it answer a new connection: what waits for it is"
                " given up (%d connections) and tried again", self._address, time.monotonic() - self._since[late[0]],
                len(waiting),
            )  # fmt: skip
            cut(waiting)
        elif sessions:
            self._compare(waiting, sessions, now)

    def _compare(self, waiting: list[Any], sessions: Sessions, now: float) -> None:
        """Cut connections whose sessions are idle or gone."""
        deaf: list[Any] = []
        for one in waiting:
            session, since = sessions.get(one.info.backend_pid), self._since[one]
            if session is None or (session.state != "active" and session.seconds >= self.suspect - TICK):
                deaf.append(one)
            elif now - since >= self._loud_at[one]:
                self._loud_at[one] = 2 * (now - since)
                pid = one.info.backend_pid
                log.warning("a statement has been running on %s for %.0f s (pid %d)", self._address, now - since, pid)
        if deaf:
            log.error(
                "the database %s answers, but not on %d of our connections: they are given up and opened anew",
                self._address, len(deaf),
            )  # fmt: skip
            cut(deaf)


def _driver(connection: Any) -> Any:
    """The connection of psycopg's beneath SQLAlchemy's adapter, if there is one."""
    return getattr(connection, "driver_connection", connection)


def has_word(driver: Any) -> bool:
    """Whether something came on a connection at rest: its end, as a rule; then a program's next call must not meet it.

    After a failover, or a restart of the server or of a pooler, every connection at rest is like that.
    """
    if driver.closed:
        return True
    number = driver.pgconn.socket
    if _HAS_POLL:
        poll = select.poll()
        poll.register(number, select.POLLIN)
        return bool(poll.poll(0))
    return bool(select.select([number], [], [], 0)[0])  # Windows


def _is_busy(driver: Any) -> bool:
    return not driver.closed and driver.pgconn.transaction_status == _BUSY


def cut(drivers: Iterable[Any]) -> None:
    """Break connections that some other thread waits for: it gets the error of a server that closed them."""
    for driver in drivers:
        with contextlib.suppress(Exception):  # closed meanwhile
            number = driver.pgconn.socket
            with socket.socket(fileno=os.dup(number)) as line:
                if driver.pgconn.socket == number:  # not closed, and its number given to another file, meanwhile
                    line.shutdown(socket.SHUT_RDWR)


def asking(arguments: dict[str, Any]) -> Callable[[], Sessions | None]:
    """A function that reads the server's sessions over a new connection with these arguments of psycopg's."""

    def ask() -> Sessions | None:
        import psycopg  # noqa: PLC0415 - the extra may be missing, and then nobody comes here

        try:
            c = psycopg.connect(**{**arguments, "connect_timeout": CONNECT}, autocommit=True)
        except psycopg.Error as error:  # refused by the server itself (too many clients, say): it lives
            return {} if error.sqlstate or "FATAL" in str(error) else None
        own_pid = c.info.backend_pid
        bound = threading.Timer(ANSWER, cut, [[c]])
        bound.start()
        try:
            rows = c.execute(_SESSIONS).fetchall()
        except psycopg.Error:
            return None
        finally:
            bound.cancel()
            c.close()
        if not any(pid == own_pid and own for pid, _, _, own in rows):  # a pooler in between has numbers of its own
            return {}
        return {pid: Session(state or "", seconds) for pid, state, seconds, _ in rows}

    return ask
