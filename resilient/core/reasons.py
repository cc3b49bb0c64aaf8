"""The sentences of `why`: one for each thing that can hold a job back.

Every reason has a stable code and one sentence that names the resource, since when, until when, and what a
person can do about it where somebody must.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from resilient.core import marks
from resilient.core.admission import Level, Stop, admit, stop_of
from resilient.core.fuse import APP_REFUSED, SUSPECT_AUTH
from resilient.core.phrases import brief, counted, error_line, when
from resilient.core.resource_key import is_below
from resilient.core.states import JobState
from resilient.core.stuck import LEAST_STUCK, share_of_key
from resilient.core.tokens import NOT_CONNECTED, REFRESHING, UNREADABLE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from datetime import datetime

    from resilient.core.records import Count, JobInfo

_NOBODY: Final = "why"  # stands in for a worker where admission asks for one; nothing is written


@dataclass(frozen=True, slots=True)
class LastError:
    """The latest error of a resource."""

    message: str
    kind: str | None = None
    code: str | None = None
    at: datetime | None = None


@dataclass(frozen=True, slots=True)
class WorkerSeen:
    """A worker process that was heard of lately."""

    id: str
    kinds: frozenset[str]
    concurrency: int
    running: int
    stopping: bool
    seen_at: datetime


@dataclass(frozen=True, slots=True)
class TurnSeen:
    """Whether the resource is in the run queue: ``parked_on`` None is an ordinary turn."""

    parked_on: str | None = None
    recheck_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Path:
    """A resource key and its ancestors, deepest first, and what is known about the work on them."""

    levels: Sequence[Level]
    waiting: Mapping[str, Count]  # key to ready jobs at or below it
    errors: Mapping[str, LastError] = field(default_factory=dict)
    turn: TurnSeen | None = None
    workers: Sequence[WorkerSeen] = ()
    stuck: Mapping[str, int] = field(default_factory=dict)  # worker to running jobs of the key that do not end

    @property
    def key(self) -> str:
        """The key itself."""
        return self.levels[0].facts.key


@dataclass(frozen=True, slots=True)
class Reason:
    """One thing that holds it back, or is worth knowing. ``code`` is stable, ``text`` is one sentence."""

    code: str
    text: str
    resource: str | None = None
    since: datetime | None = None
    until: datetime | None = None


# -- the state ----------------------------------------------------------------------------------------------


def of_state(job: JobInfo, path: Path, now: datetime) -> Iterator[Reason]:
    """What the job's own row says."""
    match job.state:
        case JobState.SUCCEEDED | JobState.CANCELLED:
            at = f" at {when(job.finished_at, now)}" if job.finished_at else ""
            yield Reason(job.state.value, f"It {_ENDED[job.state]}{at}.", since=job.finished_at)
        case JobState.DEAD:
            yield from _dead(job, now)
        case JobState.RUNNING:
            yield from _running(job, path, now)
        case JobState.BLOCKED:
            yield Reason("blocked", "It is blocked: other jobs come before it.")
        case JobState.SCHEDULED:
            yield from _scheduled(job, now)
        case JobState.READY:
            since = max(job.run_at, job.created_at)
            yield Reason("ready", f"It is ready since {when(since, now)}.", since=since)
            yield from _sent_back(job)


_ENDED: Final = {JobState.SUCCEEDED: "succeeded", JobState.CANCELLED: "was cancelled"}


def _tries(job: JobInfo) -> str:
    if job.max_attempts is None:
        return counted(job.attempts, "attempt")
    return f"{job.attempts} of {counted(job.max_attempts, 'attempt')}"


def _error(job: JobInfo) -> str:
    return error_line(job.last_error_kind, job.last_error_code, job.last_error)


def _dead(job: JobInfo, now: datetime) -> Iterator[Reason]:
    at = f" since {when(job.finished_at, now)}" if job.finished_at else ""
    text = f"It is dead{at} after {_tries(job)} and will not run again by itself."
    yield Reason("dead", text, since=job.finished_at)
    if job.last_error:
        yield Reason("last_error", f"Last error: {_error(job)}")
    if marks.unkeyed(job.sent) or job.last_error_kind == "ambiguous":
        text = (
            "Its last request may have taken effect: look at the provider, then"
            f" `resilient jobs retry {job.id} --repeat-ambiguous` or `resilient dead discard {job.id}`."
        )
        yield Reason("ambiguous", text)
    else:
        yield Reason("remedy", f"To run it again: `resilient jobs retry {job.id}`.")


