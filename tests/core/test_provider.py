"""A provider's declaration: what it accepts, where credentials may go, how paths are read."""

import importlib

import pytest

import providers.github
import providers.gitlab
import providers.hubspot
import providers.salesforce
from resilient.core.base.body import hidden, pick
from resilient.core.base.errors import InvalidInput
from resilient.core.base.hosts import without_secrets
from resilient.core.gates.rate_limit import Limit
from resilient.core.provider.facts import GENERIC, Idempotency, Provider


@pytest.mark.parametrize("name", ["", "a/b", "git hub", "ü"])
def test_a_name_is_a_segment_of_a_key(name):
    with pytest.raises(InvalidInput, match="segment"):
        Provider(name=name)


@pytest.mark.parametrize("url", ["api.example.com", "ftp://example.com", "https://", "http://h:99999/"])
def test_a_base_url_is_absolute(url):
    with pytest.raises(InvalidInput, match="https://api"):
        Provider(name="p", base_url=url)


@pytest.mark.parametrize("host", ["", "a b", "*", "a.*.com", "ftp://x", "*.*"])
def test_a_host_is_a_host(host):
    with pytest.raises(InvalidInput):
        Provider(name="p", hosts=(host,))


def test_limits_by_level_become_patterns():
    a, b, c = Limit(100, per=1), Limit(10, per=1), Limit(1, per=1)
    provider = Provider(
        name="github",
        limits={"provider": [a], "account": [b], "account/search": [c]},
        concurrency={"account": 4},
    )
    assert provider.limit_patterns() == {"github": [a], "github/*": [b], "github/*/search": [c]}
    assert provider.concurrency_patterns() == {"github/*": 4}


@pytest.mark.parametrize("level", ["acount", "provider/x", "account/", "*"])
def test_an_unknown_level_is_refused(level):
    with pytest.raises(InvalidInput, match="level"):
        Provider(name="p", limits={level: []})


P = Provider(
    name="p",
    base_url="https://api.example.com/v1",
    hosts=("upload.example.com", "*.shops.example", "http://127.0.0.1:8000"),
)


@pytest.mark.parametrize(
    ("scheme", "host", "port", "trusted"),
    [
        ("https", "api.example.com", None, True),
        ("https", "API.example.com", 443, True),
        ("https", "upload.example.com", None, True),
        ("https", "one.shops.example", None, True),
        ("https", "a.b.shops.example", None, True),
        ("http", "127.0.0.1", 8000, True),
        ("http", "api.example.com", None, False),
        ("https", "api.example.com", 8443, False),
        ("https", "shops.example", None, False),
        ("https", "evilshops.example", None, False),
        ("https", "api.example.com.evil.test", None, False),
        ("http", "127.0.0.1", 8001, False),
        ("https", "127.0.0.1", 8000, False),
    ],
)
def test_credentials_go_to_declared_origins_only(scheme, host, port, trusted):
    assert P.origins().holds(scheme, host, port) is trusted


def test_an_accounts_own_address_replaces_the_patterns():
    shops = Provider(name="shops", base_url="https://{shop}.shops.example/api", hosts=("*.shops.example",))
    mine = shops.origins("https://one.shops.example/api")
    assert mine.holds("https", "one.shops.example", None)
    assert not mine.holds("https", "two.shops.example", None)
    with pytest.raises(InvalidInput, match="stranger"):
        shops.origins("https://shops.example.evil.test/api")


def test_a_provider_without_hosts_declares_nothing():
    assert not GENERIC.origins().declared
    assert not GENERIC.origins().holds("https", "api.example.com", None)
    own = GENERIC.origins("https://api.example.com")
    assert own.declared
    assert own.holds("https", "api.example.com", None)


