"""Alerts of one app: collected in memory, written about once a second, told by whoever wrote `told_at`.

`noticed` is asked for every execution that did not end well, so it only counts; the first of a kind and code within a
second is kept as the example. The elected worker looks at what lasts twice a minute (`keep_house`). What cannot be
written (database away) is kept and written later; jobs never wait for any of this. That the database is away is told
without it (`outage.py`).
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from resilient.core import alert_groups, alerts, spread
from resilient.core.alerts import CONDITIONS, EVENTS, Alerting
from resilient.core.errors import InvalidInput
from resilient.core.misfit import explained_calls
from resilient.engine.outage import Outage
from resilient.engine.sessions import Face, Transactions, blocking
from resilient.engine.sinks import Sinks
from resilient.store import alerts as store
from resilient.store import schedule_accounts, schedule_records, schedules, symptoms

if TYPE_CHECKING:
    import builtins
    from collections.abc import Iterable
    from datetime import datetime

    from sqlalchemy import Connection

    from resilient.core.alerts import AlertInfo, Finding, Notice
    from resilient.engine.app import Resilient
    from resilient.store.circuits import Change
    from resilient.store.dialect import Dialect

log = logging.getLogger("resilient.alerts")
FLUSH_EVERY: Final = 1.0  # seconds
MOST_PENDING: Final = 1_000  # different findings between two writes
MOST_CODES: Final = 50  # error codes of one kind of job that are alerts of their own
MOST_LISTED: Final = 10_000
CLOSING: Final = 5.0  # seconds for the last alerts of a process


@explained_calls("app.alerts")
class Alerts:
    """``app.alerts``."""

    def __init__(self, app: Resilient, config: Any = None) -> None:
        self._app = app
        self._db = Transactions(app)
        self.config = checked(config)
        self._sinks = Sinks(self.config.sinks)
        self.outage = Outage(app, self._sinks)
        self._pending: dict[tuple[str, ...], Finding] = {}
        self._dropped = 0
        self._written = False
        self._codes: dict[tuple[str, str], set[str]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._flushing: asyncio.Task[None] | None = None

    # -- noticing -------------------------------------------------------------------------------------------------

    def noticed(self, execution: Any, transition: Any) -> None:
        """An execution ended other than well; call it on the event loop."""
        name = alerts.alarming(transition.decision, transition.error_kind)
        if name is None or not self.config.wants(name):
            return
        row = execution.row
        code = self._code(name, row.kind, transition.error_code)
        key = (name, row.kind, transition.error_kind, code)
        if (known := self._pending.get(key)) is not None:
            self._pending[key] = replace(known, count=known.count + 1)
        elif self._has_room():
            self._pending[key] = alerts.ended(
                name, row.kind, str(transition.error_kind), code, error=transition.error,
                resource=transition.resource_key or row.resource_key, job=str(execution.id),
            )  # fmt: skip
            self._arm()

    def _code(self, name: str, kind: str, code: str | None) -> str:
        """The code, unless this kind has had so many that they must be ids in disguise."""
        code = alerts.code_of(code)
        seen = self._codes.setdefault((name, kind), set())
        if code not in seen and len(seen) >= MOST_CODES:
            return "other"
        seen.add(code)
        return code

    def _has_room(self) -> bool:
        if len(self._pending) < MOST_PENDING:
            return True
        self._dropped += 1
        return False

    def circuit(self, change: Change) -> None:
        """A circuit changed; call it on the event loop. That it closed is told once it stays so."""
        facts, b = change.after, change.after.breaker
        if b.state != "open" or not self.config.wants("circuit_open"):
            return
        failure = change.failure
        row = {
            "key": facts.key, "breaker": "open", "opened_at": b.opened_at, "open_until": b.open_until, "auth": "ok",
            "blocked_until": None, "last_error": None if failure is None else str(failure),
            "last_error_code": None if failure is None else failure.code,
        }  # fmt: skip
        for found in alerts.of_resource(row, self._app.now(), None):
            self._pending[found.name, found.subject] = found
            self._arm()

    def found(self, finding: Finding) -> None:
        """Something else is wrong; call it on the event loop."""
        if self.config.wants(finding.name):
            self._pending[finding.name, finding.subject] = finding
            self._arm()

    def soon(self) -> None:
        """Alerts were written in somebody's transaction: tell them within a second; call it on the event loop."""
        self._written = True
        self._arm()

    def repaired(self, count: int, what: str = "turns") -> None:
        """Housekeeping gave ready jobs their lost turns back, or moved lanes; call it on the event loop."""
        if self.config.wants("invariant"):
            self._pending["invariant", what] = alerts.repaired(count, what)
            self._arm()

    # -- writing --------------------------------------------------------------------------------------------------

    def _arm(self) -> None:
        """See that `flush` runs within a second."""
        loop = asyncio.get_running_loop()
        if self._timer is None or self._loop is not loop:
            self._loop = loop
            self._timer = loop.call_later(FLUSH_EVERY, self._start)

    def _start(self) -> None:
        self._timer = None
        if self._flushing is None or self._flushing.done():
            self._flushing = asyncio.get_running_loop().create_task(self._flush_quietly(), name="resilient-alerts")
        else:
            self._arm()

    async def _flush_quietly(self) -> None:
        try:
            await self.flush()
        except Exception as error:  # noqa: BLE001 - the database may be away; they are kept
            log.debug("alerts are not written yet (%s)", type(error).__name__)
            self._arm()

    async def flush(self) -> None:
        """Write what was noticed and tell what is due."""
        pending, self._pending = self._pending, {}
        if self._dropped:
            log.warning("%d failures of too many different sorts raised no alert", self._dropped)
            self._dropped = 0
        if not pending and not self._written:
            return
        self._written = False
        try:
            notices = await self._app.database.transaction(self._write, list(pending.values()))
        except BaseException:
            for key, found in self._pending.items():
                known = pending.get(key)
                pending[key] = found if known is None else replace(known, count=known.count + found.count)
            self._pending = pending
            raise
        self._sinks.tell(notices)

    def _write(self, c: Connection, d: Dialect, findings: Iterable[Finding]) -> builtins.list[Notice]:
        now = d.now(c)
        self._record(c, d, findings, now)
        return self._due(c, d, now)

    def _record(self, c: Connection, d: Dialect, findings: Iterable[Finding], now: datetime) -> None:
        wanted = [f for f in findings if self.config.wants(f.name)]
        store.record(c, d, [f for f in wanted if f.name in EVENTS], now, lasting=False)
        store.record(c, d, [f for f in wanted if f.name in CONDITIONS], now, lasting=True)

    def _due(self, c: Connection, d: Dialect, now: datetime) -> builtins.list[Notice]:
        return alert_groups.begun(*store.to_tell(c, d, now, now - self.config.span("repeat")), now)

    async def close(self) -> None:
        """Write what is left, and deliver what is told, for a few seconds each: the database may be away."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        try:
            async with asyncio.timeout(CLOSING):
                if self._flushing is not None and self._loop is asyncio.get_running_loop():
                    await self._flushing
                await self.flush()
        except Exception as error:  # noqa: BLE001 - the end of the process
            log.warning("%d alerts were not told (%s)", len(self._pending), type(error).__name__)
        try:
            async with asyncio.timeout(CLOSING):
                await self._sinks.delivered()
        except TimeoutError:
            log.warning("the last alerts did not reach every sink within %.0f s", CLOSING)

    # -- looking --------------------------------------------------------------------------------------------------

    async def keep_house(self) -> None:
        """Look at what lasts, and tell what is due and what is over."""
        self._sinks.tell(await self._app.database.transaction(self._look))

    def _look(self, c: Connection, d: Dialect) -> builtins.list[Notice]:
        since, until = schedules.look_since(c, d, "engine:alerts")
        schedule_records.note_successes(c, d)
        now, config = d.now(c), self.config
        found = self._resources(c, d, now)
        blind = {"circuit_open", "needs_reauth", "long_throttle"} if len(found) >= symptoms.STOPPED else set()
        found += self._jobs(c, d, now)
        found += [alerts.swept(*dead) for dead in symptoms.swept(c, d, since, until)]
        self._record(c, d, found, now)
        foreign = {("no_success", name) for name in schedule_records.active(c, d) - self._app.schedules.declared.keys()}
        over = store.resolve(c, d, CONDITIONS - blind, now - config.span("settle"), now, spare=foreign)
        store.resolve(c, d, EVENTS, now - config.span("quiet"), now)
        told = alert_groups.ended(
            over, store.sizes(c, d, {one.cause for one in over}, now - config.span("repeat")), now
        )
        return [*self._due(c, d, now), *told]

    def _resources(self, c: Connection, d: Dialect, now: datetime) -> builtins.list[Finding]:
        far = None if self.config.throttled is None else self.config.span("throttled")
        rows = symptoms.stopped(c, d, now + (far or self.config.span("quiet")))
        return [found for row in rows for found in alerts.of_resource(row, now, far)]

    def _jobs(self, c: Connection, d: Dialect, now: datetime) -> builtins.list[Finding]:
        config, found = self.config, list[alerts.Finding]()
        if config.backlog is not None:
            found += alerts.of_backlog(symptoms.waiting(c, d), now, config.span("backlog"))
        if config.failure_rate is not None:
            sample = symptoms.executions(c, d, now - config.span("window"), config.failure_volume)
            found += alerts.of_executions(*sample, config.failure_rate, config.failure_volume)
        found += [alerts.of_stuck_handlers(*one) for one in symptoms.stuck_handlers(c, d)]
        for r in schedule_records.records(c, d, self._app.schedules.declared) if config.periods else ():
            silent = self._silent(c, d, r, now, config.periods or 1)
            found += [silent] if silent is not None else []
        for one in symptoms.silent_streams(c, d, now, config.periods) if config.periods else ():
            found.append(alerts.of_stream(*one[:4], ever=one[4], periods=config.periods or 1))
        return found

    @staticmethod
    def _silent(c: Connection, d: Dialect, r: schedule_records.Record, now: datetime, periods: int) -> Finding | None:
        """A schedule without success; one for many accounts if any of them is."""
        if not r.spec.for_each:
            return alerts.of_schedule(r.name, r.spec.ticks, r.since, r.succeeded_at, now, periods)
        before = spread.silent_before(r.spec.ticks, now, periods)
        silent = None if before is None else schedule_accounts.silent(c, d, r.name, before)
        if silent is None:
            return None
        return alerts.of_accounts(
            r.name, silent.accounts, silent.example, silent.since, ever=silent.ever, periods=periods
        )

    # -- people ---------------------------------------------------------------------------------------------------

    @property
    def sync(self) -> SyncAlerts:
        """The same for synchronous programs."""
        return SyncAlerts(Alerts._here(self._app))

    @classmethod
    def _here(cls, app: Resilient) -> Alerts:
        made = cls(app)
        made._db = Transactions(app, here=True)
        return made

    async def list(self, *, resolved: bool = False, limit: int = 100) -> builtins.list[AlertInfo]:
        """Alerts that go on, the latest first; with ``resolved`` also those that are over and not yet forgotten."""
        if not 1 <= limit <= MOST_LISTED:
            raise InvalidInput(f"limit={limit}: ask for 1 to {MOST_LISTED} alerts")
        return await self._db.read(None, store.page, resolved=resolved, limit=limit)


class SyncAlerts(Face[Alerts]):
    """`Alerts` for synchronous programs: the same methods, without ``await``."""

    list = blocking(Alerts.list)


def checked(given: Any) -> Alerting:
    """What `Resilient` was given as ``alerts``: an `Alerting`, one sink, several, or nothing."""
    if isinstance(given, Alerting):
        return given
    if given is None:
        return Alerting()
    if isinstance(given, str) or callable(given):
        return Alerting(sinks=(given,))
    try:
        return Alerting(sinks=tuple(given))
    except TypeError:
        raise InvalidInput("alerts= takes an Alerting, a function, a URL, or several of these") from None
