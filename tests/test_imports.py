"""The public names come when they are used, so that the command line answers at once."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import resilient
from resilient import Resilient

ROOT = Path(__file__).parents[1]


def declared():
    """What type checkers see: name to module."""
    tree = ast.parse(Path(resilient.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    return {name.name: line.module.removeprefix("resilient.") for line in block.body for name in line.names}


def test_type_checkers_and_programs_see_the_same_names():
    assert declared() == resilient._HOME
    assert sorted(resilient.__all__) == sorted(resilient._HOME)


def test_every_name_is_there():
    for name, module in declared().items():
        assert getattr(resilient, name) is getattr(importlib.import_module(f"resilient.{module}"), name)
    assert set(resilient.__all__) <= set(dir(resilient))
    everything = {}
    exec("from resilient import *", everything)  # noqa: S102 - what a user may write
    assert set(resilient.__all__) <= set(everything)
    with pytest.raises(AttributeError, match="module 'resilient' has no attribute 'Nonsense'"):
        resilient.Nonsense  # noqa: B018


def missing(path):
    """The engine's names that a file of the repository takes and that are not there."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "resilient":
            for one in node.names:
                try:
                    if not hasattr(importlib.import_module(node.module), one.name):
                        importlib.import_module(f"{node.module}.{one.name}")
                except ModuleNotFoundError:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}: {node.module} has no {one.name}"


def test_what_the_tests_and_examples_take_is_there():
    """A renamed name is found here at once, and not by a run of all tests."""
    files = [path for folder in ("tests", "examples") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 300
    assert [line for path in files for line in missing(path)] == []


HEAVY = ("sqlalchemy.orm", "sqlmodel", "pydantic", "httpx", "alembic", "cryptography", "authlib")


def test_help_imports_nothing_heavy():
    program = (
        "import sys; from resilient.surface.cli import main; main(['--help']);"
        f"print([one for one in {HEAVY!r} if one in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_command_spends_little_on_the_collector(tmp_path):
    """Neither while it imports nor as it ends: a third of its CPU time went there."""
    words = ["resilient", "--database", f"sqlite:///{tmp_path}/app.db", "db", "upgrade"]
    program = (
        "import atexit, gc, sys; atexit.register(lambda: print(gc.get_freeze_count() > 10_000, looks < 30));"
        f"sys.argv = {words}; from resilient.surface.cli import main; main(ARGUMENTS);"
        "looks = sum(one['collections'] for one in gc.get_stats())"
    )
    ends = []
    for arguments in ("", "sys.argv[1:]"):  # a process of its own, and one that only borrows it
        line = [sys.executable, "-c", program.replace("ARGUMENTS", arguments)]
        ends.append(subprocess.run(line, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    assert ends == ["True True", "False False"]


LATER = (  # with the first need: the tables, a failure, a request, a secret, a worker
    *("alembic", "mako", "tenacity", "aiosqlite", "psycopg", "starlette"),
    *("httpx", "httpcore", "h11", "authlib", "cryptography", "rich", "click", "pygments"),
    *(
        "resilient.engine.run.worker",
        "resilient.engine.gates.gate",
        "resilient.wire.requests.transport",
        "resilient.wire.oauth.endpoints",
    ),
)


def test_declaring_an_app_imports_only_what_enqueues():
    """What only some need comes when it is needed: a web application that only enqueues sends no request itself."""
    program = (
        "import sys; from resilient import Job, OAuth2, Provider, Resilient, handler;"
        "crm = Provider(name='crm', base_url='https://api.crm.example');"
        "push = handler('push')(lambda job: None); Resilient('sqlite:///app.db', handlers=[push], providers=[crm]);"
        f"print([one for one in {LATER!r} if one in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_program_that_enqueues_sends_nothing(tmp_path):
    """Not even when it does: only the tables' own tools come then."""
    program = (
        "import sys; from resilient import Resilient, handler;"
        f"app = Resilient('sqlite:///{tmp_path}/app.db', handlers=[handler('push')(lambda job: None)]);"
        "app.enqueue_sync('push', resource_key='crm/acct-7');"
        f"print([one for one in {LATER!r} if one in sys.modules and one not in ('alembic', 'mako', 'pygments')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_worker_starts_without_what_others_need(tmp_path):
    """Tables that are as they should be need no migrations."""
    address = f"sqlite:///{tmp_path}/app.db"
    Resilient(address).ready_sync()
    program = (
        "import asyncio, sys; from resilient import Resilient, handler;"
        f"app = Resilient({address!r}, handlers=[handler('push')(lambda job: None)]);"
        "app.enqueue_sync('push', resource_key='crm/acct-7');"
        "print(asyncio.run(app.worker().drain()), 'httpx' in sys.modules, [one for one in"
        " ('alembic', 'mako', 'authlib', 'tenacity') if one in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "1 True []"


def test_the_collector_stands_still_while_the_engine_is_imported():
    program = (
        "import gc; count = lambda: sum(one['collections'] for one in gc.get_stats()); before = count();"
        "from resilient import Resilient, handler; push = handler('push')(lambda job: None);"
        "app = Resilient('sqlite:///app.db', handlers=[push]);"
        "looks = count(); app.worker(); print(gc.isenabled(), looks - before < 10, count() - looks < 10)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "True True True"
