"""Traces: the spans of what the engine does, by OpenTelemetry's API and its semantic conventions (`SCHEMA_URL`).

A program that traces has imported the API itself; nothing here imports it before that. Without an SDK there is no
tracer, and every function here returns after one look.

A job's run is *linked* to the span that enqueued it and is no child of it: hours may lie between the two, one span may
enqueue 100,000 jobs, and a job may run several times. So each run is a trace of its own, and no trace stays open for
days. Requests are children of their run.

Traces are sent to other systems, so by default they hold only what is declared in code: kinds, providers, methods,
statuses, kinds of errors. Keys and addresses that customers choose, and texts of errors, which hold such, need
``Tracing(tenants=True)``; secrets are in no trace.
"""

from __future__ import annotations

import json
import os
import re
import sys
from contextlib import nullcontext
from contextvars import ContextVar
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from random import getrandbits, random
from typing import TYPE_CHECKING, Any, Final, Protocol

from resilient.core.base.errors import InvalidInput
from resilient.core.base.misfit import is_number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from types import TracebackType
    from typing import Self
    from uuid import UUID

    from opentelemetry.trace import Tracer, TracerProvider

SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.44.0"
LONGEST: Final = 255  # characters of a tracestate that is kept: an event's attribute holds no more
STATUS_TEXT: Final = 1_000  # characters of why a span failed
_IDLE: Final = frozenset({"ProxyTracerProvider", "NoOpTracerProvider"})  # the API's own: they record nothing
_NOTHING: Final[AbstractContextManager[Any]] = nullcontext()
TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
_SAMPLED: Final = 1  # of the flags at the end of a traceparent
_OURS: Final = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")  # as `_headers` writes it


class Run(Protocol):
    """One run: an execution, or the call that the executions of a batch share."""

    id: UUID  # its job, or the first of those that share the call
    ids: Sequence[UUID]  # of the jobs that share the call
    transaction_open: bool  # of its handler
    unseen: Any  # the span context of a run that `Tracing(share=)` leaves out; made when it is first asked for

    def log_fields(self) -> Mapping[str, Any]:
        """What logs say of it: ``job_id``, ``kind``, ``resource_key`` and ``attempt``."""


running: Final[ContextVar[Run | None]] = ContextVar("resilient_running", default=None)


class _Api:
    """What every span needs of OpenTelemetry's API: an import in a function costs a microsecond each time."""

    def __init__(self) -> None:
        from opentelemetry import context, trace  # noqa: PLC0415 - there is a tracer, so the program has imported it

        self.attach, self.detach, self.nowhere = context.attach, context.detach, context.Context()
        self.within = trace.set_span_in_context
        self.producer, self.consumer, self.client = (
            trace.SpanKind.PRODUCER, trace.SpanKind.CONSUMER, trace.SpanKind.CLIENT,
        )  # fmt: skip
        self.trace = trace
        self.unseen = trace.set_span_in_context(_unseen_of(trace), self.nowhere)


_api: Final = cache(_Api)


def _unseen_of(trace: Any) -> Any:
    """The span of every run that `Tracing(share=)` leaves out.

    Its ids are those of the run that asks for them: a log's record, a request, a span of the handler's own.
    """

    class Unseen(trace.NonRecordingSpan):  # type: ignore[misc] # the API is imported by the program
        def get_span_context(self) -> Any:
            run = running.get()
            if run is None:
                return trace.INVALID_SPAN_CONTEXT
            if run.unseen is None:
                run.unseen = trace.SpanContext(getrandbits(128) or 1, getrandbits(64) or 1, is_remote=False)
            return run.unseen

    return Unseen(trace.INVALID_SPAN_CONTEXT)


def current() -> tuple[str | None, str | None]:
    """``traceparent`` and ``tracestate`` of the program's span (W3C Trace Context); None where there is none."""
    api: Any = sys.modules.get("opentelemetry.trace")
    if api is None:
        return None, None
    return _headers(api.get_current_span().get_span_context())


def _headers(context: Any) -> tuple[str | None, str | None]:
    if not context.is_valid:
        return None, None
    parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
    state = context.trace_state.to_header()
    return parent, state if 0 < len(state) <= LONGEST else None  # without it rather than a transaction that fails


def current_id() -> str | None:
    """The id of the trace that the caller is in."""
    api: Any = sys.modules.get("opentelemetry.trace")
    context = None if api is None else api.get_current_span().get_span_context()
    return f"{context.trace_id:032x}" if context is not None and context.is_valid else None


def forget_current() -> None:
    """Let the caller's context be in no span."""
    if "opentelemetry.trace" in sys.modules:
        from opentelemetry import context, trace  # noqa: PLC0415 - the program has imported it

        context.attach(trace.set_span_in_context(trace.INVALID_SPAN))


