"""Every example runs, offline, as a user would run it."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SAYS = {"push_contacts.py": "59 pushed, 1 refused by the API; it said 'slow down' "}


def test_every_example_is_run_here():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SAYS)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SAYS))
def test_example(name):
    ran = subprocess.run([sys.executable, EXAMPLES / name], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    assert SAYS[name] in ran.stdout
