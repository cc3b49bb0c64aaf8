"""The sockets of coroutines: httpcore's interface over asyncio's transports, with as little as possible between.

A `Stream` is asyncio's protocol itself: what arrives waits in it, so a read that finds something waits for nothing, and
a read that waits is one future. All timeouts of a connection share one timer, which is set again only when it rings:
a timer for each read would cost more than the read.
"""

from __future__ import annotations

import asyncio
import select
import socket
import ssl
from collections import deque
from contextvars import Context
from typing import TYPE_CHECKING, Any, Final, cast

import httpcore
from aiohappyeyeballs import start_connection

from resilient.core.base.hosts import is_address

if TYPE_CHECKING:
    from collections.abc import Iterable

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
        self._rings_at = 0.0  # of the timer: uvloop's handle may not know
        self._room: asyncio.Future[None] | None = None  # set while the other side reads too slowly

    @property
    def unread(self) -> bool:
        """Whether bytes have arrived that nobody has read: TLS keeps some while too many wait here."""
        tls = self._transport.get_extra_info("ssl_object")
        return bool(self._parts) or (tls is not None and decrypts(tls))

    @property
    def has_arrived(self) -> bool:
        """Whether a read would return at once."""
        return bool(self._parts) or self._over

    @property
    def is_full(self) -> bool:
        """Whether too much waits to be sent."""
        return self._room is not None

    @property
    def is_over(self) -> bool:
        """Whether it has ended, and nothing that came before its end is left to read."""
        return self._over and not self._parts

    # -- called by asyncio ---------------------------------------------------------------------------------------

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
        """The connection is gone: wake whoever waits. An error after its end is ignored."""
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
        """Note the end, once. If TLS has not ended, too, the connection was cut (RFC 9112, 9.8)."""
        if self._over:
            return
        tls = self._transport.get_extra_info("ssl_object")
        if error is None and tls is not None and not has_ended(tls):
            error = ConnectionResetError("the connection was cut before TLS ended")
        self._over, self._error = True, error

    def _wake(self) -> None:
        if self._reading is not None and not self._reading.done():
            self._reading.set_result(None)
        if self._room is not None:  # who waits for room looks at what has arrived
            self.resume_writing()
            self.pause_writing()

    # -- called by httpcore and us -------------------------------------------------------------------------------

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109 - httpcore's signature
        """The next bytes, at most ``max_bytes``; none at the end."""
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
        """Let ``data`` be read next: it was read by a parser of another protocol."""
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
        """Send; wait only while too much is not sent yet."""
        if buffer:
            self.put(buffer)
        while self._room is not None:
            await self.wait_for_room(timeout)

    def put(self, buffer: bytes) -> None:
        """Send, and wait for nothing."""
        if self._over or self._transport.is_closing():
            raise httpcore.WriteError(str(self._error or "the connection was closed"))
        self._transport.write(buffer)

    async def wait_for_room(self, seconds: float | None) -> None:
        """Wait until there is room, or until something arrives."""
        if self._room is None:
            return
        try:
            async with asyncio.timeout(seconds):
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
        """Go on under TLS. Raises `httpcore.ConnectError` if anything arrived before: no certificate stands for it."""
        try:
            async with asyncio.timeout(timeout):
                self._require_silence()
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

    def _require_silence(self) -> None:
        if self._parts or self._over:
            raise httpcore.ConnectError("the server spoke, or hung up, before TLS began")

    def abort(self) -> None:
        """Close it at once; a read that still waits fails, because this is no end of an answer."""
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
        """See httpcore's."""
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
    """Whether bytes that TLS has been given decrypt to data; it takes one, so the connection must be dropped."""
    try:
        return bool(tls.read(1))
    except ssl.SSLError:  # nothing is there, or it was closed
        return False


def has_ended(tls: Any) -> bool:
    """Whether the other side has ended TLS (by ``close_notify``) and all that it sent before has been read."""
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
    """Connect to the first address of a host that answers; each is tried `_NEXT_ADDRESS` after the one before.

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
        """Refuse: providers are not at sockets of this machine."""
        raise httpcore.ConnectError(f"{path}: sockets of this machine are not connected to")

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await asyncio.sleep(seconds)
