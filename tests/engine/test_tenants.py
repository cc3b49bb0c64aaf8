"""What a customer types into a placeholder: no secret for a stranger, no door into our network."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from urllib.parse import parse_qs, urlsplit

import pytest

from resilient import (
    ApiKey,
    Bearer,
    ConsentRefused,
    InvalidInput,
    Job,
    OAuth2,
    Provider,
    Resilient,
    ResourceStopped,
    SyncJob,
    handler,
)
from resilient.store.accounts.secrets import new_key

KEY = new_key()


@handler("me")
async def me(job: Job[None]) -> int:
    return (await job.client.get("/me")).status_code


@handler("plain")
def plain(job: SyncJob[None]) -> int:
    return job.client.get("/me").status_code


@handler("call")
async def call(job: Job[None]) -> None:
    async with job.call("GET", "/me") as asked:
        asked.report(200)


@pytest.fixture
async def make(database_url):
    made = []

    def make_(*providers):
        app = Resilient(database_url, handlers=[me, plain, call], providers=providers, secrets=[KEY])
        made.append(app)
        return app

    yield make_
    for app in made:
        await app.close()


def mastodon(**facts):
    """Each account names its server."""
    oauth = OAuth2(
        authorize_url="{instance}/authorize", token_url="{instance}/token", client_id="app",
        client_secret="canary-secret", redirect_uri="http://127.0.0.1:1/callback",
    )  # fmt: skip
    return Provider(**{"name": "idp", "base_url": "{instance}/api", "auth": (oauth, Bearer()), **facts})


LOCAL = ("127.0.0.1",)


def ended():
    return datetime.now(UTC) - timedelta(seconds=5)


# -- hosts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("private", [(), ("*",), ("127.0.0.1",)])
@pytest.mark.parametrize("hosts", [("*.mastodon.example",), ("https://good.example",)])
async def test_no_secret_goes_to_a_host_that_the_provider_does_not_declare(make, stranger, hosts, private):
    """That a host may be private does not make it one of the provider's."""
    app = make(mastodon(hosts=hosts, private_hosts=private))
    evil = {"instance": stranger.url}
    with pytest.raises(InvalidInput, match="not among the hosts"):
        await app.connections.authorize_url("idp/a", details=evil)
    with pytest.raises(InvalidInput, match="not among the hosts"):
        await app.connections.import_("idp/a", refresh_token="canary", expires_at=ended(), details=evil)
    with pytest.raises(InvalidInput, match="not among the hosts"):
        await app.connections.add("idp/a", token="canary", details=evil)
    assert not stranger.asked


@pytest.mark.parametrize(
    "place",
    [
        "http://127.0.0.1:9", "https://127.0.0.1:9", "https://169.254.169.254", "https://10.0.0.7", "https://[::1]",
        "http://mastodon.example", "https://localhost", "https://metadata.google.internal", "https://intranet",
    ],
)  # fmt: skip
async def test_an_accounts_own_host_is_public_and_speaks_https(make, place):
    app = make(mastodon())
    for adding in (
        app.connections.add("idp/a", token="canary", details={"instance": place}),
        app.connections.authorize_url("idp/a", details={"instance": place}),
    ):
        with pytest.raises(InvalidInput, match=r"private_hosts|must be https"):
            await adding


@pytest.mark.parametrize("kind", [me, plain, call])
async def test_a_name_that_leads_home_is_not_connected_to(make, idp, monkeypatch, kind):
    """Its DNS says so only when it is asked; a redirect and a page's link would lead there, too."""
    import socket

    port = int(idp.url.rpartition(":")[2])
    real = socket.getaddrinfo

    def lies(host, *args, **words):
        return real("127.0.0.1" if host == "evil.example.com" else host, *args, **words)

    monkeypatch.setattr(socket, "getaddrinfo", lies)
    app = make(mastodon())
    await app.connections.add("idp/a", token="canary", details={"instance": f"https://evil.example.com:{port}"})
    job = await app.enqueue(kind, resource_key="idp/a")
    await app.worker().drain()
    found = await app.jobs.get(job.id)
    assert found.state.value == "dead"
    assert "not a public address" in found.last_error
    assert not idp.calls
    await app.connections.import_(
        "idp/b", refresh_token="canary", expires_at=ended(),
        details={"instance": f"https://evil.example.com:{port}"},
    )  # fmt: skip
    with pytest.raises(ResourceStopped):
        await app.credentials("idp/b")
    assert not idp.asked


