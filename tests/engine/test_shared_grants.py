"""A grant that several accounts share: whose new credentials are for whom."""

from __future__ import annotations

import asyncio
import threading
from datetime import UTC, datetime
from urllib.parse import parse_qs, urlsplit

import pytest

from resilient import (
    Bearer,
    ConnectionNotFound,
    Credentials,
    GrantState,
    InvalidInput,
    Provider,
    Resilient,
    ResourceStopped,
)
from resilient.core.base.errors import Failure, FailureKind, SecretsUnreadable
from resilient.engine.accounts import connections as engine_connections
from resilient.engine.accounts import sharing
from resilient.store.accounts import connections, grants
from tests.helpers import LIMIT
from tests.idp import connect, me
from tests.interleaving import until_somebody_waits
from tests.tenants import KEY, refreshing

ANN, BOB, EVE = "idp/ann", "idp/bob", "idp/eve"
REFUSED = Failure(FailureKind.AUTH, code="refused", status=401)
AHEAD = datetime(2999, 1, 1, tzinfo=UTC)


async def shared(app):
    """Ann's grant is Bob's, too, and Eve's by way of Bob."""
    await app.connections.add(ANN, token="canary-ann")
    await app.connections.add(BOB, grant_of=ANN)
    await app.connections.add(EVE, grant_of=BOB)


async def tokens_of(app, *keys):
    return [(await app.credentials(key)).token for key in keys or (ANN, BOB, EVE)]


async def by_hand(app):
    await app.connections.add(BOB, token="canary-bob")


async def by_import(app):
    await app.connections.import_(BOB, access_token="canary-bob", refresh_token="r", expires_at=AHEAD)


async def by_password(app):
    await app.connections.add(BOB, user="bob", password="canary-bob")


async def by_consent(app):
    """The callback of a consent page."""
    url = await app.connections.authorize_url(BOB, redirect_uri="http://127.0.0.1:1/callback")
    asked = {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}
    consent = app.connections.consent
    code = {"code": "canary-code-x", "state": asked["state"]}
    exchange = consent._exchange

    async def exchanged(*_):
        answer = await exchange(*_)
        return type(answer)(body={"access_token": "canary-bob", "refresh_token": "r", "expires_in": 3600}, failure=None)

    consent._exchange = exchanged
    await app.connections.complete(code)


@pytest.mark.parametrize("connects", [by_hand, by_import, by_password, by_consent], ids=lambda one: one.__name__)
async def test_who_shared_and_connects_an_account_of_his_own_changes_nobody_elses(make, connects):
    app = make()
    await shared(app)
    await connects(app)
    assert await tokens_of(app) == ["canary-ann", "canary-bob", "canary-ann"]
    assert await tokens_of(make()) == ["canary-ann", "canary-bob", "canary-ann"]
    infos = [await app.connections.get(key) for key in (ANN, BOB, EVE)]
    assert infos[0].grant_id == infos[2].grant_id != infos[1].grant_id
    assert (infos[0].version, infos[1].version) == (1, 1)
    await app.connections.add(BOB, token="canary-bob-2")  # his own from now on: written in its place
    assert (await app.connections.get(BOB)).grant_id == infos[1].grant_id


async def test_no_token_comes_to_the_host_of_another_tenant(database_url):
    shop = Provider(name="shop", base_url="https://{host}/api", auth=(Bearer(),), private_hosts=("*.example",))
    async with Resilient(database_url, handlers=[], providers=[shop], secrets=[KEY]) as app:
        await app.connections.add("shop/ann", token="canary-ann", details={"host": "ann.example"})
        await app.connections.add("shop/bob", grant_of="shop/ann", details={"host": "ann.example"})
        assert (await app.connections.get("shop/bob")).details == {"host": "ann.example"}
        await app.connections.add("shop/bob", token="canary-bob", details={"host": "bob.example"})
        seen = [await app.credentials(key) for key in ("shop/ann", "shop/bob")]
        assert [(one.token, one.base_url) for one in seen] == [
            ("canary-ann", "https://ann.example/api"), ("canary-bob", "https://bob.example/api"),
        ]  # fmt: skip
        await app.connections.add("shop/bob", token="canary-bob-2")  # the details stay, and nothing beside them
        assert (await app.connections.get("shop/bob")).details == {"host": "bob.example"}


