"""What the outbox costs and how fast it is: ``python tests/benchmarks/bench_outbox.py postgresql://...``.

The database should have nothing else to do; the tables are made in a schema of their own and dropped in the end.
Printed:

- relay: events a second through one worker to a destination that does nothing, each key in order;
- latency: from a commit to the destination, with an idle worker.

What publishing costs a business transaction is told by `bench_publish.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time

import sqlalchemy as sa
from sqlalchemy.orm import Session

from resilient import Event, Resilient
from resilient.store.db import schema

SCHEMA = "bench_outbox"
KEYS = 10_000


def say(text):
    sys.stdout.write(text + "\n")


class Placed(Event, type="order.placed"):
    number: int


def build(url, sink):
    async def null(message):
        sink(message)

    return Resilient(url, schema=SCHEMA, destinations={"null": null}, routes={Placed: ["null"]})


async def relay(app, seen, events):
    with Session(app.database.sync_engine) as s:
        for start in range(0, events, 500):
            for n in range(start, min(start + 500, events)):
                app.outbox.publish(s, Placed(number=n), key=f"k{n % KEYS}")
            s.commit()
    worker = app.worker(concurrency=50)
    began = time.perf_counter()
    await worker.drain(timeout=600)
    seconds = time.perf_counter() - began
    assert len(seen) == events
    last = {}
    for message in seen:
        assert message.sequence == last.get(message.key, 0) + 1, "out of order"
        last[message.key] = message.sequence
    return events / seconds


async def latency(app, arrived, rounds):
    worker = app.worker()
    running = asyncio.create_task(worker.run(signals=False))
    await asyncio.sleep(1)
    took = []
    for n in range(rounds):
        with Session(app.database.sync_engine) as s:
            app.outbox.publish(s, Placed(number=n), key=f"l{n}")
            s.commit()
        began = time.perf_counter()
        arrived.clear()
        await asyncio.wait_for(arrived.wait(), 10)
        took.append(time.perf_counter() - began)
        await asyncio.sleep(0.01)
    worker.stop()
    await running
    took.sort()
    return statistics.median(took), took[int(len(took) * 0.99)]


async def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--events", type=int, default=30_000)
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    seen, arrived = [], asyncio.Event()
    loop = asyncio.get_running_loop()

    def sink(message):
        seen.append(message)
        loop.call_soon_threadsafe(arrived.set)

    app = build(options.url, sink)
    engine = sa.create_engine(app.database.sync_engine.url, pool_size=8)
    with engine.begin() as c:
        c.exec_driver_sql(f"DROP SCHEMA IF EXISTS {SCHEMA} CASCADE")
    await schema.upgrade(app.database)
    try:
        say(f"relay, ordered, {KEYS} keys, null sink: {await relay(app, seen, options.events):,.0f} events/s")
        median, p99 = await latency(app, arrived, options.rounds)
        say(f"commit to sink, idle worker: p50 {median * 1000:.1f} ms, p99 {p99 * 1000:.1f} ms")
    finally:
        await app.close()
        with engine.begin() as c:
            c.exec_driver_sql(f"DROP SCHEMA IF EXISTS {SCHEMA} CASCADE")
        engine.dispose()


if __name__ == "__main__":
    asyncio.run(main())
