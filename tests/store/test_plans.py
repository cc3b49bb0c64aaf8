"""What a claim reads on big tables: rows and buffers must not grow with the backlog of blocked or future work."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import pytest
from sqlalchemy import event

from resilient import Limit
from resilient.core.gates.policy import Policies
from resilient.engine.ground.encoder import JobRequest
from resilient.engine.jobs import queue
from resilient.engine.run.completer import write
from resilient.store.gates import controls as gates
from resilient.store.gates import resources
from resilient.store.inspect import audit
from resilient.store.jobs import claim, ready
from resilient.store.jobs import insert as jobs

POLICIES = Policies(limits={"a/*": [Limit(1e6, per=60, burst=1e6, counts="jobs", name="m")]})
BACKLOG = (
    "INSERT INTO {job} (id, kind, resource_key, payload, state, priority, run_at, created_at, updated_at)"
    " SELECT gen_random_uuid(), 'k', :key, 'null', :state, 0, now() + :shift * interval '1 day', now(), now()"
    " FROM generate_series(1, :n)"
)


@pytest.fixture
def database(open_database, postgres_url):
    return open_database(postgres_url)


class Meter:
    """Explains every statement of a connection in a savepoint before it runs, and adds up what they touch."""

    def __init__(self, engine):
        self.buffers, self.rows = 0, 0
        event.listen(engine, "before_cursor_execute", self._explain)
        self._engine = engine

    def _explain(self, _conn, cursor, statement, parameters, _context, _many):
        word = statement.split(None, 1)[0].upper()
        if word not in {"SELECT", "WITH", "UPDATE", "INSERT", "DELETE"}:
            return
        cursor.execute("SAVEPOINT meter")
        cursor.execute("EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) " + statement, parameters)
        plan = cursor.fetchone()[0][0]["Plan"]
        cursor.execute("ROLLBACK TO meter")
        self.buffers += plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
        self._add(plan)

    def _add(self, node):
        if "Relation Name" in node:
            self.rows += (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
        for child in node.get("Plans", ()):
            self._add(child)

    def close(self):
        event.remove(self._engine, "before_cursor_execute", self._explain)


def put(database, n):
    database.transaction_sync(jobs.insert, [jobs.NewJob(uuid4(), "k", f"a/{i % 20}", "null") for i in range(n)])


def measure(database):
    """Rows and buffers of one claim of 20 jobs over 20 resources, and of finishing them."""
    put(database, 40)
    ask = claim.Ask("w", 20, ["k"], timedelta(seconds=60), POLICIES.for_key, lambda: 0.5, take=20, per_key=1)
    meter = Meter(database.sync_engine)
    claimed = database.transaction_sync(claim.claim, ask)
    done = [(row.id, row.version + 1, None) for row in claimed.jobs]
    assert len(database.transaction_sync(write, done, [], {}, again=False)) == 20
    meter.close()
    return meter.rows, meter.buffers


@pytest.mark.parametrize(("state", "shift"), [("ready", -5), ("scheduled", 5)], ids=["blocked", "future"])
def test_the_cost_of_a_claim_does_not_depend_on_work_that_cannot_run(database, state, shift):
    keys = ["a", *(f"a/{n}" for n in range(20)), "a/down"]
    database.transaction_sync(resources.ensure, keys)
    database.transaction_sync(gates.pause, "a/down", reason="down")
    measure(database)
    few = measure(database)
    database.transaction_sync(
        lambda c, d: d.run(c, BACKLOG, {"key": "a/down", "state": state, "shift": shift, "n": 100_000})
    )
    many = measure(database)
    print(f"rows, buffers: {few} in front of nothing, {many} behind 100,000 {state} jobs")  # noqa: T201 - the figure
    assert many[0] <= few[0] * 1.2 + 20
    assert many[1] <= few[1] * 1.5 + 100


def test_staging_reads_only_what_is_due(database):
    database.transaction_sync(
        lambda c, d: d.run(c, BACKLOG, {"key": "a/later", "state": "scheduled", "shift": 5, "n": 100_000})
    )
    database.transaction_sync(jobs.insert, [jobs.NewJob(uuid4(), "k", "a/1", "null", delay=0.0) for _ in range(10)])
    meter = Meter(database.sync_engine)
    assert database.transaction_sync(lambda c, d: ready.stage(c, d, d.steer(c))) == 10
    meter.close()
    assert meter.rows < 100


def test_a_change_is_audited_at_the_same_cost_however_many_were_before(database):
    """None of which is old enough to be deleted: the look for those must not read all."""
    young = "INSERT INTO {audit} (at, who, via, action, subject) SELECT now(), 'w', 'v', 'a', 's' FROM generate_series"
    database.transaction_sync(lambda c, d: d.run(c, young + "(1, 20000)"))
    meter = Meter(database.sync_engine)
    database.transaction_sync(audit.begin, who="w", via="v", action="a", subject="s", why=None)
    meter.close()
    assert meter.rows < 1000


FOLLOWERS = (
    "INSERT INTO {job} (id, kind, resource_key, payload, state, priority, run_at, created_at, updated_at,"
    " ordering_key, order_no, ordering_policy, waits, followed)"
    " SELECT gen_random_uuid(), 'k', :key, 'null', 'blocked', 0, now(), now(), now(), :name, n, 'block', 1, true"
    " FROM generate_series(:first, :last) n"
)


def lanes(database, round_):
    """Rows and buffers of claiming the heads of 20 lanes and of finishing them, which makes others their heads."""
    ask = claim.Ask("w", 20, ["k"], timedelta(seconds=60), POLICIES.for_key, lambda: 0.5, take=20, per_key=1)
    meter = Meter(database.sync_engine)
    claimed = database.transaction_sync(claim.claim, ask)
    assert {row.order_no for row in claimed.jobs} == {round_}
    done = [(row.id, row.version + 1, None) for row in claimed.jobs]
    assert len(database.transaction_sync(write, done, [], {}, again=False)) == 20
    meter.close()
    return meter.rows, meter.buffers


def test_the_cost_of_a_claim_does_not_depend_on_the_followers_of_a_head(database):
    keys = ["a", *(f"a/{n}" for n in range(20))]
    database.transaction_sync(resources.ensure, keys)
    for _ in range(6):
        ordered = [
            JobRequest(
                jobs.NewJob(uuid4(), "k", f"a/{n}", "null", ordering_key="o", ordering_policy="block", followed=True)
            )
            for n in range(20)
        ]
        database.transaction_sync(queue.write, ordered)
    lanes(database, 1)
    few = lanes(database, 2)
    add = {"name": "o", "first": 7, "last": 50_006}
    database.transaction_sync(lambda c, d: d.run(c, FOLLOWERS, {**add, "key": "a/1"}))
    database.transaction_sync(lambda c, d: d.run(c, FOLLOWERS, {**add, "key": "a/1", "name": "p"}))
    database.transaction_sync(lambda c, d: d.run(c, "UPDATE {order} SET last_no = 50006 WHERE resource_key = 'a/1'"))
    many = lanes(database, 3)
    again = lanes(database, 4)
    print(f"rows, buffers: {few} in front of a few followers, {many} and {again} of 50,000")  # noqa: T201 - the figure
    assert max(many[0], again[0]) <= few[0] * 1.2 + 20
    assert max(many[1], again[1]) <= few[1] * 2 + 100  # each look-up goes through an index that is a page or two deeper
