"""Claims never wait in a circle: who holds a row that sorts later does not wait for one that sorts earlier.

The lock order is deepest first, then by key. Leaves are locked without waiting, so a claim whose leaf is another
claim's ancestor would turn that order round. Each test scripts two connections of PostgreSQL into the circle; without
the rule one of them is ended by the server (deadlock detected).
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from uuid import uuid4

import psycopg

from resilient.core.gates.policy import Policies
from resilient.store.gates import circuits, resources
from resilient.store.gates import controls as gates
from resilient.store.jobs import claim
from resilient.store.jobs import insert as jobs
from tests.helpers import LIMIT
from tests.interleaving import until_it_waits

CAPPED = Policies(concurrency={"p": 50, "q": 50, "p/a": 50})


def put(database, priority, *keys):
    """One ready job on each key, told apart by priority."""
    new = [jobs.NewJob(uuid4(), "k", key, "null", priority=priority) for key in keys]
    database.transaction_sync(jobs.insert, new)
    return new


def ask(priority, policy=CAPPED.for_key):
    return claim.Ask(
        "w", 100, ["k"], timedelta(seconds=60), policy, lambda: 0.5, take=50, per_key=50, priority=priority
    )


def meeting(barrier):
    """Policies that wait for the other claim when first asked, which is after the leaves were locked."""
    met = []

    def policy(key, override):
        if not met:
            met.append(key)
            barrier.wait(LIMIT)
        return CAPPED.for_key(key, override)

    return policy


def both(database, *asks):
    """Claims in two threads; their results, or what they raised."""
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(database.transaction_sync, claim.claim, one) for one in asks]
        return [future.result(20) for future in running]


def claimed_until_dry(database, *priorities):
    return [
        row.resource_key
        for priority in priorities
        for _ in range(3)
        for row in database.transaction_sync(claim.claim, ask(priority)).jobs
    ]


def test_keys_that_are_leaves_of_one_claim_and_ancestors_of_another(postgres_database):
    """A holds leaf p and needs q for q/x; B holds leaf q and needs p for p/y."""
    database, keys = postgres_database, ["p", "q", "q/x", "p/y"]
    database.transaction_sync(resources.ensure, keys)
    put(database, 1, "p", "q/x")
    put(database, 2, "q", "p/y")
    barrier = threading.Barrier(2)
    found = both(database, ask(1, meeting(barrier)), ask(2, meeting(barrier)))
    started = [row.resource_key for one in found for row in one.jobs]
    assert sorted(started + claimed_until_dry(database, 1, 2)) == sorted(keys)


def test_leaves_of_different_depths(postgres_database):
    """A holds leaf p and needs p/a for p/a/x, which B holds as a leaf while it needs p for it."""
    database, keys = postgres_database, ["p", "p/a", "p/a/x"]
    database.transaction_sync(resources.ensure, keys)
    put(database, 1, "p", "p/a/x")
    put(database, 2, "p/a")
    barrier = threading.Barrier(2)
    found = both(database, ask(1, meeting(barrier)), ask(2, meeting(barrier)))
    started = [row.resource_key for one in found for row in one.jobs]
    assert sorted(started + claimed_until_dry(database, 1, 2)) == sorted(keys)


def test_parking_on_a_resource_that_somebody_writes(postgres_database):
    """The claim holds ancestor p and parks on o; a report holds o and waits for p."""
    database = postgres_database
    database.transaction_sync(resources.ensure, ["o", "p", "o/x", "p/x"])
    database.transaction_sync(gates.pause, "o")
    put(database, 1, "o/x", "p/x")
    with database.sync_engine.connect() as c, ThreadPoolExecutor(1) as pool:
        c.begin()
        circuits.lock(c, database.dialect, ["o"])
        barrier = threading.Barrier(2)
        running = pool.submit(database.transaction_sync, claim.claim, ask(1, meeting(barrier)))
        barrier.wait(LIMIT)
        with psycopg.connect(**database.driver_arguments(), autocommit=True) as watch:
            until_it_waits(watch, running)
        circuits.lock(c, database.dialect, ["p"])
        c.rollback()
        assert [row.resource_key for row in running.result(20).jobs] == ["p/x"]
    # What could not be judged kept its turn, and is parked once it can be.
    again = database.transaction_sync(claim.claim, ask(1))
    assert [t.resource_key for t in again.turns] == ["o/x"]
    assert again.stops["o/x"].gate == "pause"
