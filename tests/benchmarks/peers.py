"""Other queues on the same machine: PgQueuer and Procrastinate on PostgreSQL, huey on SQLite; no gates, no limits.

    build/peers/bin/python tests/benchmarks/peers.py postgresql://postgres@127.0.0.1/test [scale]

Prints a JSON object a line. `make bench PEERS=1` installs them into an environment of their own, and runs this beside
`resilient bench all`. Each works in a database that is made for it and dropped.
"""
# ruff: noqa: T201 - a script that prints; each peer is imported when it is its turn

import asyncio
import json
import sys
import tempfile
import time
import uuid
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg

CHUNK = 10_000


def say(peer, what, count, seconds):
    print(json.dumps({"peer": peer, "what": what, "per_second": round(count / seconds, 1)}), flush=True)


@asynccontextmanager
async def database(url):
    """A new database on the server; its address."""
    name = f"peers_{uuid.uuid4().hex[:12]}"
    server = await asyncpg.connect(url)
    await server.execute(f"CREATE DATABASE {name}")
    try:
        address, question, options = url.partition("?")  # a socket's folder stands in the options
        yield f"{address.rpartition('/')[0]}/{name}{question}{options}"
    finally:
        await server.execute(f"DROP DATABASE {name} WITH (FORCE)")
        await server.close()


async def pgqueuer(url, jobs):
    """200 at once, over asyncpg."""
    from datetime import timedelta

    from pgqueuer import PgQueuer
    from pgqueuer.db import AsyncpgPoolDriver
    from pgqueuer.queries import Queries
    from pgqueuer.types import QueueExecutionMode

    async with database(url) as address, asyncpg.create_pool(address, min_size=2, max_size=8) as pool:
        driver = AsyncpgPoolDriver(pool)
        queries = Queries(driver)
        await queries.install()
        began = time.perf_counter()
        for first in range(0, jobs, CHUNK):
            many = min(CHUNK, jobs - first)
            await queries.enqueue(["noop"] * many, [b"1"] * many, [0] * many)
        say("PgQueuer", "enqueue, 10,000 a call", jobs, time.perf_counter() - began)
        began = time.perf_counter()
        for _ in range(min(jobs, 1_000)):
            await queries.enqueue("noop", b"1")
        say("PgQueuer", "enqueue one", min(jobs, 1_000), time.perf_counter() - began)
        queue, total = PgQueuer(driver), jobs + min(jobs, 1_000)
        done = 0

        @queue.entrypoint("noop")
        async def noop(_job):
            nonlocal done
            done += 1

        began = time.perf_counter()
        await queue.run(
            batch_size=200, dequeue_timeout=timedelta(seconds=1), mode=QueueExecutionMode.drain,
            max_concurrent_tasks=400,
        )  # fmt: skip
        if done != total:
            sys.exit(f"PgQueuer did {done} of {total}")
        say("PgQueuer", "drain, 200 at once", total, time.perf_counter() - began)


async def procrastinate(url, jobs):
    """100 at once."""
    from procrastinate import App, PsycopgConnector

    async with database(url) as address:
        app = App(connector=PsycopgConnector(conninfo=address))

        @app.task(name="noop")
        async def noop(n):
            pass

        async with app.open_async():
            await app.schema_manager.apply_schema_async()
            began = time.perf_counter()
            await noop.batch_defer_async(*({"n": n} for n in range(jobs)))
            say("Procrastinate", "enqueue, in one call", jobs, time.perf_counter() - began)
            began = time.perf_counter()
            await app.run_worker_async(concurrency=100, wait=False, install_signal_handlers=False)
            say("Procrastinate", "drain, 100 at once", jobs, time.perf_counter() - began)


def huey(jobs):
    """SQLite, in one thread: what its consumer does for a task."""
    from huey import SqliteHuey

    with tempfile.TemporaryDirectory() as folder:
        queue = SqliteHuey(filename=str(Path(folder) / "huey.db"), fsync=True)

        @queue.task()
        def noop(n):
            pass

        began = time.perf_counter()
        for n in range(jobs):
            noop(n)
        say("huey (SQLite)", "enqueue one", jobs, time.perf_counter() - began)
        began = time.perf_counter()
        while (task := queue.dequeue()) is not None:
            queue.execute(task)
        say("huey (SQLite)", "drain", jobs, time.perf_counter() - began)


def main(url, scale="1"):
    jobs = round(20_000 * float(scale))
    import uvloop

    uvloop.run(pgqueuer(url, jobs))
    asyncio.run(procrastinate(url, max(100, jobs // 10)))
    huey(max(100, jobs // 10))


if __name__ == "__main__":
    main(*sys.argv[1:])
