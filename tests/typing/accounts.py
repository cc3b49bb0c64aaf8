"""The types of connecting accounts and of webhooks: mypy and pyright read this file, nobody runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_type
from uuid import UUID

from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.routing import Router

from resilient import (
    ConnectionInfo,
    Delivery,
    Inbound,
    Job,
    Kind,
    NeedsReauth,
    Resilient,
    WebhookAnswer,
    WebhookEvent,
    handler,
    web,
)

if TYPE_CHECKING:
    from starlette.requests import Request


@handler("customers.tell")
async def tell(job: Job[NeedsReauth]) -> None:
    """Tells a customer."""
    assert_type(job.payload, NeedsReauth)
    assert_type(job.payload.code, str | None)


@handler("issues.changed")
async def changed(job: Job[WebhookEvent]) -> None:
    """Works off a webhook."""
    assert_type(job.payload.event, str)
    assert_type(job.payload.headers, dict[str, str])


async def secrets(account: str) -> list[str]:
    """Of one account."""
    return [account]


inbound = [
    Inbound(provider="github", secrets=["s"], jobs={"issues": changed, "*": Kind[WebhookEvent]("hook.other")}),
    Inbound(provider="slack", secrets=secrets, jobs=changed, resource_key=lambda event: event.account or None),
]
app = Resilient("sqlite:///app.db", handlers=[tell, changed], on_needs_reauth=tell, webhooks=inbound)
servers = Starlette(lifespan=app.lifespan), FastAPI(lifespan=app.lifespan)


def caller(request: Request) -> str | None:
    """Who asks."""
    return request.cookies.get("user")


async def account(who: str, provider: str, request: Request) -> str | None:
    """What they connect."""
    return f"{provider}/{who}" if request.url.path else None


async def use() -> None:
    """The app's own types."""
    routes = web.connect_routes(app, base_url="https://a.example/connect", caller=caller, account=account)
    assert_type(routes, Router)
    assert_type(web.webhook_routes(app, base_url="https://a.example/hooks"), Router)
    assert_type(await app.webhooks.receive("github", Delivery({}, b""), account="a"), WebhookAnswer)
    assert_type(app.sync.webhooks.receive("github", Delivery({}, b"")), WebhookAnswer)
    assert_type(await app.connections.authorize_url("github/a", bound_to="session"), str)
    assert_type(await app.connections.complete({"state": "s"}, bound_to="session"), ConnectionInfo)
    assert_type(app.sync.connections.complete({"state": "s"}), ConnectionInfo)
    assert_type(await app.connections.release("github"), int)
    assert_type(app.sync.connections.confirm("github"), int)
    made = await app.webhooks.receive("github", Delivery({}, b""))
    assert_type(made.job, UUID | None)
