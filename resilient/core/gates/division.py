"""A provider's limits, divided among shards: each database counts for itself, and together they stay below.

Only what holds for a whole provider is divided, so what stands at a root (``github``). An account (``github/*``) lives
in one shard, with all of its limits, and so does what a token endpoint of its own allows.
"""

from __future__ import annotations

from math import floor
from typing import TYPE_CHECKING, Any, Final

from resilient.core.base.errors import SetupError
from resilient.core.gates.rate_limit import Limit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_SLACK: Final = 1e-9  # of sums and products of shares


def is_shared(pattern: str) -> bool:
    """Whether what a pattern matches is met by several shards."""
    return "/" not in pattern and ":token@" not in pattern


def check_shares(shares: Mapping[str, float | None], shared: Sequence[str]) -> dict[str, float]:
    """The share of each shard. ``shared``: patterns of limits and caps to divide. Raises `SetupError`."""
    declared = {name: share for name, share in shares.items() if share is not None}
    if not declared and (len(shares) == 1 or not shared):
        return dict.fromkeys(shares, 1.0)
    if missing := [name for name in shares if name not in declared]:
        why = f": {shared[0]!r} has a limit or cap for all accounts together" if shared else ""
        raise SetupError(f"shard {missing[0]!r} has no share{why}; declare each one's, Shard(url, share=0.5)")
    for name, share in declared.items():
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise SetupError(f"shard {name!r}: share={share!r} is a part of 1, above 0")
    if (total := sum(declared.values())) > 1 + _SLACK:
        raise SetupError(f"the shares of the shards are {total:g} together: at most 1, or they exceed every limit")
    return declared


def divided(limits: Mapping[str, Sequence[Limit]], share: float, shard: str) -> dict[str, Sequence[Limit]]:
    """The limits of one shard. Raises `SetupError` for one of which less than a request would be left."""
    return {
        pattern: [_part(limit, share, f"{pattern!r} in shard {shard!r}") for limit in many]
        if is_shared(pattern)
        else many
        for pattern, many in limits.items()
    }


def divided_caps(caps: Mapping[str, int], share: float, shard: str) -> dict[str, int]:
    """The concurrency caps of one shard. Raises `SetupError` for one of which no job would be left."""
    parts = {}
    for pattern, cap in caps.items():
        parts[pattern] = floor(cap * share + _SLACK) if is_shared(pattern) else cap
        if parts[pattern] < 1:
            raise SetupError(f"{share:g} of the cap of {pattern!r}, {cap}, leaves shard {shard!r} no job at once")
    return parts


def bounded(learning: Mapping[str, Any]) -> list[str]:
    """The patterns under which what is learnt has bounds, in requests a second."""
    return [pattern for pattern, word in learning.items() if isinstance(word, tuple)]


def divided_learning(learning: Mapping[str, Any], share: float) -> dict[str, Any]:
    """What one shard may learn: its share of the bounds that hold for a whole provider."""
    patterns = {pattern for pattern in bounded(learning) if is_shared(pattern)}
    return {
        pattern: tuple(bound * share for bound in word) if pattern in patterns and share < 1 else word
        for pattern, word in learning.items()
    }


def _part(limit: Limit, share: float, where: str) -> Limit:
    rate, burst = limit.rate * share, None if limit.burst is None else limit.burst * share
    if min(rate, rate if burst is None else burst) < 1 - _SLACK and share < 1:
        raise SetupError(
            f"{share:g} of the limit {limit.name} of {where} is less than one request: shards count apart, so each"
            " would send that one; give it a larger share, or a longer span (120 per 2 minutes instead of 1 a second)"
        )
    if share == 1:
        return limit
    return Limit(
        rate, limit.per, burst=None if burst is None else max(1.0, burst), name=limit.name, counts=limit.counts
    )
