"""Workflows: the next thing to do with one, decided from the states of its steps.

A workflow runs until each of its steps succeeded. If one of them dies or is cancelled, it turns around: unfinished
steps are cancelled and running ones asked to stop. Once nothing of it runs any more, undos run one after the other,
the latest step's first. A step is undone if it succeeded, or if it may have taken effect: its failure is ambiguous; an
execution of it, the last or an earlier one, was broken off by its timeout, a cancel or the loss or stop of its worker;
or it ended with a request that was never answered (an idempotency key makes a repeat safe, but does not say whether the
request took effect). A dead undo stops the undoing (`STUCK`) until
somebody retries or discards it, and so does one whose job was deleted: nobody knows whether it succeeded, unless the
next undo has begun, which waits for that. Once a workflow turned around, it never goes forward again.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from resilient.core.base.errors import FailureKind
from resilient.core.jobs.outcomes import BROKEN_OFF
from resilient.core.jobs.records import fields_of
from resilient.core.jobs.states import TERMINAL, WAITING, JobState

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID


class WorkflowState(StrEnum):
    """Where a workflow stands."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    UNDOING = "undoing"  # a step failed, or somebody cancelled it: steps are stopped, then undone
    STUCK = "stuck"  # an undo is dead: somebody has to retry or discard that job (or its job was deleted)
    UNDONE = "undone"  # every undo ended
    FAILED = "failed"  # a step failed, and no step needed an undo


OVER: Final = frozenset({WorkflowState.SUCCEEDED, WorkflowState.UNDONE, WorkflowState.FAILED})


class StepFacts(NamedTuple):
    """One step as it stands. A state is None if its job was deleted, or (of an undo) does not exist yet."""

    name: str
    no: int  # its place, from 0; a step only waits for earlier ones
    state: JobState | None
    error_kind: str | None = None
    has_undo: bool = False
    undo_begun: bool = False
    undo_state: JobState | None = None
    in_doubt: bool = False  # a request of it was never answered, or an execution of it was broken off


class Plan(NamedTuple):
    """What to do now. ``state``: the workflow's new state; ``undo``: the step whose undo begins."""

    state: WorkflowState
    reason: str | None = None
    stop: tuple[str, ...] = ()  # steps to cancel
    undo: str | None = None


def plan(state: WorkflowState, steps: Sequence[StepFacts]) -> Plan:
    """What to do next with a workflow; the plan's ``reason`` says why it turns around, if it does so now."""
    if state in OVER:
        return Plan(state)
    reason = None
    if state is WorkflowState.RUNNING:
        failed = next((s for s in steps if s.state in (JobState.DEAD, JobState.CANCELLED, None)), None)
        if failed is None:
            done = all(s.state is JobState.SUCCEEDED for s in steps)
            return Plan(WorkflowState.SUCCEEDED if done else WorkflowState.RUNNING)
        reason = f"step {failed.name} {_FAILED[failed.state]}"
    waiting = tuple(s.name for s in steps if s.state in WAITING)
    running = tuple(s.name for s in steps if s.state is JobState.RUNNING)
    if waiting or running:
        return Plan(WorkflowState.UNDOING, reason, waiting + running)
    return _undo(steps)._replace(reason=reason)


_FAILED: Final = {JobState.DEAD: "is dead", JobState.CANCELLED: "was cancelled", None: "was deleted"}


def stands_still(state: WorkflowState, steps: Sequence[StepFacts]) -> bool:
    """Whether the plan has something to do now for which no job's end will ask.

    Running steps of a workflow that turned around do not count: each was asked to stop, and its end asks for a look.
    """
    todo = plan(state, steps)
    waiting = any(s.state in WAITING for s in steps if s.name in todo.stop)
    return todo.state is not state or todo.undo is not None or waiting


def _undo(steps: Sequence[StepFacts]) -> Plan:
    """The plan of a workflow of which no step waits or runs: undo the latest step first."""
    to_undo = sorted((s for s in steps if needs_undo(s)), key=lambda s: -s.no)
    latest = next((s.name for s in reversed(to_undo) if s.undo_begun), None)
    for step in to_undo:
        if not step.undo_begun:
            return Plan(WorkflowState.UNDOING, undo=step.name)
        if step.undo_state is JobState.DEAD or (step.undo_state is None and step.name == latest):
            return Plan(WorkflowState.STUCK)
        if step.undo_state is not None and step.undo_state not in TERMINAL:
            return Plan(WorkflowState.UNDOING)
    return Plan(WorkflowState.UNDONE if to_undo else WorkflowState.FAILED)


_MAY_HAVE: Final = {JobState.DEAD: BROKEN_OFF | {FailureKind.AMBIGUOUS}, JobState.CANCELLED: BROKEN_OFF}


def needs_undo(step: StepFacts) -> bool:
    """Whether the step has an undo, and took effect or may have; it did or may have if its undo has begun."""
    if not step.has_undo:
        return False
    if step.undo_begun:
        return True
    if step.state in _MAY_HAVE and step.error_kind in _MAY_HAVE[step.state]:
        return True
    return step.state is JobState.SUCCEEDED or (step.state in (JobState.DEAD, JobState.CANCELLED) and step.in_doubt)


# -- what people are shown ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInfo:
    """One step as it stood when it was read. ``state`` None: its job was deleted."""

    name: str
    kind: str
    resource_key: str | None
    job_id: UUID
    state: JobState | None
    after: tuple[str, ...]
    attempts: int
    result: Any
    last_error: str | None
    last_error_kind: str | None
    started_at: datetime | None
    finished_at: datetime | None
    undo: str | None  # kind of its undo
    undo_job_id: UUID | None
    undo_state: JobState | None
    undo_error: str | None

    def to_json(self) -> dict[str, Any]:
        """Every field under its own name."""
        return fields_of(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowInfo:
    """One workflow as it stood when it was read. ``reason``: why it turned around."""

    id: UUID
    name: str
    state: WorkflowState
    reason: str | None
    created_at: datetime
    updated_at: datetime
    finished_at: datetime | None
    steps: tuple[StepInfo, ...]

    def step(self, name: str) -> StepInfo:
        """One of its steps; `KeyError` if there is none of that name."""
        for one in self.steps:
            if one.name == name:
                return one
        raise KeyError(name)

    def to_json(self) -> dict[str, Any]:
        """Every field under its own name."""
        return fields_of(self)
