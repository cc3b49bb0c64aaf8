"""``bench all``: the README's figures, each beside its target and the bare limit of the same run.

All benches are run one after the other, several rounds of them: where two columns differ, the machine has changed its
pace. What counts is the share of the floor, which each bench measures itself.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from resilient.surface.bench.crew import BenchFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table. ``bench``: its command, without the database; ``target``: what is wanted, in words."""

    what: str
    bench: str
    text: Callable[[Figures], str]
    target: str = ""
    is_met: Callable[[Figures], bool] | None = None
    sqlite: bool = False


def _drain_text(f: Figures) -> str:
    return f"{f['jobs_per_second']:,.0f}/s: {f['share_of_floor']:.2f} of {f['floor_per_second']:,.0f}"


def _blocked_text(f: Figures) -> str:
    return f"{100 * (1 - f['share_of_free']):.1f} % slower, {f['useless_executions']:.0f} useless"


def _single_text(f: Figures, which: str) -> str:
    return f"{f[which + 'p50_ms']:.2f} ms, {f[which + 'cpu_us']:.0f} us CPU (bare {f['single_floor_cpu_us']:.0f})"


def _pickup_text(f: Figures) -> str:
    return f"{f['p50_ms']:.1f} / {f['p99_ms']:.1f} ms (bare {f['floor_p50_ms']:.1f} / {f['floor_p99_ms']:.1f})"


def _request_text(f: Figures) -> str:
    cost, bare = f["cpu_ms_a_request"], f["bare_cpu_ms_a_request"]
    return f"{f['jobs_per_second']:,.0f}/s: {f['share_of_bare']:.2f} of bare; {cost:.2f} ms CPU (bare {bare:.2f})"


def _at_least(name: str, least: float) -> Callable[[Figures], bool]:
    return lambda f: f[name] >= least


def _at_most(name: str, most: float) -> Callable[[Figures], bool]:
    return lambda f: f[name] <= most


_DRAIN: Final = "drain --jobs {jobs} --limits --with-floor"
_SHARE: Final = _at_least("share_of_floor", 0.35)
_ENQUEUE: Final = "enqueue --jobs {many} --with-floor"
_PICKUP: Final = "pickup --jobs 200 --with-floor"
LINES: Final = (
    Line("drain, one worker of 100 slots", _DRAIN, _drain_text, "0.35 of the floor", _SHARE),
    Line("drain, 200 slots", f"{_DRAIN} --concurrency 200", _drain_text, "0.35 of the floor", _SHARE),
    Line("drain, 500 slots", f"{_DRAIN} --concurrency 500", _drain_text, "0.35 of the floor", _SHARE),
    Line("drain, two workers of 200", f"{_DRAIN} --workers 2 --concurrency 200", _drain_text, "0.35 of the floor",
         _SHARE),
    Line(
        "drain behind 100,000 blocked", f"{_DRAIN} --blocked {{many}}", _blocked_text, "4 % slower, 1 useless",
        lambda f: f["share_of_free"] >= 0.96 and f["useless_executions"] <= 1,  # noqa: PLR2004 - what is asked
    ),
    Line("drain, SQLite", _DRAIN.replace(" --limits", ""), _drain_text, "20,000/s",
         _at_least("jobs_per_second", 20_000), sqlite=True),
    Line("enqueue, 10,000 a call", _ENQUEUE, _drain_text, "100,000/s", _at_least("jobs_per_second", 100_000)),
    Line("enqueue one, from a coroutine", _ENQUEUE, lambda f: _single_text(f, "single_"), "120 us",
         _at_most("single_cpu_us", 120)),
    Line("enqueue one, from a plain program", _ENQUEUE, lambda f: _single_text(f, "single_sync_"), "120 us",
         _at_most("single_sync_cpu_us", 120)),
    Line("pick-up by an idle worker, p50 / p99", _PICKUP, _pickup_text, "2.0 / 4.0 ms",
         lambda f: f["p50_ms"] <= 2 and f["p99_ms"] <= 4),  # noqa: PLR2004 - what is asked
    Line("pick-up, SQLite", _PICKUP, _pickup_text, sqlite=True),
    Line("an idle worker", _PICKUP, lambda f: f"{f['idle_cpu_percent']:.2f} % of a core", "1 %",
         _at_most("idle_cpu_percent", 1)),
    Line("50 ms requests, 100 at once", "http --jobs {requests}", _request_text, "0.95 of bare, 0.4 ms",
         lambda f: f["share_of_bare"] >= 0.95 and f["cpu_ms_a_request"] <= 0.4),  # noqa: PLR2004 - what is asked
)  # fmt: skip


