"""Webhooks over HTTP: raw bytes, large and slow bodies, addresses behind a proxy, a database that is away."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import signal
import subprocess
from datetime import UTC, datetime

import fastapi
import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from resilient import (
    DatabaseUnreachable,
    Inbound,
    InvalidInput,
    Job,
    Resilient,
    Shard,
    Shards,
    WebhookEvent,
    handler,
    providers_by_name,
    web,
)
from resilient.testing.fake import answers
from tests import nursery
from tests.helpers import LIMIT
from tests.serving import serving as server_of

SECRET = "canary-webhook-secret"
BASE = "https://shop.example/webhooks"
GITHUB, HUBSPOT, DROPBOX = (providers_by_name()[name]() for name in ("github", "hubspot", "dropbox"))


@handler("hook")
async def hook(job: Job[WebhookEvent]) -> str:
    return job.payload.event


@pytest.fixture
async def app(database_url):
    inbound = [Inbound(provider=name, secrets=[SECRET], jobs=hook) for name in ("github", "hubspot", "dropbox")]
    app = Resilient(database_url, handlers=[hook], providers=[GITHUB, HUBSPOT, DROPBOX], webhooks=inbound)
    await app.ready()
    yield app
    await app.close()


def starlette(routes):
    return Starlette(routes=[Mount("/webhooks", app=routes)])


def fast(routes):
    api = fastapi.FastAPI()
    api.mount("/webhooks", routes)
    return api


@contextlib.asynccontextmanager
async def serving(app, make=starlette, **options):
    """A client of a server with the routes, in this loop."""
    served = make(web.webhook_routes(app, base_url=BASE, **options))
    async with (
        server_of(served) as url,
        httpx.AsyncClient(base_url=f"{url}/webhooks", trust_env=False, timeout=30) as client,
    ):
        yield client


def github(body, *, id_="d-1", secret=SECRET):
    sign = hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()
    return {"content": body, "headers": {"X-Hub-Signature-256": f"sha256={sign}", "X-GitHub-Event": "push",
                                         "X-GitHub-Delivery": id_, "Content-Type": "application/json"}}  # fmt: skip


@pytest.mark.parametrize("make", [starlette, fast])
async def test_stored_answered_worked_off_and_known_again(app, make):
    body = b'{"a":  1, "\\u00e9": "\xc3\xa9"}\n'  # not as anybody would write it again
    async with serving(app, make) as client:
        answer = await client.post("/github", **github(body))
        assert (answer.status_code, answer.content) == (200, b"")
        assert (await client.post("/github", **github(body))).status_code == 200
        assert (await client.post("/github", **github(body, secret="x", id_="d-2"))).status_code == 401
    await app.worker().drain()
    (job,) = await app.jobs.list()
    assert (job.state.value, job.result, job.resource_key) == ("succeeded", "push", "github/webhooks")
    assert job.payload["body"] == {"a": 1, "é": "é"}


async def test_an_event_that_nobody_wants_is_acknowledged_whatever_its_body_has(database_url):
    """GitHub's ping, with which a webhook begins, names no account: it was told 500, and shown as failed there."""
    inbound = Inbound(
        provider="github", secrets=[SECRET], jobs={"push": hook},
        resource_key=lambda event: f"github/{event.body['installation']['id']}",
    )  # fmt: skip
    app = Resilient(database_url, handlers=[hook], providers=[GITHUB], webhooks=[inbound])
    await app.ready()
    async with serving(app) as client:
        ping = github(b'{"zen": "Keep it logically awesome.", "hook_id": 1}')
        ping["headers"]["X-GitHub-Event"] = "ping"
        assert (await client.post("/github", **ping)).status_code == 200
        assert await app.jobs.list() == []
        assert (await client.post("/github", **github(b'{"installation": {"id": 7}}'))).status_code == 200
    assert [job.resource_key for job in await app.jobs.list()] == ["github/7"]
    await app.close()


async def test_an_account_in_the_address(app):
    async with serving(app) as client:
        assert (await client.post("/github/acct-7", **github(b"{}"))).status_code == 200
    (job,) = await app.jobs.list()
    assert job.resource_key == "github/acct-7"


