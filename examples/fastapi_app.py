"""A FastAPI application that enqueues in the transaction of its request.

    python examples/fastapi_app.py

A sign-up writes a row and enqueues the welcome mail in one transaction: if the request fails, there is neither; if it
succeeds, there are both, whatever happens to this process afterwards. ``/ops`` is the dashboard, ``/webhooks/github``
what GitHub calls. The worker runs in the application's lifespan here; in production it is a process of its own
(``resilient --app fastapi_app:jobs worker``), and this file is served as ``uvicorn fastapi_app:api``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import tempfile
from typing import TYPE_CHECKING, Annotated

import httpx
from fastapi import Depends, FastAPI, HTTPException, Request
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlmodel import Field, SQLModel

from providers import github
from resilient import Inbound, Job, Resilient, WebhookEvent, handler, web

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

FOLDER = tempfile.TemporaryDirectory()
engine = create_async_engine(f"sqlite+aiosqlite:///{FOLDER.name}/shop.db")
sessions = async_sessionmaker(engine, expire_on_commit=False)
SENT: list[str] = []
STAFF = os.environ.get("SHOP_STAFF_TOKEN") or secrets.token_urlsafe()  # your own sign-in instead
GITHUB = os.environ.get("SHOP_GITHUB_SECRET") or secrets.token_urlsafe()


class User(SQLModel, table=True):
    """A table of the application's own."""

    email: str = Field(primary_key=True)
    welcomed: bool = False


class SignUp(BaseModel):
    """What somebody posts, and what the job carries."""

    email: str


@handler("welcome.send", timeout=30)
async def welcome(job: Job[SignUp]) -> None:
    """Send the mail, then note it: the note and the job's success are committed together."""
    SENT.append(job.payload.email)  # a request to your mail provider: await job.client.post(...)
    async with job.complete() as session:
        user = await session.get(User, job.payload.email)
        if user is not None:
            user.welcomed = True


@handler("github.event")
async def from_github(job: Job[WebhookEvent]) -> str:
    """What GitHub told: verified, stored and answered before it comes here."""
    return job.payload.event


jobs = Resilient(
    engine,
    handlers=[welcome, from_github],
    providers=[github.provider()],
    webhooks=[Inbound(provider="github", secrets=[GITHUB], jobs=from_github)],
    upgrade=True,
)


@contextlib.asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    """Tables, the engine, and a worker."""
    async with engine.begin() as connection:
        await connection.run_sync(SQLModel.metadata.create_all)
    async with jobs:
        worker = jobs.worker(concurrency=4)
        running = asyncio.create_task(worker.run(signals=False))
        yield
        worker.stop()
        await running
    await engine.dispose()


async def session() -> AsyncIterator[AsyncSession]:
    """One transaction a request: committed if the endpoint returns, rolled back if it raises."""
    async with sessions.begin() as opened:
        yield opened


def operator(request: Request) -> web.Operator | None:
    """Who may see the dashboard, and do what there."""
    token = request.headers.get("authorization", "").removeprefix("Bearer ")
    known = secrets.compare_digest(token.encode(), STAFF.encode())
    return web.Operator("staff", ["read", "jobs", "resources"]) if known else None


api = FastAPI(lifespan=lifespan)
api.mount("/ops", web.dashboard(jobs, operator=operator))
api.mount("/webhooks", web.webhook_routes(jobs, base_url="https://shop.example/webhooks"))


@api.post("/sign-ups", status_code=201)
async def sign_up(form: SignUp, db: Annotated[AsyncSession, Depends(session, scope="function")]) -> dict[str, str]:
    """A row and a job, or neither."""
    db.add(User(email=form.email))
    done = await jobs.enqueue(welcome, form, resource_key="mail/outgoing", session=db)
    if form.email.endswith("@example.org"):
        raise HTTPException(422, "not from there")  # too late for the row and the job to exist
    return {"job": str(done.id)}


@api.get("/sign-ups/{email}")
async def look(email: str, db: Annotated[AsyncSession, Depends(session, scope="function")]) -> dict[str, bool]:
    """Whether somebody signed up, and was welcomed."""
    user = await db.get(User, email)
    return {"exists": user is not None, "welcomed": user is not None and user.welcomed}


async def main() -> None:
    """What two visitors see."""
    async with (
        lifespan(api),
        httpx.AsyncClient(transport=httpx.ASGITransport(app=api), base_url="http://shop") as visitor,
    ):
        good = await visitor.post("/sign-ups", json={"email": "ada@example.com"})
        bad = await visitor.post("/sign-ups", json={"email": "bob@example.org"})
        while await jobs.jobs.count(state=["ready", "scheduled", "running"]):  # noqa: ASYNC110 - for a script
            await asyncio.sleep(0.05)
        job = await jobs.jobs.get(good.json()["job"])
        async with sessions() as db:
            ada, bob = await db.get(User, "ada@example.com"), await db.get(User, "bob@example.org")
        print(f"{good.status_code}, {bad.status_code}; mails sent to {', '.join(SENT)}; the job {job.state}")
        print(f"ada was welcomed: {ada is not None and ada.welcomed}; bob is a user: {bob is not None}")


if __name__ == "__main__":
    asyncio.run(main())
