"""What an annotation takes, and the words that say so: each kind of annotation with values that fit and do not."""

from __future__ import annotations

import inspect
from datetime import UTC, date, datetime, timedelta
from enum import Enum
from typing import Generic, Literal, Protocol, TypeVar

import pytest

from resilient.core.base import misfit
from resilient.core.base.errors import InvalidInput, JobNotFound, SetupError
from resilient.core.base.misfit import check_number, check_word, explained, explained_calls, explained_class

T = TypeVar("T")


class Fruit: ...


class Apple(Fruit): ...


class Xylophone: ...


class Box(Generic[T]): ...


class Reader(Protocol):
    def read(self) -> str: ...


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


def said(annotation, value):
    """What is said of a function's only argument; None if it fits."""

    def take(it): ...

    take.__annotations__["it"] = annotation
    text = misfit.explanation(take, (value,), {})
    return None if text is None else text.removeprefix("take(it=...) takes ")


NOON = datetime(2026, 11, 1, 12, tzinfo=UTC)
FITS = [
    ("str", "a"), ("bytes", b"a"), ("bytes", bytearray(b"a")), ("bytes", memoryview(b"a")), ("bool", False), ("int", 3),
    ("float", 3), ("float", 2.5), ("None", None), ("datetime", NOON), ("date", NOON.date()), ("timedelta", NOON - NOON),
    ("str | int", 3), ("str | int", "a"), ("Fruit | None", None), ("Fruit", Apple()), ("type[Fruit]", Apple),
    ("Callable", print), ("Callable[[int], str]", print), ("Callable[..., str] | None", Apple),
    ("Literal['a', 'b']", "b"), ("Literal[1, None]", None),
    ("tuple", [1]), ("list", (1,)), ("set", frozenset({1})), ("Iterable", iter([1])), ("Mapping", {}), ("dict", {1: 2}),
    ("list[int]", iter(["read", "once"])), ("set[str]", {"a"}), ("frozenset[str]", {"a"}), ("Sequence[str]", ("a",)),
    ("tuple[int, ...]", (1, 2, 3)), ("tuple[int, str]", (1, "a")), ("tuple[None]", (None,)),
    ("tuple[int, str]", (1, 2, 3)),  # how many there are is Python's own to say
    ("dict[str, int]", {"a": 1}), ("dict[int, int]", {1: "a key that is no text is not told"}),
    ("list[Fruit | None]", [Apple(), None]), ("Box[int]", Box()), ("list[T]", [1, "a"]), ("list[Any]", [1, "a"]),
    ("Any", 1), ("T", 1), ("Reader", 1), ("AnAlias", 1), ("AnAlias[int]", 1),
]  # fmt: skip


@pytest.mark.parametrize(("annotation", "value"), FITS)
def test_it_fits(annotation, value):
    assert said(annotation, value) is None


DIFFERS = [
    ("str", 5, "text, not an int"),
    ("str", None, "text, not None"),
    ("str", print, "text, not a function"),
    ("str", said, "text, not a function"),
    ("str", Fruit, "text, not the class Fruit"),
    ("str", Fruit(), "text, not a Fruit"),
    ("str", Apple(), "text, not an Apple"),
    ("str", Xylophone(), "text, not a Xylophone"),
    ("bytes", "a", "bytes, not text"),
    ("bool", 1, "True or False, not an int"),
    ("int", 2.5, "a whole number, not a float"),
    ("float", "1", "a number, not text"),
    ("None", 3, "None, not an int"),
    ("timedelta", 5, "a timedelta, not an int"),
    ("datetime", date(2026, 11, 1), "a datetime with a zone, not a date"),
    ("date", "2026-11-01", "a date, not text"),
    ("date", timedelta(1), "a date, not a timedelta"),
    ("Fruit", Box(), "Fruit, not a Box"),
    ("Fruit", Apple, "Fruit, not the class Apple: write Apple(...)"),
    ("Fruit | None", Apple, "Fruit or None, not the class Apple: write Apple(...)"),
    ("Fruit", Box, "Fruit, not the class Box"),
    ("type[Fruit]", Apple(), "type, not an Apple"),
    ("Box[int]", 3, "Box, not an int"),
    ("None | int", "a", "None or a whole number, not text"),
    ("str | int | None", 2.5, "text, a whole number or None, not a float"),
    ("Literal['a', 'b']", "c", "'a' or 'b', not text"),
    ("Literal['a', 'b'] | None", 1, "'a' or 'b' or None, not an int"),
    ("Callable", 3, "a function, not an int"),
    ("Callable[[int], str]", None, "a function, not None"),
    ("Callable[..., str] | None", "f", "a function or None, not text"),
    ("tuple", 3, "tuple, not an int"),
    ("list", "a", "list, not text"),
    ("set", [1], "set, not a list"),
    ("dict", [1], "dict, not a list"),
    ("tuple[str, ...]", "a", "a tuple of text, not text: write (it,), with a comma"),
    ("tuple[int]", 3, "a tuple of a whole number, not an int: write (it,), with a comma"),
    ("tuple[int, str]", 3, "a tuple of a whole number, text, not an int"),
    ("list[str]", "a", "a list of text, not text: write [it]"),
    ("Sequence[str] | None", "a", "a list of text or None, not text: write [it]"),
    ("None | set[str]", "a", "None or a set of text, not text: write {it}"),
    ("frozenset[str]", "a", "a frozenset of text, not text: write frozenset({it})"),
    ("frozenset[str]", ["a"], "a frozenset of text, not a list"),
    ("list[None]", None, "a list of None, not None"),
    ("list[Any]", 3, "a list, not an int: write [it]"),
    ("list[T]", 3, "a list, not an int: write [it]"),
    ("list[int]", {"a": 1}, "a list of a whole number, not a dict"),
    ("Iterable[str]", Colour, "a list of text, not the class Colour"),
    ("list[Fruit]", Apple(), "a list of Fruit, not an Apple: write [it]"),
    ("dict[str, int]", [("a", 1)], "a dict of text to a whole number, not a list"),
    ("dict[str, int | None]", 3, "a dict of text to a whole number or None, not an int"),
]


