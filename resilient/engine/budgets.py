"""Which declared limit a server's budget belongs to, and what follows from it.

A budget belongs to the limit of the same name, else of the same size, else to the only one there is for the
only thing it could mean. One that no limit was declared for cannot be drawn; when it is spent, requests would
only be refused, so the resource rests until its reset.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient.store.limits import Seen

if TYPE_CHECKING:
    from datetime import datetime

    from resilient.core.budgets import Budget
    from resilient.core.limit import Limit
    from resilient.engine.drawing import Path


def told_of(budget: Budget, declared: Path, sent_at: datetime, now: datetime) -> Seen | None:
    """What the budget says about a declared limit; None if it says nothing, or nothing that slows us."""
    found = _owner(budget, declared)
    if found is None or budget.remaining is None or budget.reset_at is None:
        return None
    key, limit = found
    left = (budget.reset_at - now).total_seconds()
    if left <= 0 or (budget.remaining > limit.capacity and left <= budget.remaining * limit.interval):
        return None
    return Seen(key, limit, budget.remaining, budget.reset_at.timestamp(), sent_at.timestamp())


def spent(budget: Budget, declared: Path, now: datetime) -> datetime | None:
    """When an undeclared budget that is used up is full again; None if there is nothing to wait for."""
    if budget.unit != "requests" or budget.remaining is None or budget.remaining > 0 or budget.reset_at is None:
        return None
    return None if budget.reset_at <= now or _owner(budget, declared) is not None else budget.reset_at


def _owner(budget: Budget, declared: Path) -> tuple[str, Limit] | None:
    if budget.unit != "requests":
        return None
    for key, limit in declared:
        if limit.name == budget.name:
            return key, limit
    same = [(key, limit) for key, limit in declared if budget.limit is not None and limit.rate == budget.limit]
    if not same and budget.limit is None and len(declared) == 1:
        same = list(declared)
    return same[0] if same else None
