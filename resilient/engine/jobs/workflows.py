"""Workflows: built from steps, looked at and cancelled (`app.workflows`), taken further by staging.

``async with app.workflow("order") as wf:`` collects steps, checked and encoded, and writes them all in one transaction
when the block ends without an error; with ``session=`` they belong to the caller's. Within a handler ``job.workflow()``
adds steps to the workflow of which the job is a step; a step whose name is there already is kept, so that a retried
handler adds nothing twice.
"""

from __future__ import annotations

import typing
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar, overload

from pydantic import TypeAdapter
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from uuid_utils.compat import uuid7

from resilient.core.base.errors import InvalidInput, NoResult, WorkflowNotFound, WorkflowOver
from resilient.core.base.misfit import check_storable, explained_calls
from resilient.core.jobs.states import JobState
from resilient.core.jobs.workflow import OVER, StepFacts, WorkflowInfo, WorkflowState, plan, stands_still
from resilient.engine.ground import sessions
from resilient.engine.ground.audited import audited
from resilient.engine.ground.encoder import JobRequest, with_trace
from resilient.engine.ground.kinds import Handler, Kind, result_of
from resilient.engine.ground.sessions import CallersSession, SyncFacade, Transactions, blocking
from resilient.engine.jobs import queue
from resilient.store.db.dialect import SHORT_LOCK_WAIT, is_lock_timeout
from resilient.store.jobs import changes, dependencies, workflows
from resilient.store.jobs.columns import NewJob
from resilient.store.jobs.filters import as_id

if TYPE_CHECKING:
    import builtins
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from datetime import datetime
    from types import TracebackType
    from typing import Self, Unpack
    from uuid import UUID

    from sqlalchemy import Row

    from resilient.core.jobs.workflow import StepInfo
    from resilient.engine.ground.encoder import Enqueued, StepOptions
    from resilient.engine.ground.ground import Ground
    from resilient.engine.ground.sessions import CallersSession
    from resilient.store.db.dialect import Dialect


P = TypeVar("P")
R_co = TypeVar("R_co", covariant=True)
MAX_STEPS: Final = 1_000
_REFUSED: Final = ("unique_key", "on_dead", "session")


@dataclass(frozen=True, slots=True)
class Step(Generic[R_co]):
    """A step of a workflow: ``R`` is what its handler returns. ``id`` is its job's."""

    name: str
    id: UUID
    kind: Kind[Any] = field(repr=False)


def require_going(c: Connection, d: Dialect, id_: UUID, *, lock: bool) -> tuple[str, int]:
    """Name of a workflow that takes more steps, and the number of its next one. Raises `WorkflowOver`.

    Locks are taken on jobs first, then on ordering keys, then on workflows. Where jobs are still to come (in a
    completion, and in a transaction of its own) it is looked at without a lock, and with one as the last thing before
    the commit.
    """
    row = workflows.find(c, d, id_, lock=lock)
    if row is None:
        raise WorkflowOver(f"workflow {id_} does not exist any more")
    name, state, following = row
    if state != WorkflowState.RUNNING:
        raise WorkflowOver(f"workflow {id_} ({name}) is {state}: it takes no more steps")
    return name, following


