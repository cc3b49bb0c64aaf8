"""The sweeper: what time alone brings about.

`stage` makes due jobs ready and releases parked turns whose resource may be served again; every worker does it, row
locks share the work out. Rescue gives jobs of vanished workers back. Housekeeping (expired jobs, the turn invariant,
old rows) is done by whoever moves its row in `resilient_schedule` forward: elected anew each time, no leader process.
"""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from sqlalchemy.exc import DBAPIError

from resilient.core.alerts import rules as alerts
from resilient.core.base.loggers import logger
from resilient.core.base.phrases import moment
from resilient.core.base.resource_key import path
from resilient.core.gates.admission import needs_count, releasable, stop_of
from resilient.core.gates.breaker import orphaned
from resilient.core.jobs import marks
from resilient.core.jobs.decide import decide
from resilient.core.jobs.outcomes import JobFacts, Rescued
from resilient.engine.ground.chores import do_all
from resilient.engine.ground.kinds import DEFAULT_RETRY
from resilient.engine.jobs import workflows
from resilient.engine.run import heartbeat
from resilient.engine.run.completer import free_slots
from resilient.engine.run.services import Loop, idle_pause
from resilient.store.db.dialect import LOCK_WAIT, SHORT_LOCK_WAIT, is_lock_timeout
from resilient.store.db.direct import direct, operation
from resilient.store.gates import circuits, resources, turns
from resilient.store.inspect import throughput, workers
from resilient.store.jobs import dependencies, finishing, leases, order, ready
from resilient.store.schedules import ticks as schedules

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
    from uuid import UUID

    from sqlalchemy import Connection

    from resilient.core.gates.admission import Stop
    from resilient.core.gates.policy import Policies, Policy
    from resilient.engine.ground.kinds import Handler
    from resilient.engine.run.execution import Features
    from resilient.engine.run.heartbeat import DatabaseLink
    from resilient.store.db.dialect import Dialect

T = TypeVar("T")
log = logger("worker")
TICK: Final = 1.0  # seconds between two looks at what is due, jittered
SOONEST: Final = 0.005  # seconds; what is due and locked by somebody else is looked at again
PARKED_PACE: Final = 0.05  # seconds between two looks for the sake of parked turns
HOUSEKEEPING: Final = timedelta(seconds=30)
FOLDING: Final = timedelta(minutes=5)
RELEASE_BATCH: Final = 200


class RescueRules(NamedTuple):
    """What a rescue decides by. ``spares``: whether a living worker gets a little more time for a job's row."""

    kinds: Mapping[str, Handler[Any, Any]]
    policies: Policies
    roll: Callable[[], float]
    spares: Callable[[Any], bool]


class RescuedJob(NamedTuple):
    """A job whose lease was over, and what was decided about it."""

    kind: str
    resource_key: str
    decision: str
    error_kind: str


