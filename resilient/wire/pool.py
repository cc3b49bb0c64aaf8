"""The connections of one worker: shared by all its jobs, opened when first needed.

Proxies and certificates out of the environment are not taken (``trust_env`` is off): what a worker trusts is
written in the program. An idle connection is dropped before the 5 s at which many servers drop theirs,
because a request sent into a closing connection has no known outcome.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

from resilient.core import bounds
from resilient.wire import redact
from resilient.wire.connections import Connections
from resilient.wire.guard import PublicNetworkSync
from resilient.wire.sockets import Backend
from resilient.wire.surplus import keep_apart

if TYPE_CHECKING:
    import ssl


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Bounds of the connections and of what comes over them. Times are in seconds, sizes in bytes.

    ``read`` is the longest silence within an answer, ``whole`` the longest time for all of its body.
    ``largest``: bodies that are read into memory, decoded. ``error_largest``, ``error_whole``: the same for
    the body of an error, of which only the beginning is kept. ``tries``, ``tries_within``: how often one
    request is sent within one call, and in how many seconds; longer waits are the job's. ``verify``,
    ``proxy``: as httpx takes them.
    """

    connections: int = 200
    idle: int = 100
    idle_for: float = 4.0
    connect: float = 5.0
    read: float = 30.0
    write: float = 30.0
    wait: float = 60.0  # for a free connection
    whole: float = float(bounds.ANSWER_TIME.value)
    largest: int = bounds.ANSWER_BODY.value
    error_largest: int = bounds.ERROR_BODY.value
    error_whole: float = 5.0
    tries: int = 3
    tries_within: float = 3.0
    verify: ssl.SSLContext | bool = True
    proxy: str | None = None

    @property
    def timeout(self) -> httpx.Timeout:
        """What a client starts from; each request may say otherwise."""
        return httpx.Timeout(connect=self.connect, read=self.read, write=self.write, pool=self.wait)


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
            transport = httpx.AsyncHTTPTransport(**self._options())
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
        """The same for hosts that an account chose: see `resilient.wire.guard`."""
        if self._guarded is None:
            with self._lock:
                self._guarded = self._guarded or self._make_sync(guarded=True)
        return self._guarded

    def _make_sync(self, *, guarded: bool = False) -> httpx.HTTPTransport:
        transport = httpx.HTTPTransport(**self._options())
        network = PublicNetworkSync() if guarded and self.settings.proxy is None else Backend()
        transport._pool._network_backend = network  # noqa: SLF001 - httpx has no argument for it
        keep_apart(transport)
        return transport

    def _options(self) -> dict[str, Any]:
        s = self.settings
        limits = httpx.Limits(
            max_connections=s.connections, max_keepalive_connections=s.idle, keepalive_expiry=s.idle_for
        )
        return {"verify": self._certificates(), "limits": limits, "trust_env": False, "proxy": s.proxy}

    def _certificates(self) -> ssl.SSLContext:
        """Loading them takes 20 ms: once for both kinds of connections."""
        if self._context is None:
            self._context = httpx.create_ssl_context(verify=self.settings.verify, trust_env=False)
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
