"""Changing jobs from outside, one or thousands: cancel, discard, delete, edit, retry.

A `Change` sorts one job by its state (`sort`) and writes a batch of sorted jobs (`write`). A `Sweep` selects the jobs
of a filter in id order, a batch at a time, locks each batch in id order, sorts its jobs *under the lock*, and writes.
Rules:

- A running job belongs to its worker: a cancel is only requested (`cancel_requested`), nothing else is written.
- Whatever changes a waiting job raises its version, so a claim that read the old row loses.
- Only `store/jobs/ready.py` makes jobs ready; here they become scheduled at most.
- No request that may have been received is repeated blindly. Retrying a job whose request is unanswered, and editing a
  payload after any execution, needs the caller's word (`repeat_ambiguous`, `new_operation`).
- A job whose unique key another job holds by now is not retried. One that ended while it waited for others waits again
  for those that are not over, or are retried with it; what died or was cancelled meanwhile it does not wait for.
- Retries with a ``spacing`` become scheduled, so that a replay of thousands is no herd.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from resilient.core.base.errors import InvalidInput
from resilient.core.base.instants import add_seconds
from resilient.core.base.misfit import is_whole
from resilient.core.events.message import RESOURCE
from resilient.core.jobs import marks
from resilient.core.jobs.states import TERMINAL, WAITING, JobState
from resilient.store.gates import turns
from resilient.store.jobs import order, ready, workflows
from resilient.store.jobs.columns import AT_THE_END
from resilient.store.jobs.dependencies import Ends, blockers_of, release_followers, wait_again
from resilient.store.jobs.filters import JOB, JobFilter
from resilient.store.jobs.finishing import note_decision
from resilient.store.jobs.queries import ATTEMPT, picked, readable_columns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from datetime import datetime, timedelta
    from uuid import UUID

    from sqlalchemy import Connection

    from resilient.store.db.dialect import Dialect


BATCH: Final = 500


class LockedJob(NamedTuple):
    """The columns that a change reads under the lock."""

    id: UUID
    version: int
    state: str
    kind: str
    resource_key: str
    priority: int
    run_at: datetime
    executions: int
    unique_key: str | None
    sent: Any
    last_error_kind: str | None
    followed: bool
    ordering_key: str | None
    order_no: int | None


Sorted = Mapping[str, "Sequence[LockedJob]"]


class Change(Protocol):
    """One kind of change.

    ``usual``: the states of a filter that names none; ``allowed``: the states a filter may name.
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

    def sort(self, job: LockedJob) -> str:
        """The name under which this job is counted."""
        ...

    def write(self, c: Connection, d: Dialect, jobs: Sorted, now: datetime) -> Counter[str]:
        """Write the batch, sorted by `sort`; returns corrections to the counts."""
        ...


@dataclass(slots=True)
class Sweep:
    """A change of all jobs of a filter, batch by batch.

    Call `step`, each time in a transaction of its own, until it returns True.
    """

    change: Change
    filter: JobFilter
    limit: int | None = None
    dry_run: bool = False
    tally: Counter[str] = field(default_factory=Counter)
    after: UUID | None = None
    early: set[UUID] = field(default_factory=set)  # behind ``after``, and changed already
    looked_at: int = 0
    now: datetime | None = None

    def __post_init__(self) -> None:
        if self.limit is not None and not is_whole(self.limit):
            raise InvalidInput(f"limit={self.limit!r}: change at least 1 job, or give no limit")
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
            early = self._blockers(c, d, ids, self.now) if isinstance(self.change, Retry) else []
            counted = self._change(c, d, [*ids, *early], now)
            self.tally.update(counted)
            self.after, self.looked_at = ids[-1], self.looked_at + len(ids) + len(early)
            self.early = {id_ for id_ in {*self.early, *early} if id_ > self.after}
        return len(ids) < size or size <= 0

    def _next(self, c: Connection, d: Dialect, size: int, began: datetime) -> list[UUID]:
        extra = [] if self.after is None else [JOB.c.id > self.after]
        if self.early:
            extra.append(JOB.c.id.not_in(self.early))
        return self._picked(c, d, size, began, extra)

    def _picked(
        self, c: Connection, d: Dialect, size: int, began: datetime, extra: Sequence[sa.ColumnElement[bool]]
    ) -> list[UUID]:
        # "An hour ago" means an hour before the sweep began, however long it takes.
        ids = d.execute(c, picked(d, self.filter.at(began), (JOB.c.id,), extra, limit=size, newest=False, whole=False))
        return list(ids.scalars())

    def _blockers(self, c: Connection, d: Dialect, ids: Sequence[UUID], began: datetime) -> list[UUID]:
        """What these jobs waited for and a later batch would change: a retry of both belongs into one transaction.

        An id says when its job was made, by the clock of whoever made it, so that it may be greater than a follower's.
        """
        early, latest = list["UUID"](), ids
        while latest and (room := self._room(len(ids) + len(early))):
            blockers = blockers_of(c, d, latest) - {*ids, *early, *self.early}
            behind = [JOB.c.id > ids[-1], JOB.c.id.in_(sorted(blockers))]
            latest = self._picked(c, d, min(room, len(blockers)), began, behind) if blockers else []
            early += latest
        return early

    def _room(self, looked_at: int) -> int:
        """How many more jobs this batch may change."""
        return BATCH if self.limit is None else self.limit - self.looked_at - looked_at

    def _change(self, c: Connection, d: Dialect, ids: Sequence[UUID], now: datetime) -> Counter[str]:
        rows = _select(d, ids)
        if not self.dry_run:
            rows = rows.with_for_update(key_share=True)
        jobs: dict[str, list[LockedJob]] = {}
        for row in map(LockedJob._make, d.execute(c, rows)):
            if not self.filter.state or row.state in self.filter.state:  # its state may have changed before the lock
                jobs.setdefault(self.change.sort(row), []).append(row)
        counted = Counter({name: len(some) for name, some in jobs.items()})
        if not self.dry_run:
            counted.update(self.change.write(c, d, jobs, now))
        return counted


