"""Routes that providers call: ``POST {base_url}/{provider}`` and ``POST {base_url}/{provider}/{account}``.

The raw bytes go to `Webhooks.receive`; nothing here decides. Addresses that are signed are made of `base_url`, because
a proxy in front shows the server another one.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from resilient.core.bounds import WEBHOOK_BODY
from resilient.core.hosts import origin_of
from resilient.core.webhook import Delivery
from resilient.engine.webhooks import is_account
from resilient.surface.web.pages import QUIET, plain

from starlette.requests import ClientDisconnect, Request  # isort: skip - `pages` says which extra is missing
from starlette.responses import Response
from starlette.routing import Route, Router

if TYPE_CHECKING:
    from resilient.engine.app import Resilient

PATIENCE: Final = 10.0  # seconds for a body to arrive


class _Webhooks:
    """The route; see `webhook_routes`."""

    def __init__(self, app: Resilient, base_url: str, max_body: int) -> None:
        self._app, self._base, self._max_body = app, base_url.rstrip("/"), max_body

    async def receive(self, request: Request) -> Response:
        """One delivery."""
        provider, account = request.path_params["provider"], request.path_params.get("account", "")
        if provider not in self._app.webhooks.declared or not is_account(provider, account):
            return plain(404)
        try:
            async with asyncio.timeout(PATIENCE):
                body = await _body(request, self._max_body)
        except (TimeoutError, ClientDisconnect):
            return plain(408)
        if body is None:
            self._app.webhooks.say(
                provider, "too large", f"a body of more than {self._max_body:,} bytes: see webhook_routes(max_body=)"
            )
            return plain(413)
        url = f"{self._base}/{provider}" + (f"/{account}" if account else "")
        query = request.url.query
        delivery = Delivery(dict(request.headers), body, f"{url}?{query}" if query else url, request.method)
        answer = await self._app.webhooks.receive(provider, delivery, account=account)
        return Response(answer.body, answer.status, {**QUIET, **answer.headers})


def webhook_routes(app: Resilient, *, base_url: str, max_body: int = WEBHOOK_BODY.value) -> Router:
    """Routes to mount: ``Mount("/webhooks", app=webhook_routes(...))``, or FastAPI's ``api.mount("/webhooks", ...)``.

    ``base_url``: where they are mounted, as the world sees it (``https://shop.example/webhooks``). A provider is given
    ``{base_url}/{provider}``, or ``{base_url}/{provider}/{account}`` where each account has a webhook of its own.
    ``max_body`` is in bytes; what a job can hold is `Resilient`'s ``max_payload``. Raises `InvalidInput`.
    """
    origin_of(base_url)
    routes = _Webhooks(app, base_url, max_body)
    methods = ["GET", "POST"]
    return Router(
        [
            Route("/{provider}", routes.receive, methods=methods, name="webhook"),
            Route("/{provider}/{account}", routes.receive, methods=methods, name="webhook_of_account"),
        ]
    )


async def _body(request: Request, most: int) -> bytes | None:
    """The raw body; None if it is too large."""
    said = request.headers.get("content-length", "")
    if said.isdecimal() and int(said) > most:
        return None
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            return None
        parts.append(part)
    return b"".join(parts)
