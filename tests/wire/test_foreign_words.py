"""What answers say in words that no other server uses: charsets, marks, cookies, and hosts in other scripts."""

import http.cookiejar
import json
from datetime import UTC, datetime

import httpx
import pytest

from resilient import FailureKind, InvalidInput, Provider
from resilient.core.base.bounds import COOKIE, COOKIES
from resilient.core.provider.auth import OAuth2
from resilient.core.provider.rules import Errors, Rule
from resilient.wire.oauth.endpoints import TokenClient
from resilient.wire.publishers.webhook import StandardWebhook
from resilient.wire.requests.call import AsyncCall
from resilient.wire.requests.explain import explain
from resilient.wire.requests.flow import plan
from resilient.wire.requests.request_log import RequestLog
from tests.wire.conftest import Recorder

NOW = datetime.now(UTC)
BOM = "\ufeff"
INTERNATIONAL = "https://xn--bcher-kva.example"
SECRET = "whsec_" + "a" * 40


def answering(body=b"{}", *headers, status=b"200 OK"):
    async def behave(_reader, writer):
        head = b"".join(b"%s: %s\r\n" % one for one in (*headers, (b"content-length", str(len(body)).encode())))
        writer.write(b"HTTP/1.1 " + status + b"\r\n" + head + b"\r\n" + body)
        await writer.drain()

    return behave


# -- charsets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "charset",
    ["zlib", "bz2", "hex", "rot13", "idna", "undefined", "unicode_escape", "punycode", "nobodys", "a" * 10_000],
)
async def test_a_charset_that_is_none_is_read_as_utf_8(client, rude, charset):
    """Python has codecs of all these names: they pack, raise, or take a time that grows with the square of the text."""
    media = (b"content-type", b"text/plain; charset=" + charset.encode())
    async with rude(answering("ä-1".encode(), media)) as (url, _):
        answer = await client().get(url)
        assert (answer.text, answer.encoding) == ("ä-1", "utf-8")
        async with client().stream("GET", url) as stream:
            assert [part async for part in stream.aiter_text()] == ["ä-1"]


@pytest.mark.parametrize(
    ("charset", "codec"),
    [
        ("latin-1", "latin-1"),
        ("windows-1252", "cp1252"),
        ("utf-16", "utf-16"),
        ("utf-16", "utf-16-le"),
        ("utf-32", "utf-32-le"),
        ("utf-16be", "utf-16-be"),
    ],
)
async def test_a_charset_that_is_one(client, rude, charset, codec):
    media = (b"content-type", b"text/plain; charset=" + charset.encode())
    async with rude(answering("ä-1".encode(codec), media)) as (url, _):
        assert (await client().get(url)).text == "ä-1"


# -- the mark before JSON ---------------------------------------------------------------------------------------------

MARKED = (BOM + json.dumps({"error": {"code": "no_such", "message": "who?"}})).encode()
DIALECT = Errors(code=("error.code",), rules=(Rule(FailureKind.CONFLICT, status=range(200, 500), code="no_such"),))


@pytest.mark.parametrize("status", [b"200 OK", b"404 Not Found"])
async def test_json_behind_a_mark_is_read(client, rude, hooks, status):
    media = (b"content-type", b"application/json")
    async with rude(answering(MARKED, media, status=status)) as (url, _):
        api = client(Provider(name="api", base_url=url, errors=DIALECT))
        await api.get("/x")
    (_, failure), *_ = hooks.answers
    assert (failure.kind, failure.code) == (FailureKind.CONFLICT, "no_such")


@pytest.mark.parametrize("body", [MARKED, MARKED.decode()])
async def test_the_same_of_a_call_of_somebody_elses(hooks, body):
    async with AsyncCall(
        RequestLog(hooks, Provider(name="api", errors=DIALECT)), "GET", "https://api.example/x"
    ) as call:
        assert call.report(404, body=body).code == "no_such"


async def test_the_same_of_a_token(rude):
    body = (BOM + json.dumps({"access_token": "a"})).encode()
    async with rude(answering(body)) as (url, _):
        token = TokenClient()
        answer = await token.refresh(OAuth2(token_url=url, client_id="c"), "r", NOW)
        await token.aclose()
    assert answer.body == {"access_token": "a"}


