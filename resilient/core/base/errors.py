"""What went wrong: the classified `Failure` as a value, and every exception a user of the library can meet.

The kinds of failure and what follows from each are the table in `docs/handlers.md`; `decide.py` turns a failure into a
transition, `breaker.py` reads `counts_for_breaker`.

    ResilientError
    +-- InvalidInput (ValueError)      the caller's argument is wrong; nothing was written
    |   +-- BadResourceKey
    |   +-- BadPayload                 does not fit the handler's model, or is not JSON
    |   +-- PayloadTooLarge
    |   +-- UnknownKind                no handler of that name in this app
    |   +-- NaiveDatetime
    |   +-- BadCron
    +-- SetupError                     the program or its database is not ready
    |   +-- SecretsUnreadable          encrypted with a key that is not here, or changed
    |   +-- DatabaseUnreachable        away, or unable to serve: full, read-only, a standby
    |   |   +-- DatabaseBusy           every connection is in use
    |   +-- SchemaOutdated             database older than the code: run `resilient db upgrade`
    |   +-- SchemaTooNew               database newer than the code: deploy the newer code
    |   +-- MissingExtra               an optional dependency is not installed
    +-- JobNotFound
    +-- JobNotOver (TimeoutError)      a job was waited for and has not ended in that time
    +-- WorkflowNotFound
    +-- WorkflowOver                   it ended or is being undone, and takes no more steps
    +-- NoResult                       of an earlier step: there is none (yet)
    +-- ConnectionNotFound
    +-- ConsentRefused                 a person or a provider said no, or the callback is not one of ours
    |   +-- UnexpectedCallback         its state is unknown here: forged, used, too old
    +-- DuplicateJob                   enqueue with on_conflict="raise"
    +-- TransactionOpen                a request while a transaction of the job is open
    +-- LostLease                      the job was given to another worker meanwhile
    +-- ResourceStopped                a gate refused before any I/O; the job waits, no attempt is charged
    +-- JobFailure                     carries a classified `Failure`; a handler may raise these itself
    |   +-- Transient
    |   +-- Permanent
    |   +-- Throttled                  ``Throttled(until)``: the account must wait
    |   +-- Ambiguous                  it may have happened; never repeated blindly
    +-- Snooze, Cancel                 raised or returned by a handler: not failures

Messages say what happened, to which job or resource, and what to do. They never contain secrets.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Final, TypeVar

from resilient.core.base.phrases import moment

if TYPE_CHECKING:
    from collections.abc import Iterator


class FailureKind(StrEnum):
    """One word for what came back."""

    THROTTLED = "throttled"  # the resource waits for the stated time; no attempt
    QUOTA = "quota"  # an hourly or daily budget is spent; no attempt
    AUTH = "auth"  # credentials refused; no attempt
    TRANSIENT = "transient"  # charged, backed off, counts for the breaker
    AMBIGUOUS = "ambiguous"  # it may have happened
    CONFLICT = "conflict"  # re-read and try again soon
    PERMANENT = "permanent"  # dead at once
    RESET_CURSOR = "reset_cursor"  # the stream starts a full pass
    DATABASE = "database"  # the engine's own database is away, busy or full; no attempt
    TIMEOUT = "timeout"  # the handler took too long
    BUG = "bug"  # an exception from the user's code
    LOST_WORKER = "lost_worker"  # the job's workers died too often
    EXPIRED = "expired"  # expires_at passed before it could run
    UNDECODABLE = "undecodable"  # the stored payload cannot be read by this code


class Scope(StrEnum):
    """Which resource on the request's path a failure is about."""

    ENDPOINT = "endpoint"  # the request's own key
    ACCOUNT = "account"  # two segments: provider/account
    PROVIDER = "provider"  # one segment


WAITS_FOR_RESOURCE: Final = frozenset({FailureKind.THROTTLED, FailureKind.QUOTA, FailureKind.AUTH})
UNCHARGED: Final = WAITS_FOR_RESOURCE | {FailureKind.RESET_CURSOR, FailureKind.DATABASE}


@dataclass(frozen=True, slots=True)
class Failure:
    """A classified failure.

    ``retry_at`` is the time before which the provider wants no other try, ``retry_in`` the same in seconds from now
    (never both); None: it stated nothing usable. ``code`` is the provider's own error code, or a status such as
    ``http_503``. ``counts_for_breaker`` is None for "by its kind".
    """

    kind: FailureKind
    scope: Scope = Scope.ACCOUNT
    retry_at: datetime | None = None
    retry_in: float | None = None
    code: str | None = None
    status: int | None = None
    counts_for_breaker: bool | None = None
    provider_wide: bool = False  # evidence against the provider itself (5xx, timeouts, connection errors)

    def __str__(self) -> str:
        """For people, short: ``HTTP 503``, ``connect error``, ``transient``."""
        return f"HTTP {self.status}" if self.status else (self.code or str(self.kind)).replace("_", " ")


