"""One execution of one claimed job: its state while it runs, alone or in a call that a batch shares.

What its handler does with it goes through `backend.py`. `Features`, `WorkerLoop` and `RunContext` are what a worker and
its executions are handed when they are made.

While a handler waits inside the engine (for a refresh, at the gate, for a draw, for a mark's commit: `InEngine`), its
timeout stands still, because waiting costs no attempt. Each such wait ends by itself, with an admission or a deferral.
Together they prolong a call by no more than its timeout or `LEAST_PROLONGED`, whichever is longer, so that a timeout
ends even what waits all the time in one branch while another hangs.

While the engine's own database is away (`patiently`), everything is tried twice, because a pooled connection may have
been cut while it rested. Beyond that, what has done nothing yet is handed back: it costs nothing to run it again. What
has done something that must not be done twice waits, for as long as its lease and its timeout allow, because its
outcome is known and only cannot be written.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import threading
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from resilient.core.base.errors import Failure, FailureKind, JobFailure, LostLease
from resilient.core.base.frames import Hidden
from resilient.core.jobs import marks
from resilient.core.jobs.backoff import retry_pause
from resilient.core.jobs.outcomes import Failed, JobFacts
from resilient.engine.ground.counts import SUCCESS
from resilient.store.db import trouble
from resilient.store.jobs import leases
from resilient.wire.requests.sockets import Line

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Container, Coroutine, Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    from sqlalchemy import URL

    from resilient.core.base.tracing import Span
    from resilient.core.gates.breaker import Probes
    from resilient.core.jobs.outcomes import Outcome
    from resilient.engine.accounts.grants import Grants
    from resilient.engine.alerts import Alerts
    from resilient.engine.gates.gate import Gate
    from resilient.engine.gates.permits import Reservation
    from resilient.engine.ground.encoder import JobRequest
    from resilient.engine.ground.ground import Ground
    from resilient.engine.ground.kinds import Handler
    from resilient.engine.ground.sessions import SessionEngines, Transactions, Writer
    from resilient.store.jobs.claim_snapshot import ClaimedJob
    from resilient.wire.publishers.base import Destination
    from resilient.wire.requests.request_log import RequestLog


LABELLED: Final = 10  # jobs of a batch that a record of its handler names
LOOP_LOOK: Final = 1.0  # seconds between two looks of a waiting thread whether the loop is still there


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Features:
    """What of an app its workers drive. ``app`` and ``deps`` are what handlers see as ``job.app`` and ``job.deps``."""

    ground: Ground
    alerts: Alerts
    grants: Grants
    sessions: SessionEngines
    destinations: Mapping[str, Destination]
    listen_url: URL | None
    tick_schedules: Callable[[], Awaitable[None]]
    chores: Sequence[Callable[[], Awaitable[Any]]]
    app: Any
    deps: Any


class WorkerLoop:
    """A worker's event loop, as its threads see it: there while the worker runs, and after."""

    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id
        self._loop: asyncio.AbstractEventLoop | None = None

    def attach(self) -> None:
        """The running loop is the worker's."""
        self._loop = asyncio.get_running_loop()

    def call_soon(self, fn: Callable[..., object], *args: Any) -> None:
        """Call a function on the loop, if it is there; from any thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it is closed
                self._loop.call_soon_threadsafe(fn, *args)

    def send(self, coroutine: Coroutine[Any, Any, T]) -> Future[T] | None:
        """Begin a coroutine on the loop, if it is there, and wait for nothing; from any thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it is closed
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        return None

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop, for a handler in a thread, and wait for it. Raises `LostLease` without one."""
        loop, future = self._loop, self.send(coroutine)
        while loop is not None and future is not None:
            try:
                return future.result(LOOP_LOOK)
            except CancelledError:  # of all tasks, by a program that ends: no mistake of the handler's
                break
            except TimeoutError:
                if future.done() and not future.cancelled():  # just now, or the error is the coroutine's own
                    return future.result()
                if loop.is_closed():  # nobody will ever run it
                    coroutine.close()
                    break
        raise LostLease(f"worker {self._worker_id} has stopped")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RunContext:
    """What a running job needs of its worker. ``patience``: seconds a handler that does not end keeps its job.

    ``on_loop`` and ``in_threads`` run the transactions of handlers on the loop and of those in threads.
    """

    ground: Ground
    on_loop: Transactions
    in_threads: Transactions
    worker_id: str
    gate: Gate
    sessions: SessionEngines
    writer: Writer
    patience: float
    now: Callable[[], datetime]  # the database's time
    roll: Callable[[], float]
    app: Any
    deps: Any


_CHANGING: Final = threading.Lock()
_NO_LINE: Final = Line()
TRUSTED: Final = 0.75  # of a lease; the rest of it is for what was begun in time
FACTS_LAST: Final = 1.0  # seconds after its claim in which a job may start by what the claim has read of the gates


class Opened(NamedTuple):
    """A user's session in a transaction; ``is_ours`` must get an element before it is committed."""

    session: Any
    is_ours: list[bool]