@pytest.mark.parametrize(
    "path",
    [
        "/github/%2e", "/github/%2e%2e", "/github/%2e%2e%2fx", "/github/a%2Fb", "/github/a%00", "/github/*",
        "/github/%C3%A9", "/github/a/b", "/github/" + "x" * 300, "/../github", "/github/%ED%A0%BD", "/github/a%0Ab",
    ],
)  # fmt: skip
async def test_a_hostile_account_leads_nowhere(app, path):
    async with serving(app) as client:
        request = client.build_request("POST", "/github", **github(b"{}"))
        request.url = request.url.copy_with(raw_path=b"/webhooks" + path.encode())
        answer = await client.send(request)
    assert answer.status_code == 404
    assert await app.jobs.count() == 0


async def test_a_flood_of_large_bodies_is_one_line_of_the_log(app, caplog):
    async with serving(app, max_body=100) as client:
        for size in range(101, 151):
            assert (await client.post("/github", content=b"x" * size)).status_code == 413
    assert len([one for one in caplog.records if one.name.startswith("resilient")]) == 1


async def test_a_signed_address_is_the_one_the_world_sees(app):
    """HubSpot signs method, address and body; a proxy shows the server another host and scheme."""
    sent = answers.deliver(
        HUBSPOT, f"{BASE}/hubspot?portal=7", [{"a": 1}], datetime.now(UTC), secret=SECRET, event="contact.creation"
    )
    async with serving(app) as client:
        for path, status in (("/hubspot?portal=7", 200), ("/hubspot?portal=8", 401), ("/hubspot", 401)):
            assert (await client.post(path, content=sent.body, headers=dict(sent.headers))).status_code == status
    assert await app.jobs.count() == 1


async def test_a_question_with_get(app):
    async with serving(app) as client:
        answer = await client.get("/dropbox", params={"challenge": "<b>canary"})
        assert (answer.status_code, answer.text) == (200, "<b>canary")
        assert answer.headers["content-type"].startswith("text/plain")
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert (await client.get("/dropbox")).status_code == 405
        assert (await client.put("/dropbox")).status_code == 405
        assert (await client.post("/nobody")).status_code == 404
        assert (await client.post("/github/a/b")).status_code == 404
        assert (await client.post("/github/a%20b")).status_code == 404


@pytest.mark.parametrize("told", [True, False], ids=["told", "streamed"])
async def test_a_body_that_is_too_large_is_not_read_to_its_end(app, told):
    read = []

    async def endless():
        for _ in range(100):
            read.append(1)
            yield b"x" * 1_000

    async with serving(app, max_body=2_000) as client:
        given = b"x" * 100_000 if told else endless()
        with contextlib.suppress(httpx.TransportError):  # the server may close before everything is sent
            answer = await client.post("/github", content=given)
            assert answer.status_code == 413
        assert (await client.post("/github", **github(b"x" * 2_000))).status_code == 200
    assert await app.jobs.count() == 1


async def test_a_length_of_more_digits_than_a_number_has_says_nothing_of_the_body(app):
    """Servers that read headers less strictly hand it on; what arrives counts."""
    asgi = httpx.ASGITransport(starlette(web.webhook_routes(app, base_url=BASE, max_body=2_000)))
    async with httpx.AsyncClient(transport=asgi, base_url=BASE) as client:
        for body, status in ((b"{}", 200), (b"x" * 2_001, 413)):
            given = github(body)
            given["headers"]["Content-Length"] = "9" * 5_000
            assert (await client.post("/github", **given)).status_code == status