def table(url: str, *, scale: float, rounds: int, peers: str = "") -> Iterator[str]:
    """The lines of a Markdown table, after all rounds. Raises `BenchFailed`.

    ``scale`` is a factor for the numbers of jobs. ``peers``: a command that prints the rates of other queues, a JSON
    object a line (`tests/benchmarks/peers.py`).
    """
    sizes = {"jobs": round(20_000 * scale), "many": round(100_000 * scale), "requests": round(4_000 * scale)}
    measured: list[dict[tuple[str, bool], Figures]] = []
    peer_rates: list[list[Figures]] = []
    for _ in range(rounds):
        figures: dict[tuple[str, bool], Figures] = {}
        for line in LINES:
            key = (line.bench, line.sqlite)
            if key not in figures:
                figures[key] = _measure(line.bench.format(**sizes), None if line.sqlite else url)
        measured.append(figures)
        if peers:
            peer_rates.append(_run_peers([*peers.split(), url, str(scale)]))
    columns = [f"run {n + 1}" for n in range(rounds)]
    yield f"| | {' | '.join(columns)} | wanted | |"
    yield "|---" * (rounds + 3) + "|"
    for line in LINES:
        runs = [figures[line.bench, line.sqlite] for figures in measured]
        yield f"| {line.what} | {' | '.join(map(line.text, runs))} | {line.target} | {verdict(line, runs)} |"
    for rows in zip(*peer_rates, strict=True):
        rates = " | ".join(f"{row['per_second']:,.0f}/s" for row in rows)
        yield f"| {rows[0]['peer']}: {rows[0]['what']} | {rates} | | |"


def verdict(line: Line, runs: Sequence[Figures]) -> str:
    """Whether a line's target was met: in all runs, in some or in none."""
    if line.is_met is None:
        return ""
    good = sum(map(line.is_met, runs))
    return "met" if good == len(runs) else f"met {good} of {len(runs)} times" if good else "**missed**"


def _measure(bench: str, url: str | None) -> Figures:
    """The figures of one bench; one with blocked jobs runs between two without, because machines change their pace."""
    if " --blocked " not in bench:
        return _run(bench, url)
    free = bench.partition(" --blocked ")[0]
    rates = [_run(free, url)["jobs_per_second"]]
    figures = _run(bench, url)
    rates.append(_run(free, url)["jobs_per_second"])
    return figures | {"share_of_free": figures["jobs_per_second"] * 2 / sum(rates)}


def _run(bench: str, url: str | None) -> Figures:
    where = [] if url is None else ["--database", url]
    command = [sys.executable, "-m", "resilient.surface.cli", "bench", *bench.split(), *where, "--json"]
    figures: Figures = json.loads(_output_of(command, f"bench {bench}"))
    return figures


def _run_peers(command: Sequence[str]) -> list[Figures]:
    return [json.loads(line) for line in _output_of(command, command[0]).splitlines()]


def _output_of(command: Sequence[str], name: str) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)  # noqa: S603 - the caller's own
    if done.returncode:
        raise BenchFailed(f"{name} ended with status {done.returncode}; its own output above says why")
    return done.stdout
