"""Handlers: what a user declares, and nothing more.

A declaration is a value: it registers nowhere, is listed in ``Resilient(handlers=[...])`` and stays callable with a
job, so that a test needs no database. `Kind` declares a kind without its function, for programs that only enqueue.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    Generic,
    Literal,
    TypeAlias,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    overload,
)

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from resilient.core.backoff import Retry
from resilient.core.errors import BadPayload, InvalidInput, SetupError
from resilient.core.misfit import explained, explained_class

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from resilient.core.errors import Cancel, Snooze
    from resilient.engine.batch import Batch, SyncBatch
    from resilient.engine.job import Job, SyncJob

P = TypeVar("P")
R = TypeVar("R")
Mode: TypeAlias = Literal["staged", "atomic"]
Told: TypeAlias = "Snooze | Cancel | None"
_KIND: Final = re.compile(r"[A-Za-z0-9._:@+-]{1,255}")
DEFAULT_TIMEOUT: Final = 300.0
DEFAULT_RETRY: Final = Retry()
BATCHES: Final = range(1, 1001)
_UNTYPED: Final[TypeAdapter[Any]] = TypeAdapter(Any)


def adapter_of(model: Any) -> TypeAdapter[Any]:
    """What checks values of a model. Raises `InvalidInput` for what is no type at all."""
    try:
        return TypeAdapter(model)
    except (PydanticUserError, TypeError, AttributeError, KeyError) as error:
        if isinstance(model, type) or get_origin(model) is not None:  # then pydantic's words are about it
            raise
        raise InvalidInput(
            f"model= takes a pydantic model, a dataclass or any other type, such as dict[str, int]; not the value of a"
            f" {type(model).__name__}"
        ) from error


@explained_class
@dataclass(frozen=True, eq=False)
class Kind(Generic[P]):
    """One kind of job: its name and the shape of its payload.

    ``version`` is stored with every payload; ``upgrade(payload, version)`` turns an older stored payload (decoded JSON)
    into the present shape.
    """

    kind: str
    model: Any = None
    version: int = 1
    upgrade: Callable[[Any, int], Any] | None = None
    max_attempts: int | None = None
    _adapter: TypeAdapter[Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not _KIND.fullmatch(self.kind):
            raise SetupError(
                f"{self.kind!r} is not a handler kind: use letters, digits and ._:@+-, such as 'mail.send'"
            )
        object.__setattr__(self, "_adapter", _UNTYPED if self.model is None else adapter_of(self.model))

    def encode(self, payload: Any) -> str:
        """Check a payload against the model and return it as JSON text; raises `BadPayload`."""
        try:
            checked = payload if self.model is None else self._adapter.validate_python(payload)
            return self._adapter.dump_json(checked).decode()
        except ValidationError as error:
            raise BadPayload(
                f"payload of {self.kind!r} does not fit its model: {self._misfit(payload, error)}"
            ) from None
        except ValueError as error:  # PydanticSerializationError: not JSON
            raise BadPayload(f"payload of {self.kind!r} is not JSON: {error}") from None

    def _misfit(self, payload: Any, error: ValidationError) -> str:
        """What is wrong with a payload; one of another class altogether is named, because its fields say little."""
        within = any(e["loc"] for e in error.errors(include_input=False, include_url=False))
        if within or payload is None or type(payload).__module__ == "builtins" or not isinstance(self.model, type):
            return _brief(error)
        return f"it takes {_named(self.model)}, not {_named(type(payload))}"

    def decode(self, text: str | None, version: int) -> P:
        """A stored payload back as the model; raises `BadPayload`."""
        try:
            if version != self.version and self.upgrade is not None:
                return cast(
                    "P",
                    self._adapter.validate_python(self.upgrade(_UNTYPED.validate_json(text or "null"), version)),
                )
            return cast("P", self._adapter.validate_json(text or "null"))
        except ValidationError as error:
            raise BadPayload(
                f"stored payload (version {version}) does not fit the model of {self.kind!r}: {_brief(error)}"
            ) from None


@explained_class
@dataclass(frozen=True, eq=False)
class Handler(Kind[P], Generic[P, R]):
    """A user's function for one kind of job, and how it is to be run."""

    fn: Callable[[Any], Any] = field(default=lambda _job: None, repr=False)
    retry: Retry = DEFAULT_RETRY
    timeout: float | None = DEFAULT_TIMEOUT  # seconds an execution may take; None: no limit
    reconcile: Callable[[Any], Any] | None = None
    is_async: bool = True
    batch: int | None = None  # how many jobs of one resource a call takes at most; None: one, as a `Job`
    mode: Mode = "staged"
    anonymous: bool = False

    def __call__(self, job: Job[P] | SyncJob[P] | Batch[P] | SyncBatch[P]) -> Any:
        """Run the function itself; that of a batch handler takes a `Batch`."""
        return self.fn(job)


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
        def __call__(self, fn: Callable[[Batch[P]], Awaitable[Told]]) -> Handler[P, Any]: ...
        @overload
        def __call__(self, fn: Callable[[SyncBatch[P]], Told]) -> Handler[P, Any]: ...
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

    Raises `SetupError` for a bad kind, timeout or annotation.
    """
    if timeout is not None and timeout <= 0:
        raise SetupError(f"timeout of handler {kind!r} must be positive seconds or None, not {timeout!r}")
    if batch is not None and batch not in BATCHES:
        raise SetupError(f"batch of handler {kind!r} must be from 1 to {BATCHES[-1]}, not {batch!r}")

    if mode not in get_args(Mode) or (batch is not None and mode != "staged"):
        raise SetupError(
            f'mode of handler {kind!r} must be "staged" or "atomic", and "staged" for a batch, not {mode!r}'
        )

    def declare(fn: Callable[[Any], Any]) -> Handler[Any, Any]:
        return Handler(
            kind=kind,
            model=_model_of(kind, fn, batch=batch is not None, given=model),
            version=version,
            upgrade=upgrade,
            fn=fn,
            retry=retry,
            timeout=timeout,
            reconcile=reconcile,
            anonymous=anonymous,
            is_async=inspect.iscoroutinefunction(fn),
            batch=batch,
            mode=mode,
        )

    return declare


def _model_of(kind: str, fn: Callable[..., Any], *, batch: bool, given: Any) -> Any:
    """``given``, or the ``P`` of ``Job[P]`` in the first parameter's annotation; None where nothing is said."""
    parameters = list(inspect.signature(fn).parameters.values())
    if not parameters:
        raise SetupError(f"handler {kind!r} must take one argument, the job")
    annotation = parameters[0].annotation
    if annotation is inspect.Parameter.empty:
        return given
    try:
        choices = _choices(eval(annotation, _names_of(fn)) if isinstance(annotation, str) else annotation)  # noqa: S307 - the program's own annotation
    except Exception as error:  # noqa: BLE001 - whatever the annotation raises
        if given is not None:
            return given
        raise SetupError(
            f"handler {kind!r}: cannot read the annotation {annotation!r} ({error}); import it at run time or pass"
            " model="
        ) from None
    wrong = [one for one in choices if not _takes_job(one, batch=batch)]
    if len(wrong) == len(choices):
        raise _not_a_job(kind, wrong[0], fn, batch=batch)
    if given is not None:
        return given
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
    from resilient.engine.batch import BaseBatch  # noqa: PLC0415 - job.py needs handlers
    from resilient.engine.job import BaseJob  # noqa: PLC0415

    found = get_origin(annotation) or annotation
    if not isinstance(found, type) or found in (Any, object) or getattr(found, "_is_protocol", False):
        return True  # Any, a type variable, a protocol of the program's own
    return issubclass(found, BaseBatch if batch else BaseJob)


