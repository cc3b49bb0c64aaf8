"""One HTTP/1.1 connection of coroutines: h11, a stream, and nothing between.

h11 decides what an answer is, where it ends, and whether another request may follow; here is only what is sent and
read. The pool gives a connection to one request at a time, so it needs no locks. Of a request whose body is
in memory, head and body are one write. httpcore's own connection over anyio took twice the CPU time of h11 and the
socket together: locks, a scope for each read, a trace of each phase.
"""

from __future__ import annotations

import asyncio
import select
import socket
import ssl
import time
from collections import deque
from contextlib import nullcontext
from contextvars import Context
from typing import TYPE_CHECKING, Any, Final, Self, cast

import h11
import httpcore
import httpx
from aiohappyeyeballs import start_connection

from resilient.core.base.hosts import is_address
from resilient.wire.requests import redact

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

    Look = Callable[[], Awaitable[None] | None]  # before the first byte: what to wait for, if anything

_AT_ONCE: Final = 64 * 1024  # bytes that are read at once
_LONGEST_HEAD: Final = 100 * 1024
_SWITCHING: Final = 101
_SUCCESS: Final = range(200, 300)
_DEFAULT_PORTS: Final = {b"http": 80, b"https": 443}
_ENDED: Final = "the connection ended, or something came, before a byte was sent"


