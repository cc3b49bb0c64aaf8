"""Handlers: what a user declares, and nothing more.

A declaration is a value: it registers nowhere, is listed in ``Resilient(handlers=[...])`` and stays callable with a
job, so that a test needs no database. `Kind` declares a kind without its function, for programs that only enqueue.
"""

from __future__ import annotations

import inspect
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
    overload,
)

from resilient.core.base.errors import SetupError
from resilient.core.base.misfit import explained, is_number, is_whole
from resilient.engine.ground.kinds import DEFAULT_RETRY, DEFAULT_TIMEOUT, Handler, Mode
from resilient.engine.run.job import BaseBatch, BaseJob, Batch, Job, SyncBatch, SyncJob

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from resilient.core.base.errors import Cancel, Snooze
    from resilient.core.jobs.backoff import Retry
    from resilient.core.jobs.records import Redaction

P = TypeVar("P")
R = TypeVar("R")
BatchResult: TypeAlias = "Snooze | Cancel | None"
BATCHES: Final = range(1, 1001)


if TYPE_CHECKING:

    class Declare:
        """What `handler(...)` returns: a decorator for async and plain functions."""

        @overload
        def __call__(self, fn: Callable[[Job[P]], Awaitable[R]]) -> Handler[P, R]: ...
        @overload
        def __call__(self, fn: Callable[[SyncJob[P]], R]) -> Handler[P, R]: ...
        def __call__(self, fn: Any) -> Any:
            """Declare ``fn``."""

    class DeclareBatch:
        """What `handler(..., batch=...)` returns: the same for functions that take a `Batch`."""

        @overload
        def __call__(self, fn: Callable[[Batch[P]], Awaitable[BatchResult]]) -> Handler[P, Any]: ...
        @overload
        def __call__(self, fn: Callable[[SyncBatch[P]], BatchResult]) -> Handler[P, Any]: ...
        def __call__(self, fn: Any) -> Any:
            """Declare ``fn``."""


@overload
def handler(
    kind: str,
    *,
    batch: None = None,
    retry: Retry = ...,
    timeout: float | None = ...,
    model: Any = ...,
    version: int = ...,
    upgrade: Callable[[Any, int], Any] | None = ...,
    reconcile: Callable[[Any], Any] | None = ...,
    mode: Mode = ...,
    anonymous: bool = ...,
    sealed: bool = ...,
    redact: Redaction | None = ...,
) -> Declare: ...
@overload
def handler(
    kind: str,
    *,
    batch: int,
    retry: Retry = ...,
    timeout: float | None = ...,
    model: Any = ...,
    version: int = ...,
    upgrade: Callable[[Any, int], Any] | None = ...,
    reconcile: Callable[[Any], Any] | None = ...,
    anonymous: bool = ...,
    sealed: bool = ...,
    redact: Redaction | None = ...,
) -> DeclareBatch: ...
@explained
def handler(
    kind: str,
    *,
    retry: Retry = DEFAULT_RETRY,
    timeout: float | None = DEFAULT_TIMEOUT,
    model: Any = None,
    version: int = 1,
    upgrade: Callable[[Any, int], Any] | None = None,
    reconcile: Callable[[Any], Any] | None = None,
    batch: int | None = None,
    mode: Mode = "staged",
    anonymous: bool = False,
    sealed: bool = False,
    redact: Redaction | None = None,
) -> Any:
    """Declare a handler: ``async def`` functions take a `Job`, plain ones a `SyncJob` and run in a thread.

    The payload model is read from the annotation (``job: Job[SendMail]``) unless ``model`` is given; an argument that
    is annotated as the payload itself is refused in both cases. ``timeout`` is in seconds. ``reconcile(job)`` is asked
    after a request whose outcome is unknown: it returns True if the request took effect, False if it did not (the job
    runs again), None if nobody can tell (the job is dead, "unknown outcome").

    ``batch``: the function takes up to so many jobs of one resource at once, as a `Batch` or `SyncBatch`; it never
    waits for more to come. ``timeout`` is then for all of them together, ``reconcile`` still for one.

    ``mode``: ``"staged"`` commits what `Job.prepare` wrote before the remote call; ``"atomic"`` is for handlers without
    one, everything from prepare to complete in one transaction.

    ``anonymous``: its requests are sent although its account has no connection; otherwise, where the provider wants
    credentials, its jobs wait until the account is connected.

    ``sealed``: its payloads are stored encrypted, by the keys that credentials are stored under, and opened for the
    handler alone. ``redact`` is what the dashboard and the command line hide of them: field names (``["token"]``),
    paths (``["card.number", "items.*.price"]``) or a function of the payload that returns what is shown.

    Raises `SetupError` for a bad kind, timeout or annotation, `InvalidInput` for a bad ``redact``.
    """
    if callable(kind):
        name = getattr(kind, "__name__", "it")
        raise SetupError(f"@handler takes the kind of its jobs: write @handler('some.kind') above {name}")
    if timeout is not None and not (is_number(timeout) and timeout > 0):
        raise SetupError(f"timeout of handler {kind!r} must be positive seconds or None, not {timeout!r}")
    if batch is not None and not is_whole(batch, most=BATCHES[-1]):
        raise SetupError(f"batch of handler {kind!r} must be from 1 to {BATCHES[-1]}, not {batch!r}")

    if mode not in get_args(Mode) or (batch is not None and mode != "staged"):
        raise SetupError(
            f'mode of handler {kind!r} must be "staged" or "atomic", and "staged" for a batch, not {mode!r}'
        )

    def declare(fn: Callable[[Any], Any]) -> Handler[Any, Any]:
        return Handler(
            kind=kind,
            model=_model_of(kind, fn, batch=batch is not None, model=model),
            version=version,
            upgrade=upgrade,
            fn=fn,
            retry=retry,
            timeout=timeout,
            reconcile=reconcile,
            anonymous=anonymous,
            sealed=sealed,
            redact=redact,
            is_async=inspect.iscoroutinefunction(fn),
            batch=batch,
            mode=mode,
        )

    return declare


