"""Infinity and NaN, which JSON has no word for."""

import json
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, NamedTuple

import pytest
from pydantic import BaseModel, ConfigDict, TypeAdapter

from resilient import (
    BreakerPolicy,
    Fixed,
    Limit,
    OnePage,
    Resilient,
    Schedule,
    SetupError,
    Snooze,
    Stream,
    Throttled,
    Transient,
    handler,
)
from resilient.core.base.errors import BadPayload, InvalidInput
from resilient.core.base.numbers import json_text, json_value, lost_number
from resilient.core.sync.paging import PageRequest, PagingError
from resilient.engine.ground.kinds import Kind

INF, NAN = float("inf"), float("nan")


class Price(BaseModel):
    amount: float | None = None
    lines: list[float] = []


class AsText(BaseModel):
    model_config = ConfigDict(ser_json_inf_nan="strings")
    amount: float | None = None


class AsWord(BaseModel):
    model_config = ConfigDict(ser_json_inf_nan="constants")
    amount: float


class Pair(NamedTuple):
    x: float
    y: Any = None


@dataclass
class Point:
    x: Any


class Size(Enum):
    ENDLESS = INF


@pytest.mark.parametrize(
    ("model", "payload", "place"),
    [
        (None, INF, "the value is inf"),
        (None, {"a": [1, {"b": -INF}]}, "a.1.b is -inf"),
        (None, {"a": None, "b": (NAN,)}, "b.0 is nan"),
        (None, {INF: 1}, "a key is inf"),
        (None, {"a": Pair(1.0, Point(NAN))}, "a.1.x is nan"),
        (None, {"a": Size.ENDLESS}, "a is inf"),
        (None, {"a": Price(amount=INF)}, "a.amount is inf"),
        (Price, Price(amount=NAN), "amount is nan"),
        (Price, {"lines": [1.0, INF]}, "lines.1 is inf"),
        (list[float], [0.5, INF], "1 is inf"),
        (AsWord, AsWord(amount=INF), "amount is inf"),
    ],
)
def test_a_payload_with_a_number_that_json_lacks_is_refused_by_its_place(model, payload, place):
    with pytest.raises(
        BadPayload, match=r"payload of 'price' is not JSON: .*JSON has no infinity and no NaN"
    ) as caught:
        Kind("price", model).encode(payload)
    assert place in str(caught.value)


@pytest.mark.parametrize(
    ("model", "payload", "text"),
    [
        (None, {"a": None, "b": "null NaN Infinity"}, '{"a":null,"b":"null NaN Infinity"}'),
        (Price, Price(), '{"amount":null,"lines":[]}'),
        (AsText, AsText(amount=INF), '{"amount":"Infinity"}'),
        (None, {"a": None, "b": 1e308}, '{"a":null,"b":1e308}'),
    ],
)
def test_what_json_can_say_is_taken(model, payload, text):
    assert json.loads(Kind("price", model).encode(payload)) == json.loads(text)


def test_a_model_that_writes_it_as_text_reads_it_back():
    kind = Kind("price", AsText)
    assert kind.decode(kind.encode(AsText(amount=INF)), 1).amount == INF
    assert TypeAdapter(AsText).validate_json(kind.encode(AsText())).amount is None


def test_json_text_names_the_place():
    with pytest.raises(ValueError, match=r"^done\.1 is nan; JSON has no infinity"):
        json_text({"done": [1, NAN]})
    with pytest.raises(ValueError, match="Circular"):
        json_text((circle := []).append(circle) or circle)
    with pytest.raises(TypeError):
        json_text({"a": object()})
    assert json_text({"a": [1.5, None]}) == '{"a": [1.5, null]}'


class Far(float, Enum):
    AWAY = INF


REMEDY = "JSON has no infinity and no NaN: leave it out, or send null or a text"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (INF, "the value is inf"),
        ({"a": {INF: 1}}, "a.a key is inf"),
        ({1.5: NAN}, "1.5 is nan"),
        ({"a": Far.AWAY}, "a is inf"),
        ({"a": [1.5, (2.5, -INF)]}, "a.1.1 is -inf"),
    ],
)
def test_json_text_says_where_and_what_to_do(value, words):
    with pytest.raises(ValueError, match="JSON has no") as caught:
        json_text(value)
    assert str(caught.value) == f"{words}; {REMEDY}"


