"""The demo's application: its handlers, one provider's facts. What a user of the library writes, and no more.

``python -m resilient.surface.demo.app '{"url": ..., "schema": ..., "addresses": ..., "secrets": ...}'`` is one worker
process.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import threading
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, urlsplit

import httpx
import sqlalchemy as sa

from resilient import (
    BreakerPolicy,
    Errors,
    Event,
    FailureKind,
    FullJitter,
    Idempotency,
    Job,
    OAuth2,
    PageRequest,
    Provider,
    Resilient,
    Retry,
    Rotation,
    Rule,
    Scope,
    StandardWebhook,
    Stream,
    SyncJob,
    handler,
)
from resilient.core.sync.paginators import NextCursor
from resilient.engine.ground.garbage import own_process
from resilient.surface.demo import accounts
from resilient.surface.demo.accounts import Contact  # noqa: TC001 - a handler's annotation is read

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from sqlalchemy import Connection

    from resilient.store.db.dialect import Dialect


# -- tables -----------------------------------------------------------------------------------------------------------
#
# The application's own. They have no unique keys on purpose: what was written twice would show.


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


# -- people -----------------------------------------------------------------------------------------------------------
#
# The way in: what each account holds at the provider, read into a table of the application's own.
#
# A plain handler: its session is a `Session`, its rows and the stream's cursor are committed together.

PEOPLE: Final = NextCursor(items="people", cursor="next", query="after")
people: Stream[Any] = Stream(
    "people",
    request=lambda base, account: PageRequest(f"{base}/v1/{account}/people"),
    paginator=PEOPLE,
)


@handler("people.read", retry=Retry(max_attempts=20), timeout=30)
def read_people(job: SyncJob[dict[str, str]]) -> None:
    """Read an account's records, from where the last execution stopped."""
    settings: Mapping[str, Any] = job.deps
    account = job.payload["account"]
    people_read = person(settings["schema"])
    for page in job.pages(people, base=settings["addresses"]["steady"], account=account):
        with job.checkpoint(page) as session:
            session.execute(sa.insert(people_read), [{"account": account, "record": one["id"]} for one in page.items])


CONCURRENCY: Final = 16  # jobs at once in one worker; an account has its share of them, two at least
LEASE: Final = 4.0  # seconds until a dead worker's jobs run elsewhere; short, because people are watching
_ANSWER: Final = 2.0  # seconds we wait for an answer


class ContactPushed(Event, type="contact.pushed"):
    """An event for other systems; in this demo a search index."""

    contact: str


@handler("contact.push", retry=Retry(max_attempts=10, delay=FullJitter(base=0.5, cap=4)), timeout=30)
async def push_contact(job: Job[Contact]) -> None:
    """Push one contact to its account at the provider; note it and tell of it, in the transaction that ends the job."""
    contact = job.payload
    addresses: dict[str, str] = job.deps["addresses"]
    base = addresses["fragile" if contact.account == accounts.DOWN else "steady"]
    response = await job.client.post(
        f"{base}/v1/{contact.account}/{contact.endpoint}",
        json={"id": contact.id, "name": contact.name, "email": contact.email},
        timeout=_ANSWER,
    )
    response.raise_for_status()
    async with job.complete() as session:
        row = sa.insert(pushed(job.deps["schema"])).values(account=contact.account, contact=contact.id)
        await session.execute(row)
        job.app.outbox.publish(session, ContactPushed(contact=contact.id), key=contact.account)


def facts(addresses: dict[str, str]) -> Provider:
    """The facts of the demo's provider: addresses, errors, OAuth, and its Idempotency-Key."""
    return Provider(
        name=accounts.PROVIDER,
        base_url=addresses["steady"],
        hosts=(addresses["fragile"],),
        errors=Errors(
            code=("error.code",),
            rules=(
                Rule(FailureKind.THROTTLED, status=429, where={"error.scope": "endpoint"}, scope=Scope.ENDPOINT),
                Rule(FailureKind.THROTTLED, status=429, scope=Scope.ACCOUNT),
            ),
        ),
        idempotency=Idempotency(),
        auth=(
            OAuth2(
                authorize_url=f"{addresses['steady']}/oauth/authorize",
                token_url=f"{addresses['steady']}/oauth/token",
                client_id=accounts.CLIENT_ID,
                client_auth="none",
                pkce="required",
                margin=1.0,
                rotation=Rotation.GRACE,
                grace=1800,
            ),
        ),
    )


def build(settings: dict[str, Any]) -> Resilient:
    """The application; its tables are made when it is first used."""
    soon = BreakerPolicy(first_open=1.5, longest_open=6.0, ramp=4.0)  # people are watching
    return Resilient(
        settings["url"],
        schema=settings["schema"],
        upgrade=True,
        handlers=[push_contact, read_people],
        providers=[facts(settings["addresses"])],
        # What the others are refused for is a script, not a rate: there is nothing to be learnt from it.
        learn={
            f"{accounts.PROVIDER}/{accounts.UNDECLARED}": True,
            f"{accounts.PROVIDER}/**": False,
            accounts.PROVIDER: False,
        },
        breakers={accounts.PROVIDER: soon, f"{accounts.PROVIDER}/**": soon, "outbox/*": soon},
        destinations={
            accounts.SINK: StandardWebhook(
                settings["addresses"]["sink"] + "/events",
                settings["webhook_secret"],
                allow=["127.0.0.1"],
                retry=Retry(max_attempts=None, delay=FullJitter(base=0.5, cap=2)),
            )
        },
        routes={ContactPushed: [accounts.SINK]},
        secrets=settings["secrets"],
        deps=settings,
    )


# -- consent ----------------------------------------------------------------------------------------------------------
#
# The people of the demo: they send each account's owner to the provider's consent page, and take what comes back.
#
# What a browser does, without one: the authorisation code flow with PKCE and a state that is good once.

_CALLBACK: Final = "https://app.demo.example/connected"  # nobody goes there: its parameters are all that counts


def connect(settings: dict[str, Any], names: Iterable[str]) -> None:
    """Connect these accounts, one after the other."""
    asyncio.run(_connect(settings, names))


async def _connect(settings: dict[str, Any], names: Iterable[str]) -> None:
    async with build(settings) as app, httpx.AsyncClient() as browser:
        for account in names:
            address = await app.connections.authorize_url(f"{accounts.PROVIDER}/{account}", redirect_uri=_CALLBACK)
            page = await browser.get(f"{address}&account={account}")
            await app.connections.complete(dict(parse_qsl(urlsplit(page.headers["location"]).query)))


# -- the process ------------------------------------------------------------------------------------------------------


async def _work(settings: dict[str, Any]) -> None:
    app = build(settings)
    async with app:
        worker = app.worker(concurrency=CONCURRENCY, lease=LEASE, grace=5)
        loop = asyncio.get_running_loop()
        threading.Thread(target=_until_closed, args=(loop, worker.stop), daemon=True).start()
        await worker.run()


def _until_closed(loop: asyncio.AbstractEventLoop, stop: Any) -> None:
    """Stop when standard input closes: the process that started this one is gone."""
    sys.stdin.buffer.read()
    loop.call_soon_threadsafe(stop)


def main() -> None:
    """One worker process."""
    own_process()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    asyncio.run(_work(json.loads(sys.argv[1])))


if __name__ == "__main__":
    main()
