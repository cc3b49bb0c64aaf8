"""What a statement that had to wait for rows writes: all of them, as on a quiet database.

At READ COMMITTED PostgreSQL looks once more at a row it waited for (EvalPlanQual): with the plan of the statement, and
with what its other tables had. Where a join or a sub-select says which rows are meant, that look may find nothing, or
too much, and nobody is told. Plans differ with the tables, so each test runs on empty tables, on small and on large
ones that were analysed.

Each test holds rows in one connection, lets a function of the store begin to wait for them in another, and lets go.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import psycopg
import pytest

from resilient import Limit
from resilient.core.gates.rate_limit import FULL
from resilient.core.jobs.outcomes import Transition
from resilient.core.schedules import cron
from resilient.core.schedules.schedule import Spec, Template
from resilient.core.sync.paging import PageRequest
from resilient.core.sync.stream import Cursor
from resilient.engine.ground.encoder import JobRequest
from resilient.engine.jobs import queue
from resilient.store import sync as cursors
from resilient.store.gates import circuits, limits, resources
from resilient.store.jobs import dependencies, finishing, leases, order, ready, workflows
from resilient.store.jobs import insert as jobs
from resilient.store.jobs.finishing import Finish
from resilient.store.schedules import ticks as schedules
from tests.filling import SIZES, fill
from tests.interleaving import until_it_waits

NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)
MANY = 8


@pytest.fixture(scope="module")
def templates(postgres_server, _postgres_template):
    """A database of each size, to copy."""
    made = {}
    for size, n in SIZES.items():
        made[size] = postgres_server.create(_postgres_template)
        with postgres_server.connect(made[size]) as c:
            fill(c, n)
    yield made
    for name in made.values():
        postgres_server.drop(name)


@pytest.fixture(params=list(SIZES))
def database(request, postgres_server, templates, open_database, clock):
    name = postgres_server.create(templates[request.param])
    yield open_database(postgres_server.url(name))
    postgres_server.drop(name)


@pytest.fixture
def connect(database):
    """``connect()``: another connection to it."""
    url = database.url.render_as_string(hide_password=False).replace("postgresql+psycopg", "postgresql")
    return lambda: psycopg.connect(url)


@pytest.fixture(params=["as it is", "steered"])
def meet(request, database, connect):
    """``meet(hold, fn, *args)``: what ``fn(c, d, *args)`` gives that waits for the rows that the SQL ``hold`` changes.

    ``steered``: in a transaction of the engine's own; else as in a program's.
    """

    def meet(hold, fn, *args):
        def run(c, d):
            if request.param == "steered":
                d.steer(c)
            return fn(c, d, *args)

        with connect() as holding, connect() as watch, ThreadPoolExecutor(1) as pool:
            watch.autocommit = True
            for statement in [hold] if isinstance(hold, str) else hold:
                holding.execute(statement.encode())
            future = pool.submit(database.transaction_sync, run)
            assert until_it_waits(watch, future), "it did not wait: the test holds the wrong rows"
            holding.commit()
            return future.result(30)

    return meet


def made(database, n=MANY, **over):
    new = [jobs.NewJob(uuid4(), "k", f"a/{i}", "null", **over) for i in range(n)]
    database.transaction_sync(jobs.insert, new)
    return [job.id for job in new]


def running(database, ids):
    """As a claim leaves them, at version 2."""
    sets = "state = 'running', version = 2, locked_by = 'w', lease_until = updated_at"
    d = database.dialect
    statement = f"UPDATE {{job}} SET {sets} WHERE id {d.among('ids', 'uuid')}"
    database.transaction_sync(lambda c, d: d.run(c, statement, {"ids": d.pack_ids(ids)}))


def begun(database, n=MANY, steps=4):
    """Workflows, each with its steps' jobs."""
    found = {}

    def make(c, d):
        for _ in range(n):
            id_ = uuid4()
            found[id_] = [uuid4() for _ in range(steps)]
            workflows.insert(c, d, id_, "w", NOW)
            news = [workflows.NewStep(f"s{no}", no, job, "k", "a/1") for no, job in enumerate(found[id_])]
            workflows.insert_steps(c, d, id_, news)

    database.transaction_sync(make)
    return found


