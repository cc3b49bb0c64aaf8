"""Why is it not running, and when will it? Facts in, sentences out.

`why_job` and `why_resource` look at everything that can hold a job back, in the order in which the engine
does: its state and time, the gates of its path (the deepest first), its place in line, its turn, the workers.
They name every cause they find, not only the first: whoever opens one gate wants to know about the next one.

``until`` of the answer is the time after which nothing known stops it any more: None if that is now, or if it
depends on people or on other jobs (then a reason without ``until`` says on what).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from resilient.core import blocked
from resilient.core.phrases import counted, when
from resilient.core.reasons import Path, Reason, gates, line, of_state, stuck, workers
from resilient.core.records import Count, JobInfo, plain
from resilient.core.states import JobState

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from resilient.core.blocked import Waits


@dataclass(frozen=True, slots=True)
class Why:
    """The answer.

    ``state``: the job's, or of a resource ``open`` or ``stopped``. ``waiting``: ready jobs there.
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
    known: bool | None = None,
    waits: Waits | None = None,
) -> Why:
    """Why ``job`` stands where it stands.

    ``ahead``: jobs before it in line; ``known``: its kind in this program; ``waits``: which jobs it waits for.
    """
    waiting = path.waiting.get(job.resource_key, Count(0))
    reasons = list(of_state(job, path, now))
    if waits is not None:
        reasons += blocked.reasons(job, waits)
    if job.state in (JobState.READY, JobState.SCHEDULED):
        stopped_by = list(gates(path, now))
        reasons += stopped_by
        if job.state == JobState.READY:
            reasons += line(path, ahead, now, stopped=bool(stopped_by))
        reasons += stuck(path)
        reasons += workers(path, job.kind, known=known)
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
    reasons = list(stopped_by)
    if not stopped_by:
        reasons.append(Reason("open", f"Nothing stops {key}.", key))
    first = f", for example {example}" if example is not None else ""
    waits = f"{counted(waiting, 'job is', 'jobs are')} ready at or below {key}{first}."
    reasons.append(Reason("waiting", waits, key))
    reasons += stuck(path)
    if waiting:
        reasons += workers(path, None)
    state = "stopped" if stopped_by else "open"
    return Why(key, state, _latest(reasons, now), waiting, tuple(reasons))


_HARMLESS: Final = frozenset({"ready", "first", "last_error", "expires", "due", "cancel_requested"})
_GATES: Final = frozenset({"breaker", "cooldown", "pause", "auth", "limit", "concurrency", "scheduled"})


def _latest(reasons: Sequence[Reason], now: datetime) -> datetime | None:
    """When the last of the known stops ends; None if one of them has no known end."""
    stops = [reason for reason in reasons if reason.code in _GATES]
    if any(reason.until is None for reason in stops):
        return None
    return max((r.until for r in stops if r.until is not None and r.until > now), default=None)
