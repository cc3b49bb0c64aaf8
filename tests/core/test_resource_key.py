"""Resource keys and patterns."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.core.base.errors import BadResourceKey, InvalidInput
from resilient.core.base.resource_key import (
    ancestors,
    check,
    check_pattern,
    check_stored,
    depth,
    each_depth,
    is_below,
    is_budget,
    matches,
    may_hold,
    of_budget,
    parent,
    path,
    serves,
)

SEGMENT = st.text(alphabet="abcXYZ019._:@+-", min_size=1, max_size=6).filter(lambda one: one not in (".", ".."))
KEY = st.lists(SEGMENT, min_size=1, max_size=4).map("/".join)


@pytest.mark.parametrize(
    "key",
    [
        "github",
        "github/acct-7",
        "github/acct-7/search",
        "a/b/c/d",
        "mail/user+tag@example.org",
        "a:b.c_d/1",
        "x" * 255,
    ],
)
def test_keys(key):
    assert check(key) == key


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/",
        "a/",
        "/a",
        "a//b",
        "a/b/c/d/e",
        "a b",
        "a/ü",
        "a*",
        "a?",
        "a\n",
        "a\\b",
        "a,b",
        "a/%2e",
        "x" * 256,
        "a/\x00",
    ],
)
def test_bad_keys_are_named_with_the_remedy(key):
    with pytest.raises(BadResourceKey, match="is not a resource key: use 1 to 4 segments") as caught:
        check(key)
    assert repr(key) in str(caught.value)
    assert isinstance(caught.value, InvalidInput)


@pytest.mark.parametrize("key", ["..", ".", "a/..", "a/./b", "../a", "a/b/../c"])
def test_a_segment_that_an_address_loses_is_refused_and_read(key):
    with pytest.raises(BadResourceKey, match=r"is not a resource key: no segment may be '\.' or '\.\.'"):
        check(key)
    assert check_stored(key) == key
    assert check(key.replace("..", "...").replace("/./", "/.x/").replace(".", "dot"))


@pytest.mark.parametrize("key", ["", "a//b", "a b", "a/../b c", 7])
def test_what_no_row_has_is_refused_for_rows_too(key):
    with pytest.raises(BadResourceKey, match="use 1 to 4 segments"):
        check_stored(key)


def test_path_is_deepest_first():
    assert path("a/b/c") == ("a/b/c", "a/b", "a")
    assert path("a") == ("a",)
    assert ancestors("a/b/c") == ("a/b", "a")
    assert ancestors("a") == ()


@pytest.mark.parametrize(("key", "above", "deep"), [("a", None, 1), ("a/b", "a", 2), ("a/b/c/d", "a/b/c", 4)])
def test_parent_and_depth(key, above, deep):
    assert parent(key) == above
    assert depth(key) == deep


@pytest.mark.parametrize(
    ("key", "ancestor", "expected"),
    [
        ("a", "a", True),
        ("a/b", "a", True),
        ("a/b/c", "a", True),
        ("a", "a/b", False),
        ("ab", "a", False),
        ("a/bc", "a/b", False),
        ("b/a", "a", False),
    ],
)
def test_is_below(key, ancestor, expected):
    assert is_below(key, ancestor) == expected


@pytest.mark.parametrize(
    ("key", "pattern", "expected"),
    [
        ("github", "github", True),
        ("github", "*", True),
        ("github/a", "*", False),  # a star never crosses a slash
        ("github/a", "github/*", True),
        ("github", "github/*", False),
        ("github/a/b", "github/*", False),
        ("github/a/b", "github/*/b", True),
        ("github/a/b", "*/*/*", True),
        ("github/acct-7", "github/acct-?", True),
        ("github/acct-77", "github/acct-?", False),
        ("GitHub/a", "github/*", False),
        ("github/a", "github/**", True),
        ("github/a/b/c", "github/**", True),
        ("github", "github/**", False),  # everything below, not itself
        ("gitlab/a", "github/**", False),
        ("gitlab/a/b", "git*/**", True),
        ("gitlab/a/b", "git*/a/**", True),
        ("gitlab/b/a", "git*/a/**", False),
        ("a/b/c/d", "a/b/c/**", True),
    ],
)
def test_matches(key, pattern, expected):
    assert check_pattern(pattern) == pattern
    assert matches(key, pattern) == expected


def test_what_is_no_key_is_shown_in_part():
    with pytest.raises(BadResourceKey) as caught:
        check("a" * 10**6)
    assert len(str(caught.value)) < 1_000


@pytest.mark.parametrize("pattern", ["", "/", "a/", "/**", "a//b", "a b", "[ab]", "a/b/c/d/e/f", "a/ü", "{a}"])
def test_bad_patterns(pattern):
    with pytest.raises(BadResourceKey, match="is not a resource pattern"):
        check_pattern(pattern)


@given(KEY)
def test_every_key_is_below_each_of_its_path(key):
    assert check(key) == key
    assert len(path(key)) == depth(key)
    for up, down in zip(path(key)[1:], path(key), strict=False):
        assert parent(down) == up
        assert is_below(down, up)
        assert not is_below(up, down)
        assert matches(down, up + "/**")
    assert parent(path(key)[-1]) is None


@given(KEY, KEY)
def test_below_is_a_matter_of_the_path(key, other):
    assert is_below(key, other) == (other in path(key))
    assert matches(key, other) == (key == other)


@given(st.text(max_size=20))
def test_any_text_is_a_key_or_refused(text):
    try:
        assert path(check(text))[0] == text
    except BadResourceKey:
        assert (
            not text
            or set(text) - set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._:@+-")
            or "/" in text
            or text in (".", "..")
        )


@pytest.mark.parametrize(
    ("pattern", "served", "others"),
    [
        ("github", ["github", "github/a", "github/a/b/c"], ["githubs", "git", "crm/github"]),
        ("github/*", ["github/a", "github/a/b"], ["github", "crm/a"]),
        ("github/**", ["github/a", "github/a/b/c"], ["github"]),
        ("*/a", ["crm/a", "github/a/b"], ["crm/b/a", "a", "github/b"]),
        ("github/?-*", ["github/a-1", "github/a-1/x"], ["github/ab", "github/ab-1"]),
    ],
)
def test_what_a_worker_of_a_pattern_serves(pattern, served, others):
    assert all(serves(key, [pattern]) for key in served)
    assert not any(serves(key, [pattern]) for key in others)
    assert all(serves(key, ["x/y", pattern]) and serves(key, []) for key in served)


@pytest.mark.parametrize(
    ("key", "pattern", "may"),
    [
        ("github", "github/*", True),
        ("github", "github/**", True),
        ("github", "github/a/b", True),
        ("github/a", "github/a/b", True),
        ("github/a", "github/*/b/**", True),
        ("github/a", "github/b/a", False),
        ("github/a", "github", True),
        ("crm", "github/*", False),
        ("github/b", "github/a/*", False),
    ],
)
def test_where_a_worker_of_a_pattern_may_have_jobs(key, pattern, may):
    assert may_hold(key, [pattern]) is may


@pytest.mark.parametrize(
    ("pattern", "depths"),
    [
        ("github", ("github", "github/*", "github/*/*", "github/*/*/*")),
        ("github/*", ("github/*", "github/*/*", "github/*/*/*")),
        ("github/**", ("github/*", "github/*/*", "github/*/*/*")),
        ("github/a/b/**", ("github/a/b/*",)),
        ("a/b/c/d", ("a/b/c/d",)),
        ("a/b/c/d/**", ()),
    ],
)
def test_the_patterns_of_each_depth(pattern, depths):
    assert each_depth(pattern) == depths


@pytest.mark.parametrize(
    ("account_key", "name", "key"),
    [
        ("p/a", "search", "p/a/budget:search"),
        ("p/a", "Search API/v2: é", "p/a/budget:Search-API-v2---"),
        ("p/a", "a@b_c.d+e-f", "p/a/budget:a@b_c.d+e-f"),
        ("p/a", "", None),
        ("p/a/b/c", "search", None),  # a fifth segment
        ("p/a b", "search", None),
        ("p", "x" * 246, "p/budget:" + "x" * 246),
        ("p", "x" * 247, None),
    ],
)
def test_a_budget_that_a_provider_names_is_below_its_account(account_key, name, key):
    assert of_budget(account_key, name) == key
    assert key is None or is_budget(check(key))


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("p/a/budget:search", True), ("p/budget:search", True), ("budget:search", True), ("p/a/budgets", False),
        ("p/a/my-budget:search", False), ("p/budget:search/deeper", False), ("p/a", False),
    ],
)  # fmt: skip
def test_a_budget_is_told_by_its_last_segment(key, expected):
    assert is_budget(key) is expected


@given(KEY, st.lists(SEGMENT | st.sampled_from(["*", "a*", "?"]), min_size=1, max_size=4).map("/".join), st.booleans())
def test_each_depth_of_a_pattern(key, pattern, everything):
    pattern += "/**" if everything else ""
    assert any(matches(key, one) for one in each_depth(pattern)) is serves(key, [pattern])
