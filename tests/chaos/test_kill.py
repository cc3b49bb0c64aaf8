"""SIGKILL at every named step: what was committed is finished by others, nothing runs that was rolled back."""

from __future__ import annotations

import contextlib
import signal
import sqlite3
import sys
import time
from pathlib import Path
from uuid import uuid4

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import history

from resilient.store.jobs import insert as jobs
from tests import nursery
from tests.helpers import LIMIT

CHILD = Path(__file__).parent / "child.py"
STEPS = [
    f"{function}:{phase}:1" for function in ("claim", "write", "ensure") for phase in ("before", "inside", "after")
] + ["handler:before:1", "handler:after:1", "attend:inside:1", "attend:after:1"]
STEPS += ["beat:before:2", "beat:inside:2", "beat:after:2"]  # the first is that of its start


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request, open_database):
    url = request.getfixturevalue("sqlite_url" if request.param == "sqlite" else "postgres_url")
    database = open_database(url)
    history.install(database)
    return database


def address(database):
    return database.url.render_as_string(hide_password=False)


def start(database, log, *options):
    return nursery.start(CHILD, address(database), log, *options)


def put(database, n=9, account="p/"):
    batch = [
        jobs.NewJob(uuid4(), ("work", "thread", "fails")[i % 3], f"{account}{i % 2}", f'{{"n": {i}}}', max_attempts=20,
                    delay=0.05 if i == 0 else None)
        for i in range(n)
    ]  # fmt: skip
    batch = [
        j if j.kind != "fails" else jobs.NewJob(j.id, j.kind, j.resource_key, j.payload, max_attempts=3) for j in batch
    ]
    database.transaction_sync(jobs.insert, batch)
    return [j.id.hex for j in batch]


def put_and_roll_back(database):
    job = jobs.NewJob(uuid4(), "work", "p/0", '{"n": 99}')
    with database.sync_engine.connect() as c:
        c.begin()
        jobs.insert(c, database.dialect, [job])
        c.rollback()
    return job.id.hex


def finish(database, log, timeout=120):
    """Let a healthy worker end what is left."""
    child = start(database, log, "--until-idle")
    assert child.wait(timeout) == 0


def freeze(child):
    """SIGSTOP, and every thread stands: one in a system call ends that first, and may have got a lock by it."""
    child.send_signal(signal.SIGSTOP)
    tasks = Path(f"/proc/{child.pid}/task")
    if tasks.exists():
        _wait(lambda: {(one / "stat").read_text().rpartition(")")[2].split()[0] for one in tasks.iterdir()} == {"T"})


def stop(database, child):
    """Freeze it; on SQLite not while it is the one writer, who would stop everybody (PostgreSQL cuts him off)."""
    while True:
        freeze(child)
        if not database.is_sqlite:
            return
        with contextlib.closing(sqlite3.connect(database.url.database, timeout=0.3)) as c:
            try:
                c.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                child.send_signal(signal.SIGCONT)
                time.sleep(0.02)
            else:
                return


def stop_in_the_handlers(database, child):
    """SIGSTOP while it has no transaction open, whose rows would be locked until the server cuts it off."""
    busy = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    while True:
        freeze(child)
        time.sleep(0.02)
        if not history.rows(database, f"{busy} AND state <> 'idle'"):
            return
        child.send_signal(signal.SIGCONT)
        time.sleep(0.02)


def test_a_worker_killed_at_any_named_step_loses_nothing(database, tmp_path):
    log = tmp_path / "log"
    committed, rolled_back, unreached = [], [], []
    for number, step in enumerate(STEPS):
        committed += put(database, account=f"p/{number}-")  # new ones, whose rows are to be made
        rolled_back.append(put_and_roll_back(database))
        child = start(database, log, "--kill", step, "--until-idle")
        if child.wait(LIMIT) != -signal.SIGKILL:
            unreached.append(step)
    finish(database, log)
    assert unreached == []
    assert history.check(database, log, committed=committed, rolled_back=rolled_back) == []


def test_a_worker_stopped_for_longer_than_its_lease_changes_nothing_when_it_wakes(database, tmp_path):
    log = tmp_path / "log"
    committed = put(database)
    sleeper = start(database, log, "--lease", "0.5", "--slow", "0.3")
    _wait(lambda: len(history.read(log)) >= 2)
    stop(database, sleeper)
    finish(database, log)
    sleeper.send_signal(signal.SIGCONT)
    time.sleep(1.0)
    sleeper.terminate()
    assert sleeper.wait(LIMIT) == 0
    assert history.check(database, log, committed=committed) == []


def test_the_checker_catches_an_engine_without_a_fence(open_database, postgres_url, tmp_path):
    """The woken worker finishes what another one is executing; only the fence prevents it."""
    database = open_database(postgres_url)
    history.install(database)
    log = tmp_path / "log"
    batch = [jobs.NewJob(uuid4(), "work", "p/0", f'{{"n": {i}}}', max_attempts=20) for i in range(4)]
    database.transaction_sync(jobs.insert, batch)
    sleeper = start(database, log, "--lease", "0.5", "--slow", "4", "--mutant", "no_fence")
    _wait(lambda: len(history.read(log)) >= 4)
    stop_in_the_handlers(database, sleeper)
    other = start(database, log, "--slow", "30", "--lease", "5")
    _wait(lambda: any(line["execution"] == 2 for line in history.read(log)))  # the rescued run one after the other
    sleeper.send_signal(signal.SIGCONT)
    _wait(lambda: history.rows(database, "SELECT 1 FROM resilient_job WHERE finished_at IS NOT NULL"))
    for child in (sleeper, other):
        child.kill()
        child.wait(LIMIT)
    broken = history.check(database, log, committed=[j.id.hex for j in batch])
    assert any(line.startswith("J5") for line in broken), broken


def _wait(condition, timeout=60):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
