"""The way in: what each account holds at the provider, read into a table of the application's own.

A plain handler: its session is a `Session`, its rows and the stream's cursor are committed together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from resilient import PageRequest, Retry, Stream, SyncJob, handler
from resilient.core.paginators import NextCursor
from resilient.surface.demo import rows

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    people_read = rows.person(settings["schema"])
    for page in job.pages(people, base=settings["addresses"]["steady"], account=account):
        with job.checkpoint(page) as session:
            session.execute(sa.insert(people_read), [{"account": account, "record": one["id"]} for one in page.items])
