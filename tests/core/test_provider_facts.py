"""What a provider's facts come to: for one account, for one app, and for those who read them."""

from __future__ import annotations

from datetime import date

import pytest

from resilient.core.base.budgets import BudgetFields
from resilient.core.base.errors import FailureKind, InvalidInput
from resilient.core.base.exchange import RequestFacts
from resilient.core.gates.policy import Tenancy
from resilient.core.gates.rate_limit import Limit
from resilient.core.gates.retry_after import WaitDialect
from resilient.core.provider.auth import ApiKey, Basic, Bearer, OAuth2
from resilient.core.provider.facts import Idempotency, Provider
from resilient.core.provider.rules import Errors, Rule, Wait

TOKEN = "https://auth.example.com/token"


def provider(**facts):
    return Provider(**{"name": "p", **facts})


# -- keys --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "fields", "carried"),
    [
        ({}, ({"Idempotency-Key": "k"}, {}), ("/v1/a", {"idempotency-key": "k"}, {"q": "x"})),
        ({"header": "X-Key"}, ({"X-Key": "k"}, {}), ("/v1/a", {"x-key": "k"}, {})),
        ({"quoted": True}, ({"Idempotency-Key": '"k"'}, {}), ("/v1/a", {"idempotency-key": '"k"'}, {})),
        ({"query": "q"}, ({}, {"q": "k"}), ("/v1/a", {"idempotency-key": "x"}, {"q": "k"})),
        ({"in_path": True}, ({}, {}), ("/v1/a/k", {"idempotency-key": "x"}, {})),
    ],
)
def test_where_a_request_carries_its_key(facts, fields, carried):
    made = Idempotency(**facts)
    assert made.fields("k") == fields
    assert made.key_of(*carried) == "k"
    if not made.in_path:
        assert made.key_of("/v1/a", {}, {}) is None


def test_a_key_is_read_without_its_quotes_and_with_all_else():
    assert Idempotency(quoted=True).key_of("/v1/a", {"idempotency-key": '"X"k"X"'}, {}) == 'X"k"X'


@pytest.mark.parametrize(
    ("facts", "method", "path", "expected"),
    [
        ({}, "POST", "/v1/a", True),
        ({}, "GET", "/v1/a", False),
        ({"paths": ("/a", "/b*")}, "POST", "/bc", True),
        ({"paths": ("/a",)}, "POST", "/A", False),
        ({"in_path": True}, "POST", "/v1/key", True),
        ({"in_path": True}, "POST", "/v1/", False),  # no key was written
        ({}, "POST", "/v1/", True),
    ],
)
def test_which_requests_may_carry_one(facts, method, path, expected):
    assert Idempotency(**facts).covers(method, path) is expected


# -- what others read --------------------------------------------------------------------------------------------------


def test_the_names_of_its_budgets_and_waits_without_them():
    fields = (BudgetFields("a", limit="X-Limit", remaining="X-Left"), BudgetFields("b", used="x-used", reset="x-reset"))
    made = provider(waits=WaitDialect(budgets=(*fields, BudgetFields("c", combined="x-both"))))
    stated = {"x-limit", "x-left", "x-used", "x-reset", "x-both"}
    assert made.budget_names == stated | {"ratelimit", "ratelimit-policy"}
    assert (made.floors, made.waits.budgets != ()) == (WaitDialect(budgets=()), True)


def test_parameters_that_carry_a_key():
    ways = (ApiKey(query="key"), ApiKey(), Bearer(), ApiKey(query="token"))
    assert provider(auth=ways).secret_params == {"key", "token"}
    assert provider().secret_params == frozenset()


@pytest.mark.parametrize(
    ("facts", "tenancy"),
    [
        ({"base_url": "https://api.example.com"}, Tenancy.SHARED),
        ({"base_url": "https://{shop}.shop.example"}, Tenancy.SUBDOMAIN),
        ({"base_url": "https://{home}"}, Tenancy.APART),
        ({"base_url": "https://{home}", "hosts": ("*.example.com",)}, Tenancy.SUBDOMAIN),
    ],
)
def test_what_its_accounts_share(facts, tenancy):
    assert provider(**facts).tenancy is tenancy


def quota(period):
    return Errors(rules=(Rule(FailureKind.AUTH), Rule(FailureKind.QUOTA, wait=Wait(period=period))))


