"""What the benchmarks with worker processes share: their options, a scratch database, the crew, patience.

A benchmark is a script that starts itself again, with ``--work``, as each of its worker processes. It makes a schema of
its own in the database it is given (SQLite: a file beside it), and drops it in the end: what stood there is not touched
and not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from resilient.store.db.database import Database
from resilient.store.db.schema import upgrade_sync
from resilient.surface.scratch import scratch


def main(doc, name, declare, *, work, scenario, patience=120.0):
    """Run the benchmark and print its figures, or be one of its workers. ``declare(option)`` adds its own options."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--database", help="a schema of its own is made there, and dropped in the end")
    parser.add_argument("--patience", type=float, default=patience)
    parser.add_argument("--schema", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=int, help=argparse.SUPPRESS)
    declare(parser.add_argument)
    options = parser.parse_args()
    if options.work:
        asyncio.run(work(options))
        return
    with scratch(options.database, name) as place:
        options.database, options.schema = place.url, place.schema
        database = Database(place.url, schema=place.schema)
        upgrade_sync(database)
        database.close_sync()
        print(json.dumps(asyncio.run(scenario(options))))  # noqa: T201


async def run_worker(app, **options):
    """Be a worker until the parent closes the standard input."""
    worker = app.worker(**options)
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), worker.stop)
    await worker.run(signals=False)
    await app.close()


async def worker_process(script, options, port):
    """A process that works for the provider at ``port``."""
    place = ["--database", options.database, *(["--schema", options.schema] if options.schema else [])]
    command = [sys.executable, script, *sys.argv[1:], *place, "--work", str(port)]
    return await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE)


@contextlib.asynccontextmanager
async def crew(script, options, port):
    """Worker processes, ended at the end."""
    workers = [await worker_process(script, options, port) for _ in range(options.workers)]
    try:
        yield workers
        for one in workers:
            one.stdin.close()
            await asyncio.wait_for(one.wait(), 60)
    finally:
        for one in workers:
            if one.returncode is None:
                one.kill()
                await one.wait()


async def until(condition, seconds, every=0.02):
    """Wait for something that happens in this process. Raises `TimeoutError`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        await asyncio.sleep(every)
