"""Events are published if, and only if, the transaction they were published in is committed."""

import asyncio
import errno
import sys
import types
from datetime import timedelta
from socket import gaierror
from urllib.error import URLError
from uuid import UUID

import httpx
import pytest
from opentelemetry import trace
from pydantic import Field
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session as PlainSession
from sqlalchemy.orm import scoped_session, sessionmaker
from sqlmodel import Session

from resilient import (
    Ambiguous,
    BadPayload,
    Callback,
    Cancel,
    Event,
    FailureKind,
    InvalidInput,
    Job,
    Limit,
    MissingExtra,
    PayloadTooLarge,
    Permanent,
    RabbitMQ,
    Resilient,
    Retry,
    SetupError,
    Snooze,
    Transient,
    handler,
)
from resilient.wire.publishers.base import Unsendable, lost, refused
from tests.helpers import LIMIT, brisk, until


class OrderPlaced(Event, type="order.placed", version=2):
    number: int
    total: float = Field(default=0.0, alias="grandTotal")


class OrderPaid(OrderPlaced, type="order.paid"):
    pass


class Unrouted(Event, type="order.lost"):
    pass


class Base(Event):
    """Without a type."""


class Sink:
    """A destination that remembers."""

    def __init__(self):
        self.seen = []
        self.errors = []

    async def __call__(self, message):
        if self.errors:
            raise self.errors.pop(0)
        self.seen.append(message)

    @property
    def numbers(self):
        return [m.event["data"]["number"] for m in self.seen]


@pytest.fixture
def sink():
    return Sink()


@pytest.fixture
def other():
    return Sink()


@pytest.fixture
def app(database, sink, other):
    return Resilient(
        database, destinations={"orders": sink, "audit": other}, routes={OrderPlaced: ["orders"]}, event_source="/shop"
    )


@pytest.fixture
def session(database):
    return lambda: Session(database.sync_engine)


async def relayed(app):
    return await app.worker(concurrency=5).drain(timeout=LIMIT)


