"""Waking: workers of other processes hear of committed work at once, and nothing depends on it."""

from __future__ import annotations

import asyncio
import threading
import time

import psycopg

from resilient import Resilient
from resilient.store.db import pool, wake
from resilient.store.db.database import Database
from resilient.store.db.wake import Listener, Waker
from tests.helpers import LIMIT


def test_a_poke_reaches_listeners_of_the_same_database(postgres_url):
    database, heard = Database(postgres_url), threading.Event()
    listener = Listener(database, heard.set)
    listener.start()
    assert heard.wait(LIMIT)  # what was committed before it listened
    heard.clear()
    waker = Waker(database)
    waker.poke()
    assert heard.wait(LIMIT)
    waker.close()
    listener.close()


def test_an_address_of_its_own_where_the_pooler_swallows_notifications(postgres_url):
    """The database's address leads to nobody here; work and changed gates are heard through ``listen_url``."""
    name = postgres_url.partition("?")[0].rpartition("/")[2]
    app = Resilient(
        f"postgresql://postgres@127.0.0.1:1/{name}", listen_url=postgres_url.replace("postgresql", "postgres", 1)
    )
    heard = threading.Event()
    listener = Listener(app.database, heard.set, listen_url=app.listen_url)
    listener.start()
    assert heard.wait(LIMIT)
    heard.clear()
    app.poke()
    assert heard.wait(LIMIT)
    listener.close()
    asyncio.run(app.close())


def test_what_only_listens_is_never_idle_for_too_long(postgres_url):
    with psycopg.connect(postgres_url.replace("postgresql+psycopg", "postgresql"), autocommit=True) as c:
        name = c.execute("SELECT current_database()").fetchone()[0]
        c.execute(f'ALTER DATABASE "{name}" SET idle_session_timeout = 60000')
    with wake._autocommit(Database(postgres_url), None) as driver:
        assert driver.execute("SHOW idle_session_timeout").fetchone() == ("0",)
    with psycopg.connect(postgres_url.replace("postgresql+psycopg", "postgresql")) as c:
        assert c.execute("SHOW idle_session_timeout").fetchone() == ("1min",), "it is the setting of this one alone"


def test_a_short_program_still_sends_its_hint(postgres_url):
    database, heard = Database(postgres_url), threading.Event()
    listener = Listener(database, heard.set)
    listener.start()
    assert heard.wait(LIMIT)
    heard.clear()
    waker = Waker(database)
    for _ in range(2):  # a waker that was closed begins anew
        waker.poke()
        waker.close()
        assert heard.wait(LIMIT)
        heard.clear()
    listener.close()


def test_it_hears_again_and_again(postgres_url):
    database, heard = Database(postgres_url), threading.Event()
    told, all_told = [], threading.Event()

    def changed(keys):
        told.extend(keys)
        if len(told) >= 20:
            all_told.set()

    listener = Listener(database, heard.set, changed)
    listener.start()
    assert heard.wait(LIMIT)
    waker = Waker(database)
    for n in range(20):
        waker.tell(f"p/{n}")
        time.sleep(0.002)
    assert all_told.wait(LIMIT)
    assert sorted(told) == sorted(f"p/{n}" for n in range(20))
    waker.close()
    listener.close()


def test_a_connection_that_was_cut_is_opened_again(postgres_url):
    database, heard = Database(postgres_url), threading.Event()
    listener = Listener(database, heard.set)
    listener.start()
    assert heard.wait(LIMIT)
    waker = Waker(database)
    waker.poke()
    heard.clear()
    waker.poke()
    assert heard.wait(LIMIT)
    with psycopg.connect(postgres_url, autocommit=True) as c:
        cut = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'SELECT pg_notify%'"
        assert c.execute(cut).fetchall() == [(True,)]
    heard.clear()
    waker.poke()  # finds out, and says it on the next connection
    assert heard.wait(LIMIT)
    waker.close()
    listener.close()


class PokedWhenLookedAt(Waker):
    """Somebody pokes right after the thread has seen that nobody had."""

    _told = False

    @property
    def _work(self):
        seen, self._told = self._told, True
        return seen

    @_work.setter
    def _work(self, value):
        self._told = value

    def _send(self):
        pass


def test_a_poke_while_gates_are_told_is_not_forgotten(postgres_url):
    waker = PokedWhenLookedAt(Database(postgres_url))
    waker.tell("a")
    assert list(waker._payloads()) == ["a"]
    assert "" in waker._payloads()


