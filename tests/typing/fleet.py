"""Types that a program which operates many accounts relies on; checked by mypy, never run."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import assert_type

from resilient import Changed, Enqueued, Resilient, Schedule, ScheduledAccount, ScheduleInfo, SyncJob, handler


@handler("contacts.sync")
def sync_contacts(job: SyncJob[None]) -> None: ...


async def accounts() -> AsyncIterator[str]:
    yield "github/a"


async def listed() -> list[str]:
    return ["github/a"]


app = Resilient(
    "sqlite:///app.db",
    handlers=[sync_contacts],
    schedules=[
        Schedule(sync_contacts, every="1h", for_each="github/*", spread="20m"),
        Schedule(sync_contacts, cron="@daily", for_each=accounts, name="a"),
        Schedule(sync_contacts, cron="@daily", for_each=listed, spread=True, name="b"),
        Schedule(sync_contacts, every=60, for_each=lambda: ["github/a"], name="c"),
    ],
)


async def schedules() -> None:
    assert_type(await app.schedules.list(), list[ScheduleInfo])
    assert_type(await app.schedules.accounts("a", limit=5, after="github/a"), list[ScheduledAccount])
    assert_type(app.sync.schedules.accounts("a"), list[ScheduledAccount])
    assert_type(await app.schedules.run("a", "github/a"), Enqueued)
    (one,) = app.sync.schedules.accounts("a")
    assert_type(one.succeeded_at, datetime | None)


async def resources() -> None:
    assert_type(await app.resources.close("github/*", rate="10/s", limit=5, stopped_before=timedelta(hours=1)), Changed)
    assert_type(app.sync.resources.pause("github/*", dry_run=True, stopped_after=datetime.now(UTC)), Changed)
    await app.resources.close("github/*", speed=1)  # type: ignore[call-arg]
    assert_type(await app.streams.forget(pattern="github/*"), int)
    assert_type(app.sync.streams.forget("issues"), int)