# -- cookies ----------------------------------------------------------------------------------------------------------


async def test_accounts_share_no_cookie_of_their_token_endpoint(rude):
    """A server may take whoever sends it for the account that it was given to."""
    async with rude(answering(b'{"access_token": "a"}', (b"set-cookie", b"session=ada"))) as (url, received):
        token, oauth = TokenClient(), OAuth2(token_url=url, client_id="c")
        for refresh_token in ("ada's", "bob's"):
            assert (await token.refresh(oauth, refresh_token, NOW)).failure is None
        await token.aclose()
    assert [b"session=ada" in one for one in received] == [False, False]


async def test_so_many_cookies_are_kept(client, rude):
    many = [(b"set-cookie", b"c%d=1" % n) for n in range(COOKIES.value + 5)]
    api = client()
    async with rude(answering(b"{}", *many)) as (url, _):
        await api.get(url)
    assert [one.name for one in api.cookies.jar] == [f"c{n}" for n in range(COOKIES.value)]
    async with rude(answering(b"{}", (b"set-cookie", b"later=1"))) as (url, _):
        await api.get(url)
    assert [one.name for one in api.cookies.jar] == [*(f"c{n}" for n in range(1, COOKIES.value)), "later"]


async def test_a_cookie_that_is_too_long_is_not_kept(client, rude):
    values = [b"a=" + b"1" * (COOKIE.value - 2), b"b=" + b"1" * (COOKIE.value - 1)]
    api = client()
    async with rude(answering(b"{}", *((b"set-cookie", value) for value in values))) as (url, _):
        await api.get(url)
    assert [one.name for one in api.cookies.jar] == ["a"]


async def test_cookies_of_a_kind_that_nobody_sends_are_not_read(client, rude, monkeypatch):
    """Python reads ``Set-Cookie2`` word by word, and copies the rest of it for each."""
    read = []
    monkeypatch.setattr(http.cookiejar, "split_header_words", lambda values: read.extend(values) or [])
    api = client()
    async with rude(answering(b"{}", (b"set-cookie", b"a=1"), (b"set-cookie2", b"b," * 1_000))) as (url, _):
        await api.get(url)
    assert ([one.name for one in api.cookies.jar], read) == (["a"], [])


# -- hosts in other scripts -------------------------------------------------------------------------------------------


def test_a_host_in_another_script_is_the_providers():
    """It got no credentials, no key and no gate: httpx told its name in letters that nobody had declared."""
    log = RequestLog(Recorder(), Provider(name="api", base_url=INTERNATIONAL))
    facts = plan(log, httpx.Request("GET", f"{INTERNATIONAL}/x")).facts
    assert (facts.trusted, facts.gated, facts.host) == (True, True, INTERNATIONAL.removeprefix("https://"))


def test_one_that_an_account_chose_is_guarded_and_may_be_excepted():
    for private, guarded in (((), True), (("xn--bcher-kva.example",), False)):
        provider = Provider(name="api", base_url="https://{host}", private_hosts=private)
        log = RequestLog(Recorder(), provider, INTERNATIONAL)
        request = httpx.Request("GET", f"{INTERNATIONAL}/x")
        assert plan(log, request).facts.trusted
        assert request.extensions.get("resilient_guarded", False) is guarded


@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize("location", ["http://xn--a/", "http://xn--/x", "data:text/plain,x"])
async def test_a_redirect_to_what_is_no_address_is_the_servers_fault(client, rude, hooks, location, follows):
    async with rude(answering(b"", (b"location", location.encode()), status=b"302 Found")) as (url, _):
        api = client()
        with pytest.raises(httpx.RemoteProtocolError, match=r"^the answer redirects to ") as caught:
            await api.get(url, follow_redirects=follows)
        assert explain(caught.value, api.request_log, hooks.now()).failure.kind is FailureKind.TRANSIENT


@pytest.mark.parametrize("host", ["xn--bcher-kva.example", "xn--a"])
def test_a_webhook_at_such_a_host(host):
    StandardWebhook(f"https://{host}/hook", SECRET)
    StandardWebhook(f"http://{host}/hook", SECRET, allow=[host])
    with pytest.raises(InvalidInput, match="use https"):
        StandardWebhook(f"http://{host}/hook", SECRET)
