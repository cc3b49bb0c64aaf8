"""A message is taken once, in the consumer's transaction; in order where it has a number."""

import threading
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import create_engine, event
from sqlalchemy.ext.asyncio import AsyncSession
from sqlmodel import Session

from resilient import Arrival, InvalidInput, Resilient, Retention
from resilient.store import events
from tests.helpers import LIMIT

DAY = timedelta(days=1)


@pytest.fixture
def app(database):
    return Resilient(database, retention=Retention(batch=2))


@pytest.fixture
def session(database):
    """A function that opens the program's own sessions."""
    return lambda: Session(database.sync_engine)


class TestFirst:
    async def test_once_per_consumer(self, app, session):
        for expected in (True, False):
            with session() as s:
                assert await app.inbox.first(s, "billing", "m-1") is expected
                s.commit()
        with session() as s:
            assert await app.inbox.first(s, "shipping", "m-1")

    def test_synchronous_and_twice_in_a_transaction(self, app, session):
        with session() as s:
            assert app.sync.inbox.first(s, "billing", "m-1")
            assert not app.sync.inbox.first(s, "billing", "m-1")

    async def test_with_an_async_session(self, postgres_database):
        app = Resilient(postgres_database)
        async with AsyncSession(postgres_database.async_engine) as s:
            assert await app.inbox.first(s, "billing", "m-1")
            await s.commit()
        async with AsyncSession(postgres_database.async_engine) as s:
            assert not await app.inbox.first(s, "billing", "m-1")
            with pytest.raises(InvalidInput, match="take a Session, not an AsyncSession"):
                app.sync.inbox.first(s, "billing", "m-1")

    def test_taken_with_the_consumers_rows_or_not_at_all(self, app, session):
        with session() as s:
            assert app.sync.inbox.first(s, "billing", "m-1")
            s.rollback()
            assert app.sync.inbox.first(s, "billing", "m-1")
            s.rollback()
            assert app.sync.inbox.first(s, "billing", "other")
            with s.begin_nested() as savepoint:
                assert app.sync.inbox.first(s, "billing", "m-1")
                savepoint.rollback()
            assert app.sync.inbox.first(s, "billing", "m-1")

    def test_the_second_of_two_at_once_waits_for_the_first(self, postgres_url, open_database):
        database = open_database(postgres_url)
        app = Resilient(database)
        with Session(database.sync_engine) as one, Session(database.sync_engine) as two:
            assert app.sync.inbox.first(one, "billing", "m-1")
            two.connection().exec_driver_sql("SET LOCAL lock_timeout = '50ms'")
            with pytest.raises(Exception, match="lock timeout"):
                app.sync.inbox.first(two, "billing", "m-1")
            two.rollback()
            one.rollback()  # it was not taken, so the other one takes it
            assert app.sync.inbox.first(two, "billing", "m-1")

    @pytest.mark.parametrize("name", ["x" * 256, "line\nbreak", "nul\0", "\ud800", "né"])
    def test_any_text_a_stranger_sends(self, app, session, name):
        with session() as s:
            assert app.sync.inbox.first(s, "billing", name)
            assert not app.sync.inbox.first(s, "billing", name)
            assert app.sync.inbox.first(s, "billing", name + "!")

    @pytest.mark.parametrize(
        ("consumer", "message", "words"),
        [
            ("", "m", "1 to 255 printable"),
            ("c" * 256, "m", "1 to 255"),
            ("c", "", "has no id"),
            ("a\n", "m", "printable"),
        ],
    )
    def test_mistakes(self, app, session, consumer, message, words):
        with session() as s, pytest.raises(InvalidInput, match=words):
            app.sync.inbox.first(s, consumer, message)

    def test_loud_without_a_transaction(self, app, database):
        with pytest.raises(InvalidInput, match="give it the session"):
            app.sync.inbox.first(None, "billing", "m")
        for options in ({"isolation_level": "AUTOCOMMIT"}, {"execution_options": {"isolation_level": "AUTOCOMMIT"}}):
            engine = create_engine(database.sync_engine.url, **options)
            with Session(engine) as s, pytest.raises(InvalidInput, match="not in a transaction"):
                app.sync.inbox.first(s, "billing", "m")
            engine.dispose()


