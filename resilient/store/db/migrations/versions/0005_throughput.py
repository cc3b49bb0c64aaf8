"""How many executions ended how, in each minute.

One table, which the code before this revision does not know.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import sqlalchemy as sa

if TYPE_CHECKING:
    from alembic.operations import Operations

revision = "0005"
down_revision = "0004"

NAME: Final = sa.String(255)


def upgrade(op: Operations) -> None:
    """Make it."""
    op.create_table(
        "resilient_throughput",
        sa.Column("minute", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("worker", NAME, primary_key=True),
        sa.Column("kind", NAME, primary_key=True),
        sa.Column("provider", NAME, primary_key=True),
        sa.Column("outcome", NAME, primary_key=True),
        sa.Column("count", sa.BigInteger, nullable=False),
        schema=op.get_context().opts["version_table_schema"],
    )


def downgrade(op: Operations) -> None:
    """Drop it, with what it holds."""
    op.drop_table("resilient_throughput", schema=op.get_context().opts["version_table_schema"])
