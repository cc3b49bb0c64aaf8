"""Tokens that nothing renews: they are used to their end, and their end says nothing about provider and endpoint."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from urllib.parse import parse_qs, urlsplit

import pytest

from resilient import GrantState, Resilient, ResourceStopped
from resilient.store.accounts.secrets import new_key
from tests.engine.test_token_endpoints import ask, break_it, due, settled
from tests.idp import connect

KEY = new_key()
TOKEN = "idp:token"


@pytest.fixture
async def app(database_url, idp):
    app = Resilient(database_url, providers=[idp.provider()], secrets=[KEY])
    yield app
    await app.close()


async def consent(app, idp, key):
    """Connect an account whose provider gives it no refresh token."""
    idp.script.insert(0, "bare")
    state = parse_qs(urlsplit(await app.connections.authorize_url(key)).query)["state"][0]
    return await app.connections.complete({"state": state, "code": "canary"})


async def move(app, **seconds):
    """Set the times of every grant, in seconds from now."""
    sets = ", ".join(f"{name} = :{name}" for name in seconds)
    times = {name: datetime.now(UTC) + timedelta(seconds=value) for name, value in seconds.items()}
    await app.database.transaction(lambda c, d: d.run(c, f"UPDATE {{grant}} SET {sets}", times))
    app.grants.accounts.forget()


async def test_a_token_is_used_to_its_end(app, idp):
    await consent(app, idp, "idp/a")
    token = (await app.credentials("idp/a")).token
    await move(app, refresh_at=-1, expires_at=60)
    assert (await app.credentials("idp/a")).token == token
    await move(app, expires_at=-1)
    with pytest.raises(ResourceStopped):
        await app.credentials("idp/a")
    info = await app.connections.get("idp/a")
    assert (info.state, info.last_code, len(idp.asked)) == (GrantState.NEEDS_REAUTH, "no_refresh_token", 1)


async def test_many_that_end_together_are_no_fault_of_the_providers(app, idp):
    keys = [f"idp/acct-{n}" for n in range(8)]
    for key in keys:
        await consent(app, idp, key)
    await connect(app, idp, "idp/well")
    await move(app, worked_at=-60, refresh_at=-1, expires_at=-1)
    for key in keys:
        with pytest.raises(ResourceStopped):
            await app.credentials(key)
    assert {(await app.connections.get(key)).state for key in keys} == {GrantState.NEEDS_REAUTH}
    assert (await app.resources.get("idp")).auth == "ok"
    assert (await app.credentials("idp/well")).version == 2


async def test_an_account_that_asks_nothing_closes_no_circuit(app, idp):
    """It would be the one probe of an endpoint that is down, and all the others would follow."""
    await consent(app, idp, "idp/bare")
    await break_it(app, idp)
    await due(app)
    await move(app, refresh_at=-1, expires_at=-1)
    before = len(idp.asked)
    with pytest.raises(ResourceStopped):
        await app.credentials("idp/bare")
    await settled(app)
    info = await app.resources.get(TOKEN)
    assert (info.breaker, len(idp.asked)) == ("open", before)
    assert await ask(app, ["idp/acct-29"])


async def test_an_account_that_asks_nothing_does_not_prove_that_the_application_is_taken(app, idp):
    await consent(app, idp, "idp/bare")
    await app.grants.fuse.app_refused("idp", "invalid_client")
    await move(app, refresh_at=-1, expires_at=-1)
    with pytest.raises(ResourceStopped):
        await app.grants.test("idp/bare")
    assert (await app.resources.get("idp")).auth == "app_refused"
