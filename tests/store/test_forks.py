"""A process that forks after it used its app: parent and children each have connections of their own.

SQLite is closed for a fork, because a child would inherit the locks of what is open, and hold none. What cannot be
closed then is not used in the child.
"""

import ast
import asyncio
import faulthandler
import os
import signal
import socket
import sqlite3
import threading
import traceback
from contextlib import closing
from pathlib import Path

import httpcore
import pytest

import resilient
from resilient import Kind, Resilient, SetupError
from resilient.store.db import pool
from resilient.store.db.database import Database
from resilient.store.db.wake import Listener, Waker
from resilient.surface.metrics import Exporter
from resilient.wire.requests import sockets
from tests.helpers import LIMIT

EACH = 20
PACKAGE = Path(resilient.__file__).parent


def in_child(work):
    """The pid of a child that does it; it ends with 0 if nothing was raised."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        faulthandler.register(signal.SIGALRM, file=2, chain=True)  # shows where it stands, and ends it
        signal.alarm(30)  # who waits for an answer that another process has read waits for ever
        work()
        status = 0
    except Exception:  # noqa: BLE001 - the status tells
        traceback.print_exc()
    finally:
        os._exit(status)


def enqueue(app, name):
    for n in range(EACH):
        app.enqueue_sync("k", {"of": name, "n": n}, resource_key="a/b")
        assert app.sync.jobs.count() > 0


def test_children_and_their_parent_enqueue_side_by_side(database_url):
    app = Resilient(database_url, kinds=[Kind("k")])
    enqueue(app, "before")
    children = [in_child(lambda n=n: enqueue(app, n)) for n in range(3)]
    enqueue(app, "parent")
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0, 0]
    assert app.sync.jobs.count() == EACH * 5
    asyncio.run(app.close())


def test_a_child_goes_on_where_coroutines_were_used(database_url):
    app = Resilient(database_url, kinds=[Kind("k")])
    asyncio.run(app.enqueue("k", resource_key="a/b"))
    child = in_child(lambda: asyncio.run(app.enqueue("k", resource_key="a/b")))
    assert os.waitpid(child, 0)[1] == 0
    assert app.sync.jobs.count() == 2
    asyncio.run(app.close())


@pytest.mark.parametrize("used", [False, True])
def test_a_child_wakes_workers(postgres_url, used):
    database, heard = Database(postgres_url), threading.Event()
    waker = Waker(database)
    if used:
        waker.poke()
        waker._poked.wait(0.2)
    listener = Listener(Database(postgres_url), heard.set)
    listener.start()
    assert heard.wait(LIMIT)
    waker._closed.wait(0.2)  # the parent's own hint is heard
    heard.clear()

    def poke():
        waker.poke()
        waker.close()

    assert os.waitpid(in_child(poke), 0)[1] == 0
    assert heard.wait(LIMIT)
    waker.close()
    listener.close()


# -- locks -----------------------------------------------------------------------------------------------------------

HELD_IN_A_CHILD = {
    ("store/db/pool.py", "<module>"): "held over the fork by whoever forks",
    ("store/db/pool.py", "__init__"): "of permits, which `Connections.begin_anew` makes anew",
    ("store/db/database.py", "_queue_up"): "called by `begin_anew`",
    ("engine/ground/sessions.py", "__init__"): "of a worker, which lives in no child",
    ("engine/run/execution.py", "<module>"): "of a worker, which lives in no child",
    ("wire/requests/sockets.py", "__init__"): "of an execution, which lives in no child",
    ("wire/requests/pool.py", "__init__"): "of a worker, or of one request",
    ("wire/requests/body_budget.py", "__init__"): "of a worker: other requests have small answers",
    ("adapters/requests.py", "<module>"): "of a worker, which lives in no child",
    ("surface/web/dashboard/live.py", "<module>"): "of who serves pages, who forks before",
    ("surface/web/dashboard/live.py", "__init__"): "of who serves pages, who forks before",
    (
        "django/program.py",
        "<module>",
    ): "while the app is made, which `RESILIENT` names; who forks has it, or makes it after",
    ("testing/fake/provider.py", "__init__"): "of a test's server, which lives in no child",
}


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_a_child_waits_for_no_lock_that_a_thread_of_its_parent_held(database, request, tmp_path):
    url = f"sqlite:///{tmp_path}/app.db" if database == "sqlite" else request.getfixturevalue("postgres_url")
    app = Resilient(url, kinds=[Kind("k")], upgrade=True)
    first = app.enqueue_sync("k", resource_key="a/b")
    locks = (app.ground.counts._lock, app.jobs._ends._lock)
    held, end = threading.Event(), threading.Event()

    def hold():
        with locks[0], locks[1]:
            held.set()
            assert end.wait(LIMIT)

    def use():
        enqueue_some(app, 1)
        with pytest.raises(TimeoutError):
            asyncio.run(app.jobs.wait(first.id, timeout=0.01))

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(LIMIT)
    child = in_child(use)
    end.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
    assert app.sync.jobs.count() == 2
    asyncio.run(app.close())


def test_a_child_waits_for_no_scrape_and_no_name_of_its_parent(tmp_path, monkeypatch):
    app = Resilient(f"sqlite:///{tmp_path}/app.db", kinds=[Kind("k")], upgrade=True)
    exporter, silent, over, asked = Exporter(app.ground, ()), "silent.example", threading.Event(), threading.Event()
    rows = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("93.184.216.34", 443))]

    def getaddrinfo(*_, **__):
        asked.set()
        assert over.wait(LIMIT)
        return rows

    def use():
        over.set()
        assert sockets.addresses_of(silent, 443, LIMIT) == ["93.184.216.34"]
        exporter.read()

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with pytest.raises(httpcore.ConnectTimeout):
        sockets.addresses_of(silent, 443, 0.01)
    assert asked.wait(LIMIT)
    with exporter._lock, sockets._LOOKUPS._lock:  # as other threads may at the fork
        child = in_child(use)
    over.set()
    assert os.waitpid(child, 0)[1] == 0
    asyncio.run(app.close())


def test_every_lock_is_made_anew_in_a_child():
    places = set()

    def look(node, where, name):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call) and ast.unparse(child.func) in ("threading.Lock", "threading.RLock"):
                places.add((where, name))
            is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
            look(child, where, child.name if is_function else name)

    for path in sorted(PACKAGE.rglob("*.py")):
        look(ast.parse(path.read_text()), str(path.relative_to(PACKAGE)), "<module>")
    assert {place for place in places if place[1] != "begin_anew"} == set(HELD_IN_A_CHILD)


# -- SQLite ----------------------------------------------------------------------------------------------------------


class Turns:
    """Parent and child take turns: each waits for a word of the other's."""

    def __init__(self):
        self.to_child, self.to_parent = os.pipe(), os.pipe()

    def say(self, pipe):
        os.write(pipe[1], b"x")

    def wait(self, pipe):
        assert os.read(pipe[0], 1) == b"x"


