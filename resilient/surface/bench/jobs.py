"""``bench drain``, ``enqueue`` and ``pickup``: jobs that do nothing.

``drain``: no-op jobs claimed, run and finished, as fast as it goes. ``blocked`` puts that many older jobs of one
account in front, whose breaker is open: what other queues execute once each to learn it. ``useless_executions`` are
all executions beyond one per finished job.

``enqueue``: jobs into the database, many at once and one by one, each committed. One by one from a coroutine
(``single_...``) and from a synchronous program (``single_sync_...``). ``single_times_floor`` compares the coroutine
with a bare insert by a synchronous driver, which is quicker than any asynchronous one; ``single_times_floor_async``
with a bare insert by the asynchronous driver (PostgreSQL).

``pickup``: how long an idle worker in another process takes to start a job. Counted from the return of `enqueue` (the
commit is acknowledged) to the first line of the handler, and, as ``from_call``, from the beginning of that call.
``new_account`` are the first jobs, each of an account that nobody has used before, for a worker that has done nothing
yet: rows are made for them, and statements are planned. The others are of the same accounts. Before the first job the
worker is left alone for a while: ``idle_cpu_percent`` of a core.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from resilient import Item
from resilient.engine.ground.counts import OTHER, Counts
from resilient.surface.bench.crew import (
    DOWN,
    ROOT,
    BenchFailed,
    Load,
    Server,
    account,
    build,
    down,
    milliseconds,
    noop,
    own_cpu,
    percentile,
    rate,
    run_crew,
    run_measured,
    stamp,
    warm,
    work,
)
from resilient.surface.bench.floor import drain_floor, enqueue_floor, pickup_floor
from resilient.surface.loop import run
from resilient.surface.scratch import scratch

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from resilient import Resilient
    from resilient.store.db.dialect import Dialect
    from resilient.surface.bench.crew import Start
    from resilient.surface.scratch import Scratch


_CHUNK: Final = 10_000
_TRACED: Final = 100  # jobs enqueued within one span: each such span is sampled for itself
_PROBE_IN: Final = timedelta(seconds=2)  # the probe of the open circuit comes due while the workers run


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
            figures = _drained(app, Load(place, jobs, concurrency, limits), workers)
        finally:
            app.database.close_sync()
    if with_floor:
        floors.append(_floor(url, jobs, resources, workers))  # before and after: machines change their pace
        figures["floor_per_second"] = round(sum(floors) / 2, 1)
        figures["share_of_floor"] = round(figures["jobs_per_second"] * 2 / sum(floors), 3)
    return figures


_COUNTED: Final = 100_000


def overhead(
    url: str | None, *, jobs: int, resources: int, concurrency: int, rounds: int, sampled: float
) -> dict[str, Any]:
    """`drain` with what can be watched and without, by turns, each round in the other order; the best of each.

    ``metrics``: metrics and probes that are asked every second, and a JSON log. ``all_on``: traces of a share
    ``sampled`` of the jobs, too; ``every_trace``: of all. What the counting alone costs is always paid, so it is
    measured apart and taken out of ``without``. All are filled alike: in how many transactions jobs came decides how
    they lie in the table, and so how fast they drain.
    """
    shares = {"without": 0.0, "metrics": 0.0, "all_on": sampled, "every_trace": 1.0}
    rates: dict[str, list[float]] = {name: [] for name in shares}
    cpu: dict[str, list[float]] = {name: [] for name in shares}  # seconds: steadier on a machine with other work
    for n in range(rounds):
        for name, share in list(shares.items())[:: -1 if n % 2 else 1]:
            with scratch(url, "bench") as place:
                app = build(place, sampled=share)
                try:
                    fill(app, place, jobs=jobs, resources=resources, blocked=0, chunk=_TRACED)
                    load = Load(place, jobs, concurrency, scraped=name != "without", sampled=share)
                    row = _drained(app, load, 1)
                finally:
                    app.database.close_sync()
            rates[name].append(row["jobs_per_second"])
            cpu[name].append(row["worker_cpu_seconds"])
    counting = _counting()
    without, least = 1 / (1 / max(rates.pop("without")) - counting), min(cpu.pop("without")) - counting * jobs
    figures = {
        "jobs_per_second_without": round(without, 1),
        "cpu_microseconds_a_job_without": round(least * 1e6 / jobs, 1),
    }
    for name, many in rates.items():
        figures[f"jobs_per_second_with_{name}"] = max(many)
        figures[f"share_with_{name}"] = round(max(many) / without, 3)
        figures[f"share_by_cpu_with_{name}"] = round(least / min(cpu[name]), 3)
        figures[f"cpu_microseconds_a_job_more_with_{name}"] = round((min(cpu[name]) - least) * 1e6 / jobs, 1)
    return {**figures, "sampled": sampled, "counting_nanoseconds_a_job": round(counting * 1e9)}


def _counting() -> float:
    """CPU seconds that a process counts for each job: what the pipeline and the worker do when one has ended."""
    counts, kind, key, now = Counts([noop.kind], [ROOT]), noop.kind, account(1, 2), datetime.now(UTC)
    began = time.process_time()
    for _ in range(_COUNTED):
        by_provider, root = counts.successes[kind], key.partition("/")[0]
        by_provider[root if root in by_provider else OTHER] += 1
        counts.durations[kind].observe(0.001)
        counts.waits[kind].observe(max(0.0, (now - now).total_seconds() + time.monotonic() - 0.001))
    return (time.process_time() - began) / _COUNTED


def fill(app: Resilient, place: Scratch, *, jobs: int, resources: int, blocked: int, chunk: int = _CHUNK) -> None:
    """Enqueue the blocked jobs, then the others, ``chunk`` at a time; then settle it as the floor does (PostgreSQL)."""
    app.ready_sync()
    for first in range(0, blocked, _CHUNK):
        app.enqueue_many_sync(down, range(first, min(blocked, first + _CHUNK)), resource_key=DOWN)
    if blocked:
        app.sync.resources.open(DOWN, until=app.now() + _PROBE_IN)
    _fill_ready(app, jobs, resources, chunk)
    if not app.database.is_sqlite:
        from resilient.surface.bench.floor_postgresql import connect, settle  # noqa: PLC0415 - the driver may be missing

        with connect(place) as c:
            settle(c, "resilient_job", "resilient_turn")


def _fill_ready(app: Resilient, jobs: int, resources: int, chunk: int) -> None:
    for first in range(0, jobs, chunk):
        numbers = range(first, min(jobs, first + chunk))
        app.enqueue_many_sync(noop, [Item(n, resource_key=account(n, resources)) for n in numbers])


def _drained(app: Resilient, load: Load, workers: int) -> dict[str, Any]:
    done = multiprocessing.get_context("spawn").Array("q", workers, lock=False)
    server = Server(load.place)
    crew, cpu = run_measured(server, work, workers, done, load)
    useless = useless_executions(app, load.jobs)
    return {
        "jobs_per_second": rate(load.jobs, crew.seconds),
        "seconds": round(crew.seconds, 3),
        "cpu_seconds": cpu,
        "worker_cpu_seconds": round(crew.cpu, 3),
        "worker_memory_mb": crew.memory,
        "useless_executions": useless,
    }


def useless_executions(app: Resilient, jobs: int) -> int:
    """How many executions brought no job to its end. Raises `BenchFailed` unless so many jobs succeeded."""
    succeeded, executions = app.database.transaction_sync(_counts)
    if succeeded < jobs:
        raise BenchFailed(f"{succeeded} of {jobs} jobs succeeded")
    return executions - succeeded


def _counts(c: Connection, d: Dialect) -> tuple[int, int]:
    """Succeeded jobs, and executions of all jobs, without those that warmed up."""
    row = d.run(
        c,
        "SELECT sum(CASE WHEN state = 'succeeded' THEN 1 ELSE 0 END), sum(executions) FROM {job} WHERE kind <> :warm",
        {"warm": warm.kind},
    ).one()
    return int(row[0] or 0), int(row[1] or 0)


def _floor(url: str | None, jobs: int, resources: int, workers: int) -> float:
    with scratch(url, "bench") as place:
        return drain_floor(place, jobs=jobs, resources=resources, workers=workers).per_second


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
    figures: dict[str, Any] = milliseconds(after[_ACCOUNTS:])
    figures |= milliseconds(called[_ACCOUNTS:], "from_call_")
    figures |= milliseconds(after[:_ACCOUNTS], "new_account_")
    figures |= {"cpu_seconds": cpu, "idle_cpu_percent": answer["idle"], "worker_memory_mb": crew.memory}
    figures["useless_executions"] = answer["executions"] - total
    if with_floor:
        with scratch(url, "bench") as place:
            bare = pickup_floor(place, jobs=jobs)
        figures |= milliseconds(bare, "floor_")
        figures["share_of_floor"] = round(percentile(bare, 0.5) * 1000 / max(figures["p50_ms"], 1e-3), 3)
    return figures


def _feed(app: Resilient, jobs: int, times: list[tuple[float, float]]) -> None:
    """Enqueue one job at a time; notes when the call began and when it returned."""
    run(_feeding(app, jobs, times))


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
    return run(_picking_up(start, place, jobs, concurrency))


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


_SINGLES: Final = 1_000


def enqueue(url: str | None, *, jobs: int, resources: int, with_floor: bool) -> dict[str, Any]:
    """Enqueue ``jobs`` in calls of 10,000, then up to 1,000 one by one."""
    with scratch(url, "bench") as place:
        app = build(place)
        figures, single = run(_inserted(place, app, jobs, resources))
    with scratch(url, "bench") as place:
        blocking, cpu = _single_sync(build(place), min(jobs, _SINGLES), resources)
    figures |= milliseconds(blocking, "single_sync_") | {"single_sync_cpu_us": _each(cpu, blocking)}
    if with_floor:
        with scratch(url, "bench") as place:
            many, bare, bare_async, cpu = enqueue_floor(place, jobs=jobs, resources=resources)
        figures["single_floor_cpu_us"] = _each(cpu, bare_async or bare)
        figures["floor_per_second"] = round(many, 1)
        figures["share_of_floor"] = round(figures["jobs_per_second"] / many, 3)
        figures["single_floor_p50_ms"] = _p50(bare)
        figures["single_times_floor"] = round(_p50(single) / _p50(bare), 2)
        figures["single_sync_times_floor"] = round(_p50(blocking) / _p50(bare), 2)
        if bare_async:
            figures["single_floor_async_p50_ms"] = _p50(bare_async)
            figures["single_times_floor_async"] = round(_p50(single) / _p50(bare_async), 2)
    return figures


def _each(cpu: float, singles: list[float]) -> float:
    """Microseconds of CPU of the program for each, its threads included."""
    return round(cpu * 1e6 / len(singles), 1)


def _p50(seconds: list[float]) -> float:
    return round(percentile(seconds, 0.5) * 1000, 3)


async def _inserted(place: Scratch, app: Resilient, jobs: int, resources: int) -> tuple[dict[str, Any], list[float]]:
    server = Server(place)
    async with app:
        await app.enqueue(noop, 0, resource_key=account(0, resources))  # connections are open, statements known
        before, own = server.cpu(), own_cpu()
        seconds = await _many(app, jobs, resources)
        cpu = server.total(own_cpu() - own, before)
        own = own_cpu()
        single = await _single(app, min(jobs, _SINGLES), resources)
        single_cpu = own_cpu() - own
    figures: dict[str, Any] = {
        "jobs_per_second": rate(jobs, seconds),
        "cpu_seconds": cpu,
        "useless_executions": 0,
    }
    figures |= {"single_per_second": rate(len(single), sum(single)), **milliseconds(single, "single_")}
    figures["single_cpu_us"] = _each(single_cpu, single)
    return figures, single


async def _many(app: Resilient, jobs: int, resources: int) -> float:
    chunks = [range(first, min(jobs, first + _CHUNK)) for first in range(0, jobs, _CHUNK)]
    began = time.perf_counter()
    for chunk in chunks:
        await app.enqueue_many(noop, [Item(n, resource_key=account(n, resources)) for n in chunk])
    return time.perf_counter() - began


async def _single(app: Resilient, jobs: int, resources: int) -> list[float]:
    took = []
    for n in range(jobs):
        began = time.perf_counter()
        await app.enqueue(noop, n, resource_key=account(n, resources))
        took.append(time.perf_counter() - began)
    return took


def _single_sync(app: Resilient, jobs: int, resources: int) -> tuple[list[float], float]:
    """The seconds of each, and the CPU seconds of all."""
    took = []
    try:
        app.sync.enqueue(noop, 0, resource_key=account(0, resources))  # it opens the connection
        own = own_cpu()
        for n in range(jobs):
            began = time.perf_counter()
            app.sync.enqueue(noop, n, resource_key=account(n, resources))
            took.append(time.perf_counter() - began)
        return took, own_cpu() - own
    finally:
        app.sync.close()
        app.database.close_sync()
