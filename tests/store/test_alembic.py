"""An application with its own Alembic: autogenerate leaves our tables alone, its revisions can make them."""

import io
import textwrap
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config

import resilient.alembic
from resilient import SetupError
from resilient.store.db import schema
from resilient.store.db.database import Database

ENV = """
    from alembic import context
    import sqlalchemy as sa
    import resilient.alembic

    metadata = sa.MetaData()
    sa.Table("customer", metadata, sa.Column("id", sa.Integer, primary_key=True), sa.Column("name", sa.Text))
    options = context.config.attributes

    def run(connection=None, **offline):
        context.configure(
            connection=connection, target_metadata=metadata, include_schemas=options["schemas"],
            include_name=options["filter"], transaction_per_migration=True, **offline,
        )
        with context.begin_transaction():
            context.run_migrations()

    if context.is_offline_mode():
        run(url=options["url"])
    else:
        engine = sa.create_engine(options["url"], poolclass=sa.NullPool)
        with engine.connect() as connection:
            run(connection)
"""
TEMPLATE = """revision, down_revision = "x", ${repr(down_revision)}
def upgrade():
    ${upgrades}
"""
REVISION = """
    revision, down_revision = {name!r}, {before!r}

    import resilient.alembic
    import sqlalchemy as sa
    from alembic import op

    def upgrade():
        {body}
"""


class Application:
    """Somebody's program with Alembic of its own."""

    def __init__(self, home, url):
        self.home = home
        self.config = Config(stdout=io.StringIO(), output_buffer=io.StringIO())
        self.config.set_main_option("script_location", str(home))
        self.config.set_main_option("path_separator", "os")
        self.url = url.replace("postgresql://", "postgresql+psycopg://")
        self.config.attributes.update(url=self.url, schemas=False, filter=resilient.alembic.include_name)
        (home / "versions").mkdir(parents=True)
        (home / "env.py").write_text(textwrap.dedent(ENV))
        (home / "script.py.mako").write_text(TEMPLATE)
        self.revision(
            "a",
            None,
            "op.create_table('customer', sa.Column('id', sa.Integer, primary_key=True), sa.Column('name', sa.Text))",
        )

    def revision(self, name, before, body):
        text = textwrap.dedent(REVISION).format(name=name, before=before, body=body)
        (self.home / "versions" / f"{name}.py").write_text(text)

    def upgrade(self):
        command.upgrade(self.config, "head")

    def autogenerate(self):
        """What Alembic proposes."""
        made = command.revision(self.config, autogenerate=True, rev_id="x")
        lines = Path(made.path).read_text().splitlines()
        return [line.strip() for line in lines if line.strip().startswith("op.")]

    def tables(self, schema_=None):
        engine = sa.create_engine(self.url)
        try:
            return set(sa.inspect(engine).get_table_names(schema=schema_))
        finally:
            engine.dispose()


@pytest.fixture
def application(tmp_path, empty_url):
    return Application(tmp_path / "alembic", empty_url)


def installed(url, **options):
    database = Database(url, **options)
    schema.upgrade_sync(database)
    database.close_sync()


def test_autogenerate_proposes_nothing(application):
    application.upgrade()
    installed(application.config.attributes["url"])
    assert "resilient_job" in application.tables()
    assert application.autogenerate() == []


def test_without_the_filter_it_would_drop_every_table(application):
    application.upgrade()
    installed(application.config.attributes["url"])
    application.config.attributes["filter"] = None
    assert any("drop_table" in line and "resilient_job" in line for line in application.autogenerate())


def test_autogenerate_still_sees_the_applications_own_tables(application):
    installed(application.config.attributes["url"])
    application.revision("a", None, "op.create_table('customer', sa.Column('id', sa.Integer, primary_key=True))")
    application.upgrade()
    (line,) = application.autogenerate()
    assert "add_column" in line
    assert "customer" in line


def test_in_a_schema_of_its_own(tmp_path, postgres_server):
    name = postgres_server.create()
    application = Application(tmp_path / "alembic", postgres_server.url(name))
    application.config.attributes["schemas"] = True
    application.upgrade()
    installed(postgres_server.url(name), schema="jobs")
    assert "resilient_job" in application.tables("jobs")
    assert application.autogenerate() == []
    postgres_server.drop(name)


def test_tables_made_by_the_applications_own_revision(application):
    application.revision(
        "b",
        "a",
        "resilient.alembic.upgrade(op.get_bind()); op.add_column('customer', sa.Column('age', sa.Integer))",
    )
    application.revision("c", "b", "resilient.alembic.upgrade(op.get_bind())")  # harmless
    application.upgrade()
    database = Database(application.config.attributes["url"])
    schema.check_sync(database)
    columns = {column["name"] for column in sa.inspect(database.sync_engine).get_columns("customer")}
    database.close_sync()
    assert columns == {"id", "name", "age"}


def test_and_undone_with_it_when_it_fails(application):
    application.revision("b", "a", "resilient.alembic.upgrade(op.get_bind()); raise RuntimeError('theirs')")
    with pytest.raises(RuntimeError, match="theirs"):
        application.upgrade()
    assert "resilient_job" not in application.tables()


def test_not_as_a_script(application):
    application.revision("b", "a", "resilient.alembic.upgrade(op.get_bind())")
    with pytest.raises(SetupError, match="--sql mode"):
        command.upgrade(application.config, "head", sql=True)


def test_filter():
    include = resilient.alembic.include_name
    assert include("customer", "table", {})
    assert include(None, "schema", {})
    assert include("resilient", "schema", {})
    assert include("resilient_note", "column", {"table_name": "customer"})
    assert not include("resilient_job", "table", {"schema_name": "jobs"})
    assert not include("id", "column", {"table_name": "resilient_job"})
    assert not include(schema.VERSION_TABLE, "table", {})
