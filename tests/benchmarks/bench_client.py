"""What ``job.client`` costs beside a bare ``httpx.AsyncClient``, against a uvicorn server on this machine.

    python tests/benchmarks/bench_client.py [--requests 3000] [--concurrency 1]

Prints one JSON object: microseconds per request of both, the ratio of wall time (target: below 1.3) and of the client's
CPU time. The server runs in a process of its own; the two take turns, so that both meet the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from datetime import UTC, datetime
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[2]))

from resilient import Idempotency, Provider
from resilient.wire.requests.client import build_async_client
from resilient.wire.requests.hooks import Permit
from resilient.wire.requests.pool import Pool
from resilient.wire.requests.request_log import RequestLog

ROUNDS = 8
BODY = b'{"id": 1, "name": "a contact", "tags": ["x", "y"]}'


async def app(scope, receive, send):
    """Answers at once, with the headers of a usual API."""
    while (await receive()).get("more_body"):
        pass
    headers = [
        (b"content-type", b"application/json"), (b"content-length", str(len(BODY)).encode()),
        (b"x-ratelimit-limit", b"5000"), (b"x-ratelimit-remaining", b"4999"), (b"x-ratelimit-reset", b"1900000000"),
    ]  # fmt: skip
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": BODY})


class Nothing:
    """A RequestHooks that does as little as one can: the engine's own share is measured elsewhere."""

    resource_key, base_key = "api/acct", "job"

    def now(self):
        return datetime.now(UTC)

    async def admit(self, asked):
        return Permit(asked, headers={"authorization": "Bearer token"})

    def is_late(self, _permit):
        return False

    async def answered(self, permit, answer, failure):
        pass


async def bare(url, requests, concurrency):
    """One client for all."""
    async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
        await _drive(lambda _: client, requests, concurrency)


async def ours(url, requests, concurrency, per_job=3):
    """A client for each job of ``per_job`` requests, over one pool."""
    pool, provider = Pool(), Provider(name="api", base_url=url, idempotency=Idempotency())
    clients = {}

    def client(n):
        found = clients.get(n // per_job)
        if found is None:
            clients.pop(n // per_job - concurrency, None)
            found = clients[n // per_job] = build_async_client(RequestLog(Nothing(), provider), pool)
        return found

    await _drive(client, requests, concurrency)
    await pool.aclose()


async def _drive(client, requests, concurrency):
    numbers = iter(range(requests))

    async def work():
        for n in numbers:
            http = client(n)
            response = await (http.post("/contacts", json={"n": n}) if n % 3 == 0 else http.get("/contacts/1"))
            response.raise_for_status()
            response.json()

    await asyncio.gather(*(work() for _ in range(concurrency)))


def _measure(run, *args):
    wall, cpu = time.perf_counter(), time.process_time()
    asyncio.run(run(*args))
    return time.perf_counter() - wall, time.process_time() - cpu


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--port", type=int, default=18431)
    options = parser.parse_args()
    server = subprocess.Popen(
        [sys.executable, "-m", "uvicorn", "bench_client:app", "--app-dir", str(Path(__file__).parent),
         "--host", "127.0.0.1", "--port", str(options.port), "--log-level", "warning", "--no-access-log"],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    url = f"http://127.0.0.1:{options.port}"
    try:
        _wait_for(url)
        share = options.requests // ROUNDS
        _measure(bare, url, share, options.concurrency)
        _measure(ours, url, share, options.concurrency)
        rounds = [
            (_measure(bare, url, share, options.concurrency), _measure(ours, url, share, options.concurrency))
            for _ in range(ROUNDS)
        ]
    finally:
        server.terminate()
        server.wait()
    wall = [b[0] for b, _ in rounds], [o[0] for _, o in rounds]
    sys.stdout.write(json.dumps({
        "requests": share * ROUNDS, "concurrency": options.concurrency,
        "bare_us": round(1e6 * statistics.median(wall[0]) / share, 1),
        "client_us": round(1e6 * statistics.median(wall[1]) / share, 1),
        "ratio": round(statistics.median(o[0] / b[0] for b, o in rounds), 3),
        "cpu_ratio": round(statistics.median(o[1] / b[1] for b, o in rounds), 3),
    }) + "\n")  # fmt: skip


def _wait_for(url):
    for _ in range(100):
        try:
            urllib.request.urlopen(url, timeout=1)  # noqa: S310 - our own server
        except OSError:
            time.sleep(0.1)
        else:
            return


if __name__ == "__main__":
    main()
