"""Nothing is left out of both a quick run and the rest of it."""

import os
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

from tests.turns import DATABASES

TESTS, ROOT = Path(__file__).parent, Path(__file__).parents[1]
MARK, FILE = re.compile(r'mark\.proof\("([^"]+)'), re.compile(r"[\w/]+\.py")
ABOVE = ("engine/test_retention.py", "engine/test_outbox.py", "chaos/test_kill.py")
STORE = "store/test_gates.py"


@cache
def collected(turns):
    paths = [str(TESTS / path) for path in (*ABOVE, STORE)]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", f"--turns={turns}"]
    environ = {name: text for name, text in os.environ.items() if name != "PYTEST_ADDOPTS"}
    done = subprocess.run([*command, *paths], cwd=ROOT, env=environ, capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if "::" in line]


def of(*files, turns):
    return {name for name in collected(turns) if name.removeprefix("tests/").startswith(files)}


def database_of(name):
    return next((one for one in DATABASES if f"[{one}" in name), None)


def without(name):
    return name.replace(database_of(name) or "", "")


def test_what_a_quick_run_leaves_out_is_the_rest():
    quick, rest = set(collected("quick")), set(collected("rest"))
    assert quick | rest == set(collected("all"))
    assert not quick & rest
    assert rest


def test_of_a_test_for_both_databases_one_is_run():
    cases = Counter(without(name) for name in of(*ABOVE, turns="all"))
    assert Counter(without(name) for name in of(*ABOVE, turns="quick")) == Counter(set(cases))
    assert set(cases.values()) == {1, 2}


def test_each_database_has_its_turn_about_as_often():
    quick = Counter(database_of(name) for name in of("engine/test_outbox.py", turns="quick"))
    assert min(quick[one] for one in DATABASES) > quick.total() / 3


def test_what_is_run_instead_is_there():
    for path in TESTS.rglob("test_*.py"):
        for text in MARK.findall(path.read_text()):
            for name in FILE.findall(text):
                assert any((place / name).exists() for place in (path.parent, TESTS, ROOT)), f"{path}: {name}"


def test_the_store_meets_both_in_every_test():
    assert of(STORE, turns="quick") == of(STORE, turns="all")
    assert {database_of(name) for name in of(STORE, turns="quick")} >= set(DATABASES)
