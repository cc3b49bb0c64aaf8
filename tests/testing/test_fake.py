"""The scriptable provider: what it is told to do, it does, in its provider's dialect, and it counts truly."""

import json
import pickle
import threading
from dataclasses import replace
from datetime import timedelta

import httpx
import pytest

from resilient import FailureKind, Limit, OAuth2, Provider, Rotation, Scope, SetupError, Signature, Webhook
from resilient.core.events.webhook import verify
from resilient.testing import FakeClock, FakeProvider, Reply, provider_at
from resilient.testing.fake.answers import fitting, put
from resilient.testing.fake.meter import Window


@pytest.fixture
def time():
    return FakeClock()


@pytest.fixture
def make(time):
    """``make(provider, ...)``: a fake in this process, and a client of it."""

    def make(provider="hubspot", **options):
        fake = FakeProvider(provider, clock=time.now, port=False, **options)
        return fake, httpx.Client(transport=fake.transport, base_url=fake.provider.base_url)

    return make


def bearer(account):
    return {"Authorization": f"Bearer {account.access_token}"}


# -- what is there -----------------------------------------------------------------------------------------------------


def test_routes_and_the_log(make):
    fake, client = make(anonymous=True)
    fake.on("POST /crm/*", lambda request: {"id": "7", "said": request.json["name"]})
    fake.on("/plain", Reply(201, "text"))
    assert client.post("/crm/contacts?x=1", json={"name": "a"}).json() == {"id": "7", "said": "a"}
    assert (client.get("/plain").status_code, client.get("/nothing").status_code) == (201, 404)
    first = fake.log[0]
    assert (first.target, first.query, first.status, first.kind) == ("POST /crm/contacts", {"x": "1"}, 200, None)
    assert [one.path for one in fake.log.where(method="GET", status=404)] == ["/nothing"]
    assert [one.target for one in fake.performed] == ["POST /crm/contacts"]


def test_its_address_has_a_slash_at_its_end_only_where_the_providers_has(make):
    """SDKs are handed an address to put paths behind: ``f"{fake.provider.base_url}/contacts"``."""
    for base_url, path in [("https://a.example", ""), ("https://a.example/", "/"), ("https://a.example/v1", "/v1")]:
        fake, _ = make(Provider(name="acme", base_url=base_url), anonymous=True)
        assert fake.provider.base_url == fake.url.rstrip("/") + path


async def coroutine(request):
    return {}


@pytest.mark.parametrize(
    "told",
    [
        lambda fake: fake.on("GET", {}),
        lambda fake: fake.on("get /x", {}),
        lambda fake: fake.on("contacts", {}),
        lambda fake: fake.on("/x", coroutine),
        lambda fake: fake.fail_next(on="tokens"),
        lambda fake: fake.fail_next(42),
        lambda fake: fake.fail_next(times=0),
        lambda fake: fake.throttle(30, on="POST"),
        lambda fake: fake.hold("tokens").__enter__(),
        lambda fake: fake.log.where(acount="a"),
        lambda fake: fake.revoke("nobody"),
        lambda fake: fake.expire_tokens("nobody"),
    ],
)
def test_what_can_never_be_is_refused_where_it_is_said(make, told):
    fake, _ = make()
    with pytest.raises(ValueError, match=r"no request is|fail_next|has no|plain function"):
        told(fake)


def test_an_answer_that_raises_is_told(caplog):
    with FakeProvider("hubspot", anonymous=True) as fake:
        fake.on("GET /x", lambda _: 1 / 0)
        assert httpx.get(f"{fake.url}/x").status_code == 500
    assert "division by zero" in caplog.text
    assert "GET /x" in caplog.text


def test_an_unknown_name_or_pagination_says_which_there_are(make):
    with pytest.raises(ValueError, match=r"'nobody'.*hubspot"):
        FakeProvider("nobody")
    fake, _ = make()
    with pytest.raises(ValueError, match=r"'rest'.*list, search"):
        fake.records("/contacts", pages="rest")
    with pytest.raises(ValueError, match="dropped"):
        fake.fail_next("nonsense")


