"""``resilient worker``: a worker in this process, or processes that each run one.

With --processes or --reload this process runs no jobs: it keeps others (`supervisor.py`), which are started with the
same line, --supervised, and a port of their own for metrics.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from resilient.core.base.errors import SetupError
from resilient.core.base.loggers import logger
from resilient.core.base.phrases import counted
from resilient.surface.cli import logs
from resilient.surface.loop import VARIABLE, LoopName
from resilient.surface.loop import run as start

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.engine.run.worker import Worker
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
Loop = Annotated[
    LoopName,
    typer.Option(envvar=VARIABLE, help="The event loop; auto: uvloop where it is installed."),
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
    loop: Loop = "auto",
    supervised: Supervised = None,
) -> None:
    """Run jobs until stopped.

    SIGTERM or Ctrl-C lets running jobs finish; a second one hands them back at once.
    """
    run: Context = ctx.obj
    logs.set_up(log, log_level, run.out.options)
    options = {
        "concurrency": concurrency, "kinds": kinds or None, "except_kinds": except_kinds or (),
        "resources": patterns or (), "lease": lease, "grace": grace,
    }  # fmt: skip
    ends = {"max_jobs": max_jobs, "max_memory": max_memory}
    with logs.last_words(log):
        if (processes is not None or reload) and supervised is None:
            line = _line(run, {**options, **ends, "loop": loop, "log": log, "log_level": log_level})
            raise typer.Exit(_supervise(line, processes or 1, reload=reload, metrics=metrics, health=health))
        if (shards := run.shards("a worker")) is not None:
            if any(ends.values()) or supervised is not None:
                raise SetupError(
                    "--processes, --reload, --max-jobs and --max-memory are one shard's: say"
                    f" which, --shard {next(iter(shards))}"
                )
            start(_work_all(shards, options, metrics=metrics, health=health), loop)
            return
        app = run.program("a worker")
        health = health if supervised is None else None  # the environment is the supervisor's, too
        start(_work(app, options, ends, metrics=metrics, health=health, supervised=supervised), loop)


async def _work_all(
    shards: Shards, options: dict[str, Any], *, metrics: str | None, health: str | None
) -> None:  # fmt: skip
    from resilient.engine.run.worker import exit_if_stuck  # noqa: PLC0415 - half a second of imports, only where needed
    from resilient.surface.probes import Probes  # noqa: PLC0415 - as above

    workers = shards.worker(**options)
    probes = Probes(shards, {name: (shards[name], worker) for name, worker in workers.workers.items()})
    try:
        probes.open(metrics=metrics, health=health)
        await workers.run()  # each waits for a database that is away
    finally:
        probes.close()
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
    from resilient.surface.cli.supervisor import Tether  # noqa: PLC0415 - as above
    from resilient.surface.cli.worker import stop_when_due  # noqa: PLC0415 - as above
    from resilient.surface.probes import Probes  # noqa: PLC0415 - as above

    worker = app.worker(**options)
    probes = Probes(app, {"": (app, worker)})
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


# -- a process that ends by itself ------------------------------------------------------------------------------------
#
# A worker process that ends by itself, drained, so that whoever started it starts a new one.
#
# What a handler's libraries leak is given back that way.

log = logger("worker")
LOOK: Final = 1.0  # seconds between two looks
_MEGABYTE: Final = 2**20
_KILOBYTE: Final = 2**10


def resident() -> int:
    """Bytes of memory that this process uses; where the system does not say, the most it ever used."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return _peak()
    return pages * os.sysconf("SC_PAGE_SIZE")


def _peak() -> int:
    try:
        import resource  # noqa: PLC0415 - not on Windows
    except ImportError:
        return 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(most) * (1 if sys.platform == "darwin" else _KILOBYTE)


async def stop_when_due(worker: Worker, *, max_jobs: int | None, max_memory: int | None) -> None:
    """Stop the worker once it has ended so many executions, or its process uses so many megabytes."""
    while True:
        used = resident() // _MEGABYTE
        if max_jobs is not None and worker.ended >= max_jobs:
            reason = f"it has ended {counted(worker.ended, 'execution')} (--max-jobs {max_jobs})"
        elif max_memory is not None and used > max_memory:
            reason = f"it uses {used} MB of memory (--max-memory {max_memory})"
        else:
            await asyncio.sleep(LOOK)
            continue
        log.info("worker %s stops for a new process: %s", worker.id, reason)
        worker.stop()
        return
