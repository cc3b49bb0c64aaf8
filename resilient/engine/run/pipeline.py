"""A claimed job's way to what is written of it, from top to bottom.

    claimed      the worker makes an `Execution` of each row that its claim brought, and the executor gives it a slot
    admitted     `admit`, `admit_late`: why it does not run; None if it does
    decoded      `decode`: its payload
    called       `run_job`, `run_batch`: its function, on the loop or in a thread
    explained    `explain_result`, `explain_error`, `explain_interruption`: an `Outcome`
    decided      `Finisher.conclude`: a `Transition`
    written      by the completer, in a batch; `finish_of` is the row of it

Each takes plain values and returns one. Nothing here raises but for a bug of the engine's own, whatever a handler
returned or raised: an exception without a text, or a text no database takes, costs no slot and holds up no result.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import re
from collections import Counter
from contextvars import copy_context
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from pydantic import TypeAdapter

from resilient.core.base.bounds import RESULT
from resilient.core.base.errors import (
    BadPayload,
    Cancel,
    Failure,
    FailureKind,
    JobFailure,
    LostLease,
    ResourceStopped,
    Snooze,
    chain,
)
from resilient.core.base.loggers import logger
from resilient.core.base.phrases import error_line, plain, value_text
from resilient.core.jobs import marks
from resilient.core.jobs.decide import decide
from resilient.core.jobs.outcomes import (
    SUCCEEDED,
    CancelledByHandler,
    Deferred,
    Expired,
    Failed,
    HandedBack,
    Outcome,
    Reconciled,
    Snoozed,
    Succeeded,
    Transition,
)
from resilient.core.jobs.states import TERMINAL
from resilient.core.provider.classify import believed
from resilient.engine.accounts.missing_keys import left_to_others
from resilient.engine.ground.foreign import CallResult, NoThread, tried
from resilient.engine.ground.kinds import json_fault
from resilient.engine.ground.sealing import discreet, trace, unreadable
from resilient.engine.ground.sessions import to_the_end
from resilient.engine.run import two_phase
from resilient.engine.run.backend import HandlerBackend, stored_payload
from resilient.engine.run.completer import Completer
from resilient.engine.run.execution import begin_call, elapsed, end_span
from resilient.engine.run.job import Job, SyncJob
from resilient.engine.run.lease import require_lease
from resilient.engine.run.mishap import explain_bug, explain_trouble, is_databases
from resilient.store.jobs.finishing import Finish
from resilient.wire.requests.explain import Explained, explain
from resilient.wire.requests.redact import scrub, text_of, without_secrets_in_code
from resilient.wire.requests.sockets import Line, using

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence
    from concurrent.futures import Executor as ThreadPool
    from uuid import UUID

    from resilient.engine.run.backend import Wire
    from resilient.engine.run.completer import FencedId
    from resilient.engine.run.execution import Execution, Features, RunContext, SharedCall

log = logger("worker")
NEWER_VERSION_DELAY: Final = 30.0  # seconds, and up to as many again
NO_THREAD_PAUSE: Final = 1.0  # seconds until a slot that got no thread tries the next job
NOT_KEPT: Final = "result_not_kept"  # the only member of a document that stands for a result
_WAITS: Final = frozenset({"defer", "handed_back"})
_RESULT: Final[TypeAdapter[Any]] = TypeAdapter(Any)
_NUL: Final = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")


# -- admitted and decoded ------------------------------------------------------------------------------------


def admit(execution: Execution) -> Outcome | None:
    """Why it does not run, as far as this process knows; None if it does."""
    if execution.lost:
        return HandedBack("its lease was lost before it started")
    row, context = execution.row, execution.context
    # Housekeeping ends expired jobs too, but only now and then. One with a mark runs, so that its request is looked up.
    if row.expires_at is not None and row.expires_at <= context.now() and not marks.unanswered(row.sent):
        return Expired()
    if (stop := context.gate.stop(execution.resource_key, probes=execution.probes)) is not None:  # since the claim
        return _deferred(ResourceStopped(stop.resource, stop.gate, stop.until))
    if execution.sent and execution.handler.reconcile is None:
        return Failed(Failure(FailureKind.AMBIGUOUS), execution.doubt())
    return None


async def admit_late(execution: Execution, wire: Wire) -> Outcome | None:
    """Check again what may be out of date by now; returns why it does not run, or None.

    If it waited, the gates; its account's address; the place of its first request (`Wire.lines_up`); an unsure lease.
    """
    try:
        if execution.waited:
            await execution.context.gate.check(execution.resource_key, probes=execution.probes)
        await wire.prepare(execution)
        if wire.lines_up(execution):
            await wire.line_up(execution)
        if execution.is_unsure:
            await require_lease(execution)
    except Exception as error:  # noqa: BLE001 - a stopped account, the database, an address that is none
        return explain_error(execution, error)
    return None


def decode(execution: Execution) -> tuple[Any, Outcome | None]:
    """Its payload, or why that cannot be read."""
    handler, row = execution.handler, execution.row
    if row.payload_version > handler.version:
        return None, Snoozed(
            delay=NEWER_VERSION_DELAY * (1 + execution.context.roll()),
            message=f"payload version {row.payload_version} is newer than this worker's {handler.version} of"
            f" {handler.kind!r}; waiting for a newer worker",
        )
    if row.tags and not isinstance(row.tags, dict):
        return None, Failed(Failure(FailureKind.UNDECODABLE), "its tags are not a JSON object of strings")
    try:
        return handler.decode(stored_payload(execution), row.payload_version), None
    except BadPayload as error:
        return None, unreadable(error, NEWER_VERSION_DELAY * (1 + execution.context.roll()))
    except BaseException as error:  # noqa: BLE001 - of the user's upgrade function, or of a validator of the model
        is_upgrade = handler.upgrade is not None and row.payload_version != handler.version
        where = f"upgrade of payload version {row.payload_version}" if is_upgrade else "validator of the model"
        return None, Failed(Failure(FailureKind.UNDECODABLE), f"{where}: {text_of(error)}")


# -- called --------------------------------------------------------------------------------------------------


async def run_job(execution: Execution, wire: Wire, threads: ThreadPool) -> Outcome:
    """A job of its own, from its slot to its outcome."""
    if (refusal := admit(execution)) is not None:
        return refusal
    payload, refusal = decode(execution)
    if refusal is not None:
        return refusal
    handler = execution.handler
    try:
        is_late = execution.waited or wire.scattered or wire.lines_up(execution) or execution.is_unsure
        if is_late and (refusal := await admit_late(execution, wire)) is not None:
            return refusal
        job = _job(execution, payload, wire)
        begin_call(execution, [execution])
        wire.begin(execution)
        reconciling = execution.sent and handler.reconcile is not None
        fn = handler.reconcile if reconciling and handler.reconcile is not None else handler.fn
        if not handler.is_async:
            ended = await _in_thread(execution, threads, partial(_call_in_thread, execution, fn, job, reconciling))
            result = ended.unpacked()
        elif inspect.isawaitable(result := fn(job)):
            result = await result
    except BaseException as error:  # noqa: BLE001 - SystemExit and the like end the job, not the worker
        uncancel(execution)
        outcome = explain_error(execution, error)
        if execution.work is not None and not execution.thread:
            await two_phase.roll_back(execution)
            uncancel(execution)
        return outcome
    uncancel(execution)
    if execution.work is None:
        return _explain_end(execution, result, reconciling)
    if execution.thread:  # `_call_in_thread` has done it
        outcome = result
    else:
        outcome = await _commit(execution, _explain_end(execution, result, reconciling))
    uncancel(execution)
    return outcome


async def run_batch(
    call: SharedCall, wire: Wire, threads: ThreadPool, close: Callable[[Execution, Outcome], None]
) -> None:
    """The jobs of a batch, from their slot to their outcomes; ``close`` is called with one that ends apart."""
    payloads = await _payloads(call, wire, close)
    if not call.members:
        return
    begin_call(call, list(call.members.values()))
    batch = call.batch([_job(one, payloads[one.number], wire) for one in call.members.values()])
    fn, result = call.handler.fn, None
    failure: BaseException | None = None
    try:
        if not call.handler.is_async:
            result, failure = await _in_thread(call, threads, partial(fn, batch))
        elif inspect.isawaitable(result := fn(batch)):
            result = await result
    except BaseException as error:  # noqa: BLE001 - as in `run_job`
        failure = error
    uncancel(call)
    call.end(result, failure)


async def _payloads(call: SharedCall, wire: Wire, close: Callable[[Execution, Outcome], None]) -> dict[int, Any]:
    """The payloads of a batch, by number of the job: of those that run."""
    payloads: dict[int, Any] = {}
    for one in list(call.members.values()):
        if (refusal := admit(one)) is None:
            payloads[one.number], refusal = decode(one)
        if refusal is None:
            refusal = await admit_late(one, wire)
        if refusal is not None:
            close(one, refusal)
    for one in [one for one in call.members.values() if one.is_unsure]:  # it has waited for the others
        if (refusal := await admit_late(one, wire)) is not None:
            close(one, refusal)
    return payloads


def uncancel(execution: Execution | SharedCall) -> None:
    """The next job of this slot begins without the cancellations of this one."""
    task = execution.task or asyncio.current_task()
    if task is not None:
        while task.cancelling():
            task.uncancel()


async def _in_thread(execution: Execution | SharedCall, threads: ThreadPool, fn: Callable[[], Any]) -> CallResult:
    """Call a function in a thread. Raises `NoThread`."""
    called_off = False

    def begin() -> CallResult:
        if called_off:
            return CallResult(None, NoThread("it was called off"))
        with using(line):
            return tried(fn)

    line = Line()
    execution.take_thread(line)
    try:
        execution.future = asyncio.get_running_loop().run_in_executor(threads, copy_context().run, begin)
    except RuntimeError as error:  # its worker has closed, or the system gives no more threads
        called_off = True  # it stays in the pool's queue, where a thread that gets free would find it
        await asyncio.sleep(NO_THREAD_PAUSE)
        raise NoThread(f"its worker has no thread for it: {error}") from None
    await asyncio.wait([execution.future])  # a cancellation leaves the future alone, because the thread goes on
    if execution.future.cancelled():
        raise NoThread("its worker closed before a thread was free")
    end: CallResult = execution.future.result()
    return end


def _call_in_thread(execution: Execution, fn: Callable[[Any], Any], job: Any, reconciling: bool) -> Any:  # noqa: FBT001
    """In the thread: the result, or what came of its transactions, which are ended where they began."""
    try:
        result = fn(job)
    except BaseException:
        to_the_end(two_phase.roll_back(execution))
        raise
    if execution.work is None:
        return result
    return to_the_end(_commit(execution, _explain_end(execution, result, reconciling)))


async def _commit(execution: Execution, outcome: Outcome) -> Outcome:
    """The handler's transaction, committed with the job's success or rolled back; returns what came of it."""
    if execution.work is None or execution.work.opened is None:
        return outcome
    success = Succeeded() if isinstance(outcome, Reconciled) and outcome.took_effect else outcome
    if not isinstance(success, Succeeded):
        await two_phase.roll_back(execution)
        return outcome
    if (error := await two_phase.commit(execution, success)) is not None:
        return explain_error(execution, error)
    return Succeeded(success.result, written=True)


def _explain_end(execution: Execution, result: Any, reconciling: bool) -> Outcome:  # noqa: FBT001 - hot
    """What it means that the handler returned."""
    if execution.reason is not None and (not execution.thread or execution.is_warned or execution.line.broke):
        # it swallowed its cancellation, heard of it and left, or read half an answer
        return explain_interruption(execution)
    return explain_result(execution, result, reconciling=reconciling)


def _job(execution: Execution, payload: Any, wire: Wire) -> Job[Any] | SyncJob[Any]:
    """What the handler sees of it."""
    row = execution.row
    return (Job if execution.handler.is_async else SyncJob)(
        id=execution.id, kind=row.kind, payload=payload, resource_key=row.resource_key, attempt=row.attempts + 1,
        execution=row.executions + 1, idempotency_key=row.idempotency_key, tags=row.tags or {},
        ordering_key=row.ordering_key, order_no=row.order_no, backend=HandlerBackend(wire, execution),
    )  # fmt: skip


# -- explained ---------------------------------------------------------------------------------------------


def explain_result(execution: Execution, result: Any, *, reconciling: bool) -> Outcome:
    """What a handler's return value means; ``reconciling``: it is its reconcile hook's."""
    try:
        if (word := _word_of(execution, result)) is not None:
            return word
    except BaseException as error:  # noqa: BLE001 - a lazy value asks what it stands for, and that raises
        if not reconciling:
            return _leave_out(execution, f"it cannot be read ({type(error).__name__}: {type(result).__name__})")
    if reconciling:
        return Reconciled(took_effect=result)
    return SUCCEEDED if result is None else _keep(execution, result)


def _word_of(execution: Execution, result: Any) -> Outcome | None:
    """What a return value means that is no result."""
    if isinstance(result, (Snooze, Cancel)):
        return _explain_return(result, execution.secrets())
    return _never_ran(result) if inspect.isawaitable(result) else None


def _keep(execution: Execution, result: Any) -> Outcome:
    """The result as JSON text."""
    try:
        document = _RESULT.dump_json(result)
        is_kept = len(document) <= RESULT.value
        problem = json_fault(document.decode(), lambda: _RESULT.dump_python(result)) if is_kept else None
    except BaseException as error:  # noqa: BLE001 - what a value of the program's own raises when it is read
        return _leave_out(execution, f"it is not JSON ({type(error).__name__}: {type(result).__name__})")
    if len(document) > RESULT.value:
        return _leave_out(execution, f"it has {len(document):,} bytes of JSON, and {RESULT.value:,} are kept at most")
    if problem is not None:
        return _leave_out(execution, f"it is not JSON: {problem}")
    text = document.decode()
    if "\\u0000" in text:  # PostgreSQL takes no NUL in a text
        text = _NUL.sub(r"\1\\ufffd", text)
    return Succeeded(text)


def _leave_out(execution: Execution, why: str) -> Outcome:
    """Its work is done, so it has succeeded, and is not done again; what is missing stands where the result would."""
    log.warning("the result of job %s (%s) is not kept: %s", execution.id, execution.row.kind, why)
    return Succeeded(json.dumps({NOT_KEPT: why}))


def _never_ran(result: Any) -> Outcome:
    if inspect.iscoroutine(result):
        result.close()
    message = "the handler returned an awaitable: a decorator hides that it is async, so nobody awaited it"
    return Failed(Failure(FailureKind.BUG, code="NotAwaited"), message)


def explain_error(execution: Execution, error: BaseException) -> Outcome:
    """What an exception that left a handler means. One that cannot be read, because it raises itself, is a bug."""
    try:
        return _explain_error(execution, error if execution.work is None else two_phase.named(error))
    except BaseException as second:  # noqa: BLE001 - its `__bool__`, say: the job has an end all the same
        return explain_bug(execution, second)


def _explain_error(execution: Execution, error: BaseException) -> Outcome:
    if isinstance(error, asyncio.CancelledError) and execution.reason is not None:
        return explain_interruption(execution)
    if execution.lost or (isinstance(error, (LostLease, NoThread)) and execution.reason != "timeout"):
        why = str(error) if isinstance(error, NoThread) else "its lease was lost"
        return HandedBack(execution.doubt_effect() + why)
    if (outcome := _explain_chain(execution, error)) is not None:
        return outcome
    if execution.reason == "timeout":
        return explain_interruption(execution)
    explained, secrets = _explained(execution, error), execution.secrets()
    text = text_of(error, secrets)
    if explained.failure.kind is FailureKind.BUG:
        lines = trace(error, execution.handler.sealed, secrets)
        return Failed(explained.failure, execution.doubt_effect() + text, lines, resource=explained.resource)
    return Failed(explained.failure, text, resource=explained.resource)


def _explained(execution: Execution, error: BaseException) -> Explained:
    """The failure of an exception, in the light of what its execution's requests were answered; without secrets."""
    last = execution.request_logs.get(execution.request_resource)
    others = [request_log for request_log in execution.request_logs.values() if request_log is not last]
    now = execution.context.now()
    explained = explain(error, last, now, *others)
    failure = without_secrets_in_code(explained.failure, execution.secrets()) or explained.failure
    root = (explained.resource or execution.row.resource_key).partition("/")[0]
    failure = believed(failure, execution.context.ground.providers.get(root), now)
    return explained if failure is explained.failure else explained._replace(failure=failure)


