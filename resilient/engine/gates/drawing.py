"""Request limits: drawn from the database when requests are sent, and lowered by what servers say.

All draws of a worker that come while one transaction is under way go into the next, so a thousand waiting
requests cost one. A busy path through fast limits leases some units more (a fraction of a second of the rate)
and spends them without asking; what is left over goes back with the next draw, if nobody has drawn since. A
draw that must wait a moment has reserved its place; one that would wait longer is refused, and so are those
behind it until that time, without asking the database.

A draw is for a moment of the database's clock, and good for a short while (`TimedDraw.deadline`): a request that
reaches its socket later, because the commit was slow, a connection had to be opened or the process stood still, draws
again, for a moment far enough ahead to be on time then (`lead`). So what goes over all sockets keeps to the limit, not
only what was drawn. A slow commit makes every path's draws late; a connection that opens slowly, those of its own path
alone.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from resilient.core.base.bounds import ACTUAL_COST
from resilient.core.base.errors import ResourceStopped
from resilient.core.base.instants import from_epoch
from resilient.core.base.loggers import FailureLog, apart, logger
from resilient.core.base.resource_key import depth
from resilient.core.gates.rate_limit import ROAD, Limit
from resilient.core.jobs.backoff import retry_pause
from resilient.store.db.dialect import SHORT_LOCK_WAIT, is_lock_timeout
from resilient.store.gates import limits as store
from resilient.store.gates.limits import Settled

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime

    from resilient.store.db.database import Database
    from resilient.store.gates.limits import Drawn, Observation


log = logger("gate")
PATIENCE: Final = 2.0  # seconds a request may wait in place
Limits = tuple[tuple[str, Limit], ...]  # (resource, limit) of every request limit on a request's path
GRACE: Final = ROAD / 2  # seconds a draw is good for; the other half is for the way from the last look to the socket
LEAST_LEAD, LONGEST_LEAD = 0.005, 1.0  # seconds
_BATCH: Final = 500  # draws in one transaction
_MOST_LEASES: Final = 10_000
_LEAST_LEASE: Final = 2  # units
_SHUT_FOR: Final = 2.0  # seconds in which a refusal is repeated without asking: a person may reset the limit meanwhile
_NEXT_TRY: Final = 5.0  # seconds until a job whose draw failed, and what a held limit has to settle, are tried again


@dataclass(slots=True)
class LimitLease:
    """What this worker holds of one path of limits: units that were leased, to be spent without asking."""

    limits: Limits
    chunk: int  # units worth leasing at once; below 2: none
    duration: float  # seconds
    units: float = 0.0  # leased and not spent
    ends_at: float = 0.0  # monotonic
    tats: tuple[float, ...] = ()  # of each limit, its theoretical arrival time (GCRA) after the lease
    lead: float = 0.0  # seconds; how far ahead its draws must be to be on time
    draws: int = 0  # from `since` on, for as long as a lease lasts
    before: int = 0  # draws in as long a time before `since`
    since: float = 0.0  # monotonic
    shut_until: float = 0.0  # epoch seconds; before that a draw of `shut_cost` is refused
    shut_at: float = 0.0  # monotonic; when that was answered
    shut_cost: float = 0.0
    shut_by: str = ""

    def count(self, at: float) -> None:
        """One more draw."""
        if at - self.since > self.duration:
            self.before = self.draws if at - self.since <= 2 * self.duration else 0
            self.draws, self.since = 0, at
        self.draws += 1

    def spend(self, cost: float, at: float) -> bool:
        """Take from the leased units."""
        if self.units < cost or at >= self.ends_at:
            return False
        self.units -= cost
        return True

    def empty(self) -> list[Settled]:
        """Take out the leased units that nobody spent."""
        units, self.units = self.units, 0.0
        limits = zip(self.limits, self.tats, strict=True) if units else ()
        return [Settled(key, limit, -units, tat, unsent=True) for (key, limit), tat in limits]


@dataclass(slots=True)
class TimedDraw:
    """One draw: when to send (monotonic), when at the latest, and what `Settled` needs to give it back."""

    limits: Limits
    cost: float
    send_at: float
    deadline: float
    earliest: float  # monotonic; the moment that it was drawn for is not before
    tats: tuple[float, ...]
    arrived: float  # monotonic; when it was drawn


@dataclass(slots=True)
class _Waiting:
    lease: LimitLease
    cost: float
    answer: asyncio.Future[Drawn]
    lead: float = 0.0
    is_passed: bool = False  # one of its limits was held by somebody when it was asked for


class Drawing:
    """The draws of one worker."""

    def __init__(
        self,
        database: Database,
        monotonic: Callable[[], float],
        now: Callable[[], datetime],
        roll: Callable[[], float],
    ) -> None:
        self._database, self._monotonic, self._now, self._roll = database, monotonic, now, roll
        self._leases: dict[tuple[store.LimitId, ...], LimitLease] = {}
        self._unspent: dict[int, LimitLease] = {}  # leases with unspent units, by `id`
        self._waiting: list[_Waiting] = []
        self._settled: list[Settled] = []
        self._postponed: list[Settled] = []  # of limits that somebody holds
        self._postponed_timer: asyncio.TimerHandle | None = None  # at its end they are tried again
        self._clocks = ClockBracket()
        self._lead = 0.0  # seconds; how far ahead every draw must be, because commits are slow
        self._observations: dict[tuple[str, str], Observation] = {}
        self._task: asyncio.Task[None] | None = None
        self._rounds: list[asyncio.Future[None]] = []  # those who wait for the end of the next transaction
        self._tries = 0  # transactions in a row that failed
        self._failures = FailureLog(log, "request limits can be drawn again")
        self._retry_timer: asyncio.TimerHandle | None = None  # at its end settlements that failed are tried again

    async def draw(self, limits: Limits, cost: float) -> TimedDraw:
        """Draw ``cost`` from each of ``limits``; send at `TimedDraw.send_at`. Raises `ResourceStopped`."""
        lease, at = self._lease_of(limits), self._monotonic()
        lease.count(at)
        if lease.spend(cost, at):
            return TimedDraw(limits, cost, at, lease.ends_at + GRACE, at, lease.tats, at)
        self._refuse_if_shut(lease, cost)
        lead = max(lease.lead, self._lead)
        waiting = _Waiting(lease, cost, asyncio.get_running_loop().create_future(), lead)
        self._waiting.append(waiting)
        self._start()
        try:
            drawn = await waiting.answer
        except asyncio.CancelledError:
            self._give_back_cancelled(waiting)
            raise
        if not drawn.draw.granted:
            lease.shut_until, lease.shut_cost, lease.shut_at = drawn.draw.at, cost, self._monotonic()
            lease.shut_by = limits[drawn.draw.by][0]
            raise self._stopped(lease)
        return self._timed(lease, cost, drawn)

    def _timed(self, lease: LimitLease, cost: float, drawn: Drawn) -> TimedDraw:
        earliest, send_at = self._clocks.earliest(drawn.draw.at), self._clocks.latest(drawn.draw.at)
        deadline = earliest + lease.duration + GRACE
        if self._clocks.is_narrowest:  # it is sent as soon as it surely may be
            deadline = max(deadline, send_at + GRACE / 2)
        return TimedDraw(lease.limits, cost, send_at, deadline, earliest, drawn.tats, self._monotonic())

    def is_late(self, draw: TimedDraw) -> bool:
        """Whether a request may not be sent on this draw any more. May be asked from any thread."""
        return self._monotonic() > draw.deadline

    async def draw_again(self, draw: TimedDraw) -> TimedDraw:
        """Another draw for one that is late. Raises `ResourceStopped`."""
        lease = self._lease_of(draw.limits)
        if draw.arrived > draw.deadline:
            self._lead = _lead_for(draw.arrived - draw.earliest)
        else:
            lease.lead = _lead_for(self._monotonic() - draw.earliest)
        self._settled += lease.empty()  # leased at the same time, and as late
        self.give_back(draw)
        return await self.draw(draw.limits, draw.cost)

    def give_back(self, draw: TimedDraw) -> None:
        """Nothing was sent on this draw: its units come back with the next transaction, if nobody has drawn since."""
        self._reopen(draw.limits)
        for (key, limit), tat in zip(draw.limits, draw.tats, strict=True):
            self._settled.append(Settled(key, limit, -draw.cost, tat, unsent=True))
        self._start()

    def settle(self, draw: TimedDraw, units: float, *, shared: bool = True) -> None:
        """Correct a request's charge by ``units``, once its cost is known: negative ones go back. With the next draw.

        A cost is bounded by what the limit gives in its window (`ACTUAL_COST`), and at a limit that accounts share also
        by what the account's own limits give in theirs. ``shared``: settle at such limits too.
        """
        if units < 0:
            self._reopen(draw.limits)
        if units:
            limits = draw.limits
            most = min((limit.rate for key, limit in limits if depth(key) > 1), default=float("inf"))
            for (key, limit), tat in zip(limits, draw.tats, strict=True):
                if depth(key) > 1:
                    self._settled.append(Settled(key, limit, min(units, limit.rate * ACTUAL_COST.value), tat))
                elif shared:
                    self._settled.append(Settled(key, limit, min(units, limit.rate * ACTUAL_COST.value, most), tat))
            self._start()

    def observe(self, observation: Observation) -> None:
        """Remember what the server reported; `flush` writes it."""
        id_ = (observation.resource_key, observation.limit.name)
        before = self._observations.get(id_)
        if before is None or observation.sent_at >= before.sent_at:
            self._observations[id_] = observation

    async def flush(self) -> None:
        """Try once to write settlements and observations; draws that come meanwhile are not waited for.

        While the database is away, what is to be drawn and what was observed stay pending. Units that would
        come back are lost.
        """
        self._retry_postponed()
        self._end_retry_pause()
        await self._round()
        if self._observations:
            await self._write_observations()

    async def close(self) -> None:
        """`flush`; what could not be written is given up."""
        try:
            await self.flush()
        except Exception as error:  # noqa: BLE001 - limits may be told wrong for a while, a worker has to end
            log.warning("could not save what is left of request limits (%s: %s)", type(error).__name__, error)
        finally:
            for pending in (self._settled, self._postponed, self._observations):
                pending.clear()
            self._retry_postponed()
            self._end_retry_pause()

    # -- inside ----------------------------------------------------------------------------------------------

    async def _write_observations(self) -> None:
        """Write what is pending, or what somebody's lock leaves free of it; raises if anything stays pending."""
        rest, self._observations = list(self._observations.values()), {}
        try:
            await self._database.transaction(store.observe, rest)
            rest = []
        except Exception as error:
            if not is_lock_timeout(error):
                raise
            rest = await self._database.transaction(store.observe_free, rest)
            if rest:
                raise
        finally:  # the database may be away, or this task cancelled
            newer, self._observations = self._observations, {}
            for one in (*rest, *newer.values()):
                self.observe(one)

    async def _round(self) -> None:
        """Wait for the end of the transaction that takes along what is pending now, if anything is."""
        if self._task is not None and not self._task.done():
            end = asyncio.get_running_loop().create_future()
            self._rounds.append(end)
            await end

    def _lease_of(self, limits: Limits) -> LimitLease:
        id_ = _limit_ids(limits)
        lease = self._leases.get(id_)
        if lease is None or lease.limits != limits:
            lead = 0.0 if lease is None else lease.lead  # as slow as before, whatever the limits are
            if len(self._leases) >= _MOST_LEASES:
                self._leases.clear()
            duration = min(limit.lease for _, limit in limits)
            chunk = int(min(duration / limit.interval for _, limit in limits))
            lease = self._leases[id_] = LimitLease(limits, chunk if chunk >= _LEAST_LEASE else 0, duration, lead=lead)
        return lease

    def _reopen(self, limits: Limits) -> None:
        """Let the next request ask the database again, because units come back."""
        if (lease := self._leases.get(_limit_ids(limits))) is not None:
            lease.shut_until = 0.0

    def _refuse_if_shut(self, lease: LimitLease, cost: float) -> None:
        shut = cost >= lease.shut_cost and lease.shut_until > self._now().timestamp() + PATIENCE
        if shut and self._monotonic() - lease.shut_at < _SHUT_FOR:
            raise self._stopped(lease)

    def _stopped(self, lease: LimitLease) -> ResourceStopped:
        # A little early: the rest of the wait takes place in `draw`, where its end is reserved.
        until = from_epoch(lease.shut_until - PATIENCE / 2)
        return ResourceStopped(lease.shut_by, "limit", until)

    def _give_back_cancelled(self, waiting: _Waiting) -> None:
        answer = waiting.answer
        if not answer.done() or answer.cancelled() or answer.exception() is not None:
            return
        if answer.result().draw.granted:
            self.give_back(self._timed(waiting.lease, waiting.cost, answer.result()))

    def _start(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="resilient-draw", context=apart())
            self._task.add_done_callback(self._continue)

    def _continue(self, _task: asyncio.Task[None]) -> None:
        """Start another task if this one ended, perhaps cancelled, before its work was done."""
        if self._has_work():
            self._start()

    def _has_work(self) -> bool:
        return bool(self._waiting or self._rounds or (self._settled and self._retry_timer is None))

    def _end_retry_pause(self) -> None:
        if self._retry_timer is not None:
            self._retry_timer.cancel()
            self._retry_timer = None
        if self._settled:
            self._start()

    def _note_failure(self, error: BaseException) -> None:
        """Settlements pause before they are tried again; a draw does not wait for that, and takes them along."""
        if isinstance(error, Exception):
            self._failures.failed("cannot draw request limits (%s: %s)", type(error).__name__, error)
        if self._settled and self._retry_timer is None:
            pause = retry_pause(self._tries, self._roll())
            self._retry_timer = asyncio.get_running_loop().call_later(pause, self._end_retry_pause, context=apart())
        self._tries += 1

    async def _run(self) -> None:
        while self._has_work():
            ends, self._rounds = self._rounds, []
            try:
                await self._draw_batch()
            except asyncio.CancelledError:
                self._rounds, ends = ends + self._rounds, []
                raise
            finally:
                for end in ends:
                    if not end.done():
                        end.set_result(None)

    async def _draw_batch(self) -> None:
        batch = [w for w in self._waiting[:_BATCH] if not w.answer.cancelled()]
        self._waiting = self._waiting[_BATCH:]
        expired = self._expired_units()
        asks, remainder = self._asks(batch)
        settled, self._settled = self._settled + expired + remainder, []
        if not batch and not settled:
            return
        try:
            drawn, rest = await self._transaction(asks, settled)
        except BaseException as error:  # the database may be away; the jobs wait
            self._settled += _charges(settled)
            for w in batch:
                self._refuse(w)
            self._note_failure(error)
            if isinstance(error, Exception):
                return
            raise
        self._tries = 0
        self._failures.worked()
        self._end_retry_pause()
        self._postpone(rest)
        self._take_in(batch, drawn)

    def _asks(self, batch: list[_Waiting]) -> tuple[list[store.Ask], list[Settled]]:
        """The asks of a batch, and the unspent units of leases that they renew, which go back.

        The last draw of a lease renews it. What every draw is ahead decreases with each transaction.
        """
        asks: list[store.Ask] = []
        remainder: list[Settled] = []
        last = {id(w.lease): w for w in batch}
        for w in batch:
            more = self._units_to_lease(w) if last[id(w.lease)] is w else 0
            if more:
                remainder += w.lease.empty()
            asks.append(store.Ask(w.lease.limits, w.cost, PATIENCE, more, w.lead))
        for w in last.values():
            w.lease.lead = _decreased(w.lease.lead)
        if batch:
            self._lead = _decreased(self._lead)
        return asks, remainder

    def _take_in(self, batch: list[_Waiting], drawn: Sequence[store.Drawn | None]) -> None:
        for w, answer in zip(batch, drawn, strict=True):
            if answer is None:
                self._ask_again(w)
                continue
            if answer.leased:
                w.lease.units, w.lease.tats = answer.leased, answer.tats
                w.lease.ends_at = self._clocks.earliest(answer.now) + w.lease.duration
                self._unspent[id(w.lease)] = w.lease
            if not w.answer.done():
                w.answer.set_result(answer)
            elif answer.draw.granted:  # cancelled meanwhile
                self.give_back(self._timed(w.lease, w.cost, answer))

    def _postpone(self, rest: list[Settled]) -> None:
        """Postpone settlements of limits that somebody holds: with them every draw would wait for that lock."""
        self._postponed += _charges(rest)
        if self._postponed and self._postponed_timer is None:
            loop = asyncio.get_running_loop()
            self._postponed_timer = loop.call_later(_NEXT_TRY, self._retry_postponed, context=apart())

    def _retry_postponed(self) -> None:
        if self._postponed_timer is not None:
            self._postponed_timer.cancel()
            self._settled, self._postponed, self._postponed_timer = self._settled + self._postponed, [], None
            if self._settled:
                self._start()

    def _ask_again(self, w: _Waiting) -> None:
        """Ask once more for a draw whose limit somebody holds; the second time let its job wait."""
        if not w.is_passed:
            w.is_passed = True
            self._waiting.append(w)
        else:
            self._refuse(w)

    def _refuse(self, w: _Waiting) -> None:
        if not w.answer.done():
            until = self._now() + timedelta(seconds=_NEXT_TRY)
            w.answer.set_exception(ResourceStopped(w.lease.limits[0][0], "database", until))

    async def _transaction(
        self, asks: list[store.Ask], settled: list[Settled]
    ) -> tuple[Sequence[store.Drawn | None], list[Settled]]:
        """What was drawn, and what could not be settled; None where somebody holds a limit of an ask."""
        try:
            return await self._exchange(asks, settled), []
        except Exception as error:  # noqa: BLE001 - see below
            if is_lock_timeout(error):
                return await self._exchange_free(asks, settled)
            await asyncio.sleep(0.05)  # once more: a deadlock or a cut connection is over by then
            return await self._exchange(asks, _charges(settled)), []  # the first one may have been committed

    async def _exchange(self, asks: list[store.Ask], settled: list[Settled]) -> list[store.Drawn]:
        before = self._monotonic()
        drawn: list[store.Drawn] = await self._database.transaction(store.draw, asks, settled, SHORT_LOCK_WAIT)
        if drawn:
            self._clocks.learn(drawn[0].now, before, self._monotonic())
        return drawn

    async def _exchange_free(
        self, asks: list[store.Ask], settled: list[Settled]
    ) -> tuple[list[store.Drawn | None], list[Settled]]:
        before = self._monotonic()
        drawn, rest = await self._database.transaction(store.draw_free, asks, settled)
        if (one := next((one for one in drawn if one is not None), None)) is not None:
            self._clocks.learn(one.now, before, self._monotonic())
        return drawn, rest

    def _units_to_lease(self, w: _Waiting) -> int:
        """Units to lease on top: as many as the lease used lately."""
        lease = w.lease
        if not lease.chunk or w.lead or lease.units >= w.cost:  # its lease came while it waited
            return 0
        lately = max(lease.before, lease.draws)
        return min(lease.chunk, lately) if lately >= _LEAST_LEASE else 0

    def _expired_units(self) -> list[Settled]:
        """Take out the units of leases that ended before they were spent."""
        at = self._monotonic()
        expired = [lease for lease in self._unspent.values() if lease.ends_at <= at]
        for lease in expired:
            del self._unspent[id(lease)]
        return [one for lease in expired for one in lease.empty()]