def _running(job: JobInfo, path: Path, now: datetime) -> Iterator[Reason]:
    since = f" since {when(job.started_at, now)}" if job.started_at else ""
    text = f"It runs{since} on worker {job.locked_by} (execution {job.executions})."
    yield Reason("running", text, since=job.started_at)
    if job.last_error_code == "stuck":
        text = f"Its handler should have ended at {when(job.updated_at, now)}: it {job.last_error}."
        yield Reason("stuck", text, since=job.updated_at)
    if job.lease_until is not None and job.lease_until <= now:
        text = f"Its worker lost it at {when(job.lease_until, now)}: another worker will take it over."
        yield Reason("lease_over", text, since=job.lease_until)
        yield from workers(path, job.kind)
    if job.cancel_requested:
        yield Reason("cancel_requested", "It was asked to stop and has not ended yet.")


def _scheduled(job: JobInfo, now: datetime) -> Iterator[Reason]:
    at = when(job.run_at, now)
    elsewhere = job.waiting_for is not None and not is_below(job.resource_key, job.waiting_for)
    if job.run_at > now and elsewhere:
        text = f"It waits for {job.waiting_for} and goes on with it (`resilient resources show {job.waiting_for}`)."
        yield Reason("waits_for", text, job.waiting_for)
        yield Reason("scheduled", f"It is looked at again at {at}.", until=job.run_at)
    elif job.run_at > now:
        text = f"It is {'tried again' if job.executions else 'scheduled to run'} at {at}."
        yield Reason("scheduled", text, until=job.run_at)
    else:
        yield Reason("due", f"It is due since {at} and about to become ready.", since=job.run_at)
    yield from _sent_back(job)


def _sent_back(job: JobInfo) -> Iterator[Reason]:
    if job.last_error and job.executions:
        yield Reason("last_error", f"Last time ({_tries(job)} used): {_error(job)}")
    if job.waiting_for is not None:
        times = counted(job.deferrals, "time")
        text = f"It was sent back {times} without spending an attempt, the last time for {job.waiting_for}."
        yield Reason("deferred", text, job.waiting_for)


# -- the gates ----------------------------------------------------------------------------------------------


def gates(path: Path, now: datetime) -> Iterator[Reason]:
    """Every gate of the path that would not let one more job through, the deepest key first."""
    for level in path.levels:
        key = level.facts.key
        stop = stop_of(level.facts, now) or admit([level], 1, now, _NOBODY).stop
        if stop is not None:
            text = _gate_text(stop, level, path.errors.get(key), now)
            if key != path.key and (waiting := path.waiting.get(key)) is not None:
                text += (
                    "" if text.endswith((".", "…")) else "."
                ) + f" {counted(waiting, 'job waits', 'jobs wait')} there."
            yield Reason(stop.gate, text, key, stop.since, stop.until)
        elif level.facts.breaker.state != "closed":
            text = f"The circuit of {key} is due for a probe: the next job to start there is the one."
            yield Reason("probe", text, key, level.facts.breaker.opened_at)


def _gate_text(  # noqa: PLR0911 - one sentence a gate
    stop: Stop, level: Level, error: LastError | None, now: datetime
) -> str:
    key = stop.resource
    since = f" since {when(stop.since, now)}" if stop.since else ""
    end = when(stop.until, now) if stop.until else ""
    match stop.gate:
        case "pause":
            reason = f" ({brief(stop.code)})" if stop.code else ""
            end = end or f"somebody runs `resilient resources resume {key}`"
            return f"{key} is paused{reason}{since}, until {end}."
        case "auth":
            remedy = _REMEDIES.get(stop.code or "", "its account must be connected again")
            remedy = remedy.replace("{key}", key).replace("{provider}", key.partition("/")[0])
            return f"{key} lacks valid credentials ({stop.code}){since}: {remedy}."
        case "cooldown":
            if stop.code == REFRESHING:
                return f"The token of {key} is being refreshed{since}: its jobs go on with it, or are tried at {end}."
            code = f" ({stop.code})" if stop.code else ""
            return f"{key} was told to slow down{code}{since} and rests until {end}."
        case "limit":
            return f"Limit {stop.code} of {key} is used up until {end}."
        case "concurrency":
            cap = counted(level.policy.concurrency or 0, "job")
            return f"{key} lets {cap} run at once and {level.running:,} do: it goes on when one of them ends."
        case "breaker":
            text = _breaker_text(stop, level, since, end)
            if error is None or stop.code == "ramp":
                return text
            at = f" at {when(error.at, now)}" if error.at else ""
            return f"{text} Last error{at}: {error_line(error.kind, error.code, error.message)}"


