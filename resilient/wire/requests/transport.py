"""The two drivers of `flow.exchange`, as httpx transports: one awaits, one works in a thread.

A transport belongs to one execution, its connections to the worker: closing the client closes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import httpx

from resilient.core.base.frames import without_frames
from resilient.wire.requests.flow import Close, Flow, Read, ReadError, Send, Sleep, exchange
from resilient.wire.requests.guard import GUARDED

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from resilient.wire.requests.answer import Answer
    from resilient.wire.requests.hooks import Permit, RequestHooks
    from resilient.wire.requests.pool import Pool
    from resilient.wire.requests.request_log import RequestLog

T = TypeVar("T")
if TYPE_CHECKING:
    Bridge = Callable[[Coroutine[Any, Any, T]], T]  # runs a coroutine on the engine's loop, from a thread


class AsyncTransport(httpx.AsyncBaseTransport):
    """Carries an execution's requests over the pool's connections."""

    def __init__(self, request_log: RequestLog, pool: Pool) -> None:
        self._request_log, self._pool = request_log, pool

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """See `flow.exchange`."""
        outer = sys.exception()
        try:
            answer: Answer = await drive(exchange(self._request_log, self._pool.settings, request), self._pool)
        except httpx.HTTPError as error:
            raise without_frames(error, outer)  # noqa: B904 - it is the same one
        return answer


class SyncTransport(httpx.BaseTransport):
    """The same for a handler in a thread; ``bridge`` runs the coroutines of the `RequestHooks` on the engine's loop."""

    def __init__(self, request_log: RequestLog, pool: Pool, bridge: Bridge[Any]) -> None:
        self._request_log, self._pool, self._bridge = request_log, pool, bridge

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """See `flow.exchange`."""
        outer = sys.exception()
        try:
            flow = exchange(self._request_log, self._pool.settings, request)
            answer: Answer = drive_sync(flow, self._pool, self._bridge)
        except httpx.HTTPError as error:
            raise without_frames(error, outer)  # noqa: B904 - it is the same one
        return answer


async def drive(flow: Flow, pool: Pool | None = None) -> Any:
    """Carry out a flow's steps in a coroutine."""
    try:
        step = next(flow)
        while True:
            try:
                result = await _step(step, pool)
            except BaseException as error:  # noqa: BLE001 - also a cancellation: the flow has to know
                step = flow.throw(error)
            else:
                step = flow.send(result)
    except StopIteration as stop:
        return stop.value


async def _step(step: Any, pool: Pool | None) -> Any:
    kind = type(step)
    if kind is Send and pool is not None:
        return await _send(step, pool.for_coroutines)
    if kind is Read:
        return await step.answer.aread()
    if kind is ReadError:
        return await _read_error(step.answer)
    if kind is Close:
        return await _close(step.answer)
    if kind is Sleep:
        return await asyncio.sleep(step.seconds)
    return await step


# -- the last look before the first byte -------------------------------------------------------------------------

_FIRST_BYTE: Final = ("http11.send_request_headers.started", "http2.send_request_headers.started")


async def _send(step: Send, transport: Any) -> httpx.Response:
    send = getattr(transport, "send", None)
    if send is None:  # httpx's: there is a proxy
        with _with_trace(step, _trace(step)):
            response: httpx.Response = await transport.handle_async_request(step.request)
    else:
        response = await send(step.request, partial(_look, step.hooks, step.permit))
    return response


def _look(hooks: RequestHooks, permit: Permit) -> Coroutine[Any, Any, None] | None:
    return _again(hooks, permit) if hooks.is_late(permit) else None


async def _again(hooks: RequestHooks, permit: Permit) -> None:
    """Draw and look once more; the time that this waits is not counted as the request's."""
    await hooks.again(permit)
    permit.sent_at = time.perf_counter()


@contextlib.contextmanager
def _with_trace(step: Send, trace: Any) -> Iterator[None]:
    """Set the trace by which httpcore says when it is about to write; the caller's own is put back at the end."""
    extensions = step.request.extensions
    before = extensions.get("trace")
    extensions["trace"] = trace
    try:
        yield
    finally:
        if before is None:
            extensions.pop("trace", None)
        else:
            extensions["trace"] = before


def _trace(step: Send) -> Callable[[str, Any], Coroutine[Any, Any, None]]:
    before = step.request.extensions.get("trace")

    async def trace(event: str, info: Any) -> None:
        if before is not None:
            await before(event, info)
        if event in _FIRST_BYTE and step.hooks.is_late(step.permit):
            await _again(step.hooks, step.permit)

    return trace


def _trace_sync(step: Send, bridge: Bridge[Any]) -> Callable[[str, Any], None]:
    before = step.request.extensions.get("trace")

    def trace(event: str, info: Any) -> None:
        if before is not None:
            before(event, info)
        if event in _FIRST_BYTE and step.hooks.is_late(step.permit):
            bridge(_again(step.hooks, step.permit))

    return trace


# -- reading -----------------------------------------------------------------------------------------------------


async def _read_error(answer: Answer) -> None:
    try:
        async with asyncio.timeout(answer.bounds.error_whole):
            await answer.aread_error()
    except TimeoutError:
        await answer.aclose()


async def _close(answer: Answer) -> None:
    with contextlib.suppress(httpx.HTTPError):  # nobody gets this answer, so nobody its error
        await answer.aclose()


def drive_sync(flow: Flow, pool: Pool | None, bridge: Bridge[Any]) -> Any:
    """Carry out a flow's steps in a thread."""
    try:
        step = next(flow)
        while True:
            try:
                result = _step_sync(step, pool, bridge)
            except BaseException as error:  # noqa: BLE001 - the flow has to know
                step = flow.throw(error)
            else:
                step = flow.send(result)
    except StopIteration as stop:
        return stop.value


def _step_sync(step: Any, pool: Pool | None, bridge: Bridge[Any]) -> Any:
    kind = type(step)
    if kind is Send and pool is not None:
        guarded = GUARDED in step.request.extensions
        transport = pool.guarded_for_threads if guarded else pool.for_threads
        with _with_trace(step, _trace_sync(step, bridge)):
            return transport.handle_request(step.request)
    if kind is Read:
        return step.answer.read()
    if kind is ReadError:
        return _read_error_sync(step)
    if kind is Close:
        return _close_sync(step.answer)
    if kind is Sleep:
        return time.sleep(step.seconds)
    return bridge(step)


def _read_error_sync(step: ReadError) -> None:
    """A thread cannot be interrupted, so httpcore's read timeout, which it takes from the request, is shortened."""
    extensions = step.request.extensions
    timeout = extensions.get("timeout", {})
    longest = step.answer.bounds.error_whole
    extensions["timeout"] = {**timeout, "read": min(timeout.get("read") or longest, longest)}
    try:
        step.answer.read_error()
    finally:
        extensions["timeout"] = timeout


def _close_sync(answer: Answer) -> None:
    with contextlib.suppress(httpx.HTTPError):
        answer.close()
