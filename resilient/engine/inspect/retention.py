"""Pruning: a walk of short transactions that deletes what is older than its retention.

Housekeeping walks for most of the time until its next round, if there is so much, and rests after each transaction as
long as that worked, so that at most half of a connection's time (on SQLite: of the writer's) goes into it; the next
round goes on. On SQLite everybody else waits while the one writer deletes: a transaction deletes as many rows as take
`LONGEST_STEP`. `Resilient.prune` walks to the end.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from resilient.core.base.errors import InvalidInput
from resilient.core.base.misfit import is_whole
from resilient.core.inspect.retention import Pruned, Retention, Span, span
from resilient.core.jobs.states import TERMINAL
from resilient.store import events as events_store
from resilient.store.inspect import retention as store
from resilient.store.schedules import ticks as schedules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from datetime import datetime

    from sqlalchemy import Connection

    from resilient.engine.ground.sessions import Transactions
    from resilient.store.db.database import Database
    from resilient.store.db.dialect import Dialect

SECONDS: Final = 25.0  # of one round of housekeeping, which begins every thirty: in less it may never catch up
SHORTEST_REST: Final = 0.005
SQLITE_BATCH: Final = 250  # rows of the first transaction of a walk, and the fewest
LONGEST_STEP: Final = 0.02  # seconds
FORGET_EVERY: Final = timedelta(hours=1)
ANEW_EVERY: Final = timedelta(days=7)
COUNTED: Final = 100_000  # rows of each sort that a dry run counts
_DEFAULT: Final = Retention()
_LAST: Final = UUID(int=2**128 - 1)


class Walk:
    """One pruning. Call `step`, each time in a transaction, until it returns True.

    ``apart``: events of the outbox have a retention of their own. Then a walk reads succeeded jobs of both sorts and
    keeps those of the other sort. ``reached`` is the place up to which earlier walks have read: this walk begins there.
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
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        if limit is not None and not is_whole(limit):
            raise InvalidInput(f"limit={limit!r}: prune at least 1 job, or give no limit")
        self._batch, self._limit, self._dry_run = retention.batch, limit, dry_run
        self._monotonic, self._sqlite_batch = monotonic, min(retention.batch, SQLITE_BATCH)
        self.worked = 0.0  # seconds of the last step, without its wait for a connection and the writer's lock
        self._ages, self._apart = dict(ages), apart
        self._at: dict[str, Any] = {}  # where each part goes on
        self._reached = {} if reached is None else reached
        self.tally: Counter[str] = Counter()
        self._jobs = 0

    @classmethod
    def by_age(cls, retention: Retention, only: Iterable[str] = Pruned.__slots__, **options: Any) -> Walk:
        """The walk over everything that is older than its retention."""
        apart = retention.events_apart
        parts = [name for name in only if apart or name != "events"]
        ages = {name: age for name in parts if (age := retention.age(name)) is not None}
        return cls(retention, ages, apart=apart, **options)

    def step(self, c: Connection, d: Dialect) -> bool:
        """Delete the next batch; True when nothing is left. If it fails, nothing is counted: it can be called again."""
        if not self._ages:
            return True
        name, age = next(iter(self._ages.items()))
        began = self._monotonic()
        is_done = self._part(name)(c, d, name, d.now(c) - age)
        self.worked = self._monotonic() - began
        self._sqlite_batch = self._next_batch(self._sqlite_batch)
        del self._ages[name]
        if not is_done:
            self._ages[name] = age  # at the end: a part that never ends does not starve the others
        return not self._ages

    def _next_batch(self, size: int) -> int:
        """As many rows as take `LONGEST_STEP`, at most twice as many as before."""
        fitting = size * LONGEST_STEP / self.worked if self.worked > 0 else math.inf
        least = min(self._batch, SQLITE_BATCH)
        return round(max(least, min(fitting, 2 * size, self._batch)))

    def _part(self, name: str) -> Callable[..., bool]:
        if name == "resources":
            return self._forget
        if name == "inbox":
            return self._inbox
        return self._attempts if name == "attempts" else self._finished

    def _finished(self, c: Connection, d: Dialect, name: str, before: datetime) -> bool:
        state = "succeeded" if name == "events" else name
        events = name == "events" if self._apart and state == "succeeded" else None
        room = COUNTED if self._limit is None else self._limit - self._jobs
        if self._dry_run:
            count = store.count_finished(c, d, state, before, limit=min(COUNTED, room), events=events) if room else 0
            done = True
        elif room:
            size, at = self._batch if d.is_postgresql else self._sqlite_batch, self._at.get(name)
            if events is None:
                count, at = store.prune_finished(c, d, state, before, since=at, limit=min(size, room))
            else:
                behind = at or self._reached.get(name)
                count, at = store.prune_succeeded(c, d, before, events=events, behind=behind, limit=size, most=room)
                if count < room:  # else the limit may have left some behind
                    self._reached[name] = at or (before, _LAST)
            self._at[name], done = at, at is None
        else:
            count, done = 0, True
        self._jobs += count
        self.tally[name] += count
        return done

    def _attempts(self, c: Connection, d: Dialect, name: str, before: datetime) -> bool:
        if self._dry_run:
            count, more = store.count_attempts(c, d, before, COUNTED), False
        else:
            count, more = store.prune_attempts(c, d, before, self._batch)
        self.tally[name] += count
        return not more

    def _inbox(self, c: Connection, d: Dialect, name: str, before: datetime) -> bool:
        if self._dry_run:
            count, more = events_store.count_inbox(c, d, before, COUNTED), False
        else:
            count, more = events_store.prune_inbox(c, d, before, self._batch if d.is_postgresql else self._sqlite_batch)
        self.tally[name] += count
        return not more

    def _forget(self, c: Connection, d: Dialect, name: str, before: datetime) -> bool:
        if name not in self._at and not self._dry_run:
            store.forget_notes(c, d, before)
        count, self._at[name] = store.forget_idle(c, d, before, self._at.get(name, ""), dry_run=self._dry_run)
        self.tally[name] += count
        return self._at[name] is None

    @property
    def pruned(self) -> Pruned:
        """What was deleted so far."""
        return Pruned(**self.tally)


