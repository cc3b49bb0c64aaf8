"""What the relay takes for an answer of a destination, and what an outage of one costs: in attempts and in limits."""

import asyncio
import contextlib

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sqlmodel import Session

from resilient import BreakerPolicy, Event, Limit, Permanent, Resilient, Tracing, Transient
from resilient.engine.run.relay import MOST_STRIKES
from resilient.wire.publishers.base import cut_off, lost
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
    await until(lambda: len(to.asked) == MOST_STRIKES)
    to.refuse(error, MOST_STRIKES - 1)  # so many more are sent, because it may be about them
    await until(lambda: len(to.open) == MOST_STRIKES)
    to.refuse(error)
    await task
    assert (len(to.asked), await attempts(app)) == (2 * MOST_STRIKES - 1, MOST_STRIKES)
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
    publish(app, 10 * MOST_STRIKES)
    _, task = relaying(app)
    await task
    assert len(asked) == 10 * MOST_STRIKES
    assert {str(job.state) for job in await app.jobs.list(limit=100)} == {"dead", "scheduled"}
    await app.close()


async def test_a_connection_that_is_closed_over_events_is_no_outage(database):
    """However many there are in a row: the destination is there, and takes the others over another connection."""
    asked = []

    async def to(message):
        asked.append(number := message.event["data"]["number"])
        if number < 3 * MOST_STRIKES:
            raise cut_off("it closes the connection over that one", "channel_closed")

    app = app_of(database, to)
    publish(app, 5 * MOST_STRIKES)
    _, task = relaying(app)
    await until(lambda: set(range(3 * MOST_STRIKES, 5 * MOST_STRIKES)) <= set(asked))
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert [one.breaker for one in await app.resources.list() if one.key == "outbox/there"] in ([], ["closed"])
    await app.close()


async def cancelled():
    asyncio.current_task().cancel()
    await asyncio.sleep(0)


async def cancelled_and_returns():
    asyncio.current_task().cancel()


async def cancelled_and_goes_on():
    asyncio.current_task().cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(0)


async def cancelled_and_raises():
    """As libraries did that bound a call before Python had a timeout of its own."""
    try:
        await cancelled()
    except asyncio.CancelledError:
        raise TimeoutError from None


async def everybody_cancelled():
    for task in asyncio.all_tasks():
        if task.get_coro().__qualname__.endswith("_publish_waiting"):
            task.cancel()
    await asyncio.sleep(0)


@pytest.mark.parametrize(
    "cancel", [cancelled, cancelled_and_returns, cancelled_and_goes_on, cancelled_and_raises, everybody_cancelled]
)
async def test_no_event_counts_as_published_because_a_task_was_cancelled(database, cancel):
    """The batch's handler returns all the same, and by its return a batch says that its jobs have succeeded."""
    delivered = set()

    async def to(message):
        if message.event["data"]["number"] < MOST_STRIKES:
            await cancel()
        delivered.add(message.id)

    app = app_of(database, to)
    publish(app, 30)
    await relaying(app)[1]
    events = await app.outbox.list(limit=100)
    assert {one.id for one in events if one.state == "succeeded"} <= delivered
    assert {str(one.state) for one in events} <= {"succeeded", "scheduled", "ready"}
    await app.close()


class Unreadable(ConnectionError):
    def __str__(self):
        raise RuntimeError


class Forgetful(Transient):
    def __init__(self):
        """Without its base's."""


@pytest.mark.parametrize("error", [Unreadable, Forgetful])
async def test_an_error_that_cannot_be_read_is_one_events_own(database, error):
    """It ended the whole batch: events that were on their way beside it were sent again."""
    seen = []

    async def to(message):
        seen.append(message)
        if len(seen) == 3:
            raise error

    app = app_of(database, to, breakers={"outbox/there": BreakerPolicy(streak=None, ratio=None)})
    publish(app, 20)
    await relaying(app)[1]
    states = [str(job.state) for job in await app.jobs.list(limit=100)]
    assert (len(seen), states.count("succeeded"), states.count("scheduled")) == (20, 19, 1)
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
    await until(lambda: len(to.open) == MOST_STRIKES)
    if reason == "lost":
        for one in list(worker.executor.running.values())[MOST_STRIKES : MOST_STRIKES + 3]:  # those that are due next
            one.lost = True
    to.refuse(away, 1)
    await until(lambda: len(to.open) >= MOST_STRIKES)
    to.error = away
    to.refuse(away)
    await task
    assert (to.most, len(to.asked)) == (MOST_STRIKES, MOST_STRIKES + 1)
    states = [str(job.state) for job in await app.jobs.list(limit=100)]
    assert states.count("dead") == (3 if reason == "undecodable" else 0)
    await app.close()


async def test_what_was_drawn_for_an_event_that_is_not_sent_is_given_back(database, clock):
    """The limit of a destination counts what that got, and not what waited when it was away."""
    asked, errors = [], [away()] * MOST_STRIKES

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
    publish(app, 10 * MOST_STRIKES)
    await relaying(app)[1]
    ended = exporter.get_finished_spans()
    batches = {one.context.span_id for one in ended if one.name == "process outbox.there"}
    sent = [one for one in ended if one.name == "send there"]
    assert len(sent) == 10 * MOST_STRIKES
    assert {one.parent.span_id for one in sent} == batches
    await app.close()
