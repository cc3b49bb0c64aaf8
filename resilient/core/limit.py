"""One rate limit, as declared.

``Limit(100, per=60)`` keeps a promise about the provider's count: never more than 100 in *any* 60 seconds,
wherever its window begins. A bucket as large as the rate would let 200 through in the first minute. So such a limit
paces: a tenth of the rate may go at once, one if that is less, and the rest follows evenly. ``Limit(10, per="1m")``
lets one request through every 6 seconds.

What is counted is the moment a request is written to its socket, because that is when it is on its way to the provider.
It may be later than the draw by what a worker may hold in advance (`lease`) and by `ROAD`; a request that is late by
more draws again (`engine/drawing.py`). Both come off the rate, which is felt where the window is short: of 10 a second
9.1 are used, of 100 a minute 99.8.

``burst=`` says that the provider itself has a bucket: that many at once, refilled at the full rate. It is kept to at
the draw; at the socket it may be exceeded by what the rate gives in `lease` and `ROAD` together.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from datetime import timedelta
from math import isfinite
from typing import Any, Final, Literal

from resilient.core.errors import InvalidInput
from resilient.core.misfit import explained_class

Counts = Literal["requests", "jobs"]
LONGEST_LEASE: Final = 0.1  # seconds of a limit's rate that a worker may hold in advance
ROAD: Final = 0.08  # seconds from the draw to the socket that are allowed for
_LEASE: Final = 0.02  # share of the window a lease may last
_NAME: Final = re.compile(r"[A-Za-z0-9._:@+/-]{1,64}")
_SPAN: Final = re.compile(r"([0-9]*\.?[0-9]*)\s*([a-z]+)")
_UNITS: Final = {
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86400.0),
}


def seconds(span: float | str | timedelta) -> float:
    """A span as seconds: a number, a timedelta, or text such as ``"15m"``, ``"min"`` or ``"1h"``."""
    if isinstance(span, timedelta):
        value = span.total_seconds()
    elif isinstance(span, str):
        found = _SPAN.fullmatch(span.strip().lower())
        if not found or found[2] not in _UNITS or found[1] == ".":
            raise InvalidInput(
                f"{span!r} is not a span of time: write seconds, or text such as '90s', '15m', '1h', '1d'"
            )
        value = float(found[1] or 1) * _UNITS[found[2]]
    else:
        value = float(span)
    if not isfinite(value) or value <= 0:
        raise InvalidInput(f"a span of time must be positive, not {span!r}")
    return value


@explained_class
@dataclass(frozen=True, slots=True, init=False)
class Limit:
    """At most ``rate`` units in any ``per`` seconds, or with ``burst`` a bucket of that many at once.

    ``per`` takes seconds, a timedelta or text such as ``"1m"``. ``name``: as the provider's headers call it, so that
    what they report is applied to it. ``counts`` says of what: requests are drawn
    when they are sent, jobs when they are claimed. Raises `InvalidInput`.
    """

    rate: float
    per: float
    burst: float | None
    name: str
    counts: Counts
    interval: float = field(repr=False, compare=False)  # seconds for one unit to come back
    capacity: float = field(repr=False, compare=False)  # units at once

    def __init__(
        self,
        rate: float,
        per: float | str | timedelta,
        *,
        burst: float | None = None,
        name: str = "",
        counts: Counts = "requests",
    ) -> None:
        span = seconds(per)
        for word, number in (("rate", rate), ("burst", 1 if burst is None else burst)):
            if isinstance(number, bool) or not isinstance(number, (int, float)):
                raise InvalidInput(f"Limit({word}={number!r}): write a number, such as Limit(100, per='1m', burst=20)")
        if not isfinite(rate) or rate <= 0 or (burst is not None and not (isfinite(burst) and burst >= 1)):
            raise InvalidInput(
                f"Limit({rate!r}, per={per!r}, burst={burst!r}): rate must be positive, burst at least 1"
            )
        if counts not in ("requests", "jobs"):
            raise InvalidInput(f"a limit counts 'requests' or 'jobs', not {counts!r}")
        name = name or f"{rate:.12g}/{span:.12g}s"
        if not _NAME.fullmatch(name):
            raise InvalidInput(f"{name!r} cannot name a limit: use at most 64 letters, digits and ._:@+/-")
        if burst is not None:
            interval, capacity = span / rate, float(burst)
        elif rate >= 1:
            capacity = max(1.0, rate / 10)
            interval = (span + _lease(span) + ROAD) / (rate - capacity + 1)
        else:  # less than one per span: one per longer span
            capacity, interval = 1.0, (span + _lease(span) + ROAD) / rate
        values = (float(rate), span, burst, name, counts, interval, capacity)
        for item, value in zip(fields(self), values, strict=True):
            object.__setattr__(self, item.name, value)

    @property
    def lease(self) -> float:
        """How many seconds of the rate a worker may draw in advance."""
        return _lease(self.per)

    @classmethod
    def parse(cls, text: str, *, counts: Counts = "requests", name: str = "") -> Limit:
        """Read ``"100/min"``, ``"5000/1h"``, ``"10/s"`` or ``"2/s burst 40"``."""
        head, _, burst = text.partition(" burst ")
        rate, slash, per = head.partition("/")
        try:
            if not slash:
                raise ValueError  # noqa: TRY301 - one message for everything malformed
            return cls(float(rate), per, burst=float(burst) if burst else None, counts=counts, name=name)
        except ValueError as error:
            if isinstance(error, InvalidInput):
                raise
            raise InvalidInput(f"{text!r} is not a limit: write '100/min', '5000/1h' or '2/s burst 40'") from None

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads."""
        found = {
            "rate": self.rate,
            "per": self.per,
            "burst": self.burst,
            "name": self.name,
            "counts": self.counts,
        }
        return {key: value for key, value in found.items() if value is not None}

    @classmethod
    def from_json(cls, doc: Any) -> Limit:
        """Read what `to_json` wrote, or the text of `parse`."""
        if isinstance(doc, str):
            return cls.parse(doc)
        try:
            return cls(**doc)
        except TypeError:
            raise InvalidInput(f"{doc!r} is not a limit: give rate, per and perhaps burst, name, counts") from None


def _lease(span: float) -> float:
    return min(LONGEST_LEASE, span * _LEASE)