class TestArrived:
    def take(self, app, s, number, *, gapless=False, message=None, key="order-7"):
        return app.sync.inbox.arrived(
            s, "billing", message or f"m-{key}-{number}", key=key, number=number, gapless=gapless
        )

    def test_each_number_once_and_never_backwards(self, app, session):
        with session() as s:
            assert self.take(app, s, 3) is Arrival.FIRST
            assert self.take(app, s, 3) is Arrival.DUPLICATE
            assert self.take(app, s, 2) is Arrival.OUTDATED
            assert self.take(app, s, 7) is Arrival.FIRST
            assert self.take(app, s, 1, key="order-8") is Arrival.FIRST
            assert self.take(app, s, 8, message="m-order-7-3") is Arrival.DUPLICATE
            words = {"key": "order-7", "number": 2}  # another consumer has its own
            assert app.sync.inbox.arrived(s, "shipping", "m-order-7-3", **words) is Arrival.FIRST

    def test_a_gap_is_early_until_it_is_filled(self, app, session):
        with session() as s:
            assert self.take(app, s, 4, gapless=True) is Arrival.FIRST  # a consumer may begin anywhere
            assert self.take(app, s, 6, gapless=True) is Arrival.EARLY
            assert self.take(app, s, 5, gapless=True) is Arrival.FIRST
            assert self.take(app, s, 6, gapless=True) is Arrival.FIRST
            assert self.take(app, s, 4, gapless=True) is Arrival.DUPLICATE

    def test_what_is_refused_is_not_noted(self, app, session, read_all):
        with session() as s:
            self.take(app, s, 4)
            assert self.take(app, s, 2) is self.take(app, s, 2) is Arrival.OUTDATED
            assert self.take(app, s, 9, gapless=True) is Arrival.EARLY
            s.commit()
        assert [r["message_id"] for r in read_all("SELECT message_id FROM {inbox}")] == ["m-order-7-4"]
        assert read_all("SELECT number FROM {inbox_key}") == [{"number": 4}]

    def test_two_of_one_key_are_taken_one_after_the_other(self, postgres_database):
        app = Resilient(postgres_database)
        with Session(postgres_database.sync_engine) as one, Session(postgres_database.sync_engine) as two:
            assert self.take(app, one, 1) is Arrival.FIRST
            assert self.take(app, two, 1, key="order-8") is Arrival.FIRST  # another key does not wait
            two.commit()
            two.connection().exec_driver_sql("SET LOCAL lock_timeout = '50ms'")
            with pytest.raises(Exception, match="lock timeout"):
                self.take(app, two, 2)

    def test_of_a_known_key_too(self, postgres_database, monkeypatch):
        """Its row is there: the second must not decide by what the first, which has just looked, is about to change."""
        app, seen = Resilient(postgres_database), events.has_taken
        waiting, found = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'", []
        with Session(postgres_database.sync_engine) as one, Session(postgres_database.sync_engine) as two:
            assert self.take(app, one, 1) is Arrival.FIRST
            one.commit()
            second = threading.Thread(target=lambda: (found.append(self.take(app, two, 2)), two.commit()))

            def between(*args):
                if second.ident is None:
                    second.start()
                    while not postgres_database.transaction_sync(lambda c, _: c.exec_driver_sql(waiting).scalar()):
                        second.join(0.01)
                        if not second.is_alive():
                            break
                return seen(*args)

            monkeypatch.setattr(events, "has_taken", between)
            assert self.take(app, one, 3) is Arrival.FIRST
            one.commit()
            second.join(LIMIT)
            assert found == [Arrival.OUTDATED]

    @pytest.mark.parametrize(("key", "number"), [("", 1), ("k", 0), ("k", 2**63), ("k", "1")])
    def test_mistakes(self, app, session, key, number):
        with session() as s, pytest.raises(InvalidInput, match="a key and a number from 1 up"):
            app.sync.inbox.arrived(s, "billing", "m", key=key, number=number)


class TestPruning:
    take = TestArrived.take

    async def test_by_age(self, app, database, clock, read_all):
        def take(c, d):
            for n in range(5):
                assert events.first_seen(c, d, "billing", f"old-{n}", clock.now() - 31 * DAY)
            assert events.first_seen(c, d, "billing", "new", clock.now() - 29 * DAY)
            for key, ago in (("old", 31), ("new", 29)):
                at = clock.now() - ago * DAY
                events.arrived(c, d, "billing", f"{key}-numbered", key, 3, at, gapless=False)

        database.transaction_sync(take)
        assert (await app.prune(dry_run=True)).inbox == 6
        assert (await app.prune()).inbox == 6
        left = {r["message_id"] for r in read_all("SELECT message_id FROM {inbox}")}
        assert left == {"new", "new-numbered"}
        assert read_all("SELECT ordering_key FROM {inbox_key}") == [{"ordering_key": "new"}]

    @pytest.mark.parametrize("minutes", [1, 30, 59, 60, 61])
    async def test_a_key_is_known_for_as_long_as_a_message_however_short_that_is(
        self, database, clock, session, read_all, minutes
    ):
        """Its time is written once an hour."""
        app = Resilient(database, retention=Retention(inbox="30m"))
        for number in (10, 11):
            with session() as s:
                assert self.take(app, s, number) is Arrival.FIRST
                s.commit()
            clock.advance(minutes=minutes if number == 10 else 30)
            await app.prune()
        assert read_all("SELECT message_id FROM {inbox} WHERE message_id LIKE '%11'") != []
        with session() as s:
            assert self.take(app, s, 3) is Arrival.OUTDATED
        clock.advance(minutes=61)
        await app.prune()
        assert read_all("SELECT number FROM {inbox_key}") == []

    @pytest.mark.parametrize("at", ["INSERT", "SELECT"])
    def test_a_key_that_is_forgotten_while_its_next_message_comes(self, postgres_database, at):
        """Between any two statements of `arrived`: it is a key's first message then, and no error."""
        app, engine = Resilient(postgres_database), postgres_database.sync_engine

        def forget(c, d):
            return events.prune_inbox(c, d, datetime(9999, 1, 1, tzinfo=UTC), 100)

        @event.listens_for(engine, "after_cursor_execute")
        def between(_c, _cursor, statement, *_):
            if statement.startswith(at) and "inbox_key" in statement and not gone:
                gone.append(postgres_database.transaction_sync(forget))

        gone = ["not yet"]
        for number in (3, 4):
            with Session(engine) as s:
                assert self.take(app, s, number) is Arrival.FIRST
                s.commit()
            gone.clear()
        event.remove(engine, "after_cursor_execute", between)

    def test_a_key_in_use_is_touched(self, app, clock, session, read_all):
        for minutes in (0, 30, 61):
            with session() as s:
                number = minutes + 1
                app.sync.inbox.arrived(s, "billing", f"m-{minutes}", key="k", number=number)
                s.commit()
            clock.advance(minutes=30 if minutes == 0 else 31)
        (row,) = read_all("SELECT number, updated_at FROM {inbox_key}")
        assert row["number"] == 62
        assert str(row["updated_at"])[:16] == "2030-01-01 13:01"
