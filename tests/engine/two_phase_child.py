"""A worker process that may kill itself in the middle of a job: ``two_phase_child.py URL WHERE``.

WHERE: ``inside`` the complete block, ``after`` it (written, not committed), ``committed`` (right after the commit, with
nothing else done), or ``never``; ``stopped``: it is frozen inside, as a suspended machine is.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import os
import signal
import sys

import sqlalchemy as sa

from resilient import Job, Resilient, Retry, SyncJob, handler

URL, WHERE = sys.argv[1], sys.argv[2]
PATIENT = Retry(max_rescues=20)
INSERT = sa.text("INSERT INTO effect (name) VALUES (:name)")


def die(here):
    if here == WHERE:
        os.kill(os.getpid(), signal.SIGKILL)
    if (here, WHERE) == ("inside", "stopped"):
        os.kill(os.getpid(), signal.SIGSTOP)


@handler("next")
async def after(job: Job[str]) -> None: ...


@handler("async", retry=PATIENT)
async def work(job: Job[None]) -> str:
    async with job.complete() as session:
        await session.execute(INSERT, {"name": "async"})
        job.then(after, "async")
        job.after_commit(lambda: die("committed"))
        die("inside")
    die("after")
    return "done"


@handler("plain", retry=PATIENT)
def work_plain(job: SyncJob[None]) -> str:
    with job.complete() as session:
        session.execute(INSERT, {"name": "plain"})
        job.then(after, "plain")
        job.after_commit(lambda: die("committed"))
        die("inside")
    die("after")
    return "done"


async def main():
    app = Resilient(URL, handlers=[work, work_plain, after], upgrade=False)
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
