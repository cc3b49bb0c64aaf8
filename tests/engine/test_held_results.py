"""A program's open transaction holds what a worker's results need: only those wait for it."""

import asyncio
import time
from datetime import timedelta

import pytest
import sqlalchemy as sa
from sqlmodel import Session

from resilient import Fixed, Item, Job, Resilient, Retry, handler
from resilient.engine.run import completer
from resilient.store.jobs import finishing
from tests.helpers import LIMIT, until

GATE: dict = {}
RAN = []


@handler("held", retry=Retry(max_attempts=1, delay=Fixed(0)))
async def held(job: Job[str]) -> None:
    RAN.append(job.id)
    GATE["started"].set()
    await GATE["go"].wait()
    if job.payload == "fails":
        raise RuntimeError("it fails")
    job.then(work, -1, resource_key="p/after")


@handler("work")
async def work(job: Job[int]) -> None:
    RAN.append(job.payload)


@pytest.fixture
async def app(postgres_url, monkeypatch):
    for module in (completer, finishing):
        monkeypatch.setattr(module, "LOCK_WAIT", "50ms")
        monkeypatch.setattr(module, "SHORT_LOCK_WAIT", "20ms")
    GATE.update(started=asyncio.Event(), go=asyncio.Event())
    RAN.clear()
    app = Resilient(postgres_url, handlers=[held, work])
    yield app
    await app.close()


def cancelled(app, id_):
    """A program asks a running job to stop, and does something else before it commits."""
    s = Session(app.database.sync_engine)
    app.sync.jobs.cancel(id_, session=s)
    return s


def next_of_lane(app, _id):
    """On a plain connection a job in order is written at once, and holds its lane."""
    c = app.database.sync_engine.connect()
    c.begin()
    app.sync.enqueue(work, -2, resource_key="p/held", ordering_key="o", session=c)
    return c


async def is_(app, id_, state):
    return (await app.jobs.get(id_)).state == state


def succeeded(app, count):
    async def look():
        return await app.jobs.count(state="succeeded") >= count

    return look


@pytest.mark.parametrize(
    ("holds", "ends", "state"),
    [(cancelled, "succeeds", "succeeded"), (cancelled, "fails", "dead"), (next_of_lane, "succeeds", "succeeded")],
)
async def test_the_others_are_written(app, holds, ends, state):
    id_ = (await app.enqueue(held, ends, resource_key="p/held", ordering_key="o")).id
    worker = app.worker(concurrency=5)
    running = asyncio.create_task(worker.run(signals=False))
    await asyncio.wait_for(GATE["started"].wait(), LIMIT)
    holding = await asyncio.to_thread(holds, app, id_)
    GATE["go"].set()
    await app.enqueue_many(work, [Item(n, f"p/{n % 5}") for n in range(20)])
    await until(succeeded(app, 20))
    assert (await app.jobs.get(id_)).state == "running"
    assert (id_, 2) in worker.fences()  # and its lease is still looked after
    await asyncio.to_thread(holding.commit)
    holding.close()
    # What follows it comes too, and the one whose turn it is then.
    await until(succeeded(app, 20 if ends == "fails" else 22 + (holds is next_of_lane)))
    await until(lambda: is_(app, id_, state))
    worker.stop()
    await asyncio.wait_for(running, LIMIT)
    assert RAN.count(id_) == 1
    assert sorted(n for n in RAN if isinstance(n, int) and n >= 0) == list(range(20))
    assert worker.completer.stale == 0
    assert worker.completer.written == len(RAN)


async def test_a_worker_that_stops_waits_until_its_last_result_is_written(app):
    id_ = (await app.enqueue(held, "succeeds", resource_key="p/held")).id
    worker = app.worker(concurrency=5)
    running = asyncio.create_task(worker.run(signals=False))
    await asyncio.wait_for(GATE["started"].wait(), LIMIT)
    holding = await asyncio.to_thread(cancelled, app, id_)
    GATE["go"].set()
    await until(lambda: asyncio.sleep(0, worker.completer._held))
    worker.stop()
    done, _ = await asyncio.wait([running], timeout=0.3)
    assert not done
    await asyncio.to_thread(holding.commit)
    holding.close()
    await asyncio.wait_for(running, LIMIT)
    assert (await app.jobs.get(id_)).state == "succeeded"


async def test_many_are_held(app):
    """The batch is written without all of them at once."""
    ids = [(await app.enqueue(held, "succeeds", resource_key=f"p/{n}")).id for n in range(60)]
    other = await app.enqueue(held, "succeeds", resource_key="p/other")
    worker = app.worker(concurrency=100)
    running = asyncio.create_task(worker.run(signals=False))
    await until(lambda: asyncio.sleep(0, len(RAN) >= 61))
    holding = await asyncio.to_thread(cancelled, app, ids)
    GATE["go"].set()
    await until(lambda: is_(app, other.id, "succeeded"))
    assert sum(len(batch.ids) for batch in worker.completer._held) in (0, 60)  # none while they are tried
    await asyncio.to_thread(holding.commit)
    holding.close()
    await until(succeeded(app, 2 * 61))
    worker.stop()
    await asyncio.wait_for(running, LIMIT)
    assert len(RAN) == 2 * 61


