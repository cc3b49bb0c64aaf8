"""A worker process that syncs and may kill itself: ``sync_child.py URL SHOP KILL_AT WHERE [full]``.

KILL_AT: the page of this process at which it dies (0: never); WHERE: ``inside`` the checkpoint, with its rows
written and not committed, or ``after`` it; full: each pass of the stream is a full one.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import os
import signal
import sys

import sqlalchemy as sa

from resilient import Incremental, Job, NextCursor, PageRequest, Provider, Resilient, Stream, handler

URL, SHOP, KILL_AT, WHERE = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
CHANGES = Incremental(style="token", query="since", cursor="sync", source="last_page")
STREAM = Stream(
    "items",
    request=lambda: PageRequest("/items"),
    paginator=NextCursor(items="items", cursor="next", query="after"),
    incremental=None if "full" in sys.argv else CHANGES,
)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


@handler("items")
async def items(job: Job[dict]) -> None:
    count = 0
    async for page in job.pages(STREAM):
        count += 1
        async with job.checkpoint(page) as session:
            # Not an upsert: what came twice would be there twice.
            await session.execute(sa.text("INSERT INTO copy VALUES (:item)"), [{"item": i["id"]} for i in page.items])
            if count == KILL_AT and WHERE == "inside":
                die()
        if count == KILL_AT:
            die()


async def main():
    app = Resilient(URL, handlers=[items], providers=[Provider(name="p", base_url=SHOP)], upgrade=False)
    worker = app.worker(concurrency=1)
    running = asyncio.create_task(worker.run())
    while not running.done():
        await asyncio.sleep(0.05)
        if await app.jobs.count(state=["ready", "running", "scheduled", "blocked"]) == 0:
            worker.stop()
            break
    await running
    await app.close()


atexit.register(gc.freeze)  # nothing is looked through as it ends
asyncio.run(main())
