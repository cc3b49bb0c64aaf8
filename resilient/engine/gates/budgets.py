"""Budgets that a provider names: which requests count for which of them, and what is learnt about each.

Many providers count some requests apart: searches, say, beside the rest. Some name in their answers the budget that a
request counted for (`core.base.budgets.counted_for`). When such a request is throttled, that budget rests and learns,
and nothing else of its account. A budget is a resource below its account (`resource_key.of_budget`), so it is drawn
from, written, reported and shown as any other; its row is made with its first throttle.

Before a request is sent nobody says what it will count for. So this process remembers what those before it did: by
method and path (its variable segments left out), else by the path's first segment, where all others of it agree. What
it does not know goes by the account alone; if that is refused, its answer names the budget. Jobs wait in the claim for
a budget if those of their kind have lately counted for it alone.

One name alone is no budget of its own: whatever is asked counts for it, so it is the account's. Of an account `MOST`
budgets may have a lesson at once; one more is its account's again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from resilient.core.base.bounds import believed_wait
from resilient.core.base.resource_key import account, depth, is_budget, of_budget
from resilient.core.gates.policy import Tenancy
from resilient.core.gates.rate_limit import Limit
from resilient.store.gates.limits import Observation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from datetime import datetime

    from resilient.core.base.budgets import Budget
    from resilient.engine.gates.drawing import Limits

MOST: Final = 8  # names of one provider
_ACCOUNT: Final = 2  # segments of an account's key
_SURE: Final = 5  # requests of a kind, one after the other, that counted for the same budget
_SHAPES: Final = 2_000  # of one provider
_GROUPS: Final = 200
_LONGEST: Final = 24  # characters of a segment that is the same for all
_VARIABLE: Final = re.compile(r"[0-9@%]")


def shape(path: str) -> str:
    """A request's path without what differs from one request to the next: ids, names, tokens."""
    parts = path.split("/")
    return "/".join("*" if len(part) > _LONGEST or _VARIABLE.search(part) else part for part in parts)


class _Names:
    """What one provider's answers have named."""

    def __init__(self) -> None:
        self.names: dict[str, bool] = {}  # to whether it is learnt apart
        self.by_shape: dict[tuple[str, str], str] = {}
        self.by_head: dict[tuple[str, str], str | None] = {}  # None: they differ
        self.by_kind: dict[str, tuple[str, int]] = {}
        self.has_another = False  # there are several, although this process has seen one name only

    def count(self, kind: str, name: str) -> None:
        """One more request of a kind counts for a budget."""
        before, streak = self.by_kind.get(kind, (name, 0))
        self.by_kind[kind] = (name, min(streak + 1, _SURE)) if before == name else (name, 1)

    @property
    def has_several(self) -> bool:
        """Whether there is more than one."""
        return self.has_another or len(self.names) > 1


