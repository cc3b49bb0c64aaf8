"""Edit: new values for jobs that wait, or that are dead and will be replayed.

Rules: a running job is its worker's; a payload that may have been sent already under the job's idempotency
key is only replaced as a new operation, under a new key; what becomes due goes through the one function that
makes jobs ready.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from resilient.core.states import WAITING, JobState
from resilient.store import jobs, turns
from resilient.store.changes import Sorted, next_key, write_all
from resilient.store.filters import JOB

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from sqlalchemy import Connection, Row

    from resilient.store.dialect import Dialect


class Unset(Enum):
    """Nothing was given for this field (None often means something)."""

    UNSET = "unset"


UNSET: Final = Unset.UNSET


_EDITED: Final = ("priority", "max_attempts", "expires_at", "tags")


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """New values for jobs that do not run.

    ``payload`` is decoded JSON that fits the kind; None is a value.
    """

    payload: Any = UNSET
    payload_version: int = 1
    priority: int | Unset = UNSET
    run_at: datetime | Unset = UNSET
    max_attempts: int | Unset | None = UNSET
    expires_at: datetime | Unset | None = UNSET
    tags: Mapping[str, str] | Unset | None = UNSET
    new_operation: bool = False
    verb: str = "edited"
    usual: frozenset[JobState] = WAITING
    allowed: frozenset[JobState] = WAITING | {JobState.DEAD}

    def sort(self, job: Row[Any]) -> str:
        """A dead job may be corrected before it is replayed, but has no time to run at."""
        if job.state == JobState.RUNNING:
            return "running"
        if job.state not in self.allowed or (job.state == JobState.DEAD and self.run_at is not UNSET):
            return "too_late"
        risky = self.payload is not UNSET and not self.new_operation
        return "sent" if risky and (job.sent is not None or job.executions > 0) else "edited"

    def write(self, c: Connection, d: Dialect, found: Sorted, now: datetime) -> Counter[str]:
        """The values first, then the place in line."""
        rows = found.get("edited", ())
        values = {name: value for name in _EDITED if (value := getattr(self, name)) is not UNSET}
        if self.payload is not UNSET:
            values |= {"payload": self.payload, "payload_version": self.payload_version}
        if self.new_operation:
            values |= {"idempotency_key": next_key(), "sent": None}
        write_all(c, d, rows, version=JOB.c.version + 1, updated_at=now, **values)
        ready = [row for row in rows if row.state == JobState.READY]
        if self.priority is not UNSET:  # a better place needs a turn of that priority
            turns.insert(c, d, {row.resource_key: self.priority for row in ready})
        if self.run_at is not UNSET:
            self._move(c, d, rows, self.run_at, now)
        return Counter()

    def _move(self, c: Connection, d: Dialect, rows: Sequence[Row[Any]], run_at: datetime, now: datetime) -> None:
        """To another time. Blocked jobs stay blocked, ready ones stay ready if they are due."""
        write_all(c, d, rows, run_at=run_at)
        if run_at > now:
            due = [row for row in rows if row.state == JobState.READY]
            write_all(c, d, due, state=JobState.SCHEDULED.value)
            return
        scheduled = [row for row in rows if row.state == JobState.SCHEDULED]
        jobs.make_ready_if_version(c, d, {row.id: row.version + 1 for row in scheduled}, now)
