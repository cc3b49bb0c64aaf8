"""Every two transactions side by side, and some threes: nothing is lost, stranded or doubled, nobody waits in a circle.

Here the acts that hold rows others want meet each other once, the first with all its locks in hand, and those that hold
most of them meet by threes, the first two in their middle, with the plans of a large database (`pairs.py`).
RESILIENT_PAIRS=all (`make proof`) has every act meet every other in both orders, before each of its statements, and the
threes likewise, with the plans of an empty, a small and a large database.
"""

from __future__ import annotations

import ast
import os
from itertools import combinations, permutations, product
from pathlib import Path

import pytest

import tests.store.acts  # noqa: F401 - it registers them
from resilient.store.jobs import workflows
from tests import invariants
from tests.store.pairs import COMMIT, PLANS, WAITED, Arena, names, writes
from tests.store.registry import ACTS, LONGEST, NOT_PAIRED, Act, covered
from tests.store.world import build

ALL = os.environ.get("RESILIENT_PAIRS") == "all"
HOLDERS = (
    "claims", "finishes", "finishes others", "finishes and goes on", "stages", "attends", "rescues", "repairs lanes",
    "repairs workflows", "prunes succeeded", "enqueues", "enqueues in another order", "cancels", "retries them",
    "discards", "deletes", "turns a workflow around", "adds a step", "reports failures", "closes", "notes successes",
    "ticks",
)  # fmt: skip


@pytest.fixture(scope="module")
def arena(postgres_server, _postgres_template):
    """``arena(plans)``: made once each."""
    made = {}

    def of(plans):
        if plans not in made:
            made[plans] = Arena(postgres_server.url(postgres_server.create(_postgres_template)), plans)
        return made[plans]

    yield of
    for one in made.values():
        one.close()


def touched(arena, act):
    """The tables that an act writes, and those that it names."""
    statements = arena.statements_of(act)
    return set().union(*map(writes, statements)), set().union(*map(names, statements))


def opposite(name):
    """Whom one of the holders meets as the first: itself, and every second of the others, which meets the rest so."""
    at = HOLDERS.index(name)
    return [other for n, other in enumerate(HOLDERS) if n == at or (n + at) % 2 == (n > at)]


def test_each_two_meet_once():
    met = [frozenset((one, other)) for one in HOLDERS for other in opposite(one)]
    assert len(met) == len(set(met)) == len(HOLDERS) * (len(HOLDERS) + 1) / 2


def meetings(arena, first, *, everywhere):
    """Whom the act meets, and where it stands then. Two that write nothing of what the other names never meet."""
    count = len(arena.statements_of(first))
    written, named = touched(arena, first)
    for other in ACTS.values() if everywhere else map(ACTS.get, opposite(first.name)):
        writes_too, names_too = touched(arena, other)
        if written & names_too or writes_too & named:
            yield from ((other, k) for k in ([*range(1, count + 1), COMMIT] if everywhere else [COMMIT]))


@pytest.mark.parametrize("plans", list(PLANS) if ALL else ["large"])
@pytest.mark.parametrize("name", list(ACTS) if ALL else HOLDERS)
def test_it_meets_the_others(arena, name, plans):
    place = arena(plans)
    found = list(meetings(place, ACTS[name], everywhere=ALL))
    wrong = [line for other, k in found for line in place.meet(ACTS[name], other, stops=[k]).wrong]
    print(f"{name}: {len(found)} meetings, plans of a database that is {plans}")  # noqa: T201 - the figure
    assert wrong == []


@pytest.mark.parametrize("other", ["finishes and goes on", "cancels what runs"])
def test_a_batch_of_several_statements_has_its_jobs_before_their_followers(arena, other):
    """A follower is a job too: one that is locked between two of the batch's own makes a circle."""
    place = arena("large")
    for acts in permutations((ACTS["finishes"], ACTS[other])):
        stops = [*range(1, len(place.statements_of(acts[0])) + 1), COMMIT]
        assert [line for k in stops for line in place.meet(*acts, stops=[k]).wrong] == []