class Sweeper:
    """Staging, rescue and housekeeping of one worker."""

    def __init__(
        self,
        features: Features,
        link: DatabaseLink,
        *,
        lease: timedelta,
        wake: Callable[[], None],
        now: Callable[[], datetime],
        roll: Callable[[], float],
    ) -> None:
        self._features, self._link, self._lease = features, link, lease
        self._ground, self._database = features.ground, features.ground.database
        self._wake, self._now, self._roll = wake, now, roll
        self.rescued = 0
        self.repaired = 0
        self._walk = dependencies.Walk()  # how far the look at waiting jobs has come
        self._workflow = ""  # and that at workflows
        self._last = ""  # the workflow that was attended last
        self._look_at = inf  # loop time by which this worker's own parked turns want to be looked at
        self._rest: asyncio.Timeout | None = None  # of the staging loop
        self._seen: dict[tuple[UUID, int], float] = {}  # since when: overdue jobs of living workers in the look before
        self._overdue: dict[tuple[UUID, int], float] = {}  # and in this one
        self._spare = 2 * min(lease.total_seconds() / 4, heartbeat.LONGEST_BEAT)

    def loops(self) -> list[Loop]:
        """What of it polls."""
        rescue_every = max(0.2, min(self._lease.total_seconds() / 4, 15.0))
        poll, ticks = self._poll, self._features.tick_schedules  # apart: a program's `for_each` may take its time
        loops: list[tuple[str, Callable[[], Awaitable[float]]]] = [
            ("rescue", partial(poll, self.rescue, rescue_every)),
            ("schedules", partial(poll, ticks, TICK, shared=True)),
            ("housekeeping", partial(poll, self.keep_house, HOUSEKEEPING.total_seconds() / 3)),
        ]
        stage = partial(poll, self.stage_step, TICK, shared=True)
        staging = Loop("stage", stage, self._roll, rest=self._until_parked)
        return [staging, *(Loop(name, step, self._roll) for name, step in loops)]

    async def _poll(self, step: Callable[[], Awaitable[float | None]], every: float, *, shared: bool = False) -> float:
        """One step; returns the seconds until the next, jittered: what it says, and about ``every`` at most.

        ``shared``: every worker of the fleet does the same, each for all.
        """
        delay = await step()
        rest = idle_pause(every, 0.2, self._link.fleet if shared else 1, self._roll())
        return rest if delay is None else min(rest, idle_pause(delay, 0.2, 1, self._roll()))

    # -- staging --------------------------------------------------------------------------------------------------

    async def stage_step(self) -> float | None:
        """`stage`, then how long until something is due, if anything is."""
        moved, due_at, recheck_at = await self._stage_all()
        if moved:
            self._wake()
        now, delays = self._now(), list[float]()
        for at, least in ((due_at, SOONEST), (recheck_at, PARKED_PACE)):
            if at is not None:
                delays.append(max(least, (at - now).total_seconds()))
        return min(delays, default=None)

    def parked(self, stops: Iterable[Stop]) -> None:
        """This worker parked turns: look at them as soon as they may be released, not only with the next tick."""
        soonest = min((stop.until for stop in stops if stop.until is not None), default=None)
        if soonest is None:
            return
        loop = asyncio.get_running_loop()
        self._look_by(loop.time() + max(PARKED_PACE, (soonest - self._now()).total_seconds()))

    def nudge(self) -> None:
        """Something ended that staging goes on with: look soon; call it on the event loop."""
        self._look_by(asyncio.get_running_loop().time() + PARKED_PACE)

    def _look_by(self, at: float) -> None:
        if self._rest is None or self._rest.expired():
            self._look_at = min(self._look_at, at)
        elif at < (self._rest.when() or 0.0):
            self._rest.reschedule(at)

    async def _until_parked(self, delay: float) -> None:
        """Sleep, but no longer than `parked` says."""
        at = min(asyncio.get_running_loop().time() + delay, self._look_at)
        self._look_at = inf
        try:
            async with asyncio.timeout_at(at) as self._rest:
                await asyncio.Event().wait()
        except TimeoutError:
            pass
        finally:
            self._rest = None

    async def stage(self) -> int:
        """Due jobs become ready and parked turns are looked at; returns how many of both moved."""
        return (await self._stage_all())[0]

    async def _stage_all(self) -> tuple[int, datetime | None, datetime | None]:
        due = await self._database.statement(ready.read_due)
        if not due.anything:
            return 0, due.job_at, due.turn_at
        moved = 0
        for _ in range(1000):
            staged, released, due = await self._database.transaction(
                attend, self._ground.policies.for_key, self._roll()
            )
            moved += staged + released
            if staged < ready.STAGE_LIMIT and released < turns.RECHECK_BATCH:
                break
        if due.workflows:
            moved += await self._attend_workflows()
        return moved, due.job_at, due.turn_at

    async def _attend_workflows(self) -> int:
        look = await self._carefully(workflows.attend, self._last)
        self._last = look.last
        for name, id_ in look.stuck:
            self._features.alerts.add(alerts.stuck(name, id_))
        return look.size

    async def _carefully(self, fn: Callable[..., T], *args: Any) -> T:
        """Run ``fn``; after a lock timeout once more, ``careful``: it leaves out what others hold."""
        try:
            return await self._database.transaction(fn, *args)
        except DBAPIError as error:
            if not is_lock_timeout(error):
                raise
            return await self._database.transaction(fn, *args, careful=True)

    # -- rescue ---------------------------------------------------------------------------------------------------

    async def rescue(self) -> None:
        """Jobs whose lease is over go back, or die after too many rescues.

        After an outage of the database every lease may be over: the others get the time of two heartbeats to renew
        theirs, as this worker had.
        """
        if self._link.is_cut_off or self._link.monotonic() - self._link.back_at < self._spare:
            return
        self._seen, self._overdue = self._overdue, {}
        while True:
            try:
                rescued = await self._database.transaction(rescue, self._rules())
            except DBAPIError as error:
                if not is_lock_timeout(error):
                    raise
                rescued = await self._rescue_each()
            self.rescued += len(rescued)
            for one in rescued:
                self._ground.counts.rescued(*one)
            if rescued:
                log.warning("%d jobs of vanished or silent workers were rescued", len(rescued))
                self._wake()
            if len(rescued) < leases.RESCUE_BATCH:
                return

    async def _rescue_each(self) -> list[RescuedJob]:
        """Rescue one by one: somebody holds the ordering key or workflow of one job, and the others need not wait."""
        rescued: list[RescuedJob] = []
        for id_ in await self._database.transaction(_overdue):
            try:
                rescued += await self._database.transaction(rescue, self._rules(), id_)
            except DBAPIError as error:
                if not is_lock_timeout(error):
                    raise
        return rescued

    def _rules(self) -> RescueRules:
        return RescueRules(self._ground.kinds, self._ground.policies, self._roll, self.spares)

    def spares(self, row: Any) -> bool:
        """Whether the living worker of an overdue job gets a little more time: to renew the lease, or save the result.

        It could do neither while a program held the row, perhaps until just now: so the time runs from the first look.
        """
        key, now = (row.id, row.version), self._link.monotonic()
        first = self._overdue[key] = self._seen.get(key, now)
        return now - first < self._spare

    # -- housekeeping ---------------------------------------------------------------------------------------------

    async def keep_house(self) -> None:
        """Chores, if it is this worker's turn."""
        if await self._database.transaction(schedules.elect, "engine:housekeeping", HOUSEKEEPING):
            await self.chores()

    async def chores(self) -> None:
        """Expired jobs, lost turns, silent workers, retention, alerts: each, although another may fail."""
        await do_all([
            self._expire, self._repair_jobs, self._repair_turns, self._repair_lanes, self._repair_workflows,
            self._forget, *self._features.chores,
        ])  # fmt: skip

    async def _expire(self) -> None:
        while await self._carefully(_expire) >= ready.STAGE_LIMIT:
            pass

    async def _repair_jobs(self) -> None:
        stranded, self._walk = await self._database.transaction(_repair_waiting, self._walk)
        self._repaired("jobs", stranded)

    async def _repair_turns(self) -> None:
        self._repaired("turns", await self._database.transaction(_repair))

    async def _repair_lanes(self) -> None:
        self._repaired("lanes", await self._database.transaction(_repair_lanes))

    async def _repair_workflows(self) -> None:
        stranded, self._workflow = await self._database.transaction(_repair_workflows, self._workflow)
        self._repaired("workflows", stranded)

    async def _forget(self) -> None:
        await self._database.transaction(_forget)

    def _repaired(self, what: str, count: int) -> None:
        if count:
            self.repaired += count
            self._features.alerts.repaired(count, what)
            log.error("%d %s; repaired. This is a bug: please report it", count, _WRONG[what])
            self._wake()


