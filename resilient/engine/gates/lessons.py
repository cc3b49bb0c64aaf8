"""What this process learns from throttles and from what is let through, and when it writes that (`core.gates.learnt`).

`Flows` are the requests of this process that are on their way, by resource: how many at once, and what was let
through. A resource without a declared limit that this process has not used lately begins slowly, because nobody knows
what it takes: one request, then more as they are answered well, and a little more with time where answers are slow.
After a throttle it begins so again; how many jobs may start then is decided over all processes by the claim. Nothing
here is written for a resource that no throttle taught anything about; for the others, what was let through is reported
to its row.

A throttle concerns an account, and its resource learns from it. Where throttles of several accounts show one limit of
the application (`core.gates.retry_after.CommonLimit`), the root of their provider learns instead.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlalchemy.exc import DBAPIError

from resilient.core.base.errors import DatabaseUnreachable
from resilient.core.base.loggers import FailureLog, logger
from resilient.core.base.phrases import learnt_limit
from resilient.core.base.resource_key import depth, is_budget, path
from resilient.core.gates.learnt import STRETCH, Answers, Refusal, allowance, summary
from resilient.core.gates.policy import Tenancy
from resilient.core.gates.rate_limit import LEARNT
from resilient.core.gates.retry_after import BURST, CommonLimit
from resilient.engine.gates.timer import Timer
from resilient.store.db.dialect import is_lock_timeout
from resilient.store.gates import controls as gates
from resilient.store.gates.controls import Report

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import datetime

    from resilient.core.gates.admission import ResourceFacts
    from resilient.core.gates.policy import Policies
    from resilient.engine.gates.drawing import Limits, TimedDraw
    from resilient.engine.gates.permits import GatePermit
    from resilient.engine.gates.snapshot import Snapshot
    from resilient.store.db.database import Database


FIRST, FIRST_OF_ROOT = 1.0, 8.0  # requests at once of an unknown resource; of an unknown provider with all its accounts
GROWTH: Final = 0.5  # requests at once that each good answer adds
WIDER, PAUSE = 1.5, 0.25  # times as many at once, after each so many seconds without an answer
SHARE: Final = 0.25  # of the requests that the provider says are left: at once
IDLE: Final = 2.0  # seconds without a request, after which counting begins again
PROMPT, SOON = 0.05, 1.0  # seconds until a report, while the load comes back and later
_UNUSED: Final = 60.0  # seconds after which it begins slowly again
MOST_RESOURCES: Final = 20_000
MOST_ROOTS: Final = 1_000
_UNBOUNDED: Final = 1e9  # requests at once: no bound


@dataclass(slots=True, eq=False)
class Flow:
    """One resource. Times are monotonic."""

    key: str
    cap: float  # requests at once
    generation: int = 0  # of what is learnt
    in_flight: int = 0
    accepted: int = 0  # requests that were let through and are not reported yet
    peak: int = 0  # most of them at once
    since: float = 0.0  # the begin of the stretch that `accepted` counts
    accepted_before: int = 0  # the same of the stretch before, where nothing is learnt
    since_before: float = 0.0
    used_at: float = 0.0
    grown_at: float = 0.0
    stated_cap: float = 1e9  # requests at once, by what the provider says is left, until `stated_until`
    stated_until: float = 0.0
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)


class Flight(NamedTuple):
    """One request in flight through one resource: its generation, and how many were in flight when it began."""

    flow: Flow
    generation: int
    at_once: int


class Flows:
    """The flows of one process. ``facts`` are those it has read, by key. Not for threads."""

    def __init__(
        self, monotonic: Callable[[], float], facts: Mapping[str, ResourceFacts], now: Callable[[], datetime]
    ) -> None:
        self._monotonic, self._facts, self._now = monotonic, facts, now
        self._flows: dict[str, Flow] = {}
        self._outbound: list[Report] = []  # of generations that are over, and those that could not be written
        self._unreported: set[str] = set()  # keys with something to report

    async def enter(self, key: str, *, limited: bool = False) -> tuple[Flight, ...]:
        """Wait until there is room on the whole path; `leave` gives it back.

        ``limited``: by declared limits, so that nothing unknown has to be found out slowly.
        """
        flows = [self._flow(level) for level in path(key)]
        if limited:
            for flow in flows:
                if not flow.generation:
                    flow.cap = _UNBOUNDED
        while (full := next((f for f in flows if not self._has_room(f)), None)) is not None:
            await self._wait(full)
        flights = []
        for flow in flows:
            self._follow(flow)
            # the idle time before says nothing of the rate
            if flow.generation and not flow.in_flight and not flow.accepted:
                flow.since = self._monotonic()
            flow.in_flight += 1
            flights.append(Flight(flow, flow.generation, flow.in_flight))
        return tuple(flights)

    def leave(self, flights: tuple[Flight, ...], passed: tuple[str, ...] = ()) -> float | None:
        """End flights; ``passed``: levels that let them through. Returns the seconds until a report is due, if any."""
        due: float | None = None
        for flight in flights:
            flow = flight.flow
            flow.in_flight -= 1
            if flow.key in passed:
                # one of an earlier generation says nothing of the present rate
                if flight.generation == flow.generation:
                    flow.cap, flow.grown_at = flow.cap + GROWTH, self._monotonic()
                wait = self._count(flow, flight.generation, flight.at_once)
                due = wait if due is None or (wait is not None and wait < due) else due
            while flow.waiting and flow.in_flight < flow.cap:
                waiter = flow.waiting.popleft()
                if not waiter.done():
                    waiter.set_result(None)
                    break
        return due

    def hold_to(self, key: str, remaining: float, seconds: float) -> None:
        """The provider says how many requests are left for so many seconds: send only `SHARE` of them at once.

        So the requests in flight, of all processes, do not exceed what is left.
        """
        flow = self._flow(key)
        flow.stated_cap, flow.stated_until = max(1.0, remaining * SHARE), self._monotonic() + seconds

    def credit(self, key: str) -> float | None:
        """Note that an execution without a request went well; returns what `leave` does."""
        flow = self._flow(key)
        self._follow(flow)
        return self._count(flow, flow.generation, 1) if flow.generation else None

    def refusal(self, key: str, flights: tuple[Flight, ...], wait: float | None) -> Refusal | None:
        """What a throttle of ``key`` may teach. The counts move into it and are not reported again."""
        flight = next((one for one in flights if one.flow.key == key), None)
        if flight is None:
            return None
        flow = flight.flow
        if flight.generation != flow.generation:
            return Refusal(flight.generation, wait)
        accepted, began = flow.accepted, flow.since
        if not flow.generation and flow.accepted_before:
            accepted, began = accepted + flow.accepted_before, flow.since_before
        peak = flow.peak
        self._restart(flow)
        return Refusal(flight.generation, wait, accepted, max(0.0, self._monotonic() - began), peak)

    def give_back(self, key: str, refusal: Refusal) -> None:
        """Report what a refusal counted: it belongs to an earlier throttle, so it teaches nothing."""
        if refusal.accepted:
            self._outbound.append(Report(key, Answers(refusal.generation, refusal.accepted, refusal.peak)))

    def changed(self, key: str) -> float | None:
        """Take in new facts of a key; returns what `leave` does."""
        if (flow := self._flows.get(key)) is not None:
            self._follow(flow)
        return PROMPT if self._outbound else None

    def collect(self) -> list[Report]:
        """Take out what is to be reported."""
        reports, self._outbound = self._outbound, []
        for key in self._unreported:
            flow = self._flows.get(key)
            if flow is not None and flow.accepted and flow.generation:
                reports.append(Report(key, Answers(flow.generation, flow.accepted, max(1, flow.peak))))
                flow.accepted = flow.peak = 0
        self._unreported.clear()
        return reports

    def put_back(self, reports: list[Report]) -> None:
        """Keep reports that could not be written for the next `collect`."""
        self._outbound = (reports + self._outbound)[-MOST_RESOURCES:]

    # -- inside ----------------------------------------------------------------------------------------------

    def _flow(self, key: str) -> Flow:
        at, flow = self._monotonic(), self._flows.get(key)
        if flow is None or (at - flow.used_at > _UNUSED and not flow.in_flight and not flow.waiting):
            if len(self._flows) >= MOST_RESOURCES:
                self._forget()
            flow = Flow(key, FIRST if "/" in key else FIRST_OF_ROOT, since=at, grown_at=at)
            flow.generation = self._generation(key)
            if is_budget(key) and not flow.generation:  # its account begins slowly
                flow.cap = _UNBOUNDED
            self._flows[key] = flow
        elif at - flow.used_at > IDLE and not flow.in_flight and not flow.generation:
            self._restart(flow)
        flow.used_at = at
        return flow

    def _forget(self) -> None:
        """Forget half of the flows: first those that nothing is learnt about, then the quietest; none in use."""
        at = self._monotonic()
        idle = [flow for flow in self._flows.values() if not flow.in_flight and not flow.waiting and flow.used_at < at]
        idle.sort(key=lambda flow: (flow.generation > 0, flow.used_at))
        for flow in idle[: MOST_RESOURCES // 2]:
            del self._flows[flow.key]
            if flow.generation and flow.accepted:
                self._outbound.append(Report(flow.key, Answers(flow.generation, flow.accepted, max(1, flow.peak))))

    def _generation(self, key: str) -> int:
        facts = self._facts.get(key)
        return 0 if facts is None or facts.learnt is None else facts.learnt.generation

    def _follow(self, flow: Flow) -> None:
        """Take in that the resource's generation changed: what was counted belongs to the one before."""
        generation = self._generation(flow.key)
        if generation == flow.generation:
            return
        facts = self._facts.get(flow.key)  # None: it was forgotten
        learnt = None if facts is None else facts.learnt
        if flow.accepted and learnt is not None and learnt.previous == flow.generation:
            self._outbound.append(Report(flow.key, Answers(flow.generation, flow.accepted, max(1, flow.peak))))
        flow.generation = generation
        first = FIRST if "/" in flow.key else FIRST_OF_ROOT
        flow.cap = first if generation else max(first, flow.in_flight + 1)  # forgotten: not all at once
        self._restart(flow)

    def _restart(self, flow: Flow) -> None:
        at = self._monotonic()
        flow.accepted = flow.peak = flow.accepted_before = 0
        flow.since, flow.grown_at = at, at

    def _count(self, flow: Flow, generation: int, at_once: int) -> float | None:
        at = self._monotonic()
        if generation != flow.generation:
            facts = self._facts.get(flow.key)
            if facts is None or facts.learnt is None or facts.learnt.previous != generation:
                return None
            self._outbound.append(Report(flow.key, Answers(generation, 1)))
            return PROMPT
        if not flow.generation:
            if at - flow.since > STRETCH:
                flow.accepted_before, flow.since_before = flow.accepted, flow.since
                flow.accepted, flow.peak, flow.since = 0, 0, at
            flow.accepted += 1
            flow.peak = max(flow.peak, at_once)
            return None
        flow.accepted += 1
        flow.peak = max(flow.peak, at_once)
        self._unreported.add(flow.key)
        facts = self._facts.get(flow.key)
        is_slow = facts is not None and allowance(facts.learnt, self._now().timestamp()) is not None
        return PROMPT if is_slow else SOON

    def _has_room(self, flow: Flow) -> bool:
        if flow.in_flight >= flow.stated_cap and self._monotonic() < flow.stated_until:
            return False
        return flow.in_flight < flow.cap or self._widen(flow)

    def _widen(self, flow: Flow) -> bool:
        """Raise the cap as time passes without answers; returns whether there is room now."""
        at = self._monotonic()
        if at - flow.grown_at >= PAUSE:
            flow.cap, flow.grown_at = max(flow.cap * WIDER, flow.cap + 1), at
        return flow.in_flight < flow.cap

    async def _wait(self, flow: Flow) -> None:
        waiter = asyncio.get_running_loop().create_future()
        flow.waiting.append(waiter)
        try:
            async with asyncio.timeout(PAUSE):
                await waiter
        except TimeoutError:
            return
        finally:
            if waiter in flow.waiting:
                flow.waiting.remove(waiter)


