"""The dispatcher: keeps the slots filled.

`poll()` claims once and returns how long to wait before the next look (0: at once), so tests call it and never sleep.
It asks for what is free plus what will be free by the time the claim is back (at most as many again), measured from how
fast jobs end: slow jobs are never claimed ahead, fast ones leave no slot idle between two claims.

Turns are taken by priority, each tenth time oldest first, so that nothing starves. How far dead turns reach is
remembered per priority (`low`); ids are drawn before they commit, so once a second, and whenever a bounded look finds
nothing, an unbounded one follows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sqlalchemy.exc import DBAPIError

from resilient.store import claim, patience, resources

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Collection, Mapping, Sequence
    from datetime import timedelta

    from resilient.core.policy import Policies
    from resilient.store.database import Database

POLL: Final = 1.0  # seconds between two looks of an idle worker, jittered
OLDEST_EVERY: Final = 10
UNBOUNDED_EVERY: Final = 1.0
BUSY: Final = 0.02  # every resource taken was locked by somebody: no hot loop while he is slow or stopped
SKIP_FOR: Final = 1.0  # how long a key with only unknown kinds, or with a job that somebody holds, is passed over
CAREFUL_FOR: Final = 30.0  # seconds after a claim had to wait for whoever holds a job
MOST_TURNS: Final = 256
QUANTUM: Final = (4, 16)  # jobs of one key at a time, at least and at most: fair between keys, and few statements a job
COUNT_EVERY: Final = 0.02  # seconds
AHEAD: Final = 0.1  # seconds of work to claim in advance
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
    ) -> None:
        self._database, self._worker_id, self._kinds = database, worker_id, tuple(kinds)
        self._concurrency, self._lease, self._policies = concurrency, lease, policies
        self._monotonic, self._rng = monotonic, rng
        self._batches = batches or {}
        self._low: dict[int, int] = {}  # per priority: ids below are known to be gone
        self._looks = 0
        self._unbounded_at = -1e9
        self._yield = 4.0  # slots a turn fills that is not cut short by too few of them, moving average
        self._keys = MOST_TURNS  # how many keys the last look found, if fewer than it asked for
        self._rate = 0.0  # calls ended per second, moving average
        self._counted, self._counted_at = 0, monotonic()
        self._skip: dict[str, float] = {}
        self._missing: list[str] = []  # keys without a resource row
        self._careful_until = -1e9
        self.claims = 0
        self.avoid: Collection[str] = ()  # keys that are passed over for as long as they stand here

    # -- how many -------------------------------------------------------------------------------------------------

    def ended(self, total: int) -> None:
        """Tell how many calls of handlers have ended so far."""
        now = self._monotonic()
        if (elapsed := now - self._counted_at) >= COUNT_EVERY:
            rate = (total - self._counted) / elapsed
            self._rate += (rate - self._rate) * min(1.0, elapsed / 0.2)
            self._counted, self._counted_at = total, now

    def wanted(self, claimed: int) -> int:
        """How many jobs to claim now, given how many are claimed and not ended; 0: not worth it yet."""
        ahead = min(self._concurrency, int(self._rate * AHEAD))
        room = self._concurrency + ahead - claimed
        worth = max(1, min(self._concurrency // 2, int(self._rate * SMALLEST_CLAIM)))
        return room if room >= worth else 0

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
            if ask.careful or not patience.was_held_up(error):
                raise
            self._careful_until = now + CAREFUL_FOR
            return None, 0.0
        self.claims += 1
        self._learn(ask, claimed, now)
        self._missing = claimed.missing
        found = claimed if claimed.turns else None
        was_all = ask.priority is None and claimed.taken < ask.take  # what is committed from now on wakes us
        if claimed.continued or claimed.missing or not was_all:
            if found is None:  # a bounded look: look everywhere before resting
                self._unbounded_at = -1e9
            stuck = not claimed.jobs and not claimed.missing and 0 < len(claimed.turns) <= claimed.continued
            return found, BUSY if stuck else 0.0
        self._unbounded_at = -1e9
        return found, SKIP_FOR if ask.skip else POLL * (0.75 + 0.5 * self._rng.random())

    async def _make_missing(self, now: float) -> None:
        """Rows of new resources, but for those that somebody makes in an open transaction: they are tried again."""
        missing, careful = self._missing, now < self._careful_until
        try:
            await self._database.statement(resources.ensure, missing, patience.SHORT if careful else patience.PATIENCE)
        except DBAPIError as error:
            if not patience.was_held_up(error):
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
            batches=self._batches,
            careful=now < self._careful_until,
        )

    def _learn(self, ask: claim.Ask, claimed: claim.Claimed, now: float) -> None:
        self._keys = max(1, len(claimed.turns)) if len(claimed.turns) < ask.take else MOST_TURNS
        for key in (*claimed.unknown, *claimed.held):
            self._skip[key] = now + SKIP_FOR
        if claimed.held:
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