@pytest.mark.parametrize(
    ("facts", "seconds"),
    [
        ({}, 0),
        ({"limits": {"account": [Limit(1, per=5), Limit(2, per=9)], "provider": [Limit(1, per=7)]}}, 9),
        ({"waits": WaitDialect(budgets=(BudgetFields("a", remaining="x", window=60.0),))}, 60),
        ({"waits": WaitDialect(budgets=(BudgetFields("a", remaining="x"),))}, 0),
        ({"errors": quota("hour")}, 3_600),
        ({"errors": quota("day")}, 86_400),
        ({"errors": Errors(rules=(Rule(FailureKind.QUOTA, wait=Wait(fallback=9.0)),))}, 0),
    ],
)
def test_its_longest_window(facts, seconds):
    assert provider(**facts).longest_window == seconds


def test_whether_a_success_is_read():
    dialect = Errors(rules=(Rule(FailureKind.AUTH, status=299, text="a"),))
    assert not provider().reads_success
    assert provider(cost=lambda _: 1).reads_success
    assert provider(errors=dialect).reads_success


@pytest.mark.parametrize(
    ("rule", "reads"),
    [
        (Rule(FailureKind.AUTH, status=200, text="a"), True),
        (Rule(FailureKind.AUTH, status=range(299, 301), text="a"), True),
        (Rule(FailureKind.AUTH, status=(199, 300), text="a"), False),
        (Rule(FailureKind.AUTH), False),
        (Rule(None, status=200), False),
    ],
)
def test_a_dialect_that_names_a_success_has_it_read(rule, reads):
    assert Errors(rules=(Rule(FailureKind.CONFLICT), rule)).reads_success is reads


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("POST", "/v1/a/query", True), ("POST", "/search", True), ("post", "/search", False), ("PUT", "/search", False),
        ("POST", "/searching", False), ("POST", "/a b", True),
    ],
)  # fmt: skip
def test_what_changes_nothing(method, path, expected):
    assert provider(reads=("POST /v1/*/query", "POST /search", "POST /a b")).is_read(method, path) is expected
    assert provider().is_read(method, path) is False


# -- one account -------------------------------------------------------------------------------------------------------


SHOP = provider(
    base_url="https://{shop}.example.com/v1",
    headers={"X-V": "1", "X-T": "{tenant}"},
    auth=(
        Basic(),
        OAuth2(token_url="https://{shop}.example.com/t", authorize_url="https://{shop}.example.com/a"),
        Bearer(),
    ),
)


def test_the_facts_of_one_account():
    assert (SHOP.placeholders, SHOP.oauth.kind) == ({"shop", "tenant"}, "oauth2")
    made = SHOP.filled(shop="acme")
    assert (made.base_url, made.headers) == ("https://acme.example.com/v1", {"X-V": "1", "X-T": "{tenant}"})
    assert [one.kind for one in made.auth] == ["basic", "oauth2", "bearer"]
    assert made.oauth.token_url == "https://acme.example.com/t"
    assert SHOP.filled(shop="acme", tenant="5").headers == {"X-V": "1", "X-T": "5"}
    assert SHOP.base_url_for({"shop": "acme"}) == "https://acme.example.com/v1"
    assert SHOP.base_url_for({}) == ""
    assert SHOP.headers_for({"tenant": "5"}) == {"X-V": "1", "X-T": "5"}
    assert SHOP.headers_for({}) == {"X-V": "1"}


def test_without_oauth_there_are_no_facts_of_it():
    made = provider(auth=(Basic(), Bearer()))
    assert (made.oauth, made.oauth_for({})) == (None, None)
    assert made.filled().auth == made.auth


APART = "https://{home}/v1"


@pytest.mark.parametrize(
    ("facts", "template", "address", "guarded"),
    [
        ({}, APART, "https://a.example/v1", True),
        ({}, APART, "https://a.example:8443/v1", True),
        ({}, "{home}/v1", "https://a.example/v1", True),
        ({}, APART, "", False),
        ({}, APART, "https://{home}/v1", False),  # an answer may tell it
        ({}, "https://a.example", "http://127.0.0.1", False),  # the facts' own word
        ({}, "https://{shop}.shop.example", "https://a.shop.example", False),
        ({"hosts": ("*.example",)}, APART, "https://a.example/v1", False),
        ({"hosts": ("a.example",)}, "https://{shop}.shop.example", "https://a.shop.example", False),
        ({"private_hosts": ("10.0.0.1",)}, APART, "http://10.0.0.1/v1", False),
        ({"private_hosts": ("acme.internal", "b")}, APART, "https://acme.internal/v1", False),
        ({"private_hosts": ("*",)}, APART, "http://10.0.0.1/v1", False),
        ({"private_hosts": ("10.0.0.2",)}, APART, "https://a.example/v1", True),
    ],
)
def test_where_only_public_addresses_are_connected_to(facts, template, address, guarded):
    assert provider(**facts).check_address(template, address) is guarded


