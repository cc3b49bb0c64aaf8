"""Changing jobs from outside, one or thousands: cancel, discard, delete; see also `retries.py`, `edits.py`.

A `Change` says what becomes of one job as it stands (`sort`) and writes a batch of those (`write`). A `Sweep`
finds the jobs of a filter in id order, a batch at a time, locks each batch in id order, sorts what it finds
*under the lock*, and writes. Rules:

- a running job belongs to its worker: it is only ever *asked* (`cancel_requested`), never written over
- whatever changes a waiting job bumps its version, so a claim that saw the old row loses
- only `store/jobs.py` makes jobs ready; here they become scheduled at most
- a request that may have been received is never repeated blindly: a job with an unanswered one, and a payload
  edit after any execution, need the caller's word (`repeat_ambiguous`, `new_operation`)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

import sqlalchemy as sa

from resilient.core.errors import InvalidInput
from resilient.core.states import TERMINAL, WAITING, JobState
from resilient.store import shown
from resilient.store.filters import JOB, JobFilter
from resilient.store.followers import Ends, release_followers
from resilient.store.queries import ATTEMPT, picked

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import datetime
    from uuid import UUID

    from sqlalchemy import Connection, Row

    from resilient.store.dialect import Dialect

BATCH: Final = 500
_SEEN: Final = (
    "id", "version", "state", "kind", "resource_key", "priority", "run_at", "executions", "unique_key",
    "sent", "last_error_kind", "followed", "ordering_key", "order_no",
)  # fmt: skip
Sorted = Mapping[str, "Sequence[Row[Any]]"]


class Change(Protocol):
    """One kind of change.

    ``usual``: the states a filter means that names none; ``allowed``: those it may name.
    """

    @property
    def verb(self) -> str:
        """For messages: the past participle."""
        ...

    @property
    def usual(self) -> frozenset[JobState]:
        """See above."""
        ...

    @property
    def allowed(self) -> frozenset[JobState]:
        """See above."""
        ...

    def sort(self, job: Row[Any]) -> str:
        """Under which name this job is counted."""
        ...

    def write(self, c: Connection, d: Dialect, found: Sorted, now: datetime) -> Counter[str]:
        """Write the batch; returns corrections to the counts."""
        ...


@dataclass(slots=True)
class Sweep:
    """A change on its way through the jobs of a filter.

    Call `step`, each in a transaction, until it returns True.
    """

    change: Change
    filter: JobFilter
    limit: int | None = None
    dry_run: bool = False
    tally: Counter[str] = field(default_factory=Counter)
    after: UUID | None = None
    looked_at: int = 0
    now: datetime | None = None

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise InvalidInput(f"limit={self.limit}: change at least 1 job, or give no limit")
        if wrong := sorted(set(self.filter.state) - set(map(str, self.change.allowed))):
            raise InvalidInput(
                f"{wrong[0]} jobs cannot be {self.change.verb}: {', '.join(sorted(self.change.allowed))} can"
            )
        if not self.filter.state and self.filter.ids is None:
            self.filter = self.filter.with_states(sorted(self.change.usual))

    def step(self, c: Connection, d: Dialect) -> bool:
        """Change the next batch; True when none is left. If it fails, nothing is counted and it can be called again."""
        now = d.now(c)
        self.now = self.now or now
        size = BATCH if self.limit is None else min(BATCH, self.limit - self.looked_at)
        ids = self._next(c, d, size, self.now) if size > 0 else []
        if ids:
            counted = self._change(c, d, ids, now)
            self.tally.update(counted)
            self.after, self.looked_at = ids[-1], self.looked_at + len(ids)
        return len(ids) < size or size <= 0

    def _next(self, c: Connection, d: Dialect, size: int, began: datetime) -> list[UUID]:
        extra = [] if self.after is None else [JOB.c.id > self.after]
        # "An hour ago" means an hour before the sweep began, however long it takes.
        found = d.execute(
            c, picked(d, self.filter.at(began), (JOB.c.id,), extra, limit=size, newest=False, whole=False)
        )
        return list(found.scalars())

    def _change(self, c: Connection, d: Dialect, ids: Sequence[UUID], now: datetime) -> Counter[str]:
        rows = sa.select(*shown.columns(d, JOB, _SEEN)).where(JOB.c.id.in_(ids)).order_by(JOB.c.id)
        if not self.dry_run:
            rows = rows.with_for_update(key_share=True)
        found: dict[str, list[Row[Any]]] = {}
        for row in d.execute(c, rows):
            if not self.filter.state or row.state in self.filter.state:  # it may have moved on before the lock
                found.setdefault(self.change.sort(row), []).append(row)
        counted = Counter({name: len(some) for name, some in found.items()})
        if not self.dry_run:
            counted.update(self.change.write(c, d, found, now))
        return counted


def unlocked(c: Connection, d: Dialect, ids: Sequence[UUID]) -> Sequence[Row[Any]]:
    """Those of these jobs that nobody holds, locked, for a `Change` to write."""
    rows = sa.select(*shown.columns(d, JOB, _SEEN)).where(JOB.c.id.in_(ids)).order_by(JOB.c.id)
    return d.execute(c, rows.with_for_update(key_share=True, skip_locked=True)).all()


def _ids(rows: Iterable[Row[Any]]) -> list[UUID]:
    return [row.id for row in rows]


def _end(c: Connection, d: Dialect, rows: Sequence[Row[Any]], now: datetime, later: Ends | None) -> None:
    """These jobs are over. Their lanes and workflows go on: ``later``, where a program's commit is still to come."""
    ends = later or Ends()
    ends.add(c, d, [r.id for r in rows if r.followed], [r.id for r in rows if r.ordering_key is not None], now)
    if later is None:
        ends.go_on(c, d, now)


