"""Any features, one after the other, on the same jobs: see `features.py`."""

from __future__ import annotations

import copy
import os
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.features import run

EXAMPLES = int(os.environ.get("RESILIENT_PROGRAMS", "40"))  # `make proof` runs twenty thousand
PLACE = st.integers(0, 3)
HOW = st.lists(st.sampled_from(["ok", "later", "never"]), max_size=3)
OPTIONS = {
    "key": st.just(1),
    "unique_key": st.just("u"),
    "unique_until": st.just("finish"),
    "on_conflict": st.sampled_from(["replace", "raise"]),
    "while_running": st.just("once_more"),
    "after": st.lists(PLACE, min_size=1, max_size=2, unique=True),
    "on_dead": st.sampled_from(["wait", "run"]),
    "ordering_key": st.just("lane"),
    "ordering_policy": st.just("skip"),
    "expires_in": st.just(30),
    "delay": st.just(20),
    "script": HOW,
}
NEW = st.sampled_from([{}, {}, {"new_operation": True}])
OTHERS = {
    "cancel": st.tuples(st.just("cancel"), PLACE, st.just({})),
    "discard": st.tuples(st.just("discard"), PLACE, st.just({})),
    "delete": st.tuples(st.just("delete"), PLACE, st.just({})),
    "retry": st.tuples(st.just("retry"), PLACE, NEW),
    "edit": st.tuples(st.just("edit"), PLACE, NEW),
    "house": st.just(("house",)),
    "retry all": st.just(("retry all",)),
    "advance": st.tuples(st.just("advance"), st.sampled_from([5, 15, 40])),
    "gate": st.tuples(st.sampled_from(["pause", "resume"]), st.integers(0, 1)),
    "prune": st.tuples(st.just("prune"), st.just(60)),
    "workflow": st.tuples(st.just("workflow"), st.lists(HOW, min_size=3, max_size=3)),
}


@st.composite
def programs(draw):
    """A few features each, so that they meet: of all of them at once, two seldom come to the same job."""
    chosen = draw(st.sets(st.sampled_from(sorted(OPTIONS)), max_size=5))
    options = st.fixed_dictionaries({}, optional={name: OPTIONS[name] for name in sorted(chosen)})
    within = st.one_of(st.tuples(st.just("enqueue"), options), OTHERS["cancel"], OTHERS["advance"])
    enqueue = st.builds(
        lambda words, inside: ("enqueue", {**words, "inside": inside}), options, st.lists(within, max_size=2)
    )
    others = draw(st.sets(st.sampled_from(sorted(OTHERS)), min_size=1, max_size=4))
    operations = st.one_of(enqueue, st.just(("drain",)), *(OTHERS[name] for name in sorted(others)))
    return draw(st.lists(operations, min_size=3, max_size=10))


@pytest.fixture
def place(tmp_path, _sqlite_template):
    return tmp_path / "app.db", _sqlite_template


@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), deadline=None)
@given(operations=programs())
def test_no_feature_forgets_what_another_hung_on_a_job(place, operations):
    path, template = place
    for old in path.parent.glob("app.db*"):
        old.unlink()
    shutil.copy(template, path)
    assert run(f"sqlite:///{path}", operations) == []


UNIQUE = {"unique_key": "u", "unique_until": "finish"}
AGAIN = {**UNIQUE, "while_running": "once_more"}
FOUND = {
    "a retry forgets what the job waits for": [
        ("enqueue", {"key": 0, "delay": 20}), ("enqueue", {"key": 1, "after": [0]}), ("cancel", 1, {}),
        ("retry", 1, {}), ("drain",),
    ],
    "a cancelled job runs once more": [
        ("enqueue", {**UNIQUE, "script": ["later"], "inside": [("enqueue", AGAIN)]}), ("drain",), ("cancel", 0, {}),
        ("retry", 0, {}), ("drain",),
    ],
    "the newer payload is dropped": [
        ("enqueue", {**UNIQUE, "inside": [("enqueue", {**AGAIN, "on_conflict": "replace"})]}), ("drain",),
    ],
    "the expiry of the run before ends the promised one": [
        ("enqueue", {**UNIQUE, "expires_in": 30, "inside": [("enqueue", AGAIN), ("advance", 40)]}), ("drain",),
    ],
    "a newer one runs before what it waits for": [
        ("enqueue", {"unique_key": "u"}), ("enqueue", {"key": 1, "delay": 20}),
        ("enqueue", {"unique_key": "u", "on_conflict": "replace", "after": [1]}), ("drain",),
    ],
    "an undo has the payload from before an edit": [("workflow", [[], ["never"], []]), ("edit", 0, {}), ("drain",)],
    "a step that was retried and cancelled is not undone": [
        ("workflow", [[], ["later", "never"], []]), ("drain",), ("retry", 0, {}), ("pause", 0), ("advance", 15),
        ("cancel", 0, {}), ("drain",),
    ],
    "a step that was retried and died is not undone": [
        ("workflow", [["ok", "never"], ["later", "never"], []]), ("drain",), ("retry", 0, {}), ("drain",),
    ],
}  # fmt: skip


@pytest.mark.parametrize("fault", FOUND)
def test_what_was_found_once_holds(database_url, fault):
    assert run(database_url, copy.deepcopy(FOUND[fault])) == []
