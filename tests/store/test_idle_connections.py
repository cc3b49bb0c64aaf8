"""Connections that rest are closed without being missed meanwhile."""

import sqlite3
from collections import deque
from functools import partial

from resilient.store.db.pool import IDLE, BudgetPool


class Resting(deque):
    """What rests, and how often something was taken from its old end."""

    taken = 0

    def popleft(self):
        self.taken += 1
        return super().popleft()


def test_what_has_not_rested_long_stays_where_a_transaction_finds_it():
    """Else one that begins at this moment would open another connection, beyond the budget."""
    pool = BudgetPool(partial(sqlite3.connect, ":memory:"))
    pool._resting = Resting([(object(), 100.0)])
    assert not pool.close_one(before=100.0 + 1 - IDLE)
    assert (pool._resting.taken, len(pool._resting)) == (0, 1)
