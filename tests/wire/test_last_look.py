"""The last look: what was admitted too long ago is admitted again before its first byte, or not sent at all."""

import asyncio

import pytest

from resilient import ResourceStopped
from resilient.core.base.exchange import IDEMPOTENT
from resilient.wire.requests.client import build_client
from resilient.wire.requests.request_log import RequestLog

STOPPED = ResourceStopped("api/acct", "limit")


async def test_a_late_request_is_admitted_again(hooks, client, server):
    hooks.late = [None]
    response = await client().get("/x")
    assert response.status_code == 200
    assert hooks.steps == ["admit", "again", "answered"]
    assert len(server.app.seen) == 1


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
