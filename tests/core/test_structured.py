"""Structured fields: the grammar of RFC 9651 that rate-limit headers need."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.core.base.budgets import Date, Item, parse_dictionary, parse_list


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('"default";r=50;t=30', [Item("default", {"r": 50, "t": 30})]),
        ('"a";q=10;w=1 ,\t"b";q=2.5', [Item("a", {"q": 10, "w": 1}), Item("b", {"q": 2.5})]),
        ("100;w=60, 10", [Item(100, {"w": 60}), Item(10, {})]),
        ("default;r=1", [Item("default", {"r": 1})]),
        (r'"say \"hi\" \\ "', [Item(r'say "hi" \ ', {})]),
        ('"a";pk=:cHsdsRa894==:; partial', [Item("a", {"pk": b"cHsdsRa894==", "partial": True})]),
        ("?0, ?1;x=?0", [Item(value=False, params={}), Item(value=True, params={"x": False})]),
        ("-5, *tok/en", [Item(-5, {}), Item("*tok/en", {})]),
        ('"a";r=1;r=2', [Item("a", {"r": 2})]),
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
        ("limit=", None),
        ("limit=1,", None),
        ("Limit=1", None),
        ("", None),
    ],
)
def test_dictionaries(text, expected):
    assert parse_dictionary(text) == expected


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
        ('"a";d=123456789012.123', 123456789012.123), ('"a";d=:aGk=:', b"aGk="), ('"a";  d=1', 1),
    ],
)  # fmt: skip
def test_values_that_rfc_9651_knows(text, value):
    assert parse_list(text)[0].params["d"] == value


@pytest.mark.parametrize(
    "text",
    [
        '"a";\td=1', '\t"a"', '"a";d=1234567890123.5', '"a";d=:a=b:', '"a";d=:a===:', '"a";d=@1.5', '"a";d=@',
        '"a";d=%"%C3"', '"a";d=%"%ff"', '"a";d=%"%c"', '"a";d=1.', '"a";d=1.1234', '"a";d=1234567890123456',
    ],
)  # fmt: skip
def test_what_it_does_not_know(text):
    assert parse_list(text) is None
