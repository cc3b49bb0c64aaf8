"""`Retry`: the policy that says whether a failed job is tried again, and after how long.

The default is full jitter above a floor of half the base (``tests/core/test_backoff.py`` has the reason: no two of
many jobs come back at one moment). After a conflict the wait is short, because the other side is done soon, unless
the policy has a delay of its own for conflicts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from hashlib import blake2b
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from resilient.core.base.errors import Failure, FailureKind, InvalidInput, JobFailure
from resilient.core.base.misfit import explained_class, is_number, is_whole

if TYPE_CHECKING:
    from collections.abc import Mapping

# -- delays -----------------------------------------------------------------------------------------------------------
#
# Delay strategies: how long to wait after attempt n.
#
# Rules: a strategy is a frozen value; the dice are an argument (``roll`` in [0, 1)); jitter comes last, after
# the cap, or all jobs that have reached the cap would return in the same second. Attempts count from 1: the
# delay after the first failure is that of attempt 1.
#
# Tenacity's own ``wait_*`` objects are accepted, recognised by where their classes come from, so that nothing
# here imports tenacity. They roll their own dice.

Seconds = float | timedelta

LONGEST: Final = 366 * 86400.0  # seconds; longer is a mistake of units in a user's function
LONGEST_RETRY_PAUSE: Final = 10.0  # seconds between two tries to reach a database
_MOST_STEPS: Final = 64  # of a decorrelated chain; it settles much earlier


def spread_upwards(seconds: float, roll: float) -> float:
    """``seconds``, and up to half as much again: jobs that were stopped together come back apart, and none earlier."""
    return seconds * (1 + roll / 2)


def retry_pause(tries: int, roll: float, longest: float = LONGEST_RETRY_PAUSE) -> float:
    """Seconds to wait before talking to a database that did not answer, growing to ``longest``, plus up to half.

    ``roll``, from 0 to below 1, spreads it: the workers of a fleet lose their database at one moment, and must not all
    come back to it at another.
    """
    return spread_upwards(min(0.1 * 2 ** min(tries, 10), longest), roll)


@runtime_checkable
class Delay(Protocol):
    """A delay strategy."""

    def seconds(self, attempt: int, roll: float) -> float:
        """Seconds to wait after ``attempt`` (from 1) failed."""


DelayLike = Delay | Seconds | Callable[..., Any]


class _Value:
    """The base of the strategies: it sets the fields of a frozen dataclass."""

    __slots__ = ()

    def _set(self, **values: float) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)


@explained_class
@dataclass(frozen=True, slots=True, init=False)
class Fixed(_Value):
    """Always the same delay, without jitter."""

    delay: float

    def __init__(self, delay: Seconds) -> None:
        self._set(delay=_seconds("delay", delay))

    def seconds(self, attempt: int, roll: float) -> float:  # noqa: ARG002
        """See `Delay`."""
        return self.delay


@explained_class
@dataclass(frozen=True, slots=True, init=False)
class Linear(_Value):
    """``attempt`` x ``step``: 30 s, 60 s, 90 s ..., at most ``cap``. No jitter: wrap it in `PlusMinus`."""

    step: float
    cap: float

    def __init__(self, step: Seconds = 30.0, cap: Seconds = 3600.0) -> None:
        self._set(step=_seconds("step", step), cap=_seconds("cap", cap))

    def seconds(self, attempt: int, roll: float) -> float:  # noqa: ARG002
        """See `Delay`."""
        return min(self.cap, attempt * self.step)


@explained_class
@dataclass(frozen=True, slots=True, init=False)
class Exponential(_Value):
    """``base`` x ``factor`` ^ (attempt - 1), at most ``cap``. No jitter: prefer `FullJitter`."""

    base: float
    factor: float
    cap: float

    def __init__(self, base: Seconds = 1.0, factor: float = 2.0, cap: Seconds = 600.0) -> None:
        low, high = _seconds("base", base), _seconds("cap", cap)
        if not (is_number(factor) and factor >= 1):
            raise InvalidInput(f"factor={factor!r} would shrink the delay: use a number of at least 1, such as 2")
        if low > high:
            raise InvalidInput(f"base={low:g} s is longer than cap={high:g} s: raise the cap or lower the base")
        self._set(base=low, factor=float(factor), cap=high)

    def curve(self, attempt: int) -> float:
        """The delay before any jitter."""
        try:
            return min(self.cap, self.base * self.factor ** (max(attempt, 1) - 1))
        except OverflowError:
            return self.cap if self.base else 0.0

    def seconds(self, attempt: int, roll: float) -> float:  # noqa: ARG002
        """See `Delay`."""
        return self.curve(attempt)


@explained_class
@dataclass(frozen=True, slots=True, init=False)
class FullJitter(Exponential):
    """Anything between half the base and the exponential delay, each as likely as any other. The default.

    The floor is the lower end of the range. Were short delays lifted to it instead, half of all first retries would
    come at one moment.
    """

    def seconds(self, attempt: int, roll: float) -> float:
        """See `Delay`."""
        floor = self.base / 2
        return floor + roll * (self.curve(attempt) - floor)


@explained_class
@dataclass(frozen=True, slots=True, init=False)
class EqualJitter(Exponential):
    """Half the exponential delay, and up to as much again."""

    def seconds(self, attempt: int, roll: float) -> float:
        """See `Delay`."""
        return self.curve(attempt) * (1 + roll) / 2


@explained_class
@dataclass(frozen=True, slots=True, init=False)
class Decorrelated(_Value):
    """Between ``base`` and three times the delay before, at most ``cap``: jitter that does not follow the attempts.

    A job's row keeps none of its delays, and its times do not show them (a provider's wait, a closed gate, a slow
    worker and a run by hand are in them too). So the chain of earlier delays is rolled anew each time: each delay has
    the same distribution as if the chain were kept, but does not depend on the delay that came before.
    """

    base: float
    cap: float

    def __init__(self, base: Seconds = 1.0, cap: Seconds = 600.0) -> None:
        low, high = _seconds("base", base), _seconds("cap", cap)
        if low > high:
            raise InvalidInput(f"base={low:g} s is longer than cap={high:g} s: raise the cap or lower the base")
        self._set(base=low, cap=high)

    def seconds(self, attempt: int, roll: float) -> float:
        """See `Delay`."""
        delay = self.base
        for step in range(1, min(attempt, _MOST_STEPS)):
            delay = self.base + _rolled(roll, step) * (self._high(delay) - self.base)
        return self.base + roll * (self._high(delay) - self.base)

    def _high(self, previous: float) -> float:
        return max(self.base, min(self.cap, 3 * previous))


@explained_class
@dataclass(frozen=True, slots=True, init=False)
class PlusMinus:
    """Another strategy's delay, give or take ``ratio`` of it (+-20 %)."""

    of: Delay
    ratio: float

    def __init__(self, of: DelayLike | None = None, ratio: float = 0.2) -> None:
        if not (is_number(ratio) and 0 <= ratio <= 1):
            raise InvalidInput(f"ratio={ratio!r} is not a share: use a number from 0 to 1, such as 0.2 for +-20 %")
        object.__setattr__(self, "of", Exponential() if of is None else as_delay(of))
        object.__setattr__(self, "ratio", float(ratio))

    def seconds(self, attempt: int, roll: float) -> float:
        """See `Delay`."""
        return self.of.seconds(attempt, roll) * (1 - self.ratio + 2 * self.ratio * roll)


