"""What docs/faults.md and docs/security.md promise is held by tests that exist, and no line is without one unawares."""

import ast
import re
from pathlib import Path

import pytest

from tests.simulation.mutants import MUTANTS
from tests.simulation.table import BY_PAIRS
from tests.simulation.test_simulation import USUAL

ROOT = Path(__file__).parents[1]
PAGES = ["faults.md", "security.md"]
NAMED = re.compile(r"`(tests/[\w/.-]+)((?:::\w+)*)`")
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def lines(page):
    return (ROOT / "docs" / page).read_text().splitlines()


def rows(page):
    """The cells of each row of its tables."""
    found = [line.strip("| ").split(" | ") for line in lines(page) if line.startswith("|")]
    return [row for row in found if not set("".join(row)) <= set("-| ")]


def defined(path):
    """The tests of a file, as pytest names them, without running it."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, FUNCTIONS):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {node.name, *(f"{node.name}::{one.name}" for one in node.body if isinstance(one, FUNCTIONS))}
    return {name for name in found if name.partition("::")[0].startswith(("test_", "Test"))}


def broken_engines():
    return {*MUTANTS, *BY_PAIRS}


def test_every_broken_engine_is_in_the_table():
    begun = lines("faults.md").index("## Broken on purpose")
    table = [line.strip("| ").split(" | ")[0] for line in lines("faults.md")[begun:] if line.startswith("| ")]
    assert set(table[1:]) == broken_engines()


def test_the_suite_runs_the_seeds_that_find_them_twice_over():
    """A change moves what a seed meets: as many more as the rarest fault needs are room for that."""
    latest = max(int(seed) for line in lines("faults.md") for seed in re.findall(r"\| seed (\d+) \|", line))
    assert latest * 2 < int(USUAL.partition(":")[2])


@pytest.mark.parametrize("page", PAGES)
def test_every_test_that_is_named_exists(page):
    named = [found for line in lines(page) for found in NAMED.findall(line)]
    assert len(named) > 15
    missing = []
    for file, test in named:
        path = ROOT / file
        if not path.exists() or (test and test.removeprefix("::") not in defined(path)):
            missing.append(file + test)
    assert missing == []


def test_each_fault_names_its_test_or_says_why_nothing_is_promised():
    faults = [row for row in rows("faults.md") if row[0] not in {"fault", "the engine", *broken_engines()}]
    assert len(faults) >= 42
    for fault, promised, *tests in faults:
        assert (tests and NAMED.search(tests[0])) or re.search(
            r"\*\*(not|no pace) promised\*\*|\*\*only safety\*\*", promised
        ), fault


def test_a_page_names_tests_by_their_whole_name():
    """A file alone says too little where a fault is meant."""
    named = [NAMED.findall(row[-1]) for row in rows("faults.md") if row[0] not in broken_engines()]
    assert all(test for found in named for _, test in found)
