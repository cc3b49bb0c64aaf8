"""A sync of many records by a process that is killed again and again: complete, nothing doubled, and how fast.

    python tests/benchmarks/bench_sync.py [--database URL] [--records 100000] [--page 100] [--rate 50] [--kills 10]

A provider on this machine serves the records page by page and allows ``--rate`` requests a second; a worker
process reads them into a table without any unique key, and is killed (SIGKILL) ``--kills`` times, evenly over
the pass, wherever it then stands. Prints one JSON object: ``missing``, ``doubled``, ``asked_again`` (pages that
a killed process had asked for and not saved), ``seconds``, and ``used``: the share of the provider's limit that
was used while a process ran (``of_all``: of the whole time, with the starts of processes and the waits for dead
ones' leases).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import sqlalchemy as sa

sys.path.insert(0, str(Path(__file__).parents[2]))

from resilient import Job, Limit, NextCursor, PageRequest, Provider, Resilient, Retry, Stream, handler
from resilient.store.database import Database
from resilient.store.schema import upgrade_sync

ITEMS = sa.Table("copied", sa.MetaData(), sa.Column("id", sa.Integer), sa.Column("name", sa.String(40)))
STREAM = Stream(
    "items", request=lambda: PageRequest("/items"), paginator=NextCursor(items="items", found="next", query="after")
)  # fmt: skip
LEASE = 2.0  # seconds until a killed worker's job goes on


class Source:
    """``GET /items?after=``: pages of numbers, each counted."""

    def __init__(self, records, page):
        self.records, self.page, self.asked = records, page, Counter()
        self.at = []

    async def serve(self, reader, writer):
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                after = int(parse_qs(urlsplit(head.split(b" ", 2)[1].decode()).query).get("after", ["0"])[0])
                self.asked[after] += 1
                self.at.append(time.monotonic())
                last = min(after + self.page, self.records)
                items = [{"id": n, "name": f"record {n}"} for n in range(after + 1, last + 1)]
                body = json.dumps({"items": items, "next": str(last) if last < self.records else ""}).encode()
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
                )
                writer.write(body)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@handler("copy", retry=Retry(max_attempts=3), timeout=600)
async def copy(job: Job[None]) -> None:
    async for page in job.pages(STREAM):
        async with job.checkpoint(page) as session:
            await session.execute(sa.insert(ITEMS), page.items)


def program(options, port):
    return Resilient(
        options.database, handlers=[copy], providers=[Provider(name="p", base_url=f"http://127.0.0.1:{port}")],
        limits={"p/*": [Limit(options.rate, per=1, burst=max(1, options.rate // 10))]}, upgrade=False,
    )  # fmt: skip


async def work(options):
    """A worker process; it ends when the standard input closes."""
    app = program(options, options.work)
    worker = app.worker(concurrency=2, lease=LEASE)
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), worker.stop)
    await worker.run(signals=False)
    await app.close()


async def synced(options):
    """The whole of it; the figures."""
    source = Source(options.records, options.page)
    server = await asyncio.start_server(source.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    app = program(options, port)
    await app.database.transaction(lambda c, _d: ITEMS.create(c))
    job = await app.enqueue(copy, resource_key="p/1")
    pages = -(-options.records // options.page)
    command = [sys.executable, __file__, *sys.argv[1:], "--database", options.database, "--work", str(port)]
    began, idle, killed = time.monotonic(), 0.0, 0
    while True:
        asked = len(source.at)
        child = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE)
        try:
            started = time.monotonic()
            await until(lambda seen=asked: len(source.at) > seen, options.patience)
            idle += time.monotonic() - started
            if killed == options.kills:
                await finished(app, job.id, options.patience)
                child.stdin.close()
                await child.wait()
                break
            goal = pages * (killed + 1) // (options.kills + 1)
            await until(lambda goal=goal: len(source.asked) >= goal, options.patience)
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()
        killed += 1
    lasted = source.at[-1] - began
    server.close()
    found = await app.database.transaction(lambda c, _d: Counter(c.execute(sa.select(ITEMS.c.id)).scalars().all()))
    state = (await app.jobs.get(job.id)).state.value
    await app.close()
    return {
        "records": options.records, "pages": pages, "kills": killed, "state": state,
        "missing": sum(n not in found for n in range(1, options.records + 1)),
        "doubled": sum(many > 1 for many in found.values()),
        "asked_again": sum(source.asked.values()) - pages, "seconds": round(lasted, 1),
        "used": round(len(source.at) / options.rate / (lasted - idle), 3),
        "of_all": round(len(source.at) / options.rate / lasted, 3),
    }  # fmt: skip


async def finished(app, job, seconds):
    deadline = time.monotonic() + seconds
    while (await app.jobs.get(job)).finished_at is None:
        if time.monotonic() > deadline:
            raise TimeoutError
        await asyncio.sleep(0.1)


async def until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        await asyncio.sleep(0.002)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--database")
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--page", type=int, default=100)
    parser.add_argument("--rate", type=int, default=50)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--patience", type=float, default=300.0)
    parser.add_argument("--work", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        asyncio.run(work(options))
        return
    with tempfile.TemporaryDirectory() as home:
        options.database = options.database or f"sqlite:///{os.fspath(Path(home) / 'sync.db')}"
        database = Database(options.database)
        upgrade_sync(database)
        database.close_sync()
        print(json.dumps(asyncio.run(synced(options))))  # noqa: T201


if __name__ == "__main__":
    main()
