"""Endpoints that take several requests at once and answer each on its own, as facts: Microsoft Graph's ``$batch``.

A batch of n parts is n requests: to the limits, to the gate, and to whoever has to know which of them failed. So
each part is drawn, classified and reported like a request of its own, and the batch itself is only their envelope.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from resilient.core.errors import InvalidInput, JobFailure, Snooze
from resilient.core.failure import Failure, FailureKind
from resilient.core.misfit import explained_class

if TYPE_CHECKING:
    from collections.abc import Mapping

_WAITS = frozenset({FailureKind.THROTTLED, FailureKind.QUOTA})


@explained_class
@dataclass(frozen=True, slots=True)
class Part:
    """One request of a batch. ``url``: below the base URL, as ``/me/messages``; ``body``: JSON."""

    method: str
    url: str
    body: Any = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class PartAnswer:
    """What came back for one part. ``status`` is None if a gate or limit kept it from being sent.

    ``failure``: what that means in the provider's dialect; None for success.
    """

    part: Part
    status: int | None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    body: Any = field(default=None, repr=False)
    failure: Failure | None = None

    def raise_for_failure(self) -> None:
        """Raise what went wrong: `Snooze` for a part that was throttled, so that only its own job waits."""
        if self.failure is None:
            return
        if self.failure.kind in _WAITS:
            raise Snooze(self.failure.retry_in, until=self.failure.retry_at)
        told = f"{self.part.method} {self.part.url.partition('?')[0]} within a batch answered {self.status}"
        error = JobFailure(f"{told}: {self.failure.kind}", failure=self.failure)
        error.told = told
        raise error


@explained_class
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchEndpoint:
    """A JSON batch: ``POST path`` with ``{requests: [{id, method, url, headers, body}]}``.

    The answer is ``{responses: [{id, status, headers, body}]}``, in any order. ``path``: below the base URL;
    ``most``: parts in one batch; ``requests``, ``responses``: how the two lists are called.
    """

    path: str
    most: int = 20
    requests: str = "requests"
    responses: str = "responses"

    def __post_init__(self) -> None:
        if not self.path.startswith("/"):
            raise InvalidInput(f"BatchEndpoint(path={self.path!r}): a path below the base URL, such as '/$batch'")
        if isinstance(self.most, bool) or not isinstance(self.most, int) or self.most < 1:
            raise InvalidInput(f"BatchEndpoint(most={self.most!r}): how many parts one batch takes, from 1")
