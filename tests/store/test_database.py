"""Addresses, engines of the application's own, what a transaction promises, and what errors say."""

import asyncio
import sqlite3
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import create_async_engine

from resilient import DatabaseUnreachable, Kind, MissingExtra, Resilient, SetupError
from resilient.store.db import schema
from resilient.store.db.address import for_listening
from resilient.store.db.database import Database
from resilient.store.db.dialect import Dialect
from resilient.store.db.wake import Listener
from resilient.store.jobs import ready
from tests.helpers import LIMIT

SECRET = "canary-p4ssword"


def write(c, _d, name="a"):
    c.execute(
        sa.text(
            "INSERT INTO resilient_worker (id, host, pid, concurrency, code_version, started_at, seen_at)"
            " VALUES (:name, 'h', 1, 1, '0', '2030-01-01 00:00:00.000000', '2030-01-01 00:00:00.000000')"
        ),
        {"name": name},
    )


def names(c, _d):
    return sorted(c.execute(sa.text("SELECT id FROM resilient_worker")).scalars())


def isolation(c, d):
    return c.execute(sa.text("SHOW transaction_isolation")).scalar() if d.is_postgresql else None


# -- addresses -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("app.db", "not a database address: write sqlite:///app.db or postgresql://"),
        ("", "not a database address"),
        ("sqlite:///app\0.db", "not a database address"),
        ("sqlite:///app\ud800.db", "not a database address"),
        (f"postgresql://u:{SECRET}@host:port/db", "not a database address"),
        (f"mysql://u:{SECRET}@host/db", "'mysql' databases are not supported: use sqlite"),
        (
            f"postgresql+asyncpg://u:{SECRET}@host/db",
            "'asyncpg' is not supported: use 'psycopg' (postgresql://...)",
        ),
        (f"postgresql+nonsense://u:{SECRET}@host/db", "'nonsense' is not supported"),
        ("sqlite+pysqlcipher:///app.db", "'pysqlcipher' is not supported"),
    ],
)
def test_wrong_addresses(address, message):
    with pytest.raises(SetupError) as caught:
        Database(address)
    assert message in str(caught.value)
    assert SECRET not in "".join(traceback.format_exception(caught.value))


async def test_a_pooler_that_loses_prepared_statements(postgres_url, open_database):
    """As PgBouncer in transaction mode does before version 1.21."""

    def forget_then_use(c, _d):
        for _ in range(10):  # psycopg prepares a statement when it is used the sixth time
            c.execute(sa.text("SELECT 1"))
        driver = c.connection.driver_connection
        session = driver.pgconn
        session.exec_(b"DEALLOCATE ALL")
        c.execute(sa.text("SELECT 1"))

    with pytest.raises(SetupError, match=r"does not keep prepared statements .* add \?prepare_threshold=none"):
        await open_database(postgres_url).transaction(forget_then_use)
    await open_database(f"{postgres_url}&prepare_threshold=none").transaction(forget_then_use)
    database = open_database(f"{postgres_url}&prepare_threshold=100")
    await database.transaction(forget_then_use)
    assert "prepare_threshold" not in database.url.query
    with pytest.raises(SetupError, match="must be a number or 'none'"):
        open_database(f"{postgres_url}&prepare_threshold=off")


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
async def test_texts_are_texts_however_the_database_stores_them(postgres_server, open_database, encoding):
    name = f"stored_as_{encoding.lower()}"
    with postgres_server.connect() as c:
        c.execute(f"CREATE DATABASE {name} TEMPLATE template0 ENCODING '{encoding}' LC_COLLATE 'C' LC_CTYPE 'C'")
    try:
        database = open_database(postgres_server.url(name), clock=None)
        await schema.upgrade(database)
        app = Resilient(postgres_server.url(name), kinds=[Kind("greet")])
        await app.enqueue("greet", {"name": "Zoë"}, resource_key="a/b")
        await app.enqueue_many("greet", [{"name": "Zoë"}] * 60, resource_key="a/b")
        assert {job.payload["name"] for job in await app.jobs.list(limit=100)} == {"Zoë"}
        heard = threading.Event()
        listener = Listener(database, heard.set)
        listener.start()
        assert await asyncio.to_thread(heard.wait, LIMIT)
        listener.close()
        await app.close()
    finally:
        await database.close()
        postgres_server.drop(name)


