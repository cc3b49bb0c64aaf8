"""Mutation of the core: ``python -m tests.mutation jobs``; 1 if fewer than 95 % of that room's mutants are killed.

Each mutant is one small change of one function; the tests of `tests/core` that reach the function must fail. mutmut
keeps its results in `mutants/`: a run that was cut off goes on, and only what changed is tried again. Functions in
`SAME` are left out, each with the reason.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("accounts", "alerts", "base", "events", "gates", "inspect", "jobs", "provider", "schedules", "sync")
WANTED = 0.95
# What a mutant of it changes is nobody's promise, or cannot be seen: function -> reason.
SAME: dict[str, str] = {}
# mutmut's exit codes of a mutant's tests: killed by a test that failed, by time, or by the end of its process.
KILLED, UNREACHED = {1, 3, 24, -24, -9, -11, 36, 152, 255}, {5, 33, None}


def results(room):
    """(function, exit code) of every mutant of a room."""
    for path in sorted((ROOT / "mutants" / "resilient" / "core" / room).rglob("*.meta")):
        for mutant, code in json.loads(path.read_text())["exit_code_by_key"].items():
            yield mutant.rpartition("__mutmut_")[0], code


def main():
    (room,) = sys.argv[1:]
    command = [Path(sys.executable).with_name("mutmut"), "run", f"resilient.core.{room}.*"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    counts, alive = Counter(), Counter()
    for function, code in results(room):
        if function not in SAME:
            kind = "killed" if code in KILLED else "unreached" if code in UNREACHED else "survived"
            counts[kind] += 1
            alive[function] += kind != "killed"
    for function, count in alive.most_common():
        if count:
            sys.stdout.write(f"{count:4} {function}\n")
    if not counts:
        sys.exit(done.stdout[-2_000:] + done.stderr[-2_000:])
    share = counts["killed"] / counts.total()
    sys.stdout.write(
        f"{share:.1%} of {counts.total()} killed, {counts['survived']} survived, {counts['unreached']} unreached\n"
    )
    sys.exit(share < WANTED)


if __name__ == "__main__":
    main()
