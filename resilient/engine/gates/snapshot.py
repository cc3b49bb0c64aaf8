"""The facts of resource rows that a worker has read, and when it read them.

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
_DISBELIEF: Final = 5.0  # seconds for which facts of an older revision are refused: then the row was made anew
_MOST: Final = 20_000  # keys; beyond that those not asked for lately are forgotten
_FORGET: Final = 60.0  # seconds since the last facts of a key that may be forgotten


class Snapshot:
    """Facts of the keys in use, each at most ``max_age`` seconds old when `refresh` returns."""

    def __init__(self, database: Database, monotonic: Callable[[], float], max_age: float) -> None:
        self._database, self._monotonic, self._max_age = database, monotonic, max_age
        self._failures = FailureLog(log, "resources can be read again")
        self._clock = database.dialect.clock
        self.facts: dict[str, ResourceFacts] = {}
        self.restricted: set[str] = set()  # keys that some gate stops or slows
        self._read_at: dict[str, float] = {}
        self._offset: tuple[datetime, float] | None = None
        self._requested: set[str] = set()
        self._round: asyncio.Future[None] | None = None  # the refresh that will take in `_requested`
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
        facts_of, read_at = self.facts, self._read_at
        for key, new in facts.items():
            old = facts_of.get(key)
            if old is None or new.revision >= old.revision or at - read_at[key] > _DISBELIEF:
                self._keep(key, new)
                read_at[key] = at  # not for refused facts: they would be refused for ever
        if len(facts_of) > _MOST:
            self._forget(at)

    def put(self, facts: ResourceFacts) -> None:
        """Take in one row as this worker just wrote it."""
        self._keep(facts.key, facts)
        self._read_at[facts.key] = self._monotonic()

    def _keep(self, key: str, facts: ResourceFacts) -> None:
        self.facts[key] = facts
        if not facts.calm:
            self.restricted.add(key)
        elif self.restricted:
            self.restricted.discard(key)

    def forget(self, keys: Iterable[str]) -> None:
        """Read these keys again before they are used."""
        for key in keys:
            if key in self._read_at:
                self._read_at[key] = -1e9

    async def refresh(self, keys: Sequence[str]) -> None:
        """Read the keys older than ``max_age``; raises `ResourceStopped` if the database is away for too long."""
        horizon = self._monotonic() - self._max_age
        read_at = self._read_at
        stale = [key for key in keys if read_at.get(key, -1e9) < horizon]
        if not stale:
            return
        self._requested.update(stale)
        if self._round is None:
            self._round = asyncio.get_running_loop().create_future()
        round_ = self._round
        if self._task is None or self._task.done():
            self._start()
        await asyncio.shield(round_)
        oldest = self._monotonic() - OLDEST
        for key in keys:
            if read_at.get(key, -1e9) < oldest:
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
            keys, round_ = sorted(self._requested), self._round
            self._requested, self._round = set(), None
            try:
                facts, now = await self._database.transaction(_read, keys)
                if missing := [key for key in keys if key not in facts]:
                    if owned := [key for key in missing if not is_budget(key)]:  # a throttle makes a budget's
                        await self._insert(owned)
                    facts |= {key: ResourceFacts(key, calm=True) for key in missing}
                self.learn(facts, now)
            except Exception as error:  # noqa: BLE001 - the database may be away; the age decides
                self._failures.failed("cannot read resources (%s: %s)", type(error).__name__, error)
            else:
                self._failures.worked()
            finally:
                round_.set_result(None)

    async def _insert(self, missing: Sequence[str]) -> None:
        """Insert the rows of these keys; if another transaction inserts one of them, leave all to a later round."""
        try:
            await self._database.transaction(resources.ensure, missing, SHORT_LOCK_WAIT)
        except DBAPIError as error:
            if not is_lock_timeout(error):
                raise

    def _forget(self, at: float) -> None:
        for key in [key for key, then in self._read_at.items() if at - then > _FORGET]:
            del self._read_at[key]
            self.facts.pop(key, None)
            self.restricted.discard(key)


@direct
def _read(c: Connection, d: Dialect, keys: Sequence[str]) -> tuple[dict[str, ResourceFacts], datetime]:
    rows = resources.read(c, d, keys)
    return rows, d.now(c)
