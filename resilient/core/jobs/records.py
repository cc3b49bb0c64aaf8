"""What people and programs are shown of jobs: plain frozen values, safe to keep after the transaction.

Each has ``to_json``: the stable form that the command line's ``--json`` prints (ids as text, times as ISO
8601 in UTC).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, is_dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Self
from uuid import UUID

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.core.jobs.states import JobState


class Count(int):
    """A number of rows, counted up to a bound.

    ``more`` says that there are more, and it prints as ``10000+``.
    """

    more: bool

    def __new__(cls, number: int, *, more: bool = False) -> Self:
        """``number`` rows, or at least that many."""
        made = super().__new__(cls, number)
        made.more = more
        return made

    def __str__(self) -> str:
        return f"{int(self)}+" if self.more else f"{int(self)}"


class NotLoaded:
    """What stands in a job's ``payload``, ``progress`` and ``result`` if it was listed without them."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<not loaded: app.jobs.get(id) has it>"


NOT_LOADED: Final = NotLoaded()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInfo:
    """One job as it stood when it was read. Times are aware and in UTC.

    A document that cannot be read (somebody wrote into the database's file) is ``{"not_readable": why}``.
    """

    id: UUID
    kind: str
    resource_key: str
    state: JobState
    payload: Any
    payload_version: int
    priority: int
    run_at: datetime
    expires_at: datetime | None
    attempts: int
    max_attempts: int | None  # None: no end
    executions: int
    deferrals: int
    rescues: int
    version: int
    locked_by: str | None  # the worker that runs it
    lease_until: datetime | None
    started_at: datetime | None
    unique_key: str | None
    idempotency_key: str | None
    sent: Any  # marks of requests without an answer, by name: see `core/jobs/marks.py`
    tags: Mapping[str, str] | None
    progress: Any
    result: Any
    last_error: str | None
    last_error_kind: str | None
    last_error_code: str | None
    waiting_for: str | None
    ordering_key: str | None
    order_no: int | None  # its number within its ordering key
    ordering_policy: str | None
    waits: int  # while blocked: how many blockers it has; the job ahead in its ordering key counts as one
    cancel_requested: bool
    created_at: datetime
    updated_at: datetime
    finished_at: datetime | None

    def to_json(self) -> dict[str, Any]:
        """Every field under its own name, without those that were not loaded."""
        return {name: value for name, value in fields_of(self).items() if getattr(self, name) is not NOT_LOADED}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptInfo:
    """One execution that did not simply succeed."""

    execution: int
    worker_id: str | None
    started_at: datetime | None
    finished_at: datetime
    duration: float | None  # seconds
    decision: str
    charged: bool
    kind: str | None
    code: str | None
    status: int | None
    resource_key: str | None
    next_at: datetime | None
    message: str | None
    traceback: str | None

    def to_json(self) -> dict[str, Any]:
        """Every field under its own name."""
        return fields_of(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceInfo:
    """One resource as it stood when it was read.

    ``gate`` is what stops it then (None: nothing, limits and caps aside), with its ``code``, ``since`` and
    ``until`` (None: nobody knows). ``policy`` is the runtime override. ``learnt`` is what throttles taught: its
    ``kind`` (rate, slots or quota), ``rate`` a second, how many ``at_once`` or ``in_a_window``, ``at`` what time, from
    how many ``throttles``. ``budgets``: of an account that is read alone, the budgets its provider names of which
    throttles taught something, by name: until when each rests (``until``) and what is ``learnt``. ``waiting`` and
    ``running`` count the jobs at or below it.
    """

    key: str
    gate: str | None
    code: str | None
    since: datetime | None
    until: datetime | None
    breaker: str
    reopens: int
    probe_owner: str | None
    blocked_until: datetime | None
    paused_at: datetime | None
    paused_reason: str | None
    auth: str
    policy: Mapping[str, Any] | None
    learnt: Mapping[str, Any] | None
    last_error: str | None
    last_error_kind: str | None
    last_error_code: str | None
    last_error_at: datetime | None
    last_success_at: datetime | None
    created_at: datetime | None  # None: no worker has met it yet
    waiting: Count
    running: int
    budgets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Every field under its own name."""
        return fields_of(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppedGroup:
    """Stopped resources of one provider, by gate and code.

    ``since`` is the earliest, ``until`` the latest end (None if one of them has no known end), ``first_until`` the
    first known one. ``waiting`` counts ready jobs at or below them; ``example`` is one of the resources,
    ``example_job`` a job there, ``reason`` what somebody who stopped one of them by hand had to say.
    """

    provider: str
    gate: str
    code: str | None
    resources: int
    since: datetime | None
    until: datetime | None
    waiting: Count
    example: str
    example_job: UUID | None
    last_error: str | None
    first_until: datetime | None = None
    reason: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Every field under its own name."""
        return fields_of(self)


def plain(value: Any) -> Any:
    """``value`` made of JSON's types only."""
    match value:
        case Enum():
            result: Any = value.value
        case datetime():
            result = value.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        case UUID():
            result = str(value)
        case dict():
            result = {str(k): plain(v) for k, v in value.items()}
        case set() | frozenset():
            result = sorted(plain(v) for v in value)
        case list() | tuple():
            result = [plain(v) for v in value]
        case _:
            result = fields_of(value) if is_dataclass(value) and not isinstance(value, type) else value
    return result


def fields_of(value: Any) -> dict[str, Any]:
    """A dataclass as a JSON object."""
    return {field.name: plain(getattr(value, field.name)) for field in fields(value)}


# -- changed ----------------------------------------------------------------------------------------------------------
#
# What a change from outside brought: how many jobs it changed, and why it left the others alone.
#
# With ``dry_run`` the numbers say what would have happened. A number is True where it is not zero, so
# ``if not (await app.jobs.cancel(id)).cancelled: ...`` reads as it should.


@dataclass(frozen=True, slots=True)
class _Tally:
    """Numbers by name."""

    @classmethod
    def of(cls, tally: Mapping[str, int]) -> Self:
        """The numbers of a tally; 0 for what it lacks."""
        return cls(**{f.name: tally.get(f.name, 0) for f in fields(cls)})

    def to_json(self) -> dict[str, Any]:
        """Every number under its own name."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Cancelled(_Tally):
    """``requested``: these run, and their workers were asked to stop them. ``too_late``: these were over."""

    cancelled: int = 0
    requested: int = 0
    too_late: int = 0


@dataclass(frozen=True, slots=True)
class Edited(_Tally):
    """``running`` and ``too_late`` (over) jobs were left alone.

    ``sent``: their old payload may have been sent under their idempotency key, and ``new_operation`` was not
    given.
    """

    edited: int = 0
    running: int = 0
    too_late: int = 0
    sent: int = 0


@dataclass(frozen=True, slots=True)
class Retried(_Tally):
    """What was left alone.

    ``not_finished``: still waiting or running. ``ambiguous``: their last request may have taken effect, and
    ``repeat_ambiguous`` was not given. ``duplicates``: another job holds their unique key by now. ``undone``: steps of
    workflows that turned around.
    """

    retried: int = 0
    not_finished: int = 0
    ambiguous: int = 0
    duplicates: int = 0
    undone: int = 0


@dataclass(frozen=True, slots=True)
class Discarded(_Tally):
    """Dead jobs that are cancelled now; the others were not dead."""

    discarded: int = 0
    not_dead: int = 0


@dataclass(frozen=True, slots=True)
class Deleted(_Tally):
    """Jobs that are gone; the others were not over."""

    deleted: int = 0
    not_finished: int = 0


@dataclass(frozen=True, slots=True)
class Changed:
    """The resources that were changed, in the order of their keys.

    ``queued``: those of them that no worker has met yet; they count because jobs wait there.
    """

    keys: tuple[str, ...] = ()
    queued: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.keys)

    def to_json(self) -> dict[str, Any]:
        """The keys and their number."""
        return {"changed": len(self.keys), "keys": list(self.keys), "queued": list(self.queued)}
