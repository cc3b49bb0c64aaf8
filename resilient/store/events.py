"""Events: those of the outbox are jobs on ``outbox/<destination>``, and here are the questions that look into them.

A type is looked for within what the other conditions leave over, so ask for a time or a destination too. Below: the
inbox, the messages that consumers have taken.
"""

from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa
from sqlalchemy import BigInteger

from resilient.core.base.instants import add
from resilient.core.events.message import RESOURCE, Arrival, destination, place
from resilient.core.jobs.records import JobInfo
from resilient.core.jobs.states import JobState
from resilient.store.db.dialect import TIME
from resilient.store.jobs.filters import JOB, JobFilter, as_id, conditions, in_state
from resilient.store.jobs.queries import Order, picked

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    from sqlalchemy import ColumnElement, Connection

    from resilient.store.db.dialect import Dialect


__all__ = ["Order", "as_id", "page", "published", "resources", "where_published"]

_COLUMNS: Final = tuple(JOB.c[name] for name in JobInfo.__slots__)


def resources(destinations: Sequence[str] | None) -> tuple[str, ...]:
    """The resource keys of destinations, or the pattern of all."""
    return (f"{RESOURCE}/*",) if destinations is None else tuple(f"{RESOURCE}/{name}" for name in destinations)


def _attribute(d: Dialect, name: str) -> ColumnElement[Any]:
    """An attribute of a job's event; NULL if its payload has none."""
    payload: ColumnElement[Any] = JOB.c.payload
    if not d.is_postgresql:  # one row whose text is no JSON must not fail the others
        payload = sa.type_coerce(sa.case((sa.func.json_valid(payload) == 1, payload)), sa.JSON())
    text: ColumnElement[Any] = payload[name].as_string()
    return text


def _inside(d: Dialect, types: Sequence[str], key: str | None, event_id: str | None) -> list[ColumnElement[bool]]:
    where: list[ColumnElement[bool]] = []
    for name, words in (
        ("type", types),
        ("partitionkey", [key] if key else ()),
        ("id", [event_id] if event_id else ()),
    ):
        if words:
            where.append(_attribute(d, name).in_(words))
    return where


def page(
    c: Connection,
    d: Dialect,
    f: JobFilter,
    *,
    types: Sequence[str] = (),
    key: str | None = None,
    event_id: str | None = None,
    limit: int = 100,
    after: UUID | None = None,
    order: Order = "newest",
) -> list[JobInfo]:
    """Events that fit, in the order of their jobs' ids, from the one that follows ``after``."""
    newest = order == "newest"
    extra = _inside(d, types, key, event_id)
    if after is not None:
        extra.append(JOB.c.id < after if newest else JOB.c.id > after)
    rows = d.execute(c, picked(d, f.at(d.now(c)), _COLUMNS, extra, limit=limit, newest=newest))
    return [_info(row) for row in rows.mappings()]


def published(
    c: Connection,
    d: Dialect,
    f: JobFilter,
    *,
    types: Sequence[str] = (),
    key: str | None = None,
    behind: tuple[datetime, UUID] | None = None,
    limit: int,
) -> list[tuple[JobInfo, str]]:
    """Published events with their text, in the order of publishing, after ``behind``."""
    rows = d.execute(c, _published((_TEXT, *_COLUMNS), d, f, types, key, behind).order_by(*_AT).limit(limit))
    return [(_info(row), row["text"]) for row in rows.mappings()]


def _info(row: Mapping[Any, Any]) -> JobInfo:
    return JobInfo(**{**{name: row[name] for name in JobInfo.__slots__}, "state": JobState(row["state"])})


def where_published(
    c: Connection, d: Dialect, f: JobFilter, *, types: Sequence[str] = (), key: str | None = None, limit: int
) -> list[str]:
    """The destination of each event that `published` would return."""
    rows = d.execute(c, _published((JOB.c.resource_key,), d, f, types, key, None).order_by(*_AT).limit(limit))
    return [destination(row.resource_key) for row in rows]


_TEXT: Final = sa.cast(JOB.c.payload, sa.Text).label("text")  # digit for digit
_AT: Final = (JOB.c.finished_at, JOB.c.id)


def _published(
    columns: Sequence[ColumnElement[Any]],
    d: Dialect,
    f: JobFilter,
    types: Sequence[str],
    key: str | None,
    behind: tuple[datetime, UUID] | None,
) -> sa.Select[Any]:
    originals = JOB.c.tags.is_(None)  # a replay is tagged, so that the next one does not double it
    is_event = _attribute(d, "id") != ""  # not so of a row whose payload was overwritten
    where = [*conditions(f, d), in_state("succeeded"), originals, is_event, *_inside(d, types, key, None)]
    if behind is not None:
        where.append(sa.tuple_(*_AT) > sa.tuple_(*(sa.literal(v, k.type) for v, k in zip(behind, _AT, strict=True))))
    return sa.select(*columns).where(*where)


