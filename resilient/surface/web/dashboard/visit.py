"""One request for a page: who asks, what they may, and how an answer is made."""

from __future__ import annotations

import hashlib
import json
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from dataclasses import dataclass, field
from hmac import compare_digest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, quote, urlencode

from resilient.core.base.errors import InvalidInput, MissingExtra
from resilient.core.base.resource_key import has_dots
from resilient.surface.web.dashboard import words
from resilient.surface.web.dashboard.charts import GROUPS

try:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined, pass_context
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect
    from starlette.responses import RedirectResponse, Response
except ImportError as error:  # pragma: no cover - a test without the extra runs in a process of its own
    raise MissingExtra("the dashboard needs jinja2 and Starlette: pip install 'resilient-engine[dashboard]'") from error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager
    from datetime import datetime

    from starlette.requests import Request

    from resilient.engine.app.app import Resilient
    from resilient.surface.web.dashboard.guard import Guard, Operator

HERE: Final = Path(__file__).parent
FORM_BYTES: Final = 1024 * 1024  # room for a payload of 256 KiB, percent-encoded
_NAMED: Final = {"/account/": "key", "/schedules/": "name"}  # pages about what has a name; its parameter
SHARDS: Final = "resilient.shards"  # the name in a request's scope
OPTIONS: Final = "resilient.options"  # the same: what commands need that a page prints, see `surface.cli.hints`
_TEXT: Final = 2_000  # characters of a note


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(HERE / "templates"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, finalize=words.printable,
    )  # fmt: skip
    environment.filters |= words.FILTERS | {
        "at": pass_context(words.at), "prose": pass_context(words.prose), "which": pass_context(words.which),
    }  # fmt: skip
    environment.globals |= words.FUNCTIONS | {"chart_groups": GROUPS}
    return environment


ENVIRONMENT: Final = _environment()
VERSION: Final = hashlib.sha256(b"".join(p.read_bytes() for p in sorted((HERE / "static").iterdir()))).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class ShardLink:
    """The way to the pages of a shard, or to those of all; ``is_here``: it is this page's."""

    name: str
    address: str
    is_here: bool


def shards_of(request: Request) -> Sequence[ShardLink]:
    """All shards, of a program that has several."""
    links: Sequence[ShardLink] = request.scope.get(SHARDS, ())
    return links


