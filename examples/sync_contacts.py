"""Contacts of a connected account, kept in a table of one's own; what is gone at the provider is deleted here too.

    python examples/sync_contacts.py

Rows and cursor are committed together, so a crash at any point costs nothing but the page it was on. The provider is
HubSpot's dialect on this machine.
"""

from __future__ import annotations

import asyncio
import tempfile
from typing import Any

from pydantic import BaseModel
from sqlalchemy import create_engine
from sqlmodel import Field, Session, SQLModel, func, select

from providers.hubspot import HUBSPOT
from resilient import PageRequest, Resilient, Stream, SyncJob, handler
from resilient.testing import FakeProvider, new_key


class Contact(SQLModel, table=True):
    """A table of the application's own."""

    account: str = Field(primary_key=True)
    id: str = Field(primary_key=True)
    email: str
    last_pass: int = 0  # the latest pass that read it


class Record(BaseModel):
    """What one record of the provider holds."""

    id: str
    properties: dict[str, Any]


contacts = Stream(
    "hubspot.contacts",
    request=lambda: PageRequest("/crm/v3/objects/contacts?limit=100"),
    paginator=next(iter(HUBSPOT.pagination.values())),
    model=Record,
)


@handler("contacts.sync", timeout=300)
def sync_contacts(job: SyncJob[None]) -> None:
    """A plain function: it runs in a thread."""
    for page in job.pages(contacts):
        with job.checkpoint(page) as session:
            for record in page.items:
                email = record.properties["email"]
                session.merge(
                    Contact(account=job.resource_key, id=record.id, email=email, last_pass=page.pass_id),
                )
    with job.sweep(contacts) as sweep:  # only after a complete full pass
        if sweep is not None:
            stale = select(Contact).where(Contact.account == job.resource_key, Contact.last_pass < sweep.pass_id)
            for gone in sweep.session.scalars(stale):
                sweep.session.delete(gone)


async def run(folder: str, hubspot: FakeProvider) -> None:
    """Sync twice; between the two a contact is gone and another one is new."""
    engine = create_engine(f"sqlite:///{folder}/crm.db")
    SQLModel.metadata.create_all(engine, tables=[Contact.__table__])  # type: ignore[attr-defined]
    listed = hubspot.records("/crm/v3/objects/contacts", [person(n) for n in range(250)], size=100)
    app = Resilient(engine, handlers=[sync_contacts], providers=[hubspot.provider], secrets=[new_key()], upgrade=True)
    async with app:
        await app.connections.import_("hubspot/acct-7", **hubspot.account("acct-7").tokens)
        for again in (False, True):
            if again:
                listed.delete("7")
                listed.put(person(250))
            await app.enqueue(sync_contacts, resource_key="hubspot/acct-7")
            await app.worker().drain()
            with Session(engine) as session:
                count = session.exec(select(func.count()).select_from(Contact)).one()
                is_there = session.get(Contact, ("hubspot/acct-7", "7")) is not None
            print(f"{count} contacts; number 7 is there: {is_there}; requests so far: {len(hubspot.log.api)}")
    engine.dispose()


def person(number: int) -> dict[str, Any]:
    """One record."""
    return {"id": str(number), "properties": {"email": f"p{number}@example.com"}}


def main() -> None:
    """Start the provider and run."""
    with tempfile.TemporaryDirectory() as folder, FakeProvider("hubspot") as hubspot:
        asyncio.run(run(folder, hubspot))


if __name__ == "__main__":
    main()
