"""An account that is erased while a person comes back from its consent page stays erased."""

from __future__ import annotations

from urllib.parse import parse_qs, urlsplit

import pytest

from resilient import ConnectionNotFound, ConsentRefused, Credentials
from tests.idp import connect

KEY, OTHER = "idp/acct-1", "idp/acct-2"


class Table:
    """The app's own table of credentials."""

    def __init__(self):
        self.rows = {}

    async def load(self, key):
        return self.rows.get(key)

    async def save(self, key, version, new):
        self.rows[key] = Credentials(
            token=new.token, refresh_token=new.refresh_token, expires_at=new.expires_at, version=version + 1
        )
        return True


async def returns(app, monkeypatch, meanwhile, key=KEY):
    """Somebody comes back from a consent page, and something happens while the code is exchanged."""
    url = await app.connections.authorize_url(key)
    exchange = app.connections.consent._exchange

    async def exchanged(*args):
        answer = await exchange(*args)
        await meanwhile()
        return answer

    monkeypatch.setattr(app.connections.consent, "_exchange", exchanged)
    state = parse_qs(urlsplit(url).query)["state"][0]
    return await app.connections.complete({"state": state, "code": "canary-code"})


@pytest.mark.parametrize("was_connected", [True, False])
@pytest.mark.parametrize("own", [True, False])
async def test_who_comes_back_meanwhile_connects_it_no_more(make, idp, monkeypatch, read_all, own, was_connected):
    table = Table()
    provider = idp.provider(revoke_url=f"{idp.url}/revoke")
    app = make(provider, credentials=table) if own else make(provider)
    if was_connected and not own:
        await connect(app, idp, KEY)

    with pytest.raises(ConsentRefused, match="was erased meanwhile: start again"):
        await returns(app, monkeypatch, lambda: app.accounts.erase(KEY))
    with pytest.raises(ConnectionNotFound):
        await app.connections.get(KEY)
    assert table.rows == {}
    assert [row async for row in app.accounts.export(KEY) if row["table"] != "audit"] == []
    assert [form["token"] for form in idp.revoked] == [f"canary-refresh-{2 if was_connected and not own else 1}"]
    assert read_all("SELECT id FROM {grant}") == []


async def test_what_came_too_late_is_not_revoked_beside_newer_credentials(make, idp, monkeypatch):
    app = make(idp.provider(revoke_url=f"{idp.url}/revoke"))

    async def erased_and_connected():
        await app.accounts.erase(KEY)
        await connect(app, idp, KEY)

    with pytest.raises(ConsentRefused, match="erased meanwhile"):
        await returns(app, monkeypatch, erased_and_connected)
    assert (await app.connections.get(KEY)).state == "active"
    assert idp.revoked == []


async def test_the_erasure_of_another_account_changes_nothing(make, idp, monkeypatch, read_all):
    app = make()
    info = await returns(app, monkeypatch, lambda: app.accounts.erase(OTHER))
    assert (info.resource_key, info.state) == (KEY, "active")
    assert read_all("SELECT id FROM {authorization}") == []