async def test_times_that_the_driver_cannot_read(postgres_url, open_database):
    with psycopg.connect(postgres_url, autocommit=True) as c:
        c.execute(f"ALTER DATABASE {c.info.dbname} SET DateStyle = 'German'")
    for run in (lambda d: d.statement(ready.read_due), lambda d: d.transaction(lambda c, own: Dialect.now(own, c))):
        with pytest.raises(SetupError, match=r"DateStyle 'German, DMY'.* add \?options=-cDateStyle=ISO"):
            await run(open_database(postgres_url, clock=None))
        await run(open_database(f"{postgres_url}&options=-cDateStyle=ISO", clock=None))


def test_schema_needs_postgresql_and_a_plain_name():
    with pytest.raises(SetupError, match="schema='jobs' needs PostgreSQL; this database is sqlite"):
        Database("sqlite:///app.db", schema="jobs")
    with pytest.raises(SetupError, match="not a plain identifier"):
        Database("postgresql://host/db", schema='jobs"; DROP TABLE x; --')


def test_the_usual_spellings_are_understood():
    assert Database("postgres://host/db").url.drivername == "postgresql"
    assert Database(sa.make_url("postgresql+psycopg://host/db")).dialect.is_postgresql
    assert Database("sqlite+aiosqlite:///app.db").url.drivername == "sqlite"


def test_a_file_is_found_again_after_a_change_of_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    database = Database("sqlite:///app.db")
    monkeypatch.chdir("/")
    schema.upgrade_sync(database)
    database.close_sync()
    assert (tmp_path / "app.db").exists()
    assert database.file == tmp_path / "app.db"


def test_without_psycopg(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "psycopg", None)
    with pytest.raises(MissingExtra, match=r"pip install 'resilient-engine\[postgres\]'"):
        Database("postgresql://host/db")


# -- nothing answers -----------------------------------------------------------------------------------------


async def refused(database):
    """What async and sync callers are told; the same."""
    with pytest.raises(DatabaseUnreachable) as caught:
        await database.transaction(names)
    with pytest.raises(DatabaseUnreachable) as caught_sync:
        await asyncio.to_thread(database.transaction_sync, names)
    assert str(caught_sync.value) == str(caught.value)
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    return str(caught.value)


async def test_no_server(open_database):
    message = await refused(open_database(f"postgresql://u:{SECRET}@127.0.0.1:1/db"))
    assert "postgresql://u:***@127.0.0.1:1/db does not answer" in message
    assert "is the server running" in message
    message = await refused(open_database(f"postgresql://127.0.0.1:1/db?user=u&password={SECRET}&sslpassword={SECRET}"))
    assert "postgresql://127.0.0.1:1/db?password=...&sslpassword=...&user=u does not answer" in message


@pytest.mark.parametrize("secret", ["e", "st", "onn"])
async def test_a_password_that_is_a_part_of_other_words_garbles_none(open_database, secret):
    with pytest.raises(DatabaseUnreachable) as caught:
        await open_database(f"postgresql://u:{secret}@127.0.0.1:1/db").transaction(names)
    assert "Connection refused" in str(caught.value)
    assert "is the server running, and is the port right?" in str(caught.value)
    assert str(caught.value).count("***") == 1


def test_an_address_for_listening_is_written_like_any_other():
    for prefix in ("postgres", "postgresql", "postgresql+psycopg"):
        url = for_listening(f"{prefix}://u@host/db?prepare_threshold=none")
        assert (url.drivername, url.query) == ("postgresql+psycopg", {})
    with pytest.raises(SetupError, match="not of sqlite"):
        for_listening("sqlite:///app.db")
    with pytest.raises(SetupError, match="not a database address"):
        for_listening("host:port/db")


async def test_no_such_database(postgres_server, open_database):
    message = await refused(open_database(postgres_server.url("absent")))
    assert 'database "absent" does not exist (create it, or correct the address)' in message


async def test_no_such_directory(tmp_path, open_database):
    message = await refused(open_database(f"sqlite:///{tmp_path}/absent/app.db"))
    assert f"{tmp_path}/absent/app.db does not answer: unable to open database file (its folder" in message
    assert "absent cannot be looked at: No such file or directory)" in message


async def test_no_connection_left(postgres_url, open_database):
    engine = sa.create_engine(
        postgres_url.replace("://", "+psycopg://"), pool_size=1, max_overflow=0, pool_timeout=0.05
    )
    database = open_database(engine)
    with engine.connect():
        message = await refused(database)
    assert "every connection" in message
    assert "hand over an engine with a larger pool" in message
    engine.dispose()


