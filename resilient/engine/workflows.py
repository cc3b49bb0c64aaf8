"""`app.workflows`: look at workflows and cancel them; what staging does for them; results of earlier steps."""

from __future__ import annotations

import typing
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pydantic import TypeAdapter
from sqlalchemy.exc import DBAPIError
from uuid_utils.compat import uuid7

from resilient.core.errors import InvalidInput, NoResult, WorkflowNotFound
from resilient.core.misfit import explained_calls
from resilient.core.states import JobState
from resilient.core.workflow import OVER, StepFacts, WorkflowInfo, WorkflowState, plan, stands_still
from resilient.engine import writing
from resilient.engine.enqueue import Ordered
from resilient.engine.handler import Handler, Kind
from resilient.engine.sessions import CallersSession, Face, Transactions, blocking
from resilient.engine.steps import Step
from resilient.store import changes, patience, workflows
from resilient.store.filters import as_id
from resilient.store.jobs import NewJob

if TYPE_CHECKING:
    import builtins
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from sqlalchemy import Connection, Row

    from resilient.core.workflow import StepInfo
    from resilient.engine.app import Resilient
    from resilient.store.dialect import Dialect

R = TypeVar("R")
_ROUNDS: Final = 10


@explained_calls("app.workflows")
class Workflows:
    """Workflows of one app. Raises `WorkflowNotFound` for an id that no workflow has."""

    def __init__(self, app: Resilient, *, here: bool = False) -> None:
        self._app, self._db = app, Transactions(app, here=here)

    @property
    def sync(self) -> SyncWorkflows:
        """The same for synchronous programs."""
        return SyncWorkflows(Workflows(self._app, here=True))

    async def get(self, workflow_id: UUID | str, *, session: CallersSession = None) -> WorkflowInfo:
        """One workflow with its steps."""
        return await self._db.read(session, _require, as_id(workflow_id, "workflow"))

    async def list(
        self,
        *,
        state: str | None = None,
        name: str | None = None,
        limit: int = 100,
        after: UUID | str | None = None,
        session: CallersSession = None,
    ) -> builtins.list[WorkflowInfo]:
        """A page of workflows with their steps, the newest first; the next one is ``after`` the last of these."""
        if state is not None and state not in list(WorkflowState):
            raise InvalidInput(f"{state!r} is not a workflow state: use one of {', '.join(WorkflowState)}")
        if not 1 <= limit <= workflows.LIST_LIMIT:
            raise InvalidInput(f"limit={limit}: ask for 1 to {workflows.LIST_LIMIT:,} workflows at a time")
        last = None if after is None else as_id(after, "workflow")
        return await self._db.read(session, workflows.page, state=state, name=name, after=last, limit=limit)

    async def cancel(self, workflow_id: UUID | str, *, session: CallersSession = None) -> WorkflowInfo:
        """Turn a workflow around: unfinished steps are cancelled, the others undone.

        It begins within a second. Nothing happens to a workflow that is over.
        """
        return await self._db.write(session, _cancel, as_id(workflow_id, "workflow"))


class SyncWorkflows(Face[Workflows]):
    """`Workflows` for synchronous programs: the same methods, the same arguments."""

    get = blocking(Workflows.get)
    list = blocking(Workflows.list)
    cancel = blocking(Workflows.cancel)


def _require(c: Connection, d: Dialect, id_: UUID) -> WorkflowInfo:
    if (found := workflows.get(c, d, id_)) is None:
        raise WorkflowNotFound(f"there is no workflow {id_}: it was never committed, or it was pruned since")
    return found


def _cancel(c: Connection, d: Dialect, id_: UUID) -> WorkflowInfo:
    found = workflows.find(c, d, id_, lock=True)
    if found is not None and found[1] == WorkflowState.RUNNING:
        state, reason = WorkflowState.UNDOING, "it was cancelled"
        workflows.write(c, d, id_, state, reason, d.now(c), over=False, attention=True)
    return _require(c, d, id_)


# -- staging -----------------------------------------------------------------------------------------------------------


def attend(c: Connection, d: Dialect, *, careful: bool = False) -> tuple[int, list[tuple[str, str]]]:
    """Look at workflows of which a job ended.

    Returns how many, and those (name, id) that got stuck over a dead undo. Others lock a workflow last and this has it
    first, so it waits for nobody: it fails (see `patience.py`), and then it is to be ``careful``, and leaves workflows
    whose jobs or lanes somebody holds for the next look.
    """
    now = d.steer(c, patience.SHORT)
    rows, stuck = workflows.due(c, d), []
    for row in rows:
        before, after = WorkflowState(row.state), None
        try:
            with c.begin_nested() if careful else nullcontext():
                after = _attend(c, d, row.id, before, row.reason, now)
        except DBAPIError as error:
            if not careful or not patience.was_held_up(error):
                raise
        if after is WorkflowState.STUCK is not before:
            stuck.append((row.name, str(row.id)))
    return len(rows), stuck


def _attend(
    c: Connection, d: Dialect, id_: UUID, state: WorkflowState, reason: str | None, now: datetime
) -> WorkflowState:
    """Do what is to be done for one locked workflow; what somebody else holds is left for the next look."""
    again = False
    for _ in range(_ROUNDS):
        steps = workflows.steps_of(c, d, [id_])[id_]
        todo = plan(state, [_facts(step) for step in steps])
        state, reason = todo.state, reason or todo.reason
        if todo.stop:
            stopped, again = _stop(c, d, [s for s in steps if s.name in todo.stop], now)
            if stopped and not again:
                continue
        elif todo.undo is not None:
            _begin_undo(c, d, next(s for s in steps if s.name == todo.undo))
        break
    workflows.write(c, d, id_, state, reason, now, over=state in OVER, attention=again)
    return state


