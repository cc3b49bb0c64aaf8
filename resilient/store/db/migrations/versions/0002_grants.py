"""What is known of a grant's health, and seals on connections.

Columns only, all of which the code before this revision may leave empty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import sqlalchemy as sa

if TYPE_CHECKING:
    from alembic.operations import Operations

revision = "0002"
down_revision = "0001"

TIME: Final = sa.DateTime(timezone=True).with_variant(sa.String(26), "sqlite")
_TIMES: Final = ("worked_at", "doubted_at", "client_refused_at", "refused_since", "authorised_at")


def upgrade(op: Operations) -> None:
    """Add them."""
    schema = op.get_context().opts["version_table_schema"]  # ALTER TABLE is not translated to it
    for name in _TIMES:
        op.add_column("resilient_grant", sa.Column(name, TIME), schema=schema)
    op.add_column(
        "resilient_grant", sa.Column("refusals", sa.Integer, nullable=False, server_default="0"), schema=schema
    )
    op.add_column("resilient_connection", sa.Column("seal", sa.Text), schema=schema)


def downgrade(op: Operations) -> None:
    """Drop them, with what they hold."""
    schema = op.get_context().opts["version_table_schema"]
    op.drop_column("resilient_connection", "seal", schema=schema)
    for name in ("refusals", *reversed(_TIMES)):
        op.drop_column("resilient_grant", name, schema=schema)
