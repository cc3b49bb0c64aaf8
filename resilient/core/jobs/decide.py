"""What becomes of a job whose execution ended: (job, outcome, policy, now, dice) -> `Transition`.

Rules, in the order in which they win:

1. A success is a success, also when a cancel came too late.
2. A request that may have been received is never blindly repeated: while its mark stands, the job goes on only
   by reconciling, else it is dead, "unknown outcome". A cancelled one is not run again, not even to reconcile:
   a person looks. An answer clears a request's mark. That of a write without a key stands all the same, unless the
   handler itself said how its execution ends: running the handler again would repeat the write.
3. A permanent failure, and whatever is out of attempts or rescues, is dead.
4. A cancel wins over every way of going on; so does an expiry that comes before the next try.
5. Waiting is not charged: throttles, quotas, credentials, stopped resources, snoozes, used-up slices, hand-backs,
   lost workers and the engine's own database. A job that waits for a resource on its own path goes back to ready and
   keeps its place: the gate holds it. A resource elsewhere gates nothing in the claim, so then the job is scheduled.
   A lost worker is not charged even where a request is in doubt; `max_rescues` bounds how often that happens.
6. Everything else is charged and backed off; the time that the provider stated is a floor.

`decide` never raises for a handler's mistakes: a delay function that fails is replaced by the default delay.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, assert_never

from resilient.core.base import bounds
from resilient.core.base.errors import UNCHARGED, Failure, FailureKind, at_scope
from resilient.core.base.instants import add_seconds, in_utc
from resilient.core.base.misfit import is_number
from resilient.core.base.phrases import counted, moment, one_line, plain, value_text
from resilient.core.base.resource_key import is_below
from resilient.core.gates.retry_after import resume_at
from resilient.core.jobs.backoff import DEFAULT_DELAY
from resilient.core.jobs.outcomes import (
    BROKEN_OFF,
    INTERRUPTED,
    CancelledByHandler,
    Decision,
    Deferred,
    Expired,
    Failed,
    HandedBack,
    JobFacts,
    Outcome,
    Reconciled,
    Rescued,
    Snoozed,
    Succeeded,
    Transition,
)
from resilient.core.jobs.states import TERMINAL, JobState

if TYPE_CHECKING:
    from resilient.core.jobs.backoff import Retry

REFUSALS: Final = 3  # refused credentials or cursors after which it is not tried again at once
DATABASE_PAUSE: Final = 5.0  # seconds at most until a job that met a database in trouble is tried again
RECHECK: Final = 60.0  # seconds until a job asks again for a resource that is not on its path
_DEAD_AT_ONCE: Final = frozenset(
    {FailureKind.PERMANENT, FailureKind.UNDECODABLE, FailureKind.EXPIRED, FailureKind.LOST_WORKER}
)
_UNGATED: Final = frozenset({FailureKind.AUTH, FailureKind.RESET_CURSOR})  # uncharged, and perhaps no gate shuts
_NEVER_RAN: Final = frozenset({FailureKind.UNDECODABLE, FailureKind.EXPIRED, FailureKind.LOST_WORKER})


def decide(job: JobFacts, outcome: Outcome, retry: Retry, now: datetime, roll: float) -> Transition:
    """The step of a running job. ``roll`` in [0, 1) is the only dice.

    It carries the steps that are written instead if a cancel is requested, or the job is enqueued again, before it is
    written itself.
    """
    step = _decide(job, outcome, retry, now, roll)
    if job.cancel_requested:
        return step
    cancelled = _decide(job._replace(cancel_requested=True), outcome, retry, now, roll)
    again = once_more(job, step, now)
    if job.once_more and again is not None:
        step, again = again, None
    return step._replace(
        if_cancelled=None if cancelled.state == step.state else cancelled,
        if_once_more=again,
    )


def _decide(job: JobFacts, outcome: Outcome, retry: Retry, now: datetime, roll: float) -> Transition:
    match outcome:
        case Succeeded():
            step = _succeeded(job, outcome.result)
        case Failed():
            step = _failed(job, outcome, retry, now, roll)
        case Deferred() | Snoozed() | HandedBack():
            step = _waits(job, outcome, retry, now, roll)
        case Rescued():
            step = _rescued(job, outcome, retry, now)
        case Reconciled():
            step = _reconciled(job, outcome, now)
        case CancelledByHandler():
            step = _cancelled(job, outcome)
        case Expired():
            step = _expired(job, _step(job, JobState.DEAD, "expired", error=outcome.message or None), now)
        case _:
            assert_never(outcome)
    return step if job.called else step._replace(unbegun=True)


def once_more(job: JobFacts, step: Transition, now: datetime) -> Transition | None:
    """The step instead of ``step`` for a job that was enqueued again while it ran; None if that changes nothing.

    The job goes to the back of the line, with a fresh budget of attempts. So does a dead one, and one that its handler
    cancelled (a requested cancel ends the wish, too), because the caller was promised one more execution; but not if a
    request of it may have been received, because that is never repeated.
    If the operation goes on instead (another try, a wait, a rescue), that is not the promised execution: it has the
    same idempotency keys, and a provider that has seen them does nothing. The row keeps the wish until it ends.
    """
    unanswered = not step.clear_sent and (job.sent or job.safe_until is not None)
    if step.state == JobState.SUCCEEDED:
        decision: Decision = "once_more"
    elif step.state in TERMINAL and step.error_kind is not FailureKind.AMBIGUOUS and not unanswered:
        decision = step.decision
    else:
        return None
    rescues = int(step.rescues > job.rescues)  # a rescue counts, so that its holder can tell it from its own finish
    return step._replace(
        state=JobState.READY, decision=decision, attempts=0, rescues=rescues, run_at=now, fresh_key=True,
        clear_sent=True,
    )  # fmt: skip


def _step(job: JobFacts, state: JobState, decision: Decision, *, charged: bool = False, **rest: Any) -> Transition:
    counters = {"attempts": job.attempts + charged, "deferrals": job.deferrals, "rescues": job.rescues}
    return Transition(state, decision, charged, **{**counters, **rest})


def _succeeded(job: JobFacts, result: str | None) -> Transition:
    return _step(job, JobState.SUCCEEDED, "succeeded", result=result, clear_sent=True, clear_error=True)


def _failed(job: JobFacts, outcome: Failed, retry: Retry, now: datetime, roll: float) -> Transition:
    failure, kind = outcome.failure, outcome.failure.kind
    about = _about(job, outcome)
    if kind in _DEAD_AT_ONCE:
        return _dead(job, kind, outcome.message, charged=kind not in _NEVER_RAN)._replace(**_origin(about))
    if kind in UNCHARGED:
        if (unknown := _unanswered(job, outcome.message)) is not None:
            return unknown._replace(**_origin(about))
        not_before = _provider_time(failure, now)
        return _go_on(job, _uncharged(job, about, not_before, now, roll), now, not_before)
    if job.sent or (kind is FailureKind.AMBIGUOUS and not outcome.repeatable):
        return _in_doubt(job, outcome, retry, now, _next_try(job, failure, retry, now, roll))
    if kind is FailureKind.TIMEOUT and job.checkpointed:
        step = _step(job, JobState.READY, "slice", run_at=now, **about)
        return _go_on(job, step._replace(deferrals=job.deferrals + 1), now)
    return _charged(job, outcome, retry, now, roll)


def _charged(job: JobFacts, outcome: Failed, retry: Retry, now: datetime, roll: float) -> Transition:
    """Retry with a delay, or dead."""
    kind, attempts = outcome.failure.kind, job.attempts + 1
    limit = retry.limit(kind, job.max_attempts)
    if limit is not None and attempts >= limit:
        message = f"{outcome.message} (attempt {attempts} of {limit})"
        return _dead(job, kind, message, charged=True)._replace(**_origin(_about(job, outcome)))
    run_at, note = _next_try(job, outcome.failure, retry, now, roll)
    if job.safe_until is not None and run_at >= job.safe_until:
        late = f"its key is safe to repeat until {moment(job.safe_until)}, and the next try would come later"
        return _in_doubt(job, replace(outcome, message=f"{late}; {outcome.message}"), retry, now, (run_at, note))
    about = _about(job, outcome, outcome.message + note)
    return _go_on(job, _at(_step(job, JobState.SCHEDULED, "retry", charged=True, **about), run_at, now), now)


def _in_doubt(
    job: JobFacts, outcome: Failed, retry: Retry, now: datetime, next_try: tuple[datetime, str]
) -> Transition:
    """The step after a request that may have been received and cannot be repeated: reconcile, or dead.

    ``next_try``: what `_next_try` returned.
    """
    origin = _origin(_about(job, outcome))
    limit = retry.limit(FailureKind.AMBIGUOUS, job.max_attempts)
    run_at, note = next_try
    if (
        not job.can_reconcile
        or job.cancel_requested
        # Reconciling repeats nothing, so it may come once after the last attempt.
        or (limit is not None and job.attempts >= limit)
        or (job.expires_at is not None and run_at >= job.expires_at)
    ):
        return _unknown(job, outcome.message)._replace(**origin)
    error = _clip(f"unknown outcome, will be looked up: {outcome.message}{note}")
    step = _step(
        job, JobState.SCHEDULED, "reconcile", charged=True, error=error, error_kind=FailureKind.AMBIGUOUS,
        set_mark=not job.sent, **origin,
    )  # fmt: skip
    return _at(step, run_at, now)


def _waits(
    job: JobFacts, outcome: Deferred | Snoozed | HandedBack, retry: Retry, now: datetime, roll: float
) -> Transition:
    """Refused by a gate, snoozed or handed back: nothing is charged."""
    not_before = None
    match outcome:
        case Deferred():
            step = _deferred(job, outcome, now, roll)
            if outcome.gate == "cooldown" and outcome.until is not None:  # other gates may open early
                not_before = _aware(outcome.until)
        case Snoozed():
            step = _snoozed(job, outcome, retry, now, roll)
        case HandedBack():
            code = INTERRUPTED if outcome.interrupted else None
            step = _step(job, JobState.READY, "handed_back", error=_clip(outcome.reason), error_code=code)
    return _unanswered(job, step.error or step.decision) or _go_on(job, step, now, not_before)


def _cancelled(job: JobFacts, outcome: CancelledByHandler) -> Transition:
    """A requested cancel cannot overrule a mark that stands; a handler that cancels its job knows what it sent."""
    if job.sent and job.cancel_requested:
        return _unknown(job, outcome.reason)
    code = INTERRUPTED if outcome.interrupted else None
    return _step(job, JobState.CANCELLED, "cancelled", error=_clip(outcome.reason), error_code=code)


def _reconciled(job: JobFacts, outcome: Reconciled, now: datetime) -> Transition:
    if outcome.took_effect is None:
        return _unknown(job, "its reconcile hook cannot tell")
    if outcome.took_effect:
        return _succeeded(job, None)
    return _go_on(job, _step(job, JobState.READY, "reconciled", clear_sent=True), now)


def _rescued(job: JobFacts, outcome: Rescued, retry: Retry, now: datetime) -> Transition:
    rescues = job.rescues + 1
    if (unknown := _unanswered(job, outcome.message)) is not None:
        return unknown._replace(charged=False, attempts=job.attempts, rescues=rescues)
    if rescues >= retry.max_rescues:
        lost = counted(rescues, "worker was lost while it", "workers were lost while they")
        message = f"{outcome.message}; {lost} ran it"
        return _dead(job, FailureKind.LOST_WORKER, message, charged=False)._replace(rescues=rescues)
    step = _step(
        job, JobState.READY, "reconcile" if job.sent else "rescued", error=_clip(outcome.message),
        error_kind=FailureKind.LOST_WORKER,
    )  # fmt: skip
    return _go_on(job, step._replace(rescues=rescues), now)


def _uncharged(
    job: JobFacts, about: dict[str, Any], not_before: datetime | None, now: datetime, roll: float
) -> Transition:
    """Throttled, out of quota, without credentials, a refused cursor, or our own database in trouble."""
    if about["error_kind"] is FailureKind.DATABASE:  # it fails now and then: while it is away, nothing is claimed
        run_at = add_seconds(now, DATABASE_PAUSE * (1 - roll / 2))
        run_at = run_at if not_before is None else max(run_at, resume_at(not_before, now, roll))
        step = _step(job, JobState.SCHEDULED, "defer", run_at=run_at, **{**about, "resource_key": None})
    elif about["error_kind"] is FailureKind.RESET_CURSOR:
        step = _step(job, JobState.READY, "reset_cursor", **about)
    else:
        step = _wait_for(job, about["resource_key"], not_before, now, roll)._replace(**about)
    if about["error_kind"] in _UNGATED and job.deferrals >= REFUSALS and step.state == JobState.READY:
        # No gate stops it and yet it is refused again and again: the provider gets a pause, though nothing is charged.
        pause = min(RECHECK, 2.0 ** min(job.deferrals - REFUSALS, 10)) * (1 - roll / 2)
        later = add_seconds(now, pause)
        later = later if not_before is None else max(later, resume_at(not_before, now, roll))
        step = step._replace(state=JobState.SCHEDULED, run_at=later)
    return step._replace(deferrals=job.deferrals + 1)


def _deferred(job: JobFacts, outcome: Deferred, now: datetime, roll: float) -> Transition:
    until = None if outcome.until is None else _aware(outcome.until)
    step = _wait_for(job, outcome.resource, until, now, roll)
    return step._replace(
        deferrals=job.deferrals + 1, error=_clip(outcome.message), resource_key=outcome.resource or None
    )


def _wait_for(job: JobFacts, resource: str, until: datetime | None, now: datetime, roll: float) -> Transition:
    if not job.resource_key or is_below(job.resource_key, resource):
        return _step(job, JobState.READY, "defer", waiting_for=resource)
    if until is None or until <= now:
        run_at = add_seconds(now, RECHECK * (1 - roll / 2))
    else:
        run_at = resume_at(until, now, roll)
    return _step(job, JobState.SCHEDULED, "defer", waiting_for=resource, run_at=run_at)


def _snoozed(job: JobFacts, outcome: Snoozed, retry: Retry, now: datetime, roll: float) -> Transition:
    if outcome.until is not None:
        run_at = _aware(outcome.until)
    else:
        delay = outcome.delay.total_seconds() if isinstance(outcome.delay, timedelta) else outcome.delay
        if job.cancel_requested:  # as in `_next_try`
            delay = 0.0
        elif not is_number(delay):
            delay = _delay(None, retry, job.deferrals + 1, roll)[0]
        run_at = add_seconds(now, delay)
    error = _clip(outcome.message)
    step = _step(job, JobState.SCHEDULED, "snooze", error=error, error_kind=outcome.kind, error_code=outcome.code)
    return _at(step, run_at, now)._replace(deferrals=job.deferrals + 1)


def _go_on(job: JobFacts, step: Transition, now: datetime, not_before: datetime | None = None) -> Transition:
    """``step``, unless a cancel or an expiry forbids going on. ``not_before``: the job certainly cannot run earlier."""
    if job.cancel_requested:
        return step._replace(state=JobState.CANCELLED, decision="cancelled", run_at=None, waiting_for=None)
    if job.expires_at is not None:
        next_try = max(t for t in (now, step.run_at, not_before) if t is not None)
        if next_try >= job.expires_at:
            return _expired(job, step, next_try)
    return step


def _expired(job: JobFacts, step: Transition, next_try: datetime) -> Transition:
    if job.expires_at is None:
        reason = "expired"
    else:
        reason = f"expires at {moment(job.expires_at)}, could not run before {moment(next_try)}"
    return step._replace(
        state=JobState.DEAD, decision="expired", run_at=None, waiting_for=None,
        error_kind=FailureKind.EXPIRED, error=_clip(f"{reason}; {step.error}" if step.error else reason),
        error_code=INTERRUPTED if step.error_kind in BROKEN_OFF else step.error_code,
    )  # fmt: skip


def _unanswered(job: JobFacts, message: str) -> Transition | None:
    """The step to dead, if a mark stands and no hook can look the request up; else None."""
    if job.sent and (job.cancel_requested or not job.can_reconcile):
        return _unknown(job, message)
    return None


def _unknown(job: JobFacts, message: str) -> Transition:
    return _dead(job, FailureKind.AMBIGUOUS, message, charged=True)


def _dead(job: JobFacts, kind: FailureKind, message: str, *, charged: bool) -> Transition:
    if kind is FailureKind.AMBIGUOUS:
        message = f"unknown outcome: a request may have been received, and is not repeated blindly; {message}"
    elif job.sent or job.safe_until is not None:
        message = f"{message}; another request of this job may have been received"
    return _step(job, JobState.DEAD, "dead", charged=charged, error=_clip(message or kind.value), error_kind=kind)


def _about(job: JobFacts, outcome: Failed, message: str | None = None) -> dict[str, Any]:
    """The fields of a transition that say what went wrong."""
    failure = outcome.failure
    return {
        "error": _clip(message or outcome.message or failure.kind.value),
        "error_kind": failure.kind,
        "error_code": one_line((failure.code or "")[: bounds.ERROR_CODE.value]) or None,
        "status": failure.status,
        "resource_key": outcome.resource or at_scope(job.resource_key, failure.scope) or None,
        "traceback": outcome.traceback,
    }


def _origin(about: dict[str, Any]) -> dict[str, Any]:
    """The fields of ``about`` that say where the failure came from; error and kind are those of the new step."""
    return {key: about[key] for key in ("error_code", "status", "resource_key", "traceback")}


def _next_try(job: JobFacts, failure: Failure, retry: Retry, now: datetime, roll: float) -> tuple[datetime, str]:
    """When to try again, never earlier than the provider asked, and a note if the policy's delay function failed."""
    if job.cancel_requested:  # it is never tried again, and a policy's function is called once for each decision
        return now, ""
    delay, note = _delay(failure, retry, job.attempts + 1, roll)
    run_at, not_before = add_seconds(now, delay), _provider_time(failure, now)
    return (run_at if not_before is None else max(run_at, resume_at(not_before, now, roll))), note


