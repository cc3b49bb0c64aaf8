"""Waking workers: a hint that there may be work, or that gates changed. Polling finds the same, later.

PostgreSQL: NOTIFY from a thread and connection of its own, after the commit and coalesced: inside the business
transaction it takes a database-wide lock at commit and cost 65 % of the throughput. It goes straight to libpq, because
busy publishers pay for each. A caller's Connection reports only that its commit begins: the thread looks for its end.
Whoever waits for jobs to end announces it now and then; only while somebody does, workers announce the ends of jobs,
on a channel of its own.
A worker hears it in its event loop (`_LoopReader`): a thread that hears it and then wakes the loop takes as long as the
NOTIFY took. A thread connects, and connects again; a lost connection is no matter of the loop.
SQLite: every commit changes ``PRAGMA data_version`` for other connections, so a thread looks at that.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import selectors
import socket
import sqlite3
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from resilient.core.base.loggers import logger
from resilient.core.jobs.backoff import spread_upwards
from resilient.store.db import pool
from resilient.store.db.file import place_of

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from sqlalchemy.engine import URL

    from resilient.store.db.database import Database
    from resilient.store.db.file import Place

log = logger("wake")
PAYLOAD: Final = 7_000  # bytes of one NOTIFY; PostgreSQL takes 8,000
COALESCE: Final = 0.01  # seconds between two NOTIFYs of one process
SQLITE_LOOK: Final = 0.01  # seconds between two looks at data_version
_LOOK_AT_FILE: Final = 0.5  # seconds between two checks whether the path names another file
_LOOKS: Final = round(_LOOK_AT_FILE / SQLITE_LOOK)
AWAITED: Final = "!awaited"  # no resource key: somebody waits for jobs to end
AWAITED_FOR: Final = 30.0  # seconds for which workers announce the ends of jobs, after somebody announced a wait
ENDS: Final = "_ends"  # suffix of the channel on which the ends of jobs are announced
_LOOK_AT_LOOP: Final = 0.5  # seconds between two checks whether the loop was closed before it ran a callback
# What only listens is idle for long; PostgreSQL before 14 has no such setting.
_STAYS_IDLE: Final = "SELECT set_config(name, '0', false) FROM pg_settings WHERE name = 'idle_session_timeout'"
RETRY: Final = 5.0  # seconds before listening again, plus up to half: a restart cuts every worker off at once


def listener_name(worker_id: str) -> str:
    """The ``application_name`` of a worker's LISTEN, by which `resilient doctor` knows it; at most 63 bytes."""
    return f"resilient {worker_id[-53:]}"


def channel(database: Database) -> str:
    """The NOTIFY channel of one schema."""
    name = f"{database.url.database}/{database.dialect.schema or ''}"
    return "resilient_" + hashlib.sha256(name.encode()).hexdigest()[:16]


class _LossLog:
    """Logs once that a connection for hints was lost, however often connecting fails."""

    def __init__(self, what: str, instead: str) -> None:
        self._what, self._instead, self._is_reported = what, instead, False

    def log_loss(self, error: Exception) -> None:
        """Log that it was lost, unless that was logged."""
        if not self._is_reported:
            message = (str(error).strip().splitlines() or [""])[0]
            log.warning("no %s (%s: %s); %s", self._what, type(error).__name__, message, self._instead)
        self._is_reported = True

    def log_recovery(self) -> None:
        """Log that there is one again, if the loss was logged."""
        if self._is_reported:
            log.info("%s works again", self._what)
        self._is_reported = False


