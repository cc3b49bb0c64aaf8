"""An event on its way to one destination, and its form: CloudEvents 1.0 in JSON.

The format (https://github.com/cloudevents/spec, "JSON Event Format") is one flat object, so it is written here: a
library for it would be larger. Beside the required attributes an event carries ``datacontenttype``, ``time``,
``subject`` if it has one, and extensions: ``partitionkey`` (the ordering key), ``sequence`` (its number within the key,
padded so that texts compare like numbers), ``typeversion``, and ``traceparent`` and ``tracestate`` (Distributed
Tracing).
"""

from __future__ import annotations

import json
import re
from json.encoder import encode_basestring
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from resilient.core.errors import InvalidInput

if TYPE_CHECKING:
    from datetime import datetime

CONTENT_TYPE: Final = "application/cloudevents+json"
_DIGITS: Final = 20
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_NUL: Final = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")
LONGEST: Final = 255


class Message(NamedTuple):
    """What a destination is given.

    ``id`` is the event's: the same at every destination, in every retry and replay; consumers tell duplicates by it.
    ``delivery`` is the job's: the same over its retries, another one in a replay, and once somebody retries what was
    published: a broker that drops what it has seen lately must not drop those. ``body`` is the whole event as
    CloudEvents JSON. ``sequence`` counts the events of ``key`` at this destination from 1.
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

    @property
    def event(self) -> dict[str, Any]:
        """The event's attributes, and ``data``."""
        found: dict[str, Any] = json.loads(self.body)
        return found

    @property
    def headers(self) -> dict[str, str]:
        """What is worth carrying beside the body: its type and the trace."""
        found = {"content-type": CONTENT_TYPE, "traceparent": self.traceparent, "tracestate": self.tracestate}
        return {name: value for name, value in found.items() if value is not None}


class Envelope:
    """What all events of one type and source have in common: their text but for what is each one's own.

    Made once and used for each event, because a business transaction waits for it. Raises `InvalidInput` for a source
    or type that no attribute may be.
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
    """A text attribute as the specification wants it: not empty, no control characters."""
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST or _CONTROL.search(value):
        raise InvalidInput(f"{name} of an event must be 1 to 255 characters without control ones, not {value!r:.60}")
    return value


def _quoted(name: str, value: str) -> str:
    return encode_basestring(checked(name, value))


def decode(text: str, *, delivery: str, number: int | None = None) -> Message:
    """The message of a stored event; ``number`` is its place within its key, unless the event says it itself.

    Raises `ValueError` for text that is no event.
    """
    found = json.loads(text)
    try:
        sequence = found.get("sequence")
        if sequence is None and number is not None:
            text = numbered(text, number)
        return Message(
            id=found["id"], type=found["type"], body=text.encode(), delivery=delivery, key=found.get("partitionkey"),
            sequence=number if sequence is None else int(sequence), subject=found.get("subject"),
            traceparent=found.get("traceparent"), tracestate=found.get("tracestate"),
        )  # fmt: skip
    except (AttributeError, KeyError) as error:
        raise ValueError(f"not an event in CloudEvents JSON: {error}") from None


def numbered(text: str, number: int) -> str:
    """A stored event with its place within its key."""
    return f'{{"sequence": "{number:0{_DIGITS}d}", {text[1:]}'
