"""Addresses filled per account lead nowhere else."""

import pytest

from resilient.core.base.errors import InvalidInput
from resilient.core.provider.facts import Provider
from resilient.core.provider.placeholders import fill_header, fill_url, names_in

SHOP = "https://{shop}.example.com/admin/{version}"


def test_filled():
    assert fill_url(SHOP, {"shop": "acme", "version": "2026-07"}) == "https://acme.example.com/admin/2026-07"
    assert fill_url(SHOP, {"shop": "acme"}) == "https://acme.example.com/admin/{version}"
    assert fill_url("{origin}/v1", {"origin": "https://a.my.example.com/"}) == "https://a.my.example.com/v1"
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