async def test_a_server_that_stops_and_comes_back(own_postgres, open_database):
    database = open_database(own_postgres.url())
    await database.transaction(lambda c, _d: c.exec_driver_sql("SELECT 1"))
    own_postgres.stop()
    with pytest.raises(DatabaseUnreachable):
        await database.transaction(lambda c, _d: c.exec_driver_sql("SELECT 1"))
    own_postgres.start()
    assert await database.transaction(lambda c, _d: c.exec_driver_sql("SELECT 1").scalar()) == 1


async def test_a_session_that_the_server_ends_is_no_line_of_the_log(postgres_database, caplog):
    """An outage ends them all, again and again: who wanted one says what it waits for."""
    caplog.set_level("INFO", "resilient")
    with pytest.raises(DatabaseUnreachable):
        await postgres_database.transaction(lambda c, d: d.run(c, "SELECT pg_terminate_backend(pg_backend_pid())"))
    assert not caplog.records


async def test_a_connection_that_is_killed(postgres_database, postgres_url, open_database):
    def suicide(c, _d):
        c.exec_driver_sql("SELECT pg_terminate_backend(pg_backend_pid())")

    with pytest.raises(DatabaseUnreachable, match="terminating connection"):
        await postgres_database.transaction(suicide)
    assert await postgres_database.transaction(names) == []


async def test_a_mistake_in_a_statement_stays_what_it_is(database):
    with pytest.raises(sa.exc.DBAPIError, match="nonsense"):
        await database.transaction(lambda c, _d: c.execute(sa.text("SELECT nonsense")))


async def test_payloads_stay_out_of_errors(database):
    def fail(c, _d):
        c.execute(sa.text("INSERT INTO resilient_absent VALUES (:payload)"), {"payload": SECRET})

    with pytest.raises(sa.exc.DBAPIError) as caught:
        await database.transaction(fail)
    assert SECRET not in str(caught.value)


# -- transactions --------------------------------------------------------------------------------------------


async def test_commits_or_leaves_nothing(database):
    def fail(c, d):
        write(c, d, "lost")
        raise KeyError("mine")

    await database.transaction(write, name="kept")
    with pytest.raises(KeyError, match="mine"):
        await database.transaction(fail)
    with pytest.raises(KeyError, match="mine"):
        await asyncio.to_thread(database.transaction_sync, fail)
    assert database.transaction_sync(names) == ["kept"]


async def test_a_transaction_that_is_cancelled_on_postgresql_leaves_nothing(postgres_database):
    def slow(c, d):
        write(c, d)
        c.exec_driver_sql("SELECT pg_sleep(30)")

    task = asyncio.create_task(postgres_database.transaction(slow))
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await postgres_database.transaction(names) == []


async def test_statements_see_what_was_committed_meanwhile(postgres_server, open_database):
    """Whatever the database's own default says: the claim reads again after it waited for a lock."""
    name = postgres_server.create()
    with postgres_server.connect() as c:
        c.execute(f"ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'")
    database = open_database(postgres_server.url(name))
    assert await database.transaction(isolation) == "read committed"
    assert await asyncio.to_thread(database.transaction_sync, isolation) == "read committed"


def test_sqlite_writers_wait_for_each_other(sqlite_url, open_database):
    """Read, then write, from many connections at once: with a deferred BEGIN nearly all would fail."""

    def add(database):
        def read_then_write(c, d):
            found = names(c, d)
            write(c, d, f"{len(found):03}")

        for _ in range(10):
            database.transaction_sync(read_then_write)

    databases = [open_database(sqlite_url) for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(add, databases))
    assert databases[0].transaction_sync(names) == [f"{n:03}" for n in range(40)]


async def test_sqlite_is_opened_for_durable_commits(sqlite_database):
    def pragmas(c, _d):
        return {
            name: c.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "busy_timeout")
        }

    assert await sqlite_database.transaction(pragmas) == {
        "journal_mode": "wal",
        "synchronous": 2,
        "busy_timeout": 30000,
    }


async def test_a_reader_of_sqlite_does_not_wait_for_a_writer(sqlite_database):
    with sqlite_database.sync_engine.begin() as c:
        write(c, sqlite_database.dialect)
        reader = sqlite3.connect(sqlite_database.file, timeout=0)
        assert reader.execute("SELECT count(*) FROM resilient_worker").fetchone() == (0,)
        reader.close()


