"""Rows that somebody wrote by hand, or half: each is parked with its reason, and everything else goes on."""

from __future__ import annotations

import asyncio

import pytest

from resilient import Job, Resilient, handler
from resilient.store.db.database import Database
from resilient.surface.cli import main
from tests.helpers import LIMIT


@handler("good")
async def good(job: Job[int]) -> int:
    return job.payload


@pytest.fixture
async def app(database_url):
    app = Resilient(Database(database_url), handlers=[good], upgrade=False)
    yield app
    await app.close()


def spoil(app, id_, **columns):
    """Write what nothing in the engine would."""
    sets = ", ".join(f"{name} = '{value}'" for name, value in columns.items())
    with app.database.sync_engine.begin() as c:
        text = str(id_) if app.database.dialect.is_postgresql else id_.hex
        c.exec_driver_sql(f"UPDATE resilient_job SET {sets} WHERE id = '{text}'")
        if "resource_key" in columns:
            c.exec_driver_sql(
                f"INSERT INTO resilient_turn (resource_key, priority) VALUES ('{columns['resource_key']}', 0)"
            )


DEAD = [{"payload": '"text"'}, {"payload": "null"}, {"sent": "3"}, {"sent": '["a"]'}, {"tags": "3"}, {"tags": '["a"]'}]
SQLITE_ONLY = [{"payload": "{oops"}, {"payload": ""}, {"sent": "{oops"}, {"tags": "{oops"}]


@pytest.mark.parametrize("columns", [*DEAD, *SQLITE_ONLY], ids=str)
async def test_it_is_dead_with_its_reason_and_the_others_run(app, columns):
    if columns in SQLITE_ONLY and not app.database.is_sqlite:
        columns = DEAD[0]  # PostgreSQL takes no such value
    first = await app.enqueue(good, 1, resource_key="p/1")
    bad = await app.enqueue(good, 2, resource_key="p/1")
    last = await app.enqueue(good, 3, resource_key="p/1")
    spoil(app, bad.id, **columns)
    worker = app.worker()
    assert await worker.drain(timeout=LIMIT) == 3
    assert [(await app.jobs.get(one.id)).state for one in (first, last)] == ["succeeded"] * 2
    job = await app.jobs.get(bad.id)
    if "sent" in columns:  # something may have been sent: nobody knows
        assert (job.state, job.last_error_kind, "unknown outcome" in job.last_error) == ("dead", "ambiguous", True)
    else:
        assert (job.state, job.last_error_kind) == ("dead", "undecodable")
        assert next(iter(columns)) in job.last_error
    assert bad.id in {one.id for one in await app.jobs.list()}


async def test_a_payload_with_a_byte_that_is_no_text_is_dead_and_appears_in_no_log(app, caplog):
    if not app.database.is_sqlite:
        return  # PostgreSQL takes no such value
    bad, fine = [await app.enqueue(good, n, resource_key="p/1") for n in (1, 2)]
    with app.database.sync_engine.begin() as c:
        c.exec_driver_sql(
            f"UPDATE resilient_job SET payload = CAST(x'2263616e617279ff22' AS text) WHERE id = '{bad.id.hex}'"
        )
    await app.worker().drain(timeout=LIMIT)
    assert (await app.jobs.get(fine.id)).state == "succeeded"
    state, kind = app.database.transaction_sync(
        lambda c, d: d.run(c, "SELECT state, last_error_kind FROM {job} WHERE id = :id", {"id": d.id(bad.id)}).one()
    )
    assert (state, kind) == ("dead", "undecodable")
    assert "canary" not in caplog.text


TAGS = {"user": "7"}
CANARY = "2263616e617279ff22"  # "canary\\xff"