def test_what_is_told_fits_into_one_notify(postgres_url):
    waker = Waker(Database(postgres_url))
    waker._send = lambda: None
    keys = {f"{n:x}" for n in range(5_000)}
    for key in keys:
        waker.tell(key)
    told = list(waker._payloads())
    assert max(map(len, told)) < 8_000
    assert {key for one in told for key in one.split()} == keys


def test_a_listener_that_waits_ends_at_once(postgres_url):
    """Nothing else ends its wait: no event comes, and it has no timeout."""
    heard = threading.Event()
    listener = Listener(Database(postgres_url), heard.set)
    listener.start()
    assert heard.wait(LIMIT)
    time.sleep(0.01)
    listener.close()
    listener._thread.join(LIMIT)
    assert not listener._thread.is_alive()


def listeners(c):
    rows = c.execute("SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN%'")
    return [pid for (pid,) in rows.fetchall()]


async def test_a_loop_hears_for_itself_and_again_after_a_lost_connection(postgres_url, monkeypatch):
    """And it has let go of the socket before that is closed: its number may be another's the next moment."""
    monkeypatch.setattr(wake, "RETRY", 0.0)
    database, heard, keys = Database(postgres_url), asyncio.Event(), asyncio.Queue()
    threads = set()

    def on_work():
        threads.add(threading.get_ident())
        heard.set()

    loop = asyncio.get_running_loop()
    before = set(loop._selector.get_map())
    listener = Listener(database, on_work, keys.put_nowait)
    listener.start(loop)
    waker = Waker(database)
    async with asyncio.timeout(LIMIT):
        await heard.wait()
        with psycopg.connect(postgres_url, autocommit=True) as c:
            for _ in range(2):
                pids = listeners(c)  # it has said LISTEN
                waker.tell("p/1")
                assert await keys.get() == ["p/1"]
                assert listener._thread.is_alive()
                heard.clear()
                assert c.execute("SELECT pg_terminate_backend(%s)", pids).fetchone() == (True,)
                await heard.wait()  # over another connection
            waker.poke()
    await asyncio.to_thread(listener.close)
    assert not listener._thread.is_alive()
    assert set(loop._selector.get_map()) == before
    assert threads == {threading.get_ident()}
    waker.close()


def test_a_commit_wakes_on_sqlite(sqlite_url):
    database, heard = Database(sqlite_url), threading.Event()
    listener = Listener(database, heard.set)
    listener.start()
    assert heard.wait(LIMIT)
    heard.clear()
    database.transaction_sync(lambda c, d: d.run(c, "DELETE FROM {turn}"))
    database.transaction_sync(lambda c, d: d.run(c, "INSERT INTO {turn} (resource_key, priority) VALUES ('a', 0)"))
    assert heard.wait(LIMIT)
    listener.close()


def test_a_waker_that_was_closed_while_it_connected_ends_although_another_began(postgres_url, monkeypatch):
    database, heard, proceeds = Database(postgres_url), threading.Event(), threading.Event()
    listener, waker = Listener(database, heard.set), Waker(database)
    listener.start()
    assert heard.wait(LIMIT)
    heard.clear()
    connect, connects = wake._autocommit, threading.Event()

    def slowly_at_first(*args):
        if not connects.is_set():
            connects.set()
            proceeds.wait(LIMIT)
        return connect(*args)

    monkeypatch.setattr(wake, "_autocommit", slowly_at_first)
    waker.poke()
    first = waker.end()
    assert connects.wait(LIMIT)
    waker.poke()
    assert heard.wait(LIMIT)  # from the second, which has cleared the event that both share
    proceeds.set()
    first.join(LIMIT)
    assert not first.is_alive()
    waker.close()
    listener.close()


def test_a_database_that_does_not_answer_hurts_nobody():
    database = Database("postgresql://postgres@127.0.0.1:1/nowhere")
    waker = Waker(database)
    waker.poke()
    waker.close()


async def test_a_listener_that_needs_the_loop_holds_up_nobody_who_closes_the_database_in_it(postgres_url):
    database, heard = Database(postgres_url), asyncio.Event()
    listener = Listener(database, heard.set)
    async with asyncio.timeout(LIMIT):
        listener.start(asyncio.get_running_loop())
        await heard.wait()
        listener.end()  # its thread needs a turn of the loop for that
        began = time.monotonic()
        database.close_sync()
        assert time.monotonic() - began < pool.LAST_CONNECT / 2
        while not listener.is_over:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
