"""Somebody can write the database and lacks the keys: no customer's token goes to another account or host."""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import parse_qs, urlsplit

import pytest

from resilient import Bearer, ConsentRefused, InvalidInput, Job, Provider, Resilient, handler
from resilient.core.base.errors import SecretsUnreadable
from resilient.engine.accounts import seals
from resilient.store.accounts import connections, grants
from resilient.store.accounts.secrets import new_key
from tests.helpers import LIMIT, hear

KEY = new_key()
A, B = "shop/a", "shop/b"


@handler("me")
async def me(job: Job[None]) -> None:
    (await job.client.get("/me")).raise_for_status()


class Api:
    """Takes every request and notes who came."""

    def __init__(self):
        self.callers = []

    async def __call__(self, scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        self.callers.append(dict(scope["headers"]).get(b"authorization", b"").decode())
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"{}"})


@pytest.fixture
async def make(database_url, api):
    """Accounts name their own host, as at many shops."""
    made = []
    provider = Provider(
        name="shop", base_url=api.url.replace("127.0.0.1", "{host}"), auth=(Bearer(),), private_hosts=("*",)
    )

    def make_(**options):
        made.append(Resilient(database_url, handlers=[me], **{"providers": [provider], "secrets": [KEY], **options}))
        return made[-1]

    yield make_
    for app in made:
        await app.close()


async def connected(app):
    await app.connections.add(A, token="canary-a", details={"host": "127.0.0.1"})
    await app.connections.add(B, token="canary-b", details={"host": "127.0.0.1"})


async def spoil(app, sets, **params):
    """What somebody does who can write the database."""
    await app.database.transaction(
        lambda c, d: d.run(c, f"UPDATE {{connection}} SET {sets} WHERE resource_key = :a", {"a": A, **params})
    )
    app.grants.accounts.forget()


REPOINTED = "grant_id = (SELECT grant_id FROM {connection} WHERE resource_key = 'shop/b')"
STOLEN = "seal = (SELECT seal FROM {connection} WHERE resource_key = 'shop/b')"
ELSEWHERE = """details = '{{"host": "localhost"}}'"""
ATTACKS = [REPOINTED, f"{REPOINTED}, {STOLEN}", f"{REPOINTED}, seal = NULL", ELSEWHERE, f"{ELSEWHERE}, seal = NULL"]


async def as_older_code(app, *keys):
    """The rows as the code before seals left them: no seal, and no note of it within the secrets."""

    def strip(c, d):
        for key in keys:
            bound = connections.find(c, d, key)
            old = replace(app.grants.accounts.decrypt(bound.grant), values={})
            new = app.grants.accounts.encrypt(bound.grant.id, old)
            grants.reseal(c, d, bound.grant.id, new.secrets, new.key_id)
            connections.set_seal(c, d, key, None)

    await app.database.transaction(strip)
    app.grants.accounts.forget()


@pytest.mark.parametrize("attack", ATTACKS)
async def test_a_connection_that_was_changed_in_the_database_sends_nothing_and_is_told(make, api, attack):
    told = []
    app = make(alerts=told.append)
    await connected(app)
    job = await app.enqueue(me, resource_key=A)
    await spoil(app, attack)
    with pytest.raises(SecretsUnreadable, match="the connection of shop/a does not fit its seal"):
        await app.credentials(A)
    await app.worker().drain(timeout=LIMIT)
    assert not api.callers
    found = await app.jobs.get(job.id)
    assert (found.state.value, found.attempts) == ("ready", 0)
    assert (await app.resources.get(A)).auth == "unreadable"
    assert "resilient connect shop shop/a" in (await app.jobs.why(job.id)).text
    await hear(app)
    assert [(n.alert.name, n.alert.subject) for n in told] == [("needs_reauth", A)]
    await app.enqueue(me, resource_key=B)
    await app.worker().drain(timeout=LIMIT)
    assert api.callers == ["Bearer canary-b"]  # the account whose row was left alone goes on


@pytest.mark.parametrize("attack", ATTACKS)
async def test_connecting_it_again_mends_it_and_touches_no_other_grant(make, api, attack):
    app = make()
    await connected(app)
    await app.enqueue(me, resource_key=A)
    await spoil(app, attack)
    await app.worker().drain(timeout=LIMIT)
    with pytest.raises(InvalidInput, match="address of its account is not known"):
        await app.connections.add(A, token="canary-new")  # what stands there is not believed
    await app.connections.add(A, token="canary-new", details={"host": "127.0.0.1"})
    assert (await app.credentials(B)).token == "canary-b"
    assert (await app.connections.get(A)).grant_id != (await app.connections.get(B)).grant_id
    await app.worker().drain(timeout=LIMIT)
    assert api.callers == ["Bearer canary-new"]