def _facts(row: Row[Any]) -> StepFacts:
    return StepFacts(
        row.name,
        row.no,
        None if row.state is None else JobState(row.state),
        row.last_error_kind,
        has_undo=row.undo_kind is not None,
        undo_begun=row.undo_job_id is not None,
        undo_state=None if row.undo_state is None else JobState(row.undo_state),
        in_doubt=bool(row.in_doubt),
    )


def _stop(c: Connection, d: Dialect, steps: Sequence[Row[Any]], now: datetime) -> tuple[int, bool]:
    """Cancel what waits, ask what runs; returns how many were cancelled, and whether some were locked by others."""
    ids = [step.job_id for step in steps]
    rows = changes.unlocked(c, d, ids)
    change = changes.Cancel()
    found: dict[str, list[Row[Any]]] = {}
    for row in rows:
        found.setdefault(change.sort(row), []).append(row)
    change.write(c, d, found, now)
    return len(found.get("cancelled", ())) + len(found.get("too_late", ())), len(rows) < len(ids)


def _begin_undo(c: Connection, d: Dialect, step: Row[Any]) -> None:
    row = NewJob(
        id=uuid7(),
        kind=step.undo_kind,
        resource_key=step.resource_key,
        payload=step.undo_payload or "null",
        payload_version=step.undo_version,
        max_attempts=step.undo_max_attempts,
        followed=True,
    )
    writing.write(c, d, [Ordered(row)])
    workflows.undo_begins(c, d, step.workflow_id, step.name, row.id)


REPAIR_WINDOW: Final = 500


def repair(c: Connection, d: Dialect, after: str) -> tuple[int, str]:
    """Look through the next workflows for those that stand still and at which nobody was asked to look; let them go on.

    Returns how many (a bug if there are any), and the ``after`` of the next call. What a first look finds is looked at
    again under the lock: whoever ended a step meanwhile asked for a look.
    """
    rows = workflows.unattended(c, d, after, REPAIR_WINDOW)
    suspects = _still(c, d, rows)
    lost = _still(c, d, workflows.hold_unattended(c, d, suspects)) if suspects else []
    if lost:
        workflows.look_at(c, d, lost, d.now(c))
    return len(lost), d.id(rows[-1].id) if len(rows) == REPAIR_WINDOW else ""


def _still(c: Connection, d: Dialect, rows: Sequence[Row[Any]]) -> list[UUID]:
    """Those of these workflows (id, state) that stand still."""
    steps = workflows.steps_of(c, d, [row.id for row in rows])
    return [row.id for row in rows if stands_still(WorkflowState(row.state), [_facts(step) for step in steps[row.id]])]


# -- results -----------------------------------------------------------------------------------------------------------


async def results_of(
    db: Transactions, app: Resilient, job_id: UUID, step: Step[Any] | Kind[Any] | str, session: CallersSession = None
) -> list[Any]:
    """The results of the steps that are meant, in their order, of the workflow the job belongs to.

    Raises `NoResult` if it belongs to none, if no step is meant, or one of them did not succeed.
    """
    info = await db.read(session, _of_job, job_id)
    if info is None:
        raise NoResult(f"job {job_id} is not a step of a workflow, so there are no results of other steps")
    meant = [s for s in info.steps if _means(step, s)]
    if not meant:
        names = ", ".join(s.name for s in info.steps)
        raise NoResult(f"workflow {info.id} ({info.name}) has no step {_word(step)!r}; it has: {names}")
    for one in meant:
        if one.state is not JobState.SUCCEEDED:
            raise NoResult(f"step {one.name} of workflow {info.id} is {one.state or 'deleted'}: it has no result")
    return [_decoded(app, one) for one in meant]


def the_one(found: list[R], step: Step[R] | Kind[Any] | str) -> R:
    """The result, if one step is meant."""
    if len(found) > 1:
        raise NoResult(f"{len(found)} steps are {_word(step)!r}: ask for results_of, or by the name of one")
    return found[0]


def _of_job(c: Connection, d: Dialect, job_id: UUID) -> WorkflowInfo | None:
    found = workflows.of_job(c, d, job_id)
    return None if found is None else workflows.get(c, d, found)


def _means(step: Step[Any] | Kind[Any] | str, one: StepInfo) -> bool:
    if isinstance(step, Step):
        return one.name == step.name
    return one.kind == step.kind if isinstance(step, Kind) else one.name == step


def _word(step: Step[Any] | Kind[Any] | str) -> str:
    return step if isinstance(step, str) else step.name if isinstance(step, Step) else step.kind


def _decoded(app: Resilient, one: StepInfo) -> Any:
    """The stored JSON as what the handler says it returns."""
    handler = app.kinds.get(one.kind)
    model = None if handler is None else _returns(handler)
    return one.result if model is None else TypeAdapter(model).validate_python(one.result)


def _returns(handler: Handler[Any, Any]) -> Any:
    try:
        return typing.get_type_hints(handler.fn).get("return")
    except (NameError, TypeError):  # its annotations cannot be read: the JSON as it is
        return None
