"""Trouble of the database is known as such on every engine, whatever stood at its place in memory before."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from resilient.store.db import trouble


def error_on(engine):
    with engine.connect() as c, pytest.raises(sa.exc.DBAPIError) as refusal:
        c.exec_driver_sql("ATTACH '/nowhere/of.db' AS other")  # "unable to open database"
    return refusal.value


def test_an_engine_at_the_address_of_one_before_it():
    kept, addresses = [], set()
    for _ in range(500):
        engine = sa.create_engine("sqlite://")
        addresses.add(id(engine))
        trouble.mark_errors_of(engine)
        assert trouble.is_of_database(error_on(engine))
        kept.append(engine.dialect)  # and its listeners with it
        del engine
    assert len(addresses) < 500  # some stood where another had stood


def test_an_engine_with_options_of_its_own_and_one_marked_twice():
    engine = sa.create_engine("sqlite://")
    trouble.mark_errors_of(engine.execution_options(mine=1))
    trouble.mark_errors_of(engine)
    assert trouble.is_of_database(error_on(engine))
    assert trouble.is_of_database(error_on(engine.execution_options(mine=2)))


def test_a_mistake_of_a_statement_is_no_trouble():
    engine = sa.create_engine("sqlite://")
    trouble.mark_errors_of(engine)
    with engine.connect() as c, pytest.raises(sa.exc.DBAPIError) as refusal:
        c.exec_driver_sql("SELECT nothing FROM nowhere")
    assert not trouble.is_of_database(refusal.value)


@pytest.mark.parametrize("statement", ["SELECT * FROM connections", "SELECT connected_at FROM sqlite_master"])
def test_a_name_that_sounds_like_trouble(statement):
    engine = sa.create_engine("sqlite://")
    trouble.mark_errors_of(engine)
    with engine.connect() as c, pytest.raises(sa.exc.DBAPIError) as refusal:
        c.exec_driver_sql(statement)
    assert not trouble.is_of_database(refusal.value)


def test_a_trigger_that_speaks_of_connections():
    engine = sa.create_engine("sqlite://")
    trouble.mark_errors_of(engine)
    with engine.begin() as c:
        c.exec_driver_sql("CREATE TABLE own (a)")
        c.exec_driver_sql(
            "CREATE TRIGGER most BEFORE INSERT ON own BEGIN SELECT RAISE(ABORT, 'too many connections'); END"
        )
    with engine.begin() as c, pytest.raises(sa.exc.DBAPIError) as refusal:
        c.exec_driver_sql("INSERT INTO own VALUES (1)")
    assert not trouble.is_of_database(refusal.value)


@pytest.mark.parametrize("value", ["too many connections", "too many clients", "remaining connection slots"])
def test_a_value_that_sounds_like_trouble(postgres_url, value):
    engine = sa.create_engine(postgres_url.replace("postgresql://", "postgresql+psycopg://"))
    trouble.mark_errors_of(engine)
    with engine.connect() as c, pytest.raises(sa.exc.DBAPIError) as refusal:
        c.execute(sa.text("SELECT CAST(CAST(:value AS text) AS int)"), {"value": value})
    engine.dispose()
    assert value in str(refusal.value.orig)
    assert not trouble.is_of_database(refusal.value)