def test_a_change_that_is_made_twice_is_counted(make):
    fake, client = make(anonymous=True)
    fake.on("*", {})
    for name in "aab":
        client.post("/x", json={"name": name})
    assert (len(fake.performed), fake.duplicates) == (3, 1)


def test_an_idempotency_key_is_remembered_for_its_life(make, time):
    fake, client = make("stripe", anonymous=True)
    fake.on("POST /v1/charges", lambda _: {"id": f"ch_{len(fake.performed)}"})
    headers = {"Idempotency-Key": "k"}
    assert [client.post("/v1/charges", headers=headers).json()["id"] for _ in range(2)] == ["ch_0", "ch_0"]
    assert (len(fake.performed), len(fake.log.where(replayed=True))) == (1, 1)
    time.advance(days=1, seconds=1)
    assert client.post("/v1/charges", headers=headers).json()["id"] == "ch_1"


# -- accounts and tokens -----------------------------------------------------------------------------------------------


def test_nobody_may_without_credentials_unless_the_facts_say_so(make):
    fake, client = make()
    fake.on("*", {})
    assert client.get("/x").status_code == 401
    account = fake.account("acct-7")
    assert client.get("/x").status_code == 401
    assert client.get("/x", headers=bearer(account)).status_code == 200
    assert [one.account for one in fake.log] == ["", "", "acct-7"]
    public, client = make(anonymous=True)
    public.on("*", {})
    assert client.get("/x").status_code == 200


def test_tokens_expire_and_are_revoked(make, time):
    fake, client = make()
    fake.on("*", {})
    one, other = fake.account("one", lifetime=60), fake.account("other")

    def codes():
        return [client.get("/x", headers=bearer(account)).status_code for account in (one, other)]

    assert codes() == [200, 200]
    time.advance(60)
    assert codes() == [401, 200]
    fake.expire_tokens()
    assert codes() == [401, 401]
    fake.authorize("one")
    assert codes() == [200, 401]
    fake.revoke("one")
    assert codes() == [401, 401]


def test_what_was_revoked_stays_so_after_a_new_consent(make):
    fake, client = make(refreshing(Rotation.NONE))
    fake.on("*", {})
    old = fake.account("one").tokens
    fake.revoke("one")
    fake.authorize("one")
    assert client.get("/x", headers={"Authorization": f"Bearer {old['access_token']}"}).status_code == 401
    assert ask(client, fake, grant_type="refresh_token", refresh_token=old["refresh_token"]).status_code == 400
    assert client.get("/x", headers=bearer(fake.account("one"))).status_code == 200


def test_a_login_of_an_account_that_has_no_oauth(make):
    fake, client = make("twilio")
    fake.on("*", {})
    login = fake.account("one").key
    assert client.get("/x", auth=(login["user"], login["password"])).status_code == 200
    assert client.get("/x", auth=(login["user"], "wrong")).status_code == 401
    for text in (b"!", b"\xe9", b"/w=="):  # no base64, no ASCII, no UTF-8
        assert client.get("/x", headers={"Authorization": b"Basic " + text}).status_code == 401


def ask(client, fake, **fields):
    oauth = fake.provider.oauth
    return client.post(oauth.token_url, data={"client_id": "client", "client_secret": "secret", **fields})


def refreshing(rotation, grace=None):
    oauth = OAuth2(token_url="https://t.example.com/token", rotation=rotation, grace=grace)
    return Provider(name="acme", base_url="https://api.example.com", auth=(oauth,))


@pytest.mark.parametrize(
    ("rotation", "grace", "codes"),
    [
        (Rotation.NONE, None, [200, 200, 200]),
        (Rotation.OLD_KEPT, None, [200, 200, 200]),
        (Rotation.SINGLE_USE, None, [200, 400, 400]),
        (Rotation.GRACE, 600, [200, 200, 400]),  # the third comes after the grace
    ],
)
def test_a_refresh_token_used_again(make, time, rotation, grace, codes):
    fake, client = make(refreshing(rotation, grace))
    account = fake.account("one")
    old, answers = account.refresh_token, []
    for wait in (0, 599, 2):
        time.advance(wait)
        answers.append(ask(client, fake, grant_type="refresh_token", refresh_token=old))
    assert [one.status_code for one in answers] == codes
    assert answers[-1].json().get("error") == ("invalid_grant" if codes[-1] == 400 else None)
    assert (account.refresh_token == old) is (rotation is Rotation.NONE)
    assert account.refreshes == codes.count(200)


