"""`Retry`: the policy that says whether a failed job is tried again, and after how long.

The default is full jitter above a floor of half the base (``tests/core/test_backoff.py`` has the reason: no two of
many jobs come back at one moment). A conflict waits shortly, because the other side is done soon, unless the policy
names a delay for it. The strategies themselves are in `delays`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from resilient.core.delays import (
    Delay,
    DelayLike,
    FullJitter,
    Tenacity,
    as_delay,
)
from resilient.core.errors import InvalidInput
from resilient.core.failure import Failure, FailureKind
from resilient.core.misfit import explained_class

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_DELAY: Final = FullJitter()
CONFLICT_DELAY: Final = FullJitter(base=0.5, cap=15.0)  # the other side is done soon


@explained_class
@dataclass(frozen=True, slots=True, init=False)
class Retry:
    """What happens after a failure that may be repeated.

    ``max_attempts``: None for no end. ``delay``: a strategy, seconds, a timedelta, a function of the attempt,
    or one of tenacity's waits. ``by_kind``: another delay, or a whole `Retry`, for some kinds of error:
    ``{"conflict": Fixed(2), "bug": Retry(max_attempts=2)}``. Attempts are counted over all kinds together.
    ``max_rescues``: after how many lost workers a job is given up.

    Raises `InvalidInput` for options that make no sense.
    """

    max_attempts: int | None
    delay: Delay
    by_kind: tuple[tuple[FailureKind, Retry], ...]
    max_rescues: int

    def __init__(
        self,
        max_attempts: int | None = 10,
        delay: DelayLike = DEFAULT_DELAY,
        *,
        by_kind: Mapping[FailureKind | str, Retry | DelayLike] | None = None,
        max_rescues: int = 3,
    ) -> None:
        put = object.__setattr__
        put(self, "max_attempts", None if max_attempts is None else _count("max_attempts", max_attempts))
        put(self, "delay", as_delay(delay))
        put(self, "max_rescues", _count("max_rescues", max_rescues))
        rules = [(_kind(k), _rule(k, v, max_attempts)) for k, v in by_kind.items()] if by_kind else ()
        put(self, "by_kind", tuple(rules))

    def rule(self, kind: FailureKind) -> Retry:
        """The policy for this kind of error: its own, or this one."""
        for known, rule in self.by_kind:
            if known is kind:
                return rule
        return self

    def limit(self, kind: FailureKind, of_job: int | None) -> int | None:
        """After how many attempts a job is given up; None for never.

        ``of_job`` is the job's own number. If it is this policy's, the kind's number counts instead; if
        somebody gave the job another one, the kind's number can only lower it.
        """
        own = self.rule(kind).max_attempts
        if of_job == self.max_attempts:
            return own
        return own if of_job is None else of_job if own is None else min(own, of_job)

    def seconds(self, kind: FailureKind, attempt: int, roll: float, failure: Failure | None = None) -> float:
        """Seconds to wait after ``attempt`` (from 1) ended in an error of this kind.

        A user's function that raises, raises through this; one that returns no delay raises `InvalidInput`.
        """
        rule = self.rule(kind)
        if isinstance(rule.delay, Tenacity):
            wait = rule.delay.after(attempt, failure)
        else:
            wait = rule.delay.seconds(attempt, roll)
        if kind is FailureKind.CONFLICT and rule is self:  # nobody asked for another one
            wait = min(wait, CONFLICT_DELAY.seconds(attempt, roll))
        return wait


def _rule(kind: str, value: Retry | DelayLike, max_attempts: int | None) -> Retry:
    if not isinstance(value, Retry):
        return Retry(max_attempts, value)
    if value.by_kind:
        raise InvalidInput(f"by_kind[{str(kind)!r}] has a by_kind of its own: name its kinds in the outer one")
    return value


def _kind(kind: FailureKind | str) -> FailureKind:
    try:
        return FailureKind(kind)
    except ValueError:
        known = ", ".join(FailureKind)
        raise InvalidInput(f"by_kind names {kind!r}, which is no kind of error: use one of {known}") from None


def _count(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        hint = " or None for no end" if name == "max_attempts" else ""
        raise InvalidInput(f"{name}={value!r} is no number of times: use an integer of at least 1{hint}")
    return value
