"""What the outcome of one request says about each resource on its path.

Evidence against the provider (5xx, timeouts, connection errors) counts for the whole path, other failures up
to the resource they name. Above that, any answer that is not 5xx, 408 or a throttle of the level is proof of
life. Throttles, refused credentials, and what never reached the provider say nothing about the resource they
name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from resilient.core.failure import FailureKind, at_scope
from resilient.core.resource_key import depth, is_below

if TYPE_CHECKING:
    from resilient.core.failure import Failure

Verdict = Literal["ok", "failed", "neutral"]
OWN: Final = "."  # the child name of a key's own requests
_SERVER_ERROR: Final = 500
_REQUEST_TIMEOUT: Final = 408
_ILLNESS: Final = frozenset({FailureKind.TRANSIENT, FailureKind.AMBIGUOUS})
_SILENT: Final = frozenset({FailureKind.THROTTLED, FailureKind.QUOTA, FailureKind.AUTH})


def judge(failure: Failure | None, request_key: str, level: str) -> Verdict:
    """What a request through ``request_key`` (failure None: a success) says about a key of its path."""
    if failure is None:
        return "ok"
    named = is_below(level, at_scope(request_key, failure.scope)) or depth(level) >= depth(request_key)
    answered = failure.status is not None and failure.status < _SERVER_ERROR and failure.status != _REQUEST_TIMEOUT
    if counts(failure):
        if named or failure.provider_wide:
            return "failed"
    elif named and failure.kind in _SILENT:
        return "neutral"
    return "ok" if answered else "neutral"


def counts(failure: Failure) -> bool:
    """Whether the failure is evidence of illness at all."""
    if failure.counts_for_breaker is not None:
        return failure.counts_for_breaker
    return failure.kind in _ILLNESS


def child_of(request_key: str, level: str) -> str:
    """The child of ``level`` that a request through ``request_key`` belongs to."""
    return OWN if request_key == level else request_key[len(level) + 1 :].partition("/")[0]
