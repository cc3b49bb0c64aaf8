"""Routes through which an app's customers connect their accounts, and providers deliver webhooks.

    GET {base_url}/{provider}/start?next=/settings   sends the person to the provider's consent page
    GET {base_url}/{provider}/callback               takes the provider's answer, and sends the person to ``next``

What could go wrong, and what is done about it:

- a stranger begins: `caller` must know who it is; and a page of another site begins for nobody (Fetch Metadata);
- a person finishes what another one began (login CSRF, or a victim's consent for an attacker's account): the callback
  must come with the cookie of the browser and from the caller of the start;
- a forged, old or second callback: the state is signed, single-use and short-lived; PKCE binds the code to it;
- an open redirect: ``next`` is one of `returns`, letter for letter; the address for the provider is `base_url`'s,
  whatever a request's headers say.
"""

from __future__ import annotations

import asyncio
import secrets
from html import escape
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlencode, urlsplit

from resilient.core.accounts.tokens import EMPTY
from resilient.core.base.bounds import WEBHOOK_BODY, whole_number
from resilient.core.base.errors import (
    ConsentRefused,
    DatabaseUnreachable,
    InvalidInput,
    MissingExtra,
    ResilientError,
    SetupError,
    UnexpectedCallback,
)
from resilient.core.base.frames import frameless
from resilient.core.base.hosts import origin_of
from resilient.core.base.loggers import logger
from resilient.core.events.webhook import Delivery
from resilient.engine.events.webhooks import is_account
from resilient.surface.shards import Shards

try:
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
    from starlette.routing import Route, Router

    from resilient.surface.web.scope import MountedRouter
except ImportError as error:  # pragma: no cover - a test without the extra runs in a process of its own
    raise MissingExtra("routes need Starlette: pip install 'resilient-engine[web]'") from error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from resilient.core.provider.auth import OAuth2
    from resilient.engine.app.app import Resilient

log = logger("web")
LASTS: Final = 1800  # seconds that the cookie lasts; a state lasts as long
_OTHER_SITES: Final = frozenset({"cross-site"})


def apps_of(app: Resilient | Shards) -> Iterable[Resilient]:
    """The apps behind a mount: this one, or those of the shards."""
    return app.apps.values() if isinstance(app, Shards) else (app,)


def app_of(app: Resilient | Shards, key: str) -> Resilient:
    """The app in which an account lives."""
    return app.app(key) if isinstance(app, Shards) else app


