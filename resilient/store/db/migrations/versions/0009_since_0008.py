"""What a job is to be when it runs once more: the payload and the rest of the newer enqueue.

One column, which the code before this revision leaves empty: then a job that runs once more keeps its payload.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import sqlalchemy as sa

if TYPE_CHECKING:
    from alembic.operations import Operations

revision = "0009_since_0008"
down_revision = "0008_since_0007"

DOCUMENT: Final = sa.JSON().with_variant(sa.Text(), "sqlite")  # SQLite rounds numbers in a column called JSON


def upgrade(op: Operations) -> None:
    """Add it."""
    schema = op.get_context().opts["version_table_schema"]  # ALTER TABLE is not translated to it
    op.add_column("resilient_job", sa.Column("wish", DOCUMENT), schema=schema)


def downgrade(op: Operations) -> None:
    """Drop it, with what it holds."""
    schema = op.get_context().opts["version_table_schema"]
    op.drop_column("resilient_job", "wish", schema=schema)
