"""What goes straight to the driver is a transaction like every other: committed, rolled back, explained, cleaned up."""

import asyncio
import contextlib
from datetime import UTC, datetime
from functools import partial

import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError

from resilient import DatabaseBusy, DatabaseUnreachable
from resilient.store.db.database import Database
from resilient.store.db.dialect import TIME
from resilient.store.db.direct import Direct, direct
from tests.helpers import until


@pytest.fixture
def quick(postgres_database):
    """A transaction that goes straight to the driver."""

    async def run(fn, *args):
        return await postgres_database.transaction(direct(fn), *args)

    return run


@pytest.fixture(params=["async", "sync"])
def statement(request, postgres_database):
    """One statement that does, for coroutines and for threads."""

    async def run(fn, *args):
        if request.param == "async":
            return await postgres_database.statement(fn, *args)
        return await asyncio.to_thread(postgres_database.statement_sync, fn, *args)

    return run


@direct
def put(c, d, key):
    d.run(
        c,
        "INSERT INTO {resource} (key, created_at, updated_at) VALUES (:key, clock_timestamp(), clock_timestamp())",
        {"key": key},
    )


@direct
def keys(c, d):
    return [row.key for row in d.run(c, "SELECT key FROM {resource} ORDER BY key")]


def connections(url):
    with psycopg.connect(url, autocommit=True) as c:
        return c.execute(
            "SELECT count(*) FILTER (WHERE state LIKE 'idle in transaction%%'), count(*) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        ).fetchone()


async def test_it_commits(quick, postgres_url):
    await quick(put, "a")
    with psycopg.connect(postgres_url) as other:
        assert other.execute("SELECT key FROM resilient_resource").fetchall() == [("a",)]
    assert connections(postgres_url)[0] == 0


async def test_an_error_rolls_all_of_it_back_and_is_sqlalchemys(quick, postgres_url):
    def twice(c, d):
        put(c, d, "a")
        put(c, d, "a")

    with pytest.raises(IntegrityError) as caught:
        await quick(twice)
    assert caught.value.orig.sqlstate == "23505"
    assert "'a'" not in str(caught.value).split("DETAIL")[0]  # parameters stay out of messages
    assert await quick(keys) == []
    assert connections(postgres_url)[0] == 0


async def test_an_error_of_the_callers_own_rolls_back(quick):
    def fail(c, d):
        put(c, d, "a")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await quick(fail)
    assert await quick(keys) == []


async def test_an_error_in_the_only_statement_leaves_the_connection_usable(statement):
    for _ in range(3):
        with pytest.raises(DBAPIError):
            await statement(lambda c, d: d.run(c, "SELECT 1 / 0"))
    await statement(put, "a")
    assert await statement(keys) == ["a"]


async def test_only_marked_functions_go_there(postgres_database):
    def kind(c, _d):
        return type(c)

    assert await postgres_database.transaction(kind) is not Direct
    assert await postgres_database.transaction(direct(kind)) is Direct
    assert await postgres_database.statement(kind) is Direct
    assert postgres_database.statement_sync(kind) is Direct


async def test_nothing_run_is_nothing_begun(quick):
    assert await quick(lambda _c, _d: 7) == 7


async def test_the_first_statement_may_travel_with_its_begin(quick):
    def look(c, d):
        now = d.steer(c)  # without parameters
        return now, d.run(
            c,
            "SELECT current_setting('enable_hashjoin') AS hash, current_setting('plan_cache_mode') AS plans,"
            " now() AS began",
            began=TIME,
        ).one()

    now, row = await quick(look)
    assert (row.hash, row.plans) == ("off", "force_generic_plan"), "set for this transaction"
    assert row.began < now, "both statements are of one transaction"
    assert now.tzinfo is UTC
    assert row.began.tzinfo is UTC
    assert (await quick(lambda c, d: d.run(c, "SELECT current_setting('enable_hashjoin')").scalar())) == "on"


async def test_it_is_read_committed_whatever_the_database_says(quick, postgres_url):
    with psycopg.connect(postgres_url, autocommit=True) as c:
        name = c.execute("SELECT current_database()").fetchone()[0]
        c.execute(f"ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'")
    assert await quick(lambda c, d: d.run(c, "SHOW transaction_isolation").scalar()) == "read committed"


async def test_so_is_a_single_statement(postgres_server, open_database):
    name = postgres_server.create()
    with postgres_server.connect() as c:
        c.execute(f"ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'")
    database = open_database(postgres_server.url(name))
    for _ in range(2):
        assert await database.statement(isolation) == "read committed"
        assert await asyncio.to_thread(database.statement_sync, isolation) == "read committed"


@direct
def isolation(c, d):
    return d.run(c, "SHOW transaction_isolation").scalar()


async def test_a_statement_keeps_its_plan_from_its_second_time_on(quick):
    """Each connection would plan it ten times: some of a worker's first jobs would wait for that."""
    if await quick(lambda c, d: int(d.run(c, "SHOW server_version_num").scalar())) < 140000:
        pytest.skip("PostgreSQL counts such plans from version 14 on")
    for _ in range(3):
        await quick(lambda c, d: d.run(c, "SELECT key AS planned FROM {resource} WHERE key = :key", {"key": "a"}).all())
    kept = "SELECT generic_plans AS kept, custom_plans AS made_anew FROM pg_prepared_statements"
    (row,) = await quick(lambda c, d: d.run(c, f"{kept} WHERE statement LIKE 'SELECT key AS planned%'").all())
    assert (row.kept, row.made_anew) == (2, 0)


async def test_plans_are_left_to_the_server_where_that_is_asked(postgres_url, open_database):
    """Citus by schema refuses generic plans."""

    def look(c, d):
        d.steer(c)
        return d.run(
            c,
            "SELECT current_setting('plan_cache_mode') AS plans, current_setting('enable_hashjoin') AS hash,"
            " current_setting('jit') AS jit",
        ).one()

    database = open_database(postgres_url, generic_plans=False)
    for way in (look, direct(partial(look))):
        assert tuple(await database.transaction(way)) == ("auto", "off", "off")
    assert tuple(database.transaction_sync(look)) == ("auto", "off", "off")


async def test_nothing_is_compiled_and_the_setting_ends_with_the_transaction(postgres_database):
    """What costs little to run would be compiled for seconds, because steering makes it look dear."""

    def told(c, d):
        return d.run(c, "SELECT current_setting('jit') AS jit").scalar()

    def steered(c, d):
        d.steer(c)
        return told(c, d)

    marked = direct(partial(told))
    assert await postgres_database.transaction(marked) == "off"
    assert await postgres_database.statement(marked) == "on"
    assert await postgres_database.transaction(steered) == "off"
    assert await postgres_database.transaction(told) == "on"


async def test_a_table_altered_under_a_kept_plan_costs_one_call(quick, statement, postgres_url):
    """Else each connection that keeps such a plan fails for ever."""

    def codes(c, d):
        return d.run(c, "SELECT last_error_code FROM {job} WHERE resource_key = :key", {"key": "a"}).all()

    for _ in range(3):
        with pytest.raises(DBAPIError):
            await quick(lambda c, d: d.run(c, "SELECT 1 / 0"))
        assert await quick(codes) == []
        assert await statement(codes) == []
    with psycopg.connect(postgres_url, autocommit=True) as c:
        c.execute("ALTER TABLE resilient_job ALTER COLUMN last_error_code TYPE varchar(300)")
    with pytest.raises(DBAPIError, match="cached plan"):
        await statement(codes)
    assert await statement(codes) == []
    with contextlib.suppress(DBAPIError):  # the first call was made by the others' pool
        await quick(codes)
    assert await quick(codes) == []


async def test_what_went_wrong_is_told_although_the_rollback_fails_too(quick):
    def fail(c, d):
        put(c, d, "a")
        c._driver.pgconn.send_query(b"SELECT 1")  # as a COPY that was cut off leaves it
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await quick(fail)
    assert await quick(keys) == []


async def test_an_address_that_wants_no_prepared_statements_gets_none(postgres_url):
    database = Database(f"{postgres_url}{'&' if '?' in postgres_url else '?'}prepare_threshold=none")
    for _ in range(9):
        await database.transaction(direct(lambda c, d: d.run(c, "SELECT 1 AS one WHERE :a = 'a'", {"a": "a"}).all()))
    assert (
        await database.transaction(direct(lambda c, d: d.run(c, "SELECT name FROM pg_prepared_statements").all())) == []
    )
    await database.close()


async def test_parameters_are_values_whatever_they_look_like(quick):
    hostile = "100%s :now %(key)s '; DROP TABLE resilient_job; --"
    row = await quick(lambda c, d: d.run(c, "SELECT :text AS text, 5 % 3 AS rest, :at AS at",
                                         {"text": hostile, "at": datetime(2030, 1, 1, tzinfo=UTC)}).one())  # fmt: skip
    assert (row.text, row.rest, row.at) == (hostile, 2, datetime(2030, 1, 1, tzinfo=UTC))
    assert await quick(lambda c, d: d.run(c, "SELECT 5 % 3 AS rest, '%' AS sign", {"unused": 1}).one()[:2]) == (2, "%")


async def test_a_cut_connection_is_named_and_the_next_call_has_a_new_one(quick, postgres_url):
    await quick(put, "a")

    def cut(c, d):
        mine = d.run(c, "SELECT pg_backend_pid()").scalar()
        with psycopg.connect(postgres_url, autocommit=True) as other:
            other.execute("SELECT pg_terminate_backend(%s)", (mine,))
        put(c, d, "b")

    with pytest.raises(DatabaseUnreachable):
        await quick(cut)
    assert await quick(keys) == ["a"]


async def test_connections_cut_while_idle_cost_no_call(quick, postgres_url):
    await quick(put, "a")
    with psycopg.connect(postgres_url, autocommit=True) as other:
        other.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
    await until(lambda: connections(postgres_url)[1] == 0)  # their sessions end when the server gets to it
    assert await quick(keys) == ["a"]


async def test_a_database_that_cannot_be_reached_is_named(postgres_url, open_database):
    gone = open_database(postgres_url.replace("/data", "/elsewhere"))
    with pytest.raises(DatabaseUnreachable, match="is the server running"):
        await gone.transaction(keys)
    with pytest.raises(DatabaseUnreachable, match="is the server running"):
        gone.statement_sync(keys)


async def test_a_cancelled_call_leaves_no_transaction_behind(quick, postgres_url):
    def slow(c, d):
        put(c, d, "a")
        d.run(c, "SELECT pg_sleep(:seconds)", {"seconds": 30})

    task = asyncio.create_task(quick(slow))
    while not await quick(_sleepers):  # noqa: ASYNC110 - the server's state, no event
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await quick(keys) == []
    assert connections(postgres_url)[0] == 0


async def test_a_cancelled_statement_leaves_a_usable_pool(postgres_database, postgres_url):
    def slow(c, d):
        d.run(c, "SELECT pg_sleep(:seconds)", {"seconds": 30})

    for _ in range(3):
        task = asyncio.create_task(postgres_database.statement(slow))
        while not await postgres_database.transaction(_sleepers):  # noqa: ASYNC110 - the server's state, no event
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert [await postgres_database.statement(keys) for _ in range(20)] == [[]] * 20
    assert connections(postgres_url)[0] == 0


async def test_every_connection_in_use_is_said(postgres_url, monkeypatch):
    monkeypatch.setattr(Database.new_async_engine, "__kwdefaults__", {"timeout": 0.05})
    database = Database(postgres_url, connections=1)
    begun = asyncio.Event()

    def wait_for_the_lock(c, d):
        begun.set()
        d.run(c, "SELECT pg_advisory_xact_lock(7)")

    try:
        async with await psycopg.AsyncConnection.connect(postgres_url) as other:
            await other.execute("SELECT pg_advisory_xact_lock(7)")
            waiting = asyncio.create_task(database.statement(wait_for_the_lock))
            await begun.wait()
            with pytest.raises(
                DatabaseBusy, match=r"is in use: shorten transactions, or raise Resilient\(connections="
            ):
                await database.transaction(keys)
        await waiting
        assert await database.transaction(keys) == []
    finally:
        await database.close()


async def test_an_engine_that_was_handed_over_is_used_as_it_is(postgres_url, open_database):
    engine = create_engine(postgres_url.replace("postgresql://", "postgresql+psycopg://"))
    database = open_database(engine)
    await database.transaction(put, "a")
    await database.statement(put, "b")
    assert database.statement_sync(keys) == ["a", "b"]
    assert connections(postgres_url)[1] == 1
    engine.dispose()


def _sleepers(c, d):
    return d.run(
        c, "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'SELECT pg_sleep%' AND state = 'active'"
    ).scalar()


async def test_an_error_that_is_not_about_the_connection_stays_what_it_is(quick, postgres_url):
    def wait(c, d):
        d.run(c, "SET LOCAL lock_timeout = '1ms'")
        d.run(c, "SELECT 1 FROM {job}")

    with psycopg.connect(postgres_url) as other:
        other.execute("LOCK TABLE resilient_job")
        with pytest.raises(OperationalError) as caught:
            await quick(wait)
    assert caught.value.orig.sqlstate == "55P03"
