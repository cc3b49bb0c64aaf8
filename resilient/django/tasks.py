"""Django's tasks as jobs: ``TASKS = {"default": {"BACKEND": "resilient.django.tasks.Backend"}}``.

`Backend` is for `django.tasks` (Django 6), or for the package ``django-tasks`` where there is none; `PackageBackend` is
for the package on any Django. Every task is a job of one kind, which `run_task` runs: list it in the app's handlers.

A queue is a resource: ``tasks/<queue>``, so it can be paused and limited. A queue with a slash in its name is itself a
resource key: ``task.using(queue_name="crm/acct-7")`` waits for that account's gate and limits.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from django.core import checks
from django.db import transaction
from django.utils import timezone
from django.utils.module_loading import import_string
from pydantic import BaseModel

from resilient.core.base.errors import InvalidInput, JobNotFound, MissingExtra, ResilientError, SetupError
from resilient.core.jobs.states import JobState
from resilient.django import program
from resilient.django.connection import session
from resilient.django.settings import current
from resilient.engine.app.handler import handler

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import datetime
    from types import ModuleType

    from resilient.core.jobs.records import AttemptInfo, JobInfo
    from resilient.engine.run.job import SyncJob

KIND: Final = "django.task"
_OPTIONS: Final = ("max_attempts",)
_STATES: Final = {
    JobState.RUNNING: "RUNNING",
    JobState.SUCCEEDED: "SUCCESSFUL",
    JobState.DEAD: "FAILED",
    JobState.CANCELLED: "FAILED",
}
_EXCEPTION: Final = re.compile(r"^(?:  \| )?([A-Za-z_][\w.]*)(?::|$)", re.MULTILINE)  # a group's lines begin with a bar
_LISTED: Final = "list it: Resilient(..., handlers=[..., resilient.django.tasks.run_task])"


class TaskCall(BaseModel):
    """The payload of a task's job: which function, and what it is called with."""

    task: str
    args: list[Any]
    kwargs: dict[str, Any]


@handler(KIND, timeout=None, model=TaskCall)
def run_task(job: SyncJob[TaskCall]) -> Any:
    """Run a task; what it returns is the job's result, and what it raises is retried by the engine's policy."""
    task: Any = import_string(job.payload.task)
    backend = task.get_backend()
    if not isinstance(backend, ResilientTasks):
        raise SetupError(f"TASKS has another backend for {job.payload.task} than the one that enqueued it")
    result = backend.get_result(str(job.id))
    tell = backend.package("signals")
    tell.task_started.send(sender=type(backend), task_result=result)
    context = (backend.package("base").TaskContext(task_result=result),) if task.takes_context else ()
    value = task.call(*context, *job.payload.args, **job.payload.kwargs)
    for name, new in (
        ("finished_at", timezone.now()),
        ("status", backend.status("SUCCESSFUL")),
        ("_return_value", value),
    ):
        object.__setattr__(result, name, new)  # a frozen dataclass: as Django's own backends do it
    tell.task_finished.send(sender=type(backend), task_result=result)
    return value