async def test_in_memory(open_database):
    database = open_database("sqlite://")
    await schema.upgrade(database)
    await asyncio.gather(*(database.transaction(write, name=f"{n}") for n in range(5)))
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda n: database.transaction_sync(write, name=f"{n}"), range(5, 9)))
    assert await database.transaction(names) == [f"{n}" for n in range(9)]


async def test_the_loop_runs_on_while_sqlite_works(sqlite_database):
    ticks = []

    async def tick():
        while True:
            await asyncio.sleep(0.01)
            ticks.append(1)

    def work(_c, _d):
        end = time.monotonic() + LIMIT
        while len(ticks) <= 5 and time.monotonic() < end:
            time.sleep(0.01)
        return len(ticks)

    ticking = asyncio.create_task(tick())
    assert await sqlite_database.transaction(work) > 5
    ticking.cancel()


# -- engines of the application's own ------------------------------------------------------------------------


def engine_for(url, *, asynchronous, **options):
    if asynchronous:
        address = url.replace("postgresql://", "postgresql+psycopg://").replace("sqlite://", "sqlite+aiosqlite://")
        return create_async_engine(address, **options)
    return sa.create_engine(url.replace("postgresql://", "postgresql+psycopg://"), **options)


@pytest.fixture(params=["engine", "async engine"])
async def theirs(request, database_url):
    engine = engine_for(database_url, asynchronous=request.param == "async engine")
    yield engine
    closed = engine.dispose()
    if closed is not None:
        await closed


async def test_an_engine_is_used_and_left_open(theirs, open_database):
    database = open_database(theirs)
    await database.transaction(write, name="async")
    await asyncio.to_thread(database.transaction_sync, write, name="sync")
    assert await database.transaction(names) == ["async", "sync"]
    assert (database.async_engine or database.sync_engine) is theirs
    await database.close()
    again = open_database(theirs)
    assert await again.transaction(names) == ["async", "sync"]


async def test_an_engine_of_theirs_reads_then_writes_on_many_connections(theirs, database_url, open_database):
    def read_then_write(c, d, name):
        names(c, d)
        write(c, d, name)

    databases = [open_database(theirs), open_database(database_url)]
    await asyncio.gather(
        *(databases[n % 2].transaction(read_then_write, f"{n:03}") for n in range(30)),
        *(asyncio.to_thread(databases[n % 2].transaction_sync, read_then_write, f"{n:03}") for n in range(30, 50)),
    )
    assert await databases[0].transaction(names) == [f"{n:03}" for n in range(50)]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("level", ["AUTOCOMMIT", "SERIALIZABLE"])
async def test_their_isolation_level_is_theirs(database_url, asynchronous, level, open_database):
    engine = engine_for(database_url, asynchronous=asynchronous, isolation_level=level)
    database = open_database(engine)

    def fail(c, d):
        write(c, d)
        raise KeyError("mine")

    with pytest.raises(KeyError):
        await database.transaction(fail)
    assert await database.transaction(names) == []
    assert await database.transaction(isolation) in (None, "read committed")
    await database.transaction(write)
    if database.dialect.is_postgresql and level == "SERIALIZABLE":
        if asynchronous:
            async with engine.connect() as c:
                assert await c.run_sync(isolation, database.dialect) == "serializable"
        else:
            with engine.connect() as c:
                assert isolation(c, database.dialect) == "serializable"
    if (closing := engine.dispose()) is not None:
        await closing


async def test_a_sqlite_engine_that_begins_by_itself(sqlite_url, open_database):
    """As SQLAlchemy's documentation advises for SERIALIZABLE isolation."""
    engine = sa.create_engine(sqlite_url)

    @sa.event.listens_for(engine, "connect")
    def _(connection, _record):
        connection.isolation_level = None

    @sa.event.listens_for(engine, "begin")
    def _(c):
        c.exec_driver_sql("BEGIN")

    database = open_database(engine)
    await database.transaction(write)
    assert await database.transaction(names) == ["a"]
    engine.dispose()


async def test_busy_threads_of_the_application_do_not_stop_us(postgres_url, open_database):
    """Handlers may fill the loop's default executor; heartbeats must still reach the database."""
    engine = engine_for(postgres_url, asynchronous=False)
    database = open_database(engine)
    release = threading.Event()
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    blocker = loop.run_in_executor(None, release.wait)
    try:
        assert await asyncio.wait_for(database.transaction(names), LIMIT) == []
    finally:
        release.set()
        await blocker
        engine.dispose()


