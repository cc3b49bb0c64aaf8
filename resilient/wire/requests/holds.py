"""How much memory the bodies of answers take in this process at once, and which account may have more of it.

An answer's first MiB is free: small ones cost nothing here and are never refused. What is more is drawn from one
budget, step by step as it is decoded, and given back when nobody has the answer any more. An account may hold as much
as is left free beside it: the first gets half of the budget at most, the next half of the rest. So no account can use
up what others need; a dozen of one tenant's can, and then large answers of others are refused, and small ones never.

Nobody waits for room: who waits holds a connection and a part of the budget, and two such would wait for each other.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from typing import Final

FREE: Final = 1024 * 1024  # bytes of each answer that nobody counts
STEP: Final = 1024 * 1024  # bytes that are drawn at once


class Holds:
    """What each account holds of one process's budget, in bytes; for all its pools, loops and threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_account: Counter[str] = Counter()
        self._total = 0
        self._returns: deque[tuple[str, int]] = deque()

    def draw(self, account: str, count: int, most: int) -> bool:
        """Take ``count`` bytes of a budget of ``most``; False, and none is taken, if the account may not have them."""
        with self._lock:
            self._settle()
            if self._by_account[account] + count > most - self._total - count:
                return False
            self._by_account[account] += count
            self._total += count
            return True

    def give_back(self, account: str, count: int) -> None:
        """Give ``count`` bytes back. The collector calls it too, within any line of any thread, so it takes no lock."""
        self._returns.append((account, count))

    def total(self) -> int:
        """The bytes that are held."""
        with self._lock:
            self._settle()
            return self._total

    def _settle(self) -> None:
        while self._returns:
            account, count = self._returns.popleft()
            self._total -= count
            self._by_account[account] -= count
            if not self._by_account[account]:
                del self._by_account[account]


HOLDS: Final = Holds()


class Hold:
    """What one answer holds beyond its free part; it ends with its last reference. ``account``: a resource key."""

    __slots__ = ("_account", "_count", "_most")

    def __init__(self, account: str, most: int) -> None:
        self._account, self._most, self._count = account, most, 0

    def grow(self, count: int) -> bool:
        """Take ``count`` bytes more; False if there is no room for them."""
        if not HOLDS.draw(self._account, count, self._most):
            return False
        self._count += count
        return True

    def __del__(self) -> None:
        if self._count:
            HOLDS.give_back(self._account, self._count)

    def explanation(self, remedies: str) -> str:
        """Why there is no room; ``remedies``: what to do about it."""
        return (
            f"no room for the answer's body: of the {self._most:,} bytes that this process has for large ones,"
            f" {self._account} holds as much as is left free: {remedies}"
        )
