"""Enqueueing: in a transaction of one's own and in the caller's, unique keys, and everything that is refused."""

from __future__ import annotations

import inspect
import json
from datetime import UTC, datetime, timedelta

import pytest
from pydantic import BaseModel
from sqlalchemy import Column, Integer, MetaData, String, Table, create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlmodel import Session as ModelSession

from resilient import (
    BadPayload,
    BadResourceKey,
    BreakerPolicy,
    DuplicateJob,
    InvalidInput,
    Item,
    Job,
    Kind,
    Limit,
    NaiveDatetime,
    PayloadTooLarge,
    Permanent,
    Provider,
    Resilient,
    SchemaOutdated,
    Snooze,
    Transient,
    UnknownKind,
    handler,
)
from resilient.engine.ground.encoder import Encoder, JobOptions, StepOptions
from tests.helpers import LIMIT


class Mail(BaseModel):
    to: str
    n: int = 0


@handler("mail")
async def mail(job: Job[Mail]) -> None:
    """Nothing."""


orders = Table("orders", MetaData(), Column("id", Integer, primary_key=True), Column("name", String(50)))


@pytest.fixture
async def app(database):
    app = Resilient(database, handlers=[mail], upgrade=False)
    with database.sync_engine.begin() as c:
        orders.create(c)
    yield app
    await app.close()


class AnHourFast(datetime):
    @classmethod
    def now(cls, tz=None):
        return datetime.now(tz) + timedelta(hours=1)


class TestExpiry:
    async def test_a_test_clock_is_the_clock(self, clock, database):
        app = Resilient(database, handlers=[mail], upgrade=False)
        one = await app.enqueue(mail, Mail(to="a"), resource_key="a", expires_in=60)
        many = await app.enqueue_many(mail, [Mail(to="a")] * 60, resource_key="a", expires_in=60)
        for job in (one, many[-1]):
            assert (await app.jobs.get(job.id)).expires_at == clock.now() + timedelta(seconds=60)
        await app.close()

    @pytest.mark.parametrize("options", [{}, {"unique_key": "u"}, {"ordering_key": "o"}, {"delay": 5}])
    @pytest.mark.parametrize("way", ["own", "session", "few", "copied", "replaced"])
    async def test_expires_in_counts_from_the_clock_that_decides(self, app, monkeypatch, way, options):
        """PostgreSQL's on PostgreSQL, however wrong that of the program's machine is."""
        for module in ("engine.ground.ground", "store.db.dialect"):
            monkeypatch.setattr(f"resilient.{module}.datetime", AnHourFast)
        words = {"resource_key": "a", "expires_in": 60, **options}
        if way == "session":
            with Session(app.database.sync_engine) as session:
                app.enqueue_sync(mail, Mail(to="a"), session=session, **words)
                session.commit()
        elif way == "own":
            await app.enqueue(mail, Mail(to="a"), **words)
        elif way == "replaced":
            await app.enqueue(mail, Mail(to="a"), **{**words, "unique_key": "u", "expires_in": 5})
            await app.enqueue(mail, Mail(to="b"), **{**words, "unique_key": "u", "on_conflict": "replace"})
        else:
            await app.enqueue_many(mail, [Mail(to="a")] * (3 if way == "few" else 60), **words)
        jobs = await app.jobs.list()
        assert jobs
        for job in jobs:
            within = (job.expires_at - max(job.created_at, job.updated_at)).total_seconds()
            assert within == pytest.approx(60, abs=1), job


def count(app, sql="SELECT count(*) FROM {job}"):
    return app.database.transaction_sync(lambda c, d: d.run(c, sql).scalar())


def in_doubt(app, mark):
    """A request of its only job is marked."""
    app.database.transaction_sync(
        lambda c, d: d.run(c, "UPDATE {job} SET sent = :sent", {"sent": json.dumps({"post": mark})})
    )


def turns(app):
    return count(app, "SELECT count(*) FROM {turn}")


