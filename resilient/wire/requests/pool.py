"""The connections of one worker: shared by all its jobs, opened when first needed.

Proxies and certificates out of the environment are not taken (``trust_env`` is off): what a worker trusts is
written in the program. An idle connection is dropped before the 5 s at which many servers drop theirs,
because a request sent into a closing connection has no known outcome.
"""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import httpcore
import httpx

from resilient.core.base import bounds
from resilient.core.base.loggers import apart
from resilient.core.base.misfit import check_number, check_whole
from resilient.wire.requests import redact
from resilient.wire.requests.guard import GUARDED, PublicNetwork, PublicNetworkSync
from resilient.wire.requests.http11 import Connection
from resilient.wire.requests.proxy import ProxyTransport, SyncProxyTransport
from resilient.wire.requests.sockets import Backend
from resilient.wire.requests.streams import Network, decrypts

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from resilient.wire.requests.http11 import Look


# -- settings ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Bounds of the connections and of what comes over them. Times are in seconds, sizes in bytes.

    ``connections``: how many one worker has open at once, ``idle``: how many of them may rest, ``idle_for``: how long.
    ``connect``: to reach a server by its name, and once more for its TLS; ``write``: until the server takes more of
    a request; ``wait``: for one that is free. ``read`` is the longest silence within an answer, ``whole`` the
    longest time for all of its body. ``largest``: bodies that are read into memory, decoded. ``bodies``: all of
    them that the process holds at once, without the first MiB of each; no account has more of it than it leaves
    free (`wire/requests/body_budget.py`). Less than twice ``largest`` counts as that, so that one answer always
    fits. ``error_largest``, ``error_whole``: the same as ``largest`` and ``whole`` for the body of an error, of
    which only the beginning is kept. ``tries``, ``tries_within``: how often one request is sent within one call,
    and in how many seconds; longer waits are the job's. ``verify``: an `ssl.SSLContext` with all that is trusted
    and a certificate of the program's own; True trusts the public certificates, False everybody. ``proxy``: its
    address, such as ``http://user:password@proxy.example:3128``. Raises `InvalidInput`.
    """

    connections: int = 200
    idle: int = 100
    idle_for: float = 4.0
    connect: float = 5.0
    read: float = 30.0
    write: float = 30.0
    wait: float = 60.0
    whole: float = float(bounds.ANSWER_TIME.value)
    largest: int = bounds.ANSWER_BODY.value
    bodies: int = bounds.ANSWER_BODIES.value
    error_largest: int = bounds.ERROR_BODY.value
    error_whole: float = 5.0
    tries: int = 3
    tries_within: float = 3.0
    verify: ssl.SSLContext | bool = True
    proxy: str | None = field(default=None, repr=False)  # may hold a password

    def __post_init__(self) -> None:
        for name in ("connections", "largest", "bodies", "error_largest", "tries"):
            check_whole("PoolSettings", name, getattr(self, name))
        check_whole("PoolSettings", "idle", self.idle, least=0)
        for name in ("idle_for", "tries_within"):
            check_number("PoolSettings", name, getattr(self, name), above=False)
        for name in ("connect", "read", "write", "wait", "whole", "error_whole"):
            check_number("PoolSettings", name, getattr(self, name))

    @property
    def timeout(self) -> httpx.Timeout:
        """What a client starts from; each request may say otherwise."""
        return httpx.Timeout(connect=self.connect, read=self.read, write=self.write, pool=self.wait)


# -- connections of coroutines ----------------------------------------------------------------------------------------
#
# HTTP/1.1 connections, kept per origin, last used first.
#
# httpcore's own pool looks at every connection for every request, and for every idle one at all others: with 100
# connections that is most of a request's CPU time (3.5 ms instead of 1 ms). Here a request takes the connection on top
# of its origin's stack and puts it back; nothing else is looked at. The connections are those of `http11`, the errors
# httpx's. A coroutine that has to wait for one waits in line; `httpx.PoolTimeout` ends that.

Origin = tuple[bytes, bytes, int | None, bool]  # the last: whether its host was chosen by an account


_LAST_PORT: Final = 65_535
_NETWORK: Final = Network()
_HTTPCORES: Final = httpcore.AsyncHTTPConnection.handle_async_request
_GUARDED_NETWORK: Final = PublicNetwork(network=_NETWORK)


class Connections(httpx.AsyncBaseTransport):
    """The open connections of one event loop."""

    def __init__(self, settings: PoolSettings, context: ssl.SSLContext) -> None:
        self._settings, self._context = settings, context
        self._stacks: dict[Origin, deque[Connection]] = {}
        self._resting: OrderedDict[Connection, tuple[Origin, float]] = OrderedDict()  # since when, oldest first
        self._open = 0  # resting and in use
        self._line: deque[asyncio.Future[None]] = deque()
        self._called = 0  # connections kept for those who were woken and have not run yet
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request. Raises httpx's errors; after any of them the connection is gone."""
        return await self.send(request)

    async def send(self, request: httpx.Request, look: Look | None = None) -> httpx.Response:
        """`handle_async_request`; ``look`` is called right before the first byte."""
        url = request.url
        origin = (url.raw_scheme, url.raw_host, url.port, GUARDED in request.extensions)
        if origin[0] not in (b"http", b"https"):
            raise httpx.UnsupportedProtocol(f"{url.scheme!r} is not HTTP: write a URL that begins with https://")
        if (url.port or 0) > _LAST_PORT:  # sockets take such a number for another, or raise what is no error of httpx's
            raise httpx.UnsupportedProtocol(f"there is no port {url.port}: the last is {_LAST_PORT}")
        if httpcore.AsyncHTTPConnection.handle_async_request is not _HTTPCORES:  # by respx, say, in a program's tests
            return await self._send_by_httpcore(request, look)
        is_full = self._open - len(self._resting) + self._called >= self._settings.connections
        connection = None if is_full else self._take(origin)
        if connection is None:
            connection = await self._wait(origin, request.extensions.get("timeout", {}).get("pool"))
        try:
            return await connection.send(request, _Body(self, origin, connection, request), look)
        except BaseException as error:
            self._give_back(origin, connection)
            _raise_as_httpx(error)
            raise

    async def _send_by_httpcore(self, request: httpx.Request, look: Look | None) -> httpx.Response:
        """Send it over httpcore's connection, in whose place a test has put its own."""
        if look is not None and (wait := look()) is not None:
            await wait
        transport = httpx.AsyncHTTPTransport(verify=self._context, trust_env=False)
        if GUARDED in request.extensions:
            transport._pool._network_backend = PublicNetwork()  # noqa: SLF001 - httpx has no argument for it
        return await transport.handle_async_request(request)

    # -- taking and giving back ------------------------------------------------------------------------------

    def _take(self, origin: Origin) -> Connection | None:
        """A connection for one request, resting or new; None if all are in use."""
        stack = self._stacks.get(origin)
        while stack:
            connection = stack.pop()
            if not stack:  # accounts may have hosts of their own: an origin without connections leaves nothing
                del self._stacks[origin]
            del self._resting[connection]
            if not connection.has_expired():
                return connection
            self._drop(connection)
        if self._open >= self._settings.connections and self._resting:
            self._drop_oldest()
        if self._open >= self._settings.connections:
            return None
        self._open += 1
        network = _GUARDED_NETWORK if origin[3] else _NETWORK
        return Connection(origin[:3], self._context, network, self._settings.idle_for)

    async def _wait(self, origin: Origin, seconds: float | None) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(seconds):
                while True:
                    turn: asyncio.Future[None] = loop.create_future()
                    self._line.append(turn)
                    try:
                        await turn
                    except BaseException:
                        if turn in self._line:
                            self._line.remove(turn)
                        elif turn.done() and not turn.cancelled():
                            self._called -= 1
                            self._next()  # woken and interrupted at once: the turn is somebody else's
                        raise
                    self._called -= 1
                    if (connection := self._take(origin)) is not None:
                        return connection
        except TimeoutError:
            raise httpx.PoolTimeout(
                f"none of {self._settings.connections} connections was free for {seconds:g} s"
            ) from None

    def _next(self) -> None:
        while self._line:
            turn = self._line.popleft()
            if not turn.done():
                turn.set_result(None)
                self._called += 1
                return

    def _give_back(self, origin: Origin, connection: Connection) -> None:
        """The request is over: keep the connection if it can serve another."""
        usable = connection.is_idle() and not connection.has_surplus()
        if not usable or self._closed or len(self._resting) >= self._settings.idle:
            self._drop(connection)
        else:
            loop = asyncio.get_running_loop()
            self._stacks.setdefault(origin, deque()).append(connection)
            self._resting[connection] = origin, loop.time()
            if self._sweeper is None:
                self._sweeper = loop.call_later(self._settings.idle_for, self._sweep, context=apart())
        self._next()

    def _drop_oldest(self) -> None:
        connection, (origin, _) = self._resting.popitem(last=False)
        self._stacks[origin].popleft()  # the bottom of a stack rests longest
        if not self._stacks[origin]:
            del self._stacks[origin]
        self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        self._open -= 1
        connection.close()

    def _sweep(self) -> None:
        """Close connections that have rested too long; the timer runs only while one rests."""
        loop = asyncio.get_running_loop()
        self._sweeper = None
        while self._resting:
            since = next(iter(self._resting.values()))[1]
            remaining = since + self._settings.idle_for - loop.time()
            if remaining > 0:
                self._sweeper = loop.call_later(remaining, self._sweep, context=apart())
                return
            self._drop_oldest()

    async def aclose(self) -> None:
        """Close the connections that rest; one in use is closed when it is given back."""
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        while self._resting:
            self._drop_oldest()
        await asyncio.sleep(0)  # sockets are closed in the loop's next round


