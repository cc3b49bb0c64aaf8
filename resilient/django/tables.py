"""The engine's tables in Django's migrations, and their end in ``manage.py flush``.

Each migration of this package brings the tables to what the installed engine needs, so that ``manage.py migrate`` is
enough after an update, and taken back they go to the revision before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.db import connections, transaction

from resilient import alembic
from resilient.django.connection import session
from resilient.django.settings import current
from resilient.store.db import schema
from resilient.store.db.dialect import Dialect

if TYPE_CHECKING:
    from collections.abc import Callable


def forwards(_apps: Any, editor: Any) -> None:
    """For `RunPython`: make the tables, or bring them up to date, in the migration's transaction."""
    alias, settings = editor.connection.alias, current()
    if alias == settings.alias:
        alembic.upgrade(session(alias), schema=settings.schema)


def back_to(revision: str) -> Callable[[Any, Any], None]:
    """For `RunPython`: back to a revision of the engine's; ``base`` drops the tables and every job in them."""

    def backwards(_apps: Any, editor: Any) -> None:
        alias, settings = editor.connection.alias, current()
        if alias == settings.alias:
            alembic.downgrade(session(alias), schema=settings.schema, revision=revision)

    return backwards


def empty(alias: str) -> None:
    """Delete every row of the engine's tables in this database, if the jobs are in it and it has tables."""
    settings = current()
    if alias != settings.alias:
        return
    with transaction.atomic(alias):
        schema.empty(session(alias), Dialect(connections[alias].vendor, schema=settings.schema))
