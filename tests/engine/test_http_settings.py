"""`Resilient(http=...)`: through which proxy requests are sent, and which certificates are trusted, by provider."""

from __future__ import annotations

import contextlib
import json
from urllib.parse import parse_qs, urlsplit

import pytest

from resilient import Job, OAuth2, PoolSettings, Provider, Resilient, Retry, SetupError, SyncJob, handler
from resilient.store.accounts.secrets import new_key
from resilient.store.db.database import Database
from tests.brokers import free_port
from tests.connect_proxy import ConnectProxy
from tests.serving import Certificate, Server

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
    made = Certificate(tmp_path_factory.mktemp("tls"))
    return {"ssl_keyfile": made.key, "ssl_certfile": made.cert}, made.trusting


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


# -- a tunnel, and a proxy that fails ----------------------------------------------------------------------------------


@handler("write", retry=Retry(max_attempts=7, delay=10))
async def write(job: Job[None]) -> None:
    (await job.client.post("/contacts", json={})).raise_for_status()


@handler("write.plainly", retry=Retry(max_attempts=7, delay=10))
def write_plainly(job: SyncJob[None]) -> None:
    job.client.post("/contacts", json={}).raise_for_status()


async def test_https_goes_through_a_tunnel(tmp_path, authority):
    files, trusting = authority
    with Server(answering, **files) as url, ConnectProxy() as proxy:
        crm = provider("crm", url.replace("http:", "https:"))
        http = {"crm": PoolSettings(proxy=proxy.address, verify=trusting)}
        assert (await run(tmp_path, [crm], http))[::2] == (["succeeded"] * 2, 200)
    assert {head.split("\r\n")[0] for head in proxy.heads} == {f"CONNECT {url.removeprefix('http://')} HTTP/1.1"}
    assert "Proxy-Authorization: Basic dXM6aHVzaA==" in proxy.heads[0]
    assert [path for _, path in SEEN] == ["/contacts", "/contacts", "/me"]


async def test_a_certificate_that_nobody_trusts_is_the_providers_fault(tmp_path, authority):
    """And each of its tunnels is closed: the pool has two places, and neither is lost."""
    files, _ = authority
    with Server(answering, **files) as url, ConnectProxy() as proxy:
        crm = provider("crm", url.replace("http:", "https:"))
        http = PoolSettings(proxy=proxy.address, connections=2, wait=0.5)
        async with Resilient(
            f"sqlite:///{tmp_path}/app.db", handlers=[ask, ask_plainly], providers=[crm], http=http
        ) as app:
            jobs = [await app.enqueue(one, resource_key=f"crm/{n}") for n in range(4) for one in (ask, ask_plainly)]
            await app.worker().drain()
            infos = [await app.jobs.get(job.id) for job in jobs]
    assert {(info.state, info.last_error_code) for info in infos} == {("dead", "tls_verification")}


@pytest.fixture
def failing_proxy():
    """``failing_proxy(mode)``: the address of a proxy that fails like this."""
    with contextlib.ExitStack() as stack:

        def address(mode):
            if mode == "away":
                return f"http://us:hush@127.0.0.1:{free_port()}"
            return stack.enter_context(ConnectProxy(mode)).address

        yield address


# A plain request and its answer pass through a proxy: which of the two answered 502 or hung up, nobody can say.
@pytest.mark.parametrize(
    ("scheme", "mode"),
    [*(("https", mode) for mode in ("407", "502", "cut", "mute", "away")), ("http", "407"), ("http", "away")],
)
async def test_what_fails_at_the_proxy_names_it_and_nothing_was_sent(tmp_path, failing_proxy, scheme, mode):
    """No write is in doubt, and no secret in a text."""
    address = failing_proxy(mode)
    http = PoolSettings(proxy=address, connect=0.2, read=0.2, tries=1)
    crm = provider("crm", f"{scheme}://api.crm.example")
    async with Resilient(
        f"sqlite:///{tmp_path}/app.db", handlers=[write, write_plainly], providers=[crm], http=http
    ) as app:
        jobs = [await app.enqueue(one, resource_key="crm/acct-7") for one in (write, write_plainly)]
        await app.worker().drain()
        infos = [await app.jobs.get(job.id) for job in jobs]
        test = await app.resources.test("crm/acct-7")
    place = address.rpartition("@")[2]
    for info in infos:
        assert (info.last_error_kind, info.last_error_code) == ("transient", "proxy_error"), info
        assert f"the proxy http://{place}" in info.last_error
        assert "hush" not in info.last_error
    assert (test.status, test.code) == (None, "proxy_error")


async def test_behind_a_proxy_that_fails_for_an_hour_no_job_dies(tmp_path, authority, clock):
    """The circuit opens as if the provider were away: jobs wait, and run once the proxy lets them through again."""
    files, trusting = authority
    with Server(answering, **files) as url, ConnectProxy("502") as proxy:
        http = PoolSettings(proxy=proxy.address, verify=trusting, tries=1)
        crm = provider("crm", url.replace("http:", "https:"))
        database = Database(f"sqlite:///{tmp_path}/app.db", clock=clock.now)
        async with Resilient(database, handlers=[write], providers=[crm], http=http) as app:
            jobs = [await app.enqueue(write, resource_key="crm/acct-7") for _ in range(20)]

            async def for_minutes(count):
                for _ in range(2 * count):
                    worker = app.worker()
                    await worker.sweeper.stage()
                    await worker.drain()
                    clock.advance(30)

            await for_minutes(60)
            assert {(await app.jobs.get(job.id)).state for job in jobs} <= {"ready", "scheduled"}
            assert len(proxy.heads) < 25, "5 until the circuit opens, then probes"
            proxy.mode = "open"
            await for_minutes(30)
            assert {(await app.jobs.get(job.id)).state for job in jobs} == {"succeeded"}


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
        (PoolSettings(proxy="us:hush@proxy.example:3128"), "takes an address such as http://proxy.example:3128"),
        (PoolSettings(proxy="http://us:hush@[::1"), "takes an address such as http://proxy.example:3128"),
        ({"crm": PoolSettings(proxy="ftp://proxy.example")}, "crm.*takes an address such as http://"),
    ],
)
def test_what_cannot_be_meant(tmp_path, http, words):
    with pytest.raises(SetupError, match=words) as refusal:
        Resilient(f"sqlite:///{tmp_path}/app.db", providers=[provider("crm", "https://crm.example")], http=http)
    assert "hush" not in str(refusal.value)


def test_a_proxys_password_is_shown_to_nobody():
    assert "hush" not in repr(PoolSettings(proxy="http://us:hush@proxy.example"))
