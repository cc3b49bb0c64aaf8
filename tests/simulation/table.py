"""Each broken engine and the first seed that finds it: ``python -m tests.simulation.table``; 1 if one is missed."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.simulation.mutants import MUTANTS

SEEDS = 1_000


def first(mutant):
    """The first seed that fails, and what it says."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.simulation.run", "--seeds", f"0:{SEEDS}", "--first"]
    done = subprocess.run([*command, "--shrink", "0", "--mutant", mutant], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    failed = json.loads(lines[-1])["failed"]
    return (failed[0], lines[0].partition(": ")[2]) if failed else (None, "not found")


def main():
    missed = 0
    for mutant in MUTANTS:
        seed, line = first(mutant)
        missed += seed is None
        sys.stdout.write(f"{mutant:32} {'' if seed is None else seed:>5}  {line[:90]}\n")
        sys.stdout.flush()
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
