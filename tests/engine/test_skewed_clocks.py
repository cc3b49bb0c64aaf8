"""A host whose clock is wrong, beside a database whose clock counts: a token lasts as long as its provider says."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from urllib.parse import parse_qs, urlsplit

import pytest
from joserfc import jwt

from resilient import GrantState, Resilient
from resilient.engine.ground.ground import Ground
from resilient.store.accounts.secrets import new_key
from tests.idp import key_of, me

A, KEY = "idp/acct-1", new_key()


@pytest.fixture
async def make(postgres_url, idp):
    made = []

    def make_(provider=None):
        app = Resilient(postgres_url, handlers=[me], providers=[provider or idp.provider()], secrets=[KEY])
        made.append(app)
        return app

    yield make_
    for app in made:
        await app.close()


@pytest.fixture(params=[-2, 2], ids=["behind", "ahead"])
def wrong(request, monkeypatch):
    """This host's clock, so many hours from the database's."""
    off = timedelta(hours=request.param)
    monkeypatch.setattr(Ground, "now", lambda _: datetime.now(UTC) + off)
    return off


async def test_a_consent_that_a_host_with_a_wrong_clock_takes(make, idp, wrong):
    """Else its customer would be asked to connect it again at once, and so on for ever."""
    idp.script = ["bare"]  # no refresh token
    app = make()
    url = await app.connections.authorize_url(A)
    asked = {k: v[0] for k, v in parse_qs(urlsplit(url).query).items()}
    info = await app.connections.complete({"state": asked["state"], "code": "canary-code"})
    left = (info.expires_at - datetime.now(UTC)).total_seconds()
    assert abs(left - 3600) < 60
    await app.enqueue(me, resource_key=A)
    await app.worker().drain()
    assert [job.state.value for job in await app.jobs.list()] == ["succeeded"]
    assert (await app.connections.get(A)).state is GrantState.ACTIVE


async def test_what_proves_the_application_counts_from_the_databases_clock(make, idp, wrong):
    """Else the provider takes neither the code of a consent nor a revocation: it is over, or not valid yet."""
    pem = key_of(idp)
    facts = {"client_secret": pem, "client_auth": "jwt", "revoke_url": f"{idp.url}/revoke"}
    app = make(idp.provider(**facts))
    url = await app.connections.authorize_url(A)
    (state,) = parse_qs(urlsplit(url).query)["state"]
    await app.connections.complete({"state": state, "code": "canary-code"})
    assert await app.connections.disconnect(A)
    claims = [*idp.claims, jwt.decode(idp.revoked[-1]["client_assertion"], idp.public, algorithms=["ES256"])]
    now = datetime.now(UTC).timestamp()
    assert [abs(one.claims["iat"] - now) < 60 for one in claims] == [True, True]
