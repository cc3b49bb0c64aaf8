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

import asyncio
import json
import time
from collections import Counter
from urllib.parse import parse_qs, urlsplit

import sqlalchemy as sa
from crew import main, run_worker, until, worker_process

from resilient import Job, Limit, NextCursor, PageRequest, Provider, Resilient, Retry, Stream, handler

STREAM = Stream(
    "items", request=lambda: PageRequest("/items"), paginator=NextCursor(items="items", cursor="next", query="after")
)  # fmt: skip
LEASE = 2.0  # seconds until a killed worker's job goes on
TICK = 0.002  # seconds


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
            await session.execute(sa.insert(job.deps), page.items)


def copied(schema):
    """Where the records go; nothing but the checkpoint keeps them single."""
    return sa.Table("copied", sa.MetaData(schema), sa.Column("id", sa.Integer), sa.Column("name", sa.String(40)))


def program(options, port):
    return Resilient(
        options.database, schema=options.schema, handlers=[copy], deps=copied(options.schema), upgrade=False,
        providers=[Provider(name="p", base_url=f"http://127.0.0.1:{port}")],
        limits={"p/*": [Limit(options.rate, per=1, burst=max(1, options.rate // 10))]},
    )  # fmt: skip


async def work(options):
    """A worker process; it ends when the standard input closes."""
    await run_worker(program(options, options.work), concurrency=2, lease=LEASE)


async def synced(options):
    """The whole of it; the figures."""
    source = Source(options.records, options.page)
    server = await asyncio.start_server(source.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    app = program(options, port)
    items = copied(options.schema)
    await app.database.transaction(lambda c, _d: items.create(c))
    job = await app.enqueue(copy, resource_key="p/1")
    pages = -(-options.records // options.page)
    began, idle, killed = time.monotonic(), 0.0, 0
    while True:
        asked = len(source.at)
        child = await worker_process(__file__, options, port)
        try:
            started = time.monotonic()
            await until(lambda seen=asked: len(source.at) > seen, options.patience, TICK)
            idle += time.monotonic() - started
            if killed == options.kills:
                await finished(app, job.id, options.patience)
                child.stdin.close()
                await child.wait()
                break
            goal = pages * (killed + 1) // (options.kills + 1)
            await until(lambda goal=goal: len(source.asked) >= goal, options.patience, TICK)
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()
        killed += 1
    lasted = source.at[-1] - began
    server.close()
    found = await app.database.transaction(lambda c, _d: Counter(c.execute(sa.select(items.c.id)).scalars().all()))
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


def declare(option):
    option("--records", type=int, default=100_000)
    option("--page", type=int, default=100)
    option("--rate", type=int, default=50)
    option("--kills", type=int, default=10)


if __name__ == "__main__":
    main(__doc__, "sync", declare, work=work, scenario=synced, patience=300.0)