class Waker:
    """Wakes the workers of other processes. Call `poke` and `tell` after the commit: they never block, never fail."""

    def __init__(self, database: Database, *, listen_url: URL | None = None) -> None:
        self._database, self._url = database, listen_url
        self.begin_anew()
        pool.renew_in_children(self)

    def begin_anew(self) -> None:
        """See `pool.renew_in_children`."""
        self._closed, self._poked = threading.Event(), threading.Event()
        self._work, self._has_ended, self._awaited_until = False, False, -1e9
        self._changed: set[str] = set()
        self._ending: deque[tuple[Callable[[], bool], Callable[[], None]]] = deque()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def poke(self) -> None:
        """Announce that there may be work."""
        self._work = True
        self._send()

    def tell(self, key: str) -> None:
        """Announce that a gate of this resource shut or opened: workers' snapshots are out of date."""
        self._changed.add(key)
        self._send()

    def tell_awaited(self) -> None:
        """Announce that somebody waits for jobs to end, for `AWAITED_FOR` seconds."""
        self.tell(AWAITED)

    def note_awaited(self) -> None:
        """A process has called `tell_awaited`: announce the ends of jobs for a while."""
        self._awaited_until = time.monotonic() + AWAITED_FOR

    def tell_ended(self) -> None:
        """Announce that jobs have ended; nothing is sent while nobody waits."""
        if time.monotonic() < self._awaited_until:
            self._has_ended = True
            self._send()

    def call_after(self, is_open: Callable[[], bool], then: Callable[[], None]) -> None:
        """Call ``then`` once a transaction whose commit begins now is over, and announce that there may be work."""
        self._ending.append((is_open, then))
        self._send()

    def _send(self) -> None:
        if self._database.is_sqlite:
            return
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    run, closed = self._run, self._closed
                    self._thread = threading.Thread(target=run, args=(closed,), name="resilient-waker", daemon=True)
                    self._thread.start()
        self._poked.set()

    def _run(self, closed: threading.Event) -> None:
        name, lost = channel(self._database).encode(), _LossLog("NOTIFY", "workers find the work by polling")
        while not closed.is_set() or self._poked.is_set():
            try:
                with _autocommit(self._database, self._url) as driver:
                    lost.log_recovery()
                    while True:
                        if not closed.is_set():  # the next thread, which shares the event, may have cleared it
                            self._poked.wait(COALESCE if self._ending else None)
                        self._poked.clear()
                        self._call_ended()
                        self._notify(driver.pgconn, name)  # also when closing: a short program may just have begun
                        if closed.is_set():
                            return
                        closed.wait(COALESCE)
            except Exception as error:  # noqa: BLE001 - a hint: polling goes on whatever happened
                lost.log_loss(error)
                if closed.wait(0.5):
                    return

    def _call_ended(self) -> None:
        for _ in range(len(self._ending)):
            is_open, then = self._ending.popleft()
            if is_open():
                self._ending.append((is_open, then))
            else:
                self._work = True  # no `poke`: this thread sends it, and that of a closed waker must start no other
                then()

    def _notify(self, libpq: Any, name: bytes) -> None:
        """Send every payload; one that a lost connection did not take is kept for the next connection."""
        if self._has_ended:  # lost, it costs those who wait a second
            self._has_ended = False
            libpq.exec_params(b"SELECT pg_notify($1, '')", [name + ENDS.encode()])
        for payload in self._payloads():
            with self._kept_if_gone(libpq, payload):
                done = libpq.exec_params(b"SELECT pg_notify($1, $2)", [name, payload.encode()])
                if done.error_message:
                    raise ConnectionError("the database took no NOTIFY")

    @contextlib.contextmanager
    def _kept_if_gone(self, libpq: Any, payload: str) -> Iterator[None]:
        try:
            yield
        except Exception:
            if libpq.status:  # not OK
                self._work = self._work or not payload
                self._changed.update(payload.split())
                self._poked.set()
            raise

    def _payloads(self) -> Iterator[str]:
        """The payloads to send: an empty one for work, then the changed keys, as many in each as fit."""
        if self._work:  # read before it is reset: a poke in between is sent now, one after it is a new one
            self._work = False
            yield ""
        while self._changed:
            keys, size = list[str](), 0
            while self._changed and size <= PAYLOAD - 300:
                keys.append(self._changed.pop())
                size += len(keys[-1]) + 1
            yield " ".join(keys)

    def end(self) -> threading.Thread | None:
        """Let the thread send what is pending and end. A later call of `poke` or `tell` starts another one."""
        with self._lock:
            thread, self._thread = self._thread, None
            closed, self._closed = self._closed, threading.Event()
        if thread is not None:
            self._database.await_end(thread)
        closed.set()
        self._poked.set()
        return thread

    def close(self) -> None:
        """`end`, and wait for it."""
        if (thread := self.end()) is not None:
            thread.join(timeout=2)