class Connection:
    """New, in use, at rest (`is_idle`), closed. Raises httpcore's errors; after any of them it is closed."""

    def __init__(
        self,
        address: tuple[bytes, bytes, int | None],
        context: ssl.SSLContext,
        network: httpcore.AsyncNetworkBackend,
        idle_for: float,
    ) -> None:
        """``address``: scheme, host, port."""
        self._address, self._context, self._network, self._idle_for = address, context, network, idle_for
        self._h11 = h11.Connection(h11.CLIENT, max_incomplete_event_size=_LONGEST_HEAD)
        self._stream: Any = None
        self._resting_until: float | None = None  # None: in use, or new
        self._closed = False

    # -- a request -----------------------------------------------------------------------------------------------

    async def send(
        self, request: httpx.Request, body: httpx.AsyncByteStream, look: Look | None = None
    ) -> httpx.Response:
        """Send ``request`` and read the head of its answer, whose stream, ``body``, asks for `body` and then `end`s."""
        self._resting_until = None
        try:
            is_new = self._stream is None
            if is_new:
                await self._connect(request)
            first = self._first(request)  # before the look: between that and the first byte no time should pass
            if look is not None and (wait := look()) is not None:
                await wait
                if not is_new:
                    self._refuse_surplus()
            self._refuse_end()
            times = request.extensions.get("timeout", _NO_TIMES)
            if _is_watched(request):
                head = await self._traced(request, first, times)
            else:
                await self._write(request, first, times.get("write"))
                head = await self._head(times.get("read"))
            extensions = {
                "http_version": b"HTTP/" + head.http_version, "reason_phrase": head.reason,
                "network_stream": self._switched(request, head.status_code),
            }  # fmt: skip
            return httpx.Response(
                head.status_code, headers=head.headers.raw_items(), stream=body, extensions=extensions
            )
        except BaseException:
            self.close()
            raise

    def _refuse_end(self) -> None:
        """Raise if it ended before a byte was sent, without a word: the request has done nothing."""
        if self._stream.is_over:
            raise httpcore.ConnectError(_ENDED)

    def _refuse_surplus(self) -> None:
        """Raise if it ended, or something came, while the request waited: it would be taken for its answer."""
        if self._stream.get_extra_info("is_readable"):
            raise httpcore.ConnectError(_ENDED)

    def _first(self, request: httpx.Request) -> bytes:
        """What is written first: the head, and the body where it is here already."""
        try:
            buffer = self._start(request)
            if isinstance(request.stream, httpx.ByteStream):
                for part in request.stream:
                    buffer += self._h11.send(h11.Data(part)) or b""
                buffer += self._h11.send(h11.EndOfMessage()) or b""
        except h11.LocalProtocolError as error:
            raise httpcore.LocalProtocolError(str(error)) from error
        return buffer

    async def _write(self, request: httpx.Request, first: bytes, seconds: float | None) -> None:
        try:
            await self._stream.write(first, seconds)
            if not isinstance(request.stream, httpx.ByteStream):
                await self._write_parts(request, seconds)
        except h11.LocalProtocolError as error:
            raise httpcore.LocalProtocolError(str(error)) from error
        except httpcore.WriteError:
            pass  # a server may answer, and hang up, before it has read all

    def _start(self, request: httpx.Request) -> bytes:
        """The head of a request, as it is sent."""
        target = request.extensions.get("target", request.url.raw_path)
        try:
            head = h11.Request(method=request.method, target=target, headers=request.headers.raw)
        except h11.LocalProtocolError as error:
            raise httpcore.LocalProtocolError(without_value(str(error), request.headers.raw)) from None
        return self._h11.send(head) or b""

    async def _write_parts(self, request: httpx.Request, seconds: float | None) -> None:
        async for part in request.stream:  # type: ignore[union-attr]  # an AsyncClient sends no other
            await self._stream.write(self._h11.send(h11.Data(part)) or b"", seconds)
        await self._stream.write(self._h11.send(h11.EndOfMessage()) or b"", seconds)

    async def _head(self, seconds: float | None) -> h11.Response | h11.InformationalResponse:
        while True:
            event = await self._event(seconds)
            if isinstance(event, h11.Response):
                return event
            if isinstance(event, h11.InformationalResponse) and event.status_code == _SWITCHING:
                return event

    async def _event(self, seconds: float | None) -> Any:
        """The next thing that the server says."""
        h = self._h11
        try:
            while (event := h.next_event()) is h11.NEED_DATA:
                data = await self._stream.read(_AT_ONCE, seconds)
                if not data and h.their_state is h11.SEND_RESPONSE:
                    raise httpcore.RemoteProtocolError("Server disconnected without sending a response.")
                h.receive_data(data)
        except h11.RemoteProtocolError as error:
            raise httpcore.RemoteProtocolError(str(error)) from error
        return event

    async def body(self, request: httpx.Request) -> AsyncIterator[bytes]:
        """The answer's body, as it comes."""
        seconds = request.extensions.get("timeout", _NO_TIMES).get("read")
        report = _Event(request, "http11", "receive_response_body") if _is_watched(request) else nullcontext()
        del request  # an error tracker would show it, with its secrets
        async with report:
            while isinstance(event := await self._event(seconds), h11.Data):
                yield bytes(event.data)

    def end(self) -> None:
        """The answer is read, or nobody wants the rest: rest, or close if anything is open still."""
        h = self._h11
        if self._closed:
            return
        if h.our_state is h11.DONE and h.their_state is h11.DONE:
            h.start_next_cycle()
            self._resting_until = time.monotonic() + self._idle_for
        else:
            self.close()

    def _switched(self, request: httpx.Request, status: int) -> Any:
        """The stream for whoever speaks another protocol from now on."""
        stream = self._stream
        if status == _SWITCHING or (request.method == "CONNECT" and status in _SUCCESS):
            stream.put_back(self._h11.trailing_data[0])
        return stream

    # -- connecting ----------------------------------------------------------------------------------------------

    async def _connect(self, request: httpx.Request) -> None:
        scheme, raw, port = self._address
        host, seconds = raw.decode("ascii"), request.extensions.get("timeout", _NO_TIMES).get("connect")
        port = port or _DEFAULT_PORTS[scheme]
        info = {"host": host, "port": port, "local_address": None, "timeout": seconds, "socket_options": None}
        async with _Event(request, "connection", "connect_tcp", info) as event:
            self._stream = event.value = await self._network.connect_tcp(host, port, seconds)
        if scheme != b"https":
            return
        self._context.set_alpn_protocols(["http/1.1"])
        name = request.extensions.get("sni_hostname") or host
        info = {"ssl_context": self._context, "server_hostname": name, "timeout": seconds}
        async with _Event(request, "connection", "start_tls", info) as event:
            event.value = await self._stream.start_tls(self._context, name, seconds)

    # -- for the pool --------------------------------------------------------------------------------------------

    def is_idle(self) -> bool:
        """Whether it rests."""
        return self._resting_until is not None

    def is_closed(self) -> bool:
        """Whether it is closed."""
        return self._closed

    def has_expired(self) -> bool:
        """Whether it has rested too long, or something came that nobody asked for: its end, or worse."""
        if self._resting_until is None:
            return self._closed
        return time.monotonic() > self._resting_until or self._stream.get_extra_info("is_readable")

    def has_surplus(self) -> bool:
        """Whether there are bytes behind the end of the answer: see `resilient.wire.requests.pool`."""
        return bool(self._h11.trailing_data[0]) or self._stream.unread

    def close(self) -> None:
        """Close it at once."""
        self._closed, self._resting_until = True, None
        if self._stream is not None:
            self._stream.abort()

    async def _traced(self, request: httpx.Request, first: bytes, times: dict[str, float | None]) -> Any:
        async with _Event(request, "http11", "send_request_headers"):
            pass
        async with _Event(request, "http11", "send_request_body"):
            await self._write(request, first, times.get("write"))
        async with _Event(request, "http11", "receive_response_headers") as event:
            head = await self._head(times.get("read"))
            event.value = b"HTTP/" + head.http_version, head.status_code, head.reason, head.headers.raw_items()
        return head


