"""Requests through a proxy of the program's own: what fails at the proxy names the proxy.

To httpx a proxy that is away looks like a provider that is away, its silence after CONNECT like a request that may have
arrived, and its 407 to a plain request like the provider's answer. All are a `httpx.ProxyError` here: nothing reached
the provider, so the request may be repeated. Circuits open all the same, because no account can be reached through
it, and jobs wait instead of being charged.
"""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Any, Final, Self

import httpx

from resilient.core.base.errors import chain

if TYPE_CHECKING:
    from collections.abc import Callable

PROXY_AUTHENTICATION_REQUIRED: Final = 407  # RFC 9110, section 15.5.8: only a proxy says so
_REQUEST_BEGINS: Final = ("http11.send_request_headers.started", "http2.send_request_headers.started")


class ProxyTransport(httpx.AsyncHTTPTransport):
    """httpx's transport through the proxy of this address, for coroutines."""

    def __init__(self, proxy: str, **options: Any) -> None:
        super().__init__(proxy=proxy, **options)
        self._address = shown(proxy)
        close_broken_tunnels(self._pool, _closing)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request. Raises `httpx.ProxyError` for what the proxy refused, or if it cannot be reached."""
        with _Attempt(self._address, request) as attempt:
            trace = attempt.trace

            async def note(event: str, info: Any) -> None:
                if trace is not None:
                    await trace(event, info)
                attempt.note(event, info)

            request.extensions["trace"] = note
            response = await super().handle_async_request(request)
            if response.status_code == PROXY_AUTHENTICATION_REQUIRED:
                await response.aclose()
                raise attempt.refusal()
        return response


class SyncProxyTransport(httpx.HTTPTransport):
    """The same for threads."""

    def __init__(self, proxy: str, **options: Any) -> None:
        super().__init__(proxy=proxy, **options)
        self._address = shown(proxy)
        close_broken_tunnels(self._pool, _closing_sync)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """See `ProxyTransport.handle_async_request`."""
        with _Attempt(self._address, request) as attempt:
            trace = attempt.trace

            def note(event: str, info: Any) -> None:
                if trace is not None:
                    trace(event, info)
                attempt.note(event, info)

            request.extensions["trace"] = note
            response = super().handle_request(request)
            if response.status_code == PROXY_AUTHENTICATION_REQUIRED:
                response.close()
                raise attempt.refusal()
        return response


def shown(proxy: str) -> str:
    """A proxy's address without what it may hold of a user and a password."""
    url = httpx.URL(proxy)
    return f"{url.scheme}://{url.netloc.decode('ascii')}"


# -- tunnels ----------------------------------------------------------------------------------------------------------


def close_broken_tunnels(pool: Any, closing: Callable[[Any], None]) -> None:
    """Close a tunnel whose TLS fails. httpcore leaves it open and taken for good: its pool runs out of places."""
    make: Callable[[Any], Any] = pool.create_connection

    def create_connection(origin: Any) -> Any:
        connection = make(origin)
        if hasattr(connection, "_connect_lock"):  # a tunnel, and no connection for plain requests
            closing(connection)
        return connection

    pool.create_connection = create_connection


def _closing(tunnel: Any) -> None:
    send = tunnel.handle_async_request

    async def handle_async_request(request: Any) -> Any:
        try:
            return await send(request)
        except BaseException:
            if not tunnel._connected:  # noqa: SLF001 - nothing public says so
                await tunnel.aclose()
            raise

    tunnel.handle_async_request = handle_async_request


def _closing_sync(tunnel: Any) -> None:
    send = tunnel.handle_request

    def handle_request(request: Any) -> Any:
        try:
            return send(request)
        except BaseException:
            if not tunnel._connected:  # noqa: SLF001 - nothing public says so
                tunnel.close()
            raise

    tunnel.handle_request = handle_request


# -- errors -----------------------------------------------------------------------------------------------------------


class _Attempt:
    """One request on its way through the proxy: errors before its first byte are the proxy's."""

    def __init__(self, address: str, request: httpx.Request) -> None:
        self._address, self._request = address, request
        self.trace = request.extensions.get("trace")
        self._has_begun = False

    def note(self, event: str, info: Any) -> None:
        """Hear httpcore: a request that begins and is no CONNECT is the provider's."""
        if event in _REQUEST_BEGINS and info["request"].method != b"CONNECT":
            self._has_begun = True

    def refusal(self) -> httpx.ProxyError:
        """The error of a 407 to a request that needs no tunnel."""
        return httpx.ProxyError(f"{PROXY_AUTHENTICATION_REQUIRED} Proxy Authentication Required")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _frames: object) -> None:
        if self.trace is None:
            self._request.extensions.pop("trace", None)
        else:
            self._request.extensions["trace"] = self.trace
        if isinstance(error, httpx.ProxyError):
            raise httpx.ProxyError(f"the proxy {self._address} refused the request: {error}") from error
        if self._has_begun or not isinstance(error, httpx.TransportError) or isinstance(error, httpx.PoolTimeout):
            return
        if any(isinstance(one, ssl.SSLError) for one in chain(error)):
            return  # of the provider's certificate, through the tunnel
        why = str(error) or type(error).__name__
        raise httpx.ProxyError(f"no way through the proxy {self._address}: {why}") from error
