"""An account that was given other credentials meanwhile: what was said of the old ones does not concern them."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from urllib.parse import parse_qs, urlsplit

import pytest

from resilient import ConnectionNotFound, Credentials, GrantState, Resilient, SetupError
from resilient.core.base.errors import Failure, FailureKind, ResilientError
from resilient.engine.accounts import connections as engine_connections
from resilient.engine.accounts import seals
from resilient.store.accounts import grants
from resilient.store.accounts.secrets import new_key
from tests.helpers import LIMIT
from tests.idp import connect, key_of, me
from tests.interleaving import until_somebody_waits
from tests.tenants import KEY
from tests.tenants import refreshing as begun

A, B, C = "idp/acct-1", "idp/acct-2", "idp/acct-3"
REFUSED = Failure(FailureKind.AUTH, code="refused", status=401)


async def test_a_refusal_of_an_old_key_kills_no_grant_that_is_shared_since(make, idp):
    """Both grants are in their first version."""
    app = make()
    await app.connections.add(A, token="canary-old")
    await app.connections.add(B, token="canary-good")
    used = await app.credentials(A)
    await app.connections.add(A, grant_of=B)
    await app.grants.refused(A, used, REFUSED)
    assert (await app.connections.get(A)).state is GrantState.ACTIVE
    assert (await app.credentials(B)).token == "canary-good"


async def test_a_refusal_of_an_old_token_refreshes_no_grant_that_is_shared_since(make, idp):
    app = make()
    await connect(app, idp, A)
    await connect(app, idp, B)
    used = await app.credentials(A)
    await app.connections.add(A, grant_of=B)
    assert await app.grants.renew(A, used)  # there are other credentials: the request is repeated with them
    assert not idp.asked


async def test_a_token_that_was_refused_does_not_condemn_one_of_another_grant(make, idp):
    app = make()
    await connect(app, idp, A)
    await connect(app, idp, B)
    used = await app.credentials(A)
    idp.script = ["down"]
    assert not await app.grants.renew(A, used)
    await app.connections.add(A, grant_of=B)
    assert (await app.credentials(A)).token == "canary-access-2"
    assert len(idp.asked) == 1


# -- disconnecting ---------------------------------------------------------------------------------------------------


async def test_the_key_of_a_service_account_is_never_sent_to_be_revoked(make, idp):
    app = make(idp.provider(flows=("jwt_bearer",), revoke_url=f"{idp.url}/revoke"))
    await app.connections.add(A, private_key=key_of(idp), issuer="robot@idp")
    await app.credentials(A)
    assert await app.connections.disconnect(A)
    assert [form["token"] for form in idp.revoked] == ["canary-access-1"]
    await app.connections.add(B, private_key=key_of(idp), issuer="robot@idp")
    assert not await app.connections.disconnect(B)  # it never had a token: there is nothing to revoke
    assert len(idp.revoked) == 1


async def test_what_is_revoked_at_the_provider_is_the_latest_token(make, idp, monkeypatch):
    """A refresh ends between the look at an account and the deletion of its credentials."""
    app = make(idp.provider(revoke_url=f"{idp.url}/revoke"))
    id_ = (await connect(app, idp)).grant_id
    begun = await app.database.transaction(grants.begin, id_, 1, 60.0, refused=False)
    require = seals.require

    def after_a_refresh(ring, bound, credentials):
        require(ring, bound, credentials)
        fresh = app.grants.accounts.encrypt(id_, replace(credentials, refresh_token="canary-newer"))
        assert app.database.transaction_sync(grants.renew_if_held, begun.grant, fresh)

    monkeypatch.setattr(seals, "require", after_a_refresh)
    assert await app.connections.disconnect(A)
    assert [form["token"] for form in idp.revoked] == ["canary-newer"]


@contextlib.asynccontextmanager
async def refreshing(app, idp):
    """The provider has got a refresh of the account and answers it at the end of the block; then it has come."""
    await connect(app, idp, expired=True)
    task = await begun(app, idp, A)
    yield
    idp.hold.set()
    with contextlib.suppress(ResilientError):
        await task


async def test_what_a_refresh_brings_to_an_account_that_was_disconnected_meanwhile_is_revoked(make, idp):
    app = make(idp.provider(revoke_url=f"{idp.url}/revoke"))
    async with refreshing(app, idp):
        assert await app.connections.disconnect(A)
        assert [form["token"] for form in idp.revoked] == ["canary-refresh-1"]
    assert [form["token"] for form in idp.revoked] == ["canary-refresh-1", "canary-refresh-2"]
    assert (await app.connections.get(A)).state is GrantState.REVOKED


async def test_what_a_refresh_brings_to_an_account_that_is_gone_is_revoked(make, idp):
    app = make(idp.provider(revoke_url=f"{idp.url}/revoke"))
    async with refreshing(app, idp):
        await app.accounts.erase(A)
    assert [form["token"] for form in idp.revoked] == ["canary-refresh-2"]


async def test_whoever_looks_at_the_account_meanwhile_the_token_is_revoked(make, idp):
    app = make(idp.provider(revoke_url=f"{idp.url}/revoke"))
    async with refreshing(app, idp):
        await app.accounts.erase(A)
        with pytest.raises(ConnectionNotFound):
            await app.credentials(A)
    assert [form["token"] for form in idp.revoked] == ["canary-refresh-2"]


@pytest.mark.parametrize("shares", [False, True])
async def test_what_a_refresh_brings_is_not_revoked_once_the_account_has_other_credentials(make, idp, shares):
    """The grant that was refreshed is gone: its account was erased and connected anew, or shares another's."""
    app = make(idp.provider(revoke_url=f"{idp.url}/revoke"))
    await connect(app, idp, B)
    async with refreshing(app, idp):
        if shares:
            await app.connections.add(A, grant_of=B)
        else:
            await app.accounts.erase(A)
            await connect(app, idp, A)
    assert idp.revoked == []
    assert (await app.connections.get(A)).state is GrantState.ACTIVE


