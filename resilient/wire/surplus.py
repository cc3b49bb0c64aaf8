"""Connections that hold more than the answer that was asked for.

HTTP/1.1 has nothing but the order of answers to tell whose is whose. Bytes behind the end of an answer (a second
answer, or the body of a 204) would be read as the answer of the next request, which may be another account's. So a
connection with anything left over serves nobody again (RFC 9112, 6.3 and 9.3). httpcore looks for bytes that wait in
the socket; here is the rest of the way: what h11, the loop's reader and TLS have taken out of the socket already. What
arrives only after the next request was sent nobody can tell from its answer.
"""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_MOST_LAYERS: Final = 8  # of proxies' connections around the one that speaks HTTP/1.1


def surplus(connection: Any) -> bool:
    """Whether an idle connection of httpcore's (of coroutines or threads) holds bytes that nobody asked for."""
    for _ in range(_MOST_LAYERS):
        if (h11 := getattr(connection, "_h11_state", None)) is not None:
            return bool(h11.trailing_data[0]) or _unread(connection._network_stream)  # noqa: SLF001 - no public way
        connection = getattr(connection, "_connection", None)
    return False


def _unread(stream: Any) -> bool:
    """Bytes that have left the socket and were not read by httpcore yet."""
    tls = stream.get_extra_info("ssl_object")
    if isinstance(tls, ssl.SSLObject) and _decrypts(tls):
        return True
    layer = getattr(stream, "_stream", None)  # anyio's: TLS over a socket, or the socket
    for _ in range(_MOST_LAYERS):
        if layer is None:
            return False
        if getattr(getattr(layer, "_protocol", None), "read_queue", None):
            return True
        layer = getattr(layer, "transport_stream", None)
    return False


def _decrypts(tls: ssl.SSLObject) -> bool:
    """Whether bytes that TLS has already been given hold a part of an answer."""
    try:
        return bool(tls.read(1))  # it is dropped with its connection
    except ssl.SSLError:  # nothing is there, or it was closed
        return False


def keep_apart(transport: Any) -> None:
    """Make a transport of httpx's with a pool of its own drop such connections."""
    pool = transport._pool  # noqa: SLF001 - httpx has no argument for it
    make: Callable[[Any], Any] = pool.create_connection

    def create_connection(origin: Any) -> Any:
        connection = make(origin)
        has_expired = connection.has_expired
        connection.has_expired = lambda: has_expired() or (connection.is_idle() and surplus(connection))
        return connection

    pool.create_connection = create_connection