@pytest.mark.parametrize(
    ("value", "text", "words"),
    [
        (INF, "null", "the value is inf"),
        ({"a": [1, NAN]}, '{"a": [1, null]}', "a.1 is nan"),
        ({"a": [1, NAN]}, '{"a": [1, NaN]}', "a.1 is nan"),
        ({"a": (Size.ENDLESS,)}, '{"a": [null]}', "a.0 is inf"),
        ({"None": INF}, '{"None": null}', "None is inf"),
        ({"a": {NAN: 1}}, '{"a": {"None": 1}}', "a.a key is nan"),
        ({NAN: 1, "None": 2}, '{"None": 1, "None": 2}', "a key is nan"),
        ({1.5: INF}, '{"1.5": null}', "1.5 is inf"),
        ({"a": None, "b": {INF}}, '{"a": null, "b": [null]}', "b.0 is inf"),
        # the text says it, or says something else
        (INF, '"Infinity"', None),
        ({"a": INF}, '{"a": "Infinity"}', None),
        ({NAN: 1}, '{"NaN": 1}', None),
        ({"a": INF}, "null", None),
        ({"a": INF}, "[null]", None),
        ({"a": INF, "b": 1}, '{"b": 1}', None),
        ([INF], "null", None),
        ([INF], '{"0": null}', None),
        ([INF, 1], "[null]", None),
        ({"a": [INF], "b": {"c": NAN}}, '{"a": "inf", "b": 7}', None),
    ],
)
def test_a_number_that_a_text_has_lost_is_named_by_its_place(value, text, words):
    assert lost_number(value, text) == (None if words is None else f"{words}; {REMEDY}")


@pytest.mark.parametrize(
    "value",
    ["a", 7, None, 1.5, Far, [], [1, "a", None, True, 1.5], {"a": None, "b": [{"c": 1.5}]}, {1: 2, 2.5: {None: "x"}}],
)
def test_where_no_number_can_be_lost_the_text_is_not_even_read(value):
    assert lost_number(value, "{ no JSON") is None


def test_a_number_too_large_is_shown_by_its_beginning():
    with pytest.raises(ValueError, match="larger") as caught:
        json_value("1" + "0" * 400 + ".5")
    assert str(caught.value) == "1" + "0" * 39 + " is larger than any number here; send a text"


@pytest.mark.parametrize("text", ["NaN", "Infinity", '{"a": -Infinity}', "1e999", '{"a": [-1e400]}'])
def test_what_is_typed_as_such_a_number_is_no_json(text):
    with pytest.raises(ValueError, match=r"is no number|is larger than any number"):
        json_value(text)
    assert json_value('{"a": "NaN", "b": 1e30}') == {"a": "NaN", "b": 1e30}


def test_a_page_request_has_a_body_that_can_be_stored():
    with pytest.raises(InvalidInput, match=r"the body of POST https://x/y: variables\.n is inf"):
        PageRequest("https://x/y", "POST", {"variables": {"n": INF}})
    with pytest.raises(PagingError, match=r"the next page cannot be asked for: .* after is nan"):
        PageRequest("https://x/y", "POST", {}).with_body("after", NAN)


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("name", [one.name for one in fields(BreakerPolicy)])
def test_a_breaker_policy_takes_none(name, bad):
    with pytest.raises(InvalidInput):
        BreakerPolicy(**{name: bad})


@pytest.mark.parametrize("bad", [INF, NAN])
@pytest.mark.parametrize(
    "make",
    [
        Snooze, lambda bad: Throttled(retry_after=bad), lambda bad: Transient(retry_after=bad),
        lambda bad: handler("x", timeout=bad)(nothing), lambda bad: APP.worker(lease=bad),
        lambda bad: APP.worker(grace=bad), lambda bad: APP.worker(concurrency=bad),
        lambda bad: Resilient("sqlite://", connections=bad), lambda bad: Resilient("sqlite://", max_payload=bad),
        lambda bad: stream(overlap=bad), lambda bad: stream(full_every=bad), lambda bad: stream(expected=bad),
        lambda bad: Limit(bad, per=1), lambda bad: Limit(1, per=bad), lambda bad: Limit(1, per=1, burst=bad),
        lambda bad: Schedule(NOTHING, every=bad, resource_key="a"), Fixed,
    ],
)  # fmt: skip
def test_nothing_is_infinite(make, bad):
    """Each is refused where it is declared, and not in a worker."""
    with pytest.raises((InvalidInput, SetupError)):
        make(bad)


async def nothing(job):
    pass


NOTHING = handler("nothing")(nothing)
APP = Resilient("sqlite://", handlers=[NOTHING])


def stream(**options):
    return Stream("s", request=lambda: PageRequest("/x"), paginator=OnePage(), **options)
