"""``bench pickup``: how long an idle worker in another process takes to start a job.

Counted from the return of `enqueue` (the commit is known) to the first line of the handler, and, as
``from_call``, from the beginning of that call. ``new_account`` are the first jobs, each of an account that nobody has
used before, for a worker that has done nothing yet: rows are made for them, and statements are planned. The others are
of the same accounts. Before the first job the worker is left alone for a while: ``idle_cpu_percent`` of a core.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final

from resilient.surface.bench.app import ROOT, build, stamp
from resilient.surface.bench.cpu import own_cpu
from resilient.surface.bench.crew import BenchFailed, run_crew
from resilient.surface.bench.figures import milliseconds, percentile
from resilient.surface.bench.floor import pickup_floor
from resilient.surface.bench.server import Server
from resilient.surface.scratch import scratch

if TYPE_CHECKING:
    from resilient import Resilient
    from resilient.surface.bench.crew import Start
    from resilient.surface.scratch import Scratch

_ACCOUNTS: Final = 10
_GAP: Final = 0.02  # seconds between two jobs: the worker is idle again
_PATIENCE: Final = 10.0
_SETTLE: Final = 1.0  # seconds after its start in which a worker may be busy with itself
_IDLE: Final = 3.0  # seconds in which its CPU is measured


def pickup(url: str | None, *, jobs: int, concurrency: int, with_floor: bool) -> dict[str, Any]:
    """Enqueue ``jobs`` one by one for an idle worker."""
    with scratch(url, "bench") as place:
        app = build(place)
        times: list[tuple[float, float]] = []
        try:
            app.ready_sync()
            server = Server(place)
            before = server.cpu()
            total = _ACCOUNTS + jobs
            crew = run_crew(_pick_up, 1, place, total, concurrency, meanwhile=lambda: _feed(app, total, times))
            cpu = server.total(crew.cpu, before)
        finally:
            app.database.close_sync()
    (answer,) = crew.answers
    started: dict[int, float] = answer["started"]
    if len(started) != total:
        raise BenchFailed(f"{len(started)} of {total} jobs started")
    after = [max(0.0, started[n] - returned) for n, (_, returned) in enumerate(times)]
    called = [started[n] - began for n, (began, _) in enumerate(times)]
    found: dict[str, Any] = milliseconds(after[_ACCOUNTS:])
    found |= milliseconds(called[_ACCOUNTS:], "from_call_")
    found |= milliseconds(after[:_ACCOUNTS], "new_account_")
    found |= {"cpu_seconds": cpu, "idle_cpu_percent": answer["idle"], "worker_memory_mb": crew.memory}
    found["useless_executions"] = answer["executions"] - total
    if with_floor:
        with scratch(url, "bench") as place:
            bare = pickup_floor(place, jobs=jobs)
        found |= milliseconds(bare, "floor_")
        found["share_of_floor"] = round(percentile(bare, 0.5) * 1000 / max(found["p50_ms"], 1e-3), 3)
    return found


def _feed(app: Resilient, jobs: int, times: list[tuple[float, float]]) -> None:
    """Enqueue one job at a time; notes when the call began and when it returned."""
    asyncio.run(_feeding(app, jobs, times))


async def _feeding(app: Resilient, jobs: int, times: list[tuple[float, float]]) -> None:
    await asyncio.sleep(_SETTLE + _IDLE + 0.5)
    async with app:
        for n in range(jobs):
            called = time.perf_counter()
            await app.enqueue(stamp, n, resource_key=f"{ROOT}/acct-{n % _ACCOUNTS}")
            times.append((called, time.perf_counter()))
            await asyncio.sleep(_GAP)


def _pick_up(start: Start, place: Scratch, jobs: int, concurrency: int) -> dict[str, Any]:
    """The worker process (a task of `run_crew`)."""
    return asyncio.run(_picking_up(start, place, jobs, concurrency))


async def _picking_up(start: Start, place: Scratch, jobs: int, concurrency: int) -> dict[str, Any]:
    started: dict[int, float] = {}
    async with build(place, deps=started) as app:
        worker = app.worker(concurrency=concurrency)
        start()
        running = asyncio.create_task(worker.run())
        await asyncio.sleep(_SETTLE)
        before = own_cpu()
        await asyncio.sleep(_IDLE)
        idle = round((own_cpu() - before) / _IDLE * 100, 2)
        deadline = time.perf_counter() + _PATIENCE + jobs * (_GAP + 0.2)
        while len(started) < jobs and time.perf_counter() < deadline:  # noqa: ASYNC110 - a count, no event
            await asyncio.sleep(0.1)
        worker.stop()
        await running
        return {"started": started, "idle": idle, "executions": worker.executions}
