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
# Those that hold the most rows for the longest time: they meet by threes.
LONGEST = ("finishes", "claims", "rescues", "stages", "cancels", "publishes", "attends", "enqueues")


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
NOT_PAIRED = (
    dict.fromkeys(
        (
            "accounts.access: _find",
            "accounts.whoami: _infos",
            "engine.alerts: store.page",
            "accounts.connections: connections.find",
            "accounts.connections: connections.find_all",
            "accounts.connections: sharing.who_stays",
            "inspect.erasure: connections.find_all",
            "accounts.missing_keys: workers.has_others",
            "accounts.revocation: _unwanted_at",
            "accounts.connections: _time",
            "inspect.audit: store.page",
            "inspect.doctor: health.contents",
            "inspect.erasure: store.endpoints_of",
            "inspect.erasure: store.obstacles",
            "inspect.erasure: store.rows",
            "inspect.erasure: store.windowed",
            "inspect.doctor: health.server",
            "inspect.exporter: gauges.read",
            "run.worker: health.server",
            "run.worker: resources.has_accounts",
            "accounts.fuse: grants.keys_of",
            "accounts.fuse: resources.read",
            "accounts.fuse: _is_over",
            "accounts.application: fuse.standing",
            "accounts.application: gates.auth_of",
            "inspect.doctor: connections.sealed_with",
            "accounts.grants: connections.find",
            "accounts.access: connections.sealed_with",
            "accounts.grants: connections.shut",
            "accounts.fuse: store.suspects",
            "accounts.fuse: store.well",
            "jobs.api: _why",
            "jobs.api: plan_edit",
            "jobs.api: queries.attempts",
            "jobs.api: queries.count",
            "jobs.api: queries.page",
            "jobs.api: queries.require",
            "accounts.seals: secrets.schedules_under_other_keys",
            "accounts.seals: secrets.sealed_under_other_keys",
            "accounts.seals: secrets.undos_under_other_keys",
            "jobs.waiting: queries.over",
            "events.outbox: _now",
            "events.outbox: store.page",
            "events.outbox: store.where_published",
            "gates.api: _between",
            "gates.api: _why",
            "gates.api: resource_queries.get",
            "gates.api: resource_queries.keys_of",
            "gates.api: resource_queries.page",
            "gates.api: resource_queries.queued_keys",
            "gates.api: resource_queries.summary",
            "schedules.schedules: schedule_accounts.page",
            "schedules.schedules: self._list",
            "gates.snapshot: _read",
            "engine.sync: cursors.list_cursors",
            "run.stream_reader: cursors.read",
            "run.two_phase: _is_done",
            "jobs.workflows: _of_job",
            "jobs.workflows: _require",
            "jobs.workflows: workflows.page",
        ),
        "only reads",
    )
    | dict.fromkeys(
        ("inspect.audit: store.begin", "inspect.audit: store.settle"),
        "touches one table that nobody else touches, and deletes what nobody holds",
    )
    | dict.fromkeys(
        (
            "accounts.access: fn",
            "accounts.fuse: fn",
            "accounts.application: fn",
            "accounts.grants: fn",
            "ground.sessions: fn",
            "app.sync_side: lambda features: features.grants.required(key)",
            "app.sync_side: lambda features: features.tests.send(key)",
            "ground.audited: fn",
        ),
        "passes on what others name",
    )
)
