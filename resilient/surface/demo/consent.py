"""The people of the demo: they send each account's owner to the provider's consent page, and take what comes back.

What a browser does, without one: the authorisation code flow with PKCE and a state that is good once.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, urlsplit

import httpx

from resilient.surface.demo.accounts import PROVIDER

if TYPE_CHECKING:
    from collections.abc import Iterable

_CALLBACK: Final = "https://app.demo.example/connected"  # nobody goes there: its parameters are all that counts


def connect(settings: dict[str, Any], accounts: Iterable[str]) -> None:
    """Connect these accounts, one after the other."""
    asyncio.run(_connect(settings, accounts))


async def _connect(settings: dict[str, Any], accounts: Iterable[str]) -> None:
    from resilient.surface.demo.app import build  # noqa: PLC0415 - the whole engine: only when needed

    async with build(settings) as app, httpx.AsyncClient() as browser:
        for account in accounts:
            address = await app.connections.authorize_url(f"{PROVIDER}/{account}", redirect_uri=_CALLBACK)
            page = await browser.get(f"{address}&account={account}")
            await app.connections.complete(dict(parse_qsl(urlsplit(page.headers["location"]).query)))
