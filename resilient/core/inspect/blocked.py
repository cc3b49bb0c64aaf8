"""What a blocked job waits for, in words: its turn in an ordering key, other jobs, or both; and whom a dead one keeps.

`of_blocked` gives the code and the text of each reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from resilient.core.base.phrases import brief, counted
from resilient.core.jobs.records import Count
from resilient.core.jobs.states import JobState
from resilient.core.jobs.workflow import WorkflowState

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from uuid import UUID

    from resilient.core.jobs.records import JobInfo

MOST_NAMED: Final = 5  # blockers that are named one by one
_MOST_LANES: Final = 3  # ordering keys in one sentence


@dataclass(frozen=True, slots=True)
class JobSeen:
    """Another job that this one waits for. ``state`` None: it does not exist (any more)."""

    id: UUID
    kind: str | None
    state: JobState | None
    error: str | None = None
    is_over: bool = False  # it is a step of a workflow that turned around: no retry takes it


@dataclass(frozen=True, slots=True)
class StepSeen:
    """The workflow that a job belongs to, as a step or as the undo of one."""

    workflow: UUID
    name: str
    state: WorkflowState
    is_undo: bool = False

    @property
    def is_over(self) -> bool:
        """Whether it is a step that no retry takes any more: the same rule decides the retry."""
        return not self.is_undo and self.state not in (WorkflowState.RUNNING, WorkflowState.SUCCEEDED)

    @property
    def is_stuck(self) -> bool:
        """Whether the workflow cannot go on without this undo."""
        return self.is_undo and self.state == WorkflowState.STUCK


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldLane:
    """An ordering key that stands still because its turn is a dead job's; ``behind`` are the jobs that wait for it."""

    resource_key: str
    ordering_key: str
    job: UUID
    kind: str
    behind: Count


@dataclass(frozen=True, slots=True)
class Waits:
    """What is before it. ``head``: whose turn it is; ``ahead``: how many wait between; ``behind``: after it.

    ``step``: of which workflow it is one.
    """

    blockers: Sequence[JobSeen] = ()
    more: int = 0  # blockers beside those
    head: JobSeen | None = None
    ahead: Count | None = None
    behind: Count | None = None
    step: StepSeen | None = None


def of_blocked(job: JobInfo, waits: Waits) -> Iterator[tuple[str, str]]:
    """One sentence for each thing a blocked job waits for; and for a dead one, whom it keeps waiting."""
    if job.state == JobState.DEAD:
        if job.ordering_policy == "block" and waits.behind:
            retry = "" if waits.step is not None and waits.step.is_over else "retry it, or "
            text = (
                f"It keeps {counted(waits.behind, 'job')} of ordering key {job.ordering_key!r} waiting: {retry}"
                f"give it up with `resilient dead discard {job.id}`."
            )
            yield ("holds_order", text)
        return
    if waits.head is not None and waits.head.id != job.id:
        yield _turn(job, waits.head, waits.ahead)
    for one in waits.blockers:
        yield _blocker(one)
    if waits.more:
        yield ("blockers", f"It waits for {counted(waits.more, 'other job')} beside these.")


def held_lanes(lanes: Sequence[HeldLane], number: Count) -> str:
    """Which ordering keys dead jobs hold up, in one sentence. ``number``: of all of them."""
    named = "; ".join(
        f"{one.ordering_key!r} of {one.resource_key} ({counted(one.behind, 'job waits', 'jobs wait')} for {one.job})"
        for one in lanes[:_MOST_LANES]
    )
    rest = Count(int(number) - min(len(lanes), _MOST_LANES), more=number.more)
    others = f"; and {counted(rest, 'other')}" if rest else ""
    return (
        f"{counted(number, 'ordering key')} held up by a dead job: {named}{others}. Retry it or discard it"
        f" (`resilient jobs why {lanes[0].job}`)."
    )


def _turn(job: JobInfo, head: JobSeen, ahead: Count | None) -> tuple[str, str]:
    line = f"ordering key {job.ordering_key!r} of {job.resource_key}"
    between = f", with {counted(ahead, 'job')} between" if ahead else ""
    if head.state == JobState.DEAD:
        retry = "" if head.is_over else f"`resilient jobs retry {head.id}` or "
        text = (
            f"It waits for its turn in {line}, which job {head.id} ({head.kind}) holds up since it is dead{between}:"
            f" {retry}`resilient dead discard {head.id}` lets it go on."
        )
        if head.error:
            text += f" Its error: {brief(head.error)}"
        return ("order_dead", text)
    return ("order", f"It waits for its turn in {line}, after job {head.id} ({_named(head)}){between}.")


def _named(one: JobSeen) -> str:
    return f"{one.kind}, {one.state}" if one.state else "deleted"


def _blocker(one: JobSeen) -> tuple[str, str]:
    if one.state in (JobState.DEAD, JobState.CANCELLED):
        what = "is dead" if one.state == JobState.DEAD else "was cancelled"
        retry = "" if one.is_over else f"`resilient jobs retry {one.id}`, or "
        text = f"It waits for job {one.id} ({one.kind}), which {what}: {retry}cancel this one."
        return (f"blocker_{one.state}", text)
    return ("blocker", f"It waits for job {one.id} ({_named(one)}).")
