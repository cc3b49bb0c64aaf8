"""Which declared limit a server's budget belongs to, and what follows from it.

A budget belongs to the limit of the same name, else of the same size, else to the only one there is for the
only thing it could mean. A limit that all accounts of a provider share is lowered only by a budget of its name, which
is the facts' word, and never by a host that an account chose: what is told to one account binds that account. A budget
that no limit was declared for cannot be drawn; when it is spent, requests would only be refused, so the resource rests
until its reset. Resets are believed as far as `bounds.believed_wait` says.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from resilient.core.bounds import believed_wait
from resilient.core.resource_key import depth
from resilient.core.tenancy import Tenancy
from resilient.store.limits import Seen

if TYPE_CHECKING:
    from datetime import datetime

    from resilient.core.budgets import Budget
    from resilient.core.limit import Limit
    from resilient.engine.drawing import Path


@dataclass(frozen=True, slots=True)
class Reach:
    """The limits on a request's path, and which of them its answer may speak about.

    ``own`` are those of its account and below: what an unnamed budget may mean. ``named`` may be lowered by a budget
    of their name.
    """

    own: Path
    named: Path

    @classmethod
    def of(cls, declared: Path, key: str, tenancy: Tenancy = Tenancy.SHARED) -> Reach:
        """The limits on the path of ``key``; a root's own requests speak about the root."""
        own = declared if depth(key) == 1 else tuple(one for one in declared if depth(one[0]) > 1)
        return cls(own, own if tenancy is Tenancy.APART else declared)


def told_of(budget: Budget, reach: Reach, sent_at: datetime, now: datetime) -> Seen | None:
    """What the budget says about a declared limit; None if it says nothing, or nothing that slows us."""
    found = _owner(budget, reach)
    if found is None or budget.remaining is None or budget.reset_at is None:
        return None
    key, limit = found
    left = believed_wait((budget.reset_at - now).total_seconds(), limit.per)
    if left <= 0 or (budget.remaining > limit.capacity and left <= budget.remaining * limit.interval):
        return None
    return Seen(key, limit, budget.remaining, now.timestamp() + left, sent_at.timestamp())


def spent(budget: Budget, reach: Reach, now: datetime) -> datetime | None:
    """When an undeclared budget that is used up is full again; None if there is nothing to wait for."""
    if budget.unit != "requests" or budget.remaining is None or budget.remaining > 0 or budget.reset_at is None:
        return None
    if budget.reset_at <= now or _owner(budget, reach) is not None:
        return None
    return now + timedelta(seconds=believed_wait((budget.reset_at - now).total_seconds()))


def _owner(budget: Budget, reach: Reach) -> tuple[str, Limit] | None:
    if budget.unit != "requests":
        return None
    for key, limit in reach.named:
        if limit.name == budget.name:
            return key, limit
    same = [(key, limit) for key, limit in reach.own if budget.limit is not None and limit.rate == budget.limit]
    if not same and budget.limit is None and len(reach.own) == 1:
        same = list(reach.own)
    return same[0] if same else None
