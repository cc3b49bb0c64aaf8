"""The runner of mutants: one change of one function at a time, put in where it runs, and nothing that is the same."""

import ast
import importlib
import re
import sys
from types import SimpleNamespace

import pytest

from tests import mutation
from tests.mutation_rooms import ROOMS, ROOT, SAME

TEXT = '''
from functools import partial

LIMIT = 3 * 2


class Gate:
    """Shut from so many on."""

    def is_open(self, number, *, most=3):
        """Whether it is."""
        return number < most

    @staticmethod
    def name(of="a"):
        return of


def twice(number):
    result = [
        number + number
        for _ in range(1)
    ]
    return result[0]
'''


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "a_mutated_module.py").write_text(TEXT)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("a_mutated_module")
    del sys.modules["a_mutated_module"]


def mutants():
    return list(mutation.mutants_of("a_mutated_module", TEXT))


def test_each_is_one_change_of_one_function():
    made = {(one.function, one.before, one.after) for one in mutants()}
    assert {one[0] for one in made} == {"Gate.is_open", "Gate.name", "twice"}  # what an import does is left out
    assert ("Gate.is_open", "return number < most", "return number <= most") in made
    assert ("twice", "number + number", "number - number") in made


def test_the_type_of_a_cast_is_nothing_to_change():
    text = 'class Gate:\n    def rest(self, number):\n        return cast("list[int]", number + 1)\n'
    made = {one.after for one in mutation.mutants_of("a_module", text)}
    assert 'return cast("list[int]", number - 1)' in made
    assert 'return cast("list[int]", None)' in made
    assert not [one for one in made if "list[int]" not in one and "number + 1" in one and "cast(number" not in one]


def test_each_changes_what_its_function_does_and_nothing_else(module):
    seen = set()
    for mutant in mutants():
        function = mutation.function_of(mutant.module, mutant.function)
        before = function.__code__, function.__defaults__, function.__kwdefaults__
        assert mutation.put_in(mutant), mutant
        try:
            results = (module.Gate().is_open(2), module.Gate().is_open(3), module.Gate.name(), module.twice(2))
        except (TypeError, IndexError):
            results = "an error"
        seen.add((mutant.function, results))
        function.__code__, function.__defaults__, function.__kwdefaults__ = before
    assert ("Gate.is_open", (True, True, "a", 4)) in seen
    assert ("Gate.name", (True, False, "XXaXX", 4)) in seen
    assert ("twice", (True, False, "a", 0)) in seen
    assert (module.Gate().is_open(2), module.Gate().is_open(3), module.Gate.name(), module.twice(2)) == (
        True, False, "a", 4,
    )  # fmt: skip


def test_the_same_code_is_no_mutant(module):
    mutant = mutants()[0]
    lines = TEXT.splitlines(keepends=True)
    same = "".join([*mutation.classes_of("twice"), *lines[lines.index("def twice(number):\n") :]])
    assert not mutation.put_in(mutant._replace(module=module.__name__, function="twice", source=same))


def test_a_function_says_that_it_is_called(module):
    calls = []
    for name in ("Gate.is_open", "Gate.name", "twice"):
        function = mutation.function_of(module.__name__, name)
        function.__globals__["_called"] = lambda name=name: calls.append(name)
        function.__code__ = mutation.telling(function, name, "_called")
    assert module.Gate().is_open(3) is False
    assert module.Gate.name() == "a"
    assert module.twice(2) == 4
    assert len(calls) == 3


@pytest.mark.parametrize(
    ("name", "fixtures", "shared"),
    [
        ("test_a[sqlite]", ("database", "backend"), False),
        ("test_a[postgresql]", ("database", "backend"), True),
        ("test_a", ("open_database", "postgres_url", "postgres_server"), True),
    ],
)
def test_forks_share_no_server(name, fixtures, shared):
    assert mutation.is_shared(SimpleNamespace(name=name, fixturenames=fixtures)) is shared


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_has_functions_to_change_and_tests(name):
    room = ROOMS[name]
    assert room.tests
    assert all((ROOT / path).exists() for path in room.tests)
    names = []
    for place in room.places:
        path = ROOT / "resilient" / place
        assert path.exists()
        for file in path.rglob("*.py") if path.is_dir() else [path]:
            spans = mutation.spans(ast.parse(file.read_text()).body, f"{file.stem}.")
            names += {function for _, (function, _, _) in spans if re.search(room.functions, function)}
    assert len(names) > 1


def test_what_is_named_is_there_and_has_a_reason():
    sources = "\n".join(path.read_text() for path in (ROOT / "resilient").rglob("*.py"))
    for (name, _), reason in SAME.items():
        assert f"def {name.rpartition('.')[2]}(" in sources, name
        assert len(reason.split()) > 3, name
