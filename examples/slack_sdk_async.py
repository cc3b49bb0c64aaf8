"""Post messages with Slack's own SDK, which speaks through aiohttp, from jobs.

    python examples/slack_sdk_async.py

The SDK gets a session of the job's: it carries the workspace's token, which is refreshed once however many jobs find it
expired; it keeps to one message a second and channel over all workers; and what the SDK raises is understood. Slack is
played by the test kit on this machine: it lets the token expire in the middle, and says "slow down" once.
"""

from __future__ import annotations

import asyncio
import tempfile

from pydantic import BaseModel
from slack_sdk.web.async_client import AsyncWebClient

from resilient import FailureKind, Job, Resilient, Retry, handler
from resilient.adapters.aiohttp import session
from resilient.testing import FakeProvider, new_key

MESSAGES = 6


# -- what you write ------------------------------------------------------------------------------------------


class Message(BaseModel):
    """The payload of a job."""

    channel: str
    text: str


@handler("message.send", retry=Retry(max_attempts=5), timeout=60)
async def send(job: Job[Message]) -> str:
    """One message. Nothing is caught, and nothing is tried again here."""
    async with session(job) as http:
        slack = AsyncWebClient(base_url=job.deps, session=http, retry_handlers=[])  # base_url: Slack is on this machine
        answer = await slack.chat_postMessage(channel=job.payload.channel, text=job.payload.text)
    return str(answer["ts"])


# -- the run -------------------------------------------------------------------------------------------------


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder, FakeProvider("slack") as fake:
        fake.on("POST /api/chat.postMessage", lambda _: {"ok": True, "ts": str(len(fake.performed))})
        app = Resilient(
            f"sqlite:///{folder}/jobs.db", handlers=[send], providers=[fake.provider], secrets=[new_key()],
            deps=f"{fake.url}/api/",
        )  # fmt: skip
        async with app:
            await app.connections.import_("slack/team-1", **fake.account("team-1").tokens)
            fake.expire_tokens()
            fake.fail_next(FailureKind.THROTTLED, wait=1)
            for number in range(MESSAGES):
                message = Message(channel=f"C{number % 2}", text=f"message {number}")
                await app.enqueue(send, message, resource_key="slack/team-1")
            while await app.jobs.count(state="succeeded") < MESSAGES:
                await app.worker(concurrency=MESSAGES).drain()
                await asyncio.sleep(0.1)
        twice = "none twice" if fake.duplicates == 0 else f"{fake.duplicates} twice"
        throttled = len(fake.log.where(kind=FailureKind.THROTTLED))
        print(
            f"{len(fake.performed)} messages, {twice}; refreshes: {fake.account('team-1').refreshes};"
            f" 'slow down': {throttled}, ignored: {fake.early}; over the limit: {fake.over_admitted}"
        )


if __name__ == "__main__":
    asyncio.run(main())