@direct
@operation("stage")
def attend(c: Connection, d: Dialect, policy: Callable[[str, Any], Policy], roll: float) -> tuple[int, int, ready.Due]:
    """One look at what time brings, in one transaction: jobs staged, turns released, what is due next."""
    now = d.steer(c)
    hold_back(c, d, policy, roll)
    staged = ready.stage(c, d, now) + dependencies.resolve_dependencies(c, d, now)
    released = recheck(c, d, policy, roll)
    return staged, released, ready.read_due(c, d)


def hold_back(c: Connection, d: Dialect, policy: Callable[[str, Any], Policy], roll: float) -> int:
    """Put off due jobs that wait for a resource which is still stopped, but for those it may be tried with.

    So a job that waits is not run again and again to find out. Returns how many wait on.
    """
    now, waiting = d.now(c), 0
    keys = turns.due_for(c, d, now)
    facts = resources.read(c, d, keys) if keys else {}
    for key, resource in sorted(facts.items()):
        count = releasable(resource, policy(key, resource.policy_override), now, turns.BATCH)
        if count >= turns.BATCH:
            continue
        stop, soon = stop_of(resource, now), now + turns.RELEASE_STEP
        until = soon if stop is None else now + turns.recheck_in(roll)
        if stop is not None and stop.until is not None:
            until = max(soon, min(until, stop.until))
        waiting += turns.put_off(c, d, key, now, until, spare=count)
    return waiting


def recheck(c: Connection, d: Dialect, policy: Callable[[str, Any], Policy], roll: float) -> int:
    """Look at parked turns that are due: release what may run, postpone the rest; returns how many were released."""
    now = d.now(c)
    due = turns.due_parked(c, d, now)
    facts = resources.read(c, d, sorted(due)) if due else {}
    released = 0
    for key, ids in sorted(due.items()):
        resource = facts.get(key)
        count = RELEASE_BATCH
        if resource is not None:
            count = releasable(resource, policy(key, resource.policy_override), now, RELEASE_BATCH)
        if count:
            turns.postpone(c, d, ids, now + turns.RELEASE_STEP)
            probing = resource is not None and resource.breaker.state != "closed"
            released += turns.release(c, d, key, count, now, oldest_first=probing)
            continue
        stop = stop_of(resource, now) if resource is not None else None
        later = now + turns.recheck_in(roll)
        until = stop.until if stop is not None and stop.until is not None else later
        turns.postpone(c, d, ids[:1], max(now + turns.RELEASE_STEP, min(until, later)))
        turns.postpone(c, d, ids[1:], later)
    return released