def _explain_chain(execution: Execution, error: BaseException) -> Outcome | None:
    """What a Snooze, a Cancel, the database's trouble or a stopped resource means, anywhere in its chain; else None."""
    # SDKs and task groups wrap what they catch.
    for one in chain(error):
        if isinstance(one, (Snooze, Cancel)):
            return _explain_return(one, execution.secrets())
        if is_databases(one):
            return explain_trouble(one, execution)
        if isinstance(one, ResourceStopped):
            return left_to_others(one, execution.resource_key) or _deferred(one)
        if isinstance(one, JobFailure):
            return None  # raised over one of the others: it says more
    return None


def _deferred(stopped: ResourceStopped) -> Deferred:
    return Deferred(stopped.resource, stopped.gate, stopped.until, value_text(stopped))


def explain_interruption(execution: Execution) -> Outcome:
    """What it means that an execution was stopped from outside."""
    if execution.reason in ("timeout", "stop") and execution.outage is not None:
        return explain_trouble(execution.outage, execution)
    before = execution.doubt_effect()
    if execution.reason == "timeout":
        return Failed(Failure(FailureKind.TIMEOUT), before + _late(execution) + _overtime(execution))
    if execution.reason == "cancel":
        return CancelledByHandler(before + "cancelled on request", interrupted=True)
    stopped = "its worker stopped" if execution.reason == "stop" else "its lease was lost"
    return HandedBack(before + stopped, bool(execution.started))


