"""Events of the outbox are jobs on ``outbox/<destination>``; here are the questions that look into them.

A type is looked for within what the other conditions leave over, so ask for a time or a destination too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa

from resilient.core.events.message import RESOURCE, destination
from resilient.core.jobs.records import JobInfo
from resilient.core.jobs.states import JobState
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


def _inside(types: Sequence[str], key: str | None, event_id: str | None) -> list[ColumnElement[bool]]:
    where: list[ColumnElement[bool]] = []
    for name, words in (
        ("type", types),
        ("partitionkey", [key] if key else ()),
        ("id", [event_id] if event_id else ()),
    ):
        if words:
            where.append(JOB.c.payload[name].as_string().in_(words))
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
    extra = _inside(types, key, event_id)
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
    where = [*conditions(f, d), in_state("succeeded"), originals, *_inside(types, key, None)]
    if behind is not None:
        where.append(sa.tuple_(*_AT) > sa.tuple_(*(sa.literal(v, k.type) for v, k in zip(behind, _AT, strict=True))))
    return sa.select(*columns).where(*where)
