"""Marks: the requests of a job whose outcome nobody knows, as its row keeps them (``sent``), by name.

A request without a provider's key is in doubt as soon as it was sent and nothing came back: sending it again might do
it twice. One with a key may be repeated for as long as the provider remembers the key (`Idempotency.life`, counted from
the first sending); after that it is in doubt like any other. So the key and its first time are committed before the
first sending, and a repeat changes neither.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from resilient.core.phrases import moment

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.core.exchange import RequestFacts

MARGIN: Final = 60.0  # seconds a repeat may be on its way, and clocks may differ; at most a tenth of the life


def made(asked: RequestFacts, now: datetime) -> dict[str, Any]:
    """The mark of a request that is about to be sent for the first time."""
    mark: dict[str, Any] = {"hash": asked.body_hash, "at": _text(now)}
    if asked.idempotency_key and asked.key_life is not None:
        safe = asked.key_life - min(MARGIN, asked.key_life / 10)
        mark |= {"key": asked.idempotency_key, "until": _text(now + timedelta(seconds=safe))}
    return mark


def readable(found: Any) -> Mapping[str, Mapping[str, Any]]:
    """Marks as a row has them. What cannot be read means that something may have been sent: in doubt."""
    if not found:
        return {}
    if isinstance(found, dict) and all(isinstance(mark, dict) for mark in found.values()):
        return found
    return {"unreadable mark": {}}


def until_of(mark: Mapping[str, Any]) -> datetime | None:
    """Until when the request may be repeated; None if never."""
    return _time(mark.get("until"))


def in_doubt(marks: Mapping[str, Mapping[str, Any]] | None, now: datetime) -> bool:
    """Whether some request must not be repeated: it had no key, or the provider may have forgotten it."""
    return any((until := until_of(mark)) is None or until <= now for mark in readable(marks).values())


def unkeyed(marks: Mapping[str, Mapping[str, Any]] | None) -> bool:
    """Whether some request was sent without a key."""
    return any(until_of(mark) is None for mark in readable(marks).values())


def safe_until(marks: Mapping[str, Mapping[str, Any]] | None) -> datetime | None:
    """When the first of the keys is forgotten; None if none is outstanding."""
    return min((until for mark in readable(marks).values() if (until := until_of(mark)) is not None), default=None)


def forgotten(marks: Mapping[str, Mapping[str, Any]] | None, now: datetime) -> str:
    """What to tell a person about the requests in doubt whose key is too old; "" if there is none."""
    old = [
        f"{name} was first sent at {_told(mark.get('at'))}, and the provider remembers its key only until"
        f" {moment(until)}"
        for name, mark in sorted(readable(marks).items())
        if (until := until_of(mark)) is not None and until <= now
    ]
    return "; ".join(old)


def _text(at: datetime) -> str:
    return at.isoformat(timespec="milliseconds")


def _time(text: Any) -> datetime | None:
    try:
        return datetime.fromisoformat(text) if isinstance(text, str) else None
    except ValueError:
        return None


def _told(text: Any) -> str:
    at = _time(text)
    return "a time nobody knows" if at is None else moment(at)
