"""How many handlers that do not end a worker bears: altogether, and of one resource key."""

from __future__ import annotations

from typing import Final

LEAST_STUCK: Final = 16  # handlers that may be stuck and replaced, also in a worker of few slots


def share_of_key(most_stuck: int) -> int:
    """With how many stuck handlers of one resource key a worker runs nothing more of it."""
    return max(1, most_stuck // 4)
