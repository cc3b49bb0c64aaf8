"""Whoever ends jobs takes lanes in the order of everybody, so that no business transaction waits in a circle with it.

Each test holds what both sides want, lets the engine queue for it first and a business transaction second, and lets go.
"""

import asyncio
from datetime import UTC, datetime

import pytest
import sqlalchemy as sa
from sqlmodel import Session

from resilient import Event, Fixed, Job, Resilient, Retry, handler
from resilient.core.jobs.outcomes import Transition
from resilient.engine.run import completer
from resilient.store.jobs import dependencies, finishing, workflows
from resilient.store.jobs.finishing import Finish
from tests.helpers import LIMIT

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


@handler("cancels")
async def cancels(job: Job[str]) -> None:
    async with job.complete() as session:
        await job.app.jobs.cancel(job.payload, session=session)


HANDLERS = [publishes, followed, last, cancels]


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


def business(app, key="p/1"):
    """It publishes, and has something done in order."""

    def write():
        with Session(app.database.sync_engine) as s:
            app.outbox.publish(s, Moved(number=2), key="k")
            app.sync.enqueue(last, session=s, resource_key=key, ordering_key="o")
            s.commit()

    return lambda: asyncio.to_thread(write)


def drain(app):
    return lambda: app.worker(concurrency=2).drain(timeout=LIMIT)


def end(app, done, dead=(), follow_ups=None):
    """A worker's results, in one batch."""
    running(app, [*done, *dead])
    finishes = [Finish(id_, 2, Transition("dead", "dead")) for id_ in dead]
    return lambda: app.database.transaction(
        completer.write, [(id_, 2, None) for id_ in done], finishes, {}, follow_ups=follow_ups
    )


def running(app, ids):
    """As a claim leaves them."""
    sets = "state = 'running', version = 2, locked_by = 'w', lease_until = updated_at"
    d = app.database.dialect
    statement = f"UPDATE {{job}} SET {sets} WHERE id {d.among('ids', 'uuid')}"
    app.database.transaction_sync(lambda c, d: d.run(c, statement, {"ids": d.pack_ids(ids)}))


async def test_only_lanes_of_jobs_that_have_one_are_looked_for(anywhere):
    """SQLite's RETURNING once said of every job that it has a key."""
    ids = [(await anywhere.enqueue(last, resource_key="p/1", ordering_key=key)).id for key in (None, "a", None, "b")]
    running(anywhere, ids)
    ends = dependencies.Ends()

    def write(c, d):
        finishing.succeed_if_held(c, d, [(id_, 2, None) for id_ in ids[:2]], d.now(c), ends)
        finishing.finish_if_held(c, d, [Finish(id_, 2, Transition("dead", "dead")) for id_ in ids[2:]], d.now(c), ends)

    await anywhere.database.transaction(write)
    assert ends.in_order == {ids[1], ids[3]}


@pytest.mark.parametrize("kind", [publishes, followed], ids=lambda kind: kind.kind)
@pytest.mark.parametrize(("key", "held"), [("p/1", "p/1"), ("a/1", "outbox/a")])
async def test_a_job_in_order_is_followed_by_others_in_order(app, kind, key, held):
    """Whether its own lane comes behind that of the event, or before it."""
    await app.enqueue(kind, resource_key=key, ordering_key="o")
    if held != key:
        await app.enqueue(last, resource_key=held, ordering_key="k", delay=3600)
    lane = f"resilient_order WHERE resource_key = '{held}'"
    assert errors(await meet(app, lane, drain(app), business(app, key))) == []
    assert TRIES == [1]


@pytest.mark.parametrize("kind", [publishes, followed], ids=lambda kind: kind.kind)
async def test_both_lanes_go_on(clock, anywhere, read_all, kind):
    app = anywhere
    for _ in range(3):
        await app.enqueue(kind, resource_key="p/1", ordering_key="o")
    await app.worker(concurrency=2).drain(timeout=LIMIT)
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
    await app.worker().drain(timeout=LIMIT)
    one, two = await app.enqueue(last, resource_key="q/1"), await app.enqueue(followed, resource_key="q/1")
    await app.enqueue(last, resource_key="q/1", after=[one.id])
    await app.database.transaction(dependencies.resolve_dependencies, datetime.now(UTC))
    new = app.ground.encoder.encode(last, None, "q/2", ordering_key="o")
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


async def test_a_step_is_retried_while_a_batch_ends_another_one_of_its_lane(app):
    """The batch takes the lane, and then the workflow; so does the retry."""
    async with app.workflow("w", resource_key="p/1") as wf:
        first = wf.step(last, None, name="first", ordering_key="o")
        second = wf.step(last, None, name="second", ordering_key="o")
    await end(app, [first.id])()

    def retry():
        with Session(app.database.sync_engine) as s:  # in which nothing is tried again
            app.sync.jobs.retry(first.id, session=s)
            s.commit()

    assert errors(await meet(app, LANE, end(app, [second.id]), lambda: asyncio.to_thread(retry))) == []
    assert (await app.jobs.get(first.id)).state == "ready"


