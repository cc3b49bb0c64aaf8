"""The application's own tables. They have no unique keys on purpose: what was written twice would show."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import sqlalchemy as sa

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from resilient.store.dialect import Dialect


@lru_cache
def person(schema: str | None) -> sa.Table:
    """What was read in: one row a record."""
    columns = (sa.Column("account", sa.Text, nullable=False), sa.Column("record", sa.Text, nullable=False))
    return sa.Table("demo_person", sa.MetaData(schema=schema), *columns)


@lru_cache
def pushed(schema: str | None) -> sa.Table:
    """What was pushed out: one row a contact."""
    columns = (sa.Column("account", sa.Text, nullable=False), sa.Column("contact", sa.Text, nullable=False))
    return sa.Table("demo_pushed", sa.MetaData(schema=schema), *columns)


def create(c: Connection, d: Dialect) -> None:
    """Make them."""
    person(d.schema).create(c)
    pushed(d.schema).create(c)


def all_records(c: Connection, d: Dialect) -> list[str]:
    """Every record that was read in, for the audit."""
    return list(c.execute(sa.select(person(d.schema).c.record)).scalars())


def all_pushed(c: Connection, d: Dialect) -> list[str]:
    """Every contact whose push was noted, for the audit."""
    return list(c.execute(sa.select(pushed(d.schema).c.contact)).scalars())
