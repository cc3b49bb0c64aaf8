"""Connections to hosts that an account chose: resolved here, and only public addresses are connected to.

The address that was checked is the one that is connected to: a name that answers differently the second time (DNS
rebinding) wins nothing, nor do the many ways to write 127.0.0.1. Through a proxy the proxy resolves names, and guards.
Without this, a host that a customer names is a door to what stands beside us
(https://owasp.org/www-community/attacks/Server_Side_Request_Forgery).
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any, Final

import httpcore
import httpx

from resilient.core.addresses import denied
from resilient.core.errors import Permanent
from resilient.core.failure import Failure, FailureKind
from resilient.wire.sockets import Backend

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

GUARDED: Final = "resilient_guarded"  # an extension of a request: its host was chosen by an account


class AddressDenied(httpx.ConnectError, Permanent):
    """The host that an account chose leads to an address that is not public: nothing was sent."""

    def __init__(self, host: str, address: str) -> None:
        Exception.__init__(
            self,
            f"{host!r}, which an account chose, is at {address}: that is not a public address, so nothing was sent"
            f" (for development and networks of your own: provider(private_hosts=({host!r},)))",
        )
        self._request: httpx.Request | None = None
        self.failure = Failure(FailureKind.PERMANENT, code="address_denied")


class PublicNetwork(httpcore.AsyncNetworkBackend):
    """For coroutines. ``allow``: hosts and addresses that are connected to all the same; ``refusal``: the error."""

    def __init__(self, allow: Iterable[str] = (), refusal: Callable[[str, str], Exception] = AddressDenied) -> None:
        self._allow, self._refusal = frozenset(name.lower() for name in allow), refusal
        self._network = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore's signature
        local_address: str | None = None,
        socket_options: Any = None,
    ) -> httpcore.AsyncNetworkStream:
        """Resolve, check, connect. Raises `AddressDenied`, or what ``refusal`` makes."""
        error: Exception | None = None
        for address in await resolved(host, port, self._allow, self._refusal):
            try:
                return await self._network.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as failed:
                error = failed
        raise error or httpcore.ConnectError(f"{host!r} has no address")

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,  # noqa: ARG002, ASYNC109 - httpcore's signature
        socket_options: Any = None,  # noqa: ARG002 - the same
    ) -> httpcore.AsyncNetworkStream:
        """Never."""
        raise self._refusal(path, "a socket of this machine")

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await asyncio.sleep(seconds)


class PublicNetworkSync(httpcore.NetworkBackend):
    """For threads."""

    def __init__(self) -> None:
        self._network = Backend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Any = None,
    ) -> httpcore.NetworkStream:
        """Resolve, check, connect. Raises `AddressDenied`."""
        error: Exception | None = None
        for address in _resolved_sync(host, port):
            try:
                return self._network.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as failed:
                error = failed
        raise error or httpcore.ConnectError(f"{host!r} has no address")

    def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,  # noqa: ARG002 - httpcore's signature
        socket_options: Any = None,  # noqa: ARG002 - the same
    ) -> httpcore.NetworkStream:
        """Never."""
        raise AddressDenied(path, "a socket of this machine")


async def resolved(
    host: str,
    port: int,
    allow: Collection[str] = (),
    refusal: Callable[[str, str], Exception] = AddressDenied,
) -> Sequence[str]:
    """The addresses of a host, all of them public. Raises `AddressDenied`, `httpcore.ConnectError`."""
    try:
        rows = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise _unresolved(host, error) from error
    return _checked(host, _addresses(rows), allow, refusal)


def _resolved_sync(host: str, port: int) -> Sequence[str]:
    try:
        rows = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise _unresolved(host, error) from error
    return _checked(host, _addresses(rows))


def _addresses(rows: Iterable[tuple[Any, ...]]) -> list[str]:
    return list(dict.fromkeys(str(row[4][0]) for row in rows))


def _unresolved(host: str, error: Exception) -> httpcore.ConnectError:
    return httpcore.ConnectError(f"{host!r} cannot be resolved: {error}")


def _checked(
    host: str,
    addresses: Sequence[str],
    allow: Collection[str] = (),
    refusal: Callable[[str, str], Exception] = AddressDenied,
) -> Sequence[str]:
    if host.lower() not in allow:
        for address in addresses:
            if address not in allow and denied(address):
                raise refusal(host, address)
    return addresses
