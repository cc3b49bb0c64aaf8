"""What a worker knows about resource rows, and how old that is.

Facts come from claims, from the worker's own writes and from refreshes: one query for all keys that somebody
waits for at that moment. Older facts never replace newer ones (`revision`); a row that vanished and came back
starts anew, so after a few seconds anything is believed.

The clock is the database's, carried forward on the worker's monotonic one: workers' clocks may be an hour
apart.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from sqlalchemy.exc import DBAPIError

from resilient.core.base.errors import ResourceStopped
from resilient.core.base.loggers import FailureLog, apart, logger
from resilient.core.base.resource_key import is_budget
from resilient.core.gates.admission import ResourceFacts
from resilient.store.db.dialect import SHORT_LOCK_WAIT, is_lock_timeout
from resilient.store.db.direct import direct
from resilient.store.gates import resources

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from sqlalchemy import Connection

    from resilient.store.db.database import Database
    from resilient.store.db.dialect import Dialect

log = logger("gate")
OLDEST: Final = 30.0  # seconds; with the database away, facts up to this age are better than none
_DISBELIEF: Final = 5.0  # seconds for which facts of an older revision are refused
_MOST: Final = 20_000  # keys; beyond that those not asked for lately are forgotten
_FORGET: Final = 60.0  # seconds since the last facts of a key that may be forgotten


class Snapshot:
    """Facts of the keys in use, each at most ``max_age`` seconds old when `refresh` returns."""

    def __init__(self, database: Database, monotonic: Callable[[], float], max_age: float) -> None:
        self._database, self._monotonic, self._max_age = database, monotonic, max_age
        self._failures = FailureLog(log, "resources can be read again")
        self._clock = database.dialect.clock
        self.known: dict[str, ResourceFacts] = {}
        self.uneasy: set[str] = set()  # known keys that some gate stops or slows
        self._at: dict[str, float] = {}
        self._offset: tuple[datetime, float] | None = None
        self._wanted: set[str] = set()
        self._round: asyncio.Future[None] | None = None  # the refresh that will take in `_wanted`
        self._task: asyncio.Task[None] | None = None

    def now(self) -> datetime:
        """The database's time, as well as it is known here."""
        if self._clock is not None:
            return self._clock()
        if self._offset is None:
            return datetime.now(UTC)
        base, then = self._offset
        return base + timedelta(seconds=self._monotonic() - then)

    def learn(self, facts: Mapping[str, ResourceFacts], now: datetime) -> None:
        """Take in what was read or written at ``now`` (database time)."""
        at = self._monotonic()
        self._offset = (now, at)
        facts_of, ages = self.known, self._at
        for key, new in facts.items():
            old = facts_of.get(key)
            if old is None or new.revision >= old.revision or at - ages[key] > _DISBELIEF:
                self._know(key, new)
                ages[key] = at  # what is refused renews nothing, or a key that is read often would refuse for ever
        if len(facts_of) > _MOST:
            self._forget(at)

    def put(self, facts: ResourceFacts) -> None:
        """Take in one row as this worker just wrote it."""
        self._know(facts.key, facts)
        self._at[facts.key] = self._monotonic()

    def _know(self, key: str, facts: ResourceFacts) -> None:
        self.known[key] = facts
        if not facts.calm:
            self.uneasy.add(key)
        elif self.uneasy:
            self.uneasy.discard(key)

    def forget(self, keys: Iterable[str]) -> None:
        """Read these keys again before they are used."""
        for key in keys:
            if key in self._at:
                self._at[key] = -1e9

    async def refresh(self, keys: Sequence[str]) -> None:
        """See that these keys are fresh; raises `ResourceStopped` if the database has been away for too long."""
        horizon = self._monotonic() - self._max_age
        ages = self._at
        stale = [key for key in keys if ages.get(key, -1e9) < horizon]
        if not stale:
            return
        self._wanted.update(stale)
        if self._round is None:
            self._round = asyncio.get_running_loop().create_future()
        round_ = self._round
        if self._task is None or self._task.done():
            self._start()
        await asyncio.shield(round_)
        oldest = self._monotonic() - OLDEST
        for key in keys:
            if ages.get(key, -1e9) < oldest:
                raise ResourceStopped(key, "database", self.now() + timedelta(seconds=_DISBELIEF))

    def _start(self) -> None:
        self._task = asyncio.create_task(self._read(), name="resilient-snapshot", context=apart())
        self._task.add_done_callback(self._ended)

    def _ended(self, _task: asyncio.Task[None]) -> None:
        """Somebody may have cancelled the task: another one reads for those who still wait."""
        if self._round is not None:
            self._start()

    async def _read(self) -> None:
        """Rounds until nobody waits; each reads everything asked for while the last one was under way."""
        while self._round is not None:
            keys, round_ = sorted(self._wanted), self._round
            self._wanted, self._round = set(), None
            try:
                facts, now = await self._database.transaction(_read, keys)
                if missing := [key for key in keys if key not in facts]:
                    if owned := [key for key in missing if not is_budget(key)]:  # a budget's comes with a throttle
                        await self._make(owned)
                    facts |= {key: ResourceFacts(key, calm=True) for key in missing}
                self.learn(facts, now)
            except Exception as error:  # noqa: BLE001 - the database may be away; the age decides
                self._failures.failed("cannot read resources (%s: %s)", type(error).__name__, error)
            else:
                self._failures.worked()
            finally:
                round_.set_result(None)

    async def _make(self, missing: Sequence[str]) -> None:
        """Make the rows of these keys; while another open transaction makes one of them, leave all to a later round."""
        try:
            await self._database.transaction(resources.ensure, missing, SHORT_LOCK_WAIT)
        except DBAPIError as error:
            if not is_lock_timeout(error):
                raise

    def _forget(self, at: float) -> None:
        for key in [key for key, then in self._at.items() if at - then > _FORGET]:
            del self._at[key]
            self.known.pop(key, None)
            self.uneasy.discard(key)


@direct
def _read(c: Connection, d: Dialect, keys: Sequence[str]) -> tuple[dict[str, ResourceFacts], datetime]:
    rows = resources.read(c, d, keys)
    return rows, d.now(c)
