"""``resilient bench ...``."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path  # noqa: TC003 - typer reads it
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from resilient.core.base.errors import ResilientError
from resilient.surface.bench.floor import floor as run_floor

if TYPE_CHECKING:
    from collections.abc import Callable

app = typer.Typer(
    help="Measure this machine: the engine, and the bare limit of the same database.", no_args_is_help=True
)
Database = Annotated[
    str | None, typer.Option(help="sqlite:///... or postgresql://...; default: a temporary SQLite file.")
]
Jobs = Annotated[int, typer.Option(min=1, help="How many jobs.")]
Resources = Annotated[int, typer.Option(min=1, help="Over how many accounts they are spread.")]
Workers = Annotated[int, typer.Option(min=1, max=64, help="Worker processes.")]
Concurrency = Annotated[int, typer.Option(min=1, help="Jobs at once in each worker.")]
Limits = Annotated[bool, typer.Option("--limits", help="Two rate limits on each account.")]
WithFloor = Annotated[bool, typer.Option("--with-floor", help="Also the bare limit, in the same run.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object.")]


@app.command()
def floor(
    database: Database = None,
    jobs: Jobs = 20_000,
    resources: Resources = 1_000,
    workers: Workers = 1,
    *,
    as_json: AsJson = False,
) -> None:
    """The bare limit of the database.

    A minimal loop that claims 100 and completes 100.
    """
    _run("floor", lambda: run_floor(database, jobs=jobs, resources=resources, workers=workers), as_json=as_json)


@app.command()
def drain(
    database: Database = None,
    jobs: Jobs = 20_000,
    resources: Resources = 1_000,
    workers: Workers = 1,
    concurrency: Concurrency = 100,
    blocked: Annotated[int, typer.Option(min=0, help="Older jobs of an account that is down, in front.")] = 0,
    *,
    limits: Limits = False,
    with_floor: WithFloor = False,
    as_json: AsJson = False,
) -> None:
    """Jobs that do nothing, claimed, run and finished."""
    from resilient.surface.bench.jobs import drain as run_drain  # noqa: PLC0415 - the engine: only where needed

    shape = {"jobs": jobs, "resources": resources, "workers": workers, "concurrency": concurrency}
    _run(
        "drain",
        lambda: shape | run_drain(database, **shape, limits=limits, blocked=blocked, with_floor=with_floor),
        as_json=as_json,
    )


@app.command()
def overhead(
    database: Database = None,
    jobs: Jobs = 50_000,
    resources: Resources = 1_000,
    concurrency: Concurrency = 100,
    rounds: Annotated[int, typer.Option(min=1, help="How often each.")] = 3,
    sampled: Annotated[float, typer.Option(min=0.001, max=1, help="The share of jobs that are traced.")] = 0.05,
    *,
    as_json: AsJson = False,
) -> None:
    """What metrics, probes, logs and traces cost a drain."""
    from resilient.surface.bench.jobs import overhead as run_overhead  # noqa: PLC0415 - as above

    shape = {"jobs": jobs, "resources": resources, "concurrency": concurrency}
    _run("overhead", lambda: shape | run_overhead(database, **shape, rounds=rounds, sampled=sampled), as_json=as_json)


@app.command()
def enqueue(
    database: Database = None,
    jobs: Jobs = 100_000,
    resources: Resources = 1_000,
    *,
    with_floor: WithFloor = False,
    as_json: AsJson = False,
) -> None:
    """Jobs into the database: 10,000 at a time, and one by one."""
    from resilient.surface.bench.jobs import enqueue as run_enqueue  # noqa: PLC0415 - as above

    _run(
        "enqueue",
        lambda: run_enqueue(database, jobs=jobs, resources=resources, with_floor=with_floor),
        as_json=as_json,
    )


@app.command()
def pickup(
    database: Database = None,
    jobs: Jobs = 200,
    concurrency: Concurrency = 100,
    *,
    with_floor: WithFloor = False,
    as_json: AsJson = False,
) -> None:
    """How soon an idle worker starts a job, and what idling costs."""
    from resilient.surface.bench.jobs import pickup as run_pickup  # noqa: PLC0415 - as above

    _run(
        "pickup",
        lambda: run_pickup(database, jobs=jobs, concurrency=concurrency, with_floor=with_floor),
        as_json=as_json,
    )


@app.command()
def http(
    database: Database = None,
    jobs: Jobs = 2_000,
    resources: Resources = 100,
    workers: Workers = 1,
    concurrency: Concurrency = 100,
    *,
    limits: Limits = False,
    alone: Annotated[bool, typer.Option("--alone", help="Without the bare loop.")] = False,
    as_json: AsJson = False,
) -> None:
    """Jobs of one 50 ms request, beside a bare loop over httpx."""
    from resilient.surface.bench.http import http as run_http  # noqa: PLC0415 - as above

    shape = {"jobs": jobs, "resources": resources, "workers": workers, "concurrency": concurrency}
    _run("http", lambda: shape | run_http(database, **shape, limits=limits, bare=not alone), as_json=as_json)


@app.command()
def throttle(
    database: Database = None,
    provider: Annotated[str, typer.Option(help="Which kind of provider, a list with commas, or all.")] = "sliding",
    scale: Annotated[float, typer.Option(min=0.1, help="Makes every window and the run shorter by this.")] = 1.0,
    *,
    alone: Annotated[bool, typer.Option("--alone", help="Without tenacity and the adaptive limiter.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Also a plot of each second, into this file.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="All as one table.")] = False,
    as_json: AsJson = False,
) -> None:
    """Two workers against a limit that nobody declared.

    What is refused and accepted, as the provider counts it; beside tenacity, and a limiter in each process.
    """
    from resilient.surface.bench.metered import METERS  # noqa: PLC0415 - as above
    from resilient.surface.bench.throttle import markdown as table  # noqa: PLC0415 - as above
    from resilient.surface.bench.throttle import throttle as run_throttle  # noqa: PLC0415 - as above

    names = list(METERS) if provider == "all" else provider.split(",")
    if unknown := set(names) - METERS.keys():
        raise typer.BadParameter(f"{min(unknown)!r} is none of {', '.join(METERS)}")
    rows = []
    for name in names:
        bench = partial(run_throttle, database, name, scale=scale, rivals=not alone, plot=svg)
        if markdown:
            rows.append(_measured("throttle", bench))
        else:
            _run("throttle", bench, as_json=as_json)
    if markdown:
        Console().print(table(rows), soft_wrap=True, markup=False, highlight=False)


@app.command(name="all")
def everything(
    database: Annotated[str, typer.Option(help="postgresql://...; SQLite's figures come from temporary files.")],
    scale: Annotated[float, typer.Option(min=0.001, help="Makes every bench smaller by this.")] = 1.0,
    rounds: Annotated[int, typer.Option(min=1, help="How often all of it is run.")] = 2,
    peers: Annotated[str, typer.Option(help="A command that measures other queues.", hidden=True)] = "",
) -> None:
    """Every figure beside its target, after some minutes.

    Prints a Markdown table.
    """
    from resilient.surface.bench.table import table  # noqa: PLC0415 - as above

    console = Console()
    try:
        for line in table(database, scale=scale, rounds=rounds, peers=peers):
            console.print(line, soft_wrap=True, markup=False, highlight=False)
    except ResilientError as error:
        Console(stderr=True).print(f"error: {error}", soft_wrap=True, markup=False, highlight=False)
        raise typer.Exit(2) from None


@app.command()
def growth(
    database: Annotated[str, typer.Option(help="postgresql://... of a server that nobody else uses.")],
    scale: Annotated[float, typer.Option(min=0.0001, help="Makes every number smaller by this.")] = 1.0,
    *,
    as_json: AsJson = False,
) -> None:
    """How cost grows with workers, accounts and old rows.

    Each cost is a ratio to that of the smallest.
    """
    from resilient.surface.bench.growth import growth as run_growth  # noqa: PLC0415 - as above

    _run("growth", lambda: run_growth(database, scale=scale), as_json=as_json)


def _measured(name: str, bench: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The figures; exit status 2 with a sentence for what could not be measured."""
    try:
        return {"bench": name, **bench()}
    except ResilientError as error:
        Console(stderr=True).print(f"error: {error}", soft_wrap=True, markup=False, highlight=False)
        raise typer.Exit(2) from None


def _run(name: str, bench: Callable[[], dict[str, Any]], *, as_json: bool) -> None:
    """Print the figures."""
    console, row = Console(), _measured(name, bench)
    if as_json:
        console.print(json.dumps(row), soft_wrap=True, markup=False, highlight=False)
        return
    width = max(map(len, row))
    for key, value in row.items():
        console.print(f"{key.replace('_', ' '):{width}}  {value:,}" if isinstance(value, (int, float)) else value)