async def test_a_body_that_never_ends_is_given_up(app, monkeypatch):
    monkeypatch.setattr("resilient.surface.web.routes.PATIENCE", 0.2)
    async with serving(app) as client:
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(b"POST /webhooks/github HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        async with asyncio.timeout(LIMIT):
            assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
        writer.close()
    assert app.ground.counts.webhooks == {("github", "broken_off"): 1}


async def test_what_the_routes_refuse_themselves_is_counted_too(app):
    async with serving(app, max_body=2_000) as client:
        for path, size in (("/a-tenants-word", 1), ("/github/a b", 1), ("/github", 2_001), ("/github", 2_000)):
            await client.post(path, **github(b"x" * size))
    assert app.ground.counts.webhooks == {
        ("other", "unknown"): 1, ("github", "unknown"): 1, ("github", "too_large"): 1, ("github", "stored"): 1,
    }  # fmt: skip


def test_what_cannot_be_mounted(database):
    with pytest.raises(InvalidInput):
        web.webhook_routes(Resilient(database), base_url="shop.example/webhooks")


CHILD = """
import asyncio, os, signal, sys
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount
from resilient import Inbound, Kind, Resilient, providers_by_name, web
from resilient.engine.events import webhooks

url, secret, when = sys.argv[1:]
store = webhooks._store

def killed(c, d, *args):
    made = store(c, d, *args)
    if when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    return made

webhooks._store = killed
app = Resilient(url, providers=[providers_by_name()["github"]()],
                webhooks=[Inbound(provider="github", secrets=[secret], jobs=Kind("hook"))])

async def main():
    await app.ready()
    routes = web.webhook_routes(app, base_url="https://shop.example/webhooks")

    async def served(scope, receive, send):
        async def dying(message):
            if when == "after" and message["type"] == "http.response.start":
                os.kill(os.getpid(), signal.SIGKILL)
            await send(message)
        await Starlette(routes=[Mount("/webhooks", app=routes)])(scope, receive, dying)

    server = uvicorn.Server(uvicorn.Config(served, host="127.0.0.1", port=0, log_level="critical", lifespan="off"))
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    print(server.servers[0].sockets[0].getsockname()[1], flush=True)
    await task

asyncio.run(main())
"""


@pytest.mark.parametrize("when", ["before", "after"])
async def test_killed_around_the_commit_the_repeat_makes_exactly_one_job(app, database_url, when):
    """Killed before the commit nothing is stored; after it, before the answer, the repeat is known."""
    child = nursery.start(CHILD, database_url, SECRET, when, stdout=subprocess.PIPE)
    try:
        port = (await asyncio.to_thread(child.stdout.readline)).strip()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=30) as client:
            with pytest.raises(httpx.TransportError):
                await client.post("/webhooks/github", **github(b"{}"))
        assert await asyncio.to_thread(child.wait, LIMIT) == -signal.SIGKILL
    finally:
        child.kill()
        child.communicate()
    assert await app.jobs.count() == (1 if when == "after" else 0)
    async with serving(app) as client:
        assert (await client.post("/github", **github(b"{}"))).status_code == 200
    assert await app.jobs.count() == 1


# -- several databases -------------------------------------------------------------------------------------------------


def by_body(event):
    return f"github/{event.body['account']}"


@pytest.fixture
async def shards(empty_urls):
    one = Inbound(provider="github", secrets=[SECRET], jobs=hook, resource_key=by_body)
    halves = {name: Shard(empty_urls(), share=0.5) for name in ("eu", "us")}
    async with Shards(
        halves, of=lambda key: key.split("/")[1][:2], handlers=[hook], providers=[GITHUB], webhooks=[one], upgrade=True
    ) as shards:
        yield shards


@pytest.mark.parametrize("of", ["shards", "eu", "us"])
async def test_a_delivery_is_stored_in_the_shard_of_its_account(shards, of):
    """Through one mount for all, and through that of any shard; a repeat is known where it was stored."""
    async with serving(shards if of == "shards" else shards[of]) as client:
        for n, name in enumerate(("eu-1", "us-1", "us-2")):
            body = json.dumps({"account": name}).encode()
            for _ in range(2):
                assert (await client.post("/github", **github(body, id_=f"d-{n}"))).status_code == 200
    stored = {name: [job.resource_key for job in await shards[name].jobs.list(order="oldest")] for name in shards}
    assert stored == {"eu": ["github/eu-1"], "us": ["github/us-1", "github/us-2"]}


async def test_a_shard_that_is_away_gets_its_delivery_once_it_is_back(shards, monkeypatch):
    us, eu = (json.dumps({"account": name}).encode() for name in ("us-1", "eu-1"))

    def away(*_):
        raise DatabaseUnreachable("gone")

    async with serving(shards) as client:
        with monkeypatch.context() as patch:
            patch.setattr(shards["us"].database, "transaction", away)
            answer = await client.post("/github", **github(us))
            assert (answer.status_code, "retry-after" in answer.headers) == (503, True)
            assert (await client.post("/github", **github(eu, id_="d-2"))).status_code == 200
        assert (await client.post("/github", **github(us))).status_code == 200
    assert [await shards[name].jobs.count() for name in ("eu", "us")] == [1, 1]