@pytest.mark.parametrize("asked", ["code", "refresh", "revoke"])
async def test_a_token_endpoint_that_leads_home_is_not_connected_to(make, monkeypatch, asked):
    """Not even a connection is opened: what listens there may act on one."""
    import socket

    real, home = socket.getaddrinfo, socket.create_server(("127.0.0.1", 0))
    home.settimeout(0)

    def lies(host, *args, **words):
        return real("127.0.0.1" if host == "evil.example.com" else host, *args, **words)

    monkeypatch.setattr(socket, "getaddrinfo", lies)
    oauth = OAuth2(
        authorize_url="{instance}/authorize", token_url="{instance}/token", revoke_url="{instance}/revoke",
        client_id="app", client_secret="canary-secret", redirect_uri="http://127.0.0.1:1/callback",
    )  # fmt: skip
    app = make(mastodon(auth=(oauth, Bearer())))
    details = {"instance": f"https://evil.example.com:{home.getsockname()[1]}"}
    with home:
        if asked == "code":
            url = await app.connections.authorize_url("idp/a", details=details)
            state = parse_qs(urlsplit(url).query)["state"][0]
            with pytest.raises(ConsentRefused, match="address_denied"):
                await app.connections.complete({"state": state, "code": "canary"})
        else:
            await app.connections.import_("idp/a", refresh_token="canary", expires_at=ended(), details=details)
        if asked == "refresh":
            with pytest.raises(ResourceStopped):
                await app.credentials("idp/a")
        elif asked == "revoke":
            assert not await app.connections.disconnect("idp/a")
        with pytest.raises(BlockingIOError):
            home.accept()


async def test_a_network_of_ones_own_is_named(make, idp):
    app = make(mastodon(private_hosts=LOCAL))
    idp.access.add("canary")
    await app.connections.add("idp/a", token="canary", details={"instance": idp.url})
    await app.enqueue(me, resource_key="idp/a")
    await app.worker().drain()
    assert idp.calls == [(200, "Bearer canary")]


# -- token endpoints -----------------------------------------------------------------------------------------


async def test_a_customers_token_endpoint_rests_alone(make, idp, stranger):
    app = make(mastodon(private_hosts=LOCAL))
    idp.secret = stranger.secret = "canary-secret"
    stranger.script = ["throttle"]
    for key, server in (("idp/evil", stranger), ("idp/good", idp)):
        access, refresh = server.issue()
        await app.connections.import_(
            key, access_token=access, refresh_token=refresh, expires_at=ended(), details={"instance": server.url}
        )
    with pytest.raises(ResourceStopped) as stopped:
        await app.credentials("idp/evil")
    assert stopped.value.resource == f"idp:token@{stranger.url.removeprefix('http://')}"
    assert (await app.credentials("idp/good")).version == 2


@pytest.mark.parametrize("said", ["999999999999", "9" * 400, "1e308"])
async def test_a_told_wait_is_believed_for_a_day_at_most(make, idp, monkeypatch, said):
    from tests import idp as server

    answer = server.answer
    monkeypatch.setattr(server, "answer", lambda send, status, doc, **_: answer(send, status, doc, retry_after=said))
    app = make(idp.provider())
    access, refresh = idp.issue()
    await app.connections.import_("idp/a", access_token=access, refresh_token=refresh, expires_at=ended())
    idp.script = ["throttle"]
    with pytest.raises(ResourceStopped):
        await app.credentials("idp/a")
    waits = (await app.connections.get("idp/a")).retry_at
    assert waits is None or waits < datetime.now(UTC) + timedelta(days=1, minutes=1)


async def test_a_grant_waits_for_as_long_as_its_token_endpoint_says(make, idp, monkeypatch):
    from tests import idp as server

    answer = server.answer
    monkeypatch.setattr(server, "answer", lambda send, status, doc, **_: answer(send, status, doc, retry_after="1800"))
    app = make(idp.provider())
    access, refresh = idp.issue()
    await app.connections.import_("idp/a", access_token=access, refresh_token=refresh, expires_at=ended())
    idp.script = ["throttle"]
    with pytest.raises(ResourceStopped):
        await app.credentials("idp/a")
    waits = (await app.connections.get("idp/a")).retry_at
    assert timedelta(minutes=29) < waits - datetime.now(UTC) < timedelta(minutes=31)


# -- accounts ------------------------------------------------------------------------------------------------


async def test_credentials_belong_to_an_account_not_to_the_whole_provider(make, idp):
    app = make(
        idp.provider(), Provider(name="solo", base_url="https://solo.example", auth=(ApiKey(),), single_account=True)
    )
    await app.connections.add("idp/a", token="canary")
    for adding in (
        app.connections.add("idp", token="canary"),
        app.connections.import_("idp", access_token="canary"),
        app.connections.add("idp", grant_of="idp/a"),
        app.connections.authorize_url("idp"),
    ):
        with pytest.raises(InvalidInput, match="belong to one account of it, such as idp/main"):
            await adding
    await app.connections.add("solo", api_key="canary")
    assert (await app.credentials("solo")).token == "canary"