async def test_a_provider_that_says_nothing_about_a_revocation_has_done_it(make, idp):
    async def nothing(_headers, send):
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    idp.api = nothing
    app = make(idp.provider(revoke_url=f"{idp.url}/revocations"))
    await connect(app, idp)
    assert await app.connections.disconnect(A)


async def test_that_it_cannot_be_revoked_is_said_and_hurts_nobody(make, idp, caplog):
    app = make(idp.provider(revoke_url="http://127.0.0.1:1/revoke"))
    async with refreshing(app, idp):
        assert not await app.connections.disconnect(A)
    assert "the token that came could not be revoked" in caplog.text
    assert "canary" not in caplog.text


@pytest.mark.parametrize("then", ["connected anew", "the token stays the same"])
async def test_what_a_refresh_brings_is_not_revoked_where_that_could_end_other_tokens(make, idp, then):
    app = make(idp.provider(revoke_url=f"{idp.url}/revoke"))
    idp.rotation = "single_use" if then == "connected anew" else "none"
    async with refreshing(app, idp):
        await app.connections.revoke(A)
        if then == "connected anew":
            await connect(app, idp)
    assert idp.revoked == []


# -- connecting ------------------------------------------------------------------------------------------------------


class Table:
    """An app's own table of tokens."""

    def __init__(self, credentials=None):
        self.credentials = credentials

    async def load(self, _key):
        return self.credentials

    async def save(self, _key, expected_version, credentials):
        if expected_version != (0 if self.credentials is None else self.credentials.version):
            return False
        self.credentials = credentials
        return True


async def consent(app, **details):
    url = await app.connections.authorize_url(A, details=details)
    state = parse_qs(urlsplit(url).query)["state"][0]
    return await app.connections.complete({"state": state, "code": "canary-code"})


