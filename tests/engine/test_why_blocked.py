"""What a blocked job waits for, as `why` tells it."""

from __future__ import annotations

import random

import pytest

from resilient import Job, Permanent, Resilient, handler
from tests.helpers import LIMIT


@handler("step")
async def step(job: Job[object]) -> None:
    if job.payload == "dies":
        raise Permanent("no such thing")


@pytest.fixture
async def app(database):
    app = Resilient(database, handlers=[step], upgrade=False)
    yield app
    await app.close()


def put(app, payload, **options):
    return app.sync.enqueue(step, payload, resource_key="p/1", **options).id


def why(app, id_):
    found = app.sync.jobs.why(id_)
    return [(r.code, r.text) for r in found.reasons if r.code != "blocked"]


async def test_its_turn(app):
    ids = [put(app, n, ordering_key="k", delay=3600 if n == 0 else None) for n in range(4)]
    head = f"after job {ids[0]} (step, scheduled)"
    line = "It waits for its turn in ordering key 'k' of p/1,"
    assert why(app, ids[1]) == [("order", f"{line} {head}.")]
    assert why(app, ids[3]) == [("order", f"{line} {head}, with 2 jobs between.")]
    assert app.sync.jobs.why(ids[3]).until is None


async def test_a_dead_head(app):
    dead, follower = put(app, "dies", ordering_key="k"), put(app, 1, ordering_key="k")
    await app.worker(rng=random.Random(1)).drain(timeout=LIMIT)
    ((code, text),) = why(app, follower)
    assert code == "order_dead"
    assert f"`resilient jobs retry {dead}` or `resilient dead discard {dead}` lets it go on" in text
    assert text.endswith("Its error: no such thing")
    told = f"It keeps 1 job of ordering key 'k' waiting: retry it, or give it up with `resilient dead discard {dead}`."
    assert ("holds_order", told) in why(app, dead)


async def test_others(app):
    first = [put(app, n, delay=3600) for n in range(7)]
    dead = put(app, "dies")
    child = put(app, 1, after=[*first[:2], dead], on_dead="wait")
    many = put(app, 1, after=first)
    await app.worker(rng=random.Random(1)).drain(timeout=LIMIT)
    remedy = f"which is dead: `resilient jobs retry {dead}`, or cancel this one."
    assert why(app, child) == [
        ("blocker", f"It waits for job {first[0]} (step, scheduled)."),
        ("blocker", f"It waits for job {first[1]} (step, scheduled)."),
        ("blocker_dead", f"It waits for job {dead} (step), {remedy}"),
    ]
    assert why(app, many)[-1] == ("blockers", "It waits for 2 other jobs beside these.")


async def test_both(app):
    gate = put(app, 0, delay=3600)
    head = put(app, 1, ordering_key="k", after=gate)
    behind = put(app, 2, ordering_key="k", after=gate)
    assert [code for code, _ in why(app, head)] == ["blocker"]
    assert [code for code, _ in why(app, behind)] == ["order", "blocker"]


async def test_jobs_of_an_ordering_key(app):
    mine = [put(app, n, ordering_key="k") for n in range(3)]
    put(app, 9, ordering_key="other")
    assert {job.id for job in app.sync.jobs.list(ordering_key="k")} == set(mine)
    assert app.sync.jobs.count(ordering_key="k", state="blocked") == 2
