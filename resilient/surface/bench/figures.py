"""Small arithmetic every bench prints with."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def percentile(values: Sequence[float], share: float) -> float:
    """The value that a ``share`` (0 to 1) of ``values`` does not exceed: always a measured one."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(share * len(ranked)) - 1)]


def milliseconds(values: Sequence[float], prefix: str = "") -> dict[str, float]:
    """Median and 99th percentile of ``values`` (seconds), in milliseconds."""
    return {f"{prefix}p50_ms": _ms(percentile(values, 0.5)), f"{prefix}p99_ms": _ms(percentile(values, 0.99))}


def rate(count: int, seconds: float) -> float:
    """Things per second, to a tenth."""
    return round(count / seconds, 1)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