class TestPublish:
    async def test_with_the_commit(self, app, session, sink, other, read_all):
        with session() as s:
            id_ = app.outbox.publish(s, OrderPlaced(number=7, grandTotal=1.5), subject="order/7")
            assert read_all("SELECT * FROM {job}") == []  # buffered, so that no lock is held meanwhile
            s.commit()
        await relayed(app)
        (message,) = sink.seen
        assert message.event | {"time": None} == {
            "specversion": "1.0", "id": id_, "type": "order.placed", "typeversion": 2, "source": "/shop",
            "subject": "order/7", "datacontenttype": "application/json", "time": None,
            "data": {"number": 7, "grandTotal": 1.5},
        }  # fmt: skip
        (job,) = await app.jobs.list()
        assert (job.kind, job.resource_key, job.state) == ("outbox.orders", "outbox/orders", "succeeded")
        assert message.delivery == str(job.id)
        assert other.seen == []

    async def test_never_after_a_rollback(self, app, session, sink):
        with session() as s:
            app.outbox.publish(s, OrderPlaced(number=1))
            s.rollback()
            app.outbox.publish(s, OrderPlaced(number=2))
            s.commit()
            app.outbox.publish(s, OrderPlaced(number=3))
        await relayed(app)
        assert sink.numbers == [2]

    async def test_a_savepoint_takes_its_events_with_it(self, app, session, sink):
        with session() as s:
            app.outbox.publish(s, OrderPlaced(number=1))
            with s.begin_nested() as savepoint:
                app.outbox.publish(s, OrderPlaced(number=2))
                savepoint.rollback()
            with s.begin_nested():
                app.outbox.publish(s, OrderPlaced(number=3))
                inner = s.begin_nested()
                app.outbox.publish(s, OrderPlaced(number=4))
                inner.rollback()
            s.commit()
        await relayed(app)
        assert sorted(sink.numbers) == [1, 3]

    async def test_closing_a_session_or_savepoint_is_no_commit(self, app, session, sink):
        """SQLAlchemy tells nobody of such a rollback, and the session may be used again."""
        s = session()
        app.outbox.publish(s, OrderPlaced(number=1))
        s.close()
        app.outbox.publish(s, OrderPlaced(number=2))
        savepoint = s.begin_nested()
        app.outbox.publish(s, OrderPlaced(number=3))
        savepoint.close()
        s.commit()
        s.close()
        await relayed(app)
        assert sink.numbers == [2]

    async def test_plain_sqlalchemy_scoped_and_connections(self, app, database, sink):
        with PlainSession(database.sync_engine) as s, s.begin():
            app.sync.outbox.publish(s, OrderPlaced(number=1))
        scoped = scoped_session(sessionmaker(database.sync_engine))
        app.outbox.publish(scoped, OrderPlaced(number=2))
        scoped.commit()
        scoped.remove()
        with database.sync_engine.begin() as c:
            app.outbox.publish(c, OrderPlaced(number=3))
        with database.sync_engine.connect() as c:
            with pytest.raises(InvalidInput, match="begin one"):
                app.outbox.publish(c, OrderPlaced(number=4))
            with c.begin() as transaction:
                app.outbox.publish(c, OrderPlaced(number=4))
                transaction.rollback()
        with database.sync_engine.begin() as c, PlainSession(c) as s:  # somebody else's transaction
            app.outbox.publish(s, OrderPlaced(number=5))
        await relayed(app)
        assert sorted(sink.numbers) == [1, 2, 3, 5]

    async def test_an_async_session(self, app, database, sink):
        url = database.url
        if database.is_sqlite:
            url = url.set(drivername="sqlite+aiosqlite")
        engine = database.async_engine or create_async_engine(url)
        async with AsyncSession(engine) as s:
            app.outbox.publish(s, OrderPlaced(number=1))
            await s.rollback()
            app.outbox.publish(s, OrderPlaced(number=2))
            async with s.begin_nested() as savepoint:
                app.outbox.publish(s, OrderPlaced(number=3))
                await savepoint.rollback()
            await s.commit()
        async with engine.begin() as c:
            with pytest.raises(InvalidInput, match="run_sync"):
                app.outbox.publish(c, OrderPlaced(number=4))
            async with AsyncSession(bind=c) as s:
                with pytest.raises(InvalidInput, match="is not its own"):
                    app.outbox.publish(s, OrderPlaced(number=5))
                await s.run_sync(app.outbox.publish, OrderPlaced(number=6))
            await c.run_sync(app.outbox.publish, OrderPlaced(number=7))
        if engine is not database.async_engine:
            await engine.dispose()
        await relayed(app)
        assert sorted(sink.numbers) == [2, 6, 7]

    async def test_routes(self, app, session, sink, other):
        with session() as s:
            app.outbox.publish(s, OrderPaid(number=1))  # the route of the class it is derived from
            id_ = app.outbox.publish(s, OrderPlaced(number=2), to=["orders", "audit"])
            s.commit()
        await relayed(app)
        assert sorted(sink.numbers) == [1, 2]
        assert [m.id for m in other.seen] == [id_]
        assert {m.id for m in sink.seen if m.type == "order.placed"} == {id_}

    @pytest.mark.parametrize(
        ("event", "words", "said"),
        [
            (Unrouted(), {}, "event 'order.lost' has no route"),
            (OrderPlaced(number=1), {"to": ["nowhere"]}, "'nowhere', which is not declared; known are: audit, orders"),
            (OrderPlaced(number=1), {"to": []}, r"to=\[\]: event 'order.placed' would be published nowhere"),
            (OrderPlaced(number=1), {"to": iter(())}, r"to=\[\]: event 'order.placed' would be published nowhere"),
            (Base(), {}, r"Base is no event: write `class Base\(Event, type='...'\)`"),
            ({"number": 1}, {}, "dict is no event"),
            (OrderPlaced(number=1), {"key": ""}, "partitionkey of an event must be 1 to 255"),
            (OrderPlaced(number=1), {"key": "a\u2028b"}, "ordering_key must be 1 to 255 printable"),
            (OrderPlaced(number=1), {"subject": 7}, "subject of an event must be 1 to 255"),
            (OrderPlaced.model_construct(number=1 + 2j), {}, "is not what its fields say"),
        ],
    )
    def test_mistakes_write_nothing(self, app, session, read_all, event, words, said):
        with session() as s:
            with pytest.raises(InvalidInput, match=said):
                app.outbox.publish(s, event, **words)
            s.commit()
        assert read_all("SELECT * FROM {job}") == []

    def test_an_empty_route_leads_nowhere(self, database, session, sink, read_all):
        app = Resilient(database, destinations={"a": sink}, routes={OrderPlaced: ["a"], OrderPaid: []})
        with session() as s:
            app.outbox.publish(s, OrderPaid(number=1))
            s.commit()
        assert read_all("SELECT * FROM {job}") == []

    @pytest.mark.parametrize("key", [None, "k"])
    def test_too_large(self, database, session, sink, key):
        app = Resilient(database, destinations={"a": sink}, routes={OrderPlaced: ["a"]}, max_payload=250)
        with session() as s, pytest.raises(PayloadTooLarge, match="max_payload=250"):
            app.outbox.publish(s, OrderPlaced(number=1), key=key, subject="ü" * 100)

    def test_a_value_of_another_type(self, app, session):
        with session() as s, pytest.raises(BadPayload, match=r"order\.placed"):
            app.outbox.publish(s, OrderPlaced.model_construct(number="seven"))

    def test_loud_where_nothing_would_be_atomic(self, app, database, read_all):
        for options in ({"isolation_level": "AUTOCOMMIT"}, {"execution_options": {"isolation_level": "AUTOCOMMIT"}}):
            engine = create_engine(database.sync_engine.url, **options)
            with Session(engine) as s, pytest.raises(InvalidInput, match="autocommit"):
                app.outbox.publish(s, OrderPlaced(number=1))
            engine.dispose()
        with Session(database.sync_engine) as s:
            app.outbox.publish(s, OrderPlaced(number=1))
            s.connection(execution_options={"isolation_level": "AUTOCOMMIT"})
            with pytest.raises(InvalidInput, match="autocommit"):
                s.commit()
        with Session(database.sync_engine, autobegin=False) as s, pytest.raises(InvalidInput, match=r"session\.begin"):
            app.outbox.publish(s, OrderPlaced(number=1))
        for wrong in (None, database.sync_engine, "s"):
            with pytest.raises(InvalidInput, match="publish takes a Session"):
                app.outbox.publish(wrong, OrderPlaced(number=1))
        assert read_all("SELECT * FROM {job}") == []

    async def test_the_trace_is_carried(self, app, session, sink, monkeypatch):
        with session() as s:
            app.outbox.publish(s, OrderPlaced(number=1), traceparent="00-" + "a" * 32 + "-" + "b" * 16 + "-01")
            span = types.SimpleNamespace(
                is_valid=True, trace_id=0xABC, span_id=0xD, trace_flags=1,
                trace_state=types.SimpleNamespace(to_header=lambda: "v=1"),
            )  # fmt: skip
            monkeypatch.setattr(trace, "get_current_span", lambda: types.SimpleNamespace(get_span_context=lambda: span))
            app.outbox.publish(s, OrderPlaced(number=2))
            s.commit()
        await relayed(app)
        found = {m.event["data"]["number"]: m for m in sink.seen}
        assert found[1].traceparent == "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
        assert found[2].headers["traceparent"] == f"00-{0xABC:032x}-{0xD:016x}-01"
        assert found[2].headers["tracestate"] == "v=1"

    @pytest.mark.parametrize("state", ["", "v=" + "1" * 400])
    async def test_a_trace_is_no_reason_to_fail(self, app, session, sink, monkeypatch, state):
        """W3C lets a long state be dropped; a business transaction must not fail over it."""
        span = types.SimpleNamespace(
            is_valid=True, trace_id=1, span_id=2, trace_flags=0,
            trace_state=types.SimpleNamespace(to_header=lambda: state),
        )  # fmt: skip
        monkeypatch.setattr(trace, "get_current_span", lambda: types.SimpleNamespace(get_span_context=lambda: span))
        with session() as s:
            app.outbox.publish(s, OrderPlaced(number=1))
            s.commit()
        await relayed(app)
        assert (sink.seen[0].traceparent is not None, sink.seen[0].tracestate) == (True, None)

    async def test_a_waiting_worker_hears_of_it(self, app, session, sink):
        worker = app.worker()
        running = asyncio.create_task(worker.run(signals=False))
        await asyncio.sleep(0.1)
        with session() as s:
            app.outbox.publish(s, OrderPlaced(number=1))
            s.commit()
        async with asyncio.timeout(LIMIT):
            while not sink.seen:  # noqa: ASYNC110 - the worker is another task
                await asyncio.sleep(0.005)
        worker.stop()
        await running