async def test_new_credentials_of_the_account_that_is_shared_are_for_all(make):
    app = make()
    await shared(app)
    await app.connections.add(ANN, token="canary-ann-2")
    assert await tokens_of(app) == ["canary-ann-2"] * 3
    assert await app.connections.revoke(ANN)
    await app.connections.add(ANN, token="canary-ann-3")
    assert await tokens_of(app) == ["canary-ann-3"] * 3


async def test_a_dead_grant_that_one_guest_leaves_stays_dead_for_the_others(make):
    app = make()
    await shared(app)
    await app.grants.refused(ANN, await app.credentials(ANN), REFUSED)
    await app.connections.add(BOB, token="canary-bob")
    states = [(await app.connections.get(key)).state for key in (ANN, BOB, EVE)]
    assert states == [GrantState.NEEDS_REAUTH, GrantState.ACTIVE, GrantState.NEEDS_REAUTH]
    assert [(await app.resources.get(key)).auth for key in (ANN, BOB, EVE)] == ["needs_reauth", "ok", "needs_reauth"]
    await app.connections.add(ANN, token="canary-ann-2")
    assert await tokens_of(app) == ["canary-ann-2", "canary-bob", "canary-ann-2"]


async def test_without_its_owner_each_that_shared_is_on_its_own(make, caplog):
    app = make()
    await shared(app)
    await app.accounts.erase(ANN)
    await app.connections.add(BOB, token="canary-bob")
    assert f"{BOB} has a grant of its own now; {EVE} stay with the one it shared" in caplog.text
    assert await tokens_of(app, BOB, EVE) == ["canary-bob", "canary-ann"]
    before = (await app.connections.get(EVE)).grant_id
    await app.connections.add(EVE, token="canary-eve")  # the last one: nothing is left behind
    assert (await app.connections.get(EVE)).grant_id == before
    assert await tokens_of(app, BOB, EVE) == ["canary-bob", "canary-eve"]


async def test_sharing_in_a_circle_leaves_the_owner_the_owner(make):
    app = make()
    await shared(app)
    await app.connections.add(ANN, grant_of=BOB)
    await app.connections.add(ANN, grant_of=ANN)
    await app.connections.add(BOB, grant_of=BOB)
    await app.connections.add(ANN, token="canary-ann-2")
    await app.connections.add(BOB, token="canary-bob")
    assert await tokens_of(app) == ["canary-ann-2", "canary-bob", "canary-ann-2"]


async def test_of_a_grant_that_older_code_shared_nobody_is_the_owner(make):
    app = make()
    await shared(app)

    def as_older_code(c, d):
        for key in (ANN, BOB, EVE):
            connections.bind(c, d, key, connections.find(c, d, key).grant.id, {}, "ok", seal=None)
        for bound in connections.of_grant(c, d, connections.find(c, d, ANN).grant.id):
            seal = engine_connections.seals.seal(app.grants.accounts.ring, bound.resource_key, bound.grant.id, {})
            connections.set_seal(c, d, bound.resource_key, seal)

    await app.database.transaction(as_older_code)
    app.grants.accounts.forget()
    await app.connections.add(ANN, token="canary-ann-2")
    assert await tokens_of(app) == ["canary-ann-2", "canary-ann", "canary-ann"]
    await app.connections.add(BOB, grant_of=ANN)
    await app.connections.add(ANN, token="canary-ann-3")
    assert await tokens_of(app) == ["canary-ann-3", "canary-ann-3", "canary-ann"]


async def test_one_that_waited_for_the_refresh_of_the_others_waits_no_longer(make, idp):
    app = make()
    await connect(app, idp, ANN)
    await app.connections.add(BOB, grant_of=ANN)
    id_ = (await app.connections.get(ANN)).grant_id
    await app.database.transaction(grants.begin, id_, 1, 3600.0, refused=False)
    assert await app.database.transaction(grants.park, id_) is not None
    await app.connections.add(BOB, token="canary-bob")
    blocked = [(await app.resources.get(key)).blocked_until for key in (ANN, BOB)]
    assert (blocked[0] is not None, blocked[1]) == (True, None)


