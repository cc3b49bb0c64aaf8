"""The system under the engine: clock, dice, ids, SQLite's locks and the faults of its connections, all from one seed.

The engine's own code runs on it unchanged. Replaced are only its ways out of the process: the monotonic clock, random
numbers, ids, connections to SQLite (a lock that is taken fails at once and is waited for in virtual time), the threads
of aiosqlite, the heartbeat's thread and the listener's.
"""

from __future__ import annotations

import contextlib
import gc
import random
import secrets
import sqlite3
import sqlite3.dbapi2 as dbapi
import sys
import time
import types
import uuid
import weakref
from collections import deque
from datetime import UTC, datetime, timedelta
from functools import cache

import aiosqlite.core
import uuid_utils

from resilient import DatabaseUnreachable
from resilient.engine.accounts import grants
from resilient.engine.inspect import retention
from resilient.engine.run import heartbeat, services, worker
from resilient.store.db import database
from resilient.store.db.database import Database
from resilient.store.db.direct import is_direct
from resilient.store.jobs import leases
from tests.simulation.loop import PROCESS, Crashed, Loop, Process

EPOCH = datetime(2030, 1, 1, tzinfo=UTC)
BUSY = 30.0  # seconds that a connection waits for the lock


class System:
    """One run's clock, dice and faults."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.loop = Loop(random.Random(self.rng.random()), lambda: self.rng.uniform(0.0001, 0.003))
        self.step = 0.0  # seconds by which the wall clock was set
        self.faults = {}  # process -> list of (countdown of transactions, point, deed)
        self.notes = []  # what happened, for the report
        self._ids = 0
        self._probe, self._connections = None, []

    # -- time --------------------------------------------------------------------------------------------------

    def now(self):
        return EPOCH + timedelta(seconds=self.loop.now - 1_000.0 + self.step)

    def note(self, text):
        self.notes.append(f"{self.loop.now - 1_000.0:9.4f} {text}")

    def uuid7(self, *_):
        """In the order of creation, as the real ones are, from this run's dice."""
        self._ids += 1
        milliseconds = int(self.now().timestamp() * 1_000)
        value = milliseconds << 80 | 7 << 76 | (self._ids & 0xFFF) << 64 | 2 << 62 | self._ids << 20
        return uuid.UUID(int=value | self.rng.getrandbits(20))

    # -- faults of transactions ----------------------------------------------------------------------------------

    def plan(self, process, count, point, deed):
        """At the ``count``-th transaction from now, "before", "inside" or "after": "crash" or "cut"."""
        self.faults.setdefault(process, []).append([count, point, deed])

    def _due(self, process):
        """The fault of this transaction, if it is its turn."""
        for fault in self.faults.get(process, ()):
            fault[0] -= 1
            if fault[0] == 0:
                return fault[1], fault[2]
        return None, None

    def _strike(self, process, deed, where):
        self.note(f"{process}: {deed} {where}")
        if deed == "crash":
            process.kill()
            raise Crashed
        raise DatabaseUnreachable(f"simulated: the connection was cut {where}")

    def transaction_sync(self, original):
        def run(database, fn, *args, **kwargs):
            process = PROCESS.get()
            point, deed = self._due(process)
            name = getattr(fn, "__name__", str(fn))
            if point == "before":
                self._strike(process, deed, f"before {name}")

            def inside(c, d, *args, **kwargs):
                result = fn(c, d, *args, **kwargs)
                if point == "inside":
                    self._strike(process, deed, f"in {name}")
                return result

            inside.direct = is_direct(fn)
            result = original(database, inside, *args, **kwargs)
            if point == "after":
                self._strike(process, deed, f"after the commit of {name}")
            return result

        return run

    # -- SQLite ------------------------------------------------------------------------------------------------

    def connect(self, original):
        loop = weakref.ref(self.loop)  # a connection's functions hide from the collector what they keep: it stays open

        def connect(path, *args, **kwargs):
            kwargs.update(timeout=0, check_same_thread=False)
            connection = original(path, *args, **kwargs)
            connection.create_function("virtual_seconds", 0, lambda: loop().now - 1_000.0)
            self._connections.append(connection)
            if (process := PROCESS.get()) is not None:
                process.at_death.append(lambda: contextlib.suppress(sqlite3.Error) and _roll_back(connection))
            return connection

        return connect

    def watch(self, path):
        """Calls in threads wait for whoever writes to this file."""
        self._probe = sqlite3.connect(path, timeout=0, isolation_level=None)
        self.loop.may_block = self._is_locked

    def _is_locked(self):
        if not any(map(self._is_inside, tuple(self._connections))):
            return False
        try:
            self._probe.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return True
        self._probe.execute("ROLLBACK")
        return False

    def _is_inside(self, connection):
        """Whether it is in a transaction, that of a reader too."""
        try:
            return connection.in_transaction
        except sqlite3.ProgrammingError:  # it was closed
            self._connections.remove(connection)
            return False

    # -- the ways out -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def installed(self):
        """Everything replaced, and put back afterwards."""
        loop, rng, real = self.loop, self.rng, random.Random

        class Dice(real):
            def __init__(self, seed=None):
                super().__init__(rng.random() if seed is None else seed)

        replaced = [
            (time, "monotonic", loop.time),
            (leases, "clock", loop.time),
            (random, "Random", Dice),
            (secrets, "token_hex", lambda n=8: f"{rng.getrandbits(8 * n):0{2 * n}x}"),
            (uuid, "uuid4", lambda: uuid.UUID(int=rng.getrandbits(128), version=4)),
            (sqlite3, "connect", self.connect(sqlite3.connect)),
            (dbapi, "connect", self.connect(dbapi.connect)),
            (aiosqlite.core, "SimpleQueue", lambda: Queue(self)),
            (aiosqlite.core, "Thread", NoThread),
            (Database, "transaction_sync", self.transaction_sync(Database.transaction_sync)),
            (database, "_sqlite_engine", _like_the_first(database._sqlite_engine)),
            (retention.keep, "__defaults__", (loop.time, *retention.keep.__defaults__[1:])),
            (grants, "LEASE", 3.0),
            (worker, "Heartbeat", Heartbeat),
            (services, "Listener", Listener),
            *((module, "uuid7", self.uuid7) for module in _with_ids()),
            (uuid_utils, "uuid7", self.uuid7),
        ]
        before = [(place, name, getattr(place, name)) for place, name, _ in replaced]
        for place, name, value in replaced:
            setattr(place, name, value)
        random.seed(rng.random())  # the dice of libraries
        gc.disable()  # a coroutine of a killed process runs on when it is collected: not before the end
        try:
            yield self
        finally:
            for place, name, value in before:
                setattr(place, name, value)
            self.loop.bury()
            self._close_connections()

    def _close_connections(self):
        """Those of killed processes too: caches keep this system, and each would hold its file open for ever."""
        for connection in self._connections:
            connection.close()
        self._connections.clear()
        self.loop.may_block = None

    def process(self, name, coroutine_function, *args):
        """Start a process; (process, its main task)."""
        process = Process(name)
        token = PROCESS.set(process)
        try:
            return process, self.loop.create_task(coroutine_function(*args), name=name)
        finally:
            PROCESS.reset(token)