@dataclass(frozen=True, slots=True)
class Custom:
    """A function of the attempt (from 1) to seconds or a timedelta."""

    function: Callable[[int], Any]

    def seconds(self, attempt: int, roll: float) -> float:  # noqa: ARG002
        """See `Delay`. Raises `InvalidInput` if the function returns no delay."""
        return _returned(self.function(attempt), self.function)


@dataclass(frozen=True, slots=True)
class Tenacity:
    """One of tenacity's ``wait_*`` objects. Its retry state's exception is a `JobFailure`."""

    wait: Callable[[Any], Any]

    def seconds(self, attempt: int, roll: float) -> float:  # noqa: ARG002
        """See `Delay`. Raises `InvalidInput` if it returns no delay."""
        return self.after(attempt, None)

    def after(self, attempt: int, failure: Failure | None) -> float:
        """The delay after this failure."""
        error = JobFailure("failed", failure=failure or Failure(FailureKind.TRANSIENT))
        outcome = SimpleNamespace(exception=lambda: error, failed=True, attempt_number=attempt)
        state = SimpleNamespace(
            attempt_number=attempt, outcome=outcome, idle_for=0.0, seconds_since_start=None,
            upcoming_sleep=0.0, next_action=None, start_time=0.0, outcome_timestamp=None, fn=None, args=(),
            kwargs={}, retry_object=None,
        )  # fmt: skip
        return _returned(self.wait(state), self.wait)


