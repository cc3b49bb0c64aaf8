"""How long finished jobs, old history and unused rows are kept; how many of them pruning deleted."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, Final, TypeAlias

from resilient.core.base.errors import InvalidInput
from resilient.core.base.misfit import explained_class, is_whole
from resilient.core.gates.rate_limit import seconds
from resilient.core.jobs.records import fields_of

Span: TypeAlias = "str | float | timedelta"
_LARGEST_BATCH: Final = 10_000
_LONGEST: Final = timedelta(days=365_000)


@explained_class
@dataclass(frozen=True, slots=True)
class Retention:
    """How long finished jobs, old history and idle resources are kept.

    Spans are seconds, timedeltas or text such as ``"7d"``; None keeps for ever. Jobs count from when they finished,
    and their history goes with them. ``events``: published events of the outbox, which can be replayed for so long; by
    default ("succeeded") they are kept as long as other succeeded jobs. ``attempts`` is for the history of jobs that go
    on for ever, ``resources`` for resources nobody used (and for resolved alerts and schedules that are no longer
    declared), ``inbox`` for the notes of handled messages: a duplicate that comes later than that is handled again.
    ``batch`` is how many rows one transaction deletes. Raises `InvalidInput`.
    """

    succeeded: Span | None = "7d"
    events: Span | None = "succeeded"
    dead: Span | None = "90d"
    cancelled: Span | None = "7d"
    attempts: Span | None = "180d"
    resources: Span | None = "30d"
    inbox: Span | None = "30d"
    batch: int = 1_000

    def __post_init__(self) -> None:
        if self.events == "succeeded":
            object.__setattr__(self, "events", self.succeeded)
        for name in SPANS:
            object.__setattr__(self, name, span(name, getattr(self, name)))
        if not is_whole(self.batch, most=_LARGEST_BATCH):
            raise InvalidInput(f"Retention(batch={self.batch!r}): delete 1 to {_LARGEST_BATCH:,} rows at a time")

    @property
    def events_apart(self) -> bool:
        """Whether published events are kept for another time than other succeeded jobs."""
        return self.events != self.succeeded

    def age(self, name: str) -> timedelta | None:
        """The span in one of the fields."""
        value: timedelta | None = getattr(self, name)
        return value


SPANS: Final = tuple(f.name for f in fields(Retention) if f.name != "batch")


def span(name: str, value: Any) -> timedelta | None:
    """A span of time, or None; raises `InvalidInput` with its name."""
    try:
        length = None if value is None else timedelta(seconds=seconds(value))
        if length is None or length <= _LONGEST:
            return length
    except (InvalidInput, TypeError, ValueError, OverflowError):
        raise InvalidInput(f"{name}={value!r} is not a span of time: write '7d', '12h' or 3600, more than 0") from None
    raise InvalidInput(f"{name}={value!r} is longer than {_LONGEST.days:,} days: it would begin before all time")


@dataclass(frozen=True, slots=True)
class Pruned:
    """How many rows were deleted, or with a dry run would be (counted up to a bound)."""

    succeeded: int = 0
    events: int = 0  # 0 if they are kept as long as succeeded jobs: then they count as such
    dead: int = 0
    cancelled: int = 0
    attempts: int = 0
    resources: int = 0
    inbox: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return sum(getattr(self, name) for name in SPANS)

    def to_json(self) -> dict[str, Any]:
        """Every field under its own name."""
        return fields_of(self)