_NO_TIMES: Final[dict[str, float | None]] = {}


def without_value(message: str, headers: list[tuple[bytes, bytes]]) -> str:
    """What is wrong with a request's head; h11 quotes a header's whole value, which may be a key with a line's end."""
    for name, value in headers:
        if repr(value) in message and repr(name) not in message:
            shown = name.decode("ascii", "replace")
            return f"the value of the header {shown!r} holds a character that no header may, such as a line's end"
    return message


# -- told to a trace and to httpcore's loggers ------------------------------------------------------------------------


def _is_watched(request: httpx.Request) -> bool:
    return "trace" in request.extensions or redact.logs_httpcore()


class _Event:
    """What httpcore tells a trace (``extensions={"trace": ...}``) and its loggers. ``value``: what came of it."""

    __slots__ = ("_info", "_name", "_room", "_trace", "_watched", "value")

    def __init__(self, request: httpx.Request, room: str, name: str, info: dict[str, Any] | None = None) -> None:
        self._room, self._name, self._trace = room, name, request.extensions.get("trace")
        self._watched = _is_watched(request)
        if self._watched and info is None:
            url = httpcore.URL(str(request.url))
            info = {"request": httpcore.Request(request.method, url, headers=request.headers.raw)}
        self._info: dict[str, Any] = info or {}
        self.value: Any = None

    async def __aenter__(self) -> Self:
        if self._watched:
            await self._tell("started", self._info)
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, where: object) -> None:
        if self._watched and error is None:
            await self._tell("complete", {"return_value": self.value})
        elif self._watched:
            await self._tell("failed", {"exception": error})

    async def _tell(self, moment: str, info: dict[str, Any]) -> None:
        if self._trace is not None:
            await self._trace(f"{self._room}.{self._name}.{moment}", info)
        words = (f"{name}={value!r}" for name, value in info.items() if value is not None)
        redact.log_as_httpcore(self._room, " ".join((f"{self._name}.{moment}", *words)))


# -- the sockets ------------------------------------------------------------------------------------------------------
#
# httpcore's interface over asyncio's transports, with as little as can be between. A `Stream` is asyncio's protocol
# itself: what arrives waits in it, so a read that finds something waits for nothing, and a read that waits is one
# future. Its timeout is one timer of the connection, which is set again only when it rings: a timer for each read
# would cost more than the read.

_FULL: Final = 256 * 1024  # bytes that wait to be read, before the other side has to wait
_NEXT_ADDRESS: Final = 0.25  # seconds after which a host's next address is tried beside the one before (RFC 8305)
_NOBODY: Final = Context()  # timers outlive the job whose request set them


