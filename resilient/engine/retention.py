"""Pruning: a walk of short transactions over what is older than it is kept.

Housekeeping walks a few seconds at a time and rests as long as each transaction took, so that at most half of a
connection's time (on SQLite: of the writer's) goes into it; what is left is there the next time. `Resilient.prune`
walks to the end. Both faces drive the same `Walk`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from resilient.core.errors import InvalidInput
from resilient.core.retention import Pruned, Retention, Span, span
from resilient.core.states import TERMINAL
from resilient.store import inbox, schedules
from resilient.store import retention as store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from datetime import datetime

    from sqlalchemy import Connection

    from resilient.engine.app import Resilient
    from resilient.store.dialect import Dialect

SECONDS: Final = 10.0  # of one round of housekeeping
SHORTEST_REST: Final = 0.005
SQLITE_BATCH: Final = 250  # everybody else waits while the one writer deletes
FORGET_EVERY: Final = timedelta(hours=1)
COUNTED: Final = 100_000  # rows of each sort that a dry run counts
_DEFAULT: Final = Retention()
_LAST: Final = UUID(int=2**128 - 1)


class Walk:
    """A pruning on its way. Call `step`, each in a transaction, until it returns True.

    ``apart``: events of the outbox are a part of their own. Those that are kept longer than what surrounds them, or
    shorter, are looked at once, not with every walk: ``reached`` remembers how far the walks before have come.
    """

    def __init__(
        self,
        retention: Retention,
        ages: dict[str, timedelta],
        *,
        limit: int | None = None,
        dry_run: bool = False,
        apart: bool = False,
        reached: dict[str, store.Place] | None = None,
    ) -> None:
        if limit is not None and limit < 1:
            raise InvalidInput(f"limit={limit}: prune at least 1 job, or give no limit")
        self._batch, self._limit, self._dry_run = retention.batch, limit, dry_run
        self._ages, self._apart = dict(ages), apart
        self._at: dict[str, Any] = {}  # where each part goes on
        self._reached = {} if reached is None else reached
        self.tally: Counter[str] = Counter()
        self._jobs = 0

    @classmethod
    def by_age(cls, retention: Retention, only: Iterable[str] = Pruned.__slots__, **options: Any) -> Walk:
        """Everything that is kept no longer."""
        apart = retention.events_apart
        parts = [name for name in only if apart or name != "events"]
        ages = {name: age for name in parts if (age := retention.age(name)) is not None}
        return cls(retention, ages, apart=apart, **options)

    def step(self, c: Connection, d: Dialect) -> bool:
        """Do the next batch; True when nothing is left."""
        if not self._ages:
            return True
        name = next(iter(self._ages))
        age = self._ages.pop(name)
        if not self._part(name)(c, d, name, d.now(c) - age):
            self._ages[name] = age  # at the end: a part that never ends does not starve the others
        return not self._ages

    def _part(self, name: str) -> Callable[..., bool]:
        if name == "resources":
            return self._forget
        if name == "inbox":
            return self._inbox
        return self._attempts if name == "attempts" else self._finished

    def _finished(self, c: Connection, d: Dialect, name: str, before: datetime) -> bool:
        state = "succeeded" if name == "events" else name
        events = name == "events" if self._apart and state == "succeeded" else None
        left = COUNTED if self._limit is None else self._limit - self._jobs
        if self._dry_run:
            found = store.count_finished(c, d, state, before, limit=min(COUNTED, left), events=events) if left else 0
            done = True
        elif left:
            size, at = self._batch if d.is_postgresql else min(self._batch, SQLITE_BATCH), self._at.get(name)
            if events is None:
                found, at = store.prune_finished(c, d, state, before, since=at, limit=min(size, left))
            else:
                behind = at or self._reached.get(name)
                found, at = store.prune_succeeded(c, d, before, events=events, behind=behind, limit=size, most=left)
                if found < left:  # else the limit may have left some behind
                    self._reached[name] = at or (before, _LAST)
            self._at[name], done = at, at is None
        else:
            found, done = 0, True
        self._jobs += found
        self.tally[name] += found
        return done

    def _attempts(self, c: Connection, d: Dialect, name: str, before: datetime) -> bool:
        if self._dry_run:
            found, more = store.count_attempts(c, d, before, COUNTED), False
        else:
            found, more = store.prune_attempts(c, d, before, self._batch)
        self.tally[name] += found
        return not more

    def _inbox(self, c: Connection, d: Dialect, name: str, before: datetime) -> bool:
        if self._dry_run:
            found, more = inbox.count(c, d, before, COUNTED), False
        else:
            found, more = inbox.prune(c, d, before, self._batch if d.is_postgresql else SQLITE_BATCH)
        self.tally[name] += found
        return not more

    def _forget(self, c: Connection, d: Dialect, name: str, before: datetime) -> bool:
        if name not in self._at and not self._dry_run:
            store.forget_notes(c, d, before)
        found, self._at[name] = store.forget_idle(c, d, before, self._at.get(name, ""), dry_run=self._dry_run)
        self.tally[name] += found
        return self._at[name] is None

    @property
    def pruned(self) -> Pruned:
        """What went so far."""
        return Pruned(**self.tally)


def checked(given: Any) -> Retention:
    """What `Resilient` was given as ``retention``."""
    if given is None:
        return _DEFAULT
    if not isinstance(given, Retention):
        raise InvalidInput(f"retention={given!r}: write Retention(succeeded='7d', dead='90d')")
    return given


def walk_of(
    retention: Retention,
    *,
    older_than: Span | None = None,
    state: str | Iterable[str] | None = None,
    limit: int | None = None,
    dry_run: bool = False,
) -> Walk:
    """The walk that a caller means; see `Resilient.prune`."""
    options: dict[str, Any] = {"limit": limit, "dry_run": dry_run}
    if older_than is None and state is None:
        return Walk.by_age(retention, **options)
    states = sorted(map(str, TERMINAL)) if state is None else [state] if isinstance(state, str) else list(state)
    if wrong := sorted(set(states) - set(map(str, TERMINAL))):
        raise InvalidInput(f"{wrong[0]!r} is no state in which jobs are pruned: use {', '.join(sorted(TERMINAL))}")
    age = span("older_than", older_than)
    ages = {s: retention.age(s) if age is None else age for s in states}
    options["apart"] = age is None and retention.events_apart
    if options["apart"] and "succeeded" in states and (longer := retention.age("events")) is not None:
        ages["events"] = longer
    if kept := [s for s, a in ages.items() if a is None]:
        raise InvalidInput(f"{kept[0]} jobs are kept for ever: say older_than= to prune them all the same")
    return Walk(retention, {s: a for s, a in ages.items() if a is not None}, **options)


async def walk(app: Resilient, walk: Walk) -> Pruned:
    """Walk to the end."""
    while True:
        if await app.database.transaction(walk.step):
            return walk.pruned
        await asyncio.sleep(SHORTEST_REST)


def walk_sync(app: Resilient, walk: Walk) -> Pruned:
    """`walk` for synchronous programs."""
    while not app.database.transaction_sync(walk.step):
        time.sleep(SHORTEST_REST)
    return walk.pruned


async def keep(app: Resilient, monotonic: Callable[[], float] = time.monotonic, seconds: float = SECONDS) -> Pruned:
    """One round of housekeeping: jobs, history and inbox each time, resources once an hour."""
    parts = ["succeeded", "events", "dead", "cancelled", "attempts", "inbox"]
    if await app.database.transaction(schedules.elect, "engine:forget", FORGET_EVERY):
        parts.append("resources")
    w = Walk.by_age(app.retention, parts, reached=app.pruned_to)
    deadline, done = monotonic() + seconds, False
    while not done and (began := monotonic()) < deadline:
        done = await app.database.transaction(w.step)
        if not done:
            await asyncio.sleep(max(SHORTEST_REST, monotonic() - began))
    return w.pruned
