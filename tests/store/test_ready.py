"""There is one way into `ready`, and it leaves a turn: `store/jobs/ready.py`.

Looked for in the texts of all statements, and in what every transaction of the engine does to a database that notes
each job that became ready.
"""

import ast
import re
import sys
from pathlib import Path
from uuid import uuid4

import pytest

import tests.store.acts
from resilient import JobState
from resilient.store.db import direct
from resilient.store.db.dialect import Dialect
from resilient.store.jobs import changes, ready
from resilient.store.jobs import insert as jobs
from resilient.store.jobs.columns import NewJob
from tests.store.registry import ACTS, Refused
from tests.store.world import build, id_of

ROOT = Path(__file__).parents[2] / "resilient"
WAY = Path(ready.__file__)
COPIES = ROOT / "surface/bench/growth.py"  # copies a succeeded job, so that the bench has millions
NEW = re.compile(r"(INSERT INTO|COPY) \{job\}")
STATE = re.compile(r"UPDATE \{job\} SET\b.*?\bstate = (?P<value>'?\w*)", re.DOTALL)
OTHERS = {f"'{state}'" for state in JobState if state != JobState.READY}


def texts(path):
    """Every string of a module as it is written, `{}` for what is put in; implicit joins are one already."""
    tree = ast.parse(path.read_text())
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            yield node.value


def other_ways(path):
    """Statements that insert jobs, or write a state that is, or may be, `ready`."""
    for text in texts(path):
        state = STATE.search(text)
        if NEW.search(text) or (state and state["value"] not in {one.rstrip("'") for one in OTHERS}):
            yield text


def test_no_text_elsewhere_inserts_jobs_or_makes_them_ready():
    found = {
        (str(path.relative_to(ROOT)), text)
        for path in ROOT.rglob("*.py")
        if path not in (WAY, COPIES)
        for text in other_ways(path)
    }
    assert not found
    assert list(other_ways(WAY))


@pytest.mark.parametrize(
    "statement",
    [
        "\"UPDATE {job} SET version = 1, state = 'ready' WHERE id = :id\"",
        'f"UPDATE {{job}} SET state = {_STATE} FROM p"',
        "f\"UPDATE {{job}} SET state = '{state}', waits = 0\"",
        '"INSERT INTO {job} (id) VALUES (:id)"',
        'f"COPY {{job}} ({columns}) FROM STDIN"',
    ],
)
def test_texts_that_take_another_way_are_found(tmp_path, statement):
    module = tmp_path / "module.py"
    module.write_text(f"SQL = {statement}\n")
    assert list(other_ways(module))


# -- behaviour -----------------------------------------------------------------------------------------------

_CHANGED = "NEW.state = 'ready' AND OLD.state <> 'ready'"
_NOTE = "INSERT INTO became_ready VALUES (NEW.id);"
_SQLITE = [
    f"CREATE TRIGGER ready_new AFTER INSERT ON resilient_job WHEN NEW.state = 'ready' BEGIN {_NOTE} END",
    f"CREATE TRIGGER ready_changed AFTER UPDATE ON resilient_job WHEN {_CHANGED} BEGIN {_NOTE} END",
]
_RUN = "EXECUTE FUNCTION note_ready()"
_POSTGRESQL = [
    f"CREATE FUNCTION note_ready() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN {_NOTE} RETURN NULL; END'",
    f"CREATE TRIGGER ready_new AFTER INSERT ON resilient_job FOR EACH ROW WHEN (NEW.state = 'ready') {_RUN}",
    f"CREATE TRIGGER ready_changed AFTER UPDATE ON resilient_job FOR EACH ROW WHEN ({_CHANGED}) {_RUN}",
]
STRANDED = (
    "SELECT count(*) AS n FROM {job} WHERE state = 'ready' AND id IN (SELECT id FROM became_ready)"
    " AND NOT EXISTS (SELECT 1 FROM {turn} t WHERE t.resource_key = {job}.resource_key)"
)


class Undone(Exception):
    """Rolls an act back."""


