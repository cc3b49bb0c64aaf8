"""`Resilient(http=...)`: through which proxy requests are sent, and which certificates are trusted, by provider."""

from __future__ import annotations

import json
import ssl
import subprocess
from urllib.parse import parse_qs, urlsplit

import pytest

from resilient import Job, OAuth2, PoolSettings, Provider, Resilient, SetupError, SyncJob, handler
from resilient.store.accounts.secrets import new_key
from tests.serving import Server

SEEN: list[tuple[str, str]] = []


async def answering(scope, receive, send):
    """What a proxy is asked for, and a token where one is asked for."""
    host = dict(scope["headers"]).get(b"host", b"").decode()
    SEEN.append((host, scope["path"]))
    tokens = {"access_token": "token-of-acct-7", "refresh_token": "next-of-acct-7", "expires_in": 3600}
    body = json.dumps(tokens if scope["path"].endswith("/token") else {}).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": body})


@handler("ask")
async def ask(job: Job[None]) -> None:
    (await job.client.get("/contacts")).raise_for_status()


@handler("ask.plainly")
def ask_plainly(job: SyncJob[None]) -> None:
    job.client.get("/contacts").raise_for_status()


def provider(name, url, **facts):
    return Provider(name=name, base_url=url, whoami="GET /me", anonymous=True, **facts)


@pytest.fixture(autouse=True)
def _fresh():
    SEEN.clear()


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    """A certificate for 127.0.0.1 that nobody else trusts: its files, and a context that trusts it."""
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-days", "1",
         "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    return {"ssl_keyfile": key, "ssl_certfile": cert}, ssl.create_default_context(cafile=str(cert))


async def run(tmp_path, providers, http, name="app"):
    """Both handlers, and a request to test the account: what became of them."""
    async with Resilient(
        f"sqlite:///{tmp_path}/{name}.db", handlers=[ask, ask_plainly], providers=providers, http=http
    ) as app:
        jobs = [await app.enqueue(one, resource_key="crm/acct-7") for one in (ask, ask_plainly)]
        await app.worker().drain()
        test = await app.resources.test("crm/acct-7")
        infos = [await app.jobs.get(job.id) for job in jobs]
        return [info.state for info in infos], [info.last_error for info in infos], test.status


@pytest.mark.parametrize("by", ["crm", "*", None], ids=["its own", "of all others", "of all"])
async def test_requests_go_through_the_proxy_of_their_provider(tmp_path, by):
    with Server(answering) as proxy:
        settings = PoolSettings(proxy=proxy)
        http = settings if by is None else {by: settings}
        crm = provider("crm", "http://api.crm.example")
        assert (await run(tmp_path, [crm], http))[::2] == (["succeeded"] * 2, 200)
    assert [host for host, _ in SEEN] == ["api.crm.example"] * 3


async def test_a_provider_of_its_own_settings_has_none_of_the_others(tmp_path):
    with Server(answering) as proxy, Server(answering) as there:
        http = {"*": PoolSettings(proxy=proxy), "crm": PoolSettings()}
        assert (await run(tmp_path, [provider("crm", there)], http))[::2] == (["succeeded"] * 2, 200)
    assert {host for host, _ in SEEN} == {there.removeprefix("http://")}


async def test_a_certificate_of_ones_own_authority(tmp_path, authority):
    files, trusting = authority
    with Server(answering, **files) as url:
        crm = provider("crm", url.replace("http:", "https:"))
        states, errors, status = await run(tmp_path, [crm], None, "without")
        assert (states, status) == (["dead"] * 2, None)
        assert ["certificate" in str(error).lower() for error in errors] == [True] * 2, errors
        http = {"crm": PoolSettings(verify=trusting)}
        assert (await run(tmp_path, [crm], http))[::2] == (["succeeded"] * 2, 200)


@pytest.mark.parametrize("way", ["tls", "proxy"])
async def test_tokens_are_asked_for_in_the_same_way(tmp_path, authority, way):
    files, trusting = authority
    with Server(answering, **(files if way == "tls" else {})) as url:
        home, settings = url.replace("http:", "https:"), PoolSettings(verify=trusting)
        if way == "proxy":
            home, settings = "http://127.0.0.1:9", PoolSettings(proxy=url)  # where nobody answers
        oauth = OAuth2(authorize_url=f"{home}/authorize", token_url=f"{home}/token", client_id="us", pkce="none")
        crm = Provider(name="crm", base_url=home, auth=(oauth,))
        key, http = new_key(), {"crm": settings}
        async with Resilient(
            f"sqlite:///{tmp_path}/app.db", handlers=[ask], providers=[crm], secrets=[key], http=http
        ) as app:
            page = await app.connections.authorize_url("crm/acct-7", redirect_uri="https://shop.example/callback")
            await app.connections.complete({"state": state_of(page), "code": "c"})
            page = app.sync.connections.authorize_url("crm/acct-7", redirect_uri="https://shop.example/callback")
            app.sync.connections.complete({"state": state_of(page), "code": "c"})
            await app.grants.test("crm/acct-7")
            await app.enqueue(ask, resource_key="crm/acct-7")
            assert await app.worker().drain() == 1
    assert [path.rpartition("/")[2] for _, path in SEEN] == ["token", "token", "token", "contacts"]


def state_of(url):
    return parse_qs(urlsplit(url).query)["state"][0]


@pytest.mark.parametrize(
    ("http", "words"),
    [
        ({"crn": PoolSettings()}, "no provider has this name; did you mean 'crm'"),
        ({"crm": "http://proxy"}, "takes PoolSettings"),
        ("http://proxy", "takes PoolSettings"),
    ],
)
def test_what_cannot_be_meant(tmp_path, http, words):
    with pytest.raises(SetupError, match=words):
        Resilient(f"sqlite:///{tmp_path}/app.db", providers=[provider("crm", "https://crm.example")], http=http)


def test_a_proxys_password_is_shown_to_nobody():
    assert "hush" not in repr(PoolSettings(proxy="http://us:hush@proxy.example"))
