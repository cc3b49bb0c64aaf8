"""The request for a page: edited, stored, and never led astray."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.core.base.errors import InvalidInput
from resilient.core.sync.paging import PageRequest, PagingError

HERE = PageRequest("https://api.example.com/v1/things?a=1&b=2")


@pytest.mark.parametrize(
    ("to", "url"),
    [
        ("https://api.example.com/v1/things?page=2", "https://api.example.com/v1/things?page=2"),
        ("/v2/x", "https://api.example.com/v2/x"),
        ("?page=3", "https://api.example.com/v1/things?page=3"),
        ("http://api.example.com/x", "https://api.example.com/x"),  # a server behind a proxy
        ("http://API.example.com:80/x", "https://API.example.com/x"),
        ("//api.example.com/x", "https://api.example.com/x"),
    ],
)
def test_the_next_page_is_on_the_same_host(to, url):
    assert HERE.at(to).url == url


@pytest.mark.parametrize("query", ["name=M%FCller&c=%FF%FE", "a=b%20c+d", "a;b=1;c", "x", "q=%&r=%zz"])
def test_what_is_not_changed_of_a_query_stays_as_it_is_written(query):
    """A latin-1 name, or a cursor of bytes, was another one on the second page."""
    first = PageRequest(f"https://api.example.com/x?{query}")
    assert first.with_query(page=2).url == f"https://api.example.com/x?{query}&page=2"
    assert first.with_query(page=2).with_query(page=None).url == first.url


def test_two_cursors_that_are_no_text_are_two_pages():
    pages = [PageRequest(f"https://api.example.com/x?c=%{byte}") for byte in ("FF", "FE")]
    assert pages[0].fingerprint != pages[1].fingerprint


def test_an_address_of_endless_length_is_no_page():
    assert HERE.at("?" + "a=1&" * 2_047 + "b=1").url.endswith("&b=1")
    with pytest.raises(PagingError, match="8,193 characters") as caught:
        HERE.at("?" + "a" * 8_192)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "to",
    [
        "https://evil.test/x",
        "//evil.test/x",
        "https://api.example.com.evil.test/",
        "https://api.example.com:8443/",
        "https://user@evil.test/",
        "http://api.example.com:8080/",
        "file:///etc/passwd",
        "javascript:alert(1)",
    ],
)
def test_an_answer_leads_to_no_other_host(to):
    with pytest.raises(PagingError, match="another host"):
        HERE.at(to)


def test_the_error_shows_no_values():
    with pytest.raises(PagingError) as caught:
        HERE.at("https://evil.test/?token=canary")
    assert "canary" not in str(caught.value)
    assert "canary" not in repr(PageRequest("https://h/?t=canary", body={"t": "canary"}, headers={"t": "canary"}))


def test_relative_urls_go_below_the_base():
    assert PageRequest("/users?x=1").on("https://h/v1/").url == "https://h/v1/users?x=1"
    assert PageRequest("Xusers").on("https://h/v1X/").url == "https://h/v1X/Xusers"
    assert PageRequest("/X").on("https://h//").url == "https://h/X"
    assert HERE.on("https://other") is HERE


def test_parameters():
    assert HERE.with_query(b=3, c="x y").url == "https://api.example.com/v1/things?a=1&b=3&c=x+y"
    assert HERE.with_query(a=None).url == "https://api.example.com/v1/things?b=2"
    assert PageRequest("https://h/?a=&b=1").with_query(c=2).url == "https://h/?a=&b=1&c=2"
    assert HERE.query("b") == "2"
    assert HERE.query("z") is None
    assert PageRequest("https://h/?a=&b").query("a") == ""


def test_the_body():
    request = PageRequest("https://h/", "POST", {"a": 1, "variables": {"n": 2}})
    assert request.with_body("variables.after", "c").body == {"a": 1, "variables": {"n": 2, "after": "c"}}
    assert request.body == {"a": 1, "variables": {"n": 2}}  # untouched
    assert request.with_body("x.y", 1).body["x"] == {"y": 1}
    assert request.with_body("a", None).body == {"variables": {"n": 2}}
    assert request.with_body("z", None) == request
    assert request.in_body("variables.n") == 2
    assert request.in_body("a.n") is None
    assert PageRequest("https://h/").with_body("cursor", "c").body == {"cursor": "c"}
    for body, path in (([1], "cursor"), ({"page": 3}, "page.after")):
        message = f"the request's body has no place for '{path}': it must be a JSON object"
        with pytest.raises(PagingError, match=f"^{re.escape(message)}$"):
            PageRequest("https://h/", "POST", body).with_body(path, "c")


def test_a_fingerprint_is_the_pages_own():
    assert HERE.fingerprint == PageRequest("https://api.example.com/v1/things?b=2&a=1").fingerprint
    others = [
        HERE.with_query(a=2),
        HERE.with_body("x", 1),
        PageRequest(HERE.url, "POST"),
        PageRequest(HERE.url, headers={"If-Modified-Since": "x"}),
        PageRequest("https://other.example.com/v1/things?a=1&b=2"),
    ]
    assert len({HERE.fingerprint, *(other.fingerprint for other in others)}) == len(others) + 1


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda v: st.lists(v) | st.dictionaries(st.text(), v)
)


@given(st.text(min_size=1), st.sampled_from(["GET", "POST"]), json_values, st.dictionaries(st.text(), st.text()))
def test_stored_and_read_again_it_is_the_same(path, method, body, headers):
    request = PageRequest("https://h/" + path, method, body, headers)
    assert PageRequest.from_json(json.loads(json.dumps(request.to_json()))) == request


@given(st.dictionaries(st.text(min_size=1), st.text() | st.integers(), min_size=1))
def test_any_value_survives_the_query(values):
    request = HERE.with_query(**values)
    assert {name: request.query(name) for name in values} == {name: str(value) for name, value in values.items()}


def test_only_what_is_said_is_stored():
    assert PageRequest("https://h/").to_json() == {"url": "https://h/"}
    whole = {"url": "https://h/", "method": "POST", "body": {}, "headers": {"A": "b"}}
    assert PageRequest("https://h/", "POST", {}, {"A": "b"}).to_json() == whole


@pytest.mark.parametrize(
    ("to", "place"),
    [
        ("https://evil.test/x?t=canary", "https://evil.test/x?t=…, which is another host"),
        ("https://api.example.com\\@evil.test/x", "'https://evil.test/x': another host, or no URL"),
        ("https://[" + "x" * 400, f"'https://[{'x' * 291}': another host, or no URL"),
    ],
)
def test_where_an_answer_leads_is_said(to, place):
    with pytest.raises(PagingError) as caught:
        HERE.at(to)
    assert str(caught.value) == f"the next page of https://api.example.com/v1/things?a=…&b=… is said to be at {place}"


@pytest.mark.parametrize("doc", [None, {}, "x", {"url": 1}])
def test_what_is_no_page_is_refused(doc):
    message = "the stored page is none: reset the stream, so that it starts a full pass"
    with pytest.raises(InvalidInput, match=f"^{message}$"):
        PageRequest.from_json(doc)


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ("https://api.example.com/x", "https://api.example.com:443/x?page=2"),
        ("https://api.example.com:443/x", "https://API.example.com/x?page=2"),
        ("http://127.0.0.1:80/x", "http://127.0.0.1/x?page=2"),
    ],
)
def test_the_default_port_may_be_spelt(here, there):
    assert PageRequest(here).at(there).url.endswith("/x?page=2")