def _delay(failure: Failure | None, retry: Retry, attempt: int, roll: float) -> tuple[float, str]:
    kind = FailureKind.TRANSIENT if failure is None else failure.kind
    try:
        return retry.seconds(kind, attempt, roll, failure), ""
    except BaseException as error:  # noqa: BLE001 - a user's function must not lose the job, whatever it raises
        note = f" (its delay function failed, the default is used: {type(error).__name__}: {value_text(error)})"
        return DEFAULT_DELAY.seconds(attempt, roll), note


def _provider_time(failure: Failure, now: datetime) -> datetime | None:
    """The time before which the provider wants no other try, if it lies ahead; else None."""
    if failure.retry_at is not None:
        at = _aware(failure.retry_at)
    elif failure.retry_in is not None and failure.retry_in > 0:
        at = add_seconds(now, failure.retry_in)
    else:
        return None
    return at if at > now else None


def _at(step: Transition, run_at: datetime, now: datetime) -> Transition:
    """A scheduled step at its time, if that lies ahead; else ready at once, at the back of the line."""
    if run_at > now:
        return step._replace(run_at=run_at)
    return step._replace(state=JobState.READY, run_at=now)


def _aware(at: datetime) -> datetime:
    """A handler's naive datetime is taken as UTC: refusing it here would lose the job."""
    return in_utc(at.replace(tzinfo=UTC) if at.tzinfo is None else at)


def _clip(text: str | None) -> str | None:
    return plain(text[: bounds.ERROR_TEXT.value]) if text else None
