"""A request limit shared by many processes, counted by the provider.

    python tests/benchmarks/bench_limits.py [--database URL] [--workers 8] [--concurrency 10] [--rate 200]
        [--per 5] [--seconds 12]

Worker processes send requests for one account as fast as they may. Prints one JSON object: ``most``, the most
requests that arrived within any ``--per`` seconds (once every worker has opened its connections: before that, requests
are on their way for as long as a process takes to start), ``over``, by how many that is too many (0: never), and
``used``, the share of the limit that was used.
"""

from __future__ import annotations

import asyncio
import os

from bench_outage import Sick
from crew import crew, main, run_worker, until

from resilient import Job, Limit, Provider, Resilient, handler

WARM_UP = 1.0  # seconds


class Counting(Sick):
    """Also who sent what."""

    def __init__(self, latency):
        super().__init__(None, latency)
        self.senders = {}  # pid: its first request

    def answer(self, writer, path):
        self.senders.setdefault(path.partition("?")[2], self.good[-1] if self.good else 0.0)
        super().answer(writer, path)


@handler("send")
async def send(job: Job[int]) -> None:
    (await job.client.get(f"/jobs/{job.payload}", params={"by": os.getpid()})).raise_for_status()


def program(options, port):
    limits = {"p/*": [Limit(options.rate, per=options.per)]}
    providers = [Provider(name="p", base_url=f"http://127.0.0.1:{port}")]
    return Resilient(
        options.database, schema=options.schema, handlers=[send], providers=providers, limits=limits, upgrade=False
    )


async def work(options):
    """A worker process; it ends when the standard input closes."""
    await run_worker(program(options, options.work), concurrency=options.concurrency)


async def limited(options):
    """The whole of it; the figures."""
    sick = Counting(0.01)
    server = await asyncio.start_server(sick.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    app = program(options, port)
    total = int(options.rate / options.per * options.seconds)
    await app.enqueue_many(send, range(total), resource_key="p/1")
    async with crew(__file__, options, port):
        await until(lambda: len(sick.served) == total, options.patience)
    server.close()
    done = int(await app.jobs.count(state="succeeded", limit=total + 1))
    await app.close()
    warm = max(sick.senders.values()) + WARM_UP
    sick.arrivals.sort()
    lasted = sick.arrivals[-1] - sick.arrivals[0]
    most = busiest([at for at in sick.arrivals if at >= warm], options.per)
    allowed = options.rate / options.per * lasted
    return {
        "workers": len(sick.senders), "requests": len(sick.arrivals), "rate": options.rate, "per": options.per,
        "most": most, "over": max(0, most - options.rate), "used": round(total / allowed, 3),
        "lost": total - done, "repeated": sum(many > 1 for many in sick.served.values()), "seconds": round(lasted, 1),
    }  # fmt: skip


def busiest(arrivals, seconds):
    """The most requests within any so many seconds."""
    most = first = 0
    for last, at in enumerate(arrivals):
        while arrivals[first] <= at - seconds:
            first += 1
        most = max(most, last - first + 1)
    return most


def declare(option):
    option("--workers", type=int, default=8)
    option("--concurrency", type=int, default=10)
    option("--rate", type=int, default=200)
    option("--per", type=float, default=5.0)
    option("--seconds", type=float, default=12)


if __name__ == "__main__":
    main(__doc__, "limits", declare, work=work, scenario=limited)