async def test_details_of_a_consent_are_kept_beside_the_apps_own_table(make, idp):
    """The address of the account is made of them."""
    provider = replace(idp.provider(), base_url=f"{idp.url}/{{shop}}")
    app = make(provider, credentials=Table())
    await consent(app, shop="mine")
    assert (await app.credentials(A)).base_url == f"{idp.url}/mine"
    await consent(app)
    assert (await app.credentials(A)).base_url == f"{idp.url}/mine"


async def test_new_keys_sign_what_stands_beside_the_apps_own_table(make, idp):
    provider, table, new = replace(idp.provider(), base_url=f"{idp.url}/{{shop}}"), Table(), new_key()
    await consent(make(provider, credentials=table), shop="mine")
    assert await make(provider, credentials=table, secrets=[new, KEY]).connections.rotate_secrets() == 0
    after = make(provider, credentials=table, secrets=[new])
    assert (await after.credentials(A)).base_url == f"{idp.url}/mine"


async def test_a_consent_into_the_apps_own_table_leaves_no_old_grant(make, idp, read_all):
    await connect(make(), idp)
    app = make(credentials=Table())
    await consent(app)
    (left,) = read_all("SELECT secrets FROM {grant}")
    assert left["secrets"] is None


async def test_a_token_of_the_apps_own_table_is_refreshed_once_it_can_be(make, idp):
    """The account was first used when its row had no refresh token."""
    access, refresh = idp.issue()
    table = Table(Credentials(token=access))
    app = make(credentials=table)
    assert (await app.credentials(A)).token == access
    table.credentials = Credentials(token=access, refresh_token=refresh, version=2)
    idp.expire()
    await app.connections.restored(A)
    await app.enqueue(me, resource_key=A)
    await app.worker().drain(timeout=LIMIT)
    assert [job.state.value for job in await app.jobs.list()] == ["succeeded"]
    assert table.credentials.version == 3


async def test_a_bare_token_of_the_apps_own_table_is_sent_where_only_oauth_is_known(make, idp):
    access, _ = idp.issue()
    provider = idp.provider()
    app = make(replace(provider, auth=(provider.oauth,)), credentials=Table(Credentials(token=access)))
    assert (await app.credentials(A)).headers == {"Authorization": f"Bearer {access}"}


async def test_without_a_table_of_the_apps_nothing_is_restored_and_nothing_deleted(make, idp):
    app = make()
    await connect(app, idp)
    with pytest.raises(SetupError, match="credentials="):
        await app.connections.restored(A)
    assert (await app.credentials(A)).token == "canary-access-1"


@pytest.mark.parametrize("words", [{"token": "canary-new"}, {"grant_of": B}])
def test_an_account_whose_grant_goes_while_it_is_connected_is_connected_in_the_end(postgres_url, idp, words):
    """The grant it is about was found, and is deleted before it is locked: the last account that used it left it."""
    app = Resilient(postgres_url, handlers=[me], providers=[idp.provider()], secrets=[KEY])
    add = app.sync.connections.add
    for key in (A, B, C):
        add(key, token=f"canary-{key}")
    database, moving = app.database, A if "token" in words else B
    with database.sync_engine.begin() as c:
        engine_connections._share(c, database.dialect, moving, C, {}, app.grants)
        adding = threading.Thread(target=lambda: add(A, **words), daemon=True)
        adding.start()
        until_somebody_waits(database, adding)
    adding.join(LIMIT)
    expected = "canary-new" if "token" in words else f"canary-{C}"
    assert app.sync.credentials(A).token == expected
    assert add(A, token="canary-again").state is GrantState.ACTIVE
    app.sync.close()
    database.close_sync()


async def test_new_keys_leave_what_no_key_opens_and_reach_what_is_behind_it(make, idp, caplog):
    app, new = make(), new_key()
    for key in (A, B, C):
        await connect(make(secrets=[new_key()]) if key == B else app, idp, key)
    both = make(secrets=[new, KEY])
    assert await both.connections.rotate_secrets() == 2
    assert "1 grant" in caplog.text
    after = make(secrets=[new])
    assert [(await after.credentials(key)).token for key in (A, C)] == ["canary-access-1", "canary-access-3"]