# -- workflows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("undo", [False, True], ids=["steps", "undos"])
def test_each_workflow_is_asked_to_be_looked_at(database, meet, read_all, undo):
    found = begun(database)
    if undo:
        database.transaction_sync(lambda c, d: d.run(c, "UPDATE {step} SET undo_job_id = job_id WHERE no = 0"))
    meet(
        "UPDATE resilient_workflow SET reason = 'looked at' WHERE name = 'w'",
        workflows.ask,
        [ids[0] for ids in found.values()],
        NOW,
    )
    assert {row["id"] for row in read_all("SELECT id FROM {workflow} WHERE attention")} == found.keys()


def test_one_that_ended_meanwhile_needs_no_look(database, meet, read_all):
    first, *others = begun(database).items()
    meet(
        [
            f"UPDATE resilient_workflow SET state = 'succeeded', finished_at = now() WHERE id = '{first[0]}'",
            "UPDATE resilient_workflow SET reason = 'looked at' WHERE name = 'w'",
        ],
        workflows.ask,
        [first[1][0], *(ids[0] for _, ids in others)],
        NOW,
    )
    assert {row["id"] for row in read_all("SELECT id FROM {workflow} WHERE attention")} == {id_ for id_, _ in others}


def test_no_step_of_a_workflow_that_turned_around_meanwhile_is_missed(database, meet):
    found = begun(database)
    steps = [id_ for ids in found.values() for id_ in ids]
    turned = meet("UPDATE resilient_workflow SET state = 'undoing' WHERE name = 'w'", workflows.turned_around, steps)
    assert turned == set(steps)


# -- lanes -------------------------------------------------------------------------------------------------------------


def lanes(database, n=MANY, each=3):
    """Lanes with a few jobs; ids in their order, by lane."""
    new = [
        [
            JobRequest(jobs.NewJob(uuid4(), "k", f"a/{i}", "null", ordering_key="o", ordering_policy="block"))
            for _ in range(each)
        ]
        for i in range(n)
    ]
    database.transaction_sync(queue.write, [one for lane in new for one in lane])
    return [[one.row.id for one in lane] for lane in new]


def test_each_lane_goes_on(database, meet, read_all):
    ids = lanes(database)
    heads = [lane[0] for lane in ids]
    running(database, heads)

    def finish(c, d):
        assert finishing.succeed_if_held(c, d, [(id_, 2, None) for id_ in heads], NOW) == set(heads)

    meet("UPDATE resilient_order SET last_no = last_no WHERE resource_key LIKE 'a/%'", finish)
    assert {row["id"] for row in read_all("SELECT id FROM {job} WHERE state = 'ready' AND kind = 'k'")} == {
        lane[1] for lane in ids
    }


def test_a_lane_that_was_repaired_meanwhile_gets_no_second_head(database, meet, read_all):
    """Two processes find the same lane standing still: the second one waits for the first, and lets the lane be."""
    (lane,) = lanes(database, n=1)
    database.transaction_sync(lambda c, d: d.run(c, "DELETE FROM {job} WHERE order_no = 1 AND kind = 'k'"))
    assert (
        meet(
            [
                f"UPDATE resilient_job SET state = 'ready', waits = 0 WHERE id = '{lane[1]}'",
                f"UPDATE resilient_order SET head_id = '{lane[1]}', seek_no = 2 WHERE resource_key = 'a/0'",
            ],
            order.repair,
            NOW,
        )
        == 0
    )
    rows = read_all("SELECT state FROM {job} WHERE kind = 'k' ORDER BY order_no")
    assert [row["state"] for row in rows] == ["ready", "blocked"]


# -- jobs --------------------------------------------------------------------------------------------------------------

TOUCH = "UPDATE resilient_job SET cancel_requested = false WHERE kind = 'k'"  # its fence stays


