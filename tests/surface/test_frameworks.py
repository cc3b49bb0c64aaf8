"""The examples for web frameworks as they are served in production: a real server, its lifespan on.

The row and the job of a request are committed together or not at all; dashboard and webhooks answer where they stand.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import importlib.util
import sys
import threading
from pathlib import Path

import httpx
import pytest
from werkzeug.serving import make_server

from tests.helpers import until
from tests.serving import production

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def load(monkeypatch):
    """Import an example anew."""

    def load(name):
        spec = importlib.util.spec_from_file_location(f"served_{name}", EXAMPLES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)  # pydantic looks types up there
        spec.loader.exec_module(module)
        return module

    return load


def delivery(secret, body=b'{"zen": "Keep it logically awesome."}'):
    sign = hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()
    headers = {"X-Hub-Signature-256": f"sha256={sign}", "X-GitHub-Event": "ping", "Content-Type": "application/json"}
    return {"content": body, "headers": headers}


@pytest.mark.parametrize("name", ["fastapi_app", "starlette_app", "litestar_app"])
async def test_an_asgi_application_under_its_server(load, name):
    shop = load(name)
    async with production(shop.api) as url, httpx.AsyncClient(base_url=url, trust_env=False) as visitor:
        good = await visitor.post("/sign-ups", json={"email": "ada@example.com"})
        bad = await visitor.post("/sign-ups", json={"email": "bob@example.org"})
        assert (good.status_code, bad.status_code) == (201, 422)
        await shop.jobs.jobs.wait(good.json()["job"], timeout=60)
        assert (await visitor.get("/sign-ups/ada@example.com")).json() == {"exists": True, "welcomed": True}
        assert (await visitor.get("/sign-ups/bob@example.org")).json() == {"exists": False, "welcomed": False}
        assert await shop.jobs.jobs.count(kind="welcome.send") == 1
        await looks_at_the_dashboard(visitor, shop.STAFF)
        assert (await visitor.post("/webhooks/github", **delivery("another"))).status_code == 401
        assert (await visitor.post("/webhooks/github", **delivery(shop.GITHUB))).status_code == 200
        (job,) = await shop.jobs.jobs.list(kind="github.event")
        assert (await shop.jobs.jobs.wait(job.id, timeout=60)).result == "ping"
    assert shop.jobs.database._owned == [], "what the lifespan opened, its end closed"


async def looks_at_the_dashboard(visitor, token):
    assert (await visitor.get("/ops/", headers={"Accept": "text/html"})).status_code in {401, 403}
    staff = {"Authorization": f"Bearer {token}"}
    page = await visitor.get("/ops/", headers=staff)
    assert page.status_code == 200
    assert 'href="/ops/jobs' in page.text, "its links lead below the path that it is mounted at"
    assert (await visitor.get("/ops/jobs", headers=staff)).status_code == 200


async def test_a_flask_application_under_a_server_with_threads(load, monkeypatch, database_url):
    monkeypatch.setenv("SHOP_DATABASE", database_url.replace("postgresql:", "postgresql+psycopg:"))
    shop = load("flask_app")
    shop.SQLModel.metadata.tables["order"].create(shop.engine)
    server = make_server("127.0.0.1", 0, shop.app, threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        async with httpx.AsyncClient(base_url=url, trust_env=False) as visitor:
            answers = await asyncio.gather(
                *(visitor.post("/orders", data={"item": item}) for item in ("chair", "nothing", "table"))
            )
            assert [one.status_code for one in answers] == [201, 422, 201]
            assert (await visitor.post("/webhooks/github", **delivery("another"))).status_code == 401
            assert (await visitor.post("/webhooks/github", **delivery(shop.GITHUB))).status_code == 200
        worker = shop.jobs.worker(concurrency=2)
        running = asyncio.create_task(worker.run(signals=False))
        await until(lambda: has_done(shop.jobs, 3))
        worker.stop()
        await running
        assert await shop.jobs.jobs.count() == 3, "the order that was refused has no job"
    finally:
        await asyncio.to_thread(server.shutdown)
        thread.join()
        server.server_close()
        await shop.jobs.close()
        shop.engine.dispose()


async def has_done(app, number):
    return await app.jobs.count(state="succeeded") == number