@pytest.mark.parametrize("verb", ["revoke", "disconnect"])
async def test_who_has_just_left_a_shared_grant_and_is_given_up_takes_nothing_from_the_others(
    make, idp, monkeypatch, verb
):
    """Another process connects the account anew between the look at it and the deletion."""
    app, other = make(), make()
    await shared(app)
    write = app.connections._give_up

    async def leaves_first(*args):
        other.sync.connections.add(BOB, token="canary-bob")
        return await write(*args)

    monkeypatch.setattr(app.connections, "_give_up", leaves_first)
    await getattr(app.connections, verb)(BOB)
    assert await tokens_of(app, ANN, EVE) == ["canary-ann"] * 2
    assert (await app.connections.get(BOB)).state is GrantState.REVOKED


async def test_details_cannot_say_whose_grant_it_is(make):
    app = make()
    forged = {sharing.GUEST: "1"}
    await app.connections.add(ANN, token="canary-ann", details=forged)
    await app.connections.add(BOB, grant_of=ANN)
    await app.connections.add(ANN, token="canary-ann-2", details=forged)
    assert await tokens_of(app, ANN, BOB) == ["canary-ann-2"] * 2


class Table:
    """An app's own table of tokens."""

    def __init__(self):
        self.rows = {}

    async def load(self, key):
        return self.rows.get(key)

    async def save(self, key, version, credentials):  # noqa: ARG002 - the signature
        self.rows[key] = credentials
        return True


async def test_who_moves_to_the_apps_own_table_leaves_the_others_what_they_have(make, idp):
    app = make()
    await shared(app)
    table = Table()
    table.rows[BOB] = Credentials(token="canary-bob", version=1)
    other = make(credentials=table)
    await other.connections.restored(BOB)
    assert await tokens_of(other) == ["canary-ann", "canary-bob", "canary-ann"]


async def test_details_of_a_grant_that_is_shared_are_checked_and_stay(database_url):
    shop = Provider(name="shop", base_url="https://{host}/api", auth=(Bearer(),))
    async with Resilient(database_url, handlers=[], providers=[shop], secrets=[KEY]) as app:
        add, ann = app.connections.add, "shop/ann"
        await add(ann, token="canary-ann", details={"host": "ann.example"})
        for details, words in (({}, "is not known"), ({"host": "127.0.0.1"}, "must be public")):
            with pytest.raises(InvalidInput, match=words):
                await add("shop/bob", grant_of=ann, details=details)
        with pytest.raises(ConnectionNotFound):
            await app.connections.get("shop/bob")
        await add("shop/bob", grant_of=ann, details={"host": "bob.example"})
        await add("shop/bob", grant_of=ann)
        assert (await app.credentials("shop/bob")).base_url == "https://bob.example/api"


# -- a refresh that another account began ------------------------------------------------------------------------------


async def both_wait(app, idp):
    """Ann's caller refreshes the grant of both, Bob's waits for the same refresh; its answer is held back."""
    await connect(app, idp, ANN, expired=True)
    await app.connections.add(BOB, grant_of=ANN)
    ann = await refreshing(app, idp, ANN)
    refreshes, bob = app.grants._refreshes, asyncio.create_task(app.credentials(BOB))
    joins, joined = refreshes.join, asyncio.Event()

    async def noted(*args):
        joined.set()
        return await joins(*args)

    refreshes.join = noted
    await joined.wait()
    return ann, bob


@pytest.mark.parametrize("word", ["dead", "unexplained"])
async def test_what_stops_both_is_told_each_of_its_own_account(make, idp, word):
    app = make()
    ann, bob = await both_wait(app, idp)
    idp.says["canary-refresh-1"] = (400, {"error": "invalid_grant" if word == "dead" else "canary"})
    idp.hold.set()
    errors = await asyncio.gather(ann, bob, return_exceptions=True)
    assert [error.resource for error in errors] == [ANN, BOB]
    assert ANN not in str(errors[1])


async def test_who_leaves_during_its_refresh_keeps_nobody_else_from_the_token(make, idp):
    app = make()
    ann, bob = await both_wait(app, idp)
    await app.accounts.erase(ANN)
    idp.hold.set()
    with pytest.raises(ResourceStopped):
        await ann
    assert (await bob).token == "canary-access-2"


