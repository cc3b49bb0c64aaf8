"""A job as a step of its workflow: results of earlier steps, and more steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from resilient.core.errors import NoResult
from resilient.engine.sessions import Transactions
from resilient.engine.workflows import results_of

if TYPE_CHECKING:
    from resilient.engine.handler import Handler
    from resilient.engine.job import BaseJob
    from resilient.engine.steps import BaseWorkflow, Step

R = TypeVar("R")
W = TypeVar("W", bound="BaseWorkflow")


async def results(job: BaseJob[Any], step: Step[R] | Handler[Any, R]) -> list[R]:
    """See `Job.results_of`."""
    if (given := _given(job, step)) is not None:
        return given
    return await results_of(Transactions(job.app), job.app, job.id, step, _open_session(job))


def results_sync(job: BaseJob[Any], step: Step[R] | Handler[Any, R]) -> list[R]:
    """The same in a thread: a coroutine on transactions that block never suspends."""
    if (given := _given(job, step)) is not None:
        return given
    coroutine = results_of(Transactions(job.app, here=True), job.app, job.id, step, _open_session(job))
    try:
        coroutine.send(None)
    except StopIteration as done:
        found: list[R] = done.value
        return found
    raise AssertionError("results_of waited for something else than its database")


def _given(job: BaseJob[Any], step: Any) -> list[Any] | None:
    """Of a job made by ``resilient.testing``: the results it was given."""
    given = getattr(job._side, "results", None)  # noqa: SLF001 - the job's other half
    if given is None:
        return None
    name = step if isinstance(step, str) else getattr(step, "kind", None) or step.name
    if name not in given:
        raise NoResult(f"this job was given no result of {name!r}, as if that step had not succeeded")
    found = given[name]
    return list(found) if isinstance(found, list) else [found]


def begin(job: BaseJob[Any], kind: type[W], name: str | None, session: Any, resource_key: str | None) -> W:
    """See `Job.workflow`."""
    ours = _open_session(job)
    wf = kind(job.app, name or job.kind, session or ours, resource_key or job.resource_key, job.id)
    if ours is not None and (session is None or session is ours):
        side: Any = job._side  # noqa: SLF001 - the job's other half
        wf.checked_later = side.work.workflows
    return wf


def _open_session(job: BaseJob[Any]) -> Any:
    """The session of the job's open transaction: with one writer at a time, another one would wait for it for ever."""
    work = getattr(job._side, "work", None)  # noqa: SLF001 - the job's other half
    return None if work is None or work.opened is None else work.opened.session
