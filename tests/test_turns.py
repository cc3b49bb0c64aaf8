"""Nothing is left out of both a quick run and the rest of it."""

import json
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


# In a process of its own, because this one is in the middle of a run: what each of the options would run.
LOOK = """
import json, sys, types, pytest

class Looker:
    def pytest_collection_finish(self, session):
        from tests import turns

        for chosen in ("all", "quick", "rest"):
            items, options = list(session.items), {"getoption": lambda _: chosen, "hook": session.config.hook}
            turns.pytest_collection_modifyitems(types.SimpleNamespace(**options), items)
            names[chosen] = [item.nodeid for item in items]

names = {}
pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", *sys.argv[1:]], plugins=[Looker()])
sys.stdout.write("\\n" + json.dumps(names))
"""


@cache
def everything():
    environ = {name: text for name, text in os.environ.items() if name != "PYTEST_ADDOPTS"}
    command = [sys.executable, "-c", LOOK, *(str(TESTS / path) for path in (*ABOVE, STORE))]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def collected(chosen):
    return everything()[chosen]


def of(*files, chosen):
    return {name for name in collected(chosen) if name.removeprefix("tests/").startswith(files)}


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
    cases = Counter(without(name) for name in of(*ABOVE, chosen="all"))
    assert Counter(without(name) for name in of(*ABOVE, chosen="quick")) == Counter(set(cases))
    assert set(cases.values()) == {1, 2}


def test_each_database_has_its_turn_about_as_often():
    quick = Counter(database_of(name) for name in of("engine/test_outbox.py", chosen="quick"))
    assert min(quick[one] for one in DATABASES) > quick.total() / 3


def test_what_is_run_instead_is_there():
    for path in TESTS.rglob("test_*.py"):
        for text in MARK.findall(path.read_text()):
            for name in FILE.findall(text):
                assert any((place / name).exists() for place in (path.parent, TESTS, ROOT)), f"{path}: {name}"


def test_the_store_meets_both_in_every_test():
    assert of(STORE, chosen="quick") == of(STORE, chosen="all")
    assert {database_of(name) for name in of(STORE, chosen="quick")} >= set(DATABASES)
