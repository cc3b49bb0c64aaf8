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
