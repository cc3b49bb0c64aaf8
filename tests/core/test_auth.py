"""How credentials are sent, and declarations that cannot be meant."""

import pytest

from resilient.core.base.errors import InvalidInput
from resilient.core.provider.auth import ApiKey, Basic, Bearer, OAuth2, Rotation
from resilient.core.provider.facts import Provider

TOKEN = "https://auth.example.com/token"


def test_what_a_request_carries():
    assert Bearer().headers("t") == {"Authorization": "Bearer t"}
    assert Bearer(header="X-Token", prefix="").headers("t") == {"X-Token": "t"}
    assert ApiKey().headers("k") == {"X-API-Key": "k"}
    assert ApiKey(query="key").headers("k") == {}
    assert Basic().headers("Aladdin", "open sesame") == {
        "Authorization": "Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ=="
    }  # RFC 7617
    assert Basic().headers("test", "123£") == {"Authorization": "Basic dGVzdDoxMjPCow=="}  # RFC 7617, 2.1
    with pytest.raises(InvalidInput, match="colon"):
        Basic().headers("a:b", "c")


@pytest.mark.parametrize(
    "url", ["http://auth.example.com/token", "auth.example.com", "ftp://x/", "http://localhost.evil.test/"]
)
def test_secrets_go_over_https_only(url):
    with pytest.raises(InvalidInput):
        OAuth2(token_url=url)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8000/token", "http://localhost/token", "http://[::1]:9/token", "https://x/"]
)
def test_or_stay_on_this_machine(url):
    assert OAuth2(token_url=url).token_url == url


@pytest.mark.parametrize(
    "facts",
    [{"grace": 600}, {"rotation": Rotation.GRACE, "grace": 0}, {"refreshes": False, "rotation": Rotation.SINGLE_USE}],
)
def test_facts_that_contradict_each_other(facts):
    with pytest.raises(InvalidInput):
        OAuth2(token_url=TOKEN, **facts)


@pytest.mark.parametrize(
    ("rotation", "replayable"),
    [(Rotation.NONE, True), (Rotation.OLD_KEPT, True), (Rotation.GRACE, True), (Rotation.SINGLE_USE, False)],
)
def test_what_may_be_tried_again_after_a_lost_answer(rotation, replayable):
    assert OAuth2(token_url=TOKEN, rotation=rotation).replayable is replayable


def test_scopes():
    oauth = OAuth2(token_url=TOKEN, scopes=("a", "offline", "b"), offline_scopes=("offline",), scope_separator=",")
    assert oauth.scope_text() == "a,offline,b"


def test_no_secret_in_the_repr():
    provider = Provider(name="p", auth=(OAuth2(token_url=TOKEN),)).configured("id", "canary")
    assert "canary" not in repr(provider)
    assert provider.oauth.client_secret == "canary"


def test_configured_speaks_of_the_client_only():
    plain = Provider(name="p", auth=(Bearer(), OAuth2(token_url=TOKEN)))
    made = plain.configured("id", "secret", scopes=("a",), redirect_uri="https://app/cb", base_url="https://api")
    assert (made.oauth.client_id, made.oauth.scopes, made.oauth.redirect_uri) == ("id", ("a",), "https://app/cb")
    assert made.base_url == "https://api"
    assert plain.oauth.client_id == ""
    assert plain.configured().auth == plain.auth


def test_a_client_without_oauth_is_refused():
    with pytest.raises(InvalidInput, match="no OAuth"):
        Provider(name="p", auth=(Basic(),)).configured("id")
    assert Provider(name="p", auth=(Basic(),)).configured(name="q").name == "q"


def test_moved_to_another_origin():
    provider = Provider(
        name="p",
        base_url="https://{shop}.example.com/admin/api",
        hosts=("*.example.com",),
        auth=(OAuth2(authorize_url="https://{shop}.example.com/oauth/authorize", token_url="https://x.example.com/t"),),
    )
    moved = provider.moved("http://127.0.0.1:8000")
    assert moved.base_url == "http://127.0.0.1:8000/admin/api"
    assert moved.oauth.authorize_url == "http://127.0.0.1:8000/oauth/authorize"
    assert moved.oauth.token_url == "http://127.0.0.1:8000/t"
    assert moved.oauth.revoke_url == ""
    assert moved.origins().holds("http", "127.0.0.1", 8000)
    assert not moved.origins().holds("https", "shop.example.com", None)
    sandbox = provider.signing_in_at("https://test.example.com")
    assert (sandbox.base_url, sandbox.oauth.token_url) == (provider.base_url, "https://test.example.com/t")