OWN = (
    "an account's own host must be public and speak https; for development and networks of your own:"
    " p.provider(private_hosts=({!r},))"
)
STRANGER = (
    "is not among the hosts of provider 'p' (*.a.example, b.example): declare its host, or secrets would go to a"
    " stranger"
)


@pytest.mark.parametrize(
    ("facts", "address", "message"),
    [
        ({}, "http://a.example/?key=canary", f"'http://a.example/?key=…': {OWN.format('a.example')}"),
        ({}, "https://10.0.0.1/v1", f"'https://10.0.0.1/v1': {OWN.format('10.0.0.1')}"),
        (
            {"private_hosts": ("b.example",)},
            "https://acme.internal/v1",
            f"'https://acme.internal/v1': {OWN.format('acme.internal')}",
        ),
        ({"hosts": ("*.a.example", "b.example")}, "https://c.example/?key=canary",
         f"'https://c.example/?key=…' {STRANGER}"),
        ({"hosts": ("*.a.example", "b.example")}, "http://b.example", f"'http://b.example' {STRANGER}"),
        ({"hosts": ("*.a.example", "b.example")}, "https://b.example:8443", f"'https://b.example:8443' {STRANGER}"),
    ],
)  # fmt: skip
def test_an_accounts_own_host_is_one_that_may_be_called(facts, address, message):
    with pytest.raises(InvalidInput) as caught:
        provider(**facts).check_address(APART, address)
    assert str(caught.value) == message


@pytest.mark.parametrize("address", ["a.example", "ftp://a.example", "https://a@b.example"])
@pytest.mark.parametrize("template", [APART, "https://{shop}.shop.example"])
def test_an_accounts_address_is_one(template, address):
    with pytest.raises(InvalidInput, match="absolute URL"):
        provider().check_address(template, address)


@pytest.mark.parametrize("name", ["authorize_url", "token_url", "refresh_url", "revoke_url"])
def test_the_token_endpoint_that_an_account_chose_is_guarded(name):
    made = provider(auth=(OAuth2(**{"token_url": TOKEN, name: "https://{home}/t"}),))
    assert made.oauth_for({"home": "a.example"}).guarded is True
    assert getattr(made.oauth_for({"home": "a.example"}), name) == "https://a.example/t"
    assert made.oauth_for({}).guarded is False
    with pytest.raises(InvalidInput, match="must be public"):
        made.oauth_for({"home": "10.0.0.1"})


@pytest.mark.parametrize(
    ("base_url", "hosts", "own", "trusted"),
    [
        ("https://api.example.com", (), None, ["api.example.com"]),
        ("https://api.example.com", ("b.example.com",), None, ["api.example.com", "b.example.com"]),
        ("https://{shop}.example.com", ("b.example.com",), None, ["b.example.com"]),
        ("https://{shop}.example.com", (), "https://a.example.com", ["a.example.com"]),
        ("https://{shop}.example.com", ("*.example.com",), "https://a.example.com", ["a.example.com"]),
    ],
)
def test_the_hosts_that_get_credentials(base_url, hosts, own, trusted):
    names = ["api.example.com", "b.example.com", "a.example.com", "c.test"]
    origins = provider(base_url=base_url, hosts=hosts).origins(own)
    assert [name for name in names if origins.holds("https", name, None)] == sorted(trusted, key=names.index)


def test_the_refusal_of_an_account_at_another_host_names_the_provider():
    with pytest.raises(InvalidInput, match=r"^'https://c\.test' is not among the hosts of provider 'p' \(a\.test\)"):
        provider(hosts=("a.test",)).origins("https://c.test")


# -- one app -----------------------------------------------------------------------------------------------------------

HERE = provider(
    base_url="https://api.example.com/v1",
    hosts=("upload.example.com",),
    whoami="GET https://api.example.com/me",
    auth=(
        Bearer(),
        OAuth2(authorize_url="https://login.example.com/a", token_url="https://api.example.com/t", scopes=("old",)),
    ),
)


