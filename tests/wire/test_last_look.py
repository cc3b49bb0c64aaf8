"""The last look: what was admitted too long ago is admitted again before its first byte, or not sent at all."""

import asyncio
from datetime import UTC, datetime

import pytest

from resilient import OAuth2, ResourceStopped
from resilient.core.base.exchange import IDEMPOTENT
from resilient.wire.oauth.endpoints import TokenClient
from resilient.wire.requests.call import AsyncCall
from resilient.wire.requests.client import build_client
from resilient.wire.requests.request_log import RequestLog

STOPPED = ResourceStopped("api/acct", "limit")
NOW = datetime(2026, 11, 1, 12, 0, tzinfo=UTC)


async def test_a_late_request_is_admitted_again(hooks, client, server):
    hooks.late = [None]
    response = await client().get("/x")
    assert response.status_code == 200
    assert hooks.steps == ["admit", "again", "answered"]
    assert len(server.app.seen) == 1


async def test_what_the_last_look_waits_for_is_no_part_of_the_requests_time(hooks, client, monkeypatch):
    permits = []

    async def again(permit):
        hooks.late.clear()
        permit.sent_at = float("-inf")  # as if it had waited for ever
        permits.append(permit)

    monkeypatch.setattr(hooks, "again", again)
    hooks.late = [None]
    await client().get("/x")
    assert permits[0].sent_at > 0


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_one_that_may_not_go_any_more_is_not_sent_and_leaves_no_mark(hooks, client, server, method):
    hooks.late = [STOPPED]
    with pytest.raises(ResourceStopped):
        await client().request(method, "/x")
    marked = [] if method in IDEMPOTENT else ["mark", "clear"]
    assert [step for step in hooks.steps if step in ("mark", "clear")] == marked
    assert hooks.marks == {}
    assert server.app.seen == []
    assert (await client().get("/y")).status_code == 200  # over connections that are as good as before


async def test_a_trace_of_the_callers_own_is_heard(hooks, client):
    heard = []

    async def trace(event, _info):
        heard.append(event)

    hooks.late = [None]
    await client().get("/x", extensions={"trace": trace})
    assert "http11.send_request_headers.started" in heard
    assert "again" in hooks.steps


async def test_in_threads_too(hooks, pool, server):
    loop = asyncio.get_running_loop()

    def bridge(step):
        return asyncio.run_coroutine_threadsafe(step, loop).result(60)

    def send():
        with build_client(RequestLog(hooks, base_url=server.url), pool, bridge) as client:
            hooks.late = [None]
            client.get("/x")
            hooks.late = [STOPPED]
            with pytest.raises(ResourceStopped):
                client.post("/x")

    await asyncio.to_thread(send)
    assert hooks.steps.count("again") == 2
    assert hooks.marks == {}
    assert len(server.app.seen) == 1


async def test_a_call_of_somebody_elses_client_has_its_last_look_when_its_block_begins(hooks):
    log, begun = RequestLog(hooks, base_url="https://api.example.com"), []
    hooks.late = [STOPPED, None]
    async with AsyncCall(log, "POST", "/x") as call:
        call.report(200)
    assert hooks.steps == ["admit", "mark", "again", "answered", "clear"]
    with pytest.raises(ResourceStopped):
        async with AsyncCall(log, "POST", "/y"):
            begun.append(1)
    assert (begun, hooks.marks, hooks.steps[-4:]) == ([], {}, ["mark", "again", "clear", "abandoned"])


async def test_a_token_client_asks_before_its_first_byte(server):
    looks, client = [], TokenClient()
    oauth = OAuth2(authorize_url=server.url, token_url=f"{server.url}/x", client_id="app")

    async def look():
        looks.append(1)
        if len(looks) == 2:
            raise STOPPED

    await client.refresh(oauth, "token", NOW, look)
    with pytest.raises(ResourceStopped):
        await client.refresh(oauth, "token", NOW, look)
    assert len(server.app.seen) == 1
    await client.refresh(oauth, "token", NOW)  # over connections that are as good as before
    assert len(server.app.seen) == 2
    await client.aclose()
