"""Ten million jobs through a small table that housekeeping prunes: its pace and its size must stay as they are.

    python -m tests.benchmarks.bench_long postgresql [--jobs 10000000] [--stretch 100000] [--place FOLDER]

One worker process, 1,000 resources with two job limits each, every tenth job in a lane; what succeeded is kept for
thirty seconds. The database and a line for each stretch stay in FOLDER, so a run that was cut off goes on: jobs that it
left in the database are done first, and not counted. After each stretch all of its jobs must have run once and
succeeded, and every rule of `tests/invariants.py` must hold.

Exit status 1: a rule was broken, a job ran twice or not at all, the last tenth was slower than nine tenths of the first
(by CPU of the worker and the server, which other users of the machine change least; the rate is printed beside it), or
the table or its indexes are larger in the last tenth than in the first fifth, by more than a quarter. What is kept for
thirty seconds is more where jobs are done faster: so the size is seen beside the highest rate up to then.
"""
# ruff: noqa: T201 - a script that prints

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil

from resilient import Item, Limit, Resilient, Retention, handler
from resilient.store.db.database import Database
from resilient.surface.bench.crew import own_cpu, postmaster, server_cpu
from tests import invariants
from tests.conftest import PostgresServer

BATCH = 2_500
RESOURCES = 1_000
AHEAD = 5_000  # jobs in the table that have not run
ROOMY = [Limit(10_000_000, per=60, counts="jobs"), Limit(10_000_000, per=3600, counts="jobs")]
KEPT = 30  # seconds
PACE, GROWTH = 0.9, 1.25
PATIENCE = 600.0  # seconds in which a stretch gets on by one job at least

_SIZES = """
SELECT pg_table_size('resilient_job') / 1048576.0, pg_indexes_size('resilient_job') / 1048576.0,
 pg_database_size(current_database()) / 1048576.0, (SELECT count(*) FROM resilient_job)
"""
_SIZES_SQLITE = """
SELECT page_count * page_size / 1048576.0, 0.0, page_count * page_size / 1048576.0, (SELECT count(*) FROM resilient_job)
 FROM pragma_page_count(), pragma_page_size()
"""


class Runs:
    """How often each job of a stretch ran."""

    def __init__(self):
        self.counts = bytearray()

    def begin(self, jobs):
        self.counts = bytearray(jobs)


RUNS = Runs()


@handler("long.noop")
async def noop(job):
    RUNS.counts[job.payload] += 1


def _lane(n):
    """Every tenth job is in one of 2,000: five of them follow each other in a stretch."""
    return f"lane-{n // RESOURCES % 20}" if n % 10 == 0 else None


def _items(first, last):
    for n in range(first, last):
        yield Item(n, resource_key=f"long/acct-{n % RESOURCES}", ordering_key=_lane(n))


