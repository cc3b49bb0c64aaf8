"""Connecting accounts through mounted routes: a real app server, a real OAuth server, and people who cheat."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from urllib.parse import parse_qs, urlsplit

import fastapi
import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.routing import Mount, Route

from resilient import DatabaseUnreachable, GrantState, InvalidInput, Resilient, SetupError, Shards, web
from resilient.store.accounts.secrets import new_key
from tests.idp import me
from tests.serving import serving

KEY = new_key()


@pytest.fixture
async def app(database_url, idp):
    app = Resilient(database_url, handlers=[me], providers=[idp.provider(redirect_uri="")], secrets=[KEY])
    await app.ready()
    yield app
    await app.close()


def caller(request):
    who = request.cookies.get("user")
    return RedirectResponse("/login") if who == "lost" else who


async def account(who, provider, request):
    return None if who == "guest" else f"{provider}/{who}"


def routes(app, base_url, **options):
    options = {
        "caller": caller,
        "account": account,
        "returns": ["/settings", "https://spa.example/done?a=1"],
        **options,
    }
    return web.connect_routes(app, base_url=base_url, **options)


def starlette(connect):
    settings = Route("/settings", lambda _: PlainTextResponse("settings"))
    return Starlette(routes=[Mount("/connect", app=connect), settings])


def fast(connect):
    api = fastapi.FastAPI()
    api.mount("/connect", connect)

    @api.get("/settings", response_class=fastapi.responses.PlainTextResponse)
    def settings():
        return "settings"

    return api


class Site:
    """A server with the routes, in this loop, and browsers."""

    def __init__(self, app, make=starlette, **options):
        self.app, self.make, self.options = app, make, options
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self):
        async def late(scope, receive, send):
            await self.served(scope, receive, send)

        self.url = await self._stack.enter_async_context(serving(late))
        self.base = f"{self.url}/connect"
        self.served = self.make(routes(self.app, self.options.pop("base_url", self.base), **self.options))
        return self

    async def __aexit__(self, *_):
        await self._stack.aclose()

    async def browser(self, user="ann"):
        client = httpx.AsyncClient(base_url=self.url, cookies={"user": user}, trust_env=False, timeout=30)
        return await self._stack.enter_async_context(client)


@pytest.fixture
async def site(app):
    async with Site(app) as made:
        yield made


async def begin(browser, **query):
    """To the provider and back, but not into the callback: its address."""
    sent = await browser.get("/connect/idp/start", params=query)
    assert sent.status_code == 303, sent.text
    async with httpx.AsyncClient(trust_env=False) as client:
        return (await client.get(sent.headers["location"])).headers["location"]


@pytest.mark.parametrize("make", [starlette, fast])
async def test_there_and_back(app, idp, make):
    async with Site(app, make) as site:
        ann = await site.browser()
        sent = await ann.get("/connect/idp/start")
        asked = parse_qs(urlsplit(sent.headers["location"]).query)
        assert asked["redirect_uri"] == [f"{site.base}/idp/callback"]
        assert asked["code_challenge_method"] == ["S256"]
        assert sent.headers["referrer-policy"] == "no-referrer"
        cookie = sent.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=lax" in cookie
        done = await ann.get("/connect/idp/start", follow_redirects=True)
        assert (done.status_code, done.text) == (200, "settings")
        assert str(done.url) == f"{site.url}/settings?connected=idp"
    assert (await app.connections.get("idp/ann")).state is GrantState.ACTIVE
    assert (await app.credentials("idp/ann")).token


async def test_an_account_whose_grant_died_goes_on_by_itself(app, idp, site):
    ann = await site.browser()
    await ann.get("/connect/idp/start", follow_redirects=True)
    idp.refresh.clear()
    idp.access.clear()
    await app.enqueue(me, resource_key="idp/ann")
    await app.worker().drain()
    assert (await app.connections.get("idp/ann")).state is GrantState.NEEDS_REAUTH
    (told,) = await app.alerts.list()
    assert (told.name, told.subject) == ("needs_reauth", "idp/ann")
    assert [job.state.value for job in await app.jobs.list()] == ["ready"]
    await ann.get("/connect/idp/start", follow_redirects=True)
    await app.worker().drain()
    (job,) = await app.jobs.list()
    assert (job.state.value, job.attempts) == ("succeeded", 0)


async def test_a_callback_works_once(app, site, idp):
    ann = await site.browser()
    back = await begin(ann)
    assert (await ann.get(back)).status_code == 303
    again = await ann.get(back)
    assert (again.status_code, "not expected" in again.text) == (400, True)
    assert len(idp.asked) == 1


async def test_where_to_come_back_is_on_the_list(site):
    ann = await site.browser()
    assert (await ann.get(await begin(ann))).headers["location"] == "/settings?connected=idp"
    there = await begin(ann, next="https://spa.example/done?a=1")
    assert (await ann.get(there)).headers["location"] == "https://spa.example/done?a=1&connected=idp"
    for to in ("https://evil.example", "//evil.example", "/\\evil.example", "/settings/..", "settings", "/settings?x"):
        refused = await ann.get("/connect/idp/start", params={"next": to})
        assert (refused.status_code, "location" in refused.headers) == (400, False)


async def test_a_victims_consent_does_not_connect_to_an_attackers_account(app, site, idp):
    """Mallory begins and sends the provider's link to Ann, who consents."""
    mallory, ann = await site.browser("mallory"), await site.browser()
    await ann.get("/connect/idp/start")  # she has a cookie of ours, too
    refused = await ann.get(await begin(mallory))
    assert (refused.status_code, "another browser" in refused.text) == (400, True)
    assert not idp.asked
    assert await app.connections.list() == []