class TestOwnTransaction:
    async def test_one(self, app):
        done = await app.enqueue(mail, Mail(to="a"), resource_key="p/1")
        assert (done.created, count(app), turns(app)) == (True, 1, 1)

    async def test_by_name_and_as_a_dict(self, app):
        await app.enqueue("mail", {"to": "a", "n": "3"}, resource_key="p/1")
        assert json.loads(count(app, "SELECT {payload} FROM {job}")) == {"to": "a", "n": 3}

    async def test_ten_thousand(self, app):
        done = await app.enqueue_many(mail, [{"to": "a"}] * 10_000, resource_key="p/1")
        assert len({d.id for d in done}) == count(app) == 10_000
        assert turns(app) == 1  # one a batch

    async def test_items_may_differ_in_more_than_the_payload(self, app):
        await app.enqueue_many(
            mail,
            [Item({"to": "a"}, resource_key="p/1", priority=3), Item({"to": "b"}, delay=60), {"to": "c"}],
            resource_key="p/2",
        )
        assert count(app, "SELECT count(*) FROM {job} WHERE resource_key = 'p/2'") == 2
        assert count(app, "SELECT count(*) FROM {job} WHERE state = 'scheduled'") == 1

    def test_without_asyncio(self, app):
        done = app.sync.enqueue(mail, Mail(to="a"), resource_key="p/1")
        assert app.sync.jobs.get(done.id).state == "ready"
        assert len(app.sync.enqueue_many(mail, [Mail(to="b")] * 3, resource_key="p/1")) == 3


class TestCallersTransaction:
    @pytest.fixture(params=[Session, ModelSession])
    def session(self, app, request):
        with request.param(app.database.sync_engine) as session:
            yield session

    def test_commit(self, app, session):
        session.execute(orders.insert().values(id=1, name="x"))
        app.sync.enqueue(mail, Mail(to="a"), resource_key="p/1", session=session)
        session.commit()
        assert (count(app), turns(app), count(app, "SELECT count(*) FROM orders")) == (1, 1, 1)

    def test_rollback(self, app, session):
        session.execute(orders.insert().values(id=1, name="x"))
        app.sync.enqueue(mail, Mail(to="a"), resource_key="p/1", session=session)
        app.sync.enqueue(mail, Mail(to="a"), resource_key="p/1", session=session, unique_key="u")
        session.rollback()
        assert (count(app), turns(app)) == (0, 0)
        session.execute(text("SELECT 1"))
        session.commit()
        assert count(app) == 0

    def test_a_rolled_back_savepoint_takes_its_unique_jobs_with_it(self, app, session):
        app.sync.enqueue(mail, Mail(to="a"), resource_key="p/1", session=session, unique_key="outer")
        with session.begin_nested() as savepoint:
            app.sync.enqueue(mail, Mail(to="a"), resource_key="p/1", session=session, unique_key="gone")
            with session.begin_nested():
                app.sync.enqueue(mail, Mail(to="a"), resource_key="p/1", session=session, unique_key="gone too")
            savepoint.rollback()
        with session.begin_nested():
            app.sync.enqueue(mail, Mail(to="a"), resource_key="p/1", session=session, unique_key="inner")
        session.commit()
        keys = app.database.transaction_sync(lambda c, d: d.run(c, "SELECT unique_key FROM {job}").scalars().all())
        assert sorted(keys) == ["inner", "outer"]

    def test_unique_jobs_are_written_with_the_commit(self, app, session):
        done = app.sync.enqueue(mail, Mail(to="a"), resource_key="p/1", session=session, unique_key="u")
        assert done.created is None
        session.commit()
        assert count(app) == 1

    def test_a_connection(self, app):
        with app.database.sync_engine.begin() as c:
            app.sync.enqueue(mail, Mail(to="a"), resource_key="p/1", session=c)
            app.sync.enqueue(mail, Mail(to="a"), resource_key="p/1", session=c, unique_key="u")
        assert count(app) == 2

    def test_a_session_on_a_foreign_connection_writes_at_once(self, app):
        with app.database.sync_engine.connect() as c, c.begin():
            with Session(c, join_transaction_mode="rollback_only") as session:
                done = app.sync.enqueue(mail, Mail(to="a"), resource_key="p/1", session=session, unique_key="u")
                session.commit()
            assert done.created is True
        assert count(app) == 1

    async def test_an_async_session(self, app):
        driver = "sqlite+aiosqlite" if app.database.is_sqlite else "postgresql+psycopg"
        engine = create_async_engine(app.database.url.set(drivername=driver))
        async with AsyncSession(engine) as session:
            await app.enqueue(mail, Mail(to="a"), resource_key="p/1", session=session)
            await app.enqueue(mail, Mail(to="b"), resource_key="p/1", session=session, unique_key="u")
            await session.commit()
        async with AsyncSession(engine) as session:
            await app.enqueue(mail, Mail(to="c"), resource_key="p/1", session=session)
            await session.rollback()
        await engine.dispose()
        assert count(app) == 2

    def test_autocommit_is_refused_loudly(self, app):
        driver = "sqlite" if app.database.is_sqlite else "postgresql+psycopg"
        engine = create_engine(app.database.url.set(drivername=driver), isolation_level="AUTOCOMMIT")
        with engine.connect() as c, pytest.raises(InvalidInput, match="autocommit"):
            app.sync.enqueue(mail, Mail(to="a"), resource_key="p/1", session=c)
        engine.dispose()

    def test_something_else_is_refused(self, app):
        with pytest.raises(InvalidInput, match="not str"):
            app.sync.enqueue(mail, Mail(to="a"), resource_key="p/1", session="nope")