_ENGINES = []


def _like_the_first(original):
    """Engines that share what SQLAlchemy has compiled: there are some for each process of each run."""

    def make(url):
        engine = original(url)
        _ENGINES.append(engine) if not _ENGINES else None
        engine.dialect, engine._compiled_cache = _ENGINES[0].dialect, _ENGINES[0]._compiled_cache
        return engine

    return make


@cache
def _with_ids():
    """The engine's modules that make ids."""
    return [sys.modules[n] for n in list(sys.modules) if n.startswith("resilient.") and "uuid7" in vars(sys.modules[n])]


def _roll_back(connection):
    with contextlib.suppress(sqlite3.Error):
        connection.rollback()
        connection.close()


class NoThread:
    """What stands for aiosqlite's thread: its queue calls by itself."""

    def __init__(self, *_, **__):
        self.daemon = True

    def start(self):
        pass


class Queue:
    """aiosqlite's queue of calls: each runs a little later, in order, and waits for SQLite's lock."""

    def __init__(self, system):
        self._system, self._calls, self._is_busy = system, deque(), False

    def put_nowait(self, call):
        self._calls.append((*call, self._system.loop.now + BUSY))
        if not self._is_busy:
            self._is_busy = True
            self._system.loop.call_later(self._system.rng.uniform(0.00005, 0.001), self._run)

    def _run(self):
        future, function, patience = self._calls[0]
        loop = self._system.loop
        try:
            result, error = function(), None
        except sqlite3.OperationalError as failure:
            if "locked" in str(failure) and loop.now < patience:
                loop.call_later(0.002, self._run)
                return
            result, error = None, failure
        except BaseException as failure:  # noqa: BLE001 - as aiosqlite does
            result, error = None, failure
        self._calls.popleft()
        if future is not None and not future.done():
            future.set_exception(error) if error is not None else future.set_result(result)
        if self._calls:
            loop.call_later(0.0002, self._run)
        else:
            self._is_busy = False


class Heartbeat(heartbeat.Heartbeat):
    """The engine's, on the loop instead of a thread."""

    async def start(self):
        import asyncio

        self._loop = asyncio.get_running_loop()
        await self._database.call(self._beat)
        self._tick()
        self._beats = self._loop.create_task(self._beat_on())

    async def _beat_on(self):
        import asyncio

        while True:
            await asyncio.sleep(self._interval)
            try:
                await self._database.call(self._beat)
            except Exception as error:  # noqa: BLE001 - as the thread does
                heartbeat.log.warning("heartbeat failed (%s: %s)", type(error).__name__, error)

    async def close(self):
        self._beats.cancel()
        self._thread = types.SimpleNamespace(is_alive=lambda: False)
        await super().close()


class Listener:
    """Nobody is woken from outside: polling is the truth."""

    def __init__(self, *_, **__):
        pass

    is_over = True

    def start(self, *_):
        pass

    def end(self):
        pass