@pytest.mark.parametrize(
    ("rotation", "grace", "killed"),
    [
        (Rotation.NONE, None, False),
        (Rotation.OLD_KEPT, None, False),
        (Rotation.SINGLE_USE, None, True),
        (Rotation.GRACE, 600, True),  # once the grace is over
    ],
)
def test_a_rotated_refresh_token_that_comes_again_ends_its_family(make, time, rotation, grace, killed):
    fake, client = make(refreshing(rotation, grace))
    fake.on("*", {})
    account, other = fake.account("one"), fake.account("other")
    stolen = account.refresh_token
    assert ask(client, fake, grant_type="refresh_token", refresh_token=stolen).status_code == 200
    time.advance(seconds=601)
    good = account.refresh_token
    assert (ask(client, fake, grant_type="refresh_token", refresh_token=stolen).status_code == 400) is killed
    assert (client.get("/x", headers=bearer(account)).status_code == 401) is killed
    assert (ask(client, fake, grant_type="refresh_token", refresh_token=good).status_code == 400) is killed
    assert account.revoked is killed
    assert client.get("/x", headers=bearer(other)).status_code == 200
    fake.authorize("one")
    assert client.get("/x", headers=bearer(account)).status_code == 200


def revoking(client, fake, **fields):
    oauth = fake.provider.oauth
    return client.post(oauth.revoke_url, data={"client_id": "client", "client_secret": "secret", **fields})


@pytest.mark.parametrize("which", ["access_token", "refresh_token"])
def test_a_client_revokes_what_came_of_one_consent(make, which):
    provider = refreshing(Rotation.SINGLE_USE)
    oauth = replace(provider.oauth, revoke_url="https://t.example.com/revoke")
    fake, client = make(replace(provider, auth=(oauth,)))
    fake.on("*", {})
    account, other = fake.account("one"), fake.account("other")
    refused = client.post(fake.provider.oauth.revoke_url, data={"client_id": "client", "token": account.access_token})
    assert refused.json() == {"error": "invalid_client"}
    assert revoking(client, fake, token="never issued").status_code == 200  # RFC 7009, 2.2
    assert not account.revoked
    assert revoking(client, fake, token=account.tokens[which]).status_code == 200
    assert account.revoked
    assert client.get("/x", headers=bearer(account)).status_code == 401
    assert ask(client, fake, grant_type="refresh_token", refresh_token=account.refresh_token).status_code == 400
    assert client.get("/x", headers=bearer(other)).status_code == 200
    assert [one.what for one in fake.log][:3] == ["revoke"] * 3
    fake.authorize("one")
    assert client.get("/x", headers=bearer(account)).status_code == 200


def test_a_grace_without_end_lasts_until_the_successor_is_used(make):
    fake, client = make(refreshing(Rotation.GRACE))
    old = fake.account("one").refresh_token
    new = ask(client, fake, grant_type="refresh_token", refresh_token=old).json()["refresh_token"]
    again = ask(client, fake, grant_type="refresh_token", refresh_token=old).json()["refresh_token"]
    assert again == new != old
    assert ask(client, fake, grant_type="refresh_token", refresh_token=new).status_code == 200
    assert ask(client, fake, grant_type="refresh_token", refresh_token=old).status_code == 400