def test_an_async_engine_of_theirs_serves_one_loop_after_the_other(database_url):
    """As in scripts that call ``asyncio.run`` several times, with more to do at once than there are connections."""
    engine = engine_for(database_url, asynchronous=True, pool_size=1, max_overflow=0)
    database = Database(engine)

    async def write_many(first):
        await asyncio.gather(*(database.transaction(write, name=f"{n}") for n in range(first, first + 4)))

    async def read():
        found = await database.transaction(names)
        await engine.dispose()
        return found

    asyncio.run(write_many(0))
    asyncio.run(write_many(4))
    assert asyncio.run(read()) == [f"{n}" for n in range(8)]


def test_an_async_engine_of_theirs_serves_one_loop_at_a_time(postgres_url):
    engine = engine_for(postgres_url, asynchronous=True, pool_size=1, max_overflow=0)
    database = Database(engine)

    async def write_many(first):
        await asyncio.gather(*(database.transaction(write, name=f"{n}") for n in range(first, first + 4)))

    with asyncio.Runner() as home:
        home.run(write_many(0))
        with pytest.raises(SetupError, match=r"is in use by another event loop: hand over its address instead"):
            asyncio.run(write_many(4))
        home.run(engine.dispose())


def test_an_async_engine_in_memory_is_one_and_the_same_in_every_loop():
    engine = create_async_engine("sqlite+aiosqlite://")
    database = Database(engine)
    asyncio.run(schema.upgrade(database))
    asyncio.run(database.transaction(write))
    assert asyncio.run(database.transaction(names)) == ["a"]
    asyncio.run(engine.dispose())


async def test_an_async_engine_in_memory_has_no_synchronous_side(open_database):
    engine = create_async_engine("sqlite+aiosqlite://")
    database = open_database(engine)
    await schema.upgrade(database)
    assert await database.transaction(names) == []
    with pytest.raises(SetupError, match="in memory cannot serve synchronous callers"):
        database.transaction_sync(names)
    await engine.dispose()


def test_engines_with_other_drivers_are_refused():
    stranger = sa.create_engine("sqlite://")
    stranger.dialect.driver = "pysqlcipher"
    with pytest.raises(SetupError, match="driver 'pysqlcipher' is not supported"):
        Database(stranger)


async def test_a_single_statement_needs_no_transaction_of_its_own(database):
    def put(c, d, key):
        d.run(c, f"INSERT INTO {{resource}} (key, created_at, updated_at) VALUES (:key, {d.now_sql}, {d.now_sql})",
              {"key": key} | ({"now": d.host_now()} if d.host_now() else {}))  # fmt: skip
        return key

    assert await database.statement(put, "a") == "a"
    assert database.statement_sync(put, "b") == "b"
    with pytest.raises(IntegrityError):
        await database.statement(put, "a")
    with pytest.raises(IntegrityError):
        database.statement_sync(put, "b")
    found = await database.transaction(lambda c, d: [r[0] for r in d.run(c, "SELECT key FROM {resource} ORDER BY key")])
    assert found == ["a", "b"]
    with pytest.raises(RuntimeError, match="undone"):  # the connections it used are as before
        await database.transaction(_put_and_fail, put)
    with pytest.raises(RuntimeError, match="undone"):
        database.transaction_sync(_put_and_fail, put)
    assert database.transaction_sync(lambda c, d: d.run(c, "SELECT count(*) FROM {resource}").scalar()) == 2


def _put_and_fail(c, d, put):
    put(c, d, "c")
    raise RuntimeError("undone")


def test_a_file_that_is_no_database_and_a_host_that_is_none_are_named(tmp_path):
    (tmp_path / "notes.db").write_text("not a database at all, but long enough to be looked at as one")
    for address, says in (
        (f"sqlite:///{tmp_path}/notes.db", f"{tmp_path}/notes.db does not answer: file is not a database (correct the"),
        (
            "postgresql://no.such.host.invalid/x",
            r"no.such.host.invalid/x does not answer: .* \(is the host's name right",
        ),
    ):
        with pytest.raises(DatabaseUnreachable, match=says.replace("(correct", r"\(correct")):
            Database(address).transaction_sync(lambda c, d: d.now(c))


def test_a_check_creates_no_file_of_an_address_in_the_form_of_sqlite(tmp_path):
    database = Database(f"sqlite:///file:{tmp_path}/typo.db?uri=true")
    with pytest.raises(DatabaseUnreachable, match="does not exist"):
        schema.check_sync(database)
    database.close_sync()
    assert list(tmp_path.iterdir()) == []
