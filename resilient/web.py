"""Routes to mount in a Starlette, FastAPI or other ASGI app (extra ``web``).

`connect_routes`: an app's customers connect their accounts. `webhook_routes`: what providers call. `dashboard` (extra
``dashboard``): pages for `Operator`s, who see what stands still and act.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resilient.surface.web.routes import connect_routes, webhook_routes

if TYPE_CHECKING:
    from resilient.surface.web.dashboard.guard import Operator
    from resilient.surface.web.dashboard.mount import dashboard

__all__ = ["Operator", "connect_routes", "dashboard", "webhook_routes"]


def __getattr__(name: str) -> Any:
    """The dashboard comes when it is used: it needs jinja2, the other routes do not."""
    if name == "dashboard":
        from resilient.surface.web.dashboard.mount import dashboard  # noqa: PLC0415 - see above

        return dashboard
    if name == "Operator":
        from resilient.surface.web.dashboard.guard import Operator  # noqa: PLC0415 - see above

        return Operator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
