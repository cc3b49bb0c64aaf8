"""What consumers took already: the guard against a message that comes twice, or out of order.

Written in the consumer's own transaction: if that rolls back, the message was not taken. Two transactions with one
message at once: the second waits for the first and then finds it taken, or, if the first rolled back, takes it.
A message's id comes from strangers: one that fits no column is stored as its hash.
"""

from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from sqlalchemy import BigInteger

from resilient.core.events.message import Arrival, place
from resilient.store.db.dialect import TIME

if TYPE_CHECKING:
    from datetime import datetime

    from sqlalchemy import Connection

    from resilient.store.db.dialect import Dialect

LONGEST: Final = 255
TOUCHED: Final = timedelta(hours=1)


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
    d.run(
        c,
        "INSERT INTO {inbox_key} (consumer, ordering_key, number, updated_at) VALUES (:consumer, :key, 0, :now)"
        " ON CONFLICT DO NOTHING",
        {**at, "now": now},
    )
    where, types = "WHERE consumer = :consumer AND ordering_key = :key", {"number": BigInteger(), "updated_at": TIME}
    row = d.run(c, f"SELECT number, updated_at FROM {{inbox_key}} {where} {{row_lock}}", at, **types).one()
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


def prune(c: Connection, d: Dialect, before: datetime, limit: int) -> tuple[int, bool]:
    """Forget up to ``limit`` messages, and as many keys, taken before a time; (how many messages, whether more may)."""
    params = {"before": before, "limit": limit}
    gone = d.run(c, f"DELETE FROM {{inbox}} WHERE {_old(d, '{inbox}', 'seen_at')}", params).rowcount
    keys = d.run(c, f"DELETE FROM {{inbox_key}} WHERE {_old(d, '{inbox_key}', 'updated_at')}", params).rowcount
    return int(gone), max(gone, keys) >= limit


def _old(d: Dialect, table: str, at: str) -> str:
    """A condition for the oldest rows by time that are not locked."""
    return d.chosen_rows(table, f"{at} < :before ORDER BY {at} LIMIT :limit")


def count(c: Connection, d: Dialect, before: datetime, limit: int) -> int:
    """How many messages `prune` would forget, counted up to ``limit``."""
    number: int = d.run(
        c,
        "SELECT count(*) FROM (SELECT 1 FROM {inbox} WHERE seen_at < :before LIMIT :limit) AS old",
        {"before": before, "limit": limit},
    ).scalar_one()
    return number
