"""The way in: what each account holds at the provider, read into a table of the application's own.

A plain handler: its session is a `Session`, its rows and the stream's cursor are committed together. The table has no
unique key on purpose: a page that was written twice would show.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from resilient import PageRequest, Retry, Stream, SyncJob, handler
from resilient.core.paginators import NextCursor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sqlalchemy import Connection

    from resilient.store.dialect import Dialect

people: Stream[Any] = Stream(
    "people",
    request=lambda base, account: PageRequest(f"{base}/v1/{account}/people"),
    paginator=NextCursor(items="people", found="next", query="after"),
)


@handler("people.read", retry=Retry(max_attempts=20), timeout=30)
def read_people(job: SyncJob[dict[str, str]]) -> None:
    """Read an account's records, from where the last execution stopped."""
    settings: Mapping[str, Any] = job.deps
    account = job.payload["account"]
    rows = table(settings["schema"])
    for page in job.pages(people, base=settings["addresses"]["steady"], account=account):
        with job.checkpoint(page) as session:
            session.execute(sa.insert(rows), [{"account": account, "record": one["id"]} for one in page.items])


@lru_cache
def table(schema: str | None) -> sa.Table:
    """The application's own table."""
    columns = (sa.Column("account", sa.Text, nullable=False), sa.Column("record", sa.Text, nullable=False))
    return sa.Table("demo_person", sa.MetaData(schema=schema), *columns)


def create(c: Connection, d: Dialect) -> None:
    """Make it."""
    table(d.schema).create(c)


def all_records(c: Connection, d: Dialect) -> list[str]:
    """Every record that was written, for the audit."""
    return list(c.execute(sa.select(table(d.schema).c.record)).scalars())
