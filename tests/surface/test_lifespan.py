"""``lifespan=app.lifespan`` as the documents say, under a real uvicorn with its lifespan on."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import fastapi
import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from resilient import Kind, Resilient
from tests.serving import production

PING = Kind("a.ping")


def starlette(app):
    async def enqueue(request):
        done = await app.enqueue(PING, resource_key="a/b")
        return JSONResponse({"id": str(done.id), "state": list(request.scope.get("state", {}))})

    return Starlette(lifespan=app.lifespan, routes=[Route("/", enqueue, methods=["POST"])])


def fast(app):
    api = fastapi.FastAPI(lifespan=app.lifespan)

    @api.post("/")
    async def enqueue():
        return {"id": str((await app.enqueue(PING, resource_key="a/b")).id), "state": []}

    return api


def router(app):
    """A router of FastAPI has a lifespan of its own, merged with the application's."""
    inner = fastapi.APIRouter(lifespan=app.lifespan)

    @inner.post("/")
    async def enqueue():
        return {"id": str((await app.enqueue(PING, resource_key="a/b")).id), "state": []}

    api = fastapi.FastAPI()
    api.include_router(inner)
    return api


@pytest.mark.parametrize("make", [starlette, fast, router])
async def test_the_app_lives_as_long_as_the_server(make, database_url):
    app, others = Resilient(database_url, kinds=[PING]), set(threading.enumerate())
    server = make(app)
    for count in (1, 2):  # a server that is started again opens it anew
        async with production(server) as url, httpx.AsyncClient(base_url=url, trust_env=False) as client:
            assert app.ground.tables.are_ready
            answer = await client.post("/")
            assert (answer.status_code, answer.json()["state"]) == (200, [])
            assert await app.jobs.count() == count
        assert app.database._owned == []
    for one in set(threading.enumerate()) - others:
        if one.name.startswith("resilient"):  # the one that watches connections ends with its next look
            await asyncio.to_thread(one.join, 20)
            assert not one.is_alive(), one.name


async def test_a_server_whose_database_is_not_ready_does_not_start(empty_url):
    app = Resilient(empty_url, kinds=[PING], upgrade=False)
    running = uvicorn.Server(uvicorn.Config(starlette(app), port=0, log_level="critical", lifespan="on"))
    with contextlib.suppress(SystemExit):  # newer uvicorn leaves with a status
        await running.serve()
    assert not running.started
    assert app.database._owned == []