def _not_a_job(kind: str, annotation: Any, fn: Callable[..., Any], *, batch: bool) -> SetupError:
    """What to write instead of an annotation that is the payload's: a handler gets the job."""
    from resilient.engine.batch import BaseBatch  # noqa: PLC0415 - job.py needs handlers
    from resilient.engine.job import BaseJob  # noqa: PLC0415

    found = get_origin(annotation) or annotation
    is_async = inspect.iscoroutinefunction(fn)
    wanted = ("Batch" if is_async else "SyncBatch") if batch else "Job" if is_async else "SyncJob"
    name = annotation.__name__ if annotation is found else str(annotation)
    inner = "..." if issubclass(found, (BaseJob, BaseBatch)) else name
    return SetupError(
        f"handler {kind!r} is called with a {wanted}, and its argument is annotated as {name}: write"
        f" `{wanted}[{inner}]`; the payload of a job is job.payload"
    )


def _names_of(fn: Callable[..., Any]) -> dict[str, Any]:
    """The names an annotation may use: the function's globals, what it closes over, and its definer's locals."""
    from resilient.engine import batch, job  # noqa: PLC0415 - job.py needs handlers

    definer: dict[str, Any] = {}
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    if frame is not None:
        definer = dict(frame.f_locals)
    known = {"Job": job.Job, "SyncJob": job.SyncJob, "Batch": batch.Batch, "SyncBatch": batch.SyncBatch}
    return {**known, **getattr(fn, "__globals__", {}), **definer}


def _named(model: type[Any]) -> str:
    return f"{model.__module__}.{model.__qualname__}".removeprefix("builtins.")


def _brief(error: ValidationError) -> str:
    """The first few problems, by place and rule; never the values (they may be secrets)."""
    first = error.errors(include_input=False, include_url=False)[:3]
    problems = [": ".join(filter(None, (".".join(map(str, e["loc"])), e["msg"]))) for e in first]
    more = error.error_count() - len(problems)
    return "; ".join(problems) + (f" (and {more} more)" if more > 0 else "")


def by_kind(handlers: Any) -> Mapping[str, Handler[Any, Any]]:
    """Handlers by kind; raises `SetupError` for two of one kind or something that is no handler."""
    found: dict[str, Handler[Any, Any]] = {}
    for h in handlers:
        if not isinstance(h, Handler):
            raise SetupError(f"{h!r} is not a handler: decorate it with @handler('some.kind')")
        if h.kind in found:
            raise SetupError(f"two handlers are declared for kind {h.kind!r}: give one another name")
        found[h.kind] = h
    return found
