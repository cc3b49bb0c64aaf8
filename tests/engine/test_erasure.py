"""Erasing and exporting an account: every table that says anything of it, and nothing of its neighbours."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from uuid import UUID, uuid5

import pytest
import sqlalchemy as sa

from resilient import BadResourceKey, InvalidInput, Resilient, handler
from resilient.store.db import tables
from resilient.store.inspect import erasure as store
from tests.helpers import drain, until

OWNERS = ("crm/acct-7", "crm/acct-7/search", "crm/acct-70", "crm/acct-6/x", "crm", "a/b")
GONE = OWNERS[:2]
AT = datetime(2029, 12, 31, tzinfo=UTC)
# Tables that say nothing of a single account, or that stay.
OTHERS = {
    "resilient_schedule": "declared by the program, whatever accounts there are",
    "resilient_worker": "of processes",
    "resilient_throughput": "counts by provider",
    "resilient_audit": "stays: who did what",
}
TABLES = [table for table in tables.metadata.sorted_tables if table.name not in OTHERS]


def id_of(what, owner):
    return uuid5(UUID(int=1), f"{what} {owner}")


def marked(owner):
    return f"words of <{owner}>"


def _special(owner):
    job, grant, workflow = id_of("job", owner), id_of("grant", owner), id_of("workflow", owner)
    return {
        "resilient_job": {
            "id": job, "resource_key": owner, "state": "succeeded", "waiting_for": None, "unique_lock": None,
            "ordering_key": None,
        },
        "resilient_attempt": {"job_id": job, "id": None, "resource_key": owner},
        "resilient_dependency": {"job_id": job, "blocker_id": id_of("blocker", owner)},
        "resilient_workflow": {"id": workflow, "state": "succeeded"},
        "resilient_step": {"workflow_id": workflow, "job_id": job, "resource_key": owner},
        "resilient_resource": {"key": owner, "window": None, "policy": None, "learnt": None, "paused_at": None},
        "resilient_turn": {"resource_key": owner, "parked_on": None, "id": None},
        "resilient_alert": {"subject": owner},
        "resilient_grant": {"id": grant, "state": "active"},
        "resilient_connection": {"resource_key": owner, "grant_id": grant},
        "resilient_inbox": {"message_id": marked(owner)},
        "resilient_inbox_key": {"ordering_key": owner},
        "resilient_order": {"resource_key": owner, "head_id": None},
    }  # fmt: skip


def _value(column, owner):
    if isinstance(column.type, sa.Uuid):
        return id_of(column.name, owner)
    for type_, value in ((sa.Boolean, False), (sa.Float, 1.0), (sa.Integer, 1), (sa.String, marked(owner))):
        if isinstance(column.type, type_):
            return value
    return {"note": marked(owner)} if isinstance(column.type, sa.JSON) else AT


def _row(table, owner):
    special = _special(owner).get(table.name, {"resource_key": owner})
    values = {column.name: special.get(column.name, _value(column, owner)) for column in table.c}
    values |= {name: value for name, value in special.items() if name in values}
    return {name: value for name, value in values.items() if not (name == "id" and value is None)}


def _event(owner):
    """An event of the outbox that has the owner as its key."""
    job = next(table for table in TABLES if table.name == "resilient_job")
    payload = {"id": marked(owner), "subject": "contact 9", "data": {"note": marked(owner)}}
    over = {"id": id_of("event", owner), "resource_key": "outbox/x", "ordering_key": owner, "payload": payload}
    return {**_row(job, owner), **over}


def _fill(c, d):
    for owner in OWNERS:
        for table in TABLES:
            d.execute(c, table.insert(), _row(table, owner))
        d.execute(c, TABLES_BY_NAME["resilient_job"].insert(), _event(owner))
        order = TABLES_BY_NAME["resilient_order"]
        d.execute(c, order.insert(), {**_row(order, owner), "resource_key": "outbox/x", "ordering_key": owner})


TABLES_BY_NAME = {table.name: table for table in TABLES}


def _contents(c, d):
    """Every row of every table, as text."""
    every = {}
    for table in tables.metadata.sorted_tables:
        rows = d.execute(c, sa.select(table)).mappings()
        every[table.name] = sorted(json.dumps(dict(row), default=str, sort_keys=True) for row in rows)
    return every


def _mentions(line, owner):
    return f"<{owner}>" in line or f'"{owner}"' in line


@handler("k")
async def nothing(job):
    pass


@pytest.fixture
async def app(database):
    app = Resilient(database, handlers=[nothing])
    yield app
    await app.close()


def test_every_table_that_names_a_resource_is_covered():
    names = {table.name for table in tables.metadata.sorted_tables}
    assert names >= OTHERS.keys()
    mine = {f"resilient_{name}" for name in (*store.WINDOWS, *store.OTHERS, "grant", "workflow", "dependency", "inbox")}
    assert names - OTHERS.keys() == mine, "a new table: is anything of an account in it? Erase it, or say why not"


async def test_nothing_of_an_account_stays_and_all_of_the_others_does(app, database):
    await database.transaction(_fill)
    before = await database.transaction(_contents)
    for name in TABLES_BY_NAME:
        assert [one for one in before[name] if _mentions(one, GONE[0])], f"the test has nothing in {name}"
    dry = await app.accounts.erase("crm/acct-7", dry_run=True)
    assert await database.transaction(_contents) == before
    done = await app.accounts.erase("crm/acct-7", who="ann", why="they left")
    after = await database.transaction(_contents)
    for name, rows in after.items():
        if name != "resilient_audit":
            kept = [one for one in before[name] if not any(_mentions(one, owner) for owner in GONE)]
            assert rows == kept, name
    assert dry.rows == done.rows
    assert done.rows == {
        name: len(rows) - len(after[f"resilient_{name}"])
        for name, rows in ((name.removeprefix("resilient_"), rows) for name, rows in before.items())
        if name != "audit" and len(rows) > len(after[f"resilient_{name}"])
    }
    (note,) = await app.audit.list()
    assert (note.who, note.action, note.subject, note.why) == ("ann", "erase", "crm/acct-7", "they left")
    assert note.outcome == done.rows
    assert (await app.accounts.erase("crm/acct-7")).rows == {"resource": 1}  # the pause of this erasure


async def test_an_export_has_every_row_and_no_secret(app, database):
    await database.transaction(_fill)
    rows = [row async for row in app.accounts.export("crm/acct-7")]
    dry = await app.accounts.erase("crm/acct-7", dry_run=True)
    count = {}
    for row in rows:
        count[row["table"]] = count.get(row["table"], 0) + 1
        assert row.keys().isdisjoint({"secrets", "seal"})
        assert not any(_mentions(json.dumps(row), owner) for owner in OWNERS[2:])
    inbox = dry.rows["inbox"]  # says no more than the ids of events that are exported
    assert count | {"inbox": inbox} == dry.rows
    assert rows == await asyncio.to_thread(lambda: list(app.sync.accounts.export("crm/acct-7")))


async def test_small_windows_reach_everything(app, database, monkeypatch):
    monkeypatch.setattr(store, "WINDOW", 3)
    monkeypatch.setattr(store, "BATCH", 2)
    for n in range(9):
        await app.enqueue("k", n, resource_key="crm/acct-7", ordering_key="o")
        await app.enqueue("k", n, resource_key="crm/acct-8")
    exported = [row async for row in app.accounts.export("crm/acct-7")]
    assert sorted(row["payload"] for row in exported if row["table"] == "job") == list(range(9))
    done = await asyncio.to_thread(app.sync.accounts.erase, "crm/acct-7")
    assert done.rows["job"] == 9
    assert done.rows["order"] == 1
    assert await drain(app) == 9


async def test_what_waited_for_an_erased_job_is_told(app):
    blocker = await app.enqueue("k", None, resource_key="crm/acct-7", delay=3600)
    waiting = await app.enqueue("k", None, resource_key="crm/acct-8", after=[blocker])
    runs = await app.enqueue("k", None, resource_key="crm/acct-8", after=[blocker], on_dead="run")
    await drain(app)
    await app.accounts.erase("crm/acct-7")
    await drain(app)
    assert (await app.jobs.get(waiting.id)).last_error_code == "blocker_gone"
    assert (await app.jobs.get(runs.id)).state == "succeeded"


async def test_running_jobs_are_refused_or_waited_for(database):
    may_end, begun = asyncio.Event(), asyncio.Event()

    @handler("slow")
    async def slow(job):
        begun.set()
        await may_end.wait()

    app = Resilient(database, handlers=[slow])
    job = await app.enqueue(slow, None, resource_key="crm/acct-7")
    worker = app.worker(concurrency=2)
    running = asyncio.create_task(worker.run(signals=False))
    await until(begun.is_set)
    with pytest.raises(InvalidInput, match=f"are running .{job.id}.: wait for them"):
        await app.accounts.erase("crm/acct-7")
    assert (await app.resources.get("crm/acct-7")).paused_at is None
    (note,) = await app.audit.list()
    assert "are running" in note.outcome["error"]
    erasing = asyncio.create_task(app.accounts.erase("crm/acct-7", timeout=60))
    await until(lambda: _is_paused(app))
    may_end.set()
    assert (await erasing).rows["job"] == 1
    worker.stop()
    await running
    await app.close()


async def _is_paused(app):
    return (await app.resources.get("crm/acct-7")).paused_at is not None


async def test_a_workflow_that_is_not_over_is_in_the_way(app):
    async with app.workflow("order") as wf:
        wf.step(nothing, None, resource_key="crm/acct-8", delay=3600)
        wf.step(nothing, None, resource_key="crm/acct-7")
    with pytest.raises(InvalidInput, match="workflows with steps of crm/acct-7 are not over"):
        await app.accounts.erase("crm/acct-7")


@pytest.mark.parametrize(
    ("key", "error", "words"),
    [
        ("crm/*", BadResourceKey, "is not a resource key"),
        ("crm", InvalidInput, "is a provider, with all of its accounts"),
        ("outbox/x", InvalidInput, "is a destination of events"),
    ],
)
async def test_only_one_account_at_a_time(app, key, error, words):
    with pytest.raises(error, match=words):
        await app.accounts.erase(key, dry_run=True)
    with pytest.raises(error, match=words):
        [row async for row in app.accounts.export(key)]