class Work:
    """The transactions of one execution's handler."""

    __slots__ = ("after", "committing", "completed", "opened", "stack", "workflows")

    def __init__(self) -> None:
        self.opened: Opened | None = None  # a transaction that outlives its block
        self.stack: Any = None  # ends it
        self.completed = False  # a complete block ended without an error: the job's end belongs in the transaction
        self.committing = False
        self.after: list[Callable[[], Any]] = []
        self.workflows: list[UUID] = []  # that got more steps


class Pausable:
    """What has a timeout. Its waits change on the worker's loop alone."""

    # Class attributes: most executions never change them.
    ids: Sequence[UUID] = ()  # of the jobs that share a call
    transaction_open = False  # of the handler's: nothing may be sent
    waits = 0  # requests that wait inside the engine now
    waits_since = 0.0  # loop time at which the first of them began
    waited_before = 0.0  # seconds of the waits that have ended
    unseen: Any = None  # see `tracing.Run`

    def pause(self, now: float) -> float:
        """Seconds in which at least one of its requests waited."""
        return self.waited_before + (now - self.waits_since if self.waits else 0.0)


class Execution(Pausable):
    """A claimed job between its claim and its finish."""

    # Most of it stays as it is here for most executions: a class attribute costs nothing to set.
    run: SharedCall | None = None  # the call it shares with others
    work: Work | None = None  # its handler's transactions
    span: Span | None = None  # of its run
    follow_ups: list[JobRequest] | None = None  # jobs to enqueue if it succeeds
    since = 0.0  # loop time of its claim
    lease = 0.0  # seconds
    held_until = math.inf  # by `leases.clock`: nobody else has its job before
    started = 0.0  # loop time; 0 until it starts
    task: asyncio.Task[Any] | None = None  # the slot that runs it
    thread = False  # its function runs in a thread, which cannot be interrupted
    future: asyncio.Future[Any] | None = None  # that thread's end
    cancelled_at = 0.0  # loop time; 0 if it was not told to end at once
    replaced = False  # another slot stands for the one it keeps
    aside = False  # it did not end: its slot went on without it, and its job stays claimed
    is_warned = False  # the handler was told that it should stop
    reason: str | None = None  # why it was interrupted: "timeout", "cancel", "stop" or "lost"
    lost = False  # the fence is gone: nothing this execution writes counts
    over = False  # its end was decided; a thread that goes on sends nothing more
    called = False  # its handler was called
    checkpointed = False  # saved progress of a sync since the claim
    passes: frozenset[tuple[str, str, str]] = frozenset()  # streams whose pass it asked for
    is_answered = False  # some request of this execution was answered; written by `count_answer`
    elected: Probes = ()  # circuits off its path that its requests probe
    begun_at = 0.0  # loop time at which its handler was called; 0 again with its first request
    reservation: Reservation | None = None  # the place of that request
    request_resource = ""  # the resource whose request log was used last
    request_logs: Mapping[str, RequestLog] = MappingProxyType({})  # of its requests, by resource; made with the first
    outage: BaseException | None = None  # why the database does not serve, while it is waited for
    decision = ""  # what was decided of it, if that may be taken back
    ending = SUCCESS  # what its end counts as: the outcome, the kind of its error
    effect: str | None = None  # the latest request that took effect and would be done again by a repeat, by name
    _effects: Mapping[str, Any] = MappingProxyType({})  # its mark, which stays on the row until the finish
    _marks: Mapping[str, Any] = MappingProxyType({})  # of unanswered requests, by name
    _marking: asyncio.Lock | None = None  # made with the first mark

    def __init__(self, context: RunContext, row: ClaimedJob, handler: Handler[Any, Any], probes: Probes) -> None:
        self.context = context
        self.row = row
        self.handler = handler
        self.id: UUID = row.id
        self.number: int = row.id.int  # what dicts know it by: hashing and comparing UUIDs is Python code
        self.resource_key = row.resource_key
        self.fence: int = row.version + 1  # the claim raised it
        self.probes = probes  # half-open circuits this job tries out
        self.line = _NO_LINE  # what its thread waits for, once it has one
        if row.sent is not None:
            self._marks = marks.readable(row.sent)

    def log_fields(self) -> dict[str, Any]:
        """See `tracing.Run`."""
        row = self.row
        return {
            "job_id": str(self.id), "kind": row.kind, "resource_key": row.resource_key, "attempt": row.attempts + 1,
        }  # fmt: skip

    @property
    def db(self) -> Transactions:
        """Runs its handler's transactions, where the handler runs."""
        return self.context.on_loop if self.handler.is_async else self.context.in_threads

    def hold(self, since: float) -> None:
        """Its lease was taken, or renewed, by a statement that was sent after ``since``."""
        self.held_until = since + TRUSTED * self.lease

    @property
    def is_unsure(self) -> bool:
        """Whether another worker may have its job by now: see `lease.require_lease`."""
        return leases.clock() > self.held_until

    @property
    def waited(self) -> bool:
        """Whether what its claim has read of the gates may be out of date now that it starts."""
        return self.started - self.since > FACTS_LAST

    def facts(self) -> JobFacts:
        """What `decide` must know."""
        row = self.row
        return JobFacts(
            attempts=row.attempts, max_attempts=row.max_attempts, deferrals=row.deferrals,
            rescues=0 if self.checkpointed else row.rescues, expires_at=row.expires_at, sent=self.sent,
            safe_until=marks.safe_until(self._marks), cancel_requested=self.reason == "cancel",
            once_more=bool(row.once_more), resource_key=row.resource_key,
            can_reconcile=self.handler.reconcile is not None, checkpointed=self.checkpointed, called=self.called,
        )  # fmt: skip

    @property
    def cancel_requested(self) -> bool:
        """See `job.JobBackend`. A thread that was told so and returns has not ended its work."""
        self.is_warned = self.is_warned or self.reason is not None
        return self.is_warned

    @property
    def sent(self) -> bool:
        """Whether a request is unanswered that must not be repeated."""
        return bool(self._marks) and marks.in_doubt(self._marks, self.context.now())

    def secrets(self) -> Hidden:
        """What its requests carried: nothing that is kept of it may show them."""
        return Hidden(secret for request_log in self.request_logs.values() for secret in request_log.secrets)

    def doubt(self) -> str:
        """Why a request must not be repeated."""
        return marks.forgotten(self._marks, self.context.now()) or "a request of an earlier execution is unanswered"

    def mark_of(self, name: str) -> dict[str, Any] | None:
        """The mark of an unanswered request."""
        return self._marks.get(name)

    def unmark(self, name: str, *, took_effect: bool, keyed: bool) -> dict[str, Any] | None:
        """The outcome of a request is known; its row hears of it with the finish, so that this costs nothing.

        What took effect stays in the row until then, for whoever finds it after a crash; under a key, to the job's end.
        """
        mark = None if self.over or self.lost else self._marks.get(name)
        if mark is not None:
            keeps = keyed and (took_effect or marks.is_answered(mark))
            self._set_mark(name, marks.with_answer(mark) if keeps else None)
            if took_effect and not keyed:
                self.effect, self._effects = name, {name: mark}
        return mark

    @property
    def is_settled(self) -> bool:
        """Whether what its row says about its requests is only that some were answered."""
        is_marking = self._marking is not None and self._marking.locked()
        return bool(self.effect or self._marks) and not marks.unanswered(self._marks) and not is_marking

    def doubt_effect(self) -> str:
        """It ends without a decision of its handler's: a repeat would do again what was answered without a key.

        So its mark stands again. Returns the beginning of a message that says so; "" if there is no such request.
        """
        if self.effect is None:
            return ""
        for name, mark in self._effects.items():
            self._set_mark(name, mark)
        return f"{self.effect} was answered, and then: "

    def settle(self) -> None:
        """A checkpoint is committed: a repeat begins after it, so the answered requests before it are forgotten."""
        self.effect, self._effects = None, {}
        self._marks = marks.unanswered(self._marks)

    def begin_work(self) -> Work:
        """The transactions of its handler, made with the first block."""
        self.work = self.work or Work()
        return self.work

    def follow(self, job: JobRequest) -> None:
        """Enqueue a job with its success."""
        self.follow_ups = [*(self.follow_ups or ()), job]

    def take_back_follow_ups(self, ids: Container[UUID] | None = None) -> None:
        """Drop its follow-up jobs of these ids; None: all of them."""
        rest = [] if ids is None else [one for one in self.follow_ups or () if one.row.id not in ids]
        self.follow_ups = rest or None

    def count_answer(self) -> None:
        """A request was answered, or an error of another one stands for it: its end is no evidence of its own."""
        self.is_answered = True

    def leave(self) -> None:
        """Its end is decided: it sends and marks nothing more."""
        self.over = True

    def begin_time_anew(self) -> None:
        """Give its handler its whole timeout again; call it on the worker's loop."""
        self.started, self.waited_before = asyncio.get_running_loop().time(), 0.0

    def restore_mark(self, name: str, mark: dict[str, Any] | None) -> None:
        """Set the mark of a request again, because its outcome is not known after all. None: it had none."""
        if mark is not None:
            self._set_mark(name, mark)

    def _set_mark(self, name: str, mark: dict[str, Any] | None) -> None:
        with _CHANGING:  # answers are taken in by the threads that asked
            others = {k: v for k, v in self._marks.items() if k != name}
            self._marks = others if mark is None else {**others, name: mark}

    async def mark(self, name: str, mark: dict[str, Any], commit: Callable[[str], Awaitable[bool]]) -> None:
        """Commit the mark of one request before it is sent; raises `LostLease` if the fence is gone.

        ``commit`` writes all marks, as JSON text, and says whether the fence held. One after the other: two requests at
        once must not write each other's mark away.
        """
        self._marking = self._marking or asyncio.Lock()
        async with self._marking:
            self.require_running()
            text = json.dumps({**self._effects, **self._marks, name: mark})
            self.require_held(await commit(text))
            self.require_running()
            self._set_mark(name, mark)

    @property
    def marks(self) -> dict[str, Any] | None:
        """Its requests that are unanswered when it ends, and those that took effect under a key that has an end."""
        return dict(self._marks) or None

    def require_running(self) -> None:
        """Raises `LostLease` if nothing this execution does counts any more."""
        if self.over or self.lost:
            raise LostLease(f"job {self.id} ({self.row.kind}) is not run by this execution any more: it sends nothing")

    def take_thread(self, line: Line) -> None:
        """Its function is called in a thread, which waits on this line."""
        self.thread, self.line = True, line

    def require_time(self) -> None:
        """Raises `JobFailure` if its time is over: a thread that goes on sends nothing more."""
        if self.line.is_cut:
            raise JobFailure(
                f"job {self.id} ({self.row.kind}) has used up its time: it sends nothing more",
                failure=Failure(FailureKind.TIMEOUT),
            )

    def require_held(self, is_held: bool) -> None:  # noqa: FBT001 - the answer of a conditional write
        """Raises `LostLease` if a write under the fence met nothing."""
        if not is_held:
            self.lost = True
            raise LostLease(
                f"job {self.id} ({self.row.kind}) is no longer held by worker {self.context.worker_id}: it was given"
                " to another one, so nothing more of this execution counts"
            )


