"""What time has brought, in one look: so that a worker with nothing to stage asks one question a second, not ten."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from resilient.store.dialect import TIME
from resilient.store.direct import direct

if TYPE_CHECKING:
    from datetime import datetime

    from sqlalchemy import Connection

    from resilient.store.dialect import Dialect


@dataclass(frozen=True, slots=True)
class Due:
    """When the next scheduled job and the next parked turn are due, and whether others' ends are to be followed up."""

    now: datetime
    job_at: datetime | None
    turn_at: datetime | None
    edges: bool
    workflows: bool

    @property
    def anything(self) -> bool:
        """Whether there is something to do at once."""
        return (
            self.edges or self.workflows or any(at is not None and at <= self.now for at in (self.job_at, self.turn_at))
        )


@direct
def look(c: Connection, d: Dialect) -> Due:
    """One statement, without locks."""
    now = d.host_now()
    params: dict[str, Any] = {} if now is None else {"now": now}
    row = d.run(
        c,
        f"SELECT {d.now_sql} AS now,"
        " (SELECT run_at FROM {job} WHERE state = 'scheduled' ORDER BY run_at LIMIT 1) AS job_at,"
        " (SELECT recheck_at FROM {turn} WHERE parked_on IS NOT NULL ORDER BY recheck_at LIMIT 1) AS turn_at,"
        " EXISTS (SELECT 1 FROM {dependency} WHERE NOT resolved) AS edges,"
        " EXISTS (SELECT 1 FROM {workflow} WHERE attention) AS workflows",
        params,
        now=TIME,
        job_at=TIME,
        turn_at=TIME,
        edges=None,
        workflows=None,
    ).one()
    return Due(row[0], row[1], row[2], bool(row[3]), bool(row[4]))
