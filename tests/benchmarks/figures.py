"""The README's figures from one run, each beside its target, as a Markdown table.

    python tests/benchmarks/figures.py postgresql://postgres@127.0.0.1/test [runs]

Medians of ``runs`` (default 3) runs of `resilient bench` on PostgreSQL and on SQLite. Every comparison is with the bare
limit measured in the same run. Takes some minutes on a quiet machine; on a busy one the figures mean nothing. The exit
status is 1 if a target is missed.
"""
# ruff: noqa: T201 - a script that prints

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Line:
    """One line of the table: what was measured, and whether it is good enough."""

    what: str
    bench: str  # the command line, without the database
    figure: Callable[[dict[str, Any]], str]
    target: str
    met: Callable[[dict[str, Any]], bool]
    sqlite: bool = False


def drained(f: dict[str, Any]) -> str:
    return f"{f['jobs_per_second']:,.0f}/s, {f['share_of_floor']:.2f} of bare {f['floor_per_second']:,.0f}/s"


def inserted(f: dict[str, Any]) -> str:
    return f"{f['jobs_per_second']:,.0f}/s, {f['share_of_floor']:.2f} of bare {f['floor_per_second']:,.0f}/s"


def single_sync(f: dict[str, Any]) -> str:
    times, bare = f["single_sync_times_floor"], f["single_floor_p50_ms"]
    return f"{f['single_sync_p50_ms']:.2f} ms, {times:.2f} times bare {bare:.2f} ms"


def single(f: dict[str, Any]) -> str:
    times, bare = f["single_times_floor_async"], f["single_floor_async_p50_ms"]
    return f"{f['single_p50_ms']:.2f} ms, {times:.2f} times bare {bare:.2f} ms (asynchronous driver)"


def woken(f: dict[str, Any]) -> str:
    bare, new = f"{f['floor_p50_ms']:.1f}, {f['floor_p99_ms']:.1f}", f"{f['new_account_p50_ms']:.1f}"
    return f"p50 {f['p50_ms']:.1f} ms, p99 {f['p99_ms']:.1f} ms (bare {bare}); the first of a new account p50 {new} ms"


def requested(f: dict[str, Any]) -> str:
    return f"{f['jobs_per_second']:,.0f}/s, {f['share_of_bare']:.2f} of bare {f['bare_per_second']:,.0f}/s"


def past(f: dict[str, Any]) -> str:
    slower = 100 * (1 - f["share_of_free"])
    word = f"{slower:.1f} % slower" if slower > 0 else "not slower"
    return f"{f['jobs_per_second']:,.0f}/s, {word}, {f['useless_executions']:.0f} useless"


DRAIN = "drain --jobs 20000 --resources 1000 --workers 1 --limits --with-floor"
ENQUEUE = "enqueue --jobs 100000 --with-floor"
PICKUP = "pickup --jobs 200 --with-floor"
PAST = "at most 5 % slower, at most 1 useless"


def held_up(f: dict[str, Any]) -> bool:
    """Blocked work in front costs next to nothing."""
    return f["useless_executions"] <= 1 and f["share_of_free"] >= 0.95


LINES = (
    Line("drain, gate and two limits", DRAIN, drained, "0.2 of bare", lambda f: f["share_of_floor"] >= 0.2),
    Line("drain, two workers", DRAIN.replace("workers 1", "workers 2"), drained, "", lambda _: True),
    Line("drain, 100,000 blocked in front", f"{DRAIN} --blocked 100000", past, PAST, held_up),
    Line("drain, 1,000,000 blocked in front", f"{DRAIN} --blocked 1000000", past, PAST, held_up),
    Line("drain", DRAIN, drained, "5,000/s", lambda f: f["jobs_per_second"] >= 5000, sqlite=True),
    Line("enqueue, 10,000 a call", ENQUEUE, inserted, "60,000/s", lambda f: f["jobs_per_second"] >= 60_000),
    Line(
        "enqueue, one by one", ENQUEUE, single_sync, "1.5 times bare", lambda f: f["single_sync_times_floor"] <= 1.5
    ),
    Line(
        "the same from a coroutine", ENQUEUE, single, "1.5 times bare", lambda f: f["single_times_floor_async"] <= 1.5
    ),
    Line("pick-up by an idle worker", PICKUP, woken, "3 / 8 ms", lambda f: f["p50_ms"] < 3 and f["p99_ms"] < 8),
    Line("pick-up", PICKUP, woken, "10 / 30 ms", lambda f: f["p50_ms"] < 10 and f["p99_ms"] < 30, sqlite=True),
    Line(
        "idle worker", PICKUP, lambda f: f"{f['idle_cpu_percent']:.2f} % of a core", "1 %",
        lambda f: f["idle_cpu_percent"] < 1,
    ),
    Line(
        "50 ms requests, 100 at once", "http --jobs 2000 --concurrency 100", requested, "0.85 of bare",
        lambda f: f["share_of_bare"] >= 0.85,
    ),
    Line(
        "memory, 1,000 jobs in flight", "http --jobs 4000 --concurrency 1000 --alone",
        lambda f: f"{f['worker_memory_mb']:.0f} MB", "250 MB", lambda f: f["worker_memory_mb"] < 250,
    ),
)  # fmt: skip


def main(database: str, runs: int = 3) -> int:
    """Measure and print; how many targets were missed."""
    measured: dict[tuple[str, bool], dict[str, Any]] = {}
    missed = 0
    print("| | PostgreSQL or SQLite | measured | target | |\n|---|---|---|---|---|")
    for line in LINES:
        key = (line.bench, line.sqlite)
        if key not in measured:
            measured[key] = median([run(line.bench, None if line.sqlite else database) for _ in range(runs)])
        found = measured[key]
        met = line.met(found)
        missed += not met
        verdict = "" if not line.target else "met" if met else "**missed**"
        where = "SQLite" if line.sqlite else "PostgreSQL"
        print(f"| {line.what} | {where} | {line.figure(found)} | {line.target} | {verdict} |", flush=True)
    return missed


def run(bench: str, database: str | None) -> dict[str, Any]:
    """One run of `resilient bench`; with blocked jobs between two without, because machines change their pace."""
    if " --blocked " in bench:
        free = [_run(DRAIN, database)["jobs_per_second"]]
        found = _run(bench, database)
        free.append(_run(DRAIN, database)["jobs_per_second"])
        return found | {"share_of_free": found["jobs_per_second"] * 2 / sum(free)}
    return _run(bench, database)


def _run(bench: str, database: str | None) -> dict[str, Any]:
    where = [] if database is None else ["--database", database]
    command = [sys.executable, "-m", "resilient.surface.cli", "bench", *bench.split(), *where, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def median(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of each figure."""
    return {
        name: statistics.median(r[name] for r in runs) if isinstance(value, int | float) else value
        for name, value in runs[0].items()
    }


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], *map(int, sys.argv[2:3])) > 0)
