"""Alerts of one app: collected in memory, written about once a second, sent by the process that writes `told_at`.

- `Alerts` (``app.alerts``): `noticed` is called for every execution that did not end well, so it only counts; the first
  of a kind and code within a second is kept as the example. The elected worker looks at what lasts twice a minute
  (`keep_house`). What cannot be written (database away) is kept and written later; jobs never wait for any of this.
- `Outage`: the engine's own database does not answer. Every other alert is a row first, so that one process sends it.
  Here nothing can be written: each process whose workers do not reach the database tells its own sinks, once when an
  outage begins and once when it ends. All have one fingerprint, by which a pager makes one incident of them. Called on
  the event loop, by the heartbeat and by a worker that waits for its start.
- `Sinks`: the log, functions, webhooks. A sink that fails or hangs harms nobody: it has a queue of its own, a time
  limit and a line in the log. A webhook that is away is tried again later. Plain functions run in a thread.

May use: `ground`. Begin with: `Alerts.noticed`, `Alerts.flush`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import deque
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from resilient.core.alerts import rules as alerts
from resilient.core.alerts import words
from resilient.core.alerts.codes import Codes
from resilient.core.alerts.rules import CONDITIONS, EVENTS, Alerting
from resilient.core.base.errors import InvalidInput
from resilient.core.base.loggers import apart, logger
from resilient.core.base.misfit import explained_calls
from resilient.core.base.resource_key import account
from resilient.core.jobs.backoff import spread_upwards
from resilient.core.schedules import schedule
from resilient.engine.ground.foreign import called
from resilient.engine.ground.sessions import SyncFacade, Transactions, blocking
from resilient.store import alerts as store
from resilient.store.schedules import accounts as schedule_accounts
from resilient.store.schedules import ticks as schedules
from resilient.wire.publishers import notify

if TYPE_CHECKING:
    import builtins
    from collections.abc import Callable, Collection, Sequence
    from datetime import datetime

    from sqlalchemy import Connection

    from resilient.core.alerts.rules import AlertInfo, Finding, Notice, Sink
    from resilient.engine.ground.ground import Ground
    from resilient.store.db.dialect import Dialect
    from resilient.store.gates.circuits import Change

log = logger("alerts")
FLUSH_EVERY: Final = 1.0  # seconds
NEAR: Final = timedelta(minutes=1)  # by so much the clocks of hosts may differ
MOST_PENDING: Final = 1_000  # different findings between two writes
MOST_LISTED: Final = 10_000
CLOSING: Final = 5.0  # seconds for the last alerts of a process
AWAY: Final = 9.0  # seconds without an answer until the alert; with the heartbeat's interval that is less than 15
STEADY: Final = 30.0  # seconds of answers until it is over: a database that comes and goes is one outage
LONGEST: Final = 10.0  # seconds one sink may take for one notice
PAUSES: Final = (1.0, 5.0)  # seconds before a webhook is tried again, plus up to half: a fleet meets one outage
LATER: Final = (30.0, 60.0, 120.0, 300.0)  # the same for one that is away; the last one again and again
GIVE_UP: Final = 3  # notices in a row that a sink refuses, after which it gets none of those that wait
MOST_WAITING: Final = 100  # notices for one sink; beyond that alerts are only logged


@explained_calls("app.alerts")
class Alerts:
    """Alerts of one app: collects findings, writes them and has their notices sent."""

    def __init__(self, ground: Ground, config: Alerting, schedules: Collection[str], *, here: bool = False) -> None:
        """``schedules`` are the names of the schedules that the app declares."""
        self._ground, self._schedules = ground, schedules
        self._db = Transactions(ground, here=here)
        self.config = config
        self._sinks = Sinks(self.config.sinks)
        self.outage = Outage(ground, config, self._sinks)
        self._pending: dict[tuple[str, ...], Finding] = {}
        self._dropped = 0
        self._written = False
        self._since: datetime | None = None  # when the oldest of them was noticed
        self._codes: dict[tuple[str, str], Codes] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._flushing: asyncio.Task[None] | None = None
        self._is_closing = False

    # -- noticing -------------------------------------------------------------------------------------------------

    def noticed(self, execution: Any, transition: Any) -> None:
        """Count an execution that did not end well, if that is an alert; call it on the event loop."""
        name = alerts.alarming(transition.decision, transition.error_kind)
        if name is None or not self.config.wants(name):
            return
        row = execution.row
        resource = transition.resource_key or row.resource_key
        if (codes := self._codes.get((name, row.kind))) is None:
            codes = self._codes[name, row.kind] = Codes()
        code, whose = codes.classify(
            alerts.code_of(transition.error_code), account(resource), self._ground.now(), self.config.span("quiet")
        )
        key = (name, row.kind, transition.error_kind, code, whose)
        if (finding := self._pending.get(key)) is not None:
            self._pending[key] = replace(finding, count=finding.count + 1)
        elif self._has_room():
            self._pending[key] = alerts.ended(
                name, row.kind, str(transition.error_kind), code, error=transition.error, resource=resource,
                job=str(execution.id), apart=whose,
            )  # fmt: skip
            self._arm()

    def _has_room(self) -> bool:
        if len(self._pending) < MOST_PENDING:
            return True
        self._dropped += 1
        return False

    def note_breaker(self, change: Change) -> None:
        """Note a breaker's change; call it on the event loop. An alert ends only after the breaker has stayed closed.

        Workers of other processes are told to read the resource again before they send.
        """
        self._ground.tell(change.after.key)
        facts, b = change.after, change.after.breaker
        if b.state != change.before.breaker.state:
            counts = self._ground.counts
            counts.transitions[counts.provider_of(facts.key), b.state] += 1
        if b.state != "open" or not self.config.wants("circuit_open"):
            return
        failure = change.failure
        row = {
            "key": facts.key, "breaker": "open", "opened_at": b.opened_at, "open_until": b.open_until, "auth": "ok",
            "blocked_until": None, "last_error": None if failure is None else str(failure),
            "last_error_code": None if failure is None else failure.code,
        }  # fmt: skip
        for finding in alerts.of_resource(row, self._ground.now(), None):
            self.add(finding)

    def add(self, finding: Finding) -> None:
        """Write a finding within a second; call it on the event loop."""
        if self.config.wants(finding.name):
            key = (finding.name, finding.subject)
            self._pending[key] = _together(self._pending.get(key), finding)
            self._arm()

    def soon(self) -> None:
        """Send within a second what another transaction has written; call it on the event loop."""
        self._written = True
        self._arm()

    def repaired(self, count: int, what: str = "turns") -> None:
        """Note what housekeeping repaired: lost turns, or ordering keys that stood still; call it on the event loop."""
        self.add(alerts.repaired(count, what))

    # -- writing --------------------------------------------------------------------------------------------------

    def _arm(self) -> None:
        """See that `flush` runs within a second."""
        self._since = self._since or self._ground.now()
        if self._is_closing:
            return
        loop = asyncio.get_running_loop()
        if self._timer is None or self._loop is not loop:
            self._loop = loop
            self._timer = loop.call_later(FLUSH_EVERY, self._start, context=apart())

    def _start(self) -> None:
        self._timer = None
        if not self._is_flushing():
            self._flushing = asyncio.get_running_loop().create_task(
                self._flush_quietly(), name="resilient-alerts", context=apart()
            )
        else:
            self._arm()

    def _is_flushing(self) -> bool:
        """Whether a task of this loop writes: one that a closed loop has left never ends."""
        task = self._flushing
        return task is not None and not task.done() and task.get_loop() is asyncio.get_running_loop()

    async def _flush_quietly(self) -> None:
        try:
            await self.flush()
        except Exception as error:  # noqa: BLE001 - the database may be away; they are kept
            log.debug("alerts are not written yet (%s)", type(error).__name__)
            self._arm()

    async def flush(self) -> None:
        """Write the pending findings and send the notices that are due."""
        pending, self._pending = self._pending, {}
        if self._dropped:
            log.warning("%d failures of too many different sorts raised no alert", self._dropped)
            self._dropped = 0
        if not pending and not self._written:
            return
        written, self._written = self._written, False
        since, self._since = self._since or self._ground.now(), None
        try:
            notices = await self._ground.database.transaction(self._write, list(pending.values()), since)
        except BaseException:
            for key, newer in self._pending.items():
                pending[key] = _together(pending.get(key), newer)
            self._pending, self._written, self._since = pending, self._written or written, since
            raise
        self._sinks.tell(notices)

    def _write(
        self, c: Connection, d: Dialect, findings: builtins.list[Finding], since: datetime
    ) -> builtins.list[Notice]:
        now = d.now(c)
        self._record(c, d, findings, now, since)
        return self._due(c, d, now)

    def _record(
        self, c: Connection, d: Dialect, findings: builtins.list[Finding], now: datetime, since: datetime
    ) -> None:
        """Write findings, the oldest noticed at ``since``; not those about accounts that were erased meanwhile."""
        gone = store.erased(c, d, min(since, now) - NEAR, now) if findings else []
        findings = [f for one in findings if self.config.wants(one.name) and (f := one.without(gone)) is not None]
        store.record(c, d, [f for f in findings if f.name in EVENTS], now, lasting=False)
        store.record(c, d, [f for f in findings if f.name in CONDITIONS], now, lasting=True)

    def _due(self, c: Connection, d: Dialect, now: datetime) -> builtins.list[Notice]:
        return words.begun(*store.to_tell(c, d, now, now - self.config.span("repeat")), now)

    async def close(self) -> None:
        """Write the pending findings and deliver the notices, for a few seconds each: the database may be away."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._is_closing = True  # a write that fails meanwhile is not tried again later
        try:
            async with asyncio.timeout(CLOSING):
                if self._flushing is not None and self._is_flushing():
                    await asyncio.gather(self._flushing, return_exceptions=True)  # cancelled, perhaps
                await self.flush()
        except Exception as error:  # noqa: BLE001 - the end of the process
            log.warning("%d alerts were not told (%s)", len(self._pending), type(error).__name__)
        finally:
            self._is_closing = False
        try:
            async with asyncio.timeout(CLOSING):
                await self._sinks.finish()
        except TimeoutError:
            log.warning("the last alerts did not reach every sink within %.0f s", CLOSING)

    # -- looking --------------------------------------------------------------------------------------------------

    async def keep_house(self) -> None:
        """Look at conditions that last; send the notices of alerts that are due and of those that are over."""
        self._sinks.tell(await self._ground.database.transaction(self._look))

    def _look(self, c: Connection, d: Dialect) -> builtins.list[Notice]:
        since, until = schedules.look_since(c, d, "engine:alerts")
        schedules.note_successes(c, d)
        now, config = d.now(c), self.config
        findings = self._resources(c, d, now)
        blind = {"circuit_open", "needs_reauth", "long_throttle"} if len(findings) >= store.STOPPED else set()
        findings += self._jobs(c, d, now)
        findings += [alerts.swept(*dead) for dead in store.swept(c, d, since, until)]
        self._record(c, d, findings, now, now)
        foreign = {("no_success", name) for name in schedules.active(c, d) - set(self._schedules)}
        over = store.resolve(c, d, CONDITIONS - blind, now - config.span("settle"), now, spare=foreign)
        store.resolve(c, d, EVENTS, now - config.span("quiet"), now)
        sizes = store.sizes(c, d, {one.cause for one in over}, now - config.span("repeat"))
        return [*self._due(c, d, now), *words.ended(over, sizes, now)]

    def _resources(self, c: Connection, d: Dialect, now: datetime) -> builtins.list[Finding]:
        far = None if self.config.throttled is None else self.config.span("throttled")
        rows = store.stopped(c, d, now + (far or self.config.span("quiet")))
        return [finding for row in rows for finding in alerts.of_resource(row, now, far)]

    def _jobs(self, c: Connection, d: Dialect, now: datetime) -> builtins.list[Finding]:
        config, findings = self.config, list[alerts.Finding]()
        if config.backlog is not None:
            findings += alerts.of_backlog(store.waiting(c, d), now, config.span("backlog"))
        if config.failure_rate is not None:
            sample = store.executions(c, d, now - config.span("window"), config.failure_volume)
            findings += alerts.of_executions(*sample, config.failure_rate, config.failure_volume)
        findings += [alerts.of_stuck_handlers(*one) for one in store.stuck_handlers(c, d)]
        for r in schedules.records(c, d, self._schedules) if config.periods else ():
            silent = self._silent(c, d, r, now, config.periods or 1)
            findings += [silent] if silent is not None else []
        for one in store.silent_streams(c, d, now, config.periods) if config.periods else ():
            findings.append(alerts.of_stream(*one[:4], ever=one[4], periods=config.periods or 1))
        return findings

    @staticmethod
    def _silent(c: Connection, d: Dialect, r: schedules.Record, now: datetime, periods: int) -> Finding | None:
        """The finding of a schedule without success; of one `for_each` account, if any account is without."""
        if not r.spec.for_each:
            return alerts.of_schedule(r.name, r.spec.ticks, r.since, r.succeeded_at, now, periods)
        before = schedule.silent_before(r.spec.ticks, now, periods)
        silent = schedule_accounts.silent(c, d, r.name, before)
        if silent is None:
            return None
        return alerts.of_accounts(
            r.name, silent.accounts, silent.example, silent.since, ever=silent.ever, periods=periods
        )

    # -- people ---------------------------------------------------------------------------------------------------

    @property
    def sync(self) -> SyncAlerts:
        """The same for synchronous programs."""
        return SyncAlerts(Alerts(self._ground, self.config, self._schedules, here=True))

    async def list(self, *, resolved: bool = False, limit: int = 100) -> builtins.list[AlertInfo]:
        """Alerts that go on, the latest first; with ``resolved`` also those that are over and not yet deleted."""
        if not 1 <= limit <= MOST_LISTED:
            raise InvalidInput(f"limit={limit}: ask for 1 to {MOST_LISTED} alerts")
        return await self._db.read(None, store.page, resolved=resolved, limit=limit)


