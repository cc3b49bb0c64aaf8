"""URLs as strangers write them: read in one way, or not at all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.core.base.errors import InvalidInput
from resilient.core.base.hosts import address, origin_of, without_params, without_secrets
from resilient.core.base.loggers import urls
from resilient.core.sync.paginators import links
from resilient.core.sync.paging import PageRequest, PagingError

REFUSED = [
    "http://evil\\@good.example/",
    "http://good.example\\@evil/",
    "https://good.example\\.evil/",
    "https:\\\\good.example/",
    "https://user@good.example/",
    "https://user:pass@good.example/",
    "https://@good.example/",
    "https://good.example:x/",
    "https://good.example:/",
    "https://good.example:0/",
    "https://good.example:65536/",
    "https://good.example:080443/",
    "https://go\tod.example/",
    "https://good.example/\n",
    "https://good.example/a b",
    " https://good.example/",
    "https://good.example\x00/",
    "https://good.example/\x1b[0m",
    "https://good.example/\x85",
    "https://good.example\u3002evil/",
    "https://g\xf6od.example/",
    "https://\uff47ood.example/",
    "https://good.example\uff0fx",
    "https:///x",
    "https://",
    "//good.example/",
    "ftp://good.example/",
    "https:/good.example/",
    "https://[::1/",
    "https://::1]/",
    "https://good.example]/",
    "https://%67ood/",
    "https://good.example;evil/",
    "https://good,evil/",
    "https://a&b/",
    "https://{host}/",
    "https://good.example\ud800/",
    "",
]


@pytest.mark.parametrize("url", REFUSED)
def test_what_clients_read_in_different_ways_is_refused(url):
    with pytest.raises(InvalidInput) as caught:
        address(url)
    assert "pass" not in str(caught.value)
    assert str(caught.value).isprintable()


def test_a_refusal_says_what_to_write():
    with pytest.raises(InvalidInput) as caught:
        address("ftp://user:pass@example.com/a?key=canary")
    assert str(caught.value) == (
        "'ftp://example.com/a?key=…' is no absolute URL of an API: write 'https://api.example.com/v1', with a host of"
        " ASCII letters, and without user, backslash or blank"
    )


def test_of_a_long_url_the_beginning_is_shown():
    with pytest.raises(InvalidInput) as caught:
        address("ftp://" + "a" * 400)
    assert repr("ftp://" + "a" * 294) in str(caught.value)


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("https://API.example.com", ("https", "api.example.com", None, "/")),
        ("HTTPS://api.example.com:8443/a/b?c=d#e", ("https", "api.example.com", 8443, "/a/b")),
        ("http://127.0.0.1:8000/ü?q=ä", ("http", "127.0.0.1", 8000, "/ü")),
        ("http://[::1]:80/x@y:z", ("http", "::1", 80, "/x@y:z")),
        ("https://a_b-c.example?x=https://u:p@other/", ("https", "a_b-c.example", None, "/")),
        ("https://api.example.com:1/", ("https", "api.example.com", 1, "/")),
        ("https://api.example.com:65535/", ("https", "api.example.com", 65535, "/")),
        ("https://xn--mller-kva.example/", ("https", "xn--mller-kva.example", None, "/")),
    ],
)
def test_ordinary_urls(url, parts):
    assert tuple(address(url)) == parts


@given(st.text(alphabet="htps:/\\@?#[].%a1:é\t ", max_size=40))
def test_what_is_read_is_read_alike_by_everybody(tail):
    """httpx, urllib3 (requests) and the standard library agree about every URL that is not refused."""
    import urllib.parse

    import httpx
    import urllib3

    url = "http://good.example" + tail
    try:
        ours = address(url)
    except InvalidInput:
        return
    standard = urllib.parse.urlsplit(url)
    others = [
        (standard.hostname, standard.port),
        (parsed := urllib3.util.parse_url(url)) and (parsed.host, parsed.port),
    ]
    theirs = httpx.URL(url)
    others.append((theirs.host, theirs.port))
    assert {host for host, _ in others} == {ours.host}
    assert {port or 80 for _, port in others} == {ours.port or 80}


@pytest.mark.parametrize("url", ["http://evil\\@good.example/", "https://u:p@good.example/"])
def test_every_address_of_a_provider(url):
    with pytest.raises(InvalidInput):
        origin_of(url)


@pytest.mark.parametrize(
    "url",
    [
        "https://good.example\\@evil/",
        "https://good.example@evil/",
        "//evil/",
        "http://[",
        "https://good.example\n.evil/",
    ],
)
def test_where_the_next_page_is_said_to_be(url):
    with pytest.raises(PagingError):
        PageRequest("https://good.example/things").at(url)


@pytest.mark.parametrize(
    ("header", "found"),
    [
        ('<https://a/2>; rel="next", <https://a/9>; rel=last', {"next": "https://a/2", "last": "https://a/9"}),
        ('<a>;rel="next prev";title="x, y; rel=z"', {"next": "a", "prev": "a"}),
        ('<a>; title="\\"; rel=no"; rel=next', {"next": "a"}),
        ("<a>; rel=next, <b>; rel=next", {"next": "a"}),
        ("<a,b;c>;rel=next", {"next": "a,b;c"}),
        ("rel=next", {}), ("<a>", {}), ("<a>, rel=next", {}), ("", {}), ("<<a>>; ; ;;rel==next", {"next": "a"}),
    ],
)  # fmt: skip
def test_link_headers(header, found):
    assert links(header) == found


def test_logins_in_words_of_their_own():
    assert without_secrets("postgresql://u:p/w@host/db") == "postgresql://host/db"
    assert without_secrets("amqp://app:s:e@cret@host") == "amqp://host"


@pytest.mark.parametrize("secret", ["canary@w?x=y", "canary@w/x", "canary@w#x", "12/canary", "12?canary", "canary w?x"])
@pytest.mark.parametrize("scheme", ["postgresql", "postgresql+psycopg", "redis", "amqps"])
def test_an_address_of_a_database_that_can_be_read_in_two_ways_shows_no_password(scheme, secret):
    for behind in ("host/db", "host/db?password=x@canary", "host:5432/a@b"):
        address_ = f"{scheme}://user:{secret}@{behind}"
        shown = without_secrets(address_)
        assert "canary" not in shown, shown
        assert "user" not in shown
        if " " not in secret:
            assert "canary" not in urls(f"failed: {address_} is away")


@pytest.mark.parametrize("login", ["us/er:canary", "us?er:canary", "user:ca'nary", 'user:"canary"', "user:<canary>"])
def test_no_character_of_a_user_or_a_password_lets_the_rest_of_it_be_seen(login):
    assert "nary" not in urls(f"connecting to postgresql://{login}@host/db failed")
    assert "nary" not in without_secrets(f"postgresql://{login}@host/db")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://u:canary@h/users/@me", "https://…"),  # or is it a password with a slash?
        ("https://u:canary/w@h/x@y", "https://…"),
        ("https://h:8080/users/@me?x=1", "https://h:8080/users/@me?x=…"),
        ("https://[::1]:8080/users/@me", "https://[::1]:8080/users/@me"),
        ("sqlite:////data/b@c/app.db", "sqlite:////data/b@c/app.db"),  # a path: nobody logs in there
        ("sqlite+pysqlite:///data/b@c/app.db?key=canary", "sqlite+pysqlite:///data/b@c/app.db?key=…"),
        ("nats://h1:4222,nats://u:canary@h2:4222", "nats://h1:4222,nats://h2:4222"),
        ("nats://u:canary@h1:4222,nats://u:canary@h2:4222", "nats://h1:4222,nats://h2:4222"),
        ("nats://u:canary,nats://canary@h", "nats://h"),
        ("//u:canary@h/x?key=canary", "//h/x?key=…"),
        ("at https://h/a@b, postgresql://u:canary@w?x@h", "at https://h/a@b, postgresql://…"),
    ],
)
def test_an_at_sign_behind_the_host(url, shown):
    assert without_secrets(url) == shown


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://h/a?b=c", "https://h/a?b=…"),
        ("https://h/a?b=c=d&e&&f=#canary", "https://h/a?b=…&…&…"),
        ("https://h/a?b=c#canary&d", "https://h/a?b=…"),
        ("https://h/a#canary", "https://h/a"),
        ("https://u@h/a", "https://h/a"),
        ("https://h/users/ada@example.com", "https://h/users/ada@example.com"),
        ("https://h/to/mail://ada@example.com/x", "https://h/to/mail://ada@example.com/x"),
        ("https://h/x@y,https://u:p/w@other", "https://h/x@y,https://other"),
        ("to https://u:p@h/a it failed", "to https://h/a it failed"),
        ("no address at all", "no address at all"),
        ("", ""),
    ],
)
def test_what_people_see_of_a_url(url, shown):
    assert without_secrets(url) == shown


@pytest.mark.parametrize(
    ("url", "kept"),
    [
        ("https://h/a?key=1", "https://h/a"),
        ("https://h/a?key=1&b=2", "https://h/a?b=2"),
        ("https://h/a?a=0&key=1&b=2=3&key=4&token", "https://h/a?a=0&b=2=3"),
        ("https://h/a?key=1=2", "https://h/a"),
        ("https://h/a?k%65y=1&+=2&a=key", "https://h/a?+=2&a=key"),
        ("https://h/a?key=1#key=2#3", "https://h/a#key=2#3"),
        ("https://h/a?b=1?key=2&key=3#f", "https://h/a?b=1?key=2#f"),
        ("https://h/key=1", "https://h/key=1"),
        ("https://h/a#f", "https://h/a#f"),
        ("https://h/a?a b=1&a+b=2&c d=3", "https://h/a?c d=3"),
    ],
)
def test_parameters_that_carry_a_key_are_taken_out(url, kept):
    assert without_params(url, frozenset({"key", "token", "a b"})) == kept


@pytest.mark.parametrize("url", ["https://h/a?key=1&b=2#c", "https://h/a?", "https://h/a"])
def test_where_none_carries_a_key_a_url_stays_as_it_is(url):
    assert without_params(url, frozenset()) == url
