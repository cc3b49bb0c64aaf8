"""Who may look and act, and from where a change may come.

A change needs all of: the right, the POST method, an ``Origin`` that is ours, ``Sec-Fetch-Site: same-origin``, a cookie
that only our own pages send (SameSite=Strict), and a token signed for that cookie and that operator. Where a browser
or a proxy leaves one of the headers out, the change is refused.
"""

from __future__ import annotations

import hmac
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, get_args
from urllib.parse import urlsplit

from resilient.core.base.errors import InvalidInput, SetupError
from resilient.core.base.hosts import PORTS, origin_of

if TYPE_CHECKING:
    from collections.abc import Collection, MutableMapping
    from typing import Any

    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

Right = Literal["read", "payloads", "jobs", "resources", "connections"]
RIGHTS: Final[tuple[str, ...]] = get_args(Right)
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:;"
    " form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",  # with "no-referrer" browsers send no Origin with a form
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
_HOUR: Final = 3600
_COOKIE: Final = "resilient-dashboard"
_NONCE: Final = 43  # characters of `token_urlsafe(32)`
_LEAST_SECRET: Final = 32


@dataclass(frozen=True, slots=True)
class Operator:
    """Somebody who may use the dashboard.

    ``name`` stands in the audit of every change. ``rights``: ``read`` (every page, without payloads and results),
    ``payloads``, ``jobs`` (retry, cancel, edit, discard; schedules, workflows, streams, the outbox), ``resources``
    (pause, open, limit and their opposites), ``connections``. Secrets are shown to nobody. Raises `InvalidInput` for an
    unknown right, or without a name.
    """

    name: str
    rights: Collection[Right] = frozenset({"read"})

    def __post_init__(self) -> None:
        if isinstance(self.rights, str):
            raise InvalidInput(f"rights={self.rights!r}: write a list of rights")
        rights = frozenset(self.rights)
        if unknown := sorted(rights - set(RIGHTS)):
            raise InvalidInput(f"{unknown[0]!r} is not a right: use some of {', '.join(RIGHTS)}")
        if not self.name or not isinstance(self.name, str):
            raise InvalidInput("an operator needs a name: it stands in the audit")
        object.__setattr__(self, "rights", rights)

    def may(self, right: str) -> bool:
        """Whether the operator has this right."""
        return right in self.rights


class RefusedChangeError(Exception):
    """A change came from where it may not come; ``str()`` says what was missing."""


class Guard:
    """Signs tokens for forms, and checks changes. Processes that serve one dashboard share ``secret``.

    ``shard``: of a program that has several. What is signed for one is nothing to the others, also under one secret.
    """

    def __init__(self, secret: str | None, origin: str | None, shard: str = "") -> None:
        if secret is not None and len(secret) < _LEAST_SECRET:
            raise SetupError(f"dashboard(secret=...): at least {_LEAST_SECRET} characters, such as token_urlsafe(32)")
        key = (secret or secrets.token_urlsafe(32)).encode()
        self._key = hmac.digest(key, f"shard\n{shard}".encode(), "sha256") if shard else key
        self._origin = None if origin is None else _as_browsers_send(origin)

    def nonce(self, request: Request) -> str | None:
        """The nonce in the browser's cookie; None without one of the right length."""
        value = request.cookies.get(self.cookie(request), "")
        return value if len(value) == _NONCE else None

    def cookie(self, request: Request) -> str:
        """The cookie's name; under TLS it has a prefix that keeps subdomains from setting it."""
        return f"__Host-{_COOKIE}" if self.origin(request).startswith("https:") else _COOKIE

    def origin(self, request: Request) -> str:
        """The origin of this dashboard, as browsers see it."""
        return self._origin or f"{request.url.scheme}://{request.headers.get('host', '')}"

    def token(self, nonce: str, operator: Operator) -> str:
        """The token for forms of this browser and operator: a new one each hour, accepted until the next hour ends."""
        return self.sign(f"form\n{nonce}\n{operator.name}\n{int(time.time()) // _HOUR}")

    def sign(self, text: str) -> str:
        """The signature of a text under this dashboard's key, in hex."""
        return hmac.new(self._key, text.encode(), "sha256").hexdigest()

    def check(self, request: Request, operator: Operator, token: str) -> None:
        """Raise `RefusedChangeError` unless the change comes from a page of ours, for this operator."""
        if request.method != "POST":
            raise RefusedChangeError("changes are made by POST")
        origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site")
        if origin is None or origin != self.origin(request):
            raise RefusedChangeError(
                "its Origin is not this dashboard's"
                if origin
                else "it has no Origin header: a proxy may have dropped it, or the browser is too old"
            )
        if site != "same-origin":
            raise RefusedChangeError(
                "another site sent it"
                if site
                else "it has no Sec-Fetch-Site header: a proxy may have dropped it, or the page came without TLS"
            )
        nonce = self.nonce(request)
        hours = [int(time.time()) // _HOUR - ago for ago in (0, 1)]
        expected = [self.sign(f"form\n{nonce}\n{operator.name}\n{hour}") for hour in hours]
        if nonce is None or not any(hmac.compare_digest(one.encode(), token.encode()) for one in expected):
            raise RefusedChangeError("the form is too old or was not made for you: go back, reload the page, try again")


def _as_browsers_send(origin: str) -> str:
    """An origin as a browser's header has it: in small letters, without the usual port."""
    refusal = SetupError(
        f"dashboard(origin={origin!r}): write the scheme and host that browsers see, and the port if it is not the"
        " usual one, without a path: https://shop.example; with any other every change would be refused"
    )
    try:
        scheme, host, port = origin_of(origin)
    except InvalidInput:
        raise refusal from None
    if urlsplit(origin)[2:] not in (("", "", ""), ("/", "", "")):
        raise refusal
    name = f"[{host}]" if ":" in host else host
    return f"{scheme}://{name}" + ("" if port == PORTS[scheme] else f":{port}")


def with_headers(app: ASGIApp) -> ASGIApp:
    """The same app; every answer of it, errors too, has the headers that bind browsers."""
    binding = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
    names = {name for name, _ in binding}

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_bound(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                others = [(name, value) for name, value in message.get("headers", ()) if name.lower() not in names]
                message = {**message, "headers": [*others, *binding]}
            await send(message)

        await app(scope, receive, send_bound)

    return guarded
