"""The examples for web frameworks as they are served: a server process of their own, with its lifespan on.

The row and the job of a request are committed together or not at all; dashboard and webhooks answer where they stand.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import os
import re
import signal
from pathlib import Path

import httpx
import pytest

from resilient import Resilient
from tests import nursery
from tests.helpers import until
from tests.surface.dashboards import Page

EXAMPLES = Path(__file__).parents[2] / "examples"
SECRET, TOKEN = "canary-of-github", "canary-of-the-staff"


def delivery(secret, body=b'{"zen": "Keep it logically awesome."}'):
    sign = hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()
    headers = {"X-Hub-Signature-256": f"sha256={sign}", "X-GitHub-Event": "ping", "Content-Type": "application/json"}
    return {"content": body, "headers": headers}


@contextlib.asynccontextmanager
async def served(tmp_path, *words, **environ):
    """A server with one of the examples: a client of it, and its process."""
    log = tmp_path / "log"
    environ = {**os.environ, "SHOP_GITHUB_SECRET": SECRET, "SHOP_STAFF_TOKEN": TOKEN, **environ}
    with log.open("w") as file:
        process = nursery.module(*words, cwd=EXAMPLES, env=environ, stderr=file)

    def address():
        assert process.poll() is None, log.read_text()
        return re.search(r"[Rr]unning on (http://127\.0\.0\.1:\d+)", log.read_text())

    try:
        url = (await until(address))[1]
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as visitor:
            yield visitor
        process.send_signal(signal.SIGINT)
        await asyncio.to_thread(process.wait, 60)
    finally:
        process.kill()
        process.wait(60)
    assert "Traceback" not in log.read_text(), log.read_text()
    assert words[0] != "uvicorn" or "Application shutdown complete" in log.read_text()


@pytest.mark.parametrize("name", ["fastapi_app", "starlette_app", "litestar_app"])
async def test_an_asgi_application_under_uvicorn(tmp_path, name):
    async with served(tmp_path, "uvicorn", f"{name}:api", "--port", "0", "--lifespan", "on") as visitor:
        good = await visitor.post("/sign-ups", json={"email": "ada@example.com"})
        bad = await visitor.post("/sign-ups", json={"email": "bob@example.org"})
        assert (good.status_code, bad.status_code) == (201, 422)
        await until(lambda: says(visitor, "/sign-ups/ada@example.com", {"exists": True, "welcomed": True}))
        assert await says(visitor, "/sign-ups/bob@example.org", {"exists": False, "welcomed": False})
        assert (await visitor.post("/webhooks/github", **delivery("another"))).status_code == 401
        assert (await visitor.post("/webhooks/github", **delivery(SECRET))).status_code == 200
        assert (await visitor.get("/ops/", headers={"Accept": "text/html"})).status_code in {401, 403}
        staff = {"Authorization": f"Bearer {TOKEN}"}
        page = await visitor.get("/ops/", headers=staff)
        assert page.status_code == 200
        assert 'href="/ops/jobs' in page.text, "its links lead below the path that it is mounted at"
        jobs = (await visitor.get("/ops/jobs", headers=staff)).text
        rows = set(re.findall(r'href="(/ops/jobs/[0-9a-f-]{36})"', jobs))
        assert len(rows) == 2, "one of the sign-up, one of the webhook, none of the request that failed"
        assert good.json()["job"] in jobs
        assert "github.event" in Page(jobs).text


async def says(visitor, path, document):
    return (await visitor.get(path)).json() == document


async def test_a_flask_application_under_its_server(tmp_path, database, database_url):
    url = database_url.replace("postgresql:", "postgresql+psycopg:")
    make = "import flask_app as shop; shop.SQLModel.metadata.create_all(shop.engine)"
    make = f"import sys; sys.path.insert(0, ''); {make}"
    assert nursery.start(make, cwd=EXAMPLES, env={**os.environ, "SHOP_DATABASE": url}).wait(60) == 0
    async with served(tmp_path, "flask", "--app", "flask_app", "run", "--port", "0", SHOP_DATABASE=url) as visitor:
        items = ("chair", "nothing", "table")
        answers = await asyncio.gather(*(visitor.post("/orders", data={"item": item}) for item in items))
        assert [one.status_code for one in answers] == [201, 422, 201]
        assert (await visitor.post("/webhooks/github", **delivery("another"))).status_code == 401
        assert (await visitor.post("/webhooks/github", **delivery(SECRET))).status_code == 200
        app = Resilient(database)
        jobs = await app.jobs.list()
        assert sorted(job.kind for job in jobs) == ["github.event", "invoice.send", "invoice.send"]
        assert {str(job.id) for job in jobs if job.kind == "invoice.send"} == {answers[n].json()["job"] for n in (0, 2)}
        await app.close()
