"""``bench enqueue``: jobs into the database, many at once and one by one, each committed.

One by one from a coroutine (``single_...``) and from a synchronous program (``single_sync_...``).
``single_times_floor`` compares the coroutine with a bare insert by a synchronous driver, which is quicker than any
asynchronous one; ``single_times_floor_async`` with a bare insert by the asynchronous driver (PostgreSQL).
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final

from resilient import Item
from resilient.surface.bench.app import account, build, noop
from resilient.surface.bench.cpu import own_cpu
from resilient.surface.bench.figures import milliseconds, percentile, rate
from resilient.surface.bench.floor import enqueue_floor
from resilient.surface.bench.server import Server
from resilient.surface.scratch import scratch

if TYPE_CHECKING:
    from resilient import Resilient
    from resilient.surface.scratch import Scratch

_CHUNK: Final = 10_000
_SINGLES: Final = 1_000


def enqueue(url: str | None, *, jobs: int, resources: int, with_floor: bool) -> dict[str, Any]:
    """Enqueue ``jobs`` in calls of 10,000, then up to 1,000 one by one."""
    with scratch(url, "bench") as place:
        app = build(place)
        found, single = asyncio.run(_measured(place, app, jobs, resources))
    with scratch(url, "bench") as place:
        blocking = _single_sync(build(place), min(jobs, _SINGLES), resources)
    found |= milliseconds(blocking, "single_sync_")
    if with_floor:
        with scratch(url, "bench") as place:
            many, bare, bare_async = enqueue_floor(place, jobs=jobs, resources=resources)
        found["floor_per_second"] = round(many, 1)
        found["share_of_floor"] = round(found["jobs_per_second"] / many, 3)
        found["single_floor_p50_ms"] = _p50(bare)
        found["single_times_floor"] = round(_p50(single) / _p50(bare), 2)
        found["single_sync_times_floor"] = round(_p50(blocking) / _p50(bare), 2)
        if bare_async:
            found["single_floor_async_p50_ms"] = _p50(bare_async)
            found["single_times_floor_async"] = round(_p50(single) / _p50(bare_async), 2)
    return found


def _p50(seconds: list[float]) -> float:
    return round(percentile(seconds, 0.5) * 1000, 3)


async def _measured(place: Scratch, app: Resilient, jobs: int, resources: int) -> tuple[dict[str, Any], list[float]]:
    server = Server(place)
    async with app:
        await app.enqueue(noop, 0, resource_key=account(0, resources))  # connections are open, statements known
        before, own = server.cpu(), own_cpu()
        seconds = await _many(app, jobs, resources)
        cpu = server.total(own_cpu() - own, before)
        single = await _single(app, min(jobs, _SINGLES), resources)
    found: dict[str, Any] = {
        "jobs_per_second": rate(jobs, seconds),
        "cpu_seconds": cpu,
        "useless_executions": 0,
    }
    found |= {"single_per_second": rate(len(single), sum(single)), **milliseconds(single, "single_")}
    return found, single


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


def _single_sync(app: Resilient, jobs: int, resources: int) -> list[float]:
    took = []
    try:
        for n in range(jobs + 1):
            began = time.perf_counter()
            app.sync.enqueue(noop, n, resource_key=account(n, resources))
            took.append(time.perf_counter() - began)
    finally:
        app.sync.close()
        app.database.close_sync()
    return took[1:]  # the first one opened the connection