def _overdue(c: Connection, d: Dialect) -> list[UUID]:
    return [row.id for row in leases.overdue(c, d, d.now(c))]


@direct
@operation("rescue")
def rescue(c: Connection, d: Dialect, rules: RescueRules, only: UUID | None = None) -> list[RescuedJob]:
    """Decide about jobs whose lease is over; returns them."""
    now = d.steer(c, LOCK_WAIT if only is None else SHORT_LOCK_WAIT)
    rows = [row for row in leases.overdue(c, d, now, only) if not (row.alive and rules.spares(row))]
    finishes = []
    for row in rows:
        handler = rules.kinds.get(row.kind)
        facts = JobFacts(
            attempts=row.attempts,
            max_attempts=row.max_attempts,
            deferrals=row.deferrals,
            rescues=row.rescues,
            expires_at=row.expires_at,
            sent=marks.in_doubt(row.sent, now),
            safe_until=marks.safe_until(row.sent),
            cancel_requested=bool(row.cancel_requested),
            once_more=bool(row.once_more),
            resource_key=row.resource_key,
            can_reconcile=handler is not None and handler.reconcile is not None,
        )
        outcome = Rescued(f"worker {row.locked_by} was lost or silent for longer than its lease")
        retry = DEFAULT_RETRY if handler is None else handler.retry
        transition = decide(facts, outcome, retry, now, rules.roll())
        finish = finishing.Finish(row.id, row.version, transition, None, row.executions, row.locked_by, row.started_at)
        finishes.append(finish)
    rescued = finishing.finish_if_held(c, d, finishes, now)
    _free_slots(c, d, rules.policies.for_key, [row for row in rows if row.id in rescued], now)
    return [
        RescuedJob(row.kind, row.resource_key, finish.transition.decision, finish.transition.error_kind or "")
        for row, finish in zip(rows, finishes, strict=True)
        if row.id in rescued
    ]


def _free_slots(
    c: Connection, d: Dialect, policy: Callable[[str, Any], Policy], ended: Sequence[Any], now: datetime
) -> None:
    """Release turns parked on caps and on probes: the dead or delayed job will not come back to do it."""
    levels = [(level, row.locked_by) for row in ended for level in path(row.resource_key)]
    freed, lost = dict[str, int](), dict[str, set[str]]()
    facts = resources.read(c, d, sorted({level for level, _ in levels})) if levels else {}
    for level, owner in levels:
        if level in facts and orphaned(facts[level].breaker, (owner,)):
            lost.setdefault(level, set()).add(owner)
        if level in facts and needs_count(facts[level], policy(level, facts[level].policy_override), now):
            freed[level] = freed.get(level, 0) + 1
    circuits.give_up_probes(c, d, lost, now)
    free_slots(c, d, freed, now)


def _expire(c: Connection, d: Dialect, *, careful: bool = False) -> int:
    return finishing.expire(c, d, d.now(c), _expired_text, careful=careful)


def _expired_text(at: datetime) -> str:
    return f"expired at {moment(at)} before it could run"


def _repair(c: Connection, d: Dialect) -> int:
    lost = turns.stranded(c, d)
    turns.insert(c, d, lost)
    return len(lost)


def _repair_lanes(c: Connection, d: Dialect) -> int:
    return order.repair(c, d, d.steer(c))


def _repair_waiting(c: Connection, d: Dialect, walk: dependencies.Walk) -> tuple[int, dependencies.Walk]:
    now = d.steer(c)
    stranded, further = dependencies.repair(c, d, walk, now)
    if stranded:
        dependencies.resolve_dependencies(c, d, now, stranded)
    return len(stranded), further


def _repair_workflows(c: Connection, d: Dialect, after: str) -> tuple[int, str]:
    d.steer(c)
    return workflows.repair(c, d, after)


_WRONG: Final = {
    "turns": "resources had ready jobs and had fallen out of the line for the workers",
    "lanes": "ordering keys stood still",
    "jobs": "jobs waited for others that were over",
    "workflows": "workflows stood still",
}


def _forget(c: Connection, d: Dialect) -> None:
    workers.forget_silent(c, d, d.now(c))
    if schedules.elect(c, d, "engine:throughput", FOLDING):  # alone: an overlap would count rows twice
        throughput.fold(c, d, d.now(c))