class _Body(httpx.AsyncByteStream):
    """An answer's body; its end gives the connection back."""

    __slots__ = ("_connection", "_origin", "_owner", "_request")

    def __init__(self, owner: Connections, origin: Origin, connection: Connection, request: httpx.Request) -> None:
        self._owner: Connections | None = owner
        self._origin, self._connection, self._request = origin, connection, request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for part in self._connection.body(self._request):
                yield part
        except BaseException as error:
            self._release()
            _raise_as_httpx(error)
            raise

    async def aclose(self) -> None:
        self._release()

    def _release(self) -> None:
        owner, self._owner = self._owner, None
        if owner is not None:
            self._connection.end()
            owner._give_back(self._origin, self._connection)  # noqa: SLF001 - one mechanism in two classes


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


# -- surplus ----------------------------------------------------------------------------------------------------------
#
# Connections that hold more than the answer that was asked for.
#
# HTTP/1.1 has nothing but the order of answers to tell whose is whose. Bytes behind the end of an answer (a second
# answer, or the body of a 204) would be read as the answer of the next request, which may be another account's. So a
# connection with anything left over serves nobody again (RFC 9112, 6.3 and 9.3). `Connection.has_surplus` looks for
# them on our own connections. For httpcore's (threads, proxies), which look only into the socket, the functions below
# look at what h11, the loop's reader and TLS have already taken out of it.
# Bytes that arrive only after the next request was sent cannot be told from its answer.

