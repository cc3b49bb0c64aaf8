"""What a job is to be when it runs once more, and as what a limit was drawn.

Columns that the code before this revision leaves empty, or as they are. Then a job that runs once more keeps its
payload, and a limit that is declared anew counts what was drawn by the seconds of the old one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import sqlalchemy as sa

if TYPE_CHECKING:
    from alembic.operations import Operations

revision = "0009_since_0008"
down_revision = "0008_since_0007"

DOCUMENT: Final = sa.JSON().with_variant(sa.Text(), "sqlite")  # SQLite rounds numbers in a column called JSON
LIMITS: Final = ("unit_seconds", "drawn_at")


def upgrade(op: Operations) -> None:
    """Add them."""
    schema = op.get_context().opts["version_table_schema"]  # ALTER TABLE is not translated to it
    op.add_column("resilient_job", sa.Column("wish", DOCUMENT), schema=schema)
    for name in LIMITS:
        op.add_column("resilient_rate_limit", sa.Column(name, sa.Float(53)), schema=schema)


def downgrade(op: Operations) -> None:
    """Drop them, with what they hold."""
    schema = op.get_context().opts["version_table_schema"]
    op.drop_column("resilient_job", "wish", schema=schema)
    for name in LIMITS:
        op.drop_column("resilient_rate_limit", name, schema=schema)