def checked(value: Any) -> Retention:
    """The argument ``retention`` of `Resilient`. Raises `InvalidInput`."""
    if value is None:
        return _DEFAULT
    if not isinstance(value, Retention):
        raise InvalidInput(f"retention={value!r}: write Retention(succeeded='7d', dead='90d')")
    return value


def walk_of(
    retention: Retention,
    *,
    older_than: Span | None = None,
    state: str | Iterable[str] | None = None,
    limit: int | None = None,
    dry_run: bool = False,
) -> Walk:
    """The walk for the arguments of `Resilient.prune`. Raises `InvalidInput`."""
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


async def walk(db: Transactions, walk: Walk) -> Pruned:
    """Walk to the end."""
    while not await db.transaction(walk.step):
        await db.rest(SHORTEST_REST)
    return walk.pruned


async def keep(
    database: Database,
    retention: Retention,
    reached: dict[str, store.Place],
    monotonic: Callable[[], float] = time.monotonic,
    seconds: float = SECONDS,
) -> Pruned:
    """One round of housekeeping: jobs, history and inbox each time, resources once an hour, all anew once a week."""
    parts = ["succeeded", "events", "dead", "cancelled", "attempts", "inbox"]
    if await database.transaction(schedules.elect, "engine:forget", FORGET_EVERY):
        parts.append("resources")
    if retention.events_apart and await database.transaction(schedules.elect, "engine:anew", ANEW_EVERY):
        reached.clear()  # some were locked, or steps of a workflow under way, when the walk passed
    w = Walk.by_age(retention, parts, reached=reached, monotonic=monotonic)
    deadline, done = monotonic() + seconds, False
    try:
        while not done and monotonic() < deadline:
            done = await database.transaction(w.step)
            if not done:
                await asyncio.sleep(max(SHORTEST_REST, w.worked))
    except BaseException:
        reached.clear()  # the last step may not have been committed
        raise
    return w.pruned
