"""One JSON document to somebody's webhook, for alerts.

A webhook's URL is its password (its path is the secret), so it stays out of logs and errors: the request goes
straight to the transport, because httpx's client logs whole URLs, and errors name only the host. Redirects are
not followed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from resilient.core.base.errors import ResilientError

if TYPE_CHECKING:
    from collections.abc import Mapping

TIMEOUT: Final = 5.0  # seconds for each step of the exchange
_TOO_HIGH: Final = 300


_OF_ONE: Final = frozenset({400, 413, 422})


class NotDelivered(ResilientError):
    """A webhook did not take a document; ``of_one``: because of what the document says, so it may take others."""

    def __init__(self, message: str, *, of_one: bool = False) -> None:
        super().__init__(message)
        self.of_one = of_one


def host_of(url: str) -> str:
    """The host of a webhook's URL, the only part of it that may be shown."""
    return urlsplit(url).hostname or "?"


async def post(url: str, document: Mapping[str, Any], *, timeout: float = TIMEOUT) -> None:  # noqa: ASYNC109 - httpx's
    """Send a document; raises `NotDelivered`, naming the host and the reason."""
    import httpx  # noqa: PLC0415 - only where something is sent

    from resilient.wire.requests.pool import public_certificates  # noqa: PLC0415 - the same

    try:
        request = httpx.Request(
            "POST",
            url,
            json=document,
            headers={"user-agent": "resilient-engine"},
            extensions={"timeout": httpx.Timeout(timeout).as_dict()},
        )
        async with httpx.AsyncHTTPTransport(verify=public_certificates(), trust_env=False) as transport:
            response = await transport.handle_async_request(request)
            await response.aclose()
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
        raise NotDelivered(f"{host_of(url)}: {type(error).__name__}") from None
    if response.status_code >= _TOO_HIGH:
        raise NotDelivered(f"{host_of(url)} answered {response.status_code}", of_one=response.status_code in _OF_ONE)
