"""How long a worker's event loop stands still.

One column, which the code before this revision leaves empty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import sqlalchemy as sa

if TYPE_CHECKING:
    from alembic.operations import Operations

revision = "0008_since_0007"
down_revision = "0007_since_0006"


def upgrade(op: Operations) -> None:
    """Add it."""
    schema = op.get_context().opts["version_table_schema"]  # ALTER TABLE is not translated to it
    op.add_column("resilient_worker", sa.Column("loop_lag", sa.Float(53)), schema=schema)


def downgrade(op: Operations) -> None:
    """Drop it, with what it holds."""
    schema = op.get_context().opts["version_table_schema"]
    op.drop_column("resilient_worker", "loop_lag", schema=schema)