def as_delay(value: DelayLike) -> Delay:
    """A strategy from a number of seconds, a timedelta, a function, a tenacity wait, or a strategy.

    Raises `InvalidInput` for anything else.
    """
    if isinstance(value, (int, float, timedelta)) and not isinstance(value, bool):
        return Fixed(value)
    if isinstance(value, type):
        raise InvalidInput(f"delay={value.__name__} is a class: write {value.__name__}()")
    if any(cls.__module__.partition(".")[0] == "tenacity" for cls in type(value).__mro__) and callable(value):
        return Tenacity(value)
    if isinstance(value, Delay):
        return value
    if callable(value):
        return Custom(value)
    raise InvalidInput(
        f"delay={value!r} is no delay: use seconds, a timedelta, a strategy such as FullJitter(base=1), "
        "a function of the attempt, or one of tenacity's waits",
    )


def _rolled(roll: float, step: int) -> float:
    """Another roll of the dice, in [0, 1), computed from ``roll``: one for each ``step``."""
    digest = blake2b(f"{roll!r} {step}".encode(), digest_size=7).digest()
    return (int.from_bytes(digest) >> 3) / 2.0**53


def _seconds(name: str, value: Seconds) -> float:
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if not (is_number(value) and value >= 0):
        raise InvalidInput(f"{name}={value!r} is no delay: use seconds from 0 on, or a timedelta")
    return float(value)


def _returned(value: Any, function: object) -> float:
    """A delay out of a user's function, at most `LONGEST`."""
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        name = getattr(function, "__qualname__", type(function).__qualname__)
        raise InvalidInput(f"delay function {name} returned {value!r}: return seconds from 0 on, or a timedelta")
    return float(min(value, LONGEST))


# -- backoff ----------------------------------------------------------------------------------------------------------

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
        for own_kind, rule in self.by_kind:
            if own_kind is kind:
                return rule
        return self

    def limit(self, kind: FailureKind, of_job: int | None) -> int | None:
        """After how many attempts a job is given up; None for never.

        ``of_job`` is the number in the job's row. If it is this policy's, the number of the kind's rule counts instead;
        if the job has a number of its own, the rule's number can only lower it.
        """
        own = self.rule(kind).max_attempts
        if of_job == self.max_attempts:
            return own
        return own if of_job is None else of_job if own is None else min(own, of_job)

    def seconds(self, kind: FailureKind, attempt: int, roll: float, failure: Failure | None = None) -> float:
        """Seconds to wait after ``attempt`` (from 1) ended in an error of this kind.

        What a user's function raises is not caught. Raises `InvalidInput` if it returns no delay.
        """
        rule = self.rule(kind)
        if isinstance(rule.delay, Tenacity):
            wait = rule.delay.after(attempt, failure)
        else:
            wait = rule.delay.seconds(attempt, roll)
        if kind is FailureKind.CONFLICT and rule is self:  # the policy has no delay for conflicts
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
        kinds = ", ".join(FailureKind)
        raise InvalidInput(f"by_kind names {kind!r}, which is no kind of error: use one of {kinds}") from None


def _count(name: str, value: int) -> int:
    if not is_whole(value):
        hint = " or None for no end" if name == "max_attempts" else ""
        raise InvalidInput(f"{name}={value!r} is no number of times: use an integer of at least 1{hint}")
    return value