def count(path):
    with closing(sqlite3.connect(path)) as c:
        assert c.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return c.execute("SELECT count(*) FROM resilient_job").fetchone()[0]


def enqueue_some(app, n):
    for _ in range(n):
        app.enqueue_sync("k", resource_key="a/b")


def refused(app):
    """What a child is told that must not use its parent's file."""
    with pytest.raises(SetupError, match="was open in the process that this one was forked from"):
        enqueue_some(app, 1)
    with pytest.raises(SetupError, match="spawn"):
        app.sync.jobs.count()


@pytest.fixture(params=["path", "in SQLite's form"])
def file(request, tmp_path):
    """A SQLite file, and its address."""
    path = tmp_path / "fork & more.db"
    short = f"sqlite:///{path}"
    return path, short if request.param == "path" else f"sqlite:///file:{str(path).replace(' ', '%20')}?uri=true"


@pytest.fixture
def app(file):
    path, url = file
    app = Resilient(url, kinds=[Kind("k")], upgrade=True)
    enqueue_some(app, 1)
    assert path.exists()
    yield app
    asyncio.run(app.close())


@pytest.mark.parametrize("closes", [True, False])
def test_what_a_child_commits_to_sqlite_stays_when_its_parent_closes_it(file, app, closes):
    turns = Turns()

    def write():
        enqueue_some(app, 1)
        turns.say(turns.to_parent)
        turns.wait(turns.to_child)
        enqueue_some(app, 5)

    child = in_child(write)
    turns.wait(turns.to_parent)
    if closes:
        asyncio.run(app.close())
    assert count(file[0]) == 2  # somebody looks, and is the last to close it but for the child
    turns.say(turns.to_child)
    assert os.waitpid(child, 0)[1] == 0
    assert count(file[0]) == 7
    enqueue_some(app, 1)
    assert count(file[0]) == 8