def test_reads_and_keys_by_pattern():
    provider = Provider(
        name="p",
        reads=("POST /v1/*/query", "POST /search"),
        idempotency=Idempotency(paths=("/v1/charges", "/v1/*/refund")),
    )
    assert provider.is_read("POST", "/v1/db/query")
    assert not provider.is_read("POST", "/v1/db")
    assert not provider.is_read("PUT", "/search")
    assert provider.idempotency.covers("POST", "/v1/charges")
    assert not provider.idempotency.covers("PUT", "/v1/charges")
    assert not provider.idempotency.covers("POST", "/v1/other")


BODY = {"error": {"code": 7, "reason": {".tag": "x"}}, "errors": [{"c": 1}, {"d": 2}, {"c": 3}], "list": [[1, 2]]}


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("error.code", [7]),
        ("error.reason['.tag']", ["x"]),
        ("errors[0].c", [1]),
        ("errors[].c", [1, 3]),
        ("errors[9].c", []),
        ("list[0][1]", [2]),
        ("error.*", [7, {".tag": "x"}]),
        ("error.*['.tag']", ["x"]),
        ("errors.*", []),
        ("error.code.more", []),
        ("nothing", []),
        ("", [BODY]),
    ],
)
def test_paths(path, found):
    assert pick(BODY, path) == found


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("a.*.token", {"a": {"x": {"token": ""}, "y": {"token": "", "id": 1}}, "list": [{"token": "T"}, 5]}),
        ("a.*", {"a": {"x": "", "y": ""}, "list": [{"token": "T"}, 5]}),
        ("*.y.token", {"a": {"x": {"token": "S"}, "y": {"token": "", "id": 1}}, "list": [{"token": "T"}, 5]}),
        ("list[0].token", {"a": {"x": {"token": "S"}, "y": {"token": "S", "id": 1}}, "list": [{"token": ""}, 5]}),
        ("list[].token", {"a": {"x": {"token": "S"}, "y": {"token": "S", "id": 1}}, "list": [{"token": ""}, 5]}),
        ("list[1]", {"a": {"x": {"token": "S"}, "y": {"token": "S", "id": 1}}, "list": ["", ""]}),
        ("['*']", {"a": "", "list": ""}),
    ],
)
def test_what_a_path_finds_it_hides(path, shown):
    body = {"a": {"x": {"token": "S"}, "y": {"token": "S", "id": 1}}, "list": [{"token": "T"}, 5]}
    assert hidden(body, path) == shown
    assert all(value == "" for value in pick(hidden(body, path), path))
    assert pick(body, path)


@pytest.mark.parametrize("path", ["a..b", "[x", "a[b]"])
def test_bad_paths_are_named(path):
    with pytest.raises(InvalidInput, match="path into a body"):
        pick({}, path)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://u:p@h.test/a?key=s3cret&x=1#frag", "https://h.test/a?key=…&x=…"),
        ("https://h.test/a#frag", "https://h.test/a"),
        ("https://h.test", "https://h.test"),
        ("https://u:p%40@h.test", "https://h.test"),
        ("/relative?token=abc", "/relative?token=…"),
        ("https://h.test?token=a/b@c", "https://h.test?token=…"),
        ("https://h.test/hook?s3cret&x=1&=t", "https://h.test/hook?…&x=…&=…"),
        ("https://h.test/hook?czNjcmV0cw==&czNjcmV0cw=&x=czNjcmV0cw==", "https://h.test/hook?…&…&x=…"),
    ],
)
def test_urls_for_people(url, shown):
    assert without_secrets(url) == shown


def test_nothing_secret_in_the_facts_repr():
    from resilient.core.base.exchange import AnswerFacts, RequestFacts

    asked = RequestFacts("GET", "https://h/?k=canary", "h", "/", body=b"canary", headers={"a": "canary"})
    assert "canary" not in repr(asked)
    assert "canary" not in repr(AnswerFacts(200, body={"a": "canary"}, text="canary"))


