"""A SQLite file that is moved, deleted or replaced while it is open: nobody goes on in one that others do not see."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sqlite3

import pytest
from sqlalchemy import event, make_url, text

from resilient import Job, Resilient, SyncJob, handler
from resilient.core.base.errors import DatabaseUnreachable
from resilient.store.db import schema
from resilient.store.db.database import Database
from resilient.store.db.file import is_in_memory, path_of
from resilient.store.db.wake import Listener
from tests.helpers import LIMIT

PARTS = ("", "-wal", "-shm")


@pytest.fixture
def file(sqlite_url):
    return Database(sqlite_url).file


@pytest.fixture
def empty(file, tmp_path):
    """A copy of the file with the tables, from before anything was written."""
    return shutil.copy(file, tmp_path / "empty.db")


def move(file, to):
    for part in PARTS:
        if (one := file.with_name(file.name + part)).exists():
            one.rename(file.with_name(to + part))


def write(c, _):
    c.execute(text("INSERT INTO t VALUES (1)"))


def count(c, _):
    return c.execute(text("SELECT count(*) FROM t")).scalar()


@pytest.fixture
def database(open_database, sqlite_url):
    made = open_database(sqlite_url)
    made.transaction_sync(lambda c, _: c.execute(text("CREATE TABLE t (a)")) and None)
    return made


@pytest.mark.parametrize("how", ["moved", "deleted"])
async def test_it_is_gone(how, file, database):
    database.transaction_sync(write)
    if how == "moved":
        move(file, "away.db")
    else:
        for part in PARTS:
            file.with_name(file.name + part).unlink(missing_ok=True)
    for _ in range(2):
        with pytest.raises(DatabaseUnreachable, match="is gone: it was moved or deleted while it was open"):
            database.transaction_sync(write)
        with pytest.raises(DatabaseUnreachable, match="is gone"):
            await database.transaction(write)
    assert not file.exists()  # nothing was made in its place
    if how == "moved":
        with sqlite3.connect(file.with_name("away.db")) as c:
            assert c.execute("SELECT count(*) FROM t").fetchone() == (1,)
        move(file.with_name("away.db"), file.name)
        database.transaction_sync(write)
        assert database.transaction_sync(count) == 2


async def test_it_was_replaced(file, database, open_database, sqlite_url, caplog):
    database.transaction_sync(write)
    move(file, "old.db")
    other = open_database(sqlite_url)
    other.transaction_sync(lambda c, _: c.execute(text("CREATE TABLE t (a)")) and None)
    database.transaction_sync(write)
    await database.transaction(write)
    other.transaction_sync(write)
    assert database.transaction_sync(count) == other.transaction_sync(count) == 3
    assert caplog.text.count("was replaced while it was open: it is opened anew") == 1


async def test_it_was_replaced_and_its_log_was_left_beside_the_new_one(
    file, empty, database, open_database, sqlite_url
):
    """SQLite would take the log for the new file's, and spoil that one."""
    other = open_database(sqlite_url)
    for _ in range(100):
        other.transaction_sync(write)
    database.transaction_sync(count)
    with contextlib.closing(sqlite3.connect(empty)) as c:
        c.execute("CREATE TABLE t (a)")
    file.rename(file.with_name("old.db"))
    empty.rename(file)
    for one in (database, other):
        one.transaction_sync(write)
        await one.transaction(write)
    for name, rows in (("app.db", 4), ("old.db", 100)):
        with contextlib.closing(sqlite3.connect(file.with_name(name))) as c:
            assert c.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            assert c.execute("SELECT count(*) FROM t").fetchone() == (rows,)


async def test_a_log_that_nobody_can_empty_any_more_is_kept_from_the_new_file(file, empty, database):
    database.transaction_sync(write)
    file.rename(file.with_name("old.db"))
    with pytest.raises(DatabaseUnreachable, match="is gone"):
        database.transaction_sync(write)
    new = empty.read_bytes()
    empty.rename(file)
    for _ in range(2):
        with pytest.raises(DatabaseUnreachable, match=r"move app\.db-wal and its -shm to the old file"):
            database.transaction_sync(write)
    assert file.read_bytes() == new
    for part in PARTS[1:]:
        file.with_name(file.name + part).rename(file.with_name("old.db" + part))
    database.transaction_sync(lambda c, _: c.execute(text("CREATE TABLE t (a)")) and None)
    with contextlib.closing(sqlite3.connect(file.with_name("old.db"))) as c:
        assert c.execute("SELECT count(*) FROM t").fetchone() == (1,)


async def test_its_log_was_deleted(file, database, open_database, sqlite_url):
    """Programs that start would not see what is in it, and it would be lost with a kill."""
    other = open_database(sqlite_url)
    for one in (database, other):
        one.transaction_sync(write)
    file.with_name(file.name + "-wal").unlink()
    for one in (database, other, database):
        with pytest.raises(DatabaseUnreachable, match=r"write-ahead log \(-wal\) .* was moved or deleted"):
            one.transaction_sync(write)
        with pytest.raises(DatabaseUnreachable, match="was moved or deleted"):
            await one.transaction(write)
    assert open_database(sqlite_url).transaction_sync(count) == 2


