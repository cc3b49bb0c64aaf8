"""What happened between two looks at the database, as lines for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient.surface.demo.view import ResourceView

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    from resilient.surface.demo.view import Snapshot


def gate(resource: ResourceView | None, now: datetime) -> str:
    """One resource's gate in a few words."""
    if resource is None:
        return "flows"
    if resource.auth != "ok":
        return "must be connected again" if resource.auth == "needs_reauth" else f"stopped: {resource.auth}"
    if resource.breaker == "open":
        return f"open, tries again in {_left(resource.open_until, now)}"
    if resource.breaker != "closed":
        return "half open: one job tries" if resource.breaker == "half_open" else resource.breaker
    if resource.blocked_until is not None and resource.blocked_until > now:
        return f"told to wait {_left(resource.blocked_until, now)}"
    return "flows"


def happened(old: Snapshot, new: Snapshot) -> Iterator[str]:
    """Lines for what changed."""
    for key, after in sorted(new.resources.items()):
        before = old.resources.get(key, ResourceView(key))
        yield from _breaker(before, after, new.now)
        if after.auth == "needs_reauth" != before.auth:
            yield f"{key}: its access was taken back; its owner is told, its jobs wait"
        if after.blocked_until != before.blocked_until and after.blocked_until and after.blocked_until > new.now:
            code = f" ({after.blocked_code})" if after.blocked_code else ""
            left = _left(after.blocked_until, new.now)
            yield f"{key} said: come back later{code}; every worker waits {left}"
    if (rescued := new.rescues - old.rescues) > 0:
        yield f"jobs of a dead worker rescued, as their leases ran out: {rescued}"


def _breaker(before: ResourceView, after: ResourceView, now: datetime) -> Iterator[str]:
    if before.breaker == after.breaker and before.open_until == after.open_until:
        return
    match after.breaker:
        case "open":
            code = f" ({after.last_error_code})" if after.last_error_code else ""
            again = "still not well" if before.breaker != "closed" else "circuit opened"
            yield f"{after.key}: {again}{code}; tries again in {_left(after.open_until, now)}"
        case "half_open" if before.breaker != "half_open":
            yield f"{after.key}: one job tries whether it is well again"
        case "closed" if before.breaker != "closed":
            yield f"{after.key} is well again: circuit closed"


def _left(until: datetime | None, now: datetime) -> str:
    return "?" if until is None else f"{max(0.0, (until - now).total_seconds()):.1f} s"