def test_consent_by_code_and_verifier(make):
    from authlib.oauth2.rfc7636 import create_s256_code_challenge

    fake, client = make("github")
    oauth = fake.provider.oauth
    fake.consents("acct-9")
    query = {"client_id": "client", "redirect_uri": "https://app.example.com/cb", "state": "s", "response_type": "code"}
    query |= {"code_challenge": create_s256_code_challenge("v" * 43), "code_challenge_method": "S256"}

    def code():
        back = httpx.URL(client.get(oauth.authorize_url, params=query).headers["location"])
        assert back.params["state"] == "s"
        return back.params["code"]

    form = {"grant_type": "authorization_code", "redirect_uri": query["redirect_uri"], "code_verifier": "v" * 43}
    one = code()
    good = ask(client, fake, code=one, **form).json()
    assert good["access_token"] == fake.account("acct-9").access_token
    for wrong in ({"code": one}, {"code": code(), "code_verifier": "x"}, {"code": code(), "redirect_uri": "https://e"}):
        assert ask(client, fake, **{**form, **wrong}).status_code == 400
    assert (
        ask(client, fake, code=code(), **form, client_secret="wrong").json()["error"] == "incorrect_client_credentials"
    )
    fake.denies()
    back = httpx.URL(client.get(oauth.authorize_url, params=query).headers["location"])
    assert back.params["error"] == "access_denied"


def test_a_lost_token_answer_has_used_the_token_up(make):
    fake, client = make(refreshing(Rotation.SINGLE_USE))
    old = fake.account("one").refresh_token
    fake.fail_next("lost", on="token")
    with pytest.raises(httpx.RemoteProtocolError):
        ask(client, fake, grant_type="refresh_token", refresh_token=old)
    assert ask(client, fake, grant_type="refresh_token", refresh_token=old).status_code == 400
    assert [one.status for one in fake.log.tokens] == [None, 400]


# -- limits and outages ------------------------------------------------------------------------------------------------


def test_limits_on_several_scopes_are_kept_and_told(make, time):
    limits = {"account": [Limit(3, per="1m", name="core")], "account/search": [Limit(1, per="1m", name="search")]}
    fake, client = make("github", limits=limits)
    fake.on("*", {})
    one, other = fake.account("one"), fake.account("other")
    got = [client.get("/search/issues", headers=bearer(one)).status_code for _ in range(2)]
    assert got == [200, 403]
    spent = client.get("/search/issues", headers=bearer(one)).headers
    assert (spent["x-ratelimit-remaining"], spent["x-ratelimit-resource"]) == ("0", "search")
    answers = [client.get("/x", headers=bearer(one)) for _ in range(3)]
    assert [one.status_code for one in answers] == [200, 200, 403]
    assert [one.headers["x-ratelimit-remaining"] for one in answers] == ["1", "0", "0"]
    assert client.get("/x", headers=bearer(other)).status_code == 200
    assert (fake.over_admitted, len(fake.log.where(account="one", over=True))) == (3, 3)
    time.advance(60)
    assert client.get("/x", headers=bearer(one)).status_code == 200


def test_a_bucket_refills(make, time):
    fake, client = make(Provider(name="a", base_url="https://a.test", limits={"account": [Limit(2, "1s", burst=4)]}))
    fake.on("*", {})
    assert [client.get("/").status_code for _ in range(6)] == [200] * 4 + [429] * 2
    time.advance(1)
    assert [client.get("/").status_code for _ in range(3)] == [200, 200, 429]


def test_windows_slide():
    window = Window(Limit(10, per=10))
    for at in range(10):
        window.look(at)
        assert window.wait(1, at) == 0
        window.draw(1, at)
    window.look(9.5)
    assert window.wait(1, 9.5) == pytest.approx(0.5)
    assert window.wait(3, 9.5) == pytest.approx(2.5)
    window.look(12)
    assert window.remaining() == 3


def test_too_many_at_once(make):
    fake, client = make(Provider(name="a", base_url="https://a.test", concurrency={"account": 1}))
    fake.on("*", {})
    with fake.hold("/slow"):
        thread = threading.Thread(target=client.get, args=("/slow",))
        thread.start()
        while not fake.log:
            pass
        assert client.get("/x").status_code == 429
    thread.join()
    assert client.get("/x").status_code == 200


def test_a_throttle_says_how_long_it_still_is_and_counts_who_does_not_listen(make, time):
    fake, client = make(anonymous=True)
    fake.on("*", {})
    fake.throttle(for_=30)
    first = client.get("/x")
    assert (first.status_code, first.headers["retry-after"]) == (429, "30")
    time.advance(10)
    assert client.get("/x").headers["retry-after"] == "20"
    assert (fake.early, [one.early for one in fake.log]) == (1, [False, True])
    time.advance(20)
    assert client.get("/x").status_code == 200
    assert fake.early == 1


