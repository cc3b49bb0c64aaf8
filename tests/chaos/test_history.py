"""The checker itself: each of its rules is broken here on purpose, and named."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from uuid import uuid4

import history
import pytest
from harness import new, put

from resilient.store.jobs import insert as jobs

ID = "j"


def step(old, new_, version, *, attempts=0, executions=0):
    return SimpleNamespace(old=old, new=new_, version=version, attempts=attempts, executions=executions)


GOOD = [step(None, "ready", 0), step("ready", "running", 1, executions=1),
        step("running", "succeeded", 2, executions=1)]  # fmt: skip


def test_a_good_life():
    assert history.steps(ID, GOOD, {1: 1}) == []


@pytest.mark.parametrize(
    ("life", "ended", "rule"),
    [
        (GOOD[:2], {1: 1}, "J4 j: 0 terminal steps"),
        ([*GOOD, step("succeeded", "ready", 3), *GOOD[1:]], {1: 1}, "J4 j: 2 terminal steps"),
        ([GOOD[0], step("ready", "succeeded", 1, executions=1)], {1: 1}, "J4 j: ready to succeeded"),
        ([*GOOD[:2], step("running", "succeeded", 1, executions=1)], {1: 1}, "J4 j: version 1 after 1"),
        (GOOD, {}, "J5 j: succeeded in execution 1, which had not ended"),
        ([*GOOD[:2], step("running", "scheduled", 2, attempts=2), step("scheduled", "ready", 3, attempts=1),
          step("ready", "running", 4, attempts=1, executions=2),
          step("running", "dead", 5, attempts=1, executions=2)], {1: 1, 2: 1}, "J6 j: attempts fell from 2 to 1"),
    ],
)  # fmt: skip
def test_a_bad_life(life, ended, rule):
    assert rule in history.steps(ID, life, ended)


def test_lost_unexecuted_rolled_back_and_stranded_jobs(postgres, tmp_path):
    log = tmp_path / "log"
    waiting, ran, gone, overdone = new(), new(key="p/1"), new(key="p/2"), new(key="p/3", max_attempts=1)
    ids = put(postgres, waiting, ran, overdone)
    rolled_back = uuid4().hex
    history.note(log, event="start", job=rolled_back, execution=1, n=1)
    with postgres.sync_engine.begin() as c:
        c.exec_driver_sql("DELETE FROM resilient_turn WHERE resource_key = 'p/0'")
        for state, attempts, id_ in (("succeeded", 0, ran.id), ("dead", 2, overdone.id)):
            c.exec_driver_sql(
                f"UPDATE resilient_job SET state = '{state}', version = 1, attempts = {attempts},"
                f" finished_at = now() WHERE id = '{id_}'"
            )
    broken = history.check(postgres, log, committed=[*ids, gone.id.hex], rolled_back=[rolled_back])
    assert f"J1 {waiting.id.hex}: ready" in broken
    assert f"J1 {gone.id.hex}: None" in broken
    assert f"J2 {rolled_back}: was rolled back and ran" in broken
    assert f"J3 {ran.id.hex}: succeeded without an execution" in broken
    assert f"J6 {overdone.id.hex}: 2 attempts of 1" in broken
    assert "J9 p/0: ready work and no turn" in broken


def arrivals(*times, account="0", **over):
    return [{"t": t, "account": account, "key": "k", "n": 1, "new": False, **over} for t in times]


def test_limits_as_the_provider_counts_them():
    assert history.within(arrivals(0.0, 0.1, 1.0, 1.1), 2, 1.0) == []
    assert history.within(arrivals(0.0, 0.1, 0.2), 2, 1.0) == ["J7 0: 3 requests in 0.20 s, of 2"]
    assert history.within(arrivals(0.0, 0.1) + arrivals(0.2, account="1"), 2, 1.0) == []


def test_caps(postgres):
    batch = [new(key=f"p/{n}") for n in range(3)]
    put(postgres, *batch)
    assert history.capped(postgres, "p", 2) == []
    with postgres.sync_engine.begin() as c:
        c.exec_driver_sql("UPDATE resilient_job SET state = 'running', version = version + 1")
    assert history.capped(postgres, "p", 2) == ["J7 p: 3 jobs running, of 2"]
    assert history.capped(postgres, "p", 3) == []


T = datetime(2030, 1, 1, tzinfo=UTC)


@pytest.fixture
def change(postgres):
    """Writes one change of the circuit ``p/0``, as its trigger would."""

    def write(old, new_, generation, *, at=0.0, before=None, probe_before=None):
        when = (T + timedelta(seconds=at)).isoformat()
        lease = f"'{(T + timedelta(seconds=probe_before)).isoformat()}'" if probe_before is not None else "NULL"
        with postgres.sync_engine.begin() as c:
            c.exec_driver_sql(
                "INSERT INTO circuits (at, key, old, new, generation, before, probe_before) VALUES"
                f" ('{when}', 'p/0', '{old}', '{new_}', {generation},"
                f" {generation - 1 if before is None else before}, {lease})"
            )

    return write


def test_a_good_circuit(postgres, change):
    change("closed", "open", 1)
    change("open", "half_open", 2, at=10)
    change("half_open", "closed", 3, at=11)
    sent = arrivals(*(T.timestamp() + at for at in (0.1, 10.5, 11.5, 11.6)))
    assert history.circuits(postgres, sent) == []


def test_bad_circuits(postgres, change):
    change("closed", "half_open", 1)
    change("half_open", "half_open", 2, at=1, probe_before=5.0)
    change("half_open", "open", 2, at=2, before=2)
    sent = arrivals(*(T.timestamp() + at for at in (1.1, 1.2, 3.0)))
    broken = history.circuits(postgres, sent)
    assert "J8 p/0: closed to half_open, generation 0 1" in broken
    assert "J8 p/0: a second probe was elected before the lease of the first ended" in broken
    assert "J8 p/0: half_open to open, generation 2 2" in broken
    assert "J8 p/0: 2 requests in generation 2, half_open" in broken
    assert "J8 p/0: 1 requests in generation 2, open" in broken


def test_deliveries(postgres):
    done = jobs.NewJob(uuid4(), "work", "p/0", '{"n": 5}')
    put(postgres, done)
    with postgres.sync_engine.begin() as c:
        c.exec_driver_sql("UPDATE resilient_job SET state = 'succeeded', version = 1, finished_at = now()")
    twice = arrivals(1.0, 2.0, n=7, new=True)
    keys = arrivals(1.0, n=8, new=True) + arrivals(2.0, n=8, key="another")
    assert history.delivered(postgres, twice + keys) == [
        "J10 8: sent under 2 keys",
        "J10 7: stored 2 times",
        "J10 5: succeeded and was not stored",
    ]


def test_a_workflow_that_stands_still_and_one_that_forgot_to_undo(postgres, tmp_path):
    still, forgot = uuid4(), uuid4()
    with postgres.sync_engine.begin() as c:
        for id_, state, over in ((still, "running", "NULL"), (forgot, "undone", "now()")):
            c.exec_driver_sql(
                "INSERT INTO resilient_workflow (id, name, state, created_at, updated_at, finished_at)"
                f" VALUES ('{id_}', 'w', '{state}', now(), now(), {over})"
            )
            job = new()
            jobs.insert(c, postgres.dialect, [job])
            c.exec_driver_sql(
                "INSERT INTO resilient_step (workflow_id, name, no, job_id, kind, resource_key, undo_kind)"
                f" VALUES ('{id_}', 's', 0, '{job.id}', 'work', 'p/0', 'undo')"
            )
        c.exec_driver_sql("UPDATE resilient_job SET state = 'succeeded', finished_at = now()")
    broken = history.check(postgres, tmp_path / "log", committed=[]) + history.workflows(postgres)
    assert broken == [
        f"J11 a workflow stands still, and nobody was asked to look at it: {still}",
        f"J12 {still}: running, its step s succeeded, undo None",
        f"J12 {forgot}: undone, its step s succeeded, undo None",
    ]
