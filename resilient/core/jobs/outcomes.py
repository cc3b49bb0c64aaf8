"""How an execution can end, and the step that follows, as values.

Owns the words between the executor, which says how an execution ended (`Outcome`), `decide`, and the store,
which writes the `Transition`. No decision is taken here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from resilient.core.base.errors import FailureKind

if TYPE_CHECKING:
    from datetime import datetime, timedelta

    from resilient.core.base.errors import Failure
    from resilient.core.jobs.states import JobState

Decision = Literal[
    "succeeded", "once_more", "retry", "reconcile", "reconciled", "defer", "snooze", "slice", "reset_cursor",
    "handed_back", "rescued", "dead", "expired", "cancelled",
]  # fmt: skip

# After these the next execution goes on with the work of the one before; after any other it is new work.
CONTINUATIONS: Final[frozenset[str]] = frozenset(
    {"retry", "reconcile", "reconciled", "defer", "slice", "reset_cursor", "handed_back", "rescued"}
)


class JobFacts(NamedTuple):
    """What `decide` knows of a running job. The counters do not yet include the execution that just ended."""

    attempts: int = 0  # charged so far
    max_attempts: int | None = None  # the row's; None: no end
    deferrals: int = 0
    rescues: int = 0
    expires_at: datetime | None = None
    sent: bool = False  # a request is unanswered that must not be repeated: see `core.jobs.marks`
    safe_until: datetime | None = None  # when the provider forgets the first key of those that may be
    cancel_requested: bool = False
    once_more: bool = False  # was enqueued again while it ran
    resource_key: str = ""
    can_reconcile: bool = False  # its handler has a reconcile hook
    checkpointed: bool = False  # since the claim
    called: bool = True  # its handler was called


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
    """The handler wants to run later; without a time, after the policy's delay. ``kind``: its message is an error."""

    delay: timedelta | float | None = None
    until: datetime | None = None
    message: str = ""
    kind: FailureKind | None = None
    code: str | None = None


@dataclass(frozen=True, slots=True)
class CancelledByHandler:
    """The handler cancelled its job, or was ``interrupted`` because a cancel was requested."""

    reason: str = "cancelled by its handler"
    interrupted: bool = False


@dataclass(frozen=True, slots=True)
class HandedBack:
    """The worker stopped, or never got to start it. ``interrupted``: it had begun."""

    reason: str = ""
    interrupted: bool = False


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
INTERRUPTED: Final = "interrupted"  # code, in the history, of an execution that was broken off from outside
BROKEN_OFF: Final = frozenset({FailureKind.TIMEOUT, FailureKind.LOST_WORKER})  # kinds that say the same


class Transition(NamedTuple):
    """The step to write. ``state`` is always one that `states.TRANSITIONS` permits from running.

    ``run_at``: None keeps the place in line. ``error`` without ``error_kind`` is a remark, not an error.
    ``set_mark``: the next execution must begin by reconciling, and no mark on the row says so yet. ``fresh_key``: what
    runs next is a new operation, under an idempotency key it never had. ``unbegun``: its handler was not called, so its
    claim is taken off the job's executions again, and a unique key that the claim gave away is taken back.

    Until it is written, a cancel may be requested and the job may be enqueued again. ``if_cancelled`` and
    ``if_once_more`` are what `decide` says then, where that is another state; after both, the cancel counts. So the
    statement that writes decides nothing: it chooses by the row's two flags, and the state says what it chose.
    """

    state: JobState
    decision: Decision
    charged: bool = False
    attempts: int = 0
    deferrals: int = 0
    rescues: int = 0
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
    clear_error: bool = False  # the row forgets the error of an earlier try
    fresh_key: bool = False
    unbegun: bool = False
    traceback: str | None = None
    if_cancelled: Transition | None = None
    if_once_more: Transition | None = None

    def choices(self) -> list[Transition]:
        """Everything that may be written: this, and what is written instead. Each has a state of its own."""
        return [self, *(one for one in (self.if_cancelled, self.if_once_more) if one is not None)]

    def without_words(self, *, mark: bool) -> Transition:
        """The same step, and the same instead of it, without what a database may refuse; ``mark``: with `set_mark`."""
        return self._replace(
            error="(its error cannot be stored)" if self.error else None, error_code=None, traceback=None, result=None,
            set_mark=self.set_mark or mark,
            if_cancelled=self.if_cancelled and self.if_cancelled.without_words(mark=mark),
            if_once_more=self.if_once_more and self.if_once_more.without_words(mark=mark),
        )  # fmt: skip


# -- handlers that do not end -----------------------------------------------------------------------------------------
#
# How many of them a worker bears: altogether, and of one resource key.

LEAST_STUCK: Final = 16  # handlers that may be stuck and replaced, also in a worker of few slots


def share_of_key(most_stuck: int) -> int:
    """With how many stuck handlers of one resource key a worker runs nothing more of it."""
    return max(1, most_stuck // 4)
