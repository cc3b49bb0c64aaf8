"""Building a workflow: its steps, checked and encoded, and how they are written.

``async with app.workflow("order") as wf:`` collects steps and writes them all in one transaction when the block ends
without an error; with ``session=`` they belong to the caller's. Within a handler ``job.workflow()`` adds steps to the
workflow of which the job is a step; a step whose name is there already is kept, so that a retried handler adds nothing
twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, overload

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from uuid_utils.compat import uuid7

from resilient.core.errors import InvalidInput, WorkflowOver
from resilient.core.misfit import explained_calls
from resilient.core.workflow import WorkflowState
from resilient.engine import joining, sessions, writing
from resilient.engine.handler import Handler, Kind
from resilient.store import workflows

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import TracebackType
    from typing import Self
    from uuid import UUID

    from resilient.engine.app import Resilient
    from resilient.engine.enqueue import Enqueued, Ordered
    from resilient.engine.sessions import CallersSession
    from resilient.store.dialect import Dialect

P = TypeVar("P")
R = TypeVar("R")
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
    """Name and number of steps of a workflow that takes more. Raises `WorkflowOver`.

    Locks are taken on jobs first, then on lanes, then on workflows. Where jobs are still to come (in a completion, and
    in a transaction of its own) it is looked at without a lock, and with one as the last thing before the commit.
    """
    found = workflows.find(c, d, id_, lock=lock)
    if found is None:
        raise WorkflowOver(f"workflow {id_} does not exist any more")
    name, state, count = found
    if state != WorkflowState.RUNNING:
        raise WorkflowOver(f"workflow {id_} ({name}) is {state}: it takes no more steps")
    return name, count


@explained_calls("wf")
class BaseWorkflow:
    """What is the same for async and synchronous programs."""

    def __init__(
        self, app: Resilient, name: str | None, session: CallersSession, resource_key: str | None, within: UUID | None
    ) -> None:
        self._app, self._session, self._resource_key, self._within = app, session, resource_key, within
        self.name = name
        self.checked_later: list[UUID] | None = None  # of the completion it is written with
        self.id: UUID = uuid7()
        self.steps: list[Step[Any]] = []
        self._new: list[tuple[workflows.NewStep, Ordered]] = []

    @overload
    def step(
        self,
        kind: Handler[P, R],
        payload: P = ...,
        *,
        name: str | None = None,
        resource_key: str | None = None,
        after: Step[Any] | Iterable[Step[Any]] = (),
        undo: Kind[P] | None = None,
        **options: Any,
    ) -> Step[R]: ...
    @overload
    def step(
        self,
        kind: Kind[P],
        payload: P = ...,
        *,
        name: str | None = None,
        resource_key: str | None = None,
        after: Step[Any] | Iterable[Step[Any]] = (),
        undo: Kind[P] | None = None,
        **options: Any,
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
        **options: Any,
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
        **options: Any,
    ) -> Step[Any]:
        """Add a step: a job that starts once the steps it comes ``after`` succeeded.

        ``undo`` is the kind of job that takes its effect back; it gets the same payload. Options are those of
        `Resilient.enqueue`, but for ``unique_key`` and ``on_dead``. ``name`` is by default the kind. Raises
        `InvalidInput` (one of its kinds); nothing was written then.
        """
        if wrong := sorted(set(options) & set(_REFUSED)):
            raise InvalidInput(f"a step takes no {wrong[0]}: it belongs to its workflow alone")
        encoder = self._app._encoder  # noqa: SLF001 - the app's one encoder; it checks what enqueue checks
        declared = encoder.kind_of(kind)
        key = resource_key or self._resource_key
        if key is None:
            raise InvalidInput(f"step {name or declared.kind!r} needs a resource_key, or the workflow one for all")
        before = self._before([after] if isinstance(after, Step) else list(after))
        name = self._named(name, declared.kind)
        ordered = encoder.encode(declared, payload, key, after=[s.id for s in before], on_dead="wait", **options)
        self._app.foresight.look([ordered])
        ordered = ordered._replace(row=ordered.row._replace(followed=True))
        new = workflows.NewStep(name, len(self._new), ordered.row.id, declared.kind, key, tuple(s.name for s in before))
        if undo is not None:
            text = encoder.text(encoder.kind_of(undo), payload)
            attempts = undo.retry.max_attempts if isinstance(undo, Handler) else undo.max_attempts
            new = new._replace(
                undo_kind=undo.kind, undo_payload=text, undo_version=undo.version, undo_max_attempts=attempts
            )
        step: Step[Any] = Step(name, ordered.row.id, declared)
        self._new.append((new, ordered))
        self.steps.append(step)
        return step

    def _before(self, after: Sequence[Step[Any]]) -> Sequence[Step[Any]]:
        for one in after:
            if one not in self.steps:
                raise InvalidInput(f"step {one.name!r} belongs to another workflow: it cannot be waited for here")
        return after

    def _named(self, name: str | None, kind: str) -> str:
        taken = {s.name for s in self.steps}
        if name is not None:
            if name in taken:
                raise InvalidInput(f"two steps are called {name!r}: give one another name")
            if not 0 < len(name) <= 200 or not name.isprintable():  # noqa: PLR2004 - said in the message
                raise InvalidInput(f"a step's name has 1 to 200 printable characters, not {name[:40]!r}")
            return name
        if len(self.steps) >= MAX_STEPS:
            raise InvalidInput(f"a workflow has at most {MAX_STEPS:,} steps: enqueue plain jobs from one of them")
        return kind if kind not in taken else f"{kind}-{1 + sum(s.kind.kind == kind for s in self.steps)}"

    def _write(self, c: Connection, d: Dialect) -> list[Ordered]:
        """The workflow and its steps; returns the jobs that are still to be written."""
        now, first = d.now(c), 0
        known = None if self._within is None else workflows.of_job(c, d, self._within)
        if known is None:
            workflows.insert(c, d, self.id, self.name or "workflow", now, attention=not self._new)
        else:
            self.id = known
            first = self._require_going(c, d)
        steps = [step._replace(no=first + n) for n, (step, _) in enumerate(self._new)]
        inserted = workflows.insert_steps(c, d, self.id, steps) if steps else set()
        return self._kept(c, d, inserted)

    def _require_going(self, c: Connection, d: Dialect) -> int:
        """How many steps it has. Within a completion it is not locked yet: see `require_going`."""
        self.name, count = require_going(c, d, self.id, lock=self.checked_later is None)
        if self.checked_later is not None:
            self.checked_later.append(self.id)
        return count

    def _kept(self, c: Connection, d: Dialect, inserted: set[str]) -> list[Ordered]:
        """The jobs of the new steps. Where a step was there already, others wait for that one's job."""
        if len(inserted) == len(self._new):
            return [ordered for _, ordered in self._new]
        standing = {row.name: row.job_id for row in workflows.steps_of(c, d, [self.id])[self.id]}
        same = {step.job_id: standing[step.name] for step, _ in self._new}
        self.steps = [Step(s.name, same[s.id], s.kind) for s in self.steps]
        return [
            ordered._replace(after=tuple(same[i] for i in ordered.after))
            for step, ordered in self._new
            if step.name in inserted
        ]

    def _write_all(self, c: Connection, d: Dialect) -> list[Enqueued]:
        self.checked_later = later = list["UUID"]()
        written = writing.write(c, d, self._write(c, d))
        for id_ in later:
            require_going(c, d, id_, lock=True)
        return written

    def _join(self, target: Any, d: Dialect) -> None:
        target, c = sessions.enter(target, self._app.poke)
        if not isinstance(target, Connection):
            target.flush()
        joining.join(target, d, self._write(c, d), self._app.poke)


class Workflow(BaseWorkflow):
    """``async with app.workflow(...) as wf:``; see `BaseWorkflow.step`."""

    async def __aenter__(self) -> Self:
        """Nothing is written before the end of the block."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        """Write it all, unless there was an error."""
        if error is not None:
            return
        database = self._app.database
        if self._session is None:
            await self._app.ready()
            await database.transaction(self._write_all)
            self._app.poke()
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
        if error is not None:
            return
        if self._session is not None:
            self._join(self._session, self._app.database.dialect)
            return
        self._app.ready_sync()
        self._app.database.transaction_sync(self._write_all)
        self._app.poke()
