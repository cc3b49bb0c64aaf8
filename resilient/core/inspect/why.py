"""Why is it not running, and when will it? Facts in, sentences out.

`why_job` and `why_resource` look at everything that can hold a job back, in the order in which the engine
does: its state and time, the gates of its path (the deepest first), its place in line, its turn, the workers.
They name every cause they find, not only the first: whoever opens one gate wants to know about the next one.

``until`` of the answer is the time after which nothing known stops it any more: None if that is now, or if it
depends on people or on other jobs (then a reason without ``until`` says on what).

A `Reason` has a stable code and one sentence that names the resource, since when, until when, and what a person can do
about it where somebody must. There is one for each thing that can hold a job back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from resilient.core.accounts.fuse import APP_REFUSED, SUSPECT_AUTH
from resilient.core.accounts.tokens import LEFT_LATELY, MISSING_KEY, NOT_CONNECTED, REFRESHING, UNREADABLE
from resilient.core.base.errors import FailureKind
from resilient.core.base.instants import from_epoch
from resilient.core.base.phrases import brief, counted, error_line, learnt_limit, when
from resilient.core.base.resource_key import is_below, may_hold, serves
from resilient.core.gates.admission import RESERVED, SLOW_START, SLOWER, Level, Stop, admit, stop_of
from resilient.core.gates.learnt import summary
from resilient.core.gates.rate_limit import FULL
from resilient.core.inspect.blocked import held_lanes, of_blocked
from resilient.core.jobs import marks
from resilient.core.jobs.outcomes import LEAST_STUCK, share_of_key
from resilient.core.jobs.records import Count, JobInfo, plain
from resilient.core.jobs.states import JobState

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from uuid import UUID

    from resilient.core.inspect.blocked import HeldLane, StepSeen, Waits


_NONE: Final = Count(0)
_NOBODY: Final = "why"  # stands in for a worker where admission asks for one; nothing is written


@dataclass(frozen=True, slots=True)
class LastError:
    """The latest error of a resource."""

    message: str
    kind: str | None = None
    code: str | None = None
    at: datetime | None = None
    is_over: bool = False  # a request went well since then


STILL: Final = 1.0  # seconds


def stands_still(loop_lag: float | None) -> bool:
    """Whether a worker's event loop stood still for so long, in seconds, that its other jobs suffered."""
    return loop_lag is not None and loop_lag >= STILL


@dataclass(frozen=True, slots=True)
class WorkerSeen:
    """A worker process that was heard of lately."""

    id: str
    kinds: frozenset[str]
    concurrency: int
    running: int
    stopping: bool
    seen_at: datetime
    resources: tuple[str, ...] = ()  # patterns of what it serves; none: everything
    loop_lag: float | None = None  # seconds: the longest that its event loop stood still lately


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
    budgets: Sequence[Level] = ()  # that the account's provider names, and throttles taught something about
    blocked: Count = _NONE  # jobs at or below the key for which others come first
    lanes: Sequence[HeldLane] = ()  # ordering keys there that a dead job holds up, some of them
    lane_count: Count = _NONE  # and all

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


def of_state(job: JobInfo, path: Path, now: datetime, step: StepSeen | None = None) -> Iterator[Reason]:
    """What the job's own row says, and the workflow that it is a ``step`` of."""
    match job.state:
        case JobState.SUCCEEDED | JobState.CANCELLED:
            at = f" at {when(job.finished_at, now)}" if job.finished_at else ""
            yield Reason(job.state.value, f"It {_ENDED[job.state]}{at}.", since=job.finished_at)
        case JobState.DEAD:
            yield from _dead(job, now, step)
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