class TestUnique:
    async def test_the_first_one_is_kept(self, app):
        first = await app.enqueue(mail, Mail(to="a"), resource_key="p/1", unique_key="u")
        second = await app.enqueue(mail, Mail(to="b"), resource_key="p/1", unique_key="u")
        assert (second.id, second.created, count(app)) == (first.id, False, 1)

    async def test_replace_gives_it_the_newer_payload(self, app):
        await app.enqueue(mail, Mail(to="a"), resource_key="p/1", unique_key="u", delay=60)
        await app.enqueue(mail, Mail(to="b"), resource_key="p/1", unique_key="u", on_conflict="replace")
        assert json.loads(count(app, "SELECT {payload} FROM {job}")) == {"to": "b", "n": 0}
        assert count(app, "SELECT state FROM {job}") == "ready"
        assert turns(app) == 1

    async def test_raise(self, app):
        first = await app.enqueue(mail, Mail(to="a"), resource_key="p/1", unique_key="u")
        with pytest.raises(DuplicateJob, match=str(first.id)):
            await app.enqueue(mail, Mail(to="b"), resource_key="p/1", unique_key="u", on_conflict="raise")

    async def test_the_key_is_free_again_once_the_job_starts(self, app):
        await app.enqueue(mail, Mail(to="a"), resource_key="p/1", unique_key="u")
        await app.worker().drain(timeout=LIMIT)
        assert (await app.enqueue(mail, Mail(to="b"), resource_key="p/1", unique_key="u")).created

    async def test_the_key_is_free_while_it_runs_and_when_it_is_tried_again(self, database, clock):
        """What changes after its start may have come too late for it."""
        seen = []

        @handler("mail")
        async def again(job: Job[Mail]) -> None:
            seen.append(job.payload.to)
            if job.payload.to == "a" and job.attempt == 1:
                assert (await app.enqueue(again, Mail(to="b"), resource_key="p/1", unique_key="u")).created
                raise Transient("later")

        app = Resilient(database, handlers=[again])
        await app.enqueue(again, Mail(to="a"), resource_key="p/1", unique_key="u")
        await app.worker().drain(timeout=LIMIT)
        clock.advance(minutes=1)
        assert (await app.enqueue(again, Mail(to="c"), resource_key="p/1", unique_key="u")).created
        await app.worker().drain(timeout=LIMIT)
        assert sorted(seen) == ["a", "a", "b", "c"]
        await app.close()

    async def test_once_more_while_it_runs(self, database):
        seen = []

        @handler("again")
        async def again(job: Job[None]) -> None:
            seen.append(job.execution)
            if len(seen) == 1:
                for _ in range(3):
                    done = await app.enqueue(
                        again, resource_key="p/1", unique_key="u", unique_until="finish", while_running="once_more"
                    )
                    assert done.created is False

        app = Resilient(database, handlers=[again])
        await app.enqueue(again, resource_key="p/1", unique_key="u", unique_until="finish")
        await app.worker().drain(timeout=LIMIT)
        assert seen == [1, 2]
        await app.close()

    @pytest.mark.parametrize("end", ["succeeds", "dies", "had succeeded"])
    async def test_once_more_is_a_new_operation(self, database, end):
        """Under its old keys a provider would answer its requests without doing anything."""
        keys = []
        options = {"resource_key": "p/1", "unique_key": "u", "unique_until": "finish", "while_running": "once_more"}

        async def look(job: Job[None]) -> bool:
            keys.append(job.idempotency_key)
            await app.enqueue(again, **options)
            return True

        @handler("again", reconcile=look)
        async def again(job: Job[None]) -> None:
            keys.append(job.idempotency_key)
            if len(keys) == 1:
                await app.enqueue(again, **options)
                if end == "dies":
                    raise Permanent("no such thing")

        app = Resilient(database, handlers=[again])
        done = await app.enqueue(again, **options)
        if end == "had succeeded":
            in_doubt(app, {})
        await app.worker().drain(timeout=LIMIT)
        assert keys[0] == str(done.id)
        assert len(set(keys)) == len(keys) == 2
        assert (await app.jobs.get(done.id)).state == "succeeded"
        await app.close()

    @pytest.mark.parametrize("what", ["is tried again", "snoozes", "loses its worker"])
    async def test_once_more_is_not_the_next_try(self, database, clock, what):
        """Under the keys of the operation that goes on, a provider would answer with what it did before the change."""
        keys = []
        options = {"resource_key": "p/1", "unique_key": "u", "unique_until": "finish", "while_running": "once_more"}

        @handler("again")
        async def again(job: Job[None]) -> None:
            keys.append(job.idempotency_key)
            if len(keys) > 1:
                return
            await app.enqueue(again, **options)
            if what == "is tried again":
                raise Transient("later")
            if what == "snoozes":
                raise Snooze(10)
            await app.database.transaction(lambda c, d: d.run(c, "UPDATE {job} SET version = version + 1") and None)

        app = Resilient(database, handlers=[again])
        done = await app.enqueue(again, **options)
        await app.worker().drain(timeout=LIMIT)
        clock.advance(minutes=10)
        worker = app.worker()
        await worker.sweeper.rescue()
        await worker.drain(timeout=LIMIT)
        assert keys[:2] == [str(done.id)] * 2
        assert len(keys) == 3
        assert keys[2] != keys[0]
        assert (await app.jobs.get(done.id)).state == "succeeded"
        await app.close()

    async def failed_once(self, database):
        """An app whose only job waits for its second attempt, and what its handler saw."""
        seen = []

        @handler("mail")
        async def fails(job: Job[Mail]) -> None:
            seen.append((job.payload.to, job.attempt, job.idempotency_key))
            if job.payload.to == "a":
                raise Transient("later")

        app = Resilient(database, handlers=[fails])
        await app.enqueue(fails, Mail(to="a"), resource_key="p/1", unique_key="u", unique_until="finish")
        await app.worker().drain(timeout=LIMIT)
        assert count(app, "SELECT state FROM {job}") == "scheduled"
        return app, seen

    @pytest.mark.parametrize("mark", [None, {"until": "2031-01-01T00:00:00+00:00"}])
    async def test_replacing_what_was_executed_is_a_new_operation(self, database, clock, mark):
        app, seen = await self.failed_once(database)
        if mark is not None:
            in_doubt(app, mark)
        words = {"resource_key": "p/1", "unique_key": "u", "unique_until": "finish", "on_conflict": "replace"}
        kept = await app.enqueue("mail", Mail(to="b"), **words)
        clock.advance(minutes=1)
        await app.worker().drain(timeout=LIMIT)
        assert [(to, attempt) for to, attempt, _ in seen] == [("a", 1), ("b", 1)]
        assert seen[0][2] == str(kept.id) != seen[1][2]
        await app.close()

    @pytest.mark.usefixtures("clock")
    async def test_a_request_in_doubt_is_not_replaced(self, database):
        app, _ = await self.failed_once(database)
        in_doubt(app, {})
        words = {"resource_key": "p/1", "unique_key": "u", "unique_until": "finish", "on_conflict": "replace"}
        with pytest.raises(DuplicateJob, match="may have been received: it cannot be replaced"):
            await app.enqueue("mail", Mail(to="b"), **words)
        assert json.loads(count(app, "SELECT {payload} FROM {job}")) == {"to": "a", "n": 0}
        await app.close()

    @pytest.mark.parametrize(("cancelled", "runs", "state"), [(False, 2, "succeeded"), (True, 1, "dead")])
    async def test_once_more_although_it_dies(self, database, cancelled, runs, state):
        """Who enqueued it while it ran was promised an execution after that; who cancels wants none."""
        seen = []
        options = {"resource_key": "p/1", "unique_key": "u", "unique_until": "finish", "while_running": "once_more"}

        @handler("again")
        async def again(job: Job[None]) -> None:
            seen.append(job.attempt)
            if len(seen) == 1:
                assert not (await app.enqueue(again, **options)).created
                if cancelled:
                    await app.jobs.cancel(job.id)
                raise Permanent("no such thing")

        app = Resilient(database, handlers=[again])
        done = await app.enqueue(again, **options)
        await app.worker().drain(timeout=LIMIT)
        assert seen == [1] * runs
        assert (await app.jobs.get(done.id)).state == state
        assert [one.kind for one in await app.jobs.attempts(done.id)] == ["permanent"]
        assert (await app.enqueue(again, **options)).created  # the key is free again
        await app.close()