class TestDeclaring:
    def test_a_worker_says_at_once_which_library_is_missing(self, database, sink, monkeypatch):
        to = {"rabbit": RabbitMQ("amqp://localhost/"), "here": sink}
        monkeypatch.setitem(sys.modules, "aio_pika", None)
        app = Resilient(database, destinations=to, routes={OrderPlaced: ["rabbit"]})  # publishing needs none
        with pytest.raises(MissingExtra, match=r"resilient-engine\[rabbitmq\]"):
            app.worker()
        app.worker(kinds=["outbox.here"])

    def test_mistakes(self, database, sink):
        for words, said in (
            ({"destinations": {"a/b": sink}}, "a name without a slash"),
            ({"destinations": {"a": 7}}, "destination 'a' is 7: give RabbitMQ"),
            ({"destinations": {"a": print}}, "destination 'a' is"),
            ({"routes": {OrderPlaced: ["orders"]}}, "the route of OrderPlaced names destination 'orders', which is"),
            ({"routes": {dict: []}}, "is no Event"),
        ):
            with pytest.raises(SetupError, match=said):
                Resilient(database, **words)

    def test_types(self):
        assert (OrderPlaced.event_type, OrderPlaced.event_version) == ("order.placed", 2)
        for words, said in (({"type": "a b"}, "is not a type of events"), ({"type": "a", "version": 0}, "version of")):
            with pytest.raises(SetupError, match=said):
                type(Event)("Wrong", (Event,), {"__module__": __name__}, **words)


