"""Many jobs by COPY are the jobs that an INSERT would have made, whatever their texts look like."""

import asyncio
import json
import traceback
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import create_engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from uuid_utils.compat import uuid7

from resilient.store.db.direct import direct
from resilient.store.jobs import insert as jobs
from resilient.store.jobs.insert import NewJob

AT = datetime(2030, 1, 1, tzinfo=UTC)
HOSTILE = [
    "null",
    '"plain"',
    json.dumps({"quote": 'a"b', "slash": "a\\b\\n\\N\\.", "tab": "a\tb", "line": "a\nb\r\n", "nothing": ""}),
    json.dumps("\\."),
    json.dumps("ümläut 漢字 🙂", ensure_ascii=False),
    '{"spread":\n\t"over \\u0001 lines"\r\n}',
    json.dumps("\N{NO-BREAK SPACE}\N{LINE SEPARATOR}\N{DELETE}", ensure_ascii=False),
    "0.1000000000000000055",
    json.dumps({"nul": "a\0b"}),
]
OPTIONS = [
    {},
    {"priority": -7, "max_attempts": 3},
    {"run_at": AT},
    {"delay": 3600.0},
    {"delay": 0.0},
    {"expires_at": AT + timedelta(days=1)},
    {"tags": json.dumps({"a": "tab\there", "b": "\\N"}), "trace": json.dumps({"traceparent": "00-ab"})},
    {"idempotency_key": "key \\ with \\t signs"},
    {"ordering_key": "o", "ordering_policy": "skip", "order_no": 5, "waits": 1},
    {"followed": True, "waits": 2, "priority": 9},
    {"followed": True},
]


def new(number, payload, options):
    return NewJob(uuid7(), f"kind.{number % 3}", f"crm/acct-{number % 7}", payload, **options)


def some():
    return [new(n, payload, options) for n, options in enumerate(OPTIONS) for payload in HOSTILE]


def stored(c, d):
    """Every job but for its id and the times of writing, and every turn."""
    columns = [
        "id", "kind", "resource_key", "coalesce(CAST(payload AS text), 'null') AS payload",
        "payload_version", "state", "priority", "waits",
        "followed", "max_attempts", "expires_at", "idempotency_key", "tags", "CAST(trace AS text) AS trace",
        "ordering_key",
        "ordering_policy", "order_no", "unique_key", "unique_lock", "attempts", "executions", "version", "once_more",
        "date_trunc('minute', run_at) AS run_at", "run_at <= clock_timestamp() AS due",
        "created_at <= updated_at AND created_at > clock_timestamp() - interval '1 minute' AS is_new",
    ]  # fmt: skip
    found = {row[0]: tuple(row)[1:] for row in d.run(c, f"SELECT {', '.join(columns)} FROM {{job}}")}
    return found, sorted(tuple(row) for row in d.run(c, "SELECT resource_key, priority FROM {turn}"))


@direct
def insert_directly(c, d, given):
    jobs.insert(c, d, given)


def empty(c, d):
    d.run(c, "DELETE FROM {job}")
    d.run(c, "DELETE FROM {turn}")


def test_copied_jobs_are_as_inserted_ones(postgres_database, monkeypatch):
    given = some()
    assert len(given) >= jobs.COPY_LEAST
    postgres_database.transaction_sync(jobs.insert, given)
    copied = postgres_database.transaction_sync(stored)
    postgres_database.transaction_sync(empty)
    monkeypatch.setattr(jobs, "COPY_LEAST", 10_000)
    postgres_database.transaction_sync(jobs.insert, given)
    inserted = postgres_database.transaction_sync(stored)
    assert set(copied[0]) == {job.id for job in given}
    for job in given:
        assert copied[0][job.id] == inserted[0][job.id]
    assert copied[1] == inserted[1]


def test_it_is_used_where_it_fits(postgres_database, monkeypatch):
    seen = []
    monkeypatch.setattr(jobs, "_copy", lambda _c, _d, given: seen.append(len(given)))
    plain = [new(n, "1", {}) for n in range(jobs.COPY_LEAST)]
    postgres_database.transaction_sync(jobs.insert, plain)
    postgres_database.transaction_sync(jobs.insert, plain)
    assert seen == [jobs.COPY_LEAST] * 2
    postgres_database.transaction_sync(jobs.insert, plain[1:])
    unique = [*plain[:-1], plain[-1]._replace(unique_key="u")]
    postgres_database.transaction_sync(jobs.insert_unique, [one._replace(id=uuid7()) for one in unique])
    assert seen == [jobs.COPY_LEAST] * 2


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_it_is_part_of_the_callers_transaction(postgres_url, postgres_database, asynchronous):
    given = some()
    url = postgres_url.replace("postgresql://", "postgresql+psycopg://")
    if asynchronous:
        engine = create_async_engine(url)
        for commit in (False, True):
            async with AsyncSession(engine) as s:
                c = await s.connection()
                await c.run_sync(jobs.insert, postgres_database.dialect, given)
                await (s.commit() if commit else s.rollback())
            assert len(postgres_database.transaction_sync(stored)[0]) == (len(given) if commit else 0)
        await engine.dispose()
    else:
        engine = create_engine(url)
        for commit in (False, True):
            with Session(engine) as s:
                jobs.insert(s.connection(), postgres_database.dialect, given)
                (s.commit if commit else s.rollback)()
            assert len(postgres_database.transaction_sync(stored)[0]) == (len(given) if commit else 0)
        engine.dispose()


@pytest.mark.parametrize("insert", [jobs.insert, insert_directly])
async def test_what_the_database_refuses_is_said_and_leaves_nothing(postgres_database, insert):
    given = [new(n, "1", {}) for n in range(60)]
    given[30] = given[30]._replace(payload="{hush-hush")
    with pytest.raises(DBAPIError, match="invalid input syntax for type json") as caught:
        await postgres_database.transaction(insert, given)
    assert caught.value.orig.sqlstate == "22P02"
    assert "hush" not in "".join(traceback.format_exception(caught.value))
    assert postgres_database.transaction_sync(stored) == ({}, [])
    again = [one._replace(payload="1") for one in given]
    await postgres_database.transaction(insert, again)
    assert len(postgres_database.transaction_sync(stored)[0]) == 60


async def test_a_cancelled_copy_leaves_nothing(postgres_database):
    given = [new(n, json.dumps("x" * 10_000), {}) for n in range(20_000)]
    task = asyncio.create_task(postgres_database.transaction(insert_directly, given))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert postgres_database.transaction_sync(stored) == ({}, [])
    await postgres_database.transaction(jobs.insert, given[:100])
    assert len(postgres_database.transaction_sync(stored)[0]) == 100
