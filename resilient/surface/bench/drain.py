"""``bench drain``: no-op jobs claimed, run and finished, as fast as it goes.

``blocked`` puts that many older jobs of one account in front, whose circuit is open: what peers execute
once each just to find out. ``useless_executions`` are all executions beyond one per finished job.
"""

from __future__ import annotations

import multiprocessing
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from resilient.surface.bench.app import DOWN, account, build, down, noop
from resilient.surface.bench.crew import BenchFailed, run_crew
from resilient.surface.bench.figures import rate
from resilient.surface.bench.floor import drain_floor
from resilient.surface.bench.server import Server
from resilient.surface.bench.work import Load, work
from resilient.surface.scratch import scratch

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from resilient import Resilient
    from resilient.store.dialect import Dialect
    from resilient.surface.scratch import Scratch

_CHUNK: Final = 10_000
_PROBE_IN: Final = timedelta(milliseconds=100)  # the open circuit's probe comes due during the run


def drain(
    url: str | None,
    *,
    jobs: int,
    resources: int,
    workers: int,
    concurrency: int,
    limits: bool,
    blocked: int,
    with_floor: bool,
) -> dict[str, Any]:
    """Drain ``jobs`` no-op jobs over ``resources`` accounts."""
    floors = [_floor(url, jobs, resources, workers)] if with_floor else []
    with scratch(url, "bench") as place:
        app = build(place, limits=limits)
        try:
            fill(app, place, jobs=jobs, resources=resources, blocked=blocked)
            found = _measured(app, Load(place, jobs, concurrency, limits), workers)
        finally:
            app.database.close_sync()
    if with_floor:
        floors.append(_floor(url, jobs, resources, workers))  # before and after: machines change their pace
        found["floor_per_second"] = round(sum(floors) / 2, 1)
        found["share_of_floor"] = round(found["jobs_per_second"] * 2 / sum(floors), 3)
    return found


def fill(app: Resilient, place: Scratch, *, jobs: int, resources: int, blocked: int) -> None:
    """Enqueue the blocked jobs, then the others; then settle it, as the floor does (PostgreSQL)."""
    app.ready_sync()
    for first in range(0, blocked, _CHUNK):
        app.enqueue_many_sync(down, range(first, min(blocked, first + _CHUNK)), resource_key=DOWN)
    if blocked:
        app.sync.resources.open(DOWN, until=app.now() + _PROBE_IN)
    _fill_ready(app, jobs, resources)
    if not app.database.is_sqlite:
        from resilient.surface.bench.floor_postgresql import connect, settle  # noqa: PLC0415 - the driver may be missing

        with connect(place) as c:
            settle(c, "resilient_job", "resilient_turn")


def _fill_ready(app: Resilient, jobs: int, resources: int) -> None:
    from resilient import Item  # noqa: PLC0415 - beside its use

    for first in range(0, jobs, _CHUNK):
        numbers = range(first, min(jobs, first + _CHUNK))
        app.enqueue_many_sync(noop, [Item(n, resource_key=account(n, resources)) for n in numbers])


def _measured(app: Resilient, load: Load, workers: int) -> dict[str, Any]:
    done = multiprocessing.get_context("spawn").Array("q", workers, lock=False)
    server = Server(load.place)
    before = server.cpu()
    crew = run_crew(work, workers, done, load, numbered=True)
    cpu = server.total(crew.cpu, before)
    succeeded, executions = app.database.transaction_sync(_counts)
    if succeeded < load.jobs:
        raise BenchFailed(f"{succeeded} of {load.jobs} jobs succeeded")
    return {
        "jobs_per_second": rate(load.jobs, crew.seconds),
        "seconds": round(crew.seconds, 3),
        "cpu_seconds": cpu,
        "worker_cpu_seconds": round(crew.cpu, 3),
        "worker_memory_mb": crew.memory,
        "useless_executions": executions - succeeded,
    }


def _counts(c: Connection, d: Dialect) -> tuple[int, int]:
    """Succeeded jobs, and executions of all jobs."""
    row = d.run(c, "SELECT sum(CASE WHEN state = 'succeeded' THEN 1 ELSE 0 END), sum(executions) FROM {job}").one()
    return int(row[0] or 0), int(row[1] or 0)


def _floor(url: str | None, jobs: int, resources: int, workers: int) -> float:
    with scratch(url, "bench") as place:
        return drain_floor(place, jobs=jobs, resources=resources, workers=workers).per_second