async def test_an_attackers_consent_does_not_connect_to_a_victims_account(app, site, idp):
    """Mallory ends his own way before the callback and has Ann's browser call it."""
    mallory, ann = await site.browser("mallory"), await site.browser()
    back = await begin(mallory)
    assert (await ann.get(back)).status_code == 400
    assert not idp.asked


@pytest.mark.parametrize("missing", ["cookie", "user"])
async def test_the_same_browser_and_the_same_user(site, idp, missing):
    ann = await site.browser()
    back = await begin(ann)
    if missing == "cookie":
        ann.cookies.delete("resilient-connect")
    else:
        ann.cookies.set("user", "bob")
    assert (await ann.get(back)).status_code == 400
    assert not idp.asked


async def test_a_forged_state_costs_no_look_into_the_database(app, site, monkeypatch):
    seen = []
    monkeypatch.setattr(app.connections._db, "write", lambda *looked: seen.append(looked))
    ann = await site.browser()
    for state in ("", "made-up", "a.b.c", "x" * 5000, f"{'a' * 43}.{app.grants.accounts.ring.current}.forged"):
        assert (await ann.get("/connect/idp/callback", params={"state": state, "code": "x"})).status_code == 400
    assert not seen


async def test_another_site_cannot_begin(site):
    ann = await site.browser()
    for whence, status in (("cross-site", 403), ("same-origin", 303), ("same-site", 303), ("none", 303)):
        assert (await ann.get("/connect/idp/start", headers={"Sec-Fetch-Site": whence})).status_code == status


async def test_strangers_guests_and_unknown_providers(site):
    nobody, guest, lost = [await site.browser(user) for user in ("", "guest", "lost")]
    assert (await nobody.get("/connect/idp/start")).status_code == 401
    assert (await nobody.get("/connect/idp/callback")).status_code == 401
    assert (await guest.get("/connect/idp/start")).status_code == 403
    assert (await lost.get("/connect/idp/start")).headers["location"] == "/login"
    assert (await (await site.browser()).get("/connect/none/start")).status_code == 404
    assert (await (await site.browser()).post("/connect/idp/start")).status_code == 405


async def test_consent_refused_and_no_token_are_plain_pages_without_secrets(site, idp, caplog):
    ann = await site.browser()
    idp.refuses = True
    refused = await ann.get(await begin(ann))
    assert (refused.status_code, "access_denied" in refused.text) == (400, True)
    idp.refuses, idp.script = False, ["html"]
    failed = await ann.get(await begin(ann))
    assert (failed.status_code, "gave no token" in failed.text) == (400, True)
    odd = await ann.get("/connect/idp/callback", params={"state": "<script>", "error": "<script>"})
    for answer in (refused, failed, odd):
        assert "canary" not in answer.text
        assert "<script" not in answer.text
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    assert "canary" not in caplog.text


async def test_an_account_of_another_provider_is_the_programs_fault(app, caplog):
    async with Site(app, account=lambda *_: "other/ann") as site:
        answer = await (await site.browser()).get("/connect/idp/start")
    assert (answer.status_code, "other" in answer.text) == (500, False)
    assert "InvalidInput" in caplog.text