@pytest.mark.parametrize(
    ("column", "value", "shown"),
    [
        ("payload", f"CAST(x'{CANARY}' AS text)", {"not_readable": "byte 7 of 9 is no UTF-8"}),
        ("result", f"CAST(x'{CANARY}' AS text)", {"not_readable": "byte 7 of 9 is no UTF-8"}),
        ("progress", "'[canary'", {"not_readable": "it is no JSON: Expecting value: line 1 column 2 (char 1)"}),
        ("sent", f"CAST(x'{CANARY}' AS text)", {"not_readable": "byte 7 of 9 is no UTF-8"}),
        ("tags", f"CAST(x'{CANARY}' AS text)", {"not_readable": "byte 7 of 9 is no UTF-8"}),
        ("tags", "'{canary'", None),
        ("tags", "'3'", {"not_readable": "they are no JSON object"}),
        ("last_error", "CAST(x'63ff' AS text)", "c\ufffd"),
        ("unique_key", "CAST(x'63ff' AS text)", "c\ufffd"),
    ],
)
async def test_it_is_shown_with_its_reason_beside_the_others(app, caplog, column, value, shown):
    if not app.database.is_sqlite:
        value, shown = "'3'", 3  # PostgreSQL takes no other
        if column == "tags":
            shown = {"not_readable": "they are no JSON object"}
    ids = [(await app.enqueue(good, n, resource_key="p/1", tags=TAGS)).id for n in range(3)]
    bad = ids[1]
    message = value if column == "last_error" else "NULL"
    with app.database.sync_engine.begin() as c:
        text = f"'{bad}'" if app.database.dialect.is_postgresql else f"'{bad.hex}'"
        c.exec_driver_sql(
            f"UPDATE resilient_job SET state = 'dead', finished_at = updated_at, {column} = {value} WHERE id = {text}"
        )
        c.exec_driver_sql(
            "INSERT INTO resilient_attempt (job_id, execution, finished_at, decision, charged, message)"
            f" VALUES ({text}, 1, '2026-01-01 00:00:00.000000', 'dead', true, {message})"
        )
    job = await app.jobs.get(bad)
    if shown is not None:
        assert getattr(job, column) in (shown, str(shown))
    assert {one.id for one in await app.jobs.list()} == set(ids)
    assert {one.id for one in await app.jobs.list(state=["dead", "ready"], payloads=False)} == set(ids)
    assert [one.id for one in await app.jobs.list(state="dead")] == [bad]
    assert len(await app.jobs.attempts(bad)) == 1
    assert set(ids) - {one.id for one in await app.jobs.list(tags=TAGS)} <= {bad}
    assert (await app.jobs.count(), await app.jobs.count(state="dead")) == (3, 1)
    assert "canary" not in (await app.jobs.why(bad)).text
    assert (await app.jobs.discard(state="dead")).discarded == 1
    assert "canary" not in caplog.text


LARGE, DEEP = "1" + "0" * 5_000, "[" * 2_000 + "]" * 2_000


@pytest.mark.parametrize("value", [LARGE, DEEP], ids=["large", "deep"])
@pytest.mark.parametrize("column", ["payload", "result", "progress", "sent"])
async def test_json_that_python_does_not_read_hides_no_row_and_stops_nobody(app, column, value, capsys):
    """The databases take it."""
    bad, fine = [await app.enqueue(good, n, resource_key="p/1") for n in (1, 2)]
    async with app.workflow("w", resource_key="p/1") as wf:
        step = wf.step(good, 3)
    spoil(app, bad.id, **{column: value})
    await app.worker().drain(timeout=LIMIT)
    spoil(app, step.id, **{column: value})
    assert (await app.jobs.get(fine.id)).state == "succeeded"
    assert {one.id for one in await app.jobs.list()} == {bad.id, fine.id, step.id}
    assert set(getattr(await app.jobs.get(step.id), column)) == {"not_readable"}
    assert (await app.jobs.why(bad.id)).text
    assert [one.state for one in await app.workflows.list()] == ["succeeded"]
    await app.worker().sweeper.chores()
    for words in (["jobs", "list"], ["jobs", "show", str(bad.id)], ["workflows", "list"]):
        assert await asyncio.to_thread(main, ["--database", str(app.database.url), *words]) == 0
    assert str(bad.id) in capsys.readouterr().out


async def test_a_list_can_leave_large_values_where_they_are(app):
    id_ = (await app.enqueue(good, 7, resource_key="p/1")).id
    await app.worker().drain(timeout=LIMIT)
    (whole,), (lean,) = await app.jobs.list(), await app.jobs.list(payloads=False)
    assert (whole.id, whole.payload, whole.result) == (id_, 7, 7)
    assert {repr(lean.payload), repr(lean.progress), repr(lean.result)} == {"<not loaded: app.jobs.get(id) has it>"}
    assert whole.to_json().items() - lean.to_json().items() == {("payload", 7), ("progress", None), ("result", 7)}


