"""For drafting a revision (``make revision m="add a column"``); nothing else runs through this file.

An upgrade does not use it, because Alembic's environment is a module-global of the process, and an
application may be in the middle of its own Alembic run (see `resilient.store.db.schema`).
"""

from __future__ import annotations

from tempfile import TemporaryDirectory

from alembic import context
from sqlalchemy import Column

from resilient.store.db import schema, tables
from resilient.store.db.database import Database

# SQLite does not tell that an index sorts a column downwards, so Alembic would always find these changed.
_SORTED_DOWN = {
    index.name
    for table in tables.metadata.sorted_tables
    for index in table.indexes
    if not all(isinstance(expression, Column) for expression in index.expressions)
}


def _draft() -> None:
    """Compare the models with a database that has every revision so far."""
    with TemporaryDirectory() as home:
        database = Database(context.get_x_argument(as_dictionary=True).get("url", f"sqlite:///{home}/draft.db"))
        schema.upgrade_sync(database)
        with database.sync_engine.begin() as c:
            context.configure(
                connection=c,
                target_metadata=tables.metadata,
                version_table=schema.VERSION_TABLE,
                include_name=lambda name, *_: name not in _SORTED_DOWN,
                include_object=lambda _, name, *__: name not in _SORTED_DOWN,
            )
            context.run_migrations()
        database.close_sync()


_draft()