async def test_a_row_that_something_else_changed_stops_its_own_account_alone(make, idp):
    app = make()
    ann, bob = await both_wait(app, idp)
    spoil = "UPDATE {connection} SET seal = 'canary' WHERE resource_key = :key"
    await app.database.transaction(lambda c, d: d.run(c, spoil, {"key": ANN}) and None)
    idp.hold.set()
    with pytest.raises(SecretsUnreadable):
        await ann
    assert (await bob).token == "canary-access-2"


async def guest_refreshes(make, idp):
    """The refresh of Ann's grant that Bob, its guest, began; its answer is held back."""
    app = make(idp.provider(revoke_url=f"{idp.url}/revoke"))
    await connect(app, idp, ANN, expired=True)
    await app.connections.add(BOB, grant_of=ANN)
    return app, await refreshing(app, idp, BOB)


@pytest.mark.parametrize("gone", ["disconnected", "erased"])
async def test_what_a_guests_refresh_brings_is_revoked_if_its_owner_is_gone_and_the_guest_has_moved(make, idp, gone):
    """What the guest has by now is no consent of the owner's."""
    app, bob = await guest_refreshes(make, idp)
    if gone == "disconnected":
        await app.connections.disconnect(ANN)
    await app.connections.add(BOB, token="canary-bob")
    if gone == "erased":
        await app.accounts.erase(ANN)
    idp.hold.set()
    await asyncio.gather(bob, return_exceptions=True)
    assert [form["token"] for form in idp.revoked][-1:] == ["canary-refresh-2"]
    assert (await app.credentials(BOB)).token == "canary-bob"


@pytest.mark.parametrize("anew", ["connected", "sharing"])
async def test_what_a_guests_refresh_brings_is_not_revoked_if_its_owner_has_other_credentials(make, idp, anew):
    app, bob = await guest_refreshes(make, idp)
    await connect(app, idp, EVE)
    await app.connections.add(BOB, token="canary-bob")
    if anew == "connected":
        await app.accounts.erase(ANN)
        await connect(app, idp, ANN)
    else:
        await app.connections.add(ANN, grant_of=EVE)
    idp.hold.set()
    await asyncio.gather(bob, return_exceptions=True)
    assert idp.revoked == []


# -- at the same moment ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "second"), [(ANN, BOB), (BOB, ANN), (BOB, EVE)])
def test_two_that_share_and_connect_at_once_get_what_each_was_given(postgres_url, idp, first, second):
    app = Resilient(postgres_url, handlers=[me], providers=[idp.provider()], secrets=[KEY])
    add, database = app.sync.connections.add, app.database
    add(ANN, token="canary-ann")
    add(BOB, grant_of=ANN)
    add(EVE, grant_of=ANN)
    with database.sync_engine.begin() as c:
        token = Credentials(token=f"canary-{first}")
        engine_connections._put(c, database.dialect, first, "bearer", token, None, {}, app.grants)
        adding = threading.Thread(target=lambda: add(second, token=f"canary-{second}"), daemon=True)
        adding.start()
        until_somebody_waits(database, adding)
    adding.join(LIMIT)
    app.grants.accounts.forget()
    ann = f"canary-{ANN}" if ANN in (first, second) else "canary-ann"
    expected = {key: f"canary-{key}" if key in (first, second) else ann for key in (ANN, BOB, EVE)}
    assert {key: app.sync.credentials(key).token for key in expected} == expected
    app.sync.close()
    database.close_sync()


def test_one_that_comes_to_share_a_grant_while_it_is_first_connected_keeps_it_to_itself(postgres_url, idp):
    app = Resilient(postgres_url, handlers=[me], providers=[idp.provider()], secrets=[KEY])
    add, database = app.sync.connections.add, app.database
    add(ANN, token="canary-ann")
    with database.sync_engine.begin() as c:
        engine_connections._share(c, database.dialect, BOB, ANN, {}, app.grants)
        adding = threading.Thread(target=lambda: add(BOB, token="canary-bob"), daemon=True)
        adding.start()
        until_somebody_waits(database, adding)
    adding.join(LIMIT)
    assert [app.sync.credentials(key).token for key in (ANN, BOB)] == ["canary-ann", "canary-bob"]
    app.sync.close()
    database.close_sync()