def _dead(job: JobInfo, now: datetime, step: StepSeen | None) -> Iterator[Reason]:
    at = f" since {when(job.finished_at, now)}" if job.finished_at else ""
    text = f"It is dead{at} after {_tries(job)} and will not run again by itself."
    yield Reason("dead", text, since=job.finished_at)
    if job.last_error:
        yield Reason("last_error", f"Last error: {_error(job)}")
    if step is not None and step.is_stuck:
        text = (
            f"It was to undo step {step.name!r} of workflow {step.workflow}, which is stuck because of it"
            f" (`resilient workflows show {step.workflow}`)."
        )
        yield Reason("stuck_workflow", text)
    is_doubtful = marks.unkeyed(job.sent) or job.last_error_kind == "ambiguous"
    if is_doubtful:
        text = "Its last request may have taken effect: look at the provider"
        if step is not None and step.is_over:
            yield Reason("ambiguous", f"{text}.")
        else:
            commands = f"`resilient jobs retry {job.id} --repeat-ambiguous` or `resilient dead discard {job.id}`"
            yield Reason("ambiguous", f"{text}, then {commands}.")
    if step is not None and step.is_over:
        text = (
            f"It is step {step.name!r} of workflow {step.workflow}, which turned around ({step.state}): it is not"
            f" retried any more (`resilient workflows show {step.workflow}`). To do it after all, begin another one."
        )
        yield Reason("remedy", text)
    elif not is_doubtful:
        text = f"To run it again: `resilient jobs retry {job.id}`."
        if step is not None and step.is_stuck:
            text += f" If the step was undone by hand, or need not be: `resilient dead discard {job.id}`."
        yield Reason("remedy", text)


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
    if job.last_error and (job.executions or job.deferrals):
        yield Reason("last_error", f"Last time ({_tries(job)} used): {_error(job)}")
    if job.waiting_for is not None:
        times = counted(job.deferrals, "time")
        text = f"It was sent back {times} without spending an attempt, the last time for {job.waiting_for}."
        yield Reason("deferred", text, job.waiting_for)


# -- the gates ----------------------------------------------------------------------------------------------


def gates(path: Path, now: datetime, priority: int = 0) -> Iterator[Reason]:
    """Every gate of the path that would not let one more job of this priority through, the deepest key first."""
    for level in path.levels:
        key = level.facts.key
        stop = admit([level], 1, now, _NOBODY, priority).stop
        if stop is not None:
            budget = _budget(stop, level, now, priority) if stop.gate == "limit" else None
            text = _gate_text(stop, level, path.errors.get(key), now) if budget is None else budget
            if key != path.key and (waiting := path.waiting.get(key)) is not None:
                text += (
                    "" if text.endswith((".", "…")) else "."
                ) + f" {counted(waiting, 'job waits', 'jobs wait')} there."
            yield Reason(stop.gate, text, key, stop.since, stop.until)
        if stop is None and (taught := _taught(level, now)) is not None:
            yield Reason("learnt", f"{key} is asked no faster than {learnt_limit(taught, now)}.", key)
        if stop is None and level.facts.breaker.state != "closed":
            text = f"The circuit of {key} is due for a probe: the next job to start there is the one."
            yield Reason("probe", text, key, level.facts.breaker.opened_at)


def budgets(path: Path, now: datetime) -> Iterator[Reason]:
    """What stops or slows the jobs that count for a budget which the provider names."""
    for level in path.budgets:
        key = level.facts.key
        if key in {one.facts.key for one in path.levels}:
            continue  # told as a gate of the path
        stop = admit([level], 1, now, _NOBODY).stop
        whom = f"What counts for {key.rpartition(':')[2]} waits apart"
        if stop is not None:
            yield Reason("budget", f"{whom}: {_gate_text(stop, level, None, now)}", key, stop.since, stop.until)
        elif (taught := _taught(level, now)) is not None:
            yield Reason("budget", f"{whom}: {key} is asked no faster than {learnt_limit(taught, now)}.", key)


def _taught(level: Level, now: datetime) -> dict[str, Any] | None:
    """What throttles taught about it, as far as that is in force."""
    return summary(level.facts.learnt, now.timestamp()) if level.policy.learn.on else None