_REMEDIES: Final = {
    NOT_CONNECTED: "it was never connected: `resilient connect {provider} {key}` or `resilient connections add {key}`",
    UNREADABLE: (
        "its secrets are encrypted with a key that its workers lack: give them all keys in RESILIENT_SECRETS; or its"
        " connection was changed in the database: the workers' log says so, and `resilient connect {provider} {key}`"
        " mends it"
    ),
    APP_REFUSED: "the provider refuses the application, check its client_id and client_secret",
    SUSPECT_AUTH: (
        "the provider calls too many accounts dead at once; a probe decides, or `resilient connections release` or"
        " `confirm`"
    ),
}


def _breaker_text(stop: Stop, level: Level, since: str, end: str) -> str:
    key = stop.resource
    if stop.code == "isolated":
        end = end or f"somebody runs `resilient resources close {key}`"
        reason = f" ({brief(level.facts.paused_reason)})" if level.facts.paused_reason else ""
        return f"The circuit of {key} was opened by hand{reason}{since}, until {end}."
    if stop.code == "probing":
        return f"The circuit of {key} is open{since}; a probe is under way, decided by {end}."
    if stop.code == "ramp":
        running = counted(level.running, "job runs", "jobs run")
        return f"{key} works again{since}: its load comes back step by step, {running} now."
    return f"The circuit of {key} is open{since}; the next probe is at {end}."


# -- line, turn, workers ------------------------------------------------------------------------------------


def line(path: Path, ahead: Count | None, now: datetime, *, stopped: bool) -> Iterator[Reason]:
    """The place in line, and whether the line moves."""
    key, turn = path.key, path.turn
    if ahead:
        before, all_ = counted(ahead, "job is", "jobs are"), counted(path.waiting.get(key, ahead), "job")
        yield Reason("line", f"{before} ahead of it in the line of {key}; {all_} wait there.", key)
    elif ahead is not None:
        yield Reason("first", f"It is the next one of {key}.", key)
    if turn is None:
        text = f"{key} has no turn: a worker claims there right now, or housekeeping repairs it in a minute."
        yield Reason("no_turn", text, key)
    elif turn.parked_on is not None and not stopped and turn.recheck_at is not None:
        again = when(turn.recheck_at, now)
        text = f"{key} was stopped by {turn.parked_on} and is looked at again by {again}."
        yield Reason("parked", text, turn.parked_on, until=turn.recheck_at)


def stuck(path: Path) -> Iterator[Reason]:
    """Handlers of the key that do not end: a worker with many of them leaves the rest of it to others."""
    for id_, number in sorted(path.stuck.items()):
        slots = next((one.concurrency for one in path.workers if one.id == id_), None)
        if slots is None:
            continue
        most = share_of_key(max(LEAST_STUCK, slots))
        jobs = counted(number, "job", "jobs")
        text = (
            f"{jobs} of {path.key} should have ended and {'do' if number > 1 else 'does'} not, on worker {id_}: with"
            f" {most} such handlers of one key there, it runs nothing more of it until they end or it is restarted."
        )
        yield Reason("stuck_handlers", text, path.key)


def workers(path: Path, kind: str | None, *, known: bool | None = None) -> Iterator[Reason]:
    """Whether anybody is there to run it."""
    active = [worker for worker in path.workers if not worker.stopping]
    able = [worker for worker in active if kind is None or kind in worker.kinds]
    if not active:
        yield Reason("no_worker", "No worker is running: start one with `resilient worker`.")
    elif not able:
        have = counted(len(active), "worker runs", "workers run")
        text = f"{have}, but none has a handler for kind {kind!r}: deploy one that has."
        yield Reason("unknown_kind", text)
    elif all(worker.running >= worker.concurrency for worker in able):
        slots = sum(worker.concurrency for worker in able)
        text = f"Every slot that could take it is busy ({slots:,} on {counted(len(able), 'worker')})."
        yield Reason("busy", text)
    if known is False and able:
        yield Reason("not_declared", f"This program itself has no handler for kind {kind!r}.")
