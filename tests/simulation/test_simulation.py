"""A thousand runs of the engine under virtual time, each with its own order of things and its own faults.

Each broken engine is found within the first 187 (docs/faults.md), and a run takes a fifth of a second of CPU; `make
proof` runs a hundred thousand.
`RESILIENT_SIMULATE=FROM:TO` takes other seeds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KEPT = Path(__file__).parent / "kept"
USUAL = "0:1000"
SEEDS = os.environ.get("RESILIENT_SIMULATE", USUAL)
PARTS = 8
QUICK = ["turn not inserted", "failed job lets others pass"]


def started(*options):
    command = [sys.executable, "-W", "ignore", "-m", "tests.simulation.run", *options]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def ended(process):
    """Its summary, and everything it printed."""
    text, _ = process.communicate()
    lines = [line for line in text.splitlines() if line.startswith('{"seeds"')]
    assert lines, text
    return json.loads(lines[-1]), text


@pytest.mark.parametrize("part", range(PARTS))
def test_whatever_happens_in_these_runs_nothing_is_lost_doubled_or_left(part):
    """In parts, so that a slow machine needs longer for each, but not too long."""
    begin, end = (int(n) for n in SEEDS.split(":"))
    first, middle, last = (begin + (end - begin) * n // (2 * PARTS) for n in (2 * part, 2 * part + 1, 2 * part + 2))
    halves = [started("--seeds", f"{a}:{b}") for a, b in ((first, middle), (middle, last))]
    results = [ended(half) for half in halves]
    for summary, text in results:
        assert summary["failed"] == [], text
        assert summary["fewest_jobs"] >= 30
        assert summary["fewest_faults"] >= 3


def test_what_failed_once_holds():
    """What was found, as small as it could be made: `run.py --keep NAME`."""
    summary, text = ended(started("--kept", "--shrink", "0"))
    assert (summary["failed"], summary["seeds"]) == ([], len(list(KEPT.glob("*.json")))), text
    assert summary["seeds"]


def test_a_seed_is_the_same_run_every_time():
    first, second = (ended(started("--seeds", "0:8", "--digests"))[1] for _ in range(2))
    assert [line for line in first.splitlines() if line[0].isdigit()] == [
        line for line in second.splitlines() if line[0].isdigit()
    ]
    assert len({line.split()[1] for line in first.splitlines() if line[0].isdigit()}) == 8


@pytest.mark.parametrize("mutant", QUICK)
def test_a_broken_engine_is_found(mutant):
    """Each of `MUTANTS` is, by ``python -m tests.simulation.table``; these within a few runs."""
    summary, text = ended(started("--seeds", "0:200", "--mutant", mutant, "--first", "--shrink", "0"))
    assert summary["failed"], text
