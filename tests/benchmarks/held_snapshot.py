"""A snapshot held open under load: what dead rows that nothing may clean up cost (PostgreSQL).

    python tests/benchmarks/held_snapshot.py postgresql://postgres@127.0.0.1/test [seconds]

One worker drains batch after batch of no-op jobs; after a while without, another connection opens a snapshot and holds
it for ``seconds`` (default 600). Prints the rate of each window and the ratio of the best one before to the last one;
the exit status is 1 if that is above 3.
"""
# ruff: noqa: T201 - a script that prints

import asyncio
import statistics
import sys
import time

import psycopg

from resilient import Item
from resilient.surface.bench.crew import account, build, noop
from resilient.surface.scratch import scratch

WINDOW = 10.0
WARM_UP = 3  # windows before the snapshot
BATCH = 5_000
RESOURCES = 1_000
WORST = 3.0


async def main(database: str, seconds: float) -> float:
    """Measure; how many times slower the last windows were than those before the snapshot."""
    with scratch(database, "bench") as place:
        async with build(place, limits=True) as app:
            worker = app.worker(concurrency=100)
            running = asyncio.create_task(worker.run())
            rates: list[float] = []
            enqueued = 0

            async def window() -> float:
                nonlocal enqueued
                began, before = time.monotonic(), worker.completer.written
                while time.monotonic() - began < WINDOW:
                    if enqueued - worker.completer.written < 2 * BATCH:
                        items = [Item(n, resource_key=account(n, RESOURCES)) for n in range(BATCH)]
                        await app.enqueue_many(noop, items)
                        enqueued += BATCH
                    await asyncio.sleep(0.05)
                return (worker.completer.written - before) / (time.monotonic() - began)

            for _ in range(WARM_UP):
                rates.append(await window())
                print(f"without: {rates[-1]:8,.0f} jobs/s", flush=True)
            with psycopg.connect(place.conninfo) as holder:
                holder.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
                holder.execute("SELECT count(*) FROM pg_class")
                until = time.monotonic() + seconds
                while time.monotonic() < until:
                    rates.append(await window())
                    print(f"   held: {rates[-1]:8,.0f} jobs/s after {worker.completer.written:,} jobs", flush=True)
            worker.stop()
            await running
    return statistics.median(rates[:WARM_UP]) / statistics.median(rates[-3:])


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    ratio = asyncio.run(main(sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 600.0))
    print(f"{ratio:.2f} times slower at the end")
    sys.exit(ratio > WORST)
