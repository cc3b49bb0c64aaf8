"""`Resilient` itself and what operates it, as mypy and pyright see them: nobody runs this file."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, assert_type

from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from resilient import (
    Access,
    AlertInfo,
    ConnectionInfo,
    Deleted,
    Discarded,
    Enqueued,
    Job,
    LinkHeader,
    Page,
    PageRequest,
    Pruned,
    Resilient,
    ScheduleInfo,
    Stream,
    Sweep,
    SyncJob,
    SyncThrough,
    SyncWorkflow,
    Through,
    Worker,
    Workflow,
    handler,
)

if TYPE_CHECKING:
    from resilient.core.jobs.records import Changed
    from resilient.core.sync.stream import CursorInfo


class Issue:
    """A record of a stream."""


issues = Stream[Issue]("issues", request=lambda repo: PageRequest(f"/repos/{repo}/issues"), paginator=LinkHeader())


@handler("tidy")
async def tidy(job: Job[None]) -> None:
    """A job."""


app = Resilient("sqlite:///app.db", handlers=[tidy])


async def life() -> None:
    """From the tables to the end."""
    async with app as same, app.lifespan():
        assert_type(same, Resilient)
    await app.ready()
    app.ready_sync()
    app.poke()
    await app.keep_house()
    assert_type(app.now(), datetime)
    assert_type(await app.credentials("github/a"), Access)
    assert_type(await app.prune(older_than="30d", state=["dead"], limit=5, dry_run=True), Pruned)
    assert_type(app.prune_sync(older_than=timedelta(days=30)), Pruned)
    assert_type(app.sync.prune(state="dead"), Pruned)
    await app.prune(older="30d")  # type: ignore[call-arg]
    await app.close()
    app.sync.close()


async def work() -> None:
    """Workers."""
    worker = app.worker(concurrency=4, kinds=["tidy"], lease=30, grace=5)
    assert_type(worker, Worker)
    assert_type(await worker.drain(timeout=5), int)
    await worker.run(signals=False)
    worker.stop()
    assert_type(worker.stopping, bool)
    app.worker(concurrency="4")  # type: ignore[arg-type]
    app.worker(threads=4)  # type: ignore[call-arg]


def workflows(session: Session) -> None:
    """Both faces begin workflows."""
    assert_type(app.workflow("order", resource_key="shop/1"), Workflow)
    assert_type(app.workflow_sync("order", session=session), SyncWorkflow)
    assert_type(app.enqueue_many_sync(tidy, [None, None], resource_key="shop/1"), list[Enqueued])
    app.workflow(7)  # type: ignore[arg-type]


async def jobs() -> None:
    """What the look at jobs and the other changes leave out."""
    assert_type(await app.jobs.discard(state="blocked", limit=5), Discarded)
    assert_type(await app.jobs.delete(["id"], dry_run=True), Deleted)
    assert_type(app.sync.jobs.delete(kind="tidy", finished_before=timedelta(days=30)), Deleted)
    await app.jobs.edit("id", priority=5, delay=10, expires_at=None, tags={"a": "b"})
    await app.jobs.edit("id", priority="high")  # type: ignore[arg-type]
    await app.jobs.edit("id", run_at="tomorrow")  # type: ignore[arg-type]
    await app.jobs.delete(everything="yes")  # type: ignore[arg-type]


async def resources() -> None:
    """Gates, opened and closed by hand."""
    assert_type(await app.resources.resume("github/*", limit=5), Changed)
    assert_type(await app.resources.open("github/a", until=datetime.now(UTC), reason="maintenance"), Changed)
    assert_type(await app.resources.reset("github/a", gate="any"), Changed)
    assert_type(app.sync.resources.reset("github/a"), Changed)
    await app.resources.open("github/a", gate="door")  # type: ignore[arg-type]


async def schedules() -> None:
    """Recurring jobs."""
    assert_type(await app.schedules.pause("tidy@house"), ScheduleInfo)
    assert_type(app.sync.schedules.resume("tidy@house"), ScheduleInfo)
    await app.schedules.pause(name=1)  # type: ignore[arg-type]


async def connections() -> None:
    """Accounts."""
    assert_type(await app.connections.get("github/a"), ConnectionInfo)
    assert_type(await app.connections.list("github", state="active", limit=5, after="github/a"), list[ConnectionInfo])
    assert_type(await app.connections.add("github/a", token="t", details={"host": "h"}), ConnectionInfo)
    await app.connections.import_("github/a", access_token="t", refresh_token="r", expires_at=datetime.now(UTC))
    assert_type(app.sync.connections.add("github/a", user="u", password="p"), ConnectionInfo)
    assert_type(await app.connections.revoke("github/a"), bool)
    assert_type(await app.connections.disconnect("github/a"), bool)
    assert_type(await app.connections.rotate_secrets(), int)
    await app.connections.add("github/a", secret="t")  # type: ignore[call-arg]
    await app.connections.import_("github/a", expires_at=3600)  # type: ignore[arg-type]


async def streams() -> None:
    """Cursors, and alerts."""
    assert_type(await app.streams.list(issues, "github/*"), list[CursorInfo])
    assert_type(await app.streams.reset("issues", part="a", reason="a schema change"), int)
    assert_type(app.sync.streams.reset(issues), int)
    assert_type(await app.alerts.list(resolved=True, limit=5), list[AlertInfo])
    assert_type(app.sync.alerts.list(), list[AlertInfo])
    await app.streams.reset()  # type: ignore[call-arg]
    await app.alerts.list(limit="5")  # type: ignore[arg-type]


async def job(job: Job[None]) -> None:
    """What a coroutine is given."""
    assert_type(await job.through("smtp/a"), Through)
    await job.progress({"page": 3})
    assert_type(job.idempotency_key, str)
    assert_type(job.cancel_requested, bool)
    assert_type(job.pages(issues, repo="a/b"), AsyncIterator[Page[Issue]])
    assert_type(job.complete(), AbstractAsyncContextManager[AsyncSession])
    assert_type(job.prepare(), AbstractAsyncContextManager[AsyncSession])
    assert_type(job.sweep(issues), AbstractAsyncContextManager[Sweep[AsyncSession] | None])
    async for page in job.pages(issues):
        async with job.checkpoint(page) as session:
            assert_type(session, AsyncSession)
    job.after_commit(lambda: None)
    job.after_commit(7)  # type: ignore[arg-type]
    anything: Any = job.app, job.deps
    assert anything


def plain_job(job: SyncJob[None]) -> None:
    """What a plain function is given."""
    assert_type(job.through("smtp/a"), SyncThrough)
    job.progress(0.5)
    assert_type(job.pages(issues, repo="a/b"), Iterator[Page[Issue]])
    assert_type(job.complete(), AbstractContextManager[Session])
    assert_type(job.prepare(), AbstractContextManager[Session])
    assert_type(job.sweep(issues), AbstractContextManager[Sweep[Session] | None])
    for page in job.pages(issues):
        with job.checkpoint(page) as session:
            assert_type(session, Session)
