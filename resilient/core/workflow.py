"""Workflows: what becomes of one, decided from where its steps stand.

A workflow runs until each of its steps succeeded. If one of them dies or is cancelled, it turns around: unfinished
steps are cancelled, running ones asked to stop; once nothing of it runs any more, the undos of the steps that
succeeded, and of those that may have (ambiguous; broken off from outside, by its timeout, a cancel or a lost worker; or
over with a request that was never answered: a key makes a repeat safe, but tells nobody what became of it), run one
after the other, the latest step's first. A dead undo stops
this (`stuck`) until somebody retries or discards it. Once a workflow turned around, it never goes forward again.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from resilient.core.failure import FailureKind
from resilient.core.records import fields_of
from resilient.core.states import TERMINAL, WAITING, JobState

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID


class WorkflowState(StrEnum):
    """Where a workflow stands."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    UNDOING = "undoing"  # a step failed, or somebody cancelled it: steps are stopped, then undone
    STUCK = "stuck"  # an undo is dead: retry or discard that job
    UNDONE = "undone"  # every undo ended
    FAILED = "failed"  # a step failed and nothing was to be undone


OVER: Final = frozenset({WorkflowState.SUCCEEDED, WorkflowState.UNDONE, WorkflowState.FAILED})


class StepFacts(NamedTuple):
    """One step as it stands. States None: that job does not exist (any more, or yet)."""

    name: str
    no: int  # its place, from 0; a step only waits for earlier ones
    state: JobState | None
    error_kind: str | None = None
    has_undo: bool = False
    undo_begun: bool = False
    undo_state: JobState | None = None
    in_doubt: bool = False  # some request of it was never answered, or it was cancelled while it ran


class Plan(NamedTuple):
    """What is to be done now. ``undo``: whose undo begins."""

    state: WorkflowState
    reason: str | None = None
    stop: tuple[str, ...] = ()  # steps to cancel
    undo: str | None = None


def plan(state: WorkflowState, steps: Sequence[StepFacts]) -> Plan:
    """The next step of a workflow; ``reason``: why it turns around."""
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
    """Whether there is something to do that only a look at the workflow brings about; so one must have been asked for.

    A running step of a workflow that turned around was asked to stop, and its end asks for the next look.
    """
    todo = plan(state, steps)
    waiting = any(s.state in WAITING for s in steps if s.name in todo.stop)
    return todo.state is not state or todo.undo is not None or waiting


def _undo(steps: Sequence[StepFacts]) -> Plan:
    """Nothing of it runs any more: undo, the latest step first."""
    to_undo = sorted((s for s in steps if needs_undo(s)), key=lambda s: -s.no)
    for step in to_undo:
        if not step.undo_begun:
            return Plan(WorkflowState.UNDOING, undo=step.name)
        if step.undo_state is JobState.DEAD:
            return Plan(WorkflowState.STUCK)
        if step.undo_state is not None and step.undo_state not in TERMINAL:
            return Plan(WorkflowState.UNDOING)
    return Plan(WorkflowState.UNDONE if to_undo else WorkflowState.FAILED)


_BROKEN_OFF: Final = frozenset({FailureKind.TIMEOUT.value, FailureKind.LOST_WORKER.value})
_MAY_HAVE: Final = {JobState.DEAD: _BROKEN_OFF | {FailureKind.AMBIGUOUS.value}, JobState.CANCELLED: _BROKEN_OFF}


def needs_undo(step: StepFacts) -> bool:
    """Whether it took effect, or may have."""
    if not step.has_undo:
        return False
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