@pytest.mark.parametrize(
    "column", ["payload", "tags", "sent", "last_error", "progress", "result", "idempotency_key", "ordering_key", "kind"]
)
async def test_a_byte_that_is_no_text_hides_no_row_and_stops_nobody(app, column, capsys):
    """Neither from people, who want to see what is wrong, nor from workers."""
    if not app.database.is_sqlite:
        return  # PostgreSQL takes no such value
    bad, fine = [await app.enqueue(good, n, resource_key="p/1") for n in (1, 2)]
    with app.database.sync_engine.begin() as c:
        c.exec_driver_sql(f"UPDATE resilient_job SET {column} = CAST(x'2263ff22' AS text) WHERE id = '{bad.id.hex}'")
    await app.worker().drain(timeout=LIMIT)
    assert (await app.jobs.get(fine.id)).state == "succeeded"
    assert {one.id for one in await app.jobs.list()} == {bad.id, fine.id}
    assert (await app.jobs.get(bad.id)).id == bad.id
    assert (await app.jobs.why(bad.id)).text
    await app.worker().sweeper.chores()
    for words in (["list"], ["show", str(bad.id)]):
        assert await asyncio.to_thread(main, ["--database", str(app.database.url), "jobs", *words]) == 0
    assert str(bad.id) in capsys.readouterr().out


KEYS = ["a b", "a//b", "/", "a/b/c/d/e/f", "NULL", 'q"uote', "back\\slash", "br{ace}", "com,ma", "ünï", "p/1/", "a' '"]


@pytest.mark.parametrize("key", [k.replace("'", "''") for k in KEYS])
async def test_a_key_that_is_none_stops_nobody(app, key):
    bad = await app.enqueue(good, 1, resource_key="p/2")
    spoil(app, bad.id, resource_key=key)
    fine = [await app.enqueue(good, n, resource_key=f"p/{n}") for n in range(3)]
    await app.worker().drain(timeout=LIMIT)
    assert {(await app.jobs.get(one.id)).state for one in fine} == {"succeeded"}
    await app.worker().sweeper.chores()
    assert (await app.jobs.get(bad.id)).state in ("succeeded", "dead")


@pytest.mark.parametrize(
    "columns", [{"attempts": -5}, {"attempts": 10**6}, {"max_attempts": 0}, {"rescues": 50}, {"payload_version": -3},
                {"executions": 10**6}], ids=str
)  # fmt: skip
async def test_odd_numbers_end_too(app, columns):
    odd, fine = [await app.enqueue(good, n, resource_key="p/1") for n in (1, 2)]
    spoil(app, odd.id, **columns)
    await app.worker().drain(timeout=LIMIT)
    assert (await app.jobs.get(fine.id)).state == "succeeded"
    assert (await app.jobs.get(odd.id)).state in ("succeeded", "dead")


async def test_a_running_row_that_nobody_holds_is_rescued(app):
    """No lease, no owner: a state that was written by hand."""
    lost = await app.enqueue(good, 1, resource_key="p/1")
    spoil(app, lost.id, state="running", lease_until="2020-01-01 00:00:00.000000+00"[:26], locked_by="nobody")
    worker = app.worker()
    await worker.sweeper.rescue()
    await asyncio.sleep(0)
    await worker.drain(timeout=LIMIT)
    assert worker.sweeper.rescued == 1


@pytest.mark.parametrize(
    "override",
    ['{"paced": 1, "concurrency": 2}', "3", '["a"]', '{"limits": 3}', '{"limits": [3]}', '{"concurrency": "many"}',
     '{"breaker": 1}', '{"breaker": {"window": "long"}}', '{"breaker": {"tries": 1, "streak": 4}}'],
)  # fmt: skip
async def test_an_override_that_newer_code_or_a_hand_wrote_stops_nobody(app, override):
    """What of it can be read counts; for the rest what the program declares does."""
    await app.resources.limit("p/1", concurrency=1)
    with app.database.sync_engine.begin() as c:
        c.exec_driver_sql(f"UPDATE resilient_resource SET policy = '{override}' WHERE key = 'p/1'")
    jobs = [await app.enqueue(good, n, resource_key=f"p/{n}") for n in (1, 2)]
    await app.worker().drain(timeout=LIMIT)
    assert [(await app.jobs.get(one.id)).state for one in jobs] == ["succeeded"] * 2
