"""Structured fields: the grammar of RFC 9651 that rate-limit headers need."""

import re
from base64 import b64decode, b64encode
from datetime import UTC, datetime
from decimal import Decimal

import http_sf
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from resilient.core.base.bounds import STRUCTURED_FIELD
from resilient.core.base.budgets import Date, Item, parse_dictionary, parse_list


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('"default";r=50;t=30', [Item("default", {"r": 50, "t": 30})]),
        ('"a";q=10;w=1 ,\t"b";q=2.5', [Item("a", {"q": 10, "w": 1}), Item("b", {"q": 2.5})]),
        ("100;w=60, 10", [Item(100, {"w": 60}), Item(10, {})]),
        ("default;r=1", [Item("default", {"r": 1})]),
        (r'"say \"hi\" \\ "', [Item(r'say "hi" \ ', {})]),
        ('"a";pk=:cHsdsRa894==:; partial', [Item("a", {"pk": b64decode("cHsdsRa894=="), "partial": True})]),
        ("?0, ?1;x=?0", [Item(value=False, params={}), Item(value=True, params={"x": False})]),
        ("-5, *tok/en", [Item(-5, {}), Item("*tok/en", {})]),
        ('"a";r=1;r=2', [Item("a", {"r": 2})]),
        ("  X;r=1  ", [Item("X", {"r": 1})]),
        ("a, X", [Item("a", {}), Item("X", {})]),
        (":QUJX:", [Item(b"ABW", {})]),
        ("", None),
        ("  ", None),
        ('"a",', None),
        (",", None),
        ('"a" "b"', None),
        ('"open', None),
        ('"a";', None),
        ('"a";R=1', None),
        ('"a";r=', None),
        ('("a" "b")', None),
        ("limit=100, remaining=5", None),
        ('"ä"', None),
        ("٣", None),
        ("1" * 9000, None),
    ],
)
def test_lists(text, expected):
    assert parse_list(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "limit=100, remaining=50,reset=5",
            {"limit": Item(100, {}), "remaining": Item(50, {}), "reset": Item(5, {})},
        ),
        ("a;x=1, b=2;y", {"a": Item(value=True, params={"x": 1}), "b": Item(2, {"y": True})}),
        ("a=1, a=2", {"a": Item(2, {})}),
        ("limit=100; remaining", {"limit": Item(100, {"remaining": True})}),
        ("  a=1,b=X  ", {"a": Item(1, {}), "b": Item("X", {})}),
        ("\ta=1", None),
        ("limit=", None),
        ("limit=1,", None),
        ("Limit=1", None),
        ("", None),
    ],
)
def test_dictionaries(text, expected):
    assert parse_dictionary(text) == expected


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_a_field_may_be_so_long(more):
    word = "a" * (STRUCTURED_FIELD.value + more)
    assert (parse_list(word) is None) is (more > 0)
    assert (parse_dictionary(word) is None) is (more > 0)


GRAMMAR = st.text(alphabet='abq*19.-;=, \t":?01\\()/\x7fä', max_size=40)


@given(st.one_of(st.text(max_size=60), GRAMMAR))
def test_parsing_never_raises(text):
    items = parse_list(text)
    assert items is None or items
    parse_dictionary(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('"a";d=@1659578233', Date(1659578233)), ('"a";d=@-1', Date(-1)), ('"a";d=%"f%c3%bc"', "fü"), ('"a";d=%""', ""),
        ('"a";d=123456789012.123', 123456789012.123), ('"a";d=:aGk=:', b"hi"), ('"a";d=:aGk:', b"hi"),
        ('"a";d=::', b""), ('"a";  d=1', 1),
    ],
)  # fmt: skip
def test_values_that_rfc_9651_knows(text, value):
    assert parse_list(text)[0].params["d"] == value


