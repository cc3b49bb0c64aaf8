"""Events as CloudEvents 1.0 in JSON."""

import json
import re
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from resilient.core.base.errors import InvalidInput
from resilient.core.events.message import (
    CONTENT_TYPE,
    Arrival,
    Envelope,
    EventInfo,
    Replayed,
    decode,
    destination,
    numbered,
    place,
)
from resilient.core.jobs.records import JobInfo
from resilient.core.jobs.states import JobState

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
    assert (message.tracestate, message.time) == (None, WHEN)
    assert decode(made(tracestate="a=b"), delivery="d").headers["tracestate"] == "a=b"


@pytest.mark.parametrize("text", ["2030-01-01T12:00:00", "noon", None, 7])
def test_a_time_that_cannot_be_read_is_left_out(text):
    event = json.dumps({**json.loads(made()), "time": text})
    assert decode(event, delivery="d").time is None


def test_a_number_it_has_already_is_kept():
    message = decode(numbered(made(key="7"), 3), delivery="d", number=41)
    assert message.sequence == 3
    assert message.body.count(b"sequence") == 1
    assert decode(made(), delivery="d").sequence is None


def test_numbers_sort_as_text():
    bodies = [json.loads(numbered(made(), n))["sequence"] for n in (9, 10, 2**62)]
    assert bodies == sorted(bodies)


@pytest.mark.parametrize(
    "text", ["[]", "null", "{}", '{"id": "x"}', '{"id": "x", "type": "t", "sequence": []}', "nonsense", ""]
)
def test_what_is_no_event(text):
    with pytest.raises(ValueError, match=r"not an event|Expecting"):
        decode(text, delivery="d")


@pytest.mark.parametrize(
    "changes",
    [
        {"key": ""}, {"key": "a\nb"}, {"subject": "x" * 256}, {"source": ""}, {"subject": "\ud800"}, {"key": 7},
        {"type": ""}, {"traceparent": ""}, {"tracestate": "\x7f"},
    ],
)  # fmt: skip
def test_what_no_attribute_may_be(changes):
    (name,) = changes
    named = {"key": "partitionkey"}.get(name, name)
    text = f"^{named} of an event must be 1 to 255 characters without control ones, not "
    with pytest.raises(InvalidInput, match=text):
        made(**changes)


def test_the_longest_attribute():
    assert json.loads(made(subject="x" * 255))["subject"] == "x" * 255


def test_a_nul_in_the_data():
    text = "^the data of event 'order.placed' holds a NUL character, which no database can look into$"
    with pytest.raises(InvalidInput, match=text):
        made(data=json.dumps({"a": "x\0"}))
    made(data=json.dumps({"a": "\\u0000"}))  # six harmless characters


@pytest.mark.parametrize(
    ("number", "highest", "gapless", "arrival"),
    [
        (1, 0, True, Arrival.FIRST),
        (7, 0, True, Arrival.FIRST),  # any number may be the first
        (8, 7, True, Arrival.FIRST),
        (9, 7, True, Arrival.EARLY),
        (9, 7, False, Arrival.FIRST),
        (7, 7, False, Arrival.OUTDATED),
        (6, 7, True, Arrival.OUTDATED),
    ],
)
def test_where_a_numbered_message_stands(number, highest, gapless, arrival):
    assert place(number, highest, gapless=gapless) is arrival


JOB = JobInfo(
    **{
        **dict.fromkeys(JobInfo.__slots__), "id": UUID(int=7), "kind": "outbox:hook", "resource_key": "outbox/hook",
        "state": JobState.SUCCEEDED, "payload": json.loads(made(key="7")), "run_at": WHEN, "attempts": 2,
        "created_at": WHEN - timedelta(minutes=3), "started_at": WHEN - timedelta(minutes=2),
        "finished_at": WHEN - timedelta(minutes=1), "order_no": 41, "last_error": "no", "last_error_kind": "transient",
        "last_error_code": "http_503",
    }
)  # fmt: skip


class TestForPeople:
    def test_an_event_at_its_destination(self):
        assert EventInfo.of(JOB).to_json() == {
            "id": "e-1", "type": "order.placed", "destination": "hook", "state": "succeeded", "key": "7",
            "sequence": 41, "job_id": str(UUID(int=7)), "created_at": "2030-01-01T11:57:00.000Z",
            "started_at": "2030-01-01T11:58:00.000Z", "finished_at": "2030-01-01T11:59:00.000Z",
            "published_at": "2030-01-01T11:59:00.000Z", "attempts": 2, "run_at": "2030-01-01T12:00:00.000Z",
            "last_error": "no", "last_error_kind": "transient", "last_error_code": "http_503",
            "event": json.loads(made(key="7")),
        }  # fmt: skip

    def test_what_ended_otherwise_was_not_published(self):
        dead = EventInfo.of(job(state=JobState.DEAD))
        assert (dead.finished_at, dead.published_at) == (JOB.finished_at, None)

    @pytest.mark.parametrize(
        ("sequence", "shown"),
        [("00000000000000000003", 3), ("third", 41), (3, 41), ("", 41), (None, 41), ("9" * 5_000, 41)],
    )
    def test_its_own_number_counts_if_it_can_be_read(self, sequence, shown):
        assert EventInfo.of(job(payload={**JOB.payload, "sequence": sequence})).sequence == shown

    @pytest.mark.parametrize("payload", [{}, None, "text", [1]])
    def test_what_cannot_be_read_is_shown_empty(self, payload):
        shown = EventInfo.of(job(payload=payload))
        assert (shown.id, shown.type, shown.key, shown.event) == ("", "", None, {})

    def test_a_destination_has_its_own_name(self):
        assert [destination(key) for key in ("outbox/hook", "hook", "outbox")] == ["hook", "hook", "outbox"]

    def test_what_was_put_in_line_again(self):
        assert Replayed(3, more=True, by_destination={"a": 2}).to_json() == {
            "events": 3, "more": True, "by_destination": {"a": 2},
        }  # fmt: skip


def job(**changes):
    return JobInfo(**{**{name: getattr(JOB, name) for name in JobInfo.__slots__}, **changes})