class ResilientTasks:
    """What both backends share; see the top of this file. ``OPTIONS``: ``max_attempts`` of each job."""

    supports_async_task = True
    supports_defer = True
    supports_get_result = True
    supports_priority = True
    package_name = ""
    alias: str
    options: Mapping[str, Any]

    def package(self, name: str) -> ModuleType:
        """A module of Django's tasks, or of the package's."""
        return import_module(f"{self.package_name}.{name}")

    def status(self, name: str) -> Any:
        """A member of `TaskResultStatus`."""
        return self.package("base").TaskResultStatus[name]

    def enqueue(self, task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Write the job in the `transaction.atomic` around the call; the result's id is the job's."""
        self.validate_task(task)  # type: ignore[attr-defined]
        result = self._result(task, args, kwargs, status="READY", enqueued_at=timezone.now())
        call = TaskCall(task=task.module_path, args=result.args, kwargs=result.kwargs)
        options: dict[str, Any] = {"priority": task.priority, "run_at": _aware(task.run_after), **self.options}
        options = {name: value for name, value in options.items() if value is not None}
        enqueue: Any = program.enqueue if current().alias is not None else program.app().enqueue_sync
        if KIND not in program.app().kinds:
            raise SetupError(f"the app of RESILIENT['APP'] runs no tasks: {_LISTED}")
        done = enqueue(run_task, call, resource_key=resource_of(task.queue_name), **options)
        object.__setattr__(result, "id", str(done.id))
        self.package("signals").task_enqueued.send(sender=type(self), task_result=result)
        return result

    def get_result(self, result_id: str) -> Any:
        """The task as it stands, read in the transaction around the call. Raises `TaskResultDoesNotExist`."""
        try:
            job, attempts = _read(result_id)
        except (JobNotFound, InvalidInput):
            raise self._missing(result_id) from None
        if job.kind != KIND:
            raise self._missing(result_id)
        task = import_string(job.payload["task"])
        queue = job.resource_key.removeprefix("tasks/")
        task = task.using(priority=job.priority, queue_name=queue, run_after=job.run_at, backend=self.alias)
        ids = [one.worker_id or "" for one in attempts]
        ids += [job.locked_by or ""] * (job.executions - len(ids))
        starts = [one.started_at for one in attempts if one.started_at] + [job.started_at]
        result = self._result(
            task,
            job.payload["args"],
            job.payload["kwargs"],
            id=str(job.id),
            status=_STATES.get(JobState(job.state), "READY"),
            enqueued_at=job.created_at,
            started_at=starts[0],
            last_attempted_at=job.started_at,
            finished_at=job.finished_at,
            errors=[self._error(one) for one in attempts if one.kind is not None],
            worker_ids=ids,
        )
        object.__setattr__(result, "_return_value", job.result)
        return result

    def check(self, **_options: Any) -> Iterable[Any]:
        """For ``manage.py check``: whether tasks would be run."""
        for name in self.options:
            if name not in _OPTIONS:
                yield checks.Error(f"OPTIONS[{name!r}] of TASKS[{self.alias!r}] is not known: it takes max_attempts")
        try:
            is_listed = KIND in program.app().kinds
        except ResilientError as error:
            yield checks.Error(str(error), id="resilient.E001")
            return
        if not is_listed:
            yield checks.Error("the app of RESILIENT['APP'] runs no tasks", hint=_LISTED, id="resilient.E002")

    def _result(self, task: Any, args: Any, kwargs: Any, *, status: str, **values: Any) -> Any:
        absent = dict.fromkeys(("enqueued_at", "started_at", "last_attempted_at", "finished_at"))
        fields = {"id": "", "errors": [], "worker_ids": [], **absent, **values, "status": self.status(status)}
        return self.package("base").TaskResult(
            task=task, args=list(args), kwargs=dict(kwargs), backend=self.alias, **fields
        )

    def _error(self, attempt: AttemptInfo) -> Any:
        text = attempt.traceback or attempt.message or ""
        # Notes and lines of the message follow that of the class, and may look like it.
        paths = [one for one in _EXCEPTION.findall(text) if one.rpartition(".")[2] == attempt.code]
        path = paths[-1] if attempt.traceback and paths else "Exception"
        return self.package("base").TaskError(
            exception_class_path=path if "." in path else f"builtins.{path}", traceback=text
        )

    def _missing(self, result_id: str) -> Exception:
        error: Exception = self.package("exceptions").TaskResultDoesNotExist(result_id)
        return error


def resource_of(queue: str) -> str:
    """The resource key of a queue; a name with a slash is one."""
    return queue if "/" in queue else f"tasks/{queue}"


def _read(job_id: str) -> tuple[JobInfo, list[AttemptInfo]]:
    """A job and its failed executions, oldest first."""
    jobs = program.app().sync.jobs
    alias = current().alias
    if alias is None:
        return jobs.get(job_id), jobs.attempts(job_id)
    with transaction.atomic(alias):
        c = session(alias)
        return jobs.get(job_id, session=c), jobs.attempts(job_id, session=c)


def _aware(time: datetime | None) -> datetime | None:
    return timezone.make_aware(time) if time is not None and timezone.is_naive(time) else time


@cache
def _backend(package: str) -> type[Any]:
    base = import_module(f"{package}.backends.base").BaseTaskBackend
    return type("Backend", (ResilientTasks, base), {"package_name": package, "__module__": __name__})


def __getattr__(name: str) -> Any:
    """`Backend` and `PackageBackend` come when they are used: what they stand on may not be installed."""
    packages = {"Backend": ("django.tasks", "django_tasks"), "PackageBackend": ("django_tasks",)}.get(name)
    if packages is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for package in packages:
        try:
            return _backend(package)
        except ModuleNotFoundError as error:
            if error.name not in packages:
                raise
    raise MissingExtra("tasks need Django 6, or the package: pip install django-tasks")