async def test_an_account_without_its_placeholders_is_refused(make):
    app = make(mastodon())
    for adding in (
        app.connections.import_("idp/a", access_token="canary"),
        app.connections.add("idp/a", token="canary"),
    ):
        with pytest.raises(InvalidInput, match=r"details=\{'instance': '...'\}"):
            await adding
    await app.connections.add("idp/a", token="canary", details={"instance": "https://mastodon.example.org"})
    await app.connections.add("idp/a", token="canary-2")  # a new token for a known account


async def test_a_grant_is_shared_within_one_provider(make, idp):
    app = make(idp.provider(), Provider(name="other", base_url="https://other.example", auth=(Bearer(),)))
    await app.connections.add("idp/a", token="canary")
    with pytest.raises(InvalidInput, match="another provider's"):
        await app.connections.add("other/a", grant_of="idp/a")


# -- callbacks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("declared", "said", "good"),
    [
        ("", None, True), ("", "{url}", True), ("", "https://evil.example", False), ("", "nonsense", False),
        ("https://issuer.example", "https://issuer.example", True), ("https://issuer.example", None, False),
        ("https://issuer.example", "https://issuer.example/", False), ("https://issuer.example", "{url}", False),
    ],
)  # fmt: skip
async def test_a_callback_of_another_authorization_server_is_refused(make, idp, declared, said, good):
    """RFC 9207: the code would be sent to a server it does not belong to."""
    app = make(idp.provider(issuer=declared))
    url = await app.connections.authorize_url("idp/a")
    state = parse_qs(urlsplit(url).query)["state"][0]
    callback = {"state": state, "code": "canary-code"}
    if said is not None:
        callback["iss"] = said.format(url=idp.url)
    if good:
        await app.connections.complete(callback)
    else:
        with pytest.raises(ConsentRefused, match="another authorization server"):
            await app.connections.complete(callback)
    assert bool(idp.asked) is good


# -- answers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field",
    ['"expires_in": 1' + "0" * 400, '"expires_in": ' + "9" * 5000, '"expires_in": 1e999', '"x": ' + "7" * 9000,
     '"expires_in": "' + "9" * 400 + '"', '"expires_in": -1' + "0" * 400],
)  # fmt: skip
async def test_no_number_in_an_answer_loses_the_new_refresh_token(make, idp, monkeypatch, field):
    from tests import idp as server

    answer = server.answer

    async def absurd(send, status, doc, **words):
        if "access_token" in doc:
            doc = f'{{"access_token": "{doc["access_token"]}", "refresh_token": "{doc["refresh_token"]}", {field}}}'
        await answer(send, status, doc, **words)

    monkeypatch.setattr(server, "answer", absurd)
    app = make(idp.provider())
    access, refresh = idp.issue()
    await app.connections.import_("idp/a", access_token=access, refresh_token=refresh, expires_at=ended())
    assert (await app.credentials("idp/a")).version == 2
    held = await app.grants.accounts.load_usable("idp/a")
    assert held.credentials.refresh_token == "canary-refresh-2"


async def test_basic_authentication_of_the_client_is_form_encoded(make, idp, serve):
    """RFC 6749, 2.3.1: identifier and secret may hold what HTTP Basic cannot carry."""
    import base64

    seen = []

    async def endpoint(scope, receive, send):
        if scope["type"] == "http":
            seen.append(dict(scope["headers"])[b"authorization"].decode())
            await idp(scope, receive, send)

    idp.knows = lambda _: True
    url = serve(endpoint)
    app = make(idp.provider(client_auth="basic", client_id="a:b c", client_secret="s%/ä+", token_url=f"{url}/token"))
    access, refresh = idp.issue()
    await app.connections.import_("idp/a", access_token=access, refresh_token=refresh, expires_at=ended())
    await app.credentials("idp/a")
    assert base64.b64decode(seen[0].removeprefix("Basic ")).decode() == "a%3Ab+c:s%25%2F%C3%A4%2B"


async def test_changing_keys_leaves_out_no_grant_that_somebody_holds(postgres_url, idp):
    """Whoever takes the old key away next would lose that account."""
    old, new = new_key(), new_key()
    async with Resilient(postgres_url, handlers=[me], providers=[idp.provider()], secrets=[old]) as before:
        for n in range(3):
            await before.connections.add(f"idp/{n}", token="canary")
        held = (await before.connections.get("idp/1")).grant_id
    async with Resilient(postgres_url, handlers=[me], providers=[idp.provider()], secrets=[new, old]) as app:
        with app.database.sync_engine.connect() as other:
            with other.begin():
                app.database.dialect.run(
                    other, "SELECT 1 FROM {grant} WHERE id = :id {row_lock}", {"id": app.database.dialect.id(held)}
                )
                rotating = asyncio.create_task(app.connections.rotate_secrets())
                done, _ = await asyncio.wait({rotating}, timeout=0.5)
                assert not done
            assert await rotating == 3
    async with Resilient(postgres_url, handlers=[me], providers=[idp.provider()], secrets=[new]) as after:
        assert [(await after.credentials(f"idp/{n}")).token for n in range(3)] == ["canary"] * 3
