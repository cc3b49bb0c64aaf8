"""What a test request brought, for people: how it was answered, and what the gates learnt from that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from resilient.core.base.phrases import figure, learnt_limit, when
from resilient.core.jobs.records import fields_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from datetime import datetime

    from resilient.core.base.budgets import Budget
    from resilient.core.base.errors import FailureKind
    from resilient.core.jobs.records import ResourceInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTest:
    """How a test request ended.

    ``request``: what the provider's facts name. ``status`` is None without an answer, ``seconds`` are from sending to
    the answer's head. ``failure`` is the kind of error, None for a success, with the provider's ``code``. ``probe``:
    it tried out a circuit that was open. ``lessons``: what the gates learnt, a sentence each.
    """

    key: str
    request: str
    status: int | None
    seconds: float
    failure: FailureKind | None
    code: str | None
    probe: bool
    lessons: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Every field under its own name."""
        return fields_of(self)

    @property
    def line(self) -> str:
        """How it ended, in one sentence."""
        answer = "no answer" if self.status is None else f"answered {self.status}"
        kind = "" if self.failure is None else f", which means {self.failure.value}"
        code = f" ({self.code})" if self.failure is not None and self.code else ""
        probe = "; it was the probe of an open circuit" if self.probe else ""
        return f"{self.request} through {self.key}: {answer} in {self.seconds * 1000:,.0f} ms{kind}{code}{probe}."


def lessons_of(
    before: Mapping[str, ResourceInfo], after: Mapping[str, ResourceInfo], budgets: Sequence[Budget], now: datetime
) -> tuple[str, ...]:
    """What changed of the resources on a request's path, and what its answer said of the provider's limits."""
    changes = (one for key, info in after.items() for one in _changes(before.get(key), info, now))
    return (*changes, *(_left(one, now) for one in budgets if one.remaining is not None))


def _changes(before: ResourceInfo | None, after: ResourceInfo, now: datetime) -> Iterator[str]:
    key = after.key
    if before is not None and before.breaker != after.breaker:
        yield f"The circuit of {key} is {after.breaker.replace('_', ' ')}; it was {before.breaker.replace('_', ' ')}."
    if after.blocked_until is not None and after.blocked_until > now:
        yield f"{key} waits until {when(after.blocked_until, now)}, as the provider asks."
    if before is not None and before.auth != after.auth:
        yield f"The credentials of {key} are {after.auth.replace('_', ' ')}; they were {before.auth.replace('_', ' ')}."
    if after.learnt is not None and (before is None or before.learnt != after.learnt):
        yield f"{key} has a limit of {learnt_limit(after.learnt, now)}."


def _left(budget: Budget, now: datetime) -> str:
    of = "" if budget.limit is None else f" of {figure(budget.limit)}"
    reset = "" if budget.reset_at is None else f", full again {when(budget.reset_at, now)}"
    return f"Of its limit {budget.name!r} {figure(budget.remaining or 0)}{of} are left{reset}."
