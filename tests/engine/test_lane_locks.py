"""Whoever ends jobs takes lanes in the order of everybody, so that no business transaction waits in a circle with it.

Each test holds what both sides want, lets the engine queue for it first and a business transaction second, and lets go.
"""

import asyncio
from datetime import UTC, datetime

import pytest
import sqlalchemy as sa
from sqlmodel import Session

from resilient import Event, Fixed, Job, Resilient, Retry, handler
from resilient.engine import completer
from resilient.store import finishing, followers
from resilient.store.finishing import Finish

LANE, WORKFLOW = "resilient_order WHERE resource_key = 'p/1'", "resilient_workflow"
TRIES = []
RETRY = Retry(max_attempts=3, delay=Fixed(0))


class Moved(Event, type="stock.moved"):
    number: int


async def null(_message):
    pass


@handler("last")
async def last(_job: Job[None]) -> None:
    """Nothing."""


@handler("publishes", retry=RETRY)
async def publishes(job: Job[None]) -> None:
    TRIES.append(job.attempt)
    async with job.complete() as session:
        job.app.outbox.publish(session, Moved(number=1), key="k")


@handler("followed", retry=RETRY)
async def followed(job: Job[None]) -> None:
    TRIES.append(job.attempt)
    job.then(last, None, resource_key="outbox/a", ordering_key="k")


HANDLERS = [publishes, followed, last]


@pytest.fixture
async def app(postgres_database):
    TRIES.clear()
    app = Resilient(postgres_database, handlers=HANDLERS, destinations={"a": null}, routes={Moved: ["a"]})
    yield app
    await app.close()


@pytest.fixture
async def anywhere(database):
    """The same on either database."""
    app = Resilient(database, handlers=HANDLERS, destinations={"a": null}, routes={Moved: ["a"]})
    yield app
    await app.close()


async def meet(app, held, *others):
    """Let those queue, one after the other, for what is held; then let it go. What each of them raised."""
    with app.database.sync_engine.connect() as c:
        holding = c.begin()
        c.execute(sa.text(f"SELECT 1 FROM {held} FOR NO KEY UPDATE"))
        tasks = []
        for number, other in enumerate(others, 1):
            tasks.append(asyncio.create_task(other()))
            await waiting(app, number, tasks)
        holding.rollback()
    return await asyncio.gather(*tasks, return_exceptions=True)


async def waiting(app, number, tasks):
    q = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    for _ in range(1_000):
        if await app.database.transaction(lambda c, _: c.execute(sa.text(q)).scalar()) == number:
            return
        assert not any(task.done() for task in tasks)
        await asyncio.sleep(0.01)
    raise AssertionError("nobody waits")


def business(app):
    """It publishes, and has something done in order."""

    def write():
        with Session(app.database.sync_engine) as s:
            app.outbox.publish(s, Moved(number=2), key="k")
            app.sync.enqueue(last, session=s, resource_key="p/1", ordering_key="o")
            s.commit()

    return lambda: asyncio.to_thread(write)


def drain(app):
    return lambda: app.worker(concurrency=2).drain(timeout=30)


def end(app, done, dead=(), follow_ups=None):
    """A worker's results, in one batch."""
    running(app, [*done, *dead])
    finishes = [Finish(id_, 2, "dead", "dead") for id_ in dead]
    return lambda: app.database.transaction(
        completer.write, [(id_, 2, None) for id_ in done], finishes, {}, follow_ups=follow_ups
    )


def running(app, ids):
    """As a claim leaves them."""
    sets = "state = 'running', version = version + 1, locked_by = 'w', lease_until = updated_at"
    d = app.database.dialect
    statement = f"UPDATE {{job}} SET {sets} WHERE id {d.among('ids', 'uuid')}"
    app.database.transaction_sync(lambda c, d: d.run(c, statement, {"ids": d.pack_ids(ids)}))