def at_scope(key: str, scope: Scope) -> str:
    """The resource on the path of ``key`` that ``scope`` names; never deeper than ``key`` itself."""
    if scope is Scope.ENDPOINT:
        return key
    segments = key.split("/")
    return "/".join(segments[: 1 if scope is Scope.PROVIDER else 2])


class ResilientError(Exception):
    """Base of everything the library raises on purpose."""


class InvalidInput(ResilientError, ValueError):
    """The caller's argument is wrong; nothing was written."""


class BadResourceKey(InvalidInput):
    """Not a resource key or pattern."""


class BadPayload(InvalidInput):
    """The payload does not fit the handler's model, or is not JSON."""


class PayloadTooLarge(InvalidInput):
    """The encoded payload exceeds the app's limit."""


class UnknownKind(InvalidInput):
    """No handler of that kind is listed in the app."""


class NaiveDatetime(InvalidInput):
    """A datetime without a time zone."""


class BadCron(InvalidInput):
    """Not a cron expression, or not a time zone."""


class SetupError(ResilientError):
    """The program or its database is not ready."""


class SecretsUnreadable(SetupError):
    """Secrets are encrypted with a key that is not here, or were changed."""


class DatabaseUnreachable(SetupError):
    """The database does not answer, or cannot serve; the message names host and database, never the password.

    A job that meets it is charged nothing and tried again.
    """


class DatabaseBusy(DatabaseUnreachable):
    """Every connection is in use: the server's, or those this process may open."""


class SchemaOutdated(SetupError):
    """The tables are older than this code, or missing."""


class SchemaTooNew(SetupError):
    """The tables are newer than this code."""


class MissingExtra(SetupError):
    """An optional dependency is not installed; the message names the extra."""


class JobNotFound(ResilientError, LookupError):
    """No job has that id."""


class WorkflowNotFound(ResilientError):
    """No workflow has this id."""


class WorkflowOver(ResilientError):
    """A workflow that ended, or is being undone, takes no more steps."""


class NoResult(ResilientError):
    """An earlier step has no result: it is not there, or did not succeed."""


class ConnectionNotFound(ResilientError, LookupError):
    """The resource has no connection."""


class ConsentRefused(ResilientError):
    """A person or a provider said no to the access asked for, or a callback is not one of ours."""


class UnexpectedCallback(ConsentRefused):
    """A callback whose state is not known here: forged, used, too old, or of another database."""


class JobNotOver(ResilientError, TimeoutError):
    """A job was waited for, and has not ended in that time; it goes on all the same."""


class DuplicateJob(ResilientError):
    """A live job already holds the unique key."""


class TransactionOpen(ResilientError):
    """A request was tried while a transaction of the job is open."""


class LostLease(ResilientError):
    """The job was given to another worker meanwhile; nothing this execution writes counts."""


class ResourceStopped(ResilientError):
    """A gate refused before any I/O. The job waits for ``resource``; no attempt is charged.

    ``then``: what follows from it, where no job waits.
    """

    def __init__(self, resource: str, gate: str, until: datetime | None = None, *, then: str = "") -> None:
        self.resource, self.gate, self.until = resource, gate, until
        when = f" until {moment(until)}" if until else ""
        by = _SHUT.get(gate, f"its {gate}")
        super().__init__(f"resource {resource!r} is stopped by {by}{when}; {then or _WAITS.get(gate, _BY_ITSELF)}")


_BY_ITSELF: Final = "the job waits and goes on by itself"
_WAITS: Final = {"auth": "the job waits until they are good", "key": "the job waits for a worker that has it"}
_SHUT: Final = {
    "breaker": "its circuit",
    "auth": "its credentials",
    "database": "our database, which is away",
    "key": "the key of its secrets, which this worker lacks (RESILIENT_SECRETS)",
}


class JobFailure(ResilientError):
    """An error that carries its own classification.

    ``resource``: the key of the resource it concerns, if that is not on the job's own path. ``bare_message``: its
    message without the classification, for where that stands beside it.
    """

    failure: Failure = Failure(FailureKind.BUG)  # of a class whose `__init__` does not call this one
    resource: str | None = None
    bare_message: str | None = None

    def __init__(self, message: str, *, failure: Failure) -> None:
        self.failure = failure
        super().__init__(message)


