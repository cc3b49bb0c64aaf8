"""What a limit promises holds where the provider counts: at its socket, whatever workers and machine are doing.

The server takes the kernel's time of each request's arrival, so that its own slowness is not mistaken for the workers'.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

import pytest

from resilient import Item, Kind, Provider, Resilient
from tests import nursery
from tests.helpers import LIMIT

RATE, PROCESSES, WANTED = 10, 3, 70
SO_TIMESTAMPNS = 35  # Linux
CHILD = """
import asyncio, sys, threading
from resilient import Limit, Provider, Resilient, handler

@handler("ask", timeout=None)
async def ask(job):
    for n in range(1000):
        method = ("GET", "POST")[n % 2]
        (await job.client.request(method, "/x")).raise_for_status()

def burn():
    while True:
        sum(range(20000))

url, server, slow = sys.argv[1:]

async def main():
    api = Provider(name="api", base_url=server, limits={"account": [Limit(10, per="1s")]})
    if slow:
        threading.Thread(target=burn, daemon=True).start()
    async with Resilient(url, handlers=[ask], providers=[api]) as app:
        print("up", flush=True)
        await app.worker(concurrency=4).run(signals=False)

asyncio.run(main())
"""


class Counter:
    """An HTTP server that notes when each request's first bytes arrived, by the kernel's clock."""

    def __init__(self):
        self.arrivals, self._over = [], False
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=100)
        self._listener.settimeout(0)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            parts = {}
            while not self._over:
                for key, _ in selector.select(0.1):
                    if key.fileobj is self._listener:
                        one, _ = self._listener.accept()
                        one.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
                        one.settimeout(0)
                        selector.register(one, selectors.EVENT_READ)
                    else:
                        self._read(selector, key.fileobj, parts)

    def _read(self, selector, one, parts):
        try:
            data, extra, *_ = one.recvmsg(65536, 1024)
        except OSError:
            data, extra = b"", []
        if not data:
            selector.unregister(one)
            one.close()
            return
        if one not in parts:
            parts[one] = b""
            self.arrivals.append(arrival(extra))
        parts[one] += data
        if b"\r\n\r\n" in parts[one]:
            del parts[one]
            end = b"Connection: close\r\n" if len(self.arrivals) % 3 == 0 else b""  # some have to be opened anew
            one.send(b"HTTP/1.1 200 OK\r\n" + end + b"Content-Length: 2\r\n\r\n{}")

    def close(self):
        self._over = True
        self._thread.join()
        self._listener.close()


def arrival(extra):
    for level, kind, data in extra:
        if level == socket.SOL_SOCKET and kind == SO_TIMESTAMPNS:
            seconds, nanoseconds = struct.unpack("ll", data[:16])
            return seconds + nanoseconds / 1e9
    return time.time()


@pytest.fixture
def counter():
    one = Counter()
    yield one
    one.close()


@pytest.fixture
async def workers(database_url, counter):
    """Processes with slots for more than the limit gives; one of them has a thread that burns all CPU time it gets."""
    children = [
        nursery.start(CHILD, database_url, counter.url, "slow" if n == 0 else "", stdout=subprocess.PIPE)
        for n in range(PROCESSES)
    ]
    for child in children:
        assert await asyncio.to_thread(child.stdout.readline) == "up\n"
    yield children
    for child in children:
        os.kill(child.pid, signal.SIGCONT)
        child.kill()
        await asyncio.to_thread(child.communicate)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's time of an arrival")
async def test_frozen_and_slow_workers_together_keep_a_limit(database_url, counter, workers):
    app = Resilient(database_url, providers=[Provider(name="api", base_url=counter.url)])
    await app.enqueue_many(Kind("ask"), [Item(None, resource_key="api/acct-1")] * (4 * PROCESSES))
    await app.close()
    dice = random.Random(7)
    async with asyncio.timeout(LIMIT):
        while len(counter.arrivals) < WANTED:
            frozen = dice.choice(workers)
            os.kill(frozen.pid, signal.SIGSTOP)
            await asyncio.sleep(dice.uniform(0.05, 1.2))
            os.kill(frozen.pid, signal.SIGCONT)
            await asyncio.sleep(dice.uniform(0.05, 0.5))
    times = sorted(counter.arrivals)
    most = max(sum(start <= at < start + 1 for at in times) for start in times)
    gaps = sorted(b - a for a, b in itertools.pairwise(times))
    sys.stdout.write(
        f"{len(times)} requests in {times[-1] - times[0]:.1f} s, at most {most} in any second,"
        f" the closest {gaps[0] * 1000:.1f} ms apart\n"
    )
    assert most <= RATE