def test_an_outage_ends(make, time):
    fake, client = make(anonymous=True)
    fake.on("*", {})
    fake.down(for_=60)
    answer = client.get("/x")
    assert (answer.status_code, answer.headers["content-type"], answer.text[:6]) == (
        503, "text/html; charset=utf-8", "<html>",
    )  # fmt: skip
    time.advance(60)
    assert client.get("/x").status_code == 200
    fake.down(status=500)
    assert client.get("/x").status_code == 500
    fake.up()
    assert client.get("/x").status_code == 200


def test_its_clock_may_be_wrong(make, time):
    fake, client = make(skew=timedelta(hours=-3))
    fake.on("*", {})
    assert client.get("/x").headers["date"] == "Tue, 01 Jan 2030 09:00:00 GMT"


@pytest.mark.parametrize("kind", [FailureKind.THROTTLED, FailureKind.QUOTA, FailureKind.AUTH, FailureKind.TRANSIENT])
def test_it_fails_in_the_words_of_its_provider(make, kind):
    fake, client = make("google", anonymous=True)
    fake.fail_next(kind, times=2, on="GET /drive/*", code="quotaExceeded" if kind is FailureKind.QUOTA else "")
    fake.on("*", {})
    assert client.get("/other").status_code == 200
    answers = [client.get("/drive/v3/files") for _ in range(3)]
    assert [one.kind for one in fake.log] == [None, kind, kind, None]
    if kind is FailureKind.QUOTA:
        assert answers[0].json()["error"]["errors"][0]["reason"] == "quotaExceeded"
    assert answers[2].status_code == 200


def test_a_scope_can_be_asked_for(make):
    fake, client = make("xero")
    fake.fail_next(FailureKind.THROTTLED, scope=Scope.PROVIDER, wait=5)
    assert client.get("/Contacts").headers["x-rate-limit-problem"].lower() == "appminute"


# -- on a port ---------------------------------------------------------------------------------------------------------


def test_faults_of_the_wire():
    with (
        FakeProvider("hubspot", anonymous=True) as fake,
        httpx.Client(base_url=fake.provider.base_url, timeout=10) as client,
    ):
        fake.on("*", {"a": "b" * 100})
        assert client.get("/x").json()["a"]
        for what, error in (("lost", httpx.RemoteProtocolError), ("dropped", httpx.RemoteProtocolError)):
            fake.fail_next(what)
            with pytest.raises((error, httpx.ReadError)):
                client.post("/x", json={})
        assert len(fake.performed) == 1  # the lost one
        fake.fail_next("cut")
        with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
            client.get("/x")
        fake.fail_next("hang")
        with pytest.raises(httpx.ReadTimeout):
            client.get("/x", timeout=0.2)
        fake.fail_next("html", status=502)
        assert client.get("/x").text.startswith("<html>")
        fake.fail_next(Reply(200, "abc", fault="slow", pace=0.001), on="/slow")
        assert client.get("/slow").text == "abc"
        fake.fail_next("endless")
        with client.stream("GET", "/x") as endless:
            size = 0
            for chunk in endless.iter_bytes():
                size += len(chunk)
                if size > 10_000:
                    break
        assert client.get("/x").status_code == 200


def test_it_refuses_connections_and_comes_back_on_the_same_port():
    with (
        FakeProvider("hubspot", anonymous=True) as fake,
        httpx.Client(base_url=fake.provider.base_url, timeout=10) as client,
    ):
        fake.on("*", {})
        assert client.get("/x").status_code == 200
        fake.down(refuse=True)
        with pytest.raises(httpx.ConnectError):
            client.get("/x")
        fake.up()
        assert client.get("/x").status_code == 200


async def test_it_is_an_asgi_app(make):
    fake, _ = make(anonymous=True)
    fake.on("*", {"ok": 1})
    transport = httpx.ASGITransport(app=fake)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        assert (await client.get("/x")).json() == {"ok": 1}


def test_without_uvicorn_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "uvicorn", None)
    fake = FakeProvider("hubspot")
    with pytest.raises(SetupError, match="testing"):
        fake.__enter__()
    fake.close()


