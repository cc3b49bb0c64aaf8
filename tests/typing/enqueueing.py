"""What enqueues is typed in full: a misspelt option, a wrong value and another kind's payload are refused.

Each ``type: ignore`` is an assertion: mypy and pyright complain of one that is not needed.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, assert_type

from pydantic import BaseModel
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from resilient import Enqueued, Item, Job, Kind, Resilient, SyncJob, handler


class Mail(BaseModel):
    """A payload."""

    to: str


class Urgent(Mail):
    """A payload that is a `Mail` too."""


@handler("mail.send")
async def send(job: Job[Mail]) -> None:
    """Sends, and has a follow-up job."""
    job.then(log, Mail(to="b"), delay=5, tags={"of": "b"})
    job.then(log, Mail(to="b"), delays=5)  # type: ignore[call-overload]
    job.then(log, "b")  # type: ignore[misc]
    job.then(log)  # type: ignore[arg-type]


@handler("mail.log")
def log(job: SyncJob[Mail]) -> None:
    """A plain one."""
    job.then(send, Mail(to="b"), priority="high")  # type: ignore[call-overload]


@handler("tidy")
async def tidy(job: Job[None]) -> None:
    """Without a payload."""
    job.then(tidy)


other = Kind[Mail]("mail.other", Mail)
anything: Kind[Any] = Kind("any")
optional = Kind[Mail | None]("mail.optional")
app = Resilient("sqlite:///app.db", handlers=[send, log, tidy], kinds=[other])


async def asynchronously(session: AsyncSession, connection: AsyncConnection) -> None:
    """``await app.enqueue(...)``."""
    now = datetime.now(UTC)
    done = await app.enqueue(send, Mail(to="a"), resource_key="smtp/a", session=session)
    assert_type(done, Enqueued)
    await app.enqueue(log, Urgent(to="a"), resource_key="smtp/a", session=connection)
    await app.enqueue(other, Mail(to="a"), resource_key="smtp/a", run_at=now, expires_in=timedelta(hours=1))
    await app.enqueue(tidy, resource_key="smtp/a", unique_key="tidy", unique_until="finish", on_conflict="raise")
    await app.enqueue("mail.send", {"to": "a"}, resource_key="smtp/a", after=[done, done.id], on_dead="run")
    await app.enqueue(send, Mail(to="a"))  # type: ignore[call-overload]
    await app.enqueue(send, Mail(to="a"), resource_key="smtp/a", prioritty=1)  # type: ignore[call-overload]
    await app.enqueue(send, Mail(to="a"), resource_key="smtp/a", on_dead="stop")  # type: ignore[call-overload]
    await app.enqueue(send, Mail(to="a"), resource_key="smtp/a", session="s")  # type: ignore[call-overload]
    await app.enqueue(send, "a", resource_key="smtp/a")  # type: ignore[misc]
    await app.enqueue(other, 1, resource_key="smtp/a")  # type: ignore[misc]
    await app.enqueue(send, resource_key="smtp/a")  # type: ignore[arg-type]
    await app.enqueue(send, None, resource_key="smtp/a")  # type: ignore[arg-type]
    await app.enqueue(tidy, Mail(to="a"), resource_key="smtp/a")  # type: ignore[misc]
    await app.enqueue(anything, resource_key="smtp/a")
    await app.enqueue(anything, {"to": "a"}, resource_key="smtp/a")
    await app.enqueue(optional, None, resource_key="smtp/a")


async def many(session: AsyncSession) -> None:
    """``await app.enqueue_many(...)``."""
    mails = [Mail(to="a"), Mail(to="b")]
    assert_type(await app.enqueue_many(send, mails, resource_key="smtp/a", session=session), list[Enqueued])
    await app.enqueue_many(send, [Item(one, resource_key=f"smtp/{one.to}") for one in mails], tags={"a": "b"})
    await app.enqueue_many("mail.send", ({"to": "a"} for _ in range(3)), resource_key="smtp/a")
    await app.enqueue_many(send, mails, resource_key="smtp/a", tag={"a": "b"})  # type: ignore[call-arg]
    await app.enqueue_many(send, ["a"], resource_key="smtp/a")  # type: ignore[misc]


def synchronously(session: Session, connection: Connection) -> None:
    """``app.sync.enqueue(...)``, and ``app.enqueue_sync(...)``, which is the same."""
    assert_type(app.sync.enqueue(send, Mail(to="a"), resource_key="smtp/a", session=session), Enqueued)
    assert_type(app.enqueue_sync(send, Mail(to="a"), resource_key="smtp/a", session=connection), Enqueued)
    assert_type(app.sync.enqueue_many(send, [Mail(to="a")], resource_key="smtp/a"), list[Enqueued])
    app.sync.enqueue(send, Mail(to="a"), resource_key="smtp/a", orderingkey="k")  # type: ignore[call-overload]
    app.sync.enqueue(send, resource_key="smtp/a")  # type: ignore[arg-type]
    app.enqueue_sync(send, resource_key="smtp/a")  # type: ignore[arg-type]
    app.sync.enqueue(send, {"to": "a"}, resource_key="smtp/a")  # type: ignore[misc]
    app.sync.enqueue_many(send, [1], resource_key="smtp/a")  # type: ignore[misc]


async def steps() -> None:
    """A step takes the options of a job, but for those that its workflow decides."""
    async with app.workflow("mails", resource_key="smtp/a") as wf:
        first = wf.step(send, Mail(to="a"), delay=5)
        wf.step(log, Mail(to="a"), after=first, ordering_key="k")
        wf.step(log, after=first)  # type: ignore[arg-type]
        wf.step(log, Mail(to="a"), unique_key="k")  # type: ignore[call-overload]
        wf.step(log, Mail(to="a"), dellay=5)  # type: ignore[call-overload]
