"""${message}."""

from __future__ import annotations

from typing import TYPE_CHECKING

import sqlalchemy as sa
${imports if imports else ""}
if TYPE_CHECKING:
    from alembic.operations import Operations

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}


def upgrade(op: Operations) -> None:
    """${message}."""
    ${upgrades if upgrades else "pass"}


def downgrade(op: Operations) -> None:
    """Undo it."""
    ${downgrades if downgrades else "pass"}