class Span:
    """A span that was started; the current one between `enter` and `leave`."""

    __slots__ = ("_span", "_token", "is_recorded")

    def __init__(self, span: Any) -> None:
        self._span = span
        self._token: Any = None
        self.is_recorded: bool = span.is_recording()  # whether anybody will see it: not if it is not sampled

    def enter(self) -> None:
        """Make it the current one."""
        api = _api()
        self._token = api.attach(api.within(self._span))

    def leave(self) -> None:
        """Make the one before the current one again; in the task or thread that entered."""
        if self._token is not None:
            _api().detach(self._token)
            self._token = None

    def note(self, attributes: Mapping[str, Any]) -> None:
        """Set attributes; those that are None are left out."""
        if self._span.is_recording():
            self._span.set_attributes({name: value for name, value in attributes.items() if value is not None})

    def fail(self, error_type: str, text: str = "", traceback: str | None = None, *, name: str | None = None) -> None:
        """Say that it failed. ``text`` and ``traceback`` hold no secrets; ``name`` is the exception's."""
        from opentelemetry.trace import Status, StatusCode  # noqa: PLC0415 - as above

        self._span.set_attribute("error.type", error_type)
        self._span.set_status(Status(StatusCode.ERROR, text[:STATUS_TEXT] or None))
        if text or traceback or name:
            words = {"exception.type": name or error_type, "exception.message": text, "exception.stacktrace": traceback}
            self.event("exception", {key: value for key, value in words.items() if value})

    def event(self, name: str, attributes: Mapping[str, Any]) -> None:
        """Something that happened within it."""
        self._span.add_event(name, attributes)

    def headers(self) -> dict[str, str]:
        """The headers of a request that make the server's part of it belong to this trace."""
        pairs = zip((TRACEPARENT, TRACESTATE), _headers(self._span.get_span_context()), strict=True)
        return {name: value for name, value in pairs if value is not None}

    def end(self) -> None:
        """End it; what comes later changes nothing."""
        if self._span.is_recording():
            self._span.end()