class SharedCall(Pausable):
    """The call that the executions of a batch share. It stands in the executor's queue and slot for all of them."""

    def __init__(self, first: Execution) -> None:
        self.row, self.handler, self.id = first.row, first.handler, first.id  # for the log
        self.place = (first.row.kind, first.resource_key)
        self.members: dict[int, Execution] = {}  # claimed and not yet ended
        self.last: Outcome | None = None  # of the member that stays until the end, if it is settled
        self.task: asyncio.Task[Any] | None = None
        self.started = 0.0
        self.thread = False
        self.line = Line()  # what its thread waits for
        self.aside = self.replaced = False  # see `Executor`
        self.future: asyncio.Future[Any] | None = None
        self.interrupted = False  # the call was told to end
        self.is_warned = False  # the handler looked, and saw that it should stop
        self.span: Span | None = None

    def log_fields(self) -> dict[str, Any]:
        """See `tracing.Run`; ``job_id`` names the first few."""
        more = len(self.ids) - LABELLED
        ids = " ".join(map(str, self.ids[:LABELLED])) + (f" +{more}" if more > 0 else "")
        return {"job_id": ids, "kind": self.row.kind, "resource_key": self.row.resource_key, "attempt": None}

    def add(self, execution: Execution) -> None:
        """One more, before it starts."""
        self.members[execution.number] = execution
        execution.run = self

    def leave(self, execution: Execution) -> bool:
        """One ended; True if others are left, so that the slot stays taken."""
        return self.members.pop(execution.number, None) is not None and bool(self.members)

    @property
    def full(self) -> bool:
        """Whether it takes no more."""
        return len(self.members) >= (self.handler.batch or 1)

    def begin(self) -> None:
        """It has a slot now."""
        self.ids = [one.id for one in self.members.values()]
        for one in self.members.values():
            one.started = self.started
            one.thread = not self.handler.is_async

    def batch(self, jobs: list[Any]) -> Any:
        """What its handler is called with."""
        raise NotImplementedError

    def end(self, result: Any, error: BaseException | None) -> None:
        """The handler returned or raised: what that means for every job which it did not settle."""
        raise NotImplementedError

    def take_thread(self, line: Line) -> None:
        """Its function is called in a thread, which waits on this line."""
        self.thread, self.line = True, line
        for one in self.members.values():
            one.line = line

    def interrupt(self, reason: str) -> None:
        """One of its jobs was interrupted; end the call if it is for nothing now."""
        everybody = reason in ("timeout", "stop")
        if everybody:
            for one in self.members.values():
                if one.reason is None or (reason == "timeout" and not one.lost):
                    one.reason = reason
        if not everybody and any(one.reason is None for one in self.members.values()):
            return
        if self.task is None or (self.thread and reason not in ("timeout", "lost")):
            return
        now = asyncio.get_running_loop().time()
        for one in self.members.values():
            one.cancelled_at = one.cancelled_at or now
        if not self.interrupted:
            self.interrupted = True
            if self.thread:
                self.line.cut()
            else:
                self.task.cancel()