def _overtime(execution: Execution) -> str:
    """For how long a stuck one went on after its timeout: until now, or until its worker gave it up."""
    if not execution.aside:
        return ""
    future = (execution.run or execution).future
    seconds = (asyncio.get_running_loop() if future is None else future.get_loop()).time() - execution.cancelled_at
    if future is not None and future.done():
        return f", and ended {seconds:.1f} s after that"
    return f", and did not end within {min(seconds, execution.context.patience):.1f} s after that"


def stuck_text(execution: Execution) -> str:
    """That its handler does not end, and what that means."""
    why = _late(execution) if execution.reason == "timeout" else f"was told to end ({execution.reason})"
    return f"{why} and does not end: it is not run again until it does, or until {execution.context.patience:g} s later"


def _late(execution: Execution) -> str:
    return f"took longer than its timeout of {execution.handler.timeout:g} s"


def _explain_return(word: Snooze | Cancel, secrets: Iterable[str]) -> Outcome:
    """What a Snooze or a Cancel means that a handler returned or raised."""
    if isinstance(word, Cancel):
        return CancelledByHandler(scrub(plain(value_text(word.reason)), secrets))
    return Snoozed(delay=word.delay, until=word.until)


# -- decided and written -------------------------------------------------------------------------------------


def finish_of(execution: Execution, transition: Transition, worker_id: str, started_at: Any) -> Finish:
    """The store's form of a decision about what this process ran.

    Which requests are unanswered is written as this process knows it: a mark whose write was cut off may stand in the
    database although its request was never sent.
    """
    row = execution.row
    return Finish(row.id, execution.fence, transition, execution.marks or {}, row.executions + 1, worker_id, started_at)


