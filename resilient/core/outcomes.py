"""How an execution can end, and the step that follows, as values.

Owns the words between the executor, which says how an execution ended (`Outcome`), `decide`, and the store,
which writes the `Transition`. No decision is taken here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

if TYPE_CHECKING:
    from datetime import datetime, timedelta

    from resilient.core.failure import Failure, FailureKind
    from resilient.core.states import JobState

Decision = Literal[
    "succeeded", "once_more", "retry", "reconcile", "reconciled", "defer", "snooze", "slice", "reset_cursor",
    "handed_back", "rescued", "dead", "expired", "cancelled",
]  # fmt: skip


class JobFacts(NamedTuple):
    """What `decide` knows of a running job. The counters do not yet include the execution that just ended."""

    attempts: int = 0  # charged so far
    max_attempts: int | None = None  # the row's; None: no end
    deferrals: int = 0
    rescues: int = 0
    expires_at: datetime | None = None
    sent: bool = False  # a request is unanswered that must not be repeated: see `core.marks`
    safe_until: datetime | None = None  # when the provider forgets the first key of those that may be
    cancel_requested: bool = False
    once_more: bool = False  # was enqueued again while it ran
    resource_key: str = ""
    can_reconcile: bool = False  # its handler has a reconcile hook
    checkpointed: bool = False  # since the claim


@dataclass(frozen=True, slots=True)
class Succeeded:
    """The handler returned. ``result`` is JSON text. ``written``: its end is committed, with its own writes."""

    result: str | None = None
    written: bool = False


@dataclass(frozen=True, slots=True)
class Reconciled:
    """The reconcile hook returned: whether the request took effect; None: nobody can tell."""

    took_effect: bool | None


@dataclass(frozen=True, slots=True)
class Failed:
    """The handler ended in an error.

    ``repeatable``: the request in doubt carries a key its provider honours. ``resource``: the key the failure
    is about; by default the one its scope names on the job's path.
    """

    failure: Failure
    message: str = ""
    traceback: str | None = None
    repeatable: bool = False
    resource: str | None = None


@dataclass(frozen=True, slots=True)
class Deferred:
    """A gate refused before any I/O."""

    resource: str
    gate: str = "breaker"
    until: datetime | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class Snoozed:
    """The handler wants to run later; without a time, after the policy's delay."""

    delay: timedelta | float | None = None
    until: datetime | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class CancelledByHandler:
    """The handler cancelled its job, or was ``interrupted`` because a cancel was requested."""

    reason: str = "cancelled by its handler"
    interrupted: bool = False


@dataclass(frozen=True, slots=True)
class HandedBack:
    """The worker stopped, or never got to start it."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Rescued:
    """The lease ran out: its worker is lost, or was stopped for too long."""

    message: str = "its worker was lost"


@dataclass(frozen=True, slots=True)
class Expired:
    """``expires_at`` passed before it could run."""

    message: str = ""


Outcome = Succeeded | Reconciled | Failed | Deferred | Snoozed | CancelledByHandler | HandedBack | Rescued | Expired
SUCCEEDED: Final = Succeeded()
INTERRUPTED: Final = "interrupted"  # code, in the history, of an execution that a cancel broke off


class Transition(NamedTuple):
    """The step to write. ``state`` is always one that `states.TRANSITIONS` permits from running.

    ``run_at``: None keeps the place in line. ``error`` without ``error_kind`` is a remark, not an error.
    ``set_mark``: the next execution must begin by reconciling, and no mark on the row says so yet.
    """

    state: JobState
    decision: Decision
    charged: bool
    attempts: int
    deferrals: int
    rescues: int
    run_at: datetime | None = None
    error: str | None = None
    error_kind: FailureKind | None = None
    error_code: str | None = None
    status: int | None = None
    waiting_for: str | None = None
    resource_key: str | None = None  # the resource the failure was about
    result: str | None = None
    clear_sent: bool = False
    set_mark: bool = False
    traceback: str | None = None