_MOST_LAYERS: Final = 8  # of proxies' connections around the one that speaks HTTP/1.1


def surplus(connection: Any) -> bool:
    """Whether an idle connection of httpcore's (of coroutines or threads) holds bytes that nobody asked for."""
    for _ in range(_MOST_LAYERS):
        if (h11 := getattr(connection, "_h11_state", None)) is not None:
            return bool(h11.trailing_data[0]) or _unread(connection._network_stream)  # noqa: SLF001 - no public way
        connection = getattr(connection, "_connection", None)
    return False


def _unread(stream: Any) -> bool:
    """Whether bytes have left the socket that httpcore has not read yet."""
    tls = stream.get_extra_info("ssl_object")
    if isinstance(tls, ssl.SSLObject) and decrypts(tls):
        return True
    layer = getattr(stream, "_stream", None)  # anyio's: TLS over a socket, or the socket
    for _ in range(_MOST_LAYERS):
        if layer is None:
            return False
        if getattr(getattr(layer, "_protocol", None), "read_queue", None):
            return True
        layer = getattr(layer, "transport_stream", None)
    return False


def keep_apart(transport: Any) -> None:
    """Make one of httpx's own transports drop connections that have a `surplus`."""
    pool = transport._pool  # noqa: SLF001 - httpx has no argument for it
    make: Callable[[Any], Any] = pool.create_connection

    def create_connection(origin: Any) -> Any:
        connection = make(origin)
        has_expired = connection.has_expired
        connection.has_expired = lambda: has_expired() or (connection.is_idle() and surplus(connection))
        return connection

    pool.create_connection = create_connection


