"""``resilient worker``: a worker in this process, or processes that each run one.

With --processes or --reload this process runs no jobs: it keeps others (`supervisor.py`), which are started with the
same line, --supervised, and a port of their own for metrics.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from resilient.core.base.errors import SetupError
from resilient.surface.cli import logs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.surface.cli.context import Context
    from resilient.surface.shards import Shards

Concurrency = Annotated[
    int, typer.Option("--concurrency", "-c", envvar="RESILIENT_CONCURRENCY", min=1, help="Jobs at once.")
]
Kinds = Annotated[list[str] | None, typer.Option("--kind", "-k", help="Only this kind; may be repeated.")]
ExceptKinds = Annotated[list[str] | None, typer.Option("--except-kind", help="Every kind but this; may be repeated.")]
Patterns = Annotated[
    list[str] | None,
    typer.Option(
        "--resource",
        envvar="RESILIENT_RESOURCE",
        help="Only this key, or what fits this pattern ('github/*'), with all below it; may be repeated.",
        show_default=False,
    ),
]
Lease = Annotated[
    float,
    typer.Option(envvar="RESILIENT_LEASE", min=1, help="Seconds until a vanished worker's jobs run elsewhere."),
]
Grace = Annotated[
    float, typer.Option(envvar="RESILIENT_GRACE", min=0, help="Seconds running jobs get when it is stopped.")
]
Processes = Annotated[
    int | None,
    typer.Option(
        envvar="RESILIENT_PROCESSES",
        min=1,
        help="So many processes, each started anew when it ends.",
        show_default=False,
    ),
]
Reload = Annotated[bool, typer.Option("--reload", help="Drain and start anew when a Python file below here changes.")]
LogLevel = Annotated[str, typer.Option(envvar="RESILIENT_LOG_LEVEL", help="debug, info, warning or error.")]
Metrics = Annotated[
    str | None,
    typer.Option(
        envvar="RESILIENT_METRICS",
        help="Serve /metrics to Prometheus: 9100 (this machine alone), :9100, HOST:9100.",
    ),
]
Health = Annotated[
    str | None, typer.Option(envvar="RESILIENT_HEALTH", help="Serve /livez and /readyz there; the same shapes.")
]
MaxJobs = Annotated[
    int | None,
    typer.Option(
        envvar="RESILIENT_MAX_JOBS",
        min=1,
        help="End after so many executions, to be started anew.",
        show_default=False,
    ),
]
MaxMemory = Annotated[
    int | None,
    typer.Option(envvar="RESILIENT_MAX_MEMORY", min=1, help="End at so many megabytes of memory.", show_default=False),
]
Supervised = Annotated[int | None, typer.Option(hidden=True)]
_REPEATED = {"kinds": "--kind", "except_kinds": "--except-kind", "resources": "--resource"}


def worker(
    ctx: typer.Context,
    *,
    concurrency: Concurrency = 50,
    kinds: Kinds = None,
    except_kinds: ExceptKinds = None,
    patterns: Patterns = None,
    lease: Lease = 60,
    grace: Grace = 30,
    processes: Processes = None,
    reload: Reload = False,
    log: logs.LogShape = "text",
    log_level: LogLevel = "info",
    metrics: Metrics = None,
    health: Health = None,
    max_jobs: MaxJobs = None,
    max_memory: MaxMemory = None,
    supervised: Supervised = None,
) -> None:
    """Run jobs until stopped.

    SIGTERM or Ctrl-C lets running jobs finish; a second one hands them back at once.
    """
    run: Context = ctx.obj
    logs.set_up(log, log_level)
    options = {
        "concurrency": concurrency, "kinds": kinds or None, "except_kinds": except_kinds or (),
        "resources": patterns or (), "lease": lease, "grace": grace,
    }  # fmt: skip
    ends = {"max_jobs": max_jobs, "max_memory": max_memory}
    with logs.last_words(log):
        if (processes is not None or reload) and supervised is None:
            line = _line(run, {**options, **ends, "log": log, "log_level": log_level})
            raise typer.Exit(_supervise(line, processes or 1, reload=reload, metrics=metrics, health=health))
        if (shards := run.shards("a worker")) is not None:
            if health or metrics or any(ends.values()) or supervised is not None:
                raise SetupError(
                    "--processes, --reload, --metrics, --health, --max-jobs and --max-memory are one shard's: say"
                    f" which, --shard {next(iter(shards))}"
                )
            asyncio.run(_work_all(shards, options))
            return
        app = run.program("a worker")
        health = health if supervised is None else None  # the environment is the supervisor's, too
        asyncio.run(_work(app, options, ends, metrics=metrics, health=health, supervised=supervised))


async def _work_all(shards: Shards, options: dict[str, Any]) -> None:
    from resilient.engine.run.worker import exit_if_stuck  # noqa: PLC0415 - half a second of imports, only where needed

    workers = shards.worker(**options)
    try:
        await workers.run()  # each waits for a database that is away
    finally:
        await shards.close()
    for worker in workers.workers.values():
        exit_if_stuck(worker)


async def _work(
    app: Any,
    options: dict[str, Any],
    ends: dict[str, int | None],
    *,
    metrics: str | None,
    health: str | None,
    supervised: int | None,
) -> None:
    from resilient.engine.run.worker import exit_if_stuck  # noqa: PLC0415 - half a second of imports, only where needed
    from resilient.surface.cli.recycling import stop_when_due  # noqa: PLC0415 - as above
    from resilient.surface.cli.supervisor import Tether  # noqa: PLC0415 - as above
    from resilient.surface.probes import Probes  # noqa: PLC0415 - as above

    worker = app.worker(**options)
    probes = Probes(app, worker)
    tether = None if supervised is None else Tether(supervised, worker, probes)
    watch = asyncio.create_task(stop_when_due(worker, **ends)) if any(ends.values()) else None
    try:
        probes.open(metrics=metrics, health=health)
        await worker.run()  # it waits for a database that is away
    finally:
        if watch is not None:
            watch.cancel()
        if tether is not None:
            tether.close()
        probes.close()
        await app.close()
    exit_if_stuck(worker)


def _supervise(line: list[str], processes: int, *, reload: bool, metrics: str | None, health: str | None) -> int:
    from resilient.surface.cli.supervisor import Supervisor, endpoints  # noqa: PLC0415 - only where needed

    places = endpoints(processes, metrics, health)

    def command(number: int, supervised: int) -> list[str]:
        return [*line, *places[number], "--supervised", str(supervised)]

    return asyncio.run(Supervisor(command, processes, reload=reload).run(health=health))


def _line(run: Context, options: Mapping[str, Any]) -> list[str]:
    """The command of one process, without what differs between them."""
    words = [sys.executable, "-m", "resilient.surface.cli", "--app", run.program_name("a worker")]
    words += ["--debug"] if run.debug else []
    words += [] if run.shard is None else ["--shard", run.shard]
    words.append("worker")
    for name, value in options.items():
        option = _REPEATED.get(name, "--" + name.replace("_", "-"))
        values = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
        for one in values:
            words += [option, str(one)]
    return words
