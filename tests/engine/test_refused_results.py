"""A result that the database refuses, once or for ever: the others are written meanwhile."""

from __future__ import annotations

import asyncio

import pytest
import sqlalchemy as sa

from resilient import Job, Resilient, handler
from resilient.engine.run import completer as completer_module
from resilient.engine.run.completer import Completer
from resilient.store.db.dialect import ID
from tests.helpers import LIMIT, until

FOR_EVER = 1e6  # seconds
TRIGGERS = {
    "sqlite": [
        (
            "CREATE TRIGGER refuses BEFORE UPDATE ON resilient_job WHEN NEW.resource_key = 'p/bad' AND"
            " NEW.state = 'succeeded' BEGIN SELECT RAISE(ABORT, 'not this one'); END"
        ),
    ],
    "postgresql": [
        "CREATE FUNCTION refuse() RETURNS trigger AS $$ BEGIN RAISE EXCEPTION 'not this one'; END $$ LANGUAGE plpgsql",
        (
            "CREATE TRIGGER refuses BEFORE UPDATE ON resilient_job FOR EACH ROW WHEN (NEW.resource_key = 'p/bad' AND"
            " NEW.state = 'succeeded') EXECUTE FUNCTION refuse()"
        ),
    ],
}


@handler("work")
async def work(job: Job[None]) -> None: ...


@pytest.fixture
async def app(database_url):
    app = Resilient(database_url, handlers=[work], upgrade=False)
    yield app
    await app.close()


def execute(app, *statements):
    def run(c, _d):
        for statement in statements:
            c.execute(sa.text(statement))

    app.database.transaction_sync(run)


async def running(app, *keys):
    """Jobs of these resources that run, as their rows say."""
    for key in keys:
        await app.enqueue(work, resource_key=key)
    rows = await app.database.transaction(
        lambda c, d: d.run(c, "UPDATE {job} SET state = 'running' RETURNING id, version, resource_key", id=ID).all()
    )
    return sorted(rows, key=lambda row: row.resource_key)


@pytest.fixture
def writer(app):
    return Completer(app.database, lambda _: (), lambda *_: None, lambda *_: None, app.poke, roll=lambda: 0.0)


async def written(writer, count):
    async with asyncio.timeout(LIMIT / 5):
        await until(lambda: writer.written == count)


@pytest.mark.parametrize("result", ["1", None, "not JSON"])
async def test_the_others_do_not_wait_for_its_pauses(app, backend, writer, monkeypatch, result):
    bad, *others = await running(app, "p/bad", "p/c", "p/d")
    if result != "not JSON":
        execute(app, *TRIGGERS[backend])
    monkeypatch.setattr(completer_module, "retry_pause", lambda *_: FOR_EVER)
    await writer.start()
    writer.succeed(bad.id, bad.version, result, bad.resource_key)
    for count, row in enumerate(others, start=1 + (result == "not JSON")):
        writer.succeed(row.id, row.version, "1", row.resource_key)
        await written(writer, count)
    states = [(await app.jobs.get(row.id)).state for row in (bad, *others)]
    assert states == ["succeeded" if result == "not JSON" else "running", "succeeded", "succeeded"]
    await writer.abandon()


async def test_it_is_written_once_it_is_taken(app, backend, writer):
    bad, other = await running(app, "p/bad", "p/c")
    execute(app, *TRIGGERS[backend])
    await writer.start()
    for row in (bad, other):
        writer.succeed(row.id, row.version, "1", row.resource_key)
    await written(writer, 1)
    await until(lambda: writer._held)
    execute(app, "DROP TRIGGER refuses" + (" ON resilient_job" if backend == "postgresql" else ""))
    async with asyncio.timeout(LIMIT):
        await writer.close()
    assert (writer.written, writer.stale) == (2, 0)
    assert (await app.jobs.get(bad.id)).state == "succeeded"


async def test_many_that_are_refused_stop_the_claiming(app, backend, writer, monkeypatch):
    (bad,) = await running(app, "p/bad")
    execute(app, *TRIGGERS[backend])
    monkeypatch.setattr(completer_module, "BACKLOG", 0)
    await writer.start()
    writer.succeed(bad.id, bad.version, "1", bad.resource_key)
    await until(lambda: writer._held)
    assert writer.full
    await writer.abandon()
