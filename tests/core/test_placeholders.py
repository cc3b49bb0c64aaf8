"""Addresses filled per account lead nowhere else."""

import pytest

from resilient.core.base.errors import InvalidInput
from resilient.core.provider.facts import Provider
from resilient.core.provider.placeholders import (
    at_origin,
    check_placeholders,
    fill_header,
    fill_url,
    names_a_host,
    names_in,
    prefix_of,
)

SHOP = "https://{shop}.example.com/admin/{version}"


def test_filled():
    assert fill_url(SHOP, {"shop": "acme", "version": "2026-07"}) == "https://acme.example.com/admin/2026-07"
    assert fill_url(SHOP, {"shop": "acme"}) == "https://acme.example.com/admin/{version}"
    assert fill_url("{origin}/v1", {"origin": "https://a.my.example.com/"}) == "https://a.my.example.com/v1"
    assert fill_url("{origin}/v1", {"origin": "https://X/"}) == "https://X/v1"
    assert fill_url("https://{host}/v1", {"host": "matrix.example:8448"}) == "https://matrix.example:8448/v1"
    assert names_in(SHOP, "{a}") == {"shop", "version", "a"}


@pytest.mark.parametrize(
    "value",
    [
        "evil.test/",
        "evil.test#",
        "evil.test?",
        "a@evil.test",
        "evil.test\\",
        "a b",
        "",
        "..",
        "a/../b",
        "{x}",
        "a\n",
        "-a",
        "é",
        "a%2eb",
    ],
)
def test_a_value_does_not_change_where_it_leads(value):
    with pytest.raises(InvalidInput, match="shop"):
        fill_url(SHOP, {"shop": value})


@pytest.mark.parametrize("value", ["acme", "ftp://x", "https://", "https://a@b", "https://a/b", "//a", "javascript:x"])
def test_where_the_url_begins_with_it_it_is_an_origin(value):
    with pytest.raises(InvalidInput):
        fill_url("{origin}/v1", {"origin": value})


def test_headers():
    assert fill_header("{tenant}", {"tenant": "t 1"}) == "t 1"
    assert fill_header("{tenant}", {}) is None
    assert fill_header("2022-06-28", {}) == "2022-06-28"


def test_a_providers_facts_of_one_account():
    provider = Provider(name="p", base_url=SHOP, hosts=("*.example.com",), headers={"X-V": "1", "X-T": "{tenant}"})
    assert provider.placeholders == {"shop", "version", "tenant"}
    half = provider.filled(version="1")
    assert (half.base_url, half.headers) == ("https://{shop}.example.com/admin/1", {"X-V": "1", "X-T": "{tenant}"})
    assert half.headers_for({}) == {"X-V": "1"}
    assert half.headers_for({"tenant": "t"}) == {"X-V": "1", "X-T": "t"}
    assert half.filled(shop="acme", tenant="t").headers == {"X-V": "1", "X-T": "t"}


@pytest.mark.parametrize("text", ["{", "}", "{}", "{a b}", "{a", "https://{a}.example/}"])
def test_braces_are_placeholders(text):
    with pytest.raises(InvalidInput) as caught:
        check_placeholders(text)
    assert str(caught.value) == (
        f"{text!r}: a placeholder is a name of letters, digits and _ in braces, such as {{account_id}}"
    )
    assert check_placeholders("https://{a_1}.example/{b}") is None


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("https://{shop}.example.com/v1", True),
        ("https://example.com:{port}", True),
        ("{home}/v1", True),
        ("https://example.com/{shop}", False),
        ("https://example.com/v1/{shop}/a", False),
        ("https://example.com/to://{shop}", False),
        ("example.com/{shop}/a", False),
        ("", False),
    ],
)
def test_whether_an_account_names_the_host(template, expected):
    assert names_a_host(template) is expected


@pytest.mark.parametrize(
    ("url", "prefix", "moved"),
    [
        ("https://a.example/v1/x", "https://a.example", "http://127.0.0.1:8000/v1/x"),
        ("https://a.example:8443", "https://a.example:8443", "http://127.0.0.1:8000"),
        ("https://{shop}.example/v1?to=https://b.example/c", "https://{shop}.example",
         "http://127.0.0.1:8000/v1?to=https://b.example/c"),
        ("https://a.example/v1//x", "https://a.example", "http://127.0.0.1:8000/v1//x"),
        ("{home}", "{home}", "http://127.0.0.1:8000"),
        ("{home}/v1/x", "{home}", "http://127.0.0.1:8000/v1/x"),
        ("{home}/v1//x", "{home}", "http://127.0.0.1:8000/v1//x"),
        ("", "", ""),
    ],
)  # fmt: skip
def test_an_address_on_another_origin_keeps_its_path(url, prefix, moved):
    assert prefix_of(url) == prefix
    assert at_origin(url, "http://127.0.0.1:8000/") == at_origin(url, "http://127.0.0.1:8000") == moved
    assert at_origin(url, "http://X/") == moved.replace("127.0.0.1:8000", "X")
    with pytest.raises(InvalidInput):
        at_origin(url, "127.0.0.1")


LABEL = "give one name of letters, digits and ._~-"
ORIGIN = f"{LABEL}, or a whole origin such as https://acme.example.com"


@pytest.mark.parametrize(
    ("template", "value", "message"),
    [
        (SHOP, "a/b", f"'a/b' cannot be the shop of {SHOP}: {LABEL}"),
        (SHOP, "a..b", f"'a..b' cannot be the shop of {SHOP}: {LABEL}"),
        (SHOP, "https://a.example", f"'https://a.example' cannot be the shop of {SHOP}: {LABEL}"),
        ("{shop}/v1", "acme", f"'acme' cannot be the shop of {{shop}}/v1: {ORIGIN}"),
        ("{shop}/v1", "/", f"'/' cannot be the shop of {{shop}}/v1: {ORIGIN}"),
    ],
)
def test_what_a_refused_value_is_told(template, value, message):
    with pytest.raises(InvalidInput) as caught:
        fill_url(template, {"shop": value})
    assert str(caught.value) == message


def test_a_header_lacks_its_value_if_one_of_its_placeholders_does():
    assert fill_header("{a}/{b}", {"a": "1"}) is None
    assert fill_header("{a}/{b}", {"a": "1", "b": "2"}) == "1/2"
    assert fill_url("{a}/{b}", {"b": "2"}) == "{a}/2"
