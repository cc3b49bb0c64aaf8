"""Which accounts were erased lately, among many other changes.

One index; the code before this revision works with it and without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import sqlalchemy as sa

if TYPE_CHECKING:
    from alembic.operations import Operations

revision = "0010_since_0009"
down_revision = "0009_since_0008"

NAME: Final = "resilient_audit_erased"


def upgrade(op: Operations) -> None:
    """Add it."""
    schema, where = op.get_context().opts["version_table_schema"], sa.text("action = 'erase'")
    op.create_index(NAME, "resilient_audit", ["at"], schema=schema, postgresql_where=where, sqlite_where=where)


def downgrade(op: Operations) -> None:
    """Drop it."""
    schema = op.get_context().opts["version_table_schema"]
    op.drop_index(NAME, "resilient_audit", schema=schema)
