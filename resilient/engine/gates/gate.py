"""The gate of one worker process: may this job start, may this request be sent, and what came of it.

Before each start and each request the facts of the whole path are looked at; they are at most `MAX_AGE` old
(the promise is a second). What this worker finds out itself counts at once, what another one finds out as soon as
it is told (`forget`); where nobody can be told, on SQLite, facts age faster, so that little is sent after a 429.
Limits are drawn per request (`drawing.py`), outcomes summed (`reporter.py`), throttles written immediately and once,
however many requests were in flight.

Everything runs on the worker's event loop; requests of threads come to it (`Wire.from_thread`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from resilient.core.base.errors import WAITS_FOR_RESOURCE, DatabaseUnreachable, FailureKind, ResourceStopped
from resilient.core.base.instants import add_seconds, in_utc
from resilient.core.base.loggers import apart, logger
from resilient.core.base.phrases import moment
from resilient.core.base.resource_key import is_budget, of_budget, path
from resilient.core.gates.admission import ResourceFacts, Stop, in_force, needs_count, paced, refusal
from resilient.core.gates.breaker import child_of, judge, names, scoped
from resilient.core.gates.policy import Tenancy
from resilient.core.jobs.backoff import retry_pause
from resilient.core.jobs.outcomes import Failed, Succeeded
from resilient.engine.gates import budgets as stated_budgets
from resilient.engine.gates.drawing import Drawing
from resilient.engine.gates.lessons import Lessons
from resilient.engine.gates.permits import GatePermit, Reservation
from resilient.engine.gates.reporter import QUIET, Probing, Reporter
from resilient.engine.gates.snapshot import Snapshot
from resilient.store.db.dialect import SHORT_LOCK_WAIT, is_lock_timeout
from resilient.store.gates import controls as gates
from resilient.store.gates.limits import Observation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import datetime

    from resilient.core.base.budgets import Budget
    from resilient.core.base.errors import Failure
    from resilient.core.base.exchange import AnswerFacts
    from resilient.core.gates.breaker import Probes
    from resilient.core.gates.learnt import Refusal
    from resilient.core.gates.policy import Policies
    from resilient.core.jobs.outcomes import Outcome
    from resilient.engine.gates.drawing import Limits, TimedDraw
    from resilient.store.db.database import Database
    from resilient.store.gates.circuits import Change

log = logger("gate")
MAX_AGE: Final = 0.25  # seconds
MAX_AGE_ON_SQLITE: Final = 0.05
FRESH_FOR: Final = 0.75  # seconds from the look at the gates to the socket; with `MAX_AGE` a second
LOOK_BEFORE: Final = 0.1  # seconds before a reserved moment in which the gates are looked at
_MOST_TRIES: Final = 5  # draws for one request, where every one comes too late
_SOON: Final = 0.1  # seconds until other processes may know of a window that is nearly spent
HORIZON: Final = timedelta(hours=24)  # a cooldown that ends later is one that a person should look at


class Gate:
    """See the top of this file.

    ``owner`` is the worker's id, under which the claim elects its probes. ``on_change`` hears of circuits
    that opened or closed, ``on_cooldown`` of resources that began to rest, or rest longer.
    """

    def __init__(
        self,
        database: Database,
        policies: Policies,
        *,
        owner: str | None = None,
        rng: random.Random | None = None,
        monotonic: Callable[[], float] | None = None,
        max_age: float | None = None,
        on_change: Callable[[Change], None] | None = None,
        on_cooldown: Callable[[ResourceFacts], None] | None = None,
    ) -> None:
        clock = database.dialect.clock
        # Under a test clock facts age with it; timers and leases still run by the process's own time.
        aging = monotonic or (time.monotonic if clock is None else lambda: clock().timestamp())
        self._monotonic = monotonic = monotonic or time.monotonic
        self._database, self._policies, self._owner = database, policies, owner
        self._roll = (rng or random.Random()).random  # noqa: S311 - jitter
        if max_age is None:
            max_age = MAX_AGE_ON_SQLITE if database.is_sqlite else MAX_AGE
        self._snapshot = Snapshot(database, aging, max_age)
        self._drawing = Drawing(database, monotonic, self.now, self._roll)
        self._reporter = Reporter(
            database, policies, snapshot=self._snapshot, drawing=self._drawing, monotonic=monotonic,
            roll=self._roll, on_change=on_change,
        )  # fmt: skip
        self._probing = Probing(
            database, policies, owner=owner, snapshot=self._snapshot, reporter=self._reporter, is_probe=self._is_probe
        )
        self._on_cooldown = on_cooldown
        self._lessons = Lessons(
            database, policies, snapshot=self._snapshot, monotonic=monotonic, spawn=self._reporter.spawn
        )
        self.stated, self.names = stated_budgets.UndeclaredBudgets(), stated_budgets.BudgetNames(policies.tenancy)
        self._resting: dict[str, datetime] = {}  # throttles on their way to the database
        self._closing = False

    # -- life ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin on this loop."""
        self._closing = False
        self._reporter.start(asyncio.get_running_loop())

    async def close(self) -> None:
        """Write everything and stop."""
        self._closing = True
        await self._lessons.close()
        await self._reporter.close()

    async def flush(self) -> None:
        """Write all sums now."""
        await self._reporter.flush()
        await self._lessons.flush()

    def now(self) -> datetime:
        """The database's time."""
        return self._snapshot.now()

    # -- knowing ---------------------------------------------------------------------------------------------

    def learn(self, facts: Mapping[str, ResourceFacts], now: datetime) -> None:
        """Take in what a claim has read and written."""
        self._snapshot.learn(facts, now)

    def forget(self, keys: Sequence[str]) -> None:
        """Read these resources again before they are used, because they changed."""
        self._snapshot.forget(keys)

    def stop(self, key: str, *, probes: Probes = ()) -> Stop | None:
        """What stops a job of ``key`` from starting, as far as is known without asking the database."""
        if not self._resting and not self._is_restricted(key):
            return None
        facts_of, now = self._snapshot.facts, None
        for level in path(key):
            facts = facts_of.get(level)
            if level in self._resting:
                return Stop(level, "cooldown", self._resting[level])
            if facts is None or facts.calm:
                continue
            now = now or self.now()
            stop = refusal(facts, now, probing=self._is_probe(facts, probes))
            if stop is not None:
                return stop
        return None

    def capped(self, key: str) -> Sequence[str]:
        """The keys of the path on which an ended job frees a slot that others may wait for."""
        if not self._is_restricted(key):
            return self._policies.capped(key)
        facts_of, keys = self._snapshot.facts, []
        for level in path(key):
            facts = facts_of.get(level)
            override = None if facts is None else facts.policy_override
            policy = in_force(
                self._policies.for_key(level, override), None if facts is None else facts.learnt, self.now()
            )
            if policy.concurrency is not None or (facts is not None and needs_count(facts, policy, self.now())):
                keys.append(level)
        return keys

    # -- requests --------------------------------------------------------------------------------------------

    async def check(self, key: str, *, probes: Probes = (), own: str | None = None) -> bool:
        """Raise `ResourceStopped` if a gate of the path is shut; facts are fresh.

        ``own``: the job's key, whose path the claim elects the probes of; "" if there is no job. A circuit of any other
        resource that is due may be tried out by a request (True then), or nobody ever would.
        """
        await self._snapshot.refresh(path(key))
        if (stop := self.stop(key, probes=probes)) is None:
            return False
        if own is not None and stop.gate == "breaker" and self._probing.due(key, own, probes):
            return True
        raise ResourceStopped(stop.resource, stop.gate, stop.until)

    def budgets_by_kind(self) -> dict[str, dict[str, str]]:
        """The kinds whose jobs count for a budget that is stopped or slowed, as far as is known, by account."""
        return self.names.by_account(self._snapshot.restricted) if self.names.groups else {}

    def is_taught(self, key: str) -> bool:
        """Whether a limit was learnt from throttles of a resource of the path."""
        facts_of = self._snapshot.facts
        return self._is_restricted(key) and any(k in facts_of and facts_of[k].learnt is not None for k in path(key))

    async def reserve(self, key: str, cost: float) -> Reservation:
        """Draw for a request that is about to come, and wait until `LOOK_BEFORE` the draw's moment.

        Raises `ResourceStopped`. `admit` uses it up; if that does not happen soon, it is given back.
        """
        began = self._monotonic()
        await self.check(key)
        flights = await self._lessons.flows.enter(key, limited=bool(self._limits(key)))
        reservation = Reservation(key, cost, self._limits(key), flights)
        try:
            if reservation.limits:
                reservation.draw = await self._drawing.draw(reservation.limits, cost)
                if (ahead := reservation.draw.send_at - self._monotonic() - LOOK_BEFORE) > 0:
                    await asyncio.sleep(ahead)
            await self.check(key)
        except BaseException:
            self.release(reservation)
            raise
        loop, reservation.waited = asyncio.get_running_loop(), self._monotonic() - began
        reservation.timer = loop.call_later(LOOK_BEFORE + FRESH_FOR, self.release, reservation, context=apart())
        return reservation

    def release(self, reservation: Reservation) -> None:
        """Give back a reservation that no request has used."""
        if not reservation.take():
            return
        self._lessons.flows.leave(reservation.flights)
        if reservation.draw is not None and not self._closing:
            self._drawing.give_back(reservation.draw)

    async def admit(
        self,
        key: str,
        cost: float = 1.0,
        *,
        probes: Probes = (),
        own: str | None = None,
        reservation: Reservation | None = None,
    ) -> GatePermit:
        """Check the gates and draw the request limits, waiting up to two seconds; raises `ResourceStopped`.

        Exactly one of `answered`, `failed` and `abandoned` takes the permit back. See `check` for ``own``, and
        `reserve` for ``reservation``.
        """
        due = await self.check(key, probes=probes, own=own)
        draw: TimedDraw | None = None
        if reservation is not None and (reservation.key, reservation.cost) == (key, cost) and reservation.take():
            flights, draw, limits = reservation.flights, reservation.draw, reservation.limits
        else:
            if reservation is not None:
                self.release(reservation)
            flights = await self._lessons.flows.enter(key, limited=bool(self._limits(key)))
            limits = self._limits(key)
        try:
            if draw is None and (not limits or cost <= 0) and not due:
                if self.stop(key, probes=probes) is not None:  # `enter` has waited
                    await self.check(key, probes=probes, own=own)
                permit = self._new_permit(key, probes)
            else:
                permit = await self._draw_permit(key, cost, limits, draw, probes=probes, own=own)
        except BaseException:
            self._lessons.flows.leave(flights)
            raise
        permit.flights = flights
        return permit

    async def _draw_permit(
        self, key: str, cost: float, limits: Limits, draw: TimedDraw | None, *, probes: Probes, own: str | None
    ) -> GatePermit:
        """A permit with what was drawn for it (perhaps before: ``draw``), and with the circuits that it tries out."""
        elected: Probes = ()
        try:
            for _ in range(_MOST_TRIES):
                if draw is None and limits and cost > 0:
                    draw = await self._drawing.draw(limits, cost)
                due, now = await self._look_and_wait(draw, key, probes, own), self._limits(key)
                if draw is None or now == limits or not self._lessons.is_slower_now(draw, now):
                    break
                self._drawing.give_back(draw)  # drawn at a rate that holds no more
                draw, limits = None, now
            if due:
                elected = await self._probing.elect(key, own or "")
                probes = (*probes, *elected)
                await self.check(key, probes=probes)
        except BaseException:
            if draw is not None:
                self._drawing.give_back(draw)
            for level, generation in elected:
                self._probing.give_back(level, generation)
            raise
        permit = self._new_permit(key, probes)
        permit.draw, permit.elected = draw, elected
        return permit

    async def _look_and_wait(self, draw: TimedDraw | None, key: str, probes: Probes, own: str | None) -> bool:
        """Wait for a draw's moment, and check the gates just before it; returns what `check` does."""
        ahead = 0.0 if draw is None else draw.send_at - self._monotonic()
        if ahead > LOOK_BEFORE:
            await asyncio.sleep(ahead - LOOK_BEFORE)
        due = await self.check(key, probes=probes, own=own)  # both the wait and the draw took time
        if draw is not None and (ahead := draw.send_at - self._monotonic()) > 0:
            await asyncio.sleep(ahead)
            if not due and (stop := self.stop(key, probes=probes)) is not None:  # this worker has heard of it meanwhile
                raise ResourceStopped(stop.resource, stop.gate, stop.until)
        return due

    def is_late(self, permit: GatePermit) -> bool:
        """Asked in the moment before the request is written, from any thread: whether to call `again` first."""
        if self._monotonic() > permit.fresh_until:
            return True
        return permit.draw is not None and self._drawing.is_late(permit.draw)

    async def again(self, permit: GatePermit) -> None:
        """Check the gates once more, and draw again if need be, for a request that was admitted and not sent in time.

        Raises `ResourceStopped`; nothing was sent then, and what was drawn is given back.
        """
        key = permit.key
        of_path = zip(path(key), permit.generations, strict=True)
        probes = tuple(one for one in of_path if one[0] in permit.probing)
        for _ in range(_MOST_TRIES):
            draw, permit.draw = permit.draw, None  # from here on it is given back here
            if draw is not None:
                draw = await self._drawing.draw_again(draw) if self._drawing.is_late(draw) else draw
            try:
                await self._look_and_wait(draw, key, probes, None)
            except BaseException:
                if draw is not None:
                    self._drawing.give_back(draw)
                raise
            new = self._new_permit(key, probes)
            permit.generations, permit.sent_at, permit.fresh_until = new.generations, new.sent_at, new.fresh_until
            permit.draw = draw
            if not self.is_late(permit):
                return

    def give_back(self, key: str, generation: int) -> None:
        """See `Probing.give_back`."""
        self._probing.give_back(key, generation)

    async def answered(self, permit: GatePermit, key: str, answer: AnswerFacts, failure: Failure | None) -> None:
        """Take in an answer: a cooldown at once, then breaker, budgets and the real cost."""
        try:
            if failure is not None and failure.kind in WAITS_FOR_RESOURCE:
                await self._throttled(key, failure, permit, answer.budget)
            elif failure is None and self._policies.for_key(permit.key).learn.latency:
                with contextlib.suppress(DatabaseUnreachable):  # it is measured again
                    await self._lessons.measure(permit, (self.now() - permit.sent_at).total_seconds())
        finally:  # its job may be interrupted
            self._count(permit, failure)
        if (draw := permit.draw) is not None and answer.cost is not None:
            shared = self._policies.tenancy(key) is not Tenancy.APART  # a host of its own bills its account alone
            self._drawing.settle(draw, answer.cost - draw.cost, shared=shared)
        if answer.budgets:
            await self.budgets(permit, answer.budgets, answer.budget and self.names.key_of(key, answer.budget))

    async def failed(self, permit: GatePermit, key: str, failure: Failure) -> None:
        """Take in a request without an answer."""
        try:
            if failure.kind in WAITS_FOR_RESOURCE:
                await self._throttled(key, failure, permit)
        finally:
            self._count(permit, failure)

    def abandoned(self, permit: GatePermit) -> None:
        """End a request that nobody waits for any more: it counts for nothing, and its draw is not given back."""
        self._lessons.flows.leave(permit.flights)
        permit.flights = ()

    def ended(self, key: str, probes: Probes, outcome: Outcome, *, answered: bool) -> None:
        """End an execution. If no request of it was answered, its outcome counts for its resource.

        A probe that decided nothing is given up.
        """
        if isinstance(outcome, Succeeded) and not probes and (answered or not self._is_restricted(key)):
            return
        failure = outcome.failure if isinstance(outcome, Failed) else None
        silent = not answered and isinstance(outcome, (Failed, Succeeded))
        counts = silent and (failure is not None or bool(probes) or self._is_restricted(key))
        if counts or probes:
            permit = self._new_permit(key, probes)
            if counts:
                self._count(permit, failure)
            elif permit.probing:
                self._report_undecided(permit)
        if failure is not None and failure.status is None and failure.kind in WAITS_FOR_RESOURCE:
            self._rest_for_handler(key, failure)

    async def cool_down(
        self,
        key: str,
        until: datetime | None,
        code: str | None = None,
        *,
        sent_at: datetime | None = None,
        exact: bool = False,
        refusal: Refusal | None = None,
    ) -> None:
        """``key`` was throttled until the told time (None: it did not say); see `core.gates.retry_after.cooled`.

        ``refusal``: what it may teach (`core.gates.learnt`).
        """
        if not self._begin_rest(key, until):
            self._lessons.repeated(key, refusal)
            return
        written, details = asyncio.Event(), {"sent_at": sent_at, "exact": exact, "refusal": refusal}
        self._spawn_cool_down(key, until, code, details, written.set)
        await written.wait()  # if its job is cancelled here, the task goes on

    def _spawn_cool_down(self, key: str, *args: Any) -> None:
        self._reporter.spawn(self._cool_down_until_written(key, *args), lambda: self._resting.pop(key, None))

    async def _cool_down_until_written(
        self, key: str, until: datetime | None, code: str | None, details: Mapping[str, Any], tried: Callable[[], None]
    ) -> None:
        """Write a throttle, or try until it is over: this worker rests meanwhile. ``tried`` is called after a try."""
        rests, tries = until or self.now() + timedelta(seconds=1), 0
        while not tries or (self.now() < rests and not self._closing):
            if tries:
                await asyncio.sleep(retry_pause(tries - 1, self._roll()))
            try:
                return await self._cool(key, until, code, details)
            except Exception as error:
                if not isinstance(error, DatabaseUnreachable) and not is_lock_timeout(error):
                    raise
                if not tries:  # the answer itself is not lost
                    log.warning("cannot write yet that %s is throttled (%s)", key, error)
            finally:
                tried()
            tries += 1
        self._resting.pop(key, None)
        return None

    def _begin_rest(self, key: str, until: datetime | None) -> bool:
        """Let a resource rest here before that is written; False if it rests as long already: one signal is enough."""
        now = self.now()
        facts = self._snapshot.facts.get(key)
        rests = None if facts is None else facts.blocked_until
        rests = max((t for t in (rests, self._resting.get(key)) if t is not None and t > now), default=None)
        if rests is not None and (until is None or until <= rests):
            return False
        self._resting[key] = until if until is not None and until > now else now + timedelta(seconds=1)
        return True

    async def _cool(self, key: str, until: datetime | None, code: str | None, details: Mapping[str, Any]) -> None:
        facts = self._snapshot.facts.get(key)
        learning = self._policies.for_key(key, None if facts is None else facts.policy_override).learn
        cooled, news = await self._database.transaction(
            gates.cool_down, key, until, code, self._roll(), learning=learning, how_long=SHORT_LOCK_WAIT, **details
        )
        self._snapshot.put(cooled)
        refusal = None if news else details["refusal"]
        if cooled.key != key:  # the account has as many as are learnt apart
            self.names.fold(key)
            refusal = None
        self._lessons.cooled_down(cooled, refusal)
        self._resting.pop(key, None)
        if news and cooled.blocked_until is not None:
            level = logging.WARNING if cooled.blocked_until - self.now() > HORIZON else logging.INFO
            log.log(level, "%s is throttled until %s (%s)", key, moment(cooled.blocked_until), code or "no code")
            if self._on_cooldown is not None:
                self._on_cooldown(cooled)

    async def budgets(self, permit: GatePermit, budgets: Sequence[Budget], named: str | None = None) -> None:
        """Lower declared limits to an answer's budgets; an undeclared budget that is used up cools its resource down.

        ``named``: the resource of the budget that the request counted for, if it is one of its own.
        """
        now = self.now()
        declared = tuple(one for one in self._limits(permit.key) if not one[1].name.startswith("~"))
        reach = stated_budgets.Reach.of(declared, permit.key, self._policies.tenancy(permit.key))
        stated: list[tuple[Budget, float]] = []
        for budget in budgets:
            if (observation := stated_budgets.observation_of(budget, reach, permit.sent_at, now)) is not None:
                self._drawing.observe(observation)
                self._reporter.wake(0.0 if observation.remaining <= observation.limit.capacity else 1.0)
            elif (seconds := stated_budgets.refill_wait(budget, reach, now)) is not None and budget.remaining:
                self._lessons.flows.hold_to(permit.key, budget.remaining, seconds)
                stated.append((budget._replace(reset_at=add_seconds(now, seconds)), seconds))
            elif (reset_at := stated_budgets.refill_time(budget, reach, now)) is not None:
                await self.cool_down(named or permit.key, reset_at, f"budget:{budget.name}", exact=True)
        if stated:
            self._observe_undeclared(permit, stated)

    def _observe_undeclared(self, permit: GatePermit, stated: Sequence[tuple[Budget, float]]) -> None:
        """Report what is left of undeclared budgets, for the claims and draws of every process."""
        key, sent_at = permit.key, permit.sent_at.timestamp()
        policy, now = self._policies.for_key(key), self.now()
        spread = policy.pace is not None or bool(policy.reserve)
        for limit, budget in self.stated.take_in(key, stated, now.timestamp(), everything=spread):
            remaining, reset_at = budget.remaining or 0.0, budget.reset_at or now
            self._drawing.observe(Observation(key, limit, remaining, reset_at.timestamp(), sent_at))
            self._reporter.wake(_SOON if remaining <= stated_budgets.LOW else 1.0)

    # -- inside ----------------------------------------------------------------------------------------------

    def _new_permit(self, key: str, probes: Probes) -> GatePermit:
        facts_of = self._snapshot.facts
        levels = [facts_of.get(level) for level in path(key)]
        probing: tuple[str, ...] = ()
        if probes:
            probing = tuple(facts.key for facts in levels if facts is not None and self._is_probe(facts, probes))
        generations = tuple(-1 if facts is None else facts.breaker.generation for facts in levels)
        return GatePermit(key, generations, probing, self.now(), fresh_until=self._monotonic() + FRESH_FOR)

    def _is_probe(self, facts: ResourceFacts, probes: Probes) -> bool:
        """Whether a job with these probes is the one its half-open circuit lets through.

        Not one whose lease ended before it sent anything: another has been elected since, in a generation of its own.
        """
        b = facts.breaker
        return b.state == "half_open" and (facts.key, b.generation) in probes and self._owner in (None, b.probe_owner)

    def _is_restricted(self, key: str) -> bool:
        """Whether some gate of the path is known to stop or slow it."""
        return bool(self._snapshot.restricted) and not self._snapshot.restricted.isdisjoint(path(key))

    def _limits(self, key: str) -> Limits:
        limits: list[Any] = []
        facts_of = self._snapshot.facts
        for level in path(key):
            facts = facts_of.get(level)
            policy = self._policies.for_key(level, None if facts is None else facts.policy_override)
            if policy.pace is not None and (stated := self.stated.limits.get(level)) is not None:
                policy = paced(policy, stated)
            if facts is not None and facts.learnt is not None:
                policy = in_force(policy, facts.learnt, self.now())
            if policy.request_limits:
                limits += [(level, limit) for limit in policy.request_limits]
        return tuple(limits)

    def _count(self, permit: GatePermit, failure: Failure | None) -> None:
        """Count the outcome of a request for each resource of its path."""
        key, soonest, facts_of, passed = permit.key, QUIET, self._snapshot.facts, list[str]()
        retry_at, tenancy = None if failure is None else self._retry_at(failure), self._policies.tenancy(key)
        for level, generation in zip(path(key), permit.generations, strict=True):
            verdict = "ok" if failure is None else judge(failure, key, level, tenancy)
            if verdict == "ok" and (failure is None or failure.kind not in WAITS_FOR_RESOURCE):
                passed.append(level)  # a throttled request shows that the resource lives, but it was not let through
            if is_budget(level):
                continue  # circuits are its account's
            floor = retry_at if failure is not None and names(failure, key, level, tenancy) else None
            if level in permit.probing:
                self._reporter.tally.probe(level, generation, verdict, failure, floor)
                soonest = 0.0
                continue
            facts = facts_of.get(level)
            calm = facts is not None and facts.calm
            wait = self._reporter.tally.add(
                level, generation, verdict, child_of(key, level), failure=failure, floor=floor, calm=calm
            )
            soonest = min(soonest, wait)
        self._reporter.wake(soonest)
        self._lessons.ended(key, permit.flights, passed)
        permit.flights = ()

    def _report_undecided(self, permit: GatePermit) -> None:
        for level, generation in zip(path(permit.key), permit.generations, strict=True):
            if level in permit.probing:
                self._reporter.tally.probe(level, generation, "neutral", None, None)
        self._reporter.wake(0.0)

    async def _throttled(self, key: str, failure: Failure, permit: GatePermit, budget: str = "") -> None:
        if failure.kind == "auth":
            return  # credentials are not waited for by the clock
        retry_at = self._retry_at(failure)
        resource, seconds = scoped(failure, key, self._policies.tenancy(key)), None
        if budget:
            resource = await self._budget_of(resource, budget)
        if retry_at is not None:
            seconds = max(0.0, (retry_at - self.now()).total_seconds())
        teaches = failure.kind == FailureKind.THROTTLED
        accounts = self._lessons.common_limit(key, resource, seconds) if teaches else None
        refusal = self._lessons.refusal(resource, permit, seconds) if teaches and accounts is None else None
        await self.cool_down(resource, retry_at, failure.code, sent_at=permit.sent_at, refusal=refusal)
        if accounts:
            root = key.partition("/")[0]
            refusal = self._lessons.refusal(root, permit, seconds)
            await self.cool_down(root, retry_at, failure.code, sent_at=permit.sent_at, refusal=refusal)
            await self._lessons.forget_latest(accounts)

    async def _budget_of(self, resource: str, name: str) -> str:
        """The resource of a named budget; the account itself if it has no other that anybody knows of."""
        key = of_budget(resource, name)
        if key is not None and self.names.key_of(resource, name) is None:
            with contextlib.suppress(ResourceStopped):  # the database is away
                await self._snapshot.refresh([key])
            if key in self._snapshot.restricted:
                self.names.split(resource)
        return self.names.key_of(resource, name) or resource

    def _rest_for_handler(self, key: str, failure: Failure) -> None:
        """Begin the rest that a handler's error asks for: the next job may start before anything is written."""
        resource, until = scoped(failure, key, self._policies.tenancy(key)), self._retry_at(failure)
        if failure.kind != "auth" and self._begin_rest(resource, until):
            details = {"sent_at": None, "exact": False, "refusal": None}
            self._spawn_cool_down(resource, until, failure.code, details, lambda: None)

    def _retry_at(self, failure: Failure) -> datetime | None:
        if failure.retry_at is not None:
            return in_utc(failure.retry_at)
        return None if failure.retry_in is None else add_seconds(self.now(), failure.retry_in)
