"""``resilient dashboard``: the pages alone, for whoever sits at this machine.

It binds the loopback address only, and its address carries a token that is good once: whoever opens it first is the
operator, by a cookie that no other site can send. Requests under another ``Host`` are refused, so that no name of a
stranger that leads to this machine can read along.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from resilient.core.base.errors import MissingExtra, SetupError
from resilient.surface.cli.context import person
from resilient.surface.web.dashboard.guard import RIGHTS, Operator, with_headers
from resilient.surface.web.dashboard.mount import dashboard, plain_page
from resilient.surface.web.dashboard.visit import OPTIONS

from starlette.requests import Request  # isort: skip - `mount` says which extra is missing
from starlette.responses import RedirectResponse, Response

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from starlette.types import ASGIApp, Receive, Scope, Send

    from resilient.engine.app.app import Resilient
    from resilient.surface.shards import Shards

HOST: Final = "127.0.0.1"
_HTTP: Final = 80  # of an address with this port browsers leave it out
_COOKIE: Final = "resilient-dashboard-session"


class Alone:
    """A dashboard for one person. ``address`` is where it can be entered, once."""

    def __init__(
        self, app: Resilient | Shards, port: int, *, read_only: bool = False, options: Mapping[str, str] | None = None
    ) -> None:
        rights = ("read",) if read_only else RIGHTS
        self._who = Operator(person(), rights)  # type: ignore[arg-type] # every right, or reading alone
        self._options = options or {}
        names = (HOST, "localhost")
        self._hosts = {f"{name}:{port}" for name in names} | (set(names) if port == _HTTP else set())
        self._once: str | None = secrets.token_urlsafe(32)
        self._session = secrets.token_urlsafe(32)
        self._cookie = f"{_COOKIE}-{port}"  # cookies know no ports: two dashboards of one machine must not meet
        self._pages = dashboard(app, operator=self._operator)
        self.address = f"http://{HOST}:{port}/enter?token={self._once}"
        self.asgi: ASGIApp = with_headers(self._answer)

    def _operator(self, request: Request) -> Operator | Response:
        if hmac.compare_digest(request.cookies.get(self._cookie, "").encode(), self._session.encode()):
            return self._who
        text = "Open the address that `resilient dashboard` printed; it works once. Start it again for another."
        return plain_page(request, 401, "This dashboard has another owner", text)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        scope[OPTIONS] = self._options
        request = Request(scope)
        answer: ASGIApp = self._pages
        if request.headers.get("host") not in self._hosts:
            answer = plain_page(request, 421, "Not here", "This dashboard is reached as 127.0.0.1 only.")
        elif scope["path"] == "/enter":
            answer = self._enter(request)
        await answer(scope, receive, send)

    def _enter(self, request: Request) -> Response:
        if request.method != "GET":  # what looks at a link before somebody opens it must not use it up
            return plain_page(request, 405, "That is done another way", "Open this address.", {"Allow": "GET"})
        token = request.query_params.get("token", "")
        if self._once is None or not hmac.compare_digest(token.encode(), self._once.encode()):
            return self._operator_or_gone(request)
        self._once = None
        answer = RedirectResponse("/", 303, {"Cache-Control": "no-store"})
        answer.set_cookie(self._cookie, self._session, httponly=True, samesite="strict", path="/")
        return answer

    def _operator_or_gone(self, request: Request) -> Response:
        who = self._operator(request)
        return who if isinstance(who, Response) else RedirectResponse("/", 303, {"Cache-Control": "no-store"})


def serve(
    app: Resilient | Shards, port: int, say: Callable[[str], None], *, read_only: bool = False,
    options: Mapping[str, str] | None = None,
) -> None:  # fmt: skip
    """Serve until stopped; ``say`` gets the address. ``port`` 0: any free one. Raises `SetupError` for a taken port.

    ``options``: those that the commands on the pages need, see `resilient.surface.cli.hints`.
    """
    with _listening(port) as listening:
        alone = Alone(app, listening.getsockname()[1], read_only=read_only, options=options)
        say(alone.address)
        asyncio.run(_server(alone).serve(sockets=[listening]))


@contextmanager
def in_background(app: Resilient) -> Iterator[str]:
    """Serve from a thread, on a free port; yields the address to open. The thread closes the app at its end."""
    with _listening(0) as listening:
        alone = Alone(app, listening.getsockname()[1])
        server = _server(alone)

        async def run() -> None:
            await server.serve(sockets=[listening])
            await app.close()

        thread = threading.Thread(target=lambda: asyncio.run(run()), name="dashboard")
        thread.start()
        try:
            yield alone.address
        finally:
            server.should_exit = True
            thread.join()


def _server(alone: Alone) -> Any:
    try:
        import uvicorn  # noqa: PLC0415 - the extra may be missing
    except ImportError as error:
        raise MissingExtra("the dashboard needs a server: pip install 'resilient-engine[dashboard]'") from error
    return uvicorn.Server(
        uvicorn.Config(
            alone.asgi, log_config=None, log_level="warning", access_log=False, lifespan="off", ws="none",
            server_header=False, timeout_graceful_shutdown=3,
        )
    )  # fmt: skip


@contextmanager
def _listening(port: int) -> Iterator[socket.socket]:
    """A socket that listens before the server runs: whoever opens the address early gets an answer a little later."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((HOST, port))
        except OSError as error:
            raise SetupError(f"port {port} of {HOST} cannot be used: {error.strerror}; say --port 0 for any") from None
        listening.listen()
        yield listening
