"""How requests reach a fake provider: as an ASGI app on a loopback port, or in the same process without one.

The server has a thread and an event loop of its own, so plain and async programs use it alike, and a test that
blocks its own loop does not stop it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol
from urllib.parse import parse_qsl

import httpx

from resilient.core.base.errors import InvalidInput, SetupError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
    from datetime import datetime

    from resilient.core.base.errors import FailureKind

_PATIENCE: Final = 30.0  # seconds a held request waits at most
_TICK: Final = 0.005
_CHUNK: Final = b"x" * 1024
_HALF: Final = 2


class Provider(Protocol):
    """What answers requests: a `FakeProvider`."""

    refusing: bool

    def __call__(self, scope: Any, receive: Any, send: Any) -> Awaitable[None]:
        """Serve one ASGI request."""

    def take(self, method: str, path: str, query: str, headers: Mapping[str, str], body: bytes) -> tuple[Seen, Reply]:
        """Take a request; returns it, and its answer. Call `finish` when that was sent."""

    def holds(self, arrival: Seen) -> bool:
        """Whether the answer to this request has to wait."""

    def headers_of(self, reply: Reply) -> dict[str, str]:
        """All headers of an answer."""

    def finish(self, arrival: Seen) -> None:
        """End an exchange: the answer was sent, or the client is gone."""


class Lost(Exception):
    """Stands for a closed connection where there is none to close."""


async def serve(fake: Provider, scope: Any, receive: Any, send: Any) -> None:
    """Serve one ASGI request."""
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
    arrival, reply = fake.take(scope["method"], path, query, headers, body)
    try:
        await _release(fake, arrival)
        await asyncio.sleep(reply.delay)
        await _send(reply, fake.headers_of(reply), receive, send, head=scope["method"] == "HEAD")
    finally:
        fake.finish(arrival)


async def _release(fake: Provider, arrival: Seen) -> None:
    until = time.monotonic() + _PATIENCE
    while fake.holds(arrival) and time.monotonic() < until:  # noqa: ASYNC110 - the test is in another thread
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
    """Close the connection without uvicorn's help, in the middle of an answer."""
    transport = getattr(getattr(send, "__self__", None), "transport", None)
    if transport is None:
        raise Lost
    transport.abort()


