"""Any features, one after the other, on the same jobs: see `features.py`."""

from __future__ import annotations

import copy
import os
import random
import shutil

import pytest

from tests.engine.features import EFFECTS, MARKS, run

SEEDS = int(os.environ.get("RESILIENT_PROGRAMS", "40"))  # `make proof` runs twenty thousand
PARTS = 2
OPTIONS = {
    "key": [1],
    "unique_key": ["u"],
    "unique_until": ["finish"],
    "on_conflict": ["replace", "raise"],
    "while_running": ["once_more"],
    "on_dead": ["wait", "run"],
    "ordering_key": ["lane"],
    "ordering_policy": ["skip"],
    "expires_in": [30],
    "delay": [20],
    "looked up": [True],
}
TOGETHER = {  # what says nothing without the other
    "unique_until": ["unique_key"], "on_conflict": ["unique_key"], "while_running": ["unique_key", "unique_until"],
    "on_dead": ["after"], "ordering_policy": ["ordering_key"],
}  # fmt: skip
OTHERS = {
    "cancel": lambda dice: ("cancel", dice.randrange(4), {}),
    "discard": lambda dice: ("discard", dice.randrange(4), {}),
    "delete": lambda dice: ("delete", dice.randrange(4), {}),
    "retry": lambda dice: ("retry", dice.randrange(4), dice.choice([{}, {}, {"new_operation": True}])),
    "edit": lambda dice: ("edit", dice.randrange(4), dice.choice([{}, {}, {"new_operation": True}])),
    "house": lambda _: ("house",),
    "lose": lambda dice: ("lose", dice.choice([None, None, *MARKS]), dice.choice([*EFFECTS])),
    "retry all": lambda _: ("retry all",),
    "advance": lambda dice: ("advance", dice.choice([5, 15, 40])),
    "gate": lambda dice: (dice.choice(["pause", "resume"]), dice.randrange(2)),
    "prune": lambda _: ("prune", 60),
    "workflow": lambda dice: ("workflow", [script(dice) for _ in range(3)]),
}


def script(dice):
    return dice.choices(["ok", "later", "never", "gone"], k=dice.randrange(3))


def drawn(seed):
    """A program of a few features, so that they meet: of all of them at once, two seldom come to the same job."""
    dice = random.Random(seed)
    chosen = set(dice.sample([*OPTIONS, "after", "inside"], dice.randint(1, 4)))
    chosen |= {other for name in chosen for other in TOGETHER.get(name, ())}
    changes = dice.sample(sorted(OTHERS), dice.randint(1, 4))

    def enqueue(*, inside=False):
        words = {name: dice.choice(OPTIONS[name]) for name in OPTIONS if name in chosen and dice.random() < 0.7}
        if "after" in chosen and dice.random() < 0.7:
            words["after"] = dice.sample(range(4), dice.randint(1, 2))
        if dice.random() < 0.5:
            words["script"] = script(dice)
        if "inside" in chosen and not inside:
            others = [enqueue, enqueue, lambda **_: OTHERS["cancel"](dice), lambda **_: OTHERS["advance"](dice)]
            words["inside"] = [dice.choice(others)(inside=True) for _ in range(dice.randrange(3))]
        return ("enqueue", words)

    def any_other():
        roll = dice.random()
        return enqueue() if roll < 0.3 else ("drain",) if roll < 0.5 else OTHERS[dice.choice(changes)](dice)

    return [enqueue() for _ in range(dice.randint(1, 3))] + [any_other() for _ in range(dice.randint(4, 12))]


class Place:
    """Fresh tables for one program after the other."""

    def __init__(self, folder, template):
        self._path, self._template = folder / "app.db", template

    def run(self, operations):
        for old in self._path.parent.glob("app.db*"):
            old.unlink()
        shutil.copy(self._template, self._path)
        return run(f"sqlite:///{self._path}", copy.deepcopy(operations))

    def shrunk(self, operations):
        """The same without what it does not take to fail."""
        place = 0
        while place < len(operations):
            less = operations[:place] + operations[place + 1 :]
            if self.run(less):
                operations = less
            else:
                place += 1
        return operations


@pytest.mark.parametrize("part", range(PARTS))
def test_no_feature_forgets_what_another_hung_on_a_job(tmp_path, sqlite_url, part):
    template = tmp_path / "template.db"
    shutil.move(sqlite_url.removeprefix("sqlite:///"), template)
    place = Place(tmp_path, template)
    for seed in range(part, SEEDS, PARTS):
        operations = drawn(seed)
        if faults := place.run(operations):
            less = place.shrunk(operations)
            pytest.fail(f"seed {seed}: {faults}\n{less}\n{place.run(less)}")


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