class Stream(asyncio.Protocol, httpcore.AsyncNetworkStream):
    """One connection. Raises httpcore's errors."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._parts: deque[bytes] = deque()
        self._size = 0  # of all parts
        self._over = False  # nothing comes any more
        self._error: Exception | None = None
        self._reading: asyncio.Future[None] | None = None
        self._until = 0.0
        self._timer: asyncio.Handle | None = None
        self._rings_at = 0.0  # kept beside: uvloop's handle may not know
        self._room: asyncio.Future[None] | None = None  # set while the other side reads too slowly

    @property
    def unread(self) -> bool:
        """Whether bytes have arrived that nobody has read: TLS keeps some while too many wait here."""
        tls = self._transport.get_extra_info("ssl_object")
        return bool(self._parts) or (tls is not None and decrypts(tls))

    @property
    def is_over(self) -> bool:
        """Whether it has ended, and nothing that came before its end is left to read."""
        return self._over and not self._parts

    # -- told by asyncio -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Keep what arrived until it is read."""
        self._parts.append(data)
        self._size += len(data)
        if self._size > _FULL:
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> None:
        """Nothing more will come."""
        self._end(None)
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone. What becomes of it behind its end concerns nobody."""
        self._end(exc)
        self._wake()
        self.resume_writing()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def pause_writing(self) -> None:
        """Too much waits to be sent."""
        self._room = self._room or self._loop.create_future()

    def resume_writing(self) -> None:
        """There is room again."""
        room, self._room = self._room, None
        if room is not None and not room.done():
            room.set_result(None)

    def _end(self, error: Exception | None) -> None:
        """Note the first end. If TLS has not ended, too, somebody cut the connection (RFC 9112, 9.8)."""
        if self._over:
            return
        tls = self._transport.get_extra_info("ssl_object")
        if error is None and tls is not None and not _has_ended(tls):
            error = ConnectionResetError("the connection was cut before TLS ended")
        self._over, self._error = True, error

    def _wake(self) -> None:
        if self._reading is not None and not self._reading.done():
            self._reading.set_result(None)

    # -- asked by httpcore and us --------------------------------------------------------------------------------

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109 - httpcore's signature
        """What has arrived, at most ``max_bytes``; nothing at the end."""
        while not self._parts:
            if self._error is not None:
                raise httpcore.ReadError(str(self._error)) from self._error
            if self._over:  # a transport that only closes has not said yet whether this is the end or an error
                return b""
            await self._arrival(timeout)
        part = self._parts.popleft()
        if len(part) > max_bytes:
            self._parts.appendleft(part[max_bytes:])
            part = part[:max_bytes]
        full = self._size > _FULL
        self._size -= len(part)
        if full and self._size <= _FULL:
            self._transport.resume_reading()
        return part

    def put_back(self, data: bytes) -> None:
        """Have ``data`` read next: it was read by somebody who does not speak its protocol."""
        if data:
            self._parts.appendleft(data)
            self._size += len(data)

    async def _arrival(self, seconds: float | None) -> None:
        self._reading = self._loop.create_future()
        if seconds is not None:
            self._until = self._loop.time() + seconds
            if self._timer is None or self._rings_at > self._until:
                self._set_timer()
        try:
            await self._reading
        finally:
            self._reading, self._until = None, 0.0

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._until, self._ring, context=_NOBODY)
        self._rings_at = self._until

    def _ring(self) -> None:
        self._timer = None
        if self._reading is None or self._reading.done() or not self._until:
            return
        if self._loop.time() < self._until:
            self._set_timer()
        else:
            self._reading.set_exception(httpcore.ReadTimeout())

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109 - as above
        """Send; waits only while too much of it is not sent yet."""
        if not buffer:
            return
        if self._over or self._transport.is_closing():
            raise httpcore.WriteError(str(self._error or "the connection was closed"))
        self._transport.write(buffer)
        if self._room is None:
            return
        try:
            async with asyncio.timeout(timeout):
                await asyncio.shield(self._room)
        except TimeoutError:
            raise httpcore.WriteTimeout from None
        if self._error is not None:
            raise httpcore.WriteError(str(self._error)) from self._error

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - as above
    ) -> Stream:
        """Go on under TLS. What arrived before it was said by nobody who proved who he is."""
        try:
            async with asyncio.timeout(timeout):
                self._silence()
                transport = await self._loop.start_tls(
                    self._transport, self, ssl_context, server_hostname=server_hostname, ssl_handshake_timeout=3600
                )
        except TimeoutError:
            self.abort()
            raise httpcore.ConnectTimeout from None
        except OSError as error:  # ssl.SSLError is one
            self.abort()
            raise httpcore.ConnectError(str(error)) from error
        except BaseException:
            self.abort()
            raise
        if transport is None:
            self.abort()
            raise httpcore.ConnectError("the server hung up while TLS began")
        self._transport = transport
        return self

    def _silence(self) -> None:
        if self._parts or self._over:
            raise httpcore.ConnectError("the server spoke, or hung up, before TLS began")

    def abort(self) -> None:
        """Close it at once: to whoever still reads it, that is no end."""
        if not self._over:
            self._over, self._error = True, ConnectionAbortedError("the connection was closed on this side")
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._transport.abort()

    async def aclose(self) -> None:
        """Close it at once, and wait until its socket is closed."""
        self.abort()
        await asyncio.sleep(0)

    def get_extra_info(self, info: str) -> Any:
        """See httpcore."""
        match info:
            case "ssl_object" | "socket":
                return self._transport.get_extra_info(info)
            case "client_addr":
                return self._transport.get_extra_info("sockname")
            case "server_addr":
                return self._transport.get_extra_info("peername")
            case "is_readable":
                return self.unread or self._over or is_readable(self._transport.get_extra_info("socket"))
        return None


def decrypts(tls: Any) -> bool:
    """Whether bytes that TLS has already been given hold a part of an answer."""
    try:
        return bool(tls.read(1))  # it is dropped with its connection
    except ssl.SSLError:  # nothing is there, or it was closed
        return False


def _has_ended(tls: Any) -> bool:
    """Whether the other side has ended TLS (by a ``close_notify``); all that it sent before has been read."""
    try:
        return not tls.read(1)
    except ssl.SSLZeroReturnError:
        return True
    except ssl.SSLError:
        return False


def is_readable(sock: Any) -> bool:
    """Whether bytes, or the end, have arrived that the loop has not seen yet."""
    if sock is None or (number := sock.fileno()) < 0:
        return True
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(number, select.POLLIN)
        return bool(poll.poll(0))
    return bool(select.select([number], [], [], 0)[0])  # Windows


async def _connect(host: str, port: int, own: tuple[str, int] | None) -> Stream:
    """Connect to the first address of a host that answers, beginning with the next after a moment (RFC 8305).

    Not by asyncio's own race: uvloop has none, and it may lose a socket if it is cancelled.
    """
    loop = asyncio.get_running_loop()
    if own is not None or is_address(host):
        _, stream = await loop.create_connection(Stream, host, port, local_addr=own)
        return stream
    addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    sock = await start_connection(addresses, happy_eyeballs_delay=_NEXT_ADDRESS)
    _, stream = await loop.create_connection(Stream, sock=sock)
    return stream


class Network(httpcore.AsyncNetworkBackend):
    """Opens `Stream`s."""

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore's signature
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect, within ``timeout`` altogether."""
        own = None if local_address is None else (local_address, 0)
        try:
            async with asyncio.timeout(timeout):
                stream = await _connect(host, port, own)
        except TimeoutError:
            raise httpcore.ConnectTimeout from None
        except (OSError, UnicodeError) as error:  # a label of more than 63 characters is no OSError
            raise httpcore.ConnectError(str(error)) from error
        sock = cast("Any", stream.get_extra_info("socket"))
        for option in socket_options or ():
            sock.setsockopt(*option)
        return stream

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,  # noqa: ARG002, ASYNC109 - httpcore's signature
        socket_options: Iterable[Any] | None = None,  # noqa: ARG002 - the same
    ) -> httpcore.AsyncNetworkStream:
        """Refuse: no address of ours is a path."""
        raise httpcore.ConnectError(f"{path}: sockets of this machine are not connected to")

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await asyncio.sleep(seconds)
