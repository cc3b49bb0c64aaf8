"""An event for one destination: its format (CloudEvents 1.0 in JSON), and the values that show it to people.

The format (https://github.com/cloudevents/spec, "JSON Event Format") is one flat object, so it is written here: a
library for it would be larger. Beside the required attributes an event carries ``datacontenttype``, ``time``,
``subject`` if it has one, and extensions: ``partitionkey`` (the ordering key), ``sequence`` (its number within the key,
padded so that texts compare like numbers), ``typeversion``, and ``traceparent`` and ``tracestate`` (Distributed
Tracing).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from json.encoder import encode_basestring
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from resilient.core.base.bounds import whole_number
from resilient.core.base.errors import InvalidInput
from resilient.core.jobs.records import fields_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

    from resilient.core.jobs.records import JobInfo
    from resilient.core.jobs.states import JobState


CONTENT_TYPE: Final = "application/cloudevents+json"
_DIGITS: Final = 20
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_NUL: Final = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")
_HEADER: Final = re.compile(r"[!-~](?:[ -~]*[!-~])?")  # a trace may come from a stranger's request
LONGEST: Final = 255


class Message(NamedTuple):
    """What a destination is given.

    ``id`` is the event's: the same at every destination, in every retry and replay; consumers tell duplicates by it.
    ``delivery`` is the job's: the same over its retries, another one in a replay or if somebody retries a published
    event, so that a broker that drops recent duplicates does not drop those. ``body`` is the whole event as
    CloudEvents JSON. ``sequence`` counts the events of ``key`` at this destination from 1. ``time`` is
    that of `publish`.
    """

    id: str
    type: str
    body: bytes
    delivery: str = ""
    key: str | None = None
    sequence: int | None = None
    subject: str | None = None
    traceparent: str | None = None
    tracestate: str | None = None
    time: datetime | None = None

    @property
    def event(self) -> dict[str, Any]:
        """The event's attributes, and ``data``."""
        event: dict[str, Any] = json.loads(self.body)
        return event

    @property
    def headers(self) -> dict[str, str]:
        """The headers to send beside the body: its content type, and the trace where a header can hold it."""
        values = {"content-type": CONTENT_TYPE, "traceparent": self.traceparent, "tracestate": self.tracestate}
        return {name: value for name, value in values.items() if value is not None and _HEADER.fullmatch(value)}


class Envelope:
    """The text that all events of one type and source have in common, around the values of each.

    It is made once for all of them, because a business transaction waits while an event is written. Raises
    `InvalidInput` for a source or type that no attribute may be.
    """

    __slots__ = ("_after", "_before", "_type")

    def __init__(self, type: str, version: int, source: str) -> None:  # noqa: A002 - the attribute's name
        self._type = type
        self._before = f'", "source": {_quoted("source", source)}, "type": {_quoted("type", type)}'
        self._after = f'", "datacontenttype": "application/json", "typeversion": {version}, "data": '

    def text(
        self,
        id: str,  # noqa: A002 - the attribute's name
        time: datetime,
        data: str,
        *,
        subject: str | None = None,
        key: str | None = None,
        traceparent: str | None = None,
        tracestate: str | None = None,
    ) -> str:
        """An event as JSON text; ``id`` is a UUID's text, ``data`` JSON already.

        Raises `InvalidInput` for what no attribute may be.
        """
        more = ""
        if subject is not None:
            more = f', "subject": {_quoted("subject", subject)}'
        if key is not None:
            more += f', "partitionkey": {_quoted("partitionkey", key)}'
        if traceparent is not None:
            more += f', "traceparent": {_quoted("traceparent", traceparent)}'
        if tracestate is not None:
            more += f', "tracestate": {_quoted("tracestate", tracestate)}'
        if "\\u0000" in data and _NUL.search(data):
            raise InvalidInput(
                f"the data of event {self._type!r} holds a NUL character, which no database can look into"
            )
        return (
            f'{{"specversion": "1.0", "id": "{id}{self._before}{more}, "time": "{time.isoformat()}{self._after}{data}}}'
        )


def checked(name: str, value: str) -> str:
    """``value``, if it may be a text attribute: 1 to `LONGEST` characters, none of control. Raises `InvalidInput`."""
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST or _CONTROL.search(value):
        raise InvalidInput(f"{name} of an event must be 1 to 255 characters without control ones, not {value!r:.60}")
    return value