def _together(older: Finding | None, newer: Finding) -> Finding:
    """Two findings of one alert: events are counted, with the first as the example; of a condition the newer counts."""
    if older is None or newer.name in CONDITIONS:
        return newer
    return replace(older, count=older.count + newer.count)


class SyncAlerts(SyncFacade[Alerts]):
    """`Alerts` for synchronous programs: the same methods, without ``await``."""

    list = blocking(Alerts.list)


class Outage:
    """Whether the database answers the workers of one process."""

    def __init__(self, ground: Ground, config: Alerting, sinks: Sinks) -> None:
        self._ground, self._config, self._sinks = ground, config, sinks
        self._away: dict[str, float | None] = {}  # since when it answers again, by worker that it was away for
        self.alert: AlertInfo | None = None  # sent, and not yet resolved

    def unanswered(self, worker: str, seconds: float, error: str | None = None) -> None:
        """Note that a worker has had no answer for so many seconds; ``error``: the last that it met."""
        if worker in self._away or seconds >= AWAY:
            self._away[worker] = None
        if self.alert is None and seconds >= AWAY:
            self._begin(worker, seconds, error)

    def answered(self, worker: str, now: float) -> None:
        """Note that a worker has an answer; ``now`` is on its monotonic clock."""
        if self.alert is None:
            return
        if worker in self._away:
            since = self._away[worker]
            if since is None:
                self._away[worker] = since = now
            if now - since < STEADY:
                return
        self._over(worker, STEADY if worker in self._away else 0.0)

    def leave(self, worker: str, *, reached: bool) -> None:
        """Forget a worker that ends; ``reached``: the database has answered its last question."""
        if reached:
            self._over(worker, 0.0)
        else:
            self._away.pop(worker, None)

    def _begin(self, worker: str, seconds: float, error: str | None) -> None:
        now = self._ground.now()
        since = now - timedelta(seconds=seconds)
        finding = alerts.of_database(self._ground.database.address, since, worker, error)
        if not self._config.wants(finding.name):
            return
        self.alert = alerts.AlertInfo(
            fingerprint=finding.fingerprint, name=finding.name, subject=finding.subject, detail=finding.detail,
            count=1, first_at=since, last_at=now, told_at=now, cause=finding.cause,
        )  # fmt: skip
        self._sinks.tell([words.notice("new", self.alert, now)])

    def _over(self, worker: str, ago: float) -> None:
        """Note that the database has answered a worker for ``ago`` seconds; the last such worker ends the outage."""
        self._away.pop(worker, None)
        if self._away or self.alert is None:
            return
        now = self._ground.now() - timedelta(seconds=ago)
        over = replace(self.alert, last_at=now, resolved_at=now)
        self.alert = None
        self._sinks.tell([words.notice("resolved", over, now)])