def _moment(word: str, seconds: str, until: datetime | None) -> datetime | None:
    """``until``, in UTC if it says no zone."""
    if until is None:
        return None
    if not isinstance(until, datetime):
        raise TypeError(f"until takes a datetime, not {until!r}; for seconds write {word}({seconds}=...)")
    return until.replace(tzinfo=UTC) if until.tzinfo is None else until


S = TypeVar("S")
_LARGEST: Final = sys.float_info.max  # of infinity, NaN and 10**400 nothing can be computed


def _finite(word: str, seconds: S) -> S:
    if isinstance(seconds, (int, float)) and not -_LARGEST <= seconds <= _LARGEST:
        raise InvalidInput(f"{word}({seconds!r}): give a finite number of seconds")
    return seconds


def _seconds(word: str, retry_after: float | timedelta | None) -> float | None:
    if isinstance(retry_after, timedelta):
        return retry_after.total_seconds()
    if retry_after is not None and not isinstance(retry_after, (int, float)):
        raise TypeError(f"{word}(retry_after=...) takes seconds or a timedelta, not {retry_after!r:.80}")
    return _finite(word, retry_after)


def _scope(word: str) -> Scope:
    try:
        return Scope(word)
    except ValueError:
        raise InvalidInput(f"Throttled(scope={word!r}): scope is 'endpoint', 'account' or 'provider'") from None


class Transient(JobFailure):
    """Try again later, after ``retry_after`` (seconds) or a backoff: charged. Raises `InvalidInput`, `TypeError`."""

    def __init__(self, message: str = "transient failure", *, retry_after: float | timedelta | None = None) -> None:
        failure = Failure(FailureKind.TRANSIENT, retry_in=_seconds("Transient", retry_after))
        super().__init__(message, failure=failure)


class Permanent(JobFailure):
    """Never try again: dead at once."""

    def __init__(self, message: str = "permanent failure", *, code: str | None = None) -> None:
        super().__init__(message, failure=Failure(FailureKind.PERMANENT, code=code))


class Throttled(JobFailure):
    """The account must wait until ``until`` (without a zone: UTC), or for ``retry_after`` seconds.

    ``scope``: ``"endpoint"`` or ``"provider"`` waits instead. Raises `InvalidInput`, `TypeError`.
    """

    def __init__(
        self,
        until: datetime | None = None,
        *,
        retry_after: float | timedelta | None = None,
        scope: str = "account",
        message: str = "throttled",
    ) -> None:
        at = _moment("Throttled", "retry_after", until)
        super().__init__(
            message,
            failure=Failure(
                FailureKind.THROTTLED, scope=_scope(scope), retry_at=at, retry_in=_seconds("Throttled", retry_after)
            ),
        )


class Ambiguous(JobFailure):
    """The request may have been received: reconciled, or shown to a person, never repeated blindly."""

    def __init__(self, message: str = "unknown outcome") -> None:
        super().__init__(message, failure=Failure(FailureKind.AMBIGUOUS))


class Snooze(ResilientError):
    """Run the job again later without charging an attempt. Raise or return it. Raises `InvalidInput`, `TypeError`."""

    def __init__(self, delay: timedelta | float | None = None, *, until: datetime | None = None) -> None:
        if delay is not None and not isinstance(delay, (int, float, timedelta)):
            raise TypeError(
                f"Snooze(...) takes seconds or a timedelta, not {delay!r:.80}; for a moment write until=..."
            )
        self.delay, self.until = _finite("Snooze", delay), _moment("Snooze", "delay", until)
        super().__init__("snoozed")


class Cancel(ResilientError):
    """End the job as cancelled. Raise or return it."""

    def __init__(self, reason: str = "cancelled by its handler") -> None:
        self.reason = reason
        super().__init__(reason)


# -- chains ----------------------------------------------------------------------------------------------------------

_CHAINED: Final = 100  # exceptions of one chain


def chain(error: BaseException) -> Iterator[BaseException]:
    """``error``, then what it was raised from or during, and the members of groups; each once."""
    visited: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting and len(visited) < _CHAINED:
        current = waiting.pop(0)
        if current is None or id(current) in visited:
            continue
        visited.add(id(current))
        yield current
        waiting[:0] = _linked(current)


def _linked(error: BaseException) -> list[BaseException | None]:
    """The members of a group, the cause, the context; none if a class of the program's own raises over them."""
    try:
        members = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
        linked = [*members, error.__cause__, error.__context__]
    except BaseException:  # noqa: BLE001 - whoever reads a chain must not fail over it
        return []
    return linked