@pytest.mark.parametrize("change", ["cancel", "discard"])
async def test_two_sessions_end_jobs_and_write_others_in_their_lanes_crosswise(app, change):
    """Lanes are taken with the commits, in one order, whatever was said first."""
    lanes = [("p/1", "o"), ("p/2", "o")]
    heads = [await app.enqueue(last, resource_key=key, ordering_key=name) for key, name in lanes]
    followers = [await app.enqueue(last, resource_key=key, ordering_key=name) for key, name in lanes]
    if change == "discard":
        await end(app, [], [head.id for head in heads])()

    def write(number):
        s = Session(app.database.sync_engine)
        getattr(app.sync.jobs, change)(heads[number].id, session=s)
        key, name = lanes[1 - number]
        app.sync.enqueue(last, session=s, resource_key=key, ordering_key=name)
        return s

    sessions = [await asyncio.to_thread(write, n) for n in range(2)]
    found = await asyncio.gather(*(asyncio.to_thread(s.commit) for s in sessions), return_exceptions=True)
    for s in sessions:
        s.close()
    assert errors(found) == []
    assert [(await app.jobs.get(one.id)).state for one in followers] == ["ready", "ready"]


async def test_a_lane_goes_on_unless_the_cancel_was_rolled_back(anywhere):
    app = anywhere
    head, follower = [await app.enqueue(last, resource_key="p/1", ordering_key="o") for _ in range(2)]

    def cancel(end, savepoint="commit"):
        with Session(app.database.sync_engine) as s:
            inner = s.begin_nested()
            app.sync.jobs.cancel(head.id, session=s)
            getattr(inner, savepoint)()
            getattr(s, end)()

    for ends in [("rollback",), ("commit", "rollback")]:
        await asyncio.to_thread(cancel, *ends)
        assert (await app.jobs.get(follower.id)).state == "blocked"
    await asyncio.to_thread(cancel, "commit")
    assert [(await app.jobs.get(one.id)).state for one in (head, follower)] == ["cancelled", "ready"]


async def test_what_a_completion_cancels_lets_its_lane_go_on(clock, anywhere):
    app = anywhere
    head, follower = [await app.enqueue(last, resource_key="q/1", ordering_key="o", delay=60) for _ in range(2)]
    await app.enqueue(cancels, head.id.hex, resource_key="p/1")
    await app.worker().drain(timeout=LIMIT)
    clock.advance(61)
    await app.worker().drain(timeout=LIMIT)
    assert [(await app.jobs.get(one.id)).state for one in (head, follower)] == ["cancelled", "succeeded"]


async def test_a_look_at_workflows_waits_for_no_lane(app):
    """It has the workflow already, for which others wait with a lane in their hands."""
    async with app.workflow("w", resource_key="p/1") as wf:
        wf.step(last, None, name="waits", ordering_key="o", delay=60)
    async with app.workflow("x", resource_key="p/2") as other:
        other.step(last, None, name="waits", ordering_key="o", delay=60)
    for one in (wf, other):
        await app.workflows.cancel(one.id)
    sweeper = app.worker().sweeper
    with app.database.sync_engine.begin() as c:
        c.execute(sa.text(f"SELECT 1 FROM {LANE} FOR NO KEY UPDATE"))
        await asyncio.wait_for(sweeper._attend_workflows(), LIMIT)
        assert [(await app.workflows.get(one.id)).state for one in (wf, other)] == ["undoing", "failed"]
    await sweeper._attend_workflows()
    assert (await app.workflows.get(wf.id)).state == "failed"


async def test_a_workflow_whose_lane_is_held_is_looked_at_after_those_that_wait(app):
    """However many there are of it: they must not be all that is ever looked at."""
    first, then = [app.workflow("w", resource_key=key) for key in ("p/1", "p/2")]
    for one in (first, then):
        async with one:
            one.step(last, None, name="waits", ordering_key="o", delay=60)
        await app.workflows.cancel(one.id)
    with app.database.sync_engine.begin() as c:
        c.execute(sa.text(f"SELECT 1 FROM {LANE} FOR NO KEY UPDATE"))
        c.execute(sa.text(f"SELECT 1 FROM {WORKFLOW} WHERE id = '{then.id}' FOR UPDATE"))
        await asyncio.wait_for((sweeper := app.worker().sweeper)._attend_workflows(), LIMIT)
    rows = await app.database.transaction(workflows.due, sweeper._last)
    assert [row.id for row in rows] == [then.id, first.id]


def errors(found):
    return [str(one) for one in found if isinstance(one, BaseException)]
