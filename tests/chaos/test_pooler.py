"""Through PgBouncer in transaction mode; its failovers are in test_standby.py."""

from __future__ import annotations

import asyncio

import pytest
import sqlalchemy as sa
from pooler import Pooler

from resilient import Job, Resilient, handler
from resilient.engine.inspect.doctor import examine
from tests.helpers import LIMIT


@handler("work")
async def work(job: Job[int]) -> None:
    async with job.prepare() as session:
        await session.execute(sa.text("SELECT pg_sleep(0.01)"))


@pytest.fixture
def pooler(postgres_server):
    pooler = Pooler(postgres_server)
    yield pooler
    pooler.close()


@pytest.mark.parametrize("hears", [True, False])
async def test_work_goes_through_it_with_listening_at_the_server_or_without(postgres_server, pooler, hears):
    """`doctor` says which of the two it is."""
    name = postgres_server.create()
    listen = {"listen_url": postgres_server.url(name)} if hears else {}
    async with Resilient(pooler.url(name), handlers=[work], upgrade=True, **listen) as app:
        findings = await examine(app.database, listen_url=app.listen_url)
        assert [one.level for one in findings if one.name == "notify"] == ["ok" if hears else "warn"]
        ids = [row.id for row in await app.enqueue_many(work, list(range(200)), resource_key="p/1")]
        worker = app.worker(concurrency=50)
        running = asyncio.create_task(worker.run(signals=False))
        async with asyncio.timeout(LIMIT):
            assert {(await app.jobs.wait(one)).state for one in ids} == {"succeeded"}
        worker.stop()
        await running
    assert "error" not in pooler.said().lower()
    postgres_server.drop(name)
