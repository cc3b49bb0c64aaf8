"""How an execution ended: from what its handler returned or raised to an `Outcome`, and from a decision to a row.

Nothing here raises, whatever a handler returned or raised: an exception without a text, or a text no database takes,
must not cost a slot or hold up the results of others.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import re
import time
import traceback
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from pydantic import TypeAdapter

from resilient.core.bounds import ERROR_TEXT, RESULT, SCRUBBED_TEXT
from resilient.core.errors import Cancel, DatabaseBusy, JobFailure, LostLease, ResourceStopped, Snooze
from resilient.core.failure import Failure, FailureKind
from resilient.core.outcomes import (
    SUCCEEDED,
    CancelledByHandler,
    Deferred,
    Failed,
    HandedBack,
    Outcome,
    Reconciled,
    Snoozed,
    Succeeded,
    Transition,
)
from resilient.core.plain_text import plain
from resilient.engine.foreign import NoThread
from resilient.store import trouble
from resilient.store.finishing import Finish
from resilient.wire.explain import chain
from resilient.wire.redact import scrub

if TYPE_CHECKING:
    from collections.abc import Iterable

    from resilient.engine.execution import Execution

log = logging.getLogger("resilient.worker")
_RESULT: Final[TypeAdapter[Any]] = TypeAdapter(Any)
_NUL: Final = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")
NOT_KEPT: Final = "result_not_kept"  # the only member of a document that stands for a result
TRACEBACK_LIMIT: Final = ERROR_TEXT.value


def returned(execution: Execution, result: Any, *, reconciling: bool) -> Outcome:
    """What a handler's return value means; ``reconciling``: it is its reconcile hook's."""
    if isinstance(result, (Snooze, Cancel)):
        return _told(result, execution.worker.wire.secrets(execution))
    if inspect.isawaitable(result):
        return _never_ran(result)
    if reconciling:
        return Reconciled(took_effect=result)
    return SUCCEEDED if result is None else _kept(execution, result)


def _kept(execution: Execution, result: Any) -> Outcome:
    """The result as JSON text."""
    try:
        document = _RESULT.dump_json(result)
    except BaseException as error:  # noqa: BLE001 - what a value of the program's own raises when it is read
        return _not_kept(execution, f"it is not JSON ({type(error).__name__}: {type(result).__name__})")
    if len(document) > RESULT.value:
        return _not_kept(execution, f"it has {len(document):,} bytes of JSON, and {RESULT.value:,} are kept at most")
    text = document.decode()
    if "\\u0000" in text:  # PostgreSQL takes no NUL in a text
        text = _NUL.sub(r"\1\\ufffd", text)
    return Succeeded(text)


def _not_kept(execution: Execution, why: str) -> Outcome:
    """Its work is done, so it has succeeded, and is not done again; what is missing stands where the result would."""
    log.warning("the result of job %s (%s) is not kept: %s", execution.id, execution.row.kind, why)
    return Succeeded(json.dumps({NOT_KEPT: why}))


def _never_ran(result: Any) -> Outcome:
    if inspect.iscoroutine(result):
        result.close()
    message = "the handler returned an awaitable: a decorator hides that it is async, so nobody awaited it"
    return Failed(Failure(FailureKind.BUG, code="NotAwaited"), message)


def raised(execution: Execution, error: BaseException) -> Outcome:
    """What an exception that left a handler means."""
    if isinstance(error, asyncio.CancelledError) and execution.reason is not None:
        return interrupted(execution)
    if execution.lost or (isinstance(error, (LostLease, NoThread)) and execution.reason != "timeout"):
        return HandedBack(str(error) if isinstance(error, NoThread) else "its lease was lost")
    if (said := _said(execution, error)) is not None:
        return said
    if execution.reason == "timeout":
        return interrupted(execution)
    told = execution.worker.wire.explain(execution, error)
    secrets = execution.worker.wire.secrets(execution)
    trace = _trace(error, secrets) if told.failure.kind is FailureKind.BUG else None
    return Failed(told.failure, text_of(error, secrets), trace, resource=told.resource)


def _said(execution: Execution, error: BaseException) -> Outcome | None:
    """What a word of ours in its chain means; SDKs and task groups wrap what they catch."""
    for one in chain(error):
        if isinstance(one, (Snooze, Cancel)):
            return _told(one, execution.worker.wire.secrets(execution))
        if _is_databases(one):
            return in_trouble(one, execution)
        if isinstance(one, ResourceStopped):
            return Deferred(one.resource, one.gate, one.until, str(one))
        if isinstance(one, JobFailure):
            return None  # raised over one of the others: it says more
    return None


def _is_databases(error: BaseException) -> bool:
    return trouble.met(error) or (isinstance(error, ResourceStopped) and error.gate == "database")


def in_trouble(error: BaseException, execution: Execution | None = None) -> Failed:
    """The engine's own database was away, busy or full: nothing is charged, unless a repeat might do something twice.

    What was answered without a provider's key would be sent again with the handler: it took effect, and nothing that
    was to be written beside it has been.
    """
    code = "busy" if isinstance(error, DatabaseBusy) else "unreachable"
    effect = None if execution is None else execution.effect
    if effect is None:
        return Failed(Failure(FailureKind.DATABASE, code=code, counts_for_breaker=False), text_of(error))
    failure = Failure(FailureKind.AMBIGUOUS, code=f"database_{code}", counts_for_breaker=False)
    return Failed(failure, f"{effect} was answered, and then the engine's database failed the job: {text_of(error)}")


def interrupted(execution: Execution) -> Outcome:
    """What it means that an execution was stopped from outside."""
    if execution.reason in ("timeout", "stop") and execution.away is not None:
        return in_trouble(execution.away, execution)
    if execution.reason == "timeout":
        return Failed(Failure(FailureKind.TIMEOUT), _late(execution) + _overtime(execution))
    if execution.reason == "cancel":
        return CancelledByHandler("cancelled on request", interrupted=True)
    return HandedBack("its worker stopped" if execution.reason == "stop" else "its lease was lost")


def _overtime(execution: Execution) -> str:
    """For how long a stuck one went on after its timeout: until now, or until its worker gave it up."""
    if not execution.aside:
        return ""
    seconds = time.monotonic() - execution.cancelled_at
    if execution.future is not None and execution.future.done():
        return f", and ended {seconds:.1f} s after that"
    return f", and did not end within {min(seconds, execution.worker.patience):.1f} s after that"


def stuck_text(execution: Execution) -> str:
    """That its handler does not end, and what that means."""
    why = _late(execution) if execution.reason == "timeout" else f"was told to end ({execution.reason})"
    return f"{why} and does not end: it is not run again until it does, or until {execution.worker.patience:g} s later"


def _late(execution: Execution) -> str:
    return f"took longer than its timeout of {execution.handler.timeout:g} s"


def broken(error: BaseException) -> Outcome:
    """What it means that the engine itself failed over an execution."""
    if any(_is_databases(one) for one in chain(error)):
        return in_trouble(error)
    return Failed(Failure(FailureKind.BUG, code=type(error).__name__), text_of(error), _trace(error))


def _told(word: Snooze | Cancel, secrets: Iterable[str]) -> Outcome:
    if isinstance(word, Cancel):
        return CancelledByHandler(scrub(plain(str(word.reason)), secrets))
    return Snoozed(delay=word.delay, until=word.until)


def text_of(error: BaseException, secrets: Iterable[str] = ()) -> str:
    """Type and message of an exception, without secrets; of our own failures what their kind does not tell."""
    try:
        message = str(error).strip()
    except BaseException as second:  # noqa: BLE001 - the user's own `__str__`
        message = f"(its text cannot be had: {type(second).__name__})"
    name = type(error).__name__
    if isinstance(error, JobFailure):
        message = error.told or message
        name = "" if type(error).__module__.startswith("resilient.") else name
    most = SCRUBBED_TEXT.value + 1  # so that the scrub knows that there was more
    return scrub(plain(": ".join(filter(None, (name, message[:most]))) or type(error).__name__), secrets)


def _trace(error: BaseException, secrets: Iterable[str] = ()) -> str:
    text = "".join(traceback.format_exception(error))[-SCRUBBED_TEXT.value - 1 :]
    return scrub(plain(text), secrets, TRACEBACK_LIMIT, end=True)


def finish_of(execution: Execution, transition: Transition, worker_id: str, started_at: Any) -> Finish:
    """The store's form of a decision about what this process ran.

    Which requests are unanswered is written as this process knows it: a mark whose write was cut off may stand in the
    database although its request was never sent.
    """
    finish = _finish(execution.row, execution.fence, execution.row.executions + 1, transition, worker_id, started_at)
    if transition.clear_sent or transition.set_mark:
        return finish
    return replace(finish, clear_sent=not execution.marks, marks=execution.marks)


def finish_of_row(row: Any, transition: Transition, worker_id: str | None) -> Finish:
    """The store's form of a decision about a running row of somebody else (rescue)."""
    return _finish(row, row.version, row.executions, transition, worker_id, row.started_at)


def _finish(row: Any, fence: int, execution: int, t: Transition, worker_id: str | None, started_at: Any) -> Finish:
    return Finish(
        id=row.id,
        version=fence,
        state=t.state,
        decision=t.decision,
        charged=t.charged,
        run_at=t.run_at,
        attempts=t.attempts,
        deferrals=t.deferrals,
        rescues=t.rescues,
        error=t.error,
        error_kind=t.error_kind,
        error_code=t.error_code,
        status=t.status,
        waiting_for=t.waiting_for,
        clear_sent=t.clear_sent,
        set_mark=t.set_mark,
        result=t.result,
        execution=execution,
        worker_id=worker_id,
        started_at=started_at,
        resource_key=t.resource_key,
        traceback=t.traceback,
    )
