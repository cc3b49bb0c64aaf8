"""Where the demo's events go: a webhook of another system, which is away for a while.

It checks signatures as Standard Webhooks says and writes what it accepted to the provider's log.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from standardwebhooks import Webhook, WebhookVerificationError
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request


@dataclass(slots=True)
class Sink:
    """``log`` takes one entry an event; ``go_away`` is called when ``away_after`` of them have come."""

    secret: str
    log: Callable[[dict[str, Any]], None]
    clock: Callable[[], float]
    away_after: int
    go_away: Callable[[], None]
    seen: int = 0

    def app(self) -> Starlette:
        """The ASGI application."""
        return Starlette(routes=[Route("/events", self.take, methods=["POST"])])

    async def take(self, request: Request) -> JSONResponse:
        """Accept one event."""
        try:
            event = Webhook(self.secret).verify(await request.body(), dict(request.headers))
        except WebhookVerificationError:
            self.log({"t": self.clock(), "decision": "forged"})
            return JSONResponse({"error": "signature"}, status_code=401)
        entry = {"t": self.clock(), "decision": "event", "id": event["id"], "account": event["partitionkey"]}
        self.log(entry | {"number": int(event["sequence"]), "about": event["data"]["contact"]})
        self.seen += 1
        if self.seen == self.away_after:
            self.go_away()
        return JSONResponse({}, status_code=202)
