"""What an act is, and the list of all (`acts.py` fills it)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any


@dataclass(frozen=True)
class Act:
    """One transaction. ``run(c, d)``; ``again``: what the engine does if it gave up waiting for a lock."""

    name: str
    covers: tuple[str, ...]
    run: Callable[[Any, Any], Any]
    again: Callable[[Any, Any], Any]
    check: Callable[[Any], str | None]
    replays: bool = False  # what is over may end once more


ACTS: dict[str, Act] = {}


def act(*covers: str, again: Callable[[Any, Any], Any] | None = None, check: Any = None, replays: bool = False) -> Any:
    """Register a function of (c, d)."""

    def register(fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        name = fn.__name__.strip("_").replace("_", " ")
        ACTS[name] = Act(name, covers, fn, again or fn, check or (lambda _: None), replays)
        return fn

    return register


def nothing(found: Any) -> str | None:
    """What a repair may find."""
    count = found[0] if isinstance(found, tuple) else found
    return f"it had to repair {count}" if count else None


class Refused(Exception):
    """An act that was too late: rolled back, and its caller is told."""


@cache
def covered() -> frozenset[str]:
    """The functions that some act runs."""
    return frozenset(name for one in ACTS.values() for name in one.covers)


# What cannot spoil anything, and why.
NOT_PAIRED = dict.fromkeys(
    (
        "access: _find", "alerts: store.page", "connections: connections.find", "connections: connections.find_all",
        "doctor: health.contents", "doctor: health.server", "worker: health.server", "fuse: grants.keys_of",
        "fuse: resources.read",
        "fuse: _is_over", "grants: fuse.standing", "grants: gates.auth_of",
        "doctor: lacking.sealed_with", "grants: connections.find", "access: lacking.sealed_with",
        "grants: lacking.shut",
        "fuse: store.suspects", "fuse: store.well", "jobs_api: _why", "jobs_api: bulk.plan_edit",
        "jobs_api: queries.attempts", "jobs_api: queries.count", "jobs_api: queries.page", "jobs_api: queries.require",
        "outbox: _now", "outbox: store.page", "outbox: store.where_published", "resources_api: _between",
        "resources_api: _why", "resources_api: resource_queries.get", "resources_api: resource_queries.keys_of",
        "resources_api: resource_queries.page", "resources_api: resource_queries.queued_keys",
        "resources_api: resource_queries.summary", "schedules: schedule_accounts.page", "schedules: self._list",
        "snapshot: _read", "streams_api: cursors.page", "sync: cursors.read", "two_phase: _is_done",
        "workflows: _of_job", "workflows: _require", "workflows: workflows.page",
    ),
    "only reads",
) | dict.fromkeys(
    ("access: fn", "fuse: fn", "grants: fn", "sessions: fn", "sync_side: lambda grants: grants.required(key)"),
    "passes on what others name",
)  # fmt: skip