log = logger("gate")
_RETRY: Final = 1.0  # seconds until a failed write is tried again
_LASTING: Final = 5  # failed writes in a row that are worth a warning; a row is held for a moment now and then

_BLOCK: Final = 20  # answers whose mean time is looked at
_SLOWER: Final = 2.0  # times as long as usual
_USUAL: Final = 0.1  # weight of a block in what is usual
_MOST_SLOW: Final = 10  # slow blocks in a row, after which that is what is usual


class Latency:
    """How long the answers of one resource take, and whether that is twice as long as usual."""

    def __init__(self) -> None:
        self._usual: float | None = None
        self._count, self._sum, self._slow = 0, 0.0, 0

    def take_in(self, seconds: float) -> float | None:
        """Take in one answer's time; returns how many times as long as usual its block took, if that is too long."""
        self._count, self._sum = self._count + 1, self._sum + seconds
        if self._count < _BLOCK:
            return None
        mean, self._count, self._sum = self._sum / self._count, 0, 0.0
        usual = self._usual
        if usual is not None and mean >= _SLOWER * usual and self._slow < _MOST_SLOW:
            self._slow += 1
            return mean / usual if usual > 0 else _SLOWER
        self._usual = mean if usual is None or self._slow >= _MOST_SLOW else usual + _USUAL * (mean - usual)
        self._slow = 0
        return None