def places(arena, act):
    """Where an act may stand: before each statement once it holds something; here in the middle, with some of it."""
    count = len(arena.statements_of(act))
    return [*range(2, count + 1), COMMIT] if ALL else [count // 2 + 1]


def threes(first, *, everywhere):
    """Whom one of the longest meets, two at a time: all, or those behind it in the list."""
    ahead = LONGEST if everywhere else LONGEST[LONGEST.index(first) + 1 :]
    two = product(ahead, repeat=2) if everywhere else combinations(ahead, 2)
    return [tuple(ACTS[name] for name in (first, *names)) for names in two]


def three_meetings(arena, acts):
    """What is wrong after each, with the first two at any place; a second that waits comes to no later one."""
    for first in places(arena, acts[0]):
        for second in places(arena, acts[1]):
            meeting = arena.meet(*acts, stops=[first, second])
            yield meeting
            if meeting.places[1] == WAITED:
                break


@pytest.mark.parametrize("plans", list(PLANS) if ALL else ["large"])
@pytest.mark.parametrize("name", LONGEST if ALL else LONGEST[:-2])
def test_three_meet(arena, name, plans):
    """Two that wait for one another through a third, which no two of them would."""
    meetings = [one for acts in threes(name, everywhere=ALL) for one in three_meetings(arena(plans), acts)]
    print(f"{name}: {len(meetings)} meetings of three, plans of a database that is {plans}")  # noqa: T201
    assert [line for meeting in meetings for line in meeting.wrong] == []


def test_a_circle_of_three_is_found(arena):
    """Each takes one row, and then that of the next."""

    def takes(*keys):
        def run(c, d):
            for key in keys:
                d.run(c, "SELECT 1 FROM {resource} WHERE key = :key FOR UPDATE", {"key": key})

        return Act(" and ".join(keys), (), run, run, lambda _: None)

    circle = [takes("p", "q"), takes("q", "c"), takes("c", "p")]
    place = arena("large")
    for first, second in permutations(circle, 2):
        assert place.meet(first, second, stops=[2]).wrong == []
    (wrong,) = place.meet(*circle, stops=[2, 2]).wrong
    assert "deadlock detected" in wrong


def test_a_statement_that_leaves_rows_out_is_found(arena, monkeypatch):
    """The fault for which all this was made: a sub-select that is a join, over a UNION, in a statement that waits."""

    def ask(c, d, ids, now):
        d.run(
            c,
            "UPDATE {workflow} SET attention = true, updated_at = :now WHERE id IN (SELECT w.id FROM {workflow} w WHERE"
            f" w.finished_at IS NULL AND w.id IN (SELECT workflow_id FROM {{step}} WHERE job_id"
            f" {d.among('ids', 'uuid')} UNION ALL SELECT workflow_id FROM {{step}} WHERE undo_job_id"
            f" {d.among('ids', 'uuid')}) ORDER BY w.id FOR NO KEY UPDATE OF w)",
            {"ids": d.pack_ids(sorted(ids)), "now": now},
        )

    monkeypatch.setattr(workflows, "ask", ask)
    wrong = arena("large").meet(ACTS["attends"], ACTS["finishes others"], stops=[COMMIT]).wrong
    assert any("a workflow stands still, and nobody was asked to look at it" in line for line in wrong)
    assert any("housekeeping had to repair workflows" in line for line in wrong)


# -- where writers take turns ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(ACTS))
def test_they_take_turns(sqlite_database, clock, name):
    """On SQLite a transaction begins when the other is over; so they meet at their borders, in either order."""
    first = ACTS[name]
    with sqlite_database.sync_engine.begin() as c:
        invariants.install(c.connection.driver_connection)
    sqlite_database.transaction_sync(build)
    sqlite_database.transaction_sync(lambda c, d: d.run(c, "DELETE FROM life WHERE old IS NOT NULL"))
    for act in (first, ACTS["finishes"], ACTS["stages"], ACTS["attends"], ACTS["cancels"], first):
        outcome = Arena._do(sqlite_database, act.run)
        assert not isinstance(outcome, BaseException), (act.name, outcome)
        assert act.check(outcome) is None
        assert invariants.broken(sqlite_database) == []
    assert invariants.lives(sqlite_database, replayed=first.replays) == []
    assert invariants.keep_house(sqlite_database) == []


# -- nobody is left out ------------------------------------------------------------------------------------------------

_HOW = {"transaction": 0, "transaction_sync": 0, "statement": 0, "statement_sync": 0, "_carefully": 0, "_run": 0}
_RUNS = ("transaction", "transaction_sync", "run")  # what a `partial` may be of
_FACES = {"write": 1, "read": 1}  # of `sessions.Transactions`, as `_db` or `db`


def transactions():
    """What the engine runs in transactions of its own, as "room.module: function"."""
    root = Path(__file__).parents[2] / "resilient"
    found = set()
    for path in [*(root / "engine").rglob("*.py"), *(root / "adapters").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and (at := _place(node.func)) is not None and len(node.args) > at:
                if at and ast.unparse(node.func) == "partial" and not ast.unparse(node.args[0]).endswith(_RUNS):
                    continue
                where = path.stem if path.parent == root / "adapters" else f"{path.parent.name}.{path.stem}"
                found.add(f"{where}: {ast.unparse(node.args[at])}")
    return found


def _place(called):
    """Which argument of a call is a function that runs in a transaction; None: no such call."""
    if isinstance(called, ast.Name):
        return 1 if called.id in ("do", "partial") else None  # `do`: of `jobs_api`, `write` or `read`
    if not isinstance(called, ast.Attribute):
        return None
    by_face = _FACES.get(called.attr) if ast.unparse(called.value) in ("db", "self._db") else None
    return _HOW.get(called.attr, by_face)


def test_each_transaction_of_the_engine_is_among_the_acts():
    """A new one is to be registered in `acts.py`, or named there among those that cannot spoil anything."""
    found = transactions()
    assert sorted(found - covered() - NOT_PAIRED.keys()) == []
    assert len(found & covered()) > 70  # the names that are looked for are still those of the engine