def write_all(c: Connection, d: Dialect, rows: Sequence[Row[Any]], **values: Any) -> None:
    """Write the same values to locked rows."""
    if rows:
        d.execute(c, sa.update(JOB).where(JOB.c.id.in_(_ids(rows))).values(**values))


def next_key() -> sa.ColumnElement[str]:
    """An idempotency key this job never had: its id and the version it is about to get."""
    return sa.cast(JOB.c.id, sa.String) + "-" + sa.cast(JOB.c.version + 1, sa.String)


# -- cancel, discard, delete ---------------------------------------------------------------------------------


@dataclass(slots=True)
class Cancel:
    """Waiting jobs end at once, running ones are asked to. ``later``: goes on with their lanes and workflows."""

    later: Ends | None = None
    verb: str = "cancelled"
    usual: frozenset[JobState] = WAITING | {JobState.RUNNING}
    allowed: frozenset[JobState] = WAITING | {JobState.RUNNING}

    def sort(self, job: Row[Any]) -> str:
        """By whether it waits, runs or is over."""
        if job.state in WAITING:
            return "cancelled"
        return "requested" if job.state == JobState.RUNNING else "too_late"

    def write(self, c: Connection, d: Dialect, found: Sorted, now: datetime) -> Counter[str]:
        """The fence of a running job stays: its worker must be able to finish it."""
        write_all(
            c, d, found.get("cancelled", ()), state=JobState.CANCELLED.value, finished_at=now, updated_at=now,
            unique_lock=None, waiting_for=None, version=JOB.c.version + 1,
        )  # fmt: skip
        write_all(c, d, found.get("requested", ()), cancel_requested=True, updated_at=now)
        _end(c, d, found.get("cancelled", ()), now, self.later)
        return Counter()


@dataclass(slots=True)
class Discard:
    """Dead jobs that nobody will replay become cancelled. ``later``: see `Cancel`."""

    later: Ends | None = None
    verb: str = "discarded"
    usual: frozenset[JobState] = frozenset({JobState.DEAD})
    allowed: frozenset[JobState] = frozenset({JobState.DEAD})

    def sort(self, job: Row[Any]) -> str:
        """By whether it is dead."""
        return "discarded" if job.state == JobState.DEAD else "not_dead"

    def write(self, c: Connection, d: Dialect, found: Sorted, now: datetime) -> Counter[str]:
        """Error and history stay."""
        write_all(
            c, d, found.get("discarded", ()), state=JobState.CANCELLED.value, finished_at=now, updated_at=now,
            version=JOB.c.version + 1,
        )  # fmt: skip
        _end(c, d, found.get("discarded", ()), now, self.later)
        return Counter()


@dataclass(frozen=True, slots=True)
class Delete:
    """Finished jobs and their history go for good."""

    verb: str = "deleted"
    usual: frozenset[JobState] = TERMINAL
    allowed: frozenset[JobState] = TERMINAL

    def sort(self, job: Row[Any]) -> str:
        """By whether it is over."""
        return "deleted" if job.state in TERMINAL else "not_finished"

    def write(self, c: Connection, d: Dialect, found: Sorted, now: datetime) -> Counter[str]:
        """History first: nothing else would ever find it."""
        rows = found.get("deleted", ())
        followed, in_lanes = [r.id for r in rows if r.followed], [r.id for r in rows if r.ordering_key is not None]
        release_followers(c, d, followed, in_lanes, now, gone=True)
        if gone := _ids(rows):
            d.execute(c, sa.delete(ATTEMPT).where(ATTEMPT.c.job_id.in_(gone)))
            d.execute(c, sa.delete(JOB).where(JOB.c.id.in_(gone)))
        return Counter()
