"""Request limits: drawn from the database when requests are sent.

All draws of a worker that come while one transaction is under way go into the next, so a thousand waiting
requests cost one. A busy path through fast limits leases some units more (a fraction of a second of the rate)
and spends them without asking; what is left over goes back with the next draw. A draw that must wait a moment
has reserved its place; one that would wait longer is refused, and so are those behind it until that time,
without asking.

A draw is for a moment of the database's clock, and good for a short while (`Place.until`): a request that reaches its
socket later, because the commit was slow, a connection had to be opened or the process stood still, draws again, for a
moment far enough ahead to be on time then (`lead`). So what goes over all sockets keeps to the limit, not only what was
drawn.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from resilient.core.bounds import ACTUAL_COST
from resilient.core.errors import ResourceStopped
from resilient.core.limit import ROAD
from resilient.core.resource_key import depth
from resilient.engine.clock_bracket import ClockBracket
from resilient.store import limits
from resilient.store.limits import Settled

if TYPE_CHECKING:
    from collections.abc import Callable

    from resilient.core.limit import Limit
    from resilient.store.database import Database
    from resilient.store.limits import Drawn, Seen

log = logging.getLogger("resilient.gate")
PATIENCE: Final = 2.0  # seconds a request may wait in place
Path = tuple[tuple[str, "Limit"], ...]  # (resource, limit) of every request limit on a request's path
FRESH: Final = ROAD / 2  # seconds; the other half is for the way from the last look to the socket
LEAST_LEAD, LONGEST_LEAD = 0.005, 1.0  # seconds
_BATCH: Final = 500
_MOST_PURSES: Final = 10_000
_LEAST_LEASE: Final = 2  # units
_MOST_WINDOWS: Final = ACTUAL_COST.value
_AWAY: Final = 5.0  # seconds a job waits if the database does not answer


@dataclass(slots=True)
class Purse:
    """What this worker holds of one path of limits: units that were leased, to be spent without asking."""

    path: Path
    chunk: int  # units worth leasing at once; below 2: none
    lease: float  # seconds
    units: float = 0.0  # leased and not spent
    until: float = 0.0  # monotonic
    tats: tuple[float, ...] = ()  # of each limit, after the lease
    draws: int = 0  # in the present lease time
    before: int = 0  # in the one before
    since: float = 0.0  # monotonic
    shut_until: float = 0.0  # epoch seconds; before that a draw of `shut_cost` is refused
    shut_cost: float = 0.0
    shut_by: str = ""

    def count(self, at: float) -> None:
        """One more draw."""
        if at - self.since > self.lease:
            self.before = self.draws if at - self.since <= 2 * self.lease else 0
            self.draws, self.since = 0, at
        self.draws += 1

    def spend(self, cost: float, at: float) -> bool:
        """Take from the leased units."""
        if self.units < cost or at >= self.until:
            return False
        self.units -= cost
        return True


@dataclass(slots=True)
class Place:
    """One draw: when to send (monotonic), until when at the latest, and what `Settled` needs to give it back."""

    purse: Purse
    cost: float
    send_at: float
    until: float
    slot: float  # the earliest the moment it was drawn for can be, monotonic
    tats: tuple[float, ...]


@dataclass(slots=True)
class _Waiting:
    purse: Purse
    cost: float
    answer: asyncio.Future[Drawn]
    lead: float = 0.0


class Drawing:
    """The draws of one worker."""

    def __init__(self, database: Database, monotonic: Callable[[], float], now: Callable[[], datetime]) -> None:
        self._database, self._monotonic, self._now = database, monotonic, now
        self._purses: dict[tuple[tuple[str, str], ...], Purse] = {}
        self._leased: list[Purse] = []  # purses with units
        self._waiting: list[_Waiting] = []
        self._settled: list[Settled] = []
        self._clocks = ClockBracket()
        self._lead = 0.0  # seconds; how far ahead a draw must be to be on time
        self._seen: dict[tuple[str, str], Seen] = {}
        self._task: asyncio.Task[None] | None = None

    async def draw(self, path: Path, cost: float) -> Place:
        """Draw ``cost`` from every limit of ``path``; send at `Place.send_at`. Raises `ResourceStopped`."""
        purse, at = self._purse(path), self._monotonic()
        purse.count(at)
        if purse.spend(cost, at):
            return Place(purse, cost, at, purse.until + FRESH, at, purse.tats)
        self._refuse_if_shut(purse, cost)
        waiting = _Waiting(purse, cost, asyncio.get_running_loop().create_future(), self._lead)
        self._lead = self._lead * 0.95 if self._lead > LEAST_LEAD else 0.0  # perhaps less will do
        self._waiting.append(waiting)
        self._start()
        try:
            drawn = await waiting.answer
        except asyncio.CancelledError:
            self._cancelled(waiting)
            raise
        if not drawn.draw.granted:
            purse.shut_until, purse.shut_cost = drawn.draw.until, cost
            purse.shut_by = path[drawn.draw.by][0]
            raise self._stopped(purse)
        return self._place(purse, cost, drawn)

    def _place(self, purse: Purse, cost: float, drawn: Drawn) -> Place:
        slot, send_at = self._clocks.earliest(drawn.draw.until), self._clocks.latest(drawn.draw.until)
        until = slot + purse.lease + FRESH
        if self._clocks.settled:  # so far away that nobody can know better: it is sent as soon as it surely may be
            until = max(until, send_at + FRESH / 2)
        return Place(purse, cost, send_at, until, slot, drawn.tats)

    def is_late(self, place: Place) -> bool:
        """Whether a request may not be sent on this draw any more. May be asked from any thread."""
        return self._monotonic() > place.until

    async def draw_again(self, place: Place) -> Place:
        """Another draw for one that is late. Raises `ResourceStopped`."""
        self._lead = min(LONGEST_LEAD, 1.25 * max(0.0, self._monotonic() - place.slot))
        place.purse.units = 0.0  # leased at the same time, and as late
        self.settle(place, -place.cost)
        return await self.draw(place.purse.path, place.cost)

    def settle(self, place: Place, units: float, *, shared: bool = True) -> None:
        """Draw ``units`` more than were asked for, or (negative) give some back, with the next draw.

        More than a limit gives in its whole window is taken as that much; of a limit of several accounts, more than
        the account's own limits give in theirs. ``shared``: also of such limits.
        """
        if units:
            path = place.purse.path
            least = min((limit.rate for key, limit in path if depth(key) > 1), default=float("inf"))
            for (key, limit), until in zip(path, place.tats, strict=True):
                if depth(key) > 1:
                    self._settled.append(Settled(key, limit, min(units, limit.rate * _MOST_WINDOWS), until))
                elif shared:
                    self._settled.append(Settled(key, limit, min(units, limit.rate * _MOST_WINDOWS, least), until))
            self._start()

    def see(self, seen: Seen) -> None:
        """Remember what the server reported; `flush` writes it."""
        id_ = (seen.resource_key, seen.limit.name)
        known = self._seen.get(id_)
        if known is None or seen.sent_at >= known.sent_at:
            self._seen[id_] = seen

    async def flush(self) -> None:
        """Write what is settled and what was seen."""
        if self._settled:
            self._start()
        if self._task is not None:
            await asyncio.shield(self._task)
        if seen := list(self._seen.values()):
            self._seen = {}
            await self._database.transaction(limits.observe, seen)

    # -- inside ----------------------------------------------------------------------------------------------

    def _purse(self, path: Path) -> Purse:
        id_ = tuple((key, limit.name) for key, limit in path)
        purse = self._purses.get(id_)
        if purse is None or purse.path != path:
            if len(self._purses) >= _MOST_PURSES:
                self._purses.clear()
            lease = min(limit.lease for _, limit in path)
            chunk = int(min(lease / limit.interval for _, limit in path))
            purse = self._purses[id_] = Purse(path, chunk if chunk >= _LEAST_LEASE else 0, lease)
        return purse

    def _refuse_if_shut(self, purse: Purse, cost: float) -> None:
        if cost >= purse.shut_cost and purse.shut_until > self._now().timestamp() + PATIENCE:
            raise self._stopped(purse)

    def _stopped(self, purse: Purse) -> ResourceStopped:
        # A little early: the wait that is left is waited in place, where it has a reserved end.
        until = datetime.fromtimestamp(purse.shut_until - PATIENCE / 2, UTC)
        return ResourceStopped(purse.shut_by, "limit", until)

    def _cancelled(self, waiting: _Waiting) -> None:
        if waiting.answer.done() and not waiting.answer.cancelled() and waiting.answer.result().draw.granted:
            self.settle(self._place(waiting.purse, waiting.cost, waiting.answer.result()), -waiting.cost)

    def _start(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="resilient-draw")

    async def _run(self) -> None:
        while self._waiting or self._settled:
            batch = [w for w in self._waiting[:_BATCH] if not w.answer.cancelled()]
            self._waiting = self._waiting[_BATCH:]
            settled, self._settled = self._settled + self._left_over(), []
            asks = [limits.Ask(w.purse.path, w.cost, PATIENCE, self._more(w, batch), w.lead) for w in batch]
            try:
                drawn = await self._transaction(asks, settled)
            except Exception as error:  # noqa: BLE001 - the database may be away; the jobs wait
                log.warning("cannot draw request limits (%s: %s)", type(error).__name__, error)
                self._settled += [one for one in settled if one.units > 0]
                until = self._now() + timedelta(seconds=_AWAY)
                for w in batch:
                    if not w.answer.done():
                        w.answer.set_exception(ResourceStopped(w.purse.path[0][0], "database", until))
                continue
            for w, answer in zip(batch, drawn, strict=True):
                if answer.leased:
                    w.purse.units, w.purse.tats = w.purse.units + answer.leased, answer.tats
                    w.purse.until = self._clocks.earliest(answer.now) + w.purse.lease
                    self._leased.append(w.purse)
                if not w.answer.done():
                    w.answer.set_result(answer)
                elif answer.draw.granted:  # cancelled meanwhile
                    self.settle(self._place(w.purse, w.cost, answer), -w.cost)

    async def _transaction(self, asks: list[limits.Ask], settled: list[Settled]) -> list[limits.Drawn]:
        try:
            return await self._exchange(asks, settled)
        except Exception:  # noqa: BLE001 - once more: a deadlock or a cut connection is over by then
            await asyncio.sleep(0.05)
            return await self._exchange(asks, settled)

    async def _exchange(self, asks: list[limits.Ask], settled: list[Settled]) -> list[limits.Drawn]:
        before = self._monotonic()
        drawn: list[limits.Drawn] = await self._database.transaction(limits.draw, asks, settled)
        if drawn:
            self._clocks.learn(drawn[0].now, before, self._monotonic())
        return drawn

    def _more(self, w: _Waiting, batch: list[_Waiting]) -> int:
        """Units to lease on top: as many as the purse used lately, for the last of its draws in the batch."""
        purse = w.purse
        if not purse.chunk or w.lead or next(x for x in reversed(batch) if x.purse is purse) is not w:
            return 0
        lately = max(purse.before, purse.draws)
        return min(purse.chunk, lately) if lately >= _LEAST_LEASE else 0

    def _left_over(self) -> list[Settled]:
        """Leased units nobody spent in time."""
        at = self._monotonic()
        over = [purse for purse in self._leased if purse.until <= at]
        self._leased = [purse for purse in self._leased if purse.until > at]
        found = [
            Settled(key, limit, -purse.units, until)
            for purse in over
            if purse.units
            for (key, limit), until in zip(purse.path, purse.tats, strict=True)
        ]
        for purse in over:
            purse.units = 0.0
        return found
