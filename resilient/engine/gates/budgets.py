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
from typing import TYPE_CHECKING, Final

from resilient.core.base.resource_key import account, depth, is_budget, of_budget

if TYPE_CHECKING:
    from collections.abc import Iterable

MOST: Final = 8  # names of one provider
_SURE: Final = 5  # requests of a kind, one after the other, that counted for the same budget
_SHAPES: Final = 2_000  # of one provider
_ROOTS: Final = 200
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
        self.another = False  # there are several, though only one was named here

    def count(self, kind: str, name: str) -> None:
        """One more request of a kind counts for a budget."""
        before, streak = self.by_kind.get(kind, (name, 0))
        self.by_kind[kind] = (name, min(streak + 1, _SURE)) if before == name else (name, 1)

    @property
    def several(self) -> bool:
        """Whether there is more than one."""
        return self.another or len(self.names) > 1


class BudgetNames:
    """What this process knows about the budgets of each provider. Not for threads."""

    def __init__(self) -> None:
        self.roots: dict[str, _Names] = {}  # by provider; empty: no answer has named any

    def take_in(self, key: str, kind: str, method: str, path: str, name: str, *, apart: bool = False) -> None:
        """A request of a job of this kind, through ``key``, counted for the budget of this name.

        ``apart``: the provider's facts name another one as the usual.
        """
        root = key.partition("/")[0]
        of = self.roots.get(root)
        if of is None:
            if len(self.roots) >= _ROOTS:
                self.roots.clear()
            of = self.roots[root] = _Names()
        if name not in of.names:
            if len(of.names) >= 4 * MOST:
                return
            of.names[name] = len(of.names) < MOST
        of.another = of.another or apart
        form = shape(path)
        if len(of.by_shape) >= _SHAPES:
            of.by_shape.clear()
            of.by_head.clear()
        of.by_shape[method, form] = name
        head = method, _head(form)
        if of.by_head.setdefault(head, name) != name:
            of.by_head[head] = None
        of.count(kind, name)

    def split(self, key: str) -> None:
        """Another process has learnt about a budget of this provider's apart from its account."""
        if (of := self.roots.get(key.partition("/")[0])) is not None:
            of.another = True

    def fold(self, key: str, name: str) -> None:
        """A budget is learnt as a part of its account from now on."""
        of = self.roots.get(key.partition("/")[0])
        if of is not None and name in of.names:
            of.names[name] = False

    def key_of(self, key: str, name: str) -> str | None:
        """The resource of an account's budget; None if it is the account's own."""
        of = self.roots.get(key.partition("/")[0])
        if of is None or not of.several or not of.names.get(name) or depth(key) != 2:  # noqa: PLR2004 - an account
            return None
        return of_budget(key, name)

    def key_for(self, key: str, kind: str, method: str, path: str) -> str:
        """The resource that a request of a job of this kind, through ``key``, will count for, as far as is known."""
        of = self.roots.get(key.partition("/")[0])
        if of is None or not of.several:
            return key
        form = shape(path)
        name = of.by_shape.get((method, form)) or of.by_head.get((method, _head(form)))
        if name is None:
            return key
        of.count(kind, name)  # if it is stopped, no answer will say so
        return self.key_of(key, name) or key

    def first_of(self, key: str, kind: str) -> str:
        """The resource that jobs of this kind, of ``key``, lately counted for alone."""
        of = self.roots.get(key.partition("/")[0])
        name, streak = ("", 0) if of is None else of.by_kind.get(kind, ("", 0))
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
        of = self.roots.get(budget.partition("/")[0])
        if of is None:
            return []
        owner = account(budget)
        sure = [(kind, name) for kind, (name, streak) in of.by_kind.items() if streak >= _SURE]
        return [kind for kind, name in sure if self.key_of(owner, name) == budget]


def _head(form: str) -> str:
    return form.strip("/").partition("/")[0]