class Lessons:
    """The lessons of one worker, and their reports."""

    def __init__(
        self,
        database: Database,
        policies: Policies,
        *,
        snapshot: Snapshot,
        monotonic: Callable[[], float],
        spawn: Callable[[Any], None],
    ) -> None:
        self._database, self._policies, self._snapshot = database, policies, snapshot
        self._monotonic, self._spawn = monotonic, spawn
        self.flows = Flows(monotonic, snapshot.facts, snapshot.now)
        self._common_limits: dict[str, CommonLimit] = {}  # by root
        self._latencies: dict[str, Latency] = {}
        self._timer = Timer(lambda: self._spawn(self._report()))
        self._closed = False
        self._failures = FailureLog(log, "what was let through can be saved again")
        self._failed = 0  # writes in a row

    async def close(self) -> None:
        """Report what is left, and no more after that."""
        self._closed = True
        self._timer.cancel()
        try:
            await self.flush()
        except Exception as error:  # noqa: BLE001 - the rate is measured again
            log.warning("could not save what was let through (%s: %s)", type(error).__name__, error)

    async def flush(self) -> None:
        """Report now."""
        if reports := self.flows.collect():
            try:
                changed = await self._database.transaction(gates.take_in, reports, self._policies)
            except BaseException:  # a cancelled task loses nothing either
                self.flows.put_back(reports)
                raise
            for facts in changed:
                self._snapshot.put(facts)
                self.flows.changed(facts.key)

    # -- throttles -------------------------------------------------------------------------------------------

    def refusal(self, resource: str, permit: GatePermit, seconds: float | None) -> Refusal | None:
        """What the throttle of a resource may teach. ``seconds``: the wait it asks for, or None."""
        return self.flows.refusal(resource, permit.flights, seconds)

    def common_limit(self, key: str, resource: str, seconds: float | None) -> list[str] | None:
        """The accounts whose throttles, with this one of ``resource``, show a limit of their root.

        Empty or None if they show none; see `CommonLimit.throttled`.
        """
        if depth(resource) != 2 or self._policies.tenancy(key) is Tenancy.APART:  # noqa: PLR2004
            return None
        root = resource.partition("/")[0]
        if not self._policies.for_key(root).learn.on:
            return None
        facts = self._snapshot.facts.get(root)
        has_limit = facts is not None and facts.learnt is not None and facts.learnt.kind == "rate"
        return self._accounts_of(root).throttled(resource, self._monotonic(), seconds, has_limit=has_limit)

    async def forget_latest(self, accounts: Sequence[str]) -> None:
        """Forget what these accounts learnt just now: it was their root's limit."""
        since = self._snapshot.now() - timedelta(seconds=2 * BURST)
        await self._run_unless_locked(gates.forget_burst, accounts, since)
        self._snapshot.forget(accounts)

    def cooled_down(self, facts: ResourceFacts, repeat: Refusal | None) -> None:
        """Go on after a cooldown was written. ``repeat``: its refusal, if it belongs to an earlier throttle."""
        if repeat is not None:
            self.flows.give_back(facts.key, repeat)
        elif (limit := summary(facts.learnt, self._snapshot.now().timestamp())) is not None:
            log.info("%s is asked no faster than %s", facts.key, learnt_limit(limit, self._snapshot.now()))
        self._wake(self.flows.changed(facts.key))

    def repeated(self, key: str, refusal: Refusal | None) -> None:
        """Report what was counted before a throttle that teaches nothing, because another one came first."""
        if refusal is not None:
            self.flows.give_back(key, refusal)
            self._wake(self.flows.changed(key))

    def is_slower_now(self, draw: TimedDraw, limits: Limits) -> bool:
        """Whether a learnt limit has become slower since the draw."""
        drawn = {key: limit.interval for key, limit in draw.limits if limit.name == LEARNT}
        now = {key: limit.interval for key, limit in limits if limit.name == LEARNT}
        return any(now[key] > drawn.get(key, 0.0) * 1.001 for key in now)

    async def measure(self, permit: GatePermit, seconds: float) -> None:
        """Take in how long a good answer took; if that is much longer than usual, fewer requests are sent."""
        key = permit.key
        if len(self._latencies) >= MOST_RESOURCES:
            self._latencies.clear()
        times = self._latencies.setdefault(key, Latency()).take_in(seconds)
        refusal = None if times is None else self.flows.refusal(key, permit.flights, None)
        if times is None or refusal is None:
            return
        facts = await self._run_unless_locked(gates.slow_down, key, refusal, times)
        if facts is not None:
            self._snapshot.put(facts)
            self.cooled_down(facts, None)

    # -- answers ---------------------------------------------------------------------------------------------

    def ended(self, key: str, flights: tuple[Flight, ...], passed: Sequence[str]) -> None:
        """End a request, or (without flights) an execution that sent none."""
        if flights:
            self._wake(self.flows.leave(flights, tuple(passed)))
            root, slash, rest = key.partition("/")
            if slash and passed:
                account = f"{root}/{rest.partition('/')[0]}"
                if account in passed:
                    self._accounts_of(root).passed(account, self._monotonic())
            return
        for level in passed:
            facts = self._snapshot.facts.get(level)
            if facts is not None and facts.learnt is not None:
                self._wake(self.flows.credit(level))

    # -- inside ----------------------------------------------------------------------------------------------

    async def _run_unless_locked(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Run ``fn`` in a transaction; None if somebody holds a row it needs: no answer waits for that."""
        try:
            return await self._database.transaction(fn, *args)
        except DBAPIError as error:
            if not is_lock_timeout(error):
                raise
            return None

    def _accounts_of(self, root: str) -> CommonLimit:
        if root not in self._common_limits and len(self._common_limits) >= MOST_ROOTS:
            self._common_limits.clear()
        return self._common_limits.setdefault(root, CommonLimit())

    def _wake(self, delay: float | None) -> None:
        if delay is None or self._closed:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        self._timer.call_by(loop, loop.time() + delay)

    async def _report(self) -> None:
        try:
            await self.flush()
        except Exception as error:  # noqa: BLE001 - somebody holds the row, or the database is away
            self._failed += 1
            if isinstance(error, DatabaseUnreachable) or self._failed >= _LASTING:
                self._failures.failed(
                    "cannot save what was let through (%s: %s); trying again", type(error).__name__, error
                )
            else:
                log.debug("cannot save what was let through (%s: %s)", type(error).__name__, error)
            self._wake(_RETRY)
        else:
            self._failed = 0
            self._failures.worked()