class Server:
    """uvicorn in a thread; `refuse` stops listening and keeps the port."""

    def __init__(self, fake: Provider, port: int = 0) -> None:
        self._fake = fake
        self._socket = _bound(port)
        self.port: int = self._socket.getsockname()[1]
        self._server: Any = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Event | None = None

    def start(self) -> None:
        """Listen; returns once requests are answered."""
        try:
            import uvicorn  # noqa: PLC0415 - of the extra "testing"
        except ImportError as error:
            raise SetupError(
                "a fake provider on a port needs uvicorn: pip install 'resilient-engine[testing]'"
            ) from error
        config = uvicorn.Config(
            self._fake, log_level="critical", access_log=False, lifespan="off", date_header=False,
            server_header=False, proxy_headers=False, timeout_graceful_shutdown=1, timeout_keep_alive=60, ws="none",
            loop="asyncio",
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
        """Serve until `_stop`. uvicorn alone would take 0.2 s to notice it and to end, in each test with a provider."""
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

    def __init__(self, fake: Provider) -> None:
        self._fake = fake

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """One request of a coroutine."""
        body = await request.aread()
        arrival, reply = self._take(request, body)
        try:
            await _release(self._fake, arrival)
            await asyncio.sleep(reply.delay)
            return self._response(request, reply)
        finally:
            self._fake.finish(arrival)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """One request of a thread."""
        arrival, reply = self._take(request, request.read())
        try:
            until = time.monotonic() + _PATIENCE
            while self._fake.holds(arrival) and time.monotonic() < until:
                time.sleep(_TICK)
            time.sleep(reply.delay)
            return self._response(request, reply)
        finally:
            self._fake.finish(arrival)

    def _take(self, request: httpx.Request, body: bytes) -> tuple[Seen, Reply]:
        headers = {name.lower(): value for name, value in request.headers.items()}
        if self._fake.refusing:
            raise httpx.ConnectError("All connection attempts failed", request=request)
        return self._fake.take(request.method, request.url.path, request.url.query.decode(), headers, body)

    def _response(self, request: httpx.Request, reply: Reply) -> httpx.Response:
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


# -- log --------------------------------------------------------------------------------------------------------------
#
# What a fake provider saw: the truth for every count a test makes.

What = Literal["api", "part", "token", "authorize", "revoke"]
JSON = Any


@dataclass(slots=True, kw_only=True)
class Seen:
    """One request. ``path`` is without its query; ``headers`` have lower-case names.

    ``account``: whose credentials it carried, "" if none; ``key``: the resource it draws on; ``cost``: how much.
    ``what``: of the API itself, a ``part`` of a batch, or of OAuth. ``status``: what was answered, None if the
    connection was closed instead; ``kind``: which failure that meant, None for none. ``replayed``: answered out
    of the memory for its idempotency key. ``early``: it came although the provider had said to wait;
    ``over``: it broke a limit. ``below``: its path below that of the base URL.
    """

    at: datetime
    method: str
    path: str
    query: dict[str, str] = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)
    body: bytes = field(repr=False)
    what: What = "api"
    account: str = ""
    key: str = ""
    cost: float = 1.0
    idempotency_key: str | None = None
    status: int | None = None
    kind: FailureKind | None = None
    replayed: bool = False
    early: bool = False
    over: bool = False
    below: str = ""

    @property
    def json(self) -> Any:
        """The body as JSON; None if it is none."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    @property
    def target(self) -> str:
        """As in ``on=``: ``"POST /v1/charges"``."""
        return f"{self.method} {self.path}"


class Log(list[Seen]):
    """Every request, in the order of arrival."""

    def where(self, test: Callable[[Seen], bool] | None = None, /, **fields: Any) -> Log:
        """The requests with these fields: ``fake.log.where(account="acct-7", status=429)``, or that pass a test."""
        for name in fields:
            if not hasattr(Seen, name):
                raise InvalidInput(
                    f"a request of the log has no {name!r}: it has {', '.join(Seen.__dataclass_fields__)}"
                )
        fitting = (one for one in self if all(getattr(one, name) == value for name, value in fields.items()))
        return Log(one for one in fitting if test is None or test(one))

    @property
    def api(self) -> Log:
        """Requests to the API itself, parts of batches included."""
        return Log(one for one in self if one.what in ("api", "part"))

    @property
    def tokens(self) -> Log:
        """Requests to the token endpoint."""
        return self.where(what="token")


@dataclass(slots=True)
class Reply:
    """One answer. ``body``: JSON, or text or bytes as they are; ``delay``: seconds until it is sent.

    ``fault`` instead of a whole answer: ``lost`` (the connection is closed without one), ``cut`` (closed in the
    middle of the body), ``slow`` (a byte at a time, ``pace`` seconds apart), ``endless`` (a body without end),
    ``hang`` (nothing at all until the client gives up).
    """

    status: int = 200
    body: JSON = None
    headers: dict[str, str] = field(default_factory=dict)
    fault: Literal["", "lost", "cut", "slow", "endless", "hang"] = ""
    pace: float = 0.2
    delay: float = 0.0

    def content(self) -> bytes:
        """The body's bytes."""
        if self.body is None:
            return b""
        if isinstance(self.body, bytes):
            return self.body
        return self.body.encode() if isinstance(self.body, str) else json.dumps(self.body).encode()

    @property
    def content_type(self) -> str:
        """What the body is."""
        if isinstance(self.body, (str, bytes)):
            return "text/html; charset=utf-8" if self.content()[:1] == b"<" else "text/plain; charset=utf-8"
        return "application/json"


def query_of(text: str) -> dict[str, str]:
    """Parameters by name; of several the last."""
    return dict(parse_qsl(text, keep_blank_values=True))
