"""How requests reach a fake provider: as an ASGI app on a loopback port, or in the same process without one.

The server has a thread and an event loop of its own, so plain and async programs use it alike, and a test that
blocks its own loop does not stop it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, Final

import httpx

from resilient.core.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from resilient.testing.fake.log import Reply, Seen
    from resilient.testing.fake.provider import FakeProvider

_PATIENCE: Final = 30.0  # seconds a held request waits at most
_TICK: Final = 0.005
_CHUNK: Final = b"x" * 1024
_HALF: Final = 2


class Lost(Exception):
    """The connection is to be closed without a (whole) answer, where nothing can be closed."""


async def serve(fake: FakeProvider, scope: Any, receive: Any, send: Any) -> None:
    """One ASGI request."""
    if scope["type"] != "http":
        return
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
    path, query = scope["path"], scope["query_string"].decode()
    seen, reply = fake.take(scope["method"], path, query, headers, body)
    try:
        await _held(fake, seen)
        await _send(reply, fake.headers_of(reply), receive, send, head=scope["method"] == "HEAD")
    finally:
        fake.finish(seen)


async def _held(fake: FakeProvider, seen: Seen) -> None:
    until = time.monotonic() + _PATIENCE
    while fake.holds(seen) and time.monotonic() < until:  # noqa: ASYNC110 - the test is in another thread
        await asyncio.sleep(_TICK)


async def _send(reply: Reply, headers: dict[str, str], receive: Any, send: Any, *, head: bool) -> None:
    content = b"" if head else reply.content()
    if reply.fault == "lost":
        _cut(send)
        return
    if reply.fault == "hang":
        while (await receive())["type"] != "http.disconnect":
            pass
        return
    length = {} if reply.fault == "endless" or reply.status in (204, 304) else {"content-length": str(len(content))}
    raw = [(name.encode(), value.encode("latin-1")) for name, value in {**headers, **length}.items()]
    await send({"type": "http.response.start", "status": reply.status, "headers": raw})
    if reply.fault == "cut":
        await send({"type": "http.response.body", "body": content[: len(content) // _HALF], "more_body": True})
        _cut(send)
    elif reply.fault == "endless":
        gone = asyncio.ensure_future(receive())
        while not gone.done():
            await send({"type": "http.response.body", "body": _CHUNK, "more_body": True})
            await asyncio.sleep(_TICK)
    elif reply.fault == "slow":
        for at in range(len(content)):
            await send({"type": "http.response.body", "body": content[at : at + 1], "more_body": True})
            await asyncio.sleep(reply.pace)
        await send({"type": "http.response.body", "body": b""})
    else:
        await send({"type": "http.response.body", "body": content})


def _cut(send: Any) -> None:
    """Close the connection under uvicorn's feet."""
    transport = getattr(getattr(send, "__self__", None), "transport", None)
    if transport is None:
        raise Lost
    transport.abort()


class Server:
    """uvicorn in a thread. ``refusing``: nobody listens, but the port stays ours."""

    def __init__(self, fake: FakeProvider, port: int = 0) -> None:
        self._fake = fake
        self._socket = _bound(port)
        self.port: int = self._socket.getsockname()[1]
        self._server: Any = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Event | None = None

    def start(self) -> None:
        """Listen."""
        try:
            import uvicorn  # noqa: PLC0415 - of the extra "testing"
        except ImportError as error:
            raise SetupError(
                "a fake provider on a port needs uvicorn: pip install 'resilient-engine[testing]'"
            ) from error
        config = uvicorn.Config(
            self._fake, log_level="critical", access_log=False, lifespan="off", date_header=False,
            server_header=False, proxy_headers=False, timeout_graceful_shutdown=1, ws="none", loop="asyncio",
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._socket.listen(512)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="fake-provider", daemon=True)
        self._thread.start()
        until = time.monotonic() + _PATIENCE
        while not self._server.started:
            if time.monotonic() > until or not self._thread.is_alive():
                raise SetupError("the fake provider did not start")
            time.sleep(_TICK)

    async def _serve(self) -> None:
        """Until the end is near. uvicorn itself would take 0.2 s to notice and to go, in each test with a provider."""
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        await asyncio.wait([serving, ended := asyncio.create_task(self._end.wait())], return_when="FIRST_COMPLETED")
        for task in (serving, ended):
            task.cancel()
        await asyncio.wait([serving, ended])
        for listening in self._server.servers:
            listening.close()
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()

    def refuse(self) -> None:
        """Stop listening, cut what is open, and keep the port."""
        self._stop()
        self._socket = _bound(self.port)

    def close(self) -> None:
        """Stop."""
        self._stop()
        self._socket.close()

    def _stop(self) -> None:
        if self._thread is not None:
            if self._loop is not None and self._end is not None:
                with contextlib.suppress(RuntimeError):  # it has ended
                    self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join(_PATIENCE)
            self._thread = None
        self._socket.close()


def _bound(port: int) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind(("127.0.0.1", port))
    except (OSError, OverflowError) as error:
        made.close()
        raise SetupError(
            f"a fake provider cannot have port {port}: {error}; port=True takes one that is free"
        ) from None
    return made


class Transport(httpx.AsyncBaseTransport, httpx.BaseTransport):
    """An httpx transport to a fake provider in this process, for both kinds of client."""

    def __init__(self, fake: FakeProvider) -> None:
        self._fake = fake

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """One request of a coroutine."""
        body = await request.aread()
        seen, reply = self._take(request, body)
        try:
            await _held(self._fake, seen)
            return self._given(request, reply)
        finally:
            self._fake.finish(seen)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """One request of a thread."""
        seen, reply = self._take(request, request.read())
        try:
            until = time.monotonic() + _PATIENCE
            while self._fake.holds(seen) and time.monotonic() < until:
                time.sleep(_TICK)
            return self._given(request, reply)
        finally:
            self._fake.finish(seen)

    def _take(self, request: httpx.Request, body: bytes) -> tuple[Seen, Reply]:
        headers = {name.lower(): value for name, value in request.headers.items()}
        if self._fake.refusing:
            raise httpx.ConnectError("All connection attempts failed", request=request)
        return self._fake.take(request.method, request.url.path, request.url.query.decode(), headers, body)

    def _given(self, request: httpx.Request, reply: Reply) -> httpx.Response:
        if reply.fault == "lost":
            raise httpx.RemoteProtocolError("Server disconnected without sending a response.", request=request)
        if reply.fault == "hang":
            raise httpx.ReadTimeout("", request=request)
        headers, content = self._fake.headers_of(reply), reply.content()
        if reply.fault in ("cut", "endless"):
            return httpx.Response(reply.status, headers=headers, stream=_Broken(reply, request), request=request)
        return httpx.Response(reply.status, headers=headers, content=content, request=request)


class _Broken(httpx.AsyncByteStream, httpx.SyncByteStream):
    """A body that is cut, or never ends."""

    def __init__(self, reply: Reply, request: httpx.Request) -> None:
        self._reply, self._request = reply, request

    def __iter__(self) -> Iterator[bytes]:
        if self._reply.fault == "cut":
            content = self._reply.content()
            yield content[: len(content) // _HALF]
            raise httpx.RemoteProtocolError("peer closed connection", request=self._request)
        while True:
            yield _CHUNK

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self:
            yield chunk
