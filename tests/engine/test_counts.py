"""What a process counts is what the database says of its jobs, by labels that no tenant chooses."""

import pytest

from resilient import DatabaseUnreachable, Job, Limit, Permanent, Resilient, Transient, handler
from resilient.engine.ground.counts import OTHER, Counts
from resilient.engine.run import heartbeat
from resilient.store.inspect.throughput import Series, throughput
from tests.helpers import drain


@handler("push")
async def push(job: Job[str]) -> None:
    if job.payload == "wrong":
        raise Permanent("no such contact")
    if job.payload == "later" and job.attempt == 1:
        raise Transient("not now", retry_after=0)


@pytest.fixture
async def app(database):
    app = Resilient(database, handlers=[push], limits={"crm/*": [Limit(1000, per=1)]})
    await app.ready()
    yield app
    await app.close()


async def sums(app):
    rows = await app.database.transaction(throughput)
    return {(one.kind, one.provider, one.outcome): one.count for one in rows}


async def test_labels_are_what_the_program_declares():
    counts = Counts((), ["github", "crm"])
    keys = ["crm/a", "crm", "github:token", "outbox/search", "evil-tenant/a"]
    assert [counts.provider_of(key) for key in keys] == ["crm", "crm", "github", "outbox", OTHER]


async def test_ends_are_counted_and_added_up(app):
    for payload, key in [("ok", "crm/1"), ("ok", "crm/2"), ("wrong", "crm/1"), ("ok", "tenant/x")]:
        await app.enqueue(push, payload, resource_key=key)
    await drain(app)
    assert app.ground.counts.executions == {
        ("push", "crm", "succeeded", ""): 2,
        ("push", OTHER, "succeeded", ""): 1,
        ("push", "crm", "dead", "permanent"): 1,
    }
    expected = {("push", "crm", "succeeded"): 2, ("push", OTHER, "succeeded"): 1, ("push", "crm", "dead"): 1}
    assert await sums(app) == expected
    await drain(app)
    assert await sums(app) == expected, "a worker that did nothing adds nothing"


async def test_what_could_not_be_added_up_is_added_with_the_next_beat(app, monkeypatch):
    counts = app.ground.counts
    counts.successes["push"]["crm"] += 1
    worker = app.worker()

    def away(*_):
        raise DatabaseUnreachable("gone")

    with monkeypatch.context() as patch:
        patch.setattr(heartbeat.throughput, "add", away)
        with pytest.raises(DatabaseUnreachable):
            worker.heartbeat._beat()
    assert await sums(app) == {}
    counts.successes["push"]["crm"] += 1
    worker.heartbeat._beat()
    assert await sums(app) == {("push", "crm", "succeeded"): 2}
    assert counts.take_sums() == {}


async def test_a_result_that_was_stale_is_not_counted(app):
    counts, finisher = app.ground.counts, app.worker().finisher
    row = type("Row", (), {"kind": "push", "followed": False})()
    ids = []
    for _ in range(2):
        job = await app.enqueue(push, "ok", resource_key="crm/1")
        one = type("One", (), {"row": row, "resource_key": "crm/1", "ending": ("retry", "transient")})()
        one.probes = ()
        finisher.unwritten[job.id.int, 1] = one
        one.fence = 1
        ids.append((job.id, 1))
    finisher._written(ids, {ids[0][0]}, released=False)
    assert counts.take_sums() == {Series("push", "crm", "retry"): 1}