def _gate_text(  # noqa: C901, PLR0911 - one sentence a gate
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
            return f"{key} lacks valid credentials ({stop.code}){since}: {credentials_remedy(key, stop.code)}."
        case "cooldown":
            if stop.code == REFRESHING:
                return f"The token of {key} is being refreshed{since}: its jobs go on with it, or are tried at {end}."
            if stop.code == SLOW_START:
                running = counted(level.running, "job runs", "jobs run")
                return f"{key} may be asked again{since}: its load comes back as it is answered, {running} now."
            code = f" ({stop.code})" if stop.code else ""
            return f"{key} was told to slow down{code}{since} and rests until {end}."
        case "limit":
            taught = _taught(level, now)
            if stop.code == SLOWER and taught is not None:
                return f"{key} is asked no faster than {learnt_limit(taught, now)}; the next request may go at {end}."
            return f"Limit {stop.code} of {key} is used up until {end}."
        case "concurrency":
            cap = counted(level.policy.concurrency or 0, "job")
            taught = _taught(level, now)
            if taught is not None and taught["at_once"] == level.policy.concurrency:
                return f"{key} takes {learnt_limit(taught, now)}, and {counted(level.running, 'runs', 'run')}."
            do = counted(level.running, "does", "do")
            return f"{key} lets {cap} run at once and {do}: it goes on when one of them ends."
        case "breaker":
            text = _breaker_text(stop, level, since, end)
            if error is None or stop.code == "ramp":
                return text
            at = f" at {when(error.at, now)}" if error.at else ""
            return f"{text} Last error{at}: {error_line(error.kind, error.code, error.message)}"


def _budget(stop: Stop, level: Level, now: datetime, priority: int) -> str | None:
    """The sentence about a window of which the provider says what is left; None if another limit stops it."""
    kept, epoch = level.policy.kept_from(priority), now.timestamp()
    for limit in dict.fromkeys((*level.policy.request_limits, *level.stated)):
        name = limit.name
        state = level.limits.get(name, FULL)
        if state.remaining is None or state.reset_at is None or state.reset_at <= epoch:
            continue
        units = state.remaining - kept * limit.rate
        is_kept = state.remaining >= 1 > units
        is_awaited = units >= 1 > units - level.running  # what the running jobs leave of it
        is_told = limit in level.stated or is_kept or (is_awaited and kept > 0)
        if stop.code != (RESERVED if is_kept else name) or not is_told:
            continue
        budget = name.partition("/")[2] if name.startswith("~") else name
        rest = f"{max(0, int(state.remaining)):,} of {limit.rate:,.0f} requests left"
        reset = when(from_epoch(state.reset_at), now)
        text = f"{stop.resource} has {rest} until {reset}, as its answers say ({budget})"
        if is_kept:
            return f"{text}: they are {_kept_for(level, priority)}."
        if state.remaining < 1:
            return f"{text}."
        if level.policy.pace == "even" and not is_awaited:
            end = when(stop.until, now) if stop.until else reset
            return f"{text}: they are spread evenly, and the next may go at {end}."
        if kept:
            text += f", {kept * limit.rate:,.0f} of them {_kept_for(level, priority)}"
        return f"{text}, and {counted(level.running, 'job runs', 'jobs run')}: it goes on as those end."
    return None


def _kept_for(level: Level, priority: int) -> str:
    above = min(least for least, _ in level.policy.reserve if least > priority)
    return f"kept for jobs of priority {above} and above"


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


CREDENTIALS_ENDS: Final = {  # where no new consent of the account's owner mends it
    NOT_CONNECTED: "on connect",
    UNREADABLE: "with its key",
    APP_REFUSED: "with its secret",
    SUSPECT_AUTH: "by a probe",
}


def credentials_end(code: str | None) -> str:
    """What ends a stop for lack of valid credentials, in a few words."""
    return CREDENTIALS_ENDS.get(code or "", "on reconnect")


def credentials_remedy(key: str, code: str | None) -> str:
    """What lets jobs go on that lack valid credentials, by the code of their gate."""
    remedy = _REMEDIES.get(code or "", "its account must be connected again")
    return remedy.replace("{key}", key).replace("{provider}", key.partition("/")[0])


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


def keyless(path: Path, now: datetime) -> Iterator[Reason]:
    """Accounts of the path that workers pass over, because they lack the key of their secrets."""
    for key, error in path.errors.items():
        is_lack = (error.kind, error.code) == (FailureKind.UNDECODABLE, MISSING_KEY)  # no answer has that kind
        if is_lack and not error.is_over and error.at is not None and now - error.at <= LEFT_LATELY:
            what, _, _ = error.message.partition(":")
            text = (
                f"Workers pass over {key}, the last time at {when(error.at, now)}, because they lack the key of its"
                " secrets; its jobs run on those that have it. If none has, give all keys in RESILIENT_SECRETS to every"
                f" worker and start it again: {brief(what)}"
            )
            yield Reason(MISSING_KEY, text, key, error.at)


# -- line, turn, workers ------------------------------------------------------------------------------------


def line(path: Path, ahead: Count | None, now: datetime, *, stopped: bool) -> Iterator[Reason]:
    """The place in line, and whether the line moves."""
    key, turn = path.key, path.turn
    if ahead:
        before = counted(ahead, "job is", "jobs are")
        all_ = counted(path.waiting.get(key, ahead), "job waits", "jobs wait")
        yield Reason("line", f"{before} ahead of it in the line of {key}; {all_} there.", key)
    elif ahead is not None:
        yield Reason("first", f"It is the next one of {key}.", key)
    if turn is None:
        text = f"{key} is not in line: a worker takes jobs of it right now, or housekeeping repairs it in a minute."
        yield Reason("no_turn", text, key)
    elif turn.parked_on is not None and not stopped and turn.recheck_at is not None:
        again = when(turn.recheck_at, now)
        text = f"{key} was stopped by {turn.parked_on} and is looked at again by {again}."
        yield Reason("parked", text, turn.parked_on, until=turn.recheck_at)


def blocked(path: Path) -> Iterator[Reason]:
    """How many jobs wait for others there, and which dead ones hold an ordering key up."""
    if path.blocked:
        jobs = counted(path.blocked, "job is", "jobs are")
        yield Reason("blocked", f"{jobs} blocked at or below {path.key}: other jobs come before.", path.key)
    if path.lanes:
        yield Reason("order_dead", held_lanes(path.lanes, path.lane_count), path.key)


def stuck(path: Path) -> Iterator[Reason]:
    """Handlers of the key that do not end: a worker with many of them leaves the rest of it to others."""
    for id_, number in sorted(path.stuck.items()):
        slots = next((one.concurrency for one in path.workers if one.id == id_), None)
        if slots is None:
            continue
        most = share_of_key(max(LEAST_STUCK, slots))
        jobs = counted(number, "job")
        text = (
            f"{jobs} of {path.key} should have ended and {'do' if number > 1 else 'does'} not, on worker {id_}: with"
            f" {most} such handlers of one key there, it runs nothing more of it until they end or it is restarted."
        )
        yield Reason("stuck_handlers", text, path.key)


def workers(path: Path, kind: str | None, *, is_declared: bool | None = None) -> Iterator[Reason]:
    """Whether anybody is there to run it."""
    active = [worker for worker in path.workers if not worker.stopping]
    serving = serves if kind is not None else may_hold
    able = [worker for worker in active if kind is None or kind in worker.kinds]
    if not active:
        yield Reason("no_worker", "No worker is running: start one with `resilient worker`.")
    elif not able:
        have = counted(len(active), "worker runs", "workers run")
        text = f"{have}, but none has a handler for kind {kind!r}: deploy one that has."
        yield Reason("unknown_kind", text)
    elif not (able := [worker for worker in able if serving(path.key, worker.resources)]):
        who = "worker that has its kind" if kind else "worker"
        text = f"No running {who} serves {path.key}: start one without `--resource`, or with one that fits."
        yield Reason("unserved_resource", text, path.key)
    elif all(worker.running >= worker.concurrency for worker in able):
        slots = sum(worker.concurrency for worker in able)
        text = f"Every slot that could take it is busy ({slots:,} on {counted(len(able), 'worker')})."
        yield Reason("busy", text)
    if is_declared is False and able:
        yield Reason("not_declared", f"This program itself has no handler for kind {kind!r}.")


# -- the answers ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Why:
    """The answer.

    ``state``: the job's, or of a resource ``open``, ``slowed`` (its work goes on, a part of it at a time) or
    ``stopped``. ``waiting``: ready jobs there.
    """

    subject: str
    state: str
    until: datetime | None
    waiting: Count
    reasons: tuple[Reason, ...]

    @property
    def text(self) -> str:
        """One readable sentence each line."""
        return "\n".join(reason.text for reason in self.reasons)

    def to_json(self) -> dict[str, Any]:
        """The answer for programs; keys are stable."""
        return {
            "subject": self.subject,
            "state": self.state,
            "until": plain(self.until),
            "waiting": int(self.waiting),
            "waiting_is_more": self.waiting.more,
            "reasons": [plain(reason) for reason in self.reasons],
        }

    def __str__(self) -> str:
        return self.text


def why_job(
    job: JobInfo,
    path: Path,
    now: datetime,
    *,
    ahead: Count | None = None,
    is_declared: bool | None = None,
    waits: Waits | None = None,
) -> Why:
    """Why ``job`` stands where it stands.

    ``ahead``: jobs before it in line; ``is_declared``: whether this program has a handler of its kind; ``waits``: which
    jobs it waits for.
    """
    waiting = path.waiting.get(job.resource_key, Count(0))
    reasons = list(of_state(job, path, now, None if waits is None else waits.step))
    if waits is not None:
        reasons += [Reason(*one) for one in of_blocked(job, waits)]
    if job.state in (JobState.READY, JobState.SCHEDULED):
        stopped_by = list(gates(path, now, job.priority))
        reasons += stopped_by
        reasons += keyless(path, now)
        reasons += budgets(path, now)
        if job.state == JobState.READY:
            reasons += line(path, ahead, now, stopped=any(one.code in _GATES for one in stopped_by))
        reasons += stuck(path)
        reasons += workers(path, job.kind, is_declared=is_declared)
        if job.expires_at is not None:
            text = f"It expires at {when(job.expires_at, now)} if it has not started by then."
            reasons.append(Reason("expires", text, until=job.expires_at))
        if all(reason.code in _HARMLESS for reason in reasons):
            reasons.append(Reason("soon", "Nothing stops it: a worker should start it within moments."))
    return Why(str(job.id), job.state.value, _latest(reasons, now), waiting, tuple(reasons))


def why_resource(path: Path, now: datetime, *, example: UUID | None = None) -> Why:
    """Why the jobs of a resource do not run. ``example``: one that waits."""
    key, waiting = path.key, path.waiting.get(path.key, Count(0))
    stopped_by = list(gates(path, now))
    reasons = [*stopped_by, *keyless(path, now)]
    if not reasons:
        reasons.append(Reason("open", f"Nothing stops {key}.", key))
    first = f", for example {example}" if example is not None else ""
    reasons += budgets(path, now)
    ready = counted(waiting, "job is", "jobs are") if waiting else "No job is"
    waits = f"{ready} ready at or below {key}{first}."
    reasons.append(Reason("waiting", waits, key))
    reasons += blocked(path)
    reasons += stuck(path)
    if waiting:
        reasons += workers(path, None)
    state = "stopped" if _is_stopped(path, stopped_by, now) else "slowed" if stopped_by else "open"
    return Why(key, state, _latest(reasons, now), waiting, tuple(reasons))


_SLOW: Final = timedelta(minutes=1)


def _is_stopped(path: Path, reasons: Sequence[Reason], now: datetime) -> bool:
    """Whether nothing goes through: a gate is shut, or a limit is used up for a minute or longer."""
    if any(stop_of(level.facts, now) is not None for level in path.levels):
        return True
    return any(one.code == "limit" and one.until is not None and one.until - now >= _SLOW for one in reasons)


_HARMLESS: Final = frozenset({"ready", "first", "last_error", "expires", "due", "cancel_requested", "learnt", "budget"})
_GATES: Final = frozenset({"breaker", "cooldown", "pause", "auth", "limit", "concurrency", "scheduled"})


def _latest(reasons: Sequence[Reason], now: datetime) -> datetime | None:
    """When the last of the known stops ends; None if one of them has no known end."""
    stops = [reason for reason in reasons if reason.code in _GATES]
    if any(reason.until is None for reason in stops):
        return None
    return max((r.until for r in stops if r.until is not None and r.until > now), default=None)
