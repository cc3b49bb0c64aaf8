"""Events as CloudEvents 1.0 in JSON."""

import json
import re
from datetime import UTC, datetime

import pytest

from resilient.core.base.errors import InvalidInput
from resilient.core.events.message import CONTENT_TYPE, Envelope, decode, numbered

WHEN = datetime(2030, 1, 1, 12, tzinfo=UTC)
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def made(**changes):
    words = {"id": "e-1", "type": "order.placed", "version": 2, "source": "/shop", "time": WHEN, "data": '{"n": 1}'}
    words |= changes
    envelope = Envelope(*(words.pop(name) for name in ("type", "version", "source")))
    return envelope.text(**words)


def test_what_the_specification_asks_for():
    event = json.loads(made(subject="order/7", key="7", traceparent=PARENT, tracestate="a=b"))
    assert event == {
        "specversion": "1.0", "id": "e-1", "type": "order.placed", "source": "/shop",
        "time": "2030-01-01T12:00:00+00:00", "datacontenttype": "application/json", "data": {"n": 1},
        "subject": "order/7", "partitionkey": "7", "traceparent": PARENT, "tracestate": "a=b", "typeversion": 2,
    }  # fmt: skip
    for name in event:
        assert re.fullmatch("[a-z0-9]{1,20}", name)  # attribute names, section "Naming Conventions"
    assert set(json.loads(made())).isdisjoint({"subject", "partitionkey", "traceparent", "tracestate"})


def test_one_flat_object_whatever_the_texts_hold():
    odd = 'a"b\\c/ü€😀'
    text = made(subject=odd, key=odd, source=odd, tracestate=odd, type=odd)
    event = json.loads(text)
    assert [event[name] for name in ("subject", "partitionkey", "source", "tracestate", "type")] == [odd] * 5
    attributes = {name: value for name, value in event.items() if name != "data"}
    assert text == json.dumps(attributes, ensure_ascii=False)[:-1] + ', "data": {"n": 1}}'


def test_back_as_a_message():
    message = decode(made(subject="s", key="7", traceparent=PARENT), delivery="d-1", number=41)
    assert (message.id, message.type, message.key, message.sequence) == ("e-1", "order.placed", "7", 41)
    assert (message.delivery, message.subject, message.traceparent) == ("d-1", "s", PARENT)
    assert message.event["sequence"] == f"{41:020d}"
    assert message.event["data"] == {"n": 1}
    assert message.headers == {"content-type": CONTENT_TYPE, "traceparent": PARENT}


def test_a_number_it_has_already_is_kept():
    message = decode(numbered(made(key="7"), 3), delivery="d", number=41)
    assert message.sequence == 3
    assert message.body.count(b"sequence") == 1
    assert decode(made(), delivery="d").sequence is None


def test_numbers_sort_as_text():
    bodies = [json.loads(numbered(made(), n))["sequence"] for n in (9, 10, 2**62)]
    assert bodies == sorted(bodies)


@pytest.mark.parametrize("text", ["[]", "null", "{}", '{"id": "x"}', "nonsense", ""])
def test_what_is_no_event(text):
    with pytest.raises(ValueError, match=r"not an event|Expecting"):
        decode(text, delivery="d")


@pytest.mark.parametrize(
    "changes", [{"key": ""}, {"key": "a\nb"}, {"subject": "x" * 256}, {"source": ""}, {"subject": "\ud800"}, {"key": 7}]
)
def test_what_no_attribute_may_be(changes):
    with pytest.raises(InvalidInput, match="must be 1 to 255 characters without control ones"):
        made(**changes)


def test_a_nul_in_the_data():
    with pytest.raises(InvalidInput, match="NUL"):
        made(data=json.dumps({"a": "x\0"}))
    made(data=json.dumps({"a": "\\u0000"}))  # six harmless characters