@pytest.mark.parametrize(
    "text",
    [
        '"a";\td=1', '\t"a"', '"a";d=1234567890123.5', '"a";d=:a=b:', '"a";d=:a===:', '"a";d=:Q==:',
        '"a";d=:=:', '"a";d=@1.5', '"a";d=@',
        '"a";d=%"%C3"', '"a";d=%"%ff"', '"a";d=%"%c"', '"a";d=1.', '"a";d=1.1234', '"a";d=1234567890123456',
    ],
)  # fmt: skip
def test_what_it_does_not_know(text):
    assert parse_list(text) is None


# -- beside the library of an author of the RFC -----------------------------------------------------------------------
#
# Without inner lists, which ours does not take.

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_KEYS = st.from_regex(r"[a-z*][a-z0-9_\-.*]{0,3}", fullmatch=True)
_PLAIN = st.characters(min_codepoint=32, max_codepoint=126, exclude_characters='"\\')
_BARE = st.one_of(
    st.integers(-(10**15) + 1, 10**15 - 1).map(str),
    st.from_regex(r"-?[0-9]{1,12}\.[0-9]{1,3}", fullmatch=True),
    st.text(_PLAIN, max_size=6).map('"{}"'.format),
    st.sampled_from([r'"\\"', r'"\""', "?0", "?1", "r", "*a/b:c", "A!#$%&'", '%"f%c3%bc"', '%"%c3"']),
    st.binary(max_size=5).map(lambda raw: f":{b64encode(raw).decode()}:"),
    st.integers(-62_135_596_800, 253_402_300_799).map("@{}".format),  # beyond these years parsers may do as they like
)
_PARAMS = st.lists(st.tuples(_KEYS, st.none() | _BARE), max_size=3).map(
    lambda pairs: "".join(f";{key}" + ("" if value is None else f"={value}") for key, value in pairs)
)
_ITEMS = st.tuples(_BARE, _PARAMS).map("".join)
_MEMBERS = st.tuples(_KEYS, st.just("") | _BARE.map("={}".format), _PARAMS).map("".join)
_COMMAS = st.sampled_from([",", ", ", " ,\t"])
_STRAY = st.sampled_from(["", *'",;=:?%\\-.*( )Aé\t09'])


@st.composite
def fields(draw, members):
    """A field of such members, as it is, cut, or with one character too many, too few or wrong."""
    text = draw(_COMMAS).join(draw(st.lists(members, min_size=1, max_size=3)))
    at, stray = draw(st.integers(0, len(text))), draw(_STRAY)
    return draw(st.sampled_from([text, text[:at] + stray + text[at:], text[:at] + stray + text[at + 1 :], text[:at]]))


def bare(value):
    if isinstance(value, (http_sf.Token, http_sf.DisplayString)):
        return str(value)
    if isinstance(value, Decimal):
        return float(value)
    return Date(int((value - _EPOCH).total_seconds())) if isinstance(value, datetime) else value


def item(member):
    value, params = member if isinstance(member, tuple) else (member, {})
    return Item(bare(value), {key: bare(one) for key, one in params.items()})


def reference(text, shape):
    try:
        parsed = http_sf.parse(text.encode(), tltype=shape)
        if shape == "list":
            return [item(one) for one in parsed] or None
        return {key: item(one) for key, one in parsed.items()} or None
    except ValueError:
        return None


@settings(max_examples=500)
@given(fields(_ITEMS))
def test_a_list_is_what_http_sf_makes_of_it(text):
    assume(in_datetimes_years(text))
    assert repr(parse_list(text)) == repr(reference(text, "list"))


@settings(max_examples=500)
@given(fields(_MEMBERS))
def test_a_dictionary_is_what_http_sf_makes_of_it(text):
    assume(in_datetimes_years(text))
    assert repr(parse_dictionary(text)) == repr(reference(text, "dictionary"))


def in_datetimes_years(text):
    """Whether a digit that was added left every date between the years 1 and 9999."""
    return all(-62_135_596_800 <= int(date) <= 253_402_300_799 for date in re.findall(r"@(-?[0-9]{1,15})", text))
