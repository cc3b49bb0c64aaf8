"""What a fake provider lets through: the limits that it declares, and allowances that no answer announces.

`Meter` counts the declared ones exactly, over any window, per resource and limit. An `Allowance` stands for a provider
that counts in a way of its own: ``ask(now)`` is None if the request may pass, else a `Wait`. ``scale`` makes every
window shorter by that factor, so that an hour is a minute with ``scale=60``. Times are seconds of any clock that only
goes on.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from resilient.core.base.resource_key import path
from resilient.core.gates.policy import Policies
from resilient.testing.fake.answers import spell

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from resilient.core.base.budgets import BudgetFields
    from resilient.core.gates.rate_limit import Limit
    from resilient.core.provider.facts import Provider


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

    def remaining(self) -> float:
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
        windows = self._of(key, now)
        waits = [(window.wait(cost, now), level, window) for level, window in windows]
        worst = max(waits, key=lambda one: one[0], default=None)
        refused = Refused(worst[1], worst[2].limit, worst[0]) if worst is not None and worst[0] > 0 else None
        if refused is None or self._refused_count:
            for _, window in windows:
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
                named = [min(windows, key=lambda one: one.remaining() / one.size)]
            if named:
                made |= _written(fields, named[0], at, spent=spent)
        return made

    def _of(self, key: str, now: float) -> list[tuple[str, Window]]:
        windows = []
        for level in path(key):
            for limit in self._policies.for_key(level).request_limits:
                window = self._windows.setdefault((level, limit.name), Window(limit))
                window.look(now)
                windows.append((level, window))
        return windows


def _own(fields: Sequence[BudgetFields]) -> bool:
    """Whether the provider documents fields of its own, rather than the usual names."""
    return bool(fields) and any(f.name not in ("ratelimit", "x-ratelimit", "x-rate-limit") for f in fields)


def _written(fields: BudgetFields, window: Window, at: datetime, *, spent: bool) -> Mapping[str, Any]:
    size, rest = int(window.size), 0 if spent else int(window.remaining())
    seconds = window.full_in(at.timestamp())
    made = {}
    if fields.limit:
        made[fields.limit] = str(size)
    if fields.remaining:
        made[fields.remaining] = str(rest)
    if fields.reset:
        made[fields.reset] = spell(fields.word, min(seconds, _FAR), at)
    if fields.used:
        made[fields.used] = f"{size - rest}/{size}"
    if fields.combined:
        made[fields.combined] = f"total={size}; remaining={rest}; resets={spell(fields.word, seconds, at)}"
    if fields.named_by:
        made[fields.named_by] = window.limit.name
    return made


Hint = Literal["seconds", "exact", "none"]


@dataclass(frozen=True, slots=True)
class Wait:
    """A refusal: what Retry-After says, if anything."""

    seconds: float | None


class Allowance(Protocol):
    """What a provider lets through."""

    def ask(self, now: float) -> Wait | None:
        """Count a request, or refuse it."""

    def leave(self, now: float) -> None:
        """A request that passed is over."""

    def remaining(self, now: float) -> tuple[int, int, float] | None:
        """Limit, what remains, and when it is full again, if the provider tells."""

    def total(self, seconds: float) -> float:
        """How many requests pass in so long a time from the start, at most."""


class _Counted:
    """What most have in common: a way to say how long."""

    hint: Hint = "seconds"

    def refusal(self, wait: float) -> Wait:
        if self.hint == "none":
            return Wait(None)
        return Wait(float(max(1, math.ceil(wait - 1e-9))) if self.hint == "seconds" else max(wait, 0.001))

    def leave(self, now: float) -> None:
        """Requests in flight are not counted."""

    def remaining(self, now: float) -> tuple[int, int, float] | None:  # noqa: ARG002 - of the protocol
        """Answers announce nothing."""
        return None


class Sliding(_Counted):
    """At most so many in any ``window`` seconds; ``plan`` says from when on how many: ``[(0, 20), (60, 5)]``."""

    def __init__(
        self, plan: int | list[tuple[float, int]], window: float = 1.0, *, hint: Hint = "seconds", scale: float = 1.0
    ) -> None:
        steps = [(0.0, plan)] if isinstance(plan, int) else plan
        self.plan = [(at / scale, number) for at, number in steps]
        self.window, self.hint = window / scale, hint
        self._passed: deque[float] = deque()

    def limit(self, now: float) -> int:
        """How many just now."""
        return [number for at, number in self.plan if at <= now][-1]

    def ask(self, now: float) -> Wait | None:
        """Count it, or refuse it."""
        while self._passed and self._passed[0] <= now - self.window:
            self._passed.popleft()
        most = self.limit(now)
        if len(self._passed) < most:
            self._passed.append(now)
            return None
        return self.refusal(self._passed[len(self._passed) - most] + self.window - now)

    def total(self, seconds: float) -> float:
        """See `Allowance`."""
        ends = [at for at, _ in self.plan[1:]] + [seconds]
        spans = zip(self.plan, ends, strict=True)
        return sum(max(0.0, min(end, seconds) - at) * n / self.window for (at, n), end in spans) + self.plan[0][1]


class Bucket(_Counted):
    """A bucket of ``size`` that fills at ``rate`` a second."""

    def __init__(self, size: int, rate: float, *, hint: Hint = "seconds", scale: float = 1.0) -> None:
        self.size, self.rate, self.hint = size, rate * scale, hint
        self._level, self._at = float(size), 0.0

    def ask(self, now: float) -> Wait | None:
        """Count it, or refuse it."""
        self._level, self._at = min(self.size, self._level + (now - self._at) * self.rate), now
        if self._level >= 1:
            self._level -= 1
            return None
        return self.refusal((1 - self._level) / self.rate)

    def total(self, seconds: float) -> float:
        """See `Allowance`."""
        return self.size + self.rate * seconds


class Fixed(_Counted):
    """So many in each window of the clock, which was ``begun`` seconds old at the start; ``tells``: by headers."""

    def __init__(
        self,
        number: int,
        window: float,
        *,
        begun: float = 0.0,
        tells: bool = False,
        hint: Hint = "seconds",
        scale: float = 1.0,
    ) -> None:
        self.number, self.window, self.begun, self.tells = number, window / scale, begun / scale, tells
        self.hint = hint
        self._present, self._count = -1, 0

    def _end(self, now: float) -> float:
        present = math.floor((now + self.begun) / self.window)
        if present != self._present:
            self._present, self._count = present, 0
        return (present + 1) * self.window - self.begun

    def ask(self, now: float) -> Wait | None:
        """Count it, or refuse it."""
        end = self._end(now)
        if self._count < self.number:
            self._count += 1
            return None
        return self.refusal(end - now)

    def remaining(self, now: float) -> tuple[int, int, float] | None:
        """See `Allowance`."""
        end = self._end(now)
        return (self.number, self.number - self._count, end) if self.tells else None

    def total(self, seconds: float) -> float:
        """See `Allowance`."""
        first = math.floor(self.begun / self.window)
        return self.number * (math.floor((seconds + self.begun - 1e-9) / self.window) + 1 - first)


class AtOnce(_Counted):
    """So many requests at the same time; ``each``: seconds that one takes."""

    hint: Hint = "none"

    def __init__(self, number: int, each: float) -> None:
        self.number, self.each, self._busy = number, each, 0

    def ask(self, now: float) -> Wait | None:  # noqa: ARG002 - of the protocol
        """Count it, or refuse it."""
        if self._busy < self.number:
            self._busy += 1
            return None
        return self.refusal(0.0)

    def leave(self, now: float) -> None:  # noqa: ARG002 - of the protocol
        """One less."""
        self._busy -= 1

    def total(self, seconds: float) -> float:
        """See `Allowance`."""
        return self.number / self.each * seconds


class Stray(_Counted):
    """No limit, and one refusal for no reason ``at`` so many seconds; ``rate``: what the caller manages by himself."""

    def __init__(self, at: float, rate: float) -> None:
        self.at: float | None = at
        self.rate = rate

    def ask(self, now: float) -> Wait | None:
        """Let everything pass but one."""
        if self.at is None or now < self.at:
            return None
        self.at = None
        return self.refusal(1.0)

    def total(self, seconds: float) -> float:
        """See `Allowance`."""
        return self.rate * seconds


class Shared(_Counted):
    """Another client uses the same allowance, evenly, at ``rate`` a second."""

    def __init__(self, inner: Sliding | Bucket, rate: float) -> None:
        self.inner, self.rate, self._next = inner, rate, 0.0

    def ask(self, now: float) -> Wait | None:
        """Count it after what the other one sent meanwhile."""
        while self._next <= now:
            self.inner.ask(self._next)
            self._next += 1 / self.rate
        return self.inner.ask(now)

    def total(self, seconds: float) -> float:
        """What the other one leaves."""
        return self.inner.total(seconds) - self.rate * seconds
