"""What the demo shows of its database: one look, as plain values.

Reads the tables directly, so that the screen and the audit do not depend on the code they watch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa

from resilient.store import tables

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from sqlalchemy import Connection

    from resilient.store.dialect import Dialect

_JOB: Final[sa.Table] = tables.metadata.tables["resilient_job"]
_RESOURCE: Final[sa.Table] = tables.metadata.tables["resilient_resource"]
_ATTEMPT: Final[sa.Table] = tables.metadata.tables["resilient_attempt"]
_WAITS: Final = ("throttled", "quota")
_GATE: Final = ("key", "breaker", "open_until", "blocked_until", "blocked_code", "last_error_code", "auth")


@dataclass(frozen=True, slots=True)
class JobView:
    """One job at the end: ``charged_waits`` counts attempts it was charged for being throttled."""

    contact: str
    state: str
    error: str | None
    rescues: int
    charged_waits: int = 0


@dataclass(frozen=True, slots=True)
class ResourceView:
    """One resource's gate."""

    key: str
    breaker: str = "closed"
    open_until: datetime | None = None
    blocked_until: datetime | None = None
    blocked_code: str | None = None
    last_error_code: str | None = None
    auth: str = "ok"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything the screen needs, at one moment."""

    now: datetime
    resources: Mapping[str, ResourceView]
    states: Mapping[str, Counter[str]]  # resource key -> state -> jobs
    running: Mapping[str, int]  # worker id -> jobs
    rescues: int

    def total(self, *states: str) -> int:
        """Jobs in any of these states."""
        return sum(count[state] for count in self.states.values() for state in states)

    @property
    def jobs(self) -> int:
        """All jobs."""
        return sum(count.total() for count in self.states.values())

    @property
    def finished(self) -> int:
        """Jobs that will not change any more by themselves."""
        return self.total("succeeded", "dead", "cancelled")


def look(c: Connection, d: Dialect) -> Snapshot:
    """Read a `Snapshot`."""
    states: dict[str, Counter[str]] = {}
    rescues = 0
    grouped = sa.select(_JOB.c.resource_key, _JOB.c.state, sa.func.count(), sa.func.sum(_JOB.c.rescues))
    by_state: Sequence[Any] = d.execute(c, grouped.group_by(_JOB.c.resource_key, _JOB.c.state)).all()
    for key, state, count, rescued in by_state:
        states.setdefault(key, Counter())[state] = count
        rescues += rescued
    held = sa.select(_JOB.c.locked_by, sa.func.count()).where(_JOB.c.state == "running")
    by_worker: Sequence[Any] = d.execute(c, held.group_by(_JOB.c.locked_by)).all()
    rows = d.execute(c, sa.select(*(_RESOURCE.c[name] for name in _GATE))).mappings()
    resources = {row["key"]: ResourceView(**row) for row in rows}
    return Snapshot(d.now(c), resources, states, {w: n for w, n in by_worker if w}, rescues)


def all_jobs(c: Connection, d: Dialect) -> list[JobView]:
    """Every job that pushes a contact, for the audit."""
    charged: Counter[Any] = Counter(
        d.execute(c, sa.select(_ATTEMPT.c.job_id).where(_ATTEMPT.c.charged, _ATTEMPT.c.kind.in_(_WAITS))).scalars()
    )
    columns = (_JOB.c.id, _JOB.c.payload, _JOB.c.state, _JOB.c.last_error, _JOB.c.rescues)
    rows: Sequence[Any] = d.execute(c, sa.select(*columns).where(_JOB.c.kind == "contact.push")).all()
    return [
        JobView(str(payload["id"]), state, error if state == "dead" else None, rescues, charged[id_])
        for id_, payload, state, error, rescues in rows
    ]