class Long:
    """The run: its worker, its figures, and what was wrong."""

    def __init__(self, folder, url, server):
        self.notes, self.url, self.server = folder / "stretches.jsonl", url, server
        lines = self.notes.read_text().splitlines() if self.notes.exists() else []
        self.stretches = [json.loads(line) for line in lines]
        self.database = Database(url)

    @property
    def done(self):
        return sum(stretch["jobs"] for stretch in self.stretches)

    async def run(self, jobs, size):
        """Stretch by stretch until ``jobs`` are done."""
        limits, retention = {"long/*": ROOMY}, Retention(succeeded=KEPT)
        async with Resilient(self.url, upgrade=True, handlers=[noop], limits=limits, retention=retention) as app:
            worker = app.worker(concurrency=100)
            running = asyncio.create_task(worker.run(signals=False))
            RUNS.begin(size)
            await self._until(running, lambda: not self._open())  # what a run left behind that was cut off
            while self.done < jobs:
                stretch = await self._stretch(app, worker, running, min(size, jobs - self.done))
                self.stretches.append(stretch)
                with self.notes.open("a") as file:
                    file.write(json.dumps(stretch) + "\n")
                print(f"{self.done:11,} jobs: " + shown(stretch), flush=True)
            worker.stop()
            await running

    async def _stretch(self, app, worker, running, size):
        RUNS.begin(size)
        began, cpu, writes = time.monotonic(), self._cpu(), worker.completer.written
        for first in range(0, size, BATCH):
            await app.enqueue_many(noop, list(_items(first, min(size, first + BATCH))))
            ahead = writes + first + BATCH - AHEAD
            await self._until(running, lambda: worker.completer.written >= ahead)  # noqa: B023 - awaited at once
        await self._until(running, lambda: worker.completer.written >= writes + size)
        await self._until(running, lambda: not self._open())
        seconds, cpu = time.monotonic() - began, self._cpu() - cpu
        table, indexes, whole, rows = self._ask(_SIZES if self.server else _SIZES_SQLITE)
        return {
            "jobs": size,
            "seconds": round(seconds, 1),
            "per_second": round(size / seconds),
            "cpu_us": round(cpu / size * 1e6),
            "table_mb": round(float(table), 1),
            "indexes_mb": round(float(indexes), 1),
            "database_mb": round(float(whole), 1),
            "rows": rows,
            "memory_mb": round(psutil.Process().memory_info().rss / 2**20),
            "wrong": self._wrong(),
        }

    def _wrong(self):
        """What must not be: broken rules, jobs that did not run once, jobs that did not succeed."""
        wrong = invariants.broken(self.database)
        if others := RUNS.counts.translate(None, b"\x01"):
            wrong.append(f"{others.count(0)} jobs did not run, {len(others) - others.count(0)} ran more than once")
        ends = self._ask("SELECT count(*) FROM resilient_job WHERE state <> 'succeeded'")
        return [*wrong, *([f"{ends[0]} jobs did not succeed"] if ends[0] else [])]

    def _open(self):
        (count,) = self._ask("SELECT count(*) FROM resilient_job WHERE finished_at IS NULL")
        return count

    def _ask(self, query):
        return self.database.transaction_sync(lambda c, _: c.exec_driver_sql(query).one())

    def _cpu(self):
        return own_cpu() + (server_cpu(self.server) or 0.0 if self.server else 0.0)

    async def _until(self, running, condition):
        """Raises `TimeoutError` when nothing gets on."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if running.done():
                await running
                raise RuntimeError("the worker stopped by itself")
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing more after {self.done:,} jobs: {invariants.broken(self.database)}")
            await asyncio.sleep(0.02)


def shown(stretch):
    """One line of figures."""
    return (
        f"{stretch['per_second']:6,} jobs/s, {stretch['cpu_us']:5,} us of CPU each, table {stretch['table_mb']} MB,"
        f" indexes {stretch['indexes_mb']} MB, {stretch['rows']:,} rows, worker {stretch['memory_mb']} MB,"
        f" {len(stretch['wrong'])} wrong" + "".join(f"\n  {line}" for line in stretch["wrong"][:5])
    )


def verdict(stretches):
    """(what failed, the figures in one line) of the whole run."""
    tenth, fifth = max(1, len(stretches) // 10), max(1, len(stretches) // 5)
    first, last = stretches[:tenth], stretches[-tenth:]

    def median(part, name):
        return statistics.median(stretch[name] for stretch in part)

    def largest(part, name):
        return max(stretch[name] for stretch in part)

    pace = median(first, "cpu_us") / median(last, "cpu_us")
    rate = median(last, "per_second") / median(first, "per_second")
    faster = largest(stretches, "per_second") / largest(stretches[:fifth], "per_second")
    growth = max(
        largest(last, name) / max(1.0, largest(stretches[:fifth], name) * faster) for name in ("table_mb", "indexes_mb")
    )
    wrong = sum(len(stretch["wrong"]) for stretch in stretches)
    failures = [
        text
        for text, is_broken in (
            ("rules were broken", wrong > 0),
            ("it became slower", pace < PACE),
            ("it grew", growth > GROWTH),
        )
        if is_broken
    ]
    jobs = sum(stretch["jobs"] for stretch in stretches)
    return failures, f"{jobs:,} jobs: pace x{pace:.2f} (rate x{rate:.2f}), size x{growth:.2f}, {wrong} wrong"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("database", choices=("sqlite", "postgresql"))
    parser.add_argument("--jobs", type=int, default=10_000_000)
    parser.add_argument("--stretch", type=int, default=100_000)
    parser.add_argument("--place", type=Path, help="a short path: a socket stands in it")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))  # the server ends, too
    name = f"resilient-long-{options.database}-{options.stretch}-{os.getuid()}"
    folder = options.place or Path(tempfile.gettempdir()) / name
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    server = PostgresServer(home=folder, max_connections=50) if options.database == "postgresql" else None
    try:
        process = None
        if server is not None:
            with server.connect() as c:
                process = postmaster(c)
        url = server.url() if server else f"sqlite:///{folder / 'long.db'}"
        long = Long(folder, url, process)
        asyncio.run(long.run(options.jobs, options.stretch))
    finally:
        if server is not None:
            server.end()
    failures, figures = verdict(long.stretches)
    print("; ".join([*failures, figures]))
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