def _quoted(name: str, value: str) -> str:
    return encode_basestring(checked(name, value))


def decode(text: str, *, delivery: str, number: int | None = None) -> Message:
    """The message of a stored event; ``number`` is its place within its key, unless the event says it itself.

    Raises `ValueError` for text that is no event.
    """
    event = json.loads(text)
    try:
        sequence = event.get("sequence")
        if sequence is None and number is not None:
            text = numbered(text, number)
        return Message(
            id=event["id"], type=event["type"], body=text.encode(), delivery=delivery, key=event.get("partitionkey"),
            sequence=number if sequence is None else int(sequence), subject=event.get("subject"),
            traceparent=event.get("traceparent"), tracestate=event.get("tracestate"), time=_time(event.get("time")),
        )  # fmt: skip
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not an event in CloudEvents JSON: {error}") from None


def _time(text: Any) -> datetime | None:
    """The time of an event; None without one that can be read."""
    try:
        time = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        return None
    return None if time.tzinfo is None else time


def numbered(text: str, number: int) -> str:
    """A stored event's text with its number within its key."""
    return f'{{"sequence": "{number:0{_DIGITS}d}", {text[1:]}'


# -- inbox ------------------------------------------------------------------------------------------------------------
#
# Where a numbered message stands among those of its key that were handled already.


class Arrival(StrEnum):
    """What a consumer should do with a message."""

    FIRST = "first"  # handle it: it is noted in the same transaction
    DUPLICATE = "duplicate"  # handled before: acknowledge it and do nothing
    OUTDATED = "outdated"  # a later one of its key was handled: acknowledge it, or park it for a person
    EARLY = "early"  # numbers before it are missing: do not acknowledge it, it must come again


def place(number: int, highest: int, *, gapless: bool) -> Arrival:
    """What to do with message ``number`` of a key of which ``highest`` is the highest number handled so far.

    0: none was handled, so any number may be the first. ``gapless``: no number may be passed over.
    """
    if number <= highest:
        return Arrival.OUTDATED
    return Arrival.EARLY if gapless and highest and number > highest + 1 else Arrival.FIRST


# -- what people are shown --------------------------------------------------------------------------------------------

RESOURCE = "outbox"


def destination(resource_key: str) -> str:
    """Where the jobs of a resource publish to."""
    return resource_key.removeprefix(RESOURCE + "/")


@dataclass(frozen=True, slots=True, kw_only=True)
class EventInfo:
    """One event at one destination as it stood when it was read. Times are aware and in UTC.

    ``id`` is the event's, ``job_id`` the job's that publishes it to ``destination``. ``published_at`` is when the
    destination confirmed it. ``event`` holds all attributes and ``data``.
    """

    id: str
    type: str
    destination: str
    state: JobState
    key: str | None
    sequence: int | None
    job_id: UUID
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    published_at: datetime | None
    attempts: int
    run_at: datetime
    last_error: str | None
    last_error_kind: str | None
    last_error_code: str | None
    event: Mapping[str, Any]

    @classmethod
    def of(cls, job: JobInfo) -> EventInfo:
        """The event of a job; what cannot be read is shown empty."""
        event = job.payload if isinstance(job.payload, dict) else {}
        text = event.get("sequence")
        number = whole_number(text) if isinstance(text, str) else None
        return cls(
            id=str(event.get("id", "")),
            type=str(event.get("type", "")),
            destination=destination(job.resource_key),
            state=job.state,
            key=event.get("partitionkey"),
            sequence=job.order_no if number is None else number,
            job_id=job.id,
            created_at=job.created_at,
            started_at=job.started_at,
            finished_at=job.finished_at,
            published_at=job.finished_at if job.state == "succeeded" else None,
            attempts=job.attempts,
            run_at=job.run_at,
            last_error=job.last_error,
            last_error_kind=job.last_error_kind,
            last_error_code=job.last_error_code,
            event=event,
        )

    def to_json(self) -> dict[str, Any]:
        """Every field under its own name."""
        return fields_of(self)


@dataclass(frozen=True, slots=True)
class Replayed:
    """How many published events were put in line again, or with a dry run would be (counted up to a bound).

    An event that went to two destinations is counted at both: ``by_destination`` tells them apart.
    """

    events: int = 0
    more: bool = False
    by_destination: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Every field under its own name."""
        return fields_of(self)