class BudgetNames:
    """What this process knows about the budgets of each provider. Not for threads.

    Of a provider whose accounts have hosts of their own (`Tenancy.APART`) it knows each account's apart: what one host
    says of its budgets binds nobody else's requests.
    """

    def __init__(self, tenancy: Callable[[str], Tenancy] = lambda _key: Tenancy.SHARED) -> None:
        self._tenancy = tenancy
        self.groups: dict[str, _Names] = {}  # by provider or account; empty: no answer has named any

    def _group_key(self, key: str) -> str:
        return account(key) if self._tenancy(key) is Tenancy.APART else key.partition("/")[0]

    def _group_of(self, key: str) -> _Names | None:
        return self.groups.get(self._group_key(key))

    def take_in(self, key: str, kind: str, method: str, path: str, name: str, *, apart: bool = False) -> None:
        """A request of a job of this kind, through ``key``, counted for the budget of this name.

        ``apart``: the provider's facts name another one as the usual.
        """
        group = self._group_of(key)
        if group is None:
            if len(self.groups) >= _GROUPS:
                del self.groups[next(iter(self.groups))]  # the oldest
            group = self.groups[self._group_key(key)] = _Names()
        if name not in group.names:
            if len(group.names) >= 4 * MOST:
                return
            group.names[name] = len(group.names) < MOST
        group.has_another = group.has_another or apart
        pattern = shape(path)
        if len(group.by_shape) >= _SHAPES:
            group.by_shape.clear()
            group.by_head.clear()
        group.by_shape[method, pattern] = name
        head = method, _head(pattern)
        if group.by_head.setdefault(head, name) != name:
            group.by_head[head] = None
        group.count(kind, name)

    def split(self, key: str) -> None:
        """Note that another process learns a budget of this provider apart from its account."""
        if (group := self._group_of(key)) is not None:
            group.has_another = True

    def fold(self, budget: str) -> None:
        """Learn a budget (by its key) as a part of its account from now on."""
        if (group := self._group_of(budget)) is not None:
            group.names.update({name: False for name in group.names if of_budget(account(budget), name) == budget})

    def key_of(self, key: str, name: str) -> str | None:
        """The resource of an account's budget; None if it is the account's own."""
        group = self._group_of(key)
        if group is None or not group.has_several or not group.names.get(name) or depth(key) != _ACCOUNT:
            return None
        return of_budget(key, name)

    def key_for(self, key: str, kind: str, method: str, path: str) -> str:
        """The resource that a request of a job of this kind, through ``key``, will count for, as far as is known."""
        group = self._group_of(key)
        if group is None or not group.has_several:
            return key
        pattern = shape(path)
        name = group.by_shape.get((method, pattern)) or group.by_head.get((method, _head(pattern)))
        if name is None:
            return key
        group.count(kind, name)  # if it is stopped, no answer will say so
        return self.key_of(key, name) or key

    def first_of(self, key: str, kind: str) -> str:
        """The resource that jobs of this kind, of ``key``, lately counted for alone."""
        group = self._group_of(key)
        name, streak = ("", 0) if group is None else group.by_kind.get(kind, ("", 0))
        return (self.key_of(key, name) or key) if streak >= _SURE else key

    def by_account(self, keys: Iterable[str]) -> dict[str, dict[str, str]]:
        """Of the budgets among ``keys`` the kinds whose jobs count for one, with its key, by account."""
        budgets: dict[str, dict[str, str]] = {}
        for key in keys:
            if is_budget(key) and (kinds := self.by_kind(key)):
                budgets.setdefault(account(key), {}).update(dict.fromkeys(kinds, key))
        return budgets

    def by_kind(self, budget: str) -> list[str]:
        """The kinds whose jobs lately counted for this budget alone."""
        group = self._group_of(budget)
        if group is None:
            return []
        owner = account(budget)
        sure = [(kind, name) for kind, (name, streak) in group.by_kind.items() if streak >= _SURE]
        return [kind for kind, name in sure if self.key_of(owner, name) == budget]


def _head(pattern: str) -> str:
    return pattern.strip("/").partition("/")[0]


# -- budgets in answers ------------------------------------------------------------------------------------------------
#
# Which declared limit a server's budget belongs to, and what follows from it.
#
# A budget belongs to the limit of the same name, else of the same size, else to the only one there is for the only
# thing it could mean. A limit that all accounts of a provider share is lowered only by a budget of its name, which is
# the facts' word, and never by a host that an account chose: what is told to one account binds that account. A budget
# that no limit was declared for is noted all the same (`UndeclaredBudgets`), so that no more jobs are claimed than it
# has left; when it is used up, requests would only be refused, so the resource rests until its reset. Resets are
# believed as far as `bounds.believed_wait` says.

MOST_STATED: Final = 8  # budgets of a resource
LOW: Final = 200  # left: what the slots of a few workers use up within a second
_EARLIER: Final = 2.0  # seconds; resets of one window differ by less (rounding, skew)
_STEADY: Final = 2  # answers in a row that state a budget, after which every request is taken to count for it
_MOST_RESOURCES: Final = 20_000  # resources


@dataclass(slots=True)
class _UndeclaredBudget:
    limit: Limit
    until: float  # epoch seconds
    answers: int = 0

    def is_over(self, now: float, until: float) -> bool:
        """Whether its window has ended, or is taken back by an answer that states an earlier end."""
        return now >= self.until or until < self.until - _EARLIER