class Finisher:
    """Decides what becomes of a worker's executions, and has it written.

    ``on_end(execution)`` is called when an execution was decided. ``on_written(is_followed, is_released)`` is called
    when results were committed: whether another job or a workflow waits for one of them, so that staging has work, and
    whether a job may be ready now that was not before.
    """

    def __init__(
        self,
        context: RunContext,
        features: Features,
        wire: Wire,
        *,
        on_end: Callable[[Execution], None],
        on_written: Callable[[bool, bool], None],
    ) -> None:
        ground, self._context, self._alerts, self._wire = context.ground, context, features.alerts, wire
        self._on_end, self._on_written, self._counts = on_end, on_written, ground.counts
        self.completer = Completer(
            ground.database, context.gate.capped, self._written, self._refused, ground.poke, roll=context.roll
        )
        # Decided, not yet committed: their leases still matter. By number and fence: a job may be run here once more.
        self.unwritten: dict[tuple[int, int], Execution] = {}
        self.ended = 0
        self.outcomes: Counter[str] = Counter()

    def conclude(self, execution: Execution, outcome: Outcome) -> None:
        """An execution is over: what it came to goes to the completer."""
        self.ended += 1
        self.unwritten[execution.number, execution.fence] = execution
        try:
            if isinstance(outcome, Succeeded):
                self._succeed(execution, outcome)
            else:
                self._decide(execution, outcome)
        except BaseException:  # nobody writes it: its lease must end, so that it is rescued
            self.unwritten.pop((execution.number, execution.fence), None)
            raise
        self._tell(self._wire.ended, execution, outcome)
        self._on_end(execution)

    def _succeed(self, execution: Execution, outcome: Succeeded) -> None:
        """It needs no decision of its own: its transition is always the same."""
        self._count(execution, "succeeded")
        end_span(execution, "succeeded", outcome)
        if outcome.written:
            self.completer.written += 1
            self._written([(execution.id, execution.fence)], (), released=True)
            return
        if execution.follow_ups is not None:
            self.completer.follow(execution.id, execution.fence, execution.follow_ups)
        row = execution.row
        is_followed = row.followed or row.ordering_key is not None
        self.completer.succeed(
            execution.id, execution.fence, outcome.result, execution.resource_key, is_followed=is_followed
        )

    def _decide(self, execution: Execution, outcome: Outcome) -> None:
        now, retry, roll = self._context.now(), execution.handler.retry, self._context.roll()
        outcome = discreet(outcome) if execution.handler.sealed else outcome
        try:
            transition = decide(execution.facts(), outcome, retry, now, roll)
        except BaseException as error:  # noqa: BLE001 - a handler asked for the impossible, such as a time of no calendar
            outcome = discreet(explain_bug(execution, error), is_sealed=execution.handler.sealed)
            transition = decide(execution.facts(), outcome, retry, now, roll)
        self._count(execution, transition.decision)
        execution.ending = transition.decision, transition.error_kind or ""
        end_span(execution, transition.decision, outcome)
        started = now - timedelta(seconds=max(0.0, elapsed(execution)))
        if execution.follow_ups is not None and transition.decision in ("succeeded", "once_more"):
            self.completer.follow(execution.id, execution.fence, execution.follow_ups)
        finish = finish_of(execution, transition, self._context.worker_id, started)
        self.completer.finish(finish, execution.resource_key)
        level = logging.WARNING if transition.state in TERMINAL and transition.decision != "cancelled" else logging.INFO
        if transition.decision in _WAITS:  # the gate's own record says it, once for all of them
            level = logging.DEBUG
        if log.isEnabledFor(level):
            row, kind, code, text = execution.row, transition.error_kind, transition.error_code, transition.error
            why = f": {error_line(kind, code, text, 2_000)}" if text else ""
            log.log(level, "job %s (%s on %s): %s%s", row.id, row.kind, row.resource_key, transition.decision, why)
        self._tell(self._alerts.noticed, execution, transition)

    def _tell(self, listener: Callable[[Execution, Any], None], execution: Execution, what: Any) -> None:
        """Report its end to the gate or to the alerts: their error may cost counts, but no slot."""
        try:
            listener(execution, what)
        except Exception:
            log.exception("%s failed over job %s", getattr(listener, "__qualname__", listener), execution.id)

    def _count(self, execution: Execution, decision: str) -> None:
        """Count a decision; one that is taken back (`_refused`) does not count any more."""
        if execution.decision:
            self.outcomes -= Counter([execution.decision])
        self.outcomes[decision] += 1
        if execution.follow_ups is not None:
            execution.decision = decision

    def _written(self, ids: Sequence[FencedId], stale: Collection[UUID], released: bool) -> None:  # noqa: FBT001
        followed = False
        for id_, fence in ids:
            if (execution := self.unwritten.pop((id_.int, fence), None)) is not None:
                if not stale or id_ not in stale:
                    self._counts.ended(execution.row.kind, execution.resource_key, execution.ending)
                followed = followed or execution.row.followed
                released = released or bool(execution.probes)
        if released or followed:
            self._on_written(followed, released)

    def _refused(self, id_: UUID, fence: int, error: Exception) -> None:
        """Take a decision back: the follow-up jobs cannot be written, so neither can the job's end. It has failed."""
        if (execution := self.unwritten.get((id_.int, fence))) is not None:
            execution.take_back_follow_ups()
            self._decide(execution, explain_bug(execution, error))
