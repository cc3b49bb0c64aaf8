"""Who changed what, why and when.

One table, which the code before this revision does not know.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import sqlalchemy as sa

if TYPE_CHECKING:
    from alembic.operations import Operations

revision = "0004"
down_revision = "0003"

TIME: Final = sa.DateTime(timezone=True).with_variant(sa.String(26), "sqlite")
DOCUMENT: Final = sa.JSON().with_variant(sa.Text(), "sqlite")  # SQLite rounds numbers in a column called JSON
BIG_ID: Final = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade(op: Operations) -> None:
    """Make it."""
    op.create_table(
        "resilient_audit",
        sa.Column("id", BIG_ID, primary_key=True, autoincrement=True),
        sa.Column("at", TIME, nullable=False),
        sa.Column("who", sa.Text, nullable=False),
        sa.Column("via", sa.Text, nullable=False),
        sa.Column("action", sa.Text, nullable=False),
        sa.Column("subject", sa.Text, nullable=False),
        sa.Column("why", sa.Text),
        sa.Column("outcome", DOCUMENT),
        schema=op.get_context().opts["version_table_schema"],
    )


def downgrade(op: Operations) -> None:
    """Drop it, with what it holds."""
    op.drop_table("resilient_audit", schema=op.get_context().opts["version_table_schema"])
