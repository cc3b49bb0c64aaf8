"""For applications that use Alembic themselves, on the database the engine shares with them.

Without the filter, ``alembic revision --autogenerate`` finds tables it does not know and proposes to drop
them. In ``env.py``::

    from resilient.alembic import include_name

    context.configure(..., include_name=include_name)

The tables can be brought up to date from a revision of the application, so that one command deploys both::

    def upgrade():
        resilient.alembic.upgrade(op.get_bind())
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import Connection

from resilient.core.base.errors import SetupError
from resilient.store.db import schema as _schema
from resilient.store.db.dialect import Dialect

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["downgrade", "include_name", "upgrade"]


def include_name(name: str | None, type_: str, parent_names: Mapping[str, str | None]) -> bool:
    """Whether Alembic's autogenerate shall look at a thing: at anything but tables named ``resilient_...``.

    To be used with a filter of the application's own: ``include_name(...) and own_filter(...)``.
    """
    table = name if type_ == "table" else parent_names.get("table_name")
    return not (table or "").startswith("resilient_")


def upgrade(bind: Connection | None, *, schema: str | None = None, revision: str = "head") -> list[str]:
    """Bring the tables up to ``revision`` in the transaction of ``bind``; the revisions that were applied.

    Harmless where nothing is missing. Raises `SetupError` where that cannot be done, with what to do instead.
    """
    return _schema.apply(*_opened(bind, schema), revision)


def downgrade(bind: Connection | None, *, schema: str | None = None, revision: str = "base") -> list[str]:
    """Undo revisions; ``base`` drops the tables and every job in them."""
    return _schema.revert(*_opened(bind, schema), revision)


def _opened(bind: Connection | None, schema: str | None) -> tuple[Connection, Dialect]:
    if not isinstance(bind, Connection):  # None or a stand-in that only prints
        raise SetupError("resilient's tables cannot be made in Alembic's --sql mode: run the upgrade online")
    try:
        return bind, Dialect(bind.dialect.name, schema=schema)
    except ValueError as error:
        raise SetupError(str(error)) from None
