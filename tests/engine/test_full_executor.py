"""A program whose own calls hang in every thread of its event loop's executor."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from resilient import Job, Resilient, SyncJob, handler
from tests.helpers import LIMIT


@handler("ok")
async def ok(job: Job[None]) -> None: ...


@handler("plain")
def plain(job: SyncJob[None]) -> None: ...


@pytest.fixture
async def _full():
    loop, go_on = asyncio.get_running_loop(), threading.Event()
    loop.set_default_executor(ThreadPoolExecutor(1))
    hangs = loop.run_in_executor(None, go_on.wait)
    yield
    go_on.set()
    await hangs


@pytest.mark.usefixtures("_full")
async def test_a_worker_starts_and_stops(database_url):
    async with asyncio.timeout(LIMIT / 5):
        async with Resilient(database_url, handlers=[ok, plain], upgrade=False) as app:
            ids = [(await app.enqueue(kind, resource_key="p/1")).id for kind in (ok, plain)]
            worker = app.worker()
            running = asyncio.create_task(worker.run(signals=False))
            for id_ in ids:
                await app.jobs.wait(id_)
            worker.stop()
            await running
            app._side._side = app._side._opened()  # as a thread that asks for credentials does
    assert app._side._side is None
    assert not worker.heartbeat._thread.is_alive()
