"""Events of the outbox are jobs on ``outbox/<destination>``; here are the questions that look into them.

A type is looked for within what the other conditions leave over, so ask for a time or a destination too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import sqlalchemy as sa

from resilient.core.events import RESOURCE
from resilient.core.records import JobInfo
from resilient.core.states import JobState
from resilient.store.filters import JOB, JobFilter, as_id, conditions, in_state
from resilient.store.queries import Order, picked

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from sqlalchemy import ColumnElement, Connection

    from resilient.store.dialect import Dialect

__all__ = ["Order", "as_id", "page", "published", "resources"]

_COLUMNS: Final = tuple(JOB.c[name] for name in JobInfo.__slots__)


def resources(destinations: Sequence[str] | None) -> tuple[str, ...]:
    """Their resource keys, or the pattern of all."""
    return (f"{RESOURCE}/*",) if destinations is None else tuple(f"{RESOURCE}/{name}" for name in destinations)


def _inside(types: Sequence[str], key: str | None, event_id: str | None) -> list[ColumnElement[bool]]:
    found: list[ColumnElement[bool]] = []
    for name, words in (
        ("type", types),
        ("partitionkey", [key] if key else ()),
        ("id", [event_id] if event_id else ()),
    ):
        if words:
            found.append(JOB.c.payload[name].as_string().in_(words))
    return found


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
    return [JobInfo(**{**row, "state": JobState(row["state"])}) for row in rows.mappings()]


def published(
    c: Connection,
    d: Dialect,
    f: JobFilter,
    *,
    types: Sequence[str] = (),
    key: str | None = None,
    since: tuple[datetime, UUID] | None = None,
    limit: int,
) -> list[JobInfo]:
    """Published events in the order in which they were, from behind ``since``: what a replay puts in line again."""
    at = (JOB.c.finished_at, JOB.c.id)
    extra = _inside(types, key, None)
    if since is not None:
        extra.append(sa.tuple_(*at) > sa.tuple_(*(sa.literal(v, col.type) for v, col in zip(since, at, strict=True))))
    where = [*conditions(f.at(d.now(c)), d), in_state("succeeded"), *extra]
    rows = d.execute(c, sa.select(*_COLUMNS).where(*where).order_by(*at).limit(limit))
    return [JobInfo(**{**row, "state": JobState(row["state"])}) for row in rows.mappings()]
