"""The revisions make the tables of the models, in one step, once, in any schema."""

import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

import resilient.alembic
from resilient import DatabaseUnreachable, Job, Resilient, SchemaOutdated, SchemaTooNew, SetupError, handler
from resilient.store.db import schema, tables

ALL = [script.revision for script in schema._scripts().walk_revisions()][::-1]
HEAD = ALL[-1]
NUMBER = int(HEAD.partition("_")[0])
NEXT = f"{NUMBER + 1:04}"
ADD_A_COLUMN = f"""
import sqlalchemy as sa
revision, down_revision = "{NEXT}", "{HEAD}"
def upgrade(op):
    op.create_table("resilient_extra", sa.Column("id", sa.Integer, primary_key=True))
    op.add_column("resilient_worker", sa.Column("mood", sa.String(20)))
def downgrade(op):
    op.drop_table("resilient_extra")
"""


@handler("ping")
async def ping(job: Job[None]) -> None: ...


@pytest.fixture
def next_version(tmp_path, monkeypatch):
    """The code of a version with one more revision; its body can be given."""

    def become(body=ADD_A_COLUMN):
        home = tmp_path / "migrations"
        shutil.copytree(schema.HOME, home, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
        (home / "versions" / f"{NEXT}_next.py").write_text(body)
        monkeypatch.setattr(schema, "HOME", home)

    return become


def definitions(c, _d):
    """Everything the database knows about the shape of our tables."""
    if c.dialect.name == "sqlite":
        rows = c.exec_driver_sql("SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL").all()
        made = {name: re.sub(r"\s+", " ", sql) for type_, name, sql in rows if type_ != "table"}
        for table in (name for type_, name, _ in rows if type_ == "table" and name != schema.VERSION_TABLE):
            # A column that was added later stands elsewhere in the table's text.
            columns = c.exec_driver_sql(f"PRAGMA table_xinfo('{table}')").all()
            made |= {f"{table}.{column[1]}": tuple(column[2:]) for column in columns}
        return made
    columns = c.exec_driver_sql(
        "SELECT a.attrelid::regclass::text || '.' || a.attname, format_type(a.atttypid, a.atttypmod),"
        " a.attnotnull, pg_get_expr(d.adbin, d.adrelid), l.collname, a.attidentity FROM pg_attribute a"
        " JOIN pg_class r ON r.oid = a.attrelid"
        " LEFT JOIN pg_attrdef d ON (d.adrelid, d.adnum) = (a.attrelid, a.attnum)"
        " LEFT JOIN pg_collation l ON l.oid = a.attcollation"
        " WHERE r.relkind = 'r' AND r.relname ~ '^resilient' AND a.attnum > 0"
    ).all()
    indexes = c.exec_driver_sql("SELECT indexname, indexdef FROM pg_indexes WHERE tablename ~ '^resilient'").all()
    found = {row[0]: tuple(row[1:]) for row in (*columns, *indexes)}
    return {name: value for name, value in found.items() if not name.startswith(schema.VERSION_TABLE)}


async def test_revisions_make_what_the_models_say(empty_urls, open_database):
    by_revisions, by_models = open_database(empty_urls()), open_database(empty_urls())
    assert await schema.upgrade(by_revisions) == ALL
    await by_models.transaction(lambda c, _d: tables.metadata.create_all(c))
    made = await by_revisions.transaction(definitions)
    assert made == await by_models.transaction(definitions)
    assert len(made) > 20


async def test_alembic_sees_no_difference(postgres_database):
    def compare(c, _d):
        options = {
            "compare_type": True,
            "compare_server_default": True,
            "version_table": schema.VERSION_TABLE,
        }
        return compare_metadata(MigrationContext.configure(c, opts=options), tables.metadata)

    assert await postgres_database.transaction(compare) == []


async def test_storage_parameters(postgres_database):
    def read(c, _d):
        rows = c.exec_driver_sql("SELECT relname, reloptions FROM pg_class WHERE reloptions IS NOT NULL")
        return {name: dict(option.split("=") for option in options) for name, options in rows}

    found = await postgres_database.transaction(read)
    assert found["resilient_job"]["fillfactor"] == "85"
    assert found["resilient_resource"]["fillfactor"] == "50"
    for table in ("resilient_job", "resilient_turn", "resilient_resource", "resilient_rate_limit"):
        assert found[table]["autovacuum_vacuum_cost_delay"] == "0"
        assert float(found[table]["autovacuum_vacuum_scale_factor"]) <= 0.02


# -- upgrading -----------------------------------------------------------------------------------------------


async def test_upgrading_twice_changes_nothing(database):
    assert await schema.current(database) == schema.head() == HEAD
    assert await schema.upgrade(database) == []
    await schema.check(database)


def test_many_at_once(empty_url, open_database):
    databases = [open_database(empty_url) for _ in range(8)]
    start = threading.Barrier(8)

    def run(database):
        start.wait()
        return schema.upgrade_sync(database)

    with ThreadPoolExecutor(8) as threads:
        done = list(threads.map(run, databases))
    assert sorted(done) == [[]] * 7 + [ALL]


async def test_from_a_version_to_the_next_and_back(database, next_version):
    next_version()
    with pytest.raises(SchemaOutdated, match=f"revision {HEAD}, this code needs {NEXT}: run `resilient db upgrade`"):
        await schema.check(database)
    assert await schema.upgrade(database) == [NEXT]
    await schema.check(database)


async def test_newer_tables_are_refused_and_left_alone(database, next_version, monkeypatch):
    home = schema.HOME
    next_version()
    await schema.upgrade(database)
    monkeypatch.setattr(schema, "HOME", home)
    with pytest.raises(SchemaTooNew, match=f"revision {NEXT}, which this version does not know: deploy the newer"):
        await schema.check(database)
    with pytest.raises(SchemaTooNew):
        await schema.upgrade(database)
    assert await schema.current(database) == NEXT


@pytest.mark.parametrize(("since", "is_refused"), [(NUMBER, False), (NUMBER - 1, False), (NUMBER + 1, True)])
async def test_code_before_a_compatible_revision_starts_anew_and_works(
    database, next_version, monkeypatch, since, is_refused
):
    """A worker of the version before that is replaced, or crashes, while an update rolls."""
    home, name = schema.HOME, f"{NEXT}_since_{since:04}"
    next_version(ADD_A_COLUMN.replace(f'"{NEXT}"', f'"{name}"'))
    assert await schema.upgrade(database) == [name]
    monkeypatch.setattr(schema, "HOME", home)
    app = Resilient(database, handlers=[ping])
    if is_refused:
        with pytest.raises(SchemaTooNew, match=f"revision {name}, which this version does not know"):
            await app.ready()
        return
    assert await schema.upgrade(database) == []
    await schema.check(database)
    await app.enqueue(ping, resource_key="demo/a")
    assert await app.worker().drain(timeout=60) == 1
    assert await schema.current(database) == name


async def test_a_failing_upgrade_leaves_nothing(database, next_version):
    next_version(ADD_A_COLUMN.replace("def downgrade", "    raise RuntimeError('broken')\ndef downgrade"))
    before = await database.transaction(definitions)
    with pytest.raises(RuntimeError, match="broken"):
        await schema.upgrade(database)
    assert await database.transaction(definitions) == before
    assert await schema.current(database) == HEAD


async def test_an_upgrade_does_not_wait_behind_a_long_transaction(
    postgres_url, open_database, next_version, monkeypatch
):
    monkeypatch.setattr(schema, "LOCK_TIMEOUT", 0.1)
    next_version()
    busy = open_database(postgres_url)
    with busy.sync_engine.begin() as c:
        c.exec_driver_sql("SELECT count(*) FROM resilient_worker")
        with pytest.raises(SetupError, match="in use by a long transaction, and nothing was changed"):
            await schema.upgrade(open_database(postgres_url))
    assert await schema.upgrade(busy) == [NEXT]


async def test_without_the_right_to_create_tables(postgres_server, open_database):
    name = postgres_server.create()
    with postgres_server.connect(name) as c:
        c.execute("CREATE ROLE nobody_much LOGIN PASSWORD 'canary-secret'")
        c.execute("REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    try:
        url = postgres_server.url(name).replace("postgres@", "nobody_much:canary-secret@")
        with pytest.raises(SetupError, match=r"may not create tables .* grant it CREATE") as caught:
            await schema.upgrade(open_database(url))
        assert "canary" not in str(caught.value)
    finally:
        postgres_server.drop(name)
        with postgres_server.connect() as c:
            c.execute("DROP ROLE nobody_much")


# -- checking ------------------------------------------------------------------------------------------------


async def test_no_tables(empty_url, open_database):
    database = open_database(empty_url)
    await database.transaction(lambda c, _d: c.exec_driver_sql("SELECT 1"))
    with pytest.raises(SchemaOutdated, match="has no tables of resilient: run `resilient db upgrade`"):
        await schema.check(database)
    assert await schema.current(database) is None


async def test_looking_creates_no_file(tmp_path, open_database):
    database = open_database(f"sqlite:///{tmp_path}/absent.db")
    with pytest.raises(DatabaseUnreachable, match=r"absent\.db does not exist: `resilient db upgrade` creates it"):
        await schema.check(database)
    with pytest.raises(DatabaseUnreachable):
        schema.check_sync(database)
    assert list(tmp_path.iterdir()) == []
    schema.upgrade_sync(database)
    schema.check_sync(database)
    assert await schema.current(database) == HEAD


@pytest.mark.parametrize("version", [(12, 18), (3, 34, 1)])
def test_databases_that_are_too_old(database, version, monkeypatch):
    name = "PostgreSQL" if version > (4,) else "SQLite"
    if (name == "SQLite") is not database.is_sqlite:
        return
    database.transaction_sync(lambda _c, _d: None)  # the driver has asked the server
    monkeypatch.setattr(database.sync_engine.dialect, "server_version_info", version)
    with pytest.raises(SetupError, match=f"{name} {'.'.join(map(str, version))} is too old"):
        schema.check_sync(database)


# -- in a schema of its own ----------------------------------------------------------------------------------


async def test_in_a_schema(postgres_server, open_database):
    url = postgres_server.url(name := postgres_server.create())
    database = open_database(url, schema="Jobs_1")
    assert await schema.upgrade(database) == ALL
    assert await schema.upgrade(database) == []
    await schema.check(database)
    found = await database.transaction(
        lambda c, _d: c.exec_driver_sql(
            "SELECT DISTINCT schemaname FROM pg_tables WHERE tablename ~ '^resilient'"
        ).all()
    )
    assert found == [("Jobs_1",)]
    await database.transaction(lambda c, d: d.run(c, "SELECT id FROM {job}").all())
    plain = open_database(url)
    with pytest.raises(SchemaOutdated, match="has no tables of resilient: "):
        await schema.check(plain)
    with pytest.raises(SchemaOutdated, match="in schema 'other'"):
        await schema.check(open_database(url, schema="other"))
    assert await schema.upgrade(plain) == ALL  # both, side by side
    await database.close()
    await plain.close()
    postgres_server.drop(name)


def test_the_connection_is_left_as_it_was(empty_url, open_database):
    database = open_database(empty_url)
    with database.sync_engine.begin() as c:
        patience = c.exec_driver_sql("SHOW lock_timeout").scalar() if not database.is_sqlite else None
        resilient.alembic.upgrade(c, schema=None if database.is_sqlite else "jobs")
        if not database.is_sqlite:
            assert c.exec_driver_sql("SHOW lock_timeout").scalar() == patience
        sa.Table("mine", sa.MetaData(), sa.Column("id", sa.Integer)).create(c)
        assert sa.inspect(c).has_table("mine")
        assert resilient.alembic.downgrade(c, schema=None if database.is_sqlite else "jobs") == ALL[::-1]
