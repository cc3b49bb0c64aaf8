"""Push contacts from a CSV file to an API that says "come back later" after every twenty requests.

    python examples/push_contacts.py [contacts.csv]

The API runs on this machine, in a thread (resilient-engine[demo] brings the web server), the jobs live in an SQLite
file. When an account is throttled, its jobs wait as long as told, all of them, and none of them fails for it.
"""

from __future__ import annotations

import asyncio
import csv
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from resilient import Idempotency, Item, Job, Provider, Resilient, Retry, handler

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.requests import Request

CONTACTS = Path(__file__).parent / "data" / "contacts.csv"


# -- what you write ------------------------------------------------------------------------------------------


class Contact(BaseModel):
    """The payload of a job."""

    name: str
    email: str


@handler("contact.push", retry=Retry(max_attempts=5), timeout=60)
async def push(job: Job[Contact]) -> None:
    """Send one contact. A 429 makes the account wait; it is no failed attempt of this job."""
    response = await job.client.post("/contacts", json=job.payload.model_dump())
    response.raise_for_status()


async def push_all(path: Path, api: str) -> dict[str, int]:
    """Enqueue a job per contact, run a worker until all are finished, and say how they ended."""
    crm = Provider(name="crm", base_url=api, idempotency=Idempotency())  # it honours Idempotency-Key
    with tempfile.TemporaryDirectory() as folder, path.open(encoding="utf-8") as file:
        contacts = [Contact(name=row["name"], email=row["email"]) for row in islice(csv.DictReader(file), 60)]
        async with Resilient(f"sqlite:///{folder}/jobs.db", handlers=[push], providers=[crm]) as app:
            await app.enqueue_many(push, [Item(c, resource_key=f"crm/account-{n % 2}") for n, c in enumerate(contacts)])
            worker = app.worker(concurrency=4)
            running = asyncio.create_task(worker.run())
            while await app.jobs.count(state=["ready", "scheduled", "running"]):  # noqa: ASYNC110 - for a script
                await asyncio.sleep(0.1)
            worker.stop()
            await running
            return {state: await app.jobs.count(state=state) for state in ("succeeded", "dead")}


# -- the API -------------------------------------------------------------------------------------------------


class Api:
    """Stores twenty contacts of an account, then says 429 for a second. Refuses addresses without an @."""

    def __init__(self) -> None:
        self.allowance, self.until, self.throttled = 20, 0.0, 0

    async def store(self, request: Request) -> JSONResponse:
        """Take a contact."""
        if time.monotonic() < self.until or self.allowance == 0:
            if self.allowance == 0:
                self.allowance, self.until = 20, time.monotonic() + 1
            self.throttled += 1
            return JSONResponse({"error": "slow down"}, 429, {"retry-after": "1"})
        self.allowance -= 1
        contact = await request.json()
        if "@" not in contact["email"]:
            return JSONResponse({"error": "not an e-mail address"}, 422)
        return JSONResponse({"stored": True}, 201)


@contextmanager
def serving(api: Api) -> Iterator[str]:
    """Serve ``api`` on a free port of this machine; yields its address."""
    routes = [Route("/contacts", api.store, methods=["POST"])]
    server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


def main(path: Path = CONTACTS) -> dict[str, int]:
    """Push the first sixty contacts of ``path``."""
    api = Api()
    with serving(api) as address:
        ended = asyncio.run(push_all(path, address))
    print(f"{ended['succeeded']} pushed, {ended['dead']} refused by the API; it said 'slow down' {api.throttled} times")
    return ended


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