class UndeclaredBudgets:
    """The budgets that the answers of each resource state and nobody declared, at most `MOST_STATED` of each.

    Where some answers state one and others do not (another one for searches, say), nobody knows before a request what
    it will count for, so that budget limits nothing: give such requests a resource of their own.
    """

    def __init__(self) -> None:
        self.limits: dict[str, tuple[Limit, ...]] = {}  # by resource, those that jobs are held to
        self._by_resource: dict[str, dict[str, _UndeclaredBudget]] = {}

    def take_in(
        self, key: str, stated: Sequence[tuple[Budget, float]], now: float, *, everything: bool = False
    ) -> list[tuple[Limit, Budget]]:
        """One answer's budgets, each with the seconds until its reset; returns those that are nearly used up.

        ``everything``: also the others.
        """
        if len(self._by_resource) >= _MOST_RESOURCES:
            self._by_resource.clear()
            self.limits.clear()
        entries, names = self._by_resource.setdefault(key, {}), {budget.name for budget, _ in stated}
        for name in [name for name in entries if name not in names]:
            entries[name].answers = 0
            if now > entries[name].until + entries[name].limit.per:
                del entries[name]
        near = []
        for budget, seconds in stated:
            one = self._update(entries, budget, seconds, now)
            if one is not None and one.answers >= _STEADY and (everything or (budget.remaining or 0.0) <= LOW):
                near.append((one.limit, budget))
        if near:
            self.limits[key] = tuple(limit for limit, _ in near)
        else:
            self.limits.pop(key, None)
        return near

    def _update(
        self, entries: dict[str, _UndeclaredBudget], budget: Budget, seconds: float, now: float
    ) -> _UndeclaredBudget | None:
        if budget.limit is None or budget.limit < 1 or (budget.name not in entries and len(entries) >= MOST_STATED):
            return None
        per = budget.window or max(1.0, seconds)  # a lower bound: the answer states only what remains of it
        one, until = entries.get(budget.name), now + seconds
        if one is None or one.limit.rate != budget.limit or one.limit.per < per or one.is_over(now, until):
            answers = one.answers if one is not None and one.limit.rate == budget.limit else 0
            one = entries[budget.name] = _UndeclaredBudget(Limit.stated(budget.name, budget.limit, per), now, answers)
        one.until, one.answers = until, one.answers + 1
        return one


@dataclass(frozen=True, slots=True)
class Reach:
    """The limits on a request's path, and which of them its answer may speak about.

    ``own`` are those of its account and below: what an unnamed budget may mean. ``named`` may be lowered by a budget
    of their name.
    """

    own: Limits
    named: Limits

    @classmethod
    def of(cls, declared: Limits, key: str, tenancy: Tenancy = Tenancy.SHARED) -> Reach:
        """The limits on the path of ``key``; a root's own requests speak about the root."""
        own = declared if depth(key) == 1 else tuple(one for one in declared if depth(one[0]) > 1)
        return cls(own, own if tenancy is Tenancy.APART else declared)


def observation_of(budget: Budget, reach: Reach, sent_at: datetime, now: datetime) -> Observation | None:
    """What the budget says about a declared limit; None if it says nothing, or nothing that slows us."""
    owner = _owner(budget, reach)
    if owner is None or budget.remaining is None or budget.reset_at is None:
        return None
    key, limit = owner
    seconds = believed_wait((budget.reset_at - now).total_seconds(), limit.per)
    if seconds <= 0 or (budget.remaining > limit.capacity and seconds <= budget.remaining * limit.interval):
        return None
    return Observation(key, limit, budget.remaining, now.timestamp() + seconds, sent_at.timestamp())


def refill_wait(budget: Budget, reach: Reach, now: datetime) -> float | None:
    """Seconds until an undeclared budget is full again; None if it is declared, or its answer names no reset."""
    if budget.unit != "requests" or budget.remaining is None or budget.reset_at is None or budget.reset_at <= now:
        return None
    return None if _owner(budget, reach) is not None else _believed(budget, budget.reset_at, now)


def refill_time(budget: Budget, reach: Reach, now: datetime) -> datetime | None:
    """When an undeclared budget that is used up is full again; None if there is nothing to wait for."""
    if budget.unit != "requests" or budget.remaining is None or budget.remaining > 0 or budget.reset_at is None:
        return None
    if budget.reset_at <= now or _owner(budget, reach) is not None:
        return None
    return now + timedelta(seconds=_believed(budget, budget.reset_at, now))


def _believed(budget: Budget, reset_at: datetime, now: datetime) -> float:
    """Seconds until a stated reset, at most a day, or the budget's window if the facts declare a longer one."""
    return believed_wait((reset_at - now).total_seconds(), budget.window or 0.0)


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