@explained_calls("wf")
class BaseWorkflow:
    """What is the same for async and synchronous programs."""

    def __init__(
        self, ground: Ground, name: str | None, session: CallersSession, resource_key: str | None, within: UUID | None
    ) -> None:
        self._ground, self._session, self._resource_key, self._within = ground, session, resource_key, within
        self.name = name
        self.checked_later: list[UUID] | None = None  # of the completion it is written with
        self.check: Callable[[Connection, Dialect], None] | None = None  # in its own transaction, before it is written
        self.id: UUID = uuid7()
        self.steps: list[Step[Any]] = []
        self._is_closed = False  # its block has ended: what is added now would never be written
        self._new: list[tuple[workflows.NewStep, JobRequest]] = []

    @overload
    def step(
        self,
        kind: Handler[None, R],
        payload: None = None,
        *,
        name: str | None = None,
        resource_key: str | None = None,
        after: Step[Any] | Iterable[Step[Any]] = (),
        undo: Kind[None] | None = None,
        **options: Unpack[StepOptions],
    ) -> Step[R]: ...
    @overload
    def step(
        self,
        kind: Handler[P, R],
        payload: P,
        *,
        name: str | None = None,
        resource_key: str | None = None,
        after: Step[Any] | Iterable[Step[Any]] = (),
        undo: Kind[P] | None = None,
        **options: Unpack[StepOptions],
    ) -> Step[R]: ...
    @overload
    def step(
        self,
        kind: Kind[None],
        payload: None = None,
        *,
        name: str | None = None,
        resource_key: str | None = None,
        after: Step[Any] | Iterable[Step[Any]] = (),
        undo: Kind[None] | None = None,
        **options: Unpack[StepOptions],
    ) -> Step[Any]: ...
    @overload
    def step(
        self,
        kind: Kind[P],
        payload: P,
        *,
        name: str | None = None,
        resource_key: str | None = None,
        after: Step[Any] | Iterable[Step[Any]] = (),
        undo: Kind[P] | None = None,
        **options: Unpack[StepOptions],
    ) -> Step[Any]: ...
    @overload
    def step(
        self,
        kind: str,
        payload: Any = None,
        *,
        name: str | None = None,
        resource_key: str | None = None,
        after: Step[Any] | Iterable[Step[Any]] = (),
        undo: Kind[Any] | None = None,
        **options: Unpack[StepOptions],
    ) -> Step[Any]: ...
    def step(
        self,
        kind: Kind[Any] | str,
        payload: Any = None,
        *,
        name: str | None = None,
        resource_key: str | None = None,
        after: Step[Any] | Iterable[Step[Any]] = (),
        undo: Kind[Any] | None = None,
        **options: Unpack[StepOptions],
    ) -> Step[Any]:
        """Add a step: a job that starts once the steps it comes ``after`` succeeded.

        ``undo`` is the kind of job that takes its effect back; it gets the same payload. Options are those of
        `Resilient.enqueue`, but for ``unique_key`` and ``on_dead``. ``name`` is by default the kind. Raises
        `InvalidInput` (one of its kinds); nothing was written then.
        """
        if self._is_closed:
            raise InvalidInput(
                "the block of this workflow has ended, so this step would never be written: add it within, or in a job"
                " of the workflow with job.workflow()"
            )
        if wrong := sorted(set(options) & set(_REFUSED)):
            raise InvalidInput(f"a step takes no {wrong[0]}: it belongs to its workflow alone")
        encoder = self._ground.encoder
        declared = encoder.kind_of(kind)
        key = resource_key or self._resource_key
        if key is None:
            raise InvalidInput(f"step {name or declared.kind!r} needs a resource_key, or the workflow one for all")
        before = self._before([after] if isinstance(after, Step) else list(after))
        name = self._named(name, declared.kind)
        request = encoder.encode(declared, payload, key, after=[s.id for s in before], on_dead="wait", **options)
        (request,) = with_trace([request], self._ground.tracing)
        self._ground.foresight.look([request])
        request = request._replace(row=request.row._replace(followed=True))
        new = workflows.NewStep(name, len(self._new), request.row.id, declared.kind, key, tuple(s.name for s in before))
        if undo is not None:
            if declared.sealed and not undo.sealed:
                raise InvalidInput(
                    f"step {name!r} is sealed, and its undo {undo.kind!r} gets the same payload: seal that kind, too"
                )
            text = encoder.text(encoder.kind_of(undo), payload)
            attempts = undo.retry.max_attempts if isinstance(undo, Handler) else undo.max_attempts
            new = new._replace(
                undo_kind=undo.kind, undo_payload=text, undo_version=undo.version, undo_max_attempts=attempts
            )
        step: Step[Any] = Step(name, request.row.id, declared)
        self._new.append((new, request))
        self.steps.append(step)
        return step

    def _before(self, after: Sequence[Step[Any]]) -> Sequence[Step[Any]]:
        for one in after:
            if one not in self.steps:
                raise InvalidInput(f"step {one.name!r} belongs to another workflow: it cannot be waited for here")
        return after

    def _named(self, name: str | None, kind: str) -> str:
        if len(self.steps) >= MAX_STEPS:
            raise InvalidInput(f"a workflow has at most {MAX_STEPS:,} steps: enqueue plain jobs from one of them")
        names = {s.name for s in self.steps}
        if name is not None:
            if name in names:
                raise InvalidInput(f"two steps are called {name!r}: give one another name")
            if not 0 < len(name) <= 200 or not name.isprintable():  # noqa: PLR2004 - said in the message
                raise InvalidInput(f"a step's name has 1 to 200 printable characters, not {name[:40]!r}")
            return name
        if kind not in names:
            return kind
        number = 1 + sum(s.kind.kind == kind for s in self.steps)
        while f"{kind}-{number}" in names:  # the program has called another step so
            number += 1
        return f"{kind}-{number}"

    def _write(self, c: Connection, d: Dialect) -> list[JobRequest]:
        """The workflow and its steps; returns the jobs that are still to be written."""
        now, first = d.now(c), 0
        workflow_id = None if self._within is None else workflows.of_job(c, d, self._within)
        if workflow_id is None:
            workflows.insert(c, d, self.id, self.name or "workflow", now, attention=not self._new)
        else:
            self.id = workflow_id
            first = self._require_going(c, d)
        steps = [step._replace(no=first + n) for n, (step, _) in enumerate(self._new)]
        inserted = workflows.insert_steps(c, d, self.id, steps) if steps else set()
        return self._kept(c, d, inserted)

    def _require_going(self, c: Connection, d: Dialect) -> int:
        """The number of its next step. Within a completion it is not locked yet: see `require_going`."""
        self.name, following = require_going(c, d, self.id, lock=self.checked_later is None)
        if self.checked_later is not None:
            self.checked_later.append(self.id)
        return following

    def _kept(self, c: Connection, d: Dialect, inserted: set[str]) -> list[JobRequest]:
        """The jobs of the new steps. Where a step was there already, others wait for that one's job."""
        if len(inserted) == len(self._new):
            return [request for _, request in self._new]
        standing = {row.name: row.job_id for row in workflows.steps_of(c, d, [self.id])[self.id]}
        same = {step.job_id: standing[step.name] for step, _ in self._new}
        self.steps = [Step(s.name, same[s.id], s.kind) for s in self.steps]
        return [
            request._replace(after=tuple(same[i] for i in request.after))
            for step, request in self._new
            if step.name in inserted
        ]

    def _write_all(self, c: Connection, d: Dialect) -> list[Enqueued]:
        if self.check is not None:
            self.check(c, d)
        self.checked_later = later = list["UUID"]()
        written = queue.write(c, d, self._write(c, d))
        for id_ in later:
            require_going(c, d, id_, lock=True)
        return written

    def _join(self, target: Any, d: Dialect) -> None:
        target, c = sessions.enter(target, self._ground.poke)
        if not isinstance(target, Connection):
            target.flush()
        queue.join(target, d, self._write(c, d), self._ground.poke)


