"""The reporter of one worker: writes what requests came to, when it is due, and says what changed.

One write at a time, in batches, deepest keys first. What could not be written is kept and tried again. A
circuit that opens or closes is one clean line in the log.

`Tally` sums outcomes per resource until that is worth a write. Failures and verdicts of probes are written within
milliseconds. Successes of a resource that has troubles (a failure lately, a circuit not closed) within a second,
because they count against its failures. Those of a healthy one only now and then: they tell when it last worked and
which children of an ancestor are alive; nothing waits for them.

`Probing` is for circuits off their job's own path, which no claim ever looks at. A request may go to an endpoint below
its job's key, through another resource altogether, or (a token's refresh) have no job. When a circuit there is due, the
request that comes first becomes its probe, in a short transaction of its own; the others are refused as ever.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy.exc import DBAPIError

from resilient.core.base.errors import DatabaseUnreachable
from resilient.core.base.loggers import FailureLog, logger
from resilient.core.base.phrases import moment
from resilient.core.base.resource_key import is_below, path
from resilient.core.gates.admission import refusal, stop_of
from resilient.core.gates.breaker import Report
from resilient.engine.gates.timer import Timer
from resilient.store.db.dialect import is_lock_timeout
from resilient.store.gates import circuits
from resilient.store.gates.circuits import Evidence

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from resilient.core.base.errors import Failure
    from resilient.core.gates.admission import ResourceFacts
    from resilient.core.gates.breaker import Probes, Verdict
    from resilient.core.gates.policy import Policies
    from resilient.engine.gates.drawing import Drawing
    from resilient.engine.gates.snapshot import Snapshot
    from resilient.store.db.database import Database
    from resilient.store.gates.circuits import Change


PROMPT: Final = 0.005  # seconds; failures that arrive together are written together
SOON: Final = 1.0
QUIET: Final = 30.0  # seconds between two writes of a healthy resource's successes
_TROUBLED: Final = 60.0  # seconds after a failure in which successes are written soon
_NAMES: Final = 16  # children named in one report


@dataclass(slots=True)
class _Sum:
    generation: int
    ok: int = 0
    failed: int = 0
    trailing: int = 0
    healthy: set[str] = field(default_factory=set)
    failing: set[str] = field(default_factory=set)
    failure: Failure | None = None
    floor: datetime | None = None
    due_at: float = 0.0  # monotonic; when it is to be written
    failed_at: float = -1e9  # monotonic; when it last failed here
    written_at: float = -1e9

    def clear(self) -> None:
        self.ok = self.failed = self.trailing = 0
        self.healthy, self.failing, self.failure, self.floor = set(), set(), None, None


class Tally:
    """Sums of one worker, by key. Not for threads."""

    def __init__(self, monotonic: Callable[[], float], roll: Callable[[], float]) -> None:
        self._monotonic, self._roll = monotonic, roll
        self._sums: dict[str, _Sum] = {}
        self._open: set[str] = set()  # keys with something to write
        self._evidence: list[Evidence] = []  # verdicts of probes, and what could not be written

    def add(
        self,
        key: str,
        generation: int,
        verdict: Verdict,
        child: str,
        *,
        failure: Failure | None = None,
        floor: datetime | None = None,
        calm: bool = True,
    ) -> float:
        """Count one request; returns in how many seconds a write is due."""
        at = self._monotonic()
        s = self._sums.get(key)
        if s is None:
            s = self._sums[key] = _Sum(generation)
        elif s.generation != generation:
            if generation < s.generation:
                return QUIET  # overtaken by a change of the circuit
            s.clear()
            s.generation = generation
        if verdict == "neutral":
            return QUIET
        is_first = not (s.ok or s.failed)
        if verdict == "failed":
            s.failed += 1
            s.trailing += 1
            s.failure, s.floor, s.failed_at = failure, floor, at
            s.healthy.discard(child)
            if len(s.failing) < _NAMES:
                s.failing.add(child)
            wait = PROMPT
        else:
            s.ok += 1
            s.trailing = 0
            s.failing.discard(child)
            if len(s.healthy) < _NAMES:
                s.healthy.add(child)
            wait = self._success_wait(key, s, at, calm=calm)
        if is_first or at + wait < s.due_at:
            s.due_at = at + wait
            self._open.add(key)
        return wait

    def _success_wait(self, key: str, s: _Sum, at: float, *, calm: bool) -> float:
        """Seconds until a success is written."""
        if not calm or at - s.failed_at < _TROUBLED:
            return SOON
        if s.written_at < 0:  # the first one: ancestors soon, for they must know who is alive; leaves spread out
            return SOON if "/" not in key else SOON + QUIET * self._roll()
        return max(SOON, s.written_at + QUIET - at)

    def probe(
        self, key: str, generation: int, verdict: Verdict, failure: Failure | None, floor: datetime | None
    ) -> None:
        """The verdict of a probe."""
        ok, failed = int(verdict == "ok"), int(verdict == "failed")
        report = Report(generation, ok=ok, failed=failed, probe=True, floor_until=floor)
        self._evidence.append(Evidence(key, report, failure))

    def due(self) -> float | None:
        """In how many seconds the next write is due; None if there is nothing to write."""
        if self._evidence:
            return 0.0
        if not self._open:
            return None
        return max(0.0, min(self._sums[key].due_at for key in self._open) - self._monotonic())

    def collect(self, *, everything: bool = False) -> list[Evidence]:
        """Take out what is due, or everything."""
        at = self._monotonic()
        evidence, self._evidence = self._evidence, []
        for key in [k for k in self._open if everything or self._sums[k].due_at <= at]:
            s = self._sums[key]
            healthy, failing = frozenset(s.healthy), frozenset(s.failing)
            report = Report(s.generation, s.ok, s.failed, s.trailing, healthy, failing, floor_until=s.floor)
            evidence.append(Evidence(key, report, s.failure))
            s.clear()
            s.written_at = at
            self._open.discard(key)
        for key in [k for k, s in self._sums.items() if k not in self._open and at - s.written_at > 4 * QUIET]:
            del self._sums[key]
        return evidence

    def put_back(self, evidence: list[Evidence]) -> None:
        """What could not be written is tried again with the next write."""
        self._evidence = (evidence + self._evidence)[-_MOST_UNWRITTEN:]


_MOST_UNWRITTEN: Final = 5_000


log = logger("gate")
_BATCH: Final = 500  # resources in one write
_RETRY: Final = 1.0  # seconds until a failed write is tried again


class Reporter:
    """Sums (`tally`), their timer and their writes."""

    def __init__(
        self,
        database: Database,
        policies: Policies,
        *,
        snapshot: Snapshot,
        drawing: Drawing,
        monotonic: Callable[[], float],
        roll: Callable[[], float],
        on_change: Callable[[Change], None] | None,
    ) -> None:
        self._database, self._policies, self._roll = database, policies, roll
        self._snapshot, self._drawing, self._on_change = snapshot, drawing, on_change
        self.tally = Tally(monotonic, roll)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer = Timer(lambda: self.spawn(self._write_due()))
        self._failures = FailureLog(log, "what requests came to can be saved again")
        self._writing = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Timers run on this loop; before there is one, only `flush` writes."""
        self._loop = loop

    async def close(self) -> None:
        """Wait for what is under way, and write everything."""
        self._timer.cancel()
        while tasks := [task for task in self._tasks if not task.done()]:  # an ended one stays for a turn of the loop
            await asyncio.wait(tasks)
        try:
            await self._write(everything=True)
        except Exception as error:  # noqa: BLE001 - counts may be lost at the end, jobs may not
            log.warning("could not save what requests came to (%s: %s)", type(error).__name__, error)
        finally:
            await self._drawing.close()

    async def flush(self) -> None:
        """Write all sums now."""
        await self._write(everything=True)
        await self._drawing.flush()

    async def _write(self, *, everything: bool = False) -> None:
        async with self._writing:
            evidence = self.tally.collect(everything=everything)
            evidence.sort(key=lambda one: (-one.key.count("/"), one.key))
            batches, locked = [evidence[n : n + _BATCH] for n in range(0, len(evidence), _BATCH)], list[Evidence]()
            try:
                while batches:
                    batches[:1] = await self._report(batches[0], locked)
            finally:
                self.tally.put_back([*locked, *chain(*batches)])
        if locked:
            raise DatabaseUnreachable(f"a transaction that is open holds resource {locked[0].key}")

    async def _report(self, batch: list[Evidence], locked: list[Evidence]) -> list[list[Evidence]]:
        """Write a batch. If one of its resources is locked, return its halves; a single one goes to ``locked``."""
        try:
            changes = await self._database.transaction(circuits.report_if_current, batch, self._policies, self._roll)
        except DBAPIError as error:
            if not is_lock_timeout(error):
                raise
            if half := len(batch) // 2:
                return [batch[:half], batch[half:]]
            locked += batch
            return []
        for change in changes:
            self._changed(change)
        return []

    def _changed(self, change: Change) -> None:
        self._snapshot.put(change.after)
        before, after = change.before.breaker, change.after.breaker
        if after.state == "open" and after.open_until is not None:
            code = change.failure and (change.failure.code or change.failure.status or change.failure.kind)
            why = f"{after.streak} failures in a row" if before.state == "closed" else "its probe"
            log.warning(
                "%s: circuit open until %s after %s, latest %s; its jobs wait",
                change.after.key, moment(after.open_until), why, code or "without an answer",
            )  # fmt: skip
        elif after.state == "closed":
            log.info("%s: circuit closed, load comes back step by step", change.after.key)
        if self._on_change is not None:
            self._on_change(change)

    def wake(self, delay: float) -> None:
        """See that due sums are written in ``delay`` seconds."""
        if self._loop is not None:
            self._timer.call_by(self._loop, self._loop.time() + delay)

    async def _write_due(self) -> None:
        try:
            await self._write()
            await self._drawing.flush()
        except Exception as error:  # noqa: BLE001 - the database may be away; nothing is lost
            name = type(error).__name__
            self._failures.failed("cannot save what requests came to (%s: %s); trying again", name, error)
            self.wake(_RETRY)
            return
        self._failures.worked()
        if (delay := self.tally.due()) is not None:
            self.wake(delay)

    def spawn(self, coroutine: Any, on_failure: Callable[[], object] = lambda: None) -> None:
        """Run a coroutine beside; its error is logged. ``on_failure`` is called then, and where it is cancelled."""
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(lambda task: on_failure() if task.cancelled() or task.exception() else None)
        task.add_done_callback(self._spawned)

    def _spawned(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("gate: %s: %s", type(error).__name__, error)


class Probing:
    """The elections of one worker; ``is_probe`` says whether facts and probes of a job belong together."""

    def __init__(
        self,
        database: Database,
        policies: Policies,
        *,
        owner: str | None,
        snapshot: Snapshot,
        reporter: Reporter,
        is_probe: Callable[[ResourceFacts, Probes], bool],
    ) -> None:
        self._database, self._policies, self._owner = database, policies, owner or "?"
        self._snapshot, self._reporter, self._is_probe = snapshot, reporter, is_probe

    def due(self, key: str, own: str, probes: Probes) -> bool:
        """Whether every gate of the path lets a probe through, and some circuit off the job's own path wants one."""
        now, due = self._snapshot.now(), False
        for level in path(key):
            facts = self._snapshot.facts.get(level)
            if facts is None or facts.calm:
                continue
            if is_below(own, level):
                if refusal(facts, now, probing=self._is_probe(facts, probes)) is not None:
                    return False
            elif stop_of(facts, now) is not None:
                return False
            else:
                due = due or facts.breaker.state != "closed"
        return due

    async def elect(self, key: str, own: str) -> Probes:
        """Become the probe of the circuits off the job's own path; nothing if somebody else was faster, or has them."""
        levels = [level for level in path(key) if not is_below(own, level)]
        try:
            rows, own_keys = await self._database.transaction(
                circuits.elect_for_request, levels, self._owner, self._policies
            )
        except DBAPIError as error:
            if not is_lock_timeout(error):
                raise
            return ()
        for facts in rows:
            self._snapshot.put(facts)
        return tuple((facts.key, facts.breaker.generation) for facts in rows if facts.key in own_keys)

    def give_back(self, key: str, generation: int) -> None:
        """Give up a probe whose request or job is over: if it decided nothing, the next one may begin."""
        facts = self._snapshot.facts.get(key)
        if facts is not None and facts.breaker.state == "half_open" and facts.breaker.generation == generation:
            self._reporter.tally.probe(key, generation, "neutral", None, None)
            self._reporter.wake(0.0)
