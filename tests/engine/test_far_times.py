"""Times that lie outside of the calendar in UTC: what was taken is read again, and no job stops the others.

PostgreSQL stores the year 10000, and psycopg reads none of its rows: a single one stopped every page and every worker.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest

from resilient import InvalidInput, Job, Resilient, Snooze, Throttled, handler
from resilient.core.base.instants import FAR, NEAR

WEST, EAST = timezone(timedelta(hours=-14)), timezone(timedelta(hours=14))
LAST = datetime.max.replace(tzinfo=WEST)  # the year 10000 in UTC
FIRST = datetime.min.replace(tzinfo=EAST)  # the year 0
EVER = timedelta(days=999_999_990)


@handler("contact.push")
async def push(job: Job[str]) -> None:
    match job.payload:
        case "snooze":
            raise Snooze(until=LAST)
        case "throttled":
            raise Throttled("later", until=LAST)


@pytest.fixture
async def app(database):
    app = Resilient(database, handlers=[push], providers=[])
    await app.ready()
    yield app
    await app.close()


async def test_a_job_at_the_end_of_time_is_listed_and_others_run(app):
    late = await app.enqueue(push, "", resource_key="github/a", run_at=LAST)
    early = await app.enqueue(push, "", resource_key="github/a", run_at=FIRST)
    kept = await app.enqueue(
        push, "", resource_key="github/b", run_at=datetime.max.replace(tzinfo=UTC), expires_at=LAST
    )
    await app.worker().drain()
    assert {one.id: (one.state, one.run_at) for one in await app.jobs.list(state="scheduled")} == {
        late.id: ("scheduled", FAR), kept.id: ("scheduled", FAR)
    }  # fmt: skip
    assert (await app.jobs.get(early.id)).state == "succeeded"
    assert (await app.jobs.get(kept.id)).expires_at == FAR


async def test_a_job_is_moved_to_the_end_of_time(app):
    job = await app.enqueue(push, "", resource_key="github/a", delay=60)
    await app.jobs.edit(job.id, run_at=LAST, expires_at=LAST)
    (listed,) = await app.jobs.list()
    assert (listed.run_at, listed.expires_at) == (FAR, FAR)


@pytest.mark.parametrize("word", ["snooze", "throttled"])
async def test_a_handler_waits_until_the_end_of_time(app, word):
    job = await app.enqueue(push, word, resource_key="github/a")
    other = await app.enqueue(push, "", resource_key="github/b")
    await app.worker().drain()
    states = {one.id: one.state for one in await app.jobs.list()}
    assert states[job.id] != "succeeded"
    assert states[other.id] == "succeeded"
    await app.resources.list(gate="any")


async def test_a_replay_that_never_ends_is_spread_up_to_the_end_of_time(app):
    jobs = [await app.enqueue(push, "", resource_key="github/a") for _ in range(3)]
    await app.worker().drain()
    await app.jobs.retry(state="succeeded", rate="1/9999999d")
    assert {one.run_at for one in await app.jobs.list(state="scheduled")} >= {FAR}
    assert len(await app.jobs.list()) == len(jobs)
    for rate in ("1/9999999999d", 5e-324):
        with pytest.raises(InvalidInput, match="further apart than the calendar"):
            await app.jobs.retry(state="succeeded", rate=rate)


@pytest.mark.parametrize("until", [LAST, EVER])
async def test_a_stop_until_the_end_of_time(app, until):
    await app.resources.pause("github/a", until=until)
    await app.resources.open("github/b", until=until)
    assert {one.key: one.until for one in await app.resources.list(gate="any")} == {"github/a": FAR, "github/b": FAR}


@pytest.mark.parametrize("until", [FIRST, -EVER])
async def test_a_stop_until_the_beginning_of_time_has_passed(app, until):
    for stop in (app.resources.pause, app.resources.open):
        with pytest.raises(InvalidInput, match="has passed"):
            await stop("github/a", until=until)


@pytest.mark.parametrize(
    ("after", "before", "number"), [(FIRST, LAST, 1), (EVER, -EVER, 1), (LAST, None, 0), (-EVER, None, 0)]
)
async def test_a_filter_by_the_ends_of_time(app, after, before, number):
    await app.enqueue(push, "", resource_key="github/a", delay=60)
    await app.resources.pause("github/a")
    jobs = await app.jobs.list(created_after=after, created_before=before, run_after=after, run_before=before)
    assert len(jobs) == number
    changed = await app.resources.resume("github/*", stopped_after=after, stopped_before=before)
    assert len(changed) == number


def test_the_ends_are_a_day_inside_of_the_calendar():
    """In whatever zone a server shows them."""
    for zone in (WEST, EAST):
        assert FAR.astimezone(zone).year == 9998 + (zone is EAST)
        assert NEAR.astimezone(zone).year == 1