class TestRelay:
    async def publish(self, app, session, *numbers):
        with session() as s:
            for number in numbers:
                app.outbox.publish(s, OrderPlaced(number=number))
            s.commit()

    async def test_what_is_refused_for_good_is_dead_and_can_be_replayed(self, app, session, sink):
        sink.errors = [Permanent("no such order")]
        await self.publish(app, session, 1)
        await relayed(app)
        (job,) = await app.jobs.list()
        assert (job.state, job.last_error_kind) == ("dead", "permanent")
        await app.jobs.retry(job.id)
        await relayed(app)
        assert sink.numbers == [1]

    async def test_a_broker_that_is_away_costs_no_event(self, app, session, sink, clock):
        sink.errors = [Transient("away") for _ in range(200)]
        await self.publish(app, session, 1)
        for _ in range(14):
            await relayed(app)
            clock.advance(hours=1)
        (job,) = await app.jobs.list()
        assert (job.state, job.max_attempts) == ("scheduled", None)
        assert job.attempts > 10
        sink.errors = []
        clock.advance(hours=1)
        await relayed(app)
        assert sink.numbers == [1]

    async def test_an_outage_opens_the_circuit_and_touches_few(self, app, session, sink):
        sink.errors = [Transient("away") for _ in range(1000)]
        await self.publish(app, session, *range(100))
        await relayed(app)
        found = await app.resources.get("outbox/orders")
        assert found.gate == "breaker"
        assert sum(job.attempts for job in await app.jobs.list()) < 40
        assert {job.state for job in await app.jobs.list()} <= {"ready", "scheduled"}

    @pytest.mark.parametrize("how", ["away", "confirms", "refuses"])
    async def test_few_are_tried_at_once_before_one_is_answered(self, database, session, how):
        """A destination that says late that it is away would get all of it: five of each of five batches at most."""
        tried, now, most, answer = 0, 0, 0, asyncio.Event()

        async def sink(_message):
            nonlocal tried, now, most
            tried, now = tried + 1, now + 1
            most = max(most, now)
            await answer.wait()
            now -= 1
            if how == "away":
                raise Transient("away")
            answer.clear()  # those that wait now are as many as may be under way
            asyncio.get_running_loop().call_soon(answer.set)
            if how == "refuses":
                raise Permanent("it never takes that one")

        app = Resilient(database, destinations={"orders": sink}, routes={OrderPlaced: ["orders"]})
        await self.publish(app, session, *range(100))
        running = asyncio.create_task(relayed(app))
        await until(lambda: now >= 5)
        answer.set()
        await running
        states = {str(job.state) for job in await app.jobs.list(limit=100)}
        away = how == "away"
        assert (most <= 25, tried < 50) == (away, away)
        assert states <= {"away": {"ready", "scheduled"}, "confirms": {"succeeded"}, "refuses": {"dead"}}[how]

    async def test_a_destination_that_swallows_its_cancellation_harms_no_other_event(self, database, session):
        """Its confirm comes while the batch is being cut off: nothing new may begin then."""
        held = []

        async def sink(message):
            held.append(message)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if message is not held[0]:
                    raise

        app = Resilient(database, destinations={"orders": sink}, routes={OrderPlaced: ["orders"]})
        await self.publish(app, session, *range(20))
        worker = app.worker(concurrency=40, grace=0.0)
        running = asyncio.create_task(worker.run(signals=False))
        await until(lambda: len(held) >= 5)
        worker.stop()
        await running
        jobs = await app.jobs.list(limit=100)
        assert {(str(job.state), job.attempts, job.last_error_kind) for job in jobs} <= {
            ("succeeded", 0, None),
            ("ready", 0, None),
        }
        await app.close()

    async def test_what_cannot_be_opened_is_charged_to_the_first_that_ask(self, database, session):
        class Away(Callback):
            async def connect(self):
                raise lost("nobody there", "broker_down")

        async def never(_message):
            raise AssertionError

        app = Resilient(database, destinations={"orders": Away(never)}, routes={OrderPlaced: ["orders"]})
        await self.publish(app, session, *range(50))
        await relayed(app)
        assert 0 < sum(job.attempts for job in await app.jobs.list()) < 10
        assert {job.last_error_code for job in await app.jobs.list()} == {None, "broker_down"}

    async def test_whatever_opening_a_connection_raises_is_no_answer(self, database, session):
        """Whoever lost the connection, and cannot open another one, has sent nothing: the rest waits, uncharged."""
        opened = []

        class Refusing(Callback):
            async def connect(self):
                opened.append(1)
                if len(opened) > 1:
                    raise PermissionError("the certificate cannot be read")
                return await super().connect()

        async def cut(_message):
            raise lost("cut", "cut")

        app = Resilient(database, destinations={"orders": Refusing(cut)}, routes={OrderPlaced: ["orders"]})
        await self.publish(app, session, *range(60))
        await relayed(app)
        jobs = await app.jobs.list(limit=100)
        assert 0 < sum(job.attempts for job in jobs) < 20
        assert len(opened) < 20
        assert {str(job.state) for job in jobs} <= {"ready", "scheduled"}
        assert (await app.resources.get("outbox/orders")).gate == "breaker"

    @pytest.mark.parametrize(
        "error",
        [Permanent("a wrong password"), Ambiguous("who knows"), refused("not you", "no"), Cancel(), Snooze(5)],
        ids=["permanent", "ambiguous", "refused", "cancel", "snooze"],
    )
    async def test_what_opening_a_connection_raises_ends_no_event(self, database, session, error):
        """No event was sent, and each batch would end another one."""

        class Refusing(Callback):
            async def connect(self):
                raise error

        app = Resilient(database, destinations={"orders": Refusing(Sink())}, routes={OrderPlaced: ["orders"]})
        await self.publish(app, session, *range(60))
        await relayed(app)
        jobs = await app.jobs.list(limit=100)
        assert 0 < sum(job.attempts for job in jobs) < 20
        assert {str(job.state) for job in jobs} <= {"ready", "scheduled"}
        assert (await app.resources.get("outbox/orders")).gate == "breaker"

    @pytest.mark.parametrize(
        "error",
        [
            ConnectionRefusedError(errno.ECONNREFUSED, "refused"),
            OSError("Multiple exceptions: refused, refused"),
            OSError(errno.EHOSTUNREACH, "no route"),
            gaierror(-2, "unknown"),
            URLError(ConnectionRefusedError()),
        ],
        ids=["refused", "several", "no route", "no name", "wrapped"],
    )
    async def test_a_connection_that_a_function_lost_is_no_mistake_of_it(self, database, session, error):
        async def sink(_message):
            await asyncio.sleep(0)
            raise error from getattr(error, "reason", None)

        app = Resilient(database, destinations={"orders": sink}, routes={OrderPlaced: ["orders"]})
        await self.publish(app, session, *range(100))
        await relayed(app)
        jobs = await app.jobs.list(limit=100)
        assert 0 < sum(job.attempts for job in jobs) < 40
        assert {job.last_error_kind for job in jobs} == {None, "transient"}
        assert (await app.resources.get("outbox/orders")).gate == "breaker"

    async def test_what_a_function_makes_of_a_lost_connection_counts(self, database, session):
        async def sink(_message):
            try:
                raise ConnectionRefusedError
            except ConnectionError:
                raise Snooze(3600)  # noqa: B904 - as programs do

        app = Resilient(database, destinations={"orders": sink}, routes={OrderPlaced: ["orders"]})
        await self.publish(app, session, 1)
        await relayed(app)
        (job,) = await app.jobs.list()
        assert (job.state, job.attempts, job.last_error_kind) == ("scheduled", 0, None)

    async def test_what_a_file_raises_is_that_events(self, database, session):
        """Its name is too long, say: the event must not hold up its key for ever."""

        async def sink(_message):
            raise OSError(errno.ENAMETOOLONG, "its name")

        app = Resilient(database, destinations={"orders": sink}, routes={OrderPlaced: ["orders"]})
        await self.publish(app, session, 1)
        await relayed(app)
        assert (await app.jobs.list())[0].last_error_kind == "bug"

    @pytest.mark.parametrize("status", [None, 503])
    async def test_a_function_need_not_translate_its_clients_errors(self, database, session, status):
        """What an HTTP client raises means that the destination is away, as `Transient` does."""
        tried = []

        async def sink(message):
            tried.append(message)
            await asyncio.sleep(0)
            if status is None:
                raise httpx.ConnectError("refused")
            httpx.Response(status, request=httpx.Request("POST", "http://sink/")).raise_for_status()

        app = Resilient(database, destinations={"orders": sink}, routes={OrderPlaced: ["orders"]})
        await self.publish(app, session, *range(100))
        await relayed(app)
        assert 0 < sum(job.attempts for job in await app.jobs.list(limit=100)) < 40
        assert len(tried) < 60

    @pytest.mark.parametrize(
        "error",
        [
            httpx.ReadTimeout("nothing came", request=httpx.Request("POST", "http://sink/")),
            Ambiguous("nothing came"),
        ],
        ids=["httpx", "said"],
    )
    async def test_an_event_whose_answer_a_function_lost_is_sent_again(self, database, session, sink, clock, error):
        """It is not in doubt, as a request of a handler's is: consumers tell duplicates by its id."""
        sink.errors = [error]
        app = Resilient(database, destinations={"orders": sink}, routes={OrderPlaced: "orders"}, clock=clock)
        await self.publish(app, session, 1)
        await relayed(app)
        (job,) = await app.jobs.list()
        code = "no_confirm" if isinstance(error, Ambiguous) else "read_timeout"
        assert (job.state, job.last_error_kind, job.last_error_code) == ("scheduled", "transient", code)
        clock.advance(hours=1)
        await relayed(app)
        assert sink.numbers == [1]

    @pytest.mark.parametrize("error", [Unsendable("its key is too long"), KeyError("a mistake")])
    async def test_what_was_never_sent_is_no_answer(self, database, session, error):
        """It lets no hundred events be sent at once to a destination that has answered nothing yet."""
        now, most, spoilt, answer = 0, 0, [1], asyncio.Event()

        async def sink(_message):
            nonlocal now, most
            if spoilt:
                spoilt.pop()
                raise error
            now += 1
            most = max(most, now)
            await answer.wait()
            now -= 1
            raise Transient("away")

        app = Resilient(database, destinations={"orders": sink}, routes={OrderPlaced: ["orders"]})
        await self.publish(app, session, *range(100))
        running = asyncio.create_task(relayed(app))
        await until(lambda: now >= 4)
        answer.set()
        await running
        assert most <= 25

    async def test_each_event_ends_when_it_is_published(self, database, session):
        """Not with the last of its batch: a crash meanwhile would publish all of them again."""
        first = []

        async def sink(message):
            if not first:
                first.append(message)
                return
            async with asyncio.timeout(LIMIT):
                while (await app.jobs.get(first[0].delivery)).state != "succeeded":  # noqa: ASYNC110 - it is written
                    await asyncio.sleep(0.01)

        app = Resilient(database, destinations={"orders": sink}, routes={OrderPlaced: "orders"})
        await self.publish(app, session, 1, 2)
        await relayed(app)
        assert {(job.state, job.attempts) for job in await app.jobs.list()} == {("succeeded", 0)}

    def test_a_programs_own_mistake_does_not_block_for_ever(self, app):
        retry = app.kinds["outbox.orders"].retry
        assert retry.limit(FailureKind.TRANSIENT, None) is None
        assert retry.limit(FailureKind.BUG, None) == 20

    async def test_limits_of_the_destination_hold(self, database, session, sink, clock):
        limits = {"outbox/orders": [Limit(5, per="1h", burst=5)]}
        app = Resilient(database, destinations={"orders": sink}, routes={OrderPlaced: ["orders"]}, limits=limits)
        await self.publish(app, session, *range(12))
        await relayed(app)
        clock.advance(minutes=2)  # parked turns are looked at again: what was sent was drawn
        await relayed(app)
        assert len(sink.seen) == 5
        clock.advance(hours=1)
        await relayed(app)
        assert len(sink.seen) == 10
        assert sum(job.attempts for job in await app.jobs.list()) == 0

    async def test_a_paused_destination_waits_and_goes_on(self, app, session, sink):
        await app.resources.pause("outbox/orders", reason="maintenance")
        await self.publish(app, session, 1, 2)
        await relayed(app)
        assert sink.seen == []
        await app.resources.resume("outbox/orders")
        await relayed(app)
        assert sorted(sink.numbers) == [1, 2]

    async def test_nobody_confirms(self, database, session):
        async def hangs(_message):
            await asyncio.sleep(60)

        app = Resilient(
            database, destinations={"orders": Callback(hangs, timeout=0.05)}, routes={OrderPlaced: "orders"}
        )
        await self.publish(app, session, 1)
        await relayed(app)
        (job,) = await app.jobs.list()
        assert (job.state, job.last_error_code) == ("scheduled", "no_confirm")

    async def test_what_a_client_cancels_is_not_published(self, app, session, sink, clock):
        """A broken-off wait within a destination is no end of the batch: the event comes again."""
        sink.errors = [asyncio.CancelledError()]
        await self.publish(app, session, *range(5))
        await relayed(app)
        assert sorted(job.state for job in await app.jobs.list()) == ["scheduled"] + ["succeeded"] * 4
        clock.advance(hours=1)
        await relayed(app)
        assert sorted(sink.numbers) == [0, 1, 2, 3, 4]

    async def test_what_another_worker_has_by_now_is_not_published_too(self, database, session, monkeypatch):
        """A worker that stood still goes on with its batch: what is left of it is somebody else's."""
        monkeypatch.setattr("resilient.engine.run.relay.IN_FLIGHT", 1)
        seen, steal = [], "UPDATE {job} SET version = version + 1, locked_by = 'other' WHERE id <> :id"

        async def sink(message):
            seen.append(message)
            if len(seen) > 1:
                return
            await database.transaction(lambda c, d: d.run(c, steal, {"id": d.id(UUID(message.delivery))}))
            async with asyncio.timeout(LIMIT):
                while sum(one.lost for one in worker.executor.running.values()) < 2:  # noqa: ASYNC110 - a heartbeat
                    await asyncio.sleep(0.01)

        app = Resilient(database, destinations={"orders": sink}, routes={OrderPlaced: "orders"})
        await self.publish(app, session, 1, 2, 3)
        worker = brisk(app.worker())
        running = asyncio.create_task(worker.run(signals=False))
        async with asyncio.timeout(LIMIT):
            while worker.outcomes.get("succeeded") != 1 or worker.executor.running:  # noqa: ASYNC110 - another task
                await asyncio.sleep(0.01)
        worker.stop()
        await running
        assert len(seen) == 1

    async def test_a_payload_that_is_no_event_is_parked(self, app, session, database):
        await self.publish(app, session, 1)
        database.transaction_sync(lambda c, d: d.run(c, "UPDATE {job} SET payload = '[1]'"))
        await relayed(app)
        (job,) = await app.jobs.list()
        assert (job.state, job.last_error_code) == ("dead", "undecodable")
        assert (await app.outbox.list())[0].type == ""