async def test_only_lanes_of_jobs_that_have_one_are_looked_for(anywhere):
    """SQLite's RETURNING once said of every job that it has a key."""
    ids = [(await anywhere.enqueue(last, resource_key="p/1", ordering_key=key)).id for key in (None, "a", None, "b")]
    running(anywhere, ids)
    ends = followers.Ends()

    def write(c, d):
        finishing.succeed_if_held(c, d, [(id_, 2, None) for id_ in ids[:2]], d.now(c), ends)
        finishing.finish_if_held(c, d, [Finish(id_, 2, "dead", "dead") for id_ in ids[2:]], d.now(c), ends)

    await anywhere.database.transaction(write)
    assert ends.in_lanes == {ids[1], ids[3]}


@pytest.mark.parametrize("kind", [publishes, followed], ids=lambda kind: kind.kind)
async def test_a_job_in_order_is_followed_by_others_in_order(app, kind):
    await app.enqueue(kind, resource_key="p/1", ordering_key="o")
    assert errors(await meet(app, LANE, drain(app), business(app))) == []
    assert TRIES == [1]


@pytest.mark.parametrize("kind", [publishes, followed], ids=lambda kind: kind.kind)
async def test_both_lanes_go_on(clock, anywhere, read_all, kind):
    app = anywhere
    for _ in range(3):
        await app.enqueue(kind, resource_key="p/1", ordering_key="o")
    await app.worker(concurrency=2).drain(timeout=30)
    rows = read_all("SELECT resource_key, order_no, state FROM {job} ORDER BY resource_key, order_no")
    assert [tuple(r.values()) for r in rows] == [
        (key, n, "succeeded") for key in ("outbox/a", "p/1") for n in (1, 2, 3)
    ]
    assert read_all("SELECT last_no, head_id FROM {order}") == [{"last_no": 3, "head_id": None}] * 2


async def test_jobs_without_a_key_are_in_no_lane(anywhere, read_all):
    """Nor are those that die with what they wait for."""
    app = anywhere
    first = await app.enqueue(publishes, resource_key="p/1")
    await app.enqueue(last, resource_key="p/1", after=[first.id])
    await app.worker().drain(timeout=30)
    one, two = await app.enqueue(last, resource_key="q/1"), await app.enqueue(followed, resource_key="q/1")
    await app.enqueue(last, resource_key="q/1", after=[one.id])
    await app.database.transaction(followers.resolve_dependencies, datetime.now(UTC))
    new = app._encoder.encode(last, None, "q/2", ordering_key="o")
    await end(app, [two.id], [one.id], follow_ups={two.id: [new]})()
    lanes = [(r["resource_key"], r["ordering_key"]) for r in read_all("SELECT * FROM {order} ORDER BY 1")]
    assert lanes == [("outbox/a", "k"), ("q/2", "o")]


async def test_one_succeeded_and_one_died(app):
    words = {"ordering_key": "k", "ordering_policy": "skip"}
    one = await app.enqueue(last, resource_key="p/1", ordering_key="o")
    other = await app.enqueue(last, resource_key="outbox/a", **words)
    assert errors(await meet(app, LANE, end(app, [one.id], [other.id]), business(app))) == []


async def test_a_step_publishes_while_a_batch_ends_another_one(app):
    """The batch takes the lane of an event, and then the workflow; so does the step's completion."""
    with Session(app.database.sync_engine) as s:
        app.outbox.publish(s, Moved(number=0), key="k")
        s.commit()
    (event,) = await app.jobs.list()
    await app.resources.pause("outbox")
    async with app.workflow("w", resource_key="p/1") as wf:
        sibling = wf.step(last, None)
        wf.step(publishes, None)
    assert errors(await meet(app, WORKFLOW, drain(app), end(app, [event.id, sibling.id]))) == []
    assert TRIES == [1]


def errors(found):
    return [str(one) for one in found if isinstance(one, BaseException)]