def lock_free(c: Connection, d: Dialect, ids: Sequence[UUID]) -> Sequence[LockedJob]:
    """Lock those of these jobs that are not locked, for a `Change` to write."""
    rows = _select(d, ids).with_for_update(key_share=True, skip_locked=True)
    return [LockedJob._make(row) for row in d.execute(c, rows)]


def _select(d: Dialect, ids: Sequence[UUID]) -> sa.Select[Any]:
    return sa.select(*readable_columns(d, JOB, LockedJob._fields)).where(JOB.c.id.in_(ids)).order_by(JOB.c.id)


def _ids(rows: Iterable[LockedJob]) -> list[UUID]:
    return [row.id for row in rows]


def _end(c: Connection, d: Dialect, rows: Sequence[LockedJob], now: datetime, later: Ends | None) -> None:
    """Release what waited for these jobs, which are over; ``later``: with a program's commit that is still to come."""
    ends = later or Ends()
    ends.add(c, d, [r.id for r in rows if r.followed], [r.id for r in rows if r.ordering_key is not None], now)
    if later is None:
        ends.go_on(c, d, now)


def write_all(c: Connection, d: Dialect, rows: Sequence[LockedJob], **values: Any) -> None:
    """Write the same values to locked rows."""
    if rows:
        d.execute(c, sa.update(JOB).where(JOB.c.id.in_(_ids(rows))).values(**values))


def next_key() -> sa.ColumnElement[str]:
    """An idempotency key this job never had: its id and the version it is about to get."""
    return sa.cast(JOB.c.id, sa.String) + "-" + sa.cast(JOB.c.version + 1, sa.String)


# -- cancel, discard, delete ---------------------------------------------------------------------------------


@dataclass(slots=True)
class Cancel:
    """End waiting jobs at once, request it of running ones. ``later`` gets what follows, for a later write."""

    later: Ends | None = None
    verb: str = "cancelled"
    usual: frozenset[JobState] = WAITING | {JobState.RUNNING}
    allowed: frozenset[JobState] = WAITING | {JobState.RUNNING}

    def sort(self, job: LockedJob) -> str:
        """Sort by whether it waits, runs or is over."""
        if job.state in WAITING:
            return "cancelled"
        return "requested" if job.state == JobState.RUNNING else "too_late"

    def write(self, c: Connection, d: Dialect, jobs: Sorted, now: datetime) -> Counter[str]:
        """Write both sorts; the fence of a running job stays, so that its worker can finish it."""
        write_all(
            c, d, jobs.get("cancelled", ()), state=JobState.CANCELLED.value, finished_at=now, updated_at=now,
            version=JOB.c.version + 1, **AT_THE_END,
        )  # fmt: skip
        write_all(c, d, jobs.get("requested", ()), cancel_requested=True, updated_at=now)
        _end(c, d, jobs.get("cancelled", ()), now, self.later)
        return Counter()