class _BlockSpan(Span):
    """A span that is the current one within its block, and ends with it."""

    __slots__ = ()

    def __enter__(self) -> Self:
        self.enter()
        return self

    def __exit__(
        self, _type: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.leave()
        if error is not None:
            self.fail(type(error).__qualname__)  # its text may hold what was enqueued
        self.end()


class Tracing:
    """Where a program's spans go, and what they may say.

    ``tracer_provider``: by default the program's global one. ``tenants``: resource keys, addresses and texts of
    errors may stand in them too. ``share``: the fraction of the runs of jobs, chosen at random, that have spans at all;
    OpenTelemetry's own sampler costs several microseconds for each span that it drops. ``enabled=False``: no spans, and
    no trace context is kept with jobs. Raises `InvalidInput`.
    """

    def __init__(
        self, tracer_provider: TracerProvider | None = None, *, tenants: bool = False, share: float = 1.0,
        enabled: bool = True,
    ) -> None:  # fmt: skip
        if not is_number(share) or not 0 <= share <= 1:
            raise InvalidInput(f"Tracing(share={share!r}): it is from 0 (no run) to 1 (every run)")
        self.tenants, self.share, self.roll = tenants, share, random
        self._own, self._enabled = tracer_provider, enabled
        self._provider: Any = None
        self._tracer: Tracer | None = None

    def tracer(self) -> Tracer | None:
        """Who starts spans; None while nobody collects them."""
        provider: Any = self._own
        if not self._enabled:
            return None
        if provider is None and (provider := _global_provider()) is None:
            return None
        if provider is not self._provider:
            idle = type(provider).__name__ in _IDLE
            self._tracer = None if idle else provider.get_tracer("resilient", _version(), schema_url=SCHEMA_URL)
            self._provider = provider
        return self._tracer

    def document(self) -> str | None:
        """The caller's trace context as a job's row keeps it, JSON text; None where nobody collects that span."""
        if self.tracer() is None:
            return None
        parent, state = current()
        if parent is None or not int(parent[-2:], 16) & _SAMPLED:  # nobody will see it: there is nothing to link to
            return None
        return json.dumps({TRACEPARENT: parent} | ({} if state is None else {TRACESTATE: state}))

    def enqueue(self, kind: str) -> AbstractContextManager[Span | None]:
        """Around the enqueueing of jobs."""
        return self._produce("enqueue", "send", kind)

    def create(self, event_type: str) -> AbstractContextManager[Span | None]:
        """Around the publishing of an event into the outbox."""
        return self._produce("create", "create", event_type)

    def _produce(self, operation: str, operation_type: str, destination: str) -> AbstractContextManager[Span | None]:
        tracer = self.tracer()
        if tracer is None:
            return _NOTHING
        attributes = _message(operation, operation_type, destination)
        return _BlockSpan(tracer.start_span(f"{operation} {destination}", kind=_api().producer, attributes=attributes))

    def leaves_out(self) -> bool:
        """Whether nobody will see the run that begins, nor what begins within it.

        The caller's context stays so: beyond its run it is in no span.
        """
        if self.share >= 1 or self.tracer() is None or self.roll() < self.share:
            return False
        api = _api()
        api.attach(api.unseen)
        return True

    def process(self, kind: str, traces: Iterable[Any], *, count: int | None = None) -> Span | None:
        """The run of a job, or of a batch of ``count``; linked to what the jobs keep as their ``trace``."""
        tracer = self.tracer()
        if tracer is None:
            return None
        api = _api()
        name, attributes = (
            _run(kind) if count is None else (f"process {kind}", _message("process", "process", kind, count))
        )
        links = _links(traces) if traces else None
        return Span(tracer.start_span(name, context=api.nowhere, kind=api.consumer, links=links, attributes=attributes))

    def send(self, destination: str, trace: Mapping[str, Any]) -> AbstractContextManager[Span | None]:
        """Around the sending of an event to its destination, linked to ``trace``, the context of its publishing."""
        tracer = self.tracer()
        if tracer is None:
            return _NOTHING
        attributes, links = _message("send", "send", destination), _links([trace])
        return _BlockSpan(
            tracer.start_span(f"send {destination}", kind=_api().client, links=links, attributes=attributes)
        )

    def refresh(self, provider: str) -> AbstractContextManager[Span | None]:
        """Around the request for a new token: a trace of its own, because many callers wait for the same one."""
        tracer = self.tracer()
        if tracer is None:
            return _NOTHING
        attributes = {"http.request.method": "POST", "resilient.provider": provider}
        api = _api()
        span = tracer.start_span(f"refresh {provider}", context=api.nowhere, kind=api.client, attributes=attributes)
        return _BlockSpan(span)

    def request(self, method: str, describe: Callable[[], Mapping[str, Any]]) -> Span | None:
        """One sending of a request: a child of the current span. ``describe`` gives its attributes.

        It is called only for a span that somebody collects.
        """
        tracer = self.tracer()
        if tracer is None:
            return None
        parent = _api().trace.get_current_span().get_span_context()
        if parent.is_valid and not parent.trace_flags.sampled:  # few samplers decide otherwise than for its parent
            span = tracer.start_span(method, kind=_api().client)
            if span.is_recording():
                span.set_attributes(describe())
            return Span(span)
        return Span(tracer.start_span(method, kind=_api().client, attributes=describe()))


_NAMED_BY: Final = "OTEL_PYTHON_TRACER_PROVIDER"


def _global_provider() -> Any:
    """The program's provider, None if it has none.

    The API's own function looks into the environment each time, which takes microseconds; so it is
    called only where the environment names a provider, or the API does not keep it as it always has.
    """
    api: Any = sys.modules.get("opentelemetry.trace")
    if api is None:
        return None
    provider = vars(api).get("_TRACER_PROVIDER", api)
    if provider is api or (provider is None and _IS_NAMED):
        look = getattr(api, "get_tracer_provider", None)  # it may be half imported
        return None if look is None else look()
    return provider


_IS_NAMED: Final = _NAMED_BY in os.environ


@lru_cache(maxsize=1_000)
def _message(operation: str, operation_type: str, destination: str, count: int | None = None) -> Mapping[str, Any]:
    """The attributes that such a span begins with; the SDK copies them."""
    attributes: dict[str, Any] = {
        "messaging.system": "resilient",
        "messaging.operation.name": operation,
        "messaging.operation.type": operation_type,
        "messaging.destination.name": destination,
    }
    if count is not None:
        attributes["messaging.batch.message_count"] = count
    return attributes


@lru_cache(maxsize=1_000)
def _run(kind: str) -> tuple[str, Mapping[str, Any]]:
    """The name and the first attributes of the span of a job's run."""
    return f"process {kind}", _message("process", "process", kind)


MOST_LINKS: Final = 128  # what SDKs keep


def _links(traces: Iterable[Any]) -> list[Any]:
    """Links to the trace contexts that rows keep: each once, without those that are none."""
    links: dict[tuple[int, int], Any] = {}
    for one in traces:
        if not isinstance(one, dict) or not isinstance(one.get(TRACEPARENT), str) or len(links) >= MOST_LINKS:
            continue
        context = _context(one[TRACEPARENT], one.get(TRACESTATE))
        if context.is_valid:
            links.setdefault((context.trace_id, context.span_id), _api().trace.Link(context))
    return list(links.values())


def _context(parent: str, state: Any) -> Any:
    """The span context that a row keeps; an invalid one for what is none.

    What we wrote ourselves, without a state, is read here: the API's own reader takes ten times as long.
    """
    trace = _api().trace
    if state is None and (match := _OURS.fullmatch(parent)) is not None:
        number, span, flags = (int(part, 16) for part in match.groups())
        return trace.SpanContext(number, span, is_remote=True, trace_flags=trace.TraceFlags(flags))
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415 - rare

    carrier = {TRACEPARENT: parent} | ({TRACESTATE: state} if isinstance(state, str) else {})
    return trace.get_current_span(TraceContextTextMapPropagator().extract(carrier)).get_span_context()


def _version() -> str:
    try:
        return version("resilient-engine")
    except PackageNotFoundError:  # a copy that was never installed
        return ""


OFF: Final = Tracing(enabled=False)
