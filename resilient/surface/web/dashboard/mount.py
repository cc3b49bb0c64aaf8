"""What the dashboard is made of: its addresses, each with the right it needs.

`_Site` serves every request: it asks the hook who the operator is, checks the right, and waits for the database. An
error becomes a page that says what is wrong.
"""

from __future__ import annotations

import asyncio
import math
import time
from concurrent.futures import Future
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from resilient.core.base.errors import (
    ConnectionNotFound,
    DatabaseUnreachable,
    InvalidInput,
    JobNotFound,
    ResilientError,
    SetupError,
    WorkflowNotFound,
)
from resilient.core.base.loggers import logger
from resilient.surface.shards import Shards
from resilient.surface.web.dashboard import accounts, bulk, enqueue, jobs, live, overviews, shards
from resilient.surface.web.dashboard.guard import Guard, Operator, RefusedChangeError, with_headers
from resilient.surface.web.dashboard.visit import ENVIRONMENT, HERE, VERSION, Visit, form_of, shards_of, texts_of
from resilient.surface.web.dashboard.words import sentence_of
from resilient.surface.web.routes import got
from resilient.surface.web.scope import mounted

from starlette.applications import Starlette  # isort: skip - `visit` says which extra is missing
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from starlette.requests import Request
    from starlette.types import ASGIApp

    from resilient.engine.app.app import Resilient

    Page = Callable[[Visit], Awaitable[Response]]
    OperatorHook = Callable[[Request], Awaitable[Operator | Response | None] | Operator | Response | None]

log = logger("dashboard")
DOUBLE = 2.0  # seconds within which the same form is the second click on one button
PAGES: dict[str, tuple[str, Page]] = {}  # address: the right, the page
CHANGES: dict[str, tuple[str, Page]] = {}  # address: the right, the change
for room in (overviews, accounts, jobs, enqueue, bulk):
    PAGES |= room.PAGES
    CHANGES |= room.CHANGES


_REFUSALS: dict[type[Exception], tuple[int, str]] = {  # the first class of which the error is an instance
    RefusedChangeError: (403, "This change was refused"),
    JobNotFound: (404, "There is no such job"),
    WorkflowNotFound: (404, "There is no such workflow"),
    ConnectionNotFound: (404, "There is no such connection"),
    DatabaseUnreachable: (503, "The database does not answer"),
    InvalidInput: (400, "This was not understood"),
    ResilientError: (500, "This does not work"),
}


