"""PostgreSQL ends statements and sessions of the engine's at times that an operator set: no job pays for that."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import text

from resilient import Job, Resilient, Retry, SyncJob, handler
from resilient.core.base.errors import DatabaseUnreachable
from tests.helpers import LIMIT

CANCELLED, NO_LOCK = "57014", "55P03"
ONCE = Retry(max_attempts=1)


@handler("saves", retry=ONCE)
async def saves(job: Job[None]) -> None:
    await job.progress({"part": 1})


@handler("saves.plain", retry=ONCE)
def saves_plain(job: SyncJob[None]) -> None:
    job.progress({"part": 1})


@handler("completes", retry=ONCE)
async def completes(job: Job[None]) -> None:
    async with job.complete() as session:
        await session.execute(text("SELECT 1"))


@handler("completes.plain", retry=ONCE)
def completes_plain(job: SyncJob[None]) -> None:
    with job.complete() as session:
        session.execute(text("SELECT 1"))


@handler("slow", retry=ONCE)
async def slow(job: Job[None]) -> None:
    async with job.complete() as session:
        await session.execute(text("SET LOCAL statement_timeout = 20"))
        await session.execute(text("SELECT pg_sleep(5)"))


HANDLERS = [saves, saves_plain, completes, completes_plain, slow]
# What a DBA's timeout, or a cancel by hand, does to statements on jobs: so many of each of these in a row fail.
BREAK_OFF = """
CREATE SEQUENCE broken;
CREATE FUNCTION break_off() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  IF nextval('broken') <= {times} THEN RAISE EXCEPTION 'canceling statement' USING ERRCODE = '{state}'; END IF;
  RETURN NULL;
END $$;
CREATE TRIGGER break_off AFTER {when} ON resilient_job FOR EACH STATEMENT EXECUTE FUNCTION break_off();
"""


@pytest.fixture
async def app(postgres_url):
    made = Resilient(postgres_url, handlers=HANDLERS, upgrade=False)
    yield made
    await made.close()


async def execute(app, statements):
    """Run them; the first value of the last one's first row, if it has any."""

    def run(c, _):
        result = c.exec_driver_sql(statements)
        return result.scalar() if result.returns_rows else None

    return await app.database.transaction(run)


async def run(app, kind):
    """The job, once a worker has succeeded with it."""
    done = await app.enqueue(kind, resource_key="a/b")
    worker = app.worker()
    running = asyncio.create_task(worker.run(signals=False))
    async with asyncio.timeout(LIMIT):
        while (await app.jobs.get(done.id)).state != "succeeded":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    worker.stop()
    await running
    return await app.jobs.get(done.id)


@pytest.mark.parametrize("state", [CANCELLED, NO_LOCK])
@pytest.mark.parametrize("kind", HANDLERS[:4], ids=lambda kind: kind.kind)
async def test_a_statement_of_the_engine_that_is_broken_off_costs_no_attempt(app, kind, state, monkeypatch):
    monkeypatch.setattr("resilient.core.jobs.decide.DATABASE_PAUSE", 0.2)
    await execute(app, BREAK_OFF.format(when="UPDATE OF progress, result", state=state, times=2))
    job = await run(app, kind)
    assert job.attempts == 0
    assert await execute(app, "SELECT last_value FROM broken") > 2


async def test_a_handlers_own_statement_that_is_too_slow_is_the_handlers(app):
    done = await app.enqueue(slow, resource_key="a/b")
    await app.worker().drain()
    job = await app.jobs.get(done.id)
    assert (job.state.value, job.attempts) == ("dead", 1)
    assert "statement timeout" in job.last_error


async def test_whoever_enqueues_is_told(app):
    await execute(app, BREAK_OFF.format(when="INSERT", state=CANCELLED, times=1))
    with pytest.raises(DatabaseUnreachable, match="broke off a statement of the engine's: canceling statement"):
        await app.enqueue(saves, resource_key="a/b")
    await app.enqueue(saves, resource_key="a/b")


async def test_a_batch_of_results_that_takes_too_long_is_written_in_parts(app):
    """One that is repeated whole would take as long again."""
    ids = [(await app.enqueue(saves, resource_key=f"a/{i}")).id for i in range(8)]
    only_small = """
    CREATE FUNCTION only_small() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
      IF (SELECT count(*) FROM new WHERE state = 'succeeded') > 1 THEN
        RAISE EXCEPTION 'canceling statement due to statement timeout' USING ERRCODE = '57014';
      END IF;
      RETURN NULL;
    END $$;
    CREATE TRIGGER only_small AFTER UPDATE ON resilient_job REFERENCING NEW TABLE AS new
      FOR EACH STATEMENT EXECUTE FUNCTION only_small();
    """
    await execute(app, only_small)
    async with asyncio.timeout(LIMIT):
        await app.worker(concurrency=8).drain()
    assert [(await app.jobs.get(id_)).state.value for id_ in ids] == ["succeeded"] * 8


# -- a server that turns read-only and keeps its sessions --------------------------------------------------------------


def write(c, _):
    c.execute(text("INSERT INTO resilient_alembic_version VALUES ('x')"))
    c.execute(text("DELETE FROM resilient_alembic_version WHERE version_num = 'x'"))


@handler("writes")
async def writes(job: Job[None]) -> None:
    async with job.prepare() as session:
        await session.run_sync(lambda s: write(s.connection(), None))


async def test_sessions_at_a_server_that_takes_no_writes_any_more_are_given_up(own_postgres):
    """Others may be at the new primary: by another host of the address, its name, or a pooler."""
    name = own_postgres.create()
    app = Resilient(own_postgres.url(name), handlers=[writes], upgrade=True)
    await app.ready()

    async def refused():
        """The ways to the database that refuse a write; the next one, or the one after it, is taken."""
        ways = {
            "direct": lambda: app.enqueue(writes, resource_key="a/b"),
            "coroutines": lambda: app.database.transaction(write),
            "threads": lambda: asyncio.to_thread(app.database.transaction_sync, write),
        }
        names = set()
        for name, call in ways.items():
            for _ in range(2):
                try:
                    await call()
                except DatabaseUnreachable:
                    names.add(name)
                else:
                    break
            else:
                await call()
        return names

    assert await refused() == set()
    with own_postgres.connect() as c:
        c.autocommit = True
        c.execute("ALTER SYSTEM SET default_transaction_read_only = on")  # for the sessions that there are
        c.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = off")  # for new ones
        c.execute("SELECT pg_reload_conf()")
    before = set()
    async with asyncio.timeout(LIMIT):
        while before != {"direct", "coroutines", "threads"}:  # until each session has read the server's settings
            before |= await refused()
        assert await refused() == set()
        await app.worker().drain()
        assert await app.jobs.count(state="succeeded") >= 2
    await app.close()