class Workflow(BaseWorkflow):
    """``async with app.workflow(...) as wf:``; see `BaseWorkflow.step`."""

    async def __aenter__(self) -> Self:
        """Nothing is written before the end of the block."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        """Write it all, unless there was an error."""
        self._is_closed = True
        if error is not None:
            return
        database = self._ground.database
        if self._session is None:
            await self._ground.ready()
            await database.transaction(self._write_all)
            self._ground.poke()
            return
        target = sessions.unscoped(self._session)
        if isinstance(target, (AsyncSession, AsyncConnection)):
            await target.run_sync(self._join, database.dialect)
        else:
            self._join(target, database.dialect)


class SyncWorkflow(BaseWorkflow):
    """``with app.sync.workflow(...) as wf:``; see `BaseWorkflow.step`."""

    def __enter__(self) -> Self:
        """Nothing is written before the end of the block."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Write it all, unless there was an error."""
        self._is_closed = True
        if error is not None:
            return
        if self._session is not None:
            self._join(self._session, self._ground.database.dialect)
            return
        self._ground.ready_sync()
        self._ground.database.transaction_sync(self._write_all)
        self._ground.poke()


R = TypeVar("R")
_ROUNDS: Final = 10


@explained_calls("app.workflows")
class Workflows:
    """Workflows of one app. Raises `WorkflowNotFound` for an id that no workflow has."""

    def __init__(self, ground: Ground, *, here: bool = False) -> None:
        self._ground, self._db = ground, Transactions(ground, here=here)

    @property
    def sync(self) -> SyncWorkflows:
        """The same for synchronous programs."""
        return SyncWorkflows(Workflows(self._ground, here=True))

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
        if name is not None:
            check_storable("name", name)
        last = None if after is None else as_id(after, "workflow")
        return await self._db.read(session, workflows.page, state=state, name=name, after=last, limit=limit)

    @audited("workflows cancel")
    async def cancel(self, workflow_id: UUID | str, *, session: CallersSession = None) -> WorkflowInfo:
        """Turn a workflow around: unfinished steps are cancelled, the others undone.

        It begins within a second, with ``session=`` after its commit, as the workflow returned says it will be. Nothing
        happens to a workflow that is over.
        """
        id_, poke = as_id(workflow_id, "workflow"), self._ground.poke
        return await self._db.write(session, _cancel, id_, lambda d: queue.ends(session, d, poke))