class TestRefused:
    @pytest.mark.parametrize(
        ("error", "words", "change"),
        [
            (BadResourceKey, "'p q' is not a resource key", {"resource_key": "p q"}),
            (BadResourceKey, "1 to 4 segments", {"resource_key": "a/b/c/d/e"}),
            (BadPayload, "does not fit its model: n: ", {"payload": {"to": "a", "n": "x"}}),
            (UnknownKind, "no handler is declared for kind 'nope'", {"kind": "nope"}),
            (InvalidInput, "delay must be between 0", {"delay": -1}),
            (InvalidInput, "delay must be between 0", {"delay": timedelta(days=9999)}),
            (NaiveDatetime, "run_at=.* has no time zone", {"run_at": datetime(2030, 1, 1)}),  # noqa: DTZ001
            (NaiveDatetime, "expires_at=.* has no time zone", {"expires_at": datetime(2030, 1, 1)}),  # noqa: DTZ001
            (InvalidInput, "delay or run_at, not both", {"delay": 1, "run_at": datetime(2030, 1, 1, tzinfo=UTC)}),
            (InvalidInput, "priority must be a whole number", {"priority": 1000}),
            (InvalidInput, "priority must be a whole number", {"priority": True}),
            (InvalidInput, "delay must be .* not 1000", {"delay": 10**400}),
            (InvalidInput, "max_attempts must be at least 1", {"max_attempts": 0}),
            (InvalidInput, "max_attempts must be at least 1", {"max_attempts": True}),
            (InvalidInput, "max_attempts must be at least 1", {"max_attempts": 2**31}),
            (InvalidInput, "tag 'a' must be text", {"tags": {"a": 1}}),
            (InvalidInput, "tag 7 must be text", {"tags": {7: "x"}}),
            (InvalidInput, "tag None must be text", {"tags": {None: "x"}}),
            (InvalidInput, "tag 'a' has a character that no database stores", {"tags": {"a": "x\0"}}),
            (InvalidInput, "tag 'a' has a character that no database stores", {"tags": {"a": "\ud800"}}),
            (InvalidInput, "unique_key must be 1 to 255", {"unique_key": "x" * 300}),
            # of another type, or a word that is none: never taken for the default
            (InvalidInput, "delay must be .* not '2h'", {"delay": "2h"}),
            (InvalidInput, "expires_in must be .* not '5m'", {"expires_in": "5m"}),
            (NaiveDatetime, "run_at='2030-01-01' has no time zone", {"run_at": "2030-01-01"}),
            (InvalidInput, "max_attempts must be at least 1 .* not 'x'", {"max_attempts": "x"}),
            (InvalidInput, "unique_key must be .* not 7", {"unique_key": 7}),
            (InvalidInput, r"tags are names with their values, .* not \['a'\]", {"tags": ["a"]}),
            (InvalidInput, "None is not a job id", {"after": [None]}),
            (BadResourceKey, "None is not a resource key", {"resource_key": None}),
            (BadPayload, "does not fit its model: Input should be", {"payload": None}),
            (InvalidInput, '"keep", "replace" or "raise", not .Raise', {"unique_key": "k", "on_conflict": "Raise"}),
            (InvalidInput, 'unique_until must be "start" or "finish"', {"unique_key": "k", "unique_until": "end"}),
            (InvalidInput, 'while_running must be "drop" or', {"unique_key": "k", "while_running": "once"}),
        ],
    )
    async def test_bad_input_names_the_thing_and_writes_nothing(self, app, error, words, change):
        arguments = {"kind": mail, "payload": Mail(to="a"), "resource_key": "p/1", **change}
        with pytest.raises(error, match=words):
            await app.enqueue(arguments.pop("kind"), arguments.pop("payload"), **arguments)
        assert (count(app), turns(app)) == (0, 0)

    async def test_one_idempotency_key_for_many(self, app):
        """A provider would answer the second job's request with what it did for the first one."""
        words = {"resource_key": "p/1", "idempotency_key": "k"}
        with pytest.raises(InvalidInput, match=r"idempotency_key='k' for 2 jobs: a provider would take .* one by one"):
            await app.enqueue_many(mail, [Mail(to="a"), Mail(to="b")], **words)
        assert count(app) == 0
        await app.enqueue_many(mail, [Mail(to="a")], **words)

    async def test_a_payload_that_is_too_large(self, database):
        app = Resilient(database, kinds=[Kind("blob")], max_payload=1000)
        with pytest.raises(
            PayloadTooLarge, match=r"1,002 bytes, more than max_payload=1,000: store the data elsewhere"
        ):
            await app.enqueue("blob", "x" * 1000, resource_key="p/1")
        with pytest.raises(PayloadTooLarge, match="1,202 bytes"):
            await app.enqueue("blob", "漢" * 400, resource_key="p/1")
        await app.enqueue("blob", "漢" * 300, resource_key="p/1")
        await app.close()

    async def test_values_never_show_in_errors(self, app):
        with pytest.raises(BadPayload) as error:
            await app.enqueue(mail, {"to": {"secret": "hunter2"}}, resource_key="p/1")
        assert "hunter2" not in str(error.value)


