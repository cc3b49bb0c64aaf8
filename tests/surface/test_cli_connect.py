"""``resilient connect`` against a real OAuth server on this machine, and every way it can go wrong."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import socket
import struct
import sys
import threading
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from joserfc.jwk import import_key

from resilient.store.accounts.secrets import new_key
from resilient.surface.cli import connect as connect_command
from resilient.surface.cli import main
from resilient.surface.cli.connect import HOST, Callback, Place
from tests.helpers import LIMIT

KEY = new_key()
PROGRAM = """
from resilient import ApiKey, Basic, Bearer, OAuth2, Provider, Resilient, Rotation, SyncJob, handler

def oauth(**changes):
    facts = dict(authorize_url="{idp}/authorize", token_url="{idp}/token", client_id="app", client_secret="{secret}",
                 pkce="required", rotation=Rotation.SINGLE_USE)
    return OAuth2(**facts | changes)

def provider(name, *auth, **facts):
    return Provider(name=name, base_url="{idp}", auth=auth, **facts)

@handler("me")
def me(job: SyncJob[None]) -> int:
    return job.client.get("/me").status_code

app = Resilient({url!r}, handlers=[me], providers=[
    provider("idp", oauth(), Bearer()),
    provider("loop", oauth(redirect_uri="http://localhost:{port}/back")),
    provider("machine", oauth(flows=("client_credentials",), authorize_url="")),
    provider("bare", oauth(client_id="", client_secret=""), Bearer()),
    provider("key", ApiKey()),
    provider("mail", Basic(user="address", password="app password")),
    provider("shop", Bearer()).configured(base_url="https://{{shop}}.example"),
    provider("signed"),
])
"""


@pytest.fixture
def run(sqlite_url, tmp_path, monkeypatch, capsys, idp, free_port):
    program = PROGRAM.format(url=sqlite_url, idp=idp.url, secret=idp.secret, port=free_port)
    (tmp_path / "shop_connect.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("RESILIENT_APP", "shop_connect:app")
    monkeypatch.setenv("RESILIENT_SECRETS", KEY)

    def run_(*arguments, typed=None):
        monkeypatch.delitem(sys.modules, "shop_connect", raising=False)
        if typed is not None:
            monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        status = main(list(arguments))
        printed = capsys.readouterr()
        for hidden in ("canary", KEY, idp.secret):
            assert hidden not in printed.out + printed.err
        return status, printed.out, printed.err

    return run_


class Browser:
    """Opens an address in a thread, as `webbrowser` does, and follows where it leads."""

    def __init__(self, change=lambda url: url):
        self.opened, self.pages, self.change = [], [], change
        self.threads = []

    def __call__(self, url):
        self.opened.append(url)
        self.threads.append(threading.Thread(target=self.go, args=(self.change(url),)))
        self.threads[-1].start()
        return True

    def go(self, url):
        with httpx.Client(follow_redirects=True, trust_env=False, timeout=20) as client:
            self.pages.append(client.get(url))

    def page(self):
        for thread in self.threads:
            thread.join(LIMIT)
        return self.pages[-1]


@pytest.fixture
def browser(monkeypatch):
    made = Browser()
    monkeypatch.setattr("webbrowser.open", made)
    return made


def test_at_a_port_that_is_registered(run, browser, monkeypatch, free_port):
    monkeypatch.setenv("RESILIENT_CONNECT_PORT", str(free_port))
    status, _, err = run("connect", "idp", "idp/acct-1")
    assert status == 0
    assert f"must be: http://127.0.0.1:{free_port}/callback" in err
    assert "another one each time" not in err
    browser.page()


def test_through_the_browser_and_back(run, browser, idp):
    status, out, err = run("connect", "idp", "idp/acct-1")
    assert (status, out) == (0, "idp/acct-1 is connected: oauth2, version 1.\n")
    assert "Your browser" in err
    assert "--port 8976 keeps it" in err
    page = browser.page()
    assert (page.status_code, "idp/acct-1 is connected" in page.text) == (200, True)
    query = parse_qs(urlsplit(browser.opened[0]).query)
    assert query["redirect_uri"][0].startswith("http://127.0.0.1:")
    assert query["code_challenge_method"] == ["S256"]
    assert idp.asked[0]["grant_type"] == "authorization_code"
    assert "is well" in run("connections", "test", "idp/acct-1")[1]


def test_without_a_key_it_is_mine_and_a_second_time_renews_it(run, browser):
    assert json.loads(run("connect", "idp", "idp/me", "--json")[1])["resource_key"] == "idp/me"
    assert json.loads(run("connect", "idp", "idp/me", "--json")[1])["version"] == 2


def test_an_account_that_lost_its_access_goes_on_by_itself(run, browser, idp):
    def drained():
        sys.modules.pop("shop_connect", None)
        import shop_connect

        async def work():
            async with shop_connect.app as app:
                await app.worker().drain()
                return [job.state.value for job in await app.jobs.list()]

        return asyncio.run(work())

    run("connect", "idp", "idp/me")
    idp.refresh.clear()
    idp.access.clear()
    assert run("enqueue", "me", "--resource", "idp/me")[0] == 0
    assert drained() == ["ready"]
    assert "needs_reauth" in run("connections", "list")[1]
    assert run("connect", "idp", "idp/me")[0] == 0
    assert drained() == ["succeeded"]


def test_a_configured_address_of_this_machine_is_used(run, browser, free_port):
    assert run("connect", "loop", "loop/me")[0] == 0
    query = parse_qs(urlsplit(browser.opened[0]).query)
    assert query["redirect_uri"] == [f"http://localhost:{free_port}/back"]


def test_a_port_that_is_taken_is_said(run, browser, free_port):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port))
        listener.listen()
        status, _, err = run("connect", "loop", "loop/me")
    assert (status, f"port {free_port}" in err) == (2, True)


@pytest.mark.parametrize("leaves", [True, False])
async def test_a_browser_that_takes_no_answer_changes_no_result(leaves, monkeypatch):
    """What the command says is whether the account was connected, not whether a page was shown."""
    monkeypatch.setattr(connect_command, "_BROWSER_TIME", LIMIT if leaves else 0.01)
    async with Callback(Place()) as server:
        if leaves:
            _, writer = await asyncio.open_connection(HOST, urlsplit(server.uri).port)
            writer.write(b"GET /callback?state=s&code=c HTTP/1.1\r\n\r\n")
            assert await server.wait_for("s", LIMIT) == {"state": "s", "code": "c"}
            at_once = struct.pack("ii", 1, 0)  # its end is a reset
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
            writer.transport.abort()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        await server.answer(well=True, text="It is connected.")


def test_consent_refused(run, browser, idp):
    idp.refuses = True
    status, out, err = run("connect", "idp", "idp/me")
    assert (status, out) == (1, "")
    assert "access to idp/me was not granted: access_denied" in err
    page = browser.page()
    assert (page.status_code, "access_denied" in page.text) == (400, True)
    assert "description" not in page.text


def test_the_provider_gives_no_token(run, browser, idp):
    idp.script = ["html"]
    status, _, err = run("connect", "idp", "idp/me")
    assert (status, "gave no token for the code (no_token)" in err) == (1, True)
    assert browser.page().status_code == 400


def test_another_state_is_refused_and_the_wait_goes_on(run, browser):
    def wrong(url):
        parts = parse_qs(urlsplit(url).query)
        answer = httpx.get(f"{parts['redirect_uri'][0]}?state=made-up&code=x", trust_env=False)
        assert answer.status_code == 400
        assert httpx.get(parts["redirect_uri"][0].replace("/callback", "/"), trust_env=False).status_code == 404
        return url

    browser.change, judged = lambda url: url, []

    def go(url, plain=browser.go):
        judged.append(wrong(url))
        plain(url)

    browser.go = go
    assert run("connect", "idp", "idp/me")[0] == 0
    assert len(judged) == 1


def test_nobody_comes_back_but_a_stranger(run, browser):
    def stranger(url):
        parts = parse_qs(urlsplit(url).query)
        httpx.get(f"{parts['redirect_uri'][0]}?state=made-up&code=x", trust_env=False)

    browser.go = stranger
    status, _, err = run("connect", "idp", "idp/me", "--timeout", "2")
    assert (status, "nobody came back" in err, "1 callbacks with another state" in err) == (1, True, True)


def test_the_address_is_printed_and_may_be_pasted(run, browser, monkeypatch):
    shown = []

    def show(run, url, *rest, _show=connect_command._show, **options):
        shown.append(url)
        _show(run, url, *rest, **options)

    monkeypatch.setattr(connect_command, "_show", show)
    monkeypatch.setattr(connect_command, "secret", lambda _: httpx.get(shown[0], trust_env=False).headers["location"])
    status, out, err = run("connect", "idp", "idp/me", "--paste")
    assert (status, "idp/me is connected" in out) == (0, True)
    assert shown[0] in err
    assert not browser.opened


@pytest.mark.parametrize(
    ("arguments", "typed", "kind"),
    [
        (("connect", "key", "key/me"), "canary-key\n", "api_key"),
        (("connect", "mail", "mail/me", "--user", "me@example.com"), "canary-password\n", "basic"),
        (("connect", "bare", "bare/me", "--kind", "token"), "canary-token\n", "bearer"),
        (("connect", "shop", "shop/a", "--detail", "shop=a"), "canary-token\n", "bearer"),
    ],
)
def test_secrets_are_typed(run, arguments, typed, kind):
    status, out, _ = run(*arguments, "--json", typed=typed)
    assert status == 0
    assert json.loads(out)["kind"] == kind


def test_a_service_account_by_its_key_file(run, idp, tmp_path):
    private = ec.generate_private_key(ec.SECP256R1())
    pem = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    idp.public = import_key(pem, "EC")
    doc = {"private_key": pem, "client_email": "robot@idp", "private_key_id": "k1"}
    (tmp_path / "key.json").write_text(json.dumps(doc))
    assert run("connect", "idp", "idp/robot", "--key-file", "key.json", "--subject", "ann")[0] == 0
    assert "idp/robot is well" in run("connections", "test", "idp/robot")[1]
    assert (idp.claims[0].claims["iss"], idp.claims[0].claims["sub"]) == ("robot@idp", "ann")
    (tmp_path / "key.json").write_text(json.dumps({**doc, "private_key": "canary"}))
    status, _, err = run("connect", "idp", "idp/me", "--key-file", "key.json")
    assert (status, "no private key" in err) == (2, True)
    for wrong in ("canary", "[]", "{}"):
        (tmp_path / "key.json").write_text(wrong)
        status, _, err = run("connect", "idp", "idp/me", "--key-file", "key.json")
        assert (status, "is no JSON with client_email" in err) == (2, True)
    assert "cannot be read" in run("connect", "idp", "idp/me", "--key-file", "none.json")[2]
    assert "needs --key-file" in run("connect", "idp", "idp/me", "--kind", "service-account")[2]


def test_the_apps_own_credentials_need_nobody(run, idp):
    assert run("connect", "machine", "machine/me")[0] == 0
    assert "machine/me is well" in run("connections", "test", "machine/me")[1]
    assert idp.asked[0]["grant_type"] == "client_credentials"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("connect", "nobody"), "no provider 'nobody', only: bare, idp,"),
        (("connect", "bare", "bare/me"), "bare has no client_id: register an application there"),
        (("connect", "bare", "bare/me"), "or --kind token"),
        (("connect", "idp"), "which account of idp? Say the key its jobs go through, such as `resilient connect idp"),
        (("connect", "idp", "other/me"), "other/me is no account of idp"),
        (("connect", "idp", "idp/a", "--kind", "magic"), "--kind magic is none of"),
        (("connect", "shop", "shop/me"), "shop needs --detail shop=..."),
        (("connect", "mail", "mail/me"), "basic needs --user (address)"),
        (("connect", "signed", "signed/me"), "its vendor's SDK signs requests, or they need none"),
    ],
)
def test_what_cannot_be_meant(run, arguments, says):
    status, out, err = run(*arguments, typed="canary\n")
    assert (status, out) == (2, "")
    assert says in err


def test_without_a_key_for_secrets_nothing_begins(run, browser, monkeypatch):
    monkeypatch.delenv("RESILIENT_SECRETS")
    status, _, err = run("connect", "idp", "idp/me")
    assert (status, "resilient secrets new" in err) == (2, True)
    assert not browser.opened