class TestLooking:
    async def test_list_and_get(self, app, session, clock):
        with session() as s:
            one = app.outbox.publish(s, OrderPlaced(number=1), to=["orders", "audit"])
            s.commit()
        clock.advance(hours=1)
        with session() as s:
            two = app.outbox.publish(s, OrderPaid(number=2))
            s.commit()
        await relayed(app)
        found = await app.outbox.list()
        assert (found[0].id, found[0].type) == (two, "order.paid")
        assert {(e.id, e.destination) for e in found} == {(one, "orders"), (one, "audit"), (two, "orders")}
        assert [e.id for e in await app.outbox.list(type="order.paid")] == [two]
        assert [e.id for e in await app.outbox.list(destination="audit")] == [one]
        assert [e.id for e in await app.outbox.list(created_after=timedelta(minutes=30))] == [two]
        assert await app.outbox.list(state="dead") == []
        both = app.sync.outbox.get(one)
        assert sorted(e.destination for e in both) == ["audit", "orders"]
        assert all(e.state == "succeeded" and e.published_at is not None for e in both)
        assert both[0].event["data"] == {"number": 1, "grandTotal": 0.0}
        first = await app.outbox.list(limit=2)
        assert [e.id for e in await app.outbox.list(limit=2, after=first[-1].job_id)] == [one]