def places(made):
    return made.base_url, made.oauth.authorize_url, made.oauth.token_url, made.whoami


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, (HERE.base_url, HERE.oauth.authorize_url, HERE.oauth.token_url, HERE.whoami)),
        (
            {"base_url": "https://acme.test/api"},
            ("https://acme.test/api", "https://login.example.com/a", "https://acme.test/t", "GET https://acme.test/me"),
        ),
        (
            {"base_url": "https://api.example.com/v2"},
            ("https://api.example.com/v2", "https://login.example.com/a", "https://api.example.com/t", HERE.whoami),
        ),
        (
            {"sign_in_at": "https://box.test"},
            (HERE.base_url, "https://box.test/a", "https://box.test/t", HERE.whoami),
        ),
        (
            {"sign_in_at": "https://box.test", "base_url": "https://acme.test"},
            ("https://acme.test", "https://box.test/a", "https://box.test/t", "GET https://acme.test/me"),
        ),
        (
            {"base_url": "https://acme.test", "whoami": "GET /you"},
            ("https://acme.test", "https://login.example.com/a", "https://acme.test/t", "GET /you"),
        ),
        (
            {"auth": (OAuth2(token_url=TOKEN),), "base_url": "https://acme.test"},
            ("https://acme.test", "", TOKEN, "GET https://acme.test/me"),
        ),
        (
            {"auth": (OAuth2(token_url=TOKEN),), "sign_in_at": "https://box.test"},
            (HERE.base_url, "", "https://box.test/token", HERE.whoami),
        ),
    ],
)
def test_the_addresses_of_an_app(own, expected):
    made = HERE.configured("id", **own)
    assert places(made) == expected
    assert made.oauth.client_id == "id"


def test_facts_without_an_address_follow_no_app():
    made = provider(auth=(OAuth2(token_url=TOKEN),)).configured(base_url="https://acme.test")
    assert places(made) == ("https://acme.test", "", TOKEN, "")


def test_the_client_of_an_app():
    own = {
        "redirect_uri": "https://app.test/cb", "scopes": ("a",), "authorize_params": {"a": "1"}, "client_auth": "jwt",
        "key_header": {"kid": "1"},
    }  # fmt: skip
    made = HERE.configured("id", "secret", name="q", hosts=(), **own)
    assert [getattr(made.oauth, name) for name in own] == list(own.values())
    assert (made.oauth.client_id, made.oauth.client_secret, made.name, made.hosts) == ("id", "secret", "q", ())
    assert [one.kind for one in made.auth] == ["bearer", "oauth2"]
    assert HERE.configured(auth=()).auth == ()
    kept = HERE.configured(scopes=())
    assert (kept.oauth.scopes, kept.oauth.client_id, kept.oauth.client_secret) == (("old",), "", "")


@pytest.mark.parametrize("name", ["floors", "budget_names", "tenancy"])
def test_what_is_computed_is_no_word_of_an_app(name):
    with pytest.raises(InvalidInput, match=f"^provider 'p': {name}= is none of anonymous, "):
        HERE.configured(**{name: None})


def test_the_facts_at_another_origin():
    made = HERE.moved("http://127.0.0.1:8000")
    at = "http://127.0.0.1:8000"
    assert places(made) == (f"{at}/v1", f"{at}/a", f"{at}/t", f"GET {at}/me")
    assert (made.hosts, [one.kind for one in made.auth]) == ((at,), ["bearer", "oauth2"])
    sandbox = HERE.signing_in_at("https://box.test")
    assert places(sandbox) == (HERE.base_url, "https://box.test/a", "https://box.test/t", HERE.whoami)


@pytest.mark.parametrize(
    ("whoami", "asked", "below"),
    [
        ("GET /me", ("GET", "https://acme.test/v2/me"), "GET /me"),
        ("HEAD /me?of=https://b.test", ("HEAD", "https://acme.test/v2/me?of=https://b.test"), None),
        ("GET https://api.example.com/me", ("GET", "https://acme.test/me"), "GET https://acme.test/me"),
        ("GET https://api.example.com/a b", ("GET", "https://acme.test/a b"), "GET https://acme.test/a b"),
    ],
)
def test_the_test_request_goes_to_the_accounts_own_host(whoami, asked, below):
    made = provider(base_url="https://api.example.com/v1", whoami=whoami)
    assert made.whoami_at("https://acme.test/v2/") == made.whoami_at("https://acme.test/v2") == asked
    assert made.whoami_at("https://acme.test/X/") == (asked[0], asked[1].replace("/v2", "/X"))
    assert made.configured(base_url="https://acme.test/v2").whoami == (below or whoami)


def test_a_query_stays_where_it_is():
    query = '{ viewer(of: "https://api.example.com/v1") { id } }'
    made = provider(base_url="https://api.example.com/v1", whoami=query)
    assert made.configured(base_url="https://acme.test").whoami == query


def test_the_route_is_called_by_others():
    def route(asked: RequestFacts):
        return "search", 1.0

    assert provider(route=route, verified_on=date(2026, 1, 1)).route is route
