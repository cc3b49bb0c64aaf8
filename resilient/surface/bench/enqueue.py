"""``bench enqueue``: jobs into the database, many at once and one by one, each committed."""

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
        found, single = asyncio.run(_measured(place, jobs, resources))
    if with_floor:
        with scratch(url, "bench") as place:
            many, bare = enqueue_floor(place, jobs=jobs, resources=resources)
        found["floor_per_second"] = round(many, 1)
        found["share_of_floor"] = round(found["jobs_per_second"] / many, 3)
        found["single_floor_p50_ms"] = round(percentile(bare, 0.5) * 1000, 3)
        found["single_times_floor"] = round(percentile(single, 0.5) / percentile(bare, 0.5), 2)
    return found


async def _measured(place: Scratch, jobs: int, resources: int) -> tuple[dict[str, Any], list[float]]:
    server = Server(place)
    async with build(place) as app:
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