# -- leases ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [-1.0, 1.0], ids=["silent", "living"])
async def test_a_job_that_is_let_go_goes_to_its_living_worker(app, seconds):
    """Its lease ran out while it was held: the worker renews it, or saves its result, before anybody rescues it."""
    id_ = (await app.enqueue(work, 1, resource_key="p/1")).id
    worker = app.worker(lease=60)
    now = [time.monotonic()]
    worker.link.monotonic = lambda: now[0]
    await app.database.transaction(lease_over, id_, seconds)
    await worker.sweeper.rescue()
    assert worker.sweeper.rescued == (seconds < 0)
    if seconds > 0:
        now[0] += 9.0
        await worker.sweeper.rescue()
        assert worker.sweeper.rescued == 0
        now[0] += 2.0
        await worker.sweeper.rescue()  # it does not know of it
        assert worker.sweeper.rescued == 1


def lease_over(c, d, id_, seconds):
    """It ran out a minute ago, and the worker was heard of so many seconds later."""
    at = d.now(c) - timedelta(minutes=1)
    job = "UPDATE {job} SET state = 'running', version = 2, locked_by = 'w', lease_until = :at WHERE id = :id"
    d.run(c, job.replace(":at", ":since"), {"id": d.id(id_), "since": at})
    d.run(
        c,
        "INSERT INTO {worker} (id, host, pid, kinds, concurrency, running, code_version, started_at, seen_at, stopping)"
        " VALUES ('w', 'h', 1, '[]', 1, 1, '', :since, :until, false)",
        {"since": at, "until": at + timedelta(seconds=seconds)},
    )


async def test_one_whose_lane_is_held_keeps_no_other_from_rescue(app):
    first = (await app.enqueue(work, 1, resource_key="p/held", ordering_key="o", expires_in=0.001)).id
    ids = [first, *[(await app.enqueue(work, n, resource_key="p/1")).id for n in range(3)]]
    for id_ in ids:
        await app.database.transaction(lease_over_alone, id_)
    c = await asyncio.to_thread(next_of_lane, app, None)
    worker = app.worker()
    await asyncio.wait_for(worker.sweeper.rescue(), LIMIT)
    assert worker.sweeper.rescued == 3
    await asyncio.to_thread(c.commit)
    c.close()
    await worker.sweeper.rescue()
    assert worker.sweeper.rescued == 4


async def test_one_whose_lane_is_held_keeps_no_other_from_expiring(app):
    words = {"ordering_key": "o", "expires_in": 0.001, "delay": 60}
    ids = [(await app.enqueue(work, n, resource_key=key, **words)).id for n, key in enumerate(("p/1", "p/held", "p/z"))]
    c = await asyncio.to_thread(next_of_lane, app, None)
    worker = app.worker()
    await asyncio.wait_for(worker.sweeper.chores(), LIMIT)
    assert [(await app.jobs.get(id_)).state for id_ in ids] == ["dead", "scheduled", "dead"]
    await asyncio.to_thread(c.commit)
    c.close()
    await worker.sweeper.chores()
    assert await app.jobs.count(state="dead") == 3


def lease_over_alone(c, d, id_):
    """Its worker is gone."""
    job = sa.text("UPDATE resilient_job SET state = 'running', version = 2, locked_by = 'w', lease_until = :at"
                  " WHERE id = :id")  # fmt: skip
    c.execute(job, {"id": id_, "at": d.now(c) - timedelta(minutes=1)})


async def test_a_result_that_lost_its_lease_takes_no_follow_up_of_a_later_execution(app):
    """The job was let go, rescued and run here again while its first result waited for whoever held it."""
    id_ = (await app.enqueue(work, 1, resource_key="p/a")).id
    fence = app.database.transaction_sync(_take, id_)
    follow_ups = [[app.ground.encoder.encode(work, number, "p/a")] for number in (-3, -4)]
    results = completer.Completer(
        app.database, lambda _: (), lambda *_: None, lambda *_: None, app.poke, roll=lambda: 0.0
    )
    await results.start()
    with Session(app.database.sync_engine) as session:
        _take(session.connection(), app.database.dialect, id_)  # somebody else
        results.follow(id_, fence, follow_ups[0])
        results.succeed(id_, fence, None, "p/a")
        await until(lambda: results._held)
        later = _take(session.connection(), app.database.dialect, id_)  # and this worker once more
        results.follow(id_, later, follow_ups[1])
        results.succeed(id_, later, None, "p/a")
        session.commit()
    await results.close()
    assert (results.written, results.stale) == (1, 1)
    assert [job.payload for job in await app.jobs.list(state="ready")] == [-4]
    assert not results._follow_ups


def _take(c, d, id_):
    """A claim: the job runs, and its version is the fence."""
    d.run(c, "UPDATE {job} SET state = 'running', version = version + 1 WHERE id = :id", {"id": id_})
    return c.execute(sa.text("SELECT version FROM resilient_job WHERE id = :id"), {"id": id_}).scalar_one()
