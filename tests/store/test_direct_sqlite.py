"""What goes straight to sqlite3 is a transaction like every other: committed, rolled back, explained, cleaned up."""

import asyncio
import contextlib
import sqlite3
from datetime import UTC, datetime
from uuid import UUID

import pytest
from sqlalchemy import create_engine, event
from sqlalchemy.exc import IntegrityError, OperationalError

from resilient import DatabaseUnreachable
from resilient.store.db.database import Database
from resilient.store.db.dialect import ID, JSON, TIME
from resilient.store.db.direct import DirectSQLite, direct

NOON = datetime(2026, 5, 1, 12, 0, 0, 250, tzinfo=UTC)


@pytest.fixture
def short(sqlite_url, open_database):
    return open_database(sqlite_url)


@direct
def put(c, d, key, now=NOON):
    assert isinstance(c, DirectSQLite)
    d.run(c, "INSERT INTO {resource} (key, created_at, updated_at) VALUES (:key, :now, :now)", {"key": key, "now": now})


@direct
def keys(c, d):
    return [row.key for row in d.run(c, "SELECT key FROM {resource} ORDER BY key")]


async def test_it_commits_for_coroutines_and_for_threads(short):
    await short.transaction(put, "a")
    short.transaction_sync(put, "b")
    with contextlib.closing(sqlite3.connect(short.file)) as other, other:
        assert other.execute("SELECT key FROM resilient_resource ORDER BY key").fetchall() == [("a",), ("b",)]


def test_values_are_what_sqlalchemy_makes_of_them(short):
    id_ = UUID(int=7)

    def read(c, d):
        return d.run(
            c,
            "SELECT :now AS at, :id AS id, :text AS doc, :spoilt AS torn, NULL AS none, 3 AS [max(x)], 4 AS [max(x)]",
            {"now": NOON, "id": id_.hex, "text": '{"a": 0.1}', "spoilt": "{", "unused": 1},
            at=TIME, id=ID, doc=JSON, torn=JSON, none=TIME,
        ).one()  # fmt: skip

    plain, quick = short.transaction_sync(read), short.transaction_sync(direct(read))
    assert tuple(quick) == tuple(plain) == (NOON, id_, {"a": 0.1}, "{", None, 3, 4)
    assert quick.at.tzinfo is UTC


def test_it_says_how_many_rows_were_changed(short):
    short.transaction_sync(put, "a")

    @direct
    def change(c, d, key):
        return d.run(c, "UPDATE {resource} SET auth = 'x' WHERE key = :key RETURNING key", {"key": key}).rowcount

    assert [short.transaction_sync(change, key) for key in ("a", "b")] == [1, 0]


def test_an_error_rolls_all_of_it_back_and_is_sqlalchemys(short):
    @direct
    def twice(c, d):
        put(c, d, "secret")
        put(c, d, "secret")

    with pytest.raises(IntegrityError) as caught:
        short.transaction_sync(twice)
    assert "secret" not in str(caught.value)
    with pytest.raises(OperationalError, match="no such table"):
        short.transaction_sync(direct(lambda c, d: d.run(c, "SELECT 1 FROM nowhere")))
    with pytest.raises(ValueError, match="naive"):
        short.transaction_sync(put, "a", datetime(2026, 5, 1))  # noqa: DTZ001 - a bug, not input
    assert short.transaction_sync(keys) == []


@pytest.mark.parametrize("error", [KeyError, SystemExit, asyncio.CancelledError])
def test_whatever_a_function_raises_leaves_a_connection_that_works(short, error):
    @direct
    def fails(c, d):
        put(c, d, "a")
        raise error

    with pytest.raises(error):
        short.transaction_sync(fails)
    assert short.transaction_sync(keys) == []
    short.transaction_sync(put, "b")
    assert short.sync_engine.pool.checkedout() == 0


def test_it_waits_for_a_writer_and_says_so_in_the_end(short, monkeypatch):
    monkeypatch.setattr("resilient.store.db.database.BUSY_TIMEOUT", 0.05)
    with contextlib.closing(sqlite3.connect(short.file)) as other, other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(DatabaseUnreachable, match="locked"):
            short.transaction_sync(put, "a")
        other.rollback()
        short.transaction_sync(put, "a")
    assert short.sync_engine.pool.checkedout() == 0


def test_a_deferred_constraint_fails_the_commit_and_nothing_is_left(short):
    @direct
    def orphan(c, d):
        d.run(c, "PRAGMA defer_foreign_keys = ON")
        d.run(c, "INSERT INTO child VALUES (1)")

    with contextlib.closing(sqlite3.connect(short.file)) as other, other:
        other.execute("CREATE TABLE parent (id INTEGER PRIMARY KEY)")
        other.execute("CREATE TABLE child (id INTEGER REFERENCES parent (id))")
    with pytest.raises(IntegrityError, match="FOREIGN KEY"):
        short.transaction_sync(orphan)
    short.transaction_sync(put, "a")
    with contextlib.closing(sqlite3.connect(short.file)) as other, other:
        assert other.execute("SELECT count(*) FROM child").fetchone() == (0,)


def test_where_somebody_listens_statements_go_through_sqlalchemy(short):
    heard = []
    event.listen(short.sync_engine, "before_cursor_execute", lambda _c, _cu, statement, *_: heard.append(statement))
    assert short.transaction_sync(keys) == []
    assert heard == ["BEGIN IMMEDIATE", "SELECT key FROM resilient_resource ORDER BY key"]


def test_on_an_engine_that_was_handed_over_too(sqlite_url):
    engine = create_engine(sqlite_url)
    database = Database(engine)
    assert database.transaction_sync(keys) == []
    database.close_sync()
    engine.dispose()
