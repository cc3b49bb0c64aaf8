"""What goes to the driver of a caller's connection is part of its transaction, and looks like SQLAlchemy's."""

import asyncio
import logging

import psycopg
import pytest
from pydantic import BaseModel
from sqlalchemy import create_engine, event, text
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError, PendingRollbackError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from resilient import Event, Job, Resilient, handler
from resilient.store.db import direct
from resilient.store.db.dialect import Dialect
from resilient.store.db.direct import BorrowedConnection, through_driver
from tests.helpers import LIMIT


class Moved(Event, type="stock.moved"):
    number: int


class Name(BaseModel):
    name: str


@handler("greet")
async def greet(job: Job[Name]) -> None:
    pass


async def null(_message):
    pass


@pytest.fixture
def url(postgres_url):
    return postgres_url.replace("postgresql://", "postgresql+psycopg://")


@pytest.fixture
def engine(url):
    engine = create_engine(url)
    yield engine
    engine.dispose()


@pytest.fixture
def app(postgres_url):
    return Resilient(postgres_url, destinations={"a": null, "b": null}, routes={Moved: ["a"]})


@pytest.fixture
def in_database(url):
    """What was committed."""

    def read(statement="SELECT order_no FROM resilient_job ORDER BY order_no"):
        with psycopg.connect(url.replace("+psycopg", "")) as c:
            return [row[0] for row in c.execute(statement).fetchall()]

    return read


@pytest.fixture
def went(monkeypatch):
    """How many statements passed SQLAlchemy by."""
    seen = []
    send = BorrowedConnection._send
    monkeypatch.setattr(BorrowedConnection, "_send", lambda self, *said: seen.append(said[0]) or send(self, *said))
    return seen


def publish(app, session, number=1, **words):
    return app.outbox.publish(session, Moved(number=number), key="k", **words)


def test_committed_with_the_callers_rows(app, engine, in_database, went):
    for n in range(3):
        with Session(engine) as s:
            publish(app, s)
            s.execute(text("SELECT 1"))
            assert in_database() == list(range(1, n + 1))
            s.commit()
    assert (in_database(), len(went)) == ([1, 2, 3], 3)


def test_to_two_destinations_and_rolled_back(app, engine, in_database, went):
    with Session(engine) as s:
        publish(app, s, to=["a", "b"])
        s.commit()
        publish(app, s)
        s.rollback()
    assert in_database("SELECT resource_key FROM resilient_job ORDER BY 1") == ["outbox/a", "outbox/b"]
    assert len(went) == 2  # the numbers, and the jobs


async def test_an_async_session(app, url, in_database, went):
    engine = create_async_engine(url)
    for _ in range(3):
        async with AsyncSession(engine) as s:
            publish(app, s)
            await s.commit()
    await engine.dispose()
    assert (in_database(), len(went)) == ([1, 2, 3], 3)


def test_listeners_see_the_statement(app, engine, in_database, went):
    """Tracing hangs on these events."""
    seen = []
    event.listen(engine, "before_cursor_execute", lambda _c, _cu, statement, *_: seen.append(statement))
    with Session(engine) as s:
        publish(app, s)
        s.commit()
    assert [("resilient_order" in statement) for statement in seen] == [True]
    assert (in_database(), went) == ([1], [])


def test_logged_statements_are_logged(app, url, caplog, in_database, went):
    engine = create_engine(url, echo=True)
    with caplog.at_level(logging.INFO, logger="sqlalchemy.engine"), Session(engine) as s:
        publish(app, s)
        s.commit()
    engine.dispose()
    assert "resilient_order" in caplog.text
    assert (in_database(), went) == ([1], [])


def test_errors_are_sqlalchemys(app, engine, in_database):
    with Session(engine) as s:
        s.execute(text("ALTER TABLE resilient_job ADD CONSTRAINT never CHECK (kind = 'x')"))
        s.commit()
        publish(app, s)
        with pytest.raises(IntegrityError, match="never") as caught:
            s.commit()
        assert caught.value.orig.sqlstate == "23514"
        assert "stock.moved" not in str(caught.value).split("DETAIL")[0]  # parameters stay out of messages
        s.rollback()
        s.execute(text("ALTER TABLE resilient_job DROP CONSTRAINT never"))
        publish(app, s)
        s.commit()
    assert in_database() == [1]  # what was rolled back took no number


