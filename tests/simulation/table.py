"""Each broken engine and what finds it: ``python -m tests.simulation.table``; 1 if one is missed.

The first seed of a thousand; the meetings of two transactions where PostgreSQL's row locks are needed for the fault;
or a test of the broken part.
NAMES take only those whose name holds one of these words.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.simulation.mutants import MUTANTS

SEEDS = 1_000
ROOT = Path(__file__).parents[2]
# A thousand seeds do not meet it: places come back too seldom while others wait.
BY_TESTS = {"places taken twice": "tests/core/test_rate_limit.py"}
BY_PAIRS = {"a statement that waits leaves rows out": "test_a_statement_that_leaves_rows_out_is_found"}


def first(mutant):
    """The first seed that fails, and what it says."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.simulation.run", "--seeds", f"0:{SEEDS}", "--first"]
    done = subprocess.run([*command, "--shrink", "0", "--mutant", mutant], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    failed = json.loads(lines[-1])["failed"]
    return (f"seed {failed[0]}", lines[0].partition(": ")[2]) if failed else (None, "not found")


def met(test):
    """Whether two transactions that meet show it."""
    command = [sys.executable, "-m", "pytest", "-q", f"tests/store/test_pairs.py::{test}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return ("pairs", "a workflow stands still") if done.returncode == 0 else (None, "not found")


def tested(mutant):
    """The test of the broken part that fails."""
    options = ["-q", "-x", "--tb=no", "-p", "no:cacheprovider", "-p", "tests.simulation.breaking"]
    command = [sys.executable, "-m", "pytest", *options, BY_TESTS[mutant]]
    environment = os.environ | {"RESILIENT_MUTANT": mutant}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    return ("a test", lines[0].rpartition("::")[2]) if done.returncode == 1 and lines else (None, "not found")


def main():
    words = sys.argv[1:]
    finders = [(name, tested if name in BY_TESTS else first, name) for name in MUTANTS] + [
        (name, met, test) for name, test in BY_PAIRS.items()
    ]
    missed = 0
    for name, find, what in finders:
        if not words or any(word in name for word in words):
            by, line = find(what)
            missed += by is None
            sys.stdout.write(f"{name:40} {by or '':>9}  {line[:90]}\n")
            sys.stdout.flush()
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
