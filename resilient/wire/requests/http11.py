"""One HTTP/1.1 connection of coroutines: h11, a stream, and nothing between.

h11 decides what an answer is, where it ends, and whether another request may follow; here is only what is sent and
read. The pool gives a connection to one request at a time, so it needs no locks. Of a request whose body is
in memory, head and body are one write. httpcore's own connection over anyio took twice the CPU time of h11 and the
socket together: locks, a scope for each read, a trace of each phase.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final, Self

import h11
import httpcore
import httpx

from resilient.wire.requests import redact

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Awaitable, Callable

    Look = Callable[[], Awaitable[None] | None]  # before the first byte: what to wait for, if anything

_AT_ONCE: Final = 64 * 1024  # bytes that are read at once
_LONGEST_HEAD: Final = 100 * 1024  # bytes
_SWITCHING: Final = 101
_PARTS: Final = 100  # of a body, after which the loop has a turn: what has arrived is read without waiting
_MOST_INTERIM: Final = 1_000  # interim answers (100 to 199) before the answer
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
        self._answer: h11.Response | h11.InformationalResponse | None = None  # its head, once it has arrived
        self._interim = 0  # interim answers so far
        self._resting_until: float | None = None  # None: in use, or new
        self._closed = False

    # -- a request -----------------------------------------------------------------------------------------------

    async def send(
        self, request: httpx.Request, body: httpx.AsyncByteStream, look: Look | None = None
    ) -> httpx.Response:
        """Send ``request`` and read the head of its answer. The answer's stream is ``body``, which reads by `body`."""
        self._resting_until, self._interim = None, 0
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
            self._answer = None
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
        """Raise if the server closed it before a byte was sent: so the request had no effect."""
        if self._stream.is_over:
            raise httpcore.ConnectError(_ENDED)

    def _refuse_surplus(self) -> None:
        """Raise if it was closed, or bytes came, while the request waited: they would be taken for its answer."""
        if self._stream.get_extra_info("is_readable"):
            raise httpcore.ConnectError(_ENDED)

    def _first(self, request: httpx.Request) -> bytes:
        """What is written first: the head, and a body that is in memory."""
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
        """Send a request, or as much of it as the server reads: it may refuse and hang up before it has read all."""
        try:
            is_sent = await self._send(first, seconds)
            if is_sent and not isinstance(request.stream, httpx.ByteStream):
                is_sent = await self._send_parts(request, seconds)
        except h11.LocalProtocolError as error:
            raise httpcore.LocalProtocolError(str(error)) from error
        except httpcore.WriteError:
            is_sent = False
        if not is_sent:
            self._h11.send_failed()  # so no other request follows on this connection

    async def _send(self, data: bytes, seconds: float | None) -> bool:
        """Send a part of a request; False if the server refused the request while the part waited for room."""
        self._stream.put(data)
        while self._stream.is_full:
            if await self._is_refused():
                return False
            await self._stream.wait_for_room(seconds)
        return True

    async def _is_refused(self) -> bool:
        """Whether the answer has arrived and is no success: then no more of the request is sent (RFC 9112, 9.5)."""
        await asyncio.sleep(0)  # lets the loop read: what has arrived is lost with the first write that fails
        head = await self._head(None, wait=False)
        return head is not None and head.status_code not in _SUCCESS

    def _start(self, request: httpx.Request) -> bytes:
        """The head of a request, as it is sent."""
        target = request.extensions.get("target", request.url.raw_path)
        try:
            head = h11.Request(method=request.method, target=target, headers=request.headers.raw)
        except h11.LocalProtocolError as error:
            raise httpcore.LocalProtocolError(without_value(str(error), request.headers.raw)) from None
        return self._h11.send(head) or b""

    async def _send_parts(self, request: httpx.Request, seconds: float | None) -> bool:
        async for part in request.stream:  # type: ignore[union-attr]  # an AsyncClient sends no other
            if await self._is_refused() or not await self._send(self._h11.send(h11.Data(part)) or b"", seconds):
                return False
        return await self._send(self._h11.send(h11.EndOfMessage()) or b"", seconds)

    async def _head(self, seconds: float | None, *, wait: bool = True) -> Any:
        """The head of the answer; without ``wait`` None if it has not arrived."""
        while self._answer is None and (event := await self._event(seconds, wait=wait)) is not None:
            if isinstance(event, h11.Response) or getattr(event, "status_code", None) == _SWITCHING:
                self._answer = event
            elif (interim := self._interim + 1) > _MOST_INTERIM:
                raise httpcore.RemoteProtocolError(f"more than {_MOST_INTERIM:,} interim answers, and no answer")
            else:
                self._interim = interim
        return self._answer

    async def _event(self, seconds: float | None, *, wait: bool = True) -> Any:
        """The next event of the answer, as h11 reads it; without ``wait`` None if it has not arrived."""
        h = self._h11
        try:
            while (event := h.next_event()) is h11.NEED_DATA:
                if not wait and not self._stream.has_arrived:
                    return None
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
        parts = 0
        async with report:
            while isinstance(event := await self._event(seconds), h11.Data):
                yield bytes(event.data)
                if (parts := parts + 1) % _PARTS == 0:
                    await asyncio.sleep(0)

    def end(self) -> None:
        """Rest after an answer that was read to its end; close after any other."""
        h = self._h11
        if self._closed:
            return
        if h.our_state is h11.DONE and h.their_state is h11.DONE:
            h.start_next_cycle()
            self._resting_until = time.monotonic() + self._idle_for
        else:
            self.close()

    def _switched(self, request: httpx.Request, status: int) -> Any:
        """The stream; if the protocol changes, with the bytes that h11 has already read of the new one."""
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
        """Whether it has rested too long, or its end or surplus bytes have come."""
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


def host_of(url: httpx.URL) -> str:
    """The host as it is declared and sent. Httpx's own ``host`` decodes ``xn--...``, and raises for some of them."""
    return url.raw_host.decode("ascii")


def without_value(message: str, headers: list[tuple[bytes, bytes]]) -> str:
    """What is wrong with a request's head; h11 quotes a header's whole value, which may be a key with a line's end."""
    for name, value in headers:
        if repr(value) in message and repr(name) not in message:
            shown = name.decode("ascii", "replace")
            return f"the value of the header {shown!r} holds a character that no header may, such as a line's end"
    return message


# -- traces and httpcore's loggers ------------------------------------------------------------------------------------


def _is_watched(request: httpx.Request) -> bool:
    return "trace" in request.extensions or redact.logs_httpcore()


class _Event:
    """What httpcore reports to a trace (``extensions={"trace": ...}``) and its loggers; ``value``: its result."""

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
