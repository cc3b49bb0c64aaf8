"""The job that a schedule's tick brings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from uuid_utils.compat import uuid7

from resilient.core import schedule
from resilient.engine.enqueue import Ordered, _tags
from resilient.store import jobs

if TYPE_CHECKING:
    from datetime import datetime

    from resilient.store.schedules import Row


def job_of(row: Row, tick: datetime | None, roll: float, *, account: str = "") -> Ordered:
    """The job of a tick, of one account where there are many; ``tick`` None: asked for by hand."""
    t, key = row.spec.template, schedule.unique_key(row.name, row.spec, tick, account)
    made = jobs.NewJob(
        id=uuid7(), kind=row.kind, resource_key=account or t.resource_key, payload=t.payload,
        payload_version=t.payload_version, priority=t.priority, max_attempts=t.max_attempts,
        delay=row.spec.jitter * roll or None,
        expires_in=t.expires_in,
        unique_key=key, unique_until=None if key is None else "finish",
        tags=_tags(schedule.tags(row.name, row.spec, tick)),
    )  # fmt: skip
    return Ordered(made)
