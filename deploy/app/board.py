"""The dashboard as a server of its own, behind one password: ``uvicorn board:api``.

DASHBOARD_PASSWORD is asked for by the browser (HTTP Basic), so let nothing but TLS or this machine stand between. Where
people sign in already, mount `web.dashboard` in that application instead, with rights for each of them.
"""

from __future__ import annotations

import base64
import os
import secrets
from typing import TYPE_CHECKING

from program import app
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route

from resilient import SetupError, web

if TYPE_CHECKING:
    from starlette.requests import Request

PASSWORD = os.environ.get("DASHBOARD_PASSWORD", "")
if len(PASSWORD) < 12:  # noqa: PLR2004 - what somebody types once
    raise SetupError("set DASHBOARD_PASSWORD to twelve characters or more")


def operator(request: Request) -> web.Operator | Response:
    """Whoever knows the password may see and do everything but connections."""
    scheme, _, text = request.headers.get("authorization", "").partition(" ")
    try:
        user, _, password = base64.b64decode(text, validate=True).decode().partition(":")
    except ValueError:
        scheme = user = password = ""
    if scheme.lower() == "basic" and secrets.compare_digest(password.encode(), PASSWORD.encode()):
        return web.Operator(user or "operator", ["read", "payloads", "jobs", "resources"])
    return PlainTextResponse("Who are you?", 401, {"WWW-Authenticate": 'Basic realm="resilient"'})


async def livez(_: Request) -> Response:
    """For probes; says nothing about the database."""
    return PlainTextResponse("ok\n")


ORIGIN = os.environ.get("DASHBOARD_ORIGIN")  # https://ops.example, as browsers see it: needed behind a proxy
api = Starlette(
    lifespan=app.lifespan,
    routes=[Route("/livez", livez), Mount("/", web.dashboard(app, operator=operator, origin=ORIGIN))],
)
