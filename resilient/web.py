"""Routes to mount in a Starlette, FastAPI or other ASGI app (extra ``web``).

`connect_routes`: customers connect their accounts. `webhook_routes`: what providers call.
"""

from __future__ import annotations

from resilient.surface.web.connect import connect_routes

__all__ = ["connect_routes"]
