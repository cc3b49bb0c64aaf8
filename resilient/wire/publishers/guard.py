"""Which addresses a webhook may be sent to: public ones, as for every host that a customer names (`wire/guard.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpcore
import httpx

from resilient.core.errors import Permanent
from resilient.wire.guard import PublicNetwork
from resilient.wire.surplus import keep_apart

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterable


def _refusal(host: str, address: str) -> Permanent:
    return Permanent(
        f"webhook host {host!r} is at {address}, which is not a public address: nothing was sent (for tests: allow=)",
        code="address_denied",
    )


def transport(allow: Iterable[str], context: ssl.SSLContext, connections: int) -> httpx.AsyncHTTPTransport:
    """An httpx transport to public addresses: no proxy, nothing from the environment."""
    made = httpx.AsyncHTTPTransport(verify=context, trust_env=False)
    made._pool = httpcore.AsyncConnectionPool(  # noqa: SLF001 - httpx has no argument for it
        ssl_context=context,
        max_connections=connections,
        keepalive_expiry=4.0,
        network_backend=PublicNetwork(allow, _refusal),
    )
    keep_apart(made)
    return made