# -- small parts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["github", "stripe", "slack", "shopify", "twilio", "discord", "zendesk", "zoom", "box"]
)
def test_webhooks_are_signed(make, time, name):
    fake, _ = make(name)
    sent = fake.webhook("https://hooks.example.com/in", {"a": 1}, event="thing.changed", delivery="d-1")
    hook, secret = fake.provider.webhook, fake.webhook_secret
    from resilient.testing.contract import _ed25519

    def reason(secret, now):
        import json

        body = json.loads(sent.body) if sent.body[:1] == b"{" else None
        return verify(hook, sent, [secret], now, body=body, ed25519=_ed25519)

    assert reason(secret, time.now()) == ""
    assert reason(secret[::-1], time.now()) != ""


@pytest.mark.parametrize(
    "pattern", ["^(endpoint|resource)", "(?i)concurrent requests", "v1=([0-9a-f]+)", "^true$", "."]
)
def test_texts_that_fit(pattern):
    import re

    assert re.search(pattern, fitting(pattern))


def test_texts_with_a_part_that_is_given():
    assert fitting(r"[Rr]etry after (?P<value>[0-9T:.+Z-]+)", {"value": "2030"}) == "Retry after 2030"
    assert fitting("t=([0-9]+)", {1: "5"}) == "t=5"


def test_bodies_with_a_value_at_a_path():
    assert put({"a": 1}, "errors[0].code", "x") == {"a": 1, "errors": [{"code": "x"}]}
    assert put(None, "error['.tag']", "y") == {"error": {".tag": "y"}}
    assert put([1], "", [2]) == [2]


def test_a_fixed_port_and_the_same_facts_for_another_process():
    with FakeProvider("gitlab") as free:
        port = int(free.url.rpartition(":")[2])
        with pytest.raises(SetupError, match=f"port {port}"):
            FakeProvider("gitlab", port=port)
    with FakeProvider("gitlab", port=port) as fake:
        assert fake.url == f"http://127.0.0.1:{port}"
        other = provider_at("gitlab", fake.url)
        assert (other.base_url, other.oauth.token_url) == (fake.provider.base_url, fake.provider.oauth.token_url)
        with pytest.raises(TypeError, match="provider_at"):
            pickle.dumps(fake)


def test_a_base_url_of_ones_own_is_the_fakes_too():
    fake = FakeProvider("gitlab", port=False, base_url="https://git.acme.example/gitlab/api/v4")
    assert fake.provider.base_url == f"{fake.url}/gitlab/api/v4"
    assert fake.provider.oauth.token_url == f"{fake.url}/oauth/token"
    assert FakeProvider("github", port=False, base_url="https://x.example/api/v3").provider.base_url.endswith("/api/v3")


async def test_paths_below_the_base_url_are_named_as_handlers_write_them():
    api = Provider(name="acme", base_url="https://api.acme.example/v3", anonymous=True)
    for named in ("POST /things", "POST /v3/things", "/things", "POST /thin*"):
        fake = FakeProvider(api, port=False)
        fake.on(named, {"id": "9"})
        fake.fail_next(503, on=named)
        async with httpx.AsyncClient(transport=fake.transport, base_url=fake.provider.base_url) as client:
            assert [(await client.post("/things")).status_code for _ in "12"] == [503, 200]
            assert (await client.post("/things")).json() == {"id": "9"}


def test_a_delivery_keeps_the_id_that_its_body_has():
    signature = Signature(header="x-sign", pattern="([0-9a-f]+)")
    api = Provider(
        name="acme",
        base_url="https://api.acme.example",
        webhook=Webhook(signatures=(signature,), delivery="body:id", event="body:type"),
    )
    fake = FakeProvider(api, port=False)
    for body, delivery, id_ in (({"id": "ev-7"}, "", "ev-7"), ({}, "", "1"), ({"id": "ev-7"}, "d-2", "d-2")):
        sent = fake.webhook("https://hooks.example/in", body, event="thing.new", delivery=delivery)
        assert json.loads(sent.body) == {"id": id_, "type": "thing.new"}
