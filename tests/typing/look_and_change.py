"""`app.jobs` and `app.resources` as mypy and pyright see them: both faces have the same types."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, assert_type

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession
    from sqlmodel import Session

    from resilient import Resilient
    from resilient.core.inspect.why import Why
    from resilient.core.jobs.records import (
        AttemptInfo,
        Cancelled,
        Changed,
        Count,
        Edited,
        JobInfo,
        ResourceInfo,
        Retried,
        StoppedGroup,
    )


async def look(app: Resilient, session: AsyncSession) -> None:
    """The async face."""
    assert_type(await app.jobs.get("id", session=session), JobInfo)
    assert_type(await app.jobs.list(state="dead", tags={"user": "7"}, finished_after=timedelta(hours=1)), list[JobInfo])
    assert_type(await app.jobs.count(resource=["github/*", "gitlab/*"]), Count)
    assert_type(await app.jobs.attempts("id"), list[AttemptInfo])
    assert_type(await app.jobs.why("id"), Why)
    assert_type(await app.resources.get("github/a"), ResourceInfo)
    assert_type(await app.resources.summary(), list[StoppedGroup])
    await app.jobs.list(state=7)  # type: ignore[arg-type]
    await app.jobs.list(colour="red")  # type: ignore[call-arg]


async def change(app: Resilient, session: AsyncSession) -> None:
    """The async face."""
    assert_type(await app.jobs.cancel("id", dry_run=True), Cancelled)
    assert_type(await app.jobs.edit({"kind": "mail.send"}, payload=None, max_attempts=None), Edited)
    assert_type(await app.jobs.retry(state="dead", rate="10/s", session=session), Retried)
    assert_type(await app.resources.pause("github/*", until=timedelta(minutes=5)), Changed)
    assert_type(await app.resources.limit("github/a", limits=["100/min"], concurrency=None), Changed)


def synchronously(app: Resilient, session: Session) -> None:
    """The synchronous face, with SQLModel's session."""
    assert_type(app.sync.jobs.get("id", session=session), JobInfo)
    assert_type(app.sync.jobs.list(limit=5, kind="mail.send"), list[JobInfo])
    assert_type(app.sync.jobs.retry(["id"], repeat_ambiguous=True), Retried)
    assert_type(app.sync.resources.why("github/a"), Why)
    app.sync.jobs.list(limit="5")  # type: ignore[arg-type]
