"""What went wrong, as a value: the words every floor shares about failures.

The kinds and what follows from each are the table in `docs/handlers.md`; `decide.py` turns a failure into a
transition, `breaker.py` asks `counts_for_breaker`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from datetime import datetime


class FailureKind(StrEnum):
    """One word for what came back."""

    THROTTLED = "throttled"  # the resource waits until told; no attempt
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

    ``retry_at`` is an absolute time told by the provider, ``retry_in`` seconds told by it (never both); None means the
    provider said nothing usable. ``code`` is the provider's own error code, or a status such as ``http_503``.
    ``counts_for_breaker`` is None for "by its kind".
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
