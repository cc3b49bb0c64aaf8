"""What is buffered is written with the outermost commit, whenever before it the program got around to it."""

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session as PlainSession
from sqlalchemy.orm import sessionmaker
from sqlmodel import Field, Session, SQLModel

from resilient import Event, InvalidInput, Resilient, handler
from resilient.engine.jobs import queue


class Moved(Event, type="stock.moved"):
    number: int


class Item(SQLModel, table=True):
    __tablename__ = "item_of_the_program"

    id: int | None = Field(default=None, primary_key=True)


@handler("count")
async def count(_job):
    pass


async def null(_message):
    pass


@pytest.fixture
def app(database):
    SQLModel.metadata.create_all(database.sync_engine, tables=[Item.__table__])
    return Resilient(database, handlers=[count], destinations={"a": null}, routes={Moved: ["a"]})


@pytest.fixture
def numbers(read_all):
    """Which events, and whose numbers, are in the database."""
    return lambda: [(r["kind"], r["ordering_key"], r["order_no"]) for r in read_all("SELECT * FROM {job} ORDER BY id")]


def listening(target, name, publish):
    """``publish(session)`` for the first call of a listener, which many programs collect their events in."""
    done = []

    def listener(session, *_):
        if not done:
            done.append(1)
            publish(session)

    event.listen(target, name, listener)


@pytest.mark.parametrize("on", ["class", "session"])
@pytest.mark.parametrize("name", ["before_commit", "before_flush", "after_flush", "after_flush_postexec"])
@pytest.mark.parametrize("before", [False, True], ids=["alone", "with another"])
def test_published_by_a_listener_while_it_is_committed(app, database, numbers, on, name, before):
    """Alone, nothing else says that there is something to write."""
    maker = sessionmaker(database.sync_engine)
    with maker() as s:
        listening(maker if on == "class" else s, name, lambda s: app.outbox.publish(s, Moved(number=1), key="k"))
        s.add(Item())
        if before:
            app.outbox.publish(s, Moved(number=1), key="k")
        s.commit()
    assert numbers() == [("outbox.a", "k", n) for n in range(1, 2 + before)]


@pytest.mark.parametrize("before", [False, True], ids=["alone", "with another"])
@pytest.mark.parametrize("ends", ["commit", "rollback"])
def test_published_by_a_listener_of_a_session_in_two_phases(postgres_database, before, ends):
    """Its connection prepares and then commits what is prepared: another event than a commit's."""
    SQLModel.metadata.create_all(postgres_database.sync_engine, tables=[Item.__table__])
    app = Resilient(postgres_database, destinations={"a": null}, routes={Moved: ["a"]})
    with PlainSession(postgres_database.sync_engine, twophase=True) as s:
        listening(s, "after_flush", lambda s: app.outbox.publish(s, Moved(number=1), key="k"))
        s.add(Item())
        if before:
            app.outbox.publish(s, Moved(number=1), key="k")
        s.prepare()
        getattr(s, ends)()
        s.commit()
        count = s.execute(text("SELECT count(*) FROM resilient_job")).scalar()
    assert count == (1 + before if ends == "commit" else 0)


def test_enqueued_in_order_by_a_listener(app, database, numbers):
    maker = sessionmaker(database.sync_engine)
    words = {"resource_key": "p/1", "ordering_key": "o"}
    listening(maker, "after_flush", lambda s: app.sync.enqueue(count, session=s, **words))
    with maker() as s:
        s.add(Item())
        s.commit()
    assert numbers() == [("count", "o", 1)]


async def test_published_by_a_listener_of_an_async_session(app, database, numbers):
    url = database.url.set(drivername="sqlite+aiosqlite") if database.is_sqlite else database.url
    engine = database.async_engine or create_async_engine(url)
    maker = async_sessionmaker(engine, sync_session_class=type("Ours", (PlainSession,), {}))
    listening(maker.kw["sync_session_class"], "after_flush", lambda s: app.outbox.publish(s, Moved(number=1), key="k"))
    async with maker() as s:
        s.add(Item())
        await s.commit()
    async with AsyncSession(engine) as s:
        app.outbox.publish(s, Moved(number=1), key="k")
        await s.commit()
    if engine is not database.async_engine:
        await engine.dispose()
    assert numbers() == [("outbox.a", "k", 1), ("outbox.a", "k", 2)]


