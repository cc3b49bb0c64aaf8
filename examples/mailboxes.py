"""Mail through the mailboxes that customers have connected: each with its own tokens, limits and gate.

    python examples/mailboxes.py

Ada's token expires on the way and is refreshed, once. Bob takes the access back: his mails wait, Ada's go on; after
he has consented again they are sent, without anybody touching them. The provider is Google's dialect on this machine.
"""

from __future__ import annotations

import asyncio
import base64
import os
import tempfile
from email.message import EmailMessage

from pydantic import BaseModel

from resilient import Job, Resilient, handler
from resilient.testing import FakeProvider

KEY = "rsk1_" + base64.urlsafe_b64encode(os.urandom(32)).decode()  # as `resilient secrets new` prints one


class Mail(BaseModel):
    """The payload of a job."""

    to: str
    subject: str
    text: str


@handler("mail.send", timeout=60)
async def send(job: Job[Mail]) -> None:
    """Send one mail from the mailbox the job belongs to; ``job.client`` carries its token."""
    message = EmailMessage()
    message["To"], message["Subject"] = job.payload.to, job.payload.subject
    message.set_content(job.payload.text)
    raw = base64.urlsafe_b64encode(message.as_bytes()).decode()
    answer = await job.client.post("/gmail/v1/users/me/messages/send", json={"raw": raw})
    answer.raise_for_status()


async def run(folder: str, google: FakeProvider) -> None:
    """Connect two mailboxes, send six mails."""
    app = Resilient(f"sqlite:///{folder}/mail.db", handlers=[send], providers=[google.provider], secrets=[KEY])
    async with app:
        for name in ("ada", "bob"):
            await app.connections.import_(f"google/{name}", **google.account(name).tokens)
        mails = [Mail(to="you@example.com", subject=f"mail {n}", text="Hello") for n in range(3)]
        for name in ("ada", "bob"):
            await app.enqueue_many(send, mails, resource_key=f"google/{name}", tags={"user": name})
        google.expire_tokens("ada")
        google.revoke("bob")
        await app.worker().drain()
        await tell(app, "bob took the access back")
        await app.connections.import_("google/bob", **google.authorize("bob").tokens)  # or: resilient connect google
        while await app.jobs.count(state=["ready", "scheduled"]):  # a slow machine's may have to wait a moment
            await app.worker().drain()
        await tell(app, "bob has consented again")


async def tell(app: Resilient, when: str) -> None:
    """How it stands."""
    sent = {name: await app.jobs.count(state="succeeded", tags={"user": name}) for name in ("ada", "bob")}
    bob = await app.connections.get("google/bob")
    print(f"{when}: ada sent {sent['ada']}, bob sent {sent['bob']}; bob is {bob.state}")


def main() -> None:
    """Start the provider and run."""
    with tempfile.TemporaryDirectory() as folder, FakeProvider("google") as google:
        google.on("POST /gmail/v1/users/me/messages/send", {"id": "m1"})
        asyncio.run(run(folder, google))
        print(f"{len(google.log.api)} requests, tokens refreshed: {sum(one.what == 'token' for one in google.log)}")


if __name__ == "__main__":
    main()
