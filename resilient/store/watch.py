"""Watching our own connections to PostgreSQL: a server that says nothing is noticed, whoever waits for it.

TCP tells of a host that is gone (`address.connect_args`). A server that is stopped, or a network that drops what it
takes, acknowledges everything and answers nothing: no timeout of TCP or of PostgreSQL's ends that. A deadline for each
statement would, and would also end what rightly waits for a lock. So a thread looks at the connections, which costs
the statements nothing: one that has been busy for `SUSPECT` seconds makes it ask the server over a new connection.

- No answer: the server is gone. Every connection that waits is cut; whoever waited hears `DatabaseUnreachable`.
- The server says that this session rests, or does not know it (it is another server now): that one is cut.
- The server says that the session works, or waits for a lock: so it does.

`SUSPECT`, `CONNECT`, `ANSWER` and a `TICK` make 12.5 seconds at most.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from resilient.store import forks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

log = logging.getLogger("resilient.database")
TICK: Final = 0.5  # seconds between two looks
SUSPECT: Final = 5.0  # seconds without an answer after which the server is asked
CONNECT: Final = 4  # seconds the new connection may take
ANSWER: Final = 3.0  # seconds its answer may take
LONG: Final = 60.0  # seconds a statement may take before the log tells of it
_BUSY: Final = 1  # libpq's PQTRANS_ACTIVE: a command is in progress
_SESSIONS: Final = (
    "SELECT pid, state, coalesce(extract(epoch FROM clock_timestamp() - state_change), 0)::float,"
    " pid = pg_backend_pid() FROM pg_stat_activity WHERE backend_type = 'client backend'"
)


class Session(NamedTuple):
    """What the server says of one of its sessions."""

    state: str
    seconds: float  # since it is in that state


Sessions = dict[int, Session]  # by process id; empty: nothing is known of them


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
        forks.renew_in_children(self)

    def begin_anew(self) -> None:
        """See `forks`."""
        self._lock = threading.Lock()
        self._drivers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._since: dict[Any, float] = {}
        self._asked_at = -1e9
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

    def close(self) -> None:
        """Stop; what is added later is watched again."""
        with self._lock:
            self._closed.set()
            self._thread = None

    def _run(self, closed: threading.Event) -> None:
        while not closed.wait(TICK):
            try:
                now = time.monotonic()
                self._also(now)
                self.look(now)
            except Exception as error:  # noqa: BLE001 - the next look comes soon
                log.debug("cannot look at the connections to %s: %s", self._address, type(error).__name__)

    def look(self, now: float) -> None:
        """Look once."""
        with self._lock:
            drivers = list(self._drivers)
        self._since = {one: self._since.get(one, now) for one in drivers if _is_busy(one)}
        late = [one for one, since in self._since.items() if now - since >= self.suspect]
        if not late or now - self._asked_at < self.suspect:
            return
        self._asked_at = now
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
        """Cut those that wait for nothing."""
        deaf: list[Any] = []
        for one in waiting:
            session, since = sessions.get(one.info.backend_pid), self._since[one]
            if session is None or (session.state != "active" and session.seconds >= self.suspect - TICK):
                deaf.append(one)
            elif now - since >= LONG:
                log.warning("a statement has been running on %s for %.0f s", self._address, now - since)
        if deaf:
            log.error(
                "the database %s answers, but not on %d of our connections: they are given up and opened anew",
                self._address, len(deaf),
            )  # fmt: skip
            cut(deaf)


def _is_busy(driver: Any) -> bool:
    return not driver.closed and driver.pgconn.transaction_status == _BUSY


def cut(drivers: Iterable[Any]) -> None:
    """Break connections that some other thread waits for: it hears that the server closed them."""
    for driver in drivers:
        with contextlib.suppress(Exception):  # closed meanwhile
            number = driver.pgconn.socket
            with socket.socket(fileno=os.dup(number)) as line:
                if driver.pgconn.socket == number:  # not closed, and its number given to another file, meanwhile
                    line.shutdown(socket.SHUT_RDWR)


def asking(arguments: dict[str, Any]) -> Callable[[], Sessions | None]:
    """How the server is asked: over a new connection with these arguments of psycopg's."""

    def ask() -> Sessions | None:
        import psycopg  # noqa: PLC0415 - the extra may be missing, and then nobody comes here

        try:
            c = psycopg.connect(**{**arguments, "connect_timeout": CONNECT}, autocommit=True)
        except psycopg.Error as error:  # refused by the server itself (too many clients, say): it lives
            return {} if error.sqlstate or "FATAL" in str(error) else None
        mine = c.info.backend_pid
        bound = threading.Timer(ANSWER, cut, [[c]])
        bound.start()
        try:
            rows = c.execute(_SESSIONS).fetchall()
        except psycopg.Error:
            return None
        finally:
            bound.cancel()
            c.close()
        if not any(pid == mine and own for pid, _, _, own in rows):  # a pooler in between has numbers of its own
            return {}
        return {pid: Session(state or "", seconds) for pid, state, seconds, _ in rows}

    return ask
