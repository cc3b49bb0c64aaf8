"""The view for autoscalers: what could run now, nothing behind a gate, at a cost that no backlog raises."""

from datetime import timedelta

import pytest

from resilient import Resilient, handler
from resilient.store.gates import controls, resources
from resilient.store.inspect import gauges
from tests.store.test_plans import BACKLOG, Meter


@handler("k")
async def work(job):
    pass


@pytest.fixture
def database(open_database, postgres_url):
    return open_database(postgres_url)


@pytest.fixture
async def app(database):
    app = Resilient(database, handlers=[work])
    yield app
    await app.close()


def runnable(database):
    return {
        (one.provider, one.kind): one.count
        for one in database.transaction_sync(gauges.runnable)
        if one.oldest is not None
    }


async def test_what_a_gate_stops_is_not_runnable_and_what_is_due_is(app, database):
    for key in ("a/1", "a/2/search", "b/1", "c"):
        await app.enqueue(work, None, resource_key=key)
    await app.enqueue(work, None, resource_key="d/1", delay=3600)
    assert runnable(database) == {("a", "k"): 2, ("b", "k"): 1, ("c", "k"): 1}
    await app.resources.pause("a/2")
    await app.resources.pause("b")
    assert runnable(database) == {("a", "k"): 1, ("c", "k"): 1}
    await app.resources.resume("b")
    assert runnable(database) == {("a", "k"): 1, ("b", "k"): 1, ("c", "k"): 1}
    await app.worker().drain()
    assert runnable(database) == {}, "what waits for a/2 is parked"
    await app.resources.resume("a/2")
    database.transaction_sync(
        lambda c, d: d.run(c, "UPDATE {job} SET run_at = :now WHERE state = 'scheduled'", {"now": d.now(c)})
    )
    assert runnable(database) == {("a", "k"): 1, ("d", "k"): 1}, "no worker has staged it yet"


async def test_a_cooldown_that_is_over_is_no_gate(app, database):
    """Nobody runs, so nobody has released the turn that was parked for it: the pods must be started all the same."""
    await app.enqueue(work, None, resource_key="a/1")
    database.transaction_sync(resources.ensure, ["a/1"])

    def cool(until):
        database.transaction_sync(
            lambda c, d: d.run(
                c, "UPDATE {resource} SET blocked_until = :blocked_until", {"blocked_until": d.now(c) + until}
            )
        )

    cool(timedelta(hours=1))
    await app.worker().drain()
    assert runnable(database) == {}
    cool(-timedelta(seconds=1))
    database.transaction_sync(
        lambda c, d: d.run(c, "UPDATE {turn} SET recheck_at = :now WHERE parked_on IS NOT NULL", {"now": d.now(c)})
    )
    assert runnable(database) == {("a", "k"): 1}


async def test_its_cost_does_not_grow_with_what_waits(app, database):
    for n in range(20):
        await app.enqueue(work, None, resource_key=f"a/{n}")
    await app.enqueue(work, None, resource_key="a/down")
    database.transaction_sync(resources.ensure, ["a", "a/down", "a/big"])
    database.transaction_sync(controls.pause, "a/down", reason="down")

    def rows():
        meter = Meter(database.sync_engine)
        total = sum(runnable(database).values())
        meter.close()
        return total, meter.rows

    few = rows()
    assert few[0] == 20
    for key, state, shift in [("a/down", "ready", -5), ("a/1", "ready", -5), ("a/2", "scheduled", 5)]:
        params = {"key": key, "state": state, "shift": shift, "n": 30_000}
        database.transaction_sync(lambda c, d, params=params: d.run(c, BACKLOG, params))
    database.transaction_sync(lambda c, _: c.exec_driver_sql("ANALYZE resilient_job"))
    many = rows()
    assert many[0] == 20 - 1 + 100, "of an account a hundred are counted"
    assert many[1] <= few[1] + 400


async def test_on_sqlite_no_more_ready_jobs_are_read_than_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(gauges, "COUNTED", 3)
    app = Resilient(f"sqlite:///{tmp_path}/gauges.db", handlers=[work])
    await app.enqueue_many(work, [None] * 5, resource_key="a/1")
    assert runnable(app.database) == {("a", "k"): 3}
    await app.close()
