"""`app.schedules`: serving the ticks that are due, and what people do with schedules.

Every worker asks about once a second what is due (one indexed statement; none in a program without schedules) and
serves each schedule in a transaction of its own: lock the row, move it on, insert the job. So a tick has one job over
all workers, also if a worker dies in between. The job's unique key is a second guard, and it implements
``overlap="skip"``.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Final

from resilient.core.base.errors import DatabaseUnreachable, InvalidInput, SetupError
from resilient.core.base.loggers import logger
from resilient.core.base.misfit import check_storable, explained_calls
from resilient.core.schedules import cron, schedule
from resilient.engine.ground.audited import audited
from resilient.engine.ground.sessions import SyncFacade, Transactions, blocking
from resilient.engine.jobs import queue
from resilient.engine.schedules import per_account
from resilient.engine.schedules.declaration import Schedule, by_name, job_of
from resilient.store.schedules import accounts as schedule_accounts
from resilient.store.schedules import earlier, programs
from resilient.store.schedules import ticks as store

if TYPE_CHECKING:
    import builtins
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    from sqlalchemy import Connection

    from resilient.core.schedules.schedule import ScheduledAccount, ScheduleInfo, Spec
    from resilient.engine.ground.encoder import Enqueued
    from resilient.engine.ground.ground import Ground
    from resilient.store.db.dialect import Dialect

log = logger("schedules")
BATCH: Final = 100
LOOK_EVERY: Final = 0.8  # seconds; a worker's staging loop may turn much faster
REST: Final = 60.0  # seconds until a schedule that failed is tried again


@explained_calls("app.schedules")
class Schedules:
    """Schedules of one app: ``app.schedules``."""

    def __init__(self, ground: Ground, declared: Iterable[Schedule], *, own_table: bool, here: bool = False) -> None:
        """``own_table``: the accounts' credentials are in a table of the program."""
        self._ground = ground
        self._rng = random.Random()  # noqa: S311 - jitter
        self.declared = by_name(declared)
        self._specs = {s.name: (s.kind, s.spec(ground.encoder)) for s in self.declared.values()}
        self._check_sources(own_table)
        self._is_declared, self._declared_at = False, 0.0
        self._looked_at = -LOOK_EVERY
        self._broken: dict[str, float] = {}  # schedules that failed: the time at which they are tried again
        self._db = Transactions(ground, here=here)

    def _check_sources(self, own_table: bool) -> None:  # noqa: FBT001 - of this class
        """Raise `SetupError` for a pattern with ``own_table``: it matches connections, and would miss accounts."""
        for one in self.declared.values():
            if own_table and isinstance(one.for_each, str):
                raise SetupError(
                    f"schedule {one.name!r}: with credentials= the accounts are in the program's own table: give"
                    " for_each a function that tells their resource keys"
                )

    # -- ticking --------------------------------------------------------------------------------------------------

    async def step(self) -> None:
        """`tick`, at most once in `LOOK_EVERY` seconds."""
        if self._specs and time.monotonic() - self._looked_at >= LOOK_EVERY:
            self._looked_at = time.monotonic()
            await self.tick()

    async def tick(self) -> int:
        """Enqueue the jobs of every tick that is due; returns how many."""
        if not self._specs:
            return 0
        await self.declare()
        enqueued = 0
        while names := await self._ground.database.transaction(store.due, self._healthy(), BATCH):
            enqueued += sum([await self._serve(name) for name in names])
            if len(names) < BATCH:
                break
        if enqueued:
            self._ground.poke()
        return enqueued

    async def declare(self) -> None:
        """Write the declarations to their rows when the process starts, and look after them from then on."""
        now = time.monotonic()
        if not self._is_declared:
            await self._ground.database.transaction(_declare, self._specs, self._ground.kinds)
        elif now - self._declared_at >= programs.LOOK.total_seconds():
            await self._ground.database.transaction(_keep, self._specs, self._ground.kinds)
        else:
            return
        self._is_declared, self._declared_at = True, now

    async def _serve(self, name: str) -> int:
        """Serve one schedule; returns how many jobs are new. Its error stops no other schedule."""
        try:
            if self.declared[name].for_each is not None:
                return await per_account.serve(self._ground.database, self.declared[name], self._rng.random())
            return await self._ground.database.transaction(_serve, name, self._rng.random())
        except DatabaseUnreachable:
            raise
        except Exception:
            self._broken[name] = time.monotonic() + REST
            log.exception("schedule %s cannot tick: this worker leaves it alone for %.0f seconds", name, REST)
            return 0

    def _healthy(self) -> builtins.set[str]:
        now = time.monotonic()
        return {name for name in self._specs if self._broken.get(name, now) <= now}

    # -- people ---------------------------------------------------------------------------------------------------

    @property
    def sync(self) -> SyncSchedules:
        """The same for synchronous programs."""
        return SyncSchedules(Schedules(self._ground, self.declared.values(), own_table=False, here=True))

    async def list(self) -> builtins.list[ScheduleInfo]:
        """Every schedule by name: those declared here, and those that only have a row."""
        return await self._db.read(None, self._list)

    @audited("schedules pause")
    async def pause(self, name: str) -> ScheduleInfo:
        """Let no tick of it happen until `resume`; raises `InvalidInput` for an unknown name."""
        return await self._db.write(None, self._set_paused, name, paused=True)

    @audited("schedules resume")
    async def resume(self, name: str) -> ScheduleInfo:
        """Go on with the next tick; the ticks of the pause are dropped."""
        return await self._db.write(None, self._set_paused, name, paused=False)

    @audited("schedules run")
    async def run(self, name: str, account: str | None = None) -> Enqueued:
        """Enqueue its job now, beside its ticks; of a schedule ``for_each`` account that of one ``account``.

        With overlap="skip" an unfinished job of it is kept instead (``created`` is False).
        """
        return await self._db.write(None, self._run, name, account)

    @audited("schedules remove")
    async def remove(self, name: str) -> None:
        """Let it tick no more; a program that declares it and starts brings it back.

        For one that no program declares any more. Raises `InvalidInput` for one that this program declares, or another
        one whose workers run.
        """
        await self._db.write(None, self._remove, name)

    async def accounts(self, name: str, *, limit: int = 100, after: str = "") -> builtins.list[ScheduledAccount]:
        """A page of the accounts of a schedule ``for_each`` account, by key: their next and last ticks and jobs."""
        check_storable("the name of a schedule", name)
        return await self._db.read(
            None, schedule_accounts.page, name, limit=limit, after=check_storable("after", after)
        )

    def _list(self, c: Connection, d: Dialect) -> builtins.list[ScheduleInfo]:
        infos = {s.name: s for s in store.page(c, d)}
        now = d.now(c)
        for name, (kind, spec) in self._specs.items():  # no worker has started with it yet
            infos.setdefault(name, schedule.info(name, kind, spec, cron.next_after(spec.ticks, now)))
        return sorted(infos.values(), key=lambda s: s.name)

    def _set_paused(self, c: Connection, d: Dialect, name: str, *, paused: bool) -> ScheduleInfo:
        row = self._row(c, d, name)
        if row.paused != paused:
            store.set_paused(c, d, row, paused=paused)
        info = store.get(c, d, name)
        assert info is not None  # noqa: S101 - its row is locked
        return info

    def _remove(self, c: Connection, d: Dialect, name: str) -> None:
        row = self._row(c, d, name)
        if name in self._specs:
            raise InvalidInput(
                f"schedule {name!r} is declared by this program: take it out of Resilient(schedules=[...])"
            )
        if name in programs.others(c, d):
            raise InvalidInput(
                f"schedule {name!r} is declared by a program whose workers run, or did a minute ago: take it out of"
                f" that program, or stop it with `resilient schedules pause {name}`"
            )
        store.remove(c, d, [row.name], d.now(c))

    def _run(self, c: Connection, d: Dialect, name: str, account: str | None) -> Enqueued:
        row, now = self._row(c, d, name), d.now(c)
        if bool(row.spec.for_each) != (account is not None):
            raise InvalidInput(
                f"schedule {name!r} is for each account {row.spec.for_each!r}: say which one"
                if account is None
                else f"schedule {name!r} is for {row.spec.template.resource_key} alone: leave out the account"
            )
        if account is not None:
            per_account.require(c, d, name, account)
        (done,) = queue.write(c, d, [job_of(row, None, 0.0, account=account or "")], alone=True)
        if done.created and account is None:
            _keep_earlier(c, d, row, [done.id], now)
            store.move_on(c, d, name, now, next_at=row.next_at, last_at=row.last_at, job=done.id)
        elif done.created and account is not None:
            per_account.note_run(c, d, row, account, done.id)
        return done

    def _row(self, c: Connection, d: Dialect, name: str) -> store.Row:
        """The locked row of a schedule; inserted for one that is declared and has none yet. Raises `InvalidInput`."""
        row = store.lock(c, d, check_storable("the name of a schedule", name))
        if row is None and name in self._specs:
            store.declare(c, d, {name: self._specs[name]}, ())
            row = store.lock(c, d, name)
        if row is None:
            names = ", ".join(sorted({s.name for s in store.page(c, d)} | self._specs.keys())) or "none"
            raise InvalidInput(f"there is no schedule {name!r}; known are: {names}")
        if row.removed:
            raise InvalidInput(
                f"schedule {name!r} is no longer declared by the program: list it in Resilient(schedules=[...])"
            )
        return row


