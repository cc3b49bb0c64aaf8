"""The rules of `tests/invariants.py`: each is broken here on purpose, and named; the rows that only fill break none."""

from __future__ import annotations

from uuid import uuid4

import pytest

from resilient.engine.ground.encoder import JobRequest
from resilient.engine.jobs import queue
from resilient.store.jobs import insert as jobs
from resilient.store.jobs import workflows
from tests import invariants
from tests.filling import SIZES, fill

ONE, TWO = uuid4(), uuid4()
LATER = "'2030-01-01 00:00:00.000000'"


def job(id_, **over):
    return JobRequest(jobs.NewJob(id_, "k", "a/1", "null", **over))


@pytest.fixture
def lane(database):
    ordered = [job(id_, ordering_key="o", ordering_policy="block") for id_ in (ONE, TWO)]
    database.transaction_sync(queue.write, ordered)


@pytest.fixture
def pair(database):
    """A job, and one that waits for it."""

    waiting = job(TWO, waits=1, followed=True)._replace(after=(ONE,))
    database.transaction_sync(queue.write, [job(ONE), waiting])


RULES = list(invariants.RULES)


def breaks(database, *statements):
    def run(c, d):
        ids = {"one": d.id(ONE), "two": d.id(TWO)}
        for statement in statements:
            named = {name: value for name, value in ids.items() if f":{name}" in statement}
            d.run(c, statement, named)

    database.transaction_sync(run)
    return {line.partition(":")[0] for line in invariants.broken(database)}


@pytest.mark.parametrize(
    ("statement", "rule"),
    [
        ("UPDATE {job} SET state = 'succeeded' WHERE id = :one", "a job is over without a time"),
        ("UPDATE {job} SET state = 'running' WHERE id = :one", "a running job has no owner"),
        ("UPDATE {job} SET locked_by = 'w' WHERE id = :one", "a running job has no owner"),
        ("UPDATE {job} SET attempts = 2, max_attempts = 1 WHERE id = :one", "a job was charged more attempts"),
        ("DELETE FROM {turn}", "a key has ready work, no turn"),
        (f"UPDATE {{turn}} SET parked_on = 'a', recheck_at = {LATER}", None),
        (f"UPDATE {{turn}} SET parked_on = 'a/', recheck_at = {LATER}", "a turn is parked on what is neither"),
        ("UPDATE {turn} SET parked_on = 'a/1'", "a turn is parked on what is neither"),
        ("UPDATE {job} SET waits = 2 WHERE id = :two", "a job waits for another number of things"),
        ("UPDATE {job} SET state = 'ready' WHERE id = :two", "a job may go and waits for something"),
        ("UPDATE {job} SET followed = false WHERE id = :one", "an edge stands whose blocker is over"),
        ("DELETE FROM {job} WHERE id = :one", "an edge stands whose blocker is over"),
        ("DELETE FROM {dependency}", "a job waits for another number of things"),
    ],
)
def test_a_job_and_one_that_waits_for_it(database, pair, statement, rule):
    assert invariants.broken(database) == []
    found = breaks(database, statement)
    assert (rule is None and not found) or any(line.startswith(rule) for line in found)


@pytest.mark.parametrize(
    ("statement", "rule"),
    [
        ("DELETE FROM {order}", "a lane with open jobs has no row"),
        ("UPDATE {order} SET head_id = NULL", "a lane has waiting jobs and no head"),
        ("DELETE FROM {job} WHERE id = :one", "a lane has waiting jobs and no head"),
        ("UPDATE {job} SET state = 'ready', waits = 0 WHERE id = :two", "a job that is not the head"),
        ("UPDATE {order} SET head_id = :two", "a job that is not the head"),
        ("UPDATE {order} SET seek_no = 3", "a job waits in its lane with a number"),
        ("UPDATE {order} SET last_no = 1", "a job waits in its lane with a number"),
        ("UPDATE {job} SET order_no = NULL WHERE id = :two", "a job waits in its lane with a number"),
        ("UPDATE {job} SET waits = 0 WHERE id = :two", "a job waits for another number of things"),
    ],
)
def test_a_lane(database, lane, statement, rule):
    assert invariants.broken(database) == []
    assert any(line.startswith(rule) for line in breaks(database, statement))


@pytest.mark.parametrize(
    ("statement", "rule"),
    [
        ("UPDATE {workflow} SET state = 'failed'", "a workflow is over without a time"),
        ("UPDATE {step} SET undo_job_id = job_id", "a workflow undoes two steps at once"),
        ("UPDATE {workflow} SET state = 'undoing'", "a workflow stands still"),
        ("DELETE FROM {job} WHERE id = :two", "a workflow stands still"),
        ("UPDATE {workflow} SET state = 'undoing', attention = true", None),
    ],
)
def test_a_workflow(database, clock, statement, rule):
    id_ = uuid4()

    def begin(c, d):
        workflows.insert(c, d, id_, "w", clock.now())
        steps = [workflows.NewStep(f"s{n}", n, job_id, "k", "a/1") for n, job_id in enumerate((ONE, TWO))]
        workflows.insert_steps(c, d, id_, steps)
        queue.write(c, d, [job(one, followed=True) for one in (ONE, TWO)])

    database.transaction_sync(begin)
    assert invariants.broken(database) == []
    found = breaks(database, statement)
    assert (rule is None and not found) or any(line.startswith(rule) for line in found)


def test_lives(database):
    with database.sync_engine.begin() as c:
        driver = c.connection.driver_connection
        invariants.install(driver)
    database.transaction_sync(queue.write, [job(ONE), job(TWO)])
    assert invariants.lives(database) == []
    for state, version in (("running", 2), ("succeeded", 3), ("ready", 4), ("running", 5), ("dead", 6)):
        breaks(database, f"UPDATE {{job}} SET state = '{state}', version = {version} WHERE id = :one")
    breaks(database, "UPDATE {job} SET state = 'succeeded' WHERE id = :two")
    assert [line.partition(": ")[0] for line in invariants.lives(database)] == [
        "a job went from ready to succeeded",
        "a job went from ready to succeeded without a new version",
        "a job ended 2 times",
    ]


def test_rows_that_only_fill_break_no_rule_and_need_no_repair(postgres_database, clock):
    with postgres_database.sync_engine.connect() as c:
        driver = c.connection.driver_connection
        driver.autocommit = True
        fill(driver, SIZES["small"])
    assert invariants.broken(postgres_database) == []
    assert invariants.keep_house(postgres_database) == []
    assert invariants.broken(postgres_database) == []
