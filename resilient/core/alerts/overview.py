"""The state of everything at a glance: what `resilient status` and the dashboard's first page show."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from resilient.core.jobs.records import Count, StoppedGroup, fields_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping
    from datetime import datetime
    from uuid import UUID

    from resilient.core.alerts.rules import AlertInfo
    from resilient.core.inspect.blocked import HeldLane
    from resilient.core.inspect.why import WorkerSeen


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Jobs that failed alike: of one kind, with one kind of error and code. ``example`` is the latest of them.

    ``next_at`` is when the first of them is tried again (None: dead). Where one account alone had many ``codes``, they
    are together, and ``error_code`` is that of the example.
    """

    kind: str
    error_kind: str | None
    error_code: str | None
    count: Count
    example: UUID
    resource_key: str
    error: str | None
    next_at: datetime | None = None
    codes: int = 1


T = TypeVar("T")


def folded(groups: Iterable[T], alone: Callable[[T], Hashable | None], most: int) -> list[list[T]]:
    """Which groups are one line: each is, but those of an account share one if it has more codes than ``most``.

    Otherwise a tenant that answers with another code each time would hide all others. ``alone``: the same for all
    codes that one account alone has; None for a code of several accounts.
    """
    groups = list(groups)
    sizes = Counter(alone(one) for one in groups)
    lines: dict[Hashable, list[T]] = {}
    for n, one in enumerate(groups):
        key = alone(one)
        lines.setdefault(n if key is None or sizes[key] <= most else ("together", key), []).append(one)
    return list(lines.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """Bounded counts of jobs by state, who works, what is stopped, what fails.

    ``jobs`` counts scheduled, ready, running, blocked and dead ones; ``lately`` what ended within the last hour.
    ``retrying`` and ``died`` (within the last hour) are samples of at most 1,000 jobs. ``stranded`` resources have
    ready jobs and no turn; housekeeping repairs them. ``unserved``: kinds of ready jobs (of a sample of 1,000) that no
    running worker has. ``unserved_accounts``: accounts of such jobs whose kind some worker has, but none that serves
    the resource. ``lanes``: ordering keys that a dead job holds up, up to ten of them, and how many there are among the
    latest 5,000 dead jobs (``lane_count``). ``learnt``: what throttles taught, by resource (`ResourceInfo.learnt`), of
    at most 200.
    """

    at: datetime
    jobs: Mapping[str, Count]
    lately: Mapping[str, Count]
    overdue: Count  # scheduled jobs that should have become ready: no worker stages them
    workers: list[WorkerSeen]
    stopped: list[StoppedGroup]
    retrying: list[Trouble]
    died: list[Trouble]
    alerts: list[AlertInfo]  # those that go on
    stranded: int
    unserved: Mapping[str, Count] = field(default_factory=dict)
    unserved_accounts: Mapping[str, Count] = field(default_factory=dict)
    learnt: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    lanes: list[HeldLane] = field(default_factory=list)
    lane_count: Count = field(default_factory=lambda: Count(0))

    def to_json(self) -> dict[str, Any]:
        """Every field under its own name."""
        return fields_of(self)
