"""Ten workers that share nothing but the database's address."""

from __future__ import annotations

import asyncio
from collections import Counter

from resilient import Item, Job, Resilient, handler
from tests.helpers import LIMIT


async def test_ten_workers_run_every_job_once_and_keep_the_caps(database_url):
    ran, running, most = Counter(), Counter(), Counter()

    @handler("work")
    async def work(job: Job[int]) -> None:
        ran[job.payload] += 1
        running[job.resource_key] += 1
        most[job.resource_key] = max(most[job.resource_key], running[job.resource_key])
        await asyncio.sleep(0.005)
        running[job.resource_key] -= 1

    apps = [Resilient(database_url, handlers=[work], concurrency={"a/*": 3}) for _ in range(10)]
    await apps[0].enqueue_many(work, [Item(n, resource_key=f"a/{n % 12}") for n in range(240)])
    workers = [app.worker(concurrency=5) for app in apps]
    tasks = [asyncio.create_task(worker.run(signals=False)) for worker in workers]
    async with asyncio.timeout(LIMIT):
        while sum(worker.completer.written for worker in workers) < 240:  # noqa: ASYNC110 - ten workers' counters
            await asyncio.sleep(0.02)
    for worker in workers:
        worker.stop()
    await asyncio.gather(*tasks)
    assert set(ran.values()) == {1}
    assert len(ran) == 240
    assert max(most.values()) <= 3
    assert sum(worker.completer.stale for worker in workers) == 0
    assert await apps[0].jobs.count(state="succeeded") == 240
    for app in apps:
        await app.close()


async def test_an_account_with_much_work_does_not_starve_one_with_little(database_url):
    order = []

    @handler("work")
    async def work(job: Job[None]) -> None:
        order.append(job.resource_key)

    app = Resilient(database_url, handlers=[work])
    await app.enqueue_many(work, [None] * 400, resource_key="a/big")
    await app.enqueue_many(work, [None] * 5, resource_key="a/small")
    await app.worker(concurrency=10).drain(timeout=LIMIT)
    assert len(order) == 405
    assert max(i for i, key in enumerate(order) if key == "a/small") < 120
    await app.close()
