"""What a blocked job waits for, in words: its turn in an ordering key, other jobs, or both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from resilient.core.phrases import brief, counted
from resilient.core.reasons import Reason
from resilient.core.states import JobState

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from uuid import UUID

    from resilient.core.records import Count, JobInfo

TOLD: Final = 5  # blockers that are told one by one


@dataclass(frozen=True, slots=True)
class JobSeen:
    """Another job that this one waits for. ``state`` None: it does not exist (any more)."""

    id: UUID
    kind: str | None
    state: JobState | None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Waits:
    """What is before it. ``head``: whose turn it is; ``ahead``: how many wait between; ``behind``: after it."""

    blockers: Sequence[JobSeen] = ()
    more: int = 0  # blockers beside those
    head: JobSeen | None = None
    ahead: Count | None = None
    behind: Count | None = None


def reasons(job: JobInfo, waits: Waits) -> Iterator[Reason]:
    """One sentence for each thing a blocked job waits for; and for a dead one, whom it keeps waiting."""
    if job.state == JobState.DEAD:
        if job.ordering_policy == "block" and waits.behind:
            text = (
                f"It keeps {counted(waits.behind, 'job')} of ordering key {job.ordering_key!r} waiting: retry it, or"
                f" give it up with `resilient dead discard {job.id}`."
            )
            yield Reason("holds_order", text)
        return
    if waits.head is not None and waits.head.id != job.id:
        yield _turn(job, waits.head, waits.ahead)
    for one in waits.blockers:
        yield _blocker(one)
    if waits.more:
        yield Reason("blockers", f"It waits for {counted(waits.more, 'other job')} beside these.")


def _turn(job: JobInfo, head: JobSeen, ahead: Count | None) -> Reason:
    line = f"ordering key {job.ordering_key!r} of {job.resource_key}"
    between = f", with {counted(ahead, 'job')} between" if ahead else ""
    if head.state == JobState.DEAD:
        text = (
            f"It waits for its turn in {line}, which job {head.id} ({head.kind}) holds up since it is dead{between}:"
            f" `resilient jobs retry {head.id}` or `resilient dead discard {head.id}` lets it go on."
        )
        if head.error:
            text += f" Its error: {brief(head.error)}"
        return Reason("order_dead", text)
    return Reason("order", f"It waits for its turn in {line}, after job {head.id} ({_named(head)}){between}.")


def _named(one: JobSeen) -> str:
    return f"{one.kind}, {one.state}" if one.state else "deleted"


def _blocker(one: JobSeen) -> Reason:
    if one.state in (JobState.DEAD, JobState.CANCELLED):
        what = "is dead" if one.state == JobState.DEAD else "was cancelled"
        retry = f"`resilient jobs retry {one.id}`"
        text = f"It waits for job {one.id} ({one.kind}), which {what}: {retry}, or cancel this one."
        return Reason(f"blocker_{one.state}", text)
    return Reason("blocker", f"It waits for job {one.id} ({_named(one)}).")