class _Connect:
    """The two routes; see `connect_routes`."""

    def __init__(
        self, app: Resilient | Shards, base_url: str, caller: Any, account: Any, details: Any, returns: Sequence[str]
    ) -> None:
        self._app, self._base = app, base_url.rstrip("/")
        self._caller, self._account, self._details, self._returns = caller, account, details, tuple(returns)
        parts = urlsplit(self._base)
        self._secure = parts.scheme == "https"
        self._cookie = "__Host-resilient-connect" if self._secure else "resilient-connect"  # no subdomain can set it
        for provider in app.providers.values():
            configured = "" if provider.oauth is None else provider.oauth.redirect_uri
            if configured and configured != self._uri(provider.name):
                raise SetupError(
                    f"provider {provider.name!r} has redirect_uri={configured!r}, but its callback here is"
                    f" {self._uri(provider.name)}: leave redirect_uri out, or give the base_url that fits"
                )

    def _uri(self, provider: str) -> str:
        return f"{self._base}/{provider}/callback"

    async def start(self, request: Request) -> Response:
        """Send a person to the provider."""
        return await self._admit(request, self._start)

    async def callback(self, request: Request) -> Response:
        """Take the provider's answer."""
        return await self._admit(request, self._callback)

    async def _admit(self, request: Request, serve: Callable[[Request, str, str], Awaitable[Response]]) -> Response:
        provider = request.path_params["provider"]
        facts = self._app.providers.get(provider)
        if facts is None or facts.oauth is None:
            return page(404, "There is no such provider here.")
        who = await got(self._caller(request))
        if isinstance(who, Response) or not who:
            return who or page(401, "Sign in first.")
        return await self._answer(provider, serve(request, provider, str(who)))

    async def _answer(self, provider: str, serving: Awaitable[Response]) -> Response:
        """The answer; for an error a page with as much of it as a person may know."""
        try:
            return await serving
        except ConsentRefused as error:
            return page(400, str(error))
        except DatabaseUnreachable:
            return page(503, "This does not work at the moment. Try again in a minute.")
        except ResilientError as error:
            log.exception("connecting at %s does not work: %s", provider, type(error).__name__)
            return page(500, "This is not set up correctly. The log of the server says why.")

    @frameless
    async def _start(self, request: Request, provider: str, who: str) -> Response:
        if request.headers.get("sec-fetch-site") in _OTHER_SITES:
            return page(403, "Begin on our own pages: another site sent you here.")
        to = request.query_params.get("next", self._returns[0])
        if to not in self._returns:
            return page(400, "That is no page to come back to.")
        key = await got(self._account(who, provider, request))
        if not key:
            return page(403, "You may not connect an account here.")
        details = EMPTY if self._details is None else await got(self._details(who, provider, request))
        browser = self._browser(request) or secrets.token_urlsafe(32)
        app = app_of(self._app, key)
        oauth: OAuth2 = app.connections.oauth_of(key, details)
        if key.partition("/")[0] != provider:
            raise InvalidInput(f"account= gave {key} for the provider {provider}")
        url = await app.connections.consent.begin(
            key, oauth, self._uri(provider), details=details, bound_to=_binding(browser, who, provider), note=to
        )
        answer = RedirectResponse(url, 303, QUIET)
        answer.set_cookie(self._cookie, browser, max_age=LASTS, secure=self._secure, httponly=True, samesite="lax")
        return answer

    @frameless
    async def _callback(self, request: Request, provider: str, who: str) -> Response:
        parameters = dict(request.query_params)
        bound = _binding(self._browser(request), who, provider)
        to = await self._keep_grant(parameters, bound)
        return RedirectResponse(f"{to}{'&' if '?' in to else '?'}{urlencode({'connected': provider})}", 303, QUIET)

    async def _keep_grant(self, parameters: Mapping[str, str], bound: str) -> str:
        """Keep the grant, in the shard in which the consent began; returns the page to come back to."""
        away: DatabaseUnreachable | None = None
        unexpected = UnexpectedCallback("this callback is not expected: start again at the consent page")
        for app in apps_of(self._app):
            try:
                granted = await app.connections.consent.finish(parameters, bound_to=bound)
            except UnexpectedCallback as error:
                unexpected = error
            except DatabaseUnreachable as error:
                away = error
            else:
                await app.connections.granted(granted)
                return granted.note
        raise away or unexpected

    def _browser(self, request: Request) -> str:
        cookie = request.cookies.get(self._cookie, "")
        return cookie if 40 <= len(cookie) <= 64 else ""  # noqa: PLR2004 - as `token_urlsafe(32)` makes them


def connect_routes(
    app: Resilient | Shards,
    *,
    base_url: str,
    caller: Callable[[Request], Awaitable[Response | str | None] | Response | str | None],
    account: Callable[[str, str, Request], Awaitable[str | None] | str | None],
    returns: Sequence[str] = ("/",),
    details: Callable[[str, str, Request], Awaitable[Mapping[str, str]] | Mapping[str, str]] | None = None,
) -> Router:
    """Routes to mount: ``Mount("/connect", app=connect_routes(...))``, or FastAPI's ``api.mount("/connect", ...)``.

    ``base_url``: where they are mounted, as the world sees it (``https://shop.example/connect``); what a provider has
    to know is ``{base_url}/{provider}/callback``. ``caller``: who asks, by a name that stays the same during the visit
    (the user's id), None for nobody, or an answer to give instead (to the login page). ``account``: the resource key
    this caller connects at a provider (``github/acct-7``), None if that is not allowed. ``details``: values for the
    provider's placeholders. ``returns``: pages to come back to, the usual one first; ``?next=`` must be one of them.

    Hooks may be ``async def``. Raises `InvalidInput`, and `SetupError` for a provider with another ``redirect_uri``.
    """
    origin_of(base_url)
    if not returns:
        raise InvalidInput("connect_routes(returns=()): give at least the page to come back to")
    for to in returns:
        if not _is_page(to):
            raise InvalidInput(f"{to!r} is no page to come back to: write a path such as /settings, or https://...")
    routes = _Connect(app, base_url, caller, account, details, returns)
    return MountedRouter(
        [
            Route("/{provider}/start", routes.start, methods=["GET"], name="start"),
            Route("/{provider}/callback", routes.callback, methods=["GET"], name="callback"),
        ]
    )