@pytest.mark.parametrize("result", [None, "1"])
def test_each_job_succeeds(database, meet, result):
    ids = made(database)
    running(database, ids)
    done = [(id_, 2, result) for id_ in ids]
    assert meet(TOUCH, finishing.succeed_if_held, done, NOW) == set(ids)


def test_each_job_is_finished(database, meet):
    ids = made(database)
    running(database, ids)
    assert meet(TOUCH, finishing.finish_if_held, [Finish(i, 2, Transition("dead", "dead")) for i in ids], NOW) == set(
        ids
    )


def test_only_those_whose_fence_still_holds_are_finished(database, meet):
    ids = made(database)
    running(database, ids)
    hold = [TOUCH, f"UPDATE resilient_job SET version = 3 WHERE id = '{ids[0]}'"]
    assert meet(hold, finishing.succeed_if_held, [(i, 2, None) for i in ids], NOW) == set(ids[1:])


@pytest.mark.parametrize("result", [None, "1"])
def test_what_became_somebodys_affair_meanwhile_is_left_by_the_short_way(database, meet, read_all, result):
    ids = made(database)
    running(database, ids)
    hold = [
        TOUCH,
        f"UPDATE resilient_job SET version = 3 WHERE id = '{ids[0]}'",
        f"UPDATE resilient_job SET once_more = true WHERE id = '{ids[1]}'",
        f"UPDATE resilient_job SET followed = true WHERE id = '{ids[2]}'",
    ]
    assert meet(hold, finishing.succeed_alone, [(i, 2, result) for i in ids], "30s") == set(ids[3:])
    assert {row["id"] for row in read_all("SELECT id FROM {job} WHERE state = 'succeeded' AND kind = 'k'")} == set(
        ids[3:]
    )


def test_each_job_that_waits_for_nothing_more_becomes_ready(database, meet):
    ids = made(database, waits=1)
    assert meet(TOUCH, ready.unblock, dict.fromkeys(ids, 1), NOW) == set(ids)


def test_each_job_is_made_ready(database, meet):
    ids = made(database, delay=60)
    assert set(meet(TOUCH, ready.make_ready_if_version, dict.fromkeys(ids, 1), NOW)) == set(ids)


def test_each_waiting_job_is_released(database, meet, read_all):
    (blocker, *ids) = made(database, MANY + 1, waits=1)
    edges = [dependencies.Edge(id_, blocker) for id_ in ids]
    database.transaction_sync(dependencies.insert, edges)
    database.transaction_sync(dependencies.resolve, NOW)
    database.transaction_sync(
        lambda c, d: d.run(c, "UPDATE {job} SET state = 'succeeded' WHERE id = :id", {"id": d.id(blocker)})
    )
    meet(
        "UPDATE resilient_dependency SET resolved = true WHERE NOT job_id IN (SELECT id FROM resilient_job WHERE"
        " kind = 'filler')",
        dependencies.ended,
        [blocker],
        NOW,
    )
    assert len(read_all("SELECT id FROM {job} WHERE state = 'ready' AND kind = 'k'")) == MANY
    assert not read_all("SELECT 1 FROM {dependency} JOIN {job} j ON j.id = job_id WHERE j.kind = 'k'")


def test_each_lease_is_renewed_of_which_nobody_knows_yet_that_it_was(database, meet, read_all):
    """A renewal waits for nobody; but for what the row was locked by a moment ago."""
    ids = made(database)
    running(database, ids)
    held = [(id_, 2) for id_ in ids]

    def renew(c, d):
        c.execute(d.sql("SELECT 1 FROM {resource} WHERE key = 'filler' {row_lock}"))
        return leases.renew_if_held(c, d, held, timedelta(seconds=60), NOW)

    database.transaction_sync(resources.ensure, ["filler"])
    hold = [TOUCH, "UPDATE resilient_resource SET revision = revision WHERE key = 'filler'"]
    assert meet(hold, renew).keys() == set(ids)


# -- resources, limits, schedules --------------------------------------------------------------------------------------

KEYS = [f"a/{n}" for n in range(MANY)]