class Listener:
    """Calls ``wake`` whenever somebody may have committed work, ``changed`` with keys of gates.

    Both are called in the loop that `start` is given; without one, from a thread.
    """

    def __init__(
        self,
        database: Database,
        wake: Callable[[], None],
        changed: Callable[[Sequence[str]], None] | None = None,
        *,
        listen_url: URL | None = None,
        roll: Callable[[], float] = random.random,
        suffix: str = "",
        name: str = "",
    ) -> None:
        self._database, self._wake, self._changed, self._url = database, wake, changed, listen_url
        self._roll, self._suffix, self._name = roll, suffix, name
        self._stop = threading.Event()
        self._loop: AbstractEventLoop | None = None
        self._lost = _LossLog("LISTEN", "polling goes on")
        self._bell: socket.socket | None = None  # ends the wait for a NOTIFY, which looks at no event
        target = self._watch_sqlite if database.is_sqlite else self._listen
        self._thread = threading.Thread(target=target, name="resilient-listener", daemon=True)

    def start(self, loop: AbstractEventLoop | None = None) -> None:
        """Begin; ``loop``: where to hear NOTIFYs (a thread if it is None)."""
        self._loop = loop
        self._thread.start()

    def close(self) -> None:
        """Stop. The loop must run meanwhile."""
        self.end()
        self._thread.join(timeout=2)

    def end(self) -> None:
        """Let the thread end, without waiting for it: `Database.close` does."""
        self._database.await_end(self._thread)
        self._stop.set()
        self._ring()

    @property
    def is_over(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    def _ring(self) -> None:
        """End the thread's wait."""
        if (bell := self._bell) is not None:
            with contextlib.suppress(OSError):  # the thread has ended
                bell.send(b"!")

    def _listen(self) -> None:
        receiver, self._bell = socket.socketpair()
        with receiver, self._bell:
            while not self._stop.is_set():
                self._listen_once(receiver)

    def _listen_once(self, bell: socket.socket) -> None:
        try:
            with _autocommit(self._database, self._url) as driver:
                if self._name:
                    driver.execute("SELECT set_config('application_name', %s, false)", [self._name])
                driver.execute(f"LISTEN {channel(self._database)}{self._suffix}")
                self._lost.log_recovery()
                self._call(self._wake)  # what was committed before the LISTEN
                if self._loop is None:
                    self._hear(driver, bell)
                else:
                    self._hear_in_loop(driver, bell, self._loop)
        except Exception as error:  # noqa: BLE001 - a hint: polling goes on whatever happened
            if self._loop is not None and self._loop.is_closed():
                self._stop.set()
                return
            self._lost.log_loss(error)
            self._stop.wait(spread_upwards(RETRY, self._roll()))

    def _hear(self, driver: Any, bell: socket.socket) -> None:
        with selectors.DefaultSelector() as either:
            either.register(driver.fileno(), selectors.EVENT_READ)
            either.register(bell, selectors.EVENT_READ)
            while not self._stop.is_set():
                self._take(driver)
                either.select()

    def _hear_in_loop(self, driver: Any, bell: socket.socket, loop: AbstractEventLoop) -> None:
        """Let the loop read NOTIFYs until the listener is ended, or the connection is lost (raises its error)."""
        self._take(driver)  # what came with the answer to LISTEN
        reader = _LoopReader(driver.pgconn, loop, self._on_notify, self._ring)
        loop.call_soon_threadsafe(reader.open)
        bell.recv(1)
        loop.call_soon_threadsafe(reader.close)
        while not reader.closed.wait(_LOOK_AT_LOOP) and not loop.is_closed():
            pass  # the loop looks at the socket, which must not be closed, and its number given to another
        if reader.error is not None:
            raise reader.error

    def _take(self, driver: Any) -> None:
        for note in driver.notifies(timeout=0):
            self._call(self._on_notify, note.payload)

    def _on_notify(self, payload: str) -> None:
        if not payload:
            self._wake()
        elif self._changed is not None:
            self._changed(payload.split())

    def _call(self, fn: Callable[..., object], *args: Any) -> None:
        """Call it where it is to be called, from the thread."""
        if self._loop is None:
            fn(*args)
        else:
            self._loop.call_soon_threadsafe(fn, *args)

    def _watch_sqlite(self) -> None:
        if (file := self._database.disk) is None:
            return
        while not self._stop.is_set():
            if (place := place_of(file)) is not None:  # else it would be made here
                with contextlib.suppress(sqlite3.Error):  # polling goes on
                    self._watch_file(file, place)
            self._stop.wait(_LOOK_AT_FILE)

    def _watch_file(self, file: Path, place: Place) -> None:
        """Look for commits until the end, or until the path names another file."""
        with contextlib.closing(sqlite3.connect(file, timeout=1, check_same_thread=False)) as connection:
            last, looks = None, 0
            while not self._stop.is_set():
                time.sleep(SQLITE_LOOK)  # a third of what waiting for an event costs
                looks += 1
                if looks % _LOOKS == 0 and place_of(file) != place:
                    return
                with contextlib.suppress(sqlite3.OperationalError):
                    (version,) = connection.execute("PRAGMA data_version").fetchone()
                    if version != last:
                        last = version
                        try:
                            self._call(self._wake)
                        except RuntimeError:  # the loop is closed
                            self._stop.set()


class _LoopReader:
    """Hears a connection's NOTIFYs in an event loop; ``on_loss`` is called when there is an ``error``."""

    def __init__(
        self, libpq: Any, loop: AbstractEventLoop, on_notify: Callable[[str], None], on_loss: Callable[[], None]
    ) -> None:
        self._libpq, self._loop, self._number = libpq, loop, libpq.socket
        self._on_notify, self._on_loss = on_notify, on_loss
        self.closed = threading.Event()
        self.error: Exception | None = None

    def open(self) -> None:
        """Begin to hear, and hear what has come."""
        self._loop.add_reader(self._number, self._read)
        self._read()

    def close(self) -> None:
        """Look at the socket no more."""
        if not self.closed.is_set():
            with contextlib.suppress(OSError):  # libpq has closed it, and the kernel knows it no more
                self._loop.remove_reader(self._number)
            self.closed.set()

    def _read(self) -> None:
        try:
            self._libpq.consume_input()
            while (note := self._libpq.notifies()) is not None:
                self._on_notify(note.extra.decode())
        except Exception as error:  # noqa: BLE001 - raised in the listener's thread
            self.error = error
            self.close()
            self._on_loss()


@contextlib.contextmanager
def _autocommit(database: Database, listen_url: URL | None) -> Any:
    """A connection of psycopg's own, outside every pool."""
    import psycopg  # noqa: PLC0415 - the extra may be missing, and then nobody comes here

    with contextlib.closing(psycopg.connect(**database.driver_arguments(listen_url), autocommit=True)) as driver:
        database.watch.add(driver)
        driver.execute(_STAYS_IDLE)
        yield driver