@pytest.fixture
def watch(database, monkeypatch):
    """``watch(fn)`` runs it in a transaction that is undone: (statements of other ways, jobs that became ready)."""
    run, execute, copy, d = Dialect.run, Dialect.execute, direct.copy, database.dialect
    sets = "id char(32)" if not d.is_postgresql else "id uuid"
    with database.sync_engine.begin() as c:
        for statement in [f"CREATE TABLE became_ready ({sets})", *(_POSTGRESQL if d.is_postgresql else _SQLITE)]:
            c.exec_driver_sql(statement)
    noted, others = [0], []

    def count(c):
        return run(d, c, "SELECT count(*) AS n FROM became_ready").scalar_one()

    def watched(call, c, statement):
        result = call()
        if (now := count(c)) > noted[0]:
            noted[0] = now
            if Path(sys._getframe(2).f_code.co_filename) != WAY:
                others.append(str(statement))
        return result

    monkeypatch.setattr(
        Dialect, "run", lambda self, c, sql, params=None, **k: watched(lambda: run(self, c, sql, params, **k), c, sql)
    )
    monkeypatch.setattr(
        Dialect, "execute", lambda self, c, sql, params=None: watched(lambda: execute(self, c, sql, params), c, sql)
    )
    monkeypatch.setattr(direct, "copy", lambda c, sql, lines: watched(lambda: copy(c, sql, lines), c, sql))

    def watch(fn):
        noted[0] = 0
        others.clear()
        found = []

        def act(c, d):
            try:
                fn(c, d)
            finally:
                stranded = (
                    "SELECT count(*) AS n FROM {job} WHERE state = 'ready' AND id IN (SELECT id FROM became_ready)"
                )
                stranded += " AND NOT EXISTS (SELECT 1 FROM {turn} t WHERE t.resource_key = {job}.resource_key)"
                found.extend([count(c), run(d, c, STRANDED).scalar_one()])
            raise Undone

        with pytest.raises((Undone, Refused)):
            database.transaction_sync(act)
        total, stranded = found
        assert total == noted[0], "a statement passed by the watch"
        assert not stranded, "a job became ready without a turn"
        return list(others), total

    return watch


def test_no_transaction_of_the_engine_takes_another_way(database, clock, watch):
    clock.set(tests.store.acts.NOW)
    database.transaction_sync(build)
    database.transaction_sync(lambda c, d: d.run(c, "DELETE FROM became_ready"))
    found = {act.name: watch(act.run) for act in ACTS.values()}
    assert {name: others for name, (others, _) in found.items() if others} == {}
    makers = {name for name, (_, total) in found.items() if total}
    assert {"stages", "enqueues", "rescues", "finishes", "retries them"} <= makers


WAYS_IN = {
    "one": lambda c, d: jobs.insert(c, d, [NewJob(uuid4(), "k", "a", "1")]),
    "few": lambda c, d: jobs.insert(c, d, [NewJob(uuid4(), "k", "a", "1") for _ in range(3)]),
    "many": lambda c, d: jobs.insert(c, d, [NewJob(uuid4(), "k", "a", "1") for _ in range(jobs.COPY_LEAST)]),
    "unique": lambda c, d: jobs.insert_unique(c, d, [NewJob(uuid4(), "k", "a", "1", unique_key="u")]),
    "event": lambda c, d: (jobs.append if d.is_postgresql else lambda c, d, j: jobs.insert(c, d, [j]))(
        c, d, NewJob(uuid4(), "k", "a", "1", ordering_key="o", ordering_policy="block")
    ),
}


@pytest.mark.parametrize("insert", WAYS_IN.values(), ids=WAYS_IN)
def test_no_insert_takes_another_way(watch, insert):
    others, total = watch(insert)
    assert (others, total > 0) == ([], True)


def test_what_takes_another_way_is_found(database, clock, watch):
    clock.set(tests.store.acts.NOW)
    database.transaction_sync(build)
    id_, sql = id_of("dead1"), "UPDATE {job} SET state = 'ready' WHERE id = :id"
    row = database.transaction_sync(lambda c, d: changes.lock_free(c, d, [id_]))
    assert watch(lambda c, d: d.run(c, sql, {"id": d.id(id_)}))[0] == [sql]
    assert len(watch(lambda c, d: changes.write_all(c, d, row, state="ready"))[0]) == 1
