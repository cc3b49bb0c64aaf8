"""The words and parameters that differ between databases, and the one clock."""

import json
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
import sqlalchemy as sa

from resilient.store.db import schema
from resilient.store.db.dialect import ID, TIME, Dialect

IDS = [UUID(int=n) for n in (1, 2**127, 3)]


def test_only_two_databases():
    with pytest.raises(ValueError, match="'mysql' is not supported"):
        Dialect("mysql")


@pytest.mark.parametrize("name", ["a b", 'x"', "x;y", "", "1a", "x" * 64, "é"])
def test_schema_names_are_plain(name):
    with pytest.raises(ValueError, match="plain identifier of at most 63"):
        Dialect("postgresql", schema=name)


def test_table_names_are_filled_in():
    assert str(Dialect("sqlite").sql("SELECT id FROM {job}")) == "SELECT id FROM resilient_job"
    assert (
        str(Dialect("postgresql", schema="Jobs").sql("SELECT id FROM {job}")) == 'SELECT id FROM "Jobs".resilient_job'
    )


def test_a_statement_is_made_once():
    d = Dialect("sqlite")
    assert d.sql("SELECT id FROM {job}", id=ID) is d.sql("SELECT id FROM {job}", id=ID)
    assert d.sql("SELECT id FROM {job}") is not d.sql("SELECT id FROM {job}", id=ID)


def test_times_and_ids_by_name(database):
    at = datetime(2030, 1, 1, 12, 0, 0, 1, tzinfo=UTC)

    def run(c, d):
        if d.is_postgresql:
            template = "SELECT CAST(:run_at AS timestamptz) AS run_at, CAST(:id AS uuid) AS id"
        else:
            template = "SELECT :run_at AS run_at, :id AS id"
        return tuple(d.run(c, template, {"run_at": at, "id": d.id(IDS[1])}, run_at=TIME, id=ID).one())

    assert database.transaction_sync(run) == (at, IDS[1])


@pytest.mark.parametrize(
    ("pack", "type_", "values"),
    [
        ("pack_ids", "uuid", IDS),
        ("pack_ids", "uuid", []),
        ("pack_ints", "bigint", [1, -2, 2**62]),
        ("pack_ints", "bigint", []),
        ("pack_keys", "text", ["null", "a/b", "a@b.c+d", "NULL", "{}"]),
        ("pack_keys", "text", []),
    ],
)
def test_a_batch_is_one_parameter(database, pack, type_, values):
    def run(c, d):
        types = {"value": ID} if type_ == "uuid" else {}
        statement = f"SELECT value FROM {d.array('batch', type_)}"
        return d.run(c, statement, {"batch": getattr(d, pack)(values)}, **types).scalars().all()

    assert database.transaction_sync(run) == values


def test_the_clock_of_a_test(database, clock):
    assert database.transaction_sync(lambda c, d: d.now(c)) == clock.now()
    clock.advance(minutes=1)
    assert database.transaction_sync(lambda c, d: d.now(c)) == clock.now() == database.dialect.host_now()


def test_the_clock_tells_the_time_it_is_asked(database):
    """Not when the transaction began: it is read after the locks."""

    def run(c, d):
        first = d.now(c)
        c.execute(sa.text("SELECT pg_sleep(0.01)" if d.is_postgresql else "SELECT 1"))
        return first, d.now(c)

    first, second = database.transaction_sync(run)
    assert first < second
    assert abs(datetime.now(UTC) - second) < timedelta(seconds=10)
    assert first.tzinfo is UTC


async def test_expressions_go_to_the_schema(postgres_server, open_database):
    from resilient.store.db import tables

    name = postgres_server.create()
    database = open_database(postgres_server.url(name), schema="jobs")
    await schema.upgrade(database)
    count = sa.select(sa.func.count()).select_from(tables.Job)
    assert await database.transaction(lambda c, d: d.execute(c, count).scalar_one()) == 0


def test_no_record_of_a_large_document_is_left_out(database):
    """A job without some of its edges would start before what it waits for."""
    doc = json.dumps([{"n": 1}] * 100_001)
    query = f"SELECT count(*) FROM {database.dialect.records('doc', {'n': 'int'})} AS r"
    assert database.transaction_sync(lambda c, d: d.run(c, query, {"doc": doc}).scalar_one()) == 100_001
