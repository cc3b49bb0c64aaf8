"""HTTP/1.1 connections for coroutines, kept per origin, last used first.

httpcore's own pool looks at every connection for every request, and for every idle one at all others: with 100
connections that is most of a request's CPU time (3.5 ms instead of 1 ms). Here a request takes the connection on top of
its origin's stack and puts it back; nothing else is looked at. The connections themselves are httpcore's, the errors
httpx's. A coroutine that has to wait for one waits in line; `httpx.PoolTimeout` ends that.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Any, Final, cast

import httpcore
import httpx

from resilient.wire.guard import GUARDED, PublicNetwork
from resilient.wire.surplus import surplus

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterable, AsyncIterator

    from resilient.wire.pool import PoolSettings

Origin = tuple[bytes, bytes, int | None, bool]  # the last: whether its host was chosen by an account
Connection = httpcore.AsyncHTTPConnection


class Connections(httpx.AsyncBaseTransport):
    """The open connections of one event loop."""

    def __init__(self, settings: PoolSettings, context: ssl.SSLContext) -> None:
        self._settings, self._context = settings, context
        self._stacks: dict[Origin, deque[Connection]] = {}
        self._resting: OrderedDict[Connection, tuple[Origin, float]] = OrderedDict()  # since when, oldest first
        self._open = 0  # resting and in use
        self._line: deque[asyncio.Future[None]] = deque()
        self._sweeper: asyncio.TimerHandle | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request. Raises httpx's errors; after any of them the connection is gone."""
        url = request.url
        origin = (url.raw_scheme, url.raw_host, url.port, GUARDED in request.extensions)
        target = httpcore.URL(scheme=origin[0], host=origin[1], port=origin[2], target=url.raw_path)
        if origin[0] not in (b"http", b"https"):
            raise httpx.UnsupportedProtocol(f"{url.scheme!r} is not HTTP: write a URL that begins with https://")
        sent = httpcore.Request(
            request.method, target, headers=request.headers.raw, content=request.stream, extensions=request.extensions
        )
        patience = request.extensions.get("timeout", {}).get("pool")
        while True:
            connection = self._take(origin, target) or await self._wait(origin, target, patience)
            try:
                answer = await connection.handle_async_request(sent)
            except httpcore.ConnectionNotAvailable:  # it was closed while it rested: nothing was sent
                self._give_back(origin, connection)
            except BaseException as error:
                self._give_back(origin, connection)
                _raise_as_httpx(error)
                raise
            else:
                break
        body = _Body(self, origin, connection, answer)
        return httpx.Response(answer.status, headers=answer.headers, stream=body, extensions=answer.extensions)

    # -- taking and giving back ------------------------------------------------------------------------------

    def _take(self, origin: Origin, url: httpcore.URL) -> Connection | None:
        """A connection for one request, resting or new; None if all are in use."""
        stack = self._stacks.get(origin)
        while stack:
            connection = stack.pop()
            del self._resting[connection]
            if not connection.has_expired():
                return connection
            self._drop(connection)
        if self._open >= self._settings.connections and self._resting:
            self._drop_oldest()
        if self._open >= self._settings.connections:
            return None
        self._open += 1
        return Connection(
            url.origin, ssl_context=self._context, keepalive_expiry=self._settings.idle_for,
            network_backend=PublicNetwork() if origin[3] else None,
        )  # fmt: skip

    async def _wait(self, origin: Origin, url: httpcore.URL, patience: float | None) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(patience):
                while True:
                    turn: asyncio.Future[None] = loop.create_future()
                    self._line.append(turn)
                    try:
                        await turn
                    except BaseException:
                        if turn in self._line:
                            self._line.remove(turn)
                        elif turn.done() and not turn.cancelled():
                            self._next()  # woken and interrupted at once: the turn is somebody else's
                        raise
                    if (connection := self._take(origin, url)) is not None:
                        return connection
        except TimeoutError:
            raise httpx.PoolTimeout(
                f"none of {self._settings.connections} connections was free for {patience:g} s"
            ) from None

    def _next(self) -> None:
        while self._line:
            turn = self._line.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    def _give_back(self, origin: Origin, connection: Connection) -> None:
        """The request is over: keep the connection if it can serve another."""
        usable = connection.is_idle() and not connection.is_closed() and not surplus(connection)
        if not usable or self._closed or len(self._resting) >= self._settings.idle:
            self._drop(connection)
        else:
            loop = asyncio.get_running_loop()
            self._stacks.setdefault(origin, deque()).append(connection)
            self._resting[connection] = origin, loop.time()
            if self._sweeper is None:
                self._sweeper = loop.call_later(self._settings.idle_for, self._sweep)
        self._next()

    def _drop_oldest(self) -> None:
        connection, (origin, _) = self._resting.popitem(last=False)
        self._stacks[origin].popleft()  # the bottom of a stack rests longest
        if not self._stacks[origin]:
            del self._stacks[origin]
        self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        self._open -= 1
        if not connection.is_closed():
            task = asyncio.get_running_loop().create_task(_close(connection))
            self._closing.add(task)  # the loop keeps no strong reference
            task.add_done_callback(self._closing.discard)

    def _sweep(self) -> None:
        """Close what has rested too long; the timer runs only while something rests."""
        loop = asyncio.get_running_loop()
        self._sweeper = None
        while self._resting:
            since = next(iter(self._resting.values()))[1]
            left = since + self._settings.idle_for - loop.time()
            if left > 0:
                self._sweeper = loop.call_later(left, self._sweep)
                return
            self._drop_oldest()

    async def aclose(self) -> None:
        """Close what rests now, and what is in use when it comes back."""
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        while self._resting:
            self._drop_oldest()
        if self._closing:
            await asyncio.gather(*self._closing, return_exceptions=True)


class _Body(httpx.AsyncByteStream):
    """An answer's body; its end gives the connection back."""

    __slots__ = ("_answer", "_connection", "_origin", "_owner")

    def __init__(self, owner: Connections, origin: Origin, connection: Connection, answer: httpcore.Response) -> None:
        self._owner: Connections | None = owner
        self._origin, self._connection, self._answer = origin, connection, answer

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for part in cast("AsyncIterable[bytes]", self._answer.stream):
                yield part
        except BaseException as error:
            self._release()  # httpcore has closed the connection
            _raise_as_httpx(error)
            raise

    async def aclose(self) -> None:
        if self._owner is None:
            return
        try:
            await cast("Any", self._answer.stream).aclose()
        except Exception as error:
            _raise_as_httpx(error)
            raise
        finally:
            self._release()

    def _release(self) -> None:
        owner, self._owner = self._owner, None
        if owner is not None:
            owner._give_back(self._origin, self._connection)  # noqa: SLF001 - one mechanism in two classes


async def _close(connection: Connection) -> None:
    with contextlib.suppress(Exception):  # it is gone either way
        await connection.aclose()


_HTTPX: Final = {
    getattr(httpcore, name): getattr(httpx, name)
    for name in httpcore.__all__
    if isinstance(getattr(httpcore, name), type)
    and issubclass(getattr(httpcore, name), Exception)
    and issubclass(getattr(httpx, name, object), httpx.TransportError)
}  # their errors have the same names


def _raise_as_httpx(error: BaseException) -> None:
    """Raise httpx's error for one of httpcore's; do nothing for any other."""
    for cls in type(error).__mro__:
        if cls in _HTTPX:
            raise _HTTPX[cls](str(error)) from error
