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
from typing import Any, Final

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
    Provider,
    Resilient,
    Retry,
    Rotation,
    Rule,
    Scope,
    StandardWebhook,
    handler,
)
from resilient.surface.demo import accounts, rows
from resilient.surface.demo.contacts import Contact  # noqa: TC001 - a handler's annotation is read
from resilient.surface.demo.oauth import CLIENT_ID
from resilient.surface.demo.people import read_people

CONCURRENCY: Final = 8  # jobs at once in one worker
LEASE: Final = 4.0  # seconds until a dead worker's jobs run elsewhere; short, because people are watching
_ANSWER: Final = 2.0  # seconds we wait for an answer


class ContactPushed(Event, type="contact.pushed"):
    """Told to whoever wants to know; in this demo a search index."""

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
        noted = sa.insert(rows.pushed(job.deps["schema"])).values(account=contact.account, contact=contact.id)
        await session.execute(noted)
        job.app.outbox.publish(session, ContactPushed(contact=contact.id), key=contact.account)


def provider(addresses: dict[str, str]) -> Provider:
    """The facts of the demo's provider: where it is, how it says no, its OAuth, and that it honours Idempotency-Key."""
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
                client_id=CLIENT_ID,
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
        providers=[provider(settings["addresses"])],
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
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    asyncio.run(_work(json.loads(sys.argv[1])))


if __name__ == "__main__":
    main()