LEAST_PROLONGED: Final = 60.0  # seconds


class InEngine:
    """A block in which a handler waits for the engine: ``with InEngine(execution):``."""

    __slots__ = ("_unit",)

    def __init__(self, execution: Execution) -> None:
        self._unit: Pausable = execution.run or execution

    def __enter__(self) -> None:
        unit = self._unit
        if not unit.waits:
            unit.waits_since = asyncio.get_running_loop().time()
        unit.waits += 1

    def __exit__(self, *_: object) -> None:
        unit = self._unit
        unit.waits -= 1
        if not unit.waits:
            unit.waited_before += asyncio.get_running_loop().time() - unit.waits_since


def elapsed(execution: Execution) -> float:
    """Seconds since it started; 0 if it did not. Call it on the event loop."""
    return asyncio.get_running_loop().time() - execution.started if execution.started else 0.0


T = TypeVar("T")
LONGEST_INSIDE: Final = 1.0  # seconds at most between two tries while a handler waits


async def patiently(
    execution: Execution,
    step: Callable[[], Awaitable[T]],
    rest: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> T:
    """``step``, which writes nothing twice when it is repeated; see the top of this file. ``rest`` waits seconds."""
    tries = 0
    while True:
        try:
            result = await step()
        except Exception as error:
            if _gives_up(execution, error, tries):
                raise
        else:
            execution.outage = None
            return result
        await rest(retry_pause(tries, execution.context.roll(), LONGEST_INSIDE))
        tries += 1


def _gives_up(execution: Execution, error: Exception, tries: int) -> bool:
    """Whether the error goes to the handler; if not, note that the database is away."""
    stopped = execution.over or execution.lost or execution.reason is not None
    waits = trouble.is_of_database(error) and not stopped and (execution.effect is not None or not tries)
    execution.outage = error if waits else execution.outage if stopped else None
    return not waits


def begin_call(unit: Execution | SharedCall, executions: Sequence[Execution]) -> None:
    """The handler is called now: begin the span of the run, as the current one. `Finisher` ends it."""
    for one in executions:
        one.called = True
    ground, row = executions[0].context.ground, executions[0].row
    tracing, alone = ground.tracing, unit is executions[0]
    if tracing.share < 1 and tracing.leaves_out():
        return
    traces = () if alone and row.trace is None else [one.row.trace for one in executions]
    if (span := tracing.process(row.kind, traces, count=None if alone else len(executions))) is None:
        return
    unit.span = span
    span.enter()
    if not span.is_recorded:
        return
    provider = row.resource_key.partition("/")[0]
    words: dict[str, Any] = {"resilient.provider": provider if provider in ground.providers else None}
    words["resilient.resource_key"] = row.resource_key if tracing.tenants else None
    if alone:
        words["messaging.message.id"] = str(row.id)
        words["resilient.attempt"], words["resilient.execution"] = row.attempts + 1, row.executions + 1
    span.note(words)


def end_span(execution: Execution, decision: str, outcome: Outcome) -> None:
    """Say in the span of a run what it came to. That of a batch ends with its last job."""
    span = execution.span if (run := execution.run) is None else run.span
    if span is None or not span.is_recorded:
        return
    if run is None:
        span.note({"resilient.outcome": decision})
    elif decision != "succeeded":
        span.event("resilient.job", {"messaging.message.id": str(execution.id), "resilient.outcome": decision})
    if isinstance(outcome, Failed):
        kind = outcome.failure.kind.value
        name = outcome.failure.code if kind == "bug" else None
        if execution.context.ground.tracing.tenants:
            span.fail(kind, outcome.message, outcome.traceback, name=name)
        else:
            span.fail(kind, name=name)  # texts of errors hold addresses, and what customers wrote
    if run is None or not run.members:
        span.end()