async def test_behind_https_the_cookie_is_bound_to_this_host_alone(app):
    async with Site(app, base_url="https://shop.example/connect") as site:
        sent = await (await site.browser()).get("/connect/idp/start", headers={"Host": "evil.example"})
    assert "redirect_uri=https%3A%2F%2Fshop.example%2Fconnect%2Fidp%2Fcallback" in sent.headers["location"]
    cookie = sent.headers["set-cookie"]
    assert cookie.startswith("__Host-resilient-connect=")
    assert "Secure" in cookie
    assert "Path=/" in cookie
    assert "Domain" not in cookie


async def test_what_cannot_be_mounted(app, idp, database_url):
    for to in ("", "settings", "//evil.example", "/\\evil", "javascript:alert(1)", "/a b", "https://"):
        with pytest.raises(InvalidInput, match="page to come back to"):
            routes(app, "https://shop.example/connect", returns=[to])
    with pytest.raises(InvalidInput, match="page to come back to"):
        routes(app, "https://shop.example/connect", returns=[])
    with pytest.raises(InvalidInput):
        routes(app, "shop.example")
    other = Resilient(database_url, providers=[idp.provider()], secrets=[KEY])
    with pytest.raises(SetupError, match="leave redirect_uri out"):
        routes(other, "https://shop.example/connect")
    await other.close()


async def test_bound_to_and_the_synchronous_twin(app, idp):
    def there(bound_to):
        url = app.sync.connections.authorize_url(
            "idp/ann", redirect_uri="http://127.0.0.1:1/cb", bound_to="ann's session"
        )
        back = httpx.get(url, trust_env=False).headers["location"]
        parameters = {name: values[0] for name, values in parse_qs(urlsplit(back).query).items()}
        return app.sync.connections.complete(parameters, bound_to=bound_to)

    made = await asyncio.to_thread(there, "ann's session")
    assert (made.resource_key, made.state) == ("idp/ann", GrantState.ACTIVE)
    with pytest.raises(Exception, match="another browser"):
        await asyncio.to_thread(there, "mallory's")
    assert not await asyncio.to_thread(app.sync.connections.disconnect, "idp/ann")


def test_without_the_extra_it_says_so():
    program = (
        "import sys\n"
        "sys.modules['starlette'] = None\n"
        "import resilient\n"
        "try:\n    import resilient.web\n"
        "except resilient.MissingExtra as error:\n    print(error)\n"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "resilient-engine[web]" in said.stdout, said.stderr


# -- several databases -------------------------------------------------------------------------------------------------


async def test_an_account_is_connected_in_its_shard(empty_urls, idp):
    """One mount for all: the callback says nothing of the shard, and is taken once, where it was begun."""
    urls = {"eu": empty_urls(), "us": empty_urls()}
    options = {"handlers": [me], "providers": [idp.provider(redirect_uri="")], "secrets": [KEY], "upgrade": True}
    async with Shards(urls, of=lambda key: "us" if key.endswith("una") else "eu", **options) as shards:
        async with Site(shards) as site:
            for user in ("una", "eva"):
                browser = await site.browser(user)
                back = await begin(browser)
                arrived = await browser.get(back)
                assert (arrived.status_code, arrived.headers["location"]) == (303, "/settings?connected=idp")
                assert (await browser.get(back)).status_code == 400
            stranger = await site.browser("una")
            assert (await stranger.get(back)).status_code == 400
        connected = {name: [one.resource_key for one in await shards[name].connections.list()] for name in shards}
    assert connected == {"eu": ["idp/eva"], "us": ["idp/una"]}


async def test_a_callback_while_its_shard_is_away(empty_urls, idp, monkeypatch):
    urls = {"eu": empty_urls(), "us": empty_urls()}
    options = {"handlers": [me], "providers": [idp.provider(redirect_uri="")], "secrets": [KEY], "upgrade": True}
    async with Shards(urls, of=lambda _: "us", **options) as shards, Site(shards) as site:
        browser = await site.browser("una")
        back = await begin(browser)

        async def away(*_, **__):
            raise DatabaseUnreachable("gone")

        with monkeypatch.context() as patch:
            patch.setattr(shards["us"].database, "transaction", away)
            assert (await browser.get(back)).status_code == 503
        assert (await browser.get(back)).status_code == 303
