"""What routes answer people with: one plain sentence, nothing a stranger could have put there as markup."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any, Final, TypeVar

from resilient.core.errors import MissingExtra

try:
    from starlette.responses import HTMLResponse, PlainTextResponse, Response
except ImportError as error:  # pragma: no cover - a test without the extra runs in a process of its own
    raise MissingExtra("routes need Starlette: pip install 'resilient-engine[web]'") from error

if TYPE_CHECKING:
    from collections.abc import Awaitable

T = TypeVar("T")
QUIET: Final = {  # a callback's address carries a code: no cache, log of another site or frame shall have it
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
}


def page(status: int, text: str) -> Response:
    """A sentence for a person."""
    body = f"<!doctype html><meta charset=utf-8><title>{status}</title><p>{escape(text)}</p>"
    return HTMLResponse(body, status, QUIET)


def plain(status: int, text: str = "") -> Response:
    """A word for a program."""
    return PlainTextResponse(text, status, QUIET)


async def got(value: Awaitable[T] | T) -> T:
    """What a hook gives, whether it is ``async def`` or not."""
    if hasattr(value, "__await__"):
        found: Any = await value
        return found  # type: ignore[no-any-return]
    return value
