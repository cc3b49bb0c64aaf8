"""A worker that is told to stop while its database is away: it waits for its results; a second signal ends that."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from proxy import Proxy

from resilient import DatabaseUnreachable, Job, Resilient, handler
from resilient.engine.run import worker as worker_module
from tests.helpers import LIMIT, until


@handler("work")
async def work(job: Job[None]) -> None:
    job.deps.began += 1
    await job.deps.go_on.wait()


class World:
    def __init__(self):
        self.began, self.go_on = 0, asyncio.Event()


@pytest.fixture
def proxy(postgres_server):
    with Proxy(next(postgres_server.data.glob(".s.PGSQL.*[0-9]"))) as proxy:
        yield proxy


def go_silent(proxy):
    proxy.hole = True


@pytest.mark.parametrize("fail", [go_silent, Proxy.go_away], ids=["silent", "refusing"])
async def test_a_second_signal_leaves_what_cannot_be_saved(proxy, postgres_url, fail, monkeypatch, caplog):
    monkeypatch.setattr(worker_module, "UNSAID", 0.05)
    monkeypatch.setattr(worker_module, "LAST_PATIENCE", 0.5)
    world = World()
    app = Resilient(
        proxy.url(postgres_url.partition("?")[0].rpartition("/")[2]), handlers=[work], upgrade=False, deps=world
    )
    patience, app.database.watch.suspect = app.database.watch.suspect, 0.5
    jobs = [await app.enqueue(work, resource_key=f"k/{n}") for n in range(4)]
    worker = app.worker(concurrency=4, lease=4.0, grace=1.0)
    running = asyncio.create_task(worker.run(signals=False))
    await until(lambda: world.began == 4)
    fail(proxy)
    world.go_on.set()
    worker.stop()
    await until(lambda: "stops once 4 results can be saved; another signal leaves them" in caplog.text)
    assert not running.done()
    worker.hand_back()
    await asyncio.wait_for(running, LIMIT)
    assert "leaves 4 results unsaved, because its database does not answer: their jobs run again" in caplog.text
    proxy.away = proxy.hole = False
    await until(lambda: rescued(app))
    app.database.watch.suspect = patience  # it answers again: on a busy machine perhaps not within half a second
    await app.worker(lease=4.0).drain()
    assert {(await app.jobs.get(job.id)).state for job in jobs} == {"succeeded"}
    assert world.began == 8
    await app.close()


async def rescued(app):
    with contextlib.suppress(DatabaseUnreachable):  # a connection that was cut while it rested
        await app.worker().sweeper.rescue()
        return await app.jobs.count(state="running") == 0


async def test_the_first_signal_waits_until_the_database_is_back(proxy, postgres_url, caplog):
    world = World()
    app = Resilient(
        proxy.url(postgres_url.partition("?")[0].rpartition("/")[2]), handlers=[work], upgrade=False, deps=world
    )
    job = await app.enqueue(work, resource_key="k/1")
    worker = app.worker(lease=4.0, grace=1.0)
    running = asyncio.create_task(worker.run(signals=False))
    await until(lambda: world.began == 1)
    proxy.go_away()
    world.go_on.set()
    worker.stop()
    await until(lambda: "cannot save 1 results" in caplog.text)
    proxy.away = False
    await asyncio.wait_for(running, LIMIT)
    assert ((await app.jobs.get(job.id)).state, world.began) == ("succeeded", 1)
    await app.close()
