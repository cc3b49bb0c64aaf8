"""Accounts of a schedule `for_each` account: who they are, which are due, how they do.

Each has a row with its own next tick. All of them are written under the lock of the schedule's row, so that nobody
waits for one of them, and an account is moved on by one worker.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import sqlalchemy as sa

from resilient.core.accounts.tokens import USABLE
from resilient.core.schedules.schedule import ScheduledAccount
from resilient.store.db import tables
from resilient.store.db.dialect import ID, TIME
from resilient.store.jobs.filters import matches

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import datetime
    from uuid import UUID

    from sqlalchemy import Connection

    from resilient.store.db.dialect import Dialect

CONNECTION: Final = tables.metadata.tables["resilient_connection"]
GRANT: Final = tables.metadata.tables["resilient_grant"]
_USABLE: Final = tuple(sorted(state.value for state in USABLE))
PAGE: Final = 2_000


# -- who they are ------------------------------------------------------------------------------------------------------


def connected(c: Connection, d: Dialect, pattern: str, after: str) -> list[str]:
    """A page of accounts whose connection can be used, that match a pattern."""
    statement = sa.select(CONNECTION.c.resource_key).join(GRANT, GRANT.c.id == CONNECTION.c.grant_id)
    statement = statement.where(matches(CONNECTION.c.resource_key, pattern, d), CONNECTION.c.resource_key > after)
    statement = statement.where(GRANT.c.state.in_(_USABLE)).order_by(CONNECTION.c.resource_key).limit(PAGE)
    return list(d.execute(c, statement).scalars())


def cut_off(c: Connection, d: Dialect, keys: Sequence[str]) -> set[str]:
    """Those of these accounts whose connection cannot be used. One without any may have no need of it."""
    rows = d.run(
        c,
        f"SELECT n.resource_key FROM {d.array('keys', 'text')} JOIN {{connection}} n ON n.resource_key = value"
        f" JOIN {{grant}} g ON g.id = n.grant_id WHERE g.state NOT IN ({_words()})",
        {"keys": d.pack_keys(keys)},
    )
    return set(rows.scalars())


def page_of_keys(c: Connection, d: Dialect, name: str, after: str) -> list[str]:
    """A page of the accounts a schedule has."""
    rows = d.run(
        c,
        "SELECT resource_key FROM {schedule_account} WHERE schedule = :name AND resource_key > :after_key"
        " ORDER BY resource_key LIMIT :limit",
        {"name": name, "after_key": after, "limit": PAGE},
    )
    return list(rows.scalars())


def add(c: Connection, d: Dialect, name: str, accounts: Iterable[tuple[str, datetime]], now: datetime) -> None:
    """Insert accounts with their first ticks."""
    doc = json.dumps([{"key": key, "next_at": d.time(at)} for key, at in accounts])
    d.run(
        c,
        "INSERT INTO {schedule_account} (schedule, resource_key, next_at, active_since)"
        " SELECT CAST(:name AS text), key, next_at, CAST(:now AS {timestamp})"
        f" FROM {d.records('doc', _MOVED)} AS r WHERE true ON CONFLICT DO NOTHING",
        {"name": name, "doc": doc, "now": now},
    )


def remove(c: Connection, d: Dialect, name: str, keys: Sequence[str]) -> None:
    """Delete accounts that no longer belong to a schedule."""
    d.run(
        c,
        f"DELETE FROM {{schedule_account}} WHERE schedule = :name AND resource_key {d.among('keys', 'text')}",
        {"name": name, "keys": d.pack_keys(keys)},
    )


def forget(c: Connection, d: Dialect, name: str) -> None:
    """Delete all accounts of a schedule."""
    d.run(c, "DELETE FROM {schedule_account} WHERE schedule = :name", {"name": name})


def start_anew(c: Connection, d: Dialect, name: str, now: datetime) -> None:
    """Let the ticks of all accounts begin now: what would have ticked before never does."""
    d.run(
        c,
        "UPDATE {schedule_account} SET next_at = :now, active_since = :now WHERE schedule = :name",
        {"name": name, "now": now},
    )


# -- ticks ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Due:
    """An account whose tick is due; ``usable``: its connection does not forbid it.

    ``unended``: its last job, if that has not ended.
    """

    key: str
    next_at: datetime
    usable: bool
    unended: UUID | None = None


@dataclass(frozen=True, slots=True)
class Moved:
    """What becomes of an account: its next tick, and the latest one with its job if there was one."""

    key: str
    next_at: datetime
    last_at: datetime | None = None
    job: UUID | None = None


def due(c: Connection, d: Dialect, name: str, now: datetime, limit: int, *, connected_only: bool) -> list[Due]:
    """Accounts of a locked schedule that are due, longest due first.

    With ``connected_only`` one without a connection is not usable.
    """
    rows = d.run(
        c,
        f"SELECT a.resource_key, a.next_at, g.state, {_UNENDED} FROM {{schedule_account}} a"
        " LEFT JOIN {connection} n ON n.resource_key = a.resource_key LEFT JOIN {grant} g ON g.id = n.grant_id"
        " WHERE a.schedule = :name AND a.next_at <= :now ORDER BY a.next_at, a.resource_key LIMIT :limit",
        {"name": name, "now": now, "limit": limit},
        resource_key=None,
        next_at=TIME,
        state=None,
        unended=ID,
    )
    return [
        Due(r.resource_key, r.next_at, not connected_only if r.state is None else r.state in _USABLE, r.unended)
        for r in rows
    ]


def move_on(c: Connection, d: Dialect, name: str, moved: Sequence[Moved]) -> None:
    """Write the next ticks of accounts. The success of a last job is noted, because a new one takes its place."""
    doc = [
        {
            "schedule": name, "key": m.key, "next_at": d.time(m.next_at), "last_at": d.time(m.last_at),
            "job": None if m.job is None else d.id(m.job),
        }
        for m in moved
    ]  # fmt: skip
    d.run(
        c,
        "UPDATE {schedule_account} SET next_at = r.next_at, last_at = coalesce(r.last_at, {schedule_account}.last_at),"
        f" succeeded_at = coalesce({_LAST_SUCCESS}, succeeded_at), last_job = coalesce(r.job, last_job)"
        f" FROM {d.records('doc', _MOVED | {'schedule': 'text', 'last_at': 'timestamptz', 'job': 'uuid'})} AS r"
        # Not `= :name`: SQLite would walk all accounts of the schedule for each of these.
        " WHERE {schedule_account}.schedule = r.schedule AND resource_key = r.key",
        {"doc": json.dumps(doc)},
    )


def soonest(c: Connection, d: Dialect, name: str) -> datetime | None:
    """The next tick of any account."""
    at: datetime | None = d.run(
        c,
        "SELECT next_at FROM {schedule_account} WHERE schedule = :name ORDER BY next_at LIMIT 1",
        {"name": name},
        next_at=TIME,
    ).scalar()
    return at


def find(c: Connection, d: Dialect, name: str, key: str) -> Due | None:
    """One account of a locked schedule."""
    r = d.run(
        c,
        f"SELECT a.resource_key, a.next_at, {_UNENDED} FROM {{schedule_account}} a"
        " WHERE a.schedule = :name AND a.resource_key = :key",
        {"name": name, "key": key},
        resource_key=None,
        next_at=TIME,
        unended=ID,
    ).one_or_none()
    return None if r is None else Due(r.resource_key, r.next_at, usable=True, unended=r.unended)


# -- how they do ---------------------------------------------------------------------------------------------


def page(c: Connection, d: Dialect, name: str, *, limit: int, after: str) -> list[ScheduledAccount]:
    """A page of accounts by key."""
    rows = d.run(
        c,
        "SELECT a.resource_key, a.next_at, a.last_at, a.last_job, j.state AS last_state,"
        " CASE WHEN j.state = 'succeeded' AND (a.succeeded_at IS NULL OR a.succeeded_at < j.finished_at)"
        " THEN j.finished_at ELSE a.succeeded_at END AS succeeded_at"
        " FROM {schedule_account} a LEFT JOIN {job} j ON j.id = a.last_job"
        " WHERE a.schedule = :name AND a.resource_key > :after_key ORDER BY a.resource_key LIMIT :limit",
        {"name": name, "after_key": after, "limit": limit},
        resource_key=None,
        next_at=TIME,
        last_at=TIME,
        last_job=ID,
        last_state=None,
        succeeded_at=TIME,
    )
    return [ScheduledAccount(**r._mapping) for r in rows]  # noqa: SLF001 - SQLAlchemy's public name


@dataclass(frozen=True, slots=True)
class Total:
    """The accounts of one schedule together."""

    accounts: int
    next_at: datetime
    succeeded_at: datetime | None


def totals(c: Connection, d: Dialect) -> dict[str, Total]:
    """The totals of every schedule that has accounts."""
    rows = d.run(
        c,
        "SELECT schedule, count(*) AS accounts, min(next_at) AS next_at, max(succeeded_at) AS succeeded_at"
        " FROM {schedule_account} GROUP BY schedule",
        schedule=None,
        accounts=None,
        next_at=TIME,
        succeeded_at=TIME,
    )
    return {r.schedule: Total(r.accounts, r.next_at, r.succeeded_at) for r in rows}


@dataclass(frozen=True, slots=True)
class Silent:
    """Accounts of one schedule without a success for long: how many, and the one that waits longest."""

    accounts: int
    example: str
    since: datetime
    ever: bool


def silent(c: Connection, d: Dialect, name: str, before: datetime) -> Silent | None:
    """The accounts that had no success since ``before``, and tick since then."""
    rows = d.run(
        c,
        "SELECT resource_key, succeeded_at, coalesce(succeeded_at, active_since) AS since, count(*) OVER () AS accounts"
        " FROM {schedule_account} WHERE schedule = :name AND active_since < :before"
        " AND (succeeded_at IS NULL OR succeeded_at < :before) ORDER BY 3, 1 LIMIT 1",
        {"name": name, "before": before},
        resource_key=None,
        succeeded_at=TIME,
        since=TIME,
        accounts=None,
    ).all()
    return next((Silent(r.accounts, r.resource_key, r.since, r.succeeded_at is not None) for r in rows), None)


def note_successes(c: Connection, d: Dialect, name: str) -> None:
    """Remember which last jobs succeeded, under the schedule's lock: they may be pruned before the next tick."""
    d.run(
        c,
        f"UPDATE {{schedule_account}} SET succeeded_at = {_LAST_SUCCESS} WHERE schedule = :name AND resource_key IN ("
        "SELECT a.resource_key FROM {schedule_account} a JOIN {job} j ON j.id = a.last_job WHERE a.schedule = :name"
        " AND j.state = 'succeeded' AND (a.succeeded_at IS NULL OR a.succeeded_at < j.finished_at))",
        {"name": name},
    )


_MOVED: Final = {"key": "text", "next_at": "timestamptz"}
_UNENDED: Final = "(SELECT j.id FROM {job} j WHERE j.id = a.last_job AND j.finished_at IS NULL) AS unended"
_LAST_SUCCESS: Final = (  # an earlier job may have succeeded after the last one did
    "(SELECT CASE WHEN j.finished_at < {schedule_account}.succeeded_at THEN {schedule_account}.succeeded_at"
    " ELSE j.finished_at END FROM {job} j WHERE j.id = {schedule_account}.last_job AND j.state = 'succeeded')"
)


def _words() -> str:
    return ", ".join(f"'{word}'" for word in _USABLE)