@dataclass(slots=True)
class Discard:
    """Cancel dead jobs that nobody will replay. ``later``: see `Cancel`."""

    later: Ends | None = None
    verb: str = "discarded"
    usual: frozenset[JobState] = frozenset({JobState.DEAD})
    allowed: frozenset[JobState] = frozenset({JobState.DEAD})

    def sort(self, job: LockedJob) -> str:
        """Sort by whether it is dead."""
        return "discarded" if job.state == JobState.DEAD else "not_dead"

    def write(self, c: Connection, d: Dialect, jobs: Sorted, now: datetime) -> Counter[str]:
        """Write the state; error and history stay."""
        write_all(
            c, d, jobs.get("discarded", ()), state=JobState.CANCELLED.value, finished_at=now, updated_at=now,
            version=JOB.c.version + 1, **AT_THE_END,
        )  # fmt: skip
        _end(c, d, jobs.get("discarded", ()), now, self.later)
        return Counter()


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete finished jobs and their history for good.

    No steps and undos of workflows that are not over: nobody could say what they have done, and what is to be undone.
    """

    verb: str = "deleted"
    usual: frozenset[JobState] = TERMINAL
    allowed: frozenset[JobState] = TERMINAL

    def sort(self, job: LockedJob) -> str:
        """Sort by whether it is over."""
        return "deleted" if job.state in TERMINAL else "not_finished"

    def write(self, c: Connection, d: Dialect, jobs: Sorted, now: datetime) -> Counter[str]:
        """Delete the history first: without its job nothing would ever delete it."""
        rows = jobs.get("deleted", ())
        kept = workflows.in_open_ones(c, d, [r.id for r in rows if r.followed])
        rows = [row for row in rows if row.id not in kept]
        followed, in_order = [r.id for r in rows if r.followed], [r.id for r in rows if r.ordering_key is not None]
        release_followers(c, d, followed, in_order, now, gone=True)
        if gone := _ids(rows):
            d.execute(c, sa.delete(ATTEMPT).where(ATTEMPT.c.job_id.in_(gone)))
            d.execute(c, sa.delete(JOB).where(JOB.c.id.in_(gone)))
        return Counter({"deleted": -len(kept), "in_workflow": len(kept)}) if kept else Counter()


# -- edit: jobs that wait, or that are dead and will be retried --------------------------------------------------------


class Unset(Enum):
    """The field keeps its value (None is often a value itself)."""

    UNSET = "unset"


UNSET: Final = Unset.UNSET


_EDITED: Final = ("priority", "max_attempts", "expires_at", "tags")


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """New values for jobs that do not run.

    ``payload`` is decoded JSON that fits the kind; None is a value. ``undo_payload`` gives it as JSON text, and its
    version, for a kind that undoes a step of a workflow; it raises `InvalidInput` (one of its kinds).
    """

    payload: Any = UNSET
    payload_version: int = 1
    undo_payload: Callable[[str], tuple[str, int]] | None = None
    priority: int | Unset = UNSET
    run_at: datetime | Unset = UNSET
    max_attempts: int | Unset | None = UNSET
    expires_at: datetime | Unset | None = UNSET
    tags: Mapping[str, str] | Unset | None = UNSET
    new_operation: bool = False
    verb: str = "edited"
    usual: frozenset[JobState] = WAITING
    allowed: frozenset[JobState] = WAITING | {JobState.DEAD}

    def sort(self, job: LockedJob) -> str:
        """A dead job may be corrected before it is replayed, but has no time to run at."""
        if job.state == JobState.RUNNING:
            return "running"
        if job.state not in self.allowed or (job.state == JobState.DEAD and self.run_at is not UNSET):
            return "too_late"
        risky = self.payload is not UNSET and not self.new_operation
        return "sent" if risky and (job.sent is not None or job.executions > 0) else "edited"

    def write(self, c: Connection, d: Dialect, jobs: Sorted, now: datetime) -> Counter[str]:
        """Write the values first, then turns and times."""
        rows = jobs.get("edited", ())
        values = {name: value for name in _EDITED if (value := getattr(self, name)) is not UNSET}
        if self.payload is not UNSET:
            values |= {"payload": self.payload, "payload_version": self.payload_version}
        if self.new_operation:
            values |= {"idempotency_key": next_key(), "sent": None}
            # A row of its own: that of the execution in doubt may have been pruned.
            if ids := [row.id for row in rows if row.followed and _is_in_doubt(row)]:
                note_decision(c, d, ids, "replaced", now)
        write_all(c, d, rows, version=JOB.c.version + 1, updated_at=now, **values)
        if self.undo_payload is not None and (steps := [row.id for row in rows if row.followed]):
            for kind, ids in workflows.undos_of(c, d, steps).items():
                workflows.edit_undos(c, d, ids, *self.undo_payload(kind))
        ready = [row for row in rows if row.state == JobState.READY]
        if self.priority is not UNSET:  # a better place needs a turn of that priority
            turns.insert(c, d, {row.resource_key: self.priority for row in ready})
        if self.run_at is not UNSET:
            self._move(c, d, rows, self.run_at, now)
        return Counter()

    def _move(self, c: Connection, d: Dialect, rows: Sequence[LockedJob], run_at: datetime, now: datetime) -> None:
        """Give jobs another time. Blocked ones stay blocked, ready ones stay ready if they are due."""
        write_all(c, d, rows, run_at=run_at)
        if run_at > now:
            write_all(c, d, rows, waiting_for=None)  # a gate that opens would make them due before that time
            due = [row for row in rows if row.state == JobState.READY]
            write_all(c, d, due, state=JobState.SCHEDULED.value)
            return
        scheduled = [row for row in rows if row.state == JobState.SCHEDULED]
        ready.make_ready_if_version(c, d, {row.id: row.version + 1 for row in scheduled}, now)


# -- retry: finished jobs start over -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Retry:
    """Let finished jobs start over with a fresh budget: at once, or one every ``spacing``.

    ``repeat_ambiguous``: also those whose last request may have taken effect. ``new_operation``: under a new
    idempotency key, so that the provider does it again. A job whose unique key is held by another one stays.
    """

    repeat_ambiguous: bool = False
    new_operation: bool = False
    spacing: timedelta | None = None
    verb: str = "retried"
    usual: frozenset[JobState] = frozenset({JobState.DEAD})
    allowed: frozenset[JobState] = TERMINAL
    _started: datetime | None = None
    _done: int = 0

    def sort(self, job: LockedJob) -> str:
        """Sort by whether it is over, and whether repeating it is safe."""
        if job.state not in TERMINAL:
            return "not_finished"
        unknown = marks.unkeyed(job.sent) or job.last_error_kind == "ambiguous"
        if unknown and job.state != JobState.SUCCEEDED and not self.repeat_ambiguous:
            return "ambiguous"
        return "retried"

    def write(self, c: Connection, d: Dialect, jobs: Sorted, now: datetime) -> Counter[str]:
        """Take the unique keys back, then reset the jobs."""
        rows = jobs.get("retried", ())
        unique = sorted((row.kind, row.unique_key, row.id) for row in rows if row.unique_key is not None)
        lost = {id_ for _, _, id_ in unique if not _relock(c, d, id_)}  # in the order in which an enqueue locks them
        over = _turned_around(c, d, rows)  # of other jobs: steps have no unique key
        rows = [row for row in rows if row.id not in lost | over]
        fresh: dict[str, Any] = {"idempotency_key": next_key()} if self.new_operation else {}
        if self.repeat_ambiguous or self.new_operation:  # else keys go on being counted from their first sending
            fresh["sent"] = None
        # Death is noted; not so what a request in doubt may have done, of which nothing else speaks any more.
        news = [row for row in rows if row.state != JobState.DEAD or (row.followed and _is_in_doubt(row))]
        if ids := [row.id for row in news if row.executions]:
            note_decision(c, d, ids, "retried", now)
        kept = sa.case((JOB.c.expires_at > now, JOB.c.expires_at))  # a passed expiry would end it again at once
        write_all(c, d, rows, waiting_for=None, progress=None, result=None, expires_at=kept, **fresh)
        write_all(c, d, [row for row in rows if _was_published(row)], idempotency_key=next_key())
        first, later = self._spread(rows, now)
        starts = {row.id: now for row in first} | {row.id: at for row, at in later}
        blockers = wait_again(c, d, {row.id for row in rows if row.followed}, {row.id for row in rows})
        _put_back(c, d, [(row, starts[row.id]) for row in rows if row.ordering_key is not None], now, blockers)
        free = {row.id: row.version for row in first if row.ordering_key is None and row.id not in blockers}
        ready.make_ready_if_version(c, d, free, now, reset=True)
        alone = [(row, at) for row, at in later if row.ordering_key is None and row.id not in blockers]
        _start_over(c, d, _SCHEDULED, alone, now)
        waiting = [(row, starts[row.id]) for row in rows if row.ordering_key is None and row.id in blockers]
        _start_over(c, d, _BLOCKED, waiting, now, blockers)
        if followed := [row.id for row in rows if row.followed]:
            workflows.ask(c, d, followed, now)  # one that was stuck over a dead undo is not any more
        skipped = Counter({"duplicates": len(lost), "undone": len(over)})
        return Counter({"retried": -skipped.total(), **+skipped}) if skipped.total() else Counter()

    def _spread(
        self, rows: Sequence[LockedJob], now: datetime
    ) -> tuple[Sequence[LockedJob], list[tuple[LockedJob, datetime]]]:
        """Which jobs start now, and which when."""
        if self.spacing is None:
            return rows, []
        self._started = self._started or now
        due = [
            (row, add_seconds(self._started, self.spacing.total_seconds() * (self._done + n)))
            for n, row in enumerate(rows)
        ]
        self._done += len(rows)
        return [row for row, at in due if at <= now], [(row, at) for row, at in due if at > now]


def _is_in_doubt(row: LockedJob) -> bool:
    """Whether a request of the job may have taken effect."""
    return bool(marks.unanswered(row.sent)) or row.last_error_kind == "ambiguous"


def _was_published(row: LockedJob) -> bool:
    """Whether a job is an event that was published: under its old key a broker may drop it as a repeat."""
    return bool(row.state == JobState.SUCCEEDED and row.resource_key.startswith(f"{RESOURCE}/"))


def _turned_around(c: Connection, d: Dialect, rows: Sequence[LockedJob]) -> set[UUID]:
    """Steps that may not be retried any more. Locks the ordering keys that `_put_back` needs, then workflows."""
    steps = [row.id for row in rows if row.followed]
    if steps and (in_order := [row.id for row in rows if row.ordering_key is not None]):
        order.hold(c, d, (), in_order)
    return workflows.turned_around(c, d, steps) if steps else set()


def _relock(c: Connection, d: Dialect, id_: UUID) -> bool:
    """Lock the job's unique key again; False if another job has it."""
    other = JOB.alias()
    is_locked = sa.exists().where(other.c.kind == JOB.c.kind, other.c.unique_lock == JOB.c.unique_key)
    lock = sa.update(JOB).where(JOB.c.id == id_, ~is_locked).values(unique_lock=JOB.c.unique_key).returning(JOB.c.id)
    if not d.is_postgresql:  # one writer: nobody comes between the look and the write
        return d.execute(c, lock).first() is not None
    try:
        with c.begin_nested():
            return d.execute(c, lock).first() is not None
    except IntegrityError:  # somebody enqueued the same key meanwhile
        return False