def test_a_session_on_a_database_without_tables_is_told_what_to_do(empty_url):
    engine = create_engine(str(empty_url).replace("postgresql://", "postgresql+psycopg://"))
    app = Resilient(engine, handlers=[], upgrade=False)
    with Session(engine) as session, pytest.raises(SchemaOutdated, match="resilient db upgrade"):
        app.enqueue_sync(Kind("k"), resource_key="a/b", session=session)
    engine.dispose()


class Page(BaseModel):
    url: str


class TestWhatIsWrongIsNamed:
    """An option nobody knows, another handler's payload, a word for a number: refused in words of the caller."""

    @pytest.mark.parametrize("many", [False, True])
    async def test_an_option_that_is_none(self, app, many):
        said = r"enqueueing 'mail': there is no option 'prioriy'; did you mean 'priority'\?; there are priority, delay,"
        enqueue, what = (app.enqueue_many, [Mail(to="a")]) if many else (app.enqueue, Mail(to="a"))
        with pytest.raises(InvalidInput, match=said):
            await enqueue(mail, what, resource_key="a", prioriy=3)
        with pytest.raises(InvalidInput, match="no option 'prioriy'"):
            app.sync.enqueue(mail, Mail(to="a"), resource_key="a", prioriy=3)
        with pytest.raises(InvalidInput, match="no option 'sessions'; there are"):
            async with app.workflow("w") as wf:
                wf.step(mail, Mail(to="a"), resource_key="a", sessions=None)
        assert await app.jobs.count() == 0

    async def test_the_payload_of_another_handler(self, app):
        with pytest.raises(BadPayload, match=r"'mail' does not fit its model: it takes \S+\.Mail, not \S+\.Page"):
            await app.enqueue(mail, Page(url="https://a.example/?key=s3cret"), resource_key="a")

    @pytest.mark.parametrize("value", ["5m", "5", b"5", True, object()])
    async def test_a_word_for_a_number(self, app, value):
        for name in ("delay", "expires_in"):
            with pytest.raises(
                InvalidInput, match=rf"{name} must be a number of seconds \(300\) or a timedelta \(timedelta\("
            ):
                await app.enqueue(mail, Mail(to="a"), resource_key="a", **{name: value})

    async def test_a_kind_by_almost_its_name(self, app):
        with pytest.raises(UnknownKind, match=r"kind 'mial'; did you mean 'mail'\?"):
            await app.enqueue("mial", {}, resource_key="a")

    async def test_an_asynchronous_session_in_a_plain_call(self, app):
        engine = create_async_engine("sqlite+aiosqlite://")
        async with AsyncSession(engine) as session, engine.connect() as connection:
            for wrong, plain in ((session, "Session"), (connection, "Connection")):
                said = rf"app.sync and other plain calls take a {plain}, not an Async{plain}: `await`"
                with pytest.raises(InvalidInput, match=said):
                    app.sync.enqueue(mail, Mail(to="a"), resource_key="a", session=wrong)
                with pytest.raises(InvalidInput, match=said):
                    app.sync.jobs.list(session=wrong)
                with pytest.raises(InvalidInput, match=said), app.sync.workflow("w", session=wrong) as wf:
                    wf.step(mail, Mail(to="a"), resource_key="a")
        await engine.dispose()