def test_an_address_of_ones_own_takes_the_token_endpoint_along():
    """Where both stand at one host; else codes and the client's secret would go to the public one."""
    gitlab = providers.gitlab.provider("id", "secret", base_url="https://git.acme.example/api/v4")
    assert gitlab.oauth.token_url == "https://git.acme.example/oauth/token"
    assert gitlab.oauth.authorize_url == "https://git.acme.example/oauth/authorize"
    hubspot = providers.hubspot.provider(base_url="https://api-eu1.hubapi.com")
    assert hubspot.oauth.token_url.startswith("https://api-eu1.hubapi.com/oauth/")
    assert hubspot.oauth.authorize_url.startswith("https://app.hubspot.com/")  # another host: it stays
    moved = providers.hubspot.provider(sign_in_at="https://login.acme.example")
    assert moved.oauth.authorize_url.startswith("https://login.acme.example/")
    assert moved.base_url == providers.hubspot.HUBSPOT.base_url


@pytest.mark.parametrize(
    ("base_url", "host"),
    [("https://ghe.acme.example/api/v3", "ghe.acme.example"), ("https://api.acme.ghe.com", "acme.ghe.com")],
)
def test_github_of_ones_own_signs_in_there(base_url, host):
    made = providers.github.provider(base_url=base_url, version="2022-11-28")
    assert made.oauth.authorize_url == f"https://{host}/login/oauth/authorize"
    assert made.oauth.token_url == f"https://{host}/login/oauth/access_token"
    assert made.headers["X-GitHub-Api-Version"] == "2022-11-28"
    assert providers.github.provider().oauth.token_url == "https://github.com/login/oauth/access_token"


def test_headers_are_added_to_the_providers_own():
    made = providers.github.provider(version="2022-11-28", headers={"X-Own": "1"})
    assert made.headers == {
        "Accept": "application/vnd.github+json", "X-GitHub-Api-Version": "2022-11-28", "X-Own": "1",
    }  # fmt: skip
    other = {"accept": "application/json", "x-github-api-version": "2021-01-01"}
    assert providers.github.provider(version="2022-11-28", headers=other).headers == other  # those of the same name
    assert providers.github.provider(headers={}).headers == providers.github.GITHUB.headers
    assert providers.github.GITHUB.headers["X-GitHub-Api-Version"] == "2026-03-10"


@pytest.mark.parametrize("module", ["intercom", "notion", "quickbooks", "stripe", "xero"])
def test_no_header_of_a_provider_is_lost_with_one_of_the_programs_own(module):
    loaded = importlib.import_module(f"providers.{module}")
    headers = loaded.provider().headers
    assert headers
    assert loaded.provider(headers={"X-Own": "1"}).headers == {**headers, "X-Own": "1"}


def test_the_host_of_a_gitlab_leaves_what_is_said_in_full():
    made = providers.gitlab.provider(host="git.acme.example", hosts=("uploads.acme.example",))
    assert made.hosts == ("uploads.acme.example",)
    assert made.base_url.startswith("https://git.acme.example/")
    made = providers.gitlab.provider(host="git.acme.example", base_url="https://api.acme.example/v4")
    assert made.base_url == "https://api.acme.example/v4"
    assert made.oauth.token_url.startswith("https://git.acme.example/")
    made = providers.gitlab.provider(host="git.acme.example", sign_in_at="https://login.acme.example")
    assert made.oauth.token_url.startswith("https://login.acme.example/")
    assert made.base_url.startswith("https://git.acme.example/")
    made = providers.gitlab.provider(host="git.acme.example", auth=providers.gitlab.GITLAB.auth)
    assert made.oauth.token_url.startswith("https://git.acme.example/")


def test_the_sandbox_of_a_salesforce_may_have_a_domain_of_its_own():
    login = "https://acme--dev.sandbox.my.salesforce.com"
    made = providers.salesforce.provider(sandbox=True, sign_in_at=login)
    assert made.oauth.token_url.startswith(f"{login}/")
    for auth in ({}, {"auth": providers.salesforce.SALESFORCE.auth}):
        made = providers.salesforce.provider(sandbox=True, **auth)
        assert made.oauth.token_url.startswith("https://test.salesforce.com/")
