"""A 429 stops the workers of every process: of what follows, the provider sees only what was on its way."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import pytest

from resilient import Kind, Provider, Resilient
from tests import nursery
from tests.helpers import LIMIT, until

A, JOBS, PROCESSES = "api/acct-1", 400, 3
CHILD = """
import asyncio, sys
from resilient import Provider, Resilient, handler

@handler("get", timeout=None)
async def get(job):
    for _ in range(1000):
        (await job.client.get("/x")).raise_for_status()

url, server, max_age = sys.argv[1:]

async def main():
    async with Resilient(url, handlers=[get], providers=[Provider(name="api", base_url=server)]) as app:
        worker = app.worker(concurrency=5)
        if max_age:
            worker.gate._snapshot._max_age = float(max_age)
        running = asyncio.create_task(worker.run(signals=False))
        print("up", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        worker.stop()
        await running

asyncio.run(main())
"""


class Api:
    """Answers one request with 429 once told to, the others well, so that only being told stops a process."""

    def __init__(self):
        self.seen, self.throttled_at, self.throttle = [], None, False

    async def __call__(self, _scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        told = self.throttle and self.throttled_at is None
        self.seen.append(time.monotonic())
        if told:
            self.throttled_at = time.monotonic()
        else:
            await asyncio.sleep(0.02)
        headers = [(b"content-length", b"2"), (b"retry-after", b"600")]
        await send({"type": "http.response.start", "status": 429 if told else 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"{}"})


@pytest.fixture
async def processes(serve):
    """``processes(url, api, max_age)``: workers in processes of their own."""
    children = []

    async def start(url, server, max_age):
        children.extend(
            nursery.start(CHILD, url, server, max_age, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for _ in range(PROCESSES)
        )
        for child in children:
            assert await asyncio.to_thread(child.stdout.readline) == "up\n"

    yield start
    for child in children:
        child.stdin.write("\n")
        child.stdin.flush()
    for child in children:
        try:
            await asyncio.to_thread(child.wait, LIMIT)
        finally:
            child.kill()
            child.communicate()


async def throttled(url, api, server, processes, max_age):
    """How many requests came once the throttle was written, and how long after its answer the last one.

    The last one is the last: no process runs a job any more.
    """
    app = Resilient(url, providers=[Provider(name="api", base_url=server)])
    try:
        await processes(url, server, max_age)
        await app.enqueue_many(Kind("get"), [None] * 5 * PROCESSES, resource_key=A)
        async with asyncio.timeout(LIMIT):
            while len(api.seen) < 20 * PROCESSES:  # noqa: ASYNC110 - other processes
                await asyncio.sleep(0.02)
        api.throttle = True

        async def is_written():
            return (await app.resources.get(A)).blocked_until is not None

        async def has_stopped():
            return not await app.jobs.count(state="running")

        await until(is_written)
        before = len(api.seen)
        await until(has_stopped)
    finally:
        await app.close()
    return len(api.seen) - before, max(api.seen) - api.throttled_at


async def test_a_429_stops_every_process_although_nobody_looks_again_by_itself(postgres_url, serve, processes):
    """Facts that never age: what stops the siblings is being told."""
    api = Api()
    count, _ = await throttled(postgres_url, api, serve(api), processes, "3600")
    assert count <= 10 * 5 * PROCESSES


async def test_after_a_429_little_more_than_what_was_on_its_way_arrives(database_url, serve, processes):
    api = Api()
    count, last = await throttled(database_url, api, serve(api), processes, "")
    sys.stdout.write(
        f"after a 429 of one of {PROCESSES} processes: {count} requests, the last {last * 1000:.0f} ms later\n"
    )
    assert count <= 10 * 5 * PROCESSES
