"""Waking: workers of other processes hear of committed work at once, and nothing depends on it."""

from __future__ import annotations

import threading

from resilient.store.database import Database
from resilient.store.wake import Listener, Waker


def test_a_poke_reaches_listeners_of_the_same_database(postgres_url):
    database, heard = Database(postgres_url), threading.Event()
    listener = Listener(database, heard.set)
    listener.start()
    assert heard.wait(5)  # what was committed before it listened
    heard.clear()
    waker = Waker(database)
    waker.poke()
    assert heard.wait(5)
    waker.close()
    listener.close()


def test_a_short_program_still_sends_its_hint(postgres_url):
    database, heard = Database(postgres_url), threading.Event()
    listener = Listener(database, heard.set)
    listener.start()
    assert heard.wait(5)
    heard.clear()
    waker = Waker(database)
    waker.poke()
    waker.close()
    assert heard.wait(5)
    listener.close()


def test_a_commit_wakes_on_sqlite(sqlite_url):
    database, heard = Database(sqlite_url), threading.Event()
    listener = Listener(database, heard.set)
    listener.start()
    assert heard.wait(5)
    heard.clear()
    database.transaction_sync(lambda c, d: d.run(c, "DELETE FROM {turn}"))
    database.transaction_sync(lambda c, d: d.run(c, "INSERT INTO {turn} (resource_key, priority) VALUES ('a', 0)"))
    assert heard.wait(5)
    listener.close()


def test_a_database_that_does_not_answer_hurts_nobody():
    database = Database("postgresql://postgres@127.0.0.1:1/nowhere")
    waker = Waker(database)
    waker.poke()
    waker.close()