class SyncWorkflows(SyncFacade[Workflows]):
    """`Workflows` for synchronous programs: the same methods, the same arguments."""

    get = blocking(Workflows.get)
    list = blocking(Workflows.list)
    cancel = blocking(Workflows.cancel)


def _require(c: Connection, d: Dialect, id_: UUID) -> WorkflowInfo:
    if (row := workflows.get(c, d, id_)) is None:
        raise WorkflowNotFound(f"there is no workflow {id_}: it was never committed, or it was pruned since")
    return row


def _cancel(
    c: Connection, d: Dialect, id_: UUID, ends_of: Callable[[Dialect], dependencies.Ends | None]
) -> WorkflowInfo:
    """``ends_of``: what goes on with a program's commit that is still to come: a workflow is locked after all jobs."""
    if (later := ends_of(d)) is None:
        workflows.cancel(c, d, [id_], (), d.now(c))
        return _require(c, d, id_)
    info = _require(c, d, id_)
    if info.state is not WorkflowState.RUNNING:
        return info
    later.workflows.add(id_)
    return replace(info, state=WorkflowState.UNDOING, reason=workflows.CANCELLED)


# -- staging -----------------------------------------------------------------------------------------------------------


class Look(NamedTuple):
    """At how many workflows, those (name, id) that got stuck over a dead undo, and the id of the last one."""

    size: int
    stuck: list[tuple[str, str]]
    last: str


def attend(c: Connection, d: Dialect, after: str = "", *, careful: bool = False) -> Look:
    """Look at workflows of which a job ended, from the one behind ``after`` on.

    Others lock a workflow last and this has it first, so it waits for nobody: it fails (see `db/dialect.py`), and then
    it is to be ``careful``, and leaves workflows whose jobs or lanes somebody holds for another look.
    """
    now = d.steer(c, SHORT_LOCK_WAIT)
    rows, stuck = workflows.due(c, d, after), []
    for row in rows:
        state = before = WorkflowState(row.state)
        try:
            with c.begin_nested() if careful else nullcontext():
                state = _attend(c, d, row.id, before, row.reason, now)
        except DBAPIError as error:
            if not careful or not is_lock_timeout(error):
                raise
        if state is WorkflowState.STUCK is not before:
            stuck.append((row.name, str(row.id)))
    return Look(len(rows), stuck, d.id(rows[-1].id) if rows else "")


