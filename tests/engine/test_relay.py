"""What the relay takes for an answer of a destination, and what an outage of one costs: in attempts and in limits."""

import asyncio

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sqlmodel import Session

from resilient import BreakerPolicy, Event, Limit, Permanent, Resilient, Tracing, Transient
from resilient.engine.run.relay import AWAY
from resilient.wire.publishers.base import lost
from tests.helpers import LIMIT, until


class Placed(Event, type="placed"):
    number: int


class Destination:
    """Holds what it gets until the test lets it answer."""

    def __init__(self):
        self.asked = []
        self.most = 0
        self.error = None  # what everything is refused with from now on

    async def __call__(self, _message):
        if self.error is not None:
            raise self.error()
        self.asked.append(asyncio.get_running_loop().create_future())
        self.most = max(self.most, len(self.open))
        await self.asked[-1]

    @property
    def open(self):
        return [one for one in self.asked if not one.done()]

    def refuse(self, error, count=1_000):
        for one in self.open[:count]:
            one.set_exception(error())


def away():
    return Transient("away")


def cut():
    return lost("it is gone", "broker_down")


def publish(app, count):
    with Session(app.database.sync_engine) as session:
        for number in range(count):
            app.outbox.publish(session, Placed(number=number))
        session.commit()


def app_of(database, to, **options):
    return Resilient(database, destinations={"there": to}, routes={Placed: ["there"]}, **options)


def relaying(app):
    """A worker that has one batch at a time, and the task in which it relays."""
    worker = app.worker(concurrency=1)
    return worker, asyncio.create_task(worker.drain(timeout=LIMIT))


async def attempts(app):
    return sum(job.attempts for job in await app.jobs.list(limit=1_000))


@pytest.mark.parametrize("error", [away, cut])
async def test_an_outage_costs_the_first_few_an_attempt(database, error):
    """Also where some were on their way already when the first of those failed."""
    to = Destination()
    app = app_of(database, to)
    publish(app, 50)
    _, task = relaying(app)
    await until(lambda: len(to.asked) == AWAY)
    to.refuse(error, AWAY - 1)  # so many more are sent, because it may be about them
    await until(lambda: len(to.open) == AWAY)
    to.refuse(error)
    await task
    assert (len(to.asked), await attempts(app)) == (2 * AWAY - 1, AWAY)
    await app.close()


@pytest.mark.parametrize("error", [away, cut])
async def test_failures_that_answers_stand_between_are_no_outage(database, clock, error):
    """More than a few of them, but never so many in a row: the others of the batch are tried."""
    asked = []

    async def to(message):
        asked.append(message)
        if len(asked) % 4:
            raise Permanent("it never takes that one")
        raise error()

    # No circuit: a refusal without a status is no evidence for one, so it would open over the others.
    app = app_of(database, to, breakers={"outbox/there": BreakerPolicy(streak=None, ratio=None)})
    publish(app, 10 * AWAY)
    _, task = relaying(app)
    await task
    assert len(asked) == 10 * AWAY
    assert {str(job.state) for job in await app.jobs.list(limit=100)} == {"dead", "scheduled"}
    await app.close()


@pytest.mark.parametrize("reason", ["undecodable", "lost"])
async def test_what_was_never_sent_is_no_answer(database, reason):
    """It lets no more than a few be sent at once to a destination that has answered nothing yet."""
    to = Destination()
    app = app_of(database, to)
    publish(app, 50)
    if reason == "undecodable":
        spoil = "UPDATE {job} SET payload = '[1]' WHERE id IN (SELECT id FROM {job} ORDER BY id LIMIT 3)"
        app.database.transaction_sync(lambda c, d: d.run(c, spoil) and None)
    worker, task = relaying(app)
    await until(lambda: len(to.open) == AWAY)
    if reason == "lost":
        for one in list(worker.executor.running.values())[AWAY : AWAY + 3]:  # those that are due next
            one.lost = True
    to.refuse(away, 1)
    await until(lambda: len(to.open) >= AWAY)
    to.error = away
    to.refuse(away)
    await task
    assert (to.most, len(to.asked)) == (AWAY, AWAY + 1)
    states = [str(job.state) for job in await app.jobs.list(limit=100)]
    assert states.count("dead") == (3 if reason == "undecodable" else 0)
    await app.close()


async def test_what_was_drawn_for_an_event_that_is_not_sent_is_given_back(database, clock):
    """The limit of a destination counts what that got, and not what waited when it was away."""
    asked, errors = [], [away()] * AWAY

    async def to(message):
        asked.append(message)
        if errors:
            raise errors.pop()

    app = app_of(database, to, limits={"outbox/there": [Limit(20, per="1h", burst=20)]})
    publish(app, 50)
    await relaying(app)[1]
    assert (len(asked), errors) == (20, [])  # no time has passed
    await app.close()


async def test_no_event_is_sent_within_the_span_of_another(database):
    """Though the first answer is what lets the others be sent."""

    async def to(_message):
        await asyncio.sleep(0)

    exporter, spans = InMemorySpanExporter(), TracerProvider()
    spans.add_span_processor(SimpleSpanProcessor(exporter))
    app = app_of(database, to, tracing=Tracing(spans))
    publish(app, 10 * AWAY)
    await relaying(app)[1]
    ended = exporter.get_finished_spans()
    batches = {one.context.span_id for one in ended if one.name == "process outbox.there"}
    sent = [one for one in ended if one.name == "send there"]
    assert len(sent) == 10 * AWAY
    assert {one.parent.span_id for one in sent} == batches
    await app.close()
