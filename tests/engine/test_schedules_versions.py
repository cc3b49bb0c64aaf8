"""Programs with different schedules at once: two versions during a rollout, two programs with the same handlers."""

from datetime import timedelta

import pytest

from resilient import InvalidInput, Resilient, Schedule
from resilient.store.inspect import retention
from resilient.store.schedules import programs
from tests.engine.test_schedules import hourly, sync

GONE = programs.GONE + timedelta(seconds=1)


@pytest.fixture
def make(database_url, open_database, clock, monkeypatch):
    """Programs that look after their declarations each time they tick."""
    monkeypatch.setattr(programs, "LOOK", timedelta())

    def make(*schedules):
        return Resilient(open_database(database_url), handlers=[sync], schedules=schedules)

    return make


async def shown(app):
    return {one.name: "removed" if one.removed else one.timing for one in await app.schedules.list()}


async def while_they_run(clock, *apps):
    """Some time in which these programs' workers tick."""
    for _ in range(10):
        clock.advance(GONE.total_seconds() / 10)
        for app in apps:
            await app.schedules.tick()


async def test_an_old_worker_that_starts_in_the_middle_of_a_rollout_takes_nothing_from_the_new_version(make, clock):
    new = make(hourly(), hourly(name="t"))
    await make(hourly()).schedules.tick()
    await new.schedules.tick()
    old = make(hourly())  # it crashed, and was started again
    await old.schedules.tick()
    assert await shown(new) == {"s": "every 1 h", "t": "every 1 h"}
    await while_they_run(clock, new, old)
    clock.advance(hours=1)
    assert await new.schedules.tick() == 2


async def test_what_an_old_worker_wrote_counts_until_the_last_of_them_is_gone(make, clock):
    new = make(hourly(every="2h", resource_key="github/new"))
    await new.schedules.tick()
    old = make(hourly())
    await old.schedules.tick()
    await while_they_run(clock, new, old)
    assert await shown(new) == {"s": "every 1 h"}  # the one that was written last, without a to and fro
    await while_they_run(clock, new)
    assert await shown(new) == {"s": "every 2 h"}
    clock.advance(hours=2)
    await new.schedules.tick()
    assert [job.resource_key for job in await new.jobs.list()] == ["github/new"]


async def test_what_the_new_version_dropped_ticks_until_the_old_one_is_gone(make, clock):
    old = make(hourly(), hourly(name="t"))
    await old.schedules.tick()
    new = make(hourly())
    await new.schedules.tick()
    await while_they_run(clock, new, old)
    assert await shown(new) == {"s": "every 1 h", "t": "every 1 h"}
    await while_they_run(clock, new)
    assert await shown(new) == {"s": "every 1 h", "t": "removed"}
    await while_they_run(clock, old)  # the new version was a mistake
    assert await shown(old) == {"s": "every 1 h", "t": "every 1 h"}


async def test_two_programs_with_the_same_handlers_keep_their_own_schedules(make, clock):
    a, b = make(hourly(name="a")), make(hourly(name="b"))
    for _ in range(2):
        await a.schedules.tick()
        await b.schedules.tick()
        await make(hourly(name="b")).schedules.tick()  # one more worker of it
    await while_they_run(clock, a, b)
    assert await shown(a) == {"a": "every 1 h", "b": "every 1 h"}


async def test_who_was_away_itself_takes_nothing_from_others(make, clock):
    """An outage of the database, or a laptop that slept: the others come back in the same moment."""
    a, b = make(hourly(name="a")), make(hourly(name="b"))
    await a.schedules.tick()
    await b.schedules.tick()
    clock.advance(hours=3)
    await b.schedules.tick()
    assert await shown(b) == {"a": "every 1 h", "b": "every 1 h"}
    assert await a.schedules.tick() == 1  # of the three ticks that nobody was there for
    await while_they_run(clock, b)
    await while_they_run(clock, b)
    assert await shown(b) == {"a": "removed", "b": "every 1 h"}


async def test_nobody_removes_what_a_program_declares_whose_workers_run(make, clock):
    await make(hourly()).schedules.tick()
    other = make()
    with pytest.raises(InvalidInput, match="schedule 's' is declared by a program whose workers run"):
        await other.schedules.remove("s")
    clock.advance(GONE.total_seconds())
    await other.schedules.remove("s")
    assert await shown(other) == {"s": "removed"}


async def test_a_hundred_workers_of_a_program_are_one_row_and_one_that_is_gone_for_long_is_forgotten(make, clock):
    def rows(c, d):
        return d.run(c, "SELECT count(*) FROM {schedule} WHERE name LIKE 'engine:program:%'").scalar()

    apps = [make(hourly()) for _ in range(5)]
    for app in apps:
        await app.schedules.tick()
    await make(Schedule(sync, {"n": 1}, every="1h", resource_key="a")).schedules.tick()
    assert await apps[0].database.transaction(rows) == 2
    clock.advance(days=31)
    await apps[0].schedules.tick()
    await apps[0].database.transaction(retention.forget_notes, clock.now() - timedelta(days=30))
    assert await apps[0].database.transaction(rows) == 1
