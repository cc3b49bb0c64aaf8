"""One worker process over very many no-op jobs: its memory, its speed and what the database keeps must not grow.

    python tests/benchmarks/bench_soak.py postgresql://postgres@127.0.0.1/test [jobs] [every]

Runs ``jobs`` (default 1,000,000) jobs over 1,000 resources with two job limits each, pruning what is done on the way.
Every ``every`` (default 100,000) jobs it prints the resident memory of this process, what the garbage collector knows,
the asyncio tasks and the rate. The exit status is 1 if memory grew by more than 10 % (at least 10 MB) or objects by
more than 10 % after the first stretch, which fills pools and caches.
"""
# ruff: noqa: T201 - a script that prints

import asyncio
import gc
import sys
import time

import psutil

from resilient import Item
from resilient.surface.bench.crew import account, build, noop
from resilient.surface.scratch import scratch

BATCH = 5_000
RESOURCES = 1_000
GROWTH = 1.10
SLACK = 10.0  # MB


async def main(database: str, jobs: int, every: int) -> bool:
    """Measure; whether anything grew."""
    me = psutil.Process()
    memory: list[float] = []
    objects: list[int] = []
    with scratch(database, "bench") as place:
        async with build(place, limits=True) as app:
            worker = app.worker(concurrency=100)
            running = asyncio.create_task(worker.run())
            enqueued, began, before = 0, time.monotonic(), 0
            while worker.completer.written < jobs:
                if running.done():
                    await running
                    raise RuntimeError("the worker stopped by itself")
                if enqueued < jobs and enqueued - worker.completer.written < 2 * BATCH:
                    items = [Item(n, resource_key=account(n, RESOURCES)) for n in range(min(BATCH, jobs - enqueued))]
                    await app.enqueue_many(noop, items)
                    enqueued += len(items)
                await asyncio.sleep(0.02)
                done = worker.completer.written
                if done - before >= every or done >= jobs:
                    rate = (done - before) / (time.monotonic() - began)
                    await app.prune(older_than=1)
                    gc.collect()
                    memory.append(me.memory_info().rss / 2**20)
                    objects.append(len(gc.get_objects()))
                    print(
                        f"{done:10,} jobs: {memory[-1]:6.1f} MB, {objects[-1]:,} objects, {len(asyncio.all_tasks())}"
                        f" tasks, {rate:8,.0f} jobs/s",
                        flush=True,
                    )
                    began, before = time.monotonic(), done
            worker.stop()
            await running
    grew = memory[-1] > max(memory[0] * GROWTH, memory[0] + SLACK) or objects[-1] > objects[0] * GROWTH
    print(f"from {memory[0]:.1f} to {memory[-1]:.1f} MB: {'it grows' if grew else 'nothing grows'}")
    return grew


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    total, stretch = [*map(int, sys.argv[2:4]), *(1_000_000, 100_000)[len(sys.argv[2:4]) :]]
    sys.exit(asyncio.run(main(sys.argv[1], total, stretch)))