class SyncSchedules(SyncFacade[Schedules]):
    """`Schedules` for synchronous programs: the same methods, without ``await``."""

    list = blocking(Schedules.list)
    pause = blocking(Schedules.pause)
    resume = blocking(Schedules.resume)
    run = blocking(Schedules.run)
    remove = blocking(Schedules.remove)
    accounts = blocking(Schedules.accounts)


def _declare(c: Connection, d: Dialect, specs: Mapping[str, tuple[str, Spec]], kinds: Collection[str]) -> None:
    """Write what a program declares that starts."""
    programs.note(c, d, specs)
    store.declare(c, d, specs, kinds, programs.others(c, d, specs))
    _put_right(c, d, specs)


def _keep(c: Connection, d: Dialect, specs: Mapping[str, tuple[str, Spec]], kinds: Collection[str]) -> None:
    """Write what a program declares, where those are gone that wrote something else; remove what they left behind.

    Not where this program itself was away (an outage, a laptop that slept): so may all have been that seem to be gone.
    """
    if programs.note(c, d, specs):
        store.declare(c, d, specs, kinds, programs.others(c, d, specs), starts=False)
    _put_right(c, d, specs)


def _put_right(c: Connection, d: Dialect, specs: Collection[str]) -> None:
    """Let no schedule wait for a tick that a clock named which ran ahead."""
    for name in store.put_right(c, d, specs):
        log.warning("schedule %s: a clock that ran ahead named its next tick; it ticks from now on", name)


def _serve(c: Connection, d: Dialect, name: str, roll: float) -> int:
    """Move a due schedule on and insert its jobs; returns how many are new (0: another worker was faster)."""
    if (due := store.lock_if_due(c, d, name)) is None:
        return 0
    row, now = due
    served = schedule.serve(row.spec, row.next_at, now)
    done = queue.write(c, d, [job_of(row, tick, roll) for tick in served.ticks], alone=True)
    new = [one.id for one in done if one.created]
    _keep_earlier(c, d, row, new, now)
    store.move_on(
        c, d, name, now, next_at=served.next_at, last_at=served.ticks[-1] if served.ticks else row.last_at,
        job=new[-1] if new else None,
    )  # fmt: skip
    if len(new) < len(done):
        log.info("schedule %s ticked, but its last job is not finished: no new job", name)
    return len(new)


def _keep_earlier(c: Connection, d: Dialect, row: store.Row, new: Sequence[UUID], now: datetime) -> None:
    """Note the jobs that have not ended and are followed by the last of these new ones."""
    before = [row.unended, *new[:-1]] if new else []
    earlier.keep(c, d, row.name, [earlier.Earlier(id_) for id_ in before if id_ is not None], now)
