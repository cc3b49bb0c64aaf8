"""The dispatcher: keeps the slots filled.

`poll()` claims once and returns how long to wait before the next look (0: at once), so tests call it and never sleep.
It asks for as many jobs as slots are free, plus as many as will be free by the time the claim is back (at most as many
again; of jobs that take milliseconds twice as many), by the rate at which jobs end: slow jobs are never claimed ahead,
fast ones leave no slot idle between two claims. What is claimed holds its lease, its place under caps and its account's
share from then on, and asks the gates again when it starts.

Turns are taken by priority, each tenth time oldest first, so that nothing starves. A bounded look begins behind the
turns that were taken: the highest of their ids is remembered for each priority (`low`). A turn draws its id before its
commit, so one with a lower id may appear later: once a second, and whenever a bounded look brings nothing, an unbounded
one follows.

`Shares` says what accounts hold of the worker's slots, and what each may still have (`core.gates.admission`). An
account is active while it holds a slot, and for a second or two after one of its jobs has ended. One that has its share
is passed over (`full`) until it has given back as many slots as make a claim worth it.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from sqlalchemy.exc import DBAPIError

from resilient.core.base.resource_key import account
from resilient.core.gates.admission import UNKNOWN, mean, share
from resilient.engine.run.services import idle_pause
from resilient.store.db.dialect import LOCK_WAIT, SHORT_LOCK_WAIT, is_lock_timeout
from resilient.store.gates import resources
from resilient.store.jobs import claim

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from datetime import timedelta

    from resilient.core.gates.policy import Policies
    from resilient.core.gates.rate_limit import Limit
    from resilient.engine.run.execution import Execution
    from resilient.store.db.database import Database


POLL: Final = 1.0  # seconds between two looks of an idle worker, jittered; more in a large fleet
OLDEST_EVERY: Final = 10  # looks, of which one takes the oldest turns first
UNBOUNDED_EVERY: Final = 1.0  # seconds
BUSY: Final = 0.02  # seconds until the next look where other transactions lock every resource: no hot loop
SKIP_FOR: Final = 1.0  # seconds for which a key is passed over: it has only unknown kinds, or a locked job
CAREFUL_FOR: Final = 30.0  # seconds after a claim had to wait for whoever holds an ancestor
MOST_TURNS: Final = 256  # of one claim
QUANTUM: Final = (4, 16)  # jobs of one key at a time, at least and at most: fair between keys, and few statements a job
COUNT_EVERY: Final = 0.02  # seconds at least between two counts of ended calls
AHEAD: Final = 0.1  # seconds of work to claim in advance, at most as many jobs as there are slots
QUICK_AHEAD: Final = 0.02  # seconds of work to claim in advance beyond that, at most as many jobs again
SMALLEST_CLAIM: Final = 0.05  # seconds of work that make a claim worth its statements


class Dispatcher:
    """Claims for one worker."""

    def __init__(
        self,
        database: Database,
        *,
        worker_id: str,
        kinds: Sequence[str],
        concurrency: int,
        lease: timedelta,
        policies: Policies,
        monotonic: Callable[[], float],
        rng: random.Random,
        batches: Mapping[str, int] | None = None,
        resources: Sequence[str] = (),
    ) -> None:
        self._database, self._worker_id, self._kinds = database, worker_id, tuple(kinds)
        self._concurrency, self._lease, self._policies = concurrency, lease, policies
        self._monotonic, self._rng = monotonic, rng
        self._batches, self._resources = batches or {}, tuple(resources)
        self._low: dict[int, int] = {}  # per priority: the highest turn id taken; a bounded look starts behind it
        self._looks = 0
        self._unbounded_at = -1e9
        self._yield = 4.0  # slots that a served turn fills, moving average
        self._keys = MOST_TURNS  # keys with work: as many as the last look brought, if that was all of them
        self._rate = 0.0  # calls ended per second, moving average
        self._counted, self._counted_at = 0, monotonic()
        self._skip: dict[str, float] = {}
        self._missing: list[str] = []  # keys without a resource row
        self._careful_until = -1e9
        self._limited = True  # some keys of the last claim had limits
        self.claims = 0
        self.fleet: Callable[[], int] = lambda: 1  # workers that run the same kinds
        self.avoid: Collection[str] = ()  # keys that are passed over for as long as they stand here
        self.rooms: Callable[[set[str]], dict[str, int]] | None = None  # see `claim.Ask`
        self.stated: Mapping[str, tuple[Limit, ...]] = {}  # see `claim.Ask`
        self.budgets: Callable[[], dict[str, dict[str, str]]] = dict  # see `claim.Ask`

    # -- how many -------------------------------------------------------------------------------------------------

    def ended(self, total: int) -> None:
        """Take in how many calls of handlers have ended so far: the rate follows from it."""
        now = self._monotonic()
        if (elapsed := now - self._counted_at) >= COUNT_EVERY:
            rate = (total - self._counted) / elapsed
            self._rate += (rate - self._rate) * min(1.0, elapsed / 0.2)
            self._counted, self._counted_at = total, now

    def slots_to_claim(self, claimed: int) -> int:
        """How many jobs to claim now, given how many are claimed and not ended; 0: not worth it yet."""
        ahead = sum(min(self._concurrency, int(self._rate * seconds)) for seconds in (AHEAD, QUICK_AHEAD))
        room = self._concurrency + ahead - claimed
        return room if room >= self.least_free(self._concurrency) else 0

    def least_free(self, slots: int) -> int:
        """How many of ``slots`` have to be free to make a claim worth its statements."""
        return max(1, min(slots // 2, int(self._rate * SMALLEST_CLAIM)))

    # -- claiming -------------------------------------------------------------------------------------------------

    async def poll(self, slots: int) -> tuple[claim.Claimed | None, float]:
        """Claim up to ``slots`` jobs; returns what was claimed and the delay until the next look."""
        now = self._monotonic()
        if self._missing:  # not after the claim: were that to fail, nobody would hold what was claimed
            await self._make_missing(now)
        ask = self._ask(slots, now)
        try:
            claimed: claim.Claimed = await self._database.transaction(claim.claim, ask)
        except DBAPIError as error:
            if ask.careful or not is_lock_timeout(error):
                raise
            self._careful_until = now + CAREFUL_FOR
            return None, 0.0
        self.claims += 1
        self._learn(ask, claimed, now)
        self._missing = claimed.missing
        result = claimed if claimed.turns else None
        # All turns were taken: it may rest, for new work comes with a wake-up.
        is_complete = ask.priority is None and claimed.turn_count < ask.take
        if claimed.continued or claimed.missing or not is_complete:
            if result is None:  # a bounded look: look everywhere before resting
                self._unbounded_at = -1e9
            is_locked_out = not claimed.jobs and not claimed.missing and 0 < len(claimed.turns) <= claimed.continued
            return result, BUSY if is_locked_out else 0.0
        self._unbounded_at = -1e9
        return result, SKIP_FOR if ask.skip else idle_pause(POLL, 0.25, self.fleet(), self._rng.random())

    async def _make_missing(self, now: float) -> None:
        """Make the rows of new resources; the next claim names those again that another open transaction makes."""
        missing, careful = self._missing, now < self._careful_until
        try:
            await self._database.statement(resources.ensure, missing, SHORT_LOCK_WAIT if careful else LOCK_WAIT)
        except DBAPIError as error:
            if not is_lock_timeout(error):
                raise
            self._careful_until = now + CAREFUL_FOR
            if len(missing) > 1:
                for self._missing in [[key] for key in missing]:
                    await self._make_missing(now)
        self._missing = []

    def _ask(self, slots: int, now: float) -> claim.Ask:
        self._looks += 1
        oldest = self._looks % OLDEST_EVERY == 0
        priority = None
        if not oldest and self._low and now - self._unbounded_at < UNBOUNDED_EVERY:
            priority = max(self._low)
        elif not oldest:
            self._unbounded_at = now
        self._skip = {k: until for k, until in self._skip.items() if until > now}
        take = max(1, min(MOST_TURNS, slots, int(slots / self._yield) + 1))
        least, most = QUANTUM
        quantum = max(least, min(most, slots // 16))
        return claim.Ask(
            worker_id=self._worker_id,
            slots=slots,
            kinds=self._kinds,
            lease=self._lease,
            policy=self._policies.for_key,
            roll=self._rng.random,
            take=take,
            per_key=max(quantum, -(-slots // min(take, self._keys))),  # few keys with work may fill all slots
            priority=priority,
            low=self._low.get(priority, 0) if priority is not None else 0,
            oldest_first=oldest,
            skip=(*self._skip, *self.avoid),
            resources=self._resources,
            batches=self._batches,
            rooms=self.rooms,
            stated=self.stated,
            budgets=self.budgets(),
            careful=now < self._careful_until,
            limited=self._limited,
        )

    def _learn(self, ask: claim.Ask, claimed: claim.Claimed, now: float) -> None:
        if claimed.jobs:
            self._limited = claimed.limited
        self._keys = max(1, len(claimed.turns)) if len(claimed.turns) < ask.take else MOST_TURNS
        for key in (*claimed.unknown, *claimed.conflicts):
            self._skip[key] = now + SKIP_FOR
        if claimed.conflicts and ask.careful:
            self._careful_until = now + CAREFUL_FOR
        if ask.priority is not None and len(claimed.turns) < ask.take:
            # Everything of this priority was taken. It is asked again only after an unbounded look finds more of it.
            self._low.pop(ask.priority, None)
        for turn in claimed.turns:
            if ask.oldest_first or ask.priority is not None:
                self._low[turn.priority] = max(self._low.get(turn.priority, 0), turn.id)
            else:
                self._low.setdefault(turn.priority, 0)
        if served := len(claimed.turns) - claimed.unserved:
            self._yield += (max(0.5, claimed.slots / served) - self._yield) * 0.2


PERIOD: Final = 1.0  # seconds; an account is active in a period in which one of its jobs ended, and in the next
MOST_KEYS: Final = 500  # of one account that are passed over by name


class Shares:
    """The shares of accounts in one worker's slots. Until several had work (``is_shared``) nothing is limited."""

    def __init__(self, slots: int, monotonic: Callable[[], float]) -> None:
        self.is_shared = False
        self._slots, self._monotonic = slots, monotonic
        self._held: Counter[str] = Counter()  # slots, by account, at the last look
        self._active = 1
        self._seconds: dict[str, float] = {}  # that a job took, mean by account, of this period
        self._earlier: dict[str, float] = {}  # the same of the last period
        self._period_at = monotonic()
        self._full: dict[str, int] = {}  # slots to give back, by account that is passed over until then
        self._passed: dict[str, set[str]] = {}  # resource keys that a claim has passed over, by account

    def look(self, running: Iterable[Execution], worth: Callable[[int], int]) -> set[str]:
        """Count anew before a claim; returns the resource keys to pass over.

        ``worth``: how many free slots of so many make a claim worth it.
        """
        units = [one for one in running if one.run is None or next(iter(one.run.members.values())) is one]
        slots_of = Counter([account(one.resource_key) for one in units])
        self.is_shared = self.is_shared or len(slots_of) > 1
        if not self.is_shared:
            return set()
        self._turn_period()
        self._held, self._full = slots_of, {}
        self._active = max(len(slots_of), len(self._seconds), len(self._earlier))
        for name, slots in slots_of.items():
            most = self._most(name, self._active)
            if slots > most - (least := worth(most)):
                self._full[name] = slots - most + least
        self._passed = {name: keys for name, keys in self._passed.items() if name in self._full}
        if not self._full:
            return set()
        keys = {one.resource_key for one in units if account(one.resource_key) in self._full}
        return keys.union(*self._passed.values())

    def _turn_period(self) -> None:
        if (now := self._monotonic()) - self._period_at >= PERIOD:
            self._earlier = self._seconds if now - self._period_at < 2 * PERIOD else {}
            self._seconds, self._period_at = {}, now

    def _mean(self, name: str) -> float:
        return self._seconds.get(name) or self._earlier.get(name, UNKNOWN)

    def _most(self, name: str, active: int) -> int:
        return share(self._slots, active, self._mean(name))

    def rooms(self, waiting: set[str]) -> dict[str, int]:
        """How many slots each of these accounts may take in the claim after the last look; empty: any number."""
        self.is_shared = self.is_shared or len(waiting) > 1
        if not self.is_shared:
            return {}
        active = max(self._active, len(waiting | self._held.keys()))
        return {name: self._most(name, active) - self._held[name] for name in waiting}

    def passed(self, keys: Iterable[str]) -> None:
        """Note the resource keys that the last claim has passed over, because their accounts have their share."""
        for key in keys:
            siblings = self._passed.setdefault(account(key), set())
            if len(siblings) < MOST_KEYS:
                siblings.add(key)
            self._full.setdefault(account(key), 1)

    def ended(self, key: str, seconds: float) -> bool:
        """Note that a job of this key gave its slot back after so many seconds; True if a claim is worth it now."""
        if not self.is_shared:
            return False
        name = account(key)
        self._seconds[name] = mean(self._mean(name), seconds)
        if name not in self._full:
            return False
        self._full[name] -= 1
        if self._full[name] > 0:
            return False
        del self._full[name]
        return True
