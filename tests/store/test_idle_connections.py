"""Connections that rest are closed without being missed meanwhile, and their end is noticed before they are used."""

import sqlite3
from collections import deque
from functools import partial

import sqlalchemy as sa

from resilient.store.db.direct import direct
from resilient.store.db.pool import IDLE, BudgetPool
from tests.helpers import until


class Resting(deque):
    """What rests, and how often something was taken from its old end."""

    taken = 0

    def popleft(self):
        self.taken += 1
        return super().popleft()


def test_what_has_not_rested_long_stays_where_a_transaction_finds_it():
    """Else one that begins at this moment would open another connection, beyond the budget."""
    pool = BudgetPool(partial(sqlite3.connect, ":memory:"))
    pool._resting = Resting([(object(), 100.0)])
    assert not pool.close_one(before=100.0 + 1 - IDLE)
    assert (pool._resting.taken, len(pool._resting)) == (0, 1)


# -- their end ---------------------------------------------------------------------------------------------------------

OTHERS = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"


@direct
def look(c, d):
    return d.run(c, "SELECT 1 AS one").scalar()


def look_plainly(c, d):
    return c.execute(sa.text("SELECT 1")).scalar()


async def end_all(url):
    """Every session in the database ends, as when its server is restarted or another one is promoted."""
    engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"), poolclass=sa.NullPool)
    with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as c:  # a transaction sees them as they were
        ended = len(c.execute(sa.text(f"SELECT pg_terminate_backend(pid) FROM ({OTHERS}) AS them")).all())
        await until(lambda: not c.execute(sa.text(OTHERS)).all())
    return ended


async def test_after_a_failover_no_call_meets_a_connection_that_has_ended(postgres_database, postgres_url):
    """Of no kind: those of coroutines and of threads, with SQLAlchemy in between and without."""
    database = postgres_database

    async def use():
        assert await database.transaction(look) == await database.transaction(look_plainly) == 1
        assert database.transaction_sync(look) == database.statement_sync(look) == await database.statement(look) == 1

    for _ in range(3):
        await use()
        assert await end_all(postgres_url) >= 3
    await use()


async def test_a_notice_on_a_connection_at_rest_costs_a_connection_and_no_call(postgres_database, postgres_url):
    database = postgres_database
    assert await database.transaction(look) == 1
    engine = sa.create_engine(postgres_url.replace("postgresql:", "postgresql+psycopg:"), poolclass=sa.NullPool)
    with engine.connect() as c:
        c.execution_options(isolation_level="AUTOCOMMIT").execute(sa.text("SELECT pg_reload_conf()"))
    assert await database.transaction(look) == 1