def test_a_connection_that_is_gone(app, engine, in_database):
    with Session(engine) as s:
        pid = s.execute(text("SELECT pg_backend_pid()")).scalar()
        publish(app, s)
        in_database(f"SELECT pg_terminate_backend({pid})")
        with pytest.raises(OperationalError) as caught:
            s.commit()
        assert caught.value.connection_invalidated
        with pytest.raises(PendingRollbackError):
            s.execute(text("SELECT 1"))
        s.rollback()
        publish(app, s)
        s.commit()
    assert in_database() == [1]
    assert engine.pool.checkedout() == 0


async def test_cancelled_while_it_waits_for_its_key(app, url, in_database):
    """Nobody knows what state such a connection is in: it is not used again."""
    engine = create_async_engine(url)
    async with AsyncSession(engine) as first:
        publish(app, first)
        await first.run_sync(lambda s: s.dispatch.before_commit(s))  # holds the key
        async with AsyncSession(engine) as second:
            publish(app, second)
            committing = asyncio.create_task(second.commit())
            is_it = "wait_event_type = 'Lock' AND query LIKE 'WITH place%'"
            waiting = f"SELECT count(*) FROM pg_stat_activity WHERE {is_it}"
            async with asyncio.timeout(LIMIT):
                while in_database(waiting) != [1]:  # noqa: ASYNC110 - the database tells nobody
                    await asyncio.sleep(0.01)
            committing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await committing
            await second.rollback()
        await first.commit()
        publish(app, first)
        await first.commit()
    await engine.dispose()
    assert in_database() == [1, 2]


@pytest.mark.parametrize("listened", [False, True], ids=["driver", "sqlalchemy"])
async def test_many_jobs_cut_off_in_the_middle_are_not_committed_in_silence(app, url, in_database, listened):
    """PostgreSQL takes the COMMIT of a transaction that failed, and rolls it back."""
    engine = create_async_engine(url)
    if listened:
        event.listen(engine.sync_engine, "before_cursor_execute", lambda *_: None)

    def lines():
        asyncio.current_task().cancel()
        yield "never sent whole"

    def many(session):
        direct.copy(through_driver(session.connection()), "COPY resilient_turn (resource_key) FROM STDIN", lines())

    async def go_on():
        async with AsyncSession(engine) as s:
            await s.execute(text("CREATE TABLE mine (n int)"))
            with pytest.raises(asyncio.CancelledError):
                await s.run_sync(many)
            asyncio.current_task().uncancel()
            with pytest.raises(PendingRollbackError):
                await s.commit()

    await asyncio.create_task(go_on())
    await engine.dispose()
    assert in_database("SELECT count(*) FROM resilient_turn") == [0]


def test_the_encoding_may_change_meanwhile(postgres_url, engine, in_database):
    app = Resilient(postgres_url, handlers=[greet])
    for encoding in ("UTF8", "LATIN1", "UTF8"):
        with Session(engine) as s:
            s.execute(text(f"SET LOCAL client_encoding = '{encoding}'"))
            app.enqueue_sync(greet, Name(name="Zoë"), resource_key="a", session=s)
            s.commit()
    assert in_database("SELECT payload ->> 'name' FROM resilient_job") == ["Zoë"] * 3


def test_rows_come_with_names(engine):
    with engine.begin() as c:
        short = through_driver(c)
        d = Dialect("postgresql")
        assert d.run(short, "SELECT 1 AS one, 'a' AS name").one().name == "a"
        with pytest.raises(DBAPIError, match="division"):
            d.run(short, "SELECT 1 / :n", {"n": 0})


def test_another_driver_goes_through_sqlalchemy(sqlite_url):
    engine = create_engine(sqlite_url)
    with engine.begin() as c:
        assert through_driver(c) is c
    engine.dispose()
