"""A process that forks after it used its app: parent and children each have connections of their own."""

import asyncio
import os
import signal
import threading
import traceback

import pytest

from resilient import Kind, Resilient
from resilient.store.db.database import Database
from resilient.store.db.wake import Listener, Waker
from tests.helpers import LIMIT

EACH = 20


def in_child(work):
    """The pid of a child that does it; it ends with 0 if nothing was raised."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
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
