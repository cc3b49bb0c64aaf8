"""What the outcome of one request says about each resource on its path.

Evidence against the provider (5xx, timeouts, connection errors) counts for the whole path, other failures up
to the resource they name. Above that, any answer that is not 5xx, 408 or a throttle of the level is proof of
life. Throttles, refused credentials, and what never reached the provider say nothing about the resource they
name. What an account with a host of its own reports stays with it, as far as `tenancy` says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from resilient.core.failure import FailureKind, Scope, at_scope
from resilient.core.quorum import OWN
from resilient.core.resource_key import depth, is_below
from resilient.core.tenancy import Tenancy

if TYPE_CHECKING:
    from resilient.core.failure import Failure

Verdict = Literal["ok", "failed", "neutral"]
_SERVER_ERROR: Final = 500
_REQUEST_TIMEOUT: Final = 408
_ILLNESS: Final = frozenset({FailureKind.TRANSIENT, FailureKind.AMBIGUOUS})
_SILENT: Final = frozenset({FailureKind.THROTTLED, FailureKind.QUOTA, FailureKind.AUTH})


def judge(failure: Failure | None, request_key: str, level: str, tenancy: Tenancy = Tenancy.SHARED) -> Verdict:
    """What a request through ``request_key`` (failure None: a success) says about a key of its path."""
    if failure is None:
        return "ok"
    named = names(failure, request_key, level, tenancy)
    answered = failure.status is not None and failure.status < _SERVER_ERROR and failure.status != _REQUEST_TIMEOUT
    if counts(failure):
        if named or (failure.provider_wide and not _private(failure, request_key, level, tenancy)):
            return "failed"
    elif named and failure.kind in _SILENT:
        return "neutral"
    return "ok" if answered else "neutral"


def names(failure: Failure, request_key: str, level: str, tenancy: Tenancy = Tenancy.SHARED) -> bool:
    """Whether a failure is about this key of its request's path, or one below: a told time binds that and no more."""
    return is_below(level, scoped(failure, request_key, tenancy)) or depth(level) >= depth(request_key)


def scoped(failure: Failure, request_key: str, tenancy: Tenancy = Tenancy.SHARED) -> str:
    """The resource a failure is about; a host that its account chose speaks for no other account."""
    apart = failure.scope is Scope.PROVIDER and tenancy is Tenancy.APART
    return at_scope(request_key, Scope.ACCOUNT if apart else failure.scope)


def _private(failure: Failure, request_key: str, level: str, tenancy: Tenancy) -> bool:
    """Whether what happened at an account's own host would be counted against a root it shares with others."""
    if tenancy is Tenancy.SHARED or depth(level) > 1 or depth(request_key) == 1:
        return False
    return tenancy is Tenancy.APART or failure.status is None


def counts(failure: Failure) -> bool:
    """Whether the failure is evidence of illness at all."""
    if failure.counts_for_breaker is not None:
        return failure.counts_for_breaker
    return failure.kind in _ILLNESS


def child_of(request_key: str, level: str) -> str:
    """The child of ``level`` that a request through ``request_key`` belongs to."""
    return OWN if request_key == level else request_key[len(level) + 1 :].partition("/")[0]
