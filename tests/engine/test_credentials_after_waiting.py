"""Credentials are those of the moment in which a request may go, not of the one in which it began to wait."""

from __future__ import annotations

import pytest

from resilient import Bearer, Fixed, Job, Provider, Resilient, Retry, handler
from resilient.engine.gates.gate import Gate
from resilient.testing import new_key
from tests.helpers import until

ACCOUNT = "api/ada"


class Api:
    def __init__(self):
        self.tokens = []

    async def __call__(self, scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        self.tokens.append(dict(scope["headers"]).get(b"authorization", b"").decode())
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"{}"})


@handler("look", retry=Retry(max_attempts=3, delay=Fixed(0)))
async def look(job: Job[None]) -> None:
    (await job.client.get("/me")).raise_for_status()


@pytest.fixture
def api(serve):
    api = Api()
    api.url = serve(api)
    return api


@pytest.fixture
async def app(api, database_url):
    provider = Provider(name="api", base_url=api.url, auth=(Bearer(),))
    app = Resilient(database_url, handlers=[look], providers=[provider], secrets=[new_key()], upgrade=False)
    await app.connections.add(ACCOUNT, token="old")
    yield app
    await app.close()


def meanwhile(monkeypatch, act):
    """Let ``act`` happen once, while a request waits for its gate; the gate and its permits."""
    admit, permits, done = Gate.admit, [], []

    async def waiting(gate, *args, **options):
        permit = await admit(gate, *args, **options)
        permits.append((gate, permit))
        if not done:
            done.append(True)
            await act()
        return permit

    monkeypatch.setattr(Gate, "admit", waiting)
    return permits


async def test_a_token_that_was_replaced_while_a_request_waited_is_not_sent(app, api, monkeypatch):
    meanwhile(monkeypatch, lambda: app.connections.add(ACCOUNT, token="new"))
    await app.enqueue(look, resource_key=ACCOUNT)
    await app.worker().drain()
    assert api.tokens == ["Bearer new"]


async def test_an_account_that_was_revoked_meanwhile_sends_nothing_and_keeps_no_room(app, api, monkeypatch):
    permits = meanwhile(monkeypatch, lambda: app.connections.revoke(ACCOUNT))
    job = await app.enqueue(look, resource_key=ACCOUNT)
    await app.worker().drain()
    (_, permit), *_ = permits
    assert permit.flights == ()
    assert api.tokens == []
    info = await app.jobs.get(job.id)
    assert (info.attempts, info.executions) == (0, 1)
    await app.connections.add(ACCOUNT, token="newer")
    await app.worker().drain()
    await until(lambda: api.tokens == ["Bearer newer"])
