"""Which tests of a whole run are left to `make proof`, so that `make test` stays short.

``pytest --turns=quick`` runs a test that exists for both databases on one of them. The name of the case decides on
which, so a test with several cases meets both. This holds only in `ROOMS`, above the store, whose SQL is what differs:
elsewhere every test meets both. Tests marked ``proof`` it leaves out too: each takes long and says what is run instead.
``--turns=rest`` runs what the other leaves out; without the option everything is run.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from pathlib import Path

ROOMS = ("chaos", "django", "engine", "surface", "test_tutorial.py")
DATABASES = ("sqlite", "postgresql")


def pytest_addoption(parser):
    parser.addoption("--turns", choices=("all", "quick", "rest"), default="all", help="see tests/turns.py")


def pytest_collection_modifyitems(config, items):
    chosen = config.getoption("turns")
    if chosen == "all":
        return
    rest = left_to_proof(items)
    quick = [item for item in items if item not in rest]
    runs, left_out = (quick, rest) if chosen == "quick" else (rest, quick)
    config.hook.pytest_deselected(items=left_out)
    items[:] = runs


def left_to_proof(items):
    """The items that a quick run leaves out, each once, in their order."""
    tests = defaultdict(dict)
    for item in items:
        database = database_of(item)
        if database is not None and room_of(item.path) in ROOMS:
            tests[without(database, item)][database] = item
    in_turns = {name: cases for name, cases in tests.items() if len(cases) == len(DATABASES)}
    marked = {item for item in items if item.get_closest_marker("proof")}
    for item in marked:
        assert room_of(item.path) in ROOMS, (
            f"{item.nodeid} is marked `proof`, and no piece of `make proof` runs it: add its folder to ROOMS here"
        )
    rest = marked | {cases[database_left_out(name)] for name, cases in in_turns.items()}
    return dict.fromkeys(item for item in items if item in rest)


def database_left_out(name):
    """The one that a test does not meet in a quick run: always the same for a name, each as likely as the other."""
    return DATABASES[zlib.crc32(name.encode()) >> 7 & 1]


def database_of(item):
    """The database that one of its parameters is."""
    params = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return next((value for value in params if value in DATABASES), None)


def without(database, item):
    """The name of a test, with those of its parameters that are not the database."""
    return f"{item.nodeid.partition('[')[0]}[{item.callspec.id.replace(database, '', 1)}]"


def room_of(path):
    """The folder of ``tests`` that a file is in; its own name if it is in none."""
    return path.relative_to(Path(__file__).parent).parts[0]
