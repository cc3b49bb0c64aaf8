"""A disk without room, and one that fails: the error says so, nothing is lost, and work goes on later."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from pathlib import Path

from sqlalchemy import event

from resilient import DatabaseUnreachable, Job, Resilient, handler
from resilient.store.db import schema
from resilient.store.db.database import Database
from tests.helpers import LIMIT

TEXT = "x" * 4_000


@handler("store")
async def store(job: Job[str]) -> int:
    return len(job.payload)


async def crammed(app, before):
    """Enqueue until the disk takes no more; the ids of what was taken, and the error."""
    taken = list(before)
    while True:
        try:
            taken.append((await app.enqueue(store, TEXT, resource_key=f"p/{len(taken) % 3}")).id)
        except DatabaseUnreachable as error:
            return taken, error
        assert len(taken) < 5_000, "the disk takes everything"


async def test_a_full_disk_is_told_and_what_was_taken_is_done_when_there_is_room(sqlite_url):
    """SQLite itself is told how large its file may become, so it answers as on a full disk."""
    database, pages = Database(sqlite_url), [400]
    event.listen(
        database.sync_engine, "checkout", lambda raw, *_: raw.execute(f"PRAGMA max_page_count = {pages[0]}").fetchall()
    )
    app = Resilient(database, handlers=[store], upgrade=False)
    worker = app.worker(concurrency=2, lease=20)
    taken, error = await crammed(app, [])
    assert "make room" in str(error)
    assert TEXT not in str(error)
    running = asyncio.create_task(worker.run(signals=False))
    await asyncio.sleep(0)
    with contextlib.suppress(DatabaseUnreachable):  # what is done may make some room
        taken, _ = await crammed(app, taken)
    pages[0] = 2**30
    async with asyncio.timeout(LIMIT):
        while await app.jobs.count(state="succeeded") < len(taken):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    worker.stop()
    await running
    assert await app.jobs.count() == len(taken)
    assert {(await app.jobs.get(id_)).executions for id_ in taken[:20]} == {1}
    with database.sync_engine.connect() as c:
        assert c.exec_driver_sql("PRAGMA integrity_check").scalar() == "ok"
    await app.close()


CHILD = """
import asyncio, json, resource, sqlite3, sys, tempfile
sys.path[:0] = sys.argv[2:]
from test_disks import *
from resilient.core.base.errors import DatabaseUnreachable

async def main():
    url = sys.argv[1]
    app = Resilient(url, handlers=[store], upgrade=False)
    first = [(await app.enqueue(store, TEXT, resource_key="p/1")).id]
    wal = Path(url.removeprefix("sqlite:///") + "-wal")
    resource.setrlimit(resource.RLIMIT_FSIZE, (wal.stat().st_size + 50_000, -1))  # what goes beyond fails: EFBIG
    taken, error = await crammed(app, first)
    resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
    done = await app.worker().drain(timeout=LIMIT)
    states = [(await app.jobs.get(id_)).state for id_ in taken]
    await app.close()
    with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as c, c:
        sound = c.execute("PRAGMA integrity_check").fetchone()[0]
        rows = c.execute("SELECT count(*) FROM resilient_job").fetchone()[0]
    print(json.dumps([len(taken), rows, done, sorted(set(states)), sound, str(error), type(error).__name__]))

asyncio.run(main())
"""


def test_a_write_that_fails_is_told_and_breaks_nothing(tmp_path):
    """The operating system refuses each write beyond a size."""
    url = f"sqlite:///{tmp_path}/app.db"
    database = Database(url)
    schema.upgrade_sync(database)
    database.close_sync()
    here = Path(__file__)
    command = [sys.executable, "-c", CHILD, url, str(here.parent), str(here.parents[2])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    taken, rows, executed, states, sound, error, name = json.loads(done.stdout.splitlines()[-1])
    assert (rows, executed, states, sound) == (taken, taken, ["succeeded"], "ok")
    assert name == "DatabaseUnreachable"
    assert "I/O" in error