def test_each_circuit_is_read(database, meet):
    database.transaction_sync(resources.ensure, KEYS)
    hold = "UPDATE resilient_resource SET streak = 3 WHERE key LIKE 'a/%'"
    found = meet(hold, circuits.lock, KEYS)
    assert sorted(found) == KEYS
    assert {facts.breaker.streak for facts in found.values()} == {3}


def test_each_limit_is_read(database, meet):
    ids = [(key, "m") for key in KEYS]
    database.transaction_sync(limits.insert, ids)
    hold = "UPDATE resilient_rate_limit SET tat = 5 WHERE resource_key LIKE 'a/%'"
    found = meet(hold, limits._lock, ids)
    assert {state.tat for state in found.values()} == {5.0}
    assert FULL not in found.values()


def test_each_draw_counts(database, meet, read_all):
    limit = Limit(10, per=60, burst=10, name="m")
    database.transaction_sync(limits.insert, [(key, "m") for key in KEYS])
    asks = [limits.Ask(((key, limit),)) for key in KEYS]
    hold = f"UPDATE resilient_rate_limit SET tat = {NOW.timestamp() + 6} WHERE resource_key LIKE 'a/%'"
    assert [one.draw.granted for one in meet(hold, limits.draw, asks)] == [True] * MANY
    rows = read_all("SELECT tat FROM {rate_limit} WHERE resource_key LIKE 'a/%'")
    assert {row["tat"] for row in rows} == {NOW.timestamp() + 12}


def test_a_success_that_was_noted_is_not_forgotten_with_the_next_tick(database, clock, connect, read_all):
    """Whoever notes successes meets a tick that moves the schedule on to its next job, which has not succeeded yet."""
    spec = Spec(cron.Ticks(every=timedelta(hours=1)), Template("a/1", "null"))
    database.transaction_sync(schedules.declare, {"s": ("k", spec)}, ["k"])
    ids = made(database, 2)
    running(database, ids)
    database.transaction_sync(finishing.succeed_if_held, [(ids[0], 2, None)], NOW)
    database.transaction_sync(
        lambda c, d: d.run(c, "UPDATE {schedule} SET last_job = :id WHERE name = 's'", {"id": d.id(ids[0])})
    )
    with connect() as ticking, connect() as watch, ThreadPoolExecutor(1) as pool:
        watch.autocommit = True
        ticking.execute(
            f"UPDATE resilient_schedule SET last_job = '{ids[1]}', succeeded_at = '{NOW}' WHERE name = 's'".encode()
        )
        future = pool.submit(database.transaction_sync, schedules.note_successes)
        until_it_waits(watch, future)
        ticking.commit()
        future.result(30)
    (row,) = read_all("SELECT succeeded_at, last_job FROM {schedule} WHERE name = 's'")
    assert (row["succeeded_at"], row["last_job"]) == (NOW, ids[1])


# -- streams -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["reset", "forget"])
def test_each_cursor_is_changed_that_a_checkpoint_moves_meanwhile(database, meet, read_all, change):
    cursor = Cursor(pass_id=3, full=False, next=PageRequest("/x?page=2"), since="5", full_pass=2, resets=1)
    places = [(f"p/{n}", "items", part) for n in range(MANY) for part in ("", "repo=a")]
    for place in places:
        database.transaction_sync(cursors.write_if_unmoved, place, cursor, None, NOW)
    why = {"reset": ["somebody asked"], "forget": []}[change]
    number = meet(
        "UPDATE resilient_cursor SET version = version + 1, pages = 7 WHERE part = ''",
        getattr(cursors, change),
        cursors.Where("items", "p/*"),
        *why,
    )
    assert number == len(places)
    left = [database.transaction_sync(cursors.read, place)[0] for place in places]
    fresh = Cursor(pass_id=3, full_pass=2, error="somebody asked")
    moved = [replace(fresh, version=2 if place[2] else 3, pages=0 if place[2] else 7) for place in places]
    assert left == (moved if change == "reset" else [Cursor()] * len(places))