def _model_of(kind: str, fn: Callable[..., Any], *, batch: bool, model: Any) -> Any:
    """``model``, or the ``P`` of ``Job[P]`` in the first parameter's annotation; None if neither is there."""
    parameters = list(inspect.signature(fn).parameters.values())
    if not parameters:
        raise SetupError(f"handler {kind!r} must take one argument, the job")
    annotation = parameters[0].annotation
    if annotation is inspect.Parameter.empty:
        return model
    try:
        choices = _choices(eval(annotation, _names_of(fn)) if isinstance(annotation, str) else annotation)  # noqa: S307 - the program's own annotation
    except Exception as error:  # noqa: BLE001 - whatever the annotation raises
        if model is not None:
            return model
        raise SetupError(
            f"handler {kind!r}: cannot read the annotation {annotation!r} ({error}); import it at run time or pass"
            " model="
        ) from None
    wrong = [one for one in choices if not _takes_job(one, batch=batch)]
    if len(wrong) == len(choices):
        raise _not_a_job(kind, wrong[0], fn, batch=batch)
    if model is not None:
        return model
    models = [get_args(one)[0] for one in choices if one not in wrong and get_args(one)]
    return next((one for one in models if not isinstance(one, TypeVar) and one is not Any), None)


def _choices(annotation: Any) -> list[Any]:
    """The types that an annotation allows: the members of a union, without aliases and `Annotated`."""
    if not isinstance(annotation, type) and hasattr(annotation, "__value__"):  # ``type Alias = ...`` of Python 3.12
        return _choices(annotation.__value__)
    if get_origin(annotation) is Annotated:
        return _choices(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [choice for one in get_args(annotation) for choice in _choices(one)]
    return [annotation]


def _takes_job(annotation: Any, *, batch: bool) -> bool:
    """Whether an argument of this type may be a job, or the batch of a batch handler."""
    cls = get_origin(annotation) or annotation
    if not isinstance(cls, type) or cls in (Any, object) or getattr(cls, "_is_protocol", False):
        return True  # Any, a type variable, a protocol of the program's own
    return issubclass(cls, BaseBatch if batch else BaseJob)


def _not_a_job(kind: str, annotation: Any, fn: Callable[..., Any], *, batch: bool) -> SetupError:
    """The error for an argument that is annotated as the payload: a handler gets the job."""
    cls = get_origin(annotation) or annotation
    is_async = inspect.iscoroutinefunction(fn)
    job_type = ("Batch" if is_async else "SyncBatch") if batch else "Job" if is_async else "SyncJob"
    name = annotation.__name__ if annotation is cls else str(annotation)
    inner = "..." if issubclass(cls, (BaseJob, BaseBatch)) else name
    return SetupError(
        f"handler {kind!r} is called with a {job_type}, and its argument is annotated as {name}: write"
        f" `{job_type}[{inner}]`; the payload of a job is job.payload"
    )


def _names_of(fn: Callable[..., Any]) -> dict[str, Any]:
    """The names an annotation may use: the function's globals, what it closes over, and its definer's locals."""
    definer: dict[str, Any] = {}
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    if frame is not None:
        definer = dict(frame.f_locals)
    own = {"Job": Job, "SyncJob": SyncJob, "Batch": Batch, "SyncBatch": SyncBatch}
    return {**own, **getattr(fn, "__globals__", {}), **definer}