# -- pool -------------------------------------------------------------------------------------------------------------


class Pool:
    """Connections for coroutines and for threads, and the settings they share."""

    def __init__(self, settings: PoolSettings | None = None) -> None:
        self.settings = settings or PoolSettings()
        self.timeout = self.settings.timeout
        self._lock = threading.Lock()
        self._context: ssl.SSLContext | None = None
        self._async: httpx.AsyncBaseTransport | None = None
        self._sync: httpx.HTTPTransport | None = None
        self._guarded: httpx.HTTPTransport | None = None
        redact.install()

    @property
    def for_coroutines(self) -> httpx.AsyncBaseTransport:
        """The transport of the event loop."""
        if self._async is None:
            with self._lock:
                self._async = self._async or self._make_async()
        return self._async

    def _make_async(self) -> httpx.AsyncBaseTransport:
        if self.settings.proxy is not None:  # a tunnel is httpx's business
            transport = ProxyTransport(self.settings.proxy, **self._options())
            keep_apart(transport)
            return transport
        return Connections(self.settings, self._certificates())

    @property
    def for_threads(self) -> httpx.HTTPTransport:
        """The transport of the handlers that run in threads."""
        if self._sync is None:
            with self._lock:
                self._sync = self._sync or self._make_sync()
        return self._sync

    @property
    def guarded_for_threads(self) -> httpx.HTTPTransport:
        """The same for hosts that an account chose: see `resilient.wire.requests.guard`."""
        if self._guarded is None:
            with self._lock:
                self._guarded = self._guarded or self._make_sync(guarded=True)
        return self._guarded

    def _make_sync(self, *, guarded: bool = False) -> httpx.HTTPTransport:
        if (proxy := self.settings.proxy) is not None:
            transport: httpx.HTTPTransport = SyncProxyTransport(proxy, **self._options())
        else:
            transport = httpx.HTTPTransport(**self._options())
        network = PublicNetworkSync() if guarded and proxy is None else Backend()
        transport._pool._network_backend = network  # noqa: SLF001 - httpx has no argument for it
        keep_apart(transport)
        return transport

    def _options(self) -> dict[str, Any]:
        s = self.settings
        limits = httpx.Limits(
            max_connections=s.connections, max_keepalive_connections=s.idle, keepalive_expiry=s.idle_for
        )
        return {"verify": self._certificates(), "limits": limits, "trust_env": False}

    def _certificates(self) -> ssl.SSLContext:
        """The context that both kinds of connections share."""
        if self._context is None:
            self._context = certificates(self.settings.verify)
        return self._context

    async def aclose(self) -> None:
        """Close every connection."""
        if self._async is not None:
            await self._async.aclose()
        self.close()

    def close(self) -> None:
        """Close the connections of threads."""
        for transport in (self._sync, self._guarded):
            if transport is not None:
                transport.close()


@cache
def public_certificates() -> ssl.SSLContext:
    """The certificates that everybody trusts. To load them takes 20 ms: once a process, for all its clients."""
    return httpx.create_ssl_context(trust_env=False)


def certificates(verify: ssl.SSLContext | bool) -> ssl.SSLContext:  # noqa: FBT001 - as httpx takes it
    """What connections to a provider trust."""
    return public_certificates() if verify is True else httpx.create_ssl_context(verify=verify, trust_env=False)
