"""Where credentials may go: the hosts that a provider declares, and the account's own."""

import pytest

from resilient.core.base.errors import InvalidInput
from resilient.core.base.hosts import Origins, host_pattern, origin_of


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("https://API.example.com/v1?a=b", ("https", "api.example.com", 443)),
        ("http://api.example.com", ("http", "api.example.com", 80)),
        ("https://api.example.com:8443", ("https", "api.example.com", 8443)),
        ("http://[::1]:443/", ("http", "::1", 443)),
    ],
)
def test_an_origin_is_scheme_host_and_port(url, origin):
    assert origin_of(url) == origin


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("api.example.com", ("https", "api.example.com", 443)),
        ("Api.Example.com:8443", ("https", "api.example.com", 8443)),
        ("*.example.com", ("https", "*.example.com", 443)),
        ("*.example.com:8443", ("https", "*.example.com", 8443)),
        ("http://127.0.0.1:8000", ("http", "127.0.0.1", 8000)),
        ("http://api.example.com", ("http", "api.example.com", 80)),
        ("[::1]:8000", ("https", "::1", 8000)),
    ],
)
def test_a_declared_host_is_an_origin(text, origin):
    assert host_pattern(text) == origin


@pytest.mark.parametrize("text", ["", "*", "*example.com", "a.*.com", "api.example.com/v1", "u@api.example.com", "a b"])
def test_what_is_no_host_is_refused_with_three_that_are(text):
    with pytest.raises(InvalidInput) as caught:
        host_pattern(text)
    assert str(caught.value) == (
        f"{text!r} is no host: write 'api.example.com', '*.example.com' or 'http://127.0.0.1:8000'"
    )


HOSTS = ("login.example.com", "*.shops.example", "*.deep.example:8443", "http://127.0.0.1:8000")


@pytest.mark.parametrize(
    ("place", "is_trusted"),
    [
        (("https", "api.example.com", None), True),  # of the base URL
        (("https", "API.Example.com", 443), True),
        (("https", "api.example.com", 8443), False),
        (("http", "api.example.com", None), False),
        (("http", "api.example.com", 443), False),
        (("https", "login.example.com", None), True),
        (("https", "a.login.example.com", None), False),
        (("https", "one.shops.example", None), True),
        (("https", "a.one.shops.example", 443), True),
        (("https", "ONE.shops.example", None), True),
        (("https", "shops.example", None), False),
        (("https", "evilshops.example", None), False),
        (("https", "one.shops.example.evil.test", None), False),
        (("http", "one.shops.example", None), False),
        (("http", "one.shops.example", 443), False),
        (("https", "one.shops.example", 8443), False),
        (("https", "one.deep.example", 8443), True),
        (("https", "one.deep.example", None), False),
        (("http", "127.0.0.1", 8000), True),
        (("http", "127.0.0.1", None), False),
        (("https", "127.0.0.1", 8000), False),
        (("ftp", "api.example.com", None), False),
    ],
)
def test_credentials_go_to_declared_origins_alone(place, is_trusted):
    origins = Origins.of("api", "https://api.example.com/v1", HOSTS)
    assert origins.holds(*place) is is_trusted
    assert origins.holds(*place) is is_trusted, "remembered"


@pytest.mark.parametrize(
    ("base_url", "hosts", "own", "declared"),
    [
        ("", (), "", False),
        ("https://api.example.com", (), "", True),
        ("", ("api.example.com",), "", True),
        ("", ("*.example.com",), "", True),
        ("", (), "https://mine.example.com", True),
    ],
)
def test_an_empty_set_says_nothing_about_any_origin(base_url, hosts, own, declared):
    assert Origins.of("api", base_url, hosts, own).declared is declared


def test_an_account_has_the_exact_origins_and_its_own():
    mine = Origins.of("shops", "https://api.example.com", HOSTS, "https://one.shops.example/admin")
    trusted = [("https", "one.shops.example"), ("https", "login.example.com"), ("https", "api.example.com")]
    assert all(mine.holds(*one, None) for one in trusted)
    assert not mine.holds("https", "two.shops.example", None), "another tenant's"


def test_where_nothing_is_declared_an_account_says_where():
    mine = Origins.of("any", "", (), "http://127.0.0.1:8000/v1")
    assert mine.holds("http", "127.0.0.1", 8000)
    assert not mine.holds("http", "127.0.0.1", 8001)


@pytest.mark.parametrize(
    ("base_url", "hosts", "listed"),
    [
        ("https://api.example.com/v1", (), "https://api.example.com/v1"),
        ("", ("*.shops.example",), "*.shops.example"),
        ("https://api.example.com", ("a.example", "*.shops.example"), "a.example, *.shops.example"),
    ],
)
def test_an_account_of_another_host_is_refused_without_its_secrets(base_url, hosts, listed):
    with pytest.raises(InvalidInput) as caught:
        Origins.of("shops", base_url, hosts, "https://evil.test/?key=canary")
    assert str(caught.value) == (
        f"'https://evil.test/?key=…' is not among the hosts of provider 'shops' ({listed}): declare its host, or"
        " credentials would go to a stranger"
    )


def test_however_many_hosts_are_asked_for_few_are_remembered():
    origins = Origins.of("shops", "", ("*.shops.example",))
    for n in range(1_100):
        assert origins.holds("https", f"{n}.shops.example", None)
        assert not origins.holds("https", f"{n}.evil.test", None)
    assert len(origins._answers) == 1_024