def _is_page(to: str) -> bool:
    """Whether ``to`` is a path on this site or a whole URL, and nothing a browser could take for another site's."""
    if any(c in to for c in "\\\r\n\t ") or "#" in to:
        return False
    parts = urlsplit(to)
    if parts.scheme:
        return parts.scheme in ("https", "http") and bool(parts.hostname)
    return to.startswith("/") and not to.startswith("//")


def _binding(browser: str, who: str, provider: str) -> str:
    """The text that start and callback must have in common; without a cookie it is random, so no callback has it."""
    return f"{browser or secrets.token_urlsafe(32)}\n{who}\n{provider}"


# -- answers ----------------------------------------------------------------------------------------------------------
#
# Answers of routes: one plain sentence, escaped, so that no stranger's text becomes markup.

T = TypeVar("T")
QUIET: Final = {  # a callback's address carries a code: caches, other sites and frames must not get it
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
}


def page(status: int, text: str) -> Response:
    """An HTML answer with one sentence, for a person."""
    body = f"<!doctype html><meta charset=utf-8><title>{status}</title><p>{escape(text)}</p>"
    return HTMLResponse(body, status, QUIET)


def plain(status: int, text: str = "") -> Response:
    """A text answer, for a program."""
    return PlainTextResponse(text, status, QUIET)


async def got(value: Awaitable[T] | T) -> T:
    """The value that a hook returned, plain or ``async def``."""
    if hasattr(value, "__await__"):
        result: Any = await value
        return result  # type: ignore[no-any-return]
    return value


# -- webhooks ---------------------------------------------------------------------------------------------------------
#
# Routes that providers call: ``POST {base_url}/{provider}`` and ``POST {base_url}/{provider}/{account}``.
#
# The raw bytes go to `Webhooks.receive`; nothing here decides. Addresses that are signed are made of `base_url`,
# because a proxy in front shows the server another one.

PATIENCE: Final = 10.0  # seconds for a body to arrive


class _Webhooks:
    """The route; see `webhook_routes`."""

    def __init__(self, app: Resilient | Shards, base_url: str, max_body: int) -> None:
        self._app, self._base, self._max_body = app, base_url.rstrip("/"), max_body

    async def receive(self, request: Request) -> Response:
        """One delivery."""
        provider, account = request.path_params["provider"], request.path_params.get("account", "")
        hooks = self._app.webhooks
        if provider not in hooks.declared or not is_account(provider, account):
            hooks.count(provider, "unknown")
            return plain(404)
        try:
            async with asyncio.timeout(PATIENCE):
                body = await _body(request, self._max_body)
        except (TimeoutError, ClientDisconnect):
            hooks.count(provider, "broken_off")
            return plain(408)
        if body is None:
            hooks.count(provider, "too_large")
            hooks.say(
                provider, "too large", f"a body of more than {self._max_body:,} bytes: see webhook_routes(max_body=)"
            )
            return plain(413)
        url = f"{self._base}/{provider}" + (f"/{account}" if account else "")
        query = request.url.query
        delivery = Delivery(dict(request.headers), body, f"{url}?{query}" if query else url, request.method)
        answer = await hooks.receive(provider, delivery, account=account)
        return Response(answer.body, answer.status, {**QUIET, **answer.headers})


def webhook_routes(app: Resilient | Shards, *, base_url: str, max_body: int = WEBHOOK_BODY.value) -> Router:
    """Routes to mount: ``Mount("/webhooks", app=webhook_routes(...))``, or FastAPI's ``api.mount("/webhooks", ...)``.

    ``base_url``: where they are mounted, as the world sees it (``https://shop.example/webhooks``). A provider is given
    ``{base_url}/{provider}``, or ``{base_url}/{provider}/{account}`` where each account has a webhook of its own.
    ``max_body`` is in bytes; what a job can hold is `Resilient`'s ``max_payload``. Raises `InvalidInput`.
    """
    origin_of(base_url)
    routes = _Webhooks(app, base_url, max_body)
    methods = ["GET", "POST"]
    return MountedRouter(
        [
            Route("/{provider}", routes.receive, methods=methods, name="webhook"),
            Route("/{provider}/{account}", routes.receive, methods=methods, name="webhook_of_account"),
        ]
    )


async def _body(request: Request, most: int) -> bytes | None:
    """The raw body; None if it is too large."""
    length = whole_number(request.headers.get("content-length", ""))
    if length is not None and length > most:
        return None
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            return None
        parts.append(part)
    return b"".join(parts)