def test_a_link_that_is_led_elsewhere_leaves_the_log_beside_its_file(tmp_path, open_database):
    (tmp_path / "link.db").symlink_to(tmp_path / "one.db")
    linked, one = open_database(f"sqlite:///{tmp_path}/link.db"), open_database(f"sqlite:///{tmp_path}/one.db")
    for database in (one, open_database(f"sqlite:///{tmp_path}/two.db")):
        database.transaction_sync(lambda c, _: c.execute(text("CREATE TABLE t (a)")) and None)
    linked.transaction_sync(write)
    (tmp_path / "link.db").unlink()
    (tmp_path / "link.db").symlink_to(tmp_path / "two.db")
    linked.transaction_sync(write)
    one.transaction_sync(write)
    assert (linked.transaction_sync(count), one.transaction_sync(count)) == (1, 2)


@handler("plain")
def plain(job: SyncJob[None]) -> None:
    with job.complete() as session:
        session.execute(text("SELECT 1"))


@handler("coroutine")
async def coroutine(job: Job[None]) -> None:
    async with job.complete() as session:
        await session.execute(text("SELECT 1"))


async def test_a_worker_takes_the_jobs_of_the_file_that_took_its_place(file, empty, sqlite_url):
    app = Resilient(sqlite_url, handlers=[plain, coroutine], upgrade=False)
    worker = app.worker()
    running = asyncio.create_task(worker.run(signals=False))
    async with asyncio.timeout(LIMIT):
        for one in (plain, coroutine):
            await app.jobs.wait((await app.enqueue(one, resource_key="a/b")).id)
        move(file, "old.db")
        empty.rename(file)
        other = Resilient(sqlite_url, handlers=[plain, coroutine], upgrade=False)
        for one in (plain, coroutine):
            done = await other.enqueue(one, resource_key="a/b")
            while (await other.jobs.get(done.id)).state != "succeeded":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        worker.stop()
        await running
    await app.close()
    await other.close()


async def test_a_commit_in_it_wakes(file, empty, database, open_database, sqlite_url):
    woken = asyncio.Event()
    listener = Listener(database, woken.set)
    listener.start(asyncio.get_running_loop())
    async with asyncio.timeout(LIMIT):
        await woken.wait()
        move(file, "old.db")
        empty.rename(file)
        other = open_database(sqlite_url)
        other.transaction_sync(lambda c, _: c.execute(text("CREATE TABLE t (a)")) and None)
        for _ in range(2):  # the first is the one that opened it
            woken.clear()
            while not woken.is_set():
                other.transaction_sync(write)
                await asyncio.sleep(0.05)
    await asyncio.to_thread(listener.close)


async def test_an_address_in_sqlites_form_is_watched_without_making_a_file_of_its_name(
    file, open_database, monkeypatch
):
    """Whether `sqlite3.connect` takes such an address for one is decided where SQLite was built."""
    paths, connect = [], sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda path, *a, **o: paths.append(str(path)) or connect(path, *a, **o))
    woken = asyncio.Event()
    listener = Listener(open_database(f"sqlite:///file:{file}?uri=true"), woken.set)
    listener.start(asyncio.get_running_loop())
    async with asyncio.timeout(LIMIT):
        await woken.wait()
    await asyncio.to_thread(listener.close)
    assert paths == [str(file)]


@pytest.mark.parametrize(
    "address", ["sqlite:///file::memory:?cache=shared&uri=true", "sqlite:///file::memory:?uri=true"]
)
def test_a_database_in_memory_has_no_file(address):
    assert is_in_memory(make_url(address))


def test_a_name_that_looks_like_an_address_is_a_files_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert path_of(make_url("sqlite:///file:x.db")) == tmp_path / "file:x.db"
    assert path_of(make_url("sqlite:///file:x%20y.db?uri=true")) == tmp_path / "x y.db"


def test_a_path_that_cannot_be_looked_at_is_not_called_deleted(tmp_path, monkeypatch):
    path = tmp_path / "a.db"
    database = Database(f"sqlite:///{path}")
    schema.upgrade_sync(database)
    look = os.stat

    def refuse(name, *args, **kwargs):
        if name == path:
            raise PermissionError(13, "Permission denied")
        return look(name, *args, **kwargs)

    monkeypatch.setattr(os, "stat", refuse)
    with pytest.raises(DatabaseUnreachable, match=r"a\.db cannot be looked at \(Permission denied\)"):
        database.transaction_sync(lambda c, d: d.run(c, "SELECT 1 AS one").scalar())
    for look_for_tables in (schema.check_sync, schema.current_sync):
        with pytest.raises(DatabaseUnreachable, match=r"a\.db cannot be looked at \(Permission denied\)"):
            look_for_tables(database)
    monkeypatch.undo()
    assert database.transaction_sync(lambda c, d: d.run(c, "SELECT 1 AS one").scalar()) == 1
    database.close_sync()


def test_a_file_that_is_replaced_while_it_is_opened_is_opened_anew(tmp_path):
    path = tmp_path / "a.db"
    database = Database(f"sqlite:///{path}")
    schema.upgrade_sync(database)
    database.close_sync()
    database = Database(f"sqlite:///{path}")
    other = tmp_path / "other.db"
    other.write_bytes(path.read_bytes())
    times = iter([1])

    @event.listens_for(database.sync_engine, "connect", insert=True)
    def replace(*_):
        if next(times, None):
            other.rename(path)

    database.transaction_sync(lambda c, d: d.run(c, "CREATE TABLE here (n integer)"))
    database.close_sync()
    with contextlib.closing(sqlite3.connect(path)) as c:
        assert c.execute("SELECT count(*) FROM here").fetchone() == (0,)
