"""The last look: what was admitted too long ago is admitted again before its first byte, or not sent at all."""

import asyncio

import pytest

from resilient.core.errors import ResourceStopped
from resilient.core.exchange import IDEMPOTENT
from resilient.wire.client import build_client
from resilient.wire.trail import Trail

STOPPED = ResourceStopped("api/acct", "limit")


async def test_a_late_request_is_admitted_again(conduct, client, server):
    conduct.late = [None]
    response = await client().get("/x")
    assert response.status_code == 200
    assert conduct.steps == ["admit", "again", "answered"]
    assert len(server.app.seen) == 1


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_one_that_may_not_go_any_more_is_not_sent_and_leaves_no_mark(conduct, client, server, method):
    conduct.late = [STOPPED]
    with pytest.raises(ResourceStopped):
        await client().request(method, "/x")
    marked = [] if method in IDEMPOTENT else ["mark", "clear"]
    assert [step for step in conduct.steps if step in ("mark", "clear")] == marked
    assert conduct.marks == {}
    assert server.app.seen == []
    assert (await client().get("/y")).status_code == 200  # over connections that are as good as before


async def test_a_trace_of_the_callers_own_is_heard(conduct, client):
    heard = []

    async def trace(event, _info):
        heard.append(event)

    conduct.late = [None]
    await client().get("/x", extensions={"trace": trace})
    assert "http11.send_request_headers.started" in heard
    assert "again" in conduct.steps


async def test_in_threads_too(conduct, pool, server):
    loop = asyncio.get_running_loop()

    def bridge(step):
        return asyncio.run_coroutine_threadsafe(step, loop).result(10)

    def send():
        with build_client(Trail(conduct, base_url=server.url), pool, bridge) as client:
            conduct.late = [None]
            client.get("/x")
            conduct.late = [STOPPED]
            with pytest.raises(ResourceStopped):
                client.post("/x")

    await asyncio.to_thread(send)
    assert conduct.steps.count("again") == 2
    assert conduct.marks == {}
    assert len(server.app.seen) == 1
