"""A provider that is down for many accounts at once: how many requests it still gets, and how the load comes back.

    python tests/benchmarks/bench_outage.py [--database URL] [--accounts 1000] [--jobs 2] [--workers 2]
        [--concurrency 25] [--how 503|reset] [--down 12] [--first-open 2] [--ramp 6] [--latency 0.02]

A provider on this machine is down (answers 503, or resets each connection) while worker processes have jobs for every
account. After ``--down`` seconds it is well again. Prints one JSON object; every number is counted by the provider:

- ``until_stopped``: requests until everything stood still; ``probes``: those of the rest of the outage;
- ``first_second`` and ``peak``: requests within a second of the first good answer, and most at once in each tenth of
  the ramp; ``recovered_after``: seconds from then until the last job was done;
- ``lost``, ``repeated``: jobs that were not done, or done more than once.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
import time
from collections import Counter

from crew import crew, main, run_worker, until

from resilient import BreakerPolicy, Fixed, Item, Job, Provider, Resilient, Retry, handler

QUIET = 0.7  # of the first open interval without a request: everything stands still
NUMBER_OF_TENTHS = 10


def arrived(writer):
    """When the latest bytes of a connection came to this machine, monotonic: this process may have stood still since.

    Elsewhere than on Linux: when they are asked for.
    """
    since = 0
    if sys.platform == "linux":
        info = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
        (since,) = struct.unpack_from("I", info, 52)  # tcpi_last_data_recv, milliseconds
    return time.monotonic() - since / 1000


class Sick:
    """A small HTTP server that counts; ``how`` is None once it is well."""

    def __init__(self, how, latency):
        self.how, self.latency = how, latency
        self.arrivals, self.good, self.served = [], [], Counter()
        self.in_flight, self.load = 0, []  # (time, how many at once)

    async def serve(self, reader, writer):
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                now = time.monotonic()
                self.arrivals.append(arrived(writer))
                self.in_flight += 1
                self.load.append((now, self.in_flight))
                try:
                    await asyncio.sleep(self.latency)
                    if self.how == "reset":
                        linger = struct.pack("ii", 1, 0)
                        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                        return
                    self.answer(writer, head.split(b" ", 2)[1].decode())
                    await writer.drain()
                finally:
                    self.in_flight -= 1
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def answer(self, writer, path):
        if self.how is None:
            self.good.append(time.monotonic())
            self.served[path] += 1
        status = b"200 OK" if self.how is None else b"503 Service Unavailable"
        writer.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 2\r\ncontent-type: application/json\r\n\r\n{}")


@handler("call", retry=Retry(max_attempts=None, delay=Fixed(0.2)))
async def call(job: Job[int]) -> None:
    (await job.client.get(f"/jobs/{job.payload}")).raise_for_status()


def program(options, port):
    policy = BreakerPolicy(first_open=options.first_open, longest_open=options.first_open * 2, ramp=options.ramp)
    return Resilient(
        options.database, schema=options.schema, handlers=[call], providers=[Provider(name="p", base_url=f"http://127.0.0.1:{port}")],
        breakers={"p": policy, "p/*": policy}, upgrade=False,
    )  # fmt: skip


async def work(options):
    """A worker process; it ends when the standard input closes."""
    await run_worker(program(options, options.work), concurrency=options.concurrency)


async def outage(options):
    """The whole of it; the figures."""
    sick = Sick(options.how, options.latency)
    server = await asyncio.start_server(sick.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    app = program(options, port)
    total = options.accounts * options.jobs
    await app.enqueue_many(call, [Item(n, f"p/{n % options.accounts}") for n in range(total)])
    async with crew(__file__, options, port) as workers:
        await until(lambda: sick.arrivals, 60)
        await asyncio.sleep(options.down)
        sick.how, well = None, time.monotonic()
        await until(lambda: len(sick.served) == total, options.patience)
        last = time.monotonic()
    done = int(await app.jobs.count(state="succeeded", limit=total + 1))
    await app.close()
    server.close()
    clean = sum(one.returncode == 0 for one in workers)
    return figures(options, sick, well, last) | {"lost": total - done, "clean_exits": clean}


def figures(options, sick, well, last):
    sent = [at for at in sick.arrivals if at < well]
    gaps = [n for n in range(1, len(sent)) if sent[n] - sent[n - 1] > QUIET * options.first_open]
    burst = gaps[0] if gaps else len(sent)
    first = sick.good[0]
    tenth = options.ramp / NUMBER_OF_TENTHS
    peaks = [0] * NUMBER_OF_TENTHS
    for at, many in sick.load:
        if first <= at < first + options.ramp:
            place = int((at - first) / tenth)
            peaks[place] = max(peaks[place], many)
    return {
        "accounts": options.accounts, "jobs": options.accounts * options.jobs, "workers": options.workers,
        "slots": options.workers * options.concurrency, "how": options.how,
        "until_stopped": burst, "stopped_after": round(sent[burst - 1] - sent[0], 2), "probes": len(sent) - burst,
        "first_second": sum(first <= at < first + 1 for at in sick.arrivals), "peak": peaks,
        "recovered_after": round(last - first, 1), "first_good_after": round(first - well, 1),
        "repeated": sum(many > 1 for many in sick.served.values()),
    }  # fmt: skip


def declare(option):
    option("--accounts", type=int, default=1000)
    option("--jobs", type=int, default=2, help="of each account")
    option("--workers", type=int, default=2)
    option("--concurrency", type=int, default=25)
    option("--how", choices=("503", "reset"), default="503")
    option("--down", type=float, default=12.0)
    option("--first-open", type=float, default=2.0)
    option("--ramp", type=float, default=6.0)
    option("--latency", type=float, default=0.02)


if __name__ == "__main__":
    main(__doc__, "outage", declare, work=work, scenario=outage)