def test_a_key_goes_into_the_header_or_the_url():
    assert (ApiKey(prefix="t ").headers("k"), ApiKey(prefix="t ").params("k")) == ({"X-API-Key": "t k"}, {})
    inside = ApiKey(query="key", prefix="t ")
    assert (inside.headers("k"), inside.params("k")) == ({}, {"key": "t k"})


def test_a_colon_would_end_the_name():
    with pytest.raises(InvalidInput) as caught:
        Basic().headers("a:b", "c")
    assert str(caught.value) == "basic: a user name cannot contain a colon (RFC 7617, 2)"
    assert Basic().headers("a", "b:c") == {"Authorization": "Basic YTpiOmM="}


@pytest.mark.parametrize(
    ("urls", "expected"),
    [
        ({"token_url": "https://{shop}.example/t"}, True),
        ({"token_url": "{home}/t"}, True),
        ({"token_url": TOKEN, "refresh_url": "https://{shop}.example/t"}, True),
        ({"token_url": "https://a.example/{shop}", "authorize_url": "https://{shop}.example/a"}, False),
    ],
)
def test_whether_each_account_has_a_token_endpoint_of_its_own(urls, expected):
    assert OAuth2(**urls).at_tenants is expected


PLAIN = OAuth2(token_url=TOKEN, authorize_url="https://login.example.com/a")


@pytest.mark.parametrize(
    ("facts", "iss", "expected"),
    [
        (PLAIN, None, True),
        (PLAIN, "https://auth.example.com", True),
        (PLAIN, "https://login.example.com/", True),
        (PLAIN, "https://evil.test", False),
        (PLAIN, "http://auth.example.com", False),
        (PLAIN, "auth.example.com", False),
        (PLAIN, "", False),
        (OAuth2(token_url=TOKEN), "https://auth.example.com/x", True),
        (OAuth2(token_url=TOKEN, issuer="https://is.example.com"), "https://is.example.com", True),
        (OAuth2(token_url=TOKEN, issuer="https://is.example.com"), "https://is.example.com/", False),
        (OAuth2(token_url=TOKEN, issuer="https://is.example.com"), "https://auth.example.com", False),
        (OAuth2(token_url=TOKEN, issuer="https://is.example.com"), None, False),
    ],
)
def test_from_which_server_a_callback_may_come(facts, iss, expected):
    assert facts.is_issuer(iss) is expected


EVERYWHERE = OAuth2(
    authorize_url="https://{shop}.example/authorize",
    token_url="https://{shop}.example/token",
    refresh_url="https://auth.example/refresh",
    issuer="https://{shop}.example",
    guarded=True,
)


def addresses(oauth):
    return oauth.authorize_url, oauth.token_url, oauth.refresh_url, oauth.revoke_url, oauth.issuer, oauth.guarded


def test_the_addresses_of_one_account():
    assert addresses(EVERYWHERE.filled({"shop": "acme"})) == (
        "https://acme.example/authorize", "https://acme.example/token", "https://auth.example/refresh", "",
        "https://acme.example", True,
    )  # fmt: skip
    assert addresses(EVERYWHERE.moved("http://127.0.0.1:8000")) == (
        "http://127.0.0.1:8000/authorize", "http://127.0.0.1:8000/token", "http://127.0.0.1:8000/refresh", "",
        "https://{shop}.example", False,
    )  # fmt: skip
    assert addresses(EVERYWHERE.following("https://{shop}.example", "https://git.acme.example")) == (
        "https://git.acme.example/authorize", "https://git.acme.example/token", "https://auth.example/refresh", "",
        "https://{shop}.example", True,
    )  # fmt: skip


def test_scopes_are_separated_by_what_the_provider_says():
    assert OAuth2(token_url=TOKEN, scopes=("b", "a")).scope_text() == "b a"
    assert OAuth2(token_url=TOKEN).scope_text() == ""


@pytest.mark.parametrize("url", ["{home}/token", "https://h.test/token", "http://127.0.0.1/token"])
@pytest.mark.parametrize("name", ["authorize_url", "token_url", "refresh_url", "revoke_url"])
def test_each_address_is_checked(name, url):
    assert getattr(OAuth2(**{"token_url": TOKEN, name: url}), name) == url
    for wrong, told in [("http://h.test/t", "must be https"), ("https://{a b}/", "placeholder")]:
        with pytest.raises(InvalidInput, match=told):
            OAuth2(**{"token_url": TOKEN, name: wrong})