@pytest.mark.parametrize(("annotation", "value", "text"), DIFFERS)
def test_it_says_what_fits(annotation, value, text):
    assert said(annotation, value) == text


WITHIN = [
    ("list[str]", ["a", 5], "at [1] text, not an int"),
    ("list[Fruit]", [Apple(), 3], "at [1] Fruit, not an int"),
    ("list[Fruit]", [Apple], "at [0] Fruit, not the class Apple: write Apple(...)"),
    ("list[int | None]", [1, "a"], "at [1] a whole number or None, not text"),
    ("list[Callable]", [3], "at [0] a function, not an int"),
    ("list[Callable[[int], str]]", [3], "at [0] a function, not an int"),
    ("list[tuple]", [3], "at [0] tuple, not an int"),
    ("list[list[int]]", [3], "at [0] a list of a whole number, not an int: write [it]"),
    ("list[list[Fruit]]", [[], [3]], "at [1][0] Fruit, not an int"),
    ("list[Literal['a']]", ["a", "b"], "at [1] 'a', not text"),
    ("tuple[int, ...]", (1, "a"), "at [1] a whole number, not text"),
    ("tuple[int, str]", (1, 2), "at [1] text, not an int"),
    ("tuple[int, str]", ("a", "b"), "at [0] a whole number, not text"),
    ("dict[str, int]", {"a": 1, "b": "x"}, "at ['b'] a whole number, not text"),
    ("dict[str, list[int]]", {"a": [1, "b"]}, "at ['a'][1] a whole number, not text"),
    ("dict[str, int] | None", {"a": "x"}, "at ['a'] a whole number, not text"),
    ("None | list[dict[str, int] | None]", [None, {"a": "x"}], "at [1]['a'] a whole number, not text"),
]


@pytest.mark.parametrize(("annotation", "value", "text"), WITHIN)
def test_it_says_where_within_the_argument(annotation, value, text):
    assert said(annotation, value) == text


# -- functions and classes that explain --------------------------------------------------------------------------------


def halve(number: int, by: int = 2) -> float:
    if number == 7:
        raise JobNotFound("no 7")
    return number / by


async def wait_for(number: int, by: int = 2) -> float:
    return halve(number, by)


async def outcome(fn, *args, **words):
    """What comes of a call: the result or the exception."""
    try:
        result = fn(*args, **words)
        return await result if inspect.isawaitable(result) else result
    except Exception as error:  # noqa: BLE001 - that is what is looked at
        return error


@pytest.mark.parametrize("fn", [halve, wait_for])
async def test_an_explained_function_is_the_function_but_for_wrong_types(fn):
    call = explained(fn)
    assert (call.__name__, inspect.signature(call)) == (fn.__name__, inspect.signature(fn))
    assert inspect.iscoroutinefunction(call) == inspect.iscoroutinefunction(fn)
    assert await outcome(call, 8) == 4
    assert await outcome(call, 8, by=4) == 2
    error = await outcome(call, 8, by="two")
    assert type(error) is InvalidInput
    assert str(error) == f"{fn.__name__}(by=...) takes a whole number, not text"
    assert type(error.__cause__) is TypeError
    error = await outcome(explained(fn, "app.halve", SetupError), None)
    assert (type(error), str(error)) == (SetupError, "app.halve(number=...) takes a whole number, not None")


