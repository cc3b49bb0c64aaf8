"""Routes to mount in a Starlette, FastAPI or other ASGI app (extra ``web``).

`connect_routes`: an app's customers connect their accounts. `webhook_routes`: what providers call.
"""

from __future__ import annotations

from resilient.surface.web.connect import connect_routes
from resilient.surface.web.webhooks import webhook_routes

__all__ = ["connect_routes", "webhook_routes"]
