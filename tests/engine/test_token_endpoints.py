"""A token endpoint has a gate of its own: many accounts do not hammer one that is dead, and one of them finds out."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from resilient import Resilient, ResourceStopped, SetupError
from resilient.store.accounts.secrets import new_key
from tests.helpers import LIMIT
from tests.idp import me

KEY = new_key()
TOKEN = "idp:token"


@pytest.fixture
async def app(database_url, idp):
    app = Resilient(database_url, handlers=[me], providers=[idp.provider()], secrets=[KEY])
    yield app
    await app.close()


async def connect(app, idp, count, name="acct"):
    names = [f"idp/{name}-{n}" for n in range(count)]
    ended = datetime.now(UTC) - timedelta(seconds=5)
    for key in names:
        access, refresh = idp.issue()
        await app.connections.import_(key, access_token=access, refresh_token=refresh, expires_at=ended)
    return names


async def ask(app, names):
    """What each got: a token's version, or the resource and gate that stopped it."""

    async def one(key):
        try:
            return (await app.credentials(key)).version
        except ResourceStopped as stopped:
            return stopped.resource, stopped.gate

    return await asyncio.gather(*(one(key) for key in names))


async def settled(app):
    gate = app.grants._endpoints._gate
    await gate.flush()
    gate.forget([TOKEN])


async def due(app):
    """The open time is over."""
    over = "UPDATE {resource} SET open_until = :over_at WHERE key = 'idp:token'"
    at = datetime.now(UTC) - timedelta(seconds=1)
    await app.database.transaction(lambda c, d: d.run(c, over, {"over_at": at}))
    await settled(app)


async def break_it(app, idp, count=30):
    """Some accounts have asked a token endpoint that is down; each of them that got through rests on its own."""
    names = await connect(app, idp, count)
    idp.script = ["down"] * 1_000
    first = await ask(app, names)
    await settled(app)
    return names, first


async def test_two_hundred_accounts_send_a_few_requests_and_then_none(app, idp):
    names, first = await break_it(app, idp, 200)
    asked = len(idp.asked)
    assert 5 <= asked <= 40
    assert {resource for resource, _ in first} == {TOKEN}
    assert (await app.resources.get(TOKEN)).breaker == "open"
    assert set(await ask(app, names)) == {(TOKEN, "breaker")}
    assert len(idp.asked) == asked
    assert {one.state.value for one in await app.connections.list("idp", limit=300)} == {"active"}
    assert (await app.resources.get("idp")).auth == "ok"


async def test_one_of_them_probes_and_an_answer_lets_all_go_on(app, idp):
    await break_it(app, idp)
    first, *others = await connect(app, idp, 6, "new")
    await due(app)
    idp.script, idp.hold, before = [], type(idp.hold)(), len(idp.asked)
    probing = asyncio.create_task(ask(app, [first]))
    async with asyncio.timeout(LIMIT):
        while len(idp.asked) == before:  # noqa: ASYNC110 - the server is in another thread
            await asyncio.sleep(0.01)
    assert set(await ask(app, others)) == {(TOKEN, "breaker")}
    assert len(idp.asked) == before + 1
    idp.hold.set()
    assert await probing == [2]
    await settled(app)
    assert (await app.resources.get(TOKEN)).breaker == "closed"
    assert await ask(app, others) == [2] * 5


async def test_a_probe_that_fails_shuts_it_for_longer(app, idp):
    await break_it(app, idp)
    names = await connect(app, idp, 1, "new")
    await due(app)
    before = len(idp.asked)
    assert await ask(app, names) == [(TOKEN, "cooldown")]
    await settled(app)
    info = await app.resources.get(TOKEN)
    assert (info.breaker, info.reopens, len(idp.asked)) == ("open", 1, before + 1)


async def test_a_probe_that_could_not_be_sent_is_given_back(app, database_url, idp):
    await break_it(app, idp)
    (name,) = await connect(app, idp, 1, "new")
    await due(app)
    asked, no_key = len(idp.asked), idp.provider(client_auth="jwt", client_secret="no key")
    async with Resilient(database_url, handlers=[me], providers=[no_key], secrets=[KEY]) as wrong:
        with pytest.raises(SetupError, match="no private key"):
            await wrong.credentials(name)
        await settled(wrong)
    info = await app.resources.get(TOKEN)
    assert (info.breaker, info.reopens, len(idp.asked)) == ("open", 0, asked)


async def test_jobs_wait_for_it_and_are_charged_nothing(app, idp):
    names, _ = await break_it(app, idp)
    await app.enqueue(me, resource_key=names[28])
    await app.worker().drain()
    (job,) = await app.jobs.list()
    assert (job.state.value, job.attempts, job.waiting_for) == ("scheduled", 0, TOKEN)


async def test_a_refusal_is_proof_of_life(app, idp):
    names = await connect(app, idp, 9)
    del idp.refresh["canary-refresh-5"]
    idp.script = ["down"] * 4 + [""] + ["html"] * 4
    for key in names:
        await ask(app, [key])
    await settled(app)
    assert len(idp.asked) == 9
    assert (await app.resources.get(TOKEN)).breaker == "closed"
    assert (await app.connections.get(names[4])).state.value == "needs_reauth"


async def test_pages_that_are_no_answer_open_it(app, idp):
    names = await connect(app, idp, 7)
    idp.script = ["html"] * 7
    for key in names:
        await ask(app, [key])
        await settled(app)
    assert len(idp.asked) == 5
    assert (await app.resources.get(TOKEN)).breaker == "open"
