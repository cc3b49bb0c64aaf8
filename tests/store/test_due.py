"""One question tells whether there is anything to stage."""

from datetime import timedelta
from uuid import uuid4

from resilient.store.jobs import insert as jobs
from resilient.store.jobs import ready


def put(database, **options):
    database.transaction_sync(jobs.insert, [jobs.NewJob(uuid4(), "k", "p/a", "1", **options)])


async def look(database):
    return await database.statement(ready.read_due)


async def test_nothing_is_due_in_an_empty_database(database, clock):
    assert await look(database) == ready.Due(clock.now(), None, None, edges=False, workflows=False)
    assert not (await look(database)).anything


async def test_ready_jobs_are_not_its_business(database, clock):
    put(database)
    assert not (await look(database)).anything


async def test_a_scheduled_job_is_due_at_its_time(database, clock):
    put(database, run_at=clock.now() + timedelta(seconds=60))
    found = await look(database)
    assert (found.job_at, found.anything) == (clock.now() + timedelta(seconds=60), False)
    clock.advance(60)
    assert (await look(database)).anything


async def test_a_parked_turn_is_due_at_its_time(database, clock):
    at = clock.now() + timedelta(seconds=5)
    database.transaction_sync(
        lambda c, d: d.run(c, "INSERT INTO {turn} (resource_key, priority, parked_on, recheck_at)"
                              " VALUES ('p/a', 0, 'p', :at)", {"at": d.time(at)}))  # fmt: skip
    found = await look(database)
    assert (found.turn_at, found.anything) == (at, False)
    clock.advance(5)
    assert (await look(database)).anything


async def test_the_databases_own_clock_is_taken_without_another(postgres_url, open_database):
    database = open_database(postgres_url, clock=None)
    found = await look(database)
    assert found.now == await look_at_clock(database, found.now)


async def look_at_clock(database, now):
    later = await database.transaction(lambda c, d: d.now(c))
    assert timedelta(0) < later - now < timedelta(seconds=10)
    return now