def _limit_ids(limits: Limits) -> tuple[store.LimitId, ...]:
    return tuple((key, limit.name) for key, limit in limits)


def _charges(settled: list[Settled]) -> list[Settled]:
    """The settlements that may be written twice: charges. A refund written twice would exceed a limit."""
    return [one for one in settled if one.units > 0]


def _decreased(lead: float) -> float:
    """A shorter lead, in case that is enough."""
    return lead * 0.95 if lead > LEAST_LEAD else 0.0


def _lead_for(late: float) -> float:
    """The lead of a path whose request came so many seconds after its draw's moment."""
    return min(LONGEST_LEAD, 1.25 * max(0.0, late))


# -- clocks -----------------------------------------------------------------------------------------------------------
#
# Each exchange with the database that names its time brackets the difference of the two clocks: the time was read after
# the question left and before the answer was here. The narrowest bracket of late is kept; drift widens it. A clock that
# was set breaks it, and a new one begins.

_DRIFT: Final = 5e-4  # seconds a second, of two clocks that nobody disciplines
_ENOUGH: Final = 8  # exchanges after which the bracket is as narrow as the way to the database allows


class ClockBracket:
    """Where a moment of the database's clock (epoch seconds) lies on this process's own (monotonic)."""

    def __init__(self) -> None:
        self._low = self._high = 0.0  # the database's clock less this process's: at least, at most
        self._at = 0.0  # when that was learnt
        self._exchanges = 0

    @property
    def is_narrowest(self) -> bool:
        """Whether more exchanges would make it no narrower."""
        return self._exchanges >= _ENOUGH

    def learn(self, moment: float, before: float, after: float) -> None:
        """Take in that the database's time was ``moment`` between ``before`` and ``after`` of this process."""
        drift = (after - before) * _DRIFT
        bracket = moment - after - drift, moment - before + drift
        low, high = bracket
        if self._exchanges:
            drift = (after - self._at) * _DRIFT
            low, high = max(low, self._low - drift), min(high, self._high + drift)
        if low > high:
            (low, high), self._exchanges = bracket, 0
        self._low, self._high, self._at = low, high, after
        self._exchanges += 1

    def earliest(self, moment: float) -> float:
        """The time of this process before which it is not yet ``moment`` at the database."""
        return moment - self._high

    def latest(self, moment: float) -> float:
        """The time of this process from which on it is ``moment`` at the database, or later."""
        return moment - self._low