# -- the inbox --------------------------------------------------------------------------------------------------------
#
# What consumers took already: the guard against a message that comes twice, or out of order.
#
# Written in the consumer's own transaction: if that rolls back, the message was not taken. Two transactions with one
# message at once: the second waits for the first and then finds it taken, or, if the first rolled back, takes it. A
# message's id comes from strangers: one that fits no column is stored as its hash.

LONGEST: Final = 255
TOUCHED: Final = timedelta(hours=1)  # the time in a key's row is at most so old when it takes a message


def first_seen(c: Connection, d: Dialect, consumer: str, message_id: str, now: datetime) -> bool:
    """Note that a consumer takes a message; False if it had taken it before."""
    row = d.run(
        c,
        "INSERT INTO {inbox} (consumer, message_id, seen_at) VALUES (:consumer, :message, :now)"
        " ON CONFLICT DO NOTHING RETURNING 1",
        {"consumer": consumer, "message": fitting(message_id), "now": now},
    ).first()
    return row is not None


def has_taken(c: Connection, d: Dialect, consumer: str, message_id: str) -> bool:
    """Whether a consumer took a message."""
    params = {"consumer": consumer, "message": fitting(message_id)}
    row = d.run(c, "SELECT 1 FROM {inbox} WHERE consumer = :consumer AND message_id = :message", params).first()
    return row is not None


def arrived(
    c: Connection, d: Dialect, consumer: str, message_id: str, key: str, number: int, now: datetime, *, gapless: bool
) -> Arrival:
    """Judge a numbered message of an ordering key, and note it if it is `FIRST`.

    The key's row is locked first, so two messages of one key are taken one after the other.
    """
    at = {"consumer": consumer, "key": fitting(key)}
    where, types = "WHERE consumer = :consumer AND ordering_key = :key", {"number": BigInteger(), "updated_at": TIME}
    row = None
    while row is None:  # one that was quiet for long may be pruned between the two statements
        d.run(
            c,
            "INSERT INTO {inbox_key} (consumer, ordering_key, number, updated_at) VALUES (:consumer, :key, 0, :now)"
            " ON CONFLICT DO NOTHING",
            {**at, "now": now},
        )
        row = d.run(c, f"SELECT number, updated_at FROM {{inbox_key}} {where} {{row_lock}}", at, **types).one_or_none()
    if has_taken(c, d, consumer, message_id):
        return Arrival.DUPLICATE
    arrival = place(number, row.number, gapless=gapless)
    if arrival is Arrival.FIRST:
        first_seen(c, d, consumer, message_id, now)
        moved = max(row.updated_at, now - TOUCHED)  # rarely a new time: it is indexed, and else the update is HOT
        d.run(
            c,
            f"UPDATE {{inbox_key}} SET number = :number, updated_at = :now {where}",
            {**at, "number": number, "now": now if moved > row.updated_at else row.updated_at},
        )
    return arrival


def fitting(text: str) -> str:
    """The key for a text of a stranger: itself, or its hash if it is too long or no database takes it."""
    if len(text) <= LONGEST and text.isprintable():
        return text
    return "sha256:" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def prune_inbox(c: Connection, d: Dialect, before: datetime, limit: int) -> tuple[int, bool]:
    """Forget up to ``limit`` messages, and as many keys, taken before a time; (how many messages, whether more may).

    A key may have taken one for as long as `TOUCHED` after the time in its row.
    """
    params = {"before": before, "limit": limit}
    messages = d.run(c, f"DELETE FROM {{inbox}} WHERE {_old(d, '{inbox}', 'seen_at')}", params).rowcount
    params["before"] = add(before, -TOUCHED)
    keys = d.run(c, f"DELETE FROM {{inbox_key}} WHERE {_old(d, '{inbox_key}', 'updated_at')}", params).rowcount
    return int(messages), max(messages, keys) >= limit


def _old(d: Dialect, table: str, at: str) -> str:
    """A condition for the oldest rows by time that are not locked."""
    return d.chosen_rows(table, f"{at} < :before ORDER BY {at} LIMIT :limit")


def count_inbox(c: Connection, d: Dialect, before: datetime, limit: int) -> int:
    """How many messages `prune_inbox` would forget, counted up to ``limit``."""
    number: int = d.run(
        c,
        "SELECT count(*) FROM (SELECT 1 FROM {inbox} WHERE seen_at < :before LIMIT :limit) AS old",
        {"before": before, "limit": limit},
    ).scalar_one()
    return number
