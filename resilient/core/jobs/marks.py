"""Marks: notes in a job's row (``sent``), by the request's name, of requests whose outcome nobody knows.

A request without a provider's key is in doubt as soon as it was sent and nothing came back: sending it again might do
it twice. One with a key may be repeated for as long as the provider remembers the key (`Idempotency.life`, counted from
the first sending, and `Idempotency.lives_with`); after that it is in doubt like any other. So the key, the time of the
first sending and the grant that it uses are committed before the first sending, and a repeat changes none of them.
A request with such a key keeps its mark when it is answered, until its job ends or saves a checkpoint: it is in doubt
no more, but a repeat after the key's end would do it again, and is refused.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from resilient.core.base.phrases import moment

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.core.base.exchange import RequestFacts

FAR: Final = datetime.max.replace(tzinfo=UTC)  # the end of a key that the provider never forgets by time
MARGIN: Final = 60.0  # seconds for a repeat on its way and for clocks that differ; at most a tenth of a key's life


def made(request: RequestFacts, now: datetime, grant: str = "") -> dict[str, Any]:
    """The mark of a request that is about to be sent for the first time, under a grant of its account."""
    mark: dict[str, Any] = {"hash": request.body_hash, "at": _text(now)}
    if request.idempotency_key and request.is_forgettable:
        life = request.key_life
        until = FAR if life is None else now + timedelta(seconds=life - min(MARGIN, life / 10))
        mark |= {"key": request.idempotency_key, "until": _text(until)}
        if request.key_of_grant:
            mark["grant"] = grant
    return mark


def under(mark: Mapping[str, Any], grant: str, now: datetime) -> dict[str, Any]:
    """The mark, for an account whose grant is now ``grant``: if it was sent under another one, its key ends ``now``."""
    if mark.get("grant", grant) == grant:
        return dict(mark)
    return {**mark, "until": _text(now), "ended": "grant"}


def with_answer(mark: Mapping[str, Any]) -> dict[str, Any]:
    """The mark of a request with a key that took effect."""
    return {**mark, "answered": True}


def without_answer(mark: Mapping[str, Any]) -> dict[str, Any]:
    """The mark of a request in doubt: it was to be sent again, and its key is too old."""
    return {name: value for name, value in mark.items() if name != "answered"}


def is_answered(mark: Mapping[str, Any]) -> bool:
    """Whether the request took effect."""
    return mark.get("answered") is True


def unanswered(marks: Mapping[str, Mapping[str, Any]] | None) -> dict[str, Mapping[str, Any]]:
    """The marks of requests whose outcome nobody knows."""
    return {name: mark for name, mark in readable(marks).items() if not is_answered(mark)}


def readable(value: Any) -> Mapping[str, Mapping[str, Any]]:
    """The marks in a row's column. Unreadable ones count as one request in doubt, because it may have been sent."""
    if not value:
        return {}
    if isinstance(value, dict) and all(isinstance(mark, dict) for mark in value.values()):
        return value
    return {"unreadable mark": {}}


def until_of(mark: Mapping[str, Any]) -> datetime | None:
    """Until when the request may be repeated; None if never."""
    return _time(mark.get("until"))


def in_doubt(marks: Mapping[str, Mapping[str, Any]] | None, now: datetime) -> bool:
    """Whether some request must not be repeated: it had no key, or the provider may have forgotten it."""
    return any((until := until_of(mark)) is None or until <= now for mark in unanswered(marks).values())


def unkeyed(marks: Mapping[str, Mapping[str, Any]] | None) -> bool:
    """Whether some request was sent without a key."""
    return any(until_of(mark) is None for mark in unanswered(marks).values())


def safe_until(marks: Mapping[str, Mapping[str, Any]] | None) -> datetime | None:
    """When the first of the keys is forgotten; None if none is outstanding."""
    return min((until for mark in unanswered(marks).values() if (until := until_of(mark)) is not None), default=None)


def forgotten(marks: Mapping[str, Mapping[str, Any]] | None, now: datetime) -> str:
    """What to tell a person about the requests in doubt whose key is too old; "" if there is none."""
    old = [
        f"{name} was first sent at {_moment_in(mark.get('at'))}, and {_why(mark, until)}"
        for name, mark in sorted(readable(marks).items())
        if (until := until_of(mark)) is not None and until <= now
    ]
    return "; ".join(old)


def _why(mark: Mapping[str, Any], until: datetime) -> str:
    if mark.get("ended") == "grant":
        return "its account was connected anew since, which the provider's memory of its key does not outlive"
    return f"the provider remembers its key only until {moment(until)}"


def _text(at: datetime) -> str:
    return at.isoformat(timespec="milliseconds")


def _time(text: Any) -> datetime | None:
    try:
        at = datetime.fromisoformat(text) if isinstance(text, str) else None
    except ValueError:
        return None
    return at if at is not None and at.tzinfo is not None else None


def _moment_in(text: Any) -> str:
    at = _time(text)
    return "a time nobody knows" if at is None else moment(at)
