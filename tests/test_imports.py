"""The public names come when they are used, so that the command line answers at once."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import resilient


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


HEAVY = ("sqlalchemy.orm", "sqlmodel", "pydantic", "httpx", "alembic", "cryptography", "authlib")


def test_help_imports_nothing_heavy():
    program = (
        "import sys; from resilient.surface.cli import main; main(['--help']);"
        f"print([one for one in {HEAVY!r} if one in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_declaring_an_app_imports_no_migrations():
    """What only some need comes when it is needed: Alembic with the tables, tenacity with the first failure."""
    program = (
        "import sys; from resilient import Resilient, Job, handler; Resilient('sqlite:///app.db');"
        "print([one for one in ('alembic', 'mako', 'tenacity', 'aiosqlite', 'starlette') if one in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
