"""The two drivers of `flow.exchange`, as httpx transports: one awaits, one works in a thread.

A transport belongs to one execution, its connections to the worker: closing the client closes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from typing import TYPE_CHECKING, Any, Final, TypeVar

import httpx

from resilient.wire.flow import Flow, Read, ReadError, Send, Sleep, exchange
from resilient.wire.guard import GUARDED
from resilient.wire.redact import without_frames

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from resilient.wire.answer import Answer
    from resilient.wire.pool import Pool
    from resilient.wire.trail import Trail

T = TypeVar("T")
if TYPE_CHECKING:
    Bridge = Callable[[Coroutine[Any, Any, T]], T]  # runs a coroutine on the engine's loop, from a thread


class AsyncTransport(httpx.AsyncBaseTransport):
    """Carries an execution's requests over the pool's connections."""

    def __init__(self, trail: Trail, pool: Pool) -> None:
        self._trail, self._pool = trail, pool

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """See `flow.exchange`."""
        outer = sys.exception()
        try:
            answer: Answer = await drive(exchange(self._trail, self._pool.settings, request), self._pool)
        except httpx.HTTPError as error:
            raise without_frames(error, outer)  # noqa: B904 - it is the same one
        return answer


class SyncTransport(httpx.BaseTransport):
    """The same for a handler in a thread; ``bridge`` runs the Conduct's coroutines on the engine's loop."""

    def __init__(self, trail: Trail, pool: Pool, bridge: Bridge[Any]) -> None:
        self._trail, self._pool, self._bridge = trail, pool, bridge

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """See `flow.exchange`."""
        outer = sys.exception()
        try:
            flow = exchange(self._trail, self._pool.settings, request)
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
        with _last_look(step, _look(step)):
            return await pool.for_coroutines.handle_async_request(step.request)
    if kind is Read:
        return await step.answer.aread()
    if kind is ReadError:
        return await _read_error(step.answer)
    if kind is Sleep:
        return await asyncio.sleep(step.seconds)
    return await step


# -- the last look before the first byte -------------------------------------------------------------------------

_FIRST_BYTE: Final = ("http11.send_request_headers.started", "http2.send_request_headers.started")


@contextlib.contextmanager
def _last_look(step: Send, look: Any) -> Iterator[None]:
    """Httpcore says when it is about to write, over a connection that is there: what was set to hear it is kept."""
    extensions = step.request.extensions
    before = extensions.get("trace")
    extensions["trace"] = look
    try:
        yield
    finally:
        if before is None:
            extensions.pop("trace", None)
        else:
            extensions["trace"] = before


def _look(step: Send) -> Callable[[str, Any], Coroutine[Any, Any, None]]:
    before = step.request.extensions.get("trace")

    async def look(event: str, info: Any) -> None:
        if before is not None:
            await before(event, info)
        if event in _FIRST_BYTE and step.conduct.is_late(step.permit):
            await step.conduct.again(step.permit)

    return look


def _look_sync(step: Send, bridge: Bridge[Any]) -> Callable[[str, Any], None]:
    before = step.request.extensions.get("trace")

    def look(event: str, info: Any) -> None:
        if before is not None:
            before(event, info)
        if event in _FIRST_BYTE and step.conduct.is_late(step.permit):
            bridge(step.conduct.again(step.permit))

    return look


# -- reading -----------------------------------------------------------------------------------------------------


async def _read_error(answer: Answer) -> None:
    try:
        async with asyncio.timeout(answer.bounds.error_whole):
            await answer.aread_error()
    except TimeoutError:
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
        with _last_look(step, _look_sync(step, bridge)):
            return transport.handle_request(step.request)
    if kind is Read:
        return step.answer.read()
    if kind is ReadError:
        return _read_error_sync(step)
    if kind is Sleep:
        return time.sleep(step.seconds)
    return bridge(step)


def _read_error_sync(step: ReadError) -> None:
    """A thread cannot be interrupted: shorten the silence httpcore bears, which it reads from the request."""
    extensions = step.request.extensions
    timeout = extensions.get("timeout", {})
    longest = step.answer.bounds.error_whole
    extensions["timeout"] = {**timeout, "read": min(timeout.get("read") or longest, longest)}
    try:
        step.answer.read_error()
    finally:
        extensions["timeout"] = timeout