async def test_no_grant_is_shared_by_way_of_a_changed_row_and_nothing_revoked(make):
    app = make()
    await connected(app)
    await spoil(app, REPOINTED)
    with pytest.raises(SecretsUnreadable, match="seal"):
        await app.connections.add("shop/c", grant_of=A, details={"host": "127.0.0.1"})
    with pytest.raises(SecretsUnreadable, match="seal"):
        await app.connections.disconnect(A)


async def test_what_belongs_together_goes_on_belonging_together(make, api):
    app = make()
    await connected(app)
    await app.connections.add("shop/c", grant_of=A, details={"host": "127.0.0.1"})
    await app.connections.add(A, token="canary-2")  # its details stay
    for key in (A, "shop/c"):
        assert (await app.credentials(key)).token == "canary-2"
        await app.enqueue(me, resource_key=key)
    await app.worker().drain(timeout=LIMIT)
    assert api.callers == ["Bearer canary-2"] * 2
    assert await app.connections.revoke(A)
    await app.connections.add(A, token="canary-3")
    assert (await app.credentials("shop/c")).token == "canary-3"


async def test_rows_of_older_code_go_on_until_they_are_sealed(make, api):
    app = make()
    await connected(app)
    await as_older_code(app, A, B)
    assert (await app.credentials(A)).token == "canary-a"
    assert await app.connections.rotate_secrets() == 2
    assert await app.connections.rotate_secrets() == 0
    app.grants.accounts.forget()
    assert (await app.credentials(A)).token == "canary-a"
    await spoil(app, f"{REPOINTED}, seal = NULL")
    with pytest.raises(SecretsUnreadable, match="seal"):
        await app.credentials(A)


async def test_an_account_of_older_code_that_is_connected_again_takes_those_that_share_along(make):
    app = make()
    await connected(app)
    await app.connections.add("shop/c", grant_of=A, details={"host": "127.0.0.1"})
    await as_older_code(app, A, "shop/c")
    await app.connections.add(A, token="canary-2")
    assert (await app.credentials("shop/c")).token == "canary-2"


async def test_changing_keys_signs_anew_and_launders_nothing(make, caplog):
    app = make()
    await connected(app)
    await spoil(app, REPOINTED)
    new = new_key()
    assert await make(secrets=[new, KEY]).connections.rotate_secrets() == 2
    assert "the connection of shop/a does not fit its seal" in caplog.text
    after = make(secrets=[new])
    assert (await after.credentials(B)).token == "canary-b"
    with pytest.raises(SecretsUnreadable, match="seal"):
        await after.credentials(A)


async def test_a_refresh_that_ends_after_the_rotation_keeps_the_note(make):
    """Its new token was made of secrets that were read before."""
    app = make()
    await connected(app)
    await as_older_code(app, A)
    before = await app.database.transaction(connections.find, A)
    old = app.grants.accounts.decrypt(before.grant)
    await app.connections.rotate_secrets()
    now = await app.database.transaction(connections.find, A)
    made = app.grants.accounts.encrypt_renewed(now.grant, old)
    assert seals.has_note(app.grants.accounts.decrypt(replace(now.grant, secrets=made.secrets)))


async def test_a_consent_on_its_way_cannot_be_made_another_accounts(database_url, idp):
    provider = idp.provider()
    async with Resilient(database_url, handlers=[me], providers=[provider], secrets=[KEY]) as app:
        url = await app.connections.authorize_url("idp/mine")
        state = parse_qs(urlsplit(url).query)["state"][0]
        await app.database.transaction(lambda c, d: d.run(c, "UPDATE {authorization} SET resource_key = 'idp/victim'"))
        with pytest.raises(ConsentRefused, match="start again"):
            await app.connections.complete({"state": state, "code": "canary-code"})
        assert not idp.asked
        assert not await app.connections.list()


async def test_an_account_with_a_host_of_its_own_that_was_never_connected_waits(make, api):
    app = make()
    job = await app.enqueue(me, resource_key="shop/new")
    await app.worker().drain(timeout=LIMIT)
    assert ((await app.jobs.get(job.id)).state.value, (await app.jobs.get(job.id)).attempts) == ("ready", 0)
    assert (await app.resources.get("shop/new")).auth == "not_connected"
    await app.connections.add("shop/new", token="canary-new", details={"host": "127.0.0.1"})
    await app.worker().drain(timeout=LIMIT)
    assert api.callers == ["Bearer canary-new"]


async def test_without_the_key_an_account_with_a_host_of_its_own_waits_uncharged(make, api):
    app = make()
    await connected(app)
    stranger = make(secrets=[new_key()])
    await stranger.connections.add("shop/c", token="canary-c", details={"host": "127.0.0.1"})
    job = await stranger.enqueue(me, resource_key=A)
    await stranger.worker().drain(timeout=LIMIT)
    found = await app.jobs.get(job.id)
    assert (found.state.value, found.attempts) == ("ready", 0)
    assert (await app.resources.get(A)).auth == "unreadable"
