"""The provider's own count of what it lets through: exact, over any window, per resource and limit."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from resilient.core.policy import Policies
from resilient.core.resource_key import path
from resilient.testing.fake.shapes import said

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from resilient.core.budgets import BudgetFields
    from resilient.core.limit import Limit
    from resilient.core.provider import Provider

_FAR = 1e9


@dataclass(slots=True)
class Window:
    """What one limit of one resource let through lately. Times are epoch seconds."""

    limit: Limit
    drawn: deque[tuple[float, float]] = field(default_factory=deque)
    total: float = 0.0

    @property
    def size(self) -> float:
        """How much fits in."""
        return self.limit.rate if self.limit.burst is None else self.limit.burst

    @property
    def span(self) -> float:
        """Seconds until a drawn unit is forgotten; with a bucket: all of them at once, at its rate."""
        return self.limit.per

    def look(self, now: float) -> None:
        """Forget what is over."""
        if self.limit.burst is not None:
            if self.drawn:
                since, _ = self.drawn.pop()
                self.total = max(0.0, self.total - (now - since) * self.limit.rate / self.limit.per)
                self.drawn.clear()
            self.drawn.append((now, 0.0))
            return
        while self.drawn and self.drawn[0][0] <= now - self.span:
            self.total -= self.drawn.popleft()[1]
        if not self.drawn:
            self.total = 0.0

    def wait(self, cost: float, now: float) -> float:
        """Seconds until ``cost`` fits; 0 if it does."""
        lacking = self.total + min(cost, self.size) - self.size
        if lacking <= 1e-9:  # noqa: PLR2004 - rounding
            return 0.0
        if self.limit.burst is not None:
            return lacking * self.limit.per / self.limit.rate
        for at, drawn in self.drawn:
            lacking -= drawn
            if lacking <= 1e-9:  # noqa: PLR2004 - rounding
                return max(0.001, at + self.span - now)
        return self.span

    def draw(self, cost: float, now: float) -> None:
        """Take it."""
        self.total += cost
        if self.limit.burst is None:
            self.drawn.append((now, cost))

    def left(self) -> float:
        """What still fits in."""
        return max(0.0, self.size - self.total)

    def full_in(self, now: float) -> float:
        """Seconds until nothing of it is used."""
        if self.limit.burst is not None:
            return self.total * self.limit.per / self.limit.rate
        return self.drawn[-1][0] + self.span - now if self.drawn else 0.0


class Refused(NamedTuple):
    """A limit that a request broke: of which resource, and seconds until it would fit."""

    key: str
    limit: Limit
    wait: float


class Meter:
    """Counts by the provider's declared limits; ``refused_count``: whether refused requests draw too."""

    def __init__(self, provider: Provider, *, refused_count: bool = False) -> None:
        self._policies = Policies(provider.limit_patterns(), provider.concurrency_patterns())
        self._fields = provider.waits.budgets
        self._refused_count = refused_count
        self._windows: dict[tuple[str, str], Window] = {}
        self.in_flight: dict[str, int] = {}

    def draw(self, key: str, cost: float, at: datetime) -> Refused | None:
        """Take ``cost`` of every limit on the path of ``key``, or of none."""
        now = at.timestamp()
        found = self._of(key, now)
        waits = [(window.wait(cost, now), level, window) for level, window in found]
        worst = max(waits, key=lambda one: one[0], default=None)
        refused = Refused(worst[1], worst[2].limit, worst[0]) if worst is not None and worst[0] > 0 else None
        if refused is None or self._refused_count:
            for _, window in found:
                window.draw(cost, now)
        return refused

    def crowded(self, key: str) -> str | None:
        """The resource on the path that has as many requests in flight as it takes."""
        for level in path(key):
            cap = self._policies.for_key(level).concurrency
            if cap is not None and self.in_flight.get(level, 0) >= cap:
                return level
        return None

    def enter(self, key: str, by: int = 1) -> None:
        """A request begins (or ends, with -1)."""
        for level in path(key):
            self.in_flight[level] = self.in_flight.get(level, 0) + by

    def headers(self, key: str, at: datetime, *, spent: bool = False) -> dict[str, str]:
        """What the provider says about its budgets, in its own fields. ``spent``: that nothing is left."""
        windows = [window for _, window in self._of(key, at.timestamp())]
        if not windows or not _own(self._fields):
            return {}
        made: dict[str, str] = {}
        for fields in self._fields:
            own = key.rpartition("/")[2] if fields.named_by else fields.name
            named = [one for one in windows if one.limit.name == own]
            named = named or [one for one in windows if one.limit.name == fields.name]
            if not named and len(self._fields) == 1:
                named = [min(windows, key=lambda one: one.left() / one.size)]
            if named:
                made |= _written(fields, named[0], at, spent=spent)
        return made

    def _of(self, key: str, now: float) -> list[tuple[str, Window]]:
        found = []
        for level in path(key):
            for limit in self._policies.for_key(level).request_limits:
                window = self._windows.setdefault((level, limit.name), Window(limit))
                window.look(now)
                found.append((level, window))
        return found


def _own(fields: Sequence[BudgetFields]) -> bool:
    """Whether the provider's page names its fields, rather than nobody knowing."""
    return bool(fields) and any(f.name not in ("ratelimit", "x-ratelimit", "x-rate-limit") for f in fields)


def _written(fields: BudgetFields, window: Window, at: datetime, *, spent: bool) -> Mapping[str, Any]:
    size, left = int(window.size), 0 if spent else int(window.left())
    seconds = window.full_in(at.timestamp())
    made = {}
    if fields.limit:
        made[fields.limit] = str(size)
    if fields.remaining:
        made[fields.remaining] = str(left)
    if fields.reset:
        made[fields.reset] = said(fields.word, min(seconds, _FAR), at)
    if fields.used:
        made[fields.used] = f"{size - left}/{size}"
    if fields.combined:
        made[fields.combined] = f"total={size}; remaining={left}; resets={said(fields.word, seconds, at)}"
    if fields.named_by:
        made[fields.named_by] = window.limit.name
    return made