def test_a_child_of_a_child_writes_too(file, app):
    def grandchild():
        enqueue_some(app, 1)
        assert os.waitpid(in_child(lambda: enqueue_some(app, 1)), 0)[1] == 0
        assert count(file[0]) == 3

    assert os.waitpid(in_child(grandchild), 0)[1] == 0
    assert count(file[0]) == 3


def test_children_write_while_threads_of_their_parent_used_sqlite_at_the_fork(file, app):
    for n in range(3):
        stop, under_way, turns = threading.Event(), threading.Event(), Turns()

        def busy(stop=stop, under_way=under_way):
            while not stop.is_set():
                enqueue_some(app, 1)
                under_way.set()

        threads = [threading.Thread(target=busy) for _ in range(2)]
        for one in threads:
            one.start()
        assert under_way.wait(LIMIT)

        def write(turns=turns):
            turns.wait(turns.to_child)  # until the parent's threads have ended
            enqueue_some(app, 3)

        child = in_child(write)
        stop.set()
        for one in threads:
            one.join()
        before = count(file[0])
        turns.say(turns.to_child)
        assert os.waitpid(child, 0)[1] == 0, n
        assert count(file[0]) == before + 3


@pytest.mark.parametrize("where", ["another thread", "this thread"])
def test_a_child_refuses_what_was_in_a_transaction_at_the_fork(file, app, where, monkeypatch):
    monkeypatch.setattr(pool, "FORK_WAIT", 0.05)
    children, entered, end = [], threading.Event(), threading.Event()

    def both():
        refused(app)
        refused(Resilient(file[1], kinds=[Kind("k")]))  # made after the fork: no more does it have locks

    def transaction(c, d):
        entered.set()
        if where == "this thread":
            children.append(in_child(both))
        else:
            assert end.wait(LIMIT)

    if where == "this thread":
        app.database.transaction_sync(transaction)
    else:
        thread = threading.Thread(target=app.database.transaction_sync, args=[transaction])
        thread.start()
        assert entered.wait(LIMIT)
        children.append(in_child(both))
        end.set()
        thread.join()
    assert os.waitpid(children[0], 0)[1] == 0
    enqueue_some(app, 1)  # the parent goes on
    assert os.waitpid(in_child(lambda: enqueue_some(app, 1)), 0)[1] == 0  # and the next child writes
    assert count(file[0]) == 3


def test_a_child_refuses_a_file_that_the_program_itself_had_open(file, app):
    with closing(sqlite3.connect(file[0])) as c:
        c.execute("SELECT count(*) FROM resilient_job").fetchone()
        assert os.waitpid(in_child(lambda: refused(app)), 0)[1] == 0
    assert os.waitpid(in_child(lambda: enqueue_some(app, 1)), 0)[1] == 0
    assert count(file[0]) == 2


def test_a_child_may_use_another_file_than_the_one_that_was_open(file, app, tmp_path):
    def write():
        other = Resilient(f"sqlite:///{tmp_path / 'other.db'}", kinds=[Kind("k")], upgrade=True)
        enqueue_some(other, 1)
        assert count(tmp_path / "other.db") == 1

    with closing(sqlite3.connect(file[0])) as c:
        c.execute("SELECT count(*) FROM resilient_job").fetchone()
        assert os.waitpid(in_child(write), 0)[1] == 0


def test_open_files_are_found_without_a_list_of_them(tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "_OPEN", {})
    with (tmp_path / "one").open("w") as one:
        number = one.fileno()
        assert number in pool._numbers()
        assert pool._file_of(number)[1] == (tmp_path / "one").stat().st_ino
    assert pool._file_of(number) is None
