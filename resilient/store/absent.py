"""`insert_if_absent`: the handler's own rows, written once although the job may run twice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Table, inspect
from sqlalchemy.dialects import postgresql, sqlite

from resilient.core.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sqlalchemy.orm import Session


def insert_if_absent(target: Session | Connection, into: Any, values: Mapping[str, Any]) -> bool:
    """Insert one row into a table or mapped class unless a unique constraint holds it already; True if it is new.

    Runs in the caller's transaction (async: ``await session.run_sync(insert_if_absent, Order, {...})``). Two
    transactions at once: the second waits for the first, then inserts nothing. Give the row a natural key, or
    ``job.idempotency_key``, which stays the same over all executions of a job.
    """
    table = into if isinstance(into, Table) else inspect(into).local_table
    c = target if isinstance(target, Connection) else target.connection()
    if c.dialect.name not in ("postgresql", "sqlite"):
        raise InvalidInput(f"insert_if_absent knows PostgreSQL and SQLite, not {c.dialect.name}")
    make = postgresql.insert if c.dialect.name == "postgresql" else sqlite.insert
    statement = make(table).values(dict(values)).on_conflict_do_nothing().returning(*table.primary_key.columns)
    return c.execute(statement).first() is not None