def _attend(
    c: Connection, d: Dialect, id_: UUID, state: WorkflowState, reason: str | None, now: datetime
) -> WorkflowState:
    """Do what is to be done for one locked workflow; what somebody else holds is left for the next look."""
    again = False
    if state is WorkflowState.RUNNING and plan(state, workflows.states_of(c, d, id_)).state is state:
        workflows.write(c, d, id_, state, reason, now, over=False, attention=False)
        return state  # most looks end here: what else is known of a thousand steps need not be read for each of them
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
    rows = changes.lock_free(c, d, ids)
    change = changes.Cancel()
    by_sort: dict[str, list[changes.LockedJob]] = {}
    for row in rows:
        by_sort.setdefault(change.sort(row), []).append(row)
    change.write(c, d, by_sort, now)
    return len(by_sort.get("cancelled", ())) + len(by_sort.get("too_late", ())), len(rows) < len(ids)


def _begin_undo(c: Connection, d: Dialect, step: Row[Any]) -> None:
    row = NewJob(
        id=uuid7(),
        kind=step.undo_kind,
        resource_key=step.resource_key,
        payload=workflows.undo_payload(c, d, step.workflow_id, step.name) or "null",
        payload_version=step.undo_version,
        max_attempts=step.undo_max_attempts,
        followed=True,
    )
    queue.write(c, d, [JobRequest(row)])
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
    db: Transactions,
    handlers: Mapping[str, Handler[Any, Any]],
    job_id: UUID,
    step: Step[Any] | Kind[Any] | str,
    session: CallersSession = None,
) -> list[Any]:
    """The results of the steps that are meant, in their order, of the workflow the job belongs to.

    Raises `NoResult` if it belongs to none, if no step is meant, or one of them did not succeed.
    """
    info, results = await db.read(session, _of_job, job_id, step)
    if info is None:
        raise NoResult(f"job {job_id} is not a step of a workflow, so there are no results of other steps")
    meant = [s for s in info.steps if _means(step, s)]
    if not meant:
        names = ", ".join(s.name for s in info.steps)
        raise NoResult(f"workflow {info.id} ({info.name}) has no step {_word(step)!r}; it has: {names}")
    for one in meant:
        if one.state is not JobState.SUCCEEDED:
            raise NoResult(f"step {one.name} of workflow {info.id} is {one.state or 'deleted'}: it has no result")
    return [_decoded(handlers, one, results[one.job_id]) for one in meant]


def the_one(results: list[R], step: Step[R] | Kind[Any] | str) -> R:
    """The result, if one step is meant."""
    if len(results) > 1:
        raise NoResult(f"{len(results)} steps are {_word(step)!r}: ask for results_of, or by the name of one")
    return results[0]


def _of_job(
    c: Connection, d: Dialect, job_id: UUID, step: Step[Any] | Kind[Any] | str
) -> tuple[WorkflowInfo | None, dict[UUID, Any]]:
    """The workflow of a job, and the results of those of its steps that are meant: of no others, they may be many."""
    workflow_id = workflows.of_job(c, d, job_id)
    info = None if workflow_id is None else workflows.get(c, d, workflow_id, results=False)
    meant = [] if info is None else [one.job_id for one in info.steps if _means(step, one)]
    return info, workflows.results_of(c, d, meant)


def _means(step: Step[Any] | Kind[Any] | str, one: StepInfo) -> bool:
    if isinstance(step, Step):
        return one.name == step.name
    return one.kind == step.kind if isinstance(step, Kind) else one.name == step


def _word(step: Step[Any] | Kind[Any] | str) -> str:
    return step if isinstance(step, str) else step.name if isinstance(step, Step) else step.kind


def _decoded(handlers: Mapping[str, Handler[Any, Any]], one: StepInfo, result: Any) -> Any:
    """The stored JSON as what the handler says it returns."""
    handler = handlers.get(one.kind)
    model = None if handler is None else _returns(handler)
    return result if model is None else result_of(TypeAdapter(model), result)


def _returns(handler: Handler[Any, Any]) -> Any:
    try:
        return typing.get_type_hints(handler.fn).get("return")
    except (NameError, TypeError):  # its annotations cannot be read: the JSON as it is
        return None
