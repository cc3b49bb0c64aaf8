"""What people and programs are shown of jobs: plain frozen values, safe to keep after the transaction.

Each has ``to_json``: the stable form that the command line's ``--json`` prints (ids as text, times as ISO
8601 in UTC).
"""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias
from uuid import UUID

from resilient.core.base.errors import InvalidInput
from resilient.core.base.loggers import MASK

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

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
    """Jobs that are gone; the others were not over, or belong to a workflow that is not (``in_workflow``)."""

    deleted: int = 0
    not_finished: int = 0
    in_workflow: int = 0


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


@dataclass(frozen=True, slots=True)
class AuditInfo:
    """One change: who made it, through what (``dashboard``, ``command line``, ``program``), of what and why.

    ``outcome`` is what it brought, in numbers, or its ``error``; None: it was begun, and nobody knows how it ended.
    """

    id: int
    at: datetime
    who: str
    via: str
    action: str
    subject: str
    why: str | None
    outcome: Mapping[str, Any] | None

    def to_json(self) -> dict[str, Any]:
        """Every field under its own name."""
        return fields_of(self)


# -- payloads ---------------------------------------------------------------------------------------------------------
#
# What people are shown of a payload: nothing of a sealed one, and of others what their kind does not hide.
#
# A sealed payload (``sealed=True``) stands in its row as one JSON object with one name (`SEALED`) and the encrypted
# text. ``redact=`` is for views alone: the row keeps the value.

SEALED: Final = "resilient:sealed"
SEALED_KEY: Final = "sealed_key"  # code of a job that waits for a worker with its key
START: Final = f'{{"{SEALED}"'  # of the JSON text, as the engine writes it
Redaction: TypeAlias = "Sequence[str] | Callable[[Any], Any]"


def is_sealed(value: Any) -> bool:
    """Whether a decoded payload is a sealed one."""
    return isinstance(value, dict) and value.keys() == {SEALED}


def without_sealed(value: Any) -> Any:
    """The value, with a note of its key in place of each sealed payload."""
    if is_sealed(value):
        return {"sealed": f"with key {str(value[SEALED]).partition(':')[0][:12]}"}
    if isinstance(value, dict):
        return {name: without_sealed(one) for name, one in value.items()}
    return [without_sealed(one) for one in value] if isinstance(value, list) else value


def check_redaction(kind: str, redact: Any) -> None:
    """Raise `InvalidInput` unless it is a list of names and paths, or a function."""
    is_list = isinstance(redact, (list, tuple, set, frozenset)) and all(isinstance(one, str) and one for one in redact)
    if redact is not None and not is_list and not callable(redact):
        raise InvalidInput(
            f"redact of kind {kind!r} takes field names (['token']), paths (['card.number', 'items.*.price']) or a"
            " function of the payload"
        )


def redacted(payload: Any, redact: Redaction | None) -> Any:
    """What is shown of a decoded payload. A name stands for that field anywhere, a path is walked from the top."""
    if redact is None:
        return payload
    if callable(redact):
        try:
            return redact(copy.deepcopy(payload))
        except Exception as error:  # noqa: BLE001 - the program's own function; its text may hold the payload
            return f"{MASK} (redact= failed: {type(error).__name__})"
    shown = copy.deepcopy(payload)
    for path in redact:
        _hide(shown, path.split("."), anywhere="." not in path)
    return shown


def _hide(value: Any, path: list[str], *, anywhere: bool) -> None:
    name, rest = path[0], path[1:]
    places = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in list(places):
        if name in ("*", str(key)):
            if rest:
                _hide(one, rest, anywhere=False)
            else:
                value[key] = MASK
        elif anywhere:
            _hide(one, path, anywhere=True)