class Clicks:
    """Makes one change of a double click: the same form from one browser, sent again at once, gets the first's answer.

    With JavaScript the page sends it once. What another form of that browser stands between is meant.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._latest: dict[str, tuple[float, object, Future[Response]]] = {}

    async def once(self, browser: str, form: object, answer: Callable[[], Awaitable[Response]]) -> Response:
        """What ``answer`` gives, now or a moment ago."""
        began, what, first = self._latest.get(browser, (-math.inf, None, None))
        if first is not None and what == form and self._monotonic() - began < DOUBLE:
            await asyncio.wait([asyncio.wrap_future(first)])
            if not first.cancelled():
                return first.result()
        now = self._monotonic()
        self._latest = {name: one for name, one in self._latest.items() if now - one[0] < DOUBLE}
        promise = Future[Response]()  # of no loop: an application may be served by several
        self._latest[browser] = now, form, promise
        try:
            made = await answer()
        except BaseException:
            promise.cancel()
            raise
        promise.set_result(made)
        return made


class _Site:
    """One mounted dashboard."""

    def __init__(
        self, app: Resilient, operator: OperatorHook, guard: Guard, reconnect: Callable[[str], str | None] | None
    ) -> None:
        self._app, self._operator, self._guard, self._reconnect = app, operator, guard, reconnect
        self._clicks = Clicks()

    def page(self, right: str, serve: Page) -> Callable[[Request], Awaitable[Response]]:
        """The function of a route that serves a page to operators with this right."""

        async def answer(request: Request) -> Response:
            return await self._answer(request, right, serve, changes=False)

        return answer

    def change(self, right: str, serve: Page) -> Callable[[Request], Awaitable[Response]]:
        """The function of a route that makes a change for operators with this right."""

        async def answer(request: Request) -> Response:
            return await self._answer(request, right, serve, changes=True)

        return answer

    async def _answer(self, request: Request, right: str, serve: Page, *, changes: bool) -> Response:
        who = await _admit(request, self._operator, right)
        if isinstance(who, Response):
            return who
        try:
            return await self._serve(request, who, serve, changes=changes)
        except tuple(_REFUSALS) as error:
            status, title = next(answer for kind, answer in _REFUSALS.items() if isinstance(error, kind))
            return plain_page(request, status, title, sentence_of(error))

    async def _serve(self, request: Request, who: Operator, serve: Page, *, changes: bool) -> Response:
        form = await form_of(request) if changes else {}
        if any("\0" in text for text in texts_of(request, form)):
            raise InvalidInput("a NUL character stands in the question: nothing that is stored has one")
        if changes:
            self._guard.check(request, who, form.pop("token", ""))

        async def answer() -> Response:
            await self._app.ready()
            moment = await self._app.database.transaction(lambda c, d: d.now(c))
            return await serve(Visit(self._app, self._guard, who, request, moment, form, reconnect=self._reconnect))

        if not changes:
            return await answer()
        browser = f"{who.name}\n{self._guard.nonce(request)}"
        return await self._clicks.once(browser, (request.url.path, sorted(form.items())), answer)


async def _admit(request: Request, operator: OperatorHook, right: str = "read") -> Operator | Response:
    """Who asks, if they have this right; else what to send them instead."""
    who: Any = await got(operator(request))
    if isinstance(who, Response):
        return who
    if who is None:
        return plain_page(request, 401, "Sign in first", "Nobody is signed in here.")
    if not isinstance(who, Operator):
        raise TypeError(f"dashboard(operator=...) gave {type(who).__name__}: it must give an Operator or None")
    for one in ("read", right):
        if not who.may(one):
            return plain_page(request, 403, "You may not do this", f"{who.name} lacks the right “{one}”.")
    return who


def dashboard(
    app: Resilient | Shards, *, operator: OperatorHook, origin: str | None = None, secret: str | None = None,
    reconnect: Callable[[str], str | None] | None = None,
) -> ASGIApp:  # fmt: skip
    """Pages to mount: ``Mount("/ops", app=dashboard(...))``, or FastAPI's ``api.mount("/ops", ...)``.

    Of several shards the first page looks at all, and each has its pages at ``/shard/NAME``.
    ``operator``: a function of the request, plain or ``async def``. It returns the `Operator` who asks, None for
    nobody, or a response to send instead (a redirect to the login page). ``origin``: where browsers see the dashboard
    (``https://shop.example``). Without it the scheme and the ``Host`` header of each request say which origin is ours:
    right only where no proxy changes them, and the server answers to no other name. ``secret``: 32 characters or more,
    the same in all processes that serve one dashboard; without it each process makes its own. Raises `SetupError`
    without an operator, and for an ``origin`` that no browser sends.
    """
    if not callable(operator):
        raise SetupError(
            "dashboard(app, operator=...): give a function of the request that gives an Operator, or None for nobody;"
            " without it everybody could pause your accounts"
        )
    handlers: dict[Any, Any] = {HTTPException: _http_error, Exception: _broken}
    if isinstance(app, Shards):
        pages = shards.routes(
            app, lambda name: _pages(_Site(app[name], operator, Guard(secret, origin, name), reconnect)),
            lambda request: _admit(request, operator),
        )  # fmt: skip
        return with_headers(mounted(Starlette(routes=pages, exception_handlers=handlers)))
    return with_headers(mounted(_pages(_Site(app, operator, Guard(secret, origin), reconnect))))


def _pages(site: _Site) -> ASGIApp:
    """All pages and changes of one app."""
    routes: list[Route | Mount] = [
        Route(path, site.page(right, serve), methods=["GET"]) for path, (right, serve) in PAGES.items()
    ]
    routes += [Route(path, site.change(right, serve), methods=["POST"]) for path, (right, serve) in CHANGES.items()]
    routes.append(Route("/live", site.page("read", live.live), methods=["GET"]))
    routes += [Route(path, _moved(place), methods=["GET"]) for path, place in _GUESSES.items()]
    routes.append(Mount("/static", app=StaticFiles(directory=HERE / "static")))
    handlers: dict[Any, Any] = {HTTPException: _http_error, Exception: _broken}
    return Starlette(routes=routes, exception_handlers=handlers)


_GUESSES: dict[str, str] = {  # addresses that people guess from the words of the command line: the true page
    "/now": "/", "/status": "/", "/resources": "/accounts", "/account": "/accounts", "/sync": "/streams",
    "/doctor": "/system", "/resources/{rest:path}": "/account/", "/resource/{rest:path}": "/account/",
    "/accounts/{rest:path}": "/account/", "/job/{rest:path}": "/jobs/", "/workflow/{rest:path}": "/workflows/",
    "/schedule/{rest:path}": "/schedules/",
}  # fmt: skip


def _moved(place: str) -> Callable[[Request], Awaitable[Response]]:
    """The function of a route that leads to the true page, with what was asked."""

    async def answer(request: Request) -> Response:
        base = request.scope.get("root_path", "").rstrip("/")
        rest = request.path_params.get("rest", "")
        path = quote(base + (place + rest if rest or place == "/" else place.rstrip("/")), safe="/%:@+-._~")
        return RedirectResponse(path + (f"?{request.url.query}" if request.url.query else ""), 307)

    return answer


def plain_page(
    request: Request, status: int, title: str, text: str, headers: Mapping[str, str] | None = None
) -> Response:
    """A page that says what is wrong; it reads nothing of the database."""
    base = request.scope.get("root_path", "").rstrip("/")
    body = ENVIRONMENT.get_template("plain.html").render(
        url=lambda path: base + path,
        title=title,
        text=text,
        version=VERSION,
        known=status != HTTPStatus.UNAUTHORIZED,
        shards=() if status == HTTPStatus.UNAUTHORIZED else shards_of(request),
    )
    return Response(body, status, {**(headers or {}), "Cache-Control": "no-store"}, media_type="text/html")


_ANSWERS: dict[int, tuple[str, str]] = {
    401: ("Sign in first", "Nobody is signed in here."),
    403: ("You may not do this", "Your rights are others."),
    404: ("There is no such page", "The address is wrong, or from another version."),
    405: ("That is done another way", "This address takes another method."),
}


async def _http_error(request: Request, error: HTTPException) -> Response:
    """The page for what the router refuses, or a function of the program by an `HTTPException`."""
    try:
        phrase = HTTPStatus(error.status_code).phrase
    except ValueError:
        phrase = f"Status {error.status_code}"
    title, text = _ANSWERS.get(error.status_code, (phrase, phrase))
    if error.detail and error.detail != phrase:
        text = str(error.detail)
    return plain_page(request, error.status_code, title, sentence_of(text), error.headers)


async def _broken(request: Request, error: Exception) -> Response:
    log.error("a page of the dashboard failed", exc_info=error)
    return plain_page(request, 500, "This page failed", "The log of the server says why.")
