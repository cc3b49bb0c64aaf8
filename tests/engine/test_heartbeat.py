"""The thread that keeps leases: also while a handler blocks the event loop, but not for ever."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta

from resilient import Job, Resilient, handler
from resilient.engine.run import heartbeat
from resilient.store.db.dialect import TIME
from tests.helpers import LIMIT, brisk, until


async def block_until(app, condition):
    """Keep the event loop until ``condition(lease_until, now)`` of the only job: true if that came."""
    lease, end = "SELECT lease_until FROM {job}", time.monotonic() + LIMIT
    while time.monotonic() < end:
        row = app.database.transaction_sync(lambda c, d: (d.run(c, lease, lease_until=TIME).scalar(), d.now(c)))
        if condition(*row):
            return True
        time.sleep(0.05)  # noqa: ASYNC251 - the point
    return False


async def test_a_loop_that_is_blocked_keeps_its_jobs_for_a_while(database_url):
    leases = set()

    @handler("blocks")
    async def blocks(job: Job[None]) -> None:
        assert await block_until(app, lambda until, _now: leases.add(until) or len(leases) > 3)

    app = Resilient(database_url, handlers=[blocks], upgrade=False)
    job = await app.enqueue(blocks, resource_key="p/1")
    await drain_with(brisk(app.worker()))
    assert ((await app.jobs.get(job.id)).state, len(leases)) == ("succeeded", 4)
    await app.close()


async def test_a_loop_that_is_blocked_for_too_long_keeps_no_job_from_other_workers(database_url, monkeypatch):
    """A handler that never gives the loop back would hold all the worker's jobs for as long as the process lives."""
    monkeypatch.setattr(heartbeat, "BLOCKED_LIMIT", 0.6)
    ended = []

    @handler("blocks")
    async def blocks(job: Job[None]) -> None:
        if not ended:  # it may be rescued and run again: its lease is over
            ended.append(await block_until(app, lambda until, now: until < now))

    app = Resilient(database_url, handlers=[blocks], upgrade=False)
    await app.enqueue(blocks, resource_key="p/1")
    await drain_with(app.worker(lease=1.0))
    assert ended == [True]
    await app.close()


async def test_who_may_have_blocked_the_loop_is_named(database_url, caplog):
    @handler("one")
    async def one(job: Job[None]) -> None:
        beat._warn(2.0)

    app = Resilient(database_url, handlers=[one], upgrade=False)
    worker = app.worker()
    beat = worker.heartbeat
    beat._warn(1.5)
    await app.enqueue(one, resource_key="p/1")
    await drain_with(worker)
    first, second = [line.partition(". It is at")[0] for line in caplog.messages if "event loop" in line]
    assert first.endswith(
        "for 1.5 s while no job ran: by this program beside its handlers, or because the machine is busy"
    )
    assert second.endswith("for 2.0 s by job one: make the handler a plain def, or await its work")
    await app.close()


async def test_how_long_the_loop_stood_still_is_in_its_row(database_url):
    lags = []

    def beaten(c, d):
        return d.run(c, "SELECT loop_lag FROM {worker}").scalar()

    @handler("blocks")
    async def blocks(job: Job[None]) -> None:
        if job.payload is None and not lags:
            lags.append(app.database.transaction_sync(beaten))
            time.sleep(1.3)  # noqa: ASYNC251 - the point
        end = time.monotonic() + LIMIT
        while time.monotonic() < end and max(lag or 0 for lag in lags) < 1:
            lags.append(await app.database.transaction(beaten))
            await asyncio.sleep(0)

    app = Resilient(database_url, handlers=[blocks], upgrade=False)
    await app.enqueue(blocks, resource_key="p/1")
    await drain_with(brisk(app.worker()))
    assert lags[0] < 0.5, "before it stood still"
    assert 1.0 < max(lags[1:]) < LIMIT
    await app.close()


async def test_a_job_whose_row_is_deleted_is_ended(database_url):
    """By hand, or with its account: what its handler would still send is for nobody."""
    ended = []

    @handler("waits")
    async def waits(job: Job[None]) -> None:
        await app.database.transaction(lambda c, d: d.run(c, "DELETE FROM {job}"))
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append(True)
            raise

    app = Resilient(database_url, handlers=[waits], upgrade=False)
    await app.enqueue(waits, resource_key="p/1")
    await drain_with(brisk(app.worker()))
    assert (ended, await app.jobs.count()) == ([True], 0)
    await app.close()


async def drain_with(worker):
    await worker.drain(timeout=LIMIT + LIMIT)


async def test_a_worker_knows_how_many_look_for_the_same(database_url):
    """Those that stop, that have not been heard of for a while, or run other kinds look for nothing of its own."""

    @handler("works")
    async def works(job: Job[None]) -> None:
        pass

    @handler("rests")
    async def rests(job: Job[None]) -> None:
        pass

    app = Resilient(database_url, handlers=[works, rests], upgrade=False)
    same, other, gone = (app.worker(kinds=kinds) for kinds in (["works"], None, ["works"]))
    stopping, worker = app.worker(kinds=["works"]), app.worker(kinds=["works"])
    stopping.stop()
    for one in (same, other, gone, stopping):
        one.heartbeat._beat()
    old = "UPDATE {worker} SET seen_at = :at WHERE id = :id"
    app.database.transaction_sync(lambda c, d: d.run(c, old, {"at": d.now(c) - timedelta(seconds=13), "id": gone.id}))
    worker.heartbeat._beat()
    assert worker.link.fleet == worker.dispatcher.fleet() == 2
    await app.close()


async def test_the_loop_counts_as_alive_after_the_engine_failed_over_an_alert(database_url, monkeypatch, caplog):
    """Otherwise it would seem to stand still, and after a while the worker would renew no lease."""

    @handler("works")
    async def works(job: Job[None]) -> None:
        pass

    app = Resilient(database_url, handlers=[works], upgrade=False)
    worker, failures = app.worker(), []
    task = asyncio.create_task(worker.run(signals=False))
    await until(lambda: worker.heartbeat._ticker)

    def fail(*_):
        failures.append(worker.heartbeat._alive_at)
        raise LookupError("a mistake")

    monkeypatch.setattr(worker.heartbeat, "_report", fail)
    await until(lambda: len(failures) >= 2)
    worker.stop()
    await task
    assert failures[0] < failures[1]
    assert "the engine failed over an alert of the database" in caplog.text
    await app.close()


async def test_an_outage_is_one_line_however_many_beats_it_lasts(sqlite_url, caplog):
    @handler("works")
    async def works(job: Job[None]) -> None:
        pass

    app = Resilient(sqlite_url, handlers=[works], upgrade=False)
    worker = brisk(app.worker())

    def rename(before, after):
        app.database.transaction_sync(lambda c, _d: c.exec_driver_sql(f"ALTER TABLE {before} RENAME TO {after}"))

    def lines(text):
        return [record.levelname for record in caplog.records if text in record.getMessage()]

    caplog.set_level("DEBUG", "resilient.worker")
    task = asyncio.create_task(worker.run(signals=False))
    await until(lambda: worker.heartbeat._ticker)
    rename("resilient_worker", "away")
    await until(lambda: len(lines("heartbeat failed")) >= 3)
    rename("away", "resilient_worker")
    await until(lambda: lines("reaches the database again"))
    worker.stop()
    await task
    await app.close()
    first, *others = lines("heartbeat failed")
    assert (first, set(others)) == ("WARNING", {"DEBUG"})
    assert lines("reaches the database again") == ["WARNING"]
