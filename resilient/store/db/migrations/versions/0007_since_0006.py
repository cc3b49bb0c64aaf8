"""Which resources a worker serves.

One column, which the code before this revision leaves empty: then it serves all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import sqlalchemy as sa

if TYPE_CHECKING:
    from alembic.operations import Operations

revision = "0007_since_0006"
down_revision = "0006"

DOCUMENT: Final = sa.JSON().with_variant(sa.Text(), "sqlite")  # SQLite rounds numbers in a column called JSON


def upgrade(op: Operations) -> None:
    """Add it."""
    schema = op.get_context().opts["version_table_schema"]  # ALTER TABLE is not translated to it
    op.add_column("resilient_worker", sa.Column("resources", DOCUMENT), schema=schema)


def downgrade(op: Operations) -> None:
    """Drop it, with what it holds."""
    schema = op.get_context().opts["version_table_schema"]
    op.drop_column("resilient_worker", "resources", schema=schema)
