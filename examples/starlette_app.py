"""A Starlette application: one lifespan, one transaction a request, the dashboard and webhooks mounted.

    python examples/starlette_app.py

A sign-up writes a row and enqueues the welcome mail in one transaction: both or neither. The worker runs beside the
server here; in production it is a process of its own (``resilient --app starlette_app:jobs worker``), and this file is
served as ``uvicorn starlette_app:api``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import tempfile
from typing import TYPE_CHECKING

import httpx
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlmodel import Field, SQLModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route

from providers import github
from resilient import Inbound, Job, Resilient, WebhookEvent, handler, web

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

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
async def lifespan(_: Starlette) -> AsyncIterator[None]:
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


async def sign_up(request: Request) -> JSONResponse:
    """A row and a job, or neither."""
    form = SignUp.model_validate_json(await request.body())
    async with sessions.begin() as db:
        db.add(User(email=form.email))
        done = await jobs.enqueue(welcome, form, resource_key="mail/outgoing", session=db)
        if form.email.endswith("@example.org"):
            raise HTTPException(422, "not from there")  # too late for the row and the job to exist
    return JSONResponse({"job": str(done.id)}, 201)


async def look(request: Request) -> JSONResponse:
    """Whether somebody signed up, and was welcomed."""
    async with sessions() as db:
        user = await db.get(User, request.path_params["email"])
    return JSONResponse({"exists": user is not None, "welcomed": user is not None and user.welcomed})


def operator(request: Request) -> web.Operator | None:
    """Who may see the dashboard, and do what there."""
    token = request.headers.get("authorization", "").removeprefix("Bearer ")
    known = secrets.compare_digest(token.encode(), STAFF.encode())
    return web.Operator("staff", ["read", "jobs", "resources"]) if known else None


api = Starlette(
    lifespan=lifespan,
    routes=[
        Route("/sign-ups", sign_up, methods=["POST"]),
        Route("/sign-ups/{email}", look),
        Mount("/ops", web.dashboard(jobs, operator=operator)),
        Mount("/webhooks", web.webhook_routes(jobs, base_url="https://shop.example/webhooks")),
    ],
)


async def main() -> None:
    """What two visitors see."""
    async with (
        lifespan(api),
        httpx.AsyncClient(transport=httpx.ASGITransport(app=api), base_url="http://shop") as visitor,
    ):
        good = await visitor.post("/sign-ups", json={"email": "ada@example.com"})
        bad = await visitor.post("/sign-ups", json={"email": "bob@example.org"})
        await jobs.jobs.wait(good.json()["job"], timeout=30)
        ada, bob = [(await visitor.get(f"/sign-ups/{who}")).json() for who in ("ada@example.com", "bob@example.org")]
        print(f"{good.status_code}, {bad.status_code}; ada: {ada}; bob: {bob}")


if __name__ == "__main__":
    asyncio.run(main())
