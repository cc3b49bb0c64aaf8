"""The address on this machine that a provider sends a person's browser back to (RFC 8252, 7.3).

It listens on the loopback interface, answers one path, and takes one callback: the one that carries the state it was
told to expect. Everything else is refused and forgotten, so a page that guesses the port cannot end the wait.
"""

from __future__ import annotations

import asyncio
import hmac
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Final, Self
from urllib.parse import parse_qsl, urlsplit

if TYPE_CHECKING:
    from types import TracebackType

HOST: Final = "127.0.0.1"
LOOPBACK: Final = (HOST, "localhost")
_LONGEST: Final = 16 * 1024  # bytes of a request's first lines
_PATIENCE: Final = 10.0  # seconds for a browser to send them


@dataclass(frozen=True, slots=True)
class Place:
    """Where to listen: ``host`` is how the provider knows it. Port 0: any that is free."""

    host: str = HOST
    port: int = 0
    path: str = "/callback"

    @classmethod
    def of(cls, configured: str, port: int) -> Place:
        """The provider's configured redirect URI, if it leads to this machine; else one of our own."""
        parts = urlsplit(configured)
        if parts.scheme == "http" and parts.hostname in LOOPBACK:
            return cls(parts.hostname, port or parts.port or 80, parts.path or "/")
        return cls(port=port)


class Callback:
    """``async with Callback(place) as back: ... await back.arrived(state)``, then `answer` the person."""

    def __init__(self, place: Place) -> None:
        self._place, self._expected = place, ""
        self._parameters: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()
        self._verdict: asyncio.Future[tuple[bool, str]] = asyncio.get_running_loop().create_future()
        self._answered = asyncio.Event()
        self.strangers = 0  # requests with another state

    async def __aenter__(self) -> Self:
        """Listen. Raises `OSError` if the port is taken."""
        self._server = await asyncio.start_server(self._serve, HOST, self._place.port, limit=_LONGEST)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        """Stop listening."""
        self._verdict.cancel()
        self._server.close()

    @property
    def uri(self) -> str:
        """What the provider is told."""
        port = self._server.sockets[0].getsockname()[1]
        return f"http://{self._place.host}:{port}{self._place.path}"

    async def arrived(self, state: str, timeout: float) -> dict[str, str]:  # noqa: ASYNC109 - the person's, in seconds
        """The parameters of the callback with this state. Raises `TimeoutError`."""
        self._expected = state
        async with asyncio.timeout(timeout):
            return await asyncio.shield(self._parameters)

    async def answer(self, *, well: bool, text: str) -> None:
        """What the browser shows, and wait until it has it."""
        self._verdict.set_result((well, text))
        async with asyncio.timeout(_PATIENCE):
            await self._answered.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_PATIENCE):
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            status, text, mine = await self._judged(*head.split("\r\n", 1)[0].split(" ")[:2])
            writer.write(_page(status, text))
            await writer.drain()
            if mine:
                self._answered.set()
        except (
            TimeoutError,
            OSError,
            ValueError,
            TypeError,
            EOFError,
            asyncio.LimitOverrunError,
            asyncio.CancelledError,
        ):
            pass  # no browser, or one that left
        finally:
            writer.close()

    async def _judged(self, method: str, target: str) -> tuple[int, str, bool]:
        parts = urlsplit(target)
        if method != "GET" or parts.path != self._place.path:
            return 404, "There is nothing here.", False
        parameters = dict(parse_qsl(parts.query, keep_blank_values=True))
        if not self._expected or not hmac.compare_digest(parameters.get("state", "").encode(), self._expected.encode()):
            self.strangers += 1
            return 400, "This is not the answer that was waited for. Start again on the command line.", False
        if self._parameters.done():
            return 400, "This was answered before.", False
        self._parameters.set_result(parameters)
        well, text = await self._verdict
        return (200 if well else 400), text, True


def _page(status: int, text: str) -> bytes:
    body = f"<!doctype html><meta charset=utf-8><title>resilient</title><p>{escape(text)}</p>".encode()
    head = (
        f"HTTP/1.1 {status} {'OK' if status == 200 else 'No'}\r\nContent-Type: text/html; charset=utf-8\r\n"  # noqa: PLR2004
        f"Content-Length: {len(body)}\r\nConnection: close\r\nCache-Control: no-store\r\n"
        "Referrer-Policy: no-referrer\r\nContent-Security-Policy: default-src 'none'\r\n"
        "X-Content-Type-Options: nosniff\r\n\r\n"
    )
    return head.encode() + body