@pytest.mark.parametrize("fn", [halve, wait_for])
async def test_what_fails_for_another_reason_fails_as_it_did(fn):
    call = explained(fn)
    error = await outcome(call, 8, by=0)
    assert (type(error), error.__cause__) == (ZeroDivisionError, None)
    error = await outcome(call, 7, by="two")
    assert (type(error), str(error), error.__cause__) == (JobNotFound, "no 7", None)
    error = await outcome(call, 8, to=2)
    assert type(error) is TypeError
    assert "unexpected keyword argument 'to'" in str(error)


def test_a_class_is_known_by_its_name_from_then_on(monkeypatch):
    monkeypatch.setattr(misfit, "_CLASSES", {})

    class Parcel:
        def __init__(self, weight: int) -> None:
            self.weight = 0 + weight

    assert said("Parcel", 5) is None
    assert explained_class(Parcel) is Parcel
    assert said("Parcel", 5) == "Parcel, not an int"
    assert said("Parcel", Parcel(3)) is None
    with pytest.raises(InvalidInput) as error:
        Parcel("heavy")
    assert str(error.value) == "Parcel(weight=...) takes a whole number, not text"


async def test_the_public_methods_of_a_class_explain():
    class Counter:
        start = int  # no function of its own

        async def page(self, size: int):
            yield 0 + size

        def add(self, number: int) -> int:
            return 1 + number

        async def wait(self, number: int) -> int:
            return 1 + number

        def _add(self, number: int) -> int:
            return 1 + number

    untouched = Counter._add, Counter.page
    assert explained_calls("app.counter")(Counter) is Counter
    assert (Counter._add, Counter.page) == untouched
    assert Counter.start is int
    assert (Counter().add(1), await Counter().wait(1)) == (2, 2)
    for name in ("add", "wait"):
        error = await outcome(getattr(Counter(), name), "a")
        text = f"app.counter.{name}(number=...) takes a whole number, not text"
        assert (type(error), str(error)) == (InvalidInput, text)
    explained_calls("app.counter", SetupError)(Counter)
    assert type(await outcome(Counter._add, Counter(), "a")) is TypeError


def test_a_class_may_explain_by_another_error():
    class Counter:
        def add(self, number: int) -> int:
            return 1 + number

    explained_calls("app", SetupError)(Counter)
    with pytest.raises(SetupError, match=r"^app\.add\(number=\.\.\.\) takes a whole number, not None$"):
        Counter().add(None)


# -- checks ------------------------------------------------------------------------------------------------------------

ABOVE, FROM = "X(n={}): n is a number above 1.5", "X(n={}): n is a number from 2"


@pytest.mark.parametrize(
    ("value", "words", "text"),
    [
        (None, {}, None), (0.1, {}, None), (0, {}, "X(n=0): n is a number above 0"),
        (1.6, {"least": 1.5}, None), (1.5, {"least": 1.5}, ABOVE), (-1, {"least": 1.5}, ABOVE),
        (2, {"least": 2, "above": False}, None), (1.9, {"least": 2, "above": False}, FROM),
        (float("inf"), {"least": 1.5}, ABOVE), (float("nan"), {"least": 2, "above": False}, FROM),
        ("5", {"least": 1.5}, ABOVE), (True, {"least": 2, "above": False}, FROM),
    ],
)  # fmt: skip
def test_a_number_is_above_the_least_or_from_it_on(value, words, text):
    if text is None:
        assert check_number("X", "n", value, **words) is None
        return
    with pytest.raises(InvalidInput) as error:
        check_number("X", "n", value, **words)
    assert str(error.value) == text.format(repr(value))


@pytest.mark.parametrize(
    ("vocabulary", "good", "bad", "text"),
    [
        (("a", "b"), "b", "c", "X(w='c'): w is one of 'a', 'b'"),
        (frozenset({"a"}), "a", None, "X(w=None): w is one of 'a'"),
        (Literal["a", 1], 1, True, "X(w=True): w is one of 'a', 1"),
        (Colour, Colour.RED, "red", "X(w='red'): w is one of Colour.RED, Colour.BLUE"),
    ],
)
def test_a_word_is_one_of_its_vocabulary(vocabulary, good, bad, text):
    assert check_word("X", "w", good, vocabulary) is None
    with pytest.raises(InvalidInput) as error:
        check_word("X", "w", bad, vocabulary)
    assert str(error.value) == text