class Sinks:
    """Delivers notices to people: each sink has a queue of its own, so that none waits for another."""

    def __init__(self, sinks: Sequence[Sink], roll: Callable[[], float] = random.random) -> None:
        self._sinks, self._roll = tuple(sinks), roll
        self._deliveries: WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[Delivery, ...]] = WeakKeyDictionary()

    def tell(self, notices: Sequence[Notice]) -> None:
        """Log notices now and begin to deliver them."""
        for one in notices:
            level = logging.INFO if one.state == "resolved" else logging.WARNING
            log.log(level, "%s: %s", one.alert.name, one.text)
        if not notices or not self._sinks:
            return
        loop = asyncio.get_running_loop()
        if loop not in self._deliveries:
            self._deliveries[loop] = tuple(Delivery(sink, self._roll) for sink in self._sinks)
        for delivery in self._deliveries[loop]:
            delivery.add(notices)

    async def finish(self) -> None:
        """Deliver what waits; a sink that is away now is not tried again later."""
        deliveries = self._deliveries.get(asyncio.get_running_loop(), ())
        await asyncio.gather(*(one.finish() for one in deliveries), return_exceptions=True)


class Delivery:
    """What one sink is to be told, in order.

    A webhook that is away is tried again for as long as the process lives: often the network that stopped a provider
    has stopped the webhook, too. A function is called once for a notice: it may have told somebody before it failed.
    Every notice that does not reach the sink is in a line of the log, also where the task is cancelled.
    """

    def __init__(self, sink: Sink, roll: Callable[[], float]) -> None:
        self._sink, self._roll = sink, roll
        self._waiting: deque[Notice] = deque()
        self._task: asyncio.Task[None] | None = None
        self._is_last = asyncio.Event()  # the process ends: no pause any more

    def add(self, notices: Sequence[Notice]) -> None:
        """Queue notices behind those that wait; more than `MOST_WAITING` are only logged."""
        room = max(0, MOST_WAITING - len(self._waiting))
        if surplus := notices[room:]:
            log.warning("%s is too slow: %d alerts are only logged", _name(self._sink), len(surplus))
        self._waiting.extend(notices[:room])
        if self._waiting and self._task is None:
            loop = asyncio.get_running_loop()
            self._task = loop.create_task(self._run(), name="resilient-alerts", context=apart())

    async def finish(self) -> None:
        """Deliver what waits, or log that it did not reach the sink."""
        if self._task is not None:
            self._is_last.set()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            await self._deliver()
        finally:  # an event keeps its loop, whose deliveries end with it
            if self._waiting:
                log.warning("%d alerts did not reach %s: cut off", len(self._waiting), _name(self._sink))
                self._waiting.clear()
            self._task, self._is_last = None, asyncio.Event()

    async def _deliver(self) -> None:
        lost_count, failures_in_a_row, rounds_away, reason = 0, 0, 0, ""
        while self._waiting:
            try:
                await self._send(self._waiting[0], with_retries=not rounds_away)
                if rounds_away:
                    log.info("%s takes alerts again", _name(self._sink))
                failures_in_a_row = rounds_away = 0
            except Exception as error:  # noqa: BLE001 - somebody else's code or server
                reason = _reason(error)
                if self._is_away(error):
                    if not rounds_away:
                        waiting = len(self._waiting)
                        log.warning("%s does not answer, %d alerts wait for it: %s", _name(self._sink), waiting, reason)
                    await self._pause(LATER[min(rounds_away, len(LATER) - 1)])
                    rounds_away += 1
                    continue
                lost_count, failures_in_a_row = lost_count + 1, failures_in_a_row + 1
                if not self._is_of_one(error) or failures_in_a_row == GIVE_UP:
                    lost_count += len(self._waiting) - 1
                    self._waiting.clear()
                    break
            self._waiting.popleft()
        if lost_count:
            log.warning("%d alerts did not reach %s: %s", lost_count, _name(self._sink), reason)

    def _is_away(self, error: Exception) -> bool:
        """Whether to try the same notice again later."""
        return isinstance(self._sink, str) and not self._is_of_one(error) and not self._is_last.is_set()

    def _is_of_one(self, error: Exception) -> bool:
        """Whether the sink may have failed because of that one notice; else it takes no other now either."""
        if isinstance(error, notify.NotDelivered):
            return error.of_one
        return not (isinstance(error, TimeoutError) and isinstance(self._sink, str))

    async def _send(self, notice: Notice, *, with_retries: bool) -> None:
        """Tell the sink; with retries a webhook that fails is tried twice more within seconds."""
        for pause in PAUSES if with_retries and isinstance(self._sink, str) else ():
            try:
                return await self._send_once(notice)
            except (notify.NotDelivered, TimeoutError):
                await self._pause(pause)
        return await self._send_once(notice)

    async def _send_once(self, notice: Notice) -> None:
        async with asyncio.timeout(LONGEST):
            if isinstance(self._sink, str):
                document = {**notice.to_json(), "text": words.for_chat(notice.text, notify.host_of(self._sink))}
                await notify.post(self._sink, document)
            else:
                await called(self._sink, notice)

    async def _pause(self, seconds: float) -> None:
        """Wait, plus up to half; not where the process ends."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(spread_upwards(seconds, self._roll())):
                await self._is_last.wait()


def _name(sink: Sink) -> str:
    if isinstance(sink, str):
        return f"the webhook at {notify.host_of(sink)}"
    return f"the function {getattr(sink, '__qualname__', type(sink).__name__)}"


def _reason(error: Exception) -> str:
    """What may be logged: the text of our own error, or the name of a stranger's exception."""
    return str(error) if isinstance(error, notify.NotDelivered) else type(error).__name__


def checked(value: Any) -> Alerting:
    """The argument ``alerts`` of `Resilient`: an `Alerting`, one sink, several, or None. Raises `InvalidInput`."""
    if isinstance(value, Alerting):
        return value
    if value is None:
        return Alerting()
    if isinstance(value, str) or callable(value):
        return Alerting(sinks=(value,))
    try:
        return Alerting(sinks=tuple(value))
    except TypeError:
        raise InvalidInput("alerts= takes an Alerting, a function, a URL, or several of these") from None