class TestOrder:
    async def test_each_key_in_the_order_of_its_commits(self, app, session, sink):
        for number in range(12):
            with session() as s:
                app.outbox.publish(s, OrderPlaced(number=number), key=f"order-{number % 3}")
                s.commit()
        await relayed(app)
        for key in range(3):
            mine = [m for m in sink.seen if m.key == f"order-{key}"]
            assert [m.event["data"]["number"] for m in mine] == [key, key + 3, key + 6, key + 9]
            assert [m.sequence for m in mine] == [1, 2, 3, 4]
        assert {e.sequence for e in await app.outbox.list(key="order-1")} == {1, 2, 3, 4}

    async def test_an_event_waits_for_the_one_before_it_and_no_other_key(self, app, session, sink):
        sink.errors = [Transient("away", retry_after=3600)]
        with session() as s:
            for number, key in ((1, "a"), (2, "a"), (3, "b")):
                app.outbox.publish(s, OrderPlaced(number=number), key=key)
            s.commit()
        await relayed(app)
        waiting = {e.event["data"]["number"]: e.state for e in await app.outbox.list()}
        failed = next(n for n, state in waiting.items() if state == "scheduled")
        assert failed in (1, 3)  # the heads, in no particular order
        assert waiting[2] == ("blocked" if failed == 1 else "succeeded")
        assert sink.numbers == [3] if failed == 1 else [1, 2]

    async def test_the_consumers_inbox_takes_them_by_number(self, app, session, sink):
        with session() as s:
            for number in (1, 2, 3):
                app.outbox.publish(s, OrderPlaced(number=number), key="a")
            s.commit()
        await relayed(app)
        with session() as s:
            found = [
                app.sync.inbox.arrived(s, "billing", m.id, key=m.key, number=m.sequence, gapless=True)
                for m in (sink.seen[0], sink.seen[2], sink.seen[1], sink.seen[2], sink.seen[0])
            ]
        assert found == ["first", "early", "first", "first", "duplicate"]


class TestFromAHandler:
    @pytest.fixture
    def app(self, sqlite_url, sink):
        """Its jobs publish, in the transaction that completes them."""

        @handler("order.place", retry=Retry(max_attempts=1))
        async def place(job: Job[dict]) -> None:
            async with job.complete() as session:
                job.app.outbox.publish(session, OrderPlaced(number=job.payload["number"]), key="a")
            if job.payload.get("fails"):
                raise ValueError("after complete")

        return Resilient(sqlite_url, handlers=[place], destinations={"orders": sink}, routes={OrderPlaced: ["orders"]})

    async def test_with_the_completion_or_not_at_all(self, app, sink):
        await app.enqueue("order.place", {"number": 1}, resource_key="shop")
        await app.enqueue("order.place", {"number": 2, "fails": True}, resource_key="shop")
        await relayed(app)
        assert sink.numbers == [1]
        states = {job.payload["number"]: job.state for job in await app.jobs.list(kind="order.place")}
        assert states == {1: "succeeded", 2: "dead"}
        assert sink.seen[0].sequence == 1  # what was rolled back took no number
        await app.close()
