"""The errors a job's client raises.

    httpx.HTTPStatusError + JobFailure
    +-- FailedAnswer                  an answer the provider's dialect or its status calls a failure
        +-- TransientAnswer (Transient), PermanentAnswer (Permanent)
        +-- ThrottledAnswer (Throttled), AmbiguousAnswer (Ambiguous)
    httpx.RequestError + Permanent
    +-- AnswerTooLarge                a body beyond the pool's bound

They are httpx errors, so an SDK and existing code treat them as ever, and job failures, so ``except
Permanent`` works and nothing has to be translated when they leave the handler. Requests without an answer
raise httpx's own errors; the classification is found through their request (see `explain`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import httpx

from resilient.core.bounds import ERROR_MESSAGE
from resilient.core.errors import Ambiguous, JobFailure, Permanent, Throttled, Transient
from resilient.core.failure import Failure, FailureKind
from resilient.core.hosts import without_secrets
from resilient.core.phrases import span
from resilient.wire import redact

if TYPE_CHECKING:
    from collections.abc import Iterable


class FailedAnswer(httpx.HTTPStatusError, JobFailure):
    """An answer that is a failure: ``failure`` says which; ``request`` and ``response`` are httpx's."""

    def __init__(self, message: str, *, request: httpx.Request, response: httpx.Response, failure: Failure) -> None:
        Exception.__init__(self, message)
        self.request, self.response, self.failure = request, response, failure


class TransientAnswer(FailedAnswer, Transient):
    """It may work later."""


class PermanentAnswer(FailedAnswer, Permanent):
    """It never will."""


class ThrottledAnswer(FailedAnswer, Throttled):
    """The account must wait."""


class AmbiguousAnswer(FailedAnswer, Ambiguous):
    """A gateway lost the server's answer: it may have happened."""


class AnswerTooLarge(httpx.RequestError, Permanent):
    """The body is larger than the pool's bound, or took longer."""

    def __init__(self, message: str, *, request: httpx.Request | None = None) -> None:
        Exception.__init__(self, message)
        self._request = request
        self.failure = Failure(FailureKind.PERMANENT, code="answer_too_large")


_CLASSES: Final = {
    FailureKind.TRANSIENT: TransientAnswer,
    FailureKind.PERMANENT: PermanentAnswer,
    FailureKind.THROTTLED: ThrottledAnswer,
    FailureKind.QUOTA: ThrottledAnswer,
    FailureKind.AMBIGUOUS: AmbiguousAnswer,
}


def failed_answer(
    response: httpx.Response, failure: Failure, said: str = "", secrets: Iterable[str] = ()
) -> FailedAnswer:
    """The error for an answer; ``said`` is the provider's own message, cleaned of ``secrets``."""
    request = response.request
    parts = [f"{request.method} {without_secrets(str(request.url))} answered {response.status_code}"]
    named = failure.code not in (None, f"http_{response.status_code}")
    word = f"{failure.kind} ({failure.code})" if named else failure.kind
    if said:
        parts.append(redact.scrub(said, secrets, ERROR_MESSAGE.value))
    if failure.retry_in is not None:
        parts.append(f"told to wait {span(failure.retry_in)}")
    found = _CLASSES.get(failure.kind, FailedAnswer)
    error = found(": ".join([parts[0], word, *parts[1:]]), request=request, response=response, failure=failure)
    error.told = ": ".join(parts)
    return error