_SCHEDULED: Final = "UPDATE {job} SET state = 'scheduled', waits = 0"
_BLOCKED: Final = "UPDATE {job} SET state = 'blocked', waits = p.blockers"
_IN_LINE: Final = "UPDATE {job} SET state = 'blocked', waits = p.blockers + 1"
_FIELDS: Final = {"id": "uuid", "version": "int", "run_at": "timestamptz", "blockers": "int"}


def _put_back(
    c: Connection, d: Dialect, rows: Sequence[tuple[LockedJob, datetime]], now: datetime, blockers: Counter[UUID]
) -> None:
    """Block jobs that have an ordering key until they are its head again; the first is at once, if there is none."""
    if not rows:
        return
    _start_over(c, d, _IN_LINE, rows, now, blockers)
    numbers = {row.id: ((row.resource_key, row.ordering_key or ""), row.order_no or 0) for row, _ in rows}
    order.put_back(c, d, numbers, now)


def _start_over(
    c: Connection,
    d: Dialect,
    update: str,
    rows: Sequence[tuple[LockedJob, datetime]],
    now: datetime,
    blockers: Mapping[UUID, int] = MappingProxyType({}),
) -> None:
    """Reset the budgets of jobs, each with its time, in the state that ``update`` writes."""
    if not rows:
        return
    fields = [(d.id(row.id), row.version, d.time(at), blockers.get(row.id, 0)) for row, at in rows]
    doc = json.dumps([dict(zip(_FIELDS, one, strict=True)) for one in fields])
    d.run(
        c,
        f"{update}, run_at = p.run_at, attempts = 0, rescues = 0,"
        " finished_at = NULL, cancel_requested = false, version = {job}.version + 1,"
        " updated_at = :now"
        f" FROM {d.records('doc', _FIELDS)} AS p"
        " WHERE {job}.id = p.id AND {job}.version = p.version",
        {"doc": doc, "now": now},
    )