class TestForesight:
    """What the app can see to go wrong later is said in the log, once, and refused by nobody."""

    @pytest.fixture
    def make(self, database):
        def make(**options):
            return Resilient(database, upgrade=False, **options)

        return make

    def warnings(self, caplog):
        return [r.getMessage() for r in caplog.records if r.name == "resilient.app"]

    async def test_almost_a_provider(self, make, caplog):
        app = make(handlers=[mail], providers=[Provider(name="hubspot", base_url="https://api.hubapi.com")])
        for key in ("hubspott/a1", "hubspott/a2", "hubspot/a1", "smtp/a", "outbox/x"):
            await app.enqueue(mail, Mail(to="a"), resource_key=key)
        (said,) = self.warnings(caplog)
        assert said.startswith("resource key 'hubspott/a1': this app has no provider 'hubspott'")
        assert said.endswith("; did you mean 'hubspot'?")
        await app.enqueue_many(mail, [Item(Mail(to="a"), resource_key=f"hubspt/{n}") for n in range(3)])
        assert len(self.warnings(caplog)) == 2

    @pytest.mark.parametrize(
        ("option", "value"),
        [
            ("limits", [Limit(5, per=1)]), ("concurrency", 3), ("breakers", BreakerPolicy()), ("learn", False),
            ("pace", "even"), ("reserve", {5: 0.2}),
        ],
    )  # fmt: skip
    def test_a_pattern_of_almost_a_provider(self, make, caplog, option, value):
        facts = [Provider(name="hubspot", base_url="https://api.hubapi.com")]
        make(handlers=[mail], providers=facts, **{option: {"hubspot/*": value, "smtp/*": value, "*/*/search": value}})
        assert self.warnings(caplog) == []
        make(handlers=[mail], providers=facts, **{option: {"hubspott/*": value}})
        said = "pattern 'hubspott/*': this app has no provider 'hubspott'; did you mean 'hubspot'?"
        assert self.warnings(caplog) == [said]

    async def test_a_worker_of_almost_a_provider(self, make, caplog):
        app = make(handlers=[mail], providers=[Provider(name="hubspot", base_url="https://api.hubapi.com")])
        app.worker(resources=["hubspot/*", "*/a1", "smtp"])
        assert self.warnings(caplog) == []
        app.worker(resources=["hubspot/*", "hubspt/a1"])
        (said,) = self.warnings(caplog)
        assert said == "pattern 'hubspt/a1': this app has no provider 'hubspt'; did you mean 'hubspot'?"

    @pytest.mark.parametrize(("name", "warned"), [("cmr", True), ("crn", True), ("mail", False), ("c", False)])
    async def test_how_near_is_near(self, make, caplog, name, warned):
        app = make(handlers=[mail], providers=[Provider(name="crm", base_url="https://api.crm.example")])
        await app.enqueue(mail, Mail(to="a"), resource_key=f"{name}/a")
        assert bool(self.warnings(caplog)) is warned

    async def test_a_handler_that_is_not_listed(self, make, caplog):
        @handler("page")
        async def page(job: Job[Page]) -> None: ...

        app = make(handlers=[mail])
        for _ in range(2):
            await app.enqueue(page, Page(url="a"), resource_key="a")
        await app.enqueue(mail, Mail(to="a"), resource_key="a")
        (said,) = self.warnings(caplog)
        assert said.startswith("'page' is not among the handlers of this app: its jobs wait until a worker that has it")

    @pytest.mark.parametrize("listed", [{}, {"handlers": [mail], "kinds": [Kind("page", Page)]}])
    async def test_apps_that_only_enqueue_and_kinds_of_other_programs_are_silent(self, make, caplog, listed):
        app = make(**listed, providers=[])
        await app.enqueue(Kind("page", Page), Page(url="a"), resource_key="hubspott/a")
        assert self.warnings(caplog) == []


def test_type_checkers_know_the_options_there_are():
    """`JobOptions` is what editors complete, `Encoder.encode` what is checked at run time."""
    parameters = inspect.signature(Encoder.encode).parameters.values()
    assert {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} == set(JobOptions.__annotations__)
    assert set(StepOptions.__annotations__) < set(JobOptions.__annotations__)
