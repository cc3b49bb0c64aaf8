"""How much memory the bodies of answers take in this process at once, and which account may take more of it.

The first MiB of an answer is free, so a small answer is never refused. The bytes beyond it are drawn from one budget,
step by step as they are decoded, and are given back when the last reference to the answer is gone. An account may hold
at most as much as stays free: the first account gets half of the budget, the second half of the rest. So no single
account can use the budget up. A dozen accounts of one tenant can; then large answers of other tenants are refused.

No request waits for room: it would keep its connection and its part of the budget, and two could wait for each other.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from typing import Final

FREE: Final = 1024 * 1024  # bytes of each answer that are not counted
STEP: Final = 1024 * 1024  # bytes of one draw


class BodyBudget:
    """The bytes that each account holds of one process's budget, over all pools, event loops and threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_account: Counter[str] = Counter()
        self._total = 0
        self._returns: deque[tuple[str, int]] = deque()

    def draw(self, account: str, count: int, most: int) -> bool:
        """Take ``count`` bytes of a budget of ``most`` bytes; False if the account may not have them: it gets none."""
        with self._lock:
            self._settle()
            if self._by_account[account] + count > most - self._total - count:
                return False
            self._by_account[account] += count
            self._total += count
            return True

    def give_back(self, account: str, count: int) -> None:
        """Give ``count`` bytes back. The garbage collector may call it anywhere in any thread, so it takes no lock."""
        self._returns.append((account, count))

    def total(self) -> int:
        """The bytes that all accounts hold together."""
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


BODY_BUDGET: Final = BodyBudget()


class Reservation:
    """The bytes that one answer holds beyond its free part, until its last reference is gone.

    ``account``: its resource key; ``most``: the budget of the process, in bytes.
    """

    __slots__ = ("_account", "_count", "_most")

    def __init__(self, account: str, most: int) -> None:
        self._account, self._most, self._count = account, most, 0

    def grow(self, count: int) -> bool:
        """Take ``count`` more bytes; False if there is no room for them."""
        if not BODY_BUDGET.draw(self._account, count, self._most):
            return False
        self._count += count
        return True

    def __del__(self) -> None:
        if self._count:
            BODY_BUDGET.give_back(self._account, self._count)

    def explanation(self, remedies: str) -> str:
        """Why there is no room; ``remedies``: what to do about it."""
        return (
            f"no room for the answer's body: of the {self._most:,} bytes that this process has for large ones,"
            f" {self._account} holds as much as is left free: {remedies}"
        )
