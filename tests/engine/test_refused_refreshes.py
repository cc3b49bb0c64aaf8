"""What one customer can bring about by refusals at the token endpoint, or by bad keys: nothing for the others."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from resilient import Errors, FailureKind, GrantState, Resilient, ResourceStopped, Rule
from resilient.core.accounts import tokens
from resilient.engine.run import backend
from resilient.store.accounts.secrets import new_key
from tests.idp import me

KEY = new_key()
EVIL, GOOD = "idp/evil", "idp/good"
INVALID = (401, {"error": "invalid_client"})
BARE = (401, {})


@pytest.fixture
async def make(database_url, idp):
    made = []

    def make_(provider=None):
        app = Resilient(database_url, handlers=[me], providers=[provider or idp.provider()], secrets=[KEY])
        made.append(app)
        return app

    yield make_
    for app in made:
        await app.close()


async def connect(app, idp, key, *, worked=True, lasts=-5, **words):
    """An account whose token is over; its refresh token."""
    access, refresh = idp.issue()
    at = datetime.now(UTC) + timedelta(seconds=lasts)
    info = await app.connections.import_(key, access_token=access, refresh_token=refresh, expires_at=at, **words)
    if worked:
        ago = datetime.now(UTC) - timedelta(hours=1)
        await set_(app, info.grant_id, worked_at=ago)
    return refresh


async def set_(app, id_, **values):
    sets = ", ".join(f"{name} = :{name}" for name in values)
    await app.database.transaction(
        lambda c, d: d.run(c, f"UPDATE {{grant}} SET {sets} WHERE id = :id", {**values, "id": d.id(id_)})
    )
    app.grants.accounts.forget()


async def refused(app, key):
    with pytest.raises(ResourceStopped) as stopped:
        await app.credentials(key)
    return stopped.value


async def auth(app, key="idp"):
    found = await app.resources.list(key)
    return found[0].auth if found else "ok"


@pytest.mark.parametrize("answer", [BARE, INVALID, (400, {"error": "unauthorized_client"}), (401, {"error": "odd"})])
async def test_one_refused_grant_beside_a_good_one_stops_nobody(make, idp, answer):
    app = make()
    idp.says[await connect(app, idp, EVIL)] = answer
    await connect(app, idp, GOOD)
    await refused(app, EVIL)
    assert await auth(app) == "ok"
    assert (await app.credentials(GOOD)).version >= 2
    assert (await app.connections.get(EVIL)).state is GrantState.ACTIVE


@pytest.mark.parametrize("answer", [BARE, INVALID])
async def test_two_refused_grants_of_one_customer_stop_nobody_while_a_healthy_one_is_taken(make, idp, answer):
    app = make()
    for key in ("idp/evil-1", "idp/evil-2"):
        idp.says[await connect(app, idp, key)] = answer
    await connect(app, idp, GOOD)
    await refused(app, "idp/evil-1")
    await refused(app, "idp/evil-2")
    assert await auth(app) == "ok"
    assert (await app.credentials(GOOD)).version >= 2


async def test_an_application_that_is_refused_shuts_its_provider_after_a_witness(make, idp):
    app = make(idp.provider(client_secret="canary-wrong"))
    for key in (EVIL, GOOD):
        await connect(app, idp, key)
    assert (await refused(app, EVIL)).resource == "idp"
    assert await auth(app) == "app_refused"
    assert len(idp.asked) == 2
    assert {one.state for one in await app.connections.list("idp")} == {GrantState.ACTIVE}


async def test_bare_refusals_of_every_grant_shut_it_too(make, idp):
    app = make()
    for n in range(3):
        idp.says[await connect(app, idp, f"idp/{n}")] = BARE
    await refused(app, "idp/0")
    assert await auth(app) == "ok"
    await refused(app, "idp/1")
    assert await auth(app) == "app_refused"


async def test_keys_that_never_worked_are_no_evidence(make, idp):
    app = make()
    for n in range(4):
        idp.says[await connect(app, idp, f"idp/evil-{n}", worked=False)] = INVALID
    await connect(app, idp, GOOD)
    for n in range(4):
        await refused(app, f"idp/evil-{n}")
    assert await auth(app) == "ok"


async def test_a_customers_own_token_endpoint_says_nothing_about_the_application(make, idp):
    at = idp.url.removeprefix("http://")
    facts = idp.provider(token_url="{instance}/token", authorize_url="{instance}/authorize")
    app = make(replace(facts, private_hosts=("127.0.0.1",)))
    for key in (EVIL, GOOD):
        refresh = await connect(app, idp, key, details={"instance": f"http://{at}"})
        if key == EVIL:
            idp.says[refresh] = INVALID
    await refused(app, EVIL)
    assert await auth(app) == "ok"


# -- going on ------------------------------------------------------------------------------------------------


async def a_minute_later(app):
    at = datetime.now(UTC) - timedelta(seconds=61)
    for statement in (
        "UPDATE {resource} SET auth_since = :ago_at WHERE key = 'idp'",
        "UPDATE {schedule} SET next_at = :ago_at WHERE name = 'engine:credentials:idp'",
        "UPDATE {grant} SET retry_at = NULL WHERE provider = 'idp' AND retry_at > :ago_at",
    ):
        await app.database.transaction(lambda c, d, s=statement: d.run(c, s, {"ago_at": at}))
    await app.grants.fuse.keep_house()


async def test_the_probe_asks_who_worked_last(make, idp):
    """Many idle accounts, dead at the provider, and one that was used an hour ago."""
    app = make(idp.provider(client_secret="canary-wrong"))
    for n in range(8):
        refresh = await connect(app, idp, f"idp/dead-{n}", lasts=-86400)
        idp.says[refresh] = INVALID  # this server looks at the token first
        await set_(app, (await app.connections.get(f"idp/dead-{n}")).grant_id,
                   worked_at=datetime.now(UTC) - timedelta(days=9))  # fmt: skip
    await connect(app, idp, GOOD)
    await refused(app, GOOD)
    assert await auth(app) == "app_refused"
    before, healed = len(idp.asked), make()
    await a_minute_later(healed)
    assert await auth(healed) == "ok"
    assert len(idp.asked) == before + 1


async def test_a_dead_grant_proves_that_the_application_is_taken(make, idp):
    app = make(idp.provider(client_secret="canary-wrong"))
    for n in range(3):
        await connect(app, idp, f"idp/{n}")
    await refused(app, "idp/0")
    assert await auth(app) == "app_refused"
    idp.refresh.clear()  # and all of them are dead
    healed = make()
    await a_minute_later(healed)
    assert await auth(healed) == "ok"


# -- a refusal nobody declared -------------------------------------------------------------------------------


async def test_a_grant_refused_without_a_reason_for_an_hour_is_dead(make, idp, caplog):
    app = make()
    idp.says[await connect(app, idp, EVIL)] = (403, {"errcode": "M_FORBIDDEN"})
    await connect(app, idp, GOOD)
    id_ = (await app.connections.get(EVIL)).grant_id
    for number in range(tokens.HOPELESS_TRIES - 1):
        assert (await refused(app, EVIL)).gate == "cooldown"
        assert (await app.connections.get(EVIL)).state is GrantState.ACTIVE, number
        await set_(app, id_, retry_at=None)
    assert caplog.text.count("the token of idp/evil could not be refreshed: unexplained") == 1
    await set_(app, id_, refused_since=datetime.now(UTC) - tokens.HOPELESS_AFTER)
    await refused(app, EVIL)
    assert (await app.connections.get(EVIL)).state is GrantState.NEEDS_REAUTH
    assert await auth(app, EVIL) == "needs_reauth"
    assert (await app.credentials(GOOD)).version == 2


async def test_jobs_of_such_a_grant_wait_parked(make, idp, monkeypatch):
    monkeypatch.setattr(
        backend, "patience_of", lambda _: 30.0
    )  # a slow machine's refresh parks nobody before its answer
    app = make()
    idp.says[await connect(app, idp, EVIL)] = (403, {"errcode": "M_FORBIDDEN"})
    for _ in range(5):
        await app.enqueue(me, resource_key=EVIL)
    await app.worker().drain()
    jobs = await app.jobs.list()
    assert {(job.state.value, job.attempts) for job in jobs} == {("ready", 0)}
    assert len(idp.asked) == 1
    assert sum(job.deferrals for job in jobs) <= 5


async def test_what_a_provider_says_of_a_dead_grant_is_a_fact(make, idp):
    dead = Errors(code=("errcode",), rules=(Rule(FailureKind.AUTH, code="M_FORBIDDEN"),))
    app = make(idp.provider(errors=dead))
    idp.says[await connect(app, idp, EVIL)] = (403, {"errcode": "M_FORBIDDEN"})
    await refused(app, EVIL)
    assert (await app.connections.get(EVIL)).state is GrantState.NEEDS_REAUTH


# -- keys that never worked ----------------------------------------------------------------------------------


@pytest.fixture
def bearer(idp):
    idp.access.add("canary-good")
    return idp


async def test_six_keys_that_never_worked_stop_nobody_else(make, bearer):
    app = make()
    for n in range(7):
        await app.connections.add(f"idp/evil-{n}", token=f"canary-garbage-{n}")
        await app.enqueue(me, resource_key=f"idp/evil-{n}")
    await app.connections.add(GOOD, token="canary-good")
    await app.worker().drain()
    assert await auth(app) == "ok"
    assert {await auth(app, f"idp/evil-{n}") for n in range(7)} == {"needs_reauth"}
    job = await app.enqueue(me, resource_key=GOOD)
    await app.worker().drain()
    assert (await app.jobs.get(job.id)).state.value == "succeeded"


async def test_a_key_that_worked_is_known_to_have(make, bearer):
    app = make()
    await app.connections.add(GOOD, token="canary-good")
    await app.enqueue(me, resource_key=GOOD)
    await app.worker().drain()
    held = await app.grants.accounts.load_usable(GOOD)
    assert held.bound.grant.has_worked
    await app.connections.add(GOOD, token="canary-another")
    assert not (await app.grants.accounts.load_usable(GOOD)).bound.grant.has_worked


async def test_the_fuse_of_keys_ends_by_itself_and_who_is_refused_again_is_believed(make, bearer):
    app, names = make(), [f"idp/{n}" for n in range(6)]
    for key in names:
        await app.connections.add(key, token=f"canary-{key}")
        await set_(app, (await app.connections.get(key)).grant_id, worked_at=datetime.now(UTC))
        await app.enqueue(me, resource_key=key)
    await app.worker().drain()
    assert await auth(app) == "suspect_auth"
    await a_minute_later(app)
    assert await auth(app) == "suspect_auth"
    ago = datetime.now(UTC) - timedelta(minutes=16)
    await app.database.transaction(
        lambda c, d: d.run(c, "UPDATE {resource} SET auth_since = :ago_at WHERE key = 'idp'", {"ago_at": ago})
    )
    await app.database.transaction(
        lambda c, d: d.run(c, "UPDATE {schedule} SET next_at = :ago_at WHERE name = 'engine:credentials:idp'",
                           {"ago_at": ago})
    )  # fmt: skip
    bearer.access.add(f"canary-{names[0]}")  # this one is well again
    await app.grants.fuse.keep_house()
    assert await auth(app) == "ok"
    app.grants.accounts.forget()
    await app.worker().drain()
    assert [await auth(app, key) for key in names] == ["ok", *["needs_reauth"] * 5]
    assert await auth(app) == "ok"
