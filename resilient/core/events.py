"""What people and programs are shown of the outbox: one event on its way to one destination."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from resilient.core.records import fields_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime
    from uuid import UUID

    from resilient.core.records import JobInfo
    from resilient.core.states import JobState

RESOURCE = "outbox"


def destination(resource_key: str) -> str:
    """Where the jobs of a resource publish to."""
    return resource_key.removeprefix(RESOURCE + "/")


@dataclass(frozen=True, slots=True, kw_only=True)
class EventInfo:
    """One event at one destination as it stood when it was read. Times are aware and in UTC.

    ``id`` is the event's, ``job_id`` the job's that publishes it to ``destination``. ``published_at`` is when that
    confirmed it. ``event`` holds all attributes and ``data``.
    """

    id: str
    type: str
    destination: str
    state: JobState
    key: str | None
    sequence: int | None
    job_id: UUID
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    published_at: datetime | None
    attempts: int
    run_at: datetime
    last_error: str | None
    last_error_kind: str | None
    last_error_code: str | None
    event: Mapping[str, Any]

    @classmethod
    def of(cls, job: JobInfo) -> EventInfo:
        """The event of a job; what cannot be read is shown empty."""
        event = job.payload if isinstance(job.payload, dict) else {}
        number = event.get("sequence")
        return cls(
            id=str(event.get("id", "")),
            type=str(event.get("type", "")),
            destination=destination(job.resource_key),
            state=job.state,
            key=event.get("partitionkey"),
            sequence=int(number) if isinstance(number, str) and number.isdecimal() else job.order_no,
            job_id=job.id,
            created_at=job.created_at,
            started_at=job.started_at,
            finished_at=job.finished_at,
            published_at=job.finished_at if job.state == "succeeded" else None,
            attempts=job.attempts,
            run_at=job.run_at,
            last_error=job.last_error,
            last_error_kind=job.last_error_kind,
            last_error_code=job.last_error_code,
            event=event,
        )

    def to_json(self) -> dict[str, Any]:
        """Every field under its own name."""
        return fields_of(self)


@dataclass(frozen=True, slots=True)
class Replayed:
    """How many published events were put in line again, or with a dry run would be (counted up to a bound).

    An event that went to two destinations is counted at both: ``by_destination`` tells them apart.
    """

    events: int = 0
    more: bool = False
    by_destination: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Every field under its own name."""
        return fields_of(self)