@dataclass(slots=True)
class Visit:
    """A request of an operator who has the right to make it. ``now`` is the database's time.

    ``form``: the fields of a change, without the token. ``new_nonce``: what the answer sets as the cookie.
    ``reconnect``: see `dashboard`.
    """

    app: Resilient
    guard: Guard
    operator: Operator
    request: Request
    now: datetime
    form: dict[str, str] = field(default_factory=dict)
    new_nonce: str | None = None
    reconnect: Callable[[str], str | None] | None = None

    # -- addresses ---------------------------------------------------------------------------------------------

    def url(self, path: str, **query: Any) -> str:
        """An address of this dashboard; values that are None or empty are left out.

        The name of an account or a schedule is the rest of the path, or the query's if a browser would read it as "up".
        """
        for page, name in _NAMED.items():
            if path.startswith(page) and has_dots(path.removeprefix(page)):
                path, query = page, {name: path.removeprefix(page), **query}
        base = self.request.scope.get("root_path", "").rstrip("/") + path
        values = {name: value for name, value in query.items() if value not in (None, "", [], ())}
        return quote(base, safe="/%:@+-._~") + (f"?{urlencode(values, doseq=True)}" if values else "")

    def name(self, field: str) -> str:
        """What this page is about: the rest of its address, or a parameter of it; see `url`."""
        return str(self.request.path_params[field] or self.query.get(field, ""))

    def seg(self, value: object) -> str:
        """A value as one segment of an address."""
        return quote(str(value), safe="")

    @property
    def query(self) -> Mapping[str, str]:
        """The parameters of the address; of several with one name the last."""
        return self.request.query_params

    @property
    def token(self) -> str:
        """The token of this page's forms; the browser gets its cookie with the page."""
        nonce = self.guard.nonce(self.request) or self.new_nonce
        if nonce is None:
            nonce = self.new_nonce = secrets.token_urlsafe(32)
        return self.guard.token(nonce, self.operator)

    # -- answers -----------------------------------------------------------------------------------------------

    def render(self, template: str, status: int = 200, *, stored: bool = True, **values: Any) -> Response:
        """A page made from a template, which the browser keeps if ``stored``; 304 if it has exactly this page."""
        body = ENVIRONMENT.get_template(template).render(
            visit=self, url=self.url, seg=self.seg, now=self.now, operator=self.operator, version=VERSION,
            note=self._note(), current=self._current(), section=template.partition(".")[0],
            signals=None if self.app.database.is_sqlite else self.url("/live"),
            shards=shards_of(self.request), which_app=self.request.scope.get(OPTIONS, {}), **values,
        )  # fmt: skip
        etag = f'"{hashlib.sha256(body.encode()).hexdigest()[:32]}"'
        headers = {"ETag": etag, "Cache-Control": "private, no-cache" if stored else "no-store", "Vary": "Cookie"}
        if status == 200 and self.request.headers.get("if-none-match") == etag:  # noqa: PLR2004 - what a page is
            return Response(status_code=304, headers=headers)
        answer = Response(body, status, headers, media_type="text/html")
        if self.new_nonce is not None:
            secure = self.guard.origin(self.request).startswith("https:")
            answer.set_cookie(
                self.guard.cookie(self.request), self.new_nonce, path="/", secure=secure, httponly=True,
                samesite="strict",
            )  # fmt: skip
        return answer

    def back(self, path: str, note: str, *, bad: bool = False) -> Response:
        """A redirect to ``path`` (which may have a query), where the page shows ``note``."""
        packed = urlsafe_b64encode(json.dumps([note[:_TEXT], bad]).encode()).decode()
        signed = urlencode({"note": packed, "by": self.guard.sign(f"note\n{packed}")[:32]})
        return RedirectResponse(path + ("&" if "?" in path else "?") + signed, 303, {"Cache-Control": "no-store"})

    def _note(self) -> tuple[str, bool] | None:
        """The note that `back` put into the address, and whether it is bad news; None unless we signed it."""
        packed, by = self.query.get("note", ""), self.query.get("by", "")
        if not packed or not compare_digest(self.guard.sign(f"note\n{packed}")[:32].encode(), by.encode()):
            return None
        text, bad = json.loads(urlsafe_b64decode(packed.encode()))
        return text, bad

    def _current(self) -> str:
        """This page's own address without the note, from which its live part is fetched again."""
        pairs = [(k, v) for k, v in self.request.query_params.multi_items() if k not in ("note", "by")]
        return quote(self.request.url.path, safe="/%:@+-._~") + (f"?{urlencode(pairs)}" if pairs else "")

    def audited(self, action: str, subject: str, why: str | None = None) -> AbstractAsyncContextManager[dict[str, Any]]:
        """A context around a change: the audit gets the change before it is made, and its outcome afterwards."""
        return self.app.audit.change(self.operator.name, action, subject, why=why or None, via="dashboard")

    # -- the database ------------------------------------------------------------------------------------------

    async def read(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A store function's answer, in a transaction of its own."""
        return await self.app.database.transaction(fn, *args, **kwargs)


async def form_of(request: Request) -> dict[str, str]:
    """A form's fields; the last one of a name counts. Raises `InvalidInput` for what is too large or no form.

    What breaks off is an `HTTPException`: somebody closed a page, and nothing failed.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise InvalidInput("a change is a form: application/x-www-form-urlencoded")
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > FORM_BYTES:
                raise InvalidInput(f"a form of more than {FORM_BYTES:,} bytes")
    except ClientDisconnect:
        raise HTTPException(408, "the form broke off on its way; nothing was changed") from None
    try:
        pairs = parse_qsl(body.decode("utf-8"), keep_blank_values=True, max_num_fields=200, errors="strict")
    except ValueError as error:
        raise InvalidInput(f"this is no form: {error}") from None
    return dict(pairs)


def texts_of(request: Request, form: Mapping[str, str]) -> Iterator[str]:
    """All that somebody else wrote into an address and a form."""
    yield from map(str, request.path_params.values())
    for name, value in (*request.query_params.multi_items(), *form.items()):
        yield name
        yield value
