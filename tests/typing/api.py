"""The public types, as a specification: mypy and pyright read this file, nobody runs it."""

from __future__ import annotations

from typing import Any, assert_type
from uuid import UUID

import httpx
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from resilient import (
    Access,
    Batch,
    Credentials,
    Enqueued,
    Handler,
    Job,
    Kind,
    Resilient,
    Retry,
    Snooze,
    SyncBatch,
    SyncJob,
    SyncThrough,
    Through,
    Transient,
    handler,
    testing,
)
from resilient.wire.requests.client import AsyncClient, Client


class Mail(BaseModel):
    """A payload."""

    to: str


@handler("mail.send", retry=Retry(max_attempts=3))
async def send(job: Job[Mail]) -> int:
    """An async handler."""
    assert_type(job.payload, Mail)
    assert_type(job.client, AsyncClient)
    assert_type(job.id, UUID)
    await job.progress({"done": 1})
    assert_type(job.transport, httpx.AsyncBaseTransport)
    other = await job.through("slack/team-1")
    assert_type(other, Through)
    assert_type(other.client, AsyncClient)
    async with other.call("GET", "https://slack.com/api/x") as abroad:
        assert_type(abroad.params, dict[str, str])
    async with job.prepare() as session:
        assert_type(session, AsyncSession)
    async with job.complete() as session:
        assert_type(session, AsyncSession)
        assert_type(job.then(log, Mail(to="b"), delay=5), Enqueued)
        job.then(nothing)
        job.then("mail.other", {"to": "c"}, resource_key="smtp/acct-2")
        job.then(log, 1)  # type: ignore[misc]
        job.after_commit(lambda: None)
    async with job.call("GET", "https://api.example.com/x") as call:
        call.report(200, {}, b"")
    return 1


@handler("nothing", mode="atomic")
def nothing(job: SyncJob[None]) -> None:
    """Without a payload, in one transaction."""


@handler("mail.log")
def log(job: SyncJob[Mail]) -> str:
    """A plain handler."""
    assert_type(job.payload, Mail)
    assert_type(job.client, Client)
    assert_type(job.through("slack/team-1"), SyncThrough)
    assert_type(job.through("slack/team-1").client, Client)
    job.progress(1)
    with job.prepare() as session, job.complete() as also:
        assert_type(session, Session)
        assert_type(also, Session)
    job.then(send, Mail(to="b"))
    with job.call("GET", "https://api.example.com/x") as call:
        call.report(200, {}, b"")
    return "ok"


assert_type(send, Handler[Mail, int])
assert_type(log, Handler[Mail, str])
assert_type(testing.job(Mail(to="a")), Job[Mail])
assert_type(testing.sync_job(Mail(to="a")), SyncJob[Mail])


@handler("mail.many", batch=200)
async def many(jobs: Batch[Mail]) -> None:
    """A batch handler."""
    for job in jobs:
        assert_type(job, Job[Mail])
        jobs.fail(job, Transient())
    jobs.succeed(jobs[0], {"sent": 1})


@handler("mail.plain_many", batch=10, timeout=60)
def plain_many(jobs: SyncBatch[Mail]) -> Snooze | None:
    """A plain one."""
    assert_type(jobs[0].payload, Mail)
    assert_type(jobs[0].client, Client)
    return Snooze(10) if len(jobs) == 1 else None


assert_type(many, Handler[Mail, Any])
assert_type(plain_many, Handler[Mail, Any])
assert_type(testing.batch([Mail(to="a")]), Batch[Mail])
assert_type(testing.sync_batch([Mail(to="a")]), SyncBatch[Mail])

app = Resilient("sqlite:///app.db", handlers=[send, log, many, plain_many], kinds=[Kind[Mail]("mail.other", Mail)])


async def use() -> None:
    """The app's own types."""
    assert_type(await app.enqueue(send, Mail(to="a"), resource_key="smtp/acct-1"), Enqueued)
    assert_type(await app.enqueue_many(send, [Mail(to="a")], resource_key="smtp/acct-1"), list[Enqueued])
    assert_type(app.sync.enqueue(send, Mail(to="a"), resource_key="smtp/acct-1"), Enqueued)
    result: Any = send(testing.job(Mail(to="a")))
    await result
    assert_type(await app.worker(concurrency=10).drain(), int)
    assert_type(await app.credentials("smtp/acct-1"), Access)
    assert_type(app.sync.credentials("smtp/acct-1"), Access)


class Tokens:
    """An app's own table, in plain functions."""

    def load(self, resource_key: str) -> Credentials | None:
        """One account's."""

    def save(self, resource_key: str, expected_version: int, credentials: Credentials) -> bool:
        """If nobody was faster."""
        return bool(resource_key and expected_version and credentials)


Resilient("sqlite:///app.db", credentials=Tokens())