@pytest.mark.parametrize("words", [{"ordering_key": "o"}, {"unique_key": "u"}, None], ids=["lane", "unique", "event"])
def test_a_savepoint_s_release_is_no_commit(app, database, words):
    """Written there, a lane or a unique key would be held for the rest of the business transaction."""
    with Session(database.sync_engine) as s:
        written = lambda: s.execute(text("SELECT count(*) FROM resilient_job")).scalar()  # noqa: E731
        for _ in range(2):
            with s.begin_nested(), s.begin_nested():
                if words is None:
                    app.outbox.publish(s, Moved(number=1), key="k")
                else:
                    app.sync.enqueue(count, session=s, resource_key="p/1", **words)
        assert written() == 0
        s.commit()
        assert written() == (1 if words == {"unique_key": "u"} else 2)


def test_a_savepoint_whose_release_fails_takes_its_events_with_it(app, database, numbers):
    """Its end began like a good one."""
    with Session(database.sync_engine) as s:
        s.execute(Item.__table__.insert(), {"id": 7})
        app.outbox.publish(s, Moved(number=1), key="k")
        with pytest.raises(IntegrityError), s.begin_nested():  # noqa: PT012 - the block itself raises
            app.outbox.publish(s, Moved(number=2), key="gone")
            s.add(Item(id=7))  # written with the release
        s.commit()
    assert numbers() == [("outbox.a", "k", 1)]


def test_nothing_is_written_if_the_rest_of_the_commit_fails(app, database, numbers):
    """The listener's event is dropped with the transaction, and the session serves the next."""
    maker = sessionmaker(database.sync_engine)
    listening(maker, "after_flush", lambda s: app.outbox.publish(s, Moved(number=1), key="k"))
    listening(maker, "after_flush_postexec", lambda _s: 1 / 0)
    with maker() as s:
        s.add(Item())
        with pytest.raises(ZeroDivisionError):
            s.commit()
        s.rollback()
        s.commit()
        assert numbers() == []
        app.outbox.publish(s, Moved(number=1), key="k")
        s.commit()
        s.commit()
    assert numbers() == [("outbox.a", "k", 1)]


def test_a_flush_that_publishes_after_the_numbers_were_drawn_is_refused(app, database, numbers):
    """It would draw numbers twice, and two such transactions could wait for each other."""
    with Session(database.sync_engine) as s:
        app.outbox.publish(s, Moved(number=1), key="k")

        @event.listens_for(s, "before_commit")
        def _(session):
            session.add(Item())  # flushed after the hook, which came before this

        listening(s, "after_flush", lambda s: app.outbox.publish(s, Moved(number=1), key="a"))
        with pytest.raises(InvalidInput, match="is being committed"):
            s.commit()
        s.rollback()
    assert numbers() == []


def test_after_the_commit_it_is_too_late_and_said(app, database, numbers):
    with Session(database.sync_engine) as s:
        listening(s, "after_commit", lambda s: app.outbox.publish(s, Moved(number=1), key="k"))
        s.add(Item())
        with pytest.raises(Exception, match="committed"):
            s.commit()
    assert numbers() == []


def test_two_apps_in_two_schemas_share_a_transaction(postgres_url, monkeypatch):
    """Each writes into its own tables, in everybody's order: two such transactions wait for each other in no circle."""
    written, write = [], queue.write
    monkeypatch.setattr(
        queue, "write", lambda c, d, *rest, **words: [written.append(d.schema), *write(c, d, *rest, **words)]
    )
    words = {"destinations": {"a": null}, "routes": {Moved: ["a"]}}
    one, two = Resilient(postgres_url, **words), Resilient(postgres_url, schema="other", upgrade=True, **words)
    two.ready_sync()
    with Session(one.database.sync_engine) as s:
        for app in (two, one, two):
            app.outbox.publish(s, Moved(number=1), key="k")
        s.commit()
        assert written == [None, "other"]
        for schema, numbers in (("public", [1]), ("other", [1, 2])):
            found = s.execute(text(f"SELECT order_no FROM {schema}.resilient_job ORDER BY 1")).scalars()
            assert found.all() == numbers
    for app in (one, two):
        app.database.close_sync()
