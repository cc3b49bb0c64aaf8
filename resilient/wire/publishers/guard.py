"""Which addresses a webhook may be sent to, checked on the address that is connected to.

A customer who registers a webhook chooses a URL that our network resolves and calls: without a guard it is a door to
what stands beside us (https://owasp.org/www-community/attacks/Server_Side_Request_Forgery). So the name is resolved
here, every address is checked, and the connection goes to a checked address and to nothing else: a name that answers
differently the second time (DNS rebinding) wins nothing, nor do the many ways to write 127.0.0.1.

The list is our own: Python's ``is_global`` says yes to addresses that lead home by a detour (NAT64, 6to4, IPv4 within
IPv6), and its opinion changes with its version. What is not plainly public is refused.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any

import httpcore
import httpx

from resilient.core.addresses import denied
from resilient.core.errors import Permanent
from resilient.wire.surplus import keep_apart

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterable


class GuardedNetwork(httpcore.AsyncNetworkBackend):
    """Connects to addresses that are not denied; ``allow``: hosts and addresses that are all the same."""

    def __init__(self, allow: Iterable[str] = ()) -> None:
        self._allow = frozenset(name.lower() for name in allow)
        self._network = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore's signature
        local_address: str | None = None,
        socket_options: Any = None,
    ) -> httpcore.AsyncNetworkStream:
        """Resolve, check, connect. Raises `Permanent` if an address of the name is denied."""
        addresses = await self._resolve(host, port)
        if host.lower() not in self._allow:
            for address in addresses:
                if address not in self._allow and denied(address):
                    raise Permanent(
                        f"webhook host {host!r} is at {address}, which is not a public address: nothing was sent"
                        " (for tests: allow=)",
                        code="address_denied",
                    )
        error: Exception | None = None
        for address in addresses:
            try:
                return await self._network.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as failed:
                error = failed
        raise error or httpcore.ConnectError(f"{host!r} has no address")

    async def _resolve(self, host: str, port: int) -> list[str]:
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise httpcore.ConnectError(f"{host!r} cannot be resolved: {error}") from error
        return list(dict.fromkeys(str(one[4][0]) for one in found))

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,  # noqa: ARG002, ASYNC109 - httpcore's signature
        socket_options: Any = None,  # noqa: ARG002 - the same
    ) -> httpcore.AsyncNetworkStream:
        """Never."""
        raise Permanent(f"a webhook is not sent to the socket {path!r}", code="address_denied")

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await asyncio.sleep(seconds)


def transport(allow: Iterable[str], context: ssl.SSLContext, connections: int) -> httpx.AsyncHTTPTransport:
    """An httpx transport over a `GuardedNetwork`: no proxy, nothing from the environment."""
    made = httpx.AsyncHTTPTransport(verify=context, trust_env=False)
    made._pool = httpcore.AsyncConnectionPool(  # noqa: SLF001 - httpx has no argument for it
        ssl_context=context, max_connections=connections, keepalive_expiry=4.0, network_backend=GuardedNetwork(allow)
    )
    keep_apart(made)
    return made
