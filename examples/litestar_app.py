"""A Litestar application: one lifespan, the session as a dependency, the dashboard and webhooks mounted.

    python examples/litestar_app.py

A sign-up writes a row and enqueues the welcome mail in one transaction: both or neither. The worker runs beside the
server here; in production it is a process of its own (``resilient --app litestar_app:jobs worker``), and this file is
served as ``uvicorn litestar_app:api``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import tempfile
from collections.abc import AsyncIterator  # noqa: TC003 - Litestar reads annotations
from typing import TYPE_CHECKING, Any, cast

import httpx
from litestar import Litestar, asgi, get, post
from litestar.di import Provide
from litestar.exceptions import HTTPException
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlmodel import Field, SQLModel

from providers import github
from resilient import Inbound, Job, Resilient, WebhookEvent, handler, web

if TYPE_CHECKING:
    from starlette.requests import Request

FOLDER = tempfile.TemporaryDirectory()
engine = create_async_engine(f"sqlite+aiosqlite:///{FOLDER.name}/shop.db")
sessions = async_sessionmaker(engine, expire_on_commit=False)
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
    """Send the mail (await job.client.post(...)), then note it: the note and the job's success are one commit."""
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
async def lifespan(_: Litestar) -> AsyncIterator[None]:
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


@post("/sign-ups")
async def sign_up(data: SignUp, db: AsyncSession) -> dict[str, str]:
    """A row and a job, or neither."""
    db.add(User(email=data.email))
    done = await jobs.enqueue(welcome, data, resource_key="mail/outgoing", session=db)
    if data.email.endswith("@example.org"):
        raise HTTPException(status_code=422, detail="not from there")  # too late for the row and the job to exist
    return {"job": str(done.id)}


@get("/sign-ups/{email:str}")
async def look(email: str, db: AsyncSession) -> dict[str, bool]:
    """Whether somebody signed up, and was welcomed."""
    user = await db.get(User, email)
    return {"exists": user is not None, "welcomed": user is not None and user.welcomed}


def operator(request: Request) -> web.Operator | None:
    """Who may see the dashboard, and do what there."""
    token = request.headers.get("authorization", "").removeprefix("Bearer ")
    known = secrets.compare_digest(token.encode(), STAFF.encode())
    return web.Operator("staff", ["read", "jobs", "resources"]) if known else None


api = Litestar(
    [
        sign_up,
        look,
        asgi("/ops", is_mount=True, copy_scope=True)(web.dashboard(jobs, operator=operator)),
        asgi("/webhooks", is_mount=True, copy_scope=True)(
            web.webhook_routes(jobs, base_url="https://shop.example/webhooks")
        ),
    ],
    lifespan=[lifespan],
    dependencies={"db": Provide(session)},
)


async def main() -> None:
    """What two visitors see."""
    async with (
        lifespan(api),
        httpx.AsyncClient(transport=httpx.ASGITransport(app=cast("Any", api)), base_url="http://shop") as visitor,
    ):
        good = await visitor.post("/sign-ups", json={"email": "ada@example.com"})
        bad = await visitor.post("/sign-ups", json={"email": "bob@example.org"})
        await jobs.jobs.wait(good.json()["job"], timeout=30)
        ada, bob = [(await visitor.get(f"/sign-ups/{who}")).json() for who in ("ada@example.com", "bob@example.org")]
        print(f"{good.status_code}, {bad.status_code}; ada: {ada}; bob: {bob}")


if __name__ == "__main__":
    asyncio.run(main())
