"""Every provider keeps its contract, over its own table of answers (`dialects/`)."""

import runpy
from pathlib import Path

import pytest

from resilient import providers_by_name
from resilient.testing.contract import problems

TABLES = Path(__file__).with_name("dialects")
OURS = sorted(path.stem for path in (Path(__file__).parents[2] / "providers").glob("[a-z]*.py"))


@pytest.mark.parametrize("name", OURS)
def test_contract(name):
    dialect = runpy.run_path(str(TABLES / f"{name}.py"))["DIALECT"]
    assert problems(providers_by_name()[name](), dialect) == []
